"""What the Triton kernels of the fused forward share: the vectors of a block, its tiles, and its step of the state."""

import triton
import triton.language as tl

from tilegym_mamba2.backends._triton_math import advance_state

# With float16 products the state is kept this much larger, so that small ones don't lose bits to its small range.
FLOAT16_SCALE = tl.constexpr(32.0)

# The vectors of a block, in the order in which they are stored.
SUM_LOG2 = tl.constexpr(0)  # a
FROM_ENTRY = tl.constexpr(1)  # exp(a), 0 for tokens that the state at the block's entry does not reach
TO_EXIT = tl.constexpr(2)  # exp(a[last] - a) * d, 0 for tokens that do not reach the block's exit
TIME_STEP = tl.constexpr(3)  # d, where the gram is not float16
BIAS_LOG2 = tl.constexpr(3)  # a - log(d), where it is: a weight is then gram[i, j] * exp(a[i] - bias[j])
SUM_LOG2_LOW = tl.constexpr(4)  # with SPLIT_SUM, what the rounding of a leaves
VECTORS = 5


@triton.jit
def segment_first(segment, nsegments, nslots, skew):
    """The first slot of a segment, relative to its sequence; that of segment `nsegments` is the end."""
    equal = segment * tl.cdiv(nslots, nsegments)
    return tl.minimum(equal + (segment * (nsegments - segment) * skew >> 8), nslots)


@triton.jit
def slots_of_sequence(cu_seqlens_ptr, sequence, seqlen, nslots_row, BLOCK_CHUNK: tl.constexpr, PACKED: tl.constexpr):
    """A sequence's batch row, first token in it, length, first slot and number of slots.

    Slots of all heads fit an int32: the vectors of 2**31 would fill half a terabyte.
    """
    if PACKED:
        begin = tl.load(cu_seqlens_ptr + sequence).to(tl.int64)
        length = (tl.load(cu_seqlens_ptr + sequence + 1).to(tl.int64) - begin).to(tl.int32)
        row = tl.zeros((), tl.int64)
        slot = (begin // BLOCK_CHUNK).to(tl.int32) + sequence
        nslots = tl.cdiv(length, BLOCK_CHUNK)
    else:
        begin = tl.zeros((), tl.int64)
        length = seqlen
        row = sequence.to(tl.int64)
        slot = sequence * nslots_row
        nslots = nslots_row
    return row, begin, length, slot, nslots


@triton.jit
def tile_source(ptr, tiles, row, begin, head, stride_batch, stride_token, stride_head):
    """What `load_tile` reads the tokens of a sequence and a head or group from: tiles of the tensor, or a pointer."""
    if tiles is not None:
        source = (tiles, row.to(tl.int32), head, begin.to(tl.int32))
    else:
        source = ptr + row * stride_batch + begin * stride_token + head.to(tl.int64) * stride_head
    return source


@triton.jit
def load_tile(
    source,
    first,
    stop,
    column,
    stride_token,
    stride_column,
    NCOLUMNS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    USE_TMA: tl.constexpr,
    WIDE: tl.constexpr,
    DOT: tl.constexpr,
):
    """(BLOCK_TOKENS, BLOCK_COLUMNS) elements from token `first` on, 0 beyond NCOLUMNS and `stop`.

    By TMA those beyond the `stop` of a packed sequence are of the next one: their weights are 0, which the careful walk
    heeds if they are not finite.
    """
    if USE_TMA:
        tiles, row, head, begin = source
        tile = tiles.load([row, head, begin + first, column]).reshape(BLOCK_TOKENS, BLOCK_COLUMNS)
    else:
        tokens = tl.arange(0, BLOCK_TOKENS)
        columns = column + tl.arange(0, BLOCK_COLUMNS)
        if WIDE:
            offsets = tokens[:, None] * stride_token + columns[None, :] * stride_column
        else:
            offsets = tokens[:, None] * stride_token.to(tl.int32) + columns[None, :] * stride_column
        inside = (tokens < stop - first)[:, None]
        if NCOLUMNS % BLOCK_COLUMNS != 0:
            inside = inside & (columns < NCOLUMNS)[None, :]
        tile = tl.load(source + first * stride_token + offsets, mask=inside, other=0.0)
    return tile.to(DOT)


@triton.jit
def advance(
    state,
    x,
    B,
    to_exit,
    decay,
    COMPENSATED: tl.constexpr,
    CAREFUL: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """`advance_state`; if COMPENSATED, to_exit * x is not rounded to DOT but split into two of it."""
    if COMPENSATED and not CAREFUL:
        weighted = tl.trans(x).to(tl.float32) * to_exit[None, :]  # (headdim, block)
        # Cut off, not rounded as in `advance_state`: then neither operand is made of the other, and the compiler lets
        # them share a place in shared memory, without which a multiprocessor holds two programs of the segment kernel,
        # not three.
        high = (weighted.to(tl.int32, bitcast=True) & -0x10000).to(tl.float32, bitcast=True)
        state = tl.dot((weighted - high).to(DOT), B, state * decay, input_precision=PRECISION)
        state = tl.dot(high.to(DOT), B, state, input_precision=PRECISION)
    else:
        state = advance_state(state, x, B, to_exit, decay, CAREFUL, DOT, PRECISION, COMPENSATED)
    return state
