"""compute_out in plain torch, chunk by chunk: the definition of correct."""

import torch
import torch.nn.functional as F
from torch import Tensor

from tilegym_mamba2.registry import register


@register("compute_out", "torch-reference", differentiable=True)
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
    seqlen, ngroups = x.shape[1], B.shape[2]
    nchunks, chunk_size = dt_out.shape[2:]
    compute = torch.float64 if torch.float64 in (x.dtype, B.dtype, C.dtype) else torch.float32
    outs: list[Tensor] = []
    for chunk in range(nchunks):
        span = slice(chunk * chunk_size, min((chunk + 1) * chunk_size, seqlen))
        length = span.stop - span.start
        d = (
            dt_out[:, :, chunk, :length].to(compute).unflatten(1, (ngroups, -1))
        )  # (batch, ngroups, nheads / ngroups, length)
        a = dA_cumsum[:, :, chunk, :length].unflatten(1, (ngroups, -1))
        x_chunk = x[:, span].to(compute)  # (batch, length, nheads, headdim)
        x_heads = x_chunk.transpose(1, 2).unflatten(1, (ngroups, -1))
        B_chunk = B[:, span].to(compute).transpose(1, 2)  # (batch, ngroups, length, dstate)
        C_chunk = C[:, span].to(compute).transpose(1, 2)
        entry = states[:, chunk].to(compute).unflatten(1, (ngroups, -1))

        # Same sequence and j <= i, (batch, 1, 1, length, length); and the tokens that the entry state reaches.
        position = torch.arange(length, device=x.device)
        start = torch.zeros_like(position)[None]
        from_entry = torch.ones_like(start, dtype=torch.bool)
        if seq_idx is not None:
            start = _sequence_start(seq_idx, span)  # (batch, length)
            from_entry = start < 0
        visible = (position[:, None] >= position) & (position >= start[..., None])
        visible = visible[:, None, None]

        # In place: it is the largest tensor, and in float64 where A is.
        decay = (a[..., :, None] - a[..., None, :]).masked_fill_(~visible, -torch.inf).to(compute).exp()
        weight = torch.where(visible, (C_chunk @ B_chunk.mT)[:, :, None] * decay * d[..., None, :], 0)
        finite = x_heads.isfinite()
        y = weight @ torch.where(finite, x_heads, 0)
        # 0 * NaN would reach tokens before a non-finite one, so it is put back where it is visible.
        last_bad = torch.where(finite, -1, position[:, None]).cummax(-2).values
        y = torch.where((last_bad >= 0) & (last_bad >= start[:, None, None, :, None]), torch.nan, y)

        carried = (C_chunk[:, :, None] @ entry.mT) * a.to(compute).exp()[..., None]
        y = y + torch.where(from_entry[:, None, None, :, None], carried, 0)
        y = y.flatten(1, 2).transpose(1, 2)  # (batch, length, nheads, headdim)
        if D is not None:
            y = y + x_chunk * (D if D.dim() == 2 else D[:, None]).to(compute)
        if z is not None:
            y = y * F.silu(z[:, span].to(compute))
        outs.append(y.to(x.dtype))
    return torch.cat(outs, 1) if outs else torch.empty_like(x, memory_format=torch.contiguous_format)


def _sequence_start(seq_idx: Tensor, span: slice) -> Tensor:
    """Where each token's sequence begins, relative to the chunk, (batch, length); -1 if before the chunk."""
    length = span.stop - span.start
    before = seq_idx[:, max(span.start - 1, 0) : span.stop - 1]
    if span.start == 0:
        before = torch.cat([seq_idx[:, :1], before], 1)
    position = torch.arange(length, device=seq_idx.device)
    return torch.where(seq_idx[:, span] != before, position, -1).cummax(1).values
