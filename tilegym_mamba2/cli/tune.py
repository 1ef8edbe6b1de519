"""`tilegym-mamba2 tune`: finds the fastest configuration of the forward for this GPU, and keeps it."""

import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from tilegym_mamba2 import registry, tuning
from tilegym_mamba2.backends import cutile, triton
from tilegym_mamba2.bench import search
from tilegym_mamba2.bench.measure import is_usable
from tilegym_mamba2.bench.workloads import Workload, make_inputs
from tilegym_mamba2.cli import terminal
from tilegym_mamba2.cli.run import Dtype
from tilegym_mamba2.models import find_model
from tilegym_mamba2.ops.mamba_chunk_scan import mamba_chunk_scan

BACKENDS = ("cutile", "triton")
# One model for each headdim and dstate that a released model has.
KEY_MODELS = (
    "mamba2-2.7b", "zamba2-2.7b", "nemotron-h-56b", "nemotron-nano-9b-v2", "falcon-h1-7b", "falcon-h1-tiny"
)  # fmt: skip
# Multiprocessors, and bytes of shared memory for a program, of a GPU of each architecture.
_GPUS = {
    "sm_80": (108, 166_912),
    "sm_90": (132, 232_448),
    "sm_100": (148, 232_448),
    "sm_103": (148, 232_448),
    "sm_120": (188, 101_376),
}
_SIZES = ("batch", "seqlen", "nheads", "headdim", "ngroups", "dstate")
_LEAST_SECONDS = 10.0


@dataclass
class _Row:
    """What came of one key."""

    backend: str
    shape: str
    outcome: str
    good: bool | None
    configuration: str = ""
    seconds: float = 0.0


def command(
    model: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="A released model, whose layers it is to be fast on; may be repeated."),
    ] = None,
    shape: Annotated[
        list[str] | None,
        typer.Option(metavar="SIZES", help=f"{','.join(_SIZES)}: to be fast on that alone; may be repeated."),
    ] = None,
    backends: Annotated[
        str | None, typer.Option(metavar="A,B", help="Default: cutile,triton, if they can run.")
    ] = None,
    dtype: Annotated[Dtype, typer.Option(help="Of x, B and C.")] = Dtype.bfloat16,
    seconds: Annotated[float, typer.Option(help="At most, for each choice.")] = 60.0,
    again: Annotated[bool, typer.Option(help="Search also where a choice is kept.")] = False,
    listing: Annotated[bool, typer.Option("--list", help="Search nothing: show what is chosen, and why.")] = False,
    table: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also add what is kept to a table of the package.")
    ] = None,
) -> int:
    """Find the fastest configuration of the forward on this GPU, and keep it for later processes.

    Without --model and --shape: for every headdim and dstate of a released model. A choice holds for any batch and
    seqlen. Ctrl-C ends it and keeps what was found. Exit status 1 if a search failed.
    """
    named = [name.strip() for name in backends.split(",")] if backends else None
    tuned = [_workloads_of(name, dtype) for name in model or []] + [
        _workloads_from(text, dtype) for text in shape or []
    ]
    if listing:
        _show_choices(named or BACKENDS, dtype)
        return 0
    if not torch.cuda.is_available():
        raise terminal.UserError("there is nothing to tune without a GPU that torch can use (tilegym-mamba2 info)")
    if seconds < _LEAST_SECONDS:
        raise terminal.UserError(f"--seconds is {seconds:g}: give at least {_LEAST_SECONDS:g}")
    if tuning.cache_directory() is None:
        raise terminal.UserError(f"there is no directory to keep choices in: set {tuning.CACHE_VARIABLE}")
    device = torch.device("cuda", torch.cuda.current_device())
    names = _runnable(named, device)
    tuned = tuned or [_workloads_of(name, dtype) for name in KEY_MODELS]
    rows: list[_Row] = []
    kept: list[tuning.Choice] = []
    interrupted = False
    with terminal.steps(len(names) * len(tuned)) as progress:
        try:
            for row in _tune(names, tuned, device, seconds, again, kept, progress):
                rows.append(row)
                progress.done()
        except KeyboardInterrupt:
            interrupted = True
    _show(rows)
    if table is not None:
        try:
            tuning.write_table(table, kept)
        except (OSError, ValueError) as error:
            raise terminal.UserError(f"--table {table} can't be written: {error}") from None
    return 130 if interrupted else int(any(row.good is False for row in rows))


def _tune(
    names: Sequence[str],
    tuned: Sequence[Sequence[Workload]],
    device: torch.device,
    seconds: float,
    again: bool,
    kept: list[tuning.Choice],
    progress: terminal.Steps,
) -> Generator[_Row]:
    done: set[Any] = set()
    for workloads in tuned:
        for name in names:
            label = f"{name}, headdim {workloads[0].headdim}, dstate {workloads[0].dstate}"
            progress.start(label)
            begun = time.monotonic()
            try:
                asked = search.questions(name, workloads[0], device)
            except Exception as error:  # a compiler's or a kernel's: the other keys still count
                yield _failed(name, workloads[0], error, device)
                continue
            if not asked:
                yield _Row(name, _sizes(workloads[0]), "has one configuration", None)
            for one in asked:
                identity = (one.op, name, *one.key.items())
                if identity in done:
                    yield _Row(name, _sizes(workloads[0]), "as above", None)
                elif one.choice is not None and one.source == "here" and not again:
                    kept.append(one.choice)
                    yield _Row(
                        name, _sizes(workloads[0]), "kept already (--again)", None, _difference(one, one.position)
                    )
                else:
                    left = seconds - (time.monotonic() - begun)
                    yield _searched(one, workloads, device, left, kept, progress, label)
                done.add(identity)
                begun = time.monotonic()


def _searched(
    asked: tuning.Asked,
    workloads: Sequence[Workload],
    device: torch.device,
    seconds: float,
    kept: list[tuning.Choice],
    progress: terminal.Steps,
    label: str,
) -> _Row:
    begun = time.monotonic()
    name, sizes = asked.place.backend, _sizes(workloads[0])
    try:
        found = search.search(asked, workloads, device, seconds, lambda doing: progress.start(f"{label}: {doing}"))
    except Exception as error:  # as above
        return _failed(name, workloads[0], error, device)
    try:
        kept.append(tuning.store(asked, found.position, found.measured()))
    except OSError as error:
        reason = error.strerror or error
        raise terminal.UserError(
            f"the choice can't be written to {tuning.cache_directory()} ({reason}): set {tuning.CACHE_VARIABLE}"
        ) from None
    noise = f"noise {max(found.noise):.1%}, {len(found.seconds)} of {len(asked.candidates)} in the final"
    outcome = f"{found.gain:.2f}x by rule, {noise}" if found.position else f"by rule is best, {noise}"
    return _Row(name, sizes, outcome, True, _difference(asked, found.position), time.monotonic() - begun)


def _failed(name: str, workload: Workload, error: Exception, device: torch.device) -> _Row:
    """A row for a failure. Raises UserError if the device was lost to it."""
    if isinstance(error, NotImplementedError):
        return _Row(name, _sizes(workload), f"can't do it: {' '.join(str(error).split())}", None)
    if not is_usable(device):
        raise terminal.UserError(
            f"{name} lost the device: {terminal.one_line(error)}; what was found is kept"
        ) from None
    return _Row(name, _sizes(workload), terminal.one_line(error), False)


def _sizes(workload: Workload) -> str:
    return f"headdim {workload.headdim}, dstate {workload.dstate}, {workload.dtype}"


def _difference(asked: tuning.Asked, position: int) -> str:
    """The fields in which a candidate is not as by rule."""
    rule, other = (_flat(tuning.as_json(asked.candidates[at])) for at in (0, position))
    return ", ".join(f"{name} {value}" for name, value in other.items() if rule.get(name) != value)


def _flat(configuration: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(configuration, dict):
        return {prefix.removesuffix("."): configuration}
    flat: dict[str, Any] = {}
    for name, value in configuration.items():
        flat.update(_flat(value, f"{prefix}{name}."))
    return flat


def _show(rows: Sequence[_Row]) -> None:
    output = terminal.console()
    listing = terminal.table("backend", "for", "", "not as by rule", "seconds", numeric=["seconds"])
    for row in rows:
        spent = f"{row.seconds:.0f}" if row.seconds else ""
        listing.add_row(row.backend, row.shape, terminal.verdict(row.outcome, row.good), row.configuration, spent)
    output.print(listing)
    terminal.note(output, f"Choices are kept in {tuning.cache_directory()}.")


# What is chosen now


def _show_choices(names: Sequence[str], dtype: Dtype) -> None:
    output = terminal.console()
    gpus: dict[tuple[str, ...], list[str]] = {}
    for name in names:
        if name not in BACKENDS:
            raise terminal.UserError(f"--backends: {name} has no configurations; {' and '.join(BACKENDS)} have")
        try:
            for architecture in _GPUS:
                for asked in _asked_on(name, architecture, dtype):
                    sizes = ", ".join(str(value) for value in asked.key.values())
                    configuration = _flat(tuning.as_json(asked.candidates[asked.position]))
                    chosen = ", ".join(f"{key} {value}" for key, value in configuration.items() if value is not None)
                    gpus.setdefault((name, sizes, _source(asked), chosen), []).append(architecture)
        except (ModuleNotFoundError, registry.BackendUnavailableError) as error:
            terminal.note(output, f"{name}: {error}.")
    listing = terminal.table("backend", "for", "on", "chosen", "configuration")
    for (name, sizes, source, chosen), architectures in gpus.items():
        listing.add_row(name, sizes, ", ".join(dict.fromkeys(architectures)), source, chosen)
    output.print(listing)
    terminal.note(
        output, "For: headdim, dstate, products, and whether the state's rounding is compensated (without D)."
    )


def _source(asked: tuning.Asked) -> str:
    if asked.choice is None:
        return "by rule, not measured"
    where = "tuned here" if asked.source == "here" else f"measured on {asked.choice.gpu}"
    return f"{where}, {asked.choice.date}"


def _asked_on(backend: str, architecture: str, dtype: Dtype) -> Generator[tuning.Asked]:
    """What calls for the key models choose on a GPU of an architecture, or on the one here if it is of that."""
    for name in KEY_MODELS:
        workload = replace(_workloads_of(name, dtype)[0], batch=1, seqlen=16)
        inputs = make_inputs(workload, torch.device("cpu"), seed=0)
        with torch.inference_mode(), _supposed(backend, architecture), tuning.observing() as asked:
            try:
                mamba_chunk_scan(**inputs, chunk_size=64, backend=backend)
            except NotImplementedError:
                continue
        yield from asked


def _supposed(backend: str, architecture: str) -> Any:
    """Context manager: calls are recorded as if tensors were on a GPU of that architecture."""
    number = int(architecture.removeprefix("sm_"))
    capability = divmod(number, 10)
    multiprocessors, shared_memory = _GPUS[architecture]
    here = torch.cuda.is_available() and torch.cuda.get_device_capability() == capability
    gpu = torch.cuda.get_device_name() if here else ""
    if backend == "cutile":
        return cutile.recording(capability, None, gpu)
    return triton.recording(triton.DeviceInfo(f"cuda:{number}", multiprocessors, shared_memory, gpu))


# What the user gave


def _workloads_of(name: str, dtype: Dtype) -> list[Workload]:
    """Heads that fill a GPU, few heads of long rows, and packed sequences: which a call is, its key does not say."""
    try:
        sizes = find_model(name)
    except ValueError as error:
        raise terminal.UserError(f"--model: {error}") from None
    heads = (sizes.nheads, sizes.headdim, sizes.ngroups, sizes.dstate)
    return [
        Workload(f"{name}, 8 rows", 8, 2048, *heads, dtype=dtype.value),
        Workload(f"{name}, one row", 1, 8192, *heads, dtype=dtype.value),
        Workload(f"{name}, packed", 1, 8192, *heads, (4096, 2048, 1500, 548), dtype=dtype.value),
    ]


def _workloads_from(text: str, dtype: Dtype) -> list[Workload]:
    try:
        sizes = [int(part) for part in text.split(",")]
    except ValueError:
        sizes = []
    if len(sizes) != len(_SIZES) or min(sizes) < 1:
        raise terminal.UserError(f"--shape {text!r}: give {len(_SIZES)} sizes, {','.join(_SIZES)}, of at least 1")
    if sizes[2] % sizes[4]:
        raise terminal.UserError(f"--shape {text!r}: nheads {sizes[2]} is no multiple of ngroups {sizes[4]}")
    batch, seqlen, nheads, headdim, ngroups, dstate = sizes
    return [Workload(text, batch, seqlen, nheads, headdim, ngroups, dstate, dtype=dtype.value)]


def _runnable(named: Sequence[str] | None, device: torch.device) -> list[str]:
    explained = registry.explain_backends(device)
    for name in named or ():
        terminal.check_backend_name("--backends", name, explained)
        if name not in BACKENDS:
            raise terminal.UserError(f"--backends: {name} has no configurations; {' and '.join(BACKENDS)} have")
    names = list(named or [name for name in BACKENDS if explained[name] == "available"])
    if not names:
        reasons = "; ".join(f"{name}: {explained[name]}" for name in BACKENDS)
        raise terminal.UserError(f"there is nothing to tune: {reasons}")
    return names
