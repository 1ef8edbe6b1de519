"""Prints what a run of the tests found, from pytest's --junit-xml files: errors by op, backend and dtype.

    python bench/check_table.py check.xml [memcheck.txt ...]

Files that end in .txt are compute-sanitizer's output. Exits with status 1 if anything failed.
"""

import sys
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from pathlib import Path


def main(paths: list[str]) -> int:
    rows: dict[tuple[str, ...], list[tuple[float, float, str]]] = defaultdict(list)
    outcomes: dict[str, int] = defaultdict(int)
    failures: list[str] = []
    for path in (Path(name) for name in paths):
        if path.suffix == ".txt":
            summary = [line for line in path.read_text().splitlines() if "ERROR SUMMARY" in line or " passed" in line]
            print(f"{path.stem}: {'; '.join(line.strip('= ') for line in summary) or 'no summary'}")
            if not any("ERROR SUMMARY: 0 errors" in line for line in summary):
                failures.append(path.stem)
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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
