"""What is done in fresh processes: the time of a first call, and compiling ahead of the measurements, in parallel.

    python -m tilegym_mamba2.bench.fresh IMPLEMENTATION CHUNK_SIZE WORKLOAD...

calls the implementation once on each workload and prints the seconds of each call as a JSON list, null for one that
failed. Starting Python, importing torch, starting the device and making inputs do not count; all else does.
"""

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

import torch

from tilegym_mamba2.bench.peers import Implementation, find_implementation
from tilegym_mamba2.bench.timing import synchronize
from tilegym_mamba2.bench.workloads import Workload, find_workload, make_inputs, precision_of

# Where this package, cuTile, Triton and torch.compile keep what they compiled.
_CACHES = ("XDG_CACHE_HOME", "CUDA_TILE_CACHE_DIR", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
_SECONDS_AT_MOST = 240.0
_WORKLOADS_AT_MOST = 6  # of one task of a backend of this package

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
        # A session of its own, so that the compilers that it starts are ended with it.
        output = ""
        process = subprocess.Popen(
            command,
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        _running.add(process)
        try:
            output, _ = process.communicate(timeout=seconds_at_most)
        except subprocess.TimeoutExpired:
            _end(process)
            process.communicate()
        finally:
            _running.discard(process)
        if process.returncode != 0:
            return [None] * len(self.workloads)
        return cast(list[float | None], json.loads(output.splitlines()[-1]))


_running: set["subprocess.Popen[str]"] = set()


def _end(process: "subprocess.Popen[str]") -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def first_calls(
    workload: Workload,
    implementations: Sequence[Implementation],
    device: torch.device,
    seconds: float = _SECONDS_AT_MOST,
) -> list[FirstCall]:
    """Measures all at once, each with a processor of its own to compile on, at its first chunk size.

    What is not done after so many seconds is None.
    """
    deadline = time.monotonic() + seconds

    def measure(implementation: Implementation) -> FirstCall:
        task = Task(implementation.name, implementation.chunk_sizes[0], (workload.name,))
        with tempfile.TemporaryDirectory() as folder:
            empty = {name: os.path.join(folder, name) for name in _CACHES}
            (cold,) = task.run(empty, deadline - time.monotonic())
            (warm,) = task.run(empty, deadline - time.monotonic()) if cold is not None else (None,)
        return FirstCall(workload.name, implementation.name, cold, warm)

    return list(_in_parallel(measure, [one for one in implementations if one.why_not(workload, device) is None]))


def compile_ahead(
    workloads: Sequence[Workload],
    implementations: Sequence[Implementation],
    device: torch.device,
    progress: Callable[[str], None] = lambda doing: None,
    seconds: float = _SECONDS_AT_MOST,
) -> dict[str, float]:
    """Fills the caches on disk, so that measuring waits for no compiler. What fails here is found again there.

    What is not done after so many seconds is given up. Returns the seconds of each task.
    """
    tasks = compile_tasks(workloads, implementations, device)
    deadline = time.monotonic() + seconds

    def run(task: Task) -> float:
        begun = time.monotonic()
        if begun < deadline:
            task.run({}, deadline - begun)
        return round(time.monotonic() - begun, 1)

    spent: dict[str, float] = {}
    for task, taken in zip(tasks, _in_parallel(run, tasks), strict=True):
        spent[f"{task.implementation} {task.chunk_size} {','.join(task.workloads)}"] = taken
        progress(f"compiling ahead: {len(spent)}/{len(tasks)}")
    return spent


def compile_tasks(
    workloads: Sequence[Workload], implementations: Sequence[Implementation], device: torch.device
) -> list[Task]:
    """One task for calls that a compiler, or a search for configurations, shares work between; the longest first.

    They are those of peers, which compile many configurations.
    """
    groups: dict[Any, dict[Any, str]] = {}
    for one, workload in itertools.product(implementations, workloads):
        if one.why_not(workload, device) is None:
            for chunk_size in one.chunk_sizes:
                kind = (workload.headdim, workload.dstate, workload.dtype, workload.precision, bool(workload.lengths))
                group = groups.setdefault((one, chunk_size, kind, workload.model is not None), {})
                group.setdefault(_compiled_alike(workload, one, chunk_size), workload.name)
    tasks: list[Task] = []
    for (one, chunk_size, *_), group in groups.items():
        names = tuple(group.values())
        size = len(names) if one.peer else _WORKLOADS_AT_MOST
        tasks += [Task(one.name, chunk_size, names[first : first + size]) for first in range(0, len(names), size)]
    peers = {one.name for one in implementations if one.peer}
    return sorted(tasks, key=lambda task: (task.implementation not in peers, -len(task.workloads)))


def _in_parallel(function: Callable[[_Item], _Result], items: Sequence[_Item]) -> Generator[_Result]:
    """Results in order; when the caller stops, what runs is ended and the rest never begins."""
    pool = ThreadPoolExecutor(os.cpu_count())
    try:
        yield from pool.map(function, items)
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in tuple(_running):
            _end(process)
        raise
    finally:
        pool.shutdown()


def _compiled_alike(workload: Workload, one: Implementation, chunk_size: int) -> Any:
    """What a compiler may specialise on besides what a task has in common."""
    if not one.peer:  # this package's backends may launch other kernels for every size, and are quick to compile
        return replace(workload, name="")
    ratio = workload.nheads // workload.ngroups
    sizes = (workload.batch, workload.seqlen // chunk_size, workload.nheads, workload.ngroups, ratio)
    alike = tuple((size == 1, size % 16 == 0) for size in sizes)
    return (alike, ratio) if one.searches_every_shape else alike


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
            with precision_of(workload):
                find_implementation(name).bind(inputs, int(chunk_size))()
                synchronize(device)
            seconds.append(time.perf_counter() - begun)
        except Exception:  # compilers have their own; the other workloads still count
            seconds.append(None)
    sys.stdout.write(json.dumps(seconds) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
