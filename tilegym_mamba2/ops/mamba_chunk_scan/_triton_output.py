"""The Triton kernel of the fused forward that walks over the blocks of a segment with the state in registers.

    y[i] = exp(a[i]) * H @ C[i] + sum(gram[i, j] * exp(a[i] - a[j]) * d[j] * x[j] for j <= i) + D * x[i]

A program owns a segment, for a head and a tile of headdim, with all of dstate. x and z are read once; B, C and the gram
again for each head of the group and tile of headdim.
"""

import triton
import triton.language as tl

from tilegym_mamba2.backends._triton_math import changes_at, is_finite, silu, to_operand, wait_for_previous
from tilegym_mamba2.ops.mamba_chunk_scan._triton_blocks import (
    BIAS_LOG2,
    FLOAT16_SCALE,
    FROM_ENTRY,
    SUM_LOG2,
    SUM_LOG2_LOW,
    TIME_STEP,
    TO_EXIT,
    advance,
    load_tile,
    segment_first,
    slots_of_sequence,
    tile_source,
)
from tilegym_mamba2.ops.mamba_chunk_scan._triton_segment import sum_part

# Larger exponents occur only where the weight is masked to 0, which 2**126 keeps 0 and infinity would make NaN.
_MAX_LOG2 = tl.constexpr(126.0)


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
    gram_log2_ptr,
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
    COMPENSATED: tl.constexpr,
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

    With float16 products that is how an operand that overflowed shows itself: as the bits of a float16, which are in
    order, infinity and NaN above all others; it is 0 otherwise.
    """
    if tl.float16 == DOT:
        SCALE: tl.constexpr = FLOAT16_SCALE
        peak = tl.zeros((BLOCK_HEADDIM,), tl.int32)
    else:
        SCALE: tl.constexpr = tl.constexpr(1.0)
        peak = 0
    position = tl.arange(0, BLOCK_CHUNK)
    headdims = headdim_first + tl.arange(0, BLOCK_HEADDIM)
    for c in tl.range(part_first, part_stop, num_stages=NUM_STAGES):
        first = c * BLOCK_CHUNK
        block = (slot + c) * nheads + head
        vectors = vectors_ptr + block.to(tl.int64) * (NVECTORS * BLOCK_CHUNK)
        x = load_tile(
            x_source, first, length, headdim_first, x_token, stride_x_headdim, HEADDIM, BLOCK_CHUNK, BLOCK_HEADDIM,
            USE_TMA, WIDE, DOT,
        )  # (chunk, headdim)  # fmt: skip
        C = load_tile(
            C_source, first, length, 0, C_token, stride_C_dstate, DSTATE, BLOCK_CHUNK, BLOCK_DSTATE, USE_TMA, WIDE, DOT,
        )  # (chunk, dstate)  # fmt: skip
        gram_row = ((slot + c) * ngroups + group).to(tl.int64) * BLOCK_CHUNK
        gram_ptrs = gram_ptr + gram_row * BLOCK_CHUNK + position[:, None] * BLOCK_CHUNK + position[None, :]
        gram = tl.load(gram_ptrs)  # (chunk i, chunk j)
        sums = tl.load(vectors + SUM_LOG2 * BLOCK_CHUNK + position)  # (chunk,)
        if gram_ptr.dtype.element_ty == tl.float16:
            bias = tl.load(vectors + BIAS_LOG2 * BLOCK_CHUNK + position)
            exponent = (sums + tl.load(gram_log2_ptr + gram_row + position))[:, None] - bias[None, :]
        else:
            exponent = sums[:, None] - sums[None, :]
        if SPLIT_SUM:
            low = tl.load(vectors + SUM_LOG2_LOW * BLOCK_CHUNK + position)
            exponent += low[:, None] - low[None, :]
        weight = gram.to(tl.float32) * tl.exp2(tl.minimum(exponent, _MAX_LOG2))  # (chunk i, chunk j)
        if gram_ptr.dtype.element_ty != tl.float16:
            weight *= tl.load(vectors + TIME_STEP * BLOCK_CHUNK + position)[None, :]
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
        from_entry = tl.load(vectors + FROM_ENTRY * BLOCK_CHUNK + position) * (1.0 / SCALE)
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
        B = load_tile(
            B_source, first, length, 0, B_token, stride_B_dstate, DSTATE, BLOCK_CHUNK, BLOCK_DSTATE, USE_TMA, WIDE, DOT,
        )  # (chunk, dstate)  # fmt: skip
        decay = tl.load(exit_ptr + block)
        to_exit = tl.load(vectors + TO_EXIT * BLOCK_CHUNK + position) * SCALE  # (chunk,)
        state = advance(state, x, B, to_exit, decay, COMPENSATED, CAREFUL, DOT, PRECISION)

        if HAS_D:
            y += tl.trans(x).to(tl.float32) * D[:, None]
        if tl.float16 == DOT:
            bits = y.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) & 0x7FFF
            # What follows a packed sequence in its last tile is none of its business.
            bits = tl.where((first + position < length)[None, :], bits, 0)
            peak = tl.maximum(peak, tl.max(bits, axis=1))
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
            tiles, row, tile_head, begin = out_sink
            y_tile = y.to(out_base.dtype.element_ty).reshape(1, 1, BLOCK_CHUNK, BLOCK_HEADDIM)
            tiles.store([row, tile_head, begin + first, headdim_first], y_tile)
        else:
            out_ptrs = out_base + tokens[:, None] * (nheads * HEADDIM) + headdims[None, :]
            tl.store(out_ptrs, y.to(out_base.dtype.element_ty), mask=inside)
    return state, peak


@triton.jit
def scan_item(
    pair,
    segment,
    nsegments,
    headdim_first,
    x_ptr,
    B_ptr,
    C_ptr,
    z_ptr,
    D_ptr,
    initial_ptr,
    seq_idx_ptr,
    cu_seqlens_ptr,
    gram_ptr,
    gram_log2_ptr,
    vectors_ptr,
    exit_ptr,
    part_states_ptr,
    part_decay_ptr,
    out_ptr,
    final_ptr,
    x_tiles,
    B_tiles,
    C_tiles,
    out_tiles,
    seqlen,
    nheads,
    ngroups,
    nslots_row,
    nparts_segment,
    nparts,
    skew,
    first_pair,
    stride_x_batch,
    stride_x_token,
    stride_x_head,
    stride_B_batch,
    stride_B_token,
    stride_B_group,
    stride_C_batch,
    stride_C_token,
    stride_C_group,
    stride_z_batch,
    stride_z_token,
    stride_z_head,
    stride_D_head,
    stride_D_headdim,
    stride_initial_batch,
    stride_initial_head,
    stride_initial_headdim,
    stride_initial_dstate,
    stride_seq_idx_batch,
    stride_seq_idx_token,
    stride_x_headdim,
    stride_B_dstate,
    stride_C_dstate,
    stride_z_headdim,
    HEADDIM: tl.constexpr,
    DSTATE: tl.constexpr,
    SPLIT_SUM: tl.constexpr,
    COMPENSATED: tl.constexpr,
    NVECTORS: tl.constexpr,
    BLOCK_CHUNK: tl.constexpr,
    BLOCK_HEADDIM: tl.constexpr,
    BLOCK_DSTATE: tl.constexpr,
    UNIT: tl.constexpr,
    Z_UNIT: tl.constexpr,
    WIDE: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    AGAIN: tl.constexpr,
):
    """Walks over a segment for a head and a tile of headdim: writes its outputs, and the final state if it is the last.

    The second walk, with selections and with float16 operands that fit, is for what met something not finite. AGAIN
    says that this is known, and leaves the first out.
    """
    USE_TMA: tl.constexpr = x_tiles is not None
    sequence = pair // nheads
    head = pair % nheads
    group = head // (nheads // ngroups)
    row, begin, length, slot, nslots = slots_of_sequence(
        cu_seqlens_ptr, sequence, seqlen, nslots_row, BLOCK_CHUNK, cu_seqlens_ptr is not None
    )
    walk_first = segment_first(segment, nsegments, nslots, skew)
    walk_stop = segment_first(segment + 1, nsegments, nslots, skew)

    x_token = stride_x_token * UNIT
    B_token = stride_B_token * UNIT
    C_token = stride_C_token * UNIT
    head_long = head.to(tl.int64)
    out_base = out_ptr + ((row * seqlen + begin) * nheads + head) * HEADDIM
    x_source = tile_source(x_ptr, x_tiles, row, begin, head, stride_x_batch * UNIT, x_token, stride_x_head * UNIT)
    B_source = tile_source(B_ptr, B_tiles, row, begin, group, stride_B_batch * UNIT, B_token, stride_B_group * UNIT)
    C_source = tile_source(C_ptr, C_tiles, row, begin, group, stride_C_batch * UNIT, C_token, stride_C_group * UNIT)
    if out_tiles is not None:
        out_sink = (out_tiles, row.to(tl.int32), head, begin.to(tl.int32))
    elif USE_TMA:  # the last block of a packed sequence must leave the next one's tokens alone
        stride_token = nheads.to(tl.int64) * HEADDIM
        tiles = tl.make_tensor_descriptor(
            out_ptr,
            shape=[1, nheads, (begin + length).to(tl.int32), HEADDIM],
            strides=[stride_token, HEADDIM, stride_token, 1],
            block_shape=[1, 1, BLOCK_CHUNK, BLOCK_HEADDIM],
        )
        out_sink = (tiles, 0, head, begin.to(tl.int32))
    else:
        out_sink = out_base
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

    if tl.float16 == DOT:
        SCALE: tl.constexpr = FLOAT16_SCALE
    else:
        SCALE: tl.constexpr = tl.constexpr(1.0)
    if AGAIN:
        state = tl.zeros((BLOCK_HEADDIM, BLOCK_DSTATE), tl.float32)
        finite = 0
    else:
        state = _entry_state(
            initial_base, part_states_ptr, part_decay_ptr, offsets_initial, offsets, inside, first_part,
            segment * nparts_segment, HEADDIM, DSTATE, BLOCK_HEADDIM, BLOCK_DSTATE,
        )  # fmt: skip
        state, peak = _walk(
            state * SCALE, walk_first, walk_stop, x_source, B_source, C_source, z_base, D, seq_idx_base, gram_ptr,
            gram_log2_ptr, vectors_ptr, exit_ptr, out_base, out_sink, slot, length, nheads, head, ngroups, group,
            headdim_first, x_token, B_token, C_token, z_token, stride_seq_idx_token, stride_x_headdim, stride_B_dstate,
            stride_C_dstate, stride_z_headdim, HEADDIM, DSTATE, D_ptr is not None, z_ptr is not None,
            seq_idx_ptr is not None, SPLIT_SUM, COMPENSATED, NVECTORS, BLOCK_CHUNK, BLOCK_HEADDIM, BLOCK_DSTATE, WIDE,
            USE_TMA, DOT, PRECISION, NUM_STAGES, False,
        )  # fmt: skip
        finite = tl.min(is_finite(state).to(tl.int32))
        if tl.float16 == DOT:
            finite = tl.minimum(finite, (tl.max(peak) < 0x7C00).to(tl.int32))
    if finite == 0:
        state = _entry_state(
            initial_base, part_states_ptr, part_decay_ptr, offsets_initial, offsets, inside, first_part,
            segment * nparts_segment, HEADDIM, DSTATE, BLOCK_HEADDIM, BLOCK_DSTATE,
        )  # fmt: skip
        state *= SCALE
        if AGAIN and nparts_segment == 0:  # there are no parts: the first walk has made its entry state itself
            state, _ = sum_part(
                state, 0, walk_first, x_source, B_source, vectors_ptr, exit_ptr, slot, length, nheads, head,
                headdim_first, 0, x_token, B_token, stride_x_headdim, stride_B_dstate, HEADDIM, DSTATE, NVECTORS,
                BLOCK_CHUNK, BLOCK_HEADDIM, BLOCK_DSTATE, 1, COMPENSATED, WIDE, USE_TMA, DOT, PRECISION, 1, True,
            )  # fmt: skip
        state, _ = _walk(
            state, walk_first, walk_stop, x_source, B_source, C_source, z_base, D, seq_idx_base, gram_ptr,
            gram_log2_ptr, vectors_ptr, exit_ptr, out_base, out_sink, slot, length, nheads, head, ngroups, group,
            headdim_first, x_token, B_token, C_token, z_token, stride_seq_idx_token, stride_x_headdim, stride_B_dstate,
            stride_C_dstate, stride_z_headdim, HEADDIM, DSTATE, D_ptr is not None, z_ptr is not None,
            seq_idx_ptr is not None, SPLIT_SUM, COMPENSATED, NVECTORS, BLOCK_CHUNK, BLOCK_HEADDIM, BLOCK_DSTATE, WIDE,
            USE_TMA, DOT, PRECISION, 1, True,
        )  # fmt: skip
    if segment == nsegments - 1:
        final = (sequence.to(tl.int64) * nheads + head) * HEADDIM * DSTATE
        tl.store(final_ptr + final + offsets, state * (1.0 / SCALE), mask=inside)


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
    gram_log2_ptr,
    vectors_ptr,
    exit_ptr,
    part_states_ptr,
    part_decay_ptr,
    out_ptr,
    final_ptr,
    x_tiles,
    B_tiles,
    C_tiles,
    out_tiles,
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
    COMPENSATED: tl.constexpr,
    NVECTORS: tl.constexpr,
    BLOCK_CHUNK: tl.constexpr,
    BLOCK_HEADDIM: tl.constexpr,
    BLOCK_DSTATE: tl.constexpr,
    UNIT: tl.constexpr,
    Z_UNIT: tl.constexpr,
    WIDE: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_previous(EARLY)
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
    scan_item(
        pair, segment, nsegments, headdim_first, x_ptr, B_ptr, C_ptr, z_ptr, D_ptr, initial_ptr, seq_idx_ptr,
        cu_seqlens_ptr, gram_ptr, gram_log2_ptr, vectors_ptr, exit_ptr, part_states_ptr, part_decay_ptr, out_ptr,
        final_ptr, x_tiles, B_tiles, C_tiles, out_tiles, seqlen, nheads, ngroups, nslots_row, nparts_segment, nparts, 0,
        first_pair, stride_x_batch, stride_x_token, stride_x_head, stride_B_batch, stride_B_token, stride_B_group,
        stride_C_batch, stride_C_token, stride_C_group, stride_z_batch, stride_z_token, stride_z_head, stride_D_head,
        stride_D_headdim, stride_initial_batch, stride_initial_head, stride_initial_headdim, stride_initial_dstate,
        stride_seq_idx_batch, stride_seq_idx_token, stride_x_headdim, stride_B_dstate, stride_C_dstate,
        stride_z_headdim, HEADDIM, DSTATE, SPLIT_SUM, COMPENSATED, NVECTORS, BLOCK_CHUNK, BLOCK_HEADDIM, BLOCK_DSTATE,
        UNIT, Z_UNIT, WIDE, DOT, PRECISION, NUM_STAGES, False,
    )  # fmt: skip
