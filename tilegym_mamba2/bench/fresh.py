"""What is done in fresh processes: the time of a first call, and compiling ahead of the measurements, in parallel.

    python -m tilegym_mamba2.bench.fresh IMPLEMENTATION CHUNK_SIZE WORKLOAD...

calls the implementation once on each workload and prints the seconds of each call as a JSON list, null for one that
failed. Starting Python, importing torch, starting the device and making inputs do not count; all else does.
"""

import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch

from tilegym_mamba2.bench.peers import Implementation, find_implementation
from tilegym_mamba2.bench.timing import synchronize
from tilegym_mamba2.bench.workloads import Workload, find_workload, make_inputs

# Where this package, cuTile, Triton and torch.compile keep what they compiled.
_CACHES = ("XDG_CACHE_HOME", "CUDA_TILE_CACHE_DIR", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
_SECONDS_AT_MOST = 240.0

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class FirstCall:
    """Seconds of the first call in a process: with nothing compiled, and in a later process; None if it failed."""

    workload: str
    implementation: str
    cold: float | None
    warm: float | None


@dataclass(frozen=True)
class Task:
    """Calls of one implementation in one process."""

    implementation: str
    chunk_size: int
    workloads: tuple[str, ...]

    def run(self, environment: Mapping[str, str], seconds_at_most: float = _SECONDS_AT_MOST) -> list[float | None]:
        """Seconds of each call, None for what failed or came too late."""
        command = [sys.executable, "-m", __name__, self.implementation, str(self.chunk_size), *self.workloads]
        try:
            done = subprocess.run(
                command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=seconds_at_most
            )
        except subprocess.TimeoutExpired:
            return [None] * len(self.workloads)
        lines = done.stdout.splitlines()
        return cast(list[float | None], json.loads(lines[-1])) if done.returncode == 0 else [None] * len(self.workloads)


def first_calls(workload: Workload, implementations: Sequence[Implementation], device: torch.device) -> list[FirstCall]:
    """Measures all at once, each with a processor of its own to compile on, at its first chunk size."""

    def measure(implementation: Implementation) -> FirstCall:
        task = Task(implementation.name, implementation.chunk_sizes[0], (workload.name,))
        with tempfile.TemporaryDirectory() as folder:
            empty = {name: os.path.join(folder, name) for name in _CACHES}
            (cold,) = task.run(empty)
            (warm,) = task.run(empty) if cold is not None else (None,)
        return FirstCall(workload.name, implementation.name, cold, warm)

    return list(_in_parallel(measure, [one for one in implementations if one.why_not(workload, device) is None]))


def compile_ahead(
    workloads: Sequence[Workload],
    implementations: Sequence[Implementation],
    device: torch.device,
    progress: Callable[[str], None] = lambda doing: None,
) -> None:
    """Fills the caches on disk, so that measuring waits for no compiler. What fails here is found again there."""
    tasks = compile_tasks(workloads, implementations, device)
    for number, _ in enumerate(_in_parallel(lambda task: task.run({}), tasks)):
        progress(f"compiling ahead: {number + 1}/{len(tasks)}")


def compile_tasks(
    workloads: Sequence[Workload], implementations: Sequence[Implementation], device: torch.device
) -> list[Task]:
    """One task for calls that a compiler shares work between: of one chunk size, headdim and dstate."""
    groups: dict[Any, dict[Any, str]] = {}
    for workload, one in itertools.product(workloads, implementations):
        if one.why_not(workload, device) is None:
            for chunk_size in one.chunk_sizes:
                # This package's backends may launch other kernels for every size, and are quick to compile.
                alike = _compiled_alike(workload, chunk_size) if one.peer else workload.name
                searched = (alike,) if one.searches_every_shape else ()
                group = groups.setdefault((one.name, chunk_size, workload.headdim, workload.dstate, *searched), {})
                group.setdefault(alike, workload.name)
    return [Task(name, chunk_size, tuple(group.values())) for (name, chunk_size, *_), group in groups.items()]


def _in_parallel(function: Callable[[_Item], _Result], items: Sequence[_Item]) -> Iterator[_Result]:
    """Results in order; what has not begun when the caller stops never will."""
    pool = ThreadPoolExecutor(os.cpu_count())
    try:
        yield from pool.map(function, items)
    finally:
        pool.shutdown(cancel_futures=True)


def _compiled_alike(workload: Workload, chunk_size: int) -> Any:
    """What a compiler may specialise on besides headdim and dstate: sizes that are 1 or multiples of 16."""
    sizes = (workload.batch, workload.seqlen // chunk_size, workload.nheads, workload.ngroups)
    return workload.model, bool(workload.lengths), *((size == 1, size % 16 == 0) for size in sizes)


def main(arguments: Sequence[str]) -> None:
    name, chunk_size, *workloads = arguments
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.zeros(1, device=device)
    seconds: list[float | None] = []
    for workload in map(find_workload, workloads):
        inputs = make_inputs(workload.small() if device.type == "cpu" else workload, device, seed=0)
        synchronize(device)
        begun = time.perf_counter()
        try:
            find_implementation(name).bind(inputs, int(chunk_size))()
            synchronize(device)
            seconds.append(time.perf_counter() - begun)
        except Exception:  # compilers have their own; the other workloads still count
            seconds.append(None)
    sys.stdout.write(json.dumps(seconds) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
