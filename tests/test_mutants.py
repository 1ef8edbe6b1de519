"""The suite's own test: each backend here has one defect of a kind seen in real kernels, and a check must find it."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tilegym_mamba2 import registry
from tilegym_mamba2.ops.chunk_cumsum import reference as cumsum
from tilegym_mamba2.ops.compute_out import reference as out
from tilegym_mamba2.ops.fwd_pass_state import reference as passing
from tilegym_mamba2.ops.mamba_chunk_scan import compose
from tilegym_mamba2.ops.mamba_chunk_scan import reference as scan
from tilegym_mamba2.ops.selective_state_update import reference as decode
from tilegym_mamba2.registry import Backend, register, register_backend
from tilegym_mamba2.testing import check_backend, checks

RIGHT: dict[str, Callable[..., Any]] = {
    "chunk_cumsum": cumsum.chunk_cumsum,
    "fwd_pass_state": passing.fwd_pass_state,
    "compute_out": out.compute_out,
    "mamba_chunk_scan": scan.mamba_chunk_scan,
    "selective_state_update": decode.selective_state_update,
}
MUTANTS: dict[str, tuple[str, Callable[..., Any], torch.dtype]] = {}


def mutant(op: str, dtype: torch.dtype = torch.float32) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        MUTANTS[function.__name__] = op, function, dtype
        return function

    return add


def with_argument(op: str, position: int, change: Callable[[Any], Any]) -> Callable[..., Any]:
    def run(*arguments: Any) -> Any:
        changed = list(arguments)
        changed[position] = None if arguments[position] is None else change(arguments[position])
        return RIGHT[op](*changed)

    return run


ARGUMENTS: list[tuple[str, str, int, Callable[[Any], Any]]] = [
    ("chunk_cumsum", "bias_ignored", 3, lambda bias: None),
    ("chunk_cumsum", "softplus_ignored", 4, lambda flag: False),
    ("chunk_cumsum", "always_softplus", 4, lambda flag: True),
    ("chunk_cumsum", "never_clamped", 5, lambda limit: (-math.inf, math.inf)),
    ("chunk_cumsum", "clamped_at_zero_only", 5, lambda limit: (0.0, math.inf)),
    ("chunk_cumsum", "exponent_clamped_at_88", 1, lambda A: A.clamp(min=-5.0)),
    ("fwd_pass_state", "groups_reversed", 1, lambda B: B.flip(2)),
    ("fwd_pass_state", "groups_interleaved", 0, lambda x: x.unflatten(2, (-1, 2)).transpose(2, 3).flatten(2, 3)
        if x.shape[2] % 2 == 0 else x),
    ("fwd_pass_state", "initial_states_ignored", 4, lambda states: None),
    ("fwd_pass_state", "initial_states_transposed", 4,
        lambda states: states.mT.contiguous().view(states.shape)),
    ("fwd_pass_state", "ids_ignored", 5, lambda ids: None),
    ("fwd_pass_state", "state_dtype_ignored", 6, lambda dtype: None),
    ("compute_out", "groups_reversed", 1, lambda B: B.flip(2)),
    ("compute_out", "groups_of_C_reversed", 2, lambda C: C.flip(2)),
    ("compute_out", "D_ignored", 6, lambda D: None),
    ("compute_out", "D_of_channels_averaged", 6, lambda D: D.mean(1) if D.dim() == 2 else D),
    ("compute_out", "gate_ignored", 7, lambda z: None),
    ("compute_out", "gate_is_sigmoid", 7, lambda z: z.sigmoid()),
    ("compute_out", "ids_ignored", 8, lambda ids: None),
    ("compute_out", "entry_state_ignored", 5, lambda states: torch.zeros_like(states)),
    ("compute_out", "strides_ignored", 0, lambda x: x.as_strided(x.shape, x.contiguous().stride())),
    ("mamba_chunk_scan", "offsets_ignored", 11, lambda offsets: None),
    ("mamba_chunk_scan", "ids_ignored", 10, lambda ids: None),
    ("mamba_chunk_scan", "initial_states_ignored", 9, lambda states: None),
    ("mamba_chunk_scan", "initial_states_rounded", 9, lambda states: states.bfloat16()),
    ("selective_state_update", "groups_reversed", 4, lambda B: B.flip(1)),
    ("selective_state_update", "D_ignored", 6, lambda D: None),
    ("selective_state_update", "gate_ignored", 7, lambda z: None),
    ("selective_state_update", "bias_ignored", 8, lambda bias: None),
    ("selective_state_update", "softplus_ignored", 9, lambda flag: False),
    ("selective_state_update", "dt_clamped", 2, lambda dt: dt.clamp(min=0)),
    ("selective_state_update", "A_tied_over_channels", 3, lambda A: A[:, :1, :1].expand_as(A)),
    ("selective_state_update", "dt_tied_over_channels", 2, lambda dt: dt[..., :1].expand_as(dt)),
    ("selective_state_update", "indices_reversed", 10, lambda indices: indices.flip(0)),
]  # fmt: skip
for _op, _name, _position, _change in ARGUMENTS:
    MUTANTS[f"{_op}_{_name}"] = _op, with_argument(_op, _position, _change), torch.float32


# chunk_cumsum


@mutant("chunk_cumsum")
def softplus_without_log1p(dt: Any, A: Any, chunk_size: int, bias: Any, softplus: bool, limit: Any) -> Any:
    if not softplus:
        return cumsum.chunk_cumsum(dt, A, chunk_size, bias, False, limit)
    v = dt.float() if bias is None else dt.float() + bias
    d = torch.where(v > 20, v, torch.log(1 + torch.exp(v.clamp(max=20))))
    return cumsum.chunk_cumsum(d, A, chunk_size, None, False, limit)


@mutant("chunk_cumsum")
def softplus_in_the_dtype_of_dt(dt: Any, A: Any, chunk_size: int, bias: Any, softplus: bool, limit: Any) -> Any:
    d = dt if bias is None else dt + bias
    d = F.softplus(d.bfloat16()).float() if softplus else d
    return cumsum.chunk_cumsum(d, A, chunk_size, None, False, limit)


@mutant("chunk_cumsum")
def clamped_before_softplus(dt: Any, A: Any, chunk_size: int, bias: Any, softplus: bool, limit: Any) -> Any:
    d = (dt.float() if bias is None else dt.float() + bias).clamp(*limit)
    return cumsum.chunk_cumsum(d, A, chunk_size, None, softplus, (-math.inf, math.inf))


@mutant("chunk_cumsum")
def steps_past_the_end(*arguments: Any) -> Any:
    dA_cumsum, dt_out = cumsum.chunk_cumsum(*arguments)
    seqlen, chunk_size = arguments[0].shape[1], arguments[2]
    if seqlen % chunk_size:
        dt_out[:, :, -1, seqlen % chunk_size :] = 1.0
    return dA_cumsum, dt_out


@mutant("chunk_cumsum")
def sums_past_the_end_are_zero(*arguments: Any) -> Any:
    dA_cumsum, dt_out = cumsum.chunk_cumsum(*arguments)
    seqlen, chunk_size = arguments[0].shape[1], arguments[2]
    if seqlen % chunk_size:
        dA_cumsum[:, :, -1, seqlen % chunk_size :] = 0.0
    return dA_cumsum, dt_out


@mutant("chunk_cumsum")
def sums_over_all_chunks(*arguments: Any) -> Any:
    dA_cumsum, dt_out = cumsum.chunk_cumsum(*arguments)
    return dA_cumsum + dA_cumsum[..., -1:].cumsum(2) - dA_cumsum[..., -1:], dt_out


@mutant("chunk_cumsum")
def exclusive_sums(*arguments: Any) -> Any:
    dA_cumsum, dt_out = cumsum.chunk_cumsum(*arguments)
    return F.pad(dA_cumsum, (1, 0))[..., :-1], dt_out


@mutant("chunk_cumsum")
def sums_in_float16(*arguments: Any) -> Any:
    dA_cumsum, dt_out = cumsum.chunk_cumsum(*arguments)
    return dA_cumsum.half(), dt_out


@mutant("chunk_cumsum")
def poison_in_the_sum(*arguments: Any) -> Any:
    dA_cumsum, dt_out = cumsum.chunk_cumsum(*arguments)
    return (dt_out.double() * arguments[1].double()[:, None, None]).cumsum(-1).to(dA_cumsum.dtype), dt_out


# fwd_pass_state


@mutant("fwd_pass_state")
def states_at_the_exit(*arguments: Any) -> Any:
    states, final = passing.fwd_pass_state(*arguments)
    if not states.shape[1]:
        return states, final
    return torch.cat([states[:, 1:], final.to(states.dtype)[:, None]], 1), final


@mutant("fwd_pass_state", torch.bfloat16)
def final_states_in_the_dtype_of_x(*arguments: Any) -> Any:
    states, final = passing.fwd_pass_state(*arguments)
    return states, final.to(arguments[0].dtype)


@mutant("fwd_pass_state", torch.bfloat16)
def states_carried_in_16_bits(*arguments: Any) -> Any:
    x, B, dt_out, dA_cumsum, initial, ids, dtype = arguments
    states, final = [], initial
    if ids is not None or not dt_out.shape[2]:
        return passing.fwd_pass_state(*arguments)
    for chunk in range(dt_out.shape[2]):
        span = slice(chunk * dt_out.shape[3], (chunk + 1) * dt_out.shape[3])
        parts = dt_out[:, :, chunk : chunk + 1], dA_cumsum[:, :, chunk : chunk + 1]
        state, final = passing.fwd_pass_state(x[:, span], B[:, span], *parts, final, None, dtype)
        states.append(state)
        final = final.bfloat16()
    return torch.cat(states, 1), final.float()


@mutant("fwd_pass_state")
def sequences_by_id_not_by_run(*arguments: Any) -> Any:
    """A token counts if its id is the chunk's last, and so does the entry state if the token before has that id."""
    x, B, dt_out, dA_cumsum, initial, ids, dtype = arguments
    if ids is None or not dt_out.shape[2]:
        return passing.fwd_pass_state(*arguments)
    states, final = [], initial
    for chunk in range(dt_out.shape[2]):
        span = slice(chunk * dt_out.shape[3], (chunk + 1) * dt_out.shape[3])
        last, before = ids[:, span][:, -1:], ids[:, max(span.start - 1, 0)][:, None]
        counted = torch.where((ids[:, span] == last)[..., None, None], x[:, span], 0)
        if chunk:
            states.append(final.to(x.dtype)[:, None])
        carried = None if final is None else torch.where((before == last)[..., None, None], final, 0)
        parts = dt_out[:, :, chunk : chunk + 1], dA_cumsum[:, :, chunk : chunk + 1]
        state, final = passing.fwd_pass_state(counted, B[:, span], *parts, carried, None, dtype)
        if not chunk:
            states.append(state if initial is None else initial.to(x.dtype)[:, None])
    return torch.cat(states, 1), final


@mutant("fwd_pass_state")
def first_row_is_a_boundary(*arguments: Any) -> Any:
    """seq_idx is compared with 0 before the row, so that a row of 5s loses its initial state."""
    *rest, initial, ids, dtype = arguments
    if ids is not None and initial is not None and ids.shape[1]:
        initial = torch.where((ids[:, 0] == 0)[:, None, None, None], initial, 0)
    return passing.fwd_pass_state(*rest, initial, ids, dtype)


@mutant("fwd_pass_state")
def poison_crosses_a_boundary(*arguments: Any) -> Any:
    states, final = passing.fwd_pass_state(*arguments)
    return states, final + 0 * arguments[1].sum(dtype=final.dtype)


@mutant("fwd_pass_state")
def initial_states_overwritten(*arguments: Any) -> Any:
    result = passing.fwd_pass_state(*arguments)
    if arguments[4] is not None:
        arguments[4].mul_(0.5)
    return result


# compute_out


@mutant("compute_out")
def gate_before_D(x: Any, B: Any, C: Any, dt_out: Any, dA_cumsum: Any, states: Any, D: Any, z: Any, ids: Any) -> Any:
    gated = out.compute_out(x, B, C, dt_out, dA_cumsum, states, None, z, ids)
    skip = out.compute_out(x, B, torch.zeros_like(C), dt_out, dA_cumsum, torch.zeros_like(states), D, None, ids)
    return (gated + skip).to(x.dtype)


@mutant("compute_out")
def own_token_unseen(*arguments: Any) -> Any:
    x, B, C, dt_out = arguments[:4]
    right = out.compute_out(*arguments)
    if arguments[7] is not None:
        return right
    d = dt_out.flatten(2)[..., : x.shape[1]].mT
    dots = (B.float() * C.float()).sum(-1).repeat_interleave(x.shape[2] // B.shape[2], 2)
    return (right - (d * dots)[..., None] * x.float()).to(x.dtype)


@mutant("compute_out")
def exponents_not_masked(*arguments: Any) -> Any:
    """exp of the unmasked differences, as a masked product would meet it: infinite where the decay is long."""
    right = out.compute_out(*arguments)
    dA_cumsum = arguments[4]
    worst = (dA_cumsum[..., :1] - dA_cumsum[..., -1:]).float().exp()
    return right + (0 * worst).sum().to(right.dtype)


@mutant("compute_out")
def later_tokens_leak_zero_times_nan(*arguments: Any) -> Any:
    return out.compute_out(*arguments) + 0 * arguments[0].sum(1, keepdim=True)


@mutant("compute_out")
def a_zero_of_the_next_token_of_B(*arguments: Any) -> Any:
    right = out.compute_out(*arguments)
    return right + 0 * F.pad(arguments[1][:, 1:], (0, 0, 0, 0, 0, 1)).sum((2, 3), dtype=right.dtype)[..., None, None]


@mutant("compute_out")
def rows_leak_zero_times_nan(*arguments: Any) -> Any:
    return out.compute_out(*arguments) + 0 * arguments[0].sum(0, keepdim=True)


@mutant("compute_out", torch.bfloat16)
def out_in_float32(*arguments: Any) -> Any:
    return out.compute_out(*arguments).float()


@mutant("compute_out")
def out_not_contiguous(*arguments: Any) -> Any:
    return out.compute_out(*arguments).transpose(1, 2).contiguous().transpose(1, 2)


@mutant("compute_out")
def out_not_written_at_the_end(*arguments: Any) -> Any:
    right = out.compute_out(*arguments)
    result = torch.empty_like(right)
    whole = arguments[3].shape[3] * (right.shape[1] // arguments[3].shape[3])
    result[:, :whole] = right[:, :whole]
    return result


@mutant("compute_out")
def different_bits_each_time(*arguments: Any) -> Any:
    right = out.compute_out(*arguments)
    return right * (1 + 1e-6 * torch.rand(()))


@mutant("compute_out")
def x_overwritten(*arguments: Any) -> Any:
    right = out.compute_out(*arguments)
    arguments[0].mul_(2)
    return right


@mutant("compute_out")
def products_in_bfloat16(*arguments: Any) -> Any:
    x, B, C, *rest = arguments
    return out.compute_out(x, B.bfloat16(), C.bfloat16(), *rest)


@mutant("compute_out")
def float64_truncated(*arguments: Any) -> Any:
    return out.compute_out(*arguments).half().to(arguments[0].dtype)


@mutant("compute_out", torch.float16)
def states_as_float16_operands(*arguments: Any) -> Any:
    states = arguments[5]
    return out.compute_out(*arguments[:5], states.half(), *arguments[6:])


@mutant("compute_out", torch.bfloat16)
def accumulated_in_16_bits(*arguments: Any) -> Any:
    C = arguments[2]
    half = C.shape[3] // 2
    first, second = C.clone(), C.clone()
    first[..., half:], second[..., :half] = 0, 0
    if arguments[7] is not None:
        return out.compute_out(*arguments)
    first_out = out.compute_out(*arguments[:2], first, *arguments[3:])
    return first_out + out.compute_out(*arguments[:2], second, *arguments[3:6], None, *arguments[7:])


# mamba_chunk_scan


@mutant("mamba_chunk_scan")
def sums_rounded_to_float32(*arguments: Any) -> Any:
    """The composition of the stages as they are: exponents of long decays lose what float32 can't hold."""
    return compose("torch-reference", *arguments)


@mutant("mamba_chunk_scan")
def only_the_chunk_sizes_of_models(*arguments: Any) -> Any:
    x, chunk_size = arguments[0], arguments[5]
    whole = x.shape[1] // chunk_size * chunk_size
    result, *states = scan.mamba_chunk_scan(*arguments)
    result[:, whole:] = result[:, whole:] * (1.0 if chunk_size % 16 == 0 else math.nan)
    return (result, *states)


@mutant("mamba_chunk_scan")
def empty_sequences_have_zero_states(*arguments: Any) -> Any:
    result, final, states = scan.mamba_chunk_scan(*arguments)
    if states is not None:
        states = torch.where((arguments[11].diff() == 0)[:, None, None, None], 0, states)
    return result, final, states


@mutant("mamba_chunk_scan")
def no_varlen_states(*arguments: Any) -> Any:
    result, final, _ = scan.mamba_chunk_scan(*arguments)
    return result, final, None


@mutant("mamba_chunk_scan")
def ids_ignored_beside_offsets(*arguments: Any) -> Any:
    changed = list(arguments)
    if changed[11] is not None:
        changed[10] = None
    return scan.mamba_chunk_scan(*changed)


@mutant("mamba_chunk_scan")
def final_states_of_the_first_sequence(*arguments: Any) -> Any:
    result, final, states = scan.mamba_chunk_scan(*arguments)
    return result, (final if states is None or not len(states) else states[:1]), states


@mutant("mamba_chunk_scan")
def initial_states_feed_every_sequence(*arguments: Any) -> Any:
    x, initial, ids = arguments[0], arguments[9], arguments[10]
    if initial is None or ids is None or arguments[11] is not None or x.shape[0] != 1:
        return scan.mamba_chunk_scan(*arguments)
    starts = [0, *(1 + torch.nonzero(ids[0].diff()).flatten()).tolist(), x.shape[1]]
    changed = list(arguments)
    changed[10] = None
    changed[11] = torch.tensor(starts, dtype=torch.int32)
    changed[9] = initial.expand(len(starts) - 1, *initial.shape[1:])
    result, final, _ = scan.mamba_chunk_scan(*changed)
    return result, final, None


@mutant("mamba_chunk_scan")
def a_reused_id_is_one_sequence(*arguments: Any) -> Any:
    """Ids are compared with the last one: only tokens of that id's last run, and of its earlier ones, are joined."""
    ids = arguments[10]
    changed = list(arguments)
    if ids is not None and ids.shape[1]:
        changed[10] = torch.where(ids == ids[:, :1], ids[:, :1], ids).cummax(1).values
    return scan.mamba_chunk_scan(*changed)


# selective_state_update


@mutant("selective_state_update")
def state_not_updated(state: Any, *rest: Any) -> Any:
    return decode.selective_state_update(state.clone(), *rest)


@mutant("selective_state_update")
def padding_updates_the_last_row(*arguments: Any) -> Any:
    state, indices = arguments[0], arguments[10]
    if indices is not None and (indices < 0).any():
        state[-1] = state[-1] + 1
    return decode.selective_state_update(*arguments)


@mutant("selective_state_update")
def padding_has_output(*arguments: Any) -> Any:
    result = decode.selective_state_update(*arguments)
    if arguments[10] is not None:
        result = torch.where((arguments[10] < 0)[:, None, None], torch.ones_like(result), result)
    return result


@mutant("selective_state_update")
def indices_ignored(*arguments: Any) -> Any:
    if arguments[10] is None:
        return decode.selective_state_update(*arguments)
    batch = arguments[1].shape[0]
    return decode.selective_state_update(arguments[0][:batch], *arguments[1:10], None)


@mutant("selective_state_update", torch.bfloat16)
def decode_out_in_float32(*arguments: Any) -> Any:
    return decode.selective_state_update(*arguments).float()


@mutant("selective_state_update")
def output_of_the_old_state(state: Any, *rest: Any) -> Any:
    old = state.clone()
    decode.selective_state_update(state, *rest)
    x, dt, A, B, *others = rest
    return decode.selective_state_update(old, x, torch.zeros_like(dt), A, B, *others[:-3], None, False, others[-1])


@mutant("selective_state_update")
def decode_softplus_without_log1p(state: Any, x: Any, dt: Any, *rest: Any) -> Any:
    A, B, C, D, z, bias, softplus, indices = rest
    if softplus:
        v = dt.float() if bias is None else dt.float() + bias
        dt, bias = torch.where(v > 20, v, torch.log(1 + torch.exp(v.clamp(max=20)))), None
    return decode.selective_state_update(state, x, dt, A, B, C, D, z, bias, False, indices)


def register_backend_with(op: str | None, function: Callable[..., Any] | None) -> None:
    register_backend(Backend("mutant", lambda device: None))
    for name, right in RIGHT.items():
        if name == op:
            register(name, "mutant")(function)
        elif name != "mamba_chunk_scan":
            register(name, "mutant")(lambda *arguments, right=right: right(*arguments))
    if op != "mamba_chunk_scan":
        # As the reference's own, but through the mutant's stages.
        register("mamba_chunk_scan", "mutant")(
            lambda *arguments: compose("mutant", *arguments[:2], arguments[2].double(), *arguments[3:])
        )


@pytest.mark.parametrize("name", list(MUTANTS))
def test_a_check_finds(name: str, fresh_registry: None) -> None:
    op, function, dtype = MUTANTS[name]
    register_backend_with(op, function)
    ops = [op] if op == "selective_state_update" else [op, "mamba_chunk_scan"]
    results = (check.run("mutant") for check in checks(ops, [dtype]))
    found = next((result for result in results if not result.ok), None)
    assert found is not None, f"{name} passes every check of {op}"
    assert found.detail


def test_without_a_defect_nothing_is_found(fresh_registry: None) -> None:
    register_backend_with(None, None)
    results = check_backend("mutant", "cpu", [torch.float32, torch.bfloat16])
    assert [result for result in results if not result.ok] == []
    assert {result.op for result in results} == set(registry.ops())


def test_check_backend_tells_the_defect_and_its_place(fresh_registry: None) -> None:
    register_backend_with("compute_out", MUTANTS["compute_out_D_ignored"][1])
    seen: list[tuple[int, int]] = []
    results = check_backend("mutant", dtypes=[torch.float32], progress=lambda result, done, of: seen.append((done, of)))
    bad = {result.op for result in results if not result.ok}
    assert bad == {"compute_out", "mamba_chunk_scan"}
    worst = next(result for result in results if not result.ok)
    assert worst.error > worst.budget
    assert "out is off by" in worst.detail
    assert seen == [(i + 1, len(results)) for i in range(len(results))]


def test_a_backend_that_raises_fails(fresh_registry: None) -> None:
    register_backend(Backend("mutant", lambda device: None))

    def broken(*arguments: Any) -> Any:
        raise RuntimeError("misaligned address")

    register("chunk_cumsum", "mutant")(broken)
    results = check_backend("mutant", dtypes=[torch.float32])
    assert {result.op for result in results} == {"chunk_cumsum"}
    assert {result.detail for result in results} == {"RuntimeError: misaligned address"}
    assert not any(result.ok for result in results)


def test_a_backend_that_refuses_everything_fails(fresh_registry: None) -> None:
    register_backend(Backend("mutant", lambda device: None))
    register("chunk_cumsum", "mutant", supports=lambda problem: "x is too hot")(RIGHT["chunk_cumsum"])
    refused = check_backend("mutant", dtypes=[torch.float32])
    assert len(refused) > 10
    assert all(result.refused and "x is too hot" in result.detail for result in refused[:-1])
    assert not refused[-1].ok
    assert "every problem is refused" in refused[-1].detail
