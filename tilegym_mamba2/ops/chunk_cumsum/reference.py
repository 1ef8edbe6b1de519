"""chunk_cumsum in plain torch: the definition of correct.

The sum is carried in float64 and rounded once, so that its error is half a unit in the last place.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from tilegym_mamba2.registry import register


@register("chunk_cumsum", "torch-reference", differentiable=True)
def chunk_cumsum(
    dt: Tensor,
    A: Tensor,
    chunk_size: int,
    dt_bias: Tensor | None,
    dt_softplus: bool,
    dt_limit: tuple[float, float],
) -> tuple[Tensor, Tensor]:
    compute = torch.float64 if torch.float64 in (dt.dtype, A.dtype) else torch.float32
    d = dt.to(compute)  # (batch, seqlen, nheads)
    if dt_bias is not None:
        d = d + dt_bias.to(compute)
    if dt_softplus:
        d = F.softplus(d, threshold=20.0)
    d = d.clamp(*dt_limit)
    seqlen = d.shape[1]
    nchunks = -(-seqlen // chunk_size)
    d = F.pad(d.transpose(1, 2), (0, nchunks * chunk_size - seqlen))
    dt_out = d.unflatten(2, (nchunks, chunk_size)).contiguous()  # (batch, nheads, nchunks, chunk_size)
    # A step that is not finite poisons through dt_out; in the sum it would reach the chunk's later sequences.
    dA = torch.where(dt_out.isfinite(), dt_out, 0).double() * A.double()[:, None, None]
    return dA.cumsum(-1).to(compute), dt_out
