"""Any shape and any sequence boundaries, drawn by hypothesis, against the recurrence."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.conftest import BACKENDS, DEVICE, missing
from tilegym_mamba2.testing import make_decode_inputs, make_inputs, op_inputs, oracle_scan, relative_error, run_op

NARROW = (torch.float32, torch.float16, torch.bfloat16)


def examples(backend: str, native: int, interpreted: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Settings: the same examples on every machine, fewer where kernels are interpreted."""
    count = interpreted if DEVICE == "cpu" and backend != "torch-reference" else native
    return settings(max_examples=count, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


@st.composite
def sizes(draw: st.DrawFn, seqlen: int = 90) -> dict[str, Any]:
    ngroups = draw(st.integers(1, 3))
    return {
        "batch": draw(st.integers(0, 2)),
        "seqlen": draw(st.integers(0, seqlen)),
        "nheads": ngroups * draw(st.integers(1, 3)),
        "ngroups": ngroups,
        "headdim": draw(st.integers(1, 20)),
        "dstate": draw(st.integers(1, 20)),
        "chunk_size": draw(st.integers(1, 100)),
        "D": draw(st.sampled_from([None, "heads", "channels"])),
        "z": draw(st.booleans()),
        "dt_bias": draw(st.booleans()),
        "dt_softplus": draw(st.booleans()),
        "initial_states": draw(st.booleans()),
        "layout": draw(st.sampled_from(["contiguous", "projection", "transposed", "unaligned"])),
        "decay": draw(st.sampled_from([(1e-3, 50.0), (1e-4, 1e-2), (1.0, 50.0)])),
        "seed": draw(st.integers(0, 5)),
    }


@st.composite
def boundaries(draw: st.DrawFn, seqlen: int) -> list[int]:
    """[id, length, id, length, ...] over a row, an id now and then used again."""
    cuts = sorted(draw(st.lists(st.integers(0, seqlen), max_size=6)))
    runs: list[int] = []
    for start, stop in zip([0, *cuts], [*cuts, seqlen], strict=True):
        runs += [draw(st.integers(0, 2)), stop - start]
    return runs


@st.composite
def packed(draw: st.DrawFn) -> dict[str, Any]:
    options = draw(sizes())
    options["batch"] = max(options["batch"], 1)
    if draw(st.booleans()):
        options["seq_idx"] = [draw(boundaries(options["seqlen"])) for _ in range(options["batch"])]
    else:
        cuts = sorted(draw(st.lists(st.integers(0, options["seqlen"]), max_size=5)))
        options.update(batch=1, cu_seqlens=(0, *cuts, options["seqlen"]), first_state_only=draw(st.booleans()))
        if draw(st.booleans()):
            options["seq_idx"] = [draw(boundaries(options["seqlen"]))]
    return options


def agrees(op: str, inputs: dict[str, Any], backend: str) -> None:
    """Wider than the budgets, which are for many numbers: here one may be all there is, and its terms may cancel."""
    for output in run_op(op, inputs, backend):
        error = relative_error(output.got, output.want)
        assert error <= (4 * output.budget if output.budget < 1e-4 else 0.05), f"{op}, {output.name}: {error}"
        assert output.got.dtype == output.dtype


def test_any_shape(backend: str) -> None:
    @examples(backend, 80, 8)
    @given(sizes(), st.sampled_from(NARROW))
    def check(options: dict[str, Any], dtype: torch.dtype) -> None:
        agrees("mamba_chunk_scan", make_inputs(dtype, DEVICE, **options), backend)

    check()


def test_any_boundaries(backend: str) -> None:
    @examples(backend, 80, 8)
    @given(packed(), st.sampled_from(NARROW))
    def check(options: dict[str, Any], dtype: torch.dtype) -> None:
        agrees("mamba_chunk_scan", make_inputs(dtype, DEVICE, **options), backend)

    check()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("op", ["chunk_cumsum", "fwd_pass_state", "compute_out"])
def test_any_stage(op: str, backend: str, pytestconfig: pytest.Config) -> None:
    missing(pytestconfig, backend, op)

    @examples(backend, 40, 5)
    @given(packed(), st.sampled_from(NARROW))
    def check(options: dict[str, Any], dtype: torch.dtype) -> None:
        options.pop("cu_seqlens", None)
        agrees(op, op_inputs(op, make_inputs(dtype, DEVICE, **options)), backend)

    check()


def test_any_decode_step(decode_backend: str) -> None:
    @examples(decode_backend, 80, 15)
    @given(sizes(), st.sampled_from(NARROW), st.data())
    def check(options: dict[str, Any], dtype: torch.dtype, data: st.DataObject) -> None:
        names = ("batch", "nheads", "ngroups", "headdim", "dstate", "z", "dt_bias", "dt_softplus", "seed")
        chosen = {name: options[name] for name in names}
        slots = data.draw(st.permutations(range(5)))
        padded = data.draw(st.lists(st.booleans(), min_size=chosen["batch"], max_size=chosen["batch"]))
        if data.draw(st.booleans()):
            chosen["indices"] = tuple(-1 if skip else slot for slot, skip in zip(slots, padded, strict=False))
        chosen["tied"] = data.draw(st.booleans())
        chosen["layout"] = data.draw(st.sampled_from(["contiguous", "transposed", "unaligned"]))
        state_dtype = data.draw(st.sampled_from(NARROW))
        inputs = make_decode_inputs(dtype, DEVICE, **chosen, state_dtype=state_dtype)
        agrees("selective_state_update", inputs, decode_backend)

    check()


@settings(max_examples=60, deadline=None, derandomize=True)
@given(packed(), st.data())
def test_the_oracle_on_a_row_cut_anywhere(options: dict[str, Any], data: st.DataObject) -> None:
    """The oracle's own property: two parts, the state carried, are the whole; and ids may be renamed."""
    options.pop("cu_seqlens", None)
    inputs = make_inputs(torch.float64, **options)
    out, final, _ = oracle_scan(**inputs)
    cut = data.draw(st.integers(0, options["seqlen"]))
    names = ("x", "dt", "B", "C", "z", "seq_idx")
    first = {name: value[:, :cut] if name in names and value is not None else value for name, value in inputs.items()}
    second = {name: value[:, cut:] if name in names and value is not None else value for name, value in inputs.items()}
    first_out, state, _ = oracle_scan(**first)
    ids = inputs["seq_idx"]
    if ids is not None and 0 < cut < options["seqlen"]:
        begins = ids[:, cut] != ids[:, cut - 1]
        state = torch.where(begins[:, None, None, None], 0, state)
        inputs["seq_idx"] = 100 - 3 * ids
        assert torch.equal(oracle_scan(**inputs)[0], out)
    second_out, second_final, _ = oracle_scan(**{**second, "initial_states": state})
    assert torch.equal(torch.cat([first_out, second_out], 1), out)
    assert torch.equal(second_final, final)
