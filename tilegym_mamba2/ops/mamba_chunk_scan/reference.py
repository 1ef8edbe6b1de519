"""mamba_chunk_scan in plain torch: the definition of correct, as precise as its inputs allow.

The stages run with A in float64, so that the exponents, differences of cumulative sums that may be large, keep
float32 precision; and with chunks of at least (headdim + dstate) / 2 tokens, so that the states stored at chunk entries
take no more memory than the inputs, but not longer than the row, which would only be padded.
Neither changes what is computed: the result does not depend on the chunk size.
"""

import torch
from torch import Tensor

from tilegym_mamba2.ops.mamba_chunk_scan import compose
from tilegym_mamba2.registry import register


@register("mamba_chunk_scan", "torch-reference", differentiable=True)
def mamba_chunk_scan(
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
    chunk_size = max(min(chunk_size, x.shape[1]), (x.shape[3] + B.shape[3]) // 2)
    return compose(
        "torch-reference", x, dt, A.double(), B, C, chunk_size, D, z, dt_bias, initial_states, seq_idx,
        cu_seqlens, dt_softplus, dt_limit, state_dtype,
    )  # fmt: skip
