"""The oracle: the recurrence itself, token by token in float64. It shares no code with any backend."""

import math
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import Tensor

from tilegym_mamba2.testing.errors import INFINITY


def _heads(grouped: Tensor, nheads: int) -> Tensor:
    """(..., ngroups, dstate) in float64 with every head's own row."""
    return grouped.double()[..., torch.arange(nheads) // (nheads // grouped.shape[-2]), :]


def _begins(seq_idx: Tensor | None, x: Tensor) -> Tensor:
    """Whether a token is the first of a sequence that is not the row's first, (batch, seqlen)."""
    begins = torch.zeros(x.shape[:2], dtype=torch.bool, device=x.device)
    if seq_idx is not None:
        begins[:, 1:] = seq_idx[:, 1:] != seq_idx[:, :-1]
    return begins


def _softplus(v: Tensor) -> Tensor:
    return torch.where(v > 20, v, torch.log1p(torch.exp(v.clamp(max=20))))


def _time_steps(dt: Tensor, dt_bias: Tensor | None, dt_softplus: bool, dt_limit: tuple[float, float] | None) -> Tensor:
    d = dt.double()
    if dt_bias is not None:
        d = d + dt_bias.double()
    if dt_softplus:
        d = _softplus(d)
    return d if dt_limit is None else d.clamp(*dt_limit)


def _walk(
    x: Tensor,
    B: Tensor,
    d: Tensor,
    log_decay: Tensor,
    begins: Tensor,
    state: Tensor,
    entries: Mapping[int, Tensor] = MappingProxyType({}),
) -> Iterator[tuple[int, Tensor]]:
    """Yields each token's position and the state after it; `entries` replace the state before a position."""
    values, keys = x.double(), _heads(B, x.shape[2])
    for t in range(x.shape[1]):
        state = torch.where(begins[:, t, None, None, None], 0.0, entries.get(t, state))
        update = (d[:, t, :, None] * values[:, t])[..., None] * keys[:, t, :, None, :]
        state = log_decay[:, t, :, None, None].exp() * state + update
        yield t, state


def _readout(state: Tensor, x: Tensor, C: Tensor, D: Tensor | None, z: Tensor | None) -> Tensor:
    y = (state * C[..., None, :]).sum(-1)
    if D is not None:
        y = y + (D if D.dim() == 2 else D[:, None]).double() * x.double()
    return y if z is None else y * z.double() * torch.sigmoid(z.double())


def _initial(initial_states: Tensor | None, x: Tensor, B: Tensor) -> Tensor:
    if initial_states is not None:
        return initial_states.double()
    return x.new_zeros(x.shape[0], *x.shape[2:], B.shape[3], dtype=torch.float64)


def oracle_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int = 1,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, INFINITY),
    state_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Computes the whole forward token by token in float64: (out, final_states, varlen_states or None).

    Arguments as in `mamba_chunk_scan_combined`; chunk_size and state_dtype change nothing.
    """
    if cu_seqlens is not None:
        return _oracle_packed(
            x, dt, A, B, C, D, z, dt_bias, initial_states, seq_idx, cu_seqlens.tolist(), dt_softplus, dt_limit
        )
    d = _time_steps(dt, dt_bias, dt_softplus, dt_limit)
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    state = _initial(initial_states, x, B)
    C_heads = _heads(C, x.shape[2])
    for t, state in _walk(x, B, d, d * A.double(), _begins(seq_idx, x), state):  # noqa: B020
        out[:, t] = _readout(state, x[:, t], C_heads[:, t], D, None if z is None else z[:, t])
    return out, state.clone(), None


def _oracle_packed(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    initial_states: Tensor | None,
    seq_idx: Tensor | None,
    offsets: list[int],
    dt_softplus: bool,
    dt_limit: tuple[float, float],
) -> tuple[Tensor, Tensor, Tensor]:
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    nseq = len(offsets) - 1
    varlen = x.new_zeros(nseq, *x.shape[2:], B.shape[3], dtype=torch.float64)
    for i in range(nseq):
        span = slice(offsets[i], offsets[i + 1])
        has_state = initial_states is not None and i < initial_states.shape[0]
        out[:, span], varlen[i : i + 1], _ = oracle_scan(
            x[:, span],
            dt[:, span],
            A,
            B[:, span],
            C[:, span],
            D=D,
            z=None if z is None else z[:, span],
            dt_bias=dt_bias,
            initial_states=cast(Tensor, initial_states)[i : i + 1] if has_state else None,
            seq_idx=None if seq_idx is None else seq_idx[:, span],
            dt_softplus=dt_softplus,
            dt_limit=dt_limit,
        )
    final = varlen[-1:].clone() if nseq else x.new_zeros(1, *x.shape[2:], B.shape[3], dtype=torch.float64)
    return out, final, varlen


def oracle_chunk_cumsum(
    dt: Tensor,
    A: Tensor,
    chunk_size: int,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, INFINITY),
) -> tuple[Tensor, Tensor]:
    """Computes `chunk_cumsum` token by token in float64: (dA_cumsum, dt_out)."""
    batch, seqlen, nheads = dt.shape
    nchunks = math.ceil(seqlen / chunk_size)
    d = _time_steps(dt, dt_bias, dt_softplus, dt_limit)
    dA_cumsum = torch.zeros(batch, nheads, nchunks, chunk_size, dtype=torch.float64, device=dt.device)
    dt_out = torch.zeros_like(dA_cumsum)
    for t in range(nchunks * chunk_size):
        chunk, i = divmod(t, chunk_size)
        if t < seqlen:
            dt_out[:, :, chunk, i] = d[:, t]
        before = dA_cumsum[:, :, chunk, i - 1] if i else 0.0
        dA_cumsum[:, :, chunk, i] = before + dt_out[:, :, chunk, i] * A.double()
    return dA_cumsum, dt_out


def _unchunk(dt_out: Tensor, dA_cumsum: Tensor, seqlen: int) -> tuple[Tensor, Tensor]:
    """Each token's time step and the logarithm of its decay, (batch, seqlen, nheads)."""
    log_decay = dA_cumsum.double().diff(dim=-1, prepend=torch.zeros_like(dA_cumsum[..., :1], dtype=torch.float64))
    return dt_out.double().flatten(2)[..., :seqlen].mT, log_decay.flatten(2)[..., :seqlen].mT


def oracle_fwd_pass_state(
    x: Tensor,
    B: Tensor,
    dt_out: Tensor,
    dA_cumsum: Tensor,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    state_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Computes `fwd_pass_state` token by token in float64, unrounded whatever state_dtype: (states, final_states)."""
    nchunks, chunk_size = dt_out.shape[2:]
    d, log_decay = _unchunk(dt_out, dA_cumsum, x.shape[1])
    state = _initial(initial_states, x, B)
    states = torch.zeros(x.shape[0], nchunks, *state.shape[1:], dtype=torch.float64, device=x.device)
    if nchunks:
        states[:, 0] = state
    for t, state in _walk(x, B, d, log_decay, _begins(seq_idx, x), state):  # noqa: B020
        if (t + 1) % chunk_size == 0 and t + 1 < x.shape[1]:
            states[:, (t + 1) // chunk_size] = state
    return states, state.clone()


def oracle_compute_out(
    x: Tensor,
    B: Tensor,
    C: Tensor,
    dt_out: Tensor,
    dA_cumsum: Tensor,
    states: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    seq_idx: Tensor | None = None,
) -> Tensor:
    """Computes `compute_out` token by token in float64."""
    chunk_size = dt_out.shape[3]
    d, log_decay = _unchunk(dt_out, dA_cumsum, x.shape[1])
    entries = {chunk * chunk_size: states[:, chunk].double() for chunk in range(states.shape[1])}
    C_heads = _heads(C, x.shape[2])
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for t, state in _walk(x, B, d, log_decay, _begins(seq_idx, x), _initial(None, x, B), entries):
        out[:, t] = _readout(state, x[:, t], C_heads[:, t], D, None if z is None else z[:, t])
    return out


def oracle_selective_state_update(
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
) -> tuple[Tensor, Tensor]:
    """Computes `selective_state_update` row by row in float64: (out, the new state); the old one is left alone.

    All arguments have their head dimension here.
    """
    nheads = x.shape[1]
    new_state = state.double().clone()
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    d = _time_steps(dt, dt_bias, dt_softplus, None)
    B_heads, C_heads = _heads(B, nheads), _heads(C, nheads)
    rows = list(range(x.shape[0])) if state_batch_indices is None else state_batch_indices.tolist()
    for b, row in enumerate(rows):
        if row >= 0:
            decay = (d[b, :, :, None] * A.double()).exp()
            update = (d[b] * x[b].double())[..., None] * B_heads[b, :, None, :]
            new_state[row] = decay * state[row].double() + update
            out[b] = _readout(new_state[row], x[b], C_heads[b], D, None if z is None else z[b])
    return out, new_state


ORACLES: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "chunk_cumsum": oracle_chunk_cumsum,
        "compute_out": oracle_compute_out,
        "fwd_pass_state": oracle_fwd_pass_state,
        "mamba_chunk_scan": oracle_scan,
        "selective_state_update": oracle_selective_state_update,
    }
)
