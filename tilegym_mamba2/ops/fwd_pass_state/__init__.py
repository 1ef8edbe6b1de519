"""The op fwd_pass_state: the state at the entry of each chunk, and at the end."""

from typing import Any

import torch
from torch import Tensor

from tilegym_mamba2 import registry, torch_operator
from tilegym_mamba2.problem import fwd_pass_state_problem


def fwd_pass_state(
    x: Tensor,
    B: Tensor,
    dt_out: Tensor,
    dA_cumsum: Tensor,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    state_dtype: torch.dtype | None = None,
    *,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Computes the state H that enters each chunk, and the state after the last token.

        H[c+1] = exp(a[c, -1]) * H[c] + sum(exp(a[c, -1] - a[c, j]) * dt_out[c, j] * x[c, j] (outer) B[c, j] for j)

    per batch row and head, with a = dA_cumsum, H[0] = initial_states or zeros, and head h reading the group
    h // (nheads // ngroups) of B. With seq_idx a sum runs over the tokens of the chunk's last sequence only, and
    H[c] counts only if no sequence begins in the chunk. The second stage of the chunked scan.

    Args:
        x: (batch, seqlen, nheads, headdim), any floating dtype and strides.
        B: (batch, seqlen, ngroups, dstate); ngroups divides nheads.
        dt_out, dA_cumsum: (batch, nheads, nchunks, chunk_size), from `chunk_cumsum` of any backend.
        initial_states: (batch, nheads, headdim, dstate), the state before the first token: it belongs to the
            row's first sequence.
        seq_idx: (batch, seqlen) integers; a new sequence begins wherever the id changes.
        state_dtype: dtype of `states`; None for x's dtype, but float32 if that is float16.
        backend: a backend's name; None chooses as `tilegym_mamba2.registry` says.

    Returns:
        states: (batch, nchunks, nheads, headdim, dstate); states[:, c] is the state after the token before
            chunk c, whichever sequence that token belongs to.
        final_states: (batch, nheads, headdim, dstate), float32 (float64 if x is float64).

    Raises:
        TypeError, ValueError: an argument's type, dtype, shape or device; the message names it.
        BackendUnavailableError, NotImplementedError: the named backend can't run here, or can't do this call.
    """
    if torch_operator.is_traced(x):
        name = registry.traced_backend(backend)
        return _operator(x, B, dt_out, dA_cumsum, initial_states, seq_idx, state_dtype, name)
    return _run(x, B, dt_out, dA_cumsum, initial_states, seq_idx, state_dtype, backend)


def _run(
    x: Tensor,
    B: Tensor,
    dt_out: Tensor,
    dA_cumsum: Tensor,
    initial_states: Tensor | None,
    seq_idx: Tensor | None,
    state_dtype: torch.dtype | None,
    backend: str | None,
) -> tuple[Tensor, Tensor]:
    problem = fwd_pass_state_problem(x, B, dt_out, dA_cumsum, initial_states, seq_idx, state_dtype)
    implementation = registry.select("fwd_pass_state", problem, backend)
    return implementation.run(problem, x, B, dt_out, dA_cumsum, initial_states, seq_idx, state_dtype)


def _fake(x: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    problem = fwd_pass_state_problem(x, *rest[:-1])
    state_dtype = rest[-2]
    if state_dtype is None:
        state_dtype = torch.float32 if x.dtype == torch.float16 else x.dtype
    state = (problem.nheads, problem.headdim, problem.dstate)
    states = x.new_empty((problem.batch, problem.nchunks, *state), dtype=state_dtype)
    final_dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    return states, x.new_empty((problem.batch, *state), dtype=final_dtype)


_operator = torch_operator.define(
    "fwd_pass_state",
    "Tensor x, Tensor B, Tensor dt_out, Tensor dA_cumsum, Tensor? initial_states, Tensor? seq_idx, "
    "ScalarType? state_dtype, str? backend",
    "(Tensor, Tensor)",
    run=_run,
    fake=_fake,
    problem=fwd_pass_state_problem,
)
