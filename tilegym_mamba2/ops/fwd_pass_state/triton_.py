"""fwd_pass_state in Triton.

    H[c+1] = exp(a[c, -1]) * H[c] + sum(exp(a[c, -1] - a[c, j]) * d[c, j] * x[c, j] (outer) B[c, j] for j)

One program owns a block of the state, (BLOCK_HEADDIM, BLOCK_DSTATE), of one head of one batch row, keeps it in
registers and walks over the sequence in blocks of tokens, which divide no chunk boundary. x is read again for every
block of dstate, B for every block of headdim and every head of its group.
"""

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilegym_mamba2.backends import triton as backend
from tilegym_mamba2.backends._triton_math import advance_state, changes_at
from tilegym_mamba2.problem import float64_reason
from tilegym_mamba2.registry import register


@triton.jit(
    do_not_specialize=[
        "seqlen", "nheads", "heads_per_group", "nchunks", "chunk_size", "stride_x_batch", "stride_x_token",
        "stride_x_head", "stride_B_batch", "stride_B_token", "stride_B_group", "stride_d_batch", "stride_d_head",
        "stride_d_chunk", "stride_d_token", "stride_sum_batch", "stride_sum_head", "stride_sum_chunk",
        "stride_sum_token", "stride_initial_batch", "stride_initial_head", "stride_initial_headdim",
        "stride_initial_dstate", "stride_seq_idx_batch", "stride_seq_idx_token",
    ]
)  # fmt: skip
def _fwd_pass_state_kernel(
    x_ptr,
    B_ptr,
    dt_out_ptr,
    dA_cumsum_ptr,
    initial_ptr,
    seq_idx_ptr,
    states_ptr,
    final_ptr,
    seqlen: tl.int32,
    nheads: tl.int32,
    heads_per_group: tl.int32,
    nchunks: tl.int32,
    chunk_size: tl.int32,
    stride_x_batch: tl.int64,
    stride_x_token: tl.int64,
    stride_x_head: tl.int64,
    stride_B_batch: tl.int64,
    stride_B_token: tl.int64,
    stride_B_group: tl.int64,
    stride_d_batch: tl.int64,
    stride_d_head: tl.int64,
    stride_d_chunk: tl.int64,
    stride_d_token: tl.int64,
    stride_sum_batch: tl.int64,
    stride_sum_head: tl.int64,
    stride_sum_chunk: tl.int64,
    stride_sum_token: tl.int64,
    stride_initial_batch: tl.int64,
    stride_initial_head: tl.int64,
    stride_initial_headdim: tl.int64,
    stride_initial_dstate: tl.int64,
    stride_seq_idx_batch: tl.int64,
    stride_seq_idx_token: tl.int64,
    stride_x_headdim,
    stride_B_dstate,
    HEADDIM: tl.constexpr,
    DSTATE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_HEADDIM: tl.constexpr,
    BLOCK_DSTATE: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    NBLOCKS_DSTATE: tl.constexpr = (DSTATE + BLOCK_DSTATE - 1) // BLOCK_DSTATE
    NBLOCKS_HEADDIM: tl.constexpr = (HEADDIM + BLOCK_HEADDIM - 1) // BLOCK_HEADDIM
    program = tl.program_id(0)
    dstates = (program % NBLOCKS_DSTATE) * BLOCK_DSTATE + tl.arange(0, BLOCK_DSTATE)  # (dstate,)
    program = program // NBLOCKS_DSTATE
    headdims = (program % NBLOCKS_HEADDIM) * BLOCK_HEADDIM + tl.arange(0, BLOCK_HEADDIM)  # (headdim,)
    program = program // NBLOCKS_HEADDIM
    head = (program % nheads).to(tl.int64)
    row = (program // nheads).to(tl.int64)
    group = head // heads_per_group

    x_base = x_ptr + row * stride_x_batch + head * stride_x_head + headdims.to(tl.int64)[None, :] * stride_x_headdim
    B_base = B_ptr + row * stride_B_batch + group * stride_B_group + dstates.to(tl.int64)[None, :] * stride_B_dstate
    d_base = dt_out_ptr + row * stride_d_batch + head * stride_d_head
    sum_base = dA_cumsum_ptr + row * stride_sum_batch + head * stride_sum_head
    is_headdim = (headdims < HEADDIM)[None, :]
    is_dstate = (dstates < DSTATE)[None, :]
    inside = (headdims < HEADDIM)[:, None] & is_dstate
    offsets = headdims[:, None] * DSTATE + dstates[None, :]
    if initial_ptr is not None:
        initial_ptrs = (
            initial_ptr
            + row * stride_initial_batch
            + head * stride_initial_head
            + headdims.to(tl.int64)[:, None] * stride_initial_headdim
            + dstates.to(tl.int64)[None, :] * stride_initial_dstate
        )
        state = tl.load(initial_ptrs, mask=inside, other=0.0).to(tl.float32)  # (headdim, dstate)
    else:
        state = tl.zeros((BLOCK_HEADDIM, BLOCK_DSTATE), tl.float32)

    nblocks_chunk = tl.cdiv(chunk_size, BLOCK_TOKENS)
    for block in range(nchunks * nblocks_chunk):
        chunk = block // nblocks_chunk
        first = (block % nblocks_chunk) * BLOCK_TOKENS
        if first == 0:
            entry = ((row * nchunks + chunk) * nheads + head) * (HEADDIM * DSTATE)
            tl.store(states_ptr + entry + offsets, state.to(states_ptr.dtype.element_ty), mask=inside)
        position = first + tl.arange(0, BLOCK_TOKENS)  # (tokens,)
        token = chunk * chunk_size + position
        valid = (position < chunk_size) & (token < seqlen)
        sum_chunk = sum_base + chunk * stride_sum_chunk
        last = tl.minimum(first + BLOCK_TOKENS, chunk_size) - 1
        sum_last = tl.load(sum_chunk + last * stride_sum_token)
        sum_before = tl.load(sum_chunk + (first - 1) * stride_sum_token, mask=first > 0, other=0.0)
        sums = tl.load(sum_chunk + position * stride_sum_token, mask=valid, other=0.0)  # (tokens,)
        d = tl.load(d_base + chunk * stride_d_chunk + position * stride_d_token, mask=valid, other=0.0)
        to_exit = tl.where(valid, tl.exp(sum_last - sums) * d, 0.0)  # (tokens,)
        decay = tl.exp(sum_last - sum_before)
        if seq_idx_ptr is not None:
            stop = tl.minimum((chunk + 1) * chunk_size, seqlen)
            changes = changes_at(seq_idx_ptr + row * stride_seq_idx_batch, token, 0, stop, stride_seq_idx_token)
            last_run = tl.sum(changes, axis=0)
            to_exit = tl.where(tl.cumsum(changes, axis=0) == last_run, to_exit, 0.0)
            decay = tl.where(last_run == 0, decay, 0.0)
        tokens = token.to(tl.int64)[:, None]
        x = tl.load(x_base + tokens * stride_x_token, mask=valid[:, None] & is_headdim, other=0.0).to(DOT)
        B = tl.load(B_base + tokens * stride_B_token, mask=valid[:, None] & is_dstate, other=0.0).to(DOT)
        state = advance_state(state, x, B, to_exit, decay, True, DOT, PRECISION, tl.bfloat16 == DOT)
    tl.store(final_ptr + (row * nheads + head) * (HEADDIM * DSTATE) + offsets, state, mask=inside)


_DOT = {torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}


@register("fwd_pass_state", "triton", supports=float64_reason)
def fwd_pass_state(
    x: Tensor,
    B: Tensor,
    dt_out: Tensor,
    dA_cumsum: Tensor,
    initial_states: Tensor | None,
    seq_idx: Tensor | None,
    state_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor]:
    batch, _, nheads, headdim = x.shape
    dstate = B.shape[3]
    nchunks = dt_out.shape[2]
    if state_dtype is None:
        state_dtype = torch.float32 if x.dtype == torch.float16 else x.dtype
    if initial_states is not None and initial_states.dtype == torch.float64:
        initial_states = initial_states.float()
    states = torch.empty((batch, nchunks, nheads, headdim, dstate), dtype=state_dtype, device=x.device)
    final_states = torch.empty((batch, nheads, headdim, dstate), dtype=torch.float32, device=x.device)
    if states.numel():
        highest = torch.get_float32_matmul_precision() == "highest"
        plan = _plan(backend.layouts(x, B, dt_out, dA_cumsum, initial_states, seq_idx, states), highest)
        plan((x, B, dt_out, dA_cumsum, initial_states, seq_idx, states, final_states), x.device)
    elif initial_states is None:
        final_states.zero_()
    else:
        final_states.copy_(initial_states)
    return states, final_states


@functools.lru_cache(maxsize=1024)
def _plan(layouts: Any, highest: bool) -> backend.Launch:
    (x_shape, x_stride, x_dtype), (B_shape, B_stride, B_dtype), dt_out, dA_cumsum, initial_states, seq_idx, _ = layouts
    batch, seqlen, nheads, headdim = x_shape
    ngroups, dstate = B_shape[2:]
    nchunks, chunk_size = dt_out[0][2:]
    dot = torch.bfloat16 if x_dtype == B_dtype == torch.bfloat16 else torch.float32
    precision = "ieee" if highest and torch.float32 in (x_dtype, B_dtype) else "tf32"
    block_tokens = max(16, min(triton.next_power_of_2(chunk_size), 64 if dot == torch.bfloat16 else 32))
    block_headdim = max(16, min(triton.next_power_of_2(headdim), 64))
    block_dstate = max(16, min(triton.next_power_of_2(dstate), 64))
    programs = batch * nheads * -(-headdim // block_headdim) * -(-dstate // block_dstate)
    return backend.Launch(
        _fwd_pass_state_kernel,
        programs,
        (
            seqlen, nheads, nheads // ngroups, nchunks, chunk_size, *x_stride[:3], *B_stride[:3], *dt_out[1],
            *dA_cumsum[1], *backend.strides(initial_states, 4), *backend.strides(seq_idx, 2), x_stride[3], B_stride[3],
        ),
        (headdim, dstate, block_tokens, block_headdim, block_dstate, _DOT[dot], precision),
        backend.Options(4, 3),
    )  # fmt: skip
