"""`tilegym-mamba2 bench`: the forward on named workloads, on every backend and, if asked, on the peers."""

import datetime
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from tilegym_mamba2.bench import fresh, peers, results, workloads
from tilegym_mamba2.bench.measure import Bench
from tilegym_mamba2.bench.timing import measure_limits
from tilegym_mamba2.bench.workloads import Workload
from tilegym_mamba2.cli import terminal
from tilegym_mamba2.cli.info import devices, versions
from tilegym_mamba2.cli.report import draw, show

_PEER_DISTRIBUTIONS = {"mamba_ssm": "mamba-ssm", "tilegym": "tilegym", "transformers": "transformers"}


def command(
    workload: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="A workload; may be repeated. Default: headline.")
    ] = None,
    sweep: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help=f"A set of them: {', '.join(workloads.SWEEPS)}.")
    ] = None,
    backends: Annotated[
        str | None, typer.Option(metavar="A,B", help="Backends or peers. Default: every backend that is available.")
    ] = None,
    peers_too: Annotated[bool, typer.Option("--peers", help="Also every peer that is installed.")] = False,
    first_call: Annotated[bool, typer.Option(help="Also time first calls in fresh processes.")] = False,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the results, after each workload.")] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw FILE-time and FILE-gain, .png and .svg.")
    ] = None,
    seconds: Annotated[
        float | None, typer.Option(help="Begin no workload after so long; what was measured is kept.")
    ] = None,
) -> int:
    """Time the forward: device time on a GPU, the clock on a CPU, where sizes are smaller.

    Ctrl-C ends it and keeps what was measured. Exit status 1 if a backend of this package failed or was wrong.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    terminal.check_json_path(json)
    try:
        chosen = _workloads(workload or [], sweep or [])
        named = [name.strip() for name in backends.split(",")] if backends else None
        compared = peers.implementations(named, peers_too, device)
    except ValueError as error:
        raise terminal.UserError(str(error)) from None
    begun = time.monotonic()
    found: results.Results | None = None
    interrupted = False
    with terminal.steps(len(chosen) + 2) as progress, torch.inference_mode():
        try:
            progress.start("copy bandwidth and matrix rate")
            found = results.Results(_about(device), measure_limits(device))
            progress.start("first calls")
            if first_call:
                found.first_calls = fresh.first_calls(chosen[0], compared, device)
            progress.done()
            if device.type == "cuda":
                fresh.compile_ahead(chosen, compared, device, progress.start)
            progress.done()
            bench = Bench(device, found.limits)
            for one in chosen:
                if seconds is not None and time.monotonic() - begun > seconds:
                    break
                found.records += bench.measure(one, compared, progress.start)
                if json is not None:
                    results.save(found, json)
                progress.done()
        except KeyboardInterrupt:
            interrupted = True
    if found is None or not found.records:
        sys.stderr.write("tilegym-mamba2: nothing was measured\n")
        return 130 if interrupted else 1
    if json is not None:
        results.save(found, json)
    show(found)
    if plot is not None:
        draw(found, plot)
    if interrupted:
        return 130
    return int(any(record.broken and record.implementation not in peers.PEERS for record in found.records))


def _workloads(names: Sequence[str], sweeps: Sequence[str]) -> list[Workload]:
    """Those named, in order and each once; the headline if none is."""
    chosen = [workloads.find_workload(name) for name in names]
    for name in sweeps:
        if name not in workloads.SWEEPS:
            raise ValueError(f"there is no sweep {name!r}; there are {', '.join(workloads.SWEEPS)}")
        chosen += workloads.SWEEPS[name]
    return list(dict.fromkeys(chosen)) or [workloads.HEADLINE]


def _about(device: torch.device) -> dict[str, Any]:
    """What a reader needs to do it again."""
    named = versions()
    for package, distribution in _PEER_DISTRIBUTIONS.items():
        named[package] = peers.version_of(package, distribution)
    gpus = devices()
    return {
        "command": shlex.join(["tilegym-mamba2", *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "revision": _revision(),
        "machine": gpus[device.index or 0]["name"] if device.type == "cuda" else f"CPU, {platform.machine()}",
        "threads": torch.get_num_threads(),
        "processors": os.cpu_count(),
        "devices": gpus,
        "versions": named,
    }


def _revision() -> str | None:
    """The source's git revision, with a + if it was changed; outside a repository the variable GIT_COMMIT, or None."""
    folder = Path(__file__).parent
    try:
        asked = ["git", "-C", str(folder), "describe", "--always", "--dirty=+", "--abbrev=40", "--exclude=*"]
        return subprocess.run(asked, capture_output=True, text=True, timeout=20, check=True).stdout.strip() or None
    except (OSError, subprocess.SubprocessError):
        return os.environ.get("GIT_COMMIT")
