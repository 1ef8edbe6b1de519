"""Measures implementations on workloads: right first, then at the best chunk size, then in turn, there and back."""

import statistics
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from tilegym_mamba2.bench.peers import Implementation
from tilegym_mamba2.bench.timing import Call, Limits, Stopwatch, host_times, peak_memory, quick, synchronize
from tilegym_mamba2.bench.workloads import Inputs, Workload, cost_of, make_inputs, precision_of, rotated_inputs
from tilegym_mamba2.scan import mamba_chunk_scan_combined
from tilegym_mamba2.testing import budget, relative_error

_PROBE_SECONDS = 0.02
_PASS_SECONDS = 0.06
_BETTER = 0.97  # below this fraction of another's time a chunk size is really better
_NEARLY_BEST = 1.1  # up to this multiple of the best time a chunk size may be the best on another workload
_WHOLE_TRIALS = 2
_PEER_BUDGETS = 4  # a peer may be this many error budgets off; more is a wrong result, not a time
_TRUTH_BYTES = {"cuda": 2**33, "cpu": 2**30}


@dataclass(frozen=True)
class Record:
    """What was measured of one implementation on one workload; times in seconds, errors relative.

    Attributes:
        failed: why there is no time, else None.
        broken: it failed or was wrong at some chunk size that it does not refuse.
        chunk_size: the best of those in `chunk_times`.
        time: median of all replays, per call.
        passes: medians of the pass in order and the pass in reverse order.
        noise: how far the passes lie apart or the quartiles from the median, relative, whichever is more.
        host_time: of an eager call, from Python's call to its last launch: what a tenth of `host_calls` calls stay
            below. They are made in visits spread over the run, none waits for the device, and the first of each visit
            do not count.
        host_time_median: of the same calls.
        limit: the least time that the measured limits allow for the workload.
        heads_checked: on how many heads the errors were found.
    """

    workload: Workload
    implementation: str
    failed: str | None = None
    broken: bool = False
    chunk_size: int = 0
    chunk_times: dict[str, float] = field(default_factory=dict[str, float])
    chunk_failures: dict[str, str] = field(default_factory=dict[str, str])
    time: float = 0.0
    passes: tuple[float, ...] = ()
    noise: float = 0.0
    replays: int = 0
    calls_per_replay: int = 0
    method: str = ""
    host_time: float | None = None
    host_time_median: float | None = None
    host_calls: int = 0
    peak_memory: int | None = None
    error_out: float = 0.0
    error_final_states: float = 0.0
    heads_checked: int = 0
    flops: int = 0
    min_bytes: int = 0
    limit: float = 0.0

    def rates(self) -> dict[str, float]:
        """GB/s, TFLOP/s and the fraction of the limit."""
        if self.failed is not None:
            return {}
        return {
            "gigabytes_per_second": self.min_bytes / self.time / 1e9,
            "teraflops": self.flops / self.time / 1e12,
            "fraction_of_limit": self.limit / self.time,
        }

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), **self.rates()}


@dataclass(frozen=True)
class Truth:
    """The float64 result on the first heads."""

    heads: int
    out: torch.Tensor
    final_states: torch.Tensor

    def errors(self, result: tuple[torch.Tensor, torch.Tensor]) -> tuple[float, float]:
        """Relative errors of (out, final_states)."""
        out, final_states = result
        return (
            relative_error(out[:, :, : self.heads], self.out),
            relative_error(final_states[:, : self.heads], self.final_states),
        )


@dataclass
class Runner:
    """An implementation that is right on a workload, at its best chunk size, and what its stopwatch found so far."""

    implementation: Implementation
    chunk_size: int
    call: Call
    stopwatch: Stopwatch
    errors: tuple[float, float]
    chunk_times: dict[str, float] = field(default_factory=dict[str, float])
    chunk_failures: dict[str, str] = field(default_factory=dict[str, str])
    broken: bool = False
    passes: list[list[float]] = field(default_factory=list[list[float]])
    host_times: list[float] = field(default_factory=list[float])


class Bench:
    """Measures on one device.

    It remembers which chunk sizes were good: on the first two workloads of equal headdim, dstate and dtype all are
    tried, later those that came near the best on one of the two. What differs in name alone is measured once.

    Attributes:
        spent: seconds by workload, by what they were spent on: an implementation's name is for compiling, tuning and
            trying chunk sizes.
    """

    def __init__(self, device: torch.device, limits: Limits, spent: dict[str, dict[str, float]] | None = None):
        self.device = device
        self.limits = limits
        self.spent = {} if spent is None else spent
        self._good_chunk_sizes: dict[tuple[Any, ...], list[set[int]]] = {}
        self._measured: dict[tuple[Workload, str], Record] = {}
        self._host_times: dict[tuple[Workload, str], list[float]] = {}

    def measure(
        self,
        workload: Workload,
        implementations: Sequence[Implementation],
        progress: Callable[[str], None] = lambda doing: None,
    ) -> list[Record]:
        """Measures every implementation, each at its best chunk size, or says why it can't be.

        Raises DeviceLostError if one leaves the device unusable: this process can measure nothing more on it.
        """
        if self.device.type == "cpu":
            workload = workload.small()
        same = replace(workload, name="")
        missing = [one for one in implementations if (same, one.name) not in self._measured]
        if missing:
            with precision_of(workload):
                for record in self._measure(workload, missing, progress):
                    self._measured[same, record.implementation] = record
        return [replace(self._measured[same, one.name], workload=workload) for one in implementations]

    def host_again(self, workload: Workload, implementations: Sequence[Implementation]) -> None:
        """Adds calls to the host times that this object measured on a workload: `latest` has them."""
        same = replace(workload, name="")
        timed = [one for one in implementations if (same, one.name) in self._host_times]
        if not timed:
            return
        inputs = make_inputs(workload, self.device, seed=0)
        with precision_of(workload):
            for one in timed:
                record = self._measured[same, one.name]
                times = self._host_times[same, one.name]
                times += host_times(one.bind(inputs, record.chunk_size), self.device)
                self._measured[same, one.name] = replace(record, **_host(times))

    def latest(self, record: Record) -> Record:
        """A record that this object made, with all that is known of its host time."""
        known = self._measured.get((replace(record.workload, name=""), record.implementation))
        return record if known is None else replace(known, workload=record.workload)

    def _measure(
        self, workload: Workload, implementations: Sequence[Implementation], progress: Callable[[str], None]
    ) -> list[Record]:
        progress(f"{workload.name}: float64")
        with self._counted(workload, "inputs and float64"):
            rotated = rotated_inputs(workload, self.device)
            truth = truth_of(rotated[0])
            synchronize(self.device)
        failures: dict[str, UnmeasuredError] = {}
        runners: list[Runner] = []
        for implementation in implementations:
            progress(f"{workload.name}: {implementation.name}")
            with self._counted(workload, implementation.name):
                try:
                    runners.append(self.prepare(workload, implementation, rotated, truth))
                except UnmeasuredError as error:
                    failures[implementation.name] = error
        progress(f"{workload.name}: timing")
        with self._counted(workload, "timing"):
            for order in (runners, runners[::-1]):
                for runner in order:
                    runner.passes.append(runner.stopwatch.replays_for(_PASS_SECONDS))
        with self._counted(workload, "host time and memory"):
            if self.device.type == "cuda":
                for runner in (*runners, *runners[::-1]):
                    runner.host_times += host_times(runner.call, self.device)
                    self._host_times[replace(workload, name=""), runner.implementation.name] = runner.host_times
            done = {runner.implementation.name: self.record(workload, rotated[0], truth, runner) for runner in runners}
        for name, error in failures.items():
            done[name] = Record(workload, name, failed=str(error), broken=error.broken)
        return [done[implementation.name] for implementation in implementations]

    @contextmanager
    def _counted(self, workload: Workload, what: str) -> Generator[None]:
        begun = time.perf_counter()
        yield
        self.spent.setdefault(workload.name, {})[what] = round(time.perf_counter() - begun, 2)

    def prepare(
        self, workload: Workload, implementation: Implementation, rotated: Sequence[Inputs], truth: Truth
    ) -> Runner:
        """Finds the best chunk size of those that give a right result. Raises UnmeasuredError if there is none."""
        reason = implementation.why_not(workload, self.device)
        if reason is not None:
            raise UnmeasuredError(reason, broken=False)
        best: Runner | None = None
        times: dict[str, float] = {}
        failures: dict[str, str] = {}
        broken = False
        alike = (implementation.name, workload.headdim, workload.dstate, workload.dtype, workload.precision)
        good = self._good_chunk_sizes.setdefault(alike, [])
        for chunk_size in implementation.chunk_sizes:
            if len(good) >= _WHOLE_TRIALS and not any(chunk_size in sizes for sizes in good):
                continue
            try:
                runner = self._runner(workload, implementation, chunk_size, rotated, truth)
                times[str(chunk_size)] = statistics.median(runner.stopwatch.replays_for(_PROBE_SECONDS))
            except Exception as error:  # the reason is kept, and the other chunk sizes still count
                broken = broken or not isinstance(error, NotImplementedError)
                failures[str(chunk_size)] = one_line(error)
                if not is_usable(self.device):
                    raise DeviceLostError(implementation.name, f"{one_line(error)}; the device was lost") from error
                continue
            if best is None or times[str(chunk_size)] < _BETTER * times[str(best.chunk_size)]:
                best = runner
        if best is None:
            reasons = "; ".join(f"chunk size {size}: {reason}" for size, reason in failures.items())
            raise UnmeasuredError(reasons, broken)
        best.chunk_times, best.chunk_failures, best.broken = times, failures, broken
        least = min(times.values())
        good.append({int(size) for size, seconds in times.items() if seconds <= _NEARLY_BEST * least})
        return best

    def _runner(
        self,
        workload: Workload,
        implementation: Implementation,
        chunk_size: int,
        rotated: Sequence[Inputs],
        truth: Truth,
    ) -> Runner:
        calls = [implementation.bind(inputs, chunk_size) for inputs in rotated]
        stopwatch = Stopwatch(calls, self.device, implementation.capturable(workload))
        errors = truth.errors(stopwatch.results[0])
        allowed = budget(rotated[0]["x"].dtype) * (_PEER_BUDGETS if implementation.peer else 1)
        if not max(errors) <= allowed:
            raise WrongResultError(f"errors {errors[0]:.1e} and {errors[1]:.1e}, more than {allowed:.1e}")
        return Runner(implementation, chunk_size, calls[0], stopwatch, errors)

    def record(self, workload: Workload, inputs: Inputs, truth: Truth, runner: Runner) -> Record:
        """What a runner's passes come to."""
        cost = cost_of(inputs)
        replays = [seconds for single in runner.passes for seconds in single]
        passes = [statistics.median(single) for single in runner.passes]
        on_gpu = self.device.type == "cuda"
        return Record(
            workload,
            runner.implementation.name,
            broken=runner.broken,
            chunk_size=runner.chunk_size,
            chunk_times=runner.chunk_times,
            chunk_failures=runner.chunk_failures,
            time=statistics.median(replays),
            passes=tuple(passes),
            noise=noise(passes, replays),
            replays=len(replays),
            calls_per_replay=runner.stopwatch.calls,
            method=runner.stopwatch.method,
            **(_host(runner.host_times or host_times(runner.call, self.device)) if on_gpu else {}),
            peak_memory=peak_memory(runner.call, self.device) if on_gpu else None,
            error_out=runner.errors[0],
            error_final_states=runner.errors[1],
            heads_checked=truth.heads,
            flops=cost.flops,
            min_bytes=cost.min_bytes,
            limit=self.limits.seconds(cost.flops, cost.min_bytes),
        )


def _host(times: Sequence[float]) -> dict[str, Any]:
    """A record's fields of host time."""
    return {"host_time": quick(times), "host_time_median": statistics.median(times), "host_calls": len(times)}


def is_usable(device: torch.device) -> bool:
    """Whether this process can still run something on the device; after an illegal access it can't."""
    try:
        synchronize(device)
    except RuntimeError:
        return False
    return True


def one_line(error: Exception) -> str:
    """An exception's type and the beginning of its text."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


class WrongResultError(AssertionError):
    """A result is further from the float64 one than it may be: there is nothing to time."""


class DeviceLostError(Exception):
    """An implementation failed in a way that leaves the device unusable for this process, an illegal access say."""

    def __init__(self, implementation: str, reason: str):
        super().__init__(reason)
        self.implementation = implementation


class UnmeasuredError(Exception):
    """Why an implementation has no time on a workload."""

    def __init__(self, reason: str, broken: bool):
        super().__init__(reason)
        self.broken = broken


def noise(passes: Sequence[float], replays: Sequence[float]) -> float:
    """How far passes lie apart, or quartiles from the median, relative to it, whichever is more."""
    median = statistics.median(replays)
    low, _, high = statistics.quantiles(replays, n=4)
    return max(max(passes) - min(passes), (high - low) / 2) / median


def truth_of(inputs: Inputs) -> Truth:
    """Computes the forward in float64 by torch-reference, on as many heads as fit in part of the memory."""
    x, B = inputs["x"], inputs["B"]
    batch, seqlen, nheads, headdim = x.shape
    ngroups, dstate = B.shape[2:]
    # x, out and work of their size, and the state at every chunk of 64 tokens
    per_head = 8 * batch * seqlen * headdim * (4 + dstate // 64)
    fitting = max(1, _TRUTH_BYTES[x.device.type] // per_head)
    per_group = nheads // ngroups
    # Whole groups, so that heads still find theirs; of one that is too large, some of its heads.
    heads = nheads if fitting >= nheads else min(fitting, max(1, fitting // per_group) * per_group)
    groups = max(1, heads // per_group)
    per_head_dimension = {"x": 2, "dt": 2, "A": 0, "D": 0, "z": 2, "dt_bias": 0, "initial_states": 1}
    part: Inputs = dict(inputs)
    for name, dim in per_head_dimension.items():
        if inputs.get(name) is not None:
            part[name] = inputs[name].narrow(dim, 0, heads).double()
    for name in ("B", "C"):
        part[name] = inputs[name][:, :, :groups].double()
    result = mamba_chunk_scan_combined(**part, chunk_size=64, return_final_states=True, backend="torch-reference")
    return Truth(heads, result[0], result[1])
