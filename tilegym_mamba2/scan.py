"""The drop-in for mamba_ssm's mamba_chunk_scan_combined: its signature and returns, on any backend."""

import torch
from torch import Tensor

from tilegym_mamba2.ops.mamba_chunk_scan import mamba_chunk_scan


def mamba_chunk_scan_combined(
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
    return_final_states: bool = False,
    return_varlen_states: bool = False,
    state_dtype: torch.dtype | None = None,
    *,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """Computes the Mamba-2 (SSD) forward: a drop-in for the function of this name in mamba_ssm.

    Per batch row and head h, with state H (headdim, dstate) and group g = h // (nheads // ngroups):

        d[t] = clamp(softplus?(dt[t, h] + dt_bias[h]), *dt_limit)
        H[t] = exp(d[t] * A[h]) * H[t-1] + d[t] * x[t, h] (outer) B[t, g]
        y[t] = (H[t] @ C[t, g] + D[h] * x[t, h]) * silu(z[t, h])

    (Dao and Gu, 2024, "Transformers are SSMs".) The result does not depend on chunk_size, and equal calls on one
    backend give equal bits. Every tensor may be any strided view, and the dtypes of x, B, C, dt and z may differ.

    Args:
        x: (batch, seqlen, nheads, headdim), bfloat16, float16, float32 or (torch-reference only) float64.
        dt: (batch, seqlen, nheads), time steps before bias and softplus.
        A: (nheads,), decay rates, at most 0: cutile bounds every decay by 1.
        B, C: (batch, seqlen, ngroups, dstate); ngroups divides nheads.
        chunk_size: tokens per chunk, at least 1.
        D: (nheads,) or (nheads, headdim), the skip connection.
        z: (batch, seqlen, nheads, headdim), the gate, applied after D.
        dt_bias: (nheads,).
        initial_states: (batch, nheads, headdim, dstate), the state before the first token, for the row's first
            sequence. With cu_seqlens (nseq, ...), one per sequence, or (1, ...), for the first sequence alone.
        seq_idx: (batch, seqlen) integers; a new sequence begins wherever the id changes, and an id that comes
            back is a new sequence.
        cu_seqlens: (nseq + 1,) int32 or int64, with batch 1: where each packed sequence begins, rising from 0
            to seqlen. Sequences may be empty. On a GPU its values are not checked.
        dt_softplus: whether d passes through softplus(v) = log1p(exp(v)), linear above 20.
        dt_limit: (low, high), always applied.
        return_final_states: also return the state after the row's last token.
        return_varlen_states: also return the state at the end of each sequence of cu_seqlens.
        state_dtype: dtype of the states between chunks; None for x's dtype, but float32 if that is float16.
        backend: a backend's name; None chooses as `tilegym_mamba2.registry` says.

    Returns:
        out, (out, final_states), (out, varlen_states) or (out, final_states, varlen_states):
        out: (batch, seqlen, nheads, headdim), x's dtype, contiguous.
        final_states: (batch, nheads, headdim, dstate), float32 (float64 if x is float64).
        varlen_states: (nseq, nheads, headdim, dstate), as final_states; an empty sequence's is its initial state.

    Raises:
        TypeError, ValueError: an argument's type, dtype, shape, device or value; the message names it.
        BackendUnavailableError: the named backend can't run here.
        NotImplementedError: the named backend can't do this call (the message names the argument), or an input
            requires grad and the backend has no backward.
    """
    returns = {"return_final_states": return_final_states, "return_varlen_states": return_varlen_states}
    for name, value in returns.items():
        if not isinstance(value, bool):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"mamba_chunk_scan_combined: {name} must be a bool, got {type(value).__name__}")
    if return_varlen_states and cu_seqlens is None:
        raise ValueError("mamba_chunk_scan_combined: return_varlen_states=True needs cu_seqlens, got None")
    out, final_states, varlen_states = mamba_chunk_scan(
        x, dt, A, B, C, chunk_size, D, z, dt_bias, initial_states, seq_idx, cu_seqlens, dt_softplus, dt_limit,
        state_dtype, backend=backend,
    )  # fmt: skip
    returned = [out]
    if return_final_states:
        returned.append(final_states)
    if return_varlen_states:
        assert varlen_states is not None
        returned.append(varlen_states)
    return out if len(returned) == 1 else tuple(returned)
