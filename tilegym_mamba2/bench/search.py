"""The search for the fastest configuration of the whole forward: `search`, for `tilegym-mamba2 tune`.

    python -m tilegym_mamba2.bench.search ORDERS

runs, in a process of its own, what a search must not wait for or be ended by: `ORDERS`, as JSON, names the backend, the
op, the key, positions of candidates, and workloads to call. Whatever is compiled stays in the compilers' caches. It
prints for each position null or why it failed.
"""

import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from tilegym_mamba2 import tuning
from tilegym_mamba2.bench.measure import WrongResultError, is_usable, noise, one_line, truth_of
from tilegym_mamba2.bench.peers import BackendForward
from tilegym_mamba2.bench.timing import Stopwatch, synchronize
from tilegym_mamba2.bench.workloads import Workload, make_inputs, precision_of, rotated_inputs
from tilegym_mamba2.testing import PROBLEMS, Check, budget, run_op

Progress = Callable[[str], None]

_OP = "mamba_chunk_scan"
_LEAST_GAIN = 0.01
_HOPELESS = 1.1  # times the choice by rule: not timed any further
_PROBE_SECONDS, _PASS_SECONDS = 0.02, 0.06
_COMPILED_AT, _TIMED_AT = 0.5, 0.75  # parts of a search's time by which this is done; what is left is to check the best
_BYTES_TIMES = 8  # the memory of a process that compiles, in multiples of its inputs'
# Calls that may have the key of a timed one, and reach other branches of the kernels.
_ALIKE = ("ragged_tail", "packed_gate", "varlen_states", "unaligned")
_MARK = '["position", '


@dataclass
class Found:
    """What a search came to.

    Attributes:
        position: of the best candidate; 0, the choice by rule, where nothing is faster by more than noise.
        seconds: of every candidate that was timed on all workloads, by position, in their order.
        failures: why others were not, by position.
        noise: of the times, relative, by workload.
    """

    asked: tuning.Asked
    workloads: Sequence[Workload]
    position: int = 0
    seconds: dict[int, list[float]] = field(default_factory=dict[int, list[float]])
    failures: dict[int, str] = field(default_factory=dict[int, str])
    noise: list[float] = field(default_factory=list[float])

    @property
    def gain(self) -> float:
        """How many times as fast as the choice by rule the best is, as a geometric mean over the workloads."""
        return 1 / _ratio(self.seconds[self.position], self.seconds[0])

    def measured(self) -> dict[str, list[float]]:
        """By workload, seconds by rule and of the best."""
        names = [f"{one.shape}{' packed' * bool(one.lengths)}" for one in self.workloads]
        pairs = zip(self.seconds[0], self.seconds[self.position], strict=True)
        return {name: list(pair) for name, pair in zip(names, pairs, strict=True)}


def questions(backend: str, workload: Workload, device: torch.device) -> list[tuning.Asked]:
    """The choices between several configurations that a call makes."""
    with precision_of(workload), torch.inference_mode(), tuning.observing() as asked:
        BackendForward(backend, asked=True).bind(make_inputs(workload, device, seed=0), 64)()
        synchronize(device)
    return [one for one in asked if len(one.candidates) > 1]


def search(
    asked: tuning.Asked,
    workloads: Sequence[Workload],
    device: torch.device,
    seconds: float,
    progress: Progress = lambda doing: None,
    *,
    run_apart: "Callable[..., dict[int, str | None]] | None" = None,
) -> Found:
    """Times the candidates of a choice on workloads that share its key, and finds the best.

    A candidate must be right on every workload and on small calls of other kinds, slower than the choice by rule on
    none, and faster in the geometric mean, each by more than noise. What has no time after so many seconds is left out.

    Args:
        run_apart: calls candidates in processes of their own, as `in_processes` does.

    Raises RuntimeError while a CUDA graph is captured, and if the choice by rule fails.
    """
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("configurations can't be searched for while a CUDA graph is captured: tune before it")
    run_apart = in_processes if run_apart is None else run_apart
    begun = time.monotonic()
    found = Found(asked, workloads)
    every = range(len(asked.candidates))
    progress(f"compiling {len(every)} configurations")
    for position, failure in run_apart(asked, every, workloads, device, seconds * _COMPILED_AT).items():
        if failure is not None:
            found.failures[position] = failure
    for workload in workloads:
        progress(f"timing on {workload.name}")
        _time(found, workload, device, begun + seconds * _TIMED_AT)
    if 0 not in found.seconds:
        raise RuntimeError(f"the choice by rule failed: {found.failures.get(0, 'there was no time for it')}")
    for position in better(found.seconds, found.noise):
        progress("checking calls of other kinds")
        left = begun + seconds - time.monotonic()
        failure = run_apart(asked, [position], workloads[:1], device, left, True)[position]
        if failure is None:
            found.position = position
            break
        found.failures[position] = failure
    return found


def better(seconds: Mapping[int, Sequence[float]], noise_of: Sequence[float]) -> list[int]:
    """Positions of what is better than position 0 by more than noise, the best first."""
    rule = seconds[0]
    least = max(_LEAST_GAIN, *noise_of)
    ratios = {
        position: _ratio(times, rule)
        for position, times in seconds.items()
        if all(time <= (1 + part) * base for time, base, part in zip(times, rule, noise_of, strict=True))
    }
    return sorted((position for position, ratio in ratios.items() if ratio < 1 - least), key=ratios.__getitem__)


def _ratio(seconds: Sequence[float], rule: Sequence[float]) -> float:
    return math.exp(statistics.fmean(math.log(one / base) for one, base in zip(seconds, rule, strict=True)))


def _time(found: Found, workload: Workload, device: torch.device, deadline: float) -> None:
    """Adds the times on a workload; who has none of it loses those of the others."""
    op, backend, key = found.asked.op, found.asked.place.backend, found.asked.key
    forward = BackendForward(backend, asked=True)
    done = len(found.noise)
    left = [at for at in range(len(found.asked.candidates)) if at not in found.failures]
    if done:
        left = [at for at in left if at in found.seconds]
    watches: dict[int, Stopwatch] = {}
    probed: dict[int, float] = {}
    with precision_of(workload), torch.inference_mode():
        rotated = rotated_inputs(workload, device)
        truth, allowed = truth_of(rotated[0]), budget(rotated[0]["x"].dtype)
        calls = [forward.bind(inputs, forward.chunk_sizes[0]) for inputs in rotated]
        for at in left:
            if at and time.monotonic() > deadline:
                found.failures[at] = "there was no time for it"
                continue
            try:
                with tuning.using(op, backend, key, at):
                    watch = Stopwatch(calls, device, forward.capturable(workload))
                errors = truth.errors(watch.results[0])
                if not max(errors) <= allowed:
                    raise WrongResultError(f"errors {errors[0]:.1e} and {errors[1]:.1e}, more than {allowed:.1e}")
                probed[at] = statistics.median(watch.replays_for(_PROBE_SECONDS))
            except Exception as error:  # a compiler's or a kernel's: the other candidates still count
                if not is_usable(device):
                    raise
                found.failures[at] = one_line(error)
                continue
            if at == 0 or probed[at] <= _HOPELESS * probed.get(0, math.inf):
                watches[at] = watch
            else:
                found.failures[at] = f"{probed[at] / probed[0]:.2f} times the time of the choice by rule"
        passes: dict[int, list[list[float]]] = {at: [] for at in watches}
        for order in (list(watches), list(watches)[::-1]):
            for at in order:
                passes[at].append(watches[at].replays_for(_PASS_SECONDS))
    every = {at: [value for single in several for value in single] for at, several in passes.items()}
    medians = {at: [statistics.median(single) for single in several] for at, several in passes.items()}
    found.noise.append(max((noise(medians[at], every[at]) for at in every), default=0.0))
    before = found.seconds
    found.seconds = {at: [*before.get(at, []), statistics.median(every[at])] for at in every}


# In processes of their own


def in_processes(
    asked: tuning.Asked,
    positions: Sequence[int],
    workloads: Sequence[Workload],
    device: torch.device,
    seconds: float,
    alike: bool = False,
) -> dict[int, str | None]:
    """Calls each candidate on the workloads, or if `alike` on small calls with their key: why it failed, or None.

    In as many processes as there are processors, and memory on the device, for them.
    """
    deadline = time.monotonic() + seconds
    number = min(os.cpu_count() or 1, len(positions), *(_fitting(one, device) for one in workloads))
    shares = [list(positions[first::number]) for first in range(number)]
    with ThreadPoolExecutor(number) as pool:
        parts = list(pool.map(lambda share: _apart(asked, share, workloads, deadline, alike), shares))
    return {position: failure for part in parts for position, failure in part.items()}


def _fitting(workload: Workload, device: torch.device) -> int:
    """How many processes the device's memory has room for."""
    if device.type != "cuda":
        return 1
    tokens = workload.batch * workload.seqlen
    channels = workload.nheads * workload.headdim + 2 * workload.ngroups * workload.dstate
    free, _ = torch.cuda.mem_get_info(device)
    return max(1, free // (_BYTES_TIMES * tokens * channels * getattr(torch, workload.dtype).itemsize))


def _apart(
    asked: tuning.Asked, positions: Sequence[int], workloads: Sequence[Workload], deadline: float, alike: bool
) -> dict[int, str | None]:
    """As `in_processes`, one after the other; a process that was lost to a candidate is followed by another."""
    results: dict[int, str | None] = {}
    left = list(positions)
    while left:
        orders = {
            "backend": asked.place.backend,
            "op": asked.op,
            "key": asked.key,
            "positions": left,
            "workloads": [asdict(one) for one in workloads],
            "alike": alike,
        }
        command = [sys.executable, "-m", __name__, json.dumps(orders)]
        late, complaint = False, ""
        try:
            done = subprocess.run(command, capture_output=True, timeout=max(0.0, deadline - time.monotonic()))
            output, complaint = done.stdout, done.stderr.decode(errors="replace")
        except subprocess.TimeoutExpired as error:
            late, output = True, error.stdout or b""
        for line in output.decode(errors="replace").splitlines():
            if line.startswith(_MARK) and line.endswith("]"):  # compilers may print, and the last line may be cut
                _, position, failure = json.loads(line)
                results[position] = failure
        left = [at for at in left if at not in results]
        if late:
            results.update(dict.fromkeys(left, "it was not compiled in time"))
        elif left:
            results[left[0]] = f"its process ended: {' '.join(complaint.split())[-200:]}"
        left = [at for at in left if at not in results]
    return results


def main(arguments: Sequence[str]) -> None:
    orders: dict[str, Any] = json.loads(arguments[0])
    op, backend, key = orders["op"], orders["backend"], orders["key"]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    workloads = [replace(Workload(**one), lengths=tuple(one["lengths"])) for one in orders["workloads"]]
    for position in orders["positions"]:
        failure = None
        with torch.inference_mode(), tuning.using(op, backend, key, position), tuning.observing() as asked:
            try:
                for workload in workloads:
                    with precision_of(workload):
                        if orders["alike"]:
                            _check_alike(backend, workload, device)
                        else:
                            BackendForward(backend, asked=True).bind(make_inputs(workload, device, seed=0), 64)()
                            synchronize(device)
                if not any(one.source == "tried" for one in asked):
                    raise WrongResultError(f"no call had the key {key}, but {[one.key for one in asked]}")
            except Exception as error:  # a compiler's or a kernel's: the other candidates still count
                failure = one_line(error)
                if not is_usable(device):
                    raise SystemExit(failure) from None
        sys.stdout.write(json.dumps(["position", position, failure]) + "\n")
        sys.stdout.flush()


def _check_alike(backend: str, workload: Workload, device: torch.device) -> None:
    """Raises WrongResultError if the result of a small call with the workload's key is wrong."""
    dtype: torch.dtype = getattr(torch, workload.dtype)
    sizes = {"headdim": workload.headdim, "dstate": workload.dstate}
    for name in _ALIKE:
        inputs = PROBLEMS[name].make(dtype, device, **{**PROBLEMS[name].options, **sizes})
        result = Check(_OP, name, dtype, lambda name, _, given=inputs: run_op(_OP, given, name)).run(backend, device)
        if not result.ok:
            raise WrongResultError(f"{name}: {result.detail}")


if __name__ == "__main__":
    main(sys.argv[1:])
