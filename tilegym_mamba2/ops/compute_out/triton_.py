"""compute_out in Triton.

    y[c, i] = exp(a[c, i]) * states[c] @ C[c, i]
            + sum((C[c, i] . B[c, j]) * exp(a[c, i] - a[c, j]) * d[c, j] * x[c, j] for j <= i)
            + D * x[c, i]
    out = y * silu(z)

One program owns BLOCK_TOKENS tokens of a chunk and BLOCK_HEADDIM channels of one head. It walks backwards from its own
tokens to the chunk's first; so x and B of a chunk are read again by each later block of tokens, and the products of
C and B are computed again for every head of the group.
"""

import functools
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilegym_mamba2.backends import triton as backend
from tilegym_mamba2.backends._triton_math import changes_at, is_finite, silu
from tilegym_mamba2.problem import float64_reason
from tilegym_mamba2.registry import register


@triton.jit(
    do_not_specialize=[
        "seqlen", "nheads", "heads_per_group", "nchunks", "chunk_size", "stride_x_batch", "stride_x_token",
        "stride_x_head", "stride_B_batch", "stride_B_token", "stride_B_group", "stride_C_batch", "stride_C_token",
        "stride_C_group", "stride_d_batch", "stride_d_head", "stride_d_chunk", "stride_d_token", "stride_sum_batch",
        "stride_sum_head", "stride_sum_chunk", "stride_sum_token", "stride_states_batch", "stride_states_chunk",
        "stride_states_head", "stride_states_headdim", "stride_z_batch", "stride_z_token", "stride_z_head",
        "stride_D_head", "stride_D_headdim", "stride_seq_idx_batch", "stride_seq_idx_token",
    ]
)  # fmt: skip
def _compute_out_kernel(
    x_ptr,
    B_ptr,
    C_ptr,
    dt_out_ptr,
    dA_cumsum_ptr,
    states_ptr,
    D_ptr,
    z_ptr,
    seq_idx_ptr,
    out_ptr,
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
    stride_C_batch: tl.int64,
    stride_C_token: tl.int64,
    stride_C_group: tl.int64,
    stride_d_batch: tl.int64,
    stride_d_head: tl.int64,
    stride_d_chunk: tl.int64,
    stride_d_token: tl.int64,
    stride_sum_batch: tl.int64,
    stride_sum_head: tl.int64,
    stride_sum_chunk: tl.int64,
    stride_sum_token: tl.int64,
    stride_states_batch: tl.int64,
    stride_states_chunk: tl.int64,
    stride_states_head: tl.int64,
    stride_states_headdim: tl.int64,
    stride_z_batch: tl.int64,
    stride_z_token: tl.int64,
    stride_z_head: tl.int64,
    stride_D_head: tl.int64,
    stride_D_headdim: tl.int64,
    stride_seq_idx_batch: tl.int64,
    stride_seq_idx_token: tl.int64,
    stride_x_headdim,
    stride_B_dstate,
    stride_C_dstate,
    stride_states_dstate,
    stride_z_headdim,
    HEADDIM: tl.constexpr,
    DSTATE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_HEADDIM: tl.constexpr,
    BLOCK_DSTATE: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    NBLOCKS_HEADDIM: tl.constexpr = (HEADDIM + BLOCK_HEADDIM - 1) // BLOCK_HEADDIM
    nblocks_chunk = tl.cdiv(chunk_size, BLOCK_TOKENS)
    program = tl.program_id(0)
    headdims = (program % NBLOCKS_HEADDIM) * BLOCK_HEADDIM + tl.arange(0, BLOCK_HEADDIM)  # (headdim,)
    program = program // NBLOCKS_HEADDIM
    head = (program % nheads).to(tl.int64)
    program = program // nheads
    first_i = (program % nblocks_chunk) * BLOCK_TOKENS
    program = program // nblocks_chunk
    chunk = program % nchunks
    row = (program // nchunks).to(tl.int64)
    group = head // heads_per_group
    chunk_first = chunk * chunk_size
    stop = tl.minimum(chunk_first + chunk_size, seqlen)
    if chunk_first + first_i >= stop:
        return

    headdims_long = headdims.to(tl.int64)
    is_headdim = headdims < HEADDIM
    x_base = x_ptr + row * stride_x_batch + head * stride_x_head + headdims_long[None, :] * stride_x_headdim
    B_base = B_ptr + row * stride_B_batch + group * stride_B_group
    C_base = C_ptr + row * stride_C_batch + group * stride_C_group
    d_base = dt_out_ptr + row * stride_d_batch + head * stride_d_head + chunk * stride_d_chunk
    sum_base = dA_cumsum_ptr + row * stride_sum_batch + head * stride_sum_head + chunk * stride_sum_chunk
    seq_idx_base = seq_idx_ptr
    if seq_idx_ptr is not None:
        seq_idx_base += row * stride_seq_idx_batch

    position_i = first_i + tl.arange(0, BLOCK_TOKENS)  # (tokens i,)
    token_i = (chunk_first + position_i).to(tl.int64)
    is_token_i = token_i < stop
    sum_i = tl.load(sum_base + position_i * stride_sum_token, mask=is_token_i, other=0.0)
    # Sequences are counted from the one of the token before this block: earlier ones have negative numbers.
    if seq_idx_ptr is not None:
        run_i = tl.cumsum(changes_at(seq_idx_base, token_i, 0, stop, stride_seq_idx_token), axis=0)
    else:
        run_i = tl.zeros((BLOCK_TOKENS,), tl.int32)
    run_before = 0
    y = tl.zeros((BLOCK_TOKENS, BLOCK_HEADDIM), tl.float32)  # (tokens i, headdim)
    for back in range(0, first_i + 1, BLOCK_TOKENS):
        position_j = first_i - back + tl.arange(0, BLOCK_TOKENS)  # (tokens j,)
        token_j = (chunk_first + position_j).to(tl.int64)
        is_token_j = token_j < stop
        gram = tl.zeros((BLOCK_TOKENS, BLOCK_TOKENS), tl.float32)  # (tokens i, tokens j)
        for first_dstate in range(0, DSTATE, BLOCK_DSTATE):
            dstates = first_dstate + tl.arange(0, BLOCK_DSTATE)
            C_ptrs = C_base + token_i[:, None] * stride_C_token + dstates.to(tl.int64)[None, :] * stride_C_dstate
            B_ptrs = B_base + token_j[:, None] * stride_B_token + dstates.to(tl.int64)[None, :] * stride_B_dstate
            C = tl.load(C_ptrs, mask=is_token_i[:, None] & (dstates < DSTATE)[None, :], other=0.0).to(DOT)
            B = tl.load(B_ptrs, mask=is_token_j[:, None] & (dstates < DSTATE)[None, :], other=0.0).to(DOT)
            gram = tl.dot(C, tl.trans(B), gram, input_precision=PRECISION)
        sum_j = tl.load(sum_base + position_j * stride_sum_token, mask=is_token_j, other=0.0)
        d_j = tl.load(d_base + position_j * stride_d_token, mask=is_token_j, other=0.0)
        visible = (position_i[:, None] >= position_j[None, :]) & is_token_j[None, :]
        if seq_idx_ptr is not None:
            changes = changes_at(seq_idx_base, token_j, 0, stop, stride_seq_idx_token)
            if back > 0:
                run_before -= tl.sum(changes, axis=0)
            run_j = run_before + tl.cumsum(changes, axis=0)
            visible = visible & (run_i[:, None] == run_j[None, :])
        exponent = tl.where(visible, sum_i[:, None] - sum_j[None, :], 0.0)
        weight = tl.where(visible, gram * tl.exp(exponent) * d_j[None, :], 0.0)
        x_ptrs = x_base + token_j[:, None] * stride_x_token
        x = tl.load(x_ptrs, mask=is_token_j[:, None] & is_headdim[None, :], other=0.0).to(DOT)  # (tokens j, headdim)
        # 0 * NaN is NaN, so what isn't finite is kept out of the product, and put where it is seen.
        bad = is_finite(x) == 0
        y = tl.dot(weight.to(DOT), tl.where(bad, 0.0, x), y, input_precision=PRECISION)
        if tl.max(tl.max(bad.to(tl.int32), axis=1), axis=0) > 0:
            seen = tl.dot(visible.to(tl.float16), bad.to(tl.float16))
            y = tl.where(seen > 0.0, float("nan"), y)

    # Of the entry state's sequence are the tokens before the chunk's first change.
    from_entry = tl.where(run_i == run_before, tl.exp(sum_i), 0.0)  # (tokens i,)
    carried = tl.zeros((BLOCK_TOKENS, BLOCK_HEADDIM), tl.float32)
    states_base = states_ptr + row * stride_states_batch + chunk * stride_states_chunk + head * stride_states_head
    for first_dstate in range(0, DSTATE, BLOCK_DSTATE):
        dstates = first_dstate + tl.arange(0, BLOCK_DSTATE)
        dstates_long = dstates.to(tl.int64)
        C_ptrs = C_base + token_i[:, None] * stride_C_token + dstates_long[None, :] * stride_C_dstate
        C = tl.load(C_ptrs, mask=is_token_i[:, None] & (dstates < DSTATE)[None, :], other=0.0).to(DOT)
        state_ptrs = (
            states_base + headdims_long[:, None] * stride_states_headdim + dstates_long[None, :] * stride_states_dstate
        )
        inside = is_headdim[:, None] & (dstates < DSTATE)[None, :]
        state = tl.load(state_ptrs, mask=inside, other=0.0).to(DOT)  # (headdim, dstate)
        carried = tl.dot(C, tl.trans(state), carried, input_precision=PRECISION)
    y += tl.where((from_entry == 0.0)[:, None], 0.0, carried * from_entry[:, None])

    inside = is_token_i[:, None] & is_headdim[None, :]
    if D_ptr is not None:
        D = tl.load(D_ptr + head * stride_D_head + headdims * stride_D_headdim, mask=is_headdim, other=0.0)
        x = tl.load(x_base + token_i[:, None] * stride_x_token, mask=inside, other=0.0)
        y += x.to(tl.float32) * D.to(tl.float32)[None, :]
    if z_ptr is not None:
        z_base = z_ptr + row * stride_z_batch + head * stride_z_head
        z_ptrs = z_base + token_i[:, None] * stride_z_token + headdims_long[None, :] * stride_z_headdim
        y *= silu(tl.load(z_ptrs, mask=inside, other=0.0).to(tl.float32))
    out_ptrs = out_ptr + ((row * seqlen + token_i[:, None]) * nheads + head) * HEADDIM + headdims[None, :]
    tl.store(out_ptrs, y.to(out_ptr.dtype.element_ty), mask=inside)


_DOT = {torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}


@register("compute_out", "triton", supports=partial(float64_reason, converted="states"))
def compute_out(
    x: Tensor,
    B: Tensor,
    C: Tensor,
    dt_out: Tensor,
    dA_cumsum: Tensor,
    states: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    seq_idx: Tensor | None,
) -> Tensor:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel():
        if states.dtype == torch.float64:
            states = states.float()
        highest = torch.get_float32_matmul_precision() == "highest"
        plan = _plan(backend.layouts(x, B, C, dt_out, dA_cumsum, states, D, z, seq_idx), highest)
        plan((x, B, C, dt_out, dA_cumsum, states, D, z, seq_idx, out), x.device)
    return out


@functools.lru_cache(maxsize=1024)
def _plan(layouts: Any, highest: bool) -> backend.Launch:
    (x_shape, x_stride, x_dtype), (B_shape, B_stride, B_dtype), (_, C_stride, C_dtype), *others = layouts
    dt_out, dA_cumsum, states, D, z, seq_idx = others
    dtypes = (x_dtype, B_dtype, C_dtype)
    batch, seqlen, nheads, headdim = x_shape
    ngroups, dstate = B_shape[2:]
    nchunks, chunk_size = dt_out[0][2:]
    dot = torch.bfloat16 if set(dtypes) == {torch.bfloat16} else torch.float32
    precision = "ieee" if highest and torch.float32 in dtypes else "tf32"
    block_tokens = max(16, min(triton.next_power_of_2(chunk_size), 64 if dot == torch.bfloat16 else 32))
    block_headdim = max(16, min(triton.next_power_of_2(headdim), 64))
    block_dstate = max(16, min(triton.next_power_of_2(dstate), 64))
    programs = batch * nchunks * -(-chunk_size // block_tokens) * nheads * -(-headdim // block_headdim)
    D_stride = (*backend.strides(D, 2), 0)[:2]
    z_stride = backend.strides(z, 4)
    states_stride = states[1]
    return backend.Launch(
        _compute_out_kernel,
        programs,
        (
            seqlen, nheads, nheads // ngroups, nchunks, chunk_size, *x_stride[:3], *B_stride[:3], *C_stride[:3],
            *dt_out[1], *dA_cumsum[1], *states_stride[:4], *z_stride[:3], *D_stride, *backend.strides(seq_idx, 2),
            x_stride[3], B_stride[3], C_stride[3], states_stride[4], z_stride[3],
        ),
        (headdim, dstate, block_tokens, block_headdim, block_dstate, _DOT[dot], precision),
        backend.Options(4, 2),
    )  # fmt: skip
