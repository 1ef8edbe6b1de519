"""The fused forward in cuTile: the state of a head stays in registers from a sequence's first token to its last.

In chunks of 64 tokens, with a[i] = sum(d[j] * A for j <= i) inside the chunk and S the state at its entry:

    y[i] = exp(a[i]) * S @ C[i] + sum(W[i, j] * x[j] for j <= i) + D * x[i], times silu(z[i])
    W[i, j] = (C[i] . B[j]) * exp(a[i] - a[j]) * d[j]
    S' = exp(a[63]) * S + sum(exp(a[63] - a[j]) * d[j] * x[j] (outer) B[j])

Four kernels, or three where the heads fill the GPU:

1. `_decays_kernel`: per chunk and head d and a, exp(a[i]), and d[j] * exp(a[63] - a[j]). A program owns a chunk of a
   few heads.
2. `_group_products_kernel`: C[i] . B[j] for j <= i, once for all heads of a group. A program owns a chunk of a group;
   it runs beside the first kernel.
3. `_part_states_kernel`: what each part of a sequence adds to the state, so that several programs can share one
   sequence. It re-reads x and B of all but the last segment.
4. `_scan_kernel`: a program owns a tile of headdim of one head, for a sequence or a segment of one, and walks its
   chunks. Each reads x, z and the decays once; B, C and the products come again for each head of the group, from L2.

The products are transposed, y.T = S C.T + x.T W.T and S = x.T B, so that S, the accumulator of one product, is the left
operand of the other without leaving its registers. Runs of seq_idx need nothing of the scan kernel but selections:
decays and products across a boundary are 0, and B comes as a copy without the tokens before a chunk's last boundary.
Packed sequences are rows; each begins a chunk of its own, in a slot that needs no host synchronisation to find.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilegym_mamba2.backends._cutile_math import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    TFLOAT32,
    operand_type,
    power_of_two,
    run_index,
)
from tilegym_mamba2.backends.cutile import Hints, choose, device_info, launch
from tilegym_mamba2.ops.mamba_chunk_scan import _cutile_kernels as kernels
from tilegym_mamba2.problem import float64_reason
from tilegym_mamba2.registry import register

_CHUNK = kernels.CHUNK
_LARGEST_DSTATE = 256
_HEADDIM = 64  # rows of a state that a program owns: what a matrix instruction of Hopper has


class _Configuration(NamedTuple):
    scan: Hints
    parts: Hints
    parts_dstate: int  # columns of a state that a program of the parts' kernel owns
    resident: int  # programs of the scan kernel that a multiprocessor holds


def _configurations(dstate: int, operand: int) -> tuple[_Configuration, ...]:
    """Configurations, the default first: measured on sm_90 for 16-bit operands, by rule elsewhere."""
    wide = Hints(occupancy=1, num_worker_warps=8)
    if operand in (TFLOAT32, FLOAT32):
        return (_Configuration(wide, wide, 128, 1),)
    two = Hints(occupancy=2)
    one = Hints(occupancy=1, num_worker_warps=4)
    if dstate > 128:
        return _Configuration(wide, two, 128, 1), _Configuration(one, two, 128, 1)
    return _Configuration(two, two, 128, 2), _Configuration(one, two, 128, 1)


def _split(units: int, slots: int, nchunks: int) -> tuple[int, int, int]:
    """How units (a tile of a head's sequence each) fill the slots for programs that the GPU has.

    Returns how many units are done whole, into how many segments each other unit is cut, and how many parts per
    segment the pass has that finds what the segments begin with.
    """
    whole = units // slots * slots
    rest = units - whole
    segments = min(slots // rest, nchunks) if 0 < rest <= slots // 2 else 1
    if segments < 2:
        return units, 1, 1
    parts = slots // (rest * (segments - 1))
    return whole, segments, max(1, min(parts, 4, nchunks // segments))


def _supports(problem: Any) -> str | None:
    if problem.dstate > _LARGEST_DSTATE:
        return f"dstate is {problem.dstate}, and a state must fit a program's registers: at most {_LARGEST_DSTATE}"
    return float64_reason(problem)


@register("mamba_chunk_scan", "cutile", supports=_supports)
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
    if dt_limit[0] < 0:
        raise NotImplementedError(
            f"backend 'cutile', mamba_chunk_scan: dt_limit is {dt_limit}, and its kernels need time steps of at least 0"
        )
    batch, seqlen, nheads, headdim = x.shape
    ngroups, dstate = B.shape[2:]
    device = x.device
    rows = batch if cu_seqlens is None else len(cu_seqlens) - 1
    out = torch.empty(x.shape, dtype=x.dtype, device=device)
    final = torch.empty(rows, nheads, headdim, dstate, dtype=torch.float32, device=device)
    if initial_states is not None:
        initial_states = initial_states.to(torch.float32)
    if out.numel() == 0 or final.numel() == 0:
        out.zero_()
        final.zero_() if initial_states is None else final.copy_(initial_states)
        return _returned(out, final, batch, cu_seqlens)

    operand = operand_type(x, B, C)
    if operand == FLOAT16:
        operand = TFLOAT32  # as precise, and a state in float16 would overflow
    precise = operand != BFLOAT16
    # Without D, whose term is exact, rounding the products that make the state shows in out.
    compensated = operand == BFLOAT16 and D is None
    configuration = choose(_configurations(dstate, operand))
    block_dstate = power_of_two(dstate, 16, _LARGEST_DSTATE)
    parts_dstate = min(block_dstate, configuration.parts_dstate)
    isolated, varlen = seq_idx is not None, cu_seqlens is not None

    absent = out  # stands for what a call does not have, and is not touched in its place
    sequences: Tensor = absent if cu_seqlens is None else cu_seqlens
    slot_sequence = absent
    nchunks = nslots = -(-seqlen // _CHUNK)
    if cu_seqlens is not None:
        # A sequence's first slot is known on the device; so many slots hold the chunks of any sequences.
        nslots = seqlen // _CHUNK + rows + 1
        first_slots = cu_seqlens[:-1] // _CHUNK + torch.arange(rows, device=device)
        slots = torch.arange(nslots, device=device)
        slot_sequence = torch.searchsorted(first_slots, slots, right=True, out_int32=True) - 1
    runs = absent if seq_idx is None else run_index(seq_idx)

    decay_rows = kernels.ROWS_PRECISE if precise else kernels.ROWS
    decays = torch.empty(batch, nheads, nslots, decay_rows, _CHUNK, dtype=torch.float32, device=device)
    block_heads = power_of_two(nheads, 1, 16)
    launch(
        kernels._decays_kernel,
        (batch * nslots * -(-nheads // block_heads),),
        (
            dt, A, absent if dt_bias is None else dt_bias, runs, slot_sequence, sequences, decays, float(dt_limit[0]),
            float(dt_limit[1]), seqlen, block_heads, dt_bias is not None, dt_softplus, isolated, varlen, precise,
        ),
        Hints(occupancy=2 if isolated else 4),
    )  # fmt: skip
    products = torch.empty(batch, nslots, ngroups, _CHUNK, _CHUNK, dtype=torch.float32, device=device)
    B_kept = torch.empty(batch, nslots * _CHUNK, ngroups, dstate, dtype=B.dtype, device=device) if isolated else B
    launch(
        kernels._group_products_kernel,
        (batch * nslots * ngroups,),
        (
            B, C, runs, slot_sequence, sequences, products, B_kept, seqlen, min(block_dstate, 128), isolated, varlen,
            operand,
        ),
        Hints(occupancy=4),
        dependent=True,
    )  # fmt: skip

    units = rows * nheads * -(-headdim // _HEADDIM)
    programs = device_info(device).multiprocessors * configuration.resident
    whole, segments, parts = (units, 1, 1) if varlen else _split(units, programs, nchunks)
    part_states = part_factors = absent
    if segments > 1:
        count = (units - whole) * (segments - 1) * parts
        part_states = torch.empty(count, _HEADDIM, block_dstate, dtype=torch.float32, device=device)
        part_factors = torch.empty(count, 1, dtype=torch.float32, device=device)
        launch(
            kernels._part_states_kernel,
            (count * -(-dstate // parts_dstate),),
            (
                x, B_kept, decays, part_states, part_factors, whole, segments * parts, (segments - 1) * parts, nchunks,
                _HEADDIM, parts_dstate, precise, isolated, compensated, operand,
            ),
            configuration.parts,
        )  # fmt: skip
    skip = kernels.NO_SKIP if D is None else kernels.SKIP_OF_HEAD if D.dim() == 1 else kernels.SKIP_OF_CHANNEL
    launch(
        kernels._scan_kernel,
        (whole + (units - whole) * segments,),
        (
            x, B_kept, C, products, decays, absent if D is None else D, absent if z is None else z,
            absent if initial_states is None else initial_states, part_states, part_factors, sequences, out, final,
            whole, segments, parts, nchunks, _HEADDIM, block_dstate, precise, skip, z is not None,
            initial_states is not None, segments > 1, isolated, varlen, compensated, operand,
        ),
        configuration.scan,
    )  # fmt: skip
    return _returned(out, final, batch, cu_seqlens)


def _returned(
    out: Tensor, final: Tensor, batch: int, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    if cu_seqlens is None:
        return out, final, None
    last = final[-1:] if len(final) > 0 else final.new_zeros(batch, *final.shape[1:])
    return out, last, final
