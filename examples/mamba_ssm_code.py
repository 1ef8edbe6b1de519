"""Code written for mamba_ssm on this package, whether mamba_ssm is installed or not."""

import importlib.util

import torch

from tilegym_mamba2.integrations import mamba_ssm as integration

if importlib.util.find_spec("mamba_ssm") is None:
    integration.provide()  # stand-in modules, under mamba_ssm's name
else:
    integration.enable()  # our functions in its modules

from mamba_ssm.ops.triton.selective_state_update import selective_state_update
from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

device = "cuda" if torch.cuda.is_available() else "cpu"
batch, seqlen, nheads, headdim, dstate = 2, 100, 4, 32, 16
x = torch.randn(batch, seqlen + 1, nheads, headdim, device=device)
B, C = torch.randn(2, batch, seqlen + 1, 1, dstate, device=device)
dt = torch.rand(batch, seqlen + 1, nheads, device=device)
A = -torch.rand(nheads, device=device)


def first(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [tensor[:, :seqlen] for tensor in tensors]


x_first, dt_first, B_first, C_first = first(x, dt, B, C)
_, state = mamba_chunk_scan_combined(x_first, dt_first, A, B_first, C_first, chunk_size=64, return_final_states=True)
last = selective_state_update(
    state,
    x[:, -1],
    dt[:, -1, :, None].expand(-1, -1, headdim),
    A[:, None, None].expand(-1, headdim, dstate),
    B[:, -1],
    C[:, -1],
)
whole = mamba_chunk_scan_combined(x, dt, A, B, C, chunk_size=64)
torch.testing.assert_close(last, whole[:, -1], rtol=1e-2, atol=1e-2)
print("prefill and one decoded token agree with the whole sequence, on", mamba_chunk_scan_combined.__module__)
