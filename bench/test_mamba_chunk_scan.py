"""The whole forward: every backend and every peer that is installed, each at its best chunk size."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import pytest
import torch

from tilegym_mamba2 import registry
from tilegym_mamba2.bench.measure import Bench, Truth, UnmeasuredError, truth_of
from tilegym_mamba2.bench.peers import PEERS, find_implementation
from tilegym_mamba2.bench.timing import Stopwatch
from tilegym_mamba2.bench.workloads import HEADLINE, LATENCY, SWEEPS, VARLEN, Inputs, Workload, rotated_inputs

ON_GPU = torch.cuda.is_available()
CASES = [*SWEEPS["table"], *LATENCY[1:], *VARLEN, *SWEEPS["layers"]] if ON_GPU else [HEADLINE, LATENCY[0], VARLEN[1]]


@lru_cache(maxsize=1)  # the inputs of one workload are large, and its tests run one after the other
def _made(workload: Workload, device: torch.device) -> tuple[list[Inputs], Truth]:
    rotated = rotated_inputs(workload, device)
    return rotated, truth_of(rotated[0])


@pytest.mark.parametrize("case", CASES, ids=lambda workload: workload.name)
@pytest.mark.parametrize("implementation", [*registry.available_backends(), *PEERS])
def test_mamba_chunk_scan(
    case: Workload,
    turn: str,
    implementation: str,
    bench: Bench,
    benchmark: Any,
    report_replays: Callable[[Stopwatch], list[float]],
) -> None:
    workload = case if ON_GPU else case.small()
    rotated, truth = _made(workload, bench.device)
    try:
        runner = bench.prepare(workload, find_implementation(implementation), rotated, truth)
    except UnmeasuredError as reason:
        if reason.broken:
            raise
        pytest.skip(str(reason))
    assert not runner.broken, runner.chunk_failures
    runner.passes.append(report_replays(runner.stopwatch))
    benchmark.extra_info.update(bench.record(workload, rotated[0], truth, runner).as_dict())
