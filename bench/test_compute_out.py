"""The op compute_out: the output of every token from its chunk and the state that enters it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tilegym_mamba2 import chunk_cumsum, compute_out, fwd_pass_state
from tilegym_mamba2.bench.workloads import find_workload, make_inputs
from tilegym_mamba2.testing import budget

OP = "compute_out"
CASES = [(name, chunk_size) for name in ("headline", "latency") for chunk_size in (64, 128, 256)]


def mamba_ssm(
    x: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    dt_out: torch.Tensor,
    dA_cumsum: torch.Tensor,
    states: torch.Tensor,
    D: torch.Tensor,
) -> Any:
    from mamba_ssm.ops.triton.ssd_bmm import _bmm_chunk_fwd
    from mamba_ssm.ops.triton.ssd_chunk_scan import _chunk_scan_fwd

    products = _bmm_chunk_fwd(C, B, dA_cumsum.shape[-1], output_dtype=torch.float32)
    return _chunk_scan_fwd(products, x, dt_out, dA_cumsum, C, states, D=D)[0]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[1]}")
def test_compute_out(
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
        x, B, C = inputs["x"], inputs["B"], inputs["C"]
        dA_cumsum, dt_out = chunk_cumsum(inputs["dt"], inputs["A"], chunk_size, backend="torch-reference")
        states, _ = fwd_pass_state(x, B, dt_out, dA_cumsum, backend="torch-reference")
        return x, B, C, dt_out, dA_cumsum, states, inputs["D"]

    copies = rotated(arguments)
    exact = compute_out(*(value.double() for value in copies[0]), backend="torch-reference")
    within = chunk_size * (workload.ngroups * workload.dstate + workload.nheads * workload.headdim) // 2
    flops = 2 * workload.batch * workload.seqlen * (workload.nheads * workload.headdim * workload.dstate + within)
    measure_op(implementation, copies, [exact], budget(torch.bfloat16), flops)
