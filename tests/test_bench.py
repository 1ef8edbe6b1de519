"""Workloads, timing, records, comparison, pictures, and that documents hold no figure that is not in a result file."""

import gc
import importlib
import json
import os
import re
import subprocess
import sys
import time
import types
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tilegym_mamba2 import cli
from tilegym_mamba2.bench import fresh, measure, peers, pictures, report, results, timing, workloads
from tilegym_mamba2.bench.timing import Limits
from tilegym_mamba2.cli import bench as bench_command
from tilegym_mamba2.testing import oracle_scan

ROOT = Path(__file__).parent.parent
CPU = torch.device("cpu")
LIMITS = Limits(bytes_per_second=4e12, flops_per_second=7e14)
HEADLINE = workloads.HEADLINE


class Made(peers.Implementation):
    """An implementation made for a test, whose outputs are the oracle's, changed."""

    chunk_sizes = (64, 128)

    def __init__(
        self, name: str, peer: bool = False, factor: float = 1.0, fails_at: dict[int, Exception] | None = None
    ):
        super().__init__(asked=True)
        self.name, self.peer = name, peer
        self._factor, self._fails_at = factor, fails_at or {}

    def _why_not(self, workload: workloads.Workload, device: torch.device) -> str | None:
        return "it has no varlen" if workload.lengths else None

    def bind(self, inputs: workloads.Inputs, chunk_size: int) -> timing.Call:
        if chunk_size in self._fails_at:
            raise self._fails_at[chunk_size]
        out, final_states, _ = oracle_scan(**inputs)
        return lambda: (out * self._factor, final_states)


def record(name: str = "a", implementation: str = "cutile", time: float = 1e-4, **changes: Any) -> measure.Record:
    values: dict[str, Any] = {
        "chunk_size": 64,
        "time": time,
        "passes": (time, time),
        "noise": 0.01,
        "error_out": 1.8e-3,
        "error_final_states": 1.7e-3,
        "flops": 2 * 10**10,
        "min_bytes": 17 * 10**7,
        "limit": 4e-5,
    }
    return measure.Record(workloads.find_workload(name), implementation, **{**values, **changes})


def run_of(*records: measure.Record, machine: str = "GPU", **changes: Any) -> results.Results:
    about = {"command": "tilegym-mamba2 bench", "date": "2026-01-01", "machine": machine, "versions": {"torch": "2"}}
    return results.Results(about, LIMITS, list(records), **changes)


# Workloads


def test_workloads_are_those_of_the_issue():
    names = set(workloads.WORKLOADS)
    table = ["a", "b", "c", "130m", "a-n64", "a-n256", "a-2k", "latency", "d1", "d2", "falcon7b", "nano9b"]
    assert {"headline", "latency-256", "varlen-mixed", "nemotron-h-8b:1x8192", "mamba2-130m:8x2048", *table} <= names
    assert (HEADLINE.batch, HEADLINE.seqlen, HEADLINE.nheads, HEADLINE.headdim, HEADLINE.dstate) == (
        4,
        16384,
        8,
        64,
        128,
    )
    grid = {(one.seqlen, one.dstate) for one in workloads.SWEEPS["dstate"]}
    assert grid == {(1024 << power, dstate) for power in range(7) for dstate in (64, 128, 256)}
    for name, workload in workloads.WORKLOADS.items():
        assert workload.name == name
        assert not workload.lengths or (workload.batch == 1 and sum(workload.lengths) == workload.seqlen)


def test_an_unknown_workload_gets_the_nearest_names():
    with pytest.raises(ValueError, match=r"no workload 'headlin'.*headline"):
        workloads.find_workload("headlin")


def test_inputs_have_the_stated_distribution_and_are_fresh():
    workload = workloads.Workload("test", 2, 512, 8, 16, 2, 16)
    first, second = (workloads.make_inputs(workload, CPU, seed) for seed in (0, 1))
    assert {name: value.dtype for name, value in first.items()} == {
        **dict.fromkeys(("x", "B", "C"), torch.bfloat16),
        **dict.fromkeys(("dt", "A", "D"), torch.float32),
    }
    for name in first:
        assert not torch.equal(first[name], second[name])
    assert first["x"].float().std().item() == pytest.approx(1, abs=0.05)
    assert -16 <= first["A"].min() <= first["A"].max() <= -1
    inverse = torch.log(torch.expm1(first["dt"]))
    assert inverse.mean().item() == pytest.approx(-4, abs=0.05)
    assert inverse.std().item() == pytest.approx(1, abs=0.05)


def test_packed_and_layer_inputs_fit_the_forward():
    for name in ("varlen-mixed", "layer-mamba2-130m"):
        workload = workloads.find_workload(name).small()
        cost = workloads.cost_of(workloads.make_inputs(workload, CPU, seed=0))
        assert (cost.seqlen, cost.nheads, cost.nseq) == (workload.seqlen, workload.nheads, len(workload.lengths))


def test_rotated_copies_exceed_the_cache_twice():
    inputs = {"x": torch.empty(100), "dt": torch.empty(1).expand(10**6), "chunk_size": 64}
    size = 404
    for cache in (1, 300, 404, 5000):
        number = workloads.copies_beyond(cache, inputs)
        assert number >= 2
        assert number * size > 2 * cache
        assert number == 2 or (number - 1) * size <= 2 * cache


# Timing


def test_stopwatch_rotates_and_counts_every_call(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])
    called: list[int] = []

    def call_of(index: int, seconds: float) -> timing.Call:
        def call() -> int:
            called.append(index)
            now[0] += seconds
            return index

        return call

    stopwatch = timing.Stopwatch([call_of(0, 1e-4), call_of(1, 3e-4), call_of(2, 2e-4)], CPU)
    assert stopwatch.calls == 9
    called.clear()
    assert stopwatch.replays(2) == pytest.approx([2e-4, 2e-4])
    assert called == [0, 1, 2] * 6
    assert stopwatch.results == [0, 1, 2]
    assert timing.Stopwatch([call_of(0, 0.5)], CPU).calls == 1


def test_stopwatch_makes_more_replays_of_short_calls(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])

    def call() -> None:
        now[0] += 1e-3

    stopwatch = timing.Stopwatch([call], CPU)
    assert stopwatch.calls == 8
    assert len(stopwatch.replays_for(0.404)) == 50
    assert len(stopwatch.replays_for(0.0)) == 5
    assert len(stopwatch.replays_for(1e3)) == 300


class FakeGpu:
    """Stands for torch.cuda: a graph holds the calls that it captured, and they take device time alone."""

    def __init__(self) -> None:
        self.milliseconds = 0.0
        self.captured: list[int] | None = None
        self.eager: list[int] = []
        self.synchronized = 0
        gpu = self

        class Graph:
            def __init__(self) -> None:
                self.held: list[int] = []

            def replay(self) -> None:
                for index in self.held:
                    gpu.milliseconds += 0.1 * (1 + index)

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self) -> None:
                self.at = gpu.milliseconds

            def elapsed_time(self, other: Any) -> float:
                return other.at - self.at

        @contextmanager
        def graph(one: Graph) -> Iterator[None]:
            gpu.captured = one.held
            yield
            gpu.captured = None

        self.CUDAGraph, self.Event, self.graph = Graph, Event, graph

    def synchronize(self, device: object = None) -> None:
        self.synchronized += 1

    def call_of(self, index: int) -> timing.Call:
        def call() -> int:
            if self.captured is None:
                assert gc.isenabled()
                self.eager.append(index)
                self.milliseconds += 0.1 * (1 + index)
            else:
                assert not gc.isenabled()  # garbage may do on its way what ends a capture
                self.captured.append(index)
            return index

        return call


@pytest.mark.parametrize("capturable", [True, False])
def test_on_a_gpu_the_device_is_timed(monkeypatch, capturable):
    gpu = FakeGpu()
    monkeypatch.setattr(timing.torch, "cuda", gpu)
    stopwatch = timing.Stopwatch([gpu.call_of(index) for index in range(3)], torch.device("cuda"), capturable)
    assert stopwatch.calls == 9
    assert stopwatch.results == [0, 1, 2]
    gpu.eager.clear()
    before = gpu.synchronized
    assert stopwatch.replays(4) == pytest.approx([2e-4] * 4)
    assert gpu.synchronized - before == 2  # before the first and after the last: replays queue up
    assert gpu.eager == ([] if capturable else [0, 1, 2] * 12)
    assert stopwatch.method == ("device time of a CUDA graph" if capturable else "device time of eager calls")


def test_limit_is_the_larger_of_bytes_and_operations():
    limits = Limits(bytes_per_second=10.0, flops_per_second=100.0)
    assert limits.seconds(flops=100, nbytes=50) == 5
    assert limits.seconds(flops=900, nbytes=50) == 9


def test_limits_are_measured():
    limits = timing.measure_limits(CPU)
    assert 1e8 < limits.bytes_per_second < 1e13
    assert 1e8 < limits.flops_per_second < 1e14


class HostClock:
    """Stands for the clock and the device, which has a queue of work, so that waiting for it takes time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.queued, self.most_queued = 0.0, 0, 0
        self.times: list[float] = []  # of the next calls; then 2e-4
        monkeypatch.setattr(timing.time, "perf_counter", lambda: self.now)
        for module in (timing, measure):
            monkeypatch.setattr(module, "synchronize", self.synchronize)

    def synchronize(self, device: object) -> None:
        self.now += 1e-3 * self.queued
        self.queued = 0

    def call(self) -> None:
        self.now += self.times.pop(0) if self.times else 2e-4
        self.queued += 1
        self.most_queued = max(self.most_queued, self.queued)


def test_host_times_are_of_calls_that_wait_for_nothing(monkeypatch):
    clock = HostClock(monkeypatch)
    clock.times = [5.0, 1.0]  # first calls allocate
    assert timing.host_times(clock.call, CPU) == pytest.approx([2e-4] * 40)
    assert clock.most_queued == 4
    clock.times = [2e-4] * 3 + [0.06] * 43
    assert timing.host_times(clock.call, CPU) == pytest.approx([0.06] * 4)  # what fits in the time for it


def test_the_quick_calls_count():
    times = [2e-4] * 15 + [4e-4] * 85
    assert timing.quick(times) == pytest.approx(2e-4)
    assert timing.quick([2e-4] * 5 + [4e-4] * 95) == pytest.approx(4e-4)
    assert timing.quick([1.0] * 4) == 1.0


# Measuring


def test_truth_is_the_recurrence_on_some_heads_too(monkeypatch):
    workload = workloads.Workload("test", 1, 70, 8, 16, 2, 16)
    inputs = workloads.make_inputs(workload, CPU, seed=0)
    exact = {name: value.double() for name, value in inputs.items()}
    out, final_states, _ = oracle_scan(**exact)
    assert measure.truth_of(inputs).errors((out, final_states)) < (1e-12, 1e-12)
    for heads in (5, 4, 3, 1):  # more than a group of four heads, one, and less
        monkeypatch.setitem(measure._TRUTH_BYTES, "cpu", heads * 8 * 70 * 16 * 4)
        truth = measure.truth_of(inputs)
        assert truth.heads == min(heads, 4)
        assert max(truth.errors((out, final_states))) < 1e-12
        wrong = out.clone()
        wrong[:, :, 0] *= 1.01
        assert truth.errors((wrong, final_states))[0] > 1e-4


def test_measure_says_of_each_implementation_what_happened():
    bench = measure.Bench(CPU, LIMITS)
    compared = [
        Made("right"),
        Made("half", fails_at={64: RuntimeError("no 64")}),
        Made("refuses", fails_at={64: NotImplementedError("too wide"), 128: NotImplementedError("too wide")}),
        Made("wrong", factor=1.01),
        Made("peer", peer=True, factor=1.005),
        Made("wrong peer", peer=True, factor=1.05),
    ]
    found = {one.implementation: one for one in bench.measure(HEADLINE, compared)}
    assert list(found) == [one.name for one in compared]
    right, half = found["right"], found["half"]
    assert right.failed is None
    assert not right.broken
    assert right.time > 0
    assert set(right.chunk_times) == {"64", "128"}
    assert len(right.passes) == 2
    assert right.workload == HEADLINE.small()
    assert right.error_out < 2e-3
    assert right.limit == LIMITS.seconds(right.flops, right.min_bytes)
    assert right.rates()["fraction_of_limit"] == right.limit / right.time
    assert (half.failed, half.broken, half.chunk_size) == (None, True, 128)
    assert half.chunk_failures == {"64": "RuntimeError: no 64"}
    assert "too wide" in (found["refuses"].failed or "")
    assert not found["refuses"].broken
    assert "WrongResultError: errors 1.0e-02" in (found["wrong"].failed or "")
    assert found["wrong"].broken
    assert found["peer"].failed is None
    assert found["wrong peer"].broken


def test_measure_keeps_the_reason_of_what_an_implementation_lacks():
    (found,) = measure.Bench(CPU, LIMITS).measure(workloads.find_workload("varlen-short"), [Made("right")])
    assert (found.failed, found.broken) == ("it has no varlen", False)


def test_order_is_there_and_back(monkeypatch):
    order: list[int] = []
    plain = timing.Stopwatch.replays_for

    def replays_for(self: timing.Stopwatch, seconds: float) -> list[float]:
        order.append(id(self))
        return plain(self, seconds)

    monkeypatch.setattr(timing.Stopwatch, "replays_for", replays_for)
    compared = [Made(name) for name in ("one", "two", "three")]
    measure.Bench(CPU, LIMITS).measure(workloads.find_workload("latency-256"), compared)
    passes = order[-6:]
    assert passes[:3] == passes[:2:-1]
    assert len(set(passes)) == 3


def test_after_two_workloads_only_good_chunk_sizes_are_tried(monkeypatch):
    bench = measure.Bench(CPU, LIMITS)
    seconds = {64: 1.0, 128: 2.0, 256: 1.5}

    class Timed(Made):
        def bind(self, inputs: workloads.Inputs, chunk_size: int) -> timing.Call:
            tried.append(chunk_size)
            self.latest = chunk_size
            return super().bind(inputs, chunk_size)

    Timed.chunk_sizes = (64, 128, 256)
    tried: list[int] = []
    implementation = Timed("one")
    monkeypatch.setattr(timing.Stopwatch, "replays_for", lambda *_: [seconds[implementation.latest]] * 3)
    small = workloads.Workload("small", 1, 1024, 4, 16, 1, 16)
    for number, (expected, best) in enumerate([([64, 128, 256], 64), ([64, 128, 256], 256), ([64, 256], 256)], 1):
        seconds[256] = {64: 1.5, 256: 0.5}[best]
        tried.clear()
        (found,) = bench.measure(replace(small, seqlen=1024 * number), [implementation])
        assert found.chunk_size == best
        assert tried == expected
    tried.clear()
    bench.measure(replace(small, dstate=32), [implementation])
    assert tried == [64, 128, 256]


def test_what_differs_in_name_alone_is_measured_once(monkeypatch):
    bench = measure.Bench(CPU, LIMITS)
    bound: list[str] = []
    plain = Made.bind

    def bind(self: Made, inputs: workloads.Inputs, chunk_size: int) -> timing.Call:
        bound.append(self.name)
        return plain(self, inputs, chunk_size)

    monkeypatch.setattr(Made, "bind", bind)
    latency = workloads.find_workload("latency-256")
    (first,) = bench.measure(latency, [Made("one")])
    bound.clear()
    again, other = bench.measure(replace(latency, name="again"), [Made("one"), Made("two")])
    assert set(bound) == {"two"}
    assert again == replace(first, workload=replace(first.workload, name="again"))
    assert (other.implementation, other.workload) == ("two", again.workload)
    bound.clear()
    bench.measure(replace(latency, dtype="float16"), [Made("one")])
    assert set(bound) == {"one"}


def test_dtypes_have_their_budget_and_precision(monkeypatch):
    before = torch.get_float32_matmul_precision()
    seen: list[tuple[str, torch.dtype]] = []

    class Seen(Made):
        def bind(self, inputs: workloads.Inputs, chunk_size: int) -> timing.Call:
            seen.append((torch.get_float32_matmul_precision(), inputs["x"].dtype))
            return super().bind(inputs, chunk_size)

    off = 1e-4  # within the budgets of float16 and TF32, not within that of float32
    failed = {}
    for name in ("float16", "tf32", "float32"):
        (found,) = measure.Bench(CPU, LIMITS).measure(
            workloads.find_workload(f"a-2k-{name}"), [Seen("one", factor=1 + off)]
        )
        failed[name] = found.failed is not None
    assert failed == {"float16": False, "tf32": False, "float32": True}
    assert list(dict.fromkeys(seen)) == [
        ("highest", torch.float16),
        ("high", torch.float32),
        ("highest", torch.float32),
    ]
    assert torch.get_float32_matmul_precision() == before


def test_a_lost_device_is_said_to_be_lost(monkeypatch):
    monkeypatch.setattr(measure, "is_usable", lambda device: False)
    broken = Made("two", fails_at={64: RuntimeError("illegal access")})
    with pytest.raises(measure.DeviceLostError, match=r"illegal access; the device was lost") as caught:
        measure.Bench(CPU, LIMITS).measure(workloads.find_workload("latency-256"), [Made("one"), broken])
    assert caught.value.implementation == "two"


def test_it_is_known_where_the_time_went():
    bench = measure.Bench(CPU, LIMITS)
    bench.measure(workloads.find_workload("latency-256"), [Made("one")])
    (spent,) = bench.spent.values()
    assert set(spent) == {"inputs and float64", "one", "timing", "host time and memory"}
    assert spent["one"] > 0


def test_noise_is_the_larger_of_passes_apart_and_spread():
    assert measure.noise([1.0, 1.1], [1.0] * 10) == pytest.approx(0.1)
    assert measure.noise([1.0, 1.0], [0.8] * 5 + [1.0] + [1.2] * 5) == pytest.approx(0.2)


def test_host_times_are_of_all_visits(monkeypatch):
    bench = measure.Bench(CPU, LIMITS)
    one = Made("one")
    (first,) = bench.measure(workloads.find_workload("latency-256"), [one])
    workload = first.workload
    assert (first.host_time, first.host_calls) == (None, 0)
    bench.host_again(workload, [one])
    assert bench.latest(first) == first  # on a CPU there are none
    bench._host_times[replace(workload, name=""), "one"] = [4e-4] * 40
    clock = HostClock(monkeypatch)
    monkeypatch.setattr(Made, "bind", lambda *_: clock.call)
    alias = replace(first, workload=replace(workload, name="alias"))
    bench.host_again(workload, [one, Made("two")])
    found = bench.latest(alias)
    assert found == replace(alias, host_time=pytest.approx(2e-4), host_time_median=pytest.approx(3e-4), host_calls=80)
    bench.host_again(workload, [one])
    assert bench.latest(first).host_time_median == pytest.approx(2e-4)
    assert bench.latest(record()) == record()  # of an earlier run


# Implementations


def test_torch_peers_compute_what_the_package_does():
    workload = workloads.find_workload("c").small()
    inputs = workloads.make_inputs(workload, CPU, seed=0)
    truth = measure.truth_of(inputs)
    for name in ("torch-reference", "transformers"):
        implementation = peers.find_implementation(name)
        assert implementation.why_not(workload, CPU) is None
        for chunk_size in implementation.chunk_sizes:
            assert max(truth.errors(implementation.bind(inputs, chunk_size)())) < 2.5e-3


def test_torch_compile_gets_the_stages_and_computes_what_the_package_does():
    seen: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        seen.append(graph)
        return graph

    # More shapes than torch.compile takes by itself before it runs a function as it is.
    several = [replace(workloads.find_workload("c"), seqlen=64 * seqlen).small() for seqlen in range(64, 641, 64)]
    peers._compiled_reference.cache_clear()
    original = torch.compile
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", lambda *args, **options: original(*args, backend=backend, **options))
        for count, workload in enumerate(several, start=1):
            implementation = peers.find_implementation("torch.compile")
            inputs = workloads.make_inputs(workload, CPU, seed=0)
            assert max(measure.truth_of(inputs).errors(implementation.bind(inputs, 64)())) < 2.5e-3
            assert len(seen) == count
    peers._compiled_reference.cache_clear()
    assert not any("tilegym_mamba2" in str(node.target) for graph in seen for node in graph.graph.nodes)
    assert "divide no row of 300 tokens" in (
        peers.find_implementation("torch.compile").why_not(replace(several[0], seqlen=300), CPU) or ""
    )


def test_too_little_memory_is_the_reason_and_the_rest_is_measured():
    short = torch.OutOfMemoryError("tried to allocate 80 GiB")
    compared = [Made("none", peer=True, fails_at={64: short, 128: short}), Made("some", fails_at={128: short})]
    none, some = measure.Bench(CPU, LIMITS).measure(workloads.find_workload("latency"), compared)
    assert "chunk size 128: OutOfMemoryError: tried to allocate 80 GiB" in (none.failed or "")
    assert some.time > 0
    assert list(some.chunk_failures) == ["128"]


def test_large_calls_of_transformers_are_not_captured():
    transformers = peers.find_implementation("transformers")
    captured = {one.name: transformers.capturable(one) for one in workloads.TABLE}
    assert [name for name, does in captured.items() if does] == ["a-n64", "a-2k", "latency", "d1"]


def test_names_that_are_nothing_are_refused():
    with pytest.raises(ValueError, match=r"no backend or peer 'cutlie'; there are .*cutile.*mamba_ssm"):
        peers.implementations(["cutlie"], False, CPU)


def test_slow_ones_are_spared_long_rows_on_a_gpu_unless_asked_for():
    gpu = torch.device("cuda")
    asked, unasked = (peers.BackendForward("torch-reference", asked) for asked in (True, False))
    assert "ask for it by name" in (unasked.why_not(HEADLINE, gpu) or "")
    assert asked.why_not(HEADLINE, gpu) is None
    assert unasked.why_not(workloads.find_workload("latency"), gpu) is None


def test_tilegym_says_what_it_can_not_do():
    tilegym = peers.find_implementation("tilegym")
    if tilegym.why_not(HEADLINE, torch.device("cuda")) is not None:
        pytest.skip("tilegym is not installed")
    for name, reason in (("nano9b", "headdim 80"), ("varlen-mixed", "packed"), ("layer-mamba2-130m", "softplus")):
        assert reason in (tilegym.why_not(workloads.find_workload(name), torch.device("cuda")) or "")


def test_mamba_ssm_and_tilegym_are_compared_where_their_products_are_alike():
    for name, workload, compared in (
        ("mamba_ssm", "a-float16", True),
        ("mamba_ssm", "a-tf32", True),
        ("mamba_ssm", "a-float32", False),
        ("tilegym", "a-float32", True),
        ("tilegym", "a-tf32", False),
    ):
        reason = peers.PEERS[name](asked=True)._why_not_workload(workloads.find_workload(workload))
        assert (reason is None) == compared


def test_a_list_of_configurations_is_cut_to_those_to_keep_and_then_to_those_that_won():
    module: Any = types.SimpleNamespace(stage_tune_cache={}, stage_configs=lambda size: list(range(size)))
    for _ in range(2):
        peers._cut(module, "stage", "_configs", lambda value: value % 2 == 0)
    assert module.stage_configs(5) == [0, 2, 4]
    module.stage_tune_cache["a shape"] = (4, None)
    assert module.stage_configs(5) == [0, 2, 4]
    assert module.stage_configs(5) == [4]
    assert module.stage_configs(size=7) == [0, 2, 4, 6]  # other arguments
    for _ in range(3):
        assert module.stage_configs(3) == [0, 2]  # what won is none of these


def test_a_kernel_with_equal_hints_is_compiled_once():
    class Kernel:
        def replace_hints(self, **hints: int) -> "Kernel":
            return Kernel()

    kernel = Kernel()
    for _ in range(2):
        peers._keep_variants(kernel)
        assert kernel.replace_hints(occupancy=2) is kernel.replace_hints(occupancy=2)
    assert kernel.replace_hints(occupancy=2) is not kernel.replace_hints(occupancy=4)


def test_tuners_of_imported_triton_kernels_are_brief(monkeypatch):
    triton = pytest.importorskip("triton")

    @triton.autotune(configs=[triton.Config({}, num_warps=warps) for warps in (1, 2)], key=[])
    @triton.jit
    def kernel(pointer):
        pass

    module = types.ModuleType("made_package.kernels")
    module.kernel = kernel
    monkeypatch.setitem(sys.modules, "made_package.kernels", module)
    asked: dict[str, Any] = {}
    monkeypatch.setattr(triton.testing, "do_bench", lambda call, **options: asked.update(options))
    peers._tune_briefly("made_package")
    kernel.do_bench(print, quantiles=(0.5,))
    assert asked == {"warmup": 2, "rep": 10, "quantiles": (0.5,)}


# Fresh processes


def test_a_first_call_takes_longer_than_the_next():
    first, second = fresh.Task("torch-reference", 64, ("latency-256", "latency-256")).run({})
    assert first is not None
    assert second is not None
    assert first > second > 0


def test_first_calls_have_a_cold_and_a_warm_time():
    implementation = peers.find_implementation("torch-reference")
    (found,) = fresh.first_calls(workloads.find_workload("latency-256"), [implementation], CPU)
    assert found.implementation == "torch-reference"
    assert found.cold
    assert found.warm


def test_first_calls_of_backends_come_before_those_of_peers_and_are_given_up(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(fresh.time, "monotonic", lambda: now[0])
    ran: list[tuple[str, float]] = []
    empty: list[set[str]] = []
    outcomes = {"ours": [4.0, 0.5], "late": [55.0], "half": [3.0, 55.0], "broken": [None]}

    def run(self: fresh.Task, environment: Any, seconds_at_most: float) -> list[float | None]:
        empty.append(set(environment))
        assert all(not os.path.exists(path) for path in environment.values())
        seconds = outcomes[self.implementation].pop(0)
        ran.append((self.implementation, seconds_at_most))
        now[0] += min(seconds or 1.0, seconds_at_most)
        return [None if seconds is None or seconds >= seconds_at_most else seconds]

    monkeypatch.setattr(fresh.Task, "run", run)
    monkeypatch.setattr(fresh, "_in_parallel", map)
    compared = [Made("late", peer=True), Made("half", peer=True), Made("broken", peer=True), Made("ours")]
    found = fresh.first_calls(HEADLINE, compared, CPU, seconds=40)
    assert [name for name, _ in ran] == ["ours", "ours", "late", "half", "half", "broken"]
    assert {seconds for _, seconds in ran} == {55.0}
    assert all({"TRITON_CACHE_DIR", "CUDA_TILE_CACHE_DIR", "TILEGYM_MAMBA2_CACHE"} <= names for names in empty)
    late, half, broken, ours = [(call.cold, call.warm, call.given_up_after) for call in found]
    assert (late, half) == ((None, None, 40), (3.0, None, 40))
    assert (broken, ours) == ((None, None, None), (4.0, 0.5, None))
    rows = report.first_calls(run_of(first_calls=found)).rows
    assert [row[2:] for row in rows] == [
        ["> 40.0 s", "-"], ["3.00 s", "> 40.0 s"], ["-", "-"], ["4.00 s", "500 ms"]
    ]  # fmt: skip


def test_a_task_that_fails_or_hangs_has_no_time():
    assert fresh.Task("torch-reference", 64, ("latency-256", "nowhere")).run({}) == [None, None]
    assert fresh.Task("nothing", 64, ("latency-256", "headline")).run({}) == [None, None]
    assert fresh.Task("torch-reference", 64, ("latency-256",)).run({}, seconds_at_most=0.01) == [None]
    assert not fresh._running


@pytest.mark.parametrize(("output", "found"), [("compiling\n[0.5, null]\n", [0.5, None]), ("", [None, None])])
def test_a_process_that_ends_when_its_time_does(
    monkeypatch: pytest.MonkeyPatch, output: str, found: list[float | None]
) -> None:
    """The time is up before the process has ended, and when it is to be ended it has, with status 0."""
    started = subprocess.Popen

    class Late:
        def __init__(self, command: list[str], **options: Any):
            self.process = started([sys.executable, "-c", f"print({output!r}, end='')"], **options)
            self.pid = self.process.pid

        def communicate(self, timeout: float | None = None) -> tuple[str, None]:
            self.process.wait()
            if timeout is not None:
                raise subprocess.TimeoutExpired([], timeout)
            return self.process.communicate()

        @property
        def returncode(self) -> int | None:
            return self.process.returncode

    monkeypatch.setattr(fresh.subprocess, "Popen", Late)
    assert fresh.Task("torch-reference", 64, ("latency-256", "headline")).run({}, seconds_at_most=1.0) == found
    assert not fresh._running


def test_compiling_ahead_gives_up_and_says_what_it_took():
    reference = peers.find_implementation("torch-reference")
    assert fresh.compile_tasks([HEADLINE], [reference], CPU) == []  # it compiles nothing
    reference.compiles = True
    begun = time.monotonic()
    found = fresh.compile_ahead([workloads.find_workload("latency-256")], [reference], CPU, seconds=0.5)
    assert list(found) == [
        "torch-reference 64 latency-256",
        *(f"torch-reference {size} latency-256" for size in (128, 256)),
    ]
    assert time.monotonic() - begun < 10


def test_what_runs_is_ended_when_the_caller_stops():
    started = time.monotonic()

    def sleep(seconds: int) -> int:
        if seconds:
            time.sleep(0.5)  # it begins when the caller has stopped already
        process = subprocess.Popen(
            [sys.executable, "-c", f"import time; time.sleep({seconds})"], start_new_session=True
        )
        fresh._running.add(process)
        return process.wait()

    results_in_order = fresh._in_parallel(sleep, [0, 100])
    assert next(results_in_order) == 0
    results_in_order.close()
    fresh._running.clear()
    assert time.monotonic() - started < 50


def test_compile_tasks_share_what_compiles_alike():
    searching = Made("searching", peer=True)
    searching.searches_every_shape = True
    each, nothing = Made("each", peer=True), Made("nothing", peer=True)
    each.compiles_every_shape, nothing.compiles = True, False
    compared = [Made("ours"), Made("peer", peer=True), searching, each, nothing]
    chosen = [workloads.find_workload(name) for name in ("a", "130m", "c", "nano9b", "headline", "a-float16")]
    tasks = fresh.compile_tasks(chosen, compared, CPU)
    assert [task.expected for task in tasks] == sorted((task.expected for task in tasks), reverse=True)
    assert tasks[-1].implementation == "ours"
    found = {(task.implementation, task.chunk_size, task.workloads) for task in tasks}
    expected = {
        "ours": [("a", "130m", "c"), ("nano9b",), ("a-float16",)],
        "peer": [("a", "c"), ("nano9b",), ("a-float16",)],
        "searching": [("a", "130m", "c"), ("nano9b",), ("a-float16",)],
        "each": [("a",), ("130m",), ("c",), ("nano9b",), ("a-float16",)],
    }
    assert found == {
        (name, chunk_size, names) for name, several in expected.items() for chunk_size in (64, 128) for names in several
    }


# Stored results


def test_results_survive_a_file(tmp_path):
    calls = [fresh.FirstCall("a", "cutile", 3.0, None)]
    stored = run_of(record(), record("varlen-mixed", failed="no"), first_calls=calls, spent={"a": {"cutile": 1.5}})
    results.save(stored, tmp_path / "r.json")
    assert results.load(tmp_path / "r.json") == stored
    assert results.load(tmp_path / "r.json").digest() == stored.digest() != run_of(record()).digest()
    assert [path.name for path in tmp_path.iterdir()] == ["r.json"]
    content = json.loads((tmp_path / "r.json").read_text())
    assert content["records"][0]["gigabytes_per_second"] == pytest.approx(1700)
    assert content["records"][0]["teraflops"] == pytest.approx(200)
    assert content["records"][0]["fraction_of_limit"] == pytest.approx(0.4)


@pytest.mark.parametrize("content", ["", "{}", '{"format": 1}', '{"format": 99}', "[]"])
def test_a_file_of_something_else_is_refused(tmp_path, content):
    path = tmp_path / "r.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=re.escape(str(path))):
        results.load(path)


def test_runs_of_one_machine_are_put_together():
    both = results.merged([run_of(record("a")), run_of(record("b"))])
    assert [workload.name for workload in both.workloads()] == ["a", "b"]
    with pytest.raises(ValueError, match="GPU and of other"):
        results.merged([run_of(record()), run_of(record(), machine="other")])


@pytest.mark.parametrize(
    ("new", "slower", "faster"), [(1.04e-4, 0, 0), (1.06e-4, 1, 0), (0.96e-4, 0, 0), (0.94e-4, 0, 1)]
)
def test_only_what_exceeds_noise_is_a_change(new, slower, faster):
    (change,) = results.compare(run_of(record()), run_of(record(time=new), record("b")))
    assert (change.slower, change.faster) == (bool(slower), bool(faster))


def test_times_of_different_machines_or_sizes_are_not_compared():
    with pytest.raises(ValueError, match="can't be compared"):
        results.compare(run_of(record()), run_of(record(), machine="other"))
    small = measure.Record(HEADLINE.small(), "cutile", time=1.0)
    assert results.compare(run_of(record("headline")), run_of(small)) == []


# Tables, documents, pictures


def test_the_table_of_times_has_every_implementation_with_its_error():
    table = report.times(run_of(record(), record(implementation="mamba_ssm", time=3e-4), record("b", "triton", 2e-4)))
    assert table.columns[2:] == ("limit", "cutile", "triton", "mamba_ssm", "of limit", "over mamba_ssm")
    shape = "4, 16384, 8, 64, 1, 128"
    assert table.rows[0] == ["a", shape, "40.0 us", "100 us (1.8e-03)", "-", "300 us (1.8e-03)", "40 %", "3.00x"]
    assert table.rows[1][3:] == ["-", "200 us (1.8e-03)", "-", "20 %", "-"]
    assert table.markdown().splitlines()[1] == "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |"


def test_numbers_have_three_digits():
    values = (0.0123456, 0.00012345, 1.23456e-6, 0.987, 1234.5, 12.0)
    assert [report.seconds(value) for value in values[:3]] == ["12.3 ms", "123 us", "1.23 us"]
    assert [report.three_digits(value) for value in values] == ["0.0123", "1.2e-04", "1.2e-06", "0.987", "1234", "12.0"]


def test_targets_are_for_the_best_backend_alone():
    found = run_of(
        record(time=1.1e-4),
        record(implementation="triton", time=1.32e-4),
        record(implementation="mamba_ssm", time=1e-5),
        record("b", "triton", time=3.52e-4),
        record("b", failed="no"),
        record("a-float16", time=1e-5),
    )
    table = report.targets(found)
    assert table.columns == ("workload", "target", "cutile", "triton", "best / target")
    assert table.rows == [
        ["a", "110 us", "110 us", "132 us", "1.00, met"],
        ["b", "320 us", "-", "352 us", "1.10"],
    ]
    assert set(workloads.TARGETS) == {one.name for one in workloads.TABLE}


def test_host_times_and_memory_are_a_table():
    ours = record(host_time=2e-4, peak_memory=3 * 2**20)
    table = report.host(run_of(ours, record(implementation="mamba_ssm")))
    assert table.columns == (
        "workload", "cutile: host time", "mamba_ssm: host time", "cutile: memory", "mamba_ssm: memory",
    )  # fmt: skip
    assert table.rows == [["a", "200 us", "-", "3.00 MiB", "-"]]


def test_speeds_are_in_words():
    found = run_of(record("c", "triton"), record("c", "tilegym", 2e-4))
    found.about["versions"] = {"triton": "3", "tilegym": "1.5", "torch": "2"}
    table = report.speeds(found)
    assert table.columns == ("", "triton", "tilegym 1.5")
    assert table.rows == [["1 x 8,192 tokens, 128 heads of 64, 8 groups, dstate 128", "100 us", "200 us"]]


def test_tables_show_what_is_named():
    found = run_of(*[record(name, one) for name in ("b", "a", "a-float16") for one in ("cutile", "mamba_ssm")])

    def shown(*names: str) -> list[tuple[str, str]]:
        return [(one.workload.name, one.implementation) for one in report.selected(found, names).records]

    assert shown() == [(one.workload.name, one.implementation) for one in found.records]
    assert shown("a", "b", "cutile") == [("a", "cutile"), ("b", "cutile")]
    assert shown("b", "mamba_ssm", "cutile") == [("b", "mamba_ssm"), ("b", "cutile")]
    assert shown("dtypes") == [("a-float16", "cutile"), ("a-float16", "mamba_ssm")]
    assert shown("mamba_ssm") == [("b", "mamba_ssm"), ("a", "mamba_ssm"), ("a-float16", "mamba_ssm")]
    with pytest.raises(ValueError, match="'triton' is no workload or sweep"):
        shown("triton")


def test_gains_are_a_grid():
    grid = [("seqlen1024-dstate64", 2e-4), ("seqlen2048-dstate64", 3e-4), ("seqlen2048-dstate128", 4e-4)]
    pairs = [[record(name), record(name, "mamba_ssm", time)] for name, time in grid]
    table = report.gains(run_of(*pairs[0], *pairs[1], *pairs[2]), "cutile", "mamba_ssm")
    assert table.columns == ("dstate", "1,024 tokens", "2,048 tokens")
    assert table.rows == [["64", "2.00x", "3.00x"], ["128", "-", "4.00x"]]
    faster = record("seqlen2048-dstate128", "triton", 0.5e-4)
    best = report.gains(run_of(*pairs[0], *pairs[2], faster), "best", "mamba_ssm")
    assert best.rows == [["64", "2.00x", "-"], ["128", "-", "8.00x"]]


def test_figures_of_a_document_come_from_its_file(tmp_path):
    results.save(run_of(record(), record(implementation="mamba_ssm", time=3e-4)), tmp_path / "r.json")
    text = (
        "Before <!-- figures: time r.json a cutile -->old<!-- /figures --> and"
        " <!-- figures: gain r.json a cutile mamba_ssm --><!-- /figures --> after\n"
        "<!-- figures: times r.json --><!-- /figures -->\n"
    )
    made = report.updated(text, tmp_path)
    assert ">100 us<!-- /figures --> and" in made
    assert ">3.00x<!-- /figures --> after" in made
    assert "\n| a | 4, 16384, 8, 64, 1, 128 | 40.0 us | 100 us (1.8e-03) |" in made
    assert report.updated(made, tmp_path) == made
    assert report.bare_figures(made) == []


def test_figures_may_come_from_several_files(tmp_path):
    results.save(run_of(record()), tmp_path / "r.json")
    results.save(run_of(record(implementation="mamba_ssm", time=3e-4)), tmp_path / "s.json")
    made = report.updated("<!-- figures: gain r.json+s.json a cutile mamba_ssm --><!-- /figures -->", tmp_path)
    assert ">3.00x<" in made


@pytest.mark.parametrize(
    "request_", ["speed r.json a cutile", "time r.json b cutile", "gain r.json a cutile tilegym", "times r.json models"]
)
def test_a_figure_that_no_file_has_is_refused(tmp_path, request_):
    results.save(run_of(record()), tmp_path / "r.json")
    with pytest.raises(ValueError, match=r"no figures 'speed'|has no (time|gain|times) of"):
        report.updated(f"<!-- figures: {request_} --><!-- /figures -->", tmp_path)


@pytest.mark.parametrize(
    "text",
    ["131 us", "1.3 ms.", "4.28 TB/s", "712 TFLOP/s", "2.8x faster", "1.5 times as fast", "40 % of its limit", "31 s"],
)
def test_bare_figures_are_found(text):
    assert len(report.bare_figures(f"It takes {text} here.")) == 1
    assert report.bare_figures(f"<!-- figures: time r.json a b -->{text}<!-- /figures -->") == []


@pytest.mark.parametrize("name", ["README.md", "docs/performance.md"])
def test_every_figure_in_the_documents_is_in_a_result_file(name):
    path = ROOT / name
    if not path.exists():
        pytest.skip(f"there is no {name}")
    text = path.read_text("utf-8")
    assert report.bare_figures(text) == []
    assert report.updated(text, path.parent) == text


def test_stored_pictures_are_of_the_stored_results(tmp_path):
    stored = [path for path in (ROOT / "bench/results").rglob("*.json") if path.name != "transformers.json"]
    assert stored
    for path in stored:
        found = results.load(path)
        drawn = [*path.parent.glob(f"{path.stem}-*.png"), *path.parent.glob(f"{path.stem}-*.svg")]
        # Nothing is drawn of a run with neither a sweep nor the implementation that gains are over.
        assert {one.name for one in drawn} == {one.name for one in pictures.draw(found, tmp_path / path.stem)}
        assert {pictures.digest_in(one) for one in drawn} <= {found.digest()}


def test_pictures_are_drawn_of_what_there_is(tmp_path):
    pair = [record(), record(implementation="mamba_ssm", time=3e-4)]
    sweep = [record(f"seqlen{seqlen}-dstate{dstate}") for seqlen in (1024, 2048) for dstate in (64, 128)]
    found = run_of(*pair, *sweep)
    files = pictures.draw(found, tmp_path / "p.png")
    assert [path.name for path in files] == ["p-time.png", "p-time.svg", "p-gain.png", "p-gain.svg"]
    model = [record("mamba2-2.7b:8x2048", name) for name in ("triton", "mamba_ssm")]
    drawn = pictures.draw(run_of(*model, record("a-float16"), record("a-float16", "mamba_ssm")), tmp_path / "m")
    assert [path.name for path in drawn] == ["m-models.png", "m-models.svg"]
    assert {pictures.digest_in(path) for path in files} == {found.digest()}
    before = [path.read_bytes() for path in files]
    assert [path.read_bytes() for path in pictures.draw(found, tmp_path / "p")] == before
    assert pictures.draw(run_of(*pair), tmp_path / "q")[0].name == "q-gain.png"
    assert pictures.draw(run_of(record()), tmp_path / "r") == []


def test_without_matplotlib_pictures_say_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.style", None)
    with pytest.raises(pictures.NoPictures, match=r"tilegym_mamba2\[bench\]"):
        pictures.draw(run_of(record()), tmp_path / "p")


# The commands


@pytest.fixture
def command(monkeypatch, capsys):
    """Runs the command line in this process, on the CPU, with limits that are known: (status, output, errors)."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("tilegym_mamba2.cli.bench.measure_limits", lambda device: LIMITS)

    def run(*arguments: object) -> tuple[int, str, str]:
        status = cli.main([str(argument) for argument in arguments])
        return status, *capsys.readouterr()

    return run


def test_bench_measures_writes_and_draws(command, tmp_path):
    file = tmp_path / "r.json"
    arguments = ["--workload", "latency", "--workload", "latency-256", "--backends", "torch-reference, transformers"]
    status, output, _ = command("bench", *arguments, "--json", file, "--plot", tmp_path / "p")
    assert status == 0
    found = results.load(file)
    assert [(one.workload.name, one.implementation) for one in found.records] == [
        (name, implementation)
        for name in ("latency", "latency-256")
        for implementation in ("torch-reference", "transformers")
    ]
    assert all(one.failed is None and one.time > 0 for one in found.records)
    assert found.about["versions"]["torch"] == torch.__version__
    assert found.machine.startswith("CPU")
    for one in found.records:
        assert report.seconds(one.time) in output
    assert (tmp_path / "p-gain.png").exists()
    assert command("report", file)[1] in output


def test_the_revision_is_what_the_environment_says(monkeypatch):
    monkeypatch.setenv("GIT_COMMIT", "abc")
    assert bench_command._revision() == "abc"  # also in a repository
    monkeypatch.setenv("PATH", "")
    assert bench_command._revision() == "abc"
    monkeypatch.delenv("GIT_COMMIT")
    assert bench_command._revision() is None


def test_bench_without_a_workload_takes_the_headline(command, tmp_path):
    status, output, _ = command("bench", "--backends", "torch-reference,mamba_ssm", "--json", tmp_path / "r.json")
    assert status == 0
    assert "headline" in output
    assert "not measured: mamba_ssm" in output
    assert results.load(tmp_path / "r.json").workloads() == [HEADLINE.small()]


def test_bench_fails_if_a_backend_is_wrong(command, monkeypatch):
    monkeypatch.setattr(peers, "implementations", lambda *_: [Made("right"), Made("wrong", factor=1.01)])
    status, output, _ = command("bench", "--workload", "latency-256")
    assert status == 1
    assert "not measured: wrong: chunk size 64: WrongResultError" in output


def test_bench_goes_on_after_a_lost_device(command, monkeypatch, tmp_path):
    crashing = Made("crashing", fails_at={64: RuntimeError("illegal access")})
    monkeypatch.setattr(peers, "implementations", lambda *_: [Made("right"), crashing])
    monkeypatch.setattr(measure, "is_usable", lambda device: False)
    monkeypatch.setattr(bench_command, "is_usable", lambda device: False)
    file = tmp_path / "r.json"
    arguments = ["bench", "--workload", "latency-256", "--json", file, "--resume"]
    assert command(*arguments)[0] == 3
    (lost,) = results.load(file).records
    assert (lost.implementation, lost.broken) == ("crashing", True)
    assert "the device was lost" in (lost.failed or "")
    assert command(*arguments)[0] == 1  # the rest is measured, and something is broken
    assert [one.implementation for one in results.load(file).records] == ["crashing", "right"]
    before = file.read_bytes()
    assert command(*arguments)[0] == 1
    assert [one.time for one in results.load(file).records] == [one["time"] for one in json.loads(before)["records"]]


def test_bench_blames_all_for_what_no_one_did(command, monkeypatch, tmp_path):
    def short_of_memory(*_: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(measure, "truth_of", short_of_memory)
    file = tmp_path / "r.json"
    arguments = ["--sweep", "latency", "--backends", "torch-reference,transformers"]
    assert command("bench", *arguments, "--json", file)[0] == 1
    assert [one.failed for one in results.load(file).records] == ["RuntimeError: out of memory"] * 4


def test_bench_keeps_what_it_has_when_interrupted(command, monkeypatch, tmp_path):
    plain = measure.Bench.measure

    def interrupted(self: measure.Bench, workload: workloads.Workload, *rest: Any) -> list[measure.Record]:
        if workload.name == "latency-256":
            raise KeyboardInterrupt
        return plain(self, workload, *rest)

    monkeypatch.setattr(measure.Bench, "measure", interrupted)
    file = tmp_path / "r.json"
    status, output, _ = command("bench", "--sweep", "latency", "--backends", "torch-reference", "--json", file)
    assert status == 130
    assert [one.name for one in results.load(file).workloads()] == ["latency"]
    assert report.seconds(results.load(file).records[0].time) in output


def test_bench_times_first_calls_before_the_workloads_and_once(command, monkeypatch, tmp_path):
    order: list[str] = []
    plain = measure.Bench.measure

    def first_calls(workload: workloads.Workload, missing: Any, *_: Any) -> list[fresh.FirstCall]:
        order.append("first calls")
        return [fresh.FirstCall(workload.name, one.name, 2.0, 0.5) for one in missing]

    def measured(self: measure.Bench, workload: workloads.Workload, *rest: Any) -> list[measure.Record]:
        order.append(workload.name)
        return plain(self, workload, *rest)

    monkeypatch.setattr(fresh, "first_calls", first_calls)
    monkeypatch.setattr(measure.Bench, "measure", measured)
    file = tmp_path / "r.json"
    arguments = ["--sweep", "latency", "--backends", "torch-reference", "--first-call", "--json", file, "--resume"]
    for _ in range(2):
        status, output, _ = command("bench", *arguments)
        assert status == 0
        assert re.search(r"torch-reference +latency +2.00 s +500 ms", output)
    assert order == ["first calls", "latency", "latency-256"]
    assert len(results.load(file).first_calls) == 1


def test_bench_begins_nothing_after_its_time(command, tmp_path):
    arguments = ["--sweep", "latency", "--backends", "torch-reference", "--seconds", "0"]
    status, _, errors = command("bench", *arguments, "--json", tmp_path / "r.json")
    assert (status, errors) == (1, "tilegym-mamba2: nothing was measured\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bench", "--workload", "headlin"], "no workload 'headlin'"),
        (["bench", "--sweep", "seqlne"], "no sweep 'seqlne'"),
        (["bench", "--backends", "cutlie"], "no backend or peer 'cutlie'"),
        (["bench", "--json", "/nowhere/r.json"], "there is no directory /nowhere"),
        (["bench", "--resume"], "--resume needs --json FILE"),
        (["report"], "no result files"),
        (["report", "/nowhere/r.json"], "/nowhere/r.json"),
        (["report", "--update", "/nowhere/README.md"], "/nowhere/README.md"),
    ],
)
def test_wrong_use_is_one_line(command, arguments, message):
    status, output, errors = command(*arguments)
    assert (status, output) == (2, "")
    assert message in errors
    assert errors.count("\n") == 1


def test_report_compares(command, tmp_path):
    for name, seconds in (("old", 1e-4), ("new", 1.2e-4)):
        results.save(run_of(record(time=seconds), record("b", time=2e-4)), tmp_path / f"{name}.json")
    status, output, _ = command("report", tmp_path / "new.json", "--against", tmp_path / "old.json")
    assert status == 1
    assert re.search(r"a +cutile +100 us +120 us +1.200 +5 % +slower", output)
    assert re.search(r"b +cutile +200 us +200 us +1.000 +5 % +the same", output)
    assert command("report", tmp_path / "old.json", "--against", tmp_path / "new.json")[0] == 0


def test_report_prints_markdown_and_updates_documents(command, tmp_path):
    results.save(run_of(record()), tmp_path / "r.json")
    document = tmp_path / "D.md"
    document.write_text("<!-- figures: time r.json a cutile --><!-- /figures -->")
    status, output, _ = command("report", tmp_path / "r.json", "--markdown", "--update", document)
    assert status == 0
    assert "| a | 4, 16384, 8, 64, 1, 128 | 40.0 us | 100 us (1.8e-03) | 40 % |" in output
    assert document.read_text() == "<!-- figures: time r.json a cutile -->100 us<!-- /figures -->"


# The scripts of bench


def test_h200_sh_measures_a_part(tmp_path):
    shim = tmp_path / "python"
    shim.write_text('#!/bin/sh\nprintf "%s " "$@" >>"$CALLS"\nexit $(cat "$CALLS.codes")\n')
    shim.chmod(0o755)
    calls = tmp_path / "calls"
    for code, times in ((0, 1), (3, 3)):
        calls.write_text("")
        (tmp_path / "calls.codes").write_text(str(code))
        environment = {**os.environ, "PYTHON": str(shim), "CALLS": str(calls), "SECONDS_AT_MOST": "1000"}
        done = subprocess.run([ROOT / "bench/h200.sh", tmp_path / "out", "grid"], env=environment, timeout=60)
        assert done.returncode == code
        assert (
            calls.read_text().count("bench --sweep dstate --backends cutile,triton,mamba_ssm,tilegym --resume") == times
        )
        subprocess.run([ROOT / "bench/h200.sh", tmp_path / "out", "slow"], env=environment, timeout=60)
        compared = "cutile,triton,torch-reference,torch.compile,transformers"
        assert calls.read_text().count(f"bench --sweep table --backends {compared} --resume --json") == times
        assert f"--json {tmp_path}/out/slow.json" in calls.read_text()
    assert subprocess.run([ROOT / "bench/h200.sh", tmp_path, "nothing"], stderr=subprocess.PIPE).returncode == 2


@pytest.mark.parametrize(
    ("part", "seconds", "called"),
    [
        ("transformers", 1000, "bench/transformers_models.py {out}/transformers.json --seconds 180"),
        ("transformers", 100, "bench/transformers_models.py {out}/transformers.json --seconds 100"),
        ("pytest", 1000, "-m pytest bench -q -rs"),
    ],
)
def test_h200_sh_runs_other_scripts(tmp_path, part, seconds, called):
    shim = tmp_path / "python"
    shim.write_text('#!/bin/sh\necho "$@"\nexit 5\n')
    shim.chmod(0o755)
    environment = {**os.environ, "PYTHON": str(shim), "SECONDS_AT_MOST": str(seconds)}
    command = [ROOT / "bench/h200.sh", tmp_path / "out", part]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 5
    lines = done.stdout.splitlines()
    if part == "pytest":
        assert (tmp_path / "out/pytest.txt").read_text() == done.stdout
        assert lines.pop(0) == "-m bench.about bench/h200.sh FOLDER pytest"
    assert len(lines) == 1
    assert lines[0].startswith(called.format(out=tmp_path / "out"))


def test_about_says_what_a_reader_needs_to_do_it_again():
    command = [sys.executable, "-m", "bench.about", "bench/h200_check.sh", "FOLDER", "a b"]
    environment = {**os.environ, "GIT_COMMIT": "abc"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=True)
    (line,) = done.stdout.splitlines()
    assert line.endswith("; revision abc; command: bench/h200_check.sh FOLDER 'a b'")
    assert f"torch {torch.__version__}" in line


def test_h200_sh_measures_first_calls_and_what_counts_first():
    (everything,) = re.findall(r"^    all\) what=(.*) ;;$", (ROOT / "bench/h200.sh").read_text(), re.MULTILINE)
    (table,) = re.findall(r"^table=(.*)$", (ROOT / "bench/h200.sh").read_text(), re.MULTILINE)
    named = re.findall(r"--([\w-]+)(?: (\w+))?", everything.replace("$table", table))
    assert named[:2] == [("first-call", ""), ("sweep", "table")]
    assert named.index(("sweep", "dtypes")) < named.index(("sweep", "models"))


def test_sweeps_of_h200_sh_exist():
    named = re.findall(r"--sweep (\w+)", (ROOT / "bench/h200.sh").read_text())
    assert set(named) <= set(workloads.SWEEPS)
    assert set(workloads.SWEEPS) - set(named) == {"seqlen"}  # which dstate contains


MEMCHECK = """========= COMPUTE-SANITIZER
========= Invalid __global__ {kind} of size 4 bytes
=========     at _kernel+0xdb0 in {file}.py:9
=========     by thread (128,0,0) in block (2,0,0)
========= ERROR SUMMARY: 130 errors
"""
CLEAN = "10 passed in 1.0s\n========= ERROR SUMMARY: 0 errors\n"


@pytest.mark.parametrize(
    ("packed", "checked", "control", "failed"),
    [
        (("atomic", "ours"), ("atomic", "control"), "0 failed, 4 passed", []),
        (("write", "ours"), ("atomic", "control"), "0 failed, 4 passed", ["memcheck-cutile-packed"]),
        (("atomic", "ours"), None, "0 failed, 4 passed", ["memcheck-cutile-packed"]),
        (("atomic", "ours"), ("atomic", "control"), "1 failed, 3 passed", ["control", "memcheck-cutile-packed"]),
        (None, ("atomic", "control"), "0 failed, 4 passed", []),
    ],
)
def test_what_the_control_gets_too_is_no_failure(monkeypatch, tmp_path, capsys, packed, checked, control, failed):
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    check_table = importlib.import_module("check_table")
    outputs = {"memcheck-triton": CLEAN, "memcheck-cutile-packed": CLEAN, "memcheck-control": CLEAN, "control": control}
    for name, found in (("memcheck-cutile-packed", packed), ("memcheck-control", checked)):
        if found is not None:
            outputs[name] = MEMCHECK.format(kind=found[0], file=found[1])
    for name, output in outputs.items():
        (tmp_path / f"{name}.txt").write_text(output)
    status = check_table.main([str(tmp_path / f"{name}.txt") for name in sorted(outputs)])
    printed = capsys.readouterr().out
    assert status == bool(failed)
    assert re.findall("FAILED (.*)", printed) == failed
    assert ("memcheck-cutile-packed: ERROR SUMMARY: 130 errors; toolchain" in printed) == (
        packed is not None and not failed
    )
    if packed:
        assert f"Invalid __global__ {packed[0]} of size 4 bytes: ours.py:9" in printed
    # A report on a backend that the toolchain of the control does not compile.
    (tmp_path / "memcheck-triton.txt").write_text(MEMCHECK.format(kind="atomic", file="ours"))
    assert check_table.main([str(tmp_path / f"{name}.txt") for name in sorted(outputs)]) == 1


# pytest-benchmark


def test_the_modules_of_bench_measure_and_keep_what_they_found(tmp_path):
    file = tmp_path / "b.json"
    chosen = "torch-reference-latency and (chunk_scan or cumsum)"
    command = [sys.executable, "-m", "pytest", "bench", "-q", "-k", chosen, f"--benchmark-json={file}"]
    # pytest-benchmark measures nothing in what it takes for a worker of pytest-xdist.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    found = json.loads(file.read_text())["benchmarks"]
    forward = [one for one in found if one["name"].startswith("test_mamba_chunk_scan")]
    assert [re.findall("there|back", one["name"]) for one in forward] == [["there"], ["back"]]
    for one in forward:
        info = one["extra_info"]
        assert info["time"] == pytest.approx(one["stats"]["median"])
        assert 0 < info["error_out"] < 2.5e-3
        assert info["fraction_of_limit"] == pytest.approx(info["limit"] / info["time"])
        assert info["teraflops"] == pytest.approx(info["flops"] / info["time"] / 1e12)
    stages = [one for one in found if "cumsum" in one["name"]]
    assert len(stages) == 6
    for one in stages:
        info = one["extra_info"]
        assert max(info["errors"]) <= 1e-5
        assert info["gigabytes_per_second"] == pytest.approx(info["bytes"] / one["stats"]["median"] / 1e9, rel=0.5)
