"""The op compute_out: the output of every token from its chunk and the state that enters it."""

from typing import Any

from torch import Tensor

from tilegym_mamba2 import registry, torch_operator
from tilegym_mamba2.problem import compute_out_problem


def compute_out(
    x: Tensor,
    B: Tensor,
    C: Tensor,
    dt_out: Tensor,
    dA_cumsum: Tensor,
    states: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    seq_idx: Tensor | None = None,
    *,
    backend: str | None = None,
) -> Tensor:
    """Computes the output of every token.

        y[c, i] = exp(a[c, i]) * states[c] @ C[c, i]
                + sum((C[c, i] . B[c, j]) * exp(a[c, i] - a[c, j]) * dt_out[c, j] * x[c, j] for j <= i)
                + D * x[c, i]
        out = y * silu(z)

    per batch row and head, with a = dA_cumsum and head h reading the group h // (nheads // ngroups) of B and C.
    With seq_idx, j runs over tokens of i's sequence only, and states[c] counts only for tokens of the sequence
    of the token before the chunk (for the first chunk: of the row's first sequence). The third stage of the
    chunked scan.

    Args:
        x: (batch, seqlen, nheads, headdim), any floating dtype and strides.
        B, C: (batch, seqlen, ngroups, dstate); ngroups divides nheads.
        dt_out, dA_cumsum: (batch, nheads, nchunks, chunk_size), from `chunk_cumsum` of any backend.
        states: (batch, nchunks, nheads, headdim, dstate), from `fwd_pass_state` of any backend.
        D: (nheads,) or (nheads, headdim), the skip connection.
        z: (batch, seqlen, nheads, headdim), the gate, applied after D.
        seq_idx: (batch, seqlen) integers; a new sequence begins wherever the id changes.
        backend: a backend's name; None chooses as `tilegym_mamba2.registry` says.

    Returns:
        out: (batch, seqlen, nheads, headdim), x's dtype, contiguous.

    Raises:
        TypeError, ValueError: an argument's type, dtype, shape or device; the message names it.
        BackendUnavailableError, NotImplementedError: the named backend can't run here, or can't do this call.
    """
    if torch_operator.is_traced(x):
        name = registry.traced_backend(backend)
        return _operator(x, B, C, dt_out, dA_cumsum, states, D, z, seq_idx, name)
    return _run(x, B, C, dt_out, dA_cumsum, states, D, z, seq_idx, backend)


def _run(
    x: Tensor,
    B: Tensor,
    C: Tensor,
    dt_out: Tensor,
    dA_cumsum: Tensor,
    states: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    seq_idx: Tensor | None,
    backend: str | None,
) -> Tensor:
    problem = compute_out_problem(x, B, C, dt_out, dA_cumsum, states, D, z, seq_idx)
    implementation = registry.select("compute_out", problem, backend)
    return implementation.run(problem, x, B, C, dt_out, dA_cumsum, states, D, z, seq_idx)


def _fake(x: Tensor, *rest: Any) -> Tensor:
    compute_out_problem(x, *rest[:-1])
    return x.new_empty(x.shape)


_operator = torch_operator.define(
    "compute_out",
    "Tensor x, Tensor B, Tensor C, Tensor dt_out, Tensor dA_cumsum, Tensor states, Tensor? D, Tensor? z, "
    "Tensor? seq_idx, str? backend",
    "Tensor",
    run=_run,
    fake=_fake,
    problem=compute_out_problem,
)
