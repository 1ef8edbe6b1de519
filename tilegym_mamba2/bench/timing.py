"""How calls are timed: on a GPU the device's time, by replays of a CUDA graph; elsewhere the wall clock.

`Stopwatch` times calls over rotated inputs. What goes into the graph is as many calls as there are inputs, or a
multiple of that if calls are short, so that the time between two replays does not count.
"""

import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tilegym_mamba2.registry import no_collection

Call = Callable[[], Any]

_SHORT = 2e-3
_LEAST_SHORT_CALLS = 8
_COPIED_BYTES = {"cuda": 2**30, "cpu": 2**26}
_MATRIX_SIZE = {"cuda": 8192, "cpu": 512}
_HOST_WARM_UP, _HOST_BATCH = 3, 4
_MOST_HOST_CALLS, _HOST_SECONDS = 40, 0.1
_LEAST_REPLAYS, _MOST_REPLAYS = 5, 300


@dataclass(frozen=True)
class Limits:
    """What the device reaches on plain work: bytes read plus written in a copy, and a matrix product's operations."""

    bytes_per_second: float
    flops_per_second: float

    def seconds(self, flops: float, nbytes: float) -> float:
        """The least time of such work."""
        return max(nbytes / self.bytes_per_second, flops / self.flops_per_second)


class Stopwatch:
    """Times calls that do the same on different inputs.

    Attributes:
        method: how, in words.
        calls: in one replay.
        results: of the last replay, one per input.
    """

    def __init__(self, rotated: Sequence[Call], device: torch.device, capturable: bool = True):
        self._device = device
        for call in rotated:
            call()
        seconds = _first_estimate(rotated[0], device)
        rounds = math.ceil(_LEAST_SHORT_CALLS / len(rotated)) if seconds < _SHORT else 1
        self.calls = rounds * len(rotated)
        # Kept, so that outputs rotate as inputs do.
        self.results: list[Any] = [None] * len(rotated)

        def replay() -> None:
            for index in range(self.calls):
                self.results[index % len(rotated)] = rotated[index % len(rotated)]()

        if device.type != "cuda":
            self._replay, self.method = replay, "wall clock"
        elif not capturable:
            self._replay, self.method = replay, "device time of eager calls"
        else:
            graph = torch.cuda.CUDAGraph()
            # What is collected may call the driver, which can end a capture: kernels of cuTile, of which a search
            # leaves many, unload themselves.
            with no_collection(), torch.cuda.graph(graph):
                replay()
            self._replay, self.method = graph.replay, "device time of a CUDA graph"
        self._replay()

    def replays(self, number: int) -> list[float]:
        """Seconds per call of each of so many replays, one right after the other."""
        if self._device.type != "cuda":
            return [_wall_time(self._replay) / self.calls for _ in range(number)]
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(number + 1)]
        torch.cuda.synchronize()
        marks[0].record()
        for mark in marks[1:]:
            self._replay()
            mark.record()
        torch.cuda.synchronize()
        milliseconds = [start.elapsed_time(stop) for start, stop in itertools.pairwise(marks)]
        return [value / 1e3 / self.calls for value in milliseconds]

    def replays_for(self, seconds: float) -> list[float]:
        """As `replays`, as many as fit in a time, within reason."""
        (first,) = self.replays(1)
        number = int(seconds / max(first * self.calls, 1e-9))
        return self.replays(min(max(number, _LEAST_REPLAYS), _MOST_REPLAYS))


def _wall_time(call: Call) -> float:
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


def _first_estimate(call: Call, device: torch.device) -> float:
    synchronize(device)

    def complete() -> None:
        call()
        synchronize(device)

    return _wall_time(complete)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def host_times(call: Call, device: torch.device) -> list[float]:
    """Seconds from each of some eager calls to its last launch.

    The first few do not count: they may allocate. The device is waited for before every fourth of the others, so that
    its queue of launches is never full, and no call waits for it.
    """
    for _ in range(_HOST_WARM_UP):
        call()
    times: list[float] = []
    begun = time.perf_counter()
    while len(times) < _MOST_HOST_CALLS and (not times or time.perf_counter() - begun < _HOST_SECONDS):
        synchronize(device)
        times += [_wall_time(call) for _ in range(_HOST_BATCH)]
    synchronize(device)
    return times


def quick(times: Sequence[float]) -> float:
    """What a tenth of some times stay below: what a call costs, while nothing else wants the processor."""
    return statistics.quantiles(times, n=10, method="inclusive")[0]


def peak_memory(call: Call, device: torch.device) -> int:
    """Most bytes that one call holds on a GPU beyond what is there before, its outputs included."""
    synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    call()
    synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def measure_limits(device: torch.device) -> Limits:
    """Measures copy bandwidth, and the rate of a square matrix product in bfloat16 (on a CPU float32)."""
    source = torch.randint(-(2**31), 2**31, (_COPIED_BYTES[device.type] // 8,), device=device, dtype=torch.int64)
    target = torch.empty_like(source)
    # In a CUDA graph copy_ is a copy node, which reached 2.8 TB/s on an H200: too low for a limit; the kernel of a
    # pointwise operation moves as many bytes.
    ways: list[Call] = [lambda: target.copy_(source), lambda: torch.neg(source, out=target)]
    copy = min(statistics.median(Stopwatch([way], device).replays_for(0.1)) for way in ways)
    size = _MATRIX_SIZE[device.type]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    product = statistics.median(Stopwatch([lambda: left @ right], device).replays_for(0.1))
    return Limits(2 * source.nbytes / copy, 2 * size**3 / product)
