"""What a backend is tested with: an oracle, inputs, error budgets, and the conformance suite `check_backend`.

    from tilegym_mamba2.testing import check_backend

    for result in check_backend("my-backend"):
        print(result.op, result.problem, result.dtype, result.error, result.budget, result.detail)
        assert result.ok

The oracle is the recurrence itself, token by token in float64. It shares no code with any backend.
"""

import inspect
import math
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from types import MappingProxyType
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from tilegym_mamba2 import registry
from tilegym_mamba2.models import Model, find_model
from tilegym_mamba2.ops.chunk_cumsum import chunk_cumsum
from tilegym_mamba2.ops.compute_out import compute_out
from tilegym_mamba2.ops.fwd_pass_state import fwd_pass_state
from tilegym_mamba2.ops.mamba_chunk_scan import mamba_chunk_scan
from tilegym_mamba2.ops.selective_state_update import selective_state_update

__all__ = [
    "DECODE_PROBLEMS",
    "ORACLES",
    "PROBLEMS",
    "Check",
    "Result",
    "Scenario",
    "budget",
    "check_backend",
    "checks",
    "layer_inputs",
    "make_decode_inputs",
    "make_inputs",
    "oracle_chunk_cumsum",
    "oracle_compute_out",
    "oracle_fwd_pass_state",
    "oracle_scan",
    "oracle_selective_state_update",
    "poisoned_memory",
    "relative_error",
    "relayout",
    "run_op",
]

Inputs = dict[str, Any]

_INFINITY = float("inf")
_ELEMENTWISE_BUDGET = {torch.float32: 1e-5, torch.float64: 1e-10}  # of each time step


# The oracle


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
    dt_limit: tuple[float, float] = (0.0, _INFINITY),
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
    dt_limit: tuple[float, float] = (0.0, _INFINITY),
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


# Errors and budgets


def relative_error(got: Tensor, want: Tensor) -> float:
    """||got - want|| / ||want|| where want is finite; infinite if got is not finite somewhere there.

    Raises ValueError if the shapes differ.
    """
    finite, difference = _difference(got, want)
    if not bool(difference.isfinite().all()):
        return _INFINITY
    norm = float(torch.linalg.vector_norm(torch.where(finite, want.double(), 0)))
    error = float(torch.linalg.vector_norm(difference))
    return error / norm if norm > 0 else (0.0 if error == 0 else _INFINITY)


def elementwise_error(got: Tensor, want: Tensor) -> float:
    """The largest |got - want| / |want| where want is finite; where want is 0, got must be."""
    _, difference = _difference(got, want)
    if not bool(difference.isfinite().all()):
        return _INFINITY
    ratio = difference.abs() / want.double().abs().nan_to_num(1.0, 1.0)
    return float(ratio.nan_to_num(0.0, _INFINITY).max()) if ratio.numel() else 0.0


def _difference(got: Tensor, want: Tensor) -> tuple[Tensor, Tensor]:
    if got.shape != want.shape:
        raise ValueError(f"got shape {tuple(got.shape)}, want {tuple(want.shape)}")
    finite = want.isfinite()
    return finite, torch.where(finite, got.double() - want.double(), 0)


def budget(*dtypes: torch.dtype) -> float:
    """The largest relative error of out and final_states for inputs of these dtypes.

    For float32 it follows `torch.get_float32_matmul_precision()`.
    """
    float32 = 5e-6 if torch.get_float32_matmul_precision() == "highest" else 1.5e-3
    table = {torch.float64: 1e-10, torch.float32: float32, torch.float16: 6e-4, torch.bfloat16: 2.5e-3}
    return max(table[dtype] for dtype in dtypes)


# Makers of inputs


def _inverse_softplus(d: Tensor) -> Tensor:
    return d + torch.log(-torch.expm1(-d))


def _between(generator: torch.Generator, low: float, high: float, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.float64).uniform_(low, high, generator=generator)


def make_inputs(
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    *,
    batch: int = 2,
    seqlen: int = 70,
    nheads: int = 4,
    headdim: int = 16,
    ngroups: int = 2,
    dstate: int = 16,
    chunk_size: int = 32,
    D: str | None = "heads",
    z: bool = False,
    dt_bias: bool = True,
    dt_softplus: bool = True,
    dt_limit: tuple[float, float] = (0.0, _INFINITY),
    initial_states: torch.dtype | bool = False,
    seq_idx: Sequence[Sequence[int]] | None = None,
    seq_idx_dtype: torch.dtype = torch.int32,
    cu_seqlens: Sequence[int] | None = None,
    cu_seqlens_dtype: torch.dtype = torch.int32,
    first_state_only: bool = False,
    state_dtype: torch.dtype | None = None,
    A: tuple[float, float] = (1.0, 16.0),
    decay: tuple[float, float] = (1e-3, 50.0),
    dtypes: Mapping[str, torch.dtype] = MappingProxyType({}),
    layout: str = "contiguous",
    values: Mapping[str, Any] = MappingProxyType({}),
    poison: tuple[str, int, int, float] | None = None,
    seed: int = 0,
) -> Inputs:
    """Makes keyword arguments for `mamba_chunk_scan_combined`: normal, well-scaled, with long and short steps mixed.

    Args:
        dtype: of x, B, C, dt, z; A, D, dt_bias, initial_states are float32 (float64 if it is that).
        D: "heads" for (nheads,), "channels" for (nheads, headdim), or None.
        initial_states: True, or their dtype.
        seq_idx: for each batch row, a list of (id, length), flattened: [id, length, id, length, ...].
        cu_seqlens: offsets; needs batch 1. Initial states are then one per sequence, or with
            `first_state_only` one for the first.
        A: the range of -A, uniform for each head.
        decay: the range of |d * A|, log-uniform for each token and head.
        dtypes: argument name to dtype, where it is not as above.
        layout: "contiguous", or as in `relayout`.
        values: argument name to a number or a tensor-like that replaces every value, after all else.
        poison: (argument, batch row, token, value): that token's every value is replaced.
    """
    generator = torch.Generator().manual_seed(seed)
    wide = torch.float64 if dtype == torch.float64 else torch.float32

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    rates = _between(generator, *A, nheads)
    d = _between(generator, math.log(decay[0]), math.log(decay[1]), batch, seqlen, nheads).exp() / rates
    bias = _between(generator, -0.05, 0.05, nheads) if dt_bias else None
    raw = _inverse_softplus(d) if dt_softplus else d
    made: dict[str, Tensor | None] = {
        # Divided, so that a few tokens of long steps do not make up all of the output and hide the others' errors.
        "x": normal(batch, seqlen, nheads, headdim) / (1 + d[..., None]),
        "dt": raw if bias is None else raw - bias,
        "A": -rates,
        "B": normal(batch, seqlen, ngroups, dstate),
        "C": normal(batch, seqlen, ngroups, dstate),
        "D": None if D is None else normal(nheads) if D == "heads" else normal(nheads, headdim),
        "z": normal(batch, seqlen, nheads, headdim) if z else None,
        "dt_bias": bias,
        "initial_states": None,
    }
    if initial_states:
        rows = batch if cu_seqlens is None else 1 if first_state_only else len(cu_seqlens) - 1
        made["initial_states"] = normal(rows, nheads, headdim, dstate)
    narrow = {"x", "dt", "B", "C", "z"}
    chosen = {name: dtype if name in narrow else wide for name in made}
    if isinstance(initial_states, torch.dtype):
        chosen["initial_states"] = initial_states
    chosen.update(dtypes)
    tensors = {name: value.to(chosen[name]) for name, value in made.items() if value is not None}
    for name, value in values.items():
        tensors[name] = torch.as_tensor(value).expand(tensors[name].shape).to(tensors[name].dtype, copy=True)
    if poison is not None:
        name, row, token, value = poison
        tensors[name][row, token] = value
    if seq_idx is not None:
        rows = [torch.tensor(runs[::2]).repeat_interleave(torch.tensor(runs[1::2])) for runs in seq_idx]
        tensors["seq_idx"] = torch.stack(rows).to(seq_idx_dtype)
    if cu_seqlens is not None:
        tensors["cu_seqlens"] = torch.tensor(cu_seqlens, dtype=cu_seqlens_dtype)
    inputs: Inputs = dict.fromkeys(inspect.signature(oracle_scan).parameters)
    inputs.update(relayout({name: tensor.to(device) for name, tensor in tensors.items()}, layout))
    inputs.update(chunk_size=chunk_size, dt_softplus=dt_softplus, dt_limit=dt_limit, state_dtype=state_dtype)
    return inputs


def relayout(tensors: Mapping[str, Tensor], layout: str) -> dict[str, Tensor]:
    """The tensors in another memory layout, with the same values except for "expanded".

    - "contiguous": as they are.
    - "projection": z, x, B, C, dt are slices of one (batch, seqlen, channels) tensor, as in a model.
    - "transposed": the dimensions lie in memory in reverse order, and vectors with stride 2.
    - "unaligned": data begins one element late, rows have an odd stride, and NaN lies between them.
    - "expanded": at least one dimension of each has stride 0.
    """
    if layout == "contiguous":
        return dict(tensors)
    if layout == "projection":
        return {**tensors, **_project({name: tensors[name] for name in ("z", "x", "B", "C", "dt") if name in tensors})}
    change = {"transposed": _transpose, "unaligned": _unalign, "expanded": _expand}[layout]
    return {name: change(tensor) for name, tensor in tensors.items()}


def _project(parts: dict[str, Tensor]) -> dict[str, Tensor]:
    projection = torch.cat([part.flatten(2) for part in parts.values()], 2)
    slices = projection.split([part.shape[2:].numel() for part in parts.values()], 2)
    return {name: piece.unflatten(2, part.shape[2:]) for (name, part), piece in zip(parts.items(), slices, strict=True)}


def _transpose(tensor: Tensor) -> Tensor:
    if tensor.dim() == 1:
        return tensor.repeat_interleave(2)[::2]
    reverse = tuple(reversed(range(tensor.dim())))
    return tensor.permute(reverse).contiguous().permute(reverse)


def _unalign(tensor: Tensor) -> Tensor:
    rows, columns = tensor.shape[:-1], tensor.shape[-1]
    odd = columns + 2 - (columns + 1) % 2
    fill: Any = math.nan if tensor.is_floating_point() else 77
    storage = torch.full((rows.numel() * odd + 1,), fill, dtype=tensor.dtype, device=tensor.device)
    view = storage[1:].view(*rows, odd)[..., :columns]
    view.copy_(tensor)
    return view


def _expand(tensor: Tensor) -> Tensor:
    """Repeats the first entry along the last dimension but one (of a vector: along its only one)."""
    if not tensor.is_floating_point():
        return tensor  # one id for all, or no rising offsets, would be another problem
    dim = max(tensor.dim() - 2, 0)
    return tensor.narrow(dim, 0, min(1, tensor.shape[dim])).expand(tensor.shape)


def make_decode_inputs(
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    *,
    batch: int = 3,
    nheads: int = 4,
    headdim: int = 16,
    ngroups: int = 2,
    dstate: int = 16,
    D: bool = True,
    z: bool = False,
    dt_bias: bool = True,
    dt_softplus: bool = True,
    state_dtype: torch.dtype | None = None,
    indices: Sequence[int] | None = None,
    indices_dtype: torch.dtype = torch.int32,
    nslots: int = 6,
    tied: bool = True,
    dtypes: Mapping[str, torch.dtype] = MappingProxyType({}),
    layout: str = "contiguous",
    values: Mapping[str, Any] = MappingProxyType({}),
    seed: int = 0,
) -> Inputs:
    """Makes keyword arguments for `selective_state_update`, all with their head dimension.

    Args:
        dtype: of x, dt, B, C, z and, unless `state_dtype` is given, state; A, D, dt_bias are float32.
        indices: state_batch_indices, into `nslots` rows of state.
        tied: A, dt, D and dt_bias are expanded views of one number per head, as Mamba-2 layers pass them.
        layout: as in `relayout`, "projection" excepted.
    """
    generator = torch.Generator().manual_seed(seed)
    wide = torch.float64 if dtype == torch.float64 else torch.float32

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    channels = 1 if tied else headdim
    A = -_between(generator, 1.0, 16.0, nheads, channels, 1 if tied else dstate)
    d = _between(generator, math.log(1e-3), math.log(5.0), batch, nheads, channels).exp()
    bias = _between(generator, -0.05, 0.05, nheads, channels) if dt_bias else None
    raw = _inverse_softplus(d) if dt_softplus else d
    made: dict[str, Tensor | None] = {
        "state": normal(batch if indices is None else nslots, nheads, headdim, dstate),
        "x": normal(batch, nheads, headdim),
        "dt": raw if bias is None else raw - bias,
        "A": A,
        "B": normal(batch, ngroups, dstate),
        "C": normal(batch, ngroups, dstate),
        "D": normal(nheads, channels) if D else None,
        "z": normal(batch, nheads, headdim) if z else None,
        "dt_bias": bias,
    }
    chosen = {name: wide if name in ("A", "D", "dt_bias") else dtype for name in made}
    chosen["state"] = state_dtype or dtype
    chosen.update(dtypes)
    tensors = {name: value.to(chosen[name]).to(device) for name, value in made.items() if value is not None}
    for name, value in values.items():
        tensors[name] = (
            torch.as_tensor(value, device=device).to(tensors[name].dtype).expand(tensors[name].shape).clone()
        )
    if indices is not None:
        tensors["state_batch_indices"] = torch.tensor(indices, dtype=indices_dtype, device=device)
    state = tensors.pop("state")
    tensors = relayout(tensors, layout)
    tensors["state"] = state if layout == "expanded" else relayout({"state": state}, layout)["state"]
    full = {"dt": (batch, nheads, headdim), "A": (nheads, headdim, dstate), "D": (nheads, headdim)}
    full["dt_bias"] = full["D"]
    inputs: Inputs = dict.fromkeys(inspect.signature(oracle_selective_state_update).parameters)
    inputs.update({name: tensor.expand(full.get(name, tensor.shape)) for name, tensor in tensors.items()})
    inputs.update(dt_softplus=dt_softplus)
    return inputs


# The table of problems


@dataclass(frozen=True)
class Scenario:
    """A problem named by the branch that it hits: options of `make_inputs` or `make_decode_inputs`.

    `run_op(op, op_inputs(op, scenario.inputs(dtype)), backend)` puts it to any op that it `suits`.
    """

    make: Callable[..., Inputs]
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def inputs(self, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> Inputs:
        return self.make(dtype, device, **self.options)

    def suits(self, op: str) -> bool:
        """Whether the problem can be put to an op: only the whole forward has cu_seqlens."""
        if (op == "selective_state_update") != (self.make is make_decode_inputs):
            return False
        return op == "mamba_chunk_scan" or "cu_seqlens" not in self.options


def _scenarios(make: Callable[..., Inputs], **options: Mapping[str, Any]) -> dict[str, Scenario]:
    return {name: Scenario(make, value) for name, value in options.items()}


# Two rows whose sequences begin in different places, more than one in a chunk of 16, 32 or 64.
_PACKED: Inputs = {
    "seqlen": 100,
    "seq_idx": ([3, 13, 4, 1, 5, 10, 3, 30, 9, 46], [0, 70, 1, 30]),
    "initial_states": True,
}
_ONLY_FLOAT32 = {"dt": torch.float32}
_MIXED = {"x": torch.float32, "B": torch.bfloat16, "C": torch.float16, "dt": torch.bfloat16, "z": torch.float16}
_VARLEN: Inputs = {"batch": 1, "seqlen": 100, "cu_seqlens": (0, 13, 47, 100)}
_EMPTY_SEQUENCES: Inputs = {"batch": 1, "seqlen": 70, "cu_seqlens": (0, 0, 30, 30, 30, 70, 70), "initial_states": True}

PROBLEMS: Mapping[str, Scenario] = MappingProxyType(
    _scenarios(
        make_inputs,
        plain={"seqlen": 64},
        bare={"D": None, "dt_bias": False, "dt_softplus": False},
        ragged_tail={"seqlen": 150, "chunk_size": 64},
        many_chunks={"batch": 1, "nheads": 2, "headdim": 8, "seqlen": 300, "chunk_size": 16},
        chunk_24={"chunk_size": 24},
        chunk_of_one={"seqlen": 9, "chunk_size": 1},
        chunk_longer_than_row={"seqlen": 40, "chunk_size": 300},
        chunk_edge_below={"seqlen": 63, "chunk_size": 64, "initial_states": True},
        chunk_edge_exact={"seqlen": 64, "chunk_size": 64, "initial_states": True},
        chunk_edge_above={"seqlen": 65, "chunk_size": 64, "initial_states": True},
        one_token={"seqlen": 1, "nheads": 8, "headdim": 32, "decay": (0.5, 5.0), "initial_states": True, "z": True},
        empty_batch={"batch": 0, "initial_states": True, "z": True},
        empty_seq={"seqlen": 0, "initial_states": True, "z": True},
        empty_seq_no_state={"seqlen": 0},
        groups={"nheads": 8, "ngroups": 4, "headdim": 8},
        one_group={"nheads": 3, "ngroups": 1},
        every_head_a_group={"nheads": 3, "ngroups": 3},
        odd_headdim={"headdim": 20},
        tiny_headdim={"headdim": 3},
        odd_dstate={"dstate": 24},
        tiny_dstate={"dstate": 5},
        one_dim={"headdim": 1, "dstate": 1, "nheads": 8, "chunk_size": 16},
        wide_headdim={"batch": 1, "nheads": 1, "ngroups": 1, "headdim": 136, "seqlen": 40},
        wide_dstate={"batch": 1, "nheads": 1, "ngroups": 1, "dstate": 200, "seqlen": 40},
        long_decay={"seqlen": 150, "decay": (1.0, 50.0), "initial_states": True},
        long_memory={"seqlen": 150, "decay": (1e-6, 1e-3), "initial_states": True},
        extreme_dt={"A": (1e4, 1e4), "decay": (1e4, 5.1e5), "initial_states": True},
        no_decay={"values": {"A": 0.0}, "decay": (1e-3, 1.0), "initial_states": True},
        softplus_ends={
            "seqlen": 64,
            "values": {
                "dt": torch.tensor([-20.0, -40.0, 19.5, 20.5, 25.0, 90.0, -3.0, 0.0])[torch.arange(64) % 8][:, None]
            },
        },
        # Steps of 2e-9 with nothing beside them: what a softplus without log1p loses.
        softplus_tiny={"values": {"dt": -20.0, "x": 2e3, "B": 50.0, "C": 50.0}, "D": None, "dtypes": _ONLY_FLOAT32},
        dt_limits={"dt_limit": (0.05, 0.3), "decay": (0.02, 5.0)},
        dt_limits_no_softplus={"dt_limit": (0.05, 0.3), "dt_softplus": False},
        no_softplus_clamped={"dt_softplus": False, "decay": (1e-2, 1.0)},
        d_vector={"D": "channels"},
        gate={"z": True},
        gate_no_d={"z": True, "D": None},
        initial_states_float16={"initial_states": torch.float16, "decay": (1e-3, 1e-1)},
        initial_states_bfloat16={"initial_states": torch.bfloat16, "decay": (1e-3, 1e-1)},
        initial_states_float32={"initial_states": torch.float32, "decay": (1e-3, 1e-1)},
        initial_states_float64={"initial_states": torch.float64, "decay": (1e-3, 1e-1)},
        state_dtype_float32={"state_dtype": torch.float32, "decay": (1e-3, 1e-1)},
        state_dtype_bfloat16={"state_dtype": torch.bfloat16, "decay": (1e-3, 1e-1)},
        boundary_in_chunk={**_PACKED, "decay": (1e-3, 1.0)},
        boundary_at_chunk_edge={"batch": 1, "seqlen": 96, "seq_idx": ([0, 32, 1, 32, 2, 32],), "initial_states": True},
        reused_ids={
            "batch": 1,
            "seq_idx": ([0, 20, 1, 5, 0, 11, 1, 34],),
            "initial_states": True,
            "decay": (1e-3, 0.1),
        },
        one_id={"seq_idx": ([5, 70], [0, 70]), "initial_states": True, "decay": (1e-3, 0.1)},
        every_token_a_sequence={"batch": 1, "seqlen": 40, "seq_idx": ([0, 1, 1, 1] * 20,), "initial_states": True},
        ids_int64={**_PACKED, "seq_idx_dtype": torch.int64},
        ids_uint8={**_PACKED, "seq_idx_dtype": torch.uint8, "decay": (1e-3, 1.0)},
        packed_gate={**_PACKED, "z": True, "D": "channels"},
        varlen=_VARLEN,
        varlen_states={**_VARLEN, "initial_states": True, "decay": (1e-3, 0.1), "cu_seqlens_dtype": torch.int64},
        varlen_empty_sequences=_EMPTY_SEQUENCES,
        varlen_first_state_only={**_VARLEN, "initial_states": True, "first_state_only": True, "decay": (1e-3, 0.1)},
        varlen_one_sequence={"batch": 1, "cu_seqlens": (0, 70), "initial_states": torch.float16},
        varlen_no_sequence={"batch": 1, "seqlen": 0, "cu_seqlens": (0,)},
        varlen_all_empty={"batch": 1, "seqlen": 0, "cu_seqlens": (0, 0, 0), "initial_states": True},
        varlen_and_ids={**_VARLEN, "seq_idx": ([0, 30, 1, 70],), "initial_states": True, "decay": (1e-3, 0.1)},
        varlen_gate={**_VARLEN, "z": True, "D": "channels", "dt_limit": (0.01, 2.0)},
        mixed_dtypes={"dtypes": _MIXED, "z": True},
        mixed_with_float32={"dtypes": {"x": torch.bfloat16, "dt": torch.float32, "A": torch.bfloat16}, "z": True},
        strided_views={"layout": "projection", "z": True},
        transposed={"layout": "transposed", "z": True, "initial_states": True, "D": "channels"},
        unaligned={"layout": "unaligned", "nheads": 3, "ngroups": 1, "z": True, **_PACKED},
        expanded={"layout": "expanded", "z": True, "initial_states": True, "D": "channels"},
        varlen_unaligned={**_VARLEN, "layout": "unaligned", "initial_states": True},
        state_past_float16={
            "seqlen": 100,
            "values": {"A": -1e-4, "x": 30.0, "B": 30.0, "C": 1e-4},
            "decay": (1.0, 50.0),
        },
        poison_x={**_PACKED, "z": True, "poison": ("x", 0, 20, math.nan)},
        poison_x_infinite={"poison": ("x", 1, 40, math.inf)},
        poison_B={**_PACKED, "poison": ("B", 0, 20, math.nan)},
        poison_C={**_PACKED, "poison": ("C", 0, 20, math.inf)},
        poison_z={"z": True, "poison": ("z", 1, 40, math.nan)},
        poison_dt={**_PACKED, "poison": ("dt", 0, 20, math.nan)},
        poison_dt_infinite={**_PACKED, "poison": ("dt", 0, 20, math.inf)},
        poison_varlen={**_VARLEN, "poison": ("x", 0, 20, math.nan), "initial_states": True},
    )
)

DECODE_PROBLEMS: Mapping[str, Scenario] = MappingProxyType(
    _scenarios(
        make_decode_inputs,
        decode_plain={},
        decode_bare={"D": False, "dt_bias": False, "dt_softplus": False},
        decode_gate={"z": True},
        decode_untied={"tied": False, "z": True},
        decode_groups={"nheads": 8, "ngroups": 4},
        decode_every_head_a_group={"nheads": 3, "ngroups": 3},
        decode_odd_headdim={"headdim": 20},
        decode_odd_dstate={"dstate": 24},
        decode_one_dim={"headdim": 1, "dstate": 1, "nheads": 16},
        decode_wide_dstate={"dstate": 200},
        decode_one_row={"batch": 1, "nheads": 1, "ngroups": 1},
        decode_empty_batch={"batch": 0},
        decode_empty_batch_indexed={"batch": 0, "indices": ()},
        decode_indices={"indices": (4, 0, 3)},
        decode_padding={"indices": (-1, 5, -7), "z": True},
        decode_all_padding={"indices": (-1, -1, -1), "indices_dtype": torch.int64},
        decode_softplus_ends={"batch": 16, "tied": False, "headdim": 8, "values": {
            "dt": (-20.0, -40.0, 19.5, 20.5, 25.0, 90.0, -3.0, 0.0)}},
        decode_softplus_tiny={
            "values": {"dt": -20.0, "state": 0.0}, "D": False, "state_dtype": torch.float32, "dtypes": _ONLY_FLOAT32},
        decode_negative_dt={"dt_softplus": False, "values": {"dt": -0.05, "dt_bias": 0.01}},
        decode_state_float32={"state_dtype": torch.float32},
        decode_state_bfloat16={"state_dtype": torch.bfloat16},
        decode_mixed_dtypes={"dtypes": _MIXED, "z": True},
        decode_transposed={"layout": "transposed", "tied": False, "z": True},
        decode_unaligned={"layout": "unaligned", "tied": False, "z": True, "indices": (4, 0, 3)},
        decode_expanded={"layout": "expanded", "tied": False, "z": True},
    )
)  # fmt: skip


# Running an op, and what it is held to


_OPS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "chunk_cumsum": chunk_cumsum,
        "compute_out": compute_out,
        "fwd_pass_state": fwd_pass_state,
        "mamba_chunk_scan": mamba_chunk_scan,
        "selective_state_update": selective_state_update,
    }
)


class Output(NamedTuple):
    """One tensor that an op returned, what it should be, and how far it may be off."""

    name: str
    got: Tensor
    want: Tensor
    dtype: torch.dtype
    budget: float
    elementwise: bool = False


def op_inputs(op: str, inputs: Inputs) -> Inputs:
    """The op's own keyword arguments for the problem whose inputs, of the whole forward, are given.

    What an earlier stage would have made comes from the oracle, rounded as that stage rounds.
    """
    given = dict(inputs)
    names = list(inspect.signature(ORACLES[op]).parameters)
    if "dt_out" in names:
        wide = torch.float64 if torch.float64 in (given["dt"].dtype, given["A"].dtype) else torch.float32
        cumsum = {name: given[name] for name in inspect.signature(oracle_chunk_cumsum).parameters}
        dA_cumsum, dt_out = oracle_chunk_cumsum(**cumsum)
        given.update(dA_cumsum=dA_cumsum.to(wide), dt_out=dt_out.to(wide))
    if "states" in names:
        passing = {name: given[name] for name in inspect.signature(oracle_fwd_pass_state).parameters}
        given["states"] = oracle_fwd_pass_state(**passing)[0].to(_state_dtype(given))
    return {name: given[name] for name in names}


def _state_dtype(inputs: Inputs) -> torch.dtype:
    default = torch.float32 if inputs["x"].dtype == torch.float16 else inputs["x"].dtype
    return inputs["state_dtype"] or default


def run_op(op: str, inputs: Inputs, backend: str | None = None) -> list[Output]:
    """Runs an op on its own keyword arguments (see `op_inputs`): every output beside what the oracle says.

    Raises AssertionError if an argument, but for the decode step's state, was written to.
    """
    want: Any = ORACLES[op](**inputs)
    before = {name: value.clone() for name, value in inputs.items() if isinstance(value, Tensor)}
    state = None
    if op == "selective_state_update":
        inputs = {**inputs, "state": _clone_strided(inputs["state"])}
        state = before.pop("state")
    got: Any = _OPS[op](**inputs, backend=backend)
    for name, value in before.items():
        assert _same_bits(inputs[name], value), f"{op} wrote to its argument {name}"
    if op == "chunk_cumsum":
        wide = torch.float64 if torch.float64 in (inputs["dt"].dtype, inputs["A"].dtype) else torch.float32
        return [
            Output("dA_cumsum", got[0], want[0], wide, budget(wide)),
            Output("dt_out", got[1], want[1], wide, _ELEMENTWISE_BUDGET[wide], elementwise=True),
        ]
    x = inputs["x"]
    precision = [x.dtype, inputs["B"].dtype]
    final_dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    if op == "fwd_pass_state":
        state_dtype = _state_dtype(inputs)
        return [
            Output("states", got[0], want[0], state_dtype, budget(*precision, state_dtype)),
            Output("final_states", got[1], want[1], final_dtype, budget(*precision)),
        ]
    if op == "selective_state_update":
        assert state is not None
        return [
            Output("out", got, want[0], x.dtype, budget(x.dtype)),
            Output("state", inputs["state"], want[1], state.dtype, budget(state.dtype)),
        ]
    precision.append(inputs["C"].dtype)
    if op == "compute_out":
        return [Output("out", got, want, x.dtype, budget(*precision, inputs["states"].dtype))]
    precision.append(_state_dtype(inputs))
    outputs = [
        Output("out", got[0], want[0], x.dtype, budget(*precision)),
        Output("final_states", got[1], want[1], final_dtype, budget(*precision)),
    ]
    assert (got[2] is None) == (want[2] is None), "varlen_states belong to cu_seqlens, and to nothing else"
    if want[2] is not None:
        outputs.append(Output("varlen_states", got[2], want[2], final_dtype, budget(*precision)))
    return outputs


def _clone_strided(tensor: Tensor) -> Tensor:
    """A copy with the same strides, the memory between the elements included."""
    storage = tensor.untyped_storage().clone()
    copy = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return copy.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())


def _same_bits(tensor: Tensor, other: Tensor) -> bool:
    return torch.equal(tensor.nan_to_num(1e30), other.nan_to_num(1e30)) and torch.equal(tensor.isnan(), other.isnan())


@dataclass(frozen=True)
class Result:
    """What one check found. `ok` is True too where the backend refuses a problem as it may; `detail` says so."""

    op: str
    problem: str
    dtype: torch.dtype
    error: float
    budget: float
    ok: bool
    detail: str = ""
    refused: bool = False


@dataclass(frozen=True)
class Check:
    """One thing that is asked of a backend: of an op, a problem of the table or a property, in a dtype."""

    op: str
    problem: str
    dtype: torch.dtype
    outputs: Callable[[str, torch.device], list[Output]] = field(repr=False)

    @property
    def id(self) -> str:
        return f"{self.op}-{self.problem}-{str(self.dtype).removeprefix('torch.')}"

    def run(self, backend: str, device: torch.device | str = "cpu") -> Result:
        """Runs the check on a backend; raises nothing but what stops the process."""
        worst, allowed, complaints = 0.0, budget(self.dtype), list[str]()
        try:
            outputs = self.outputs(backend, torch.device(device))
            for output in outputs:
                error, complaint = _judge(output)
                if error / output.budget >= worst / allowed:
                    worst, allowed = error, output.budget
                if complaint:
                    complaints.append(complaint)
        except NotImplementedError as refusal:
            return Result(self.op, self.problem, self.dtype, math.nan, allowed, True, str(refusal), refused=True)
        except Exception as failure:  # whatever a backend raises is its failure, not the suite's
            detail = f"{type(failure).__name__}: {failure}"
            return Result(self.op, self.problem, self.dtype, _INFINITY, allowed, False, detail)
        return Result(self.op, self.problem, self.dtype, worst, allowed, not complaints, "; ".join(complaints))


def _judge(output: Output) -> tuple[float, str]:
    """An output's error, and what is wrong with it, if anything."""
    name, got, want, dtype, allowed, elementwise = output
    if got.shape != want.shape:
        return _INFINITY, f"{name} has shape {tuple(got.shape)}, expected {tuple(want.shape)}"
    if got.dtype != dtype:
        return _INFINITY, f"{name} has dtype {got.dtype}, expected {dtype}"
    if got.device != want.device:
        return _INFINITY, f"{name} is on {got.device}, expected {want.device}"
    if name == "out" and not got.is_contiguous():
        return _INFINITY, f"{name} is not contiguous"
    error = elementwise_error(got, want) if elementwise else relative_error(got, want)
    if error <= allowed:
        return error, ""
    worst = (got.double() - want).abs().nan_to_num(_INFINITY, _INFINITY)
    worst = torch.where(want.isfinite(), worst, -1)
    index = tuple(int(i) for i in torch.unravel_index(worst.argmax(), worst.shape))
    place = f"[{', '.join(map(str, index))}]"
    return (
        error,
        f"{name} is off by {error:.2g}; at {place} it is {float(got[index]):.6g}, not {float(want[index]):.6g}",
    )


# Properties


@contextmanager
def poisoned_memory() -> Generator[None, None, None]:
    """Context manager: torch fills whatever memory it allocates with NaN, or the largest integer."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    deterministic: Any = torch.utils.deterministic
    filled = deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    deterministic.fill_uninitialized_memory = True
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*deterministic.*")
            warnings.filterwarnings("ignore", message=".*CuBLAS.*")
            yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        deterministic.fill_uninitialized_memory = filled


@contextmanager
def _tf32_allowed() -> Generator[None, None, None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _scan(inputs: Inputs, backend: str) -> tuple[Tensor, Tensor, Tensor | None]:
    return mamba_chunk_scan(**inputs, backend=backend)


def _tokens(inputs: Inputs, start: int, stop: int) -> Inputs:
    """The inputs of a part of each row."""
    sliced = ("x", "dt", "B", "C", "z", "seq_idx")
    return {
        name: value[:, start:stop] if name in sliced and value is not None else value for name, value in inputs.items()
    }


def _causality(dtype: torch.dtype, backend: str, device: torch.device) -> list[Output]:
    """Other tokens from 40 on leave the outputs before as they are."""
    inputs = make_inputs(dtype, device, z=True)
    other = make_inputs(dtype, device, z=True, seed=1)
    changed = dict(inputs)
    for name in ("x", "dt", "B", "C", "z"):
        changed[name] = torch.cat([inputs[name][:, :40], other[name][:, 40:]], 1)
    out, _, _ = _scan(inputs, backend)
    got, _, _ = _scan(changed, backend)
    return [Output("out[:, :40]", got[:, :40], out[:, :40].double(), dtype, budget(dtype))]


def _chunk_size_invariance(dtype: torch.dtype, backend: str, device: torch.device) -> list[Output]:
    inputs = make_inputs(dtype, device, initial_states=True, decay=(1e-3, 1.0))
    want, want_final, _ = oracle_scan(**inputs)
    outputs: list[Output] = []
    for chunk_size in (1, 16, 40, 64, 256):
        out, final, _ = _scan({**inputs, "chunk_size": chunk_size}, backend)
        outputs.append(Output(f"out of chunk_size {chunk_size}", out, want, dtype, budget(dtype)))
        final_dtype = torch.promote_types(dtype, torch.float32)
        outputs.append(
            Output(f"final_states of chunk_size {chunk_size}", final, want_final, final_dtype, budget(dtype))
        )
    return outputs


def _split_and_carry(dtype: torch.dtype, backend: str, device: torch.device) -> list[Output]:
    """A row cut at a token, the second part given the first's final state, is the whole row."""
    inputs = make_inputs(dtype, device, initial_states=True, decay=(1e-3, 1.0), seqlen=100)
    want, want_final, _ = oracle_scan(**inputs)
    outputs: list[Output] = []
    for cut in (1, 41, 64):
        first, state, _ = _scan(_tokens(inputs, 0, cut), backend)
        second, final, _ = _scan({**_tokens(inputs, cut, 100), "initial_states": state}, backend)
        outputs.append(Output(f"out cut at {cut}", torch.cat([first, second], 1), want, dtype, budget(dtype)))
        outputs.append(Output(f"final_states cut at {cut}", final, want_final, final.dtype, budget(dtype)))
    return outputs


def _packed_is_separate(dtype: torch.dtype, backend: str, device: torch.device) -> list[Output]:
    """Sequences packed in a row, by seq_idx or by cu_seqlens, are what each is alone."""
    offsets = (0, 13, 14, 64, 100)
    options: Inputs = {"batch": 1, "seqlen": 100, "z": True, "decay": (1e-3, 1.0)}
    inputs = make_inputs(dtype, device, **options)
    ids = [number for i in range(4) for number in (i % 2, offsets[i + 1] - offsets[i])]
    by_ids = make_inputs(dtype, device, **options, seq_idx=[ids])
    by_offsets = make_inputs(dtype, device, **options, cu_seqlens=offsets)
    alone = [_scan(_tokens(inputs, i, j), backend) for i, j in pairwise(offsets)]
    want = torch.cat([out for out, _, _ in alone], 1).double()
    wanted_states = torch.cat([final for _, final, _ in alone]).double()
    out, final, _ = _scan(by_ids, backend)
    packed, packed_final, states = _scan(by_offsets, backend)
    assert states is not None
    return [
        Output("out", out, want, dtype, budget(dtype)),
        Output("final_states", final, wanted_states[-1:], final.dtype, budget(dtype)),
        Output("out of cu_seqlens", packed, want, dtype, budget(dtype)),
        Output("final_states of cu_seqlens", packed_final, wanted_states[-1:], final.dtype, budget(dtype)),
        Output("varlen_states", states, wanted_states, final.dtype, budget(dtype)),
    ]


def _batch_invariance(dtype: torch.dtype, backend: str, device: torch.device) -> list[Output]:
    """A row is the same alone, and beside rows of NaN."""
    inputs = make_inputs(dtype, device, batch=3, z=True, initial_states=True)
    rows = ("x", "dt", "B", "C", "z", "initial_states")
    outputs: list[Output] = []
    whole, whole_final, _ = _scan(inputs, backend)
    for row in range(3):
        alone = {name: value[row : row + 1] if name in rows else value for name, value in inputs.items()}
        beside = dict(inputs)
        for name in rows:
            beside[name] = torch.full_like(inputs[name], math.nan)
            beside[name][row] = inputs[name][row]
        for name, case, place in (("alone", alone, 0), ("beside NaN", beside, row)):
            out, final, _ = _scan(case, backend)
            want, want_final = whole[row].double(), whole_final[row].double()
            outputs.append(Output(f"out of row {row} {name}", out[place], want, dtype, budget(dtype)))
            outputs.append(
                Output(f"final_states of row {row} {name}", final[place], want_final, final.dtype, budget(dtype))
            )
    return outputs


def _groups_sliced(dtype: torch.dtype, backend: str, device: torch.device) -> list[Output]:
    """The heads of one group, given alone, are what they are among all."""
    inputs = make_inputs(dtype, device, nheads=6, ngroups=3, z=True)
    whole, whole_final, _ = _scan(inputs, backend)
    outputs: list[Output] = []
    for group in range(3):
        heads = slice(2 * group, 2 * group + 2)
        part = dict(inputs)
        for name, dim in {"x": 2, "z": 2, "dt": 2, "A": 0, "D": 0, "dt_bias": 0}.items():
            part[name] = inputs[name].narrow(dim, heads.start, 2)
        for name in ("B", "C"):
            part[name] = inputs[name][:, :, group : group + 1]
        out, final, _ = _scan(part, backend)
        outputs.append(Output(f"out of group {group}", out, whole[:, :, heads].double(), dtype, budget(dtype)))
        want = whole_final[:, heads].double()
        outputs.append(Output(f"final_states of group {group}", final, want, final.dtype, budget(dtype)))
    return outputs


def _determinism(dtype: torch.dtype, backend: str, device: torch.device) -> list[Output]:
    """The same bits each time."""
    inputs = make_inputs(dtype, device, z=True, initial_states=True)
    first = _scan(inputs, backend)
    outputs: list[Output] = []
    for _ in range(2):
        again = _scan(inputs, backend)
        outputs += [
            Output(name, got, want.double(), want.dtype, 1e-300)
            for name, got, want in zip(("out", "final_states"), again[:2], first[:2], strict=True)
        ]
    return outputs


def _strided_is_contiguous(dtype: torch.dtype, backend: str, device: torch.device) -> list[Output]:
    inputs = make_inputs(dtype, device, z=True, initial_states=True, D="channels")
    want, want_final, _ = _scan(inputs, backend)
    tensors = {name: value for name, value in inputs.items() if isinstance(value, Tensor)}
    outputs: list[Output] = []
    for layout in ("projection", "transposed", "unaligned"):
        out, final, _ = _scan({**inputs, **relayout(tensors, layout)}, backend)
        outputs.append(Output(f"out of {layout}", out, want.double(), dtype, budget(dtype)))
        outputs.append(Output(f"final_states of {layout}", final, want_final.double(), final.dtype, budget(dtype)))
    return outputs


def _fresh_memory(dtype: torch.dtype, backend: str, device: torch.device) -> list[Output]:
    """Nothing is read from memory that was not written, on every op that the backend has."""
    outputs: list[Output] = []
    for problem in ("ragged_tail", "packed_gate", "varlen_empty_sequences", "decode_padding"):
        scenario = {**PROBLEMS, **DECODE_PROBLEMS}[problem]
        for op in _ops_of(backend):
            if scenario.suits(op):
                inputs = op_inputs(op, scenario.inputs(dtype, device))
                with poisoned_memory():
                    outputs += [output._replace(name=f"{op}: {output.name}") for output in run_op(op, inputs, backend)]
    return outputs


def _mixed_stages(dtype: torch.dtype, backend: str, device: torch.device) -> list[Output]:
    """Each stage of the backend between the others of torch-reference, and the other way round."""
    inputs = make_inputs(dtype, device, initial_states=True, decay=(1e-3, 1.0), chunk_size=16)
    want, want_final, _ = oracle_scan(**inputs)
    outputs: list[Output] = []
    for chosen in range(1, 7):
        names = [backend if chosen >> stage & 1 else "torch-reference" for stage in range(3)]
        values = dict(inputs)
        cumsum = {name: values[name] for name in inspect.signature(oracle_chunk_cumsum).parameters}
        values["dA_cumsum"], values["dt_out"] = chunk_cumsum(**cumsum, backend=names[0])
        passing = {name: values[name] for name in inspect.signature(oracle_fwd_pass_state).parameters}
        values["states"], final = fwd_pass_state(**passing, backend=names[1])
        last = {name: values[name] for name in inspect.signature(oracle_compute_out).parameters}
        out = compute_out(**last, backend=names[2])
        mix = ", ".join(names)
        outputs.append(Output(f"out of {mix}", out, want, dtype, budget(dtype)))
        outputs.append(Output(f"final_states of {mix}", final, want_final, final.dtype, budget(dtype)))
    return outputs


def _tf32(dtype: torch.dtype, backend: str, device: torch.device) -> list[Output]:
    """Within the wider budget where TF32 is allowed."""
    with _tf32_allowed():
        inputs = PROBLEMS["ragged_tail"].inputs(dtype, device)
        return run_op("mamba_chunk_scan", inputs, backend)


def _headless_decode(dtype: torch.dtype, backend: str, device: torch.device) -> list[Output]:
    """The decode step's form without a head dimension, of models with one head."""
    inputs = make_decode_inputs(dtype, device, nheads=1, ngroups=1, z=True)
    want, want_state = oracle_selective_state_update(**inputs)
    squeezed = {name: value.squeeze(1) for name, value in inputs.items() if name in ("state", "x", "dt", "B", "C", "z")}
    squeezed.update({name: inputs[name].squeeze(0) for name in ("A", "D", "dt_bias")})
    out = selective_state_update(**squeezed, dt_softplus=True, backend=backend)
    return [
        Output("out", out, want.squeeze(1), dtype, budget(dtype)),
        Output("state", squeezed["state"], want_state.squeeze(1), dtype, budget(dtype)),
    ]


def _decode_is_scan(dtype: torch.dtype, backend: str, device: torch.device) -> list[Output]:
    """Token after token through the decode step is the scan."""
    inputs = make_inputs(dtype, device, seqlen=9, z=True, initial_states=True, decay=(1e-3, 1.0))
    want, want_final, _ = oracle_scan(**inputs)
    state = inputs["initial_states"].clone()
    shape = inputs["x"].shape[2:]
    outs: list[Tensor] = []
    for t in range(9):
        token = {name: inputs[name][:, t] for name in ("x", "B", "C", "z")}
        tied = {name: inputs[name][:, None].expand(shape) for name in ("D", "dt_bias")}
        A = inputs["A"][:, None, None].expand(*shape, inputs["B"].shape[3])
        dt = inputs["dt"][:, t, :, None].expand(-1, *shape)
        outs.append(selective_state_update(state, dt=dt, A=A, **token, **tied, dt_softplus=True, backend=backend))
    return [
        Output("out", torch.stack(outs, 1), want, dtype, budget(dtype)),
        Output("state", state, want_final, state.dtype, budget(state.dtype)),
    ]


class _Property(NamedTuple):
    op: str
    outputs: Callable[[torch.dtype, str, torch.device], list[Output]]
    dtypes: tuple[torch.dtype, ...] | None = None


_PROPERTIES: Mapping[str, _Property] = MappingProxyType(
    {
        "causality": _Property("mamba_chunk_scan", _causality),
        "chunk_size_invariance": _Property("mamba_chunk_scan", _chunk_size_invariance),
        "split_and_carry": _Property("mamba_chunk_scan", _split_and_carry),
        "packed_is_separate": _Property("mamba_chunk_scan", _packed_is_separate),
        "batch_invariance": _Property("mamba_chunk_scan", _batch_invariance),
        "groups_sliced": _Property("mamba_chunk_scan", _groups_sliced),
        "determinism": _Property("mamba_chunk_scan", _determinism),
        "strided_is_contiguous": _Property("mamba_chunk_scan", _strided_is_contiguous),
        "fresh_memory": _Property("mamba_chunk_scan", _fresh_memory),
        "mixed_stages": _Property("compute_out", _mixed_stages),
        "tf32_allowed": _Property("mamba_chunk_scan", _tf32, (torch.float32,)),
        "headless_decode": _Property("selective_state_update", _headless_decode),
        "decode_is_scan": _Property("selective_state_update", _decode_is_scan),
    }
)


# The suite


DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def _ops_of(backend: str) -> list[str]:
    return [op for op in registry.ops() if op in _OPS and registry.has_implementation(op, backend)]


def _value_check(op: str, problem: str, scenario: Scenario, dtype: torch.dtype) -> Check:
    def outputs(backend: str, device: torch.device) -> list[Output]:
        return run_op(op, op_inputs(op, scenario.inputs(dtype, device)), backend)

    return Check(op, problem, dtype, outputs)


def _property_check(name: str, prop: _Property, dtype: torch.dtype) -> Check:
    def outputs(backend: str, device: torch.device) -> list[Output]:
        return prop.outputs(dtype, backend, device)

    return Check(prop.op, name, dtype, outputs)


def checks(ops: Sequence[str] | None = None, dtypes: Sequence[torch.dtype] | None = None) -> Iterator[Check]:
    """Yields every check of the suite, for these ops (default: all) and dtypes (default: `DTYPES`)."""
    for op in _OPS if ops is None else ops:
        for problem, scenario in {**PROBLEMS, **DECODE_PROBLEMS}.items():
            for dtype in dtypes or DTYPES:
                fixed = scenario.options.get("dtypes", {})
                if scenario.suits(op) and (not fixed or dtype == torch.float32):
                    yield _value_check(op, problem, scenario, dtype)
        for name, prop in _PROPERTIES.items():
            for dtype in dtypes or DTYPES:
                if prop.op == op and (prop.dtypes is None or dtype in prop.dtypes):
                    yield _property_check(name, prop, dtype)


def check_backend(
    name: str,
    device: torch.device | str | None = None,
    dtypes: Sequence[torch.dtype] | None = None,
    progress: Callable[[Result, int, int], None] | None = None,
) -> list[Result]:
    """Runs the conformance suite on a backend: every op that it has, and the whole forward composed of them.

    A problem that the backend refuses with NotImplementedError is no failure, unless it refuses all of an op's.

    Args:
        name: a registered backend; an installed third party's registers itself.
        device: where the tensors are; None for the GPU if the backend can run there, else the CPU.
        dtypes: None for float32, float16, bfloat16 and float64.
        progress: called after each check with its result, how many are done, and how many there are.

    Raises:
        ValueError: no backend has that name, or it has no op.
        BackendUnavailableError: it can't run on the device.
    """
    reasons = {kind: registry.explain_backends(kind).get(name) for kind in ("cuda", "cpu")}
    with registry.use_backend(name):  # raises for an unknown name
        ops = _ops_of(name)
    if device is None:
        device = "cuda" if torch.cuda.is_available() and reasons["cuda"] == "available" else "cpu"
    reason = registry.explain_backends(device)[name]
    if reason != "available":
        raise registry.BackendUnavailableError(f"backend {name!r} can't run on {device}: {reason}")
    if not ops:
        raise ValueError(f"backend {name!r} has no op")
    todo = list(checks(ops, dtypes))
    results: list[Result] = []
    for check in todo:
        results.append(check.run(name, device))
        if progress is not None:
            progress(results[-1], len(results), len(todo))
    for op in ops:
        of_op = [result for result in results if result.op == op]
        if all(result.refused for result in of_op):
            detail = f"every problem is refused; the first: {of_op[0].detail}"
            results.append(Result(op, "any", of_op[0].dtype, _INFINITY, of_op[0].budget, False, detail))
    return results


# A real layer's inputs


def layer_inputs(
    model: Model | str,
    seqlen: int,
    text: str | bytes,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> Inputs:
    """Makes what a freshly initialised Mamba-2 layer of a released model's geometry feeds the scan.

    The text's bytes, repeated to seqlen, are the tokens. They pass a seeded embedding, an RMSNorm, in_proj, and
    the causal convolution of width 4 with SiLU. Initialised as `Mamba2` of state-spaces/mamba
    (mamba_ssm/modules/mamba2.py): A uniform in [-16, -1], dt_bias the inverse softplus of a log-uniform step in
    [1e-3, 0.1] and at least 1e-4, D one, in_proj and conv1d as torch.nn.Linear and Conv1d are, and half as many
    residual as inner channels. As there, dt is a view of in_proj's output, and x, B, C are views of the
    convolution's; the gate follows in the layer's norm, so that there is no z.

    Args:
        model: a model, or its name in `tilegym_mamba2.models.MODELS`.
        text: not empty; a file's content, say.
        dtype: of the activations x, dt, B and C; the parameters are float32 (float64 if it is that).

    Returns:
        The keyword arguments of `mamba_chunk_scan_combined`, for a batch of one.
    """
    model = find_model(model) if isinstance(model, str) else model
    content = text.encode() if isinstance(text, str) else text
    if not content:
        raise ValueError("text is empty: a layer needs at least one byte")
    generator = torch.Generator().manual_seed(seed)
    inner, groups = model.nheads * model.headdim, model.ngroups * model.dstate
    residual, conv_channels = max(inner // 2, 1), inner + 2 * groups

    def uniform(bound: float, *shape: int) -> Tensor:
        return torch.empty(shape).uniform_(-bound, bound, generator=generator)

    embedding = torch.empty(256, residual).normal_(0.0, 0.02, generator=generator)
    in_proj = uniform(residual**-0.5, inner + conv_channels + model.nheads, residual)
    conv_weight, conv_bias = uniform(0.5, 4, conv_channels), uniform(0.5, conv_channels)
    step = torch.empty(model.nheads).uniform_(math.log(1e-3), math.log(0.1), generator=generator).exp().clamp(min=1e-4)
    A = -torch.empty(model.nheads).uniform_(1.0, 16.0, generator=generator).log().exp()

    parameters = torch.float64 if dtype == torch.float64 else torch.float32
    tokens = torch.frombuffer(bytearray(content), dtype=torch.uint8).long().repeat(-(-seqlen // len(content)))[:seqlen]
    # Each token's projection depends on its byte alone: 256 rows are computed, not seqlen.
    projected = F.rms_norm(embedding, (residual,), eps=1e-5) @ in_proj.T
    projection = projected.to(device, dtype)[tokens.to(device)][None]  # (1, seqlen, channels): z, x, B, C, dt
    _, to_conv, dt = projection.split([inner, conv_channels, model.nheads], 2)
    padded = F.pad(to_conv.to(parameters), (0, 0, 3, 0))
    convolved = conv_bias.to(device, parameters).expand(1, seqlen, -1)
    for tap in range(4):
        convolved = torch.addcmul(convolved, padded[:, tap : tap + seqlen], conv_weight[tap].to(device, parameters))
    x, B, C = F.silu(convolved).to(dtype).split([inner, groups, groups], 2)

    inputs: Inputs = dict.fromkeys(inspect.signature(oracle_scan).parameters)
    inputs.update(
        x=x.unflatten(2, (model.nheads, model.headdim)),
        dt=dt,
        A=A.to(device, parameters),
        B=B.unflatten(2, (model.ngroups, model.dstate)),
        C=C.unflatten(2, (model.ngroups, model.dstate)),
        chunk_size=model.chunk_size,
        D=torch.ones(model.nheads, device=device, dtype=parameters),
        dt_bias=_inverse_softplus(step).to(device, parameters),
        dt_softplus=True,
        dt_limit=(0.0, _INFINITY),
    )
    return inputs
