"""chunk_cumsum in cuTile: time steps, and their cumulative decay exponents inside each chunk.

    d[b, t, h] = clamp(softplus?(dt[b, t, h] + dt_bias[h]), dt_limit), and 0 past seqlen
    dA_cumsum[b, h, c, i] = sum(d[b, c * chunk_size + j, h] * A[h] for j <= i)

A program owns a chunk of a few neighbouring heads of a batch row, and walks it in blocks of tokens with the sum
carried along; nothing is read twice. The sum is float64, rounded once, because exponents far along a chunk are
differences of large sums.
"""

from typing import NamedTuple

import cuda.tile as ct
import torch
from torch import Tensor

from tilegym_mamba2.backends._cutile_math import power_of_two, softplus
from tilegym_mamba2.backends.cutile import Hints, choose, launch
from tilegym_mamba2.problem import float64_reason
from tilegym_mamba2.registry import register


@ct.kernel
def _chunk_cumsum_kernel(
    dt,  # (batch, seqlen, nheads)
    A,  # (nheads,)
    dt_bias,  # (nheads,)
    dA_cumsum,  # (batch, nheads, nchunks, chunk_size)
    dt_out,  # (batch, nheads, nchunks, chunk_size)
    low: float,
    high: float,
    HAS_BIAS: ct.Constant[bool],
    SOFTPLUS: ct.Constant[bool],
    WHOLE_TILES: ct.Constant[bool],
    BLOCK_HEADS: ct.Constant[int],
    BLOCK_TOKENS: ct.Constant[int],
):
    seqlen, nheads = dt.shape[1], dt.shape[2]
    nchunks, chunk_size = dA_cumsum.shape[2], dA_cumsum.shape[3]
    head_blocks = ct.cdiv(nheads, BLOCK_HEADS)
    program = ct.bid(0)
    heads = program % head_blocks
    chunk = program // head_blocks % nchunks
    batch = program // (head_blocks * nchunks)
    chunk_first = chunk * chunk_size
    chunk_stop = ct.minimum(chunk_first + chunk_size, seqlen)

    rate = ct.load(A, (heads,), (BLOCK_HEADS,), padding_mode=ct.PaddingMode.ZERO).astype(ct.float64)
    if HAS_BIAS:
        bias = ct.load(dt_bias, (heads,), (BLOCK_HEADS,), padding_mode=ct.PaddingMode.ZERO).astype(ct.float32)
    carry = ct.zeros((BLOCK_HEADS, 1), dtype=ct.float64)
    for block in range(ct.cdiv(chunk_size, BLOCK_TOKENS)):
        first = chunk_first + block * BLOCK_TOKENS
        # A block past the end of a ragged last chunk has nothing to load; any token does, all are masked.
        readable = ct.minimum(first, seqlen - 1)
        if WHOLE_TILES:
            tile = ct.load(
                dt,
                (batch, readable // BLOCK_TOKENS, heads),
                (1, BLOCK_TOKENS, BLOCK_HEADS),
                padding_mode=ct.PaddingMode.ZERO,
            )
        else:
            tile = ct.load(
                dt.slice(1, readable, ct.minimum(readable + BLOCK_TOKENS, seqlen)),
                (batch, 0, heads),
                (1, BLOCK_TOKENS, BLOCK_HEADS),
                padding_mode=ct.PaddingMode.ZERO,
            )
        d = tile.reshape((BLOCK_TOKENS, BLOCK_HEADS)).astype(ct.float32)
        if HAS_BIAS:
            d = d + bias[None, :]
        if SOFTPLUS:
            d = softplus(d)
        # Comparisons keep a NaN, which minimum and maximum would replace by the limit.
        d = ct.where(d < low, low, d)
        d = ct.where(d > high, high, d)
        token = first + ct.arange(BLOCK_TOKENS, dtype=ct.int32)
        d = ct.where(token[:, None] < chunk_stop, d, 0.0)
        d = d.transpose()  # (BLOCK_HEADS, BLOCK_TOKENS)
        total = carry + ct.cumsum(d.astype(ct.float64) * rate[:, None], 1)  # (BLOCK_HEADS, BLOCK_TOKENS)
        carry = ct.extract(total, (0, BLOCK_TOKENS - 1), (BLOCK_HEADS, 1))
        shape = (1, BLOCK_HEADS, 1, BLOCK_TOKENS)
        ct.store(dt_out, (batch, heads, chunk, block), d.reshape(shape))
        ct.store(dA_cumsum, (batch, heads, chunk, block), total.astype(ct.float32).reshape(shape))


class _Configuration(NamedTuple):
    block_heads: int
    block_tokens: int
    hints: Hints


def _configurations(nheads: int, chunk_size: int) -> list[_Configuration]:
    return [
        _Configuration(
            power_of_two(nheads, 1, block_heads), power_of_two(chunk_size, 16, block_tokens), Hints(occupancy=occupancy)
        )
        for block_heads, block_tokens, occupancy in ((8, 64, 8), (4, 128, 8), (16, 64, 4))
    ]


@register("chunk_cumsum", "cutile", supports=float64_reason)
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
    dA_cumsum = torch.empty((batch, nheads, nchunks, chunk_size), dtype=torch.float32, device=dt.device)
    dt_out = torch.empty_like(dA_cumsum)
    if dt_out.numel() == 0:
        return dA_cumsum, dt_out
    block_heads, block_tokens, hints = choose(_configurations(nheads, chunk_size))
    launch(
        _chunk_cumsum_kernel,
        (-(-nheads // block_heads) * nchunks * batch,),
        (
            dt,
            A,
            A if dt_bias is None else dt_bias,
            dA_cumsum,
            dt_out,
            float(dt_limit[0]),
            float(dt_limit[1]),
            dt_bias is not None,
            dt_softplus,
            chunk_size % block_tokens == 0,
            block_heads,
            block_tokens,
        ),
        hints,
    )
    return dA_cumsum, dt_out
