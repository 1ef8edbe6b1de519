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
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

import torch

from tilegym_mamba2.bench.peers import Implementation, find_implementation
from tilegym_mamba2.bench.timing import synchronize
from tilegym_mamba2.bench.workloads import Workload, find_workload, make_inputs, precision_of

# Where this package, cuTile, Triton, torch.compile and the driver keep what they found and compiled.
_CACHES = (
    "TILEGYM_MAMBA2_CACHE", "XDG_CACHE_HOME", "CUDA_TILE_CACHE_DIR", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR",
    "CUDA_CACHE_PATH",
)  # fmt: skip
_SECONDS_AT_MOST = 240.0
_ALONE = {"TORCHINDUCTOR_COMPILE_THREADS": "1"}  # there are as many processes as processors
_START_SECONDS = 15.0  # in which a process is sure to have made its inputs

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class FirstCall:
    """Seconds of the first call in a process: with nothing compiled, and in a later process; None if it failed.

    Attributes:
        given_up_after: seconds for which the call that is None was waited for, if it did not end by then.
    """

    workload: str
    implementation: str
    cold: float | None
    warm: float | None
    given_up_after: float | None = None


@dataclass(frozen=True)
class Task:
    """Calls of one implementation in one process, which are expected to take about so many seconds."""

    implementation: str
    chunk_size: int
    workloads: tuple[str, ...]
    expected: float = 0.0

    def run(self, environment: Mapping[str, str], seconds_at_most: float = _SECONDS_AT_MOST) -> list[float | None]:
        """Seconds of each call, None for what failed or came too late."""
        command = [sys.executable, "-m", __name__, self.implementation, str(self.chunk_size), *self.workloads]
        # A session of its own, so that the compilers that it starts are ended with it.
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
            # One that ended just then, by itself, has said all that it had to say.
            output, _ = process.communicate()
        finally:
            _running.discard(process)
        lines = output.splitlines()
        if process.returncode != 0 or not lines:
            return [None] * len(self.workloads)
        return cast(list[float | None], json.loads(lines[-1]))


_running: set["subprocess.Popen[str]"] = set()


def _end(process: "subprocess.Popen[str]") -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def first_calls(
    workload: Workload,
    implementations: Sequence[Implementation],
    device: torch.device,
    seconds: float = 60.0,
) -> list[FirstCall]:
    """Measures first calls at the first chunk size: of this package's backends at once, then of peers at once.

    Each has a processor of its own to compile on. A call that takes longer than so many seconds is given up.
    """

    def measure(implementation: Implementation) -> FirstCall:
        task = Task(implementation.name, implementation.chunk_sizes[0], (workload.name,))
        found: list[float | None] = []
        begun = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            empty = {name: os.path.join(folder, name) for name in _CACHES}
            while len(found) < 2 and None not in found:
                begun = time.monotonic()
                found += task.run(empty, seconds + _START_SECONDS)
        late = None in found and time.monotonic() - begun >= seconds + _START_SECONDS
        cold, warm = [*found, None][:2]
        return FirstCall(workload.name, implementation.name, cold, warm, seconds if late else None)

    able = [one for one in implementations if one.why_not(workload, device) is None]
    turns = [one for one in able if not one.peer], [one for one in able if one.peer]
    done = {call.implementation: call for turn in turns for call in _in_parallel(measure, turn)}
    return [done[one.name] for one in able]


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
            task.run(_ALONE, deadline - begun)
        return round(time.monotonic() - begun, 1)

    spent: dict[str, float] = {}
    for task, taken in zip(tasks, _in_parallel(run, tasks), strict=True):
        spent[f"{task.implementation} {task.chunk_size} {','.join(task.workloads)}"] = taken
        progress(f"compiling ahead: {len(spent)}/{len(tasks)}")
    return spent


def compile_tasks(
    workloads: Sequence[Workload], implementations: Sequence[Implementation], device: torch.device
) -> list[Task]:
    """Tasks of few calls, those together that a compiler shares work between; the longest, as expected, first."""
    groups: dict[Any, dict[Any, str]] = {}
    for one, workload in itertools.product(implementations, workloads):
        if one.compiles and one.why_not(workload, device) is None:
            for chunk_size in one.chunk_sizes:
                kind = (workload.headdim, workload.dstate, workload.dtype, workload.precision, bool(workload.lengths))
                group = groups.setdefault((one, chunk_size, kind, workload.model is not None), {})
                group.setdefault(_compiled_alike(workload, one, chunk_size), workload.name)
    tasks: list[Task] = []
    for (one, chunk_size, kind, _), group in groups.items():
        names = tuple(group.values())
        size, fixed, each = _size_and_seconds(one, plain=kind[2] == "bfloat16")
        parts = [names[first : first + size] for first in range(0, len(names), size)]
        tasks += [Task(one.name, chunk_size, part, fixed + each * len(part)) for part in parts]
    return sorted(tasks, key=lambda task: -task.expected)


def _size_and_seconds(one: Implementation, plain: bool) -> tuple[int, float, float]:
    """How many workloads a task has at most, and about how long it takes, besides how long each of them does.

    `plain` is bfloat16, which all compile quickest.
    """
    if one.searches_every_shape:
        return (3, 5.0, 8.0) if plain else (1, 5.0, 40.0)
    if one.compiles_every_shape:
        return 1, 60.0, 0.0
    if one.peer:
        return 1000, 30.0, 1.0
    return (6, 5.0, 2.0) if plain else (2, 5.0, 12.0)


def _in_parallel(function: Callable[[_Item], _Result], items: Sequence[_Item]) -> Generator[_Result]:
    """Results in order; when the caller stops, what runs is ended and the rest never begins."""
    pool = ThreadPoolExecutor(os.cpu_count())
    futures = [pool.submit(function, item) for item in items]
    try:
        for future in futures:
            yield future.result()
    except BaseException:
        for future in futures:
            future.cancel()
        # Until none is left: a thread may have been about to start its process.
        while wait(futures, timeout=0.1).not_done:
            for process in tuple(_running):
                _end(process)
        raise
    finally:
        pool.shutdown()


def _compiled_alike(workload: Workload, one: Implementation, chunk_size: int) -> Any:
    """What a compiler may specialise on besides what a task has in common."""
    # This package's backends may launch other kernels for every size, and are quick to compile.
    if not one.peer or one.compiles_every_shape:
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
            with precision_of(workload), torch.inference_mode():  # as it is measured: torch.compile asks
                find_implementation(name).bind(inputs, int(chunk_size))()
                synchronize(device)
            seconds.append(time.perf_counter() - begun)
        except Exception:  # compilers have their own; the other workloads still count
            seconds.append(None)
    sys.stdout.write(json.dumps(seconds) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
