"""The op mamba_chunk_scan: the whole forward, by default the composition of its three stages."""

import itertools
from typing import Any, cast

import torch
from torch import Tensor

from tilegym_mamba2 import registry, torch_operator
from tilegym_mamba2.ops.chunk_cumsum import chunk_cumsum
from tilegym_mamba2.ops.compute_out import compute_out
from tilegym_mamba2.ops.fwd_pass_state import fwd_pass_state
from tilegym_mamba2.problem import scan_problem


def mamba_chunk_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    state_dtype: torch.dtype | None = None,
    *,
    backend: str | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Computes the whole forward; arguments and errors as in `tilegym_mamba2.mamba_chunk_scan_combined`.

    Returns:
        out: (batch, seqlen, nheads, headdim), x's dtype, contiguous.
        final_states: (batch, nheads, headdim, dstate), float32 (float64 if x is float64).
        varlen_states: the state at the end of each sequence of cu_seqlens, (nseq, nheads, headdim, dstate) in the
            dtype of final_states; None without cu_seqlens.
    """
    if torch_operator.is_traced(x):
        out, final_states, varlen_states = _operator(
            x, dt, A, B, C, chunk_size, D, z, dt_bias, initial_states, seq_idx, cu_seqlens, dt_softplus, dt_limit,
            state_dtype, registry.traced_backend(backend),
        )  # fmt: skip
        return out, final_states, None if cu_seqlens is None else varlen_states
    return _run(
        x, dt, A, B, C, chunk_size, D, z, dt_bias, initial_states, seq_idx, cu_seqlens, dt_softplus, dt_limit,
        state_dtype, backend,
    )  # fmt: skip


def _run(
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
    backend: str | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    problem = scan_problem(
        x, dt, A, B, C, chunk_size, D, z, dt_bias, initial_states, seq_idx, cu_seqlens, dt_softplus, dt_limit,
        state_dtype,
    )  # fmt: skip
    implementation = registry.select("mamba_chunk_scan", problem, backend)
    if initial_states is not None and cu_seqlens is not None and initial_states.shape[0] != problem.nseq:
        rest = initial_states.new_zeros(max(problem.nseq - 1, 0), *initial_states.shape[1:])
        initial_states = torch.cat([initial_states, rest])[: problem.nseq]
    return implementation.run(
        problem, x, dt, A, B, C, problem.chunk_size, D, z, dt_bias, initial_states, seq_idx, cu_seqlens, dt_softplus,
        dt_limit, state_dtype,
    )  # fmt: skip


def _run_operator(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Returns three tensors each time, and none that is a view of another: an operator must."""
    out, final_states, varlen_states = _run(*arguments)
    if varlen_states is None:
        varlen_states = final_states.new_empty(0, *final_states.shape[1:])
    elif final_states.untyped_storage().data_ptr() == varlen_states.untyped_storage().data_ptr():
        final_states = final_states.clone()
    return out, final_states, varlen_states


def _fake(x: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    problem = scan_problem(x, *rest[:-1])
    state = (problem.nheads, problem.headdim, problem.dstate)
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    final_states = x.new_empty((problem.batch, *state), dtype=dtype)
    return x.new_empty(x.shape), final_states, x.new_empty((problem.nseq, *state), dtype=dtype)


_operator = torch_operator.define(
    "mamba_chunk_scan",
    "Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, SymInt chunk_size, Tensor? D, Tensor? z, Tensor? dt_bias, "
    "Tensor? initial_states, Tensor? seq_idx, Tensor? cu_seqlens, bool dt_softplus, float[] dt_limit, "
    "ScalarType? state_dtype, str? backend",
    "(Tensor, Tensor, Tensor)",
    run=_run_operator,
    fake=_fake,
    problem=scan_problem,
)


@registry.register_composition("mamba_chunk_scan", ("chunk_cumsum", "fwd_pass_state", "compute_out"))
def compose(
    backend: str,
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
    """The three stages in order; with cu_seqlens for one sequence after the other, which reads it on the host."""
    if cu_seqlens is None:
        dA_cumsum, dt_out = chunk_cumsum(dt, A, chunk_size, dt_bias, dt_softplus, dt_limit, backend=backend)
        states, final_states = fwd_pass_state(
            x, B, dt_out, dA_cumsum, initial_states, seq_idx, state_dtype, backend=backend
        )
        out = compute_out(x, B, C, dt_out, dA_cumsum, states, D, z, seq_idx, backend=backend)
        return out, final_states, None

    offsets = cast(list[int], cu_seqlens.tolist())
    outs: list[Tensor] = []
    finals: list[Tensor] = []
    for index, (start, stop) in enumerate(itertools.pairwise(offsets)):
        out, final, _ = compose(
            backend,
            x[:, start:stop],
            dt[:, start:stop],
            A,
            B[:, start:stop],
            C[:, start:stop],
            chunk_size,
            D,
            None if z is None else z[:, start:stop],
            dt_bias,
            None if initial_states is None else initial_states[index : index + 1],
            None if seq_idx is None else seq_idx[:, start:stop],
            None,
            dt_softplus,
            dt_limit,
            state_dtype,
        )
        outs.append(out)
        finals.append(final)
    if not outs:
        final_dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        nothing = x.new_zeros(1, *x.shape[2:], B.shape[3], dtype=final_dtype)
        return (
            torch.empty_like(x, memory_format=torch.contiguous_format),
            nothing,
            nothing.new_empty(0, *nothing.shape[1:]),
        )
    return torch.cat(outs, 1), finals[-1], torch.cat(finals)
