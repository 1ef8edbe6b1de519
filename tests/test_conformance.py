"""The table: every op x backend x problem x dtype against the float64 recurrence, and the properties."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.conftest import BACKENDS, DEVICE, missing
from tilegym_mamba2 import registry
from tilegym_mamba2.testing import DTYPES, ORACLES, PROBLEMS, Check, checks, op_inputs, run_op


def _table() -> Iterator[Any]:
    for backend in BACKENDS:
        for check in checks(dtypes=DTYPES if backend == "torch-reference" else DTYPES[:3]):
            yield pytest.param(backend, check, id=f"{backend}-{check.id}")


@pytest.mark.parametrize(("backend", "check"), list(_table()))
def test_check(
    backend: str,
    check: Check,
    pytestconfig: pytest.Config,
    record_property: Callable[[str, object], None],
) -> None:
    missing(pytestconfig, backend, check.op)
    if check.problem == "mixed_stages":
        for op in ("chunk_cumsum", "fwd_pass_state"):
            missing(pytestconfig, backend, op)
    result = check.run(backend, DEVICE)
    dtype = str(check.dtype).removeprefix("torch.")
    for name, value in {"op": check.op, "backend": backend, "dtype": dtype, "device": DEVICE}.items():
        record_property(name, value)  # what bench/check_table.py reads from --junit-xml
    record_property("error", result.error)
    record_property("budget", result.budget)
    assert result.ok, result.detail
    assert not result.refused, result.detail
    assert result.error <= result.budget


def test_the_table_covers_every_op() -> None:
    assert {check.op for check in checks()} == set(registry.ops()) == set(ORACLES)


FAST = ("cutile", "triton")
FLOAT64_ARGUMENTS = [
    (op, name)
    for op, names in {
        "mamba_chunk_scan": ("x", "dt", "A", "B", "C", "D", "z", "dt_bias"),
        "chunk_cumsum": ("dt", "A", "dt_bias"),
        "fwd_pass_state": ("x", "B", "dt_out", "dA_cumsum"),
        "compute_out": ("x", "B", "C", "dt_out", "dA_cumsum", "D", "z"),
    }.items()
    for name in names
]


@pytest.mark.parametrize("backend", FAST)
@pytest.mark.parametrize(("op", "name"), FLOAT64_ARGUMENTS)
def test_fast_backends_refuse_float64_by_name(backend: str, op: str, name: str, pytestconfig: pytest.Config) -> None:
    missing(pytestconfig, backend, op)
    inputs = op_inputs(op, PROBLEMS["gate"].inputs(torch.float32, DEVICE))
    inputs[name] = inputs[name].double()
    with pytest.raises(NotImplementedError, match=rf"{backend}.*\b{name}\b.*float64"):
        run_op(op, inputs, backend)
