"""What the cuTile kernels share: device functions, and how a call is split into tiles."""

import math

import cuda.tile as ct
import torch

LOG2E = math.log2(math.e)

# Operand types of a kernel's matrix products; accumulators are float32 always.
BFLOAT16, FLOAT16, TFLOAT32, FLOAT32 = range(4)

_OPERANDS = {torch.bfloat16: BFLOAT16, torch.float16: FLOAT16}


def operand_type(*tensors: torch.Tensor) -> int:
    """The operand type that represents every input exactly, or TF32 where torch's precision setting allows it."""
    dtypes = {tensor.dtype for tensor in tensors}
    if len(dtypes) == 1:
        (dtype,) = dtypes
        if dtype in _OPERANDS:
            return _OPERANDS[dtype]
    # TF32 holds every bfloat16 and float16 exactly.
    exact = torch.float32 not in dtypes or torch.get_float32_matmul_precision() != "highest"
    return TFLOAT32 if exact else FLOAT32


def run_index(seq_idx: torch.Tensor) -> torch.Tensor:
    """How many times the id has changed up to each token, so that equal numbers mean the same sequence."""
    changed = torch.zeros(seq_idx.shape, dtype=torch.int32, device=seq_idx.device)
    torch.ne(seq_idx[:, 1:], seq_idx[:, :-1], out=changed[:, 1:])
    return changed.cumsum(1, dtype=torch.int32)


def power_of_two(size: int, low: int, high: int) -> int:
    """The smallest power of two that is at least `size`, within [low, high], both powers of two."""
    return min(max(1 << (size - 1).bit_length(), low), high)


def as_operand(tile, OPERAND: ct.Constant[int]):
    """The tile in the type of a matrix product's operand."""
    if OPERAND == BFLOAT16:
        result = tile.astype(ct.bfloat16)
    elif OPERAND == FLOAT16:
        result = tile.astype(ct.float16)
    elif OPERAND == TFLOAT32:
        result = tile.astype(ct.tfloat32)
    else:
        result = tile.astype(ct.float32)
    return result


def load_tokens(
    array,
    batch,
    first,
    stop,
    row,
    column,
    BLOCK_TOKENS: ct.Constant[int],
    BLOCK_CHANNELS: ct.Constant[int],
    WHOLE_TILES: ct.Constant[bool],
    LATENCY: ct.Constant[int],
):
    """Tokens [first, stop) of (batch, seqlen, row, channels), zero past the end, (BLOCK_TOKENS, BLOCK_CHANNELS).

    WHOLE_TILES says that `first` is a multiple of BLOCK_TOKENS, and `stop` the next one: TMA then finds the tile.
    """
    if WHOLE_TILES:
        tile = ct.load(
            array,
            (batch, first // BLOCK_TOKENS, row, column),
            (1, BLOCK_TOKENS, 1, BLOCK_CHANNELS),
            padding_mode=ct.PaddingMode.ZERO,
            latency=LATENCY,
        )
    else:
        tile = ct.load(
            array.slice(1, first, stop),
            (batch, 0, row, column),
            (1, BLOCK_TOKENS, 1, BLOCK_CHANNELS),
            padding_mode=ct.PaddingMode.ZERO,
        )
    return tile.reshape((BLOCK_TOKENS, BLOCK_CHANNELS))


def load_runs(runs, batch, first, stop, BLOCK_TOKENS: ct.Constant[int], WHOLE_TILES: ct.Constant[bool]):
    """Run indices of tokens [first, stop) of (batch, seqlen), zero past the end, (BLOCK_TOKENS,)."""
    if WHOLE_TILES:
        tile = ct.load(runs, (batch, first // BLOCK_TOKENS), (1, BLOCK_TOKENS), padding_mode=ct.PaddingMode.ZERO)
    else:
        tile = ct.load(runs.slice(1, first, stop), (batch, 0), (1, BLOCK_TOKENS), padding_mode=ct.PaddingMode.ZERO)
    return tile.reshape((BLOCK_TOKENS,))


def softplus(v):
    """log1p(exp(v)), linear above 20, to float32 precision for any v.

    log1p(e) = 2 atanh(e / (2 + e)) of e = exp(-|v|) <= 1 has an argument of at most 1/3, where eight terms of the
    series reach float32 precision; the logarithm of 1 + e would lose e.
    """
    e = ct.exp(-ct.abs(v))
    s = e / (e + 2.0)
    q = s * s
    series = 1.0 / 15.0
    for odd in ct.static_iter((13.0, 11.0, 9.0, 7.0, 5.0, 3.0, 1.0)):
        series = series * q + 1.0 / odd
    return ct.where(v > 20.0, v, ct.where(v > 0.0, v, 0.0) + 2.0 * s * series)


def silu(v):
    return v / (1.0 + ct.exp(-v))
