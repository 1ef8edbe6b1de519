"""Kernels are prepared at once: each in a thread of its own, on the call's device, and failures are told."""

import gc
import importlib
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tests.conftest import DEVICE
from tilegym_mamba2 import registry
from tilegym_mamba2.backends import _compile

device = torch.device(DEVICE, 0) if DEVICE == "cuda" else torch.device(DEVICE)


def test_they_run_at_the_same_time() -> None:
    meeting = threading.Barrier(3, timeout=60)
    threads: list[int] = []

    def task() -> None:
        threads.append(threading.get_ident())
        meeting.wait()  # fails unless all three are there

    _compile.at_once([task] * 3, device)
    assert len(set(threads)) == 3
    assert threading.get_ident() not in threads


def test_one_alone_runs_here() -> None:
    threads: list[int] = []
    _compile.at_once([lambda: threads.append(threading.get_ident())], device)
    _compile.at_once([], device)
    assert threads == [threading.get_ident()]


def test_the_first_failure_is_raised_when_all_have_ended() -> None:
    ended: list[str] = []
    failed = threading.Event()

    def late() -> None:
        assert failed.wait(60)
        ended.append("late")
        raise ValueError("late")

    def early() -> None:
        failed.set()
        raise RuntimeError("early")

    with pytest.raises(ValueError, match="late"):
        _compile.at_once([late, early, lambda: ended.append("good")], device)
    assert sorted(ended) == ["good", "late"]


def test_what_has_not_begun_when_one_fails_runs_too(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[str] = []

    def fail() -> None:
        raise RuntimeError("first")

    monkeypatch.setattr(_compile, "ThreadPoolExecutor", lambda _: ThreadPoolExecutor(1))
    with pytest.raises(RuntimeError, match="first"):
        _compile.at_once([fail, lambda: time.sleep(0.5), lambda: ended.append("last")], device)
    assert ended == ["last"]


def test_the_device_is_current_in_every_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    current = threading.local()

    class Device:
        def __init__(self, wanted: torch.device):
            self.wanted = wanted

        def __enter__(self) -> None:
            current.device = self.wanted

        def __exit__(self, *error: object) -> None:
            del current.device

    monkeypatch.setattr(torch.cuda, "device", Device)
    seen: list[torch.device] = []
    second = torch.device("cuda", 1)
    _compile.at_once([lambda: seen.append(current.device)] * 2, second)
    assert seen == [second, second]


@pytest.mark.parametrize("enabled", [True, False])
def test_no_garbage_is_collected_meanwhile(enabled: bool) -> None:
    """And as before afterwards, even if the compiler raises."""
    meanwhile: list[bool] = []

    @registry.no_collection()
    def compiler() -> None:
        meanwhile.append(gc.isenabled())
        raise ValueError("of the compiler")

    before = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        with pytest.raises(ValueError, match="of the compiler"):
            compiler()
        assert gc.isenabled() == enabled
    finally:
        (gc.enable if before else gc.disable)()
    assert meanwhile == [False]


def test_nor_while_a_kernels_language_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    import_module = importlib.import_module
    imported: dict[str, bool] = {}

    def watched(name: str) -> object:
        imported[name] = gc.isenabled()
        return import_module(name)

    monkeypatch.setattr(importlib, "import_module", watched)
    monkeypatch.setattr(registry, "_looked_for", set[tuple[str, str]]())
    assert registry.has_implementation("chunk_cumsum", "torch-reference")
    assert imported["tilegym_mamba2.ops.chunk_cumsum.reference"] is False
    assert gc.isenabled()
