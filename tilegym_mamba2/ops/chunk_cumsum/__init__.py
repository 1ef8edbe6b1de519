"""The op chunk_cumsum: time steps, and the cumulative decay exponents inside each chunk."""

from typing import Any

import torch
from torch import Tensor

from tilegym_mamba2 import registry, torch_operator
from tilegym_mamba2.problem import chunk_cumsum_problem


def chunk_cumsum(
    dt: Tensor,
    A: Tensor,
    chunk_size: int,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    *,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Computes the time steps d and the inclusive cumulative sum of d * A inside each chunk.

        d[b, t, h] = clamp(softplus?(dt[b, t, h] + dt_bias[h]), *dt_limit)
        dt_out[b, h, c, i] = d[b, c * chunk_size + i, h]
        dA_cumsum[b, h, c, i] = sum(dt_out[b, h, c, j] * A[h] for j <= i)

    The first of the three stages of the chunked scan (Dao and Gu, 2024, "Transformers are SSMs", section 6).

    Args:
        dt: (batch, seqlen, nheads), any floating dtype, any strides.
        A: (nheads,), the decay rates in 1/time, usually negative.
        chunk_size: tokens per chunk, at least 1.
        dt_bias: (nheads,), added before the softplus.
        dt_softplus: whether d passes through softplus(v) = log1p(exp(v)), linear above 20.
        dt_limit: (low, high); d is always clamped to it.
        backend: a backend's name; None chooses as `tilegym_mamba2.registry` says.

    Returns:
        dA_cumsum, dt_out: both (batch, nheads, nchunks, chunk_size), float32 (float64 if dt or A is float64),
        dA_cumsum in natural-log units. Positions past seqlen have dt_out 0 and repeat the last sum.

    Raises:
        TypeError, ValueError: an argument's type, dtype, shape, device or value; the message names it.
        BackendUnavailableError, NotImplementedError: the named backend can't run here, or can't do this call.
    """
    if torch_operator.is_traced(dt):
        name = registry.traced_backend(backend)
        return _operator(dt, A, chunk_size, dt_bias, dt_softplus, dt_limit, name)
    return _run(dt, A, chunk_size, dt_bias, dt_softplus, dt_limit, backend)


def _run(
    dt: Tensor,
    A: Tensor,
    chunk_size: int,
    dt_bias: Tensor | None,
    dt_softplus: bool,
    dt_limit: tuple[float, float],
    backend: str | None,
) -> tuple[Tensor, Tensor]:
    problem = chunk_cumsum_problem(dt, A, chunk_size, dt_bias, dt_softplus, dt_limit)
    implementation = registry.select("chunk_cumsum", problem, backend)
    return implementation.run(problem, dt, A, problem.chunk_size, dt_bias, dt_softplus, dt_limit)


def _fake(dt: Tensor, A: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    problem = chunk_cumsum_problem(dt, A, *rest[:-1])
    dtype = torch.float64 if torch.float64 in (dt.dtype, A.dtype) else torch.float32
    shape = (problem.batch, problem.nheads, problem.nchunks, problem.chunk_size)
    return dt.new_empty(shape, dtype=dtype), dt.new_empty(shape, dtype=dtype)


_operator = torch_operator.define(
    "chunk_cumsum",
    "Tensor dt, Tensor A, SymInt chunk_size, Tensor? dt_bias, bool dt_softplus, float[] dt_limit, str? backend",
    "(Tensor, Tensor)",
    run=_run,
    fake=_fake,
    problem=chunk_cumsum_problem,
)
