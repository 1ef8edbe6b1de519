"""The Mamba-2 models of Hugging Face transformers (5.16 and later) on our scan and one-token update.

Each of its Mamba-2 modules has the functions `mamba2_chunk_scan`, `mamba2_selective_state_update` and
`causal_conv1d_fn`, which transformers binds at import to an installed package or else to slow torch code, and which
the layers look up at each call. `enable` replaces them there: models made before or after it, however imported, run
on ours, without mamba_ssm and without causal_conv1d.

The convolution is replaced for packed sequences only (`seq_idx` or `cu_seqlens`), which transformers can't keep
apart without causal_conv1d.
"""

import importlib
import importlib.util
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tilegym_mamba2 import registry
from tilegym_mamba2.integrations._substitution import Substitution, undo_all
from tilegym_mamba2.ops.selective_state_update import selective_state_update
from tilegym_mamba2.scan import mamba_chunk_scan_combined

FAMILIES = ("mamba2", "bamba", "nemotron_h", "zamba2", "falcon_h1", "granitemoehybrid")

# Layers pass on whatever the model was called with: what is not ours is for others.
_SCAN_OPTIONS = frozenset(
    ("z", "dt_bias", "initial_states", "seq_idx", "cu_seqlens", "dt_softplus", "dt_limit", "return_final_states")
)
_UPDATE_OPTIONS = frozenset(("z", "dt_bias", "dt_softplus"))

_active: list[Substitution] = []


def enable(backend: str | None = None) -> Substitution:
    """Makes transformers' Mamba-2 models run on this package.

    A backend without a backward refuses to run where autograd records (parameters require grad unless the model is
    called under torch.no_grad(), as generate does).

    Args:
        backend: name of the backend that runs them; None chooses at each call, as `tilegym_mamba2.registry` says.

    Returns:
        What was replaced (`.names`). It is a context manager too: `with enable(): ...` restores at its end.

    Raises:
        ImportError: transformers is missing, or older than 5.16.
        ValueError: there is no such backend.
    """
    if backend is not None:
        registry.has_implementation("mamba_chunk_scan", backend)
    replacements: dict[Callable[..., Any], Callable[..., Any]] = {}
    for family in FAMILIES:
        scan, update, convolve = _functions(family)
        replacements[scan] = _scan(backend)
        replacements[update] = _update(backend)
        replacements[convolve] = _convolve(convolve)
    return Substitution(replacements, _active)


def disable() -> list[str]:
    """Puts back, exactly, what every `enable` replaced; returns the names."""
    return undo_all(_active)


def _functions(family: str) -> list[Callable[..., Any]]:
    name = f"transformers.models.{family}.modeling_{family}"
    module: ModuleType = importlib.import_module(name)
    wanted = ("mamba2_chunk_scan", "mamba2_selective_state_update", "causal_conv1d_fn")
    missing = [function for function in wanted if not hasattr(module, function)]
    if missing:
        version = importlib.import_module("transformers").__version__
        raise ImportError(
            f"transformers {version} has no {', '.join(missing)} in {name}; this integration works with "
            "transformers 5.16 and later: pip install 'transformers>=5.16'"
        )
    return [getattr(module, function) for function in wanted]


def _scan(backend: str | None) -> Callable[..., Any]:
    def mamba2_chunk_scan(
        hidden_states: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        chunk_size: int,
        D: Tensor | None = None,
        **options: Any,
    ) -> Any:
        options = {name: value for name, value in options.items() if name in _SCAN_OPTIONS}
        return mamba_chunk_scan_combined(hidden_states, dt, A, B, C, chunk_size, D, backend=backend, **options)

    return mamba2_chunk_scan


def _update(backend: str | None) -> Callable[..., Any]:
    def mamba2_selective_state_update(
        state: Tensor,
        hidden_states: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        options = {name: value for name, value in options.items() if name in _UPDATE_OPTIONS}
        return selective_state_update(state, hidden_states, dt, A, B, C, D, backend=backend, **options)

    return mamba2_selective_state_update


def _convolve(original: Callable[..., Any]) -> Callable[..., Any]:
    activations: Any = importlib.import_module("transformers.activations").ACT2FN
    has_package = importlib.util.find_spec("causal_conv1d") is not None

    def causal_conv1d_fn(
        hidden_states: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        *,
        seq_idx: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        if cu_seqlens is None and (seq_idx is None or has_package):
            if seq_idx is not None:
                options["seq_idx"] = seq_idx
            return original(hidden_states, weight, bias, activation=activation, **options)
        sequence = _sequence_number(seq_idx, cu_seqlens, hidden_states.shape[-1])
        out = _packed_convolution(hidden_states.to(weight.dtype), weight, bias, sequence)
        if activation is not None:
            out = activations[activation](out)
        return out.to(hidden_states.dtype)

    return causal_conv1d_fn


def _sequence_number(seq_idx: Tensor | None, cu_seqlens: Tensor | None, length: int) -> Tensor:
    """Each token's sequence, numbered along the row, (batch, length).

    A row that is longer than seq_idx or cu_seqlens begins with tokens of a cache, which go before the first sequence.
    """
    numbers: list[Tensor] = []
    if seq_idx is not None:
        changed = seq_idx[:, 1:] != seq_idx[:, :-1]
        numbers.append(F.pad(changed.long().cumsum(1), (1 + length - seq_idx.shape[1], 0)))
    if cu_seqlens is not None:
        position = torch.arange(length, device=cu_seqlens.device) - (length - cu_seqlens[-1])
        numbers.append(torch.searchsorted(cu_seqlens[1:-1].long(), position, right=True)[None])
    return sum(numbers[1:], numbers[0])


def _packed_convolution(x: Tensor, weight: Tensor, bias: Tensor | None, sequence: Tensor) -> Tensor:
    """out[b, d, t] = bias[d] + sum(weight[d, k] * x[b, d, t - taps + 1 + k] for k), within t's sequence."""
    taps, length = weight.shape[-1], x.shape[-1]
    x_padded = F.pad(x, (taps - 1, 0))
    sequence_padded = F.pad(sequence, (taps - 1, 0), value=-1)[:, None]
    out = x.new_zeros(x.shape) if bias is None else bias[:, None].expand_as(x)
    for tap in range(taps):
        same = sequence_padded[..., tap : tap + length] == sequence[:, None]
        out = out + torch.where(same, x_padded[..., tap : tap + length], 0) * weight[:, tap, None]
    return out
