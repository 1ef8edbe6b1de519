"""compute_out in cuTile: the output of every token from its chunk and the state that enters it.

    y[i] = exp(a[i]) * H @ C[i] + sum(W[i, j] * x[j] for j <= i) + D * x[i], times silu(z[i])
    W[i, j] = (C[i] . B[j]) * exp(a[i] - a[j]) * dt_out[j], a = dA_cumsum, H = states of the chunk

A program owns BLOCK_ROWS tokens of a chunk, for a tile of headdim and a few heads of one group, which share C B^T:
it is computed once where the chunk fits one tile of columns, else again for every head and tile of columns. C, B are
re-read for each block of heads, x for each block of rows from the block on. The products are transposed,
y^T = H C^T + x^T W^T, so that H goes to the tensor cores as it was loaded, and x through registers, where what isn't
finite is taken out: 0 * NaN would reach the rows i < j.
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
    silu,
)
from tilegym_mamba2.backends.cutile import DeviceInfo, Hints, choose, device_info, launch
from tilegym_mamba2.problem import float64_reason
from tilegym_mamba2.registry import register

_NEVER = 2**30  # past any row of a chunk


@ct.kernel
def _compute_out_kernel(
    x,  # (batch, seqlen, nheads, headdim)
    B,  # (batch, seqlen, ngroups, dstate)
    C,  # (batch, seqlen, ngroups, dstate)
    dt_out,  # (batch, nheads, nchunks, chunk_size)
    dA_cumsum,  # (batch, nheads, nchunks, chunk_size)
    states,  # (batch, nchunks, nheads, headdim, dstate)
    D,  # (nheads, headdim)
    z,  # (batch, seqlen, nheads, headdim)
    runs,  # (batch, seqlen)
    out,  # (batch, seqlen, nheads, headdim)
    row_blocks: int,  # of one batch row
    HAS_D: ct.Constant[bool],
    HAS_Z: ct.Constant[bool],
    HAS_RUNS: ct.Constant[bool],
    WHOLE_TILES: ct.Constant[bool],
    ONE_BLOCK: ct.Constant[bool],
    SAME_TILE: ct.Constant[bool],
    ONE_STATE_BLOCK: ct.Constant[bool],
    OPERAND: ct.Constant[int],
    STATE_OPERAND: ct.Constant[int],
    BLOCK_HEADS: ct.Constant[int],
    BLOCK_ROWS: ct.Constant[int],
    BLOCK_COLUMNS: ct.Constant[int],
    BLOCK_HEADDIM: ct.Constant[int],
    BLOCK_STATE: ct.Constant[int],
    LATENCY: ct.Constant[int],
):
    seqlen, nheads, headdim = x.shape[1], x.shape[2], x.shape[3]
    ngroups = B.shape[2]
    chunk_size = dt_out.shape[3]
    heads_per_group = nheads // ngroups
    head_blocks = ct.cdiv(heads_per_group, BLOCK_HEADS)
    headdim_tiles = ct.cdiv(headdim, BLOCK_HEADDIM)
    blocks_per_chunk = ct.cdiv(chunk_size, BLOCK_ROWS)
    program = ct.bid(0)
    p = program % headdim_tiles
    head_block = program // headdim_tiles % head_blocks
    group = program // (headdim_tiles * head_blocks) % ngroups
    row_block = program // (headdim_tiles * head_blocks * ngroups) % row_blocks
    batch = program // (headdim_tiles * head_blocks * ngroups * row_blocks)
    chunk = row_block // blocks_per_chunk
    block = row_block % blocks_per_chunk
    chunk_first = chunk * chunk_size
    chunk_stop = ct.minimum(chunk_first + chunk_size, seqlen)
    first = chunk_first + block * BLOCK_ROWS
    stop = ct.minimum(first + BLOCK_ROWS, chunk_stop)
    first_head = group * heads_per_group + head_block * BLOCK_HEADS
    last_head = ct.minimum(first_head + BLOCK_HEADS, (group + 1) * heads_per_group)
    column_blocks = ct.cdiv(stop - chunk_first, BLOCK_COLUMNS)

    row = block * BLOCK_ROWS + ct.arange(BLOCK_ROWS, dtype=ct.int32)  # (BLOCK_ROWS,), of the chunk
    if HAS_RUNS:
        row_run = load_runs(runs, batch, first, stop, BLOCK_ROWS, WHOLE_TILES)
        entry_run = ct.load(runs, (batch, ct.maximum(chunk_first - 1, 0)), (1, 1)).item()
        from_entry = row_run == entry_run  # (BLOCK_ROWS,)
    if ONE_STATE_BLOCK:
        C_tile = load_tokens(
            C, batch, first, stop, group, 0, BLOCK_ROWS, BLOCK_STATE, WHOLE_TILES, LATENCY
        )  # (BLOCK_ROWS, BLOCK_STATE)
    if ONE_BLOCK:
        products = _products(
            B, C, batch, group, first, stop, chunk_first, chunk_stop,
            WHOLE_TILES, OPERAND, BLOCK_ROWS, BLOCK_COLUMNS, BLOCK_STATE, LATENCY,
        )  # fmt: skip

    for head in range(first_head, last_head):
        shape = (1, 1, 1, BLOCK_ROWS)
        sum_i = ct.load(dA_cumsum, (batch, head, chunk, block), shape, padding_mode=ct.PaddingMode.ZERO)
        sum_i = sum_i.reshape((BLOCK_ROWS,))
        y = ct.zeros((BLOCK_HEADDIM, BLOCK_ROWS), dtype=ct.float32)
        if ONE_STATE_BLOCK:
            state = _load_state(states, batch, chunk, head, p, 0, BLOCK_HEADDIM, BLOCK_STATE, LATENCY)
            y = ct.mma(as_operand(state, STATE_OPERAND), as_operand(C_tile, STATE_OPERAND).transpose(), y)
        else:
            for n in range(ct.cdiv(C.shape[3], BLOCK_STATE)):
                state = _load_state(states, batch, chunk, head, p, n, BLOCK_HEADDIM, BLOCK_STATE, LATENCY)
                C_part = load_tokens(
                    C, batch, first, stop, group, n, BLOCK_ROWS, BLOCK_STATE, WHOLE_TILES, LATENCY
                )  # (BLOCK_ROWS, BLOCK_STATE)
                y = ct.mma(as_operand(state, STATE_OPERAND), as_operand(C_part, STATE_OPERAND).transpose(), y)
        y = y * ct.exp2(sum_i * LOG2E)[None, :]  # (BLOCK_HEADDIM, BLOCK_ROWS)
        if HAS_RUNS:
            y = ct.where(from_entry[None, :], y, 0.0)

        # The first row that something not finite in x reaches, for each channel.
        first_bad = ct.full((BLOCK_HEADDIM,), _NEVER, dtype=ct.int32)
        for column_block in range(1 if ONE_BLOCK else column_blocks):
            column_first = chunk_first + column_block * BLOCK_COLUMNS
            column_stop = ct.minimum(column_first + BLOCK_COLUMNS, chunk_stop)
            x_tile = load_tokens(
                x, batch, column_first, column_stop, head, p, BLOCK_COLUMNS, BLOCK_HEADDIM, WHOLE_TILES, LATENCY
            )  # (BLOCK_COLUMNS, BLOCK_HEADDIM)
            if not ONE_BLOCK:
                products = _products(
                    B, C, batch, group, first, stop, column_first, column_stop,
                    WHOLE_TILES, OPERAND, BLOCK_ROWS, BLOCK_COLUMNS, BLOCK_STATE, LATENCY,
                )  # fmt: skip
            shape = (1, 1, 1, BLOCK_COLUMNS)
            d = ct.load(dt_out, (batch, head, chunk, column_block), shape, padding_mode=ct.PaddingMode.ZERO)
            sum_j = ct.load(dA_cumsum, (batch, head, chunk, column_block), shape, padding_mode=ct.PaddingMode.ZERO)
            column = column_block * BLOCK_COLUMNS + ct.arange(BLOCK_COLUMNS, dtype=ct.int32)  # (BLOCK_COLUMNS,)
            visible = row[:, None] >= column[None, :]  # (BLOCK_ROWS, BLOCK_COLUMNS)
            if HAS_RUNS:
                column_run = load_runs(runs, batch, column_first, column_stop, BLOCK_COLUMNS, WHOLE_TILES)
                visible = visible & (row_run[:, None] == column_run[None, :])
            exponent = _difference_log2(sum_i, sum_j.reshape((BLOCK_COLUMNS,)), OPERAND)
            exponent = ct.where(visible, exponent, -float("inf"))
            weight = products * ct.exp2(exponent) * d.reshape((BLOCK_COLUMNS,))[None, :]
            # Selected once more, because B and d of a later token may not be finite.
            weight = ct.where(visible, weight, 0.0)  # (BLOCK_ROWS, BLOCK_COLUMNS)
            x_columns = x_tile.transpose()  # (BLOCK_HEADDIM, BLOCK_COLUMNS)
            if HAS_D and SAME_TILE:
                y = y + _load_skip(D, head, p, BLOCK_HEADDIM) * x_columns.astype(ct.float32)
            finite = ct.abs(x_columns.astype(ct.float32)) < float("inf")
            x_columns = ct.where(finite, x_columns, ct.zeros((BLOCK_HEADDIM, BLOCK_COLUMNS), dtype=x_columns.dtype))
            if OPERAND == FLOAT16:
                # A weight may pass 65,504; the largest of its row is taken out of the product where it passes 1.
                scale = ct.maximum(ct.max(ct.abs(weight), 1), 1.0)  # (BLOCK_ROWS,)
                part = ct.zeros((BLOCK_HEADDIM, BLOCK_ROWS), dtype=ct.float32)
                part = ct.mma(
                    as_operand(x_columns, OPERAND), as_operand(weight / scale[:, None], OPERAND).transpose(), part
                )
                y = y + part * scale[None, :]
            else:
                high = as_operand(weight, OPERAND)
                y = ct.mma(as_operand(x_columns, OPERAND), high.transpose(), y)
                if OPERAND == BFLOAT16:
                    # out is rounded to bfloat16 too: a second rounding, of the weights, would pass the budget.
                    low = as_operand(weight - high.astype(ct.float32), OPERAND)
                    y = ct.mma(as_operand(x_columns, OPERAND), low.transpose(), y)
            if HAS_RUNS:
                # Several sequences may have a bad token each: which rows it reaches is a product of its own.
                bad = ct.where(finite, 0.0, 1.0).astype(ct.bfloat16)
                reached = ct.where(visible, 1.0, 0.0).astype(ct.bfloat16)
                count = ct.zeros((BLOCK_HEADDIM, BLOCK_ROWS), dtype=ct.float32)
                count = ct.mma(bad, reached.transpose(), count)
                y = ct.where(count > 0.0, float("nan"), y)
            else:
                bad_column = ct.where(finite, _NEVER, column[None, :])
                first_bad = ct.minimum(first_bad, ct.min(bad_column, 1))
        if not HAS_RUNS:
            y = ct.where(row[None, :] >= first_bad[:, None], float("nan"), y)

        if HAS_D and not SAME_TILE:
            x_rows = load_tokens(
                x, batch, first, stop, head, p, BLOCK_ROWS, BLOCK_HEADDIM, WHOLE_TILES, LATENCY
            )  # (BLOCK_ROWS, BLOCK_HEADDIM)
            y = y + _load_skip(D, head, p, BLOCK_HEADDIM) * x_rows.transpose().astype(ct.float32)
        y = y.transpose()  # (BLOCK_ROWS, BLOCK_HEADDIM)
        if HAS_Z:
            z_tile = load_tokens(
                z, batch, first, stop, head, p, BLOCK_ROWS, BLOCK_HEADDIM, WHOLE_TILES, LATENCY
            )  # (BLOCK_ROWS, BLOCK_HEADDIM)
            y = y * silu(z_tile.astype(ct.float32))
        y = y.astype(out.dtype).reshape((1, BLOCK_ROWS, 1, BLOCK_HEADDIM))
        if WHOLE_TILES:
            ct.store(out, (batch, first // BLOCK_ROWS, head, p), y)
        else:
            ct.store(out.slice(1, first, stop), (batch, 0, head, p), y)


def _products(
    B, C, batch, group, first, stop, column_first, column_stop,
    WHOLE_TILES, OPERAND, BLOCK_ROWS, BLOCK_COLUMNS, BLOCK_STATE, LATENCY,
):  # fmt: skip
    """C[i] . B[j] of the rows [first, stop) and columns [column_first, column_stop), (BLOCK_ROWS, BLOCK_COLUMNS)."""
    products = ct.zeros((BLOCK_ROWS, BLOCK_COLUMNS), dtype=ct.float32)
    for n in range(ct.cdiv(B.shape[3], BLOCK_STATE)):
        C_tile = load_tokens(C, batch, first, stop, group, n, BLOCK_ROWS, BLOCK_STATE, WHOLE_TILES, LATENCY)
        B_tile = load_tokens(
            B, batch, column_first, column_stop, group, n, BLOCK_COLUMNS, BLOCK_STATE, WHOLE_TILES, LATENCY
        )
        products = ct.mma(as_operand(C_tile, OPERAND), as_operand(B_tile, OPERAND).transpose(), products)
    return products


def _load_state(states, batch, chunk, head, p, n, BLOCK_HEADDIM, BLOCK_STATE, LATENCY):
    state = ct.load(
        states,
        (batch, chunk, head, p, n),
        (1, 1, 1, BLOCK_HEADDIM, BLOCK_STATE),
        padding_mode=ct.PaddingMode.ZERO,
        latency=LATENCY,
    )
    return state.reshape((BLOCK_HEADDIM, BLOCK_STATE))


def _load_skip(D, head, p, BLOCK_HEADDIM):
    """D of one head, (BLOCK_HEADDIM, 1)."""
    skip = ct.load(D, (head, p), (1, BLOCK_HEADDIM), padding_mode=ct.PaddingMode.ZERO).astype(ct.float32)
    return skip.reshape((BLOCK_HEADDIM, 1))


def _difference_log2(sum_i, sum_j, OPERAND):
    """(a[i] - a[j]) * log2(e): with 16-bit operands scaled before the difference, a multiplication less."""
    if OPERAND == BFLOAT16:
        return (sum_i * LOG2E)[:, None] - (sum_j * LOG2E)[None, :]
    return (sum_i[:, None] - sum_j[None, :]) * LOG2E


class _Configuration(NamedTuple):
    block_heads: int
    block_rows: int
    block_columns: int
    block_headdim: int
    block_state: int
    latency: int
    hints: Hints


def _configurations(
    row_blocks: int,
    heads_per_group: int,
    dstate: int,
    chunk_size: int,
    has_runs: bool,
    operand: int,
    info: DeviceInfo,
) -> list[_Configuration]:
    """Configurations for this many blocks of 64 tokens in all groups and batch rows, the default first."""
    if operand == FLOAT32:
        # Scalar multiplications, unrolled in full: larger tiles run out of registers.
        return [_Configuration(1, 16, 16, 32, 16, 4, Hints(num_worker_warps=8))]
    rows = power_of_two(chunk_size, 16, 64)
    block_state = power_of_two(dstate, 16, 64 if operand == TFLOAT32 else 128)
    # Heads of a program share C B^T, but there must be programs enough to fill the GPU.
    heads = 8
    while heads > 1 and row_blocks * -(-heads_per_group // heads) < 3 * info.multiprocessors:
        heads //= 2
    if has_runs:
        hints = [Hints(occupancy=1, num_worker_warps=8)]  # four warps run out of registers
    elif chunk_size == rows and dstate <= 128 and operand == BFLOAT16:
        hints = [Hints(occupancy=3), Hints(occupancy=2)]
    else:
        hints = [Hints(occupancy=2), Hints(occupancy=1)]
    latencies = (8, 4) if has_runs else (4, 8)  # with runs, z and D of each channel, 4 runs out of registers
    return [
        _Configuration(heads, rows, rows, 64, block_state, latency, hint) for hint in hints for latency in latencies
    ]


@register("compute_out", "cutile", supports=float64_reason)
def compute_out(
    x: Tensor,
    B: Tensor,
    C: Tensor,
    dt_out: Tensor,
    dA_cumsum: Tensor,
    states: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    seq_idx: Tensor | None,
) -> Tensor:
    batch, seqlen, nheads, headdim = x.shape
    ngroups, dstate = B.shape[2:]
    nchunks, chunk_size = dt_out.shape[2:]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    operand = operand_type(x, B, C)
    # float16 states that were kept in float32 may pass float16's range.
    state_operand = TFLOAT32 if operand == FLOAT16 and states.dtype != torch.float16 else operand
    blocks = batch * ngroups * -(-seqlen // 64)
    tile = choose(
        _configurations(
            blocks, nheads // ngroups, dstate, chunk_size, seq_idx is not None, operand, device_info(x.device)
        )
    )
    last_chunk = seqlen - (nchunks - 1) * chunk_size
    row_blocks = (nchunks - 1) * -(-chunk_size // tile.block_rows) + -(-last_chunk // tile.block_rows)
    head_blocks = -(-(nheads // ngroups) // tile.block_heads)
    if D is not None and D.dim() == 1:
        D = D[:, None].expand(nheads, headdim)
    launch(
        _compute_out_kernel,
        (-(-headdim // tile.block_headdim) * head_blocks * ngroups * row_blocks * batch,),
        (
            x,
            B,
            C,
            dt_out,
            dA_cumsum,
            states,
            states if D is None else D,
            x if z is None else z,
            dt_out if seq_idx is None else run_index(seq_idx),
            out,
            row_blocks,
            D is not None,
            z is not None,
            seq_idx is not None,
            chunk_size % tile.block_rows == 0 and chunk_size % tile.block_columns == 0,
            chunk_size <= tile.block_columns,
            chunk_size <= tile.block_rows and tile.block_rows == tile.block_columns,
            dstate <= tile.block_state,
            operand,
            state_operand,
            tile.block_heads,
            tile.block_rows,
            tile.block_columns,
            tile.block_headdim,
            tile.block_state,
            tile.latency,
        ),
        tile.hints,
    )
    return out
