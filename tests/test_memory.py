"""The reference is usable: its extra memory is bounded."""

from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from tilegym_mamba2 import mamba_chunk_scan_combined
from tilegym_mamba2.testing import make_inputs


def peak_bytes(function: Any) -> int:
    """The most that torch's CPU allocator had given out at once during a call, its results included."""
    function()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        function()
    assert trace.profiler is not None
    assert trace.profiler.kineto_results is not None
    events = [event for event in trace.profiler.kineto_results.events() if event.name() == "[memory]"]
    peak = held = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def test_the_measure_measures() -> None:
    def allocate() -> None:
        first = torch.ones(1000)
        del first
        second, third = torch.ones(500), torch.ones(800)
        del second, third

    assert 1300 * 4 <= peak_bytes(allocate) < 1300 * 4 + 1000


@pytest.mark.parametrize(
    "sizes",
    [
        {"nheads": 8, "headdim": 64, "dstate": 128, "chunk_size": 256, "seqlen": 1024, "ngroups": 1},
        {"nheads": 8, "headdim": 16, "dstate": 16, "chunk_size": 64, "seqlen": 2048, "ngroups": 8},
        {"nheads": 1, "headdim": 1, "dstate": 1, "chunk_size": 512, "seqlen": 512, "ngroups": 1},
        {"nheads": 1, "headdim": 1, "dstate": 1, "chunk_size": 1, "seqlen": 512, "ngroups": 1},
        {"nheads": 2, "headdim": 256, "dstate": 256, "chunk_size": 1, "seqlen": 1024, "ngroups": 1},
        {"nheads": 4, "headdim": 64, "dstate": 64, "chunk_size": 128, "seqlen": 1024, "ngroups": 1, "batch": 2},
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("packed", [False, True])
def test_extra_memory_is_bounded(sizes: dict[str, int], dtype: torch.dtype, packed: bool) -> None:
    batch, seqlen = sizes.get("batch", 1), sizes["seqlen"]
    options: dict[str, Any] = {"z": True, "initial_states": True, "batch": batch, **sizes}
    if packed:
        options["seq_idx"] = [[0, 100, 1, seqlen - 100]] * batch
    inputs = make_inputs(dtype, **options)
    with torch.no_grad():
        peak = peak_bytes(lambda: mamba_chunk_scan_combined(**inputs, backend="torch-reference"))
    bound = 4 * batch * sizes["nheads"] * seqlen * (sizes["chunk_size"] + sizes["headdim"] + sizes["dstate"])
    assert peak / 4 <= bound, f"{peak / 4 / bound:.2f} of the bound, in float32 numbers"


def test_a_chunk_longer_than_the_row_takes_no_memory() -> None:
    inputs = make_inputs(seqlen=100, chunk_size=10**12)
    with torch.no_grad():
        out = mamba_chunk_scan_combined(**inputs, backend="torch-reference")
        want = mamba_chunk_scan_combined(**{**inputs, "chunk_size": 100}, backend="torch-reference")
    assert torch.equal(out, want)  # pyright: ignore[reportArgumentType]
