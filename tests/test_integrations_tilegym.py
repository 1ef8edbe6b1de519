"""TileGym and this package in one another's registries, with the real TileGym."""

import importlib.util
import subprocess
import sys
from typing import Any

import pytest
import torch

from tilegym_mamba2.integrations import tilegym as integration
from tilegym_mamba2.problem import scan_problem

pytestmark = pytest.mark.skipif(importlib.util.find_spec("tilegym") is None, reason="tilegym is not installed")

# TileGym's import asks for the GPU's compute capability; where there is no GPU it is told one.
PREPARE = """
import torch
if not torch.cuda.is_available():
    torch.cuda.get_device_capability = lambda device=None: (9, 0)
import tilegym_mamba2 as tm
from tilegym_mamba2.integrations import tilegym as integration
"""

INPUTS = """
torch.manual_seed(0)
batch, seqlen, nheads, headdim, ngroups, dstate = 2, 64, 4, 16, 2, 32
x, b, c = torch.randn(batch, seqlen, nheads, headdim), *torch.randn(2, batch, seqlen, ngroups, dstate)
dt, a, d = torch.rand(batch, seqlen, nheads), -torch.rand(nheads), torch.randn(nheads)
state = torch.randn(batch, nheads, headdim, dstate)
"""


def run(code: str) -> None:
    result = subprocess.run(
        [sys.executable, "-c", PREPARE + code], capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stderr


def test_forwards_are_registered_and_agree() -> None:
    run(
        INPUTS
        + """
assert integration.install() == [
    "tilegym: mamba2_chunk_forward on triton",
    "tilegym: mamba2_chunk_forward on torch-reference",
    "tilegym_mamba2: mamba_chunk_scan on tilegym",
]
assert integration.install() == []
from tilegym.ops.ops import mamba2_chunk_forward
out, final = mamba2_chunk_forward(x, a, b, c, d, dt, state, chunk_size=16, backend="torch-reference")

h, outs = state.double(), []
for t in range(seqlen):
    step = dt[:, t].double()
    bt, ct = (v[:, t].double().repeat_interleave(nheads // ngroups, 1) for v in (b, c))
    h = (step * a.double()).exp()[..., None, None] * h
    h = h + (step[..., None] * x[:, t].double())[..., None] * bt[:, :, None]
    outs.append((h @ ct[..., None])[..., 0] + d.double()[:, None] * x[:, t].double())
for got, wanted in ((out, torch.stack(outs, 1)), (final, h)):
    assert got.dtype == torch.float32
    assert (got.double() - wanted).norm() < 1e-5 * wanted.norm()
half = mamba2_chunk_forward(x, a, b, c, d, dt, state.bfloat16(), chunk_size=16, backend="torch-reference")[1]
assert half.dtype == torch.bfloat16
"""
    )


def test_what_is_registered_stays() -> None:
    run(
        """
import tilegym
from tilegym.backend.dispatcher import _REGISTRY, register_impl
theirs = _REGISTRY["mamba2_chunk_forward"]["cutile"]
other = register_impl("mamba2_chunk_forward", "triton")(lambda *args: "other")
assert "tilegym: mamba2_chunk_forward on triton" not in integration.install()
assert _REGISTRY["mamba2_chunk_forward"]["triton"] is other
assert _REGISTRY["mamba2_chunk_forward"]["cutile"] is theirs
"""
    )


def test_the_backend_is_never_chosen_and_says_what_it_needs() -> None:
    run(
        INPUTS
        + """
before = tm.available_backends("cpu")
integration.install()
assert tm.available_backends("cpu") == before
assert "CUDA devices" in tm.explain_backends("cpu")["tilegym"]
try:
    tm.mamba_chunk_scan_combined(x, dt, a, b, c, 16, backend="tilegym")
except tm.BackendUnavailableError as error:
    assert "the tensors are on cpu" in str(error)
else:
    raise AssertionError
"""
    )


def test_arguments_reach_tilegym_as_it_wants_them() -> None:
    """TileGym's own kernel stands aside for the forward that we gave it, which takes the same arguments."""
    run(
        INPUTS
        + """
torch.set_float32_matmul_precision("high")
integration.install()
import tilegym.ops.cutile.mamba2 as kernels
from tilegym.ops.ops import mamba2_chunk_forward
kernels.mamba2_chunk_forward = lambda *args, **kwargs: mamba2_chunk_forward(*args, **kwargs, backend="torch-reference")
integration._why_unavailable.__code__ = (lambda device: None).__code__
bias = torch.randn(nheads)
raw = dict(dt_bias=bias, dt_softplus=True, dt_limit=(0.1, 1.0), return_final_states=True)
for options in (raw, dict(D=d, initial_states=state, return_final_states=True)):
    got = tm.mamba_chunk_scan_combined(x, dt, a, b, c, 16, **options, backend="tilegym")
    wanted = tm.mamba_chunk_scan_combined(x, dt, a, b, c, 16, **options, backend="torch-reference")
    for result, expected in zip(got, wanted):
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4)
for options, text in (
    (dict(D=d[:, None].expand(-1, headdim)), "D has shape (4, 16), and only (nheads,)"),
    (dict(state_dtype=torch.float16), "state_dtype is torch.float16"),
    (dict(z=x), "z is given"),
):
    try:
        tm.mamba_chunk_scan_combined(x, dt, a, b, c, 16, **options, backend="tilegym")
    except NotImplementedError as error:
        assert text in str(error) and "tilegym" in str(error), error
    else:
        raise AssertionError(options)
"""
    )


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"headdim": 80}, "headdim=80, which must be a power of two"),
        ({"dstate": 96}, "dstate=96, which must be a power of two"),
        ({"chunk_size": 48}, "chunk_size is 48, which must be a power of two"),
        ({"seqlen": 100}, "seqlen=100, which must be a multiple of chunk_size=64"),
        ({"nheads": 6}, "nheads=6, which must be a multiple of 4"),
        ({"batch": 0}, "batch=0"),
        ({"dtype": torch.float16}, "all bfloat16 or all float32 only"),
        ({"dtype": torch.float32}, "multiplied in TF32"),
        ({"seq_idx": torch.zeros(2, 128, dtype=torch.int32)}, "seq_idx is given"),
        ({"dt_bias": torch.zeros(8, dtype=torch.float64)}, "dt_bias is float64"),
        ({}, None),
    ],
    ids=lambda value: str(value)[:20] if isinstance(value, dict) else "",
)
def test_what_the_backend_can_not_do(change: dict[str, Any], reason: str | None) -> None:
    sizes: dict[str, Any] = {"batch": 2, "seqlen": 128, "nheads": 8, "headdim": 64, "dstate": 128, "chunk_size": 64}
    sizes |= {name: value for name, value in change.items() if name in sizes}
    dtype = change.get("dtype", torch.bfloat16)
    x = torch.zeros(sizes["batch"], sizes["seqlen"], sizes["nheads"], sizes["headdim"], dtype=dtype)
    B = torch.zeros(sizes["batch"], sizes["seqlen"], 1, sizes["dstate"], dtype=dtype)
    dt, A = torch.zeros(x.shape[:3]), torch.zeros(sizes["nheads"])
    problem = scan_problem(
        x, dt, A, B, B, sizes["chunk_size"], None, None, change.get("dt_bias"), None, change.get("seq_idx"), None,
        False, (0.0, 1.0), None,
    )  # fmt: skip
    answer = integration._supports(problem)
    assert (answer is None) if reason is None else (answer is not None and reason in answer)


@pytest.mark.skipif(torch.cuda.is_available(), reason="TileGym can be imported where there is a CUDA device")
def test_without_a_gpu_install_says_why() -> None:
    code = """
from tilegym_mamba2.integrations import tilegym
try:
    tilegym.install()
except ImportError as error:
    assert "it needs a CUDA device" in str(error), error
else:
    raise AssertionError
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, capture_output=True)
