"""The op selective_state_update: one token of the recurrence, for decoding."""

from typing import Any

from torch import Tensor

from tilegym_mamba2 import registry, torch_operator
from tilegym_mamba2.problem import state_update_problem


def selective_state_update(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    state_batch_indices: Tensor | None = None,
    *,
    backend: str | None = None,
) -> Tensor:
    """Advances the state by one token, in place, and returns the token's output: mamba_ssm's function.

        d = softplus?(dt + dt_bias)
        state = exp(d * A) * state + d * x (outer) B
        out = (state @ C + D * x) * silu(z)

    per batch row, head and channel, head h reading the group h // (nheads // ngroups) of B and C. Unlike in the
    scan, d is not clamped. Every argument but state_batch_indices may leave out the head dimension (the group
    dimension for B and C) if there is one head.

    Args:
        state: (batch, nheads, headdim, dstate) or, with state_batch_indices, (nslots, nheads, headdim, dstate);
            updated in place, in its own dtype.
        x: (batch, nheads, headdim).
        dt: (batch, nheads, headdim), usually expanded over headdim.
        A: (nheads, headdim, dstate), usually expanded over headdim and dstate.
        B, C: (batch, ngroups, dstate); ngroups divides nheads.
        D: (nheads, headdim).
        z: (batch, nheads, headdim), the gate.
        dt_bias: (nheads, headdim).
        dt_softplus: whether d passes through softplus, linear above 20.
        state_batch_indices: (batch,) int32 or int64: the row of `state` that each batch row uses, each at most
            once. A negative one marks padding: its output is 0 and no state changes.
        backend: a backend's name; None chooses as `tilegym_mamba2.registry` says.

    Returns:
        out: x's shape and dtype.

    Raises:
        TypeError, ValueError: an argument's type, dtype, shape, device or value; the message names it. Values
            of state_batch_indices are checked on the CPU only.
        BackendUnavailableError, NotImplementedError: the named backend can't run here, or can't do this call.
    """
    headless = getattr(x, "ndim", 0) == 2
    arguments: list[Any] = [
        _with_dim(state, 3, 1),
        _with_dim(x, 2, 1),
        _with_dim(dt, 2, 1),
        _with_dim(A, 2, 0),
        _with_dim(B, 2, 1),
        _with_dim(C, 2, 1),
        _with_dim(D, 1, 0),
        _with_dim(z, 2, 1),
        _with_dim(dt_bias, 1, 0),
        dt_softplus,
        state_batch_indices,
    ]
    if torch_operator.is_traced(x):
        out = _operator(*arguments, registry.traced_backend(backend))
    else:
        out = _run(*arguments, backend)
    return out.squeeze(1) if headless else out


def _run(*arguments: Any) -> Tensor:
    problem = state_update_problem(*arguments[:-1])
    implementation = registry.select("selective_state_update", problem, arguments[-1])
    return implementation.run(problem, *arguments[:-1])


def _fake(*arguments: Any) -> Tensor:
    state_update_problem(*arguments[:-1])
    x: Tensor = arguments[1]
    return x.new_empty(x.shape)


_operator = torch_operator.define(
    "selective_state_update",
    "Tensor(a!) state, Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor? D, Tensor? z, Tensor? dt_bias, "
    "bool dt_softplus, Tensor? state_batch_indices, str? backend",
    "Tensor",
    run=_run,
    fake=_fake,
    problem=state_update_problem,
)


def _with_dim(value: Any, headless_ndim: int, position: int) -> Any:
    return value.unsqueeze(position) if isinstance(value, Tensor) and value.dim() == headless_ndim else value
