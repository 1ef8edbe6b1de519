"""The fused forward's kernels that read tiles by TMA, in Triton's interpreter, planned as if a GPU had the tensors."""

import os
from typing import Any

import pytest
import torch

from tilegym_mamba2 import mamba_chunk_scan_combined
from tilegym_mamba2.testing import budget, make_inputs, oracle_scan, relative_error

triton: Any = pytest.importorskip("triton", reason="triton is not installed: pip install 'triton>=3.4'")
pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET", "0") in ("", "0"),
    reason="needs TRITON_INTERPRET=1, which a GPU's tests don't set",
)

if tuple(int(part) for part in triton.__version__.split(".")[:2]) < (3, 6):
    pytest.skip("this Triton's interpreter takes strides of 16 elements alone for tiles", allow_module_level=True)

from tilegym_mamba2.backends import triton as backend  # noqa: E402

SHAPES: dict[str, tuple[int, dict[str, Any]]] = {
    "whole": (4, {"batch": 2, "seqlen": 101, "nheads": 4, "ngroups": 2, "z": True}),
    "segments": (16, {"batch": 2, "seqlen": 1100, "nheads": 2, "initial_states": True}),
    "wide": (4, {"batch": 2, "seqlen": 70, "nheads": 2, "headdim": 72, "dstate": 136}),
    "projection": (4, {"batch": 2, "seqlen": 70, "nheads": 8, "layout": "projection"}),
    "packed": (4, {"batch": 1, "seqlen": 300, "nheads": 2, "cu_seqlens": (0, 0, 100, 101, 165, 300)}),
    "packed segments": (16, {"batch": 1, "seqlen": 1500, "nheads": 1, "cu_seqlens": (0, 1100, 1500)}),
}
DTYPES = (torch.float16, torch.float32)


@pytest.fixture
def described(monkeypatch: pytest.MonkeyPatch, as_on_hopper: Any) -> Any:
    """A function that gives CPU tensors to a GPU of so many multiprocessors; returns the shapes that tiles are of."""
    shapes: list[tuple[int, ...]] = []
    describe = backend._descriptor

    def spy(tiles: backend.Tiles, base: Any) -> Any:
        assert max(tiles.strides) * tiles.dtype.itemsize < 2**40
        shapes.append(tiles.shape)
        return describe(tiles, base)

    def use(multiprocessors: int) -> list[tuple[int, ...]]:
        as_on_hopper(multiprocessors)
        return shapes

    monkeypatch.setattr(backend, "_descriptor", spy)
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")  # TF32 products, which take tiles
    yield use
    torch.set_float32_matmul_precision(precision)


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [(dtype, shape) for shape in SHAPES for dtype in DTYPES if (dtype, shape) != (torch.float32, "wide")],
    ids=str,
)
def test_tiles(described: Any, dtype: torch.dtype, shape: str) -> None:
    multiprocessors, options = SHAPES[shape]
    inputs = make_inputs(dtype, **{"headdim": 40, "dstate": 24, "ngroups": 1, "chunk_size": 64, **options})
    shapes = described(multiprocessors)
    out, final_states = mamba_chunk_scan_combined(**inputs, return_final_states=True, backend="triton")
    batch, seqlen, nheads, headdim = inputs["x"].shape
    ntensors = 3 if "cu_seqlens" in options else 4  # out of packed sequences is described by the kernel
    assert shapes[-ntensors:].count((batch, nheads, seqlen, headdim)) == ntensors - 2
    assert (len(shapes) > ntensors) == ("segments" in shape)
    want, want_final = oracle_scan(**inputs)[:2]
    for name, value, right in (("out", out, want), ("final_states", final_states, want_final)):
        assert relative_error(value, right) <= budget(dtype), name


@pytest.mark.parametrize("seqlens", [(100, 101, 300), (1100, 1500)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_follows_a_sequence_stays_out(described: Any, dtype: torch.dtype, seqlens: tuple[int, ...]) -> None:
    """The last tile of a packed sequence holds tokens of the next one: NaN there, and infinity."""
    inputs = make_inputs(
        dtype, batch=1, seqlen=seqlens[-1], nheads=2, headdim=40, dstate=24, ngroups=1, cu_seqlens=(0, *seqlens)
    )
    clean, _, clean_states = oracle_scan(**inputs)
    for name, value in (("x", "nan"), ("B", "inf"), ("C", "nan")):
        inputs[name] = inputs[name].clone()
        inputs[name][:, seqlens[0] :] = float(value)
    shapes = described(16)
    out, states = mamba_chunk_scan_combined(**inputs, return_varlen_states=True, backend="triton")
    assert shapes
    assert relative_error(out[:, : seqlens[0]], clean[:, : seqlens[0]]) <= budget(dtype)
    assert relative_error(states[0], clean_states[0]) <= budget(dtype)
    assert not out[:, seqlens[0] :].isfinite().any()


def test_the_next_sequence_does_not_decide_how_one_is_walked(described: Any) -> None:
    """Outputs of the next sequence that overflow in float16 change no bit of this one's."""
    inputs = make_inputs(
        torch.float16, batch=1, seqlen=200, nheads=2, headdim=40, dstate=24, ngroups=1, cu_seqlens=(0, 100, 200)
    )
    inputs["D"] = torch.full_like(inputs["D"], 20.0)
    described(4)
    plain = mamba_chunk_scan_combined(**inputs, backend="triton")
    inputs["x"] = inputs["x"].clone()
    inputs["x"][:, 100:] *= 3000
    large = mamba_chunk_scan_combined(**inputs, backend="triton")
    assert not large.isfinite().all()
    assert torch.equal(plain[:, :100], large[:, :100])


def test_the_stride_of_an_axis_of_one_element_means_nothing(described: Any) -> None:
    inputs = make_inputs(torch.float16, batch=1, seqlen=70, nheads=2, headdim=40, dstate=24, ngroups=1)
    shapes = described(4)
    want = mamba_chunk_scan_combined(**inputs, backend="triton")
    for name in ("x", "B", "C"):
        strides = inputs[name].stride()
        inputs[name] = inputs[name].as_strided(inputs[name].shape, (2**39, *strides[1:]))
    got = mamba_chunk_scan_combined(**inputs, backend="triton")
    assert len(shapes) == 8
    assert torch.equal(got, want)
