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
from tilegym_mamba2.ops.mamba_chunk_scan._triton_blocks import VECTORS
from tilegym_mamba2.ops.mamba_chunk_scan._triton_output import _scan_output_kernel
from tilegym_mamba2.ops.mamba_chunk_scan._triton_prepare import _scan_prepare_kernel
from tilegym_mamba2.ops.mamba_chunk_scan._triton_segment import _scan_segment_kernel
from tilegym_mamba2.problem import float64_reason
from tilegym_mamba2.registry import register

_LARGEST_DSTATE = 1024
# Segments and parts of fewer blocks than this would cost more than they gain.
_LEAST_SLOTS = 8
_MOST_SEGMENTS = 32
_DOT = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


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
    if problem.dstate > _LARGEST_DSTATE:
        return f"B has dstate={problem.dstate}, the kernels hold {_LARGEST_DSTATE} at most"
    return float64_reason(problem)


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
    # Without D, whose term is exact, the rounding of what is added to the state would show in out.
    compensated = dot == torch.bfloat16 and D is None
    nvectors = VECTORS if split_sum else VECTORS - 1
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
                config.segment_pair, compensated, unit, wide, use_tma, _DOT[dot], precision, config.segment.num_stages,
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
            headdim, dstate, split_sum, compensated, nvectors, config.block_chunk, config.block_headdim,
            block_dstate, unit, z_unit, wide, use_tma, _DOT[dot], precision, config.output.num_stages,
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
