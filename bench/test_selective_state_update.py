"""The op selective_state_update: one token of decoding, of a layer of mamba2-2.7b; every state is read and written."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tilegym_mamba2 import selective_state_update
from tilegym_mamba2.models import MODELS
from tilegym_mamba2.testing import budget, make_decode_inputs

OP = "selective_state_update"
NAMES = ("state", "x", "dt", "A", "B", "C", "D", "z", "dt_bias", "dt_softplus")


def mamba_ssm(*arguments: Any) -> Any:
    from mamba_ssm.ops.triton.selective_state_update import selective_state_update as update

    return update(*arguments)


@pytest.mark.parametrize("case", [1, 16, 128], ids=lambda batch: f"batch{batch}")
def test_selective_state_update(
    case: int,
    turn: str,
    implementation: Callable[..., Any],
    device: torch.device,
    rotated: Callable[..., list[tuple[Any, ...]]],
    measure_op: Callable[..., None],
) -> None:
    model = MODELS["mamba2-2.7b" if device.type == "cuda" else "falcon-h1-tiny"]
    batch = case if device.type == "cuda" else min(case, 2)

    def arguments(seed: int) -> tuple[Any, ...]:
        inputs = make_decode_inputs(
            torch.bfloat16,
            device,
            batch=batch,
            nheads=model.nheads,
            headdim=model.headdim,
            ngroups=model.ngroups,
            dstate=model.dstate,
            dt_softplus=True,
            seed=seed,
        )
        return tuple(inputs[name] for name in NAMES)

    copies = rotated(arguments)
    state = copies[0][0]
    exact = [value.double() if isinstance(value, torch.Tensor) else value for value in copies[0]]
    out = selective_state_update(*exact, backend="torch-reference")
    measure_op(implementation, copies, [out, exact[0]], budget(torch.bfloat16), 5 * state.numel(), updated=[state])
