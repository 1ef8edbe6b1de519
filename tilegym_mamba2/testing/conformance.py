"""The conformance suite: every op, problem and property that a backend is asked for."""

from collections.abc import Callable, Iterator, Sequence

import torch

from tilegym_mamba2 import registry
from tilegym_mamba2.testing.errors import INFINITY
from tilegym_mamba2.testing.problems import DECODE_PROBLEMS, PROBLEMS, Scenario
from tilegym_mamba2.testing.properties import PROPERTIES, Property
from tilegym_mamba2.testing.running import OPS, Check, Output, Result, op_inputs, ops_of, run_op

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def _value_check(op: str, problem: str, scenario: Scenario, dtype: torch.dtype) -> Check:
    def outputs(backend: str, device: torch.device) -> list[Output]:
        return run_op(op, op_inputs(op, scenario.inputs(dtype, device)), backend)

    return Check(op, problem, dtype, outputs)


def _property_check(name: str, prop: Property, dtype: torch.dtype) -> Check:
    def outputs(backend: str, device: torch.device) -> list[Output]:
        return prop.outputs(dtype, backend, device)

    return Check(prop.op, name, dtype, outputs)


def checks(ops: Sequence[str] | None = None, dtypes: Sequence[torch.dtype] | None = None) -> Iterator[Check]:
    """Yields every check of the suite, for these ops (default: all) and dtypes (default: `DTYPES`)."""
    for op in OPS if ops is None else ops:
        for problem, scenario in {**PROBLEMS, **DECODE_PROBLEMS}.items():
            for dtype in dtypes or DTYPES:
                fixed = scenario.options.get("dtypes", {})
                if scenario.suits(op) and (not fixed or dtype == torch.float32):
                    yield _value_check(op, problem, scenario, dtype)
        for name, prop in PROPERTIES.items():
            for dtype in dtypes or DTYPES:
                if prop.op == op and (prop.dtypes is None or dtype in prop.dtypes):
                    yield _property_check(name, prop, dtype)


def check_backend(
    name: str,
    device: torch.device | str | None = None,
    dtypes: Sequence[torch.dtype] | None = None,
    progress: Callable[[Result, int, int], None] | None = None,
) -> list[Result]:
    """Runs the conformance suite on a backend: every op that it has, and the whole forward composed of them.

    A problem that the backend refuses with NotImplementedError is no failure, unless it refuses all of an op's.

    Args:
        name: a registered backend; an installed third party's registers itself.
        device: where the tensors are; None for the GPU if the backend can run there, else the CPU.
        dtypes: None for float32, float16, bfloat16 and float64.
        progress: called after each check with its result, how many are done, and how many there are.

    Raises:
        ValueError: no backend has that name, or it has no op.
        BackendUnavailableError: it can't run on the device.
    """
    reasons = {kind: registry.explain_backends(kind).get(name) for kind in ("cuda", "cpu")}
    with registry.use_backend(name):  # raises for an unknown name
        ops = ops_of(name)
    if device is None:
        device = "cuda" if torch.cuda.is_available() and reasons["cuda"] == "available" else "cpu"
    reason = registry.explain_backends(device)[name]
    if reason != "available":
        raise registry.BackendUnavailableError(f"backend {name!r} can't run on {device}: {reason}")
    if not ops:
        raise ValueError(f"backend {name!r} has no op")
    todo = list(checks(ops, dtypes))
    results: list[Result] = []
    for check in todo:
        results.append(check.run(name, device))
        if progress is not None:
            progress(results[-1], len(results), len(todo))
    for op in ops:
        of_op = [result for result in results if result.op == op]
        if all(result.refused for result in of_op):
            detail = f"every problem is refused; the first: {of_op[0].detail}"
            results.append(Result(op, "any", of_op[0].dtype, INFINITY, of_op[0].budget, False, detail))
    return results
