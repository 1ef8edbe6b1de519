"""The integrations on a GPU: calls that are compiled or captured, transformers' models, and the real peers."""

import importlib
import importlib.util
import inspect
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters

import tilegym_mamba2 as tm
from tests.conftest import DEVICE, missing
from tilegym_mamba2 import registry
from tilegym_mamba2.integrations import mamba_ssm
from tilegym_mamba2.testing import (
    budget,
    make_decode_inputs,
    make_inputs,
    oracle_scan,
    oracle_selective_state_update,
    relative_error,
)

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    # inductor's
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning"),
]

KERNELS = ("cutile", "triton")
SIZES = {"nheads": 8, "headdim": 64, "ngroups": 1, "dstate": 128, "chunk_size": 128}
SCAN = "mamba_ssm.ops.triton.ssd_combined"
UPDATE = "mamba_ssm.ops.triton.selective_state_update"
PEER_BUDGETS = 2  # how many of our error budgets a peer's result may be off


@pytest.fixture(params=KERNELS)
def kernel(request: pytest.FixtureRequest) -> str:
    missing(request.config, request.param, "mamba_chunk_scan")
    return request.param


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The backend of every scan and decode step that runs, in order."""
    backends: list[str] = []
    run = registry.Implementation.run

    def spy(self: registry.Implementation, problem: Any, *arguments: Any) -> Any:
        if self.op in ("mamba_chunk_scan", "selective_state_update"):
            backends.append(self.backend)
        return run(self, problem, *arguments)

    monkeypatch.setattr(registry.Implementation, "run", spy)
    return backends


@pytest.fixture
def peer(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Imports a module of mamba_ssm; each kernel takes its configuration of least shared memory, and tries no other."""

    def load(name: str) -> Any:
        module = importlib.import_module(name)
        autotuner = importlib.import_module("triton").runtime.Autotuner
        for other in [other for key, other in sys.modules.items() if key.startswith("mamba_ssm.")]:
            for value in vars(other).values():
                if isinstance(value, autotuner):
                    smallest = min(value.configs, key=lambda one: sum(one.kwargs.values()) * one.num_stages)
                    monkeypatch.setattr(value, "configs", [smallest])
        return module

    return load


@pytest.fixture(autouse=True)
def _fresh() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    torch.cuda.empty_cache()


def is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def needs(package: str) -> None:
    if not is_installed(package):
        pytest.skip(f"{package} is not installed")


def scan_inputs(seqlen: int = 300, *, seed: int = 0, **options: Any) -> dict[str, Any]:
    return make_inputs(torch.bfloat16, DEVICE, seqlen=seqlen, seed=seed, **SIZES, **options)


def scan(inputs: dict[str, Any], **options: Any) -> Any:
    return tm.mamba_chunk_scan_combined(**inputs, return_final_states=True, **options)


def assert_right(got: Any, inputs: dict[str, Any], budgets: int = 1) -> None:
    for name, value, right in zip(("out", "final_states", "varlen_states"), got, oracle_scan(**inputs), strict=False):
        assert relative_error(value, right) <= budgets * budget(inputs["x"].dtype), name


def overwrite(inputs: dict[str, Any], others: dict[str, Any]) -> None:
    for name, value in others.items():
        if isinstance(value, Tensor):
            inputs[name].copy_(value)


def capture(function: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """A graph of a call that is warm, and its results."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            function()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = function()
    return graph, results


# torch.compile


@pytest.mark.parametrize("dynamic", [None, True, False], ids=["automatic", "dynamic", "static"])
def test_two_seqlens_compile_at_most_twice(kernel: str, dynamic: bool | None, ran: list[str]) -> None:
    counter = CompileCounterWithBackend("inductor")
    compiled = torch.compile(scan, backend=counter, fullgraph=True, dynamic=dynamic)
    for seqlen in (256, 300, 256):
        inputs = scan_inputs(seqlen)
        assert_right(compiled(inputs, backend=kernel), inputs)
    assert counter.frame_count <= 2
    assert ran == [kernel] * 3


def test_selection_around_and_inside_a_compiled_function(request: pytest.FixtureRequest, ran: list[str]) -> None:
    for name in KERNELS:
        missing(request.config, name, "mamba_chunk_scan")

    def run(inputs: dict[str, Any]) -> Any:
        with tm.use_backend("triton"):
            first = scan(inputs)
        return first, scan(inputs)

    counter = CompileCounterWithBackend("inductor")
    compiled = torch.compile(run, backend=counter, fullgraph=True)
    inputs = scan_inputs()
    for outside in (None, *KERNELS, "torch-reference"):
        with tm.use_backend(outside):
            for result in compiled(inputs):
                assert_right(result, inputs)
    assert ran == ["triton", "cutile", "triton", "cutile", "triton", "triton", "triton", "torch-reference"]
    assert counter.frame_count == 1


def test_compiled_layer_on_views_of_a_projection(kernel: str) -> None:
    """Inductor's layouts reach the kernels as they are."""
    nheads, headdim, dstate = SIZES["nheads"], SIZES["headdim"], SIZES["dstate"]
    inputs = scan_inputs()
    sizes = [nheads * headdim, dstate, dstate, nheads]
    projected = torch.cat([inputs[name].flatten(2) for name in ("x", "B", "C", "dt")], 2)

    def layer(projected: Tensor) -> Tensor:
        x, B, C, dt = (projected * 1).split(sizes, -1)
        parts = {"x": x.unflatten(-1, (nheads, headdim)), "B": B.unsqueeze(2), "C": C.unsqueeze(2), "dt": dt}
        return scan({**inputs, **parts}, backend=kernel)

    assert_right(torch.compile(layer, fullgraph=True)(projected), inputs)


def test_compiled_backward_after_the_block() -> None:
    """Autograd runs it in a thread of its own, where the automatic choice has no backward."""
    inputs = make_inputs(torch.float32, DEVICE, seqlen=40)
    leaves = {name: inputs[name].requires_grad_() for name in ("x", "dt", "A", "B", "C", "D")}
    compiled = torch.compile(scan, fullgraph=True)
    with tm.use_backend("torch-reference"):
        loss = compiled(inputs)[0].square().sum()
    loss.backward()
    wanted = scan(inputs, backend="torch-reference")[0].square().sum()
    for (name, leaf), right in zip(leaves.items(), torch.autograd.grad(wanted, list(leaves.values())), strict=True):
        assert leaf.grad is not None
        assert relative_error(leaf.grad, right) < 1e-5, name


def test_a_compiled_call_that_needs_a_backward_is_refused(kernel: str) -> None:
    inputs = scan_inputs()
    inputs["x"].requires_grad_()
    compiled = torch.compile(scan, backend="aot_eager", fullgraph=True)
    with pytest.raises(Exception, match="x requires grad and this backend has no backward"):
        compiled(inputs, backend=kernel)


def test_compiled_on_a_side_stream(kernel: str) -> None:
    inputs = scan_inputs(256)
    compiled = torch.compile(scan, fullgraph=True)
    compiled(inputs, backend=kernel)
    x = inputs["x"].clone()
    inputs["x"].zero_()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        inputs["x"].copy_(x)
        got = compiled(inputs, backend=kernel)
    stream.synchronize()
    assert_right(got, inputs)


def test_compiled_on_another_device(kernel: str) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    inputs = make_inputs(torch.bfloat16, "cuda:1", seqlen=256, **SIZES)
    assert torch.cuda.current_device() == 0
    got = torch.compile(scan, fullgraph=True)(inputs, backend=kernel)
    assert got[0].device == torch.device("cuda:1")
    assert_right(got, inputs)


# CUDA graphs


def test_captured_compiled_call_replays_with_changed_data(kernel: str) -> None:
    inputs, others = scan_inputs(initial_states=True), scan_inputs(initial_states=True, seed=1)
    compiled = torch.compile(scan, fullgraph=True)
    graph, got = capture(lambda: compiled(inputs, backend=kernel))
    overwrite(inputs, others)
    graph.replay()
    torch.cuda.synchronize()
    assert_right(got, others)


def test_reduce_overhead(kernel: str) -> None:
    """Inductor's own CUDA graphs: the operator does not stand in their way."""

    def layer(inputs: dict[str, Any]) -> Any:
        out, final_states = scan({**inputs, "x": inputs["x"] * 1}, backend=kernel)
        return out * 1, final_states

    counters.clear()
    compiled = torch.compile(layer, mode="reduce-overhead", fullgraph=True)
    with torch.no_grad():
        for seed in range(4):
            torch.compiler.cudagraph_mark_step_begin()
            inputs = scan_inputs(seed=seed)
            assert_right([result.clone() for result in compiled(inputs)], inputs)
    assert counters["inductor"]["cudagraph_skips"] == 0


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_captured_decode_step_updates_the_state_in_place(kernel: str, compiled: bool) -> None:
    options: dict[str, Any] = {"state_dtype": torch.float32, "headdim": 64, "dstate": 128, "tied": False}
    inputs, others = (make_decode_inputs(torch.bfloat16, DEVICE, seed=seed, **options) for seed in (0, 1))
    state, start = inputs["state"], others["state"].clone()
    step = torch.compile(tm.selective_state_update, fullgraph=True) if compiled else tm.selective_state_update
    graph, out = capture(lambda: step(**inputs, backend=kernel))
    overwrite(inputs, others)
    for _ in range(2):
        right, start = oracle_selective_state_update(**{**others, "state": start})
        graph.replay()
        torch.cuda.synchronize()
        assert relative_error(out, right) <= budget(torch.bfloat16)
        assert relative_error(state, start) <= budget(torch.bfloat16)


# transformers


transformers = pytest.importorskip("transformers", reason="transformers is not installed", minversion="5.16")
from tests import tiny_models  # noqa: E402 (needs transformers)
from tilegym_mamba2.integrations import transformers as integration  # noqa: E402

LOGITS_BUDGETS = 20  # of one scan: errors of several layers, each carried on by the layers after it

torch_path = pytest.mark.skipif(
    is_installed("mamba_ssm"),
    reason="with mamba_ssm installed the unpatched models run on its kernels, whose float32 products are TF32",
)


@pytest.fixture(params=integration.FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def model(family: str) -> Any:
    return tiny_models.make_model(tiny_models.config(family)).to(DEVICE)


@pytest.fixture(autouse=True)
def _nothing_replaced() -> Any:
    yield
    assert integration.disable() == [], "a test left functions replaced"


def on_device(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.to(DEVICE) for name, value in inputs.items()}


def new_cache(model: Any) -> dict[str, Any]:
    return {tiny_models.cache_name(model): transformers.DynamicCache(config=model.config)}


def medium_model(dtype: torch.dtype) -> Any:
    """Of the sizes that kernels are written for."""
    layout = transformers.Mamba2Config(
        num_heads=8,
        head_dim=64,
        hidden_size=256,
        state_size=128,
        n_groups=1,
        num_hidden_layers=2,
        vocab_size=64,
        chunk_size=128,
    )
    return tiny_models.make_model(layout).to(DEVICE, dtype)


@torch_path
@pytest.mark.parametrize("padding", [False, True], ids=["full", "left_padded"])
def test_logits_equal_the_unpatched(model: Any, padding: bool, kernel: str, ran: list[str]) -> None:
    inputs = on_device(tiny_models.left_padded() if padding else {"input_ids": tiny_models.tokens()})
    wanted = tiny_models.logits(model, **inputs)
    with integration.enable(kernel):
        got = tiny_models.logits(model, **inputs)
    mask = inputs.get("attention_mask", torch.ones(2, 21, device=DEVICE)).bool()
    assert relative_error(got[mask], wanted[mask]) < LOGITS_BUDGETS * budget(torch.float32)
    assert ran == [kernel] * tiny_models.mamba_layers(model)


@torch_path
def test_greedy_generation_is_identical(model: Any, kernel: str, ran: list[str]) -> None:
    inputs = on_device(tiny_models.left_padded())
    wanted = tiny_models.generate(model, inputs)
    with integration.enable(kernel):
        got = tiny_models.generate(model, inputs)
    assert torch.equal(got, wanted)
    assert got.shape == (2, 21 + 32)
    assert ran == [kernel] * tiny_models.mamba_layers(model) * 32


@torch_path
def test_cached_decoding_equals_the_unpatched(model: Any, kernel: str) -> None:
    ids = tiny_models.tokens().to(DEVICE)

    @torch.no_grad()
    def decode() -> Tensor:
        cache = new_cache(model)
        return torch.cat(
            [model(input_ids=part, use_cache=True, **cache).logits for part in ids.split([13, 5, 1, 1, 1], 1)], 1
        )

    wanted = decode()
    with integration.enable(kernel):
        assert relative_error(decode(), wanted) < LOGITS_BUDGETS * budget(torch.float32)


@pytest.mark.parametrize("kind", ["seq_idx", "cu_seqlens"])
def test_packed_sequences_equal_separate_ones(family: str, kind: str, kernel: str) -> None:
    model, inputs, parts = tiny_models.packed(family, kind, DEVICE)
    with integration.enable(kernel):
        got = tiny_models.logits(model, **inputs)
        wanted = torch.cat([tiny_models.logits(model, input_ids=part, use_cache=False) for part in parts], 1)
    assert relative_error(got, wanted) < LOGITS_BUDGETS * budget(torch.float32)


def test_bfloat16_is_as_close_as_the_unpatched(kernel: str, ran: list[str], peer: Callable[[str], Any]) -> None:
    if is_installed("mamba_ssm"):
        peer(SCAN)
    ids = tiny_models.tokens(4, 300).to(DEVICE)
    exact = medium_model(torch.float32)
    with integration.enable("torch-reference"):
        wanted = tiny_models.logits(exact, input_ids=ids)
    model = medium_model(torch.bfloat16)
    unpatched = relative_error(tiny_models.logits(model, input_ids=ids), wanted)
    ran.clear()
    with integration.enable(kernel):
        got = tiny_models.logits(model, input_ids=ids)
    assert relative_error(got, wanted) < 1.2 * unpatched
    assert ran == [kernel] * 2


def test_compiled_model(kernel: str) -> None:
    model = medium_model(torch.float32)
    inputs = {"input_ids": tiny_models.tokens(2, 200).to(DEVICE), "use_cache": False}
    with integration.enable(kernel):
        wanted = tiny_models.logits(model, **inputs)
        got = tiny_models.logits(torch.compile(model, fullgraph=True), **inputs)
    assert relative_error(got, wanted) < LOGITS_BUDGETS * budget(torch.float32)


def test_captured_decode_step_of_a_model(kernel: str) -> None:
    model = medium_model(torch.float32)
    prompt, ids = tiny_models.tokens(2, 20).to(DEVICE), tiny_models.tokens(2, 5).to(DEVICE)
    with integration.enable(kernel), torch.no_grad():

        def after_prompt() -> dict[str, Any]:
            cache = new_cache(model)
            model(input_ids=prompt, use_cache=True, **cache)
            return cache

        cache = after_prompt()
        wanted = [model(input_ids=part, use_cache=True, **cache).logits for part in ids.split(1, 1)]
        cache = after_prompt()
        token = ids[:, :1].clone()
        graph, got = capture(lambda: model(input_ids=token, use_cache=True, **cache).logits)
        layers = next(iter(cache.values())).layers
        for layer, fresh in zip(layers, next(iter(after_prompt().values())).layers, strict=True):
            for states in ("conv_states", "recurrent_states"):
                pairs = zip(tensors_in(getattr(layer, states)), tensors_in(getattr(fresh, states)), strict=True)
                for state, start in pairs:
                    state.copy_(start)
        for part, right in zip(ids.split(1, 1), wanted, strict=True):
            token.copy_(part)
            graph.replay()
            torch.cuda.synchronize()
            assert relative_error(got, right) < LOGITS_BUDGETS * budget(torch.float32)


def tensors_in(states: Any) -> list[Tensor]:
    """A cache's layer has a tensor, or several by number."""
    return [states] if isinstance(states, Tensor) else list(states.values() if isinstance(states, dict) else states)


# mamba_ssm


def theirs_of(inputs: dict[str, Any]) -> dict[str, Any]:
    """Without the one argument that mamba_ssm 2.3.2 doesn't have."""
    return {name: value for name, value in inputs.items() if name != "state_dtype"}


@pytest.mark.parametrize(
    "options",
    [{"initial_states": True}, {"z": True, "seq_idx": ([0, 100, 1, 60, 2, 140],) * 2}],
    ids=["initial_states", "seq_idx"],
)
def test_mamba_ssm_runs_on_ours(
    kernel: str, options: dict[str, Any], ran: list[str], peer: Callable[[str], Any]
) -> None:
    needs("mamba_ssm")
    module = peer(SCAN)
    theirs = module.mamba_chunk_scan_combined
    inputs = theirs_of(scan_inputs(**options))
    assert_right(theirs(**inputs, return_final_states=True), inputs, PEER_BUDGETS)
    assert ran == []
    with mamba_ssm.enable(kernel) as replaced:
        assert {f"{SCAN}.mamba_chunk_scan_combined", f"{UPDATE}.selective_state_update"} <= set(replaced.names)
        ours = module.mamba_chunk_scan_combined
        assert_right(ours(**inputs, return_final_states=True), inputs)
        assert ran == [kernel]
        names = list(inspect.signature(theirs).parameters)
        assert list(inspect.signature(ours).parameters)[: len(names)] == names
    assert module.mamba_chunk_scan_combined is theirs


def test_mamba_ssm_varlen_states_are_ours(kernel: str, peer: Callable[[str], Any]) -> None:
    needs("mamba_ssm")
    module = peer(SCAN)
    inputs = theirs_of(scan_inputs(batch=1, cu_seqlens=(0, 100, 137, 300)))
    lengths = torch.tensor([100, 37, 163])
    seq_idx = torch.arange(3).repeat_interleave(lengths)[None].int().to(DEVICE)
    options = {"return_final_states": True, "return_varlen_states": True}
    assert_right(module.mamba_chunk_scan_combined(**inputs | {"seq_idx": seq_idx}, **options), inputs, PEER_BUDGETS)
    with mamba_ssm.enable(kernel):
        assert_right(module.mamba_chunk_scan_combined(**inputs | {"seq_idx": seq_idx}, **options), inputs)


def test_mamba_ssm_decodes_on_ours(kernel: str, ran: list[str], peer: Callable[[str], Any]) -> None:
    needs("mamba_ssm")
    module = peer(UPDATE)
    theirs = module.selective_state_update
    inputs = make_decode_inputs(torch.bfloat16, DEVICE, z=True, headdim=64, dstate=128)
    right = oracle_selective_state_update(**inputs)

    def errors() -> list[float]:
        state = inputs["state"].clone()
        out = module.selective_state_update(**inputs | {"state": state})
        return [relative_error(got, wanted) for got, wanted in zip((out, state), right, strict=True)]

    assert max(errors()) <= PEER_BUDGETS * budget(torch.bfloat16)
    assert ran == []
    with mamba_ssm.enable(kernel):
        assert max(errors()) <= budget(torch.bfloat16)
        assert ran == [kernel]
    assert module.selective_state_update is theirs


def test_provide_serves_code_written_for_mamba_ssm(kernel: str) -> None:
    if is_installed("mamba_ssm"):
        pytest.skip("mamba_ssm is installed")
    try:
        mamba_ssm.provide(kernel)
        inputs = scan_inputs()
        provided = importlib.import_module(SCAN).mamba_chunk_scan_combined
        assert_right(provided(**inputs, return_final_states=True), inputs)
    finally:
        mamba_ssm.withdraw()


# TileGym

TILEGYM = """
import sys, torch
import tilegym_mamba2 as tm
from tilegym_mamba2.integrations import tilegym
from tilegym_mamba2.testing import budget, make_inputs, oracle_scan, relative_error

assert tilegym.install() == [
    "tilegym: mamba2_chunk_forward on triton",
    "tilegym: mamba2_chunk_forward on torch-reference",
    "tilegym_mamba2: mamba_chunk_scan on tilegym",
]
assert tm.available_backends()[0] != "tilegym" and tm.explain_backends()["tilegym"] == "available"
from tilegym.ops.ops import mamba2_chunk_forward

inputs = make_inputs(
    torch.bfloat16, "cuda", seqlen=256, nheads=8, headdim=64, dstate=128, chunk_size=64, initial_states=True,
    dt_bias=False, dt_softplus=False, dtypes={"dt": torch.float32},
)
right = oracle_scan(**inputs)

def check(name, got, budgets):
    for part, value, wanted in zip(("out", "final_states"), got, right):
        error = relative_error(value, wanted)
        print(name, part, error)
        assert error <= budgets * budget(torch.bfloat16), (name, part, error)

names = {"x": "x", "A": "a", "B": "b", "C": "c", "D": "d", "dt": "dt", "initial_states": "init_state"}
arguments = {theirs: inputs[ours] for ours, theirs in names.items()}
for name, budgets in (("cutile", 2), ("triton", 1), ("torch-reference", 1)):
    check(f"tilegym on {name}", mamba2_chunk_forward(**arguments, chunk_size=64, backend=name), budgets)
for name, budgets in (("tilegym", 2), ("cutile", 1), ("triton", 1)):
    check(name, tm.mamba_chunk_scan_combined(**inputs, return_final_states=True, backend=name), budgets)
bias = torch.rand(8, device="cuda")
raw = {**inputs, "dt": inputs["dt"].log(), "dt_bias": bias, "dt_softplus": True, "dt_limit": (0.01, 1.0)}
right = oracle_scan(**raw)
check("tilegym, raw dt", tm.mamba_chunk_scan_combined(**raw, return_final_states=True, backend="tilegym"), 2)
"""


def test_tilegym_and_ours_through_each_others_registry(request: pytest.FixtureRequest) -> None:
    needs("tilegym")
    for name in KERNELS:
        missing(request.config, name, "mamba_chunk_scan")
    # Its search takes minutes for each shape.
    environment = {**os.environ, "TILEGYM_DISABLE_AUTOTUNE": "1"}
    command = [sys.executable, "-c", TILEGYM]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200, env=environment)
    assert result.returncode == 0, result.stdout + result.stderr
