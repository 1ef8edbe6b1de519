"""The op fwd_pass_state: the state at the entry of each chunk, and at the end."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tilegym_mamba2 import chunk_cumsum, fwd_pass_state
from tilegym_mamba2.bench.workloads import find_workload, make_inputs
from tilegym_mamba2.testing import budget

OP = "fwd_pass_state"
CASES = [(name, chunk_size) for name in ("headline", "latency") for chunk_size in (64, 128, 256)]


def mamba_ssm(x: torch.Tensor, B: torch.Tensor, dt_out: torch.Tensor, dA_cumsum: torch.Tensor) -> Any:
    from mamba_ssm.ops.triton.ssd_chunk_state import _chunk_state_fwd
    from mamba_ssm.ops.triton.ssd_state_passing import _state_passing_fwd

    states = _chunk_state_fwd(B, x, dt_out, dA_cumsum, states_in_fp32=True)
    shape = states.shape[-2:]
    states, final_states = _state_passing_fwd(
        states.flatten(-2), dA_cumsum[..., -1], chunk_size=dA_cumsum.shape[-1], out_dtype=x.dtype
    )
    return states.unflatten(-1, shape), final_states.unflatten(-1, shape)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[1]}")
def test_fwd_pass_state(
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
        dA_cumsum, dt_out = chunk_cumsum(inputs["dt"], inputs["A"], chunk_size, backend="torch-reference")
        return inputs["x"], inputs["B"], dt_out, dA_cumsum

    copies = rotated(arguments)
    exact = fwd_pass_state(*(value.double() for value in copies[0]), backend="torch-reference")
    tokens = workload.batch * workload.seqlen
    flops = 2 * tokens * workload.nheads * workload.headdim * workload.dstate
    measure_op(implementation, copies, exact, budget(torch.bfloat16), flops)
