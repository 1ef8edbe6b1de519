"""`tilegym-mamba2 run`: a model's real layer input through the forward, on every backend, timed and compared."""

import enum
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib import resources
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from tilegym_mamba2 import registry
from tilegym_mamba2.cli import terminal, timing
from tilegym_mamba2.cli.info import devices, versions
from tilegym_mamba2.models import Model, find_model
from tilegym_mamba2.ops.mamba_chunk_scan import mamba_chunk_scan

_OP = "mamba_chunk_scan"
_ORACLE_NUMBERS = 600_000_000  # state entries times tokens: a few seconds, token by token
_CPU_SECONDS = 10.0  # what one call may take on the CPU before a backend is given fewer tokens
_PROBE_TOKENS = 64
_PROBE_GROWTH = 4
_PER_TOKEN = ("x", "dt", "B", "C", "z")


class Dtype(str, enum.Enum):
    """Dtypes that layers run in."""

    bfloat16 = "bfloat16"
    float16 = "float16"
    float32 = "float32"


@dataclass
class Row:
    """What was found of one backend; errors and budget are relative, times in seconds."""

    backend: str
    status: str = "ok"  # "wrong": outside the error budget; "failed": it raised; "not run"
    reason: str | None = None
    tokens: int = 0
    seconds: float | None = None
    method: str | None = None
    error_out: float | None = None
    error_final_states: float | None = None


@dataclass(frozen=True)
class Reference:
    """What results are compared with, by number of tokens."""

    inputs: Mapping[str, Any]
    name: str
    _known: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict[int, Any])

    def __call__(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        if tokens not in self._known:
            from tilegym_mamba2.testing import oracle_scan

            prefix = first_tokens(self.inputs, tokens)
            if self.name == "oracle":
                out, final_states, _ = oracle_scan(**prefix)
            else:
                double: dict[str, Any] = {
                    key: v.double() if isinstance(v, torch.Tensor) else v for key, v in prefix.items()
                }
                out, final_states, _ = mamba_chunk_scan(**double, backend="torch-reference")
            self._known[tokens] = out, final_states
        return self._known[tokens]


def command(
    model: Annotated[str, typer.Option(help="A released model, whose layer geometry is used.")] = "mamba2-130m",
    seqlen: Annotated[int, typer.Option(help="Tokens per row.")] = 2048,
    file: Annotated[
        Path | None, typer.Option(metavar="PATH", help="Whose bytes are the tokens. Default: a text in the package.")
    ] = None,
    backend: Annotated[str | None, typer.Option(help="Run this backend alone. Default: all.")] = None,
    dtype: Annotated[Dtype, typer.Option(help="Of x, B, C and dt.")] = Dtype.bfloat16,
    batch: Annotated[int, typer.Option(help="Rows.")] = 1,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Also write everything to FILE as JSON.")] = None,
) -> int:
    """Run a model's layer input through the forward on every backend: time and error.

    Exit status 1 if a result is outside its error budget, or there is none.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    sizes = _model(model)
    for name, value in (("--seqlen", seqlen), ("--batch", batch)):
        if value < 1:
            raise terminal.UserError(f"{name} is {value}: give at least 1")
    _check_memory(sizes, batch, seqlen, device)
    terminal.check_json_path(json)
    text = _text(file, batch * seqlen)
    reasons = _reasons(backend, device)

    try:
        inputs, rows, reference = _run(sizes, seqlen, text, getattr(torch, dtype.value), batch, device, reasons)
    except torch.OutOfMemoryError:
        raise terminal.UserError(
            f"--seqlen {seqlen} with --batch {batch} needs more memory than {device} has: give a smaller one"
        ) from None

    limit = _budget(inputs)
    for row in rows:
        errors = (row.error_out, row.error_final_states)
        if row.status == "ok" and not all(error is not None and error <= limit for error in errors):
            row.status = "wrong"
    _show(sizes, batch, seqlen, dtype, device, rows, limit, reference)
    terminal.write_json(
        json,
        {
            "command": "run",
            "model": asdict(sizes),
            "batch": batch,
            "seqlen": seqlen,
            "dtype": dtype.value,
            "device": str(device),
            "input": str(file) if file else "the package's text",
            "reference": reference,
            "budget": limit,
            "results": [asdict(row) for row in rows],
            "versions": versions(),
            "devices": devices(),
        },
    )
    statuses = {row.status for row in rows}
    return int("failed" in statuses or "wrong" in statuses or "ok" not in statuses)


def _rows(inputs: Mapping[str, Any], batch: int) -> dict[str, Any]:
    """One row cut into several, of consecutive parts of the text; views stay views."""
    cut = dict(inputs)
    for key in _PER_TOKEN:
        if inputs[key] is not None:
            cut[key] = inputs[key].unflatten(1, (batch, -1)).squeeze(0)
    return cut


def first_tokens(inputs: Mapping[str, Any], tokens: int) -> dict[str, Any]:
    """The same arguments for the first tokens of every row."""
    return {key: v[:, :tokens] if key in _PER_TOKEN and v is not None else v for key, v in inputs.items()}


def _run(
    model: Model,
    seqlen: int,
    text: bytes,
    dtype: torch.dtype,
    batch: int,
    device: torch.device,
    reasons: Mapping[str, str | None],
) -> tuple[dict[str, Any], list[Row], str]:
    from tilegym_mamba2.testing import layer_inputs

    with terminal.steps(len(reasons) + 1) as progress, torch.inference_mode():
        progress.start("layer input")
        inputs = _rows(layer_inputs(model, batch * seqlen, text, dtype=dtype, device=device), batch)
        progress.done()
        work = batch * seqlen * model.nheads * model.headdim * model.dstate
        reference = Reference(inputs, "oracle" if work <= _ORACLE_NUMBERS else "torch-reference in float64")
        rows: list[Row] = []
        for name, reason in reasons.items():
            if reason is None:
                rows.append(_one_backend(name, inputs, seqlen, device, reference, progress))
            else:
                rows.append(Row(name, "not run", reason))
            progress.done()
    return inputs, rows, reference.name


def _one_backend(
    name: str,
    inputs: Mapping[str, Any],
    seqlen: int,
    device: torch.device,
    reference: Reference,
    progress: terminal.Steps,
) -> Row:
    from tilegym_mamba2.testing import relative_error

    def forward(arguments: Mapping[str, Any]) -> Any:
        return mamba_chunk_scan(**arguments, backend=name)

    progress.start(name)
    try:
        tokens = seqlen if device.type == "cuda" else _affordable(forward, inputs, seqlen)
        arguments = first_tokens(inputs, tokens)
        (out, final_states, _), timed = timing.measure(forward, arguments, device)
        progress.start(f"{name}: comparing with {reference.name}")
        want_out, want_final = reference(tokens)
        return Row(
            name,
            tokens=tokens,
            seconds=timed.seconds,
            method=timed.method,
            error_out=relative_error(out, want_out),
            error_final_states=relative_error(final_states, want_final),
        )
    except NotImplementedError as error:
        return Row(name, "not run", " ".join(str(error).split()))
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # one backend's failure is a row, and the others still run
        return Row(name, "failed", terminal.one_line(error))


def _affordable(forward: Any, inputs: Mapping[str, Any], seqlen: int) -> int:
    """How many tokens a backend is given on the CPU: all of them unless it is so slow that it is interpreted.

    It is tried on ever longer beginnings, which warm it up as well, until the rest can be judged.
    """
    tokens = min(_PROBE_TOKENS, seqlen)
    forward(first_tokens(inputs, tokens))
    while True:
        per_token = timing.once(forward, first_tokens(inputs, tokens)) / tokens
        if per_token * tokens * _PROBE_GROWTH > _CPU_SECONDS or tokens * _PROBE_GROWTH >= seqlen:
            break
        tokens *= _PROBE_GROWTH
    if per_token * seqlen <= _CPU_SECONDS:
        return seqlen
    return max(tokens, int(_CPU_SECONDS / per_token) // _PROBE_TOKENS * _PROBE_TOKENS)


def _show(
    model: Model,
    batch: int,
    seqlen: int,
    dtype: Dtype,
    device: torch.device,
    rows: list[Row],
    limit: float,
    reference: str,
) -> None:
    output = terminal.console()
    threads = torch.get_num_threads()
    cpu = f"CPU, {threads} thread{'s' if threads > 1 else ''}"
    place = torch.cuda.get_device_name(device) if device.type == "cuda" else cpu
    terminal.note(
        output,
        f"{model.name}: batch {batch}, seqlen {seqlen}, nheads {model.nheads}, headdim {model.headdim}, "
        f"ngroups {model.ngroups}, dstate {model.dstate}, {dtype.value}; {place}",
    )
    columns = ("tokens", "time", "tokens/s", "error\nof out", "error of\nfinal_states")
    listing = terminal.table("backend", "", *columns, numeric=columns)
    for row in rows:
        good = None if row.status == "not run" else row.status == "ok"
        cells = ["", "", "", "", ""]
        if row.seconds is not None and row.error_out is not None and row.error_final_states is not None:
            cells = [
                f"{batch} x {row.tokens}" if batch > 1 else f"{row.tokens}",
                terminal.seconds(row.seconds),
                f"{batch * row.tokens / row.seconds:,.0f}",
                f"{row.error_out:.1e}",
                f"{row.error_final_states:.1e}",
            ]
        listing.add_row(row.backend, terminal.verdict(row.status, good), *cells)
    output.print(listing)
    for method in dict.fromkeys(row.method for row in rows if row.method):
        names = [row.backend for row in rows if row.method == method]
        terminal.note(output, f"Time of {', '.join(names)}: {method}, after a warm-up.")
    meaning = "the recurrence, token by token in float64" if reference == "oracle" else reference
    terminal.note(
        output,
        f"Error: ||got - want|| / ||want||, want being {meaning}, from the same rounded inputs; budget {limit:.1e}.",
    )
    for row in rows:
        if row.reason is not None:
            terminal.note(output, f"{row.backend}: {row.reason}.")
        elif row.tokens < seqlen:
            terminal.note(
                output,
                f"{row.backend} was given the first {row.tokens} of {seqlen} tokens alone: all of them would take "
                f"more than {_CPU_SECONDS:.0f} s a call here.",
            )


def _budget(inputs: Mapping[str, Any]) -> float:
    from tilegym_mamba2.testing import budget

    return budget(inputs["x"].dtype)


# What the user gave


def _model(name: str) -> Model:
    try:
        return find_model(name)
    except ValueError as error:
        raise terminal.UserError(f"--model: {error}") from None


def _text(file: Path | None, most: int) -> bytes:
    if file is None:
        return (resources.files("tilegym_mamba2.cli") / "text.txt").read_bytes()
    try:
        with file.open("rb") as opened:
            text = opened.read(most)
    except IsADirectoryError:
        raise terminal.UserError(f"--file {file} is a directory: give a file's name") from None
    except OSError as error:
        raise terminal.UserError(f"--file {file} can't be read ({error.strerror or error}): give another") from None
    if not text:
        raise terminal.UserError(f"--file {file} is empty: give a file with at least one byte")
    return text


def _reasons(backend: str | None, device: torch.device) -> dict[str, str | None]:
    """The backends to run, with the reason why one can't; a backend that was named must run."""
    explained = registry.explain_backends(device)
    if backend is None:
        return {name: None if reason == "available" else reason for name, reason in explained.items()}
    terminal.check_backend_name("--backend", backend, explained)
    if not registry.has_implementation(_OP, backend):
        raise terminal.UserError(f"--backend {backend} has no {_OP}: choose another (tilegym-mamba2 info)")
    return {backend: None}


def _check_memory(model: Model, batch: int, seqlen: int, device: torch.device) -> None:
    """Refuses what can't fit, before the system kills the process for trying."""
    # x, z, out in three precisions and the reference's own: a lower bound of what is held at once.
    needed = batch * seqlen * model.nheads * (model.headdim * 40 + 8)
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
    elif hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    else:
        return
    if needed > memory:
        fits = memory * seqlen // needed
        raise terminal.UserError(
            f"--seqlen {seqlen} with --batch {batch} needs more than {needed / 2**30:,.0f} GiB of memory, {device} has "
            f"{memory / 2**30:,.0f}: give a --seqlen below {max(fits, 2):,}"
        )
