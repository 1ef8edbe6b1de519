"""Every cuTile kernel that a call can launch compiles for five architectures, and is what it should be on Hopper.

The ops run on meta tensors with their launches recorded, so a new kernel or configuration is covered by existing.
Most cases are marked compile_all; the quick run keeps a sample.
"""

import glob
import inspect
import math
import os
import re
import subprocess
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("cuda.tile", reason="cuda-tile is not installed: pip install 'cuda-tile[tileiras]'")

import cuda.tile as ct
from cuda.tile.compilation import (
    ArrayConstraint,
    CallingConvention,
    ConstantConstraint,
    KernelSignature,
    ScalarConstraint,
    export_kernel,
    mangle_kernel_name,
)

from tilegym_mamba2 import registry
from tilegym_mamba2.backends import cutile

bf16, f16, f32 = torch.bfloat16, torch.float16, torch.float32


@dataclass(frozen=True)
class Call:
    """Sizes and options of a call; the ops take what they have of them."""

    name: str
    batch: int = 8
    seqlen: int = 4096
    nheads: int = 80
    headdim: int = 64
    ngroups: int = 1
    dstate: int = 128
    chunk_size: int = 64
    dtype: torch.dtype = bf16
    B_dtype: torch.dtype | None = None
    D: str | None = "heads"
    z: bool = False
    initial_states: torch.dtype | None = None
    seq_idx: bool = False
    varlen: bool = False
    slots: bool = False
    tied: bool = True
    precision: str = "highest"
    layout: str = "contiguous"


CALLS = (
    Call("mamba2-2.7b"),
    Call("nemotron-h-8b", batch=1, seqlen=8192, nheads=128, ngroups=8, chunk_size=128, z=True),
    Call("article", batch=4, seqlen=16384, nheads=8, chunk_size=256, initial_states=f32, slots=True),
    Call("latency", batch=1, seqlen=1000, D="channels"),
    Call("sequences", seq_idx=True, z=True, D=None, initial_states=bf16),
    Call("sequences_chunk_128", chunk_size=128, seq_idx=True),
    Call("packed", batch=1, varlen=True, initial_states=f32),
    Call("packed_sequences", batch=1, varlen=True, seq_idx=True, z=True, D="channels"),
    Call("packed_float32", batch=1, varlen=True, dtype=f32, dstate=64),
    Call("float16", dtype=f16, z=True, tied=False),
    Call("tf32", dtype=f32, precision="high"),
    Call("float32", dtype=f32, seq_idx=True),
    Call("mixed", dtype=bf16, B_dtype=f16, precision="high"),
    Call("odd", seqlen=1001, headdim=80, dstate=96, nheads=24, chunk_size=40, layout="unaligned"),
    Call("projection", nheads=24, headdim=56, dstate=64, chunk_size=128, layout="projection"),
    Call("wide_state", batch=4, seqlen=2048, nheads=256, ngroups=8, dstate=256),
    Call("tiny", batch=2, seqlen=9, nheads=2, headdim=16, dstate=16, chunk_size=1),
    Call("offsets_past_2**31", batch=4, seqlen=40960, nheads=8, layout="far_apart"),
)
# Other architectures compile the calls in which a kernel's types and branches differ most.
ELSEWHERE = {"mamba2-2.7b", "nemotron-h-8b", "sequences", "float16", "float32", "odd"}
# sm_103 gets the kernels of sm_100 with the same hints: each of them once, of one call.
CALLS_OF = {"sm_90": {call.name for call in CALLS}, "sm_103": {"mamba2-2.7b"}}
TUNED = {"mamba2-2.7b", "nemotron-h-8b"}  # the calls whose every candidate is compiled, on Hopper
QUICK = {"sm_90": ("mamba2-2.7b", "nemotron-h-8b"), "sm_80": ("mamba2-2.7b",), "sm_100": ("mamba2-2.7b",)}
# Not held to have no spills: an array that TMA can't load takes address registers, and no tuned call has one.
UNTUNED = ("odd", "projection", "mixed", "offsets_past_2**31")
MATRIX_KERNELS = ("_fwd_pass_state_kernel", "_compute_out_kernel", "_scan_kernel")
# Scalar multiplications instead of tensor cores, in the stages: IEEE products of float32 operands.
SCALAR = ("float32", "packed_float32")


def _arguments(op: str, call: Call) -> dict[str, Any]:
    """Every argument of an op's implementation, by name, as meta tensors."""
    channels = (call.nheads, call.headdim)
    rows = 5 if call.varlen and op == "mamba_chunk_scan" else call.batch
    tokens = (call.batch,) if op == "selective_state_update" else (call.batch, call.seqlen)
    chunks = torch.empty(call.batch, call.nheads, -(-call.seqlen // call.chunk_size), call.chunk_size, device="meta")
    B = _lay_out(call, call.B_dtype or call.dtype, *tokens, call.ngroups, call.dstate)

    def per_channel(*shape: int, trailing: tuple[int, ...] = ()) -> Tensor:
        """Expanded from one number per head as a model does, or full."""
        heads = (call.nheads, 1, *(1 for _ in trailing)) if call.tied else (*channels, *trailing)
        return torch.empty(*shape, *heads, device="meta").expand(*shape, *channels, *trailing)

    arguments: dict[str, Any] = {
        "x": _lay_out(call, call.dtype, *tokens, *channels),
        "dt": _lay_out(call, call.dtype, *tokens, call.nheads),
        "A": torch.empty(call.nheads, device="meta"),
        "B": B,
        "C": B,
        "chunk_size": call.chunk_size,
        "D": torch.empty(channels if call.D == "channels" else call.nheads, device="meta"),
        "z": _lay_out(call, call.dtype, *tokens, *channels) if call.z else None,
        "dt_bias": torch.empty(call.nheads, device="meta"),
        "initial_states": torch.empty(rows, *channels, call.dstate, dtype=call.initial_states, device="meta"),
        "seq_idx": torch.empty(tokens, dtype=torch.int32, device="meta") if call.seq_idx else None,
        "cu_seqlens": torch.empty(rows + 1, dtype=torch.int32, device="meta") if call.varlen else None,
        "dt_softplus": True,
        "dt_limit": (0.0, float("inf")),
        "state_dtype": None,
        "dt_out": chunks,
        "dA_cumsum": chunks,
        "states": torch.empty(
            call.batch,
            chunks.shape[2],
            *channels,
            call.dstate,
            dtype=f32 if call.dtype == f16 else call.dtype,
            device="meta",
        ),
        "state": torch.empty(call.batch, *channels, call.dstate, dtype=call.dtype, device="meta"),
        "state_batch_indices": torch.empty(call.batch, dtype=torch.int32, device="meta") if call.slots else None,
    }
    if call.initial_states is None:
        arguments["initial_states"] = None
    if call.D is None:
        arguments["D"] = None
    if op == "selective_state_update":
        arguments["dt"] = per_channel(call.batch)
        arguments["A"] = per_channel(trailing=(call.dstate,))
        arguments["dt_bias"] = per_channel()
        arguments["D"] = None if call.D is None else per_channel()
    return arguments


def _lay_out(call: Call, dtype: torch.dtype, *shape: int) -> Tensor:
    *rows, last = shape
    if call.layout == "far_apart":
        return torch.empty(*rows, 4096 * last, dtype=dtype, device="meta")[..., :last]
    if call.layout == "unaligned":
        return torch.empty(*rows, last + 3, dtype=dtype, device="meta")[..., 1 : last + 1]
    if call.layout == "projection" and len(shape) > 2:
        batch, seqlen, *channels = shape
        width = math.prod(channels)
        row = torch.empty(batch, seqlen, width + 1024, dtype=dtype, device="meta")[..., 512 : 512 + width]
        return row.unflatten(2, channels)
    return torch.empty(shape, dtype=dtype, device="meta")


def _run(op: str, call: Call) -> None:
    given = _arguments(op, call)
    problem: Any = SimpleNamespace(
        op=op,
        device=torch.device("meta"),
        differentiated_argument=None,
        dtypes={name: value.dtype for name, value in given.items() if isinstance(value, Tensor)},
        nseq=len(given["cu_seqlens"]) - 1 if call.varlen else 0,
        nchunks=given["dt_out"].shape[2],
        **{name: getattr(call, name) for name in _SIZES},
    )
    function = registry.select(op, problem, "cutile").function
    function(*(given[name] for name in inspect.signature(function).parameters))


_SIZES = ("batch", "seqlen", "nheads", "headdim", "ngroups", "dstate", "chunk_size")


def _record(op: str, call: Call, architecture: str, candidate: int) -> tuple[list[cutile.Recorded], int]:
    """The launches of a call and the number of configurations that it had to choose from."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(call.precision)
    try:
        with torch.no_grad(), cutile.recording(_capability(architecture), candidate) as recorded:
            _run(op, call)
    except NotImplementedError:  # the backend says which calls it can't do; test_wrong_use.py holds it to that
        return [], 1
    finally:
        torch.set_float32_matmul_precision(before)
    return recorded.launches, recorded.candidates_seen


def _capability(architecture: str) -> tuple[int, int]:
    number = int(architecture.removeprefix("sm_"))
    return number // 10, number % 10


def _array(tensor: Tensor, wide: bool) -> ArrayConstraint:
    """What the dispatcher assumes of an array: its unit strides, and what 16 bytes or 16 elements divide."""
    size = tensor.element_size()
    return ArrayConstraint(
        _DTYPES[tensor.dtype],
        tensor.dim(),
        index_dtype=ct.int64 if wide else ct.int32,
        stride_lower_bound_incl=0,
        alias_groups=(),
        may_alias_internally=False,
        stride_constant=[1 if stride == 1 else None for stride in tensor.stride()],
        stride_divisible_by=[max(1, 16 // size) if stride * size % 16 == 0 else 1 for stride in tensor.stride()],
        shape_divisible_by=[16 if extent % 16 == 0 else 1 for extent in tensor.shape],
        base_addr_divisible_by=16 if tensor.storage_offset() * size % 16 == 0 else size,
    )


_DTYPES = {bf16: ct.bfloat16, f16: ct.float16, f32: ct.float32, torch.int32: ct.int32, torch.int64: ct.int64}


def _signature(kernel: Any, launch: cutile.Recorded) -> KernelSignature:
    constraints: list[Any] = []
    annotations = kernel._annotated_function.parameter_annotations
    for argument, annotation in zip(launch.arguments, annotations, strict=True):
        if isinstance(argument, Tensor):
            constraints.append(_array(argument, launch.wide))
        elif annotation.constant:
            constraints.append(ConstantConstraint(argument))
        else:
            constraints.append(ScalarConstraint(ct.float32 if isinstance(argument, float) else ct.int32))
    return KernelSignature(constraints, CallingConvention.cutile_python_v1())


@dataclass(frozen=True)
class Case:
    """One kernel to compile: a launch of a call, found again by recording it."""

    op: str
    call: Call
    architecture: str
    candidate: int
    position: int
    kernel: str

    def __str__(self) -> str:
        return f"{self.architecture}-{self.call.name}-{self.kernel.strip('_').removesuffix('_kernel')}-{self.candidate}"

    @property
    def quick(self) -> bool:
        return self.candidate == 0 and self.call.name in QUICK.get(self.architecture, ())


def _cases() -> Iterator[Case]:
    """Each kernel once for the same types, constants, hints and architecture."""
    for architecture in cutile.ARCHITECTURES:
        seen: set[Any] = set()
        for op in registry.ops():
            if not registry.has_implementation(op, "cutile"):
                continue
            for call in CALLS:
                if call.name not in CALLS_OF.get(architecture, ELSEWHERE):
                    continue
                count, candidate = 1, 0
                while candidate < count:
                    launches, seen_candidates = _record(op, call, architecture, candidate)
                    if architecture == "sm_90" and call.name in TUNED:
                        count = seen_candidates
                    for position, launch in enumerate(launches):
                        name = launch.kernel._pyfunc.__name__
                        signature = mangle_kernel_name(name, _signature(launch.kernel, launch._replace(wide=False)))
                        key = (signature, launch.hints, launch.wide)
                        if key not in seen:
                            seen.add(key)
                            yield Case(op, call, architecture, candidate, position, name)
                    candidate += 1


def _parameters() -> list[Any]:
    return [pytest.param(case, id=str(case), marks=() if case.quick else pytest.mark.compile_all) for case in _cases()]


def _tool(name: str) -> str:
    found = glob.glob(os.path.join(sysconfig.get_path("purelib"), "nvidia", "**", "bin", name), recursive=True)
    if not found:
        pytest.skip(f"{name} is not installed: pip install nvidia-cuda-{name}")
    return found[0]


def _disassembled(*options: str, cubin: Path) -> str:
    done = subprocess.run([_tool("cuobjdump"), *options, str(cubin)], capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


@pytest.mark.parametrize("case", _parameters())
def test_kernel_compiles(case: Case, tmp_path: Path) -> None:
    launches, _ = _record(case.op, case.call, case.architecture, case.candidate)
    launch = launches[case.position]
    kernel = cutile.specialise(launch.kernel, launch.arguments, launch.hints, launch.wide)
    cubin = tmp_path / "kernel.cubin"
    export_kernel(kernel, [_signature(kernel, launch)], cubin, gpu_code=case.architecture, output_format="cubin")
    assert cubin.read_bytes()[:4] == b"\x7fELF"
    if case.architecture == "sm_90" and case.candidate == 0:
        usage = re.search(r"REG:(\d+) STACK:(\d+)", _disassembled("-res-usage", cubin=cubin))
        assert usage is not None
        assert usage[2] == "0" or case.call.name in UNTUNED, f"{usage[2]} bytes of registers spill to local memory"
        code = _disassembled("-sass", cubin=cubin)
        scalar = case.call.name in SCALAR and case.op != "mamba_chunk_scan"
        if case.kernel in MATRIX_KERNELS and not scalar:
            assert "HGMMA" in code
        if launch.dependent:
            assert "ACQBULK" in code, "it is launched early and does not wait for what comes before it"


def test_every_kernel_has_a_case() -> None:
    kernels = {case.kernel for case in _cases()}
    assert {"_chunk_cumsum_kernel", "_fwd_pass_state_kernel", "_compute_out_kernel"} <= kernels
    assert "_selective_state_update_kernel" in kernels
