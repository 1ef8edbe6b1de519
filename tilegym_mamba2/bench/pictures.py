"""Pictures of results, each as PNG and SVG: time against seqlen, and speed-up per workload and per model."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilegym_mamba2.bench.peers import PEERS
from tilegym_mamba2.bench.report import paths_of
from tilegym_mamba2.bench.results import Results
from tilegym_mamba2.bench.workloads import SWEEPS, Workload

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLOURS = {
    "cutile": "#1b7837",
    "triton": "#2166ac",
    "torch-reference": "#762a83",
    "mamba_ssm": "#d6604d",
    "tilegym": "#e08214",
    "torch.compile": "#878787",
    "transformers": "#4d4d4d",
}
_OTHER_COLOUR = "#000000"
_FAR_BEHIND = ("torch-reference", "torch.compile", "transformers")  # their bars would be too short to see
_STYLE = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": "#e0e0e0",
    "svg.hashsalt": "tilegym_mamba2",  # the same results give the same bytes
}


class NoPictures(RuntimeError):  # noqa: N818
    """matplotlib is missing."""


def draw(results: Results, stem: Path) -> list[Path]:
    """Draws what the results allow into STEM-time, STEM-gain and STEM-models, .png and .svg, and returns the files.

    Raises NoPictures, saying what to install, if matplotlib is missing.
    """
    try:
        import matplotlib.style
    except ModuleNotFoundError:
        raise NoPictures("pictures need matplotlib: pip install 'tilegym_mamba2[bench]'") from None
    files: list[Path] = []
    with matplotlib.style.context(_STYLE):
        grid = {workload.name for row in _grid(results).values() for workload in row}
        bars = [one for one in results.workloads() if one.name not in grid and one.dtype == "bfloat16"]
        names = {model.name for model in SWEEPS["models"]}
        models = [one for one in bars if one.name in names]
        others = [one for one in bars if one not in models]
        pictures = {
            "time": _time_picture(results),
            "gain": _gain_picture(results, others),
            "models": _gain_picture(results, models),
        }
        for name, figure in pictures.items():
            if figure is not None:
                files += _save(figure, paths_of(stem, name), results.digest())
    return files


def _save(figure: "Figure", paths: Sequence[Path], digest: str) -> list[Path]:
    for path in paths:
        metadata: dict[str, Any] = {"Description": f"records {digest}"}
        if path.suffix == ".svg":
            metadata["Date"] = None
        figure.savefig(path, dpi=160, metadata=metadata, bbox_inches="tight")
    return list(paths)


def digest_in(path: Path) -> str | None:
    """The digest of the records that a picture was drawn from."""
    match = re.search(rb"records ([0-9a-f]{16})", path.read_bytes())
    return match[1].decode() if match else None


def _grid(results: Results) -> dict[int, list[Workload]]:
    """Workloads of a sweep over seqlen by dstate; empty if there are not two lengths."""
    found: dict[int, list[Workload]] = {}
    for workload in results.workloads():
        if re.fullmatch(r"seqlen\d+-dstate\d+", workload.name):
            found.setdefault(workload.dstate, []).append(workload)
    return {dstate: sorted(row, key=lambda one: one.seqlen) for dstate, row in sorted(found.items()) if len(row) > 1}


def _time_picture(results: Results) -> "Figure | None":
    from matplotlib.figure import Figure

    grid = _grid(results)
    if not grid:
        return None
    figure = Figure(figsize=(1.2 + 3.8 * len(grid), 4.4), layout="constrained")
    panels: Any = figure.subplots(1, len(grid), sharey=True, squeeze=False)[0]
    for axes, (dstate, row) in zip(panels, grid.items(), strict=True):
        for name in results.implementations():
            records = [record for workload in row if (record := results.find(workload.name, name))]
            if records:
                axes.plot(
                    [record.workload.seqlen for record in records],
                    [record.time * 1e6 for record in records],
                    marker="o",
                    markersize=4,
                    color=_COLOURS.get(name, _OTHER_COLOUR),
                    label=name,
                )
        bound = [
            (workload.seqlen, record.limit * 1e6)
            for workload in row
            if (record := next((one for one in results.records if one.workload == workload and one.limit), None))
        ]
        axes.plot(*zip(*bound, strict=True), color="#888888", linestyle="--", label="limit of the device")
        axes.set(xscale="log", yscale="log", xlabel="seqlen", title=f"dstate {dstate}")
        lengths = [workload.seqlen for workload in row]
        axes.set_xticks(lengths, [f"{length // 1024}k" if length >= 1024 else str(length) for length in lengths])
        axes.minorticks_off()
    panels[0].set_ylabel("time of one forward, us")
    first = next(iter(grid.values()))[0]
    figure.suptitle(
        f"Mamba-2 forward, bfloat16, batch {first.batch}, nheads {first.nheads}, headdim {first.headdim}; "
        f"{results.machine}"
    )
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    return figure


def _gain_picture(results: Results, workloads: Sequence[Workload]) -> "Figure | None":
    from matplotlib.figure import Figure

    names = results.implementations()
    baseline = next((name for name in (*PEERS, "torch-reference") if name in names), None)
    workloads = [one for one in workloads if results.find(one.name, baseline or "")]
    others = [name for name in names if name != baseline and (name not in _FAR_BEHIND or len(names) == 2)]
    if not workloads or not others:
        return None
    assert baseline is not None
    height = 0.8 / len(others)
    nbars = len(workloads) * len(others)
    figure = Figure(figsize=(8, 1.6 + nbars * (0.26 if nbars < 40 else 0.16)), layout="constrained")
    axes: Any = figure.subplots()
    for place, name in enumerate(others):
        bars = [
            (row + (place - (len(others) - 1) / 2) * height, reference.time / record.time)
            for row, workload in enumerate(workloads)
            if (record := results.find(workload.name, name)) and (reference := results.find(workload.name, baseline))
        ]
        if bars:
            positions, lengths = zip(*bars, strict=True)
            colour = _COLOURS.get(name, _OTHER_COLOUR)
            container = axes.barh(positions, lengths, height * 0.9, color=colour, label=name)
            axes.bar_label(container, fmt=" %.2f", fontsize=8)
    axes.axvline(1, color=_COLOURS.get(baseline, _OTHER_COLOUR), linewidth=1.5, label=f"{baseline} = 1")
    axes.set_yticks(range(len(workloads)), [f"{workload.name}\n{workload.shape}" for workload in workloads], fontsize=8)
    axes.set(ylim=(len(workloads) - 0.5, -0.5), xlabel=f"times as fast as {baseline}")
    axes.set_title(f"Mamba-2 forward, bfloat16; {results.machine}")
    axes.grid(False, axis="y")
    figure.legend(loc="outside lower center", ncols=len(others) + 1, frameon=False)
    return figure
