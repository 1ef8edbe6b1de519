"""selective_state_update in Triton.

    d = softplus?(dt + dt_bias)
    state = exp(d * A) * state + d * x (outer) B
    out = (state @ C + D * x) * silu(z)

One program owns BLOCK_HEADDIM channels of one head of one batch row, with all of dstate. Only B and C are read by
several programs.
"""

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilegym_mamba2.backends import triton as backend
from tilegym_mamba2.backends._triton_math import silu, softplus
from tilegym_mamba2.problem import float64_reason
from tilegym_mamba2.registry import register


@triton.jit(
    do_not_specialize=[
        "nheads", "heads_per_group", "stride_state_batch", "stride_state_head", "stride_state_headdim",
        "stride_x_batch", "stride_x_head", "stride_x_headdim", "stride_dt_batch", "stride_dt_head",
        "stride_dt_headdim", "stride_A_head", "stride_A_headdim", "stride_A_dstate", "stride_B_batch",
        "stride_B_group", "stride_C_batch", "stride_C_group", "stride_D_head", "stride_D_headdim", "stride_z_batch",
        "stride_z_head", "stride_z_headdim", "stride_dt_bias_head", "stride_dt_bias_headdim", "stride_indices",
    ]
)  # fmt: skip
def _selective_state_update_kernel(
    state_ptr,
    x_ptr,
    dt_ptr,
    A_ptr,
    B_ptr,
    C_ptr,
    D_ptr,
    z_ptr,
    dt_bias_ptr,
    indices_ptr,
    out_ptr,
    nheads: tl.int32,
    heads_per_group: tl.int32,
    stride_state_batch: tl.int64,
    stride_state_head: tl.int64,
    stride_state_headdim: tl.int64,
    stride_x_batch: tl.int64,
    stride_x_head: tl.int64,
    stride_x_headdim: tl.int64,
    stride_dt_batch: tl.int64,
    stride_dt_head: tl.int64,
    stride_dt_headdim: tl.int64,
    stride_A_head: tl.int64,
    stride_A_headdim: tl.int64,
    stride_A_dstate: tl.int64,
    stride_B_batch: tl.int64,
    stride_B_group: tl.int64,
    stride_C_batch: tl.int64,
    stride_C_group: tl.int64,
    stride_D_head: tl.int64,
    stride_D_headdim: tl.int64,
    stride_z_batch: tl.int64,
    stride_z_head: tl.int64,
    stride_z_headdim: tl.int64,
    stride_dt_bias_head: tl.int64,
    stride_dt_bias_headdim: tl.int64,
    stride_indices: tl.int64,
    stride_state_dstate,
    stride_B_dstate,
    stride_C_dstate,
    DT_SOFTPLUS: tl.constexpr,
    HEADDIM: tl.constexpr,
    DSTATE: tl.constexpr,
    BLOCK_HEADDIM: tl.constexpr,
    BLOCK_DSTATE: tl.constexpr,
):
    NBLOCKS_HEADDIM: tl.constexpr = (HEADDIM + BLOCK_HEADDIM - 1) // BLOCK_HEADDIM
    program = tl.program_id(0)
    headdims = (program % NBLOCKS_HEADDIM) * BLOCK_HEADDIM + tl.arange(0, BLOCK_HEADDIM)  # (headdim,)
    dstates = tl.arange(0, BLOCK_DSTATE)  # (dstate,)
    head = ((program // NBLOCKS_HEADDIM) % nheads).to(tl.int64)
    row = (program // NBLOCKS_HEADDIM // nheads).to(tl.int64)
    group = head // heads_per_group
    is_headdim = headdims < HEADDIM
    is_dstate = dstates < DSTATE
    inside = is_headdim[:, None] & is_dstate[None, :]
    out_ptrs = out_ptr + (row * nheads + head) * HEADDIM + headdims
    if indices_ptr is not None:
        slot = tl.load(indices_ptr + row * stride_indices).to(tl.int64)
        if slot < 0:
            tl.store(out_ptrs, tl.zeros((BLOCK_HEADDIM,), out_ptr.dtype.element_ty), mask=is_headdim)
            return
    else:
        slot = row
    headdims_long = headdims.to(tl.int64)
    dstates_long = dstates.to(tl.int64)
    state_ptrs = (
        state_ptr
        + slot * stride_state_batch
        + head * stride_state_head
        + headdims_long[:, None] * stride_state_headdim
        + dstates_long[None, :] * stride_state_dstate
    )
    A_ptrs = A_ptr + head * stride_A_head + headdims_long[:, None] * stride_A_headdim
    A_ptrs += dstates_long[None, :] * stride_A_dstate
    state = tl.load(state_ptrs, mask=inside, other=0.0).to(tl.float32)  # (headdim, dstate)
    A = tl.load(A_ptrs, mask=inside, other=0.0).to(tl.float32)  # (headdim, dstate)
    x_ptrs = x_ptr + row * stride_x_batch + head * stride_x_head + headdims_long * stride_x_headdim
    x = tl.load(x_ptrs, mask=is_headdim, other=0.0).to(tl.float32)  # (headdim,)
    dt_ptrs = dt_ptr + row * stride_dt_batch + head * stride_dt_head + headdims_long * stride_dt_headdim
    d = tl.load(dt_ptrs, mask=is_headdim, other=0.0).to(tl.float32)  # (headdim,)
    if dt_bias_ptr is not None:
        dt_bias_ptrs = dt_bias_ptr + head * stride_dt_bias_head + headdims_long * stride_dt_bias_headdim
        d += tl.load(dt_bias_ptrs, mask=is_headdim, other=0.0).to(tl.float32)
    if DT_SOFTPLUS:
        d = softplus(d)
    B_ptrs = B_ptr + row * stride_B_batch + group * stride_B_group + dstates_long * stride_B_dstate
    C_ptrs = C_ptr + row * stride_C_batch + group * stride_C_group + dstates_long * stride_C_dstate
    B = tl.load(B_ptrs, mask=is_dstate, other=0.0).to(tl.float32)  # (dstate,)
    C = tl.load(C_ptrs, mask=is_dstate, other=0.0).to(tl.float32)  # (dstate,)
    state = state * tl.exp(d[:, None] * A) + (d * x)[:, None] * B[None, :]
    tl.store(state_ptrs, state.to(state_ptr.dtype.element_ty), mask=inside)
    y = tl.sum(state * C[None, :], axis=1)  # (headdim,)
    if D_ptr is not None:
        D_ptrs = D_ptr + head * stride_D_head + headdims_long * stride_D_headdim
        y += x * tl.load(D_ptrs, mask=is_headdim, other=0.0).to(tl.float32)
    if z_ptr is not None:
        z_ptrs = z_ptr + row * stride_z_batch + head * stride_z_head + headdims_long * stride_z_headdim
        y *= silu(tl.load(z_ptrs, mask=is_headdim, other=0.0).to(tl.float32))
    tl.store(out_ptrs, y.to(out_ptr.dtype.element_ty), mask=is_headdim)


_LARGEST_DSTATE = 4096


def _why_not(problem: Any) -> str | None:
    if problem.dstate > _LARGEST_DSTATE:
        return f"state has dstate={problem.dstate}, the kernel holds {_LARGEST_DSTATE} at most"
    return float64_reason(problem)


@register("selective_state_update", "triton", supports=_why_not)
def selective_state_update(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    dt_softplus: bool,
    state_batch_indices: Tensor | None,
) -> Tensor:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel():
        plan = _plan(backend.layouts(state, x, dt, A, B, C, D, z, dt_bias, state_batch_indices), dt_softplus)
        plan((state, x, dt, A, B, C, D, z, dt_bias, state_batch_indices, out), x.device)
    return out


@functools.lru_cache(maxsize=1024)
def _plan(layouts: Any, dt_softplus: bool) -> backend.Launch:
    state, x, dt, A, B, C, D, z, dt_bias, indices = layouts
    batch, nheads, headdim = x[0]
    ngroups, dstate = B[0][1:]
    block_dstate = triton.next_power_of_2(dstate)
    block_headdim = min(triton.next_power_of_2(headdim), max(1, 2048 // block_dstate))
    return backend.Launch(
        _selective_state_update_kernel,
        batch * nheads * -(-headdim // block_headdim),
        (
            nheads, nheads // ngroups, *state[1][:3], *x[1], *dt[1], *A[1], *B[1][:2], *C[1][:2],
            *backend.strides(D, 2), *backend.strides(z, 3), *backend.strides(dt_bias, 2),
            *backend.strides(indices, 1), state[1][3], B[1][2], C[1][2],
        ),
        (dt_softplus, headdim, dstate, block_headdim, block_dstate),
    )  # fmt: skip
