"""fwd_pass_state in plain torch, chunk by chunk: the definition of correct."""

import torch
from torch import Tensor

from tilegym_mamba2.registry import register


@register("fwd_pass_state", "torch-reference", differentiable=True)
def fwd_pass_state(
    x: Tensor,
    B: Tensor,
    dt_out: Tensor,
    dA_cumsum: Tensor,
    initial_states: Tensor | None,
    seq_idx: Tensor | None,
    state_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor]:
    batch, seqlen, nheads, headdim = x.shape
    ngroups, dstate = B.shape[2:]
    nchunks, chunk_size = dt_out.shape[2:]
    compute = torch.float64 if torch.float64 in (x.dtype, B.dtype) else torch.float32
    if state_dtype is None:
        state_dtype = torch.float32 if x.dtype == torch.float16 else x.dtype

    if initial_states is None:
        state = x.new_zeros(batch, nheads, headdim, dstate, dtype=compute)
    else:
        state = initial_states.to(compute)
    states: list[Tensor] = []
    for chunk in range(nchunks):
        states.append(state.to(state_dtype))
        span = slice(chunk * chunk_size, min((chunk + 1) * chunk_size, seqlen))
        a = dA_cumsum[:, :, chunk, : span.stop - span.start]  # (batch, nheads, length)
        weight = (a[:, :, -1:] - a).to(compute).exp() * dt_out[:, :, chunk, : a.shape[2]].to(compute)
        xw = x[:, span].to(compute) * weight.transpose(1, 2)[..., None]  # (batch, length, nheads, headdim)
        B_chunk = B[:, span].to(compute)  # (batch, length, ngroups, dstate)
        decayed = state * a[:, :, -1, None, None].to(compute).exp()
        if seq_idx is not None:
            changed = _changes(seq_idx, span)  # (batch, length)
            later = changed.flip(1).cumsum(1).flip(1) - changed  # boundaries after each token, in the chunk
            # Selected, not multiplied by 0: another sequence's NaN stays there.
            counts = (later == 0)[:, :, None, None]
            xw, B_chunk = torch.where(counts, xw, 0), torch.where(counts, B_chunk, 0)
            decayed = torch.where(changed.any(1)[:, None, None, None], 0, decayed)
        heads = xw.unflatten(2, (ngroups, -1))  # (batch, length, ngroups, nheads / ngroups, headdim)
        update = torch.einsum("blgrp,blgn->bgrpn", heads, B_chunk)
        state = decayed + update.flatten(1, 2)
    if states:
        entry_states = torch.stack(states, 1)
    else:
        entry_states = x.new_empty(batch, 0, nheads, headdim, dstate, dtype=state_dtype)
    final_dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    return entry_states, state.to(final_dtype, copy=nchunks == 0)  # never the caller's own initial_states


def _changes(seq_idx: Tensor, span: slice) -> Tensor:
    """1 where a token's id differs from that of the token before it, (batch, length); 0 for the row's first."""
    before = seq_idx[:, max(span.start - 1, 0) : span.stop - 1]
    if span.start == 0:
        before = torch.cat([seq_idx[:, :1], before], 1)
    return (seq_idx[:, span] != before).int()
