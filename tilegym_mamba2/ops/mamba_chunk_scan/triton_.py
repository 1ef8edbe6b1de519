"""The whole forward in Triton: two passes over the segments of each sequence, with the state in registers.

    a[t] = sum(d[s] * A for s <= t in t's block of BLOCK_CHUNK tokens)
    y[i] = exp(a[i]) * H @ C[i] + sum((C[i] . B[j]) * exp(a[i] - a[j]) * d[j] * x[j] for j <= i) + D * x[i]
    H    = exp(a[last]) * H + sum(exp(a[last] - a[j]) * d[j] * x[j] (outer) B[j] for j)

A slot is one block of BLOCK_CHUNK tokens of one sequence (a batch row, or a sequence of cu_seqlens). Three kernels:

1. `_scan_prepare_kernel`, program = (slot, heads): the vectors of a block that need exponentials or seq_idx; or
   program = (slot, group): C @ B^T, causal and inside runs of seq_idx, once for all heads of the group.
2. `_scan_segment_kernel`, program = (part of a segment, sequence, head): what that part adds to the state. Only
   where there are too few (sequence, head) pairs to fill the GPU; then C @ B^T is made here and not by kernel 1, at
   the same time as the parts.
3. `_scan_output_kernel`, program = (segment, sequence, head, block of headdim): combines the states of earlier
   parts, then walks over its blocks. x, B and C are read again here for the segments that kernel 2 has read.

On Hopper (compute capability 9.0), two others take the place of the third wherever `fits_hopper` says so: bfloat16,
headdim over 32, dstate over 32 and at most 128, both multiples of 8, no negative time steps, tensors that TMA can read,
and Triton 3.6 or 3.7.

3. `_scan_hopper_kernel`, program = (segment, sequence, two heads or blocks of headdim): the same walk in Gluon. It is
   done once; where it met something not finite, a flag is set. Segments of short rows find their entry states
   themselves, without kernel 2.
4. `_scan_again_kernel`: the second walk, where a flag is set.

Everything is kept transposed, (headdim, token), so that the state is a left operand straight from its registers.

Tokens of another sequence, or later ones, have the weight 0. That does not contain NaN or infinity, since
0 * NaN is NaN; but then the state of the walk isn't finite at its end, because nothing but a selection would
remove it. Only such a walk is done again, with a selection wherever a weight is 0.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilegym_mamba2.backends import triton as backend
from tilegym_mamba2.backends._memory import contiguous
from tilegym_mamba2.ops.mamba_chunk_scan._segments import best_skew
from tilegym_mamba2.ops.mamba_chunk_scan._triton_again import _scan_again_kernel
from tilegym_mamba2.ops.mamba_chunk_scan._triton_blocks import VECTORS
from tilegym_mamba2.ops.mamba_chunk_scan._triton_output import _scan_output_kernel
from tilegym_mamba2.ops.mamba_chunk_scan._triton_prepare import _scan_prepare_kernel
from tilegym_mamba2.ops.mamba_chunk_scan._triton_segment import _scan_segment_kernel
from tilegym_mamba2.problem import float64_reason
from tilegym_mamba2.registry import register
from tilegym_mamba2.tuning import planned

_LARGEST_DSTATE = 1024
# Smaller segments and parts would cost more than they gain.
_LEAST_SEGMENT_TOKENS = 256
_LEAST_PART_SLOTS = 8
_MOST_SEGMENTS = 32
# Of rows in which the walk for Hopper finds the entry states of its segments itself.
_MOST_TOKENS_OWN_ENTRY = 2048
# What that costs there for each token, in walks over it.
_ENTRY_COST = 0.5
# Of Triton, whose Gluon changes: those that the kernel for Hopper is written for.
_GLUON_VERSIONS = ("3.6", "3.7")
_HOPPER_REGISTERS = 240
# A consumer waits for the next block's tiles before it releases this one's: with one stage it would wait forever.
_HOPPER_LEAST_STAGES = 2
# Below half of that kernel's tiles of 64 the other kernel's smaller ones are the better choice.
_HOPPER_LEAST = 32
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
    """The choice by rule for a GPU, a shape and the dtype of the products, which are IEEE ones if `exact`."""
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


def fits_hopper(
    info: backend.DeviceInfo, headdim: int, dstate: int, dot: torch.dtype, dt_low: float, tma_legal: bool
) -> bool:
    """Whether `_scan_hopper_kernel` takes a call.

    Args:
        info: of the GPU.
        headdim, dstate: of x and B.
        dot: dtype of x, B and C.
        dt_low: least time step, whose logarithm the kernel uses.
        tma_legal: whether TMA can read x, B, C and z.
    """
    return (
        info.architecture == "cuda:90"
        and ".".join(triton.__version__.split(".")[:2]) in _GLUON_VERSIONS
        and dot == torch.bfloat16
        and min(headdim, dstate) > _HOPPER_LEAST
        and dstate <= 128
        and dt_low >= 0.0
        and tma_legal
    )


def hopper_config(info: backend.DeviceInfo, dstate: int, has_z: bool) -> Config:
    """The configuration where `fits_hopper`; the stages of its output are those of the ring in shared memory."""
    block_dstate = _block(dstate)
    stage = 64 * (2 * 64 + 2 * max(block_dstate, 64) + 64 + (2 * 64 if has_z else 0)) * 2 + (2 * 4 + 1) * 64 * 4
    stages = min(3, (info.shared_memory - 6 * 64 * 64 * 2 - 1024) // stage)
    return Config(64, 64, backend.Options(4, stages, 168), 64, block_dstate, backend.Options(4, 3, 168), 1, 3, True)


def configurations(rule: Config, hopper: bool) -> list[Config]:
    """The choice by rule, then others that are right wherever it is, to be measured against it."""
    output, segment, resident = rule.output, rule.segment, rule.programs_per_multiprocessor
    others = [rule._replace(output=output._replace(num_stages=output.num_stages - 1))]
    others += [rule._replace(programs_per_multiprocessor=resident + step) for step in (-1, 1)]
    others += [rule._replace(segment=segment._replace(num_stages=segment.num_stages + step)) for step in (-1, 1)]
    others += [rule._replace(segment=segment._replace(maxnreg=None))]
    if not hopper:
        others += [rule._replace(output=output._replace(num_stages=output.num_stages + 1))]
        others += [rule._replace(output=output._replace(maxnreg=registers)) for registers in (None, 128, 168, 255)]
        others += [rule._replace(output=backend.Options(2 * output.num_warps, output.num_stages))]
        fewer = {"output": backend.Options(output.num_warps, 2), "programs_per_multiprocessor": max(1, resident - 1)}
        others += [rule._replace(block_chunk=2 * rule.block_chunk, **fewer)]
    sensible = [
        one
        for one in others
        if one.output.num_stages >= (_HOPPER_LEAST_STAGES if hopper else 1)
        and min(one.segment.num_stages, one.programs_per_multiprocessor) > 0
        and one.output.num_warps <= 8
        and one.block_chunk <= 64
    ]
    return list(dict.fromkeys([rule, *sensible]))


def _products(dot: torch.dtype, exact: bool) -> str:
    """The dtype of the products, as a name."""
    return str(dot).removeprefix("torch.") if dot != torch.float32 or exact else "tf32"


def choose_segments(pairs: int, nblocks: int, resident: int, most: int) -> tuple[int, int]:
    """How many (sequence, head) pairs to leave whole, and into how many segments to cut each other one, `most` at most.

    Whole pairs fill whole waves of `resident` programs, `nblocks` for each pair; what is left over is cut so that it
    takes least time, where the first pass costs about 0.4 of the second for each token that it reads.
    """
    first_pair = pairs * nblocks // resident * resident // nblocks
    left = (pairs - first_pair) * nblocks / resident

    def cost(count: int) -> float:
        whole, part = divmod(left * count, 1)
        last_wave = 0.3 + 0.7 * part if part else 0.0  # programs that are fewer are faster
        return (whole + last_wave) / count + 0.4 * left * (count - 1) / count

    nsegments = min(range(1, max(2, min(_MOST_SEGMENTS, most) + 1)), key=cost)
    return (pairs, 1) if nsegments == 1 else (first_pair, nsegments)


def _tiles(tensor: Any, tokens: int, columns: int, shared: Any = None) -> backend.Tiles:
    """Tiles of some tokens and columns, of the layout of a (batch, seqlen, nheads or ngroups, columns)."""
    (batch, seqlen, nheads, width), (stride_batch, stride_token, stride_head, stride), dtype = tensor
    shape, strides = (batch, nheads, seqlen, width), (stride_batch, stride_head, stride_token, stride)
    # That of an axis of one element means nothing, and may be more than a tensor map can hold.
    meant = [step if size > 1 else width for size, step in zip(shape[:3], strides[:3], strict=True)]
    return backend.Tiles(dtype, shape, (*meant, stride), (1, 1, tokens, columns), shared)


def _block(size: int) -> int:
    return max(16, triton.next_power_of_2(size))


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
    if seqlen == 0 or rows == 0:
        out = torch.empty(x.shape, dtype=x.dtype, device=device)
        final_states = torch.empty((rows, nheads, headdim, dstate), dtype=torch.float32, device=device)
        if initial_states is None:
            final_states.zero_()
        else:
            final_states.copy_(initial_states)
    else:
        info = backend.device_info(device)
        if info.has_tma:
            # As the torch code of a convolution leaves them; TMA can't read them, and a copy costs far less than that.
            x, B, C, z = (t if t is None or t.stride(3) == 1 else t.contiguous() for t in (x, B, C, z))
        # Tensors whose rows can be read 16 bytes at a time only if the base pointers allow it too.
        unaligned = (x.data_ptr() | B.data_ptr() | C.data_ptr()) & 15
        z_aligned = z is None or z.data_ptr() & 15 == 0
        plan = _plan(
            backend.layouts(x, dt, A, B, C, D, z, dt_bias, initial_states, seq_idx, cu_seqlens), dt_softplus,
            tuple(dt_limit), torch.get_float32_matmul_precision() == "highest", unaligned == 0, z_aligned, info,
        )  # fmt: skip
        out, final_states = plan((x, dt, A, B, C, D, z, dt_bias, initial_states, seq_idx, cu_seqlens), device)
    if cu_seqlens is None:
        return out, final_states, None
    last = final_states[-1:].clone() if rows else final_states.new_zeros((1, nheads, headdim, dstate))
    return out, last, final_states


@planned
def _plan(
    layouts: Any,
    dt_softplus: bool,
    dt_limit: tuple[float, float],
    highest: bool,
    aligned: bool,
    z_aligned: bool,
    info: backend.DeviceInfo,
) -> backend.Launches:
    x, dt, A, B, C, D, z, dt_bias, initial_states, seq_idx, cu_seqlens = layouts
    (batch, seqlen, nheads, headdim), x_stride, x_dtype = x
    (_, _, ngroups, dstate), B_stride, B_dtype = B
    C_stride = C[1]
    out = (x[0], contiguous(x[0]), x_dtype)
    dot = x_dtype if x_dtype == B_dtype == C[2] else torch.float32
    exact = highest and torch.float32 in (x_dtype, B_dtype, C[2])
    precision = "ieee" if exact else "tf32"
    dense = (x_stride, B_stride, C_stride)
    unit = 8 if aligned and all(s[3] == 1 and not any(stride % 8 for stride in s[:3]) for s in dense) else 1
    tma_legal = unit == 8 and headdim % 8 == 0 and dstate % 8 == 0 and all(all(s[:3]) for s in dense)
    z_stride = backend.strides(z, 4)
    z_unit = 8 if z_stride[3] == 1 and not any(stride % 8 for stride in z_stride[:3]) else 1
    z_legal = z is None or (z_aligned and z[2] == x_dtype and z_unit == 8 and all(z_stride[:3]))
    hopper = fits_hopper(info, headdim, dstate, dot, dt_limit[0], tma_legal and z_legal)
    # Without D, whose term is exact, the rounding of what is added to the state would show in out.
    compensated = dot == torch.bfloat16 and D is None
    rule = hopper_config(info, dstate, z is not None) if hopper else choose_config(info, headdim, dstate, dot, exact)
    config = backend.choose(
        configurations(rule, hopper), "mamba_chunk_scan", info, headdim=headdim, dstate=dstate,
        products=_products(dot, exact), compensated=compensated,
        kernel="general" if not hopper else "hopper" if z is None else "hopper with z",
    )  # fmt: skip
    use_tma = config.use_tma and tma_legal
    columns = max(_block(headdim), _block(dstate))
    wide = any(2 * config.block_chunk * s[1] + columns * s[3] >= 2**31 for s in dense)
    x_units, B_units, C_units = (tuple(stride // unit for stride in s[:3]) for s in dense)

    early = backend.starts_early(info)
    packed = cu_seqlens is not None
    nseq = cu_seqlens[0][0] - 1 if packed else 0
    rows = nseq if packed else batch
    nslots_row = -(-seqlen // config.block_chunk)
    nslots = seqlen // config.block_chunk + nseq if packed else batch * nslots_row
    split_sum = dot == torch.float32
    nvectors = VECTORS if split_sum else VECTORS - 1
    seq_idx_stride = backend.strides(seq_idx, 2)

    nblocks_headdim = -(-headdim // config.block_headdim)
    pairs = rows * nheads
    resident = info.multiprocessors * config.programs_per_multiprocessor
    slots_sequence = -(-nslots // rows)
    most_segments = slots_sequence * config.block_chunk // _LEAST_SEGMENT_TOKENS
    if hopper:
        items_group = nheads // ngroups * nblocks_headdim
        units_group = -(-items_group // 2)
        units = rows * ngroups * units_group
        own_entry = not packed and nslots_row * config.block_chunk <= _MOST_TOKENS_OWN_ENTRY
        if own_entry:
            rest = units % info.multiprocessors
            nsegments = min(info.multiprocessors // rest, nslots_row, _MOST_SEGMENTS) if rest else 1
            first_unit = units - rest if nsegments > 1 else units
            skew = best_skew(nsegments, nslots_row, _ENTRY_COST)
        else:
            first_unit, nsegments = choose_segments(units, 1, info.multiprocessors, most_segments)
            skew = 0
        if items_group % 2 or nblocks_headdim > 2:  # units that begin or end within a head
            first_unit -= first_unit % units_group
            first_pair = first_unit // units_group * (nheads // ngroups)
        else:
            first_pair = first_unit * 2 // nblocks_headdim
        nunits = units - first_unit
    else:
        first_unit = units = nunits = 0
        skew, own_entry = 0, False
        first_pair, nsegments = choose_segments(pairs, nblocks_headdim, resident, most_segments)
    npairs = pairs - first_pair
    segment_tile_programs = -(-headdim // config.segment_headdim) * -(-dstate // config.segment_dstate)
    segment_programs = max(1, npairs * (nsegments - 1) * segment_tile_programs)
    segment_slots = -(-slots_sequence // nsegments)
    most_parts = min(resident // segment_programs, segment_slots // _LEAST_PART_SLOTS)
    nparts_segment = 0 if own_entry else max(1, most_parts)
    nparts = (nsegments - 1) * nparts_segment
    block_heads = min(triton.next_power_of_2(nheads), 16)
    block_dstate = _block(dstate)
    ngrams, cut = nslots * ngroups, nparts > 0
    prepare = backend.Launch(
        _scan_prepare_kernel,
        nslots * -(-nheads // block_heads) + (0 if cut else ngrams),
        (
            seqlen, nheads, ngroups, nseq, nslots_row, 0 if cut else ngrams, *dt[1], *A[1],
            *backend.strides(dt_bias, 1), *B_units, *C_units, *seq_idx_stride, float(dt_limit[0]), float(dt_limit[1]),
            B_stride[3], C_stride[3],
        ),
        (
            dstate, dt_softplus, split_sum, nvectors, config.block_chunk, block_heads, block_dstate, unit, wide,
            _DOT[dot], precision, not cut, early,
        ),
    )  # fmt: skip
    launches = [(prepare, "dt A dt_bias B C seq_idx cu_seqlens vectors exits gram gram_log2")]
    if cut:
        tokens = config.segment_pair * config.block_chunk
        segment = backend.Launch(
            _scan_segment_kernel,
            npairs * nparts * segment_tile_programs + ngrams,
            (
                seqlen, nheads, ngroups, nseq, nslots_row, nsegments, nparts_segment, nparts, first_pair, npairs,
                npairs * nparts * segment_tile_programs, *x_units, *B_units, *C_units, *seq_idx_stride, x_stride[3],
                B_stride[3], C_stride[3],
            ),
            (
                headdim, dstate, nvectors, config.block_chunk, config.segment_headdim, config.segment_dstate,
                block_dstate, config.segment_pair, compensated, unit, wide, _DOT[dot], precision,
                config.segment.num_stages, early,
            ),
            config.segment,
            early=early,
            tiles=(_tiles(x, tokens, config.segment_headdim), _tiles(B, tokens, config.segment_dstate))
            if use_tma
            else (None,) * 2,
        )  # fmt: skip
        launches.append((segment, "x B C seq_idx cu_seqlens vectors exits gram gram_log2 part_states part_decays x B"))
    D_stride = (*backend.strides(D, 2), 0)[:2]
    initial_stride = backend.strides(initial_states, 4)
    sizes = (seqlen, nheads, ngroups, nslots_row, nsegments, nparts_segment, nparts)
    steps = (
        *x_units, *B_units, *C_units, *(stride // z_unit for stride in z_stride[:3]), *D_stride, *initial_stride,
        *seq_idx_stride, x_stride[3], B_stride[3], C_stride[3], z_stride[3],
    )  # fmt: skip
    inputs = "x B C z D initial_states seq_idx cu_seqlens"
    made = "gram gram_log2 vectors exits part_states part_decays out final_states"
    gram_dtype = torch.float16 if hopper else torch.float32
    hopper_programs = first_unit + nunits * nsegments
    if hopper:
        from tilegym_mamba2.ops.mamba_chunk_scan._triton_hopper import TOKENS, _scan_hopper_kernel, row_tiles

        columns_state = max(block_dstate, config.block_headdim)
        output = backend.Launch(
            _scan_hopper_kernel,
            hopper_programs,
            (*sizes, skew, first_unit, max(nunits, 1), first_pair, *D_stride, *initial_stride),
            (headdim, dstate, columns_state, compensated, config.output.num_stages, _HOPPER_REGISTERS, early),
            config.output._replace(num_stages=1),
            early=early,
            tiles=(
                _tiles(x, config.block_chunk, config.block_headdim, TOKENS),
                None if z is None else _tiles(z, config.block_chunk, config.block_headdim, TOKENS),
                _tiles(B, config.block_chunk, columns_state, TOKENS),
                _tiles(C, config.block_chunk, columns_state, TOKENS),
                row_tiles(gram_dtype, nslots * ngroups * config.block_chunk, config.block_chunk, config.block_chunk),
                row_tiles(torch.float32, nslots * ngroups, config.block_chunk, 1),
                row_tiles(torch.float32, nslots * nheads, nvectors * config.block_chunk, 1),
                None if packed else _tiles(out, config.block_chunk, config.block_headdim, TOKENS),
            ),
        )  # fmt: skip
        launches.append(
            (
                output,
                "D initial_states cu_seqlens part_states part_decays final_states flags out "
                "x z B C gram gram_log2 vectors out",
            )
        )
        again = backend.Launch(
            _scan_again_kernel,
            min(2 * hopper_programs, 2 * info.multiprocessors),
            (*sizes, skew, first_pair, first_unit, max(nunits, 1), 2 * hopper_programs, *steps),
            (
                headdim, dstate, compensated, nvectors, config.block_chunk, config.block_headdim, block_dstate, unit,
                z_unit, wide, _DOT[dot], early,
            ),
            early=early,
        )  # fmt: skip
        launches.append((again, f"{inputs} {made} flags"))
    else:
        output = backend.Launch(
            _scan_output_kernel,
            (first_pair + npairs * nsegments) * nblocks_headdim,
            (*sizes, first_pair, max(npairs, 1), *steps),
            (
                headdim, dstate, split_sum, compensated, nvectors, config.block_chunk, config.block_headdim,
                block_dstate, unit, z_unit, wide, _DOT[dot], precision, config.output.num_stages, early,
            ),
            config.output,
            early=early,
            tiles=(
                _tiles(x, config.block_chunk, config.block_headdim),
                _tiles(B, config.block_chunk, block_dstate),
                _tiles(C, config.block_chunk, block_dstate),
                None if packed else _tiles(out, config.block_chunk, config.block_headdim),
            )
            if use_tma
            else (None,) * 4,
        )  # fmt: skip
        launches.append((output, f"{inputs} {made} x B C out"))
    return backend.Launches(
        "x dt A B C D z dt_bias initial_states seq_idx cu_seqlens",
        tuple(launches),
        (
            backend.Result("out", tuple(x[0]), x_dtype),
            backend.Result("final_states", (rows, nheads, headdim, dstate), torch.float32),
        ),
        {
            "vectors": (nslots * nheads * nvectors * config.block_chunk, torch.float32),
            "exits": (nslots * nheads, torch.float32),
            "gram": (nslots * ngroups * config.block_chunk**2, gram_dtype),
            "gram_log2": (nslots * ngroups * config.block_chunk if hopper else 0, torch.float32),
            "part_states": (npairs * nparts * headdim * dstate, torch.float32),
            "part_decays": (npairs * nparts, torch.float32),
            "flags": (2 * hopper_programs, torch.int32),
        },
    )
