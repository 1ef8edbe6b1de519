"""selective_state_update in plain torch: the definition of correct."""

import torch
import torch.nn.functional as F
from torch import Tensor

from tilegym_mamba2.registry import register


@register("selective_state_update", "torch-reference", differentiable=True)
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
    nheads, ngroups = x.shape[1], B.shape[1]
    inputs = (state, x, dt, A, B, C)
    compute = torch.float64 if any(tensor.dtype == torch.float64 for tensor in inputs) else torch.float32
    row = slice(None) if state_batch_indices is None else state_batch_indices.long().clamp(min=0)
    d = dt.to(compute)  # (batch, nheads, headdim)
    if dt_bias is not None:
        d = d + dt_bias.to(compute)
    if dt_softplus:
        d = F.softplus(d, threshold=20.0)
    x_compute = x.to(compute)
    B_heads = B.to(compute).repeat_interleave(nheads // ngroups, 1)  # (batch, nheads, dstate)
    C_heads = C.to(compute).repeat_interleave(nheads // ngroups, 1)
    old_state = state[row].to(compute, copy=True)  # autograd needs it, and the original is overwritten below
    decayed = old_state * (d[..., None] * A.to(compute)).exp()
    new = decayed + (d * x_compute)[..., None] * B_heads[:, :, None]  # (batch, nheads, headdim, dstate)
    out = (new @ C_heads[..., None]).squeeze(-1)
    if D is not None:
        out = out + x_compute * D.to(compute)
    if z is not None:
        out = out * F.silu(z.to(compute))
    if state_batch_indices is None:
        state.copy_(new)
    else:
        used = state_batch_indices >= 0
        out = torch.where(used[:, None, None], out, 0)
        state[state_batch_indices[used].long()] = new[used].to(state.dtype)
    return out.to(x.dtype)
