"""Cases that broke other SSD kernels in the field, by their number in that list; those that need a GPU are elsewhere.

1, 14, 16 and 21 need a GPU; 13 is about tuning and 25 about torch.compile, each tested with its subject.
"""

import hashlib
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import DEVICE
from tilegym_mamba2 import mamba_chunk_scan_combined
from tilegym_mamba2.testing import (
    budget,
    make_inputs,
    oracle_chunk_cumsum,
    oracle_scan,
    poisoned_memory,
    relative_error,
    relayout,
)

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
SMALL: dict[str, Any] = {"batch": 1, "nheads": 2, "ngroups": 1, "headdim": 16, "dstate": 16}


def scan(backend: str, inputs: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    result = mamba_chunk_scan_combined(**inputs, return_final_states=True, backend=backend)
    assert isinstance(result, tuple)
    return result[0], result[1]


def right(backend: str, inputs: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Runs the scan and holds it to the recurrence and the budget of its inputs' dtype."""
    out, final = scan(backend, inputs)
    want, want_final, _ = oracle_scan(**inputs)
    allowed = budget(inputs["x"].dtype)
    assert relative_error(out, want) <= allowed
    assert relative_error(final, want_final) <= allowed
    return out, final


@pytest.mark.case(2)
@every_dtype
def test_a_chunk_of_huge_decays(backend: str, dtype: torch.dtype) -> None:
    inputs = make_inputs(dtype, DEVICE, **SMALL, seqlen=256, chunk_size=256, dt_softplus=False, dt_bias=False, D=None)
    inputs["A"].fill_(-1e4)
    inputs["dt"].copy_(torch.linspace(1, 51, 256)[None, :, None])
    out, final = right(backend, inputs)
    assert out.isfinite().all()
    assert final.isfinite().all()


@pytest.mark.case(3)
@every_dtype
@pytest.mark.parametrize("seqlen", [200, 300])
def test_memory_filled_with_nan(backend: str, seqlen: int, dtype: torch.dtype) -> None:
    inputs = make_inputs(dtype, DEVICE, **SMALL, seqlen=seqlen, chunk_size=256)
    with poisoned_memory():
        assert torch.empty(3, device=DEVICE).isnan().all()
        out, final = right(backend, inputs)
    assert not out.isnan().any()
    assert not final.isnan().any()


@pytest.mark.case(4)
@every_dtype
@pytest.mark.parametrize("chunk_size", [40, 50, 100, 24])
def test_chunk_sizes_that_are_no_power_of_two(backend: str, chunk_size: int, dtype: torch.dtype) -> None:
    right(backend, make_inputs(dtype, DEVICE, **SMALL, seqlen=200, chunk_size=chunk_size))


@pytest.mark.case(5)
@pytest.mark.parametrize(("headdim", "dstate"), [(128, 256), (256, 64), (512, 16)])
def test_wide_heads_and_states(backend: str, headdim: int, dstate: int) -> None:
    """Or a NotImplementedError that names the limit."""
    sizes = {"batch": 1, "nheads": 1, "ngroups": 1, "headdim": headdim, "dstate": dstate}
    inputs = make_inputs(torch.float32, DEVICE, **sizes, seqlen=70, initial_states=True)
    try:
        right(backend, inputs)
    except NotImplementedError as refusal:
        assert "headdim" in str(refusal) or "dstate" in str(refusal)  # noqa: PT017


@pytest.mark.case(6)
@every_dtype
def test_strides_and_pointers_that_are_not_aligned(backend: str, dtype: torch.dtype) -> None:
    inputs = make_inputs(
        dtype, DEVICE, batch=2, nheads=3, ngroups=1, seqlen=70, z=True, initial_states=True, layout="unaligned"
    )
    for name in ("x", "B", "C", "dt", "z"):
        assert inputs[name].data_ptr() % 16
        assert any(stride % 8 for stride in inputs[name].stride())
    right(backend, inputs)


@pytest.mark.case(7)
@every_dtype
@pytest.mark.parametrize("packing", ["seq_idx", "cu_seqlens"])
def test_two_sequences_in_a_row(backend: str, packing: str, dtype: torch.dtype) -> None:
    options: dict[str, Any] = {**SMALL, "seqlen": 256, "chunk_size": 128, "initial_states": True, "decay": (1e-3, 1.0)}
    options[packing] = ([0, 100, 1, 156],) if packing == "seq_idx" else (0, 100, 256)
    inputs = make_inputs(dtype, DEVICE, **options)
    out, final = right(backend, inputs)
    parts = []
    for start, stop in ((0, 100), (100, 256)):
        part = {name: inputs[name][:, start:stop] for name in ("x", "dt", "B", "C")}
        states = inputs["initial_states"]
        if packing == "cu_seqlens":
            states = states[:1] if start == 0 else states[1:]
        elif start:
            states = None
        parts.append(scan(backend, {**inputs, **part, "seq_idx": None, "cu_seqlens": None, "initial_states": states}))
    assert relative_error(out, torch.cat([part for part, _ in parts], 1)) <= budget(dtype)
    assert relative_error(final, parts[1][1]) <= budget(dtype)


@pytest.mark.case(8)
@every_dtype
def test_the_initial_state_of_one_row_counts(backend: str, dtype: torch.dtype) -> None:
    inputs = make_inputs(dtype, DEVICE, **SMALL, seqlen=70, initial_states=True, decay=(1e-3, 1e-2))
    with_state, _ = right(backend, inputs)
    without, _ = right(backend, {**inputs, "initial_states": None})
    assert relative_error(with_state, without) > 0.1


@pytest.mark.case(9)
@every_dtype
def test_four_groups_of_sixteen_heads(backend: str, dtype: torch.dtype) -> None:
    inputs = make_inputs(dtype, DEVICE, batch=1, nheads=16, ngroups=4, headdim=8, seqlen=40)
    out, _ = right(backend, inputs)
    for group in range(4):  # other groups' B and C change nothing
        others = dict(inputs)
        for name in ("B", "C"):
            others[name] = torch.full_like(inputs[name], math.nan)
            others[name][:, :, group] = inputs[name][:, :, group]
        heads = slice(4 * group, 4 * group + 4)
        assert relative_error(scan(backend, others)[0][:, :, heads], out[:, :, heads]) <= budget(dtype)


@pytest.mark.case(10)
@every_dtype
def test_bias_then_softplus_then_limits(backend: str, dtype: torch.dtype) -> None:
    inputs = make_inputs(dtype, DEVICE, **SMALL, seqlen=70, dt_limit=(0.05, 0.3), initial_states=True)
    inputs["dt"].copy_(torch.linspace(-6, 3, 70)[None, :, None])  # steps from 0.002 to 3: below, inside and above
    inputs["dt_bias"].copy_(torch.tensor([0.5, -0.5]))
    right(backend, inputs)


@pytest.mark.case(11)
@every_dtype
@pytest.mark.parametrize("total", [-88.0, -200.0, -1e5, -1e6])
def test_sums_of_exponents_far_below_zero(backend: str, total: float, dtype: torch.dtype) -> None:
    """Most tokens decay a little and a few a lot, so that neighbours of large sums still see each other."""
    inputs = make_inputs(dtype, DEVICE, **SMALL, seqlen=130, chunk_size=128, dt_softplus=False, dt_bias=False)
    inputs["A"].fill_(-1.0)
    inputs["dt"].fill_(0.01)
    inputs["dt"][:, 5] = inputs["dt"][:, 70] = -total / 2
    inputs["x"][:, [5, 70]] *= 0.01 / (-total / 2)  # or two tokens would outweigh all others
    right(backend, inputs)


@pytest.mark.case(12)
@every_dtype
@pytest.mark.parametrize(("dstate", "chunk_size"), [(64, 128), (256, 64), (96, 128)])
def test_state_and_chunk_sizes_differ(backend: str, dstate: int, chunk_size: int, dtype: torch.dtype) -> None:
    sizes = {**SMALL, "dstate": dstate, "chunk_size": chunk_size}
    right(backend, make_inputs(dtype, DEVICE, **sizes, seqlen=140))


FINGERPRINT = """
import os, hashlib, torch
torch.set_num_threads(1)
from tilegym_mamba2 import mamba_chunk_scan_combined
from tilegym_mamba2.testing import make_inputs
inputs = make_inputs(torch.{dtype}, "{device}", seqlen=70, z=True, initial_states=True, **{sizes})
out, final = mamba_chunk_scan_combined(**inputs, return_final_states=True, backend="{backend}")
raw = out.float().cpu().numpy().tobytes() + final.cpu().numpy().tobytes()
print(hashlib.sha256(raw).hexdigest())
"""


@pytest.mark.case(15)
@every_dtype
def test_the_same_bits_twenty_times_and_in_another_process(backend: str, dtype: torch.dtype) -> None:
    sizes = SMALL if DEVICE == "cpu" else {}  # Triton's interpreter takes a second for the others
    inputs = make_inputs(dtype, DEVICE, seqlen=70, z=True, initial_states=True, **sizes)
    prints = set()
    for _ in range(20):
        out, final = scan(backend, inputs)
        raw = out.float().cpu().numpy().tobytes() + final.cpu().numpy().tobytes()
        prints.add(hashlib.sha256(raw).hexdigest())
    assert len(prints) == 1
    if dtype == torch.float32:  # a process takes seconds
        name = str(dtype).removeprefix("torch.")
        code = FINGERPRINT.format(backend=backend, dtype=name, device=DEVICE, sizes=sizes)
        root = Path(__file__).parents[1]
        paths = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))
        other = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "PYTHONPATH": paths},
        )
        assert {other.stdout.strip()} == prints


@pytest.mark.case(17)
@every_dtype
@pytest.mark.parametrize("cut", [1, 63, 64, 100])
def test_a_sequence_cut_in_two(backend: str, cut: int, dtype: torch.dtype) -> None:
    inputs = make_inputs(dtype, DEVICE, **SMALL, seqlen=130, decay=(1e-3, 0.1), z=True)
    want, want_final, _ = oracle_scan(**inputs)
    names = ("x", "dt", "B", "C", "z")
    first, state = scan(backend, {**inputs, **{name: inputs[name][:, :cut] for name in names}})
    rest = {name: inputs[name][:, cut:] for name in names}
    second, final = scan(backend, {**inputs, **rest, "initial_states": state})
    assert relative_error(torch.cat([first, second], 1), want) <= budget(dtype)
    assert relative_error(final, want_final) <= budget(dtype)


@pytest.mark.case(18)
@pytest.mark.parametrize("value", [-20.0, -40.0, 25.0, 90.0])
def test_the_ends_of_softplus(backend: str, value: float) -> None:
    """One token at a time, so that a step of 4e-18 is all there is: its relative error is the output's."""
    inputs = make_inputs(torch.float32, DEVICE, **SMALL, seqlen=1, D=None, dt_bias=False)
    inputs["dt"].fill_(value)
    want, want_final, _ = oracle_scan(**inputs)
    step = oracle_chunk_cumsum(inputs["dt"], inputs["A"], 1, None, True)[1].max()
    assert float(step) == pytest.approx(math.log1p(math.exp(value)), rel=1e-12)
    out, final = scan(backend, inputs)
    assert relative_error(out, want) <= 1e-5  # of a step; 40 * 2**-24 is half of what the exponent alone loses
    assert relative_error(final, want_final) <= 1e-5


@pytest.mark.case(19)
@pytest.mark.parametrize("seqlen", [4096])
def test_a_float16_state_past_its_range(backend: str, seqlen: int) -> None:
    sizes = {"batch": 1, "nheads": 1, "ngroups": 1, "headdim": 8, "dstate": 16}
    inputs = make_inputs(torch.float16, DEVICE, **sizes, seqlen=seqlen, chunk_size=256, D=None, decay=(1e-3, 2e-3))
    inputs["A"].fill_(-1e-4)
    inputs["dt"].fill_(2.0)
    for name in ("x", "B", "C"):
        inputs[name].abs_()
    inputs["x"] += 4
    inputs["B"] += 2
    inputs["C"] *= 1e-3
    out, final = right(backend, inputs)
    assert final.max() > 65504
    assert out.isfinite().all()


@pytest.mark.case(20)
@every_dtype
@pytest.mark.parametrize(
    ("nheads", "headdim", "dstate"), [(1, 80, 16), (1, 56, 96), (24, 8, 16), (48, 8, 8), (112, 4, 8)]
)
def test_sizes_of_models(backend: str, nheads: int, headdim: int, dstate: int, dtype: torch.dtype) -> None:
    sizes = {"batch": 1, "nheads": nheads, "ngroups": 1, "headdim": headdim, "dstate": dstate}
    right(backend, make_inputs(dtype, DEVICE, **sizes, seqlen=66, chunk_size=64))


@pytest.mark.case(22)
@every_dtype
@pytest.mark.parametrize("seqlen", [0, 1, 63, 64, 65])
@pytest.mark.parametrize("batch", [0, 1, 2])
def test_edges_of_batch_and_seqlen(backend: str, batch: int, seqlen: int, dtype: torch.dtype) -> None:
    sizes = {**SMALL, "batch": batch, "seqlen": seqlen, "chunk_size": 64, "decay": (0.1, 5.0)}
    inputs = make_inputs(torch.float32, DEVICE, **sizes, initial_states=True)
    inputs = {name: value.to(dtype) if name in ("x", "dt", "B", "C") else value for name, value in inputs.items()}
    out, final = right(backend, inputs)
    assert out.shape == (batch, seqlen, 2, 16)
    if not seqlen:
        assert torch.equal(final, inputs["initial_states"])
        assert final.data_ptr() != inputs["initial_states"].data_ptr() or not batch
        _, final = scan(backend, {**inputs, "initial_states": None})
        assert torch.equal(final, torch.zeros(batch, 2, 16, 16, device=DEVICE))


@pytest.mark.case(23)
@every_dtype
def test_slices_of_a_projection_and_transposed_views(backend: str, dtype: torch.dtype) -> None:
    inputs = make_inputs(dtype, DEVICE, batch=2, nheads=3, ngroups=1, seqlen=70, z=True)
    want, want_final = right(backend, inputs)
    tensors = {name: value for name, value in inputs.items() if isinstance(value, torch.Tensor)}
    projected = {**inputs, **relayout(tensors, "projection")}
    assert len({projected[name].untyped_storage().data_ptr() for name in ("x", "B", "C", "dt", "z")}) == 1
    turned = {**projected, **relayout({name: tensors[name] for name in ("x", "z")}, "transposed")}
    assert turned["z"].stride(0) == 1
    for strided in (projected, turned):
        out, final = scan(backend, strided)
        assert relative_error(out, want) <= budget(dtype)
        assert relative_error(final, want_final) <= budget(dtype)


@pytest.mark.case(24)
@every_dtype
@pytest.mark.parametrize("state_dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
def test_dtypes_of_initial_states(backend: str, layout: str, state_dtype: torch.dtype, dtype: torch.dtype) -> None:
    inputs = make_inputs(dtype, DEVICE, **SMALL, seqlen=66, initial_states=state_dtype, decay=(1e-3, 0.1))
    inputs.update(relayout({"initial_states": inputs["initial_states"]}, layout))
    before = inputs["initial_states"].clone()
    right(backend, inputs)
    assert torch.equal(inputs["initial_states"], before)
