"""The three cuTile kernels of the fused forward; cutile_.py tells what they compute together.

Decays are in log2 units relative to the chunk's entry: a_log2[i] = log2(e) * sum(d[j] * A for j <= i) <= 0. Every
exponent below is at most log2(d), so nothing overflows however fast a head forgets.
"""

import cuda.tile as ct

from tilegym_mamba2.backends._cutile_math import FLOAT32, LOG2E, as_operand, softplus

CHUNK = 64
# A chunk's decays are rows of one array: one copy and one barrier bring them all.
A_LOG2, D_LOG2, FROM_ENTRY, TO_END, A_LOW_LOG2 = range(5)
ROWS, ROWS_PRECISE = 4, 8
# What skip connection a call has.
NO_SKIP, SKIP_OF_HEAD, SKIP_OF_CHANNEL = range(3)

_ZERO = ct.PaddingMode.ZERO
_LARGEST = 3.3895313892515355e38  # the largest bfloat16, exact in TF32 too
_NEVER_LOG2 = -1e30  # exp2 of it is 0, and its sums and differences are finite
_FORGOTTEN_LOG2 = -200.0  # a decay that leaves nothing in float32; a stronger one would only cost the sum its precision


def _product(left, right, accumulator, OPERAND: ct.Constant[int]):
    """accumulator + left @ right; float32 operands as three TF32 products, whose error is that of float32."""
    if OPERAND == FLOAT32:
        left_high = left.astype(ct.tfloat32)
        left_low = (left - left_high.astype(ct.float32)).astype(ct.tfloat32)
        right_high = right.astype(ct.tfloat32)
        right_low = (right - right_high.astype(ct.float32)).astype(ct.tfloat32)
        result = ct.mma(left_low, right_high, ct.mma(left_high, right_low, accumulator))
        result = ct.mma(left_high, right_high, result)
    else:
        result = ct.mma(as_operand(left, OPERAND), as_operand(right, OPERAND), accumulator)
    return result


def _finite(tile):
    """NaN and infinities as the largest finite number, so that a weight of 0 stops them."""
    if tile.dtype == ct.float16:
        tile = tile.astype(ct.float32)
    return ct.minimum(ct.maximum(tile, -_LARGEST), _LARGEST)


def _silu(v):
    rest = ct.exp2(v * -LOG2E, flush_to_zero=True)
    return ct.truediv(v, rest + 1.0, rounding_mode=ct.RoundingMode.APPROX, flush_to_zero=True)


def _chunk_of_slot(slot, cu_seqlens):
    """First token of a slot's chunk, and the first and the end of its sequence."""
    sequence = 0
    beyond = cu_seqlens.shape[0] - 1
    while beyond - sequence > 1:
        middle = (sequence + beyond) // 2
        if ct.load(cu_seqlens, (middle,), ()).astype(ct.int32) // CHUNK + middle <= slot:
            sequence = middle
        else:
            beyond = middle
    sequence_start = ct.load(cu_seqlens, (sequence,), ()).astype(ct.int32)
    stop = ct.load(cu_seqlens, (sequence + 1,), ()).astype(ct.int32)
    start = sequence_start + (slot - sequence_start // CHUNK - sequence) * CHUNK
    return start, sequence_start, stop


def _runs_of_chunk(seq_idx, batch, start, sequence_start, stop):
    """How many times the id has changed since the token before a chunk, (CHUNK,); what is past the end changes nothing.

    Tokens of run 0 belong to the sequence that enters, those of the last token's run to the one that leaves.
    """
    tokens = start + ct.arange(CHUNK, dtype=ct.int32)  # (CHUNK,)
    ids = ct.gather(seq_idx, (batch, tokens))  # (CHUNK,)
    before = ct.gather(seq_idx, (batch, ct.maximum(tokens - 1, sequence_start)))  # (CHUNK,)
    return ct.cumsum(ct.where((tokens < stop) & (ids != before), 1, 0))


def _tokens(array, batch, start, row, column, CHANNELS: ct.Constant[int], VARLEN: ct.Constant[bool]):
    """A chunk of (batch, seqlen, row, channels), zero past the array's end, (CHUNK, CHANNELS).

    A packed sequence's chunk may begin anywhere and end among the next sequence's tokens, which come too: a slice would
    have every program write a descriptor for the copy.
    """
    if VARLEN:
        view = array.tiled_view((1, CHUNK, 1, CHANNELS), padding_mode=_ZERO, traversal_steps=(1, 1, 1, CHANNELS))
        tile = view.load((batch, start, row, column), latency=8)
    else:
        index = (batch, start // CHUNK, row, column)
        tile = ct.load(array, index, (1, CHUNK, 1, CHANNELS), padding_mode=_ZERO, latency=8)
    return tile.reshape((CHUNK, CHANNELS))


def _write_decays(
    program,
    dt,
    A,
    dt_bias,
    seq_idx,
    cu_seqlens,
    decays,
    low,
    high,
    seqlen,
    BLOCK_HEADS: ct.Constant[int],
    HAS_BIAS: ct.Constant[bool],
    SOFTPLUS: ct.Constant[bool],
    ISOLATED: ct.Constant[bool],
    VARLEN: ct.Constant[bool],
    PRECISE: ct.Constant[bool],
):
    nslots = decays.shape[2]
    head_blocks = ct.cdiv(decays.shape[1], BLOCK_HEADS)
    head_block = program % head_blocks
    slot = program // head_blocks % nslots
    batch = program // head_blocks // nslots
    start = slot * CHUNK
    sequence_start = 0
    stop = seqlen
    if VARLEN:
        start, sequence_start, stop = _chunk_of_slot(slot, cu_seqlens)
    if start < stop:
        # One head's tokens are nheads apart: a tile of several heads reads whole sectors.
        shape = (1, CHUNK, BLOCK_HEADS)
        if VARLEN:
            view = dt.tiled_view(shape, padding_mode=_ZERO, traversal_steps=(1, 1, BLOCK_HEADS))
            tile = view.load((batch, start, head_block))
        else:
            tile = ct.load(dt, (batch, slot, head_block), shape, padding_mode=_ZERO)
        d = tile.reshape((CHUNK, BLOCK_HEADS)).transpose().astype(ct.float32)  # (BLOCK_HEADS, CHUNK)
        if HAS_BIAS:
            bias = ct.load(dt_bias, (head_block,), (BLOCK_HEADS,), padding_mode=_ZERO)  # (BLOCK_HEADS,)
            d = d + bias.astype(ct.float32)[:, None]
        if SOFTPLUS:
            d = softplus(d)
        # Selections and not minimum and maximum, which would drop a NaN.
        d = ct.where(d < low, low, d)
        d = ct.where(d > high, high, d)
        d = ct.where(start + ct.arange(CHUNK, dtype=ct.int32)[None, :] < stop, d, 0.0)
        poison = d * 0.0  # (BLOCK_HEADS, CHUNK), 0 or NaN
        clean = ct.where(poison == 0.0, d, 0.0)  # (BLOCK_HEADS, CHUNK)

        rate = ct.load(A, (head_block,), (BLOCK_HEADS,), padding_mode=_ZERO).astype(ct.float32)  # (BLOCK_HEADS,)
        step = clean if ISOLATED else d + poison  # (BLOCK_HEADS, CHUNK)
        if PRECISE:
            step_log2 = step.astype(ct.float64) * (rate.astype(ct.float64) * LOG2E)[:, None]  # (BLOCK_HEADS, CHUNK)
            exact = ct.cumsum(ct.where(step_log2 < _FORGOTTEN_LOG2, _FORGOTTEN_LOG2, step_log2), 1)
            a_log2 = exact.astype(ct.float32)  # (BLOCK_HEADS, CHUNK)
            low_log2 = (exact - a_log2.astype(ct.float64)).astype(ct.float32)  # (BLOCK_HEADS, CHUNK)
            end = ct.extract(exact, (0, CHUNK - 1), (BLOCK_HEADS, 1))
            to_end_log2 = (end - exact).astype(ct.float32)  # (BLOCK_HEADS, CHUNK)
            from_entry = ct.exp2(a_log2) * ct.exp2(low_log2)  # (BLOCK_HEADS, CHUNK)
        else:
            step_log2 = step * (rate * LOG2E)[:, None]  # (BLOCK_HEADS, CHUNK)
            a_log2 = ct.cumsum(ct.where(step_log2 < _FORGOTTEN_LOG2, _FORGOTTEN_LOG2, step_log2), 1)
            to_end_log2 = ct.extract(a_log2, (0, CHUNK - 1), (BLOCK_HEADS, 1)) - a_log2
            from_entry = ct.exp2(a_log2)  # (BLOCK_HEADS, CHUNK)
        to_end = d * ct.exp2(to_end_log2)  # (BLOCK_HEADS, CHUNK)
        if ISOLATED:
            run = _runs_of_chunk(seq_idx, batch, start, sequence_start, stop)  # (CHUNK,)
            place = ct.arange(CHUNK, dtype=ct.int32)  # (CHUNK,)
            after = (run[:, None] == run[None, :]) & (place[:, None] <= place[None, :])  # (CHUNK, CHUNK)
            spoilt = ct.mma(
                ct.where(poison == 0.0, 0.0, 1.0).astype(ct.bfloat16),
                after.astype(ct.bfloat16),
                ct.zeros((BLOCK_HEADS, CHUNK), ct.float32),
            )  # (BLOCK_HEADS, CHUNK), how many tokens of the run so far are not finite
            from_entry = ct.where((run == 0)[None, :], from_entry, 0.0)
            from_entry = ct.where(spoilt > 0.0, float("nan"), from_entry)
            to_end = ct.where((run == ct.extract(run, (CHUNK - 1,), (1,)))[None, :], to_end, 0.0)

        shape = (1, BLOCK_HEADS, 1, 1, CHUNK)
        ct.store(decays, (batch, head_block, slot, A_LOG2, 0), a_log2.reshape(shape))
        if PRECISE:
            ct.store(decays, (batch, head_block, slot, D_LOG2, 0), clean.reshape(shape))
            ct.store(decays, (batch, head_block, slot, A_LOW_LOG2, 0), low_log2.reshape(shape))
        else:
            d_log2 = ct.where(clean > 0.0, ct.log2(clean), _NEVER_LOG2)  # (BLOCK_HEADS, CHUNK)
            ct.store(decays, (batch, head_block, slot, D_LOG2, 0), d_log2.reshape(shape))
        ct.store(decays, (batch, head_block, slot, FROM_ENTRY, 0), from_entry.reshape(shape))
        ct.store(decays, (batch, head_block, slot, TO_END, 0), to_end.reshape(shape))


def _write_products(
    program,
    B,
    C,
    seq_idx,
    cu_seqlens,
    products,
    B_kept,
    seqlen,
    BLOCK_DSTATE: ct.Constant[int],
    ISOLATED: ct.Constant[bool],
    VARLEN: ct.Constant[bool],
    OPERAND: ct.Constant[int],
):
    nslots, ngroups = products.shape[1], products.shape[2]
    group = program % ngroups
    slot = program // ngroups % nslots
    batch = program // ngroups // nslots
    start = slot * CHUNK
    sequence_start = 0
    stop = seqlen
    if VARLEN:
        start, sequence_start, stop = _chunk_of_slot(slot, cu_seqlens)
    if start < stop:
        place = ct.arange(CHUNK, dtype=ct.int32)  # (CHUNK,)
        seen = place[:, None] >= place[None, :]  # (CHUNK, CHUNK)
        leaves = start + place < stop  # (CHUNK,)
        if ISOLATED:
            run = _runs_of_chunk(seq_idx, batch, start, sequence_start, stop)  # (CHUNK,)
            leaves = leaves & (run == ct.extract(run, (CHUNK - 1,), (1,)))  # (CHUNK,)
            seen = seen & (run[:, None] == run[None, :])
        product = ct.zeros((CHUNK, CHUNK), ct.float32)
        for block in range(ct.cdiv(B.shape[3], BLOCK_DSTATE)):
            C_tile = _tokens(C, batch, start, group, block, BLOCK_DSTATE, VARLEN)
            B_tile = _tokens(B, batch, start, group, block, BLOCK_DSTATE, VARLEN)
            product = _product(C_tile, B_tile.transpose(), product, OPERAND)
            if ISOLATED or VARLEN:
                kept = ct.where(leaves[:, None], B_tile, ct.zeros((CHUNK, BLOCK_DSTATE), B.dtype))
                ct.store(B_kept, (batch, slot, group, block), kept.reshape((1, CHUNK, 1, BLOCK_DSTATE)))
        product = ct.where(seen, product, 0.0).reshape((1, 1, 1, CHUNK, CHUNK))
        ct.store(products, (batch, slot, group, 0, 0), product)


@ct.kernel
def _prepare_kernel(
    dt,  # (batch, seqlen, nheads)
    A,  # (nheads,)
    dt_bias,  # (nheads,)
    B,  # (batch, seqlen, ngroups, dstate)
    C,  # (batch, seqlen, ngroups, dstate)
    seq_idx,  # (batch, seqlen)
    cu_seqlens,  # (nseq + 1,)
    decays,  # (batch, nheads, nslots, rows, CHUNK)
    products,  # (batch, nslots, ngroups, CHUNK, CHUNK)
    B_kept,  # (batch, nslots * CHUNK, ngroups, dstate)
    low: float,
    high: float,
    seqlen: int,
    nproducts: int,
    BLOCK_HEADS: ct.Constant[int],
    BLOCK_DSTATE: ct.Constant[int],
    HAS_BIAS: ct.Constant[bool],
    SOFTPLUS: ct.Constant[bool],
    ISOLATED: ct.Constant[bool],
    VARLEN: ct.Constant[bool],
    PRECISE: ct.Constant[bool],
    OPERAND: ct.Constant[int],
):
    ct.grid_dependency_control_launch_dependents()
    program = ct.bid(0)
    if program < nproducts:
        _write_products(
            program, B, C, seq_idx, cu_seqlens, products, B_kept, seqlen, BLOCK_DSTATE, ISOLATED, VARLEN, OPERAND
        )
    else:
        _write_decays(
            program - nproducts, dt, A, dt_bias, seq_idx, cu_seqlens, decays, low, high, seqlen, BLOCK_HEADS, HAS_BIAS,
            SOFTPLUS, ISOLATED, VARLEN, PRECISE,
        )  # fmt: skip


def _nearest_power_of_two(v):
    bits = ct.bitcast(v, ct.int32) + 0x400000  # half of a mantissa's range
    return ct.bitcast(bits & -0x800000, ct.float32)


def _next_state(
    state,
    x_t,
    B_tile,
    to_end,
    factor,
    SELECT: ct.Constant[bool],
    COMPENSATED: ct.Constant[bool],
    OPERAND: ct.Constant[int],
):
    """The state at a chunk's end, (BLOCK_HEADDIM, BLOCK_DSTATE), of that at its entry and x.T (BLOCK_HEADDIM, CHUNK).

    Only the left operand is computed: it goes from registers to the matrix unit, a right one through shared memory.
    COMPENSATED splits it in two, of which the larger is exact in 16 bits.
    """
    if SELECT:
        # What is not finite must not cross a boundary as 0 * NaN.
        state = ct.where(factor == 0.0, 0.0, state)
        x_t = ct.where(to_end[None, :] == 0.0, 0.0, x_t)
    if OPERAND == FLOAT32:
        # The matrix unit truncates its sums, which the recurrence would add up.
        added = _product(x_t * to_end[None, :], B_tile, ct.zeros(state.shape, ct.float32), OPERAND)
        state = state * factor + added
    elif COMPENSATED:
        power = _nearest_power_of_two(to_end)  # (CHUNK,)
        exact = as_operand(x_t, OPERAND) * as_operand(power, OPERAND)[None, :]  # (BLOCK_HEADDIM, CHUNK)
        state = _product(exact, B_tile, state * factor, OPERAND)
        state = _product(x_t * (to_end - power)[None, :], B_tile, state, OPERAND)
    else:
        state = _product(x_t * to_end[None, :], B_tile, state * factor, OPERAND)
    return state


def _decays_of_chunk(decays, batch, head, slot, PRECISE: ct.Constant[bool], LATENCY: ct.Constant[int]):
    """Rows of a chunk's decays, (ROWS or ROWS_PRECISE, CHUNK)."""
    rows = ROWS_PRECISE if PRECISE else ROWS
    return ct.load(decays, (batch, head, slot, 0, 0), (1, 1, 1, rows, CHUNK), latency=LATENCY).reshape((rows, CHUNK))


def _row(decays, ROW: ct.Constant[int]):
    return ct.extract(decays, (ROW, 0), (1, CHUNK)).reshape((CHUNK,))


def _state_after_chunk(
    state,
    x,
    B,
    decays,
    batch,
    head,
    group,
    head_block,
    column,
    chunk,
    BLOCK_HEADDIM: ct.Constant[int],
    BLOCK_DSTATE: ct.Constant[int],
    PRECISE: ct.Constant[bool],
    ISOLATED: ct.Constant[bool],
    COMPENSATED: ct.Constant[bool],
    OPERAND: ct.Constant[int],
):
    """The state after a chunk of a row of which nothing else is computed, and the factor of the state before it."""
    decay = _decays_of_chunk(decays, batch, head, chunk, PRECISE, 8)
    x_tile = _tokens(x, batch, chunk * CHUNK, head, head_block, BLOCK_HEADDIM, False)
    B_tile = _tokens(B, batch, chunk * CHUNK, group, column, BLOCK_DSTATE, False)
    factor = ct.extract(decay, (FROM_ENTRY, CHUNK - 1), (1, 1))
    x_t = x_tile.transpose().astype(ct.float32)  # (BLOCK_HEADDIM, CHUNK)
    return _next_state(state, x_t, B_tile, _row(decay, TO_END), factor, ISOLATED, COMPENSATED, OPERAND), factor


def _first_chunk(segment, segments, nchunks, skew):
    """The first chunk of a segment that finds its entry state itself; that of segment `segments` is the end."""
    equal = segment * ct.cdiv(nchunks, segments)
    return ct.minimum(equal + segment * (segments - segment) * skew // 256, nchunks)


def _quarter(part_states, part, quarter, HEADDIM: ct.Constant[int], DSTATE: ct.Constant[int]):
    return ct.load(part_states, (part, 0, quarter), (1, HEADDIM, DSTATE // 4)).reshape((HEADDIM, DSTATE // 4))


def _part_state(part_states, part, HEADDIM: ct.Constant[int], DSTATE: ct.Constant[int]):
    """The state of a part, (HEADDIM, DSTATE), in quarters: a buffer for all of it would take those of the main loop."""
    quarters = (
        _quarter(part_states, part, 0, HEADDIM, DSTATE),
        _quarter(part_states, part, 1, HEADDIM, DSTATE),
        _quarter(part_states, part, 2, HEADDIM, DSTATE),
        _quarter(part_states, part, 3, HEADDIM, DSTATE),
    )
    return ct.cat((ct.cat((quarters[0], quarters[1]), 1), ct.cat((quarters[2], quarters[3]), 1)), 1)


@ct.kernel
def _part_states_kernel(
    x,  # (batch, seqlen, nheads, headdim)
    B,  # (batch, seqlen, ngroups, dstate)
    decays,  # (batch, nheads, nslots, rows, CHUNK)
    part_states,  # (units * passes, BLOCK_HEADDIM, dstate padded)
    part_factors,  # (units * passes, 1)
    whole: int,  # units that are not cut
    nparts: int,  # of each other unit
    npasses: int,  # of these, the parts whose states are needed
    nchunks: int,
    BLOCK_HEADDIM: ct.Constant[int],
    BLOCK_DSTATE: ct.Constant[int],
    PRECISE: ct.Constant[bool],
    ISOLATED: ct.Constant[bool],
    COMPENSATED: ct.Constant[bool],
    OPERAND: ct.Constant[int],
):
    ct.grid_dependency_control_launch_dependents()
    ct.grid_dependency_control_wait()
    column = ct.bid(0) % ct.cdiv(B.shape[3], BLOCK_DSTATE)
    index = ct.bid(0) // ct.cdiv(B.shape[3], BLOCK_DSTATE)
    unit = whole + index // npasses
    part = index % npasses
    nheads = x.shape[2]
    head_blocks = ct.cdiv(x.shape[3], BLOCK_HEADDIM)
    head = unit % nheads
    head_block = unit // nheads % head_blocks
    batch = unit // nheads // head_blocks
    group = head // (nheads // B.shape[2])
    state = ct.zeros((BLOCK_HEADDIM, BLOCK_DSTATE), ct.float32)
    total = ct.ones((1, 1), ct.float32)
    for chunk in range(part * nchunks // nparts, (part + 1) * nchunks // nparts):
        state, factor = _state_after_chunk(
            state, x, B, decays, batch, head, group, head_block, column, chunk, BLOCK_HEADDIM, BLOCK_DSTATE, PRECISE,
            ISOLATED, COMPENSATED, OPERAND,
        )  # fmt: skip
        # What is not finite ends at a boundary too.
        total = ct.where(factor == 0.0, 0.0, total * factor) if ISOLATED else total * factor
    # A kernel that waits first and then loops does not compile with TMA for its last store.
    ct.store(part_states, (index, 0, column), state.reshape((1, BLOCK_HEADDIM, BLOCK_DSTATE)), allow_tma=False)
    if column == 0:
        ct.store(part_factors, (index, 0), total)


@ct.kernel
def _scan_kernel(
    x,  # (batch, seqlen, nheads, headdim)
    B,  # (batch, seqlen, ngroups, dstate)
    C,  # (batch, seqlen, ngroups, dstate)
    products,  # (batch, nslots, ngroups, CHUNK, CHUNK)
    decays,  # (batch, nheads, nslots, rows, CHUNK)
    D,  # (nheads,) or (nheads, headdim)
    z,  # (batch, seqlen, nheads, headdim)
    initial_states,  # (rows, nheads, headdim, dstate)
    part_states,  # (units * passes, BLOCK_HEADDIM, dstate padded)
    part_factors,  # (units * passes, 1)
    cu_seqlens,  # (nseq + 1,)
    out,  # (batch, seqlen, nheads, headdim)
    final_states,  # (rows, nheads, headdim, dstate)
    whole: int,  # units that are not cut
    nsegments: int,  # of each other unit
    parts_per_segment: int,
    skew: int,  # of segments; see _segments.py
    nchunks: int,
    BLOCK_HEADDIM: ct.Constant[int],
    BLOCK_DSTATE: ct.Constant[int],
    PRECISE: ct.Constant[bool],
    SKIP: ct.Constant[int],
    GATED: ct.Constant[bool],
    HAS_INITIAL: ct.Constant[bool],
    SEGMENTED: ct.Constant[bool],
    OWN_ENTRY: ct.Constant[bool],
    ISOLATED: ct.Constant[bool],
    VARLEN: ct.Constant[bool],
    COMPENSATED: ct.Constant[bool],
    OPERAND: ct.Constant[int],
):
    cut = SEGMENTED or OWN_ENTRY
    if cut:
        # Uncut it is launched when all before it has ended.
        ct.grid_dependency_control_wait()
    nheads = x.shape[2]
    head_blocks = ct.cdiv(x.shape[3], BLOCK_HEADDIM)
    unit = ct.bid(0)
    segment = 0
    segments = 1
    if cut and ct.bid(0) >= whole:
        unit = whole + (ct.bid(0) - whole) // nsegments
        segment = (ct.bid(0) - whole) % nsegments
        segments = nsegments
    head = unit % nheads
    head_block = unit // nheads % head_blocks
    row = unit // nheads // head_blocks  # a batch row, or a packed sequence
    group = head // (nheads // B.shape[2])
    batch = row
    first = 0
    stop = 0
    slot = 0
    if VARLEN:
        batch = 0
        first = ct.load(cu_seqlens, (row,), ()).astype(ct.int32)
        stop = ct.load(cu_seqlens, (row + 1,), ()).astype(ct.int32)
        slot = first // CHUNK + row
        nchunks = ct.cdiv(stop - first, CHUNK)

    if HAS_INITIAL:
        state = ct.load(
            initial_states, (row, head, head_block, 0), (1, 1, BLOCK_HEADDIM, BLOCK_DSTATE), padding_mode=_ZERO
        )
        state = state.reshape((BLOCK_HEADDIM, BLOCK_DSTATE)).astype(ct.float32)  # (BLOCK_HEADDIM, BLOCK_DSTATE)
    else:
        state = ct.zeros((BLOCK_HEADDIM, BLOCK_DSTATE), ct.float32)
    if SEGMENTED:
        begin = (unit - whole) * (nsegments - 1) * parts_per_segment
        for part in range(begin, begin + segment * parts_per_segment):
            factor = ct.load(part_factors, (part, 0), (1, 1))
            if ISOLATED:
                state = ct.where(factor == 0.0, 0.0, state)
            state = state * factor + _part_state(part_states, part, BLOCK_HEADDIM, BLOCK_DSTATE)

    if SKIP == SKIP_OF_CHANNEL:
        skip = ct.load(D, (head, head_block), (1, BLOCK_HEADDIM), padding_mode=_ZERO).reshape((BLOCK_HEADDIM, 1))
        skip = skip.astype(ct.float32)
    elif SKIP == SKIP_OF_HEAD:
        skip = ct.load(D, (head,), (1,)).astype(ct.float32).reshape((1, 1))
    else:
        skip = ct.zeros((1, 1), ct.float32)

    if OWN_ENTRY:
        walk_first = _first_chunk(segment, segments, nchunks, skew)
        walk_stop = _first_chunk(segment + 1, segments, nchunks, skew)
        for chunk in range(walk_first):
            state, _ = _state_after_chunk(
                state, x, B, decays, batch, head, group, head_block, 0, chunk, BLOCK_HEADDIM, BLOCK_DSTATE, PRECISE,
                ISOLATED, COMPENSATED, OPERAND,
            )  # fmt: skip
    else:
        walk_first = segment * nchunks // segments
        walk_stop = (segment + 1) * nchunks // segments
    for chunk in range(walk_first, walk_stop):
        start = first + chunk * CHUNK
        # The order of these loads is that in which the copies are issued: that in which their memory is released.
        C_tile = _tokens(C, batch, start, group, 0, BLOCK_DSTATE, VARLEN)  # (CHUNK, BLOCK_DSTATE)
        x_tile = _tokens(x, batch, start, head, head_block, BLOCK_HEADDIM, VARLEN)  # (CHUNK, BLOCK_HEADDIM)
        # A low latency makes the compiler unroll the loop and keep more buffers, which costs more than it brings where
        # the states of the parts take some.
        decay = _decays_of_chunk(decays, batch, head, slot + chunk, PRECISE, 8 if SEGMENTED else 1)
        product = ct.load(products, (batch, slot + chunk, group, 0, 0), (1, 1, 1, CHUNK, CHUNK), latency=8)
        product = product.reshape((CHUNK, CHUNK))
        # Of packed sequences, B comes as copied by chunks.
        B_tile = _tokens(B, batch, (slot + chunk) * CHUNK, group, 0, BLOCK_DSTATE, False)  # (CHUNK, BLOCK_DSTATE)

        a_log2 = _row(decay, A_LOG2)  # (CHUNK,)
        if not PRECISE:
            d_log2 = _row(decay, D_LOG2)  # (CHUNK,)
            rest_log2 = a_log2 - d_log2
            # A token's weight is at most its d: the bound replaces the causal mask, which `product` has.
            weight = ct.exp2(
                ct.minimum(a_log2[:, None] - rest_log2[None, :], d_log2[None, :]), flush_to_zero=True
            )  # (CHUNK, CHUNK)
        else:
            low_log2 = _row(decay, A_LOW_LOG2)  # (CHUNK,)
            weight_log2 = (a_log2[:, None] - a_log2[None, :]) + (low_log2[:, None] - low_log2[None, :])
            weight = ct.exp2(ct.minimum(weight_log2, 0.0)) * _row(decay, D_LOG2)[None, :]  # (CHUNK, CHUNK)
        weight = product * weight

        from_entry = _row(decay, FROM_ENTRY)  # (CHUNK,)
        x_t = x_tile.transpose()  # (BLOCK_HEADDIM, CHUNK)
        y_t = ct.zeros((BLOCK_HEADDIM, CHUNK), ct.float32)
        y_t = _product(state, C_tile.transpose(), y_t, OPERAND)  # (BLOCK_HEADDIM, CHUNK)
        if ISOLATED:
            y_t = ct.where(from_entry[None, :] == 0.0, 0.0, y_t)
        y_t = y_t * from_entry[None, :]
        y_t = _product(_finite(x_t), as_operand(weight, OPERAND).transpose(), y_t, OPERAND)
        x_t = x_t.astype(ct.float32)
        y_t = y_t + x_t * skip  # a skip of 0 too: it makes a token's own NaN show
        if GATED:
            z_tile = _tokens(z, batch, start, head, head_block, BLOCK_HEADDIM, VARLEN)
            y_t = y_t * _silu(z_tile.transpose().astype(ct.float32))

        factor = ct.extract(decay, (FROM_ENTRY, CHUNK - 1), (1, 1))
        # A chunk of a packed sequence may end among the next one's tokens.
        select = ISOLATED or VARLEN
        state = _next_state(state, x_t, B_tile, _row(decay, TO_END), factor, select, COMPENSATED, OPERAND)
        y = y_t.transpose().astype(out.dtype)  # (CHUNK, BLOCK_HEADDIM)
        if not VARLEN:
            ct.store(out, (batch, chunk, head, head_block), y.reshape((1, CHUNK, 1, BLOCK_HEADDIM)))
        elif start + CHUNK <= stop:
            view = out.tiled_view((1, CHUNK, 1, BLOCK_HEADDIM), traversal_steps=(1, 1, 1, BLOCK_HEADDIM))
            view.store((batch, start, head, head_block), y.reshape((1, CHUNK, 1, BLOCK_HEADDIM)))
        else:
            tokens = start + ct.arange(CHUNK, dtype=ct.int32)[:, None]  # (CHUNK, 1)
            channels = head_block * BLOCK_HEADDIM + ct.arange(BLOCK_HEADDIM, dtype=ct.int32)[None, :]
            ct.scatter(out, (batch, tokens, head, channels), y, mask=tokens < stop)

    if segment == segments - 1:
        state = state.reshape((1, 1, BLOCK_HEADDIM, BLOCK_DSTATE))
        ct.store(final_states, (row, head, head_block, 0), state, allow_tma=not cut)
