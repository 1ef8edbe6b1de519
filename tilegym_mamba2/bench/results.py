"""Results as they are stored: records, what was measured once per run, and on what."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from tilegym_mamba2.bench.fresh import FirstCall
from tilegym_mamba2.bench.measure import Record
from tilegym_mamba2.bench.timing import Limits
from tilegym_mamba2.bench.workloads import Workload

_FORMAT = 1
_LEAST_CHANGE = 0.03  # of a time; what two runs of the same code on one machine may differ by anyway


@dataclass
class Results:
    """One run.

    Attributes:
        about: the command, date, revision, machine and versions.
        spent: seconds that measuring took, by workload or step.
    """

    about: dict[str, Any]
    limits: Limits
    records: list[Record] = field(default_factory=list[Record])
    first_calls: list[FirstCall] = field(default_factory=list[FirstCall])
    spent: dict[str, dict[str, float]] = field(default_factory=dict[str, dict[str, float]])

    @property
    def machine(self) -> str:
        return str(self.about["machine"])

    def implementations(self) -> list[str]:
        """Names of those that were measured at least once, in order."""
        return list(dict.fromkeys(record.implementation for record in self.records if record.failed is None))

    def workloads(self) -> list[Workload]:
        return list(dict.fromkeys(record.workload for record in self.records))

    def find(self, workload: str, implementation: str) -> Record | None:
        """The record of an implementation that was measured on a workload, or None."""
        for record in self.records:
            if (record.workload.name, record.implementation, record.failed) == (workload, implementation, None):
                return record
        return None

    def digest(self) -> str:
        """A short hash of what pictures show, which tells a picture from one of other records."""
        shown = [
            (asdict(record.workload), record.implementation, record.failed, record.time, record.limit)
            for record in self.records
        ]
        content = json.dumps(shown, sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()[:16]

    def as_dict(self) -> dict[str, Any]:
        return {
            "format": _FORMAT,
            "about": self.about,
            "limits": asdict(self.limits),
            "first_calls": [asdict(call) for call in self.first_calls],
            "spent": self.spent,
            "records": [record.as_dict() for record in self.records],
        }


def save(results: Results, path: Path) -> None:
    """Writes a file of results; one that is there stays whole until the new one is."""
    unfinished = path.with_name(path.name + ".part")
    unfinished.write_text(json.dumps(results.as_dict(), indent=1, allow_nan=False) + "\n", encoding="utf-8")
    unfinished.replace(path)


def load(path: Path) -> Results:
    """Reads a file of results. Raises ValueError if it is not one."""
    try:
        content: Any = json.loads(path.read_text(encoding="utf-8"))
        if content["format"] != _FORMAT:
            raise ValueError(f"{path} has format {content['format']}, this version reads {_FORMAT}")
        return Results(
            content["about"],
            Limits(**content["limits"]),
            [_record(record) for record in content["records"]],
            [FirstCall(**call) for call in content["first_calls"]],
            content.get("spent", {}),
        )
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} holds no results: {type(error).__name__}: {error}") from None


def _record(content: dict[str, Any]) -> Record:
    known = {field.name for field in fields(Record)}
    values = {name: value for name, value in content.items() if name in known}
    sizes: dict[str, Any] = values["workload"]
    sizes["lengths"] = tuple(sizes["lengths"])
    values["workload"] = Workload(**sizes)
    values["passes"] = tuple(values["passes"])
    return Record(**values)


def merged(several: Sequence[Results]) -> Results:
    """The records of several runs on one machine. Raises ValueError if they are of different machines."""
    first, *others = several
    for other in others:
        if other.machine != first.machine:
            raise ValueError(f"results of {first.machine} and of {other.machine} can't be put together")
    return Results(
        first.about,
        first.limits,
        [record for results in several for record in results.records],
        [call for results in several for call in results.first_calls],
    )


@dataclass(frozen=True)
class Change:
    """How a time changed between two runs: `ratio` is new over old, `allowed` what noise may explain."""

    workload: str
    implementation: str
    old: float
    new: float
    allowed: float

    @property
    def ratio(self) -> float:
        return self.new / self.old

    @property
    def slower(self) -> bool:
        return self.ratio > 1 + self.allowed

    @property
    def faster(self) -> bool:
        return self.ratio < 1 / (1 + self.allowed)


def compare(old: Results, new: Results) -> list[Change]:
    """The changes of everything that both runs measured. Raises ValueError if they ran on different machines."""
    if old.machine != new.machine:
        raise ValueError(f"times on {old.machine} and on {new.machine} can't be compared")
    changes: list[Change] = []
    for record in new.records:
        before = old.find(record.workload.name, record.implementation)
        if record.failed is None and before is not None and before.workload == record.workload:
            allowed = _LEAST_CHANGE + before.noise + record.noise
            changes.append(Change(record.workload.name, record.implementation, before.time, record.time, allowed))
    return changes
