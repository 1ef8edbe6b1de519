"""The op chunk_cumsum: time steps, and the cumulative decay exponents inside each chunk."""

from typing import Any

from torch import Tensor

from tilegym_mamba2 import registry
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
    problem = chunk_cumsum_problem(dt, A, chunk_size, dt_bias, dt_softplus, dt_limit)
    implementation = registry.select("chunk_cumsum", problem, backend)
    result: Any = implementation.function(dt, A, chunk_size, dt_bias, dt_softplus, dt_limit)
    return result
