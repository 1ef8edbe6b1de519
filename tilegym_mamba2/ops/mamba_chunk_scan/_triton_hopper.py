"""The fused forward's walk over segments for Hopper, in Gluon: asynchronous products, TMA, specialised warps.

    y[i] = exp(a[i]) * H @ C[i] + sum(gram[i, j] * exp(a[i] - (a[j] - log(d[j]))) * x[j] for j <= i) + D * x[i]

A program owns a segment for two items of a group, an item being 64 rows of headdim of one head. One warp fetches tiles
into a ring in shared memory; four warps for each item hold its state in registers and walk along the same tokens, so
that B, C and the gram are fetched once for both. While the tensor cores work on all products of a block, its warps
compute the weights of the next one. Where no kernel has made the states of parts, a segment first makes its entry
state, of x and B from the sequence's beginning on.
"""

import torch
import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tilegym_mamba2.backends.triton import Tiles

TOKENS = gl.NVMMASharedLayout(128, 16, 4)

_CHUNK = gl.constexpr(64)
_HEADDIM = gl.constexpr(64)
_ITEMS = gl.constexpr(2)
_VECTORS = gl.constexpr(4)
# The vectors of a block, in the order in which they are stored.
_SUM_LOG2 = gl.constexpr(0)
_FROM_ENTRY = gl.constexpr(1)
_TO_EXIT = gl.constexpr(2)
_BIAS_LOG2 = gl.constexpr(3)
# Larger exponents occur only where the weight is masked to 0, which 2**126 keeps 0 and infinity would make NaN.
_MAX_LOG2 = gl.constexpr(126.0)
_barrier = getattr(gl, "barrier", None) or gl.thread_barrier
_LARGEST = gl.constexpr(3.4028234663852886e38)
_LOG2_E = gl.constexpr(1.4426950408889634)

# (headdim, chunk), and also (chunk, chunk): accumulators of 64 x 64
_ACC_CHUNK = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
_LEFT = gl.constexpr(gl.DotOperandLayout(0, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]), 2))
# (chunk i, chunk j): loads of the gram and stores of the weights don't meet in a bank; a thread has the same of each
# quarter, so that `_quarters` moves nothing.
_WEIGHT = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [2, 0], [0, 32], [32, 0]],
        [[0, 4], [0, 8], [0, 16], [4, 0], [1, 0]],
        [[16, 0], [8, 0]],
        [],
        [64, 64],
    )
)
_TILE = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
_TOKENS = gl.constexpr(TOKENS)
_VECTOR = gl.constexpr(gl.NVMMASharedLayout(0, 32, 1))


def row_tiles(dtype: torch.dtype, nrows: int, ncolumns: int, rows: int) -> Tiles:
    """Tiles of some rows of a contiguous (nrows, ncolumns); 16-bit elements are for products, so swizzled."""
    layout = gl.NVMMASharedLayout(128 if dtype.itemsize == 2 else 0, 8 * dtype.itemsize, 2)
    return Tiles(dtype, (nrows, ncolumns), (ncolumns, 1), (rows, ncolumns), layout)


@gluon.jit
def _wait_for_previous():
    gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _launch_next():
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _segment_first(segment, nsegments, nslots, skew):
    """As `segment_first` of _triton_blocks.py, which Gluon can't call."""
    equal = segment * ((nslots + nsegments - 1) // nsegments)
    return gl.minimum(equal + (segment * (nsegments - segment) * skew >> 8), nslots)


@gluon.jit
def _fetch(
    sources,
    rings,
    full,
    empty,
    places,
    HAS_Z: gl.constexpr,
    STAGES: gl.constexpr,
    EARLY: gl.constexpr,
):
    """The fetching warp: the tiles of each block, in the order in which they are needed."""
    x, z, B, C, gram, gram_log2, vectors = sources
    x_ring, z_ring, B_ring, C_ring, gram_ring, log2_ring, vector_ring = rings
    (
        enter, walk_first, walk_stop, row, first_token, first_slot, head_0, head_1, headdim_0, headdim_1, nheads, group,
        ngroups,
    ) = places  # fmt: skip
    if EARLY:
        _wait_for_previous()
    NBYTES_STATE: gl.constexpr = B.block_type.nbytes + _ITEMS * (x.block_type.nbytes + vectors.block_type.nbytes)
    NBYTES: gl.constexpr = (
        NBYTES_STATE
        + C.block_type.nbytes
        + gram.block_type.nbytes
        + gram_log2.block_type.nbytes
        + (_ITEMS * x.block_type.nbytes if HAS_Z else 0)
    )
    for c in range(enter, walk_first):
        index = c - enter
        stage = index % STAGES
        mbarrier.wait(empty.index(stage), ((index // STAGES) & 1) ^ 1)
        ready = full.index(stage)
        token = first_token + c * _CHUNK
        vector = (first_slot + c) * nheads
        item = stage * 2
        mbarrier.expect(ready, NBYTES_STATE)
        tma.async_copy_global_to_shared(vectors, [vector + head_0, 0], ready, vector_ring.index(item))
        tma.async_copy_global_to_shared(vectors, [vector + head_1, 0], ready, vector_ring.index(item + 1))
        tma.async_copy_global_to_shared(x, [row, head_0, token, headdim_0], ready, x_ring.index(item))
        tma.async_copy_global_to_shared(x, [row, head_1, token, headdim_1], ready, x_ring.index(item + 1))
        tma.async_copy_global_to_shared(B, [row, group, token, 0], ready, B_ring.index(stage))
    for c in range(walk_first, walk_stop):
        index = c - enter
        stage = index % STAGES
        mbarrier.wait(empty.index(stage), ((index // STAGES) & 1) ^ 1)
        ready = full.index(stage)
        token = first_token + c * _CHUNK
        vector = (first_slot + c) * nheads
        item = stage * 2
        mbarrier.expect(ready, NBYTES)
        tma.async_copy_global_to_shared(vectors, [vector + head_0, 0], ready, vector_ring.index(item))
        tma.async_copy_global_to_shared(vectors, [vector + head_1, 0], ready, vector_ring.index(item + 1))
        block = (first_slot + c) * ngroups + group
        tma.async_copy_global_to_shared(gram_log2, [block, 0], ready, log2_ring.index(stage))
        tma.async_copy_global_to_shared(gram, [block * _CHUNK, 0], ready, gram_ring.index(stage))
        tma.async_copy_global_to_shared(C, [row, group, token, 0], ready, C_ring.index(stage))
        tma.async_copy_global_to_shared(x, [row, head_0, token, headdim_0], ready, x_ring.index(item))
        tma.async_copy_global_to_shared(x, [row, head_1, token, headdim_1], ready, x_ring.index(item + 1))
        tma.async_copy_global_to_shared(B, [row, group, token, 0], ready, B_ring.index(stage))
        if HAS_Z:
            tma.async_copy_global_to_shared(z, [row, head_0, token, headdim_0], ready, z_ring.index(item))
            tma.async_copy_global_to_shared(z, [row, head_1, token, headdim_1], ready, z_ring.index(item + 1))


@gluon.jit
def _silu(v):
    """v / (1 + exp(-v)), without the special cases of a division: 1 / infinity is the 0 that is wanted."""
    denominator = 1.0 + gl.exp2(v * -_LOG2_E)
    return v * gl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [denominator], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def _copy(x):
    """x again, which the compiler takes for another: it would keep x as float32, for which there are no registers."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=2)


@gluon.jit
def _widen(x):
    """bfloat16 x as float32: two instructions for two elements, where the compiler takes three."""
    return gl.inline_asm_elementwise(
        "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=f,=f,r", [x], dtype=gl.float32, is_pure=True, pack=2
    )


@gluon.jit
def _widen_again(x):
    """`_widen` in other instructions, for the reason of `_copy`."""
    return gl.inline_asm_elementwise(
        "prmt.b32 $0, $2, 0, 0x1044; prmt.b32 $1, $2, 0, 0x3244;", "=f,=f,r", [x], dtype=gl.float32, is_pure=True,
        pack=2,
    )  # fmt: skip


@gluon.jit
def _quarters(tile):
    """The four (32, 32) of a (64, 64), row by row, without moving data."""
    halves = tile.reshape([2, 32, 2, 32]).permute((1, 3, 0, 2))  # (i, j, half i, half j)
    left, right = gl.split(halves)  # (i, j, half i)
    upper_left, lower_left = gl.split(left)
    upper_right, lower_right = gl.split(right)
    return upper_left, upper_right, lower_left, lower_right


@gluon.jit
def _weights(gram_tile, log2_tile, vectors, DOT: gl.constexpr):
    """What multiplies x in a block, (chunk i, chunk j)."""
    gram = gram_tile.load(_WEIGHT)
    sums = vectors.slice(_SUM_LOG2 * _CHUNK, _CHUNK).load(gl.SliceLayout(1, _WEIGHT))
    rows = (sums + log2_tile.load(gl.SliceLayout(1, _WEIGHT)))[:, None]
    columns = vectors.slice(_BIAS_LOG2 * _CHUNK, _CHUNK).load(gl.SliceLayout(0, _WEIGHT))[None, :]
    gram_0, _, gram_2, gram_3 = _quarters(gram)
    row_0, _, row_2, row_3 = _quarters(gl.broadcast(rows, gram)[0])
    column_0, _, column_2, column_3 = _quarters(gl.broadcast(columns, gram)[0])
    # Above the diagonal, so in all of the upper right quarter, the gram is 0; nothing of the lower left is above it.
    weight_0 = (gram_0.to(gl.float32) * gl.exp2(gl.minimum(row_0 - column_0, _MAX_LOG2))).to(DOT)
    weight_2 = (gram_2.to(gl.float32) * gl.exp2(row_2 - column_2)).to(DOT)
    weight_3 = (gram_3.to(gl.float32) * gl.exp2(gl.minimum(row_3 - column_3, _MAX_LOG2))).to(DOT)
    halves = gl.join(gl.join(weight_0, weight_2), gl.join(gl.zeros_like(weight_0), weight_3))
    weight = halves.permute((2, 0, 3, 1)).reshape([_CHUNK, _CHUNK])
    return gl.convert_layout(weight, _WEIGHT, assert_trivial=True)


@gluon.jit
def _walk(
    out,
    rings,
    tiles,
    full,
    empty,
    places,
    states,
    D_ptr,
    ITEM: gl.constexpr,
    HEADDIM: gl.constexpr,
    DSTATE: gl.constexpr,
    BLOCK_DSTATE: gl.constexpr,
    HAS_INITIAL: gl.constexpr,
    HAS_D: gl.constexpr,
    HAS_Z: gl.constexpr,
    PACKED: gl.constexpr,
    COMPENSATED: gl.constexpr,
    STAGES: gl.constexpr,
    EARLY: gl.constexpr,
):
    """Four warps with the state of one item: writes its outputs, and its final state."""
    x_ring, z_ring, B_ring, C_ring, gram_ring, log2_ring, vector_ring = rings
    weight_ring, y_ring = tiles
    enter, walk_first, walk_stop, row, first_token, stop_token, head, nheads, headdim_first = places
    (
        initial_ptr, stride_initial_headdim, stride_initial_dstate, part_states_ptr, part_decay_ptr, nparts_before,
        final_ptr, is_last, flag_ptr, stride_D_headdim,
    ) = states  # fmt: skip
    if PACKED:  # its last block must leave the next sequence's tokens alone
        stride_token = gl.to_tensor(HEADDIM).to(gl.int64) * nheads
        out_tiles = tma.make_tensor_descriptor(
            out,
            shape=[1, nheads, stop_token, HEADDIM],
            strides=[stride_token, HEADDIM, stride_token, 1],
            block_shape=[1, 1, _CHUNK, _HEADDIM],
            layout=_TOKENS,
        )
    else:
        out_tiles = out
    DOT: gl.constexpr = x_ring.dtype
    ACC_STATE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_DSTATE, 16])

    headdim = headdim_first + gl.arange(0, _HEADDIM, gl.SliceLayout(1, ACC_STATE))[:, None]
    dstate = gl.arange(0, BLOCK_DSTATE, gl.SliceLayout(0, ACC_STATE))[None, :]
    inside = (headdim < HEADDIM) & (dstate < DSTATE)  # (headdim, dstate)
    offsets = headdim * DSTATE + dstate
    state = gl.zeros([_HEADDIM, BLOCK_DSTATE], gl.float32, ACC_STATE)
    if EARLY:
        _wait_for_previous()
    # The parts that it remembers, the last first.
    entry_decay = gl.to_tensor(1.0)  # from a part's end on
    part = nparts_before
    while (part > 0) & (entry_decay != 0.0):
        part -= 1
        added = gl.load(part_states_ptr + part * (HEADDIM * DSTATE) + offsets, mask=inside, other=0.0)
        state += added * entry_decay
        entry_decay *= gl.load(part_decay_ptr + part)
    if HAS_INITIAL:
        places_initial = headdim.to(gl.int64) * stride_initial_headdim + dstate.to(gl.int64) * stride_initial_dstate
        initial = gl.load(initial_ptr + places_initial, mask=inside, other=0.0).to(gl.float32)
        state += gl.where(entry_decay == 0.0, 0.0, initial * entry_decay)
    if HAS_D:
        place = headdim_first + gl.arange(0, _HEADDIM, gl.SliceLayout(1, _ACC_CHUNK))
        D = gl.load(D_ptr + place * stride_D_headdim, mask=place < HEADDIM, other=0.0).to(gl.float32)[:, None]

    for index in range(walk_first - enter):
        stage = index % STAGES
        mbarrier.wait(full.index(stage), (index // STAGES) & 1)
        vectors = vector_ring.index(stage * 2 + ITEM)
        x = x_ring.index(stage * 2 + ITEM).permute((1, 0)).load(_LEFT)  # (headdim, chunk)
        to_exit = vectors.slice(_TO_EXIT * _CHUNK, _CHUNK).load(gl.SliceLayout(0, _LEFT))[None, :]
        weighted = (_widen(x) * to_exit).to(DOT)  # (headdim, chunk)
        decay = vectors.slice(_FROM_ENTRY * _CHUNK + _CHUNK - 1, 1).load(gl.SliceLayout(0, ACC_STATE))[None, :]
        state = warpgroup_mma(weighted, B_ring.index(stage), state * decay, is_async=True)
        if COMPENSATED:
            again = _copy(x).to(gl.float32) * to_exit
            state = warpgroup_mma(
                (again - again.to(DOT).to(gl.float32)).to(DOT), B_ring.index(stage), state, is_async=True
            )
        state = warpgroup_mma_wait(0, deps=(state,))
        mbarrier.arrive(empty.index(stage), count=1)

    zeros = gl.zeros([_HEADDIM, _CHUNK], gl.float32, _ACC_CHUNK)
    if walk_first < walk_stop:
        index = walk_first - enter
        stage = index % STAGES
        mbarrier.wait(full.index(stage), (index // STAGES) & 1)
        weight = _weights(gram_ring.index(stage), log2_ring.index(stage), vector_ring.index(stage * 2 + ITEM), DOT)
        weight_ring.index(ITEM * 2 + (index & 1)).store(weight)
        fence_async_shared()
        _barrier()
    for c in range(walk_first, walk_stop):
        index = c - enter
        stage = index % STAGES
        half = index & 1
        vectors = vector_ring.index(stage * 2 + ITEM)
        x = x_ring.index(stage * 2 + ITEM).permute((1, 0)).load(_LEFT)  # (headdim, chunk)
        to_exit = vectors.slice(_TO_EXIT * _CHUNK, _CHUNK).load(gl.SliceLayout(0, _LEFT))[None, :]
        weighted = (_widen(x) * to_exit).to(DOT)  # (headdim, chunk)
        # The last token is reached from the entry just as the exit is.
        decay = vectors.slice(_FROM_ENTRY * _CHUNK + _CHUNK - 1, 1).load(gl.SliceLayout(0, ACC_STATE))[None, :]
        operand = gl.convert_layout(state.to(DOT), _LEFT, assert_trivial=True)
        # Accumulators are touched only while no product is under way, or the compiler would wait for each.
        state = state * decay
        B = B_ring.index(stage)
        weight_tile = weight_ring.index(ITEM * 2 + half)
        inner = warpgroup_mma(x, weight_tile.permute((1, 0)), zeros, use_acc=False, is_async=True)
        carried = warpgroup_mma(operand, C_ring.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
        state = warpgroup_mma(weighted, B, state, is_async=True)

        # The weights of the next block; after the last one they are those of the last again, and of no use.
        ahead = gl.minimum(index + 1, walk_stop - enter - 1)
        stage_ahead = ahead % STAGES
        mbarrier.wait(full.index(stage_ahead), (ahead // STAGES) & 1)
        tma.store_wait(0)
        _barrier()  # the last block's outputs have left their place
        weight = _weights(
            gram_ring.index(stage_ahead), log2_ring.index(stage_ahead), vector_ring.index(stage_ahead * 2 + ITEM), DOT
        )
        weight_ring.index(ITEM * 2 + (half ^ 1)).store(weight)
        carried, state, inner = warpgroup_mma_wait(0, deps=(carried, state, inner))
        if COMPENSATED:
            to_exit = vectors.slice(_TO_EXIT * _CHUNK, _CHUNK).load(gl.SliceLayout(0, _LEFT))[None, :]
            again = _copy(x).to(gl.float32) * to_exit
            state = warpgroup_mma((again - again.to(DOT).to(gl.float32)).to(DOT), B, state, is_async=True)

        from_entry = vectors.slice(_FROM_ENTRY * _CHUNK, _CHUNK).load(gl.SliceLayout(0, _ACC_CHUNK))[None, :]
        y = inner + carried * from_entry  # (headdim, chunk)
        if HAS_D:
            y += gl.convert_layout(_widen_again(x), _ACC_CHUNK, assert_trivial=True) * D
        if HAS_Z:
            z = z_ring.index(stage * 2 + ITEM).permute((1, 0)).load(_LEFT)
            y = y * _silu(gl.convert_layout(z, _ACC_CHUNK, assert_trivial=True).to(gl.float32))
        if COMPENSATED:
            state = warpgroup_mma_wait(0, deps=(state,))
        y_tile = y_ring.index(ITEM)
        y_tile.permute((1, 0)).store(y.to(DOT))
        fence_async_shared()
        _barrier()
        mbarrier.arrive(empty.index(stage), count=1)
        tma.async_copy_shared_to_global(out_tiles, [row, head, first_token + c * _CHUNK, headdim_first], y_tile)
    if is_last:
        gl.store(final_ptr + offsets, state, mask=inside)
    bad = gl.where(gl.abs(state) <= _LARGEST, 0, 1)
    gl.store(flag_ptr, gl.max(gl.max(bad, axis=1), axis=0))
    tma.store_wait(0)


@gluon.jit(
    do_not_specialize=[
        "seqlen", "nheads", "ngroups", "nslots_row", "nsegments", "nparts_segment", "nparts", "skew", "first_unit",
        "nunits", "first_pair", "stride_D_head", "stride_D_headdim", "stride_initial_batch", "stride_initial_head",
        "stride_initial_headdim", "stride_initial_dstate",
    ]
)  # fmt: skip
def _scan_hopper_kernel(
    D_ptr,
    initial_ptr,
    cu_seqlens_ptr,
    part_states_ptr,
    part_decay_ptr,
    final_ptr,
    flags_ptr,
    out_ptr,
    x,
    z,
    B,
    C,
    gram,
    gram_log2,
    vectors,
    out,
    seqlen: gl.int32,
    nheads: gl.int32,
    ngroups: gl.int32,
    nslots_row: gl.int32,
    nsegments: gl.int32,
    nparts_segment: gl.int32,
    nparts: gl.int32,
    skew: gl.int32,
    first_unit: gl.int32,
    nunits: gl.int32,
    first_pair: gl.int32,
    stride_D_head: gl.int64,
    stride_D_headdim: gl.int64,
    stride_initial_batch: gl.int64,
    stride_initial_head: gl.int64,
    stride_initial_headdim: gl.int64,
    stride_initial_dstate: gl.int64,
    HEADDIM: gl.constexpr,
    DSTATE: gl.constexpr,
    BLOCK_DSTATE: gl.constexpr,
    COMPENSATED: gl.constexpr,
    STAGES: gl.constexpr,
    WORKER_REGISTERS: gl.constexpr,
    EARLY: gl.constexpr,
):
    if EARLY:
        _launch_next()
    HAS_INITIAL: gl.constexpr = initial_ptr is not None
    HAS_D: gl.constexpr = D_ptr is not None
    HAS_Z: gl.constexpr = z is not None
    PACKED: gl.constexpr = cu_seqlens_ptr is not None
    DOT: gl.constexpr = x.dtype
    NBLOCKS: gl.constexpr = (HEADDIM + _HEADDIM - 1) // _HEADDIM

    program = gl.program_id(0)
    if program < first_unit:  # whole sequences first, so that the shorter segments fill the end of the last wave
        unit = program
        segment = 0
        nsegments = 1
    else:
        unit = first_unit + (program - first_unit) % nunits
        segment = (program - first_unit) // nunits
    items_group = (nheads // ngroups) * NBLOCKS
    units_group = (items_group + 1) // 2
    group = (unit // units_group) % ngroups
    sequence = unit // (units_group * ngroups)
    item_0 = (unit % units_group) * 2
    item_1 = gl.minimum(item_0 + 1, items_group - 1)  # of an odd number the last is done twice, with the same result
    head_0 = group * (nheads // ngroups) + item_0 // NBLOCKS
    head_1 = group * (nheads // ngroups) + item_1 // NBLOCKS
    headdim_0 = item_0 % NBLOCKS * _HEADDIM
    headdim_1 = item_1 % NBLOCKS * _HEADDIM
    if PACKED:
        first_token = gl.load(cu_seqlens_ptr + sequence).to(gl.int32)
        stop_token = gl.load(cu_seqlens_ptr + sequence + 1).to(gl.int32)
        row = sequence * 0
        first_slot = first_token // _CHUNK + sequence
        nslots = (stop_token - first_token + _CHUNK - 1) // _CHUNK
    else:
        first_token = sequence * 0
        stop_token = seqlen
        row = sequence
        first_slot = sequence * nslots_row
        nslots = nslots_row
    walk_first = _segment_first(segment, nsegments, nslots, skew)
    walk_stop = _segment_first(segment + 1, nsegments, nslots, skew)
    enter = walk_first if nparts_segment > 0 else 0  # from there to walk_first, without parts, the state alone is made

    x_ring = gl.allocate_shared_memory(DOT, [STAGES * 2, _CHUNK, _HEADDIM], _TILE)
    if HAS_Z:
        z_ring = gl.allocate_shared_memory(DOT, [STAGES * 2, _CHUNK, _HEADDIM], _TILE)
    else:
        z_ring = x_ring
    B_ring = gl.allocate_shared_memory(DOT, [STAGES, _CHUNK, BLOCK_DSTATE], _TILE)
    C_ring = gl.allocate_shared_memory(DOT, [STAGES, _CHUNK, BLOCK_DSTATE], _TILE)
    gram_ring = gl.allocate_shared_memory(gl.float16, [STAGES, _CHUNK, _CHUNK], _TILE)
    log2_ring = gl.allocate_shared_memory(gl.float32, [STAGES, _CHUNK], _VECTOR)
    vector_ring = gl.allocate_shared_memory(gl.float32, [STAGES * 2, _VECTORS * _CHUNK], _VECTOR)
    weight_ring = gl.allocate_shared_memory(DOT, [_ITEMS * 2, _CHUNK, _CHUNK], _TILE)
    y_ring = gl.allocate_shared_memory(DOT, [_ITEMS, _CHUNK, _CHUNK], _TILE)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=_ITEMS)
    fence_async_shared()

    sources = (x, z if HAS_Z else x, B, C, gram, gram_log2, vectors)
    rings = (x_ring, z_ring, B_ring, C_ring, gram_ring, log2_ring, vector_ring)
    places = (
        enter, walk_first, walk_stop, row, first_token, first_slot, head_0, head_1, headdim_0, headdim_1, nheads, group,
        ngroups,
    )  # fmt: skip
    if HAS_INITIAL:
        initial_base = initial_ptr + sequence.to(gl.int64) * stride_initial_batch
        initial_0 = initial_base + head_0 * stride_initial_head
        initial_1 = initial_base + head_1 * stride_initial_head
    else:
        initial_0 = final_ptr
        initial_1 = final_ptr
    if HAS_D:
        D_0 = D_ptr + head_0 * stride_D_head
        D_1 = D_ptr + head_1 * stride_D_head
    else:
        D_0 = final_ptr
        D_1 = final_ptr
    row_0 = sequence.to(gl.int64) * nheads + head_0
    row_1 = sequence.to(gl.int64) * nheads + head_1
    # Parts are there only for the pairs from first_pair on, which are those of the units from first_unit on.
    nparts_before = segment * nparts_segment
    part_0 = (row_0 - first_pair) * nparts
    part_1 = (row_1 - first_pair) * nparts
    is_last = segment == nsegments - 1
    flag = flags_ptr + program * 2
    states_0 = (
        initial_0, stride_initial_headdim, stride_initial_dstate, part_states_ptr + part_0 * (HEADDIM * DSTATE),
        part_decay_ptr + part_0, nparts_before, final_ptr + row_0 * (HEADDIM * DSTATE), is_last, flag,
        stride_D_headdim,
    )  # fmt: skip
    states_1 = (
        initial_1, stride_initial_headdim, stride_initial_dstate, part_states_ptr + part_1 * (HEADDIM * DSTATE),
        part_decay_ptr + part_1, nparts_before, final_ptr + row_1 * (HEADDIM * DSTATE), is_last, flag + 1,
        stride_D_headdim,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (
                _walk,
                (
                    out_ptr if PACKED else out, rings, (weight_ring, y_ring), full, empty,
                    (enter, walk_first, walk_stop, row, first_token, stop_token, head_0, nheads, headdim_0),
                    states_0, D_0, 0, HEADDIM, DSTATE, BLOCK_DSTATE, HAS_INITIAL, HAS_D, HAS_Z, PACKED,
                    COMPENSATED, STAGES, EARLY,
                ),
            ),
            (
                _walk,
                (
                    out_ptr if PACKED else out, rings, (weight_ring, y_ring), full, empty,
                    (enter, walk_first, walk_stop, row, first_token, stop_token, head_1, nheads, headdim_1),
                    states_1, D_1, 1, HEADDIM, DSTATE, BLOCK_DSTATE, HAS_INITIAL, HAS_D, HAS_Z, PACKED,
                    COMPENSATED, STAGES, EARLY,
                ),
            ),
            (_fetch, (sources, rings, full, empty, places, HAS_Z, STAGES, EARLY)),
        ],
        [4, 1],
        [WORKER_REGISTERS, 504 - 2 * WORKER_REGISTERS],
    )  # fmt: skip
