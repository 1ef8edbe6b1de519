"""How long a call takes: device time by replaying a CUDA graph, or the clock on the CPU."""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from tilegym_mamba2.bench.timing import Stopwatch
from tilegym_mamba2.bench.workloads import copies_beyond

Arguments = Mapping[str, Any]

_MOST_CALLS = 7
_SECONDS_PER_BACKEND = 3.0
_REPLAYS = 20


@dataclass(frozen=True)
class Timing:
    """The median time of one call, and how it was found."""

    seconds: float
    method: str


def measure(function: Callable[[Arguments], Any], arguments: Arguments, device: torch.device) -> tuple[Any, Timing]:
    """Calls `function(arguments)`: its result, and its time without that of first calls."""
    if device.type == "cuda":
        result = function(arguments)
        return result, _device_time(function, arguments, device)
    return _wall_time(function, arguments)


def _wall_time(function: Callable[[Arguments], Any], arguments: Arguments) -> tuple[Any, Timing]:
    """The caller has called it before, if with fewer tokens."""
    result: Any = None
    times: list[float] = []
    begun = time.perf_counter()
    while not times or (len(times) < _MOST_CALLS and time.perf_counter() - begun < _SECONDS_PER_BACKEND):
        start = time.perf_counter()
        result = function(arguments)
        times.append(time.perf_counter() - start)
    method = f"median of {len(times)} calls" if len(times) > 1 else "one call"
    return result, Timing(statistics.median(times), method)


def once(function: Callable[[Arguments], Any], arguments: Arguments) -> float:
    """Seconds that one call takes by the clock, on the CPU."""
    start = time.perf_counter()
    function(arguments)
    return time.perf_counter() - start


def _device_time(function: Callable[[Arguments], Any], arguments: Arguments, device: torch.device) -> Timing:
    """Inputs are rotated over copies that exceed the L2 cache, as in a model, where other layers ran in between."""
    rotated = [arguments, *(copy_of(arguments) for _ in range(_copies(arguments)))]
    calls = [partial(function, one) for one in rotated]
    try:
        watch = Stopwatch(calls, device)
    except RuntimeError:  # not every third party's backend can be captured in a graph
        watch = Stopwatch(calls, device, capturable=False)
    return Timing(statistics.median(watch.replays(_REPLAYS)), f"{watch.method} over {len(rotated)} rotated inputs")


def _copies(arguments: Arguments) -> int:
    size = sum(storage.nbytes() for storage in _storages(arguments).values())
    cache = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
    free, _ = torch.cuda.mem_get_info()
    return min(copies_beyond(cache, arguments) - 1, free // 4 // max(size, 1))


def copy_of(arguments: Arguments) -> dict[str, Any]:
    """The arguments with their tensors copied, strides and shared storage kept."""
    storages = {key: storage.clone() for key, storage in _storages(arguments).items()}
    copies = dict(arguments)
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor):
            storage = storages[value.untyped_storage().data_ptr()]
            empty = torch.empty(0, dtype=value.dtype, device=value.device)
            copies[name] = empty.set_(storage, value.storage_offset(), value.size(), value.stride())
    return copies


def _storages(arguments: Arguments) -> dict[int, torch.UntypedStorage]:
    tensors = [value for value in arguments.values() if isinstance(value, torch.Tensor)]
    return {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}
