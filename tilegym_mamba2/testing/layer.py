"""What a real Mamba-2 layer feeds the scan."""

import inspect
import math
import os
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from tilegym_mamba2.models import Model, find_model
from tilegym_mamba2.testing.errors import INFINITY
from tilegym_mamba2.testing.inputs import Inputs, inverse_softplus
from tilegym_mamba2.testing.oracle import oracle_scan


def layer_inputs(
    model: Model | str,
    seqlen: int,
    text: str | bytes | os.PathLike[str],
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> Inputs:
    """Makes what a freshly initialised Mamba-2 layer of a released model's geometry feeds the scan.

    The text's bytes, repeated to seqlen, are the tokens. They pass a seeded embedding, an RMSNorm, in_proj, and
    the causal convolution of width 4 with SiLU. Initialised as `Mamba2` of state-spaces/mamba
    (mamba_ssm/modules/mamba2.py): A uniform in [-16, -1], dt_bias the inverse softplus of a log-uniform step in
    [1e-3, 0.1] and at least 1e-4, D one, in_proj and conv1d as torch.nn.Linear and Conv1d are, and half as many
    residual as inner channels. As there, dt is a view of in_proj's output, and x, B, C are views of the
    convolution's; the gate follows in the layer's norm, so that there is no z.

    Args:
        model: a model, or its name in `tilegym_mamba2.models.MODELS`.
        text: not empty; or a `pathlib.Path`, for that file's content.
        dtype: of the activations x, dt, B and C; the parameters are float32 (float64 if it is that).

    Returns:
        The keyword arguments of `mamba_chunk_scan_combined`, for a batch of one.
    """
    model = find_model(model) if isinstance(model, str) else model
    if isinstance(text, os.PathLike):
        content = Path(text).read_bytes()
    else:
        content = text.encode() if isinstance(text, str) else text
    if not content:
        raise ValueError(f"text is empty ({text!r}): a layer needs at least one byte")
    generator = torch.Generator().manual_seed(seed)
    inner, groups = model.nheads * model.headdim, model.ngroups * model.dstate
    residual, conv_channels = max(inner // 2, 1), inner + 2 * groups

    def uniform(bound: float, *shape: int) -> Tensor:
        return torch.empty(shape).uniform_(-bound, bound, generator=generator)

    embedding = torch.empty(256, residual).normal_(0.0, 0.02, generator=generator)
    in_proj = uniform(residual**-0.5, inner + conv_channels + model.nheads, residual)
    conv_weight, conv_bias = uniform(0.5, 4, conv_channels), uniform(0.5, conv_channels)
    step = torch.empty(model.nheads).uniform_(math.log(1e-3), math.log(0.1), generator=generator).exp().clamp(min=1e-4)
    A = -torch.empty(model.nheads).uniform_(1.0, 16.0, generator=generator).log().exp()

    parameters = torch.float64 if dtype == torch.float64 else torch.float32
    tokens = torch.frombuffer(bytearray(content), dtype=torch.uint8).long().repeat(-(-seqlen // len(content)))[:seqlen]
    # Each token's projection depends on its byte alone: 256 rows are computed, not seqlen.
    projected = F.rms_norm(embedding, (residual,), eps=1e-5) @ in_proj.T
    projection = projected.to(device, dtype)[tokens.to(device)][None]  # (1, seqlen, channels): z, x, B, C, dt
    _, to_conv, dt = projection.split([inner, conv_channels, model.nheads], 2)
    padded = F.pad(to_conv.to(parameters), (0, 0, 3, 0))
    convolved = conv_bias.to(device, parameters).expand(1, seqlen, -1)
    for tap in range(4):
        convolved = torch.addcmul(convolved, padded[:, tap : tap + seqlen], conv_weight[tap].to(device, parameters))
    x, B, C = F.silu(convolved).to(dtype).split([inner, groups, groups], 2)

    inputs: Inputs = dict.fromkeys(inspect.signature(oracle_scan).parameters)
    inputs.update(
        x=x.unflatten(2, (model.nheads, model.headdim)),
        dt=dt,
        A=A.to(device, parameters),
        B=B.unflatten(2, (model.ngroups, model.dstate)),
        C=C.unflatten(2, (model.ngroups, model.dstate)),
        chunk_size=model.chunk_size,
        D=torch.ones(model.nheads, device=device, dtype=parameters),
        dt_bias=inverse_softplus(step).to(device, parameters),
        dt_softplus=True,
        dt_limit=(0.0, INFINITY),
    )
    return inputs
