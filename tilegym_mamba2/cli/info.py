"""`tilegym-mamba2 info`: what can run here, and why the rest can't."""

import importlib.metadata
import platform
import re
import shutil
import subprocess
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.text import Text

import tilegym_mamba2
from tilegym_mamba2 import registry, tuning
from tilegym_mamba2.backends import cutile, triton
from tilegym_mamba2.cli import terminal


def command(
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Also write everything to FILE as JSON.")] = None,
) -> int:
    """Show which op runs on which backend, or why not; the versions; the GPU."""
    terminal.check_json_path(json)
    found: dict[str, Any] = {
        "command": "info",
        "versions": versions(),
        "devices": devices(),
        **_support(),
        "tuned": _tuned(),
    }
    terminal.write_json(json, found)

    output = terminal.console()
    listing = terminal.table("", "")
    listing.show_header = False
    for name, version in found["versions"].items():
        listing.add_row(name, version or terminal.verdict("missing", None))
    for device in found["devices"]:
        listing.add_row(f"cuda:{device['index']}", _describe(device))
    if not found["devices"]:
        listing.add_row("GPU", terminal.verdict("none that torch can use", None))
    output.print(listing)

    backends: dict[str, str] = found["backends"]
    matrix = terminal.table("op", *backends)
    for op, cells in found["ops"].items():
        matrix.add_row(op, *(_cell(cells[name]) for name in backends))
    output.print(matrix)
    device = "GPU" if found["devices"] else "CPU"
    terminal.note(output, f"Automatic choice for {device} tensors: {found['automatic']}.")
    for name, reason in backends.items():
        if reason != "available":
            terminal.note(output, f"{name}: {reason}.")
    for op, cells in found["ops"].items():
        for name, support in cells.items():
            if support not in ("available", backends[name]):
                terminal.note(output, f"{name}, {op}: {support}.")
    for name, reason in found["plugins_not_loaded"].items():
        terminal.note(output, f"plugin {name} was not loaded: {reason}")
    tuned = found["tuned"]
    kept = f"{tuned['in_use']} in use" + (f", {tuned['for_others']} for others" if tuned["for_others"] else "")
    terminal.note(output, f"Tuned choices: {tuned['directory']} ({kept if tuned['exists'] else 'nothing was tuned'}).")
    for path, reason in tuned["damaged"].items():
        terminal.note(output, f"{path} is ignored: {reason}")
    return 0


def _tuned() -> dict[str, Any]:
    """Where tuned choices are kept, how many of them this package, compilers and GPUs use, and what is no choice."""
    folder = tuning.cache_directory()
    choices, damaged = tuning.stored()
    gpus = [torch.device("cuda", device["index"]) for device in devices()] if choices else []
    places = [backend.place(backend.device_info(gpu)) for gpu in gpus for backend in (cutile, triton)]
    in_use = sum(any(tuning.holds(choice, place) for place in places) for choice in choices)
    return {
        "directory": None if folder is None else str(folder),
        "exists": folder is not None and folder.is_dir(),
        "in_use": in_use,
        "for_others": len(choices) - in_use,
        "damaged": {str(path): reason for path, reason in damaged.items()},
    }


def versions() -> dict[str, str | None]:
    """What a result depends on, by name; None for what is missing."""
    return {
        "tilegym_mamba2": tilegym_mamba2.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _package("triton"),
        "cuda-tile": _package("cuda-tile"),
        "tileiras": _package("nvidia-cuda-tileiras")
        or _program_version("tileiras", "--version", r"\bV?(\d+\.\d+\.\d+)"),
        "driver": _program_version("nvidia-smi", "--query-gpu=driver_version --format=csv,noheader", r"(\d[\d.]+)"),
    }


def devices() -> list[dict[str, Any]]:
    """The GPUs that torch can use."""
    found: list[dict[str, Any]] = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        properties = torch.cuda.get_device_properties(index)
        found.append(
            {
                "index": index,
                "name": properties.name,
                "compute_capability": f"{properties.major}.{properties.minor}",
                "memory_bytes": properties.total_memory,
                "multiprocessors": properties.multi_processor_count,
            }
        )
    return found


def _support() -> dict[str, Any]:
    backends = registry.explain_backends()
    ops = {op: {name: _support_of(op, name, reason) for name, reason in backends.items()} for op in registry.ops()}
    best = registry.available_backends()
    return {
        "backends": backends,
        "ops": ops,
        "automatic": best[0] if best else None,
        "plugins_not_loaded": registry.load_failures(),
    }


def _support_of(op: str, backend: str, reason: str) -> str:
    if reason != "available":
        return reason
    try:
        return "available" if registry.has_implementation(op, backend) else f"{backend} has no {op}"
    except Exception as error:  # a broken implementation is a finding, and the other cells still count
        return f"can't be imported: {terminal.one_line(error)}"


def _cell(support: str) -> Text:
    return terminal.verdict("available", True) if support == "available" else terminal.verdict("unavailable", None)


def _describe(device: dict[str, Any]) -> str:
    memory = device["memory_bytes"] / 2**30
    return (
        f"{device['name']}, compute capability {device['compute_capability']}, {memory:.0f} GiB, "
        f"{device['multiprocessors']} multiprocessors"
    )


def _package(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _program_version(program: str, arguments: str, pattern: str) -> str | None:
    path = shutil.which(program)
    if path is None:
        return None
    try:
        answer = subprocess.run([path, *arguments.split()], capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    match = re.search(pattern, answer.stdout)
    return match[1] if match else None
