"""What the segment kernel leaves out: the slots that the state at a segment's end does not remember, and no other."""

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

triton: Any = pytest.importorskip("triton", reason="triton is not installed: pip install 'triton>=3.4'")

import triton.language as tl  # noqa: E402

from tests.conftest import DEVICE  # noqa: E402
from tilegym_mamba2.ops.mamba_chunk_scan import _triton_segment  # noqa: E402

# Of the interpreter, where a decay is 0.
pytestmark = pytest.mark.filterwarnings("ignore:divide by zero encountered in log2:RuntimeWarning")

implementation: Any = _triton_segment
first_remembered = implementation._first_remembered
WINDOW = 64


@triton.jit
def _kernel(exit_ptr: Any, found_ptr: Any, first: Any, stop: Any, nheads: Any) -> None:
    tl.store(found_ptr, first_remembered(exit_ptr, first, stop, nheads))


def found(decays: list[float], first: int, nheads: int = 1) -> int:
    exits = torch.zeros(len(decays), nheads, device=DEVICE)
    exits[:, 0] = torch.tensor(decays)
    slot = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    _kernel[1,](exits, slot, first, len(decays), nheads)
    return int(slot)


def log2(decay: float) -> float:
    return math.log2(decay) if decay > 0 else -math.inf


DECAYS: dict[str, Callable[[random.Random], float]] = {
    "mild": lambda draw: 2.0 ** -draw.uniform(0, 4),
    "fast": lambda draw: 2.0 ** -draw.uniform(0, 40),
    "some 0": lambda draw: 0.0 if draw.random() < 0.05 else 2.0 ** -draw.uniform(0, 10),
    "all 0": lambda draw: 0.0,
    "none": lambda draw: 1.0,
}


@pytest.mark.parametrize("first", [0, 7])
@pytest.mark.parametrize("nslots", [9, 30, 64, 65, 150])
@pytest.mark.parametrize("kind", DECAYS)
def test_what_is_left_out_is_forgotten(kind: str, nslots: int, first: int) -> None:
    draw = random.Random(f"{kind} {nslots} {first}")
    for _ in range(4):
        decays = [DECAYS[kind](draw) for _ in range(nslots)]
        slot = found(decays, first, nheads=3)
        assert first <= slot < nslots
        weight = sum(log2(decay) for decay in decays[slot + 1 :])  # that of the first slot which is read, at the end
        assert slot == first or weight > -150.01
        # Of those before it the last weighs most.
        assert slot == first or weight + log2(decays[slot]) < -149.99
        assert slot == first or slot > nslots - WINDOW
        if slot == first and nslots - first < WINDOW:
            assert weight > -150.01 or first == nslots - 1


@pytest.mark.parametrize("value", [math.nan, math.inf, 3.0])
def test_what_is_no_decay_is_remembered(value: float) -> None:
    """And all that is before it, which it may let grow, whatever comes after it."""
    decays = [2.0**-100] * 21
    assert found(decays, 0) == 19
    decays[10] = value
    assert found(decays, 0) == 0
    assert found(decays, 4) == 4
