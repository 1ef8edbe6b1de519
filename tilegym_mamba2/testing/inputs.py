"""Makers of well-scaled random inputs, in any memory layout."""

import inspect
import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from tilegym_mamba2.testing.errors import INFINITY
from tilegym_mamba2.testing.oracle import oracle_scan, oracle_selective_state_update

Inputs = dict[str, Any]


def inverse_softplus(d: Tensor) -> Tensor:
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
    dt_limit: tuple[float, float] = (0.0, INFINITY),
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
    raw = inverse_softplus(d) if dt_softplus else d
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
    raw = inverse_softplus(d) if dt_softplus else d
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
