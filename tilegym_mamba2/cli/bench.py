"""`tilegym-mamba2 bench`: the forward on named workloads, on every backend and, if asked, on the peers."""

import datetime
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from tilegym_mamba2.bench import fresh, peers, results, workloads
from tilegym_mamba2.bench.measure import Bench, DeviceLostError, Record, is_usable, one_line
from tilegym_mamba2.bench.timing import measure_limits
from tilegym_mamba2.bench.workloads import Workload
from tilegym_mamba2.cli import terminal
from tilegym_mamba2.cli.info import devices, versions
from tilegym_mamba2.cli.report import draw, show

_PEER_DISTRIBUTIONS = {"mamba_ssm": "mamba-ssm", "tilegym": "tilegym", "transformers": "transformers"}
_COMPILE_SECONDS = 240.0  # at most, for all of them
_FIRST_CALL_SECONDS = 40.0  # at most, for each
_HOST_AGAIN_SECONDS = 40.0  # kept for host times, out of the time for the run at most a tenth


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
        Path | None, typer.Option(metavar="FILE", help="Draw FILE-time, FILE-gain, FILE-models: .png and .svg.")
    ] = None,
    seconds: Annotated[
        float | None, typer.Option(help="Begin no workload after so long; what was measured is kept.")
    ] = None,
    resume: Annotated[bool, typer.Option(help="Keep what FILE of --json has, and measure the rest.")] = False,
) -> int:
    """Time the forward: device time on a GPU, the clock on a CPU, where sizes are smaller.

    Ctrl-C ends it and keeps what was measured. Exit status 1 if a backend of this package failed or was wrong, 3 if
    the device was lost: the file says to what, and --resume measures the rest.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    terminal.check_json_path(json)
    try:
        chosen = _workloads(workload or [], sweep or [])
        named = [name.strip() for name in backends.split(",")] if backends else None
        compared = peers.implementations(named, peers_too, device)
    except ValueError as error:
        raise terminal.UserError(str(error)) from None
    earlier = _earlier(json) if resume else None
    run = _Run(device, compared, json, seconds)
    interrupted = lost = False
    with terminal.steps(len(chosen) + 4) as progress, torch.inference_mode():
        try:
            lost = not run.measure(chosen, earlier, first_call, progress)
        except KeyboardInterrupt:
            interrupted = True
    found = run.found
    if found is None or not found.records:
        sys.stderr.write("tilegym-mamba2: nothing was measured\n")
        return 130 if interrupted else 3 if lost else 1
    run.save()
    show(found)
    if plot is not None:
        draw(found, plot)
    if interrupted or lost:
        return 130 if interrupted else 3
    return int(any(record.broken and record.implementation not in peers.PEERS for record in found.records))


class _Run:
    """What is measured, as far as it got."""

    def __init__(
        self, device: torch.device, compared: Sequence[peers.Implementation], file: Path | None, seconds: float | None
    ):
        self._device = device
        self._compared = compared
        self._file = file
        self._begun = time.monotonic()
        self._seconds = float("inf") if seconds is None else seconds
        self._for_hosts = min(_HOST_AGAIN_SECONDS, self._seconds / 10)
        self.found: results.Results | None = None

    def _left(self) -> float:
        return self._begun + self._seconds - time.monotonic()

    def save(self) -> None:
        if self._file is not None and self.found is not None:
            results.save(self.found, self._file)

    def measure(
        self, chosen: Sequence[Workload], earlier: results.Results | None, first_call: bool, progress: terminal.Steps
    ) -> bool:
        """Measures what there is no record of; false if the device was lost."""
        progress.start("copy bandwidth and matrix rate")
        self.found = found = earlier or results.Results(
            about(self._device, ["tilegym-mamba2", *sys.argv[1:]]), measure_limits(self._device)
        )
        progress.done()
        there = {(record.workload.name, record.implementation) for record in found.records}
        missing = [one for one in chosen if any((one.name, each.name) not in there for each in self._compared)]
        spent = found.spent.setdefault("run", {})
        if self._device.type == "cuda":
            at_most = min(_COMPILE_SECONDS, self._left() / 3)
            found.spent["compiling ahead"] = fresh.compile_ahead(
                missing, self._compared, self._device, progress.start, at_most
            )
        progress.done()
        spent["limits and compiling"] = round(time.monotonic() - self._begun, 1)
        if first_call:
            self._first_calls(found, chosen[0], progress)
        progress.done()
        bench = Bench(self._device, found.limits, found.spent)
        for one in missing:
            if self._left() < self._for_hosts:
                break
            left = [each for each in self._compared if (one.name, each.name) not in there]
            try:
                found.records += bench.measure(one, left, progress.start)
            except (DeviceLostError, RuntimeError) as error:
                blamed = [error.implementation] if isinstance(error, DeviceLostError) else [each.name for each in left]
                found.records += [Record(one, name, failed=one_line(error), broken=True) for name in blamed]
                if not is_usable(self._device):
                    return False
            spent["all"] = round(time.monotonic() - self._begun, 1)
            self.save()
            progress.done()
        self._host_again(found, bench, progress)
        return True

    def _first_calls(self, found: results.Results, workload: Workload, progress: terminal.Steps) -> None:
        known = {call.implementation for call in found.first_calls if call.workload == workload.name}
        missing = [one for one in self._compared if one.name not in known]
        if missing and self._left() > 0:
            progress.start("first calls")
            begun = time.monotonic()
            at_most = min(_FIRST_CALL_SECONDS, self._left())
            found.first_calls += fresh.first_calls(workload, missing, self._device, at_most)
            found.spent["run"]["first calls"] = round(time.monotonic() - begun, 1)
            self.save()

    def _host_again(self, found: results.Results, bench: Bench, progress: terminal.Steps) -> None:
        """Host times again, there and back: what disturbs the processor for a while does not last the whole run."""
        if self._device.type != "cuda":
            return
        begun = time.monotonic()
        different = list({replace(one, name=""): one for one in found.workloads()}.values())
        for workload in (*different, *reversed(different)):
            if self._left() < 0:
                break
            progress.start(f"{workload.name}: host time again")
            bench.host_again(workload, self._compared)
        found.records = [bench.latest(record) for record in found.records]
        found.spent["run"]["host times again"] = round(time.monotonic() - begun, 1)
        progress.done()


def _earlier(file: Path | None) -> results.Results | None:
    """The results to go on with. Raises UserError if they can't be read."""
    if file is None:
        raise terminal.UserError("--resume needs --json FILE")
    try:
        return results.load(file) if file.exists() else None
    except (OSError, ValueError) as error:
        raise terminal.UserError(f"--resume: {error}") from None


def _workloads(names: Sequence[str], sweeps: Sequence[str]) -> list[Workload]:
    """Those named, in order and each once; the headline if none is."""
    chosen = [workloads.find_workload(name) for name in names]
    for name in sweeps:
        if name not in workloads.SWEEPS:
            raise ValueError(f"there is no sweep {name!r}; there are {', '.join(workloads.SWEEPS)}")
        chosen += workloads.SWEEPS[name]
    return list(dict.fromkeys(chosen)) or [workloads.HEADLINE]


def about(device: torch.device, command: Sequence[str]) -> dict[str, Any]:
    """What a reader needs to do it again: the command, and on what it ran."""
    named = versions()
    for package, distribution in _PEER_DISTRIBUTIONS.items():
        named[package] = peers.version_of(package, distribution)
    gpus = devices()
    return {
        "command": shlex.join(command),
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "revision": _revision(),
        "machine": gpus[device.index or 0]["name"] if device.type == "cuda" else f"CPU, {platform.machine()}",
        "threads": torch.get_num_threads(),
        "processors": os.cpu_count(),
        "devices": gpus,
        "versions": named,
    }


def _revision() -> str | None:
    """The variable GIT_COMMIT, or the source's git revision, with a + if it was changed; None outside a repository."""
    if "GIT_COMMIT" in os.environ:
        return os.environ["GIT_COMMIT"]
    folder = Path(__file__).parent
    try:
        asked = ["git", "-C", str(folder), "describe", "--always", "--dirty=+", "--abbrev=40", "--exclude=*"]
        return subprocess.run(asked, capture_output=True, text=True, timeout=20, check=True).stdout.strip() or None
    except (OSError, subprocess.SubprocessError):
        return None
