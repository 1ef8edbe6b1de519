"""What only a GPU can show: large offsets and grids, streams, devices, CUDA graphs, processes."""

import hashlib
import subprocess
import sys

import pytest
import torch

from tilegym_mamba2 import mamba_chunk_scan_combined
from tilegym_mamba2.testing import budget, make_inputs, oracle_scan, relative_error

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

BACKENDS = ["cutile", "triton", "torch-reference"]
KERNELS = ["cutile", "triton"]


def scan(inputs, backend, **changes):
    return mamba_chunk_scan_combined(**{**inputs, **changes}, return_final_states=True, backend=backend)


def assert_equals_oracle(got, want, dtype=torch.bfloat16):
    for name, value, right in zip(("out", "final_states"), got, want, strict=False):
        assert relative_error(value, right) <= budget(dtype), name


@pytest.fixture(autouse=True)
def give_memory_back():
    yield
    torch.cuda.empty_cache()


@pytest.mark.parametrize("backend", KERNELS)
def test_offsets_beyond_int32(backend):
    """Case 1: every input is a view of one projection with more than 2**31 elements and a row stride of 35,072."""
    projection = torch.empty(4, 40960, 35072, dtype=torch.bfloat16, device="cuda")
    assert projection.numel() > 2**31
    inputs = make_inputs(
        torch.bfloat16, "cuda", batch=4, seqlen=40960, nheads=4, headdim=64, ngroups=1, dstate=64, z=True
    )
    views, start = {}, 34000
    for name in ("x", "z", "B", "C", "dt"):
        flat = inputs[name].flatten(2)
        views[name] = projection[:, :, start : start + flat.shape[2]].copy_(flat).view(inputs[name].shape)
        start += flat.shape[2] + 8
    for view, contiguous in zip(scan(inputs, backend, **views), scan(inputs, backend), strict=True):
        assert torch.equal(view, contiguous)


@pytest.mark.parametrize("backend", KERNELS)
def test_more_than_2_to_the_31_elements(backend):
    """The last tokens of a long row equal those of its second half alone, given the first half's state."""
    seqlen = 2**31 // (64 * 64) + 4096
    inputs = make_inputs(torch.bfloat16, "cuda", batch=1, seqlen=64, nheads=64, headdim=64, ngroups=1, dstate=64)
    for name in ("x", "dt", "B", "C"):
        short = inputs[name]
        inputs[name] = torch.randn(1, seqlen, *short.shape[2:], dtype=torch.bfloat16, device="cuda")
    assert inputs["x"].numel() > 2**31
    out, final = scan(inputs, backend, dt_softplus=True)
    half = seqlen // 2
    parts = {name: inputs[name][:, half:] for name in ("x", "dt", "B", "C")}
    first = {name: inputs[name][:, :half] for name in ("x", "dt", "B", "C")}
    _, carried = scan(inputs, backend, **first)
    second, second_final = scan(inputs, backend, **parts, initial_states=carried)
    assert relative_error(out[:, -4096:], second[:, -4096:]) <= budget(torch.bfloat16)
    assert relative_error(final, second_final) <= budget(torch.bfloat16)


@pytest.mark.parametrize("backend", KERNELS)
@pytest.mark.parametrize("shape", [(4096, 4096, 1), (70000, 64, 1), (2, 64, 70000)], ids=str)
def test_grid_axes(backend, shape):
    """Case 21, and batch and nheads beyond 65,535."""
    batch, seqlen, nheads = shape
    inputs = make_inputs(
        torch.bfloat16,
        "cuda",
        batch=1,
        seqlen=seqlen,
        nheads=nheads,
        headdim=16,
        ngroups=1,
        dstate=16,
        chunk_size=256,
        decay=(0.05, 0.5),
    )
    rows = {
        name: torch.randn(batch, *inputs[name].shape[1:], device="cuda").to(torch.bfloat16) for name in ("x", "B", "C")
    }
    rows["dt"] = inputs["dt"].expand(batch, -1, -1)
    out, final = scan(inputs, backend, **rows)
    # The first, the middle and the last programs; so many values that rounding averages out.
    few = max(1, 512 // seqlen)
    picked = sorted({row % batch for start in (0, batch // 2, batch - few) for row in range(start, start + few)})
    heads = slice(max(nheads - 8, 0), nheads)
    part = {name: value[picked] for name, value in rows.items()}
    part.update(x=part["x"][:, :, heads], dt=part["dt"][:, :, heads])
    part.update({name: inputs[name][heads] for name in ("A", "D", "dt_bias")})
    assert_equals_oracle((out[picked][:, :, heads], final[picked][:, heads]), oracle_scan(**{**inputs, **part}))


@pytest.mark.parametrize("backend", KERNELS)
@pytest.mark.parametrize("D", ["heads", None])
@pytest.mark.parametrize("decay", [(1e-3, 50.0), (1e-3, 1e-2), (1e-2, 1e-1), (1.0, 50.0)], ids=str)
def test_rounding_of_bfloat16_operands(backend, D, decay):
    """Real bfloat16 products, at a model's sizes: without D nothing exact outweighs the rounding of a long memory."""
    inputs = make_inputs(
        torch.bfloat16, "cuda", seqlen=512, nheads=8, headdim=64, ngroups=1, dstate=128, decay=decay, D=D
    )
    assert_equals_oracle(scan(inputs, backend), oracle_scan(**inputs))


@pytest.mark.parametrize("backend", BACKENDS)
def test_side_stream(backend):
    """The work goes to the current stream: it waits for what that stream does first."""
    inputs = make_inputs(torch.bfloat16, "cuda", seqlen=256)
    want = oracle_scan(**inputs)
    scan(inputs, backend)
    x = inputs["x"].clone()
    inputs["x"].zero_()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        inputs["x"].copy_(x)
        got = scan(inputs, backend)
    stream.synchronize()
    assert_equals_oracle(got, want)


@pytest.mark.parametrize("backend", KERNELS)
@pytest.mark.parametrize("warm", [True, False], ids=["warm", "cold"])
def test_cuda_graph(backend, warm):
    """Case 14: a capture replays with changed data; one of shapes that never ran works or raises clearly."""
    headdim = 64 if warm else 48
    inputs = make_inputs(torch.bfloat16, "cuda", seqlen=300, headdim=headdim, z=True, initial_states=True)
    other = make_inputs(torch.bfloat16, "cuda", seqlen=300, headdim=headdim, z=True, initial_states=True, seed=1)
    if warm:
        scan(inputs, backend)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            got = scan(inputs, backend)
    except RuntimeError as error:
        assert not warm
        assert "captur" in str(error)  # noqa: PT017 (either outcome is right)
        assert_equals_oracle(scan(inputs, backend), oracle_scan(**inputs))
        return
    for name, value in other.items():
        if isinstance(value, torch.Tensor):
            inputs[name].copy_(value)
    graph.replay()
    torch.cuda.synchronize()
    assert_equals_oracle(got, oracle_scan(**other))


@pytest.mark.parametrize("backend", KERNELS)
def test_varlen_is_captured(backend):
    """Nothing reads cu_seqlens or seq_idx on the host."""
    options = {"batch": 1, "seqlen": 300, "cu_seqlens": (0, 0, 100, 137, 300), "initial_states": True}
    inputs = make_inputs(torch.bfloat16, "cuda", **options)
    scan(inputs, backend)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = scan(inputs, backend)
    inputs["cu_seqlens"].copy_(torch.tensor([0, 64, 64, 201, 300]))
    graph.replay()
    torch.cuda.synchronize()
    assert_equals_oracle(got, oracle_scan(**inputs))


@pytest.mark.parametrize("backend", KERNELS)
def test_other_device(backend):
    """Case 16."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    inputs = make_inputs(torch.bfloat16, "cuda:1", seqlen=256)
    assert torch.cuda.current_device() == 0
    got = scan(inputs, backend)
    assert got[0].device == torch.device("cuda:1")
    assert_equals_oracle(got, oracle_scan(**inputs))


BITS = """
import hashlib, sys, torch
from tilegym_mamba2 import mamba_chunk_scan_combined
from tilegym_mamba2.testing import make_inputs
inputs = make_inputs(torch.bfloat16, "cuda", batch=3, seqlen=1000, nheads=8, headdim=64, dstate=128, z=True)
for _ in range(20):
    got = mamba_chunk_scan_combined(**inputs, return_final_states=True, backend=sys.argv[1])
    print(hashlib.sha256(b"".join(t.float().cpu().numpy().tobytes() for t in got)).hexdigest())
"""


@pytest.mark.parametrize("backend", KERNELS)
def test_same_bits_in_two_processes(backend):
    """Case 15."""
    runs = [
        subprocess.run([sys.executable, "-c", BITS, backend], capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    ]
    hashes = {line for run in runs for line in run.split()}
    assert len(hashes) == 1
    assert len(runs[0].split()) == 20
    assert hashes != {hashlib.sha256().hexdigest()}


@pytest.mark.parametrize("backend", KERNELS)
@pytest.mark.parametrize(("headdim", "dstate"), [(128, 256), (256, 64), (512, 64), (64, 512)], ids=str)
def test_shared_memory(backend, headdim, dstate):
    """Case 5: float32 tiles that are too large get smaller ones, or a refusal that names the limit."""
    inputs = make_inputs(
        torch.float32, "cuda", batch=1, nheads=2, seqlen=200, headdim=headdim, dstate=dstate, chunk_size=128
    )
    try:
        got = scan(inputs, backend)
    except NotImplementedError as refusal:
        assert headdim > 256 or dstate > 256, "the models' sizes must work"
        assert any(word in str(refusal) for word in ("headdim", "dstate"))  # noqa: PT017 (either outcome is right)
        return
    assert_equals_oracle(got, oracle_scan(**inputs), torch.float32)
