"""A layer around the scan under torch.compile: one graph, compiled once for every sequence length."""

import torch

import tilegym_mamba2 as tm

device = "cuda" if torch.cuda.is_available() else "cpu"
nheads, headdim, ngroups, dstate = 4, 32, 1, 16
sizes = [nheads * headdim, ngroups * dstate, ngroups * dstate, nheads]
weight = torch.randn(64, sum(sizes), device=device) / 8
A = -torch.rand(nheads, device=device)


def layer(hidden: torch.Tensor) -> torch.Tensor:
    x, B, C, dt = (hidden @ weight).split(sizes, -1)
    out = tm.mamba_chunk_scan_combined(
        x.unflatten(-1, (nheads, headdim)),
        dt,
        A,
        B.unflatten(-1, (ngroups, dstate)),
        C.unflatten(-1, (ngroups, dstate)),
        chunk_size=64,
        dt_softplus=True,
    )
    assert isinstance(out, torch.Tensor)
    return torch.nn.functional.silu(out.flatten(2))


compiled = torch.compile(layer, fullgraph=True, dynamic=True)
for seqlen in (100, 257):
    hidden = torch.randn(2, seqlen, 64, device=device)
    torch.testing.assert_close(compiled(hidden), layer(hidden), rtol=1e-3, atol=1e-3)
    print(f"seqlen {seqlen}: the compiled layer agrees")
