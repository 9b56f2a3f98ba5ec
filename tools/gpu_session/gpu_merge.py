"""What the stages of `gpu_session.sh` have left: a JSON for each, and one that has them all.

    python tools/gpu_session/gpu_merge.py FOLDER  # all into one
    python tools/gpu_session/gpu_merge.py FOLDER --stage NAME --status 0 --seconds 9
    python tools/gpu_session/gpu_merge.py FOLDER --waiting NAME...  # which have no result yet

`stages/NAME.json` has the stage's exit status, seconds, last line of its log, machine (with date,
commit and versions), and result, which is read from the log and from `parts`. The one of all is the
benchmark's JSON with a "session":

    stages      name, exit status, seconds, last line of the log, of each
    facts       lines about the machine
    compile     what gpu_compile.py found
    tests       how many passed, failed, were skipped; the names of those that failed
    sanitizer   per tool its summary, and how many cases and comparisons it saw
    NAME        what any other stage has found

If there is no benchmark, it has only the session. Results of another commit or device are left out.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import gpu_report

Row = dict[str, Any]

CHECKS = ("sanitize", "memcheck", "racecheck", "initcheck")
COUNTS = re.compile(r"(?P<cases>\d+) of (?P<of>\d+) cases .* (?P<comparisons>\d+) comparisons, ")
WRONG = re.compile(r"comparisons, (\d+) wrong")
SUMMARY = re.compile(r"\w+ SUMMARY: .*")


def lines_of(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []


def tests_of(path: Path) -> Row:
    """Counts of a JUnit file, which pytest writes."""
    if not path.exists():
        return {}
    found, failures = Counter[str](), []
    try:
        cases = list(ElementTree.parse(path).iter("testcase"))
    except ElementTree.ParseError as error:  # a stage that was killed while it wrote
        return {"unreadable": str(error)}
    for case in cases:
        kinds = {child.tag for child in case} & {"failure", "error", "skipped"}
        kind = "skipped" if kinds == {"skipped"} else "failed" if kinds else "passed"
        found[kind] += 1
        if kind == "failed":
            failures.append(f"{case.get('classname')}::{case.get('name')}")
    counts = {kind: found[kind] for kind in ("passed", "failed", "skipped")}
    return counts | {"failures": failures}


def sanitizer_of(text: str) -> Row:
    counts, wrong, summary = COUNTS.search(text), WRONG.search(text), SUMMARY.findall(text)
    row: Row = {key: int(n) for key, n in counts.groupdict().items()} if counts else {}
    if wrong:
        row["wrong"] = int(wrong[1])
    if summary:
        row["summary"] = summary[-1]
    return row


def json_of(path: Path, otherwise: Any) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else otherwise
    except ValueError as error:  # a stage that was killed while it wrote
        print(f"{path}: can't be read, and is left out: {error}")
        return otherwise


def result_of(folder: Path, name: str) -> Any:
    """What a stage has found."""
    lines, parts = lines_of(folder / f"{name}.log"), folder / "parts"
    if name == "facts":
        return lines[1:]  # the first line is the command
    if name == "tests":
        return tests_of(parts / "tests.xml")
    if name in CHECKS:
        return sanitizer_of("\n".join(lines))
    found = json_of(parts / f"{name}.json", None)
    if name == "doctor" and found:  # its facts have paths of the machine
        return {"timing": found["facts"]["timing"], "findings": found["findings"]}
    return found


def write_stage(folder: Path, options: argparse.Namespace) -> None:
    """The JSON of a stage that has ended."""
    name, lines = options.stage, lines_of(folder / f"{options.stage}.log")
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    row = {"stage": name, "status": options.status, "seconds": options.seconds}
    row |= {"last": lines[-1] if lines else "", "again": options.again}
    machine = json_of(folder / "parts" / "machine.json", {}) | {"date": now}
    row |= {"machine": machine, "result": result_of(folder, name)}
    path = folder / "stages" / f"{name}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(gpu_report.as_lines(row), encoding="utf-8")


def stages_of(folder: Path) -> dict[str, Row]:
    """The results of this commit on this device, as they came."""
    machine = json_of(folder / "parts" / "machine.json", {})
    same = ("commit", "device")
    rows = [json_of(path, {}) for path in (folder / "stages").glob("*.json")]
    rows = [
        row for row in rows if row and all(row["machine"].get(k) == machine.get(k) for k in same)
    ]
    return {row["stage"]: row for row in sorted(rows, key=lambda row: row["machine"]["date"])}


def waiting(folder: Path, names: list[str]) -> list[str]:
    """The stages that are to run: without a result, or with one for which they had no time."""
    machine = json_of(folder / "parts" / "machine.json", {})
    done = {name for name, row in stages_of(folder).items() if not row["again"]}
    if machine.get("gpus", 1) < 2:
        done.add("replicas")
    return [name for name in names if name not in done]


def merged(folder: Path) -> Path:
    """The file that has all."""
    stages = stages_of(folder)
    results = {name: row["result"] for name, row in stages.items() if row["result"] is not None}
    keys = ("status", "seconds", "last")
    session: Row = {
        "stages": [{"name": name} | {k: row[k] for k in keys} for name, row in stages.items()]
    }
    session |= {"facts": [], "compile": {}, "tests": {}, "processes": []}
    session["sanitizer"] = {name: results.pop(name) for name in CHECKS if results.get(name)}
    benchmark = results.pop("benchmark", None)
    session |= results
    machine = json_of(folder / "parts" / "machine.json", {})
    date, commit = str(machine.get("date"))[:10], machine.get("commit")
    path = folder / f"gpu-{date}-no-benchmark-{commit}.json"
    if benchmark:
        path.unlink(missing_ok=True)  # of an earlier call
        path = folder / gpu_report.file_name(benchmark["machine"])
    whole = (benchmark or {}) | {"session": session}
    path.write_text(gpu_report.as_lines(whole), encoding="utf-8")
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--stage", help="write the JSON of this one")
    parser.add_argument("--status", type=int, default=0)
    parser.add_argument("--seconds", type=int, default=0)
    parser.add_argument("--again", action="store_true", help="its time was cut short")
    parser.add_argument("--waiting", nargs="+", help="print those that have no result yet")
    options = parser.parse_args()
    if options.stage:
        write_stage(options.folder, options)
    elif options.waiting:
        print(*waiting(options.folder, options.waiting))
    else:
        print(f"written: {merged(options.folder)}")


if __name__ == "__main__":
    main()
