"""How the modules of this folder measure: device time, as seen by pytest-benchmark through its `timer` option.

`Clock` stands still but for the times that a `Stopwatch` found, so that pytest-benchmark's statistics are those of CUDA
graph replays. For each workload the implementations run in order ("there"), then in reverse order ("back").
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import tilegym_mamba2
from tilegym_mamba2 import registry
from tilegym_mamba2.bench.measure import Bench
from tilegym_mamba2.bench.peers import PEERS
from tilegym_mamba2.bench.timing import Call, Stopwatch, host_times, measure_limits, peak_memory, quick
from tilegym_mamba2.bench.workloads import HEADLINE, Workload, bytes_of, copies_beyond
from tilegym_mamba2.testing import relative_error

SECONDS = 0.1
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Clock:
    """A timer that moves only when told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


CLOCK = Clock()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrises `implementation` of a stage: backends, then the module's `mamba_ssm`, with the same arguments."""
    module: Any = metafunc.module
    if "implementation" not in metafunc.fixturenames or not hasattr(module, "OP"):
        return
    public = getattr(tilegym_mamba2, module.OP)
    found: list[Any] = [
        pytest.param(partial(_on_backend, public, name), id=name) for name in registry.available_backends()
    ]
    reason = PEERS["mamba_ssm"](asked=True).why_not(HEADLINE, DEVICE)
    missing = [pytest.mark.skip(reason=f"mamba_ssm: {reason}")] if reason else []
    metafunc.parametrize("implementation", [*found, pytest.param(module.mamba_ssm, id="mamba_ssm", marks=missing)])


def _on_backend(op: Callable[..., Any], name: str, *arguments: Any) -> Any:
    return op(*arguments, backend=name)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = [item for item in items if Path(__file__).parent in item.path.parents]
    for item in here:
        item.add_marker(pytest.mark.benchmark(timer=CLOCK, group=_group(item)))
        item.add_marker(pytest.mark.filterwarnings("default"))  # peers have theirs
    groups: dict[str, list[pytest.Item]] = {}
    for item in here:
        groups.setdefault(_group(item), []).append(item)
    ordered: list[pytest.Item] = []
    for group in groups.values():
        ordered += [item for item in group if _parameter(item, "turn") == "there"]
        ordered += [item for item in reversed(group) if _parameter(item, "turn") == "back"]
    items[:] = [item for item in items if item not in here] + ordered


def _parameter(item: pytest.Item, name: str) -> Any:
    return item.callspec.params[name]


def _group(item: pytest.Item) -> str:
    case = _parameter(item, "case")
    name = case.name if isinstance(case, Workload) else " ".join(map(str, case)) if isinstance(case, tuple) else case
    return f"{item.path.stem.removeprefix('test_')}: {name}"


@pytest.fixture(params=["there", "back"])
def turn(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="session")
def device() -> torch.device:
    return DEVICE


@pytest.fixture(scope="session")
def bench(device: torch.device) -> Bench:
    return Bench(device, measure_limits(device))


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture
def report_replays(benchmark: Any) -> Callable[[Stopwatch], list[float]]:
    """Times the replays of a stopwatch and hands them to pytest-benchmark."""

    def measure(stopwatch: Stopwatch) -> list[float]:
        found = stopwatch.replays_for(SECONDS)
        replays = iter(found)
        benchmark.pedantic(lambda: CLOCK.advance(next(replays)), rounds=len(found), iterations=1)
        benchmark.extra_info["method"] = stopwatch.method
        return found

    return measure


@pytest.fixture
def measure_op(benchmark: Any, bench: Bench, report_replays: Callable[[Stopwatch], list[float]]) -> Callable[..., None]:
    """Checks a stage's results against float64 ones, then times it."""

    def measure(
        function: Callable[..., Any],
        rotated: Sequence[Sequence[Any]],
        exact: Sequence[torch.Tensor],
        allowed: float,
        flops: float,
        updated: Sequence[torch.Tensor] = (),
    ) -> None:
        """`updated` are those of the first arguments that calls change in place, compared with the last of `exact`."""
        before = [value.clone() for value in updated]
        got = [*_as_tuple(function(*rotated[0])), *updated]
        errors = [relative_error(result, want) for result, want in zip(got, exact, strict=True)]
        assert max(errors) <= allowed
        for value, original in zip(updated, before, strict=True):
            value.copy_(original)
        calls: list[Call] = [lambda arguments=arguments: _as_tuple(function(*arguments)) for arguments in rotated]
        stopwatch = Stopwatch(calls, bench.device)
        times = report_replays(stopwatch)
        seconds = sorted(times)[len(times) // 2]
        nbytes = sum(map(bytes_of, (*rotated[0], *stopwatch.results[0], *updated)))
        benchmark.extra_info.update(
            errors=errors,
            flops=flops,
            bytes=nbytes,
            gigabytes_per_second=nbytes / seconds / 1e9,
            teraflops=flops / seconds / 1e12,
            fraction_of_limit=bench.limits.seconds(flops, nbytes) / seconds,
        )
        if bench.device.type == "cuda":
            benchmark.extra_info["host_time"] = quick(host_times(calls[0], bench.device))
            benchmark.extra_info["peak_memory"] = peak_memory(calls[0], bench.device)

    return measure


@pytest.fixture
def rotated(device: torch.device) -> Callable[[Callable[[int], tuple[Any, ...]]], list[tuple[Any, ...]]]:
    """Makes arguments from as many seeds as it takes to exceed a GPU's L2 cache twice."""

    def make_all(make: Callable[[int], tuple[Any, ...]]) -> list[tuple[Any, ...]]:
        first = make(0)
        if device.type == "cpu":
            return [first]
        number = copies_beyond(torch.cuda.get_device_properties(device).L2_cache_size, dict(enumerate(first)))
        return [first, *(make(seed) for seed in range(1, number))]

    return make_all


def _as_tuple(result: Any) -> tuple[torch.Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)
