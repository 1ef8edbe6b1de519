"""The drop-in: mamba_ssm's signature, its returns, and what the package shows."""

import inspect
import math
from typing import Any

import pytest
import torch

import tilegym_mamba2
from tilegym_mamba2 import mamba_chunk_scan_combined, selective_state_update
from tilegym_mamba2.testing import PROBLEMS, oracle_scan, relative_error


def test_the_signature_is_the_contracts() -> None:
    parameters = inspect.signature(mamba_chunk_scan_combined).parameters
    defaults = {
        "D": None,
        "z": None,
        "dt_bias": None,
        "initial_states": None,
        "seq_idx": None,
        "cu_seqlens": None,
        "dt_softplus": False,
        "dt_limit": (0.0, math.inf),
        "return_final_states": False,
        "return_varlen_states": False,
        "state_dtype": None,
        "backend": None,
    }
    assert list(parameters) == ["x", "dt", "A", "B", "C", "chunk_size", *defaults]
    assert {name: parameter.default for name, parameter in parameters.items() if name in defaults} == defaults
    assert all(parameters[name].default is inspect.Parameter.empty for name in ("x", "dt", "A", "B", "C", "chunk_size"))
    kinds = {name: parameter.kind for name, parameter in parameters.items()}
    assert kinds.pop("backend") == inspect.Parameter.KEYWORD_ONLY
    assert set(kinds.values()) == {inspect.Parameter.POSITIONAL_OR_KEYWORD}


def test_the_decode_signature_is_the_contracts() -> None:
    parameters = inspect.signature(selective_state_update).parameters
    names = ["state", "x", "dt", "A", "B", "C", "D", "z", "dt_bias", "dt_softplus", "state_batch_indices", "backend"]
    assert list(parameters) == names
    assert parameters["backend"].kind == inspect.Parameter.KEYWORD_ONLY
    assert parameters["dt_softplus"].default is False
    assert [parameters[name].default for name in ("D", "z", "dt_bias", "state_batch_indices", "backend")] == [None] * 5


def test_all_public_names_exist_and_are_documented() -> None:
    for name in tilegym_mamba2.__all__:
        value = getattr(tilegym_mamba2, name)
        assert isinstance(value, str) or inspect.getdoc(value), name


@pytest.mark.parametrize("final", [False, True])
@pytest.mark.parametrize("varlen", [False, True])
def test_what_is_returned(final: bool, varlen: bool, backend: str, device: str) -> None:
    inputs = PROBLEMS["varlen_states"].inputs(torch.float32, device)
    result: Any = mamba_chunk_scan_combined(
        **inputs, return_final_states=final, return_varlen_states=varlen, backend=backend
    )
    out, final_states, varlen_states = oracle_scan(**inputs)
    wanted = [out, *([final_states] if final else []), *([varlen_states] if varlen else [])]
    if len(wanted) == 1:
        assert isinstance(result, torch.Tensor)
        result = (result,)
    assert isinstance(result, tuple)
    assert len(result) == len(wanted)
    for got, want in zip(result, wanted, strict=True):
        assert want is not None
        assert relative_error(got, want) <= 5e-6


def test_all_arguments_by_position(backend: str, device: str) -> None:
    inputs = PROBLEMS["packed_gate"].inputs(torch.float32, device)
    order = list(inspect.signature(mamba_chunk_scan_combined).parameters)[:-1]
    values = {**inputs, "return_final_states": True, "return_varlen_states": False}
    by_position: Any = mamba_chunk_scan_combined(*(values[name] for name in order), backend=backend)
    by_name: Any = mamba_chunk_scan_combined(**values, backend=backend)
    for got, want in zip(by_position, by_name, strict=True):
        assert torch.equal(got, want)


def test_offsets_isolate_whether_or_not_states_are_returned(backend: str, device: str) -> None:
    inputs = PROBLEMS["varlen"].inputs(torch.float32, device)
    inputs["dt"] -= 5  # long memory: a leak would show
    out = mamba_chunk_scan_combined(**inputs, backend=backend)
    assert isinstance(out, torch.Tensor)
    assert relative_error(out, oracle_scan(**inputs)[0]) <= 5e-6
    assert relative_error(out, oracle_scan(**{**inputs, "cu_seqlens": None})[0]) > 1e-3


def test_results_never_share_memory_with_arguments(backend: str, device: str) -> None:
    for problem in ("empty_seq", "one_token", "varlen_all_empty"):
        inputs = PROBLEMS[problem].inputs(torch.float32, device)
        _, final = mamba_chunk_scan_combined(**inputs, return_final_states=True, backend=backend)
        before = inputs["initial_states"].clone()
        final += 1
        assert torch.equal(inputs["initial_states"], before), problem


def test_float64_is_followed_to_the_end() -> None:
    inputs = PROBLEMS["packed_gate"].inputs(torch.float64)
    out, final = mamba_chunk_scan_combined(**inputs, return_final_states=True, backend="torch-reference")
    assert out.dtype == final.dtype == torch.float64
    assert relative_error(out, oracle_scan(**inputs)[0]) < 1e-13
