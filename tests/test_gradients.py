"""torch-reference is differentiable in every floating-point input."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tilegym_mamba2 import chunk_cumsum, compute_out, fwd_pass_state, mamba_chunk_scan_combined, selective_state_update
from tilegym_mamba2.testing import make_decode_inputs, make_inputs, op_inputs, oracle_scan, relative_error

SIZES: dict[str, Any] = {"batch": 1, "seqlen": 5, "nheads": 2, "headdim": 2, "ngroups": 1, "dstate": 2, "chunk_size": 2}
EVERYTHING: dict[str, Any] = {"z": True, "D": "channels", "initial_states": True, "decay": (0.05, 2.0)}
CASES: dict[str, dict[str, Any]] = {
    "all": EVERYTHING,
    "groups": {**EVERYTHING, "ngroups": 2, "D": "heads"},
    "no_softplus": {**EVERYTHING, "dt_softplus": False},
    "limits": {**EVERYTHING, "dt_limit": (0.01, 0.1)},
    "sequences": {**EVERYTHING, "seq_idx": ([0, 1, 1, 2, 0, 2],)},
    "varlen": {**EVERYTHING, "cu_seqlens": (0, 1, 1, 4, 5)},
    "first_state": {**EVERYTHING, "cu_seqlens": (0, 3, 5), "first_state_only": True},
}


def gradcheck(function: Callable[..., Any], inputs: dict[str, Any]) -> set[str]:
    """Compares the gradients with finite differences; returns the arguments that were differentiated."""
    names = [name for name, value in inputs.items() if isinstance(value, torch.Tensor) and value.is_floating_point()]
    values = [inputs[name].double().requires_grad_() for name in names]

    def call(*tensors: torch.Tensor) -> Any:
        return function(**{**inputs, **dict(zip(names, tensors, strict=True))}, backend="torch-reference")

    assert torch.autograd.gradcheck(call, values, fast_mode=False)
    return set(names)


@pytest.mark.parametrize("name", list(CASES))
def test_the_forward(name: str) -> None:
    inputs = make_inputs(torch.float64, **{**SIZES, **CASES[name]})

    def forward(**arguments: Any) -> Any:
        varlen = arguments["cu_seqlens"] is not None
        return mamba_chunk_scan_combined(**arguments, return_final_states=True, return_varlen_states=varlen)

    assert gradcheck(forward, inputs) == {"x", "dt", "A", "B", "C", "D", "z", "dt_bias", "initial_states"}


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if "cu_seqlens" not in case])
@pytest.mark.parametrize("op", [chunk_cumsum, fwd_pass_state, compute_out])
def test_the_stages_across_chunks(op: Callable[..., Any], name: str) -> None:
    inputs = op_inputs(op.__name__, make_inputs(torch.float64, **{**SIZES, **CASES[name]}))
    differentiated = gradcheck(op, inputs)
    wanted = {
        "chunk_cumsum": {"dt", "A", "dt_bias"},
        "fwd_pass_state": {"x", "B", "dt_out", "dA_cumsum", "initial_states"},
        "compute_out": {"x", "B", "C", "dt_out", "dA_cumsum", "states", "D", "z"},
    }
    assert differentiated == wanted[op.__name__]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("indices", [None, (3, -1)])
def test_the_decode_step(indices: tuple[int, ...] | None, tied: bool) -> None:
    options: dict[str, Any] = {"batch": 2, "nheads": 2, "headdim": 2, "ngroups": 1, "dstate": 2, "nslots": 4}
    inputs = make_decode_inputs(torch.float64, **options, z=True, indices=indices, tied=tied)
    inputs = {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in inputs.items()}

    def step(state: torch.Tensor, **arguments: Any) -> Any:
        state = state.clone()  # updated in place
        out = selective_state_update(state, **arguments)
        return out, state

    assert gradcheck(step, inputs) == {"state", "x", "dt", "A", "B", "C", "D", "z", "dt_bias"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_those_of_the_recurrence(dtype: torch.dtype) -> None:
    """Over several chunks, through autograd of the token-by-token oracle."""
    inputs = make_inputs(dtype, seqlen=70, z=True, initial_states=True, seq_idx=([0, 40, 1, 30], [3, 70]))
    names = [name for name, value in inputs.items() if isinstance(value, torch.Tensor) and value.is_floating_point()]
    leaves = {name: inputs[name].clone().requires_grad_() for name in names}
    out = mamba_chunk_scan_combined(**{**inputs, **leaves})
    assert isinstance(out, torch.Tensor)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    got = torch.autograd.grad((out.double() * weights).sum(), list(leaves.values()))
    exact = {name: inputs[name].double().requires_grad_() for name in names}
    want = torch.autograd.grad((oracle_scan(**{**inputs, **exact})[0] * weights).sum(), list(exact.values()))
    for name, value, expected in zip(names, got, want, strict=True):
        assert value.dtype == inputs[name].dtype
        assert relative_error(value, expected) < (1e-4 if dtype == torch.float32 else 2e-2), name


def test_extreme_decays_have_finite_gradients() -> None:
    inputs = make_inputs(seqlen=70, A=(1e4, 1e4), decay=(1e4, 5e5), seq_idx=([0, 40, 1, 30], [3, 70]))
    leaves = {name: inputs[name].requires_grad_() for name in ("x", "dt", "A", "B", "C")}
    out = mamba_chunk_scan_combined(**inputs)
    assert isinstance(out, torch.Tensor)
    for name, grad in zip(leaves, torch.autograd.grad(out.sum(), list(leaves.values())), strict=True):
        assert grad.isfinite().all(), name
