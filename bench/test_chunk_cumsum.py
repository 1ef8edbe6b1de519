"""The op chunk_cumsum: time steps and cumulative decays, a small pass over dt."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tilegym_mamba2 import chunk_cumsum
from tilegym_mamba2.bench.workloads import find_workload, make_inputs

OP = "chunk_cumsum"
ALLOWED = 1e-5  # elementwise in float32
CASES = [(name, chunk_size) for name in ("headline", "latency") for chunk_size in (64, 128, 256)]


def mamba_ssm(dt: torch.Tensor, A: torch.Tensor, chunk_size: int) -> Any:
    from mamba_ssm.ops.triton.ssd_chunk_state import _chunk_cumsum_fwd

    return _chunk_cumsum_fwd(dt, A, chunk_size)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[1]}")
def test_chunk_cumsum(
    case: tuple[str, int],
    turn: str,
    implementation: Callable[..., Any],
    device: torch.device,
    rotated: Callable[..., list[tuple[Any, ...]]],
    measure_op: Callable[..., None],
) -> None:
    name, chunk_size = case
    workload = find_workload(name) if device.type == "cuda" else find_workload(name).small()

    def arguments(seed: int) -> tuple[Any, ...]:
        inputs = make_inputs(workload, device, seed)
        return inputs["dt"], inputs["A"], chunk_size

    copies = rotated(arguments)
    dt, A, _ = copies[0]
    exact = chunk_cumsum(dt.double(), A.double(), chunk_size, backend="torch-reference")
    measure_op(implementation, copies, exact, ALLOWED, flops=2 * dt.numel())
