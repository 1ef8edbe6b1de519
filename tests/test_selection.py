"""Which backend runs a call: the five ways, their order, and what is said where none can."""

import re
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import tilegym_mamba2
from tilegym_mamba2 import (
    BackendUnavailableError,
    available_backends,
    chunk_cumsum,
    explain_backends,
    registry,
    set_backend,
    use_backend,
)
from tilegym_mamba2.registry import Backend, register, register_backend

Fake = Callable[..., Backend]
CPU = torch.device("cpu")


@pytest.fixture
def fake(fresh_registry: None) -> Fake:
    """Makes a backend whose chunk_cumsum returns the backend's name."""

    def make(
        name: str,
        priority: int | None = None,
        *,
        unavailable: str | None = None,
        ops: tuple[str, ...] = ("chunk_cumsum",),
        refuses: str | None = None,
        differentiable: bool = False,
    ) -> Backend:
        backend = register_backend(
            Backend(name, lambda device: unavailable, {} if priority is None else {"cpu": priority})
        )
        for op in ops:

            def run(*arguments: Any) -> str:
                return name

            register(op, name, supports=lambda problem: refuses, differentiable=differentiable)(run)
        return backend

    return make


def ran(backend: str | None = None, **changes: Any) -> Any:
    """The name of the fake backend that a call ran on, or the reference's tensors."""
    inputs: dict[str, Any] = {"dt": torch.ones(1, 4, 2), "A": -torch.ones(2), "chunk_size": 2, **changes}
    return chunk_cumsum(**inputs, backend=backend)


def test_the_five_ways_in_order(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("argument", "scope", "default", "environment"):
        fake(name)
    fake("automatic", 5)
    assert ran() == "automatic"
    monkeypatch.setenv("TILEGYM_MAMBA2_BACKEND", "environment")
    assert ran() == "environment"
    set_backend("default")
    assert ran() == "default"
    with use_backend("scope"):
        assert ran() == "scope"
        assert ran("argument") == "argument"
    assert ran() == "default"
    set_backend(None)
    assert ran() == "environment"
    monkeypatch.setenv("TILEGYM_MAMBA2_BACKEND", "")
    assert ran() == "automatic"


def test_scopes_nest_and_end_with_errors(fake: Fake) -> None:
    fake("outer")
    fake("inner")
    fake("automatic", 5)

    def fail_inside() -> None:
        with use_backend("inner"):
            assert ran() == "inner"
            raise RuntimeError("mine")

    with use_backend("outer"):
        with pytest.raises(RuntimeError, match="mine"):
            fail_inside()
        assert ran() == "outer"
        with use_backend(None):
            assert ran() == "automatic"
        assert ran() == "outer"
    assert ran() == "automatic"
    assert registry.current_backend() is None


def test_scopes_belong_to_their_thread_and_the_default_to_all(fake: Fake) -> None:
    fake("mine")
    fake("theirs")
    fake("default")
    set_backend("default")
    seen: dict[str, Any] = {}
    inside, leave = threading.Event(), threading.Event()

    def other() -> None:
        seen["before"] = ran()
        with use_backend("theirs"):
            seen["inside"] = ran()
            inside.set()
            leave.wait(10)
        seen["after"] = ran()

    thread = threading.Thread(target=other)
    with use_backend("mine"):
        thread.start()
        assert inside.wait(10)
        assert ran() == "mine"
        leave.set()
        thread.join(10)
    assert seen == {"before": "default", "inside": "theirs", "after": "default"}
    assert ran() == "default"


def test_the_composition_runs_on_the_chosen_backend(fake: Fake) -> None:
    """No stage of a composed forward looks at the ambient selection."""
    seen: list[str] = []
    register_backend(Backend("copy", lambda device: None))
    for op in ("chunk_cumsum", "fwd_pass_state", "compute_out"):
        problem = registry.select(op, _problem(), "torch-reference")

        def run(*arguments: Any, op: str = op, function: Callable[..., Any] = problem.function) -> Any:
            seen.append(op)
            return function(*arguments)

        register(op, "copy")(run)
    with use_backend("torch-reference"):
        tilegym_mamba2.mamba_chunk_scan_combined(**_scan_inputs(), backend="copy")
    assert seen == ["chunk_cumsum", "fwd_pass_state", "compute_out"]


def _problem() -> Any:
    from tilegym_mamba2.problem import chunk_cumsum_problem

    return chunk_cumsum_problem(torch.ones(1, 4, 2), torch.ones(2), 2, None, False, (0.0, 1.0))


def _scan_inputs() -> dict[str, Any]:
    from tilegym_mamba2.testing import make_inputs

    return make_inputs(seqlen=8)


# Names


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("tritn", "triton"),
        ("cutil", "cutile"),
        ("torch_reference", "torch-reference"),
        ("reference", "torch-reference"),
    ],
)
def test_an_unknown_name_gets_the_nearest(name: str, nearest: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = (
        rf"'{name}', did you mean '{nearest}'\?.*cutile.*torch-reference.*triton|'{name}', did you mean '{nearest}'"
    )
    with pytest.raises(ValueError, match=expected):
        ran(name)
    with pytest.raises(ValueError, match=expected):
        set_backend(name)
    with pytest.raises(ValueError, match=expected), use_backend(name):
        pass
    monkeypatch.setenv("TILEGYM_MAMBA2_BACKEND", name)
    with pytest.raises(ValueError, match=expected) as caught:
        ran()
    assert "environment variable TILEGYM_MAMBA2_BACKEND" in str(caught.value)


def test_an_unknown_name_gets_the_list() -> None:
    with pytest.raises(ValueError, match="'zzz'") as caught:
        ran("zzz")
    assert "did you mean" not in str(caught.value)
    assert "environment" not in str(caught.value)
    for name in explain_backends("cpu"):
        assert name in str(caught.value)


def test_a_failed_set_backend_changes_nothing(fake: Fake) -> None:
    fake("good")
    set_backend("good")
    with pytest.raises(ValueError, match="zzz"):
        set_backend("zzz")
    assert ran() == "good"


@pytest.mark.parametrize("name", ["", 3, True, ["triton"]])
def test_a_name_that_is_no_name(name: Any) -> None:
    with pytest.raises(ValueError if name == "" else TypeError, match=f"backend.*{re.escape(repr(name))}"):
        ran(name)


# What a named backend can't do, it does not hand on


def test_a_named_backend_that_is_unavailable(fake: Fake) -> None:
    fake("broken", 50, unavailable="the package foo is missing: pip install foo")
    with pytest.raises(BackendUnavailableError, match=r"'broken'.*foo is missing: pip install foo"):
        ran("broken")
    with use_backend("broken"), pytest.raises(BackendUnavailableError, match="foo"):  # choosing it is no error yet
        ran()
    assert isinstance(ran(), tuple)  # the automatic choice passes it over


def test_a_backend_whose_check_fails_harms_no_other(fresh_registry: None) -> None:
    def check(device: torch.device) -> str | None:
        raise OSError("no such library")

    register_backend(Backend("broken", check, {"cpu": 9}))
    register("chunk_cumsum", "broken")(lambda *arguments: "broken")
    assert explain_backends("cpu")["broken"] == "its why_unavailable failed: OSError: no such library"
    assert isinstance(ran()[0], torch.Tensor)
    with pytest.raises(BackendUnavailableError, match="no such library"):
        ran("broken")


def test_a_named_backend_without_the_op(fake: Fake) -> None:
    fake("partial", 50, ops=("compute_out",))
    with pytest.raises(NotImplementedError, match=r"'partial'.*chunk_cumsum"):
        ran("partial")
    assert isinstance(ran(), tuple)
    with pytest.raises(NotImplementedError, match=r"'partial'.*mamba_chunk_scan"):
        tilegym_mamba2.mamba_chunk_scan_combined(**_scan_inputs(), backend="partial")


def test_a_named_backend_that_refuses_the_problem(fake: Fake) -> None:
    fake("choosy", 50, refuses="chunk_size is 2: this backend does only 256")
    with pytest.raises(
        NotImplementedError, match=r"'choosy'.*chunk_cumsum.*chunk_size is 2: this backend does only 256"
    ):
        ran("choosy")
    assert isinstance(ran(), tuple)


def test_a_composed_forward_refuses_what_a_stage_refuses(fake: Fake) -> None:
    fake("stages", ops=("chunk_cumsum", "fwd_pass_state"))
    register("compute_out", "stages", supports=lambda problem: f"headdim {problem.headdim} is too wide")(print)
    with pytest.raises(NotImplementedError, match=r"'stages', mamba_chunk_scan: headdim 16 is too wide"):
        tilegym_mamba2.mamba_chunk_scan_combined(**_scan_inputs(), backend="stages")


# The automatic choice


def test_the_highest_that_can_do_it_runs(fake: Fake) -> None:
    fake("low", 1)
    fake("middle", 5)
    assert ran() == "middle"
    fake("high", 7)
    assert ran() == "high"
    fake("unavailable", 20, unavailable="no")
    fake("refusing", 19, refuses="no")
    fake("lacking", 18, ops=("compute_out",))
    fake("never")  # no priority: only by name
    assert ran() == "high"
    assert ran("never") == "never"


def test_nothing_can_do_it(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    for table in ("_backends", "_implementations"):
        monkeypatch.setattr(registry, table, {})
    with pytest.raises(NotImplementedError, match="chunk_cumsum"):
        ran()
    fake("unavailable", 20, unavailable="reason one")
    fake("refusing", 19, refuses="reason two")
    with pytest.raises(NotImplementedError, match="unavailable: reason one; refusing: reason two"):
        ran()


def test_on_the_cpu_it_is_the_reference() -> None:
    assert registry.select("chunk_cumsum", _problem()).backend == "torch-reference"


@pytest.mark.parametrize(
    ("missing", "chosen"), [((), "cutile"), (("cutile",), "triton"), (("cutile", "triton"), "torch-reference")]
)
def test_on_a_cuda_device_cutile_then_triton_then_the_reference(
    missing: tuple[str, ...], chosen: str, fresh_registry: None
) -> None:
    """The built-in backends' own priorities, with availability and implementations pretended."""
    backends: dict[str, Any] = registry._backends
    if "triton" not in backends:
        pytest.skip("there is no backends/triton.py yet")
    for name, (backend, place) in list(backends.items()):
        reason = "pretended" if name in missing else None
        pretended = Backend(name, lambda device, reason=reason: reason, backend.priority)
        backends[name] = pretended, place
        registry._implementations.pop(("chunk_cumsum", name), None)
        register("chunk_cumsum", name)(lambda *arguments: None)
    problem = _problem()
    object.__setattr__(problem, "device", torch.device("cuda"))
    assert registry.select("chunk_cumsum", problem).backend == chosen


# Gradients


def test_a_backend_without_a_backward_refuses_inputs_that_require_grad(fake: Fake) -> None:
    fake("forward-only", 5)
    fake("differentiable", 4, differentiable=True)
    dt = torch.ones(1, 4, 2, requires_grad=True)
    for name in ("forward-only", None):  # nor does the automatic choice go to a slower one unasked
        with pytest.raises(NotImplementedError, match=r"dt requires grad.*torch\.no_grad.*torch-reference"):
            ran(name, dt=dt)
    assert ran("differentiable", dt=dt) == "differentiable"
    with torch.no_grad():
        assert ran(dt=dt) == "forward-only"
    with torch.inference_mode():
        assert ran(dt=dt) == "forward-only"
    assert ran(dt=dt.detach()) == "forward-only"
    A = -torch.ones(2, requires_grad=True)
    with pytest.raises(NotImplementedError, match="A requires grad"):
        ran(A=A)


def test_fast_backends_refuse_gradients(request: pytest.FixtureRequest) -> None:
    from tests.conftest import DEVICE, missing
    from tilegym_mamba2.testing import make_inputs

    inputs = make_inputs(device=DEVICE, seqlen=8)
    inputs["x"].requires_grad_()
    tried = []
    for name in ("cutile", "triton"):
        if explain_backends(DEVICE).get(name) == "available" and registry.has_implementation("mamba_chunk_scan", name):
            tried.append(name)
            with pytest.raises(NotImplementedError, match=rf"'{name}'.*x requires grad"):
                tilegym_mamba2.mamba_chunk_scan_combined(**inputs, backend=name)
    if not tried:
        missing(request.config, "cutile", "mamba_chunk_scan")


# What there is


def test_available_backends_are_best_first(fake: Fake) -> None:
    fake("low", -5)
    fake("good", 50)
    fake("unlisted")
    fake("absent", 70, unavailable="no luck")
    names = available_backends("cpu")
    assert names[0] == "good"
    assert names.index("torch-reference") < names.index("low")
    assert "unlisted" in names
    assert "absent" not in names
    explained = explain_backends("cpu")
    assert explained["absent"] == "no luck"
    assert explained["good"] == explained["torch-reference"] == "available"


def test_the_interpreters_variables_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TILEGYM_MAMBA2_CUTILE_INTERPRET", raising=False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    explained = explain_backends("cpu")
    assert "TILEGYM_MAMBA2_CUTILE_INTERPRET=1" in explained["cutile"]
    with pytest.raises(BackendUnavailableError, match="TILEGYM_MAMBA2_CUTILE_INTERPRET=1"):
        ran("cutile")
    if "triton" in explained and "available" not in explained["triton"]:
        assert "TRITON_INTERPRET=1" in explained["triton"]


# Registration


def test_a_pair_is_registered_once(fake: Fake) -> None:
    fake("mine")
    with pytest.raises(ValueError, match="twice") as caught:
        register("chunk_cumsum", "mine")(lambda *arguments: None)
    message = str(caught.value)
    assert "chunk_cumsum" in message
    assert "'mine'" in message
    assert message.count(__file__) == 2, "both places are named"
    assert ran("mine") == "mine"


def test_a_backend_is_registered_once(fresh_registry: None) -> None:
    def again() -> None:
        register_backend(Backend("mine", lambda device: None))

    again()
    with pytest.raises(ValueError, match="'mine' is registered twice") as caught:
        again()
    assert str(caught.value).count(__file__) == 2


def test_an_unknown_op_gets_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"no op 'chunk_cumsums', did you mean 'chunk_cumsum'\?; ops: chunk_cumsum, "):
        register("chunk_cumsums", "mine")


def test_a_plugin_can_be_registered_anew(fake: Fake) -> None:
    fake("mine")
    registry.unregister_backend("mine")
    with pytest.raises(ValueError, match="'mine'"):
        ran("mine")
    fake("mine")
    assert ran("mine") == "mine"


def test_an_implementation_may_come_before_its_backend(fresh_registry: None) -> None:
    register("chunk_cumsum", "late")(lambda *arguments: "late")
    register_backend(Backend("late", lambda device: None))
    assert ran("late") == "late"
