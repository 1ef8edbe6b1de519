"""The fused forward in cuTile: the state of a head stays in registers from a sequence's first token to its last.

In chunks of 64 tokens, with a[i] = sum(d[j] * A for j <= i) inside the chunk and S the state at its entry:

    y[i] = exp(a[i]) * S @ C[i] + sum(W[i, j] * x[j] for j <= i) + D * x[i], times silu(z[i])
    W[i, j] = (C[i] . B[j]) * exp(a[i] - a[j]) * d[j]
    S' = exp(a[63]) * S + sum(exp(a[63] - a[j]) * d[j] * x[j] (outer) B[j])

Three kernels, or two where the heads fill the GPU or rows are short:

1. `_prepare_kernel`: per chunk and head d and a, exp(a[i]), and d[j] * exp(a[63] - a[j]); a program owns a chunk of a
   few heads. Or C[i] . B[j] for j <= i, once for all heads of a group; a program owns a chunk of a group.
2. `_part_states_kernel`: what each part of a sequence adds to the state, so that several programs can share one
   sequence. It re-reads x and B of all but the last segment. In short rows this kernel would take longer than its work:
   there, each segment finds its entry state itself.
3. `_scan_kernel`: a program owns a tile of headdim of one head, for a sequence or a segment of one, and walks its
   chunks. Each reads x, z and the decays once; B, C and the products come again for each head of the group, from L2.

Where sequences are cut, the kernels after the first are launched early and wait themselves for the end of the kernel
before, which has waited likewise. The first is not: it may overwrite what an earlier call still reads.

The products are transposed, y.T = S C.T + x.T W.T and S = x.T B, so that S, the accumulator of one product, is the left
operand of the other without leaving its registers. Runs of seq_idx need nothing of the scan kernel but selections:
decays and products across a boundary are 0, and B comes as a copy without the tokens before a chunk's last boundary.
Packed sequences are rows; each begins a chunk of its own, in a slot that the device finds, and B is copied too.
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
)
from tilegym_mamba2.backends.cutile import (
    Hints,
    Launch,
    Launches,
    choose,
    device_info,
    layouts,
    planned,
)
from tilegym_mamba2.ops.mamba_chunk_scan import _cutile_kernels as kernels
from tilegym_mamba2.ops.mamba_chunk_scan._segments import best_skew
from tilegym_mamba2.problem import float64_reason
from tilegym_mamba2.registry import register

_ARGUMENTS = "x dt A B C D z dt_bias initial_states seq_idx cu_seqlens"
_CHUNK = kernels.CHUNK
_LARGEST_DSTATE = 256
_PRODUCTS = {BFLOAT16: "bfloat16", TFLOAT32: "tf32", FLOAT32: "float32"}
_MOST_CHUNKS_OWN_ENTRY = 16  # of rows whose segments find their entry states themselves
_ENTRY_COST = 0.3  # of that for each token, in walks over it
_HEADDIM = 64  # rows of a state that a program owns: what a matrix instruction of Hopper has


class _Configuration(NamedTuple):
    scan: Hints
    parts: Hints
    parts_dstate: int  # columns of a state that a program of the parts' kernel owns
    resident: int  # programs of the scan kernel that a multiprocessor holds


def _configurations(dstate: int, operand: int) -> tuple[_Configuration, ...]:
    """Configurations, the choice by rule first; `tilegym-mamba2 tune` measures the others against it."""
    wide = Hints(occupancy=1, num_worker_warps=8)
    if operand in (TFLOAT32, FLOAT32):
        return (_Configuration(wide, wide, 128, 1),)
    two = Hints(occupancy=2)
    one = Hints(occupancy=1, num_worker_warps=4)
    if dstate > 128:
        return _Configuration(wide, two, 128, 1), _Configuration(one, two, 128, 1)
    three = Hints(occupancy=3)
    smaller = _Configuration(two, three, 64, 2) if dstate > 64 else _Configuration(three, three, 64, 3)
    return _Configuration(two, two, 128, 2), _Configuration(one, two, 128, 1), smaller


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
    if initial_states is not None and initial_states.dtype == torch.float64:
        initial_states = initial_states.float()
    rows = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    if rows == 0 or x.numel() == 0:
        out = torch.zeros_like(x, memory_format=torch.contiguous_format)
        final = torch.zeros((rows, *x.shape[2:], B.shape[3]), dtype=torch.float32, device=x.device)
        if initial_states is not None:
            final.copy_(initial_states)
    else:
        tensors = (x, dt, A, B, C, D, z, dt_bias, initial_states, seq_idx, cu_seqlens)
        plan = _plan(layouts(*tensors), dt_softplus, tuple(dt_limit), operand_type(x, B, C), x.device)
        out, final = plan(tensors)
    if cu_seqlens is None:
        return out, final, None
    last = final[-1:] if rows > 0 else final.new_zeros(x.shape[0], *final.shape[1:])
    return out, last, final


@planned
def _plan(given: Any, dt_softplus: bool, dt_limit: tuple[float, float], operand: int, device: torch.device) -> Launches:
    x, _, _, B, _, D, z, dt_bias, initial_states, seq_idx, cu_seqlens = given
    batch, seqlen, nheads, headdim = x[0]
    ngroups, dstate = B[0][2:]
    if operand == FLOAT16:
        operand = TFLOAT32  # as precise, and a state in float16 would overflow
    precise = operand != BFLOAT16
    # Without D, whose term is exact, rounding the products that make the state shows in out.
    compensated = operand == BFLOAT16 and D is None
    configuration = choose(
        _configurations(dstate, operand), "mamba_chunk_scan", device_info(device), headdim=headdim, dstate=dstate,
        products=_PRODUCTS[operand], compensated=compensated,
    )  # fmt: skip
    block_dstate = power_of_two(dstate, 16, _LARGEST_DSTATE)
    parts_dstate = min(block_dstate, configuration.parts_dstate)
    isolated, varlen = seq_idx is not None, cu_seqlens is not None
    nchunks = -(-seqlen // _CHUNK)
    rows = cu_seqlens[0][0] - 1 if varlen else batch
    nslots = seqlen // _CHUNK + rows if varlen else nchunks  # so many hold the chunks of any sequences

    block_heads = power_of_two(nheads, 1, 16)
    nproducts = batch * nslots * ngroups
    prepare = Launch(
        kernels._prepare_kernel,
        (nproducts + batch * nslots * -(-nheads // block_heads),),
        (
            float(dt_limit[0]), float(dt_limit[1]), seqlen, nproducts, block_heads, min(block_dstate, 128),
            dt_bias is not None, dt_softplus, isolated, varlen, precise, operand,
        ),
        Hints(occupancy=1, num_worker_warps=8) if precise else Hints(occupancy=2 if isolated else 4),
    )  # fmt: skip

    units = rows * nheads * -(-headdim // _HEADDIM)
    programs = device_info(device).multiprocessors * configuration.resident
    whole, segments, nparts = (units, 1, 1) if varlen else _split(units, programs, nchunks)
    own_entry = segments > 1 and nchunks <= _MOST_CHUNKS_OWN_ENTRY and dstate <= 128
    skew = best_skew(segments, nchunks, _ENTRY_COST) if own_entry else 0
    count = 0 if own_entry else (units - whole) * (segments - 1) * nparts
    parts = None
    if count > 0:
        parts = Launch(
            kernels._part_states_kernel,
            (count * -(-dstate // parts_dstate),),
            (
                whole, segments * nparts, (segments - 1) * nparts, nchunks, _HEADDIM, parts_dstate, precise, isolated,
                compensated, operand,
            ),
            configuration.parts,
            dependent=True,
        )  # fmt: skip
    skip = kernels.NO_SKIP if D is None else kernels.SKIP_OF_HEAD if len(D[0]) == 1 else kernels.SKIP_OF_CHANNEL
    scan = Launch(
        kernels._scan_kernel,
        (whole + (units - whole) * segments,),
        (
            whole, segments, nparts, skew, nchunks, _HEADDIM, block_dstate, precise, skip, z is not None,
            initial_states is not None, count > 0, own_entry, isolated, varlen, compensated, operand,
        ),
        configuration.scan,
        dependent=segments > 1,
    )  # fmt: skip
    scratch = {
        "decays": ((batch, nheads, nslots, kernels.ROWS_PRECISE if precise else kernels.ROWS, _CHUNK), torch.float32),
        "products": ((batch, nslots, ngroups, _CHUNK, _CHUNK), torch.float32),
    }
    if isolated or varlen:
        scratch["B_kept"] = ((batch, nslots * _CHUNK, ngroups, dstate), B[2])
    if parts is not None:
        scratch["states"] = ((count, _HEADDIM, block_dstate), torch.float32)
        scratch["factors"] = ((count, 1), torch.float32)
    names = {name for name, layout in zip(_ARGUMENTS.split(), given, strict=True) if layout is not None}
    names |= {"out", "final", *scratch}

    def arrays(wanted: str) -> str:
        return " ".join(name if name in names else "-" for name in wanted.split())

    kept = "B_kept" if isolated or varlen else "B"
    launches = [
        (prepare, arrays("dt A dt_bias B C seq_idx cu_seqlens decays products B_kept")),
        (scan, arrays(f"x {kept} C products decays D z initial_states states factors cu_seqlens out final")),
    ]
    if parts is not None:
        launches.insert(1, (parts, arrays(f"x {kept} decays states factors")))
    results = {"out": (tuple(x[0]), x[2]), "final": ((rows, nheads, headdim, dstate), torch.float32)}
    return Launches(_ARGUMENTS, launches, results, scratch)
