"""TileGym's Mamba-2 kernel and ours, each called through the other's registry."""

import os

import torch

import tilegym_mamba2 as tm
from tilegym_mamba2.integrations import tilegym as integration

os.environ.setdefault("TILEGYM_DISABLE_AUTOTUNE", "1")  # TileGym's search takes minutes for each shape

if not torch.cuda.is_available():
    try:
        integration.install()
    except ImportError as error:
        print(error)
    raise SystemExit(0)

for line in integration.install():
    print("registered", line)

batch, seqlen, nheads, headdim, dstate = 2, 1024, 8, 64, 128
x = torch.randn(batch, seqlen, nheads, headdim, device="cuda", dtype=torch.bfloat16)
B, C = torch.randn(2, batch, seqlen, 1, dstate, device="cuda", dtype=torch.bfloat16)
dt, A = torch.rand(batch, seqlen, nheads, device="cuda"), -torch.rand(nheads, device="cuda")

wanted = tm.mamba_chunk_scan_combined(x, dt, A, B, C, 64, backend="torch-reference")
for backend in ["tilegym", *tm.available_backends()]:
    out = tm.mamba_chunk_scan_combined(x, dt, A, B, C, 64, backend=backend)
    assert isinstance(out, torch.Tensor)
    assert isinstance(wanted, torch.Tensor)
    error = (out.double() - wanted.double()).norm() / wanted.double().norm()
    print(f"{backend}: {error:.1e} from torch-reference")
