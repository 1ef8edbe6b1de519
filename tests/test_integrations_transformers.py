"""transformers' Mamba-2 families on this package: tiny models with random weights, no network."""

import importlib
import importlib.util
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.tiny_models import (
    cache_name,
    config,
    generate,
    left_padded,
    logits,
    make_model,
    mamba_layers,
    needs_packing,
    packed,
    tokens,
    transformers,
)
from tilegym_mamba2 import registry, use_backend
from tilegym_mamba2.ops.mamba_chunk_scan import mamba_chunk_scan
from tilegym_mamba2.ops.selective_state_update import selective_state_update
from tilegym_mamba2.testing import relative_error

integration = importlib.import_module("tilegym_mamba2.integrations.transformers")

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("mamba_ssm") is not None,
    reason="with mamba_ssm installed the unpatched models run on CUDA devices only",
)

NAMES = ("mamba2_chunk_scan", "mamba2_selective_state_update", "causal_conv1d_fn")


@pytest.fixture(params=integration.FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def model(family: str) -> Any:
    return make_model(config(family))


@pytest.fixture(autouse=True)
def _nothing_replaced() -> Any:
    yield
    assert integration.disable() == [], "a test left functions replaced"


@pytest.fixture
def recorded(fresh_registry: None) -> list[str]:
    """What the backend "recorder" computes, by op; it computes as torch-reference does."""
    calls: list[str] = []

    def record(op: Callable[..., Any]) -> None:
        @registry.register(op.__name__, "recorder", differentiable=True)
        def recorder(*arguments: Any) -> Any:
            calls.append(op.__name__)
            return op(*arguments, backend="torch-reference")

    registry.register_backend(registry.Backend("recorder", why_unavailable=lambda device: None))
    record(mamba_chunk_scan)
    record(selective_state_update)
    return calls


# What the models compute


@pytest.mark.parametrize("padding", [False, True], ids=["full", "left_padded"])
def test_logits_equal_the_unpatched(model: Any, padding: bool, recorded: list[str]) -> None:
    inputs = left_padded() if padding else {"input_ids": tokens()}
    wanted = logits(model, **inputs)
    with integration.enable("recorder"):
        got = logits(model, **inputs)
    mask = inputs.get("attention_mask", torch.ones(2, 21)).bool()
    assert relative_error(got[mask], wanted[mask]) < 1e-5
    assert recorded == ["mamba_chunk_scan"] * mamba_layers(model)


def test_layers_matter_to_the_logits(model: Any) -> None:
    """Else the comparison with the unpatched model would say nothing."""
    wanted = logits(model, input_ids=tokens())
    with integration.enable(), torch.no_grad():
        for module in model.modules():
            if hasattr(module, "A_log"):
                module.A_log += 1
        assert relative_error(logits(model, input_ids=tokens()), wanted) > 1e-3


def test_greedy_generation_is_identical(model: Any, recorded: list[str]) -> None:
    wanted = generate(model, left_padded())
    with integration.enable("recorder"):
        got = generate(model, left_padded())
    assert torch.equal(got, wanted)
    assert got.shape == (2, 21 + 32)
    layers = mamba_layers(model)
    assert recorded == ["mamba_chunk_scan"] * layers + ["selective_state_update"] * layers * 31


def test_cached_decoding_equals_the_unpatched(model: Any, recorded: list[str]) -> None:
    ids = tokens()

    @torch.no_grad()
    def decode() -> Tensor:
        cache = {cache_name(model): transformers.DynamicCache(config=model.config)}
        steps = ((0, 13), (13, 18), (18, 19), (19, 20), (20, 21))
        return torch.cat([model(input_ids=ids[:, slice(*step)], use_cache=True, **cache).logits for step in steps], 1)

    wanted = decode()
    with integration.enable("recorder"):
        got = decode()
    assert relative_error(got, wanted) < 1e-5
    layers = mamba_layers(model)
    assert recorded == ["mamba_chunk_scan"] * layers * 2 + ["selective_state_update"] * layers * 3


def test_cached_decoding_equals_the_whole_sequence() -> None:
    model = make_model(config("mamba2"))
    ids = tokens()
    with integration.enable(), torch.no_grad():
        cache = {cache_name(model): transformers.DynamicCache(config=model.config)}
        parts = [model(input_ids=part, use_cache=True, **cache).logits for part in ids.split([13, 5, 1, 1, 1], 1)]
        assert relative_error(torch.cat(parts, 1), model(input_ids=ids).logits) < 1e-5


@pytest.mark.parametrize("kind", ["seq_idx", "cu_seqlens"])
def test_packed_sequences_equal_separate_ones(family: str, kind: str, recorded: list[str]) -> None:
    model, inputs, parts = packed(family, kind)
    with integration.enable("recorder"):
        got = logits(model, **inputs)
        calls = len(recorded)
        wanted = [logits(model, input_ids=part, use_cache=False) for part in parts]
    assert relative_error(got, torch.cat(wanted, 1)) < 1e-5
    assert calls == mamba_layers(model)


def test_packed_prefill_into_a_cache_continues_the_last_sequence() -> None:
    needs_packing("mamba2")
    model = make_model(config("mamba2"))
    ids = tokens(1, 20)
    seq_idx = (torch.arange(19) >= 8).int()[None]
    with integration.enable(), torch.no_grad():
        cache = {cache_name(model): transformers.DynamicCache(config=model.config)}
        model.backbone(input_ids=ids[:, :19], seq_idx=seq_idx, use_cache=True, **cache)
        got = model.backbone(input_ids=ids[:, 19:], use_cache=True, **cache).last_hidden_state
        wanted = model.backbone(input_ids=ids[:, 8:], use_cache=False).last_hidden_state[:, -1:]
    assert relative_error(got, wanted) < 1e-5


def test_bfloat16_stays_close(model: Any) -> None:
    wanted = logits(model, input_ids=tokens())
    model = model.to(torch.bfloat16)
    unpatched = relative_error(logits(model, input_ids=tokens()), wanted)
    with integration.enable():
        got = logits(model, input_ids=tokens())
    assert relative_error(got, wanted) < 2 * unpatched


def test_gradients_through_the_reference(model: Any) -> None:
    def gradients() -> list[Tensor]:
        model.zero_grad()
        model(input_ids=tokens(), labels=tokens()).loss.backward()
        return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]

    wanted = gradients()
    with integration.enable("torch-reference"):
        got = gradients()
    assert len(got) == len(wanted)
    for gradient, expected in zip(got, wanted, strict=True):
        torch.testing.assert_close(gradient, expected, rtol=1e-3, atol=1e-5)


def test_compiled_model_takes_the_replacement_at_once(recorded: list[str]) -> None:
    torch._dynamo.reset()
    layout = config("mamba2")
    layout.num_hidden_layers = 1
    model = make_model(layout)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    inputs = {"input_ids": tokens(), "use_cache": False}
    wanted = logits(compiled, **inputs)
    with integration.enable("recorder"):
        assert relative_error(logits(compiled, **inputs), wanted) < 1e-5
        assert len(recorded) == mamba_layers(model)
    logits(compiled, **inputs)
    assert len(recorded) == mamba_layers(model)


# What is replaced


def functions() -> dict[str, Any]:
    modules = {
        name: importlib.import_module(f"transformers.models.{name}.modeling_{name}") for name in integration.FAMILIES
    }
    return {f"{module.__name__}.{name}": getattr(module, name) for module in modules.values() for name in NAMES}


def test_enable_says_what_it_replaces_and_disable_restores_it() -> None:
    before = functions()
    assert sorted(before) == integration.enable().names
    assert all(value is not before[name] for name, value in functions().items())
    assert integration.disable() == sorted(before)
    assert all(value is before[name] for name, value in functions().items())


def test_nested_and_repeated_enable_restore_in_order(recorded: list[str]) -> None:
    before = functions()
    model = make_model(config("mamba2"))
    with integration.enable("torch-reference"):
        outer = functions()
        with integration.enable("recorder"):
            logits(model, input_ids=tokens())
        assert len(recorded) == mamba_layers(model)
        assert functions() == outer
        logits(model, input_ids=tokens())
        assert len(recorded) == mamba_layers(model)
    assert functions() == before
    integration.enable()
    integration.enable()
    integration.disable()
    assert functions() == before


def test_disable_inside_a_with_block() -> None:
    before = functions()
    with integration.enable() as replaced:
        integration.disable()
        assert functions() == before
        replaced.undo()
    assert functions() == before


def test_none_follows_the_selection(recorded: list[str]) -> None:
    model = make_model(config("mamba2"))
    with integration.enable():
        logits(model, input_ids=tokens())
        assert recorded == []
        with use_backend("recorder"):
            logits(model, input_ids=tokens())
    assert len(recorded) == mamba_layers(model)


def test_unknown_backend_replaces_nothing() -> None:
    before = functions()
    with pytest.raises(ValueError, match="there is no backend 'tritn', did you mean 'triton'"):
        integration.enable("tritn")
    assert functions() == before


def test_older_transformers_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("transformers.models.zamba2.modeling_zamba2")
    with monkeypatch.context() as patch:
        patch.delattr(module, "mamba2_chunk_scan")
        before = functions_of("bamba")
        with pytest.raises(ImportError, match=r"has no mamba2_chunk_scan in .*zamba2.*transformers>=5\.16"):
            integration.enable()
        assert functions_of("bamba") == before


def functions_of(family: str) -> list[Any]:
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    return [getattr(module, name) for name in NAMES]


@pytest.mark.parametrize(
    "first", ["integration.enable()", "from transformers import Mamba2ForCausalLM"], ids=["enable", "transformers"]
)
def test_both_import_orders(first: str) -> None:
    code = f"""
import sys
import tilegym_mamba2
assert not any(name.partition(".")[0] in ("transformers", "triton", "mamba_ssm") for name in sys.modules)
from tilegym_mamba2.integrations import transformers as integration
{first}
from transformers import Mamba2ForCausalLM
integration.enable()
from transformers.models.mamba2 import modeling_mamba2
assert modeling_mamba2.mamba2_chunk_scan.__module__ == integration.__name__
assert Mamba2ForCausalLM.__module__ == modeling_mamba2.__name__
integration.disable()
assert modeling_mamba2.mamba2_chunk_scan.__module__ == modeling_mamba2.__name__
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
