"""TileGym (1.5 and later) and this package in one another's registries, for cross-checks and benchmarks.

`install` gives TileGym's op `mamba2_chunk_forward` the forwards of ours that it lacks, under their names here, and
offers TileGym's own cuTile kernels here as the backend "tilegym", which is never chosen automatically.
"""

import importlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tilegym_mamba2 import registry
from tilegym_mamba2.problem import Problem
from tilegym_mamba2.scan import mamba_chunk_scan_combined

BACKEND = "tilegym"

_OP = "mamba2_chunk_forward"
_OFFERED = ("triton", "torch-reference")
_DTYPES = (torch.bfloat16, torch.float32)


def install() -> list[str]:
    """Registers each in the other's registry; what is there already stays.

    Returns:
        What was registered by this call: "tilegym: mamba2_chunk_forward on triton", ...

    Raises:
        ImportError: TileGym can't be imported; its import needs a CUDA device.
    """
    dispatcher = _import("tilegym.backend.dispatcher")
    _import("tilegym")  # registers its own implementations, which go first
    registered: list[str] = []
    for name in _OFFERED:
        if not dispatcher.has_backend_impl(_OP, name):
            dispatcher.register_impl(_OP, name)(_forward_on(name))
            registered.append(f"tilegym: {_OP} on {name}")
    if BACKEND not in registry.explain_backends():
        registry.register_backend(registry.Backend(BACKEND, _why_unavailable))
        registry.register("mamba_chunk_scan", BACKEND, supports=_supports)(_mamba_chunk_scan)
        registered.append(f"tilegym_mamba2: mamba_chunk_scan on {BACKEND}")
    return registered


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except Exception as error:  # its import probes the device, and fails in other ways than ImportError without one
        raise ImportError(
            f"{name} can't be imported here ({type(error).__name__}: {error}); it needs a CUDA device, and "
            "pip install tilegym"
        ) from error


def _forward_on(backend: str) -> Callable[..., tuple[Tensor, Tensor]]:
    def mamba2_chunk_forward(
        x: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, dt: Tensor, init_state: Tensor, chunk_size: int = 64
    ) -> tuple[Tensor, Tensor]:
        """TileGym's op; dt holds the time steps as they are, without bias, softplus or limit."""
        out, final_state = mamba_chunk_scan_combined(
            x,
            dt,
            a,
            b,
            c,
            chunk_size,
            D=d,
            initial_states=init_state,
            dt_limit=(-float("inf"), float("inf")),
            return_final_states=True,
            state_dtype=c.dtype,
            backend=backend,
        )
        return out, final_state.to(init_state.dtype)

    return mamba2_chunk_forward


def _why_unavailable(device: torch.device) -> str | None:
    if device.type != "cuda":
        return f"TileGym's kernels run on CUDA devices, and the tensors are on {device}: move them there"
    if not _import("tilegym.backend").is_backend_available("cutile"):
        return "TileGym has no cuTile here: pip install 'cuda-tile[tileiras]', and unset TILEGYM_DISABLE_CUTILE"
    return None


def _supports(problem: Problem) -> str | None:
    dtypes = problem.dtypes
    for name in ("z", "seq_idx", "cu_seqlens"):
        if name in dtypes:
            return f"{name} is given, which TileGym's kernels don't have"
    if problem.batch == 0 or problem.seqlen == 0:
        return f"x has batch={problem.batch} and seqlen={problem.seqlen}, and both must be at least 1"
    if not _is_power_of_two(problem.chunk_size, at_least=16):
        return f"chunk_size is {problem.chunk_size}, which must be a power of two and at least 16"
    if problem.seqlen % problem.chunk_size:
        return f"x has seqlen={problem.seqlen}, which must be a multiple of chunk_size={problem.chunk_size}"
    if not _is_power_of_two(problem.headdim, at_least=16):
        return f"x has headdim={problem.headdim}, which must be a power of two and at least 16"
    if not _is_power_of_two(problem.dstate, at_least=16):
        return f"B has dstate={problem.dstate}, which must be a power of two and at least 16"
    if problem.nheads % 4:
        return f"x has nheads={problem.nheads}, which must be a multiple of 4"
    if dtypes["x"] not in _DTYPES or not dtypes["x"] == dtypes["B"] == dtypes["C"]:
        return f"x, B and C have dtypes {dtypes['x']}, {dtypes['B']}, {dtypes['C']}: all bfloat16 or all float32 only"
    for name, dtype in dtypes.items():
        if dtype == torch.float64 and name != "initial_states":
            return f"{name} is float64, and the kernels compute in float32"
    if dtypes["x"] == torch.float32 and torch.get_float32_matmul_precision() == "highest":
        return "x is float32, multiplied in TF32 here, which torch.set_float32_matmul_precision('high') allows"
    return None


def _is_power_of_two(size: int, at_least: int) -> bool:
    return size >= at_least and size & (size - 1) == 0


def _mamba_chunk_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    initial_states: Tensor | None,
    seq_idx: Tensor | None,
    cu_seqlens: Tensor | None,
    dt_softplus: bool,
    dt_limit: tuple[float, float],
    state_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    batch, _, nheads, headdim = x.shape
    if D is not None and D.dim() == 2:
        raise NotImplementedError(f"backend {BACKEND!r}: D has shape {tuple(D.shape)}, and only (nheads,) is possible")
    if state_dtype not in (None, C.dtype):
        raise NotImplementedError(f"backend {BACKEND!r}: state_dtype is {state_dtype}, and only C's dtype is possible")
    d = dt.float()
    if dt_bias is not None:
        d = d + dt_bias.float()
    if dt_softplus:
        d = F.softplus(d, threshold=20.0)
    d = d.clamp(*dt_limit)
    if initial_states is None:
        initial_states = x.new_zeros(batch, nheads, headdim, B.shape[-1], dtype=torch.float32)
    skip = x.new_zeros(nheads, dtype=torch.float32) if D is None else D
    forward = _import("tilegym.ops.cutile.mamba2").mamba2_chunk_forward
    with torch.cuda.device_of(x):  # it launches on the current device
        out, final_states = forward(x, A, B, C, skip, d, initial_states.float().contiguous(), chunk_size=chunk_size)
    return out.contiguous(), final_states, None
