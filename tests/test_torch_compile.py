"""The ops as torch sees them: torch.compile, operators, fake and meta tensors, autograd, autocast."""

import threading
import timeit
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import tilegym_mamba2 as tm
from tests.conftest import DEVICE, missing
from tilegym_mamba2 import registry, torch_operator
from tilegym_mamba2.ops.mamba_chunk_scan import mamba_chunk_scan

BATCH, NHEADS, HEADDIM, NGROUPS, DSTATE, CHUNK_SIZE = 2, 4, 16, 2, 16, 16
INFINITY = float("inf")

pytestmark = [  # inductor's
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning"),
]


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> None:
    torch._dynamo.reset()


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


def scan_inputs(seqlen: int = 21, *, batch: int = BATCH, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    torch.manual_seed(seqlen)
    return {
        "x": random(batch, seqlen, NHEADS, HEADDIM, dtype=dtype),
        "dt": random(batch, seqlen, NHEADS, dtype=dtype),
        "A": -random(NHEADS).exp(),
        "B": random(batch, seqlen, NGROUPS, DSTATE, dtype=dtype),
        "C": random(batch, seqlen, NGROUPS, DSTATE, dtype=dtype),
        "chunk_size": CHUNK_SIZE,
        "D": random(NHEADS),
        "z": random(batch, seqlen, NHEADS, HEADDIM, dtype=dtype),
        "dt_bias": random(NHEADS),
        "dt_softplus": True,
    }


def packed_inputs(seqlen: int = 21) -> dict[str, Any]:
    offsets = torch.tensor([0, 5, 5, seqlen], dtype=torch.int32, device=DEVICE)
    return scan_inputs(seqlen, batch=1) | {"cu_seqlens": offsets, "initial_states": random(3, NHEADS, HEADDIM, DSTATE)}


def scan(inputs: dict[str, Any], **options: Any) -> Any:
    return tm.mamba_chunk_scan_combined(**inputs, return_final_states=True, **options)


def update_inputs() -> dict[str, Any]:
    torch.manual_seed(0)
    heads = (BATCH, NHEADS, HEADDIM)
    return {
        "state": random(*heads, DSTATE),
        "x": random(*heads),
        "dt": random(BATCH, NHEADS, 1).expand(heads),
        "A": -random(NHEADS).exp()[:, None, None].expand(NHEADS, HEADDIM, DSTATE),
        "B": random(BATCH, NGROUPS, DSTATE),
        "C": random(BATCH, NGROUPS, DSTATE),
        "D": random(NHEADS)[:, None].expand(NHEADS, HEADDIM),
        "z": random(*heads),
        "dt_bias": random(NHEADS)[:, None].expand(NHEADS, HEADDIM),
        "dt_softplus": True,
    }


def stage_calls(backend: str | None = None) -> list[tuple[Callable[..., Any], tuple[Any, ...]]]:
    """Each public op with arguments that fit, those of later stages from the earlier ones."""
    inputs = scan_inputs()
    x, dt, A, B, C, _, D, z, dt_bias, _ = inputs.values()
    seq_idx = torch.arange(x.shape[1], device=DEVICE)[None].expand(BATCH, -1) // 9
    initial_states = random(BATCH, NHEADS, HEADDIM, DSTATE)
    cumsum = (dt, A, CHUNK_SIZE, dt_bias, True, (0.0, INFINITY))
    dA_cumsum, dt_out = tm.chunk_cumsum(*cumsum, backend=backend)
    state = (x, B, dt_out, dA_cumsum, initial_states, seq_idx, torch.float32)
    states, _ = tm.fwd_pass_state(*state, backend=backend)
    packed = packed_inputs()
    return [
        (tm.chunk_cumsum, cumsum),
        (tm.fwd_pass_state, state),
        (tm.compute_out, (x, B, C, dt_out, dA_cumsum, states, D, z, seq_idx)),
        (
            mamba_chunk_scan,
            (*list(inputs.values())[:9], initial_states, seq_idx, None, True, (0.0, INFINITY), None),
        ),
        (
            mamba_chunk_scan,
            (*list(packed.values())[:9], packed["initial_states"], None, packed["cu_seqlens"], True, (0.0, 1.0), None),
        ),
        (tm.selective_state_update, (*update_inputs().values(), None)),
    ]


CALLS = ("chunk_cumsum", "fwd_pass_state", "compute_out", "scan", "packed_scan", "selective_state_update")


@pytest.fixture(params=range(len(CALLS)), ids=CALLS)
def call(request: pytest.FixtureRequest) -> int:
    return request.param


def flat(result: Any) -> list[Tensor]:
    return [tensor for tensor in (result if isinstance(result, tuple) else (result,)) if tensor is not None]


def map_tensors(function: Callable[[Tensor], Tensor], arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(function(value) if isinstance(value, Tensor) else value for value in arguments)


# Compiled


@pytest.mark.parametrize("dynamic", [None, True], ids=["automatic", "dynamic"])
def test_two_seqlens_compile_at_most_twice(backend: str, dynamic: bool | None) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(scan, backend=counter, fullgraph=True, dynamic=dynamic)
    for seqlen in (21, 40, 33):
        inputs = scan_inputs(seqlen)
        for got, wanted in zip(compiled(inputs, backend=backend), scan(inputs, backend=backend), strict=True):
            assert torch.equal(got, wanted)
    assert counter.frame_count <= 2


def test_static_shapes_compile_once_each() -> None:
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(scan, backend=counter, fullgraph=True, dynamic=False)
    for seqlen in (21, 40, 21):
        inputs = scan_inputs(seqlen)
        assert torch.equal(compiled(inputs)[0], scan(inputs)[0])
    assert counter.frame_count == 2


def test_inductor_compiles_a_model_around_it() -> None:
    torch.manual_seed(0)
    dim = NHEADS * HEADDIM
    projection = random(dim, 2 * dim + 2 * NGROUPS * DSTATE + NHEADS) / dim**0.5
    A = -random(NHEADS).exp()

    def layer(hidden: Tensor) -> Tensor:
        sizes = [dim, dim, NGROUPS * DSTATE, NGROUPS * DSTATE, NHEADS]
        z, x, B, C, dt = (hidden @ projection).split(sizes, -1)
        out = tm.mamba_chunk_scan_combined(
            x.unflatten(-1, (NHEADS, HEADDIM)),
            dt,
            A,
            B.unflatten(-1, (NGROUPS, DSTATE)),
            C.unflatten(-1, (NGROUPS, DSTATE)),
            CHUNK_SIZE,
            z=z.unflatten(-1, (NHEADS, HEADDIM)),
            dt_softplus=True,
        )
        assert isinstance(out, Tensor)
        return hidden + out.flatten(2).tanh()

    compiled = torch.compile(layer, fullgraph=True)
    for seqlen in (21, 40):
        hidden = random(BATCH, seqlen, dim)
        torch.testing.assert_close(compiled(hidden), layer(hidden))


def test_packed_sequences_compile(backend: str) -> None:
    def run(inputs: dict[str, Any]) -> Any:
        return scan(inputs, return_varlen_states=True, backend=backend)

    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    for seqlen in (21, 40):
        inputs = packed_inputs(seqlen)
        for got, wanted in zip(compiled(inputs), run(inputs), strict=True):
            assert torch.equal(got, wanted)


@pytest.mark.parametrize("mode", ["aot_eager", "inductor"])
def test_decode_step_compiles_and_updates_in_place(decode_backend: str, mode: str) -> None:
    def step(cache: Tensor, inputs: dict[str, Any]) -> Tensor:
        return tm.selective_state_update(cache[1], **inputs, backend=decode_backend) * 2

    compiled = torch.compile(step, backend=mode, fullgraph=True)
    inputs = update_inputs()
    cache = torch.stack([inputs["state"], inputs.pop("state") + 1])
    wanted_cache, got_cache = cache.clone(), cache.clone()
    for _ in range(2):
        assert torch.equal(compiled(got_cache, inputs), step(wanted_cache, inputs))
        assert torch.equal(got_cache, wanted_cache)
    assert torch.equal(got_cache[0], cache[0])
    assert not torch.equal(got_cache[1], cache[1])


def test_compiled_stages_equal_eager(call: int) -> None:
    function, arguments = stage_calls()[call]
    fresh = map_tensors(Tensor.clone, arguments)
    got = torch.compile(function, backend="aot_eager", fullgraph=True)(*fresh)
    for result, wanted in zip(flat(got), flat(function(*arguments)), strict=True):
        assert torch.equal(result, wanted)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"A": torch.ones(NHEADS + 1, device=DEVICE)}, r"A has shape \(5,\), expected \(nheads=4\)"),
        ({"chunk_size": 0}, "chunk_size is 0, which must be at least 1"),
        ({"x": torch.ones(BATCH, 21, NHEADS, HEADDIM, dtype=torch.int32, device=DEVICE)}, "x has dtype torch.int32"),
    ],
    ids=["shape", "value", "dtype"],
)
def test_wrong_use_names_the_argument(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(Exception, match=message):
        torch.compile(scan, backend="aot_eager", fullgraph=True)(scan_inputs() | wrong)


# The operators


def test_opcheck(backend: str, call: int, request: pytest.FixtureRequest) -> None:
    function, arguments = stage_calls("torch-reference")[call]
    missing(request.config, backend, function.__name__)
    operator = getattr(torch.ops.tilegym_mamba2, function.__name__)
    results = torch.library.opcheck(operator, (*arguments, backend))
    assert set(results.values()) == {"SUCCESS"}


def test_opcheck_of_gradients(call: int) -> None:
    function, arguments = stage_calls()[call]
    if function is tm.selective_state_update:
        pytest.skip("an operator that writes to an argument has no gradient")
    arguments = map_tensors(lambda value: value.clone().requires_grad_(value.is_floating_point()), arguments)
    operator = getattr(torch.ops.tilegym_mamba2, function.__name__)
    results = torch.library.opcheck(operator, (*arguments, "torch-reference"))
    assert set(results.values()) == {"SUCCESS"}


@pytest.mark.parametrize("seqlen", [0, 1, 40])
def test_no_result_is_an_argument_or_another_result(seqlen: int) -> None:
    inputs = scan_inputs(seqlen, batch=1)
    state = random(1, NHEADS, HEADDIM, DSTATE)
    for extra in (
        {"initial_states": state},
        {"initial_states": state, "cu_seqlens": torch.tensor([0, seqlen], device=DEVICE)},
        {"cu_seqlens": torch.tensor([0], device=DEVICE)} if seqlen == 0 else {},
    ):
        arguments = mamba_chunk_scan_arguments(inputs | extra)
        results = torch.library.opcheck(torch.ops.tilegym_mamba2.mamba_chunk_scan, (*arguments, "torch-reference"))
        assert set(results.values()) == {"SUCCESS"}


def mamba_chunk_scan_arguments(inputs: dict[str, Any]) -> tuple[Any, ...]:
    names = ("x", "dt", "A", "B", "C", "chunk_size", "D", "z", "dt_bias", "initial_states", "seq_idx", "cu_seqlens")
    return (*(inputs.get(name) for name in names), inputs["dt_softplus"], (0.0, INFINITY), None)


def test_tracing_sees_one_operator() -> None:
    graph = make_fx(lambda inputs: scan(inputs))(scan_inputs())
    operators = [node.target for node in graph.graph.nodes if node.op == "call_function"]
    assert operators.count(torch.ops.tilegym_mamba2.mamba_chunk_scan.default) == 1


def test_export_and_run() -> None:
    class Scan(torch.nn.Module):
        def forward(self, inputs: dict[str, Any]) -> Any:
            return scan(inputs)

    inputs = scan_inputs()
    program = torch.export.export(Scan(), (inputs,))
    assert torch.equal(program.module()(inputs)[0], scan(inputs)[0])


def test_eager_calls_go_round_the_operators(monkeypatch: pytest.MonkeyPatch, call: int) -> None:
    def reached(*arguments: Any) -> Any:
        raise AssertionError("an eager call reached an operator")

    function, arguments = stage_calls()[call]
    monkeypatch.setitem(function.__globals__, "_operator", reached)
    assert flat(function(*arguments))


def test_asking_whether_a_call_is_traced_takes_less_than_5_us() -> None:
    x = scan_inputs()["x"]
    assert not torch_operator.is_traced(x)
    repeats = timeit.repeat(lambda: (torch_operator.is_traced(x), registry.traced_backend(None)), number=1000)
    assert min(repeats) / 1000 < 5e-6


# Fake and meta tensors


@pytest.mark.parametrize("kind", ["fake", "meta"])
def test_results_without_data_have_the_shapes_of_those_with(call: int, kind: str) -> None:
    function, arguments = stage_calls()[call]
    wanted = flat(function(*map_tensors(Tensor.clone, arguments)))
    if kind == "meta":
        got = flat(function(*map_tensors(lambda tensor: tensor.to("meta"), arguments)))
    else:
        with FakeTensorMode() as mode:
            got = flat(function(*map_tensors(mode.from_tensor, arguments)))
    for result, real in zip(got, wanted, strict=True):
        assert result.device.type == (DEVICE if kind == "fake" else "meta")
        assert (result.shape, result.dtype, result.stride()) == (real.shape, real.dtype, real.stride())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_dtypes_without_data_are_those_with(dtype: torch.dtype) -> None:
    inputs = scan_inputs(dtype=dtype)
    real = scan(inputs, backend="torch-reference")
    meta = scan({name: value.to("meta") if isinstance(value, Tensor) else value for name, value in inputs.items()})
    assert [result.dtype for result in meta] == [result.dtype for result in real]


def test_meta_tensors_are_validated() -> None:
    x, dt, A, B, C, *_ = (value.to("meta") for value in scan_inputs().values() if isinstance(value, Tensor))
    with pytest.raises(ValueError, match=r"A has shape \(3,\), expected \(nheads=4\)"):
        tm.mamba_chunk_scan_combined(x, dt, A[:3], B, C, CHUNK_SIZE)


# Gradients


def gradients(function: Callable[..., Any], inputs: dict[str, Any]) -> dict[str, Tensor]:
    leaves = {name: value.clone().requires_grad_() for name, value in inputs.items() if isinstance(value, Tensor)}
    out, final_states = function(inputs | leaves)
    loss = out.square().sum() + final_states.sin().sum()
    return dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))


def test_gradients_of_the_compiled_reference_equal_eager() -> None:
    def run(inputs: dict[str, Any]) -> Any:
        return scan(inputs, backend="torch-reference")

    inputs = scan_inputs() | {"initial_states": random(BATCH, NHEADS, HEADDIM, DSTATE)}
    wanted = gradients(run, inputs)
    for backend in ("aot_eager", "inductor"):
        got = gradients(torch.compile(run, backend=backend, fullgraph=True), inputs)
        for name, gradient in wanted.items():
            assert gradient.abs().sum() > 0
            torch.testing.assert_close(got[name], gradient, msg=lambda text, name=name: f"{name}: {text}")


def test_only_what_is_used_gets_a_gradient() -> None:
    inputs = scan_inputs()

    def run(x: Tensor, D: Tensor) -> Tensor:
        return scan(inputs | {"x": x, "D": D}, backend="torch-reference")[1].sum()

    x, D = scan_inputs()["x"].requires_grad_(), torch.ones(NHEADS, device=DEVICE, requires_grad=True)
    torch.compile(run, backend="aot_eager", fullgraph=True)(x, D).backward()
    assert x.grad is not None
    assert x.grad.abs().sum() > 0
    assert D.grad is None or not D.grad.any()  # the final state does not depend on D


@pytest.mark.usefixtures("fresh_registry")
def test_a_backend_without_backward_says_so_when_compiled() -> None:
    register_recorder("forward-only", [])
    inputs = scan_inputs()
    inputs["x"].requires_grad_()
    compiled = torch.compile(scan, backend="aot_eager", fullgraph=True)
    with pytest.raises(Exception, match="x requires grad and this backend has no backward"):
        compiled(inputs, backend="forward-only")
    with torch.no_grad():
        assert not compiled(inputs, backend="forward-only")[0].requires_grad


@pytest.mark.usefixtures("fresh_registry")
def test_a_compiled_backward_runs_on_the_backend_of_its_forward() -> None:
    """Whatever is selected where it runs: on a GPU autograd runs it in a thread of its own."""
    calls: list[str] = []
    register_recorder("differentiable", calls, differentiable=True)
    inputs = scan_inputs()
    x = inputs["x"].requires_grad_()
    compiled = torch.compile(scan, backend="aot_eager", fullgraph=True)
    with tm.use_backend("differentiable"):
        loss = compiled(inputs)[0].square().sum()
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    assert calls == ["differentiable"] * 2
    (wanted,) = torch.autograd.grad(scan(inputs, backend="torch-reference")[0].square().sum(), x)
    torch.testing.assert_close(x.grad, wanted)


@pytest.mark.usefixtures("fresh_registry")
def test_a_backend_without_backward_says_so_if_it_is_selected_after_compiling() -> None:
    register_recorder("forward-only", [])
    inputs = scan_inputs()
    inputs["x"].requires_grad_()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(scan, backend=counter, fullgraph=True)
    with tm.use_backend("torch-reference"):
        compiled(inputs)
    with tm.use_backend("forward-only"):
        with pytest.raises(NotImplementedError, match="requires grad and this backend has no backward"):
            compiled(inputs)
        assert counter.frame_count == 1
        with torch.no_grad():
            compiled(inputs)


def test_the_decode_step_has_no_gradient_when_compiled() -> None:
    inputs = update_inputs()
    inputs["x"].requires_grad_()
    compiled = torch.compile(tm.selective_state_update, backend="aot_eager", fullgraph=True)
    with pytest.raises(Exception, match=r"x requires grad, and under torch\.compile an update in place"):
        compiled(**inputs)
    with torch.no_grad():
        assert compiled(**inputs).shape == inputs["x"].shape


# Autocast


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_autocast_changes_nothing(backend: str, compiled: bool) -> None:
    function = torch.compile(scan, backend="aot_eager", fullgraph=True) if compiled else scan
    inputs = scan_inputs()
    wanted = scan(inputs, backend=backend)
    with torch.autocast(DEVICE, torch.bfloat16):
        got = function(inputs, backend=backend)
    for result, expected in zip(got, wanted, strict=True):
        assert result.dtype == expected.dtype
        assert torch.equal(result, expected)


# Which backend a compiled function runs on


def register_recorder(name: str, calls: list[str], *, differentiable: bool = False) -> None:
    """A backend that writes its name down and computes as torch-reference does."""
    registry.register_backend(registry.Backend(name, why_unavailable=lambda device: None))

    @registry.register("mamba_chunk_scan", name, differentiable=differentiable)
    def recorded(*arguments: Any) -> Any:
        calls.append(name)
        with torch.set_grad_enabled(differentiable and torch.is_grad_enabled()):
            *most, dt_softplus, dt_limit, state_dtype = arguments
            return mamba_chunk_scan(*most, dt_softplus, dt_limit, state_dtype, backend="torch-reference")


@pytest.fixture
def calls(fresh_registry: None) -> list[str]:
    names: list[str] = []
    for name in ("alpha", "beta", "gamma"):
        register_recorder(name, names)
    return names


def test_selection_outside_a_compiled_function_is_read_when_it_runs(calls: list[str]) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(scan, backend=counter, fullgraph=True)
    inputs = scan_inputs()
    with tm.use_backend("alpha"):
        compiled(inputs)
    tm.set_backend("beta")
    compiled(inputs)
    with tm.use_backend("gamma"):
        compiled(inputs)
    tm.set_backend(None)
    compiled(inputs)
    assert calls == ["alpha", "beta", "gamma"]  # the last ran on torch-reference, which is automatic
    assert counter.frame_count == 1


def test_environment_is_read_when_it_runs(calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = torch.compile(scan, backend="aot_eager", fullgraph=True)
    for name in ("alpha", "beta"):
        monkeypatch.setenv(registry.ENVIRONMENT_VARIABLE, name)
        compiled(scan_inputs())
    assert calls == ["alpha", "beta"]


def test_use_backend_inside_a_compiled_function(calls: list[str]) -> None:
    def run(inputs: dict[str, Any]) -> Tensor:
        with tm.use_backend("alpha"):
            first = scan(inputs)[0]
            with tm.use_backend("beta"):
                second = scan(inputs)[0]
            third = scan(inputs)[0]
            with tm.use_backend(None):
                fourth = scan(inputs)[0]
        return first + second + third + fourth + scan(inputs)[0]

    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    inputs = scan_inputs()
    tm.set_backend("gamma")
    expected = ["alpha", "beta", "alpha", "gamma", "gamma"]
    compiled(inputs)
    assert calls == expected
    with tm.use_backend("beta"):  # what is inside goes first, and None goes round both
        compiled(inputs)
    assert calls[len(expected) :] == ["alpha", "beta", "alpha", "gamma", "beta"]
    run(inputs)
    assert calls[2 * len(expected) :] == expected
    assert registry._traced == ()


def test_backend_argument_in_a_compiled_function(calls: list[str]) -> None:
    compiled = torch.compile(scan, backend="aot_eager", fullgraph=True)
    with tm.use_backend("alpha"):
        compiled(scan_inputs(), backend="beta")
    assert calls == ["beta"]


def test_threads_of_a_compiled_function_select_for_themselves(calls: list[str]) -> None:
    compiled = torch.compile(scan, backend="aot_eager", fullgraph=True)
    inputs = scan_inputs()
    compiled(inputs)

    def other() -> None:
        compiled(inputs)
        with tm.use_backend("beta"):
            compiled(inputs)

    with tm.use_backend("alpha"):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        compiled(inputs)
    assert calls == ["beta", "alpha"]  # the other thread's first call ran on torch-reference


def test_unknown_backend_raises_when_it_runs() -> None:
    compiled = torch.compile(scan, backend="aot_eager", fullgraph=True)
    with pytest.raises(ValueError, match="there is no backend 'tritn', did you mean 'triton'"):
        compiled(scan_inputs(), backend="tritn")


def test_set_backend_inside_a_compiled_function_is_refused() -> None:
    def run(inputs: dict[str, Any]) -> Any:
        tm.set_backend("torch-reference")
        return scan(inputs)

    with pytest.raises(Exception, match="set_backend can't take effect inside a compiled function"):
        torch.compile(run, backend="aot_eager", fullgraph=True)(scan_inputs())
