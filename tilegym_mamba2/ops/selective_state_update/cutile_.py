"""selective_state_update in cuTile: one token of the recurrence, with the state updated in place.

    d[h, p] = softplus?(dt[h, p] + dt_bias[h, p])
    H[h, p, n] = exp(d[h, p] * A[h, p, n]) * H[h, p, n] + d[h, p] * x[h, p] * B[g, n]
    out[h, p] = (sum(H[h, p, n] * C[g, n] for n) + D[h, p] * x[h, p]) * silu(z[h, p])

A program owns the rows of a (BLOCK_HEADDIM, dstate) tile of one head's state, in blocks of BLOCK_STATE columns. The
state is read and written once; everything else is small.
"""

from typing import NamedTuple

import cuda.tile as ct
import torch
from torch import Tensor

from tilegym_mamba2.backends._cutile_math import LOG2E, power_of_two, silu, softplus
from tilegym_mamba2.backends.cutile import Hints, choose, launch
from tilegym_mamba2.problem import float64_reason
from tilegym_mamba2.registry import register


@ct.kernel
def _selective_state_update_kernel(
    state,  # (nslots, nheads, headdim, dstate)
    x,  # (batch, nheads, headdim)
    dt,  # (batch, nheads, headdim)
    A,  # (nheads, headdim, dstate)
    B,  # (batch, ngroups, dstate)
    C,  # (batch, ngroups, dstate)
    D,  # (nheads, headdim)
    z,  # (batch, nheads, headdim)
    dt_bias,  # (nheads, headdim)
    slots,  # (batch,)
    out,  # (batch, nheads, headdim)
    HAS_D: ct.Constant[bool],
    HAS_Z: ct.Constant[bool],
    HAS_BIAS: ct.Constant[bool],
    HAS_SLOTS: ct.Constant[bool],
    SOFTPLUS: ct.Constant[bool],
    ONE_RATE: ct.Constant[bool],
    BLOCK_HEADDIM: ct.Constant[int],
    BLOCK_STATE: ct.Constant[int],
):
    nheads, headdim, dstate = state.shape[1], state.shape[2], state.shape[3]
    headdim_tiles = ct.cdiv(headdim, BLOCK_HEADDIM)
    program = ct.bid(0)
    p = program % headdim_tiles
    head = program // headdim_tiles % nheads
    batch = program // (headdim_tiles * nheads)
    group = head // (nheads // B.shape[1])
    slot = batch
    if HAS_SLOTS:
        slot = ct.load(slots, (batch,), (1,)).item().astype(ct.int32)
    y = ct.zeros((BLOCK_HEADDIM,), dtype=ct.float32)
    if slot >= 0:
        x_tile = _load_row(x, batch, head, p, BLOCK_HEADDIM)
        d = _load_row(dt, batch, head, p, BLOCK_HEADDIM)
        if HAS_BIAS:
            d = d + _load_channels(dt_bias, head, p, BLOCK_HEADDIM)
        if SOFTPLUS:
            d = softplus(d)
        for n in range(ct.cdiv(dstate, BLOCK_STATE)):
            if ONE_RATE:
                rate = ct.load(A, (head, 0, 0), (1, 1, 1)).reshape((1, 1)).astype(ct.float32)
            else:
                rate = ct.load(A, (head, p, n), (1, BLOCK_HEADDIM, BLOCK_STATE), padding_mode=ct.PaddingMode.ZERO)
                rate = rate.reshape((BLOCK_HEADDIM, BLOCK_STATE)).astype(ct.float32)
            decay = ct.exp2(d[:, None] * rate * LOG2E)  # (BLOCK_HEADDIM, 1 or BLOCK_STATE)
            tile = ct.load(
                state, (slot, head, p, n), (1, 1, BLOCK_HEADDIM, BLOCK_STATE), padding_mode=ct.PaddingMode.ZERO
            )
            B_tile = _load_row(B, batch, group, n, BLOCK_STATE)
            C_tile = _load_row(C, batch, group, n, BLOCK_STATE)
            tile = tile.reshape((BLOCK_HEADDIM, BLOCK_STATE)).astype(ct.float32)
            tile = tile * decay + (d * x_tile)[:, None] * B_tile[None, :]  # (BLOCK_HEADDIM, BLOCK_STATE)
            y = y + ct.sum(tile * C_tile[None, :], 1)
            tile = tile.astype(state.dtype).reshape((1, 1, BLOCK_HEADDIM, BLOCK_STATE))
            ct.store(state, (slot, head, p, n), tile)
        if HAS_D:
            y = y + _load_channels(D, head, p, BLOCK_HEADDIM) * x_tile
        if HAS_Z:
            y = y * silu(_load_row(z, batch, head, p, BLOCK_HEADDIM))
    ct.store(out, (batch, head, p), y.astype(out.dtype).reshape((1, 1, BLOCK_HEADDIM)))


def _load_row(array, batch, row, block, BLOCK):
    """A block of (batch, rows, channels) in float32, zero past the end, (BLOCK,)."""
    tile = ct.load(array, (batch, row, block), (1, 1, BLOCK), padding_mode=ct.PaddingMode.ZERO)
    return tile.reshape((BLOCK,)).astype(ct.float32)


def _load_channels(array, row, block, BLOCK):
    """A block of (rows, channels) in float32, zero past the end, (BLOCK,)."""
    tile = ct.load(array, (row, block), (1, BLOCK), padding_mode=ct.PaddingMode.ZERO)
    return tile.reshape((BLOCK,)).astype(ct.float32)


class _Configuration(NamedTuple):
    block_headdim: int
    block_state: int
    hints: Hints


def _configurations(headdim: int, dstate: int) -> list[_Configuration]:
    block_state = power_of_two(dstate, 1, 256)
    return [
        _Configuration(power_of_two(headdim, 1, max(1, elements // block_state)), block_state, Hints(occupancy=4))
        for elements in (4096, 2048)
    ]


@register("selective_state_update", "cutile", supports=float64_reason)
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
    batch, nheads, headdim = x.shape
    dstate = state.shape[3]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    tile = choose(_configurations(headdim, dstate))
    launch(
        _selective_state_update_kernel,
        (-(-headdim // tile.block_headdim) * nheads * batch,),
        (
            state,
            x,
            dt,
            A,
            B,
            C,
            A[:, :, 0] if D is None else D,
            x if z is None else z,
            A[:, :, 0] if dt_bias is None else dt_bias,
            B[:, 0, 0] if state_batch_indices is None else state_batch_indices,
            out,
            D is not None,
            z is not None,
            dt_bias is not None,
            state_batch_indices is not None,
            dt_softplus,
            # The usual A: one rate per head, expanded.
            A.stride()[1:] == (0, 0),
            tile.block_headdim,
            tile.block_state,
        ),
        tile.hints,
    )
    return out
