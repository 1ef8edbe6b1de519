"""The fused forward as it is planned for Hopper, in Triton's interpreter: all of it but the kernel in Gluon.

That kernel's place takes one that sets flags and ruins what the second walk has to write.
"""

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

from tilegym_mamba2.backends import triton as backend  # noqa: E402
from tilegym_mamba2.ops.mamba_chunk_scan import triton_ as implementation  # noqa: E402

if ".".join(triton.__version__.split(".")[:2]) not in implementation._GLUON_VERSIONS:
    pytest.skip("the kernel for Hopper is not written for this Triton", allow_module_level=True)

from tilegym_mamba2.ops.mamba_chunk_scan import _triton_hopper  # noqa: E402

bf16 = torch.bfloat16


class Flags:
    """In place of the kernel in Gluon: sets every flag, or the one of a program and an item."""

    def __init__(self, only: tuple[int, int] | None = None):
        self.only = only
        self.programs: list[int] = []

    def __getitem__(self, grid: tuple[int]) -> Any:
        self.programs.append(grid[0])
        return self.run

    def run(self, *arguments: Any) -> None:
        final, flags, out = arguments[5:8]
        out.fill_(float("nan"))
        final.fill_(float("nan"))
        flags.zero_()
        flags[: 2 * self.programs[-1]] = self.only is None
        if self.only is not None:
            flags[2 * self.only[0] + self.only[1]] = 1


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch, as_on_hopper: Any) -> Any:
    """CPU tensors are planned for as if a small Hopper had them."""

    def use(multiprocessors: int, only: tuple[int, int] | None = None) -> Flags:
        flags = Flags(only)
        monkeypatch.setattr(_triton_hopper, "_scan_hopper_kernel", flags)
        as_on_hopper(multiprocessors)
        return flags

    return use


def scan(inputs: dict[str, Any], **changes: Any) -> Any:
    return mamba_chunk_scan_combined(**{**inputs, **changes}, return_final_states=True, backend="triton")


SHAPES: dict[str, tuple[int, dict[str, Any]]] = {
    "whole": (4, {"batch": 2, "seqlen": 200, "nheads": 4, "ngroups": 2}),
    "odd": (4, {"batch": 2, "seqlen": 130, "nheads": 6, "ngroups": 2, "z": True}),
    "segments": (8, {"batch": 1, "seqlen": 64 * 17, "nheads": 2}),
    "mixed": (2, {"batch": 3, "seqlen": 64 * 17, "nheads": 2, "headdim": 40, "D": None}),
    "headdim": (4, {"batch": 1, "seqlen": 130, "nheads": 3, "headdim": 160, "initial_states": True}),
    "packed": (4, {"batch": 1, "seqlen": 300, "nheads": 2, "cu_seqlens": (0, 100, 100, 164, 300)}),
    "seq_idx": (4, {"batch": 2, "seqlen": 200, "nheads": 2, "seq_idx": ((5, 70, 1, 130),) * 2}),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_second_walk(hopper: Any, shape: str) -> None:
    """Every item flagged: the second walk makes the whole result, from the parts that the plan made."""
    multiprocessors, options = SHAPES[shape]
    inputs = make_inputs(bf16, **{"headdim": 48, "dstate": 40, "ngroups": 1, "chunk_size": 64, **options})
    flags = hopper(multiprocessors)
    got = scan(inputs)
    assert len(flags.programs) == 1
    for name, value, right in zip(("out", "final_states"), got, oracle_scan(**inputs), strict=False):
        assert relative_error(value, right) <= budget(bf16), name


def test_tokens_of_different_size(hopper: Any) -> None:
    """Each token is right within its own size, whatever that of C at others: the gram is float16."""
    inputs = make_inputs(
        bf16, batch=1, seqlen=130, nheads=2, headdim=48, ngroups=1, dstate=40, D=None, decay=(1e-3, 1.0)
    )
    exponents = torch.tensor([0, 40, -60, 90, -20, 3, 60])
    inputs["C"] = inputs["C"] * (2.0 ** exponents[torch.arange(130) % 7]).to(bf16)[:, None, None]
    inputs["B"] = inputs["B"] * (2.0 ** (torch.arange(130) % 11)).to(bf16)[:, None, None]
    hopper(4)
    out, want = scan(inputs)[0].double(), oracle_scan(**inputs)[0].double()
    assert ((out - want).norm(dim=(2, 3)) / want.norm(dim=(2, 3))).max() <= 4 * budget(bf16)


@pytest.mark.parametrize(
    ("program", "item", "heads", "tokens"), [(0, 1, (1, 2), (0, 704)), (2, 0, (2, 3), (704, 1088))]
)
def test_a_flag_stands_for_its_item(
    hopper: Any, program: int, item: int, heads: tuple[int, int], tokens: tuple[int, int]
) -> None:
    """Of 3 heads in 2 segments each: program 0 has heads 0 and 1, program 1 head 2 twice, the next two what follows."""
    inputs = make_inputs(bf16, batch=1, seqlen=64 * 17, nheads=3, headdim=48, dstate=40, ngroups=1)
    flags = hopper(4, (program + (program == 2), item))
    out, final_states = scan(inputs)
    assert flags.programs == [4]
    want, want_final = oracle_scan(**inputs)[:2]
    written = torch.zeros(out.shape, dtype=torch.bool)
    written[:, slice(*tokens), slice(*heads)] = True
    assert torch.equal(out.isfinite(), written)
    assert relative_error(out[written], want[written]) <= budget(bf16)
    last = torch.zeros(final_states.shape, dtype=torch.bool)
    last[:, slice(*heads)] = tokens[1] == 64 * 17
    assert torch.equal(final_states.isfinite(), last)
    if last.any():
        assert relative_error(final_states[last], want_final[last]) <= budget(bf16)


@pytest.mark.parametrize(
    ("changes", "fits"),
    [
        ({}, True),
        ({"headdim": 32}, False),
        ({"dstate": 136}, False),
        ({"headdim": 44}, False),
        ({"nheads": 1, "ngroups": 1}, True),
        ({"dtypes": {"z": torch.float32}}, False),
        ({"dtypes": {"B": torch.float32}}, False),
        ({"layout": "projection", "nheads": 8}, True),
        ({"layout": "unaligned"}, False),
        ({"layout": "expanded"}, False),
        ({"layout": "transposed"}, True),
        ({"dt_limit": (-0.1, 1.0)}, False),
    ],
    ids=str,
)
def test_what_it_takes(hopper: Any, changes: dict[str, Any], fits: bool) -> None:
    flags = hopper(4)
    inputs = make_inputs(bf16, **{"batch": 1, "seqlen": 64, "headdim": 48, "dstate": 40, "z": True, **changes})
    scan(inputs)
    assert bool(flags.programs) == fits


def test_a_z_that_is_not_aligned_is_not_for_it(hopper: Any) -> None:
    flags = hopper(4)
    inputs = make_inputs(bf16, batch=1, seqlen=64, headdim=48, dstate=40, z=True)
    z = inputs["z"]
    inputs["z"] = torch.cat([z.flatten()[:1], z.flatten()])[1:].view(z.shape)
    assert inputs["z"].data_ptr() % 16
    scan(inputs)
    assert not flags.programs


@pytest.mark.parametrize("has_z", [False, True])
@pytest.mark.parametrize("dstate", [40, 64, 72, 128])
def test_no_configuration_waits_for_itself(dstate: int, has_z: bool) -> None:
    """The kernel fetches a block's tiles while it still holds those of the one before."""
    rule = implementation.hopper_config(backend.DeviceInfo("cuda:90", 132, 232448), dstate, has_z)
    stages = [config.output.num_stages for config in implementation.configurations(rule, hopper=True)]
    assert min(stages) >= 2
