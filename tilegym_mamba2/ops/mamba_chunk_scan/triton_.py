"""The whole forward in Triton: two passes over the segments of each sequence, with the state in registers.

    a[t] = sum(d[s] * A for s <= t in t's block of BLOCK_CHUNK tokens)
    y[i] = exp(a[i]) * H @ C[i] + sum((C[i] . B[j]) * exp(a[i] - a[j]) * d[j] * x[j] for j <= i) + D * x[i]
    H    = exp(a[last]) * H + sum(exp(a[last] - a[j]) * d[j] * x[j] (outer) B[j] for j)

A slot is one block of BLOCK_CHUNK tokens of one sequence (a batch row, or a sequence of cu_seqlens). Three kernels:

1. `_scan_prepare_kernel`, program = (slot, heads): the vectors of a block that need exponentials or seq_idx; or
   program = (slot, group): C @ B^T, causal and inside runs of seq_idx, once for all heads of the group.
2. `_scan_segment_kernel`, program = (part of a segment, sequence, head): what that part adds to the state. Only
   where there are too few (sequence, head) pairs to fill the GPU.
3. `_scan_output_kernel`, program = (segment, sequence, head, block of headdim): combines the states of earlier
   parts, then walks over its blocks. x, B and C are read again here for the segments that kernel 2 has read.

Everything is kept transposed, (headdim, token), so that the state is a left operand straight from its registers.

Tokens of another sequence, or later ones, have the weight 0. That does not contain NaN or infinity, since
0 * NaN is NaN; but then the state of the walk isn't finite at its end, because nothing but a selection would
remove it. Only such a walk is done again, with a selection wherever a weight is 0.
"""

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilegym_mamba2.backends import triton as backend
from tilegym_mamba2.backends._triton_math import (
    advance_state,
    changes_at,
    is_finite,
    later_of,
    silu,
    time_step,
    to_operand,
)
from tilegym_mamba2.registry import register

_LOG2_E = tl.constexpr(1.4426950408889634)
# Larger exponents occur only where the weight is masked to 0, which 2**126 keeps 0 and infinity would make NaN.
_MAX_LOG2 = tl.constexpr(126.0)
_MIN_LOG2 = tl.constexpr(-160.0)

# With float16 products the state is kept this much larger, so that small ones don't lose bits to its small range.
_FLOAT16_SCALE = tl.constexpr(32.0)

# The vectors of a block, in the order in which they are stored.
_SUM_LOG2 = tl.constexpr(0)  # a
_FROM_ENTRY = tl.constexpr(1)  # exp(a), 0 for tokens that the state at the block's entry does not reach
_TO_EXIT = tl.constexpr(2)  # exp(a[last] - a) * d, 0 for tokens that do not reach the block's exit
_TIME_STEP = tl.constexpr(3)  # d
_SUM_LOG2_LOW = tl.constexpr(4)  # with SPLIT_SUM, what the rounding of a leaves
_VECTORS = 5


@triton.jit
def _sequence_of_slot(cu_seqlens_ptr, slot, nseq, BLOCK_CHUNK: tl.constexpr):
    """Number of the packed sequence whose slots include `slot`: sequence s has slots from begin // BLOCK_CHUNK + s."""
    before = 0
    for first in range(0, nseq, 1024):
        index = first + tl.arange(0, 1024)  # (1024,)
        begin = tl.load(cu_seqlens_ptr + index, mask=index < nseq, other=0).to(tl.int64)
        before += tl.sum(((begin // BLOCK_CHUNK + index <= slot) & (index < nseq)).to(tl.int32))
    return before - 1


@triton.jit
def _block_of_slot(cu_seqlens_ptr, slot, seqlen, nseq, nslots_row, BLOCK_CHUNK: tl.constexpr, PACKED: tl.constexpr):
    """Where a slot's tokens are: batch row, first token of the sequence, first of the block, end of the sequence."""
    if PACKED:
        sequence = _sequence_of_slot(cu_seqlens_ptr, slot, nseq, BLOCK_CHUNK)
        begin = tl.load(cu_seqlens_ptr + sequence).to(tl.int64)
        stop = tl.load(cu_seqlens_ptr + sequence + 1).to(tl.int64)
        row = tl.zeros((), tl.int64)
        first = begin + (slot - begin // BLOCK_CHUNK - sequence) * BLOCK_CHUNK
    else:
        row = (slot // nslots_row).to(tl.int64)
        begin = tl.zeros((), tl.int64)
        stop = begin + seqlen
        first = begin + (slot % nslots_row) * BLOCK_CHUNK
    return row, begin, first, stop


@triton.jit
def _write_vectors(
    dt_ptr,
    A_ptr,
    dt_bias_ptr,
    seq_idx_ptr,
    vectors_ptr,
    exit_ptr,
    slot,
    row,
    begin,
    first,
    stop,
    first_head,
    nheads,
    stride_dt_batch,
    stride_dt_token,
    stride_dt_head,
    stride_A,
    stride_dt_bias,
    stride_seq_idx_batch,
    stride_seq_idx_token,
    dt_low,
    dt_high,
    DT_SOFTPLUS: tl.constexpr,
    SPLIT_SUM: tl.constexpr,
    NVECTORS: tl.constexpr,
    BLOCK_CHUNK: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
):
    head = first_head + tl.arange(0, BLOCK_HEADS)  # (heads,)
    token = first + tl.arange(0, BLOCK_CHUNK)  # (chunk,)
    valid = (token < stop)[:, None] & (head < nheads)[None, :]  # (chunk, heads)
    dt_ptrs = dt_ptr + row * stride_dt_batch + token[:, None] * stride_dt_token + head[None, :] * stride_dt_head
    dt = tl.load(dt_ptrs, mask=valid, other=0.0).to(tl.float32)  # (chunk, heads)
    A = tl.load(A_ptr + head * stride_A, mask=head < nheads, other=0.0).to(tl.float32)  # (heads,)
    if dt_bias_ptr is not None:
        dt_bias = tl.load(dt_bias_ptr + head * stride_dt_bias, mask=head < nheads, other=0.0).to(tl.float32)
    else:
        dt_bias = tl.zeros((BLOCK_HEADS,), tl.float32)
    d = tl.where(valid, time_step(dt, dt_bias[None, :], dt_low, dt_high, DT_SOFTPLUS), 0.0)

    # A time step that is not finite must not reach other sequences through the sum: it is marked, and left out.
    bad = (is_finite(d) & is_finite(A)[None, :]) == 0
    d = tl.where(bad, 0.0, d)
    A = tl.where(is_finite(A), A, 0.0)
    position = tl.arange(0, BLOCK_CHUNK)
    last_bad = tl.associative_scan(tl.where(bad, position[:, None], -1), 0, later_of)  # (chunk, heads)
    # Exponents are differences of these sums, which may be far larger: so float64, and no token takes its decay below
    # _MIN_LOG2, where it is 0 as a float32 anyway.
    dA_log2 = tl.maximum(d.to(tl.float64) * (A.to(tl.float64) * _LOG2_E)[None, :], _MIN_LOG2)
    total = tl.cumsum(dA_log2, axis=0)  # (chunk, heads)
    last = tl.sum(tl.where(position[:, None] == BLOCK_CHUNK - 1, total, 0.0), axis=0)  # (heads,)
    sum_log2 = total.to(tl.float32)
    to_exit = tl.exp2((last[None, :] - total).to(tl.float32)) * d
    from_entry = tl.exp2(sum_log2)
    exit_decay = tl.exp2(last.to(tl.float32))
    if seq_idx_ptr is not None:
        changes = changes_at(seq_idx_ptr + row * stride_seq_idx_batch, token, begin, stop, stride_seq_idx_token)
        run = tl.cumsum(changes, axis=0)  # (chunk,)
        last_run = tl.sum(changes, axis=0)
        to_exit = tl.where((run == last_run)[:, None], to_exit, 0.0)
        from_entry = tl.where((run == 0)[:, None], from_entry, 0.0)
        exit_decay = tl.where(last_run == 0, exit_decay, 0.0)
        run_begin = tl.associative_scan(tl.where(changes != 0, position, 0), 0, later_of)  # (chunk,)
        poisoned = (last_bad >= 0) & (last_bad >= run_begin[:, None])
        to_exit = tl.where(poisoned & (run == last_run)[:, None], float("nan"), to_exit)
    else:
        poisoned = last_bad >= 0
        to_exit = tl.where(poisoned, float("nan"), to_exit)
    from_entry = tl.where(poisoned, float("nan"), from_entry)

    block = slot.to(tl.int64) * nheads + head  # (heads,)
    vectors = vectors_ptr + block[None, :] * (NVECTORS * BLOCK_CHUNK) + position[:, None]
    stored = (head < nheads)[None, :] & (position >= 0)[:, None]
    tl.store(vectors + _SUM_LOG2 * BLOCK_CHUNK, sum_log2, mask=stored)
    tl.store(vectors + _FROM_ENTRY * BLOCK_CHUNK, from_entry, mask=stored)
    tl.store(vectors + _TO_EXIT * BLOCK_CHUNK, to_exit, mask=stored)
    tl.store(vectors + _TIME_STEP * BLOCK_CHUNK, d, mask=stored)
    if SPLIT_SUM:
        low = (total - sum_log2.to(tl.float64)).to(tl.float32)
        tl.store(vectors + _SUM_LOG2_LOW * BLOCK_CHUNK, low, mask=stored)
    tl.store(exit_ptr + block, exit_decay, mask=head < nheads)


@triton.jit
def _tile(
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
    """(BLOCK_TOKENS, BLOCK_COLUMNS) elements from token `first` on, 0 beyond `stop` and NCOLUMNS."""
    if USE_TMA:
        tile = source.load([first, column])
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
def _source(
    ptr,
    length,
    stride_token,
    NCOLUMNS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    USE_TMA: tl.constexpr,
):
    """What `_tile` reads tokens from: a tensor descriptor, or the pointer itself."""
    if USE_TMA:
        source = tl.make_tensor_descriptor(
            ptr, shape=[length, NCOLUMNS], strides=[stride_token, 1], block_shape=[BLOCK_TOKENS, BLOCK_COLUMNS]
        )
    else:
        source = ptr
    return source


@triton.jit
def _write_gram(
    B_ptr,
    C_ptr,
    seq_idx_ptr,
    gram_ptr,
    slot,
    row,
    begin,
    first,
    stop,
    group,
    ngroups,
    stride_B_batch,
    stride_B_token,
    stride_B_group,
    stride_C_batch,
    stride_C_token,
    stride_C_group,
    stride_seq_idx_batch,
    stride_seq_idx_token,
    stride_B_dstate,
    stride_C_dstate,
    DSTATE: tl.constexpr,
    BLOCK_CHUNK: tl.constexpr,
    BLOCK_DSTATE: tl.constexpr,
    UNIT: tl.constexpr,
    WIDE: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    B_source = B_ptr + row * (stride_B_batch * UNIT) + group * (stride_B_group * UNIT)
    C_source = C_ptr + row * (stride_C_batch * UNIT) + group * (stride_C_group * UNIT)
    B = _tile(
        B_source, first, stop, 0, stride_B_token * UNIT, stride_B_dstate, DSTATE, BLOCK_CHUNK, BLOCK_DSTATE,
        False, WIDE, DOT,
    )  # (chunk, dstate)  # fmt: skip
    C = _tile(
        C_source, first, stop, 0, stride_C_token * UNIT, stride_C_dstate, DSTATE, BLOCK_CHUNK, BLOCK_DSTATE,
        False, WIDE, DOT,
    )  # (chunk, dstate)  # fmt: skip
    gram = tl.dot(C, tl.trans(B), input_precision=PRECISION)  # (chunk i, chunk j)
    position = tl.arange(0, BLOCK_CHUNK)
    visible = position[:, None] >= position[None, :]
    if seq_idx_ptr is not None:
        token = first + position
        changes = changes_at(seq_idx_ptr + row * stride_seq_idx_batch, token, begin, stop, stride_seq_idx_token)
        run = tl.cumsum(changes, axis=0)  # (chunk,)
        visible = visible & (run[:, None] == run[None, :])
    block = slot.to(tl.int64) * ngroups + group
    offsets = position[:, None] * BLOCK_CHUNK + position[None, :]
    gram_ptrs = gram_ptr + block * (BLOCK_CHUNK * BLOCK_CHUNK) + offsets
    tl.store(gram_ptrs, tl.where(visible, gram, 0.0))


@triton.jit(
    do_not_specialize=[
        "seqlen", "nheads", "ngroups", "nseq", "nslots_row", "ngrams", "stride_dt_batch", "stride_dt_token",
        "stride_dt_head", "stride_A", "stride_dt_bias", "stride_B_batch", "stride_B_token", "stride_B_group",
        "stride_C_batch", "stride_C_token", "stride_C_group", "stride_seq_idx_batch", "stride_seq_idx_token",
        "dt_low", "dt_high",
    ]
)  # fmt: skip
def _scan_prepare_kernel(
    dt_ptr,
    A_ptr,
    dt_bias_ptr,
    B_ptr,
    C_ptr,
    seq_idx_ptr,
    cu_seqlens_ptr,
    vectors_ptr,
    exit_ptr,
    gram_ptr,
    seqlen: tl.int32,
    nheads: tl.int32,
    ngroups: tl.int32,
    nseq: tl.int32,
    nslots_row: tl.int32,
    ngrams: tl.int32,
    stride_dt_batch: tl.int64,
    stride_dt_token: tl.int64,
    stride_dt_head: tl.int64,
    stride_A: tl.int64,
    stride_dt_bias: tl.int64,
    stride_B_batch: tl.int64,
    stride_B_token: tl.int64,
    stride_B_group: tl.int64,
    stride_C_batch: tl.int64,
    stride_C_token: tl.int64,
    stride_C_group: tl.int64,
    stride_seq_idx_batch: tl.int64,
    stride_seq_idx_token: tl.int64,
    dt_low: tl.float32,
    dt_high: tl.float32,
    stride_B_dstate,
    stride_C_dstate,
    DSTATE: tl.constexpr,
    DT_SOFTPLUS: tl.constexpr,
    SPLIT_SUM: tl.constexpr,
    NVECTORS: tl.constexpr,
    BLOCK_CHUNK: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_DSTATE: tl.constexpr,
    UNIT: tl.constexpr,
    WIDE: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    program = tl.program_id(0)
    nblocks_heads = tl.cdiv(nheads, BLOCK_HEADS)
    if program < ngrams:
        slot = program // ngroups
    else:
        slot = (program - ngrams) // nblocks_heads
    row, begin, first, stop = _block_of_slot(
        cu_seqlens_ptr, slot, seqlen, nseq, nslots_row, BLOCK_CHUNK, cu_seqlens_ptr is not None
    )
    if first < stop:
        if program < ngrams:
            group = (program % ngroups).to(tl.int64)
            _write_gram(
                B_ptr, C_ptr, seq_idx_ptr, gram_ptr, slot, row, begin, first, stop, group, ngroups, stride_B_batch,
                stride_B_token, stride_B_group, stride_C_batch, stride_C_token, stride_C_group, stride_seq_idx_batch,
                stride_seq_idx_token, stride_B_dstate, stride_C_dstate, DSTATE, BLOCK_CHUNK, BLOCK_DSTATE, UNIT, WIDE,
                DOT, PRECISION,
            )  # fmt: skip
        else:
            first_head = ((program - ngrams) % nblocks_heads) * BLOCK_HEADS
            _write_vectors(
                dt_ptr, A_ptr, dt_bias_ptr, seq_idx_ptr, vectors_ptr, exit_ptr, slot, row, begin, first, stop,
                first_head, nheads, stride_dt_batch, stride_dt_token, stride_dt_head, stride_A, stride_dt_bias,
                stride_seq_idx_batch, stride_seq_idx_token, dt_low, dt_high, DT_SOFTPLUS, SPLIT_SUM, NVECTORS,
                BLOCK_CHUNK, BLOCK_HEADS,
            )  # fmt: skip


@triton.jit
def _sequence(cu_seqlens_ptr, sequence, seqlen, nslots_row, BLOCK_CHUNK: tl.constexpr, PACKED: tl.constexpr):
    """A sequence's batch row, first token in it, length, first slot and number of slots."""
    if PACKED:
        begin = tl.load(cu_seqlens_ptr + sequence).to(tl.int64)
        length = (tl.load(cu_seqlens_ptr + sequence + 1).to(tl.int64) - begin).to(tl.int32)
        row = tl.zeros((), tl.int64)
        slot = begin // BLOCK_CHUNK + sequence
        nslots = tl.cdiv(length, BLOCK_CHUNK)
    else:
        begin = tl.zeros((), tl.int64)
        length = seqlen
        row = sequence.to(tl.int64)
        slot = row * nslots_row
        nslots = nslots_row
    return row, begin, length, slot, nslots


@triton.jit
def _part(nslots, nsegments, nparts_segment, index):
    """The slots of part `index`, relative to the sequence: segments of equal size are cut into parts of equal size."""
    segment_slots = tl.cdiv(nslots, nsegments)
    part_slots = tl.cdiv(segment_slots, nparts_segment)
    segment = index // nparts_segment
    first = segment * segment_slots + (index % nparts_segment) * part_slots
    stop = tl.minimum(tl.minimum(first + part_slots, (segment + 1) * segment_slots), nslots)
    return first, stop


@triton.jit
def _sum_part(
    state,
    part_first,
    part_stop,
    x_source,
    B_source,
    vectors_ptr,
    exit_ptr,
    slot,
    length,
    nheads,
    head,
    headdim_first,
    dstate_first,
    x_token,
    B_token,
    stride_x_headdim,
    stride_B_dstate,
    HEADDIM: tl.constexpr,
    DSTATE: tl.constexpr,
    NVECTORS: tl.constexpr,
    BLOCK_CHUNK: tl.constexpr,
    BLOCK_HEADDIM: tl.constexpr,
    BLOCK_DSTATE: tl.constexpr,
    PAIR: tl.constexpr,
    WIDE: tl.constexpr,
    USE_TMA: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    CAREFUL: tl.constexpr,
):
    """What slots part_first to part_stop make of a state, and the decay over them; a step takes PAIR slots, 1 or 2."""
    STEP: tl.constexpr = PAIR * BLOCK_CHUNK
    position = tl.arange(0, STEP)
    total_decay = 1.0
    for c in tl.range(part_first, part_stop, PAIR, num_stages=NUM_STAGES):
        x = _tile(
            x_source, c * BLOCK_CHUNK, length, headdim_first, x_token, stride_x_headdim, HEADDIM, STEP, BLOCK_HEADDIM,
            USE_TMA, WIDE, DOT,
        )  # (step, headdim)  # fmt: skip
        B = _tile(
            B_source, c * BLOCK_CHUNK, length, dstate_first, B_token, stride_B_dstate, DSTATE, STEP, BLOCK_DSTATE,
            USE_TMA, WIDE, DOT,
        )  # (step, dstate)  # fmt: skip
        block = (slot + c) * nheads + head
        decay = tl.load(exit_ptr + block)
        offsets = (position // BLOCK_CHUNK * nheads * NVECTORS + _TO_EXIT) * BLOCK_CHUNK + position % BLOCK_CHUNK
        vectors = vectors_ptr + block * (NVECTORS * BLOCK_CHUNK)
        if PAIR == 2:
            last = (part_stop - c) * BLOCK_CHUNK
            to_exit = tl.load(vectors + offsets, mask=position < last, other=0.0)  # (step,)
            second = tl.load(exit_ptr + block + nheads, mask=c + 1 < part_stop, other=1.0)
            later = tl.where(position < BLOCK_CHUNK, second, 1.0)
            to_exit = tl.where(later == 0.0, 0.0, to_exit * later)
            decay *= second
        else:
            to_exit = tl.load(vectors + offsets)  # (step,)
        if tl.float16 == DOT:
            to_exit *= _FLOAT16_SCALE
        state = advance_state(state, x, B, to_exit, decay, CAREFUL, DOT, PRECISION)
        total_decay *= decay
    return state, total_decay


@triton.jit(
    do_not_specialize=[
        "seqlen", "nheads", "heads_per_group", "nslots_row", "nsegments", "nparts_segment",
        "nparts", "first_pair", "npairs", "stride_x_batch", "stride_x_token", "stride_x_head", "stride_B_batch",
        "stride_B_token", "stride_B_group",
    ]
)  # fmt: skip
def _scan_segment_kernel(
    x_ptr,
    B_ptr,
    cu_seqlens_ptr,
    vectors_ptr,
    exit_ptr,
    part_states_ptr,
    part_decay_ptr,
    seqlen: tl.int32,
    nheads: tl.int32,
    heads_per_group: tl.int32,
    nslots_row: tl.int32,
    nsegments: tl.int32,
    nparts_segment: tl.int32,
    nparts: tl.int32,
    first_pair: tl.int32,
    npairs: tl.int32,
    stride_x_batch: tl.int64,
    stride_x_token: tl.int64,
    stride_x_head: tl.int64,
    stride_B_batch: tl.int64,
    stride_B_token: tl.int64,
    stride_B_group: tl.int64,
    stride_x_headdim,
    stride_B_dstate,
    HEADDIM: tl.constexpr,
    DSTATE: tl.constexpr,
    NVECTORS: tl.constexpr,
    BLOCK_CHUNK: tl.constexpr,
    BLOCK_HEADDIM: tl.constexpr,
    BLOCK_DSTATE: tl.constexpr,
    PAIR: tl.constexpr,
    UNIT: tl.constexpr,
    WIDE: tl.constexpr,
    USE_TMA: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    nblocks_headdim = tl.cdiv(HEADDIM, BLOCK_HEADDIM)
    nblocks_dstate = tl.cdiv(DSTATE, BLOCK_DSTATE)
    program = tl.program_id(0)
    dstate_first = (program % nblocks_dstate) * BLOCK_DSTATE
    program = program // nblocks_dstate
    headdim_first = (program % nblocks_headdim) * BLOCK_HEADDIM
    program = program // nblocks_headdim
    index = program // npairs
    pair = program % npairs
    sequence = (first_pair + pair) // nheads
    head = (first_pair + pair) % nheads
    row, begin, length, slot, nslots = _sequence(
        cu_seqlens_ptr, sequence, seqlen, nslots_row, BLOCK_CHUNK, cu_seqlens_ptr is not None
    )
    part_first, part_stop = _part(nslots, nsegments, nparts_segment, index)

    x_token = stride_x_token * UNIT
    B_token = stride_B_token * UNIT
    group = head // heads_per_group
    x_base = x_ptr + row * (stride_x_batch * UNIT) + begin * x_token + head.to(tl.int64) * (stride_x_head * UNIT)
    B_base = B_ptr + row * (stride_B_batch * UNIT) + begin * B_token + group.to(tl.int64) * (stride_B_group * UNIT)
    x_source = _source(x_base, length, x_token, HEADDIM, PAIR * BLOCK_CHUNK, BLOCK_HEADDIM, USE_TMA)
    B_source = _source(B_base, length, B_token, DSTATE, PAIR * BLOCK_CHUNK, BLOCK_DSTATE, USE_TMA)
    state = tl.zeros((BLOCK_HEADDIM, BLOCK_DSTATE), tl.float32)  # (headdim, dstate)
    state, decay = _sum_part(
        state, part_first, part_stop, x_source, B_source, vectors_ptr, exit_ptr, slot, length, nheads, head,
        headdim_first, dstate_first, x_token, B_token, stride_x_headdim, stride_B_dstate, HEADDIM, DSTATE, NVECTORS,
        BLOCK_CHUNK, BLOCK_HEADDIM, BLOCK_DSTATE, PAIR, WIDE, USE_TMA, DOT, PRECISION, NUM_STAGES, False,
    )  # fmt: skip
    if tl.min(is_finite(state).to(tl.int32)) == 0:
        state = tl.zeros((BLOCK_HEADDIM, BLOCK_DSTATE), tl.float32)
        state, decay = _sum_part(
            state, part_first, part_stop, x_source, B_source, vectors_ptr, exit_ptr, slot, length, nheads, head,
            headdim_first, dstate_first, x_token, B_token, stride_x_headdim, stride_B_dstate, HEADDIM, DSTATE,
            NVECTORS, BLOCK_CHUNK, BLOCK_HEADDIM, BLOCK_DSTATE, PAIR, WIDE, USE_TMA, DOT, PRECISION, 1, True,
        )  # fmt: skip
    if tl.float16 == DOT:
        state *= 1.0 / _FLOAT16_SCALE

    part = pair.to(tl.int64) * nparts + index
    headdims = headdim_first + tl.arange(0, BLOCK_HEADDIM)
    dstates = dstate_first + tl.arange(0, BLOCK_DSTATE)
    inside = (headdims < HEADDIM)[:, None] & (dstates < DSTATE)[None, :]
    offsets = headdims[:, None] * DSTATE + dstates[None, :]
    tl.store(part_states_ptr + part * (HEADDIM * DSTATE) + offsets, state, mask=inside)
    tl.store(part_decay_ptr + part, decay)


@triton.jit
def _entry_state(
    initial_ptr,
    part_states_ptr,
    part_decay_ptr,
    offsets_initial,
    offsets,
    inside,
    first_part,
    nparts_before,
    HEADDIM: tl.constexpr,
    DSTATE: tl.constexpr,
    BLOCK_HEADDIM: tl.constexpr,
    BLOCK_DSTATE: tl.constexpr,
):
    """The state before a segment's first token, (headdim, dstate)."""
    if initial_ptr is not None:
        state = tl.load(initial_ptr + offsets_initial, mask=inside, other=0.0).to(tl.float32)
    else:
        state = tl.zeros((BLOCK_HEADDIM, BLOCK_DSTATE), tl.float32)
    for index in tl.range(0, nparts_before, num_stages=1):
        decay = tl.load(part_decay_ptr + first_part + index)
        added = tl.load(part_states_ptr + (first_part + index) * (HEADDIM * DSTATE) + offsets, mask=inside, other=0.0)
        state = tl.where(decay == 0.0, 0.0, state * decay) + added
    return state


@triton.jit
def _poison(x, changes, BLOCK_CHUNK: tl.constexpr, DOT: tl.constexpr):
    """NaN where a token sees a non-finite x, else 0: (headdim, chunk)."""
    position = tl.arange(0, BLOCK_CHUNK)
    run = tl.cumsum(changes, axis=0)
    visible = (position[:, None] <= position[None, :]) & (run[:, None] == run[None, :])  # (chunk j, chunk i)
    bad = tl.where(is_finite(x), 0.0, 1.0).to(DOT)
    seen = tl.dot(tl.trans(bad), visible.to(DOT))
    return tl.where(seen > 0.0, float("nan"), 0.0)


@triton.jit
def _walk(
    state,
    part_first,
    part_stop,
    x_source,
    B_source,
    C_source,
    z_base,
    D,
    seq_idx_base,
    gram_ptr,
    vectors_ptr,
    exit_ptr,
    out_base,
    out_sink,
    slot,
    length,
    nheads,
    head,
    ngroups,
    group,
    headdim_first,
    x_token,
    B_token,
    C_token,
    z_token,
    stride_seq_idx_token,
    stride_x_headdim,
    stride_B_dstate,
    stride_C_dstate,
    stride_z_headdim,
    HEADDIM: tl.constexpr,
    DSTATE: tl.constexpr,
    HAS_D: tl.constexpr,
    HAS_Z: tl.constexpr,
    HAS_SEQ_IDX: tl.constexpr,
    SPLIT_SUM: tl.constexpr,
    NVECTORS: tl.constexpr,
    BLOCK_CHUNK: tl.constexpr,
    BLOCK_HEADDIM: tl.constexpr,
    BLOCK_DSTATE: tl.constexpr,
    WIDE: tl.constexpr,
    USE_TMA: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    CAREFUL: tl.constexpr,
):
    """Writes the outputs of slots part_first to part_stop, and returns the state after them, and the largest |y|.

    With float16 products that is how an operand that overflowed shows itself; it is 0 otherwise.
    """
    if tl.float16 == DOT:
        SCALE: tl.constexpr = _FLOAT16_SCALE
        peak = tl.zeros((BLOCK_HEADDIM, BLOCK_CHUNK), tl.float16)
    else:
        SCALE: tl.constexpr = tl.constexpr(1.0)
        peak = 0.0
    position = tl.arange(0, BLOCK_CHUNK)
    headdims = headdim_first + tl.arange(0, BLOCK_HEADDIM)
    for c in tl.range(part_first, part_stop, num_stages=NUM_STAGES):
        first = c * BLOCK_CHUNK
        block = (slot + c) * nheads + head
        vectors = vectors_ptr + block * (NVECTORS * BLOCK_CHUNK)
        x = _tile(
            x_source, first, length, headdim_first, x_token, stride_x_headdim, HEADDIM, BLOCK_CHUNK, BLOCK_HEADDIM,
            USE_TMA, WIDE, DOT,
        )  # (chunk, headdim)  # fmt: skip
        C = _tile(
            C_source, first, length, 0, C_token, stride_C_dstate, DSTATE, BLOCK_CHUNK, BLOCK_DSTATE, USE_TMA, WIDE, DOT,
        )  # (chunk, dstate)  # fmt: skip
        gram_row = ((slot + c) * ngroups + group) * BLOCK_CHUNK
        gram_ptrs = gram_ptr + gram_row * BLOCK_CHUNK + position[:, None] * BLOCK_CHUNK + position[None, :]
        gram = tl.load(gram_ptrs)  # (chunk i, chunk j)
        sums = tl.load(vectors + _SUM_LOG2 * BLOCK_CHUNK + position)  # (chunk,)
        d = tl.load(vectors + _TIME_STEP * BLOCK_CHUNK + position)
        exponent = sums[:, None] - sums[None, :]
        if SPLIT_SUM:
            low = tl.load(vectors + _SUM_LOG2_LOW * BLOCK_CHUNK + position)
            exponent += low[:, None] - low[None, :]
        weight = gram * tl.exp2(tl.minimum(exponent, _MAX_LOG2)) * d[None, :]  # (chunk i, chunk j)
        # This product comes first: by the time that it is done, so is the last block's update of the state.
        if CAREFUL:
            weight, weight_factor = to_operand(weight, DOT)
            y = tl.dot(tl.trans(tl.where(is_finite(x), x, 0.0)), tl.trans(weight), input_precision=PRECISION)
            y *= weight_factor
            operand, state_factor = to_operand(state, DOT)
        else:
            y = tl.dot(tl.trans(x), tl.trans(weight.to(DOT)), input_precision=PRECISION)  # (headdim, chunk)
            operand = state.to(DOT)
        carried = tl.dot(operand, tl.trans(C), input_precision=PRECISION)  # (headdim, chunk)
        from_entry = tl.load(vectors + _FROM_ENTRY * BLOCK_CHUNK + position) * (1.0 / SCALE)
        from_entry = tl.broadcast_to(from_entry[None, :], (BLOCK_HEADDIM, BLOCK_CHUNK))
        if CAREFUL:
            carried = tl.where(from_entry == 0.0, 0.0, carried * state_factor)
            if HAS_SEQ_IDX:
                changes = changes_at(seq_idx_base, first + position, 0, length, stride_seq_idx_token)
            else:
                changes = tl.zeros((BLOCK_CHUNK,), tl.int32)
            y += _poison(x, changes, BLOCK_CHUNK, DOT)
        # Not `y += carried * from_entry`: the compiler would start the first product from that, and so wait for it.
        y = tl.fma(carried, from_entry, y)
        B = _tile(
            B_source, first, length, 0, B_token, stride_B_dstate, DSTATE, BLOCK_CHUNK, BLOCK_DSTATE, USE_TMA, WIDE, DOT,
        )  # (chunk, dstate)  # fmt: skip
        decay = tl.load(exit_ptr + block)
        to_exit = tl.load(vectors + _TO_EXIT * BLOCK_CHUNK + position) * SCALE  # (chunk,)
        state = advance_state(state, x, B, to_exit, decay, CAREFUL, DOT, PRECISION)

        if HAS_D:
            y += tl.trans(x).to(tl.float32) * D[:, None]
        if tl.float16 == DOT:
            peak = tl.maximum(peak, tl.abs(y.to(tl.float16)), propagate_nan=tl.PropagateNan.ALL)
        y = tl.trans(y)  # (chunk, headdim)
        tokens = (first + position).to(tl.int64)
        inside = (first + position < length)[:, None]
        if HEADDIM % BLOCK_HEADDIM != 0:
            inside = inside & (headdims < HEADDIM)[None, :]
        if HAS_Z:
            z_ptrs = z_base + tokens[:, None] * z_token + headdims[None, :] * stride_z_headdim
            z = tl.load(z_ptrs, mask=inside, other=0.0).to(tl.float32)  # (chunk, headdim)
            y = y * silu(z)
        if USE_TMA:
            out_sink.store([first, headdim_first], y.to(out_base.dtype.element_ty))
        else:
            out_ptrs = out_base + tokens[:, None] * (nheads * HEADDIM) + headdims[None, :]
            tl.store(out_ptrs, y.to(out_base.dtype.element_ty), mask=inside)
    return state, peak


@triton.jit(
    do_not_specialize=[
        "seqlen", "nheads", "ngroups", "nslots_row", "nsegments", "nparts_segment", "nparts",
        "first_pair", "npairs", "stride_x_batch", "stride_x_token", "stride_x_head", "stride_B_batch",
        "stride_B_token", "stride_B_group", "stride_C_batch", "stride_C_token", "stride_C_group", "stride_z_batch",
        "stride_z_token", "stride_z_head", "stride_D_head", "stride_D_headdim", "stride_initial_batch",
        "stride_initial_head", "stride_initial_headdim", "stride_initial_dstate", "stride_seq_idx_batch",
        "stride_seq_idx_token",
    ]
)  # fmt: skip
def _scan_output_kernel(
    x_ptr,
    B_ptr,
    C_ptr,
    z_ptr,
    D_ptr,
    initial_ptr,
    seq_idx_ptr,
    cu_seqlens_ptr,
    gram_ptr,
    vectors_ptr,
    exit_ptr,
    part_states_ptr,
    part_decay_ptr,
    out_ptr,
    final_ptr,
    seqlen: tl.int32,
    nheads: tl.int32,
    ngroups: tl.int32,
    nslots_row: tl.int32,
    nsegments: tl.int32,
    nparts_segment: tl.int32,
    nparts: tl.int32,
    first_pair: tl.int32,
    npairs: tl.int32,
    stride_x_batch: tl.int64,
    stride_x_token: tl.int64,
    stride_x_head: tl.int64,
    stride_B_batch: tl.int64,
    stride_B_token: tl.int64,
    stride_B_group: tl.int64,
    stride_C_batch: tl.int64,
    stride_C_token: tl.int64,
    stride_C_group: tl.int64,
    stride_z_batch: tl.int64,
    stride_z_token: tl.int64,
    stride_z_head: tl.int64,
    stride_D_head: tl.int64,
    stride_D_headdim: tl.int64,
    stride_initial_batch: tl.int64,
    stride_initial_head: tl.int64,
    stride_initial_headdim: tl.int64,
    stride_initial_dstate: tl.int64,
    stride_seq_idx_batch: tl.int64,
    stride_seq_idx_token: tl.int64,
    stride_x_headdim,
    stride_B_dstate,
    stride_C_dstate,
    stride_z_headdim,
    HEADDIM: tl.constexpr,
    DSTATE: tl.constexpr,
    SPLIT_SUM: tl.constexpr,
    NVECTORS: tl.constexpr,
    BLOCK_CHUNK: tl.constexpr,
    BLOCK_HEADDIM: tl.constexpr,
    BLOCK_DSTATE: tl.constexpr,
    UNIT: tl.constexpr,
    Z_UNIT: tl.constexpr,
    WIDE: tl.constexpr,
    USE_TMA: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    nblocks_headdim = tl.cdiv(HEADDIM, BLOCK_HEADDIM)
    headdim_first = (tl.program_id(0) % nblocks_headdim) * BLOCK_HEADDIM
    program = tl.program_id(0) // nblocks_headdim
    if program < first_pair:  # whole sequences first, so that the shorter segments fill the end of the last wave
        pair = program
        segment = 0
        nsegments = 1
    else:
        pair = first_pair + (program - first_pair) % npairs
        segment = (program - first_pair) // npairs
    sequence = pair // nheads
    head = pair % nheads
    group = head // (nheads // ngroups)
    row, begin, length, slot, nslots = _sequence(
        cu_seqlens_ptr, sequence, seqlen, nslots_row, BLOCK_CHUNK, cu_seqlens_ptr is not None
    )
    segment_slots = tl.cdiv(nslots, nsegments)
    walk_first = tl.minimum(segment * segment_slots, nslots)
    walk_stop = tl.minimum(walk_first + segment_slots, nslots)

    x_token = stride_x_token * UNIT
    B_token = stride_B_token * UNIT
    C_token = stride_C_token * UNIT
    head_long = head.to(tl.int64)
    group_long = group.to(tl.int64)
    x_base = x_ptr + row * (stride_x_batch * UNIT) + begin * x_token + head_long * (stride_x_head * UNIT)
    B_base = B_ptr + row * (stride_B_batch * UNIT) + begin * B_token + group_long * (stride_B_group * UNIT)
    C_base = C_ptr + row * (stride_C_batch * UNIT) + begin * C_token + group_long * (stride_C_group * UNIT)
    out_base = out_ptr + ((row * seqlen + begin) * nheads + head) * HEADDIM
    x_source = _source(x_base, length, x_token, HEADDIM, BLOCK_CHUNK, BLOCK_HEADDIM, USE_TMA)
    B_source = _source(B_base, length, B_token, DSTATE, BLOCK_CHUNK, BLOCK_DSTATE, USE_TMA)
    C_source = _source(C_base, length, C_token, DSTATE, BLOCK_CHUNK, BLOCK_DSTATE, USE_TMA)
    out_sink = _source(out_base, length, nheads * HEADDIM, HEADDIM, BLOCK_CHUNK, BLOCK_HEADDIM, USE_TMA)
    headdims = headdim_first + tl.arange(0, BLOCK_HEADDIM)
    dstates = tl.arange(0, BLOCK_DSTATE)
    inside = (headdims < HEADDIM)[:, None] & (dstates < DSTATE)[None, :]
    offsets = headdims[:, None] * DSTATE + dstates[None, :]
    if D_ptr is not None:
        D_ptrs = D_ptr + head_long * stride_D_head + headdims * stride_D_headdim
        D = tl.load(D_ptrs, mask=headdims < HEADDIM, other=0.0).to(tl.float32)  # (headdim,)
    else:
        D = 0.0
    if z_ptr is not None:
        z_token = stride_z_token * Z_UNIT
        z_base = z_ptr + row * (stride_z_batch * Z_UNIT) + begin * z_token + head_long * (stride_z_head * Z_UNIT)
    else:
        z_token = stride_z_token
        z_base = out_base
    if seq_idx_ptr is not None:
        seq_idx_base = seq_idx_ptr + row * stride_seq_idx_batch + begin * stride_seq_idx_token
    else:
        seq_idx_base = exit_ptr
    if initial_ptr is not None:
        initial_base = initial_ptr + sequence.to(tl.int64) * stride_initial_batch + head_long * stride_initial_head
        offsets_initial = (
            headdims.to(tl.int64)[:, None] * stride_initial_headdim
            + dstates.to(tl.int64)[None, :] * stride_initial_dstate
        )
    else:
        initial_base = initial_ptr
        offsets_initial = offsets
    first_part = (pair - first_pair).to(tl.int64) * nparts

    # The second walk, with selections and with float16 operands that fit, is for what met something not finite.
    if tl.float16 == DOT:
        SCALE: tl.constexpr = _FLOAT16_SCALE
    else:
        SCALE: tl.constexpr = tl.constexpr(1.0)
    state = _entry_state(
        initial_base, part_states_ptr, part_decay_ptr, offsets_initial, offsets, inside, first_part,
        segment * nparts_segment, HEADDIM, DSTATE, BLOCK_HEADDIM, BLOCK_DSTATE,
    )  # fmt: skip
    state, peak = _walk(
        state * SCALE, walk_first, walk_stop, x_source, B_source, C_source, z_base, D, seq_idx_base, gram_ptr,
        vectors_ptr, exit_ptr, out_base, out_sink, slot, length, nheads, head, ngroups, group, headdim_first, x_token,
        B_token, C_token, z_token, stride_seq_idx_token, stride_x_headdim, stride_B_dstate, stride_C_dstate,
        stride_z_headdim, HEADDIM, DSTATE, D_ptr is not None, z_ptr is not None, seq_idx_ptr is not None, SPLIT_SUM,
        NVECTORS, BLOCK_CHUNK, BLOCK_HEADDIM, BLOCK_DSTATE, WIDE, USE_TMA, DOT, PRECISION, NUM_STAGES, False,
    )  # fmt: skip
    finite = tl.min(is_finite(state).to(tl.int32))
    if tl.float16 == DOT:
        finite = tl.minimum(finite, tl.min(is_finite(peak).to(tl.int32)))
    if finite == 0:
        state = _entry_state(
            initial_base, part_states_ptr, part_decay_ptr, offsets_initial, offsets, inside, first_part,
            segment * nparts_segment, HEADDIM, DSTATE, BLOCK_HEADDIM, BLOCK_DSTATE,
        )  # fmt: skip
        state, _ = _walk(
            state * SCALE, walk_first, walk_stop, x_source, B_source, C_source, z_base, D, seq_idx_base, gram_ptr,
            vectors_ptr, exit_ptr, out_base, out_sink, slot, length, nheads, head, ngroups, group, headdim_first,
            x_token, B_token, C_token, z_token, stride_seq_idx_token, stride_x_headdim, stride_B_dstate,
            stride_C_dstate, stride_z_headdim, HEADDIM, DSTATE, D_ptr is not None, z_ptr is not None,
            seq_idx_ptr is not None, SPLIT_SUM, NVECTORS, BLOCK_CHUNK, BLOCK_HEADDIM, BLOCK_DSTATE, WIDE, USE_TMA,
            DOT, PRECISION, 1, True,
        )  # fmt: skip
    if segment == nsegments - 1:
        final = (sequence.to(tl.int64) * nheads + head) * HEADDIM * DSTATE
        tl.store(final_ptr + final + offsets, state * (1.0 / SCALE), mask=inside)


class Config(NamedTuple):
    """Tiles and compiler options of the kernels; a configuration never depends on batch or seqlen."""

    block_chunk: int
    block_headdim: int
    output: backend.Options
    segment_headdim: int
    segment_dstate: int
    segment: backend.Options
    segment_pair: int
    programs_per_multiprocessor: int
    use_tma: bool


_LARGEST_DSTATE = 1024
_DOT = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


def choose_config(info: backend.DeviceInfo, headdim: int, dstate: int, dot: torch.dtype, exact: bool) -> Config:
    """The configuration for a GPU, a shape and the dtype of the products, which are IEEE ones if `exact`."""
    block_headdim, block_dstate = min(_block(headdim), 64), _block(dstate)
    segment_headdim, segment_dstate = block_headdim, min(block_dstate, 128)
    wide_float16 = dot == torch.float16 and block_dstate > 128
    largest_dstate = 128 if wide_float16 and info.shared_memory < 160_000 else 256
    if info.has_tma and dot.itemsize == 2 and block_dstate <= largest_dstate:
        # Blocks of 32 tokens leave room for three buffers of each tile in every resident program.
        if block_dstate <= 64:
            output, resident = backend.Options(4, 3, 128), 4
        elif block_dstate == 128:
            output, resident = backend.Options(4, 3, 168), 3
        elif not wide_float16:
            output, resident = backend.Options(4, 2), 2
        else:
            output, resident = backend.Options(8, 3), 1
        segment = backend.Options(4, 3, 168)
        return Config(32, block_headdim, output, segment_headdim, segment_dstate, segment, 2, resident, True)
    if exact and block_dstate <= 256:
        # Without matrix units every thread holds its part of the operands too: smaller tiles, more threads.
        block_headdim = max(16, min(block_headdim, 4096 // block_dstate))
        output, segment = backend.Options(8, 1), backend.Options(4, 1)
        return Config(16, block_headdim, output, segment_headdim, segment_dstate, segment, 2, 1, info.has_tma)
    if info.has_tma and block_dstate <= 128:
        options = backend.Options(4, 2)
        return Config(16, block_headdim, options, segment_headdim, segment_dstate, options, 2, 2, True)
    while block_headdim * block_dstate > 64 * 256 and block_headdim > 16:
        block_headdim //= 2
    block_chunk = 64 if dot.itemsize == 2 else 32
    bytes_token = (2 * block_dstate + block_headdim) * dot.itemsize
    while block_chunk > 16 and block_chunk * bytes_token > info.shared_memory // 2:
        block_chunk //= 2
    num_warps = 8 if block_headdim * block_dstate >= 64 * 256 else 4
    output = backend.Options(num_warps, 2 if 2 * block_chunk * bytes_token < info.shared_memory else 1)
    segment = backend.Options(4, output.num_stages)
    resident = 1 if num_warps == 8 else 2
    return Config(block_chunk, block_headdim, output, segment_headdim, segment_dstate, segment, 1, resident, False)


def choose_segments(pairs: int, nblocks: int, resident: int, slots: int) -> tuple[int, int]:
    """How many (sequence, head) pairs to leave whole, and into how many segments to cut each of the others.

    Whole pairs fill whole waves of `resident` programs, `nblocks` for each pair; what is left over is cut so that it
    takes least time, where the first pass costs about 0.4 of the second for each token that it reads.
    """
    first_pair = pairs * nblocks // resident * resident // nblocks
    left = (pairs - first_pair) * nblocks / resident

    def cost(count: int) -> float:
        whole, part = divmod(left * count, 1)
        last_wave = 0.3 + 0.7 * part if part else 0.0  # programs that are fewer are faster
        return (whole + last_wave) / count + 0.4 * left * (count - 1) / count

    nsegments = min(range(1, max(2, min(_MOST_SEGMENTS, slots // _LEAST_SLOTS) + 1)), key=cost)
    return (pairs, 1) if nsegments == 1 else (first_pair, nsegments)


def _block(size: int) -> int:
    return max(16, triton.next_power_of_2(size))


class _Plan(NamedTuple):
    """The launches of a call, and where in one piece of memory is what they pass to each other."""

    prepare: backend.Launch
    segment: backend.Launch | None
    output: backend.Launch
    scratch: int
    offsets: tuple[int, ...]


def _why_not(problem: Any) -> str | None:
    for name, dtype in problem.dtypes.items():
        if dtype == torch.float64 and name != "initial_states":
            return f"{name} is float64, the kernels compute in float32 at most"
    if problem.dstate > _LARGEST_DSTATE:
        return f"B has dstate={problem.dstate}, the kernels hold {_LARGEST_DSTATE} at most"
    return None


@register("mamba_chunk_scan", "triton", supports=_why_not)
def mamba_chunk_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    initial_states: Tensor | None,
    seq_idx: Tensor | None,
    cu_seqlens: Tensor | None,
    dt_softplus: bool,
    dt_limit: tuple[float, float],
    state_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    batch, seqlen, nheads, headdim = x.shape
    dstate = B.shape[3]
    rows = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
    device = x.device
    if initial_states is not None and initial_states.dtype == torch.float64:
        initial_states = initial_states.float()
    out = torch.empty(x.shape, dtype=x.dtype, device=device)
    final_states = torch.empty((rows, nheads, headdim, dstate), dtype=torch.float32, device=device)
    if seqlen == 0 or rows == 0:
        if initial_states is None:
            final_states.zero_()
        else:
            final_states.copy_(initial_states)
    else:
        # Tensors whose rows can be read 16 bytes at a time only if the base pointers allow it too.
        unaligned = (x.data_ptr() | B.data_ptr() | C.data_ptr()) & 15
        plan = _plan(
            backend.layouts(x, dt, A, B, C, D, z, dt_bias, initial_states, seq_idx, cu_seqlens), dt_softplus,
            tuple(dt_limit), torch.get_float32_matmul_precision() == "highest", unaligned == 0,
            backend.device_info(device),
        )  # fmt: skip
        scratch = torch.empty(plan.scratch, dtype=torch.float32, device=device)
        vectors, exits, gram, part_states, part_decays = backend.pieces(scratch, plan.offsets)
        plan.prepare((dt, A, dt_bias, B, C, seq_idx, cu_seqlens, vectors, exits, gram), device)
        if plan.segment is not None:
            plan.segment((x, B, cu_seqlens, vectors, exits, part_states, part_decays), device)
        plan.output(
            (
                x, B, C, z, D, initial_states, seq_idx, cu_seqlens, gram, vectors, exits, part_states, part_decays,
                out, final_states,
            ),
            device,
        )  # fmt: skip
    if cu_seqlens is None:
        return out, final_states, None
    last = final_states[-1:].clone() if rows else final_states.new_zeros((1, nheads, headdim, dstate))
    return out, last, final_states


@functools.lru_cache(maxsize=1024)
def _plan(
    layouts: Any,
    dt_softplus: bool,
    dt_limit: tuple[float, float],
    highest: bool,
    aligned: bool,
    info: backend.DeviceInfo,
) -> _Plan:
    x, dt, A, B, C, D, z, dt_bias, initial_states, seq_idx, cu_seqlens = layouts
    (batch, seqlen, nheads, headdim), x_stride, x_dtype = x
    (_, _, ngroups, dstate), B_stride, B_dtype = B
    C_stride = C[1]
    dot = x_dtype if x_dtype == B_dtype == C[2] else torch.float32
    exact = highest and torch.float32 in (x_dtype, B_dtype, C[2])
    precision = "ieee" if exact else "tf32"
    config = choose_config(info, headdim, dstate, dot, exact)

    dense = (x_stride, B_stride, C_stride)
    unit = 8 if aligned and all(s[3] == 1 and not any(stride % 8 for stride in s[:3]) for s in dense) else 1
    tma_legal = unit == 8 and headdim % 8 == 0 and dstate % 8 == 0 and all(all(s[:3]) for s in dense)
    use_tma = config.use_tma and tma_legal
    columns = max(_block(headdim), _block(dstate))
    wide = any(2 * config.block_chunk * s[1] + columns * s[3] >= 2**31 for s in dense)
    x_units, B_units, C_units = (tuple(stride // unit for stride in s[:3]) for s in dense)

    packed = cu_seqlens is not None
    nseq = cu_seqlens[0][0] - 1 if packed else 0
    rows = nseq if packed else batch
    nslots_row = -(-seqlen // config.block_chunk)
    nslots = seqlen // config.block_chunk + nseq if packed else batch * nslots_row
    split_sum = dot == torch.float32
    nvectors = _VECTORS if split_sum else _VECTORS - 1
    seq_idx_stride = backend.strides(seq_idx, 2)

    block_heads = min(triton.next_power_of_2(nheads), 16)
    block_dstate = _block(dstate)
    prepare = backend.Launch(
        _scan_prepare_kernel,
        nslots * (ngroups + -(-nheads // block_heads)),
        (
            seqlen, nheads, ngroups, nseq, nslots_row, nslots * ngroups, *dt[1], *A[1], *backend.strides(dt_bias, 1),
            *B_units, *C_units, *seq_idx_stride, float(dt_limit[0]), float(dt_limit[1]), B_stride[3], C_stride[3],
        ),
        (
            dstate, dt_softplus, split_sum, nvectors, config.block_chunk, block_heads, block_dstate, unit, wide,
            _DOT[dot], precision,
        ),
    )  # fmt: skip

    nblocks_headdim = -(-headdim // config.block_headdim)
    pairs = rows * nheads
    resident = info.multiprocessors * config.programs_per_multiprocessor
    slots_sequence = -(-nslots // rows)
    first_pair, nsegments = choose_segments(pairs, nblocks_headdim, resident, slots_sequence)
    npairs = pairs - first_pair
    segment_tile_programs = -(-headdim // config.segment_headdim) * -(-dstate // config.segment_dstate)
    segment_programs = max(1, npairs * (nsegments - 1) * segment_tile_programs)
    segment_slots = -(-slots_sequence // nsegments)
    nparts_segment = max(1, min(resident // segment_programs, segment_slots // _LEAST_SLOTS))
    nparts = (nsegments - 1) * nparts_segment
    segment = None
    if nsegments > 1:
        segment = backend.Launch(
            _scan_segment_kernel,
            npairs * nparts * segment_tile_programs,
            (
                seqlen, nheads, nheads // ngroups, nslots_row, nsegments, nparts_segment, nparts, first_pair, npairs,
                *x_units, *B_units, x_stride[3], B_stride[3],
            ),
            (
                headdim, dstate, nvectors, config.block_chunk, config.segment_headdim, config.segment_dstate,
                config.segment_pair, unit, wide, use_tma, _DOT[dot], precision, config.segment.num_stages,
            ),
            config.segment,
            use_tma,
        )  # fmt: skip
    z_stride = backend.strides(z, 4)
    z_unit = 8 if z_stride[3] == 1 and not any(stride % 8 for stride in z_stride[:3]) else 1
    D_stride = (*backend.strides(D, 2), 0)[:2]
    output = backend.Launch(
        _scan_output_kernel,
        (first_pair + npairs * nsegments) * nblocks_headdim,
        (
            seqlen, nheads, ngroups, nslots_row, nsegments, nparts_segment, nparts, first_pair, max(npairs, 1),
            *x_units, *B_units, *C_units,
            *(stride // z_unit for stride in z_stride[:3]), *D_stride,
            *backend.strides(initial_states, 4), *seq_idx_stride,
            x_stride[3], B_stride[3], C_stride[3], z_stride[3],
        ),
        (
            headdim, dstate, split_sum, nvectors, config.block_chunk, config.block_headdim, block_dstate,
            unit, z_unit, wide, use_tma, _DOT[dot], precision, config.output.num_stages,
        ),
        config.output,
        use_tma,
    )  # fmt: skip
    sizes = (
        nslots * nheads * nvectors * config.block_chunk,
        nslots * nheads,
        nslots * ngroups * config.block_chunk**2,
        npairs * nparts * headdim * dstate,
        npairs * nparts,
    )
    offsets = [0]
    for size in sizes:
        offsets.append(offsets[-1] + -(-size // 64) * 64)  # each 256 bytes aligned
    return _Plan(prepare, segment, output, offsets[-1], tuple(offsets[:-1]))


# Segments and parts of fewer blocks than this would cost more than they gain.
_LEAST_SLOTS = 8
_MOST_SEGMENTS = 32
