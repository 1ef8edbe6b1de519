"""Which backends the tests run on, and what a missing one means."""

import os
from collections.abc import Callable, Iterator

import pytest
import torch

from tilegym_mamba2 import registry

BACKENDS = ("cutile", "triton", "torch-reference")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

if DEVICE == "cpu":  # before triton is first imported
    os.environ.setdefault("TRITON_INTERPRET", "1")
    os.environ.setdefault("TILEGYM_MAMBA2_CUTILE_INTERPRET", "1")
    torch.set_num_threads(1)  # the tensors are small, and pytest-xdist has a process per core


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--require-backends",
        default="",
        metavar="NAME,...",
        help="backends whose absence is a failure, not a skip",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "case(number): a case of the field, by its number; see test_field_cases.py")
    unknown = required_backends(config) - set(BACKENDS)
    if unknown:
        raise pytest.UsageError(
            f"--require-backends: unknown {', '.join(sorted(unknown))}; one of {', '.join(BACKENDS)}"
        )


def required_backends(config: pytest.Config) -> set[str]:
    return {name for name in config.getoption("--require-backends").split(",") if name}


def missing(config: pytest.Config, name: str, op: str | None = None) -> None:
    """Skips the test, with the reason, if the backend can't run here or has no such op; fails if it is required."""
    reason = registry.explain_backends(DEVICE).get(name, "it is not registered")
    if reason == "available" and op is not None and not registry.has_implementation(op, name):
        reason = f"it has no {op} yet"
    if reason != "available":
        (pytest.fail if name in required_backends(config) else pytest.skip)(f"backend {name}: {reason}")


@pytest.fixture
def as_on_hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
    """A function that has Triton's fused forward planned as if a Hopper of so many multiprocessors had the tensors."""
    from tilegym_mamba2.backends import triton
    from tilegym_mamba2.ops.mamba_chunk_scan import triton_

    def use(multiprocessors: int) -> None:
        info = triton.DeviceInfo("cuda:90", multiprocessors, 232448)
        monkeypatch.setattr(triton, "device_info", lambda device: info)
        triton_._plan.cache_clear()

    yield use
    triton_._plan.cache_clear()


@pytest.fixture
def device() -> str:
    return DEVICE


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    """Every backend that can run the whole forward here."""
    missing(request.config, request.param, "mamba_chunk_scan")
    return request.param


@pytest.fixture(params=BACKENDS)
def decode_backend(request: pytest.FixtureRequest) -> str:
    """Every backend that can run the decode step here."""
    missing(request.config, request.param, "selective_state_update")
    return request.param


@pytest.fixture(autouse=True)
def _nothing_selected(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test inherits a selection, nor leaves one behind."""
    monkeypatch.delenv(registry.ENVIRONMENT_VARIABLE, raising=False)
    monkeypatch.setattr(registry, "_default", None)
    monkeypatch.setattr(registry, "_scoped", {})


@pytest.fixture
def fresh_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the test registers is forgotten after it."""
    for name in registry.explain_backends("cpu"):
        for op in registry.ops():
            registry.has_implementation(op, name)  # imported now, or an import in the test would be forgotten too
    for table in ("_backends", "_implementations", "_compositions", "_load_failures"):
        monkeypatch.setattr(registry, table, dict(getattr(registry, table)))
    monkeypatch.setattr(registry, "_looked_for", set(registry._looked_for))
