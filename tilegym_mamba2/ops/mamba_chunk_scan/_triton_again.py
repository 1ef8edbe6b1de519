"""The Triton kernel that comes last on Hopper: the second walk, of what `_scan_hopper_kernel` says was not finite.

A flag of that kernel stands for a segment, a head and a tile of headdim. A program owns every so many flags; nearly
always it finds none set, and has nothing to do.
"""

import triton
import triton.language as tl

from tilegym_mamba2.backends._triton_math import wait_for_previous
from tilegym_mamba2.ops.mamba_chunk_scan._triton_output import scan_item


@triton.jit(
    do_not_specialize=[
        "seqlen", "nheads", "ngroups", "nslots_row", "nsegments", "nparts_segment", "nparts", "skew", "first_pair",
        "first_unit", "nunits", "nflags", "stride_x_batch", "stride_x_token", "stride_x_head", "stride_B_batch",
        "stride_B_token", "stride_B_group", "stride_C_batch", "stride_C_token", "stride_C_group", "stride_z_batch",
        "stride_z_token", "stride_z_head", "stride_D_head", "stride_D_headdim", "stride_initial_batch",
        "stride_initial_head", "stride_initial_headdim", "stride_initial_dstate", "stride_seq_idx_batch",
        "stride_seq_idx_token",
    ]
)  # fmt: skip
def _scan_again_kernel(
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
    flags_ptr,
    seqlen: tl.int32,
    nheads: tl.int32,
    ngroups: tl.int32,
    nslots_row: tl.int32,
    nsegments: tl.int32,
    nparts_segment: tl.int32,
    nparts: tl.int32,
    skew: tl.int32,
    first_pair: tl.int32,
    first_unit: tl.int32,
    nunits: tl.int32,
    nflags: tl.int32,
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
    COMPENSATED: tl.constexpr,
    NVECTORS: tl.constexpr,
    BLOCK_CHUNK: tl.constexpr,
    BLOCK_HEADDIM: tl.constexpr,
    BLOCK_DSTATE: tl.constexpr,
    UNIT: tl.constexpr,
    Z_UNIT: tl.constexpr,
    WIDE: tl.constexpr,
    DOT: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_previous(EARLY)
    first = tl.program_id(0)
    step = tl.num_programs(0)
    found = 0
    for start in range(first, nflags, 256 * step):
        index = start + step * tl.arange(0, 256)
        found = tl.maximum(found, tl.max(tl.load(flags_ptr + index, mask=index < nflags, other=0)))
    if found != 0:
        nblocks_headdim = tl.cdiv(HEADDIM, BLOCK_HEADDIM)
        items_group = (nheads // ngroups) * nblocks_headdim
        units_group = (items_group + 1) // 2
        for index in range(first, nflags, step):
            program = index // 2
            if program < first_unit:
                unit = program
                segment = 0
                segments = 1
            else:
                unit = first_unit + (program - first_unit) % nunits
                segment = (program - first_unit) // nunits
                segments = nsegments
            item = (unit % units_group) * 2 + index % 2
            # Of an odd number of items the last has two flags.
            if (tl.load(flags_ptr + index) != 0) & (item < items_group):
                sequence = unit // (units_group * ngroups)
                group = (unit // units_group) % ngroups
                pair = sequence * nheads + group * (nheads // ngroups) + item // nblocks_headdim
                headdim_first = item % nblocks_headdim * BLOCK_HEADDIM
                scan_item(
                    pair, segment, segments, headdim_first, x_ptr, B_ptr, C_ptr, z_ptr, D_ptr, initial_ptr, seq_idx_ptr,
                    cu_seqlens_ptr, gram_ptr, gram_log2_ptr, vectors_ptr, exit_ptr, part_states_ptr, part_decay_ptr,
                    out_ptr, final_ptr, None, None, None, None, seqlen, nheads, ngroups, nslots_row, nparts_segment,
                    nparts, skew, first_pair, stride_x_batch, stride_x_token, stride_x_head, stride_B_batch,
                    stride_B_token, stride_B_group, stride_C_batch, stride_C_token, stride_C_group, stride_z_batch,
                    stride_z_token, stride_z_head, stride_D_head, stride_D_headdim, stride_initial_batch,
                    stride_initial_head, stride_initial_headdim, stride_initial_dstate, stride_seq_idx_batch,
                    stride_seq_idx_token, stride_x_headdim, stride_B_dstate, stride_C_dstate, stride_z_headdim,
                    HEADDIM, DSTATE, False, COMPENSATED, NVECTORS, BLOCK_CHUNK, BLOCK_HEADDIM, BLOCK_DSTATE, UNIT,
                    Z_UNIT, WIDE, DOT, "ieee", 1, True,
                )  # fmt: skip
