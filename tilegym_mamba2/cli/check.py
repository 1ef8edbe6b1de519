"""`tilegym-mamba2 check`: the conformance suite on what can run here."""

import enum
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer

from tilegym_mamba2 import registry
from tilegym_mamba2.cli import terminal
from tilegym_mamba2.cli.info import devices, versions

if TYPE_CHECKING:
    from tilegym_mamba2.testing import Result


class Dtype(str, enum.Enum):
    """Dtypes that the suite is run in."""

    bfloat16 = "bfloat16"
    float16 = "float16"
    float32 = "float32"
    float64 = "float64"


def command(
    backend: Annotated[str | None, typer.Option(help="Check this backend alone. Default: all that can run.")] = None,
    dtype: Annotated[Dtype | None, typer.Option(help="Default: all four.")] = None,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Also write everything to FILE as JSON.")] = None,
) -> int:
    """Run the conformance suite on the backends.

    Exit status 1 if a check fails.
    """
    from tilegym_mamba2.testing import check_backend

    terminal.check_json_path(json)
    explained = _explain()
    if backend is None:
        names = [name for name, reason in explained.items() if reason == "available"]
    else:
        terminal.check_backend_name("--backend", backend, explained)
        names = [backend]
    dtypes = None if dtype is None else [getattr(torch, dtype.value)]

    found: dict[str, list[Result]] = {}
    output = terminal.console()
    for name in names:
        with terminal.steps(1) as progress:

            def report(result: "Result", done: int, total: int, name: str = name) -> None:
                progress.start(f"{name}: {result.op}, {result.problem}")
                progress.at(done, total)

            progress.start(name)
            try:
                found[name] = check_backend(name, dtypes=dtypes, progress=report)
            except ValueError as error:  # it has no op: nothing to check
                explained[name] = str(error)
                continue
        _show(output, name, found[name])
    for name, reason in explained.items():
        if name not in found and backend in (None, name):
            terminal.note(output, f"{name}: not checked: {reason}.")
    failures = sum(not result.ok for results in found.values() for result in results)
    terminal.write_json(
        json,
        {
            "command": "check",
            "results": {name: [_as_json(result) for result in results] for name, results in found.items()},
            "not_checked": {name: reason for name, reason in explained.items() if name not in found},
            "versions": versions(),
            "devices": devices(),
        },
    )
    return int(failures > 0 or not found)


def _explain() -> dict[str, str]:
    """Every backend's reason, of the device on which it would be checked: a GPU if it runs there, else the CPU."""
    explained = registry.explain_backends("cpu")
    if torch.cuda.is_available():
        for name, reason in registry.explain_backends("cuda").items():
            if reason == "available" or explained[name] != "available":
                explained[name] = reason
    return explained


def _show(output: Any, name: str, results: "Sequence[Result]") -> None:
    columns = ("checks", "refused", "failed", "worst\nerror", "its\nbudget")
    listing = terminal.table("op", "dtype", *columns, numeric=columns)
    for op, dtype, group in _grouped(results):
        failed = sum(not result.ok for result in group)
        judged = [result for result in group if not result.refused]
        worst = max(judged, key=lambda result: result.error / result.budget, default=None)
        listing.add_row(
            op,
            dtype,
            f"{len(group)}",
            f"{sum(result.refused for result in group)}",
            terminal.verdict(f"{failed}", not failed),
            "" if worst is None else f"{worst.error:.1e}",
            "" if worst is None else f"{worst.budget:.1e}",
        )
    failures = sum(not result.ok for result in results)
    terminal.note(output, f"{name}: {failures or 'none'} of {len(results)} checks failed")
    output.print(listing)
    for result in results:
        if not result.ok:
            terminal.note(output, f"{name}: {result.op}, {result.problem}, {_dtype(result)}: {result.detail}")
    refusals = {result.detail: result for result in results if result.refused}
    for detail, first in refusals.items():
        terminal.note(output, f"refused, {first.op}, {first.problem}: {' '.join(detail.split())}")


def _grouped(results: "Sequence[Result]") -> "Iterator[tuple[str, str, list[Result]]]":
    for op, dtype in dict.fromkeys((result.op, _dtype(result)) for result in results):
        yield op, dtype, [result for result in results if result.op == op and _dtype(result) == dtype]


def _dtype(result: "Result") -> str:
    return str(result.dtype).removeprefix("torch.")


def _as_json(result: "Result") -> dict[str, Any]:
    names = ("op", "problem", "error", "budget", "ok", "refused", "detail")
    return {**{name: getattr(result, name) for name in names}, "dtype": _dtype(result)}
