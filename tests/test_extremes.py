"""Sizes that bfloat16 has and formulas lose: not finite, of very different size, odd numbers of heads.

Shapes are such that a GPU's own kernels take them, where there are any.
"""

from typing import Any

import pytest
import torch

from tests.conftest import DEVICE
from tilegym_mamba2 import mamba_chunk_scan_combined
from tilegym_mamba2.testing import budget, make_inputs, oracle_scan, relative_error

bf16 = torch.bfloat16
# The longer one is cut into segments, which takes interpreters too long.
SEQLENS = [200] if DEVICE == "cpu" else [200, 8192]
SHAPE: dict[str, Any] = {"batch": 2, "nheads": 6, "headdim": 64, "ngroups": 2, "dstate": 64, "chunk_size": 64}
SMALL: dict[str, Any] = {"batch": 1, "nheads": 2, "headdim": 64, "ngroups": 1, "dstate": 64, "chunk_size": 64}


def scan(inputs: dict[str, Any], backend: str) -> Any:
    return mamba_chunk_scan_combined(**inputs, return_final_states=True, backend=backend)


@pytest.mark.parametrize("seqlen", SEQLENS)
@pytest.mark.parametrize("name", ["x", "dt", "B", "C", "initial_states"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_not_finite(backend: str, name: str, value: float, seqlen: int) -> None:
    """It reaches its own token, and no earlier one, other head or group, batch row, or sequence of seq_idx."""
    token, next_sequence = seqlen // 2, seqlen // 2 + 70
    ids = (5, next_sequence, 7, seqlen - next_sequence)
    inputs = make_inputs(bf16, DEVICE, **SHAPE, seqlen=seqlen, seq_idx=(ids, ids), initial_states=True)
    want, want_final = oracle_scan(**inputs)[:2]
    inputs[name] = inputs[name].clone()
    if name == "initial_states":
        inputs[name][0, 0, 3, 5] = value
        token, heads = 0, slice(0, 1)
    else:
        inputs[name][(0, token, 0, 5) if inputs[name].ndim == 4 else (0, token, 0)] = value
        heads = slice(0, 3 if name in ("B", "C") else 1)
    out, final_states = scan(inputs, backend)
    assert not out[0, token, heads].isfinite().all(dim=-1).any()
    clean = torch.ones(out.shape, dtype=torch.bool)
    clean[0, token:next_sequence, heads] = False
    assert relative_error(out[clean], want[clean]) <= budget(bf16)
    assert relative_error(final_states, want_final) <= budget(bf16)


@pytest.mark.parametrize("seqlen", SEQLENS)
@pytest.mark.parametrize("D", ["heads", None])
@pytest.mark.parametrize("name", ["x", "C"])
@pytest.mark.parametrize("factor", [2.0**100, 2.0**-66])  # exact, so that the rounding of the input stays the same
def test_large_and_small(backend: str, name: str, factor: float, D: str | None, seqlen: int) -> None:
    inputs = make_inputs(bf16, DEVICE, **SMALL, seqlen=seqlen, D=D)
    inputs[name] = inputs[name] * factor
    for got, want in zip(scan(inputs, backend), oracle_scan(**inputs), strict=False):
        assert got.isfinite().all()
        assert relative_error(got, want) <= budget(bf16)


@pytest.mark.parametrize("seqlen", SEQLENS)
def test_tokens_of_different_size(backend: str, seqlen: int) -> None:
    """Each token is right within its own size, whatever that of C at others."""
    inputs = make_inputs(bf16, DEVICE, **SMALL, seqlen=seqlen, D=None, decay=(1e-3, 1.0))
    exponents = torch.tensor([0, 40, -60, 90, -20, 3, 60], device=DEVICE)
    factors = 2.0 ** exponents[torch.arange(seqlen, device=DEVICE) % len(exponents)]
    inputs["C"] = inputs["C"] * factors.to(bf16)[:, None, None]
    inputs["B"] = inputs["B"] * (2.0 ** (torch.arange(seqlen, device=DEVICE) % 11)).to(bf16)[:, None, None]
    out = scan(inputs, backend)[0].double()
    want = oracle_scan(**inputs)[0].double()
    errors = (out - want).norm(dim=(2, 3)) / want.norm(dim=(2, 3))
    alike = len(exponents) * 11
    worst = max(float(errors[:, first::alike].median()) for first in range(alike))  # terms may cancel in some tokens
    assert worst <= 4 * budget(bf16)


@pytest.mark.parametrize("seqlen", SEQLENS)
@pytest.mark.parametrize(("nheads", "headdim", "ngroups"), [(1, 64, 1), (9, 64, 3), (3, 80, 1), (5, 136, 1)])
def test_odd_numbers_of_heads(backend: str, nheads: int, headdim: int, ngroups: int, seqlen: int) -> None:
    sizes = {**SMALL, "nheads": nheads, "headdim": headdim, "ngroups": ngroups, "dstate": 72}
    inputs = make_inputs(bf16, DEVICE, **sizes, seqlen=seqlen, z=True, initial_states=True)
    for got, want in zip(scan(inputs, backend), oracle_scan(**inputs), strict=False):
        assert relative_error(got, want) <= budget(bf16)


def check_what_is_remembered(backend: str, dtype: torch.dtype, **options: Any) -> None:
    inputs = make_inputs(dtype, DEVICE, **{"batch": 1, "nheads": 1, "ngroups": 1, "chunk_size": 64, **options})
    for got, want in zip(scan(inputs, backend), oracle_scan(**inputs), strict=False):
        assert relative_error(got, want) <= budget(dtype)


@pytest.mark.parametrize("decay", [(1e-4, 1e-2), (0.01, 1.0), (0.3, 3.0), (5.0, 500.0)], ids=str)
@pytest.mark.parametrize(("seqlen", "dtype", "size"), [(800, bf16, 64), (2500, torch.float32, 16)], ids=str)
def test_what_a_long_row_remembers(
    backend: str, seqlen: int, dtype: torch.dtype, size: int, decay: tuple[float, float]
) -> None:
    """All of it, a part, a few tokens or none: kernels cut rows, and may leave out what they find to be forgotten."""
    check_what_is_remembered(backend, dtype, headdim=size, dstate=size, seqlen=seqlen, decay=decay, initial_states=True)


@pytest.mark.parametrize("decay", [(1e-4, 1e-2), (0.01, 1.0)], ids=str)
def test_what_a_sequence_remembers_of_itself(backend: str, decay: tuple[float, float]) -> None:
    """All since the boundary in a row that kernels cut, and nothing before it."""
    check_what_is_remembered(
        backend, torch.float32, headdim=16, dstate=16, seqlen=2500, decay=decay, initial_states=True,
        seq_idx=((0, 1234, 1, 1266),),
    )  # fmt: skip


@pytest.mark.skipif(DEVICE == "cpu", reason="interpreters take minutes for a row that a GPU's multiprocessors share")
@pytest.mark.parametrize("boundary", [False, True], ids=["whole", "boundary"])
@pytest.mark.parametrize("decay", [(1e-5, 1e-3), (0.01, 0.1), (0.1, 3.0)], ids=str)
def test_what_a_long_row_remembers_on_a_gpu(backend: str, decay: tuple[float, float], boundary: bool) -> None:
    """Parts of the kernels for bfloat16 that are long enough to be asked what is remembered of them."""
    ids = ((3, 7000, 5, 16384 - 7000),) * 4 if boundary else None
    check_what_is_remembered(
        backend, bf16, batch=4, nheads=8, headdim=64, dstate=128, seqlen=16384, decay=decay, seq_idx=ids
    )
