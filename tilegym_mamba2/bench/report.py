"""Tables of results as rows of text, and documents whose figures come from result files.

In a Markdown document, what stands between `<!-- figures: KIND FILE ARGUMENTS -->` and `<!-- /figures -->` is made from
a result file, whose name is relative to the document, or from several, joined by "+". For the kinds of a whole table
the arguments are names of workloads, sweeps and implementations to show, by default all. Kinds: see `KINDS`, and
"whole-models", of a file of bench/transformers_models.py.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tilegym_mamba2.bench.measure import Record
from tilegym_mamba2.bench.peers import PEERS
from tilegym_mamba2.bench.results import Results, load, merged
from tilegym_mamba2.bench.workloads import SWEEPS, TARGETS, WORKLOADS, Workload

NONE = "-"

_BLOCK = re.compile(r"(<!-- figures: (?P<request>.*?) -->)(?P<content>.*?)(<!-- /figures -->)", re.DOTALL)
_FIGURE = re.compile(
    r"\d[\d.,]*\s?(?:[uµ]s|microseconds|ms|milliseconds|s|seconds|[GT]B/s|TFLOP/?s|[GM]iB)\b"
    r"|\d[\d.,]*\s?(?:x|times) (?:as fast|faster|slower|the)"
    r"|\d[\d.,]*\s?% of (?:the|its) limit"
)


@dataclass(frozen=True)
class Table:
    """Rows of cells under columns; the first `text_columns` are words, the others numbers."""

    columns: tuple[str, ...]
    rows: list[list[str]]
    text_columns: int

    def markdown(self) -> str:
        alignment = ["---" if index < self.text_columns else "---:" for index in range(len(self.columns))]
        return "\n".join("| " + " | ".join(cells) + " |" for cells in (self.columns, alignment, *self.rows))


def selected(results: Results, names: Sequence[str]) -> Results:
    """The records of the workloads, sweeps and implementations of those names; of all if no such name is given.

    Raises ValueError for a name that is nothing here.
    """
    shown: list[str] = []
    implementations: list[str] = []
    for name in names:
        if name in SWEEPS:
            shown += [workload.name for workload in SWEEPS[name]]
        elif name in WORKLOADS:
            shown.append(name)
        elif name in results.implementations():
            implementations.append(name)
        else:
            raise ValueError(f"{name!r} is no workload or sweep, and no implementation that was measured")
    order = {name: place for place, name in enumerate([*dict.fromkeys(shown), *implementations])}
    found = [
        record
        for record in results.records
        if (not shown or record.workload.name in order) and (not implementations or record.implementation in order)
    ]
    found.sort(key=lambda record: (order.get(record.workload.name, 0), order.get(record.implementation, 0)))
    return replace(results, records=found)


def _ours(results: Results) -> list[str]:
    return [name for name in results.implementations() if name not in PEERS]


def _peers(results: Results) -> list[str]:
    return [name for name in PEERS if name in results.implementations()]


def _best(results: Results, workload: str) -> Record | None:
    """The record of the fastest backend of this package."""
    records = [record for name in _ours(results) if (record := results.find(workload, name))]
    return min(records, key=lambda record: record.time, default=None)


def times(results: Results) -> Table:
    """One row per workload: its shape and limit, times (errors of out), and what the best of ours gains over peers."""
    ours, peers = _ours(results), _peers(results)
    gains = [f"over {peer}" for peer in peers]
    shape = "batch, seqlen, nheads, headdim, ngroups, dstate"
    columns = ("workload", shape, "limit", *ours, *peers, "of limit", *gains)
    rows: list[list[str]] = []
    for workload in results.workloads():
        found = {name: results.find(workload.name, name) for name in (*ours, *peers)}
        best = _best(results, workload.name)
        limit = next((record.limit for record in found.values() if record), None)
        rows.append(
            [
                workload.name,
                workload.shape,
                NONE if limit is None else seconds(limit),
                *(_time_and_error(found[name]) for name in (*ours, *peers)),
                NONE if best is None else percent(best.limit / best.time),
                *(_gain(best, found[peer]) for peer in peers),
            ]
        )
    return Table(columns, rows, 2)


def speeds(results: Results) -> Table:
    """One row per workload in words, and the times alone."""
    names = [*_ours(results), *_peers(results)]
    versions: Mapping[str, str | None] = results.about.get("versions", {})
    columns = ("", *(f"{name} {versions.get(name) or ''}".strip() if name in PEERS else name for name in names))
    return Table(
        columns,
        [
            [_in_words(workload), *(_time(results.find(workload.name, name)) for name in names)]
            for workload in results.workloads()
        ],
        1,
    )


def targets(results: Results) -> Table:
    """One row per workload that has a target: its target, times, and the best of ours in multiples of the target."""
    ours = _ours(results)
    rows: list[list[str]] = []
    for name, target in TARGETS.items():
        best = _best(results, name)
        if best is not None:
            over = f"{best.time / target:.2f}{', met' if best.time <= target else ''}"
            rows.append([name, seconds(target), *(_time(results.find(name, one)) for one in ours), over])
    return Table(("workload", "target", *ours, "best / target"), rows, 1)


def _in_words(workload: Workload) -> str:
    words = [f"{workload.batch} x {workload.seqlen:,} tokens", f"{workload.nheads} heads of {workload.headdim}"]
    if workload.ngroups > 1:
        words.append(f"{workload.ngroups} groups")
    return ", ".join([*words, f"dstate {workload.dstate}"])


def host(results: Results) -> Table:
    """One row per workload: host time of an eager call and bytes that it holds, of every implementation."""
    names = [*_ours(results), *_peers(results)]
    columns = ("workload", *(f"{name}: {what}" for what in ("host time", "memory") for name in names))
    rows: list[list[str]] = []
    for workload in results.workloads():
        found = [results.find(workload.name, name) for name in names]
        rows.append([workload.name, *map(_host_time, found), *map(_memory, found)])
    return Table(columns, rows, 1)


def _host_time(record: Record | None) -> str:
    return NONE if record is None or record.host_time is None else seconds(record.host_time)


def _memory(record: Record | None) -> str:
    return NONE if record is None or record.peak_memory is None else f"{three_digits(record.peak_memory / 2**20)} MiB"


def details(results: Results) -> Table:
    """One row per workload and implementation."""
    columns = (
        "workload", "implementation", "chunk size", "time", "noise", "of limit", "GB/s", "TFLOP/s", "host time",
        "memory", "error of out", "error of final_states",
    )  # fmt: skip
    return Table(columns, [_detail(record) for record in results.records if record.failed is None], 2)


def _detail(record: Record) -> list[str]:
    rates = record.rates()
    return [
        record.workload.name,
        record.implementation,
        str(record.chunk_size),
        seconds(record.time),
        percent(record.noise),
        percent(rates["fraction_of_limit"]),
        three_digits(rates["gigabytes_per_second"]),
        three_digits(rates["teraflops"]),
        _host_time(record),
        _memory(record),
        f"{record.error_out:.1e}",
        f"{record.error_final_states:.1e}",
    ]


def failures(results: Results) -> dict[str, list[str]]:
    """Why there is no time: "implementation: reason" to names of workloads."""
    found: dict[str, list[str]] = {}
    for record in results.records:
        if record.failed is not None:
            found.setdefault(f"{record.implementation}: {record.failed}", []).append(record.workload.name)
    return found


def first_calls(results: Results) -> Table:
    """First calls in a fresh process."""
    rows: list[list[str]] = []
    for call in results.first_calls:
        found = [NONE if value is None else seconds(value) for value in (call.cold, call.warm)]
        if call.given_up_after is not None:
            found[found.index(NONE)] = f"> {seconds(call.given_up_after)}"
        rows.append([call.implementation, call.workload, *found])
    return Table(("implementation", "workload", "nothing compiled", "compiled before"), rows, 2)


def gains(results: Results, implementation: str, peer: str) -> Table:
    """How many times as fast as a peer an implementation is, seqlen by dstate around the headline.

    "best" is the fastest backend of this package.
    """
    grid = [workload for workload in results.workloads() if re.fullmatch(r"seqlen\d+-dstate\d+", workload.name)]
    lengths = sorted({workload.seqlen for workload in grid})
    names = {(workload.dstate, workload.seqlen): workload.name for workload in grid}
    rows = [
        [str(dstate), *(_gain_of(results, names.get((dstate, seqlen), ""), implementation, peer) for seqlen in lengths)]
        for dstate in sorted({workload.dstate for workload in grid})
    ]
    return Table(("dstate", *(f"{seqlen:,} tokens" for seqlen in lengths)), rows, 1)


def _gain_of(results: Results, workload: str, implementation: str, peer: str) -> str:
    record = _best(results, workload) if implementation == "best" else results.find(workload, implementation)
    return _gain(record, results.find(workload, peer))


def _gain(record: Record | None, peer: Record | None) -> str:
    return NONE if record is None or peer is None else f"{three_digits(peer.time / record.time)}x"


def _time(record: Record | None) -> str:
    return NONE if record is None else seconds(record.time)


def _time_and_error(record: Record | None) -> str:
    return NONE if record is None else f"{seconds(record.time)} ({record.error_out:.1e})"


def whole_models(records: Sequence[Mapping[str, Any]]) -> Table:
    """One row per model and case of bench/transformers_models.py: times, and what the best of ours gains over others.

    Times are of CUDA graphs, with those of eager calls in brackets; gains are of whichever is shorter.
    """
    names = list(dict.fromkeys(str(record["implementation"]) for record in records))
    ours, others = [name for name in names if name not in PEERS], [name for name in names if name in PEERS]
    cases: dict[tuple[str, str], dict[str, Mapping[str, Any]]] = {}
    for record in records:
        case = f"{record['what']}, {record['batch']} x {record['seqlen']:,}"
        cases.setdefault((record["model"], case), {})[record["implementation"]] = record
    rows: list[list[str]] = []
    for (model, case), found in cases.items():
        least = {name: _least_time(found.get(name)) for name in names}
        best = min((least[name] for name in ours), default=float("inf"))
        gains = [
            f"{three_digits(least[name] / best)}x" if least[name] + best < float("inf") else NONE for name in others
        ]
        rows.append([model, case, *(_whole_time(found.get(name)) for name in names), *gains])
    return Table(("model", "rows x tokens", *names, *(f"over {name}" for name in others)), rows, 2)


def _least_time(record: Mapping[str, Any] | None) -> float:
    if record is None or record["failed"] is not None:
        return float("inf")
    return min((record[kind] for kind in ("graph", "eager") if record[kind] is not None), default=float("inf"))


def _whole_time(record: Mapping[str, Any] | None) -> str:
    if record is None or record["failed"] is not None:
        return NONE
    graph, eager = (None if record[kind] is None else f"{record[kind] * 1e3:.2f}" for kind in ("graph", "eager"))
    times = [*([graph] if graph else []), *([f"({eager})"] if eager else [])]
    return f"{' '.join(times)} ms" if times else NONE


def three_digits(value: float) -> str:
    """A number with three digits that count."""
    if value == 0:
        return "0"
    return f"{value:.0f}" if value >= 100 else f"{value:.1e}" if value < 1e-3 else f"{value:#.3g}"


def seconds(value: float) -> str:
    """A time in the unit that suits it: microseconds below 10 milliseconds."""
    if value >= 1:
        return f"{three_digits(value)} s"
    return f"{three_digits(value * 1e3)} ms" if value >= 1e-2 else f"{three_digits(value * 1e6)} us"


def percent(fraction: float) -> str:
    return f"{100 * fraction:.0f} %"


# Documents


def _in_document(table: Table) -> str:
    return f"\n{table.markdown()}\n" if table.rows else NONE


def machine_and_versions(about: Mapping[str, Any]) -> str:
    """The machine, date and versions in `Results.about`, in a line."""
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items() if version)
    return f"{about['machine']}, {about['date']}; {versions}"


def _run(results: Results) -> str:
    about, limits = results.about, results.limits
    return (
        f"{machine_and_versions(about)}. Copy bandwidth {limits.bytes_per_second / 1e12:.2f} TB/s, "
        f"matrix rate {limits.flops_per_second / 1e12:.0f} TFLOP/s. Command: `{about['command']}`."
    )


def _time_of(results: Results, workload: str, implementation: str) -> str:
    return _time(results.find(workload, implementation))


def _error_of(results: Results, workload: str, implementation: str) -> str:
    record = results.find(workload, implementation)
    return NONE if record is None else f"{record.error_out:.1e}"


def _whole_models(path: Path) -> str:
    try:
        return _in_document(whole_models(json.loads(path.read_text(encoding="utf-8"))["records"]))
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} holds no times of whole models: {type(error).__name__}: {error}") from None


KINDS: Mapping[str, Callable[..., str]] = MappingProxyType(
    {
        "times": lambda results, *names: _in_document(times(selected(results, names))),
        "speeds": lambda results, *names: _in_document(speeds(selected(results, names))),
        "targets": lambda results: _in_document(targets(results)),
        "host": lambda results, *names: _in_document(host(selected(results, names))),
        "details": lambda results, *names: _in_document(details(selected(results, names))),
        "first-calls": lambda results: _in_document(first_calls(results)),
        "gains": lambda results, *names: _in_document(gains(results, *names)),
        "run": _run,
        "time": _time_of,
        "gain": _gain_of,
        "error": _error_of,
    }
)


def updated(text: str, folder: Path) -> str:
    """A document in that folder with its figures made anew.

    Raises ValueError for a kind that does not exist, and for a figure that is not in the file.
    """

    def block(match: re.Match[str]) -> str:
        kind, file, *arguments = match["request"].split()
        if kind == "whole-models":
            content = _whole_models(folder / file)
        elif kind in KINDS:
            content = KINDS[kind](merged([load(folder / one) for one in file.split("+")]), *arguments)
        else:
            raise ValueError(f"there are no figures {kind!r}; there are {', '.join([*KINDS, 'whole-models'])}")
        if content == NONE:
            raise ValueError(f"{file} has no {kind} of {' '.join(arguments)}")
        return f"{match[1]}{content}{match[4]}"

    return _BLOCK.sub(block, text)


def bare_figures(text: str) -> list[str]:
    """Figures of speed in a document that come from no result file."""
    return _FIGURE.findall(_BLOCK.sub("", text))


def paths_of(stem: Path, picture: str) -> Sequence[Path]:
    """The two files of a picture."""
    base = stem.with_suffix("") if stem.suffix in (".png", ".svg") else stem
    return [base.with_name(f"{base.name}-{picture}{suffix}") for suffix in (".png", ".svg")]
