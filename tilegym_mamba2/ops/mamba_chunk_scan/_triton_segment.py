"""The Triton kernel of the fused forward that cuts sequences: what each part of a segment adds to the state.

    H = exp(a[last]) * H + sum(exp(a[last] - a[j]) * d[j] * x[j] (outer) B[j] for j), from H = 0, block after block

A program owns a part, for a head and a tile of the state. x is read again for each tile of dstate, B for each head and
tile of headdim. Parts are few and wait for memory most of the time: so this kernel makes the grams too, in programs of
their own. Blocks of long parts that the segment's end has forgotten, their decay being 0 as a float32, are not read.
"""

import triton
import triton.language as tl

from tilegym_mamba2.backends._triton_math import is_finite, launch_next, wait_for_previous
from tilegym_mamba2.ops.mamba_chunk_scan._triton_blocks import (
    FLOAT16_SCALE,
    TO_EXIT,
    advance,
    load_tile,
    slots_of_sequence,
    tile_source,
)
from tilegym_mamba2.ops.mamba_chunk_scan._triton_prepare import block_of_slot, write_gram

_WINDOW = tl.constexpr(64)
_FORGOTTEN_LOG2 = tl.constexpr(-150.0)
# To find out what is remembered takes as long as a few slots.
_WORTH_ASKING = tl.constexpr(8)


@triton.jit
def _part(nslots, nsegments, nparts_segment, index):
    """Slots relative to the sequence: first and stop of part `index`, first and stop of the segment that it is of.

    Segments of equal size are cut into parts of equal size.
    """
    segment_slots = tl.cdiv(nslots, nsegments)
    part_slots = tl.cdiv(segment_slots, nparts_segment)
    segment = index // nparts_segment
    segment_first = segment * segment_slots
    segment_stop = tl.minimum(segment_first + segment_slots, nslots)
    first = segment_first + (index % nparts_segment) * part_slots
    return first, tl.minimum(first + part_slots, segment_stop), segment_first, segment_stop


@triton.jit
def _first_remembered(exit_ptr, segment_first, segment_stop, nheads):
    """The first slot that the state at a segment's end remembers, or segment_first; exit_ptr is of its sequence.

    A decay over several slots that a float32 can't hold is 0, as one over a slot is. Only the last _WINDOW are asked.
    """
    index = segment_stop - _WINDOW + tl.arange(0, _WINDOW)
    decay = tl.load(exit_ptr + index * nheads, mask=index >= segment_first, other=1.0)
    # A decay may be 0, and infinities can't be subtracted; one that is none makes all before it remembered.
    decay_log2 = tl.where(decay <= 1.0, tl.maximum(tl.log2(decay), _FORGOTTEN_LOG2), 1e30)
    later_log2 = tl.cumsum(decay_log2, reverse=True) - decay_log2
    first = tl.min(tl.where(later_log2 > _FORGOTTEN_LOG2, index, segment_stop))
    return tl.where(first > segment_stop - _WINDOW, tl.maximum(first, segment_first), segment_first)


@triton.jit
def sum_part(
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
    COMPENSATED: tl.constexpr,
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
        x = load_tile(
            x_source, c * BLOCK_CHUNK, length, headdim_first, x_token, stride_x_headdim, HEADDIM, STEP, BLOCK_HEADDIM,
            USE_TMA, WIDE, DOT,
        )  # (step, headdim)  # fmt: skip
        B = load_tile(
            B_source, c * BLOCK_CHUNK, length, dstate_first, B_token, stride_B_dstate, DSTATE, STEP, BLOCK_DSTATE,
            USE_TMA, WIDE, DOT,
        )  # (step, dstate)  # fmt: skip
        block = (slot + c) * nheads + head
        decay = tl.load(exit_ptr + block)
        offsets = (position // BLOCK_CHUNK * nheads * NVECTORS + TO_EXIT) * BLOCK_CHUNK + position % BLOCK_CHUNK
        vectors = vectors_ptr + block.to(tl.int64) * (NVECTORS * BLOCK_CHUNK)
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
            to_exit *= FLOAT16_SCALE
        state = advance(state, x, B, to_exit, decay, COMPENSATED, CAREFUL, DOT, PRECISION)
        total_decay *= decay
    return state, total_decay


@triton.jit
def _write_part(
    x_ptr,
    B_ptr,
    cu_seqlens_ptr,
    vectors_ptr,
    exit_ptr,
    part_states_ptr,
    part_decay_ptr,
    x_tiles,
    B_tiles,
    program,
    seqlen,
    nheads,
    heads_per_group,
    nslots_row,
    nsegments,
    nparts_segment,
    nparts,
    first_pair,
    npairs,
    stride_x_batch,
    stride_x_token,
    stride_x_head,
    stride_B_batch,
    stride_B_token,
    stride_B_group,
    stride_x_headdim,
    stride_B_dstate,
    HEADDIM: tl.constexpr,
    DSTATE: tl.constexpr,
    NVECTORS: tl.constexpr,
    BLOCK_CHUNK: tl.constexpr,
    BLOCK_HEADDIM: tl.constexpr,
    BLOCK_DSTATE: tl.constexpr,
    PAIR: tl.constexpr,
    COMPENSATED: tl.constexpr,
    UNIT: tl.constexpr,
    WIDE: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    EARLY: tl.constexpr,
):
    nblocks_headdim = tl.cdiv(HEADDIM, BLOCK_HEADDIM)
    nblocks_dstate = tl.cdiv(DSTATE, BLOCK_DSTATE)
    dstate_first = (program % nblocks_dstate) * BLOCK_DSTATE
    program = program // nblocks_dstate
    headdim_first = (program % nblocks_headdim) * BLOCK_HEADDIM
    program = program // nblocks_headdim
    index = program // npairs
    pair = program % npairs
    sequence = (first_pair + pair) // nheads
    head = (first_pair + pair) % nheads
    row, begin, length, slot, nslots = slots_of_sequence(
        cu_seqlens_ptr, sequence, seqlen, nslots_row, BLOCK_CHUNK, cu_seqlens_ptr is not None
    )
    part_first, part_stop, segment_first, segment_stop = _part(nslots, nsegments, nparts_segment, index)

    x_token = stride_x_token * UNIT
    B_token = stride_B_token * UNIT
    group = head // heads_per_group
    x_source = tile_source(x_ptr, x_tiles, row, begin, head, stride_x_batch * UNIT, x_token, stride_x_head * UNIT)
    B_source = tile_source(B_ptr, B_tiles, row, begin, group, stride_B_batch * UNIT, B_token, stride_B_group * UNIT)
    USE_TMA: tl.constexpr = x_tiles is not None
    state = tl.zeros((BLOCK_HEADDIM, BLOCK_DSTATE), tl.float32)  # (headdim, dstate)
    wait_for_previous(EARLY)
    walk_first = part_first
    if part_stop - part_first > _WORTH_ASKING:
        exits = exit_ptr + slot * nheads + head
        walk_first = tl.maximum(part_first, _first_remembered(exits, segment_first, segment_stop, nheads))
    state, decay = sum_part(
        state, walk_first, part_stop, x_source, B_source, vectors_ptr, exit_ptr, slot, length, nheads, head,
        headdim_first, dstate_first, x_token, B_token, stride_x_headdim, stride_B_dstate, HEADDIM, DSTATE, NVECTORS,
        BLOCK_CHUNK, BLOCK_HEADDIM, BLOCK_DSTATE, PAIR, COMPENSATED, WIDE, USE_TMA, DOT, PRECISION, NUM_STAGES, False,
    )  # fmt: skip
    if tl.min(is_finite(state).to(tl.int32)) == 0:
        state = tl.zeros((BLOCK_HEADDIM, BLOCK_DSTATE), tl.float32)
        state, decay = sum_part(
            state, walk_first, part_stop, x_source, B_source, vectors_ptr, exit_ptr, slot, length, nheads, head,
            headdim_first, dstate_first, x_token, B_token, stride_x_headdim, stride_B_dstate, HEADDIM, DSTATE,
            NVECTORS, BLOCK_CHUNK, BLOCK_HEADDIM, BLOCK_DSTATE, PAIR, COMPENSATED, WIDE, USE_TMA, DOT, PRECISION, 1,
            True,
        )  # fmt: skip
    if walk_first > part_first:
        decay = 0.0
    if tl.float16 == DOT:
        state *= 1.0 / FLOAT16_SCALE

    part = pair.to(tl.int64) * nparts + index
    headdims = headdim_first + tl.arange(0, BLOCK_HEADDIM)
    dstates = dstate_first + tl.arange(0, BLOCK_DSTATE)
    inside = (headdims < HEADDIM)[:, None] & (dstates < DSTATE)[None, :]
    offsets = headdims[:, None] * DSTATE + dstates[None, :]
    tl.store(part_states_ptr + part * (HEADDIM * DSTATE) + offsets, state, mask=inside)
    tl.store(part_decay_ptr + part, decay)


@triton.jit(
    do_not_specialize=[
        "seqlen", "nheads", "ngroups", "nseq", "nslots_row", "nsegments", "nparts_segment", "nparts", "first_pair",
        "npairs", "nprograms", "stride_x_batch", "stride_x_token", "stride_x_head", "stride_B_batch", "stride_B_token",
        "stride_B_group", "stride_C_batch", "stride_C_token", "stride_C_group", "stride_seq_idx_batch",
        "stride_seq_idx_token",
    ]
)  # fmt: skip
def _scan_segment_kernel(
    x_ptr,
    B_ptr,
    C_ptr,
    seq_idx_ptr,
    cu_seqlens_ptr,
    vectors_ptr,
    exit_ptr,
    gram_ptr,
    gram_log2_ptr,
    part_states_ptr,
    part_decay_ptr,
    x_tiles,
    B_tiles,
    seqlen: tl.int32,
    nheads: tl.int32,
    ngroups: tl.int32,
    nseq: tl.int32,
    nslots_row: tl.int32,
    nsegments: tl.int32,
    nparts_segment: tl.int32,
    nparts: tl.int32,
    first_pair: tl.int32,
    npairs: tl.int32,
    nprograms: tl.int32,  # of parts
    stride_x_batch: tl.int64,
    stride_x_token: tl.int64,
    stride_x_head: tl.int64,
    stride_B_batch: tl.int64,
    stride_B_token: tl.int64,
    stride_B_group: tl.int64,
    stride_C_batch: tl.int64,
    stride_C_token: tl.int64,
    stride_C_group: tl.int64,
    stride_seq_idx_batch: tl.int64,
    stride_seq_idx_token: tl.int64,
    stride_x_headdim,
    stride_B_dstate,
    stride_C_dstate,
    HEADDIM: tl.constexpr,
    DSTATE: tl.constexpr,
    NVECTORS: tl.constexpr,
    BLOCK_CHUNK: tl.constexpr,
    BLOCK_HEADDIM: tl.constexpr,
    BLOCK_DSTATE: tl.constexpr,
    GRAM_DSTATE: tl.constexpr,
    PAIR: tl.constexpr,
    COMPENSATED: tl.constexpr,
    UNIT: tl.constexpr,
    WIDE: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    EARLY: tl.constexpr,
):
    launch_next(EARLY)
    program = tl.program_id(0)
    if program < nprograms:
        _write_part(
            x_ptr, B_ptr, cu_seqlens_ptr, vectors_ptr, exit_ptr, part_states_ptr, part_decay_ptr, x_tiles, B_tiles,
            program, seqlen, nheads, nheads // ngroups, nslots_row, nsegments, nparts_segment, nparts, first_pair,
            npairs, stride_x_batch, stride_x_token, stride_x_head, stride_B_batch, stride_B_token, stride_B_group,
            stride_x_headdim, stride_B_dstate, HEADDIM, DSTATE, NVECTORS, BLOCK_CHUNK, BLOCK_HEADDIM, BLOCK_DSTATE,
            PAIR, COMPENSATED, UNIT, WIDE, DOT, PRECISION, NUM_STAGES, EARLY,
        )  # fmt: skip
    else:
        # Nothing of it depends on the launch before, so it does not wait; parts do, so that this launch ends after it.
        slot = (program - nprograms) // ngroups
        group = ((program - nprograms) % ngroups).to(tl.int64)
        row, begin, first, stop = block_of_slot(
            cu_seqlens_ptr, slot, seqlen, nseq, nslots_row, BLOCK_CHUNK, cu_seqlens_ptr is not None
        )
        if first < stop:
            write_gram(
                B_ptr, C_ptr, seq_idx_ptr, gram_ptr, gram_log2_ptr, slot, row, begin, first, stop, group, ngroups,
                stride_B_batch, stride_B_token, stride_B_group, stride_C_batch, stride_C_token, stride_C_group,
                stride_seq_idx_batch, stride_seq_idx_token, stride_B_dstate, stride_C_dstate, DSTATE, BLOCK_CHUNK,
                GRAM_DSTATE, UNIT, WIDE, DOT, PRECISION,
            )  # fmt: skip
