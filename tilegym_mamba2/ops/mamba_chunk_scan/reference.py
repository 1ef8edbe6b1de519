"""mamba_chunk_scan in plain torch: the definition of correct, as precise as its inputs allow.

The stages run with A in float64, so that the exponents, differences of cumulative sums that may be large, keep
float32 precision; and with chunks of at least 64 tokens, so that the states stored at chunk entries stay small.
Neither changes what is computed: the result does not depend on the chunk size.
"""

import torch
from torch import Tensor

from tilegym_mamba2.ops.mamba_chunk_scan import compose
from tilegym_mamba2.registry import register

_LEAST_CHUNK = 64


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
    return compose(
        "torch-reference", x, dt, A.double(), B, C, max(chunk_size, _LEAST_CHUNK), D, z, dt_bias, initial_states,
        seq_idx, cu_seqlens, dt_softplus, dt_limit, state_dtype,
    )  # fmt: skip
