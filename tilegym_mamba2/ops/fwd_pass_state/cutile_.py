"""fwd_pass_state in cuTile: the state that enters each chunk, and the state after the last token.

    w[c, j] = exp(a[c, -1] - a[c, j]) * dt_out[c, j], a = dA_cumsum
    H[c + 1] = exp(a[c, -1]) * H[c] + sum(w[c, j] * x[c, j] (outer) B[c, j] for j)

A program owns a (BLOCK_HEADDIM, BLOCK_STATE) tile of one head's state, keeps it in float32 registers and walks the
chunks in order. x is read once for each tile of dstate, B once for each tile of headdim and each head. The weights
scale x, the left operand of the product, which stays in registers; a scaled right operand would be written to shared
memory element by element.
"""

from typing import NamedTuple

import cuda.tile as ct
import torch
from torch import Tensor

from tilegym_mamba2.backends._cutile_math import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    LOG2E,
    TFLOAT32,
    as_operand,
    load_runs,
    load_tokens,
    operand_type,
    power_of_two,
    run_index,
)
from tilegym_mamba2.backends.cutile import DeviceInfo, Hints, choose, device_info, launch
from tilegym_mamba2.problem import float64_reason
from tilegym_mamba2.registry import register


@ct.kernel
def _fwd_pass_state_kernel(
    x,  # (batch, seqlen, nheads, headdim)
    B,  # (batch, seqlen, ngroups, dstate)
    dt_out,  # (batch, nheads, nchunks, chunk_size)
    dA_cumsum,  # (batch, nheads, nchunks, chunk_size)
    initial_states,  # (batch, nheads, headdim, dstate)
    runs,  # (batch, seqlen)
    states,  # (batch, nchunks, nheads, headdim, dstate)
    final_states,  # (batch, nheads, headdim, dstate)
    HAS_INITIAL: ct.Constant[bool],
    HAS_RUNS: ct.Constant[bool],
    WHOLE_TILES: ct.Constant[bool],
    ONE_BLOCK: ct.Constant[bool],
    OPERAND: ct.Constant[int],
    BLOCK_TOKENS: ct.Constant[int],
    BLOCK_HEADDIM: ct.Constant[int],
    BLOCK_STATE: ct.Constant[int],
    X_LATENCY: ct.Constant[int],
    B_LATENCY: ct.Constant[int],
):
    seqlen, nheads, headdim = x.shape[1], x.shape[2], x.shape[3]
    ngroups, dstate = B.shape[2], B.shape[3]
    nchunks, chunk_size = dt_out.shape[2], dt_out.shape[3]
    state_tiles = ct.cdiv(dstate, BLOCK_STATE)
    headdim_tiles = ct.cdiv(headdim, BLOCK_HEADDIM)
    program = ct.bid(0)
    n = program % state_tiles
    p = program // state_tiles % headdim_tiles
    head = program // (state_tiles * headdim_tiles) % nheads
    batch = program // (state_tiles * headdim_tiles * nheads)
    group = head // (nheads // ngroups)

    if HAS_INITIAL:
        state = ct.load(
            initial_states, (batch, head, p, n), (1, 1, BLOCK_HEADDIM, BLOCK_STATE), padding_mode=ct.PaddingMode.ZERO
        )
        state = state.reshape((BLOCK_HEADDIM, BLOCK_STATE)).astype(ct.float32)
    else:
        state = ct.zeros((BLOCK_HEADDIM, BLOCK_STATE), dtype=ct.float32)
    if HAS_RUNS:
        last_run = ct.load(runs, (batch, 0), (1, 1)).item()

    for chunk in range(nchunks):
        chunk_first = chunk * chunk_size
        chunk_stop = ct.minimum(chunk_first + chunk_size, seqlen)
        ct.store(
            states,
            (batch, chunk, head, p, n),
            state.reshape((1, 1, 1, BLOCK_HEADDIM, BLOCK_STATE)).astype(states.dtype),
        )
        sum_last = ct.load(dA_cumsum, (batch, head, chunk, chunk_size - 1), (1, 1, 1, 1)).reshape((1,))
        decayed = state * ct.exp2(sum_last * LOG2E)[:, None]  # (BLOCK_HEADDIM, BLOCK_STATE)
        if HAS_RUNS:
            entry_run = last_run
            last_run = ct.load(runs, (batch, chunk_stop - 1), (1, 1)).item()
            # Selected, not multiplied by 0: a state that isn't finite must not reach the next sequence.
            state = ct.where(entry_run == last_run, decayed, 0.0)
        else:
            state = decayed
        # Written out for one block because a loop around the loads would keep them from being issued early.
        if ONE_BLOCK:
            run_tile = 0
            if HAS_RUNS:
                run_tile = load_runs(runs, batch, chunk_first, chunk_stop, BLOCK_TOKENS, WHOLE_TILES)
                run_tile = run_tile == last_run
            state = _add_block(
                state, x, B, dt_out, dA_cumsum, sum_last, run_tile, batch, head, group, p, n, chunk, 0, chunk_first,
                chunk_stop, HAS_RUNS, WHOLE_TILES, OPERAND, BLOCK_TOKENS, BLOCK_HEADDIM, BLOCK_STATE, X_LATENCY,
                B_LATENCY,
            )  # fmt: skip
        else:
            for block in range(ct.cdiv(chunk_stop - chunk_first, BLOCK_TOKENS)):
                first = chunk_first + block * BLOCK_TOKENS
                stop = ct.minimum(first + BLOCK_TOKENS, chunk_stop)
                run_tile = 0
                if HAS_RUNS:
                    run_tile = load_runs(runs, batch, first, stop, BLOCK_TOKENS, WHOLE_TILES)
                    run_tile = run_tile == last_run
                state = _add_block(
                    state, x, B, dt_out, dA_cumsum, sum_last, run_tile, batch, head, group, p, n, chunk, block, first,
                    stop, HAS_RUNS, WHOLE_TILES, OPERAND, BLOCK_TOKENS, BLOCK_HEADDIM, BLOCK_STATE, X_LATENCY,
                    B_LATENCY,
                )  # fmt: skip
    ct.store(final_states, (batch, head, p, n), state.reshape((1, 1, BLOCK_HEADDIM, BLOCK_STATE)))


def _add_block(
    state, x, B, dt_out, dA_cumsum, sum_last, visible, batch, head, group, p, n, chunk, block, first, stop,
    HAS_RUNS, WHOLE_TILES, OPERAND, BLOCK_TOKENS, BLOCK_HEADDIM, BLOCK_STATE, X_LATENCY, B_LATENCY,
):  # fmt: skip
    """The state plus the contributions of tokens [first, stop), those in `visible` if HAS_RUNS."""
    x_tile = load_tokens(
        x, batch, first, stop, head, p, BLOCK_TOKENS, BLOCK_HEADDIM, WHOLE_TILES, X_LATENCY
    )  # (BLOCK_TOKENS, BLOCK_HEADDIM)
    shape = (1, 1, 1, BLOCK_TOKENS)
    d = ct.load(dt_out, (batch, head, chunk, block), shape, padding_mode=ct.PaddingMode.ZERO).reshape((BLOCK_TOKENS,))
    sum_j = ct.load(dA_cumsum, (batch, head, chunk, block), shape, padding_mode=ct.PaddingMode.ZERO)
    B_tile = load_tokens(
        B, batch, first, stop, group, n, BLOCK_TOKENS, BLOCK_STATE, WHOLE_TILES, B_LATENCY
    )  # (BLOCK_TOKENS, BLOCK_STATE)
    weight = ct.exp2((sum_last - sum_j.reshape((BLOCK_TOKENS,))) * LOG2E) * d  # (BLOCK_TOKENS,)
    if HAS_RUNS:
        weight = ct.where(visible, weight, 0.0)
        B_tile = ct.where(visible[:, None], B_tile, ct.zeros((BLOCK_TOKENS, BLOCK_STATE), dtype=B_tile.dtype))
    if OPERAND == FLOAT16:
        # |x| fits float16, weight * x may not; the largest weight is taken out of the product where it passes 1.
        scale = ct.maximum(ct.max(weight, 0), 1.0)
        weight = weight / scale
    weighted = x_tile.transpose().astype(ct.float32) * weight[None, :]  # (BLOCK_HEADDIM, BLOCK_TOKENS)
    if HAS_RUNS:
        weighted = ct.where(visible[None, :], weighted, 0.0)
    B_operand = as_operand(B_tile, OPERAND)
    if OPERAND == FLOAT16:
        product = ct.zeros((BLOCK_HEADDIM, BLOCK_STATE), dtype=ct.float32)
        state = state + ct.mma(as_operand(weighted, OPERAND), B_operand, product) * scale
    else:
        high = as_operand(weighted, OPERAND)
        state = ct.mma(high, B_operand, state)
        if OPERAND == BFLOAT16:
            # bfloat16 states are rounded once already: a second rounding, of the weighted x, would pass the budget.
            low = as_operand(weighted - high.astype(ct.float32), OPERAND)
            state = ct.mma(low, B_operand, state)
    return state


class _Configuration(NamedTuple):
    block_tokens: int
    block_headdim: int
    block_state: int
    x_latency: int
    b_latency: int
    hints: Hints


def _configurations(
    pairs: int, headdim: int, dstate: int, chunk_size: int, has_runs: bool, operand: int, info: DeviceInfo
) -> list[_Configuration]:
    """Configurations for this many (batch row, head) pairs, the default first."""
    if operand == FLOAT32:
        # Scalar multiplications, unrolled in full: larger tiles run out of registers.
        tokens = power_of_two(chunk_size, 16, 16)
        return [_Configuration(tokens, 32, power_of_two(dstate, 16, 32), 4, 4, Hints(num_worker_warps=8))]
    block_headdim = 64
    narrow = has_runs or operand == TFLOAT32 or info.capability[0] < 9  # 128 run out of registers there
    tokens = power_of_two(chunk_size, 16, 64 if narrow else 128)
    widest = 64 if narrow else 128
    hints = Hints(occupancy=1, num_worker_warps=8) if has_runs else Hints(occupancy=2)
    tiles = pairs * -(-headdim // block_headdim)
    # Fewer columns mean more programs, each of which reads x again: no more of them than fill the GPU twice.
    block_state = power_of_two(dstate, 16, widest)
    while block_state > 32 and tiles * -(-dstate // block_state) < 2 * info.multiprocessors:
        block_state //= 2
    sizes = [block_state] + [size for size in (32, 64, 128) if size != block_state and size <= min(widest, dstate)]
    latencies = (4, 8) if tokens == 128 or has_runs else (8, 4)
    return [
        _Configuration(tokens, block_headdim, size, latency, latency, hints) for size in sizes for latency in latencies
    ]


@register("fwd_pass_state", "cutile", supports=float64_reason)
def fwd_pass_state(
    x: Tensor,
    B: Tensor,
    dt_out: Tensor,
    dA_cumsum: Tensor,
    initial_states: Tensor | None,
    seq_idx: Tensor | None,
    state_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor]:
    batch, _, nheads, headdim = x.shape
    dstate = B.shape[3]
    nchunks, chunk_size = dt_out.shape[2:]
    if state_dtype is None:
        state_dtype = torch.float32 if x.dtype == torch.float16 else x.dtype
    states = torch.empty((batch, nchunks, nheads, headdim, dstate), dtype=state_dtype, device=x.device)
    final_states = torch.empty((batch, nheads, headdim, dstate), dtype=torch.float32, device=x.device)
    if x.numel() == 0:
        if initial_states is None:
            final_states.zero_()
        else:
            final_states.copy_(initial_states)
        return states, final_states
    operand = operand_type(x, B)
    tile = choose(
        _configurations(
            batch * nheads, headdim, dstate, chunk_size, seq_idx is not None, operand, device_info(x.device)
        )
    )
    launch(
        _fwd_pass_state_kernel,
        (-(-dstate // tile.block_state) * -(-headdim // tile.block_headdim) * nheads * batch,),
        (
            x,
            B,
            dt_out,
            dA_cumsum,
            final_states if initial_states is None else initial_states,
            dt_out if seq_idx is None else run_index(seq_idx),
            states,
            final_states,
            initial_states is not None,
            seq_idx is not None,
            chunk_size % tile.block_tokens == 0,
            chunk_size <= tile.block_tokens,
            operand,
            tile.block_tokens,
            tile.block_headdim,
            tile.block_state,
            tile.x_latency,
            tile.b_latency,
        ),
        tile.hints,
    )
    return states, final_states
