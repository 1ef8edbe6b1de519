"""The Triton kernel of the fused forward that comes first: what a block needs of dt, seq_idx, and B with C.

    a[t] = sum(d[s] * A for s <= t in t's block),   gram[i, j] = C[i] . B[j] for j <= i in i's run of seq_idx, else 0

A program owns the vectors of a slot's block for several heads, or its gram for a group; dt, B and C are read once.
Where there is a kernel of the parts, it makes the gram, which only the kernel after it reads.

A float16 gram is gram[i, j] / 2**gram_log2[i], whose largest in a row is at least 2**14 and below 2**15. So a row does
not lose by the size of others, and its elements keep float16's 11 bits down to 2**-29 of its largest.
"""

import triton
import triton.language as tl

from tilegym_mamba2.backends._triton_math import changes_at, is_finite, later_of, launch_next, time_step
from tilegym_mamba2.ops.mamba_chunk_scan._triton_blocks import (
    BIAS_LOG2,
    FROM_ENTRY,
    SUM_LOG2,
    SUM_LOG2_LOW,
    TIME_STEP,
    TO_EXIT,
    load_tile,
)

_LOG2_E = tl.constexpr(1.4426950408889634)
_MIN_LOG2 = tl.constexpr(-160.0)
# The walk adds gram_log2 to the exponent of the decay, whose own range a smaller one would use up.
_MIN_GRAM_LOG2 = tl.constexpr(-80)


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
def block_of_slot(cu_seqlens_ptr, slot, seqlen, nseq, nslots_row, BLOCK_CHUNK: tl.constexpr, PACKED: tl.constexpr):
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
    HAS_BIAS: tl.constexpr,
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
    tl.store(vectors + SUM_LOG2 * BLOCK_CHUNK, sum_log2, mask=stored)
    tl.store(vectors + FROM_ENTRY * BLOCK_CHUNK, from_entry, mask=stored)
    tl.store(vectors + TO_EXIT * BLOCK_CHUNK, to_exit, mask=stored)
    if HAS_BIAS:
        bias = total - tl.log2(d)  # infinite where d is 0
        tl.store(vectors + BIAS_LOG2 * BLOCK_CHUNK, bias.to(tl.float32), mask=stored)
    else:
        tl.store(vectors + TIME_STEP * BLOCK_CHUNK, d, mask=stored)
    if SPLIT_SUM:
        low = (total - sum_log2.to(tl.float64)).to(tl.float32)
        tl.store(vectors + SUM_LOG2_LOW * BLOCK_CHUNK, low, mask=stored)
    tl.store(exit_ptr + block, exit_decay, mask=head < nheads)


@triton.jit
def write_gram(
    B_ptr,
    C_ptr,
    seq_idx_ptr,
    gram_ptr,
    gram_log2_ptr,
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
    B = load_tile(
        B_source, first, stop, 0, stride_B_token * UNIT, stride_B_dstate, DSTATE, BLOCK_CHUNK, BLOCK_DSTATE,
        False, WIDE, DOT,
    )  # (chunk, dstate)  # fmt: skip
    C = load_tile(
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
    gram = tl.where(visible, gram, 0.0)
    block = slot.to(tl.int64) * ngroups + group
    if gram_ptr.dtype.element_ty == tl.float16:
        largest = tl.max(tl.where(is_finite(gram), tl.abs(gram), 0.0), axis=1)  # (chunk,)
        exponent = (largest.to(tl.int32, bitcast=True) >> 23) - 127
        log2 = tl.maximum(exponent - 14, _MIN_GRAM_LOG2)
        gram *= ((127 - log2) << 23).to(tl.float32, bitcast=True)[:, None]  # 2**-log2
        tl.store(gram_log2_ptr + block * BLOCK_CHUNK + position, log2.to(tl.float32))
    offsets = position[:, None] * BLOCK_CHUNK + position[None, :]
    gram_ptrs = gram_ptr + block * (BLOCK_CHUNK * BLOCK_CHUNK) + offsets
    tl.store(gram_ptrs, gram.to(gram_ptr.dtype.element_ty))


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
    gram_log2_ptr,
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
    GRAMS: tl.constexpr,  # whether ngrams > 0: without their code the vectors need fewer registers
    EARLY: tl.constexpr,
):
    launch_next(EARLY)
    program = tl.program_id(0)
    nblocks_heads = tl.cdiv(nheads, BLOCK_HEADS)
    if program < ngrams:
        slot = program // ngroups
    else:
        slot = (program - ngrams) // nblocks_heads
    row, begin, first, stop = block_of_slot(
        cu_seqlens_ptr, slot, seqlen, nseq, nslots_row, BLOCK_CHUNK, cu_seqlens_ptr is not None
    )
    if first < stop:
        if GRAMS and program < ngrams:
            group = (program % ngroups).to(tl.int64)
            write_gram(
                B_ptr, C_ptr, seq_idx_ptr, gram_ptr, gram_log2_ptr, slot, row, begin, first, stop, group, ngroups,
                stride_B_batch, stride_B_token, stride_B_group, stride_C_batch, stride_C_token, stride_C_group,
                stride_seq_idx_batch, stride_seq_idx_token, stride_B_dstate, stride_C_dstate, DSTATE, BLOCK_CHUNK,
                BLOCK_DSTATE, UNIT, WIDE, DOT, PRECISION,
            )  # fmt: skip
        else:
            first_head = ((program - ngrams) % nblocks_heads) * BLOCK_HEADS
            _write_vectors(
                dt_ptr, A_ptr, dt_bias_ptr, seq_idx_ptr, vectors_ptr, exit_ptr, slot, row, begin, first, stop,
                first_head, nheads, stride_dt_batch, stride_dt_token, stride_dt_head, stride_A, stride_dt_bias,
                stride_seq_idx_batch, stride_seq_idx_token, dt_low, dt_high, DT_SOFTPLUS, SPLIT_SUM,
                gram_ptr.dtype.element_ty == tl.float16, NVECTORS, BLOCK_CHUNK, BLOCK_HEADS,
            )  # fmt: skip
