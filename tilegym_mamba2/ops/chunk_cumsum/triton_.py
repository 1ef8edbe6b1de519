"""chunk_cumsum in Triton.

    d[b, t, h] = clamp(softplus?(dt[b, t, h] + dt_bias[h]), *dt_limit)
    dA_cumsum[b, h, c, i] = sum(d[b, c * chunk_size + j, h] * A[h] for j <= i)

One program owns one chunk of BLOCK_HEADS heads and walks over it in blocks of BLOCK_TOKENS tokens. Nothing is
read twice.
"""

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilegym_mamba2.backends import triton as backend
from tilegym_mamba2.backends._triton_math import time_step
from tilegym_mamba2.problem import float64_reason
from tilegym_mamba2.registry import register


@triton.jit(
    do_not_specialize=[
        "seqlen", "nheads", "nchunks", "chunk_size", "stride_dt_batch", "stride_dt_token", "stride_dt_head",
        "stride_A", "stride_dt_bias", "dt_low", "dt_high",
    ]
)  # fmt: skip
def _chunk_cumsum_kernel(
    dt_ptr,
    A_ptr,
    dt_bias_ptr,
    dA_cumsum_ptr,
    dt_out_ptr,
    seqlen: tl.int32,
    nheads: tl.int32,
    nchunks: tl.int32,
    chunk_size: tl.int32,
    stride_dt_batch: tl.int64,
    stride_dt_token: tl.int64,
    stride_dt_head: tl.int64,
    stride_A: tl.int64,
    stride_dt_bias: tl.int64,
    dt_low: tl.float32,
    dt_high: tl.float32,
    DT_SOFTPLUS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
):
    nblocks_heads = tl.cdiv(nheads, BLOCK_HEADS)
    program = tl.program_id(0)
    head = (program % nblocks_heads) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)  # (heads,)
    chunk = (program // nblocks_heads) % nchunks
    row = (program // nblocks_heads // nchunks).to(tl.int64)
    is_head = head < nheads
    A = tl.load(A_ptr + head * stride_A, mask=is_head, other=0.0).to(tl.float32)  # (heads,)
    if dt_bias_ptr is not None:
        dt_bias = tl.load(dt_bias_ptr + head * stride_dt_bias, mask=is_head, other=0.0).to(tl.float32)
    else:
        dt_bias = tl.zeros((BLOCK_HEADS,), tl.float32)
    dt_base = dt_ptr + row * stride_dt_batch + head[None, :] * stride_dt_head
    out = ((row * nheads + head[None, :]) * nchunks + chunk) * chunk_size
    total = tl.zeros((BLOCK_HEADS,), tl.float32)
    for first in range(0, chunk_size, BLOCK_TOKENS):
        position = first + tl.arange(0, BLOCK_TOKENS)  # (tokens,)
        token = chunk * chunk_size + position
        inside = (position < chunk_size)[:, None] & is_head[None, :]
        valid = inside & (token < seqlen)[:, None]
        dt = tl.load(dt_base + token[:, None] * stride_dt_token, mask=valid, other=0.0).to(tl.float32)
        d = tl.where(valid, time_step(dt, dt_bias[None, :], dt_low, dt_high, DT_SOFTPLUS), 0.0)  # (tokens, heads)
        dA = d * A[None, :]
        tl.store(dt_out_ptr + out + position[:, None], d, mask=inside)
        tl.store(dA_cumsum_ptr + out + position[:, None], total[None, :] + tl.cumsum(dA, axis=0), mask=inside)
        total += tl.sum(dA, axis=0)


@register("chunk_cumsum", "triton", supports=float64_reason)
def chunk_cumsum(
    dt: Tensor,
    A: Tensor,
    chunk_size: int,
    dt_bias: Tensor | None,
    dt_softplus: bool,
    dt_limit: tuple[float, float],
) -> tuple[Tensor, Tensor]:
    batch, seqlen, nheads = dt.shape
    nchunks = -(-seqlen // chunk_size)
    shape = (batch, nheads, nchunks, chunk_size)
    dA_cumsum = torch.empty(shape, dtype=torch.float32, device=dt.device)
    dt_out = torch.empty(shape, dtype=torch.float32, device=dt.device)
    if dt_out.numel():
        low, high = map(float, dt_limit)
        plan = _plan(backend.layouts(dt, A, dt_bias), chunk_size, dt_softplus, low, high)
        plan((dt, A, dt_bias, dA_cumsum, dt_out), dt.device)
    return dA_cumsum, dt_out


@functools.lru_cache(maxsize=1024)
def _plan(layouts: Any, chunk_size: int, dt_softplus: bool, dt_low: float, dt_high: float) -> backend.Launch:
    dt, A, dt_bias = layouts
    batch, seqlen, nheads = dt[0]
    nchunks = -(-seqlen // chunk_size)
    block_heads = min(triton.next_power_of_2(nheads), 16)
    block_tokens = min(triton.next_power_of_2(chunk_size), 128)
    return backend.Launch(
        _chunk_cumsum_kernel,
        batch * nchunks * -(-nheads // block_heads),
        (seqlen, nheads, nchunks, chunk_size, *dt[1], *A[1], *backend.strides(dt_bias, 1), dt_low, dt_high),
        (dt_softplus, block_tokens, block_heads),
    )
