"""Every Triton kernel that a call can launch compiles for three GPUs, with none here, and uses their matrix units.

The ops run on meta tensors with their launches recorded, so a new kernel or configuration is covered by existing.
This file is also the program that compiles them: the tests' own process interprets kernels, which is for good.
"""

import glob
import importlib
import inspect
import json
import os
import re
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tilegym_mamba2 import registry

pytest.importorskip("triton", reason="triton is not installed: pip install 'triton>=3.4'")

bf16, f16, f32 = torch.bfloat16, torch.float16, torch.float32

# name: (architecture as `DeviceInfo` has it, arguments of GPUTarget, shared memory, its matrix instruction)
TARGETS = {
    "sm_90": ("cuda:90", ("cuda", 90, 32), 232448, r"wgmma|mma\.sync"),
    "sm_100": ("cuda:100", ("cuda", 100, 32), 232448, r"tcgen05\.mma|mma\.sync"),
    "gfx942": ("hip:gfx942", ("hip", "gfx942", 64), 65536, "v_mfma"),
}
CALLS: dict[str, dict[str, Any]] = {
    "bfloat16": {},
    "everything": {"z": True, "seq_idx": True, "initial_states": True, "dt_bias": True, "slots": True},
    "packed": {"packed": True, "initial_states": True, "D": False},
    "float16": {"dtype": f16},
    "tf32": {"dtype": f32, "precision": "high"},
    "ieee": {"dtype": f32},
    "wide_state": {"dstate": 256, "headdim": 128},
    "small_state": {"dstate": 64, "headdim": 128, "nheads": 6},
    "partial_headdim": {"headdim": 80, "nheads": 6, "z": True},
    "odd": {"headdim": 80, "dstate": 96, "nheads": 24, "unaligned": True},
}
CALLS_OF = {
    "sm_90": tuple(CALLS),
    "sm_100": ("bfloat16", "packed", "float16"),
    "gfx942": ("bfloat16", "packed", "float16"),
}
# These differ from others in the fused forward alone.
SCAN_CALLS = ("packed", "tf32", "wide_state", "small_state", "partial_headdim")
# The loop of these kernels holds its tiles in registers, on Hopper, where they are tuned; a pointer or two may not fit.
# In float16 three programs share a multiprocessor's registers.
TUNED = ("_scan_segment_kernel", "_scan_output_kernel")
SPILLS_AT_MOST = {("_scan_output_kernel", "float16"): 6}
TUNED_CALLS = ("bfloat16", "packed", "float16", "wide_state")
# Of the calls that the kernel in Gluon takes, those for which it and the one after it are compiled: how often its loop
# waits for products. The compiler adds waits, and warns, where it can't leave products under way; it may spill nothing.
HOPPER = "_scan_hopper_kernel"
HOPPER_WAITS = {"bfloat16": 1, "packed": 2, "partial_headdim": 1}
MATRIX = (*TUNED, "_fwd_pass_state_kernel", "_compute_out_kernel")


def arguments(
    op: str,
    dtype: torch.dtype = bf16,
    batch: int = 4,
    seqlen: int = 4096,
    nheads: int = 8,
    headdim: int = 64,
    dstate: int = 128,
    D: bool = True,
    z: bool = False,
    seq_idx: bool = False,
    initial_states: bool = False,
    dt_bias: bool = False,
    packed: bool = False,
    slots: bool = False,
    unaligned: bool = False,
    precision: str = "highest",
) -> dict[str, Any]:
    """Every argument of an op's implementation, by name, as meta tensors."""
    ngroups, chunk_size = 2, 128
    batch = 1 if packed else batch
    tokens = (batch,) if op == "selective_state_update" else (batch, seqlen)
    channels = (nheads, headdim)

    def make(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        wider = (*shape[:-1], shape[-1] + 1) if unaligned else shape
        return torch.empty(wider, dtype=dtype, device="meta")[..., : shape[-1]]

    def maybe(given: bool, *shape: int, dtype: torch.dtype = f32) -> Tensor | None:
        return make(*shape, dtype=dtype) if given else None

    per_channel = channels if op == "selective_state_update" else (nheads,)
    chunks = make(batch, nheads, -(-seqlen // chunk_size), chunk_size, dtype=f32)
    nseq = 5
    rows = nseq if packed and op == "mamba_chunk_scan" else batch
    return {
        "x": make(*tokens, *channels),
        "dt": make(*tokens, *per_channel),
        "A": make(*channels, dstate, dtype=f32) if op == "selective_state_update" else make(nheads, dtype=f32),
        "B": make(*tokens, ngroups, dstate),
        "C": make(*tokens, ngroups, dstate),
        "chunk_size": chunk_size,
        "D": maybe(D, *per_channel),
        "z": maybe(z, *tokens, *channels, dtype=dtype),
        "dt_bias": maybe(dt_bias, *per_channel),
        "initial_states": maybe(initial_states, rows, *channels, dstate),
        "seq_idx": maybe(seq_idx, *tokens, dtype=torch.int32),
        "cu_seqlens": maybe(packed, nseq + 1, dtype=torch.int32),
        "dt_softplus": True,
        "dt_limit": (0.0, float("inf")),
        "state_dtype": None,
        "dt_out": chunks,
        "dA_cumsum": chunks,
        "states": make(batch, chunks.shape[2], *channels, dstate),
        "state": make(batch, *channels, dstate),
        "state_batch_indices": maybe(slots, batch, dtype=torch.int32),
    }


def compile_all(target: str) -> Iterator[dict[str, Any]]:
    """Compiles what the calls launch on a target; yields what is to be known of each kernel."""
    from triton.backends.compiler import GPUTarget

    from tilegym_mamba2.backends import triton as backend

    architecture, gpu, shared_memory, instruction = TARGETS[target]
    info = backend.DeviceInfo(architecture, 132, shared_memory)
    seen: set[Any] = set()
    for op in registry.ops():
        function = getattr(importlib.import_module(f"tilegym_mamba2.ops.{op}.triton_"), op)
        for call in CALLS_OF[target]:
            if call in SCAN_CALLS and op != "mamba_chunk_scan":
                continue
            torch.set_float32_matmul_precision(CALLS[call].get("precision", "highest"))
            given = arguments(op, **CALLS[call])
            names = inspect.signature(function).parameters
            with backend.recording(info) as launches:
                function(*[given[name] for name in names])
            for launch, tensors in launches:
                key = launch.key(tensors)
                kernel = key[0][0].__name__
                if key in seen or (kernel in (HOPPER, "_scan_again_kernel") and call not in HOPPER_WAITS):
                    continue
                seen.add(key)
                compiled = launch.compile(tensors, GPUTarget(*gpu))
                assembly = compiled.asm["ptx" if gpu[0] == "cuda" else "amdgcn"]
                spills, waits = None, 0
                if target == "sm_90" and kernel in (HOPPER, *TUNED):
                    loops = _spills_and_waits_in_loops(compiled.asm["cubin"])
                    if kernel != HOPPER:  # the later ones are for what is not finite
                        loops = loops[:1]
                    if loops:
                        spills, waits = sum(loop[0] for loop in loops), max(loop[1] for loop in loops)
                yield {
                    "op": op,
                    "call": call,
                    "kernel": compiled.name,
                    "shared": compiled.metadata.shared,
                    "matrix": re.search(instruction, assembly) is not None,
                    "wgmma": "wgmma" in assembly,
                    "spills": spills,
                    "waits": waits,
                }


def _spills_and_waits_in_loops(cubin: bytes) -> list[tuple[int, int]]:
    """Loads and stores of spilled registers, and waits for products, of each innermost loop with a wgmma, in order."""
    path = Path(os.environ["TRITON_CACHE_DIR"]) / "kernel.cubin"
    path.write_bytes(cubin)
    found = glob.glob(os.path.join(sysconfig.get_path("purelib"), "nvidia", "*", "bin", "nvdisasm"))
    listing = subprocess.run([found[0], "-c", path], check=True, capture_output=True, text=True).stdout.split("\n")
    labels = {line.split(":")[0]: number for number, line in enumerate(listing) if line.startswith(".L_x")}
    loops = [
        (labels[label], number)
        for number, line in enumerate(listing)
        for label in re.findall(r"BRA `\((\.L_x_\d+)\)", line)
        if labels[label] < number
    ]
    innermost: list[tuple[int, int]] = []
    for number, line in enumerate(listing):
        around = [loop for loop in loops if loop[0] < number < loop[1]] if "HGMMA" in line else []
        if around:
            innermost.append(min(around, key=lambda loop: loop[1] - loop[0]))
    bodies = [listing[start:stop] for start, stop in dict.fromkeys(innermost)]
    return [
        (sum("LDL" in line or "STL" in line for line in body), sum("WARPGROUP.DEPBAR" in line for line in body))
        for body in bodies
    ]


@pytest.mark.parametrize("target", TARGETS)
def test_every_kernel_compiles(target: str, tmp_path: Path) -> None:
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    program = [sys.executable, __file__, target]
    done = subprocess.run(program, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    kernels = [json.loads(line) for line in done.stdout.splitlines()]

    assert {kernel["op"] for kernel in kernels} == set(registry.ops())
    on_hopper = {kernel["call"]: kernel for kernel in kernels if kernel["kernel"] == HOPPER}
    assert {call: kernel["waits"] for call, kernel in on_hopper.items()} == (HOPPER_WAITS if target == "sm_90" else {})
    assert not [call for call, kernel in on_hopper.items() if kernel["spills"]]
    assert not [kernel for kernel in kernels if kernel["shared"] > TARGETS[target][2]]
    products = [kernel for kernel in kernels if kernel["kernel"] in MATRIX and kernel["call"] != "ieee"]
    assert {kernel["kernel"] for kernel in products} == set(MATRIX)
    assert not [kernel for kernel in products if not kernel["matrix"]]
    if target == "sm_90":
        assert not [kernel for kernel in products if kernel["kernel"] in TUNED and not kernel["wgmma"]]
        tuned = [kernel for kernel in products if kernel["kernel"] in TUNED and kernel["call"] in TUNED_CALLS]
        assert not [kernel for kernel in tuned if kernel["spills"] is None]
        spilled = {(kernel["kernel"], kernel["call"]): kernel["spills"] for kernel in tuned}
        assert not {key: spills for key, spills in spilled.items() if spills > SPILLS_AT_MOST.get(key, 2)}


if __name__ == "__main__":
    for kernel in compile_all(sys.argv[1]):
        sys.stdout.write(json.dumps(kernel) + "\n")
