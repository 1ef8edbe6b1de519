"""Workloads by name, and their inputs."""

import difflib
import inspect
import itertools
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any

import torch
import torch.nn.functional as F

from tilegym_mamba2.models import MODELS
from tilegym_mamba2.ops.mamba_chunk_scan import mamba_chunk_scan
from tilegym_mamba2.problem import Problem, scan_problem

Inputs = dict[str, Any]

FLOPS_CHUNK_SIZE = 64  # whose operations count, whatever chunk size an implementation prefers

_SMALLER = 64  # on a CPU, rows are this many times shorter


@dataclass(frozen=True)
class Workload:
    """Sizes of a forward.

    Attributes:
        lengths: of the sequences packed in the only row (batch 1), or empty.
        model: whose layer's inputs are used (batch 1), made from text by `testing.layer_inputs`; None for random ones.
        dtype: of x, B and C, as torch names it.
        precision: of float32 products, as `torch.set_float32_matmul_precision` names it: "highest", or "high" for TF32.
    """

    name: str
    batch: int
    seqlen: int
    nheads: int
    headdim: int
    ngroups: int
    dstate: int
    lengths: tuple[int, ...] = ()
    model: str | None = None
    dtype: str = "bfloat16"
    precision: str = "highest"

    @property
    def shape(self) -> str:
        sizes = (self.batch, self.seqlen, self.nheads, self.headdim, self.ngroups, self.dstate)
        return ", ".join(map(str, sizes))

    def small(self) -> "Workload":
        """The same in a size for a CPU: shorter rows and, but for a model's layer, a quarter of each size."""
        lengths = tuple(max(1, length // _SMALLER) for length in self.lengths)
        seqlen = sum(lengths) or max(16, self.seqlen // _SMALLER)
        if self.model is not None:
            return replace(self, batch=1, seqlen=seqlen)
        ngroups = min(2, self.ngroups)
        return replace(
            self,
            batch=min(2, self.batch),
            seqlen=seqlen,
            nheads=2 * ngroups,
            headdim=self.headdim // 4,
            ngroups=ngroups,
            dstate=self.dstate // 4,
            lengths=lengths,
        )


TABLE = (
    Workload("a", 4, 16384, 8, 64, 1, 128),
    Workload("b", 8, 4096, 80, 64, 1, 128),
    Workload("c", 1, 8192, 128, 64, 8, 128),
    Workload("130m", 8, 2048, 24, 64, 1, 128),
    Workload("a-n64", 4, 16384, 8, 64, 1, 64),
    Workload("a-n256", 4, 16384, 8, 64, 1, 256),
    Workload("a-2k", 4, 2048, 8, 64, 1, 128),
    Workload("latency", 1, 1024, 80, 64, 1, 128),
    Workload("d1", 4, 2048, 32, 64, 1, 64),
    Workload("d2", 4, 2048, 256, 64, 8, 256),
    Workload("falcon7b", 1, 8192, 24, 128, 1, 256),
    Workload("nano9b", 1, 8192, 128, 80, 8, 128),
)
# Seconds that the forward is to take on an H200.
TARGETS: Mapping[str, float] = {
    "a": 110e-6, "b": 320e-6, "c": 170e-6, "130m": 66e-6, "a-n64": 90e-6, "a-n256": 230e-6, "a-2k": 27e-6,
    "latency": 25e-6, "d1": 40e-6, "d2": 650e-6, "falcon7b": 150e-6, "nano9b": 260e-6,
}  # fmt: skip
HEADLINE = replace(TABLE[0], name="headline")
LATENCY = (TABLE[7], Workload("latency-256", 1, 256, 80, 64, 1, 128))


def _packed(name: str, *lengths: int) -> Workload:
    return Workload(name, 1, sum(lengths), 128, 64, 8, 128, lengths)


VARLEN = (
    _packed("varlen-even", *[2048] * 8),
    _packed("varlen-mixed", 8192, 4096, 1900, 1023, 511, 300, 200, 100, 61, 1),
    _packed("varlen-short", *[100, 156] * 32),
)


def _grid(dstates: Sequence[int]) -> tuple[Workload, ...]:
    """The article's: the headline with other row lengths and state sizes."""
    lengths = [1024 << power for power in range(7)]
    return tuple(
        replace(HEADLINE, name=f"seqlen{seqlen}-dstate{dstate}", seqlen=seqlen, dstate=dstate)
        for dstate, seqlen in itertools.product(dstates, lengths)
    )


def _models() -> tuple[Workload, ...]:
    return tuple(
        Workload(f"{name}:{batch}x{seqlen}", batch, seqlen, *_sizes(name))
        for batch, seqlen in ((8, 2048), (1, 8192))
        for name in MODELS
    )


def _sizes(name: str) -> tuple[int, int, int, int]:
    model = MODELS[name]
    return model.nheads, model.headdim, model.ngroups, model.dstate


LAYERS = tuple(
    Workload(f"layer-{name}", 1, 4096, *_sizes(name), model=name) for name in ("mamba2-130m", "nemotron-h-8b")
)

DTYPES = tuple(
    replace(workload, name=f"{workload.name}-{name}", dtype=dtype, precision=precision)
    for name, dtype, precision in (
        ("float16", "float16", "highest"),
        ("tf32", "float32", "high"),
        ("float32", "float32", "highest"),
    )
    for workload in TABLE
    if workload.name in ("a", "c", "130m", "a-2k")
)

SWEEPS: Mapping[str, tuple[Workload, ...]] = {
    "seqlen": _grid([128]),
    "dstate": _grid([64, 128, 256]),
    "models": _models(),
    "table": TABLE,
    "latency": LATENCY,
    "varlen": VARLEN,
    "layers": LAYERS,
    "dtypes": DTYPES,
}

WORKLOADS: Mapping[str, Workload] = {
    workload.name: workload for workload in itertools.chain((HEADLINE,), *SWEEPS.values())
}


def find_workload(name: str) -> Workload:
    """The workload of that name. Raises ValueError, with the nearest names, if there is none."""
    if name not in WORKLOADS:
        nearest = difflib.get_close_matches(name, WORKLOADS, n=3, cutoff=0.3) or list(WORKLOADS)[:13]
        raise ValueError(f"there is no workload {name!r}; there are {', '.join(nearest)} and others")
    return WORKLOADS[name]


@contextmanager
def precision_of(workload: Workload) -> Generator[None]:
    """Context manager: float32 products in the workload's precision."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(workload.precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def make_inputs(workload: Workload, device: torch.device, seed: int) -> Inputs:
    """Makes keyword arguments for `mamba_chunk_scan_combined`, all but chunk_size, fresh for every seed.

    Random: standard normal x, B, C in the workload's dtype; A uniform in [-16, -1]; dt = softplus(normal - 4) and D
    in float32.
    """
    if workload.model is not None:
        return _layer_inputs(workload, device, seed)
    generator = torch.Generator(device).manual_seed(seed)

    dtype: torch.dtype = getattr(torch, workload.dtype)

    def normal(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=torch.float32).to(dtype)

    tokens = (workload.batch, workload.seqlen)
    nheads, grouped = workload.nheads, (workload.ngroups, workload.dstate)
    inputs: Inputs = {
        "x": normal(*tokens, nheads, workload.headdim),
        "dt": F.softplus(normal(*tokens, nheads, dtype=torch.float32) - 4),
        "A": -1 - 15 * torch.rand(nheads, generator=generator, device=device),
        "B": normal(*tokens, *grouped),
        "C": normal(*tokens, *grouped),
        "D": normal(nheads, dtype=torch.float32),
    }
    if workload.lengths:
        offsets = [0, *itertools.accumulate(workload.lengths)]
        inputs["cu_seqlens"] = torch.tensor(offsets, dtype=torch.int32, device=device)
    return inputs


def _layer_inputs(workload: Workload, device: torch.device, seed: int) -> Inputs:
    from tilegym_mamba2.testing import layer_inputs

    assert workload.model is not None
    text = resources.files("tilegym_mamba2.cli").joinpath("text.txt").read_bytes()
    dtype = getattr(torch, workload.dtype)
    inputs = layer_inputs(workload.model, workload.seqlen, text, dtype=dtype, device=device, seed=seed)
    return {name: value for name, value in inputs.items() if name not in ("chunk_size", "state_dtype")}


def rotated_inputs(workload: Workload, device: torch.device) -> list[Inputs]:
    """Inputs to rotate over, together more than twice the L2 cache of a GPU, so that none is found in it."""
    first = make_inputs(workload, device, seed=0)
    if device.type != "cuda":
        return [first]
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    return [first, *(make_inputs(workload, device, seed) for seed in range(1, copies_beyond(cache, first)))]


def copies_beyond(cache: int, inputs: Mapping[Any, Any]) -> int:
    """How many sets of such inputs, at least two, take more than twice the bytes of a cache."""
    return max(2, 1 + 2 * cache // max(1, sum(map(bytes_of, inputs.values()))))


def bytes_of(value: Any) -> int:
    """Bytes that a tensor's elements take in memory, where an expanded view's are few; 0 for anything else."""
    if not isinstance(value, torch.Tensor):
        return 0
    return min(value.numel() * value.element_size(), value.untyped_storage().nbytes())


def cost_of(inputs: Inputs) -> Problem:
    """The validated call, which knows its operations and bytes."""
    call = inspect.signature(mamba_chunk_scan).bind(**inputs, chunk_size=FLOPS_CHUNK_SIZE)
    call.apply_defaults()
    return scan_problem(*(value for name, value in call.arguments.items() if name != "backend"))
