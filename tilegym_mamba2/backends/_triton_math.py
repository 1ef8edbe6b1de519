"""Device functions that Triton kernels of several ops share."""

import triton
import triton.language as tl


@triton.jit
def softplus(v):
    """log1p(exp(v)), linear above 20, to float32 precision for negative v too (there is no log1p everywhere)."""
    exp_v = tl.exp(tl.minimum(v, 20.0))
    # log(u) * e / (u - 1) with u = 1 + e rounded: the rounding of u cancels; u == 1 leaves log1p(e) = e.
    rounded = 1.0 + exp_v
    excess = tl.where(rounded == 1.0, 1.0, rounded - 1.0)
    corrected = tl.where(rounded == 1.0, exp_v, tl.log(rounded) * exp_v / excess)
    return tl.where(v > 20.0, v, tl.where(v == v, corrected, v))


@triton.jit
def is_finite(v):
    return tl.abs(v.to(tl.float32)) <= 3.4028234663852886e38


@triton.jit
def silu(v):
    exp_v = tl.exp(-tl.abs(v))  # at most 1
    return tl.where(v >= 0.0, v, v * exp_v) / (1.0 + exp_v)


@triton.jit
def time_step(dt, dt_bias, dt_low, dt_high, DT_SOFTPLUS: tl.constexpr):
    """The time step from its raw value: bias, softplus, clamp; NaN stays NaN."""
    d = dt + dt_bias
    if DT_SOFTPLUS:
        d = softplus(d)
    return tl.where(d < dt_low, dt_low, tl.where(d > dt_high, dt_high, d))


@triton.jit
def later_of(left, right):
    return tl.maximum(left, right)


@triton.jit
def changes_at(seq_idx_ptr, token, first, stop, stride_token):
    """1 where a token's id differs from that of the token before it, which token `first` does not have."""
    follows = (token > first) & (token < stop)
    here = tl.load(seq_idx_ptr + token * stride_token, mask=follows, other=0)
    before = tl.load(seq_idx_ptr + (token - 1) * stride_token, mask=follows, other=0)
    return (here != before).to(tl.int32)


@triton.jit
def to_operand(v, DOT: tl.constexpr):
    """A tile as an operand of a matrix product, and the factor that it is to be multiplied by.

    The factor is 1 unless DOT is float16, whose range a tile of float32 can pass.
    """
    if tl.float16 == DOT:
        largest = tl.max(tl.max(tl.where(is_finite(v), tl.abs(v), 0.0), axis=1), axis=0)
        factor = tl.where(largest > 0.0, tl.maximum(largest, 1e-30) * 2.0**-14, 1.0)
        operand = (v * (1.0 / factor)).to(DOT)
    else:
        factor = 1.0
        operand = v.to(DOT)
    return operand, factor


@triton.jit
def advance_state(
    state,
    x,
    B,
    to_exit,
    decay,
    CAREFUL: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    SPLIT: tl.constexpr = False,
):
    """The state (headdim, dstate) after a block: state * decay + sum(to_exit[j] * x[j] (outer) B[j] for j).

    x (block, headdim), B (block, dstate), to_exit (block,). If CAREFUL, a weight of 0 keeps out NaN and infinity, and
    operands fit into float16. If SPLIT, to_exit * x is not rounded to DOT but split into two of it.
    """
    weighted = tl.trans(x).to(tl.float32) * to_exit[None, :]  # (headdim, block)
    if CAREFUL:
        weighted = tl.where((to_exit == 0.0)[None, :], 0.0, weighted)
        B = tl.where((to_exit == 0.0)[:, None], 0.0, B)
        if decay == 0.0:
            state = tl.zeros_like(state)
    state *= decay
    if CAREFUL and tl.float16 == DOT:
        operand, factor = to_operand(weighted, DOT)
        state += tl.dot(operand, B, input_precision=PRECISION) * factor
    else:
        operand = weighted.to(DOT)
        if SPLIT:
            state = tl.dot((weighted - operand.to(tl.float32)).to(DOT), B, state, input_precision=PRECISION)
        state = tl.dot(operand, B, state, input_precision=PRECISION)
    return state


@triton.jit
def wait_for_previous(EARLY: tl.constexpr):
    """If EARLY, waits until the launches before this one have ended and what they wrote is visible.

    A kernel that `Launch(early=True)` says may begin while they run calls it in every program that reads or writes
    anything that they touch, before that, and in one program at least.
    """
    if EARLY:
        tl.extra.cuda.gdc_wait()


@triton.jit
def launch_next(EARLY: tl.constexpr):
    """If EARLY, lets the next launch begin once every program of this one has come here, if that launch waits."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
