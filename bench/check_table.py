"""Prints what a run of the tests found, from pytest's --junit-xml files: errors by op, backend and dtype.

    python bench/check_table.py check.xml [memcheck.txt ... [control.txt ...]]

Files that end in .txt are compute-sanitizer's output; control.txt and memcheck-control.txt are that of
memcheck_control.py, without compute-sanitizer and under it. Exits with status 1 if anything failed. A report on cutile
is no failure if the control, whose result is right, gets the same; what ran after it was then not checked.
"""

import re
import sys
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

CONTROL, CONTROL_CHECKED = "control", "memcheck-control"
_REPORT = re.compile(
    r"^=+ ((?:Invalid|Misaligned|Out-of-range|Unspecified|Barrier|Stack|Device|Program hit).*)\n"
    r"(?:=+ +at .* in (\S+:\d+)\n)?",
    re.MULTILINE,
)


def main(paths: list[str]) -> int:
    rows: dict[tuple[str, ...], list[tuple[float, float, str]]] = defaultdict(list)
    outcomes: dict[str, int] = defaultdict(int)
    files = [Path(name) for name in paths]
    failures = check_memory({path.stem: path.read_text() for path in files if path.suffix == ".txt"})
    for path in files:
        if path.suffix == ".txt":
            continue
        for case in ElementTree.parse(path).getroot().iter("testcase"):
            name = f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"
            kinds = [child.tag for child in case if child.tag in ("failure", "error", "skipped")]
            outcomes[kinds[0] if kinds else "passed"] += 1
            if kinds and kinds[0] != "skipped":
                failures.append(name)
            found = {item.get("name", ""): item.get("value", "") for item in case.iter("property")}
            if "error" in found:
                key = tuple(found[column] for column in ("op", "backend", "dtype", "device"))
                rows[key].append((float(found["error"]), float(found["budget"]), name))
    print(f"{'op':24}{'backend':17}{'dtype':10}{'device':8}{'checks':>7}{'worst error':>13}{'of budget':>11}  where")
    for key, results in sorted(rows.items()):
        error, budget, name = max(results, key=lambda result: result[0] / result[1])
        where = name.partition("[")[2].rstrip("]")
        print(
            f"{key[0]:24}{key[1]:17}{key[2]:10}{key[3]:8}{len(results):7}{error:13.1e}{error / budget:11.2f}  {where}"
        )
    print(", ".join(f"{count} {kind}" for kind, count in sorted(outcomes.items())))
    for name in failures:
        print(f"FAILED {name}")
    return 1 if failures else 0


def check_memory(outputs: dict[str, str]) -> list[str]:
    """Prints a line for each output of compute-sanitizer, by name, and returns the names of those that failed."""
    control_is_right = "0 failed" in outputs.get(CONTROL, "")
    known = reports(outputs.get(CONTROL_CHECKED, "")) if control_is_right else {}
    failures: list[str] = []
    for name, output in outputs.items():
        found = reports(output)
        verdict = ""
        if name == CONTROL:
            failures += [] if control_is_right else [name]
        elif name == CONTROL_CHECKED:
            verdict = "; a kernel that only multiplies slices of an array" if found else ""
        elif "ERROR SUMMARY: 0 errors" not in output:
            if "cutile" in name and found and found.keys() <= known.keys():
                verdict = "; toolchain: the control gets the same report; what came after it was not checked"
            else:
                failures.append(name)
        print(f"{name}: {'; '.join(summary(output)) or 'no summary'}{verdict}")
        for kind, places in sorted(found.items()):
            print(f"    {kind}: {', '.join(sorted(places))}")
    return failures


def summary(output: str) -> Sequence[str]:
    """The lines that count: compute-sanitizer's errors, pytest's and the control's cases."""
    return [line.strip("= ") for line in output.splitlines() if re.search(r"ERROR SUMMARY: \d+ error|\d passed", line)]


def reports(output: str) -> dict[str, set[str]]:
    """Each kind of access that compute-sanitizer reports, with the lines of source."""
    found: dict[str, set[str]] = defaultdict(set)
    for kind, place in _REPORT.findall(output):
        found[kind].add(place or "no line of source")
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
