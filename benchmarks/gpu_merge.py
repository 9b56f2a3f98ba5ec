"""Merges what the stages of `gpu_session.sh` have left into the benchmark's JSON, as "session".

    python benchmarks/gpu_merge.py FOLDER       # with the logs, and `parts` for the rest

    stages      name, exit status, seconds, last line of the log, of each
    facts       lines about the machine
    compile     what gpu_compile.py found
    tests       how many passed, failed, were skipped; the names of those that failed
    sanitizer   per tool its summary, and how many cases and comparisons it saw
    processes   what gpu_processes.py measured, or the sentence with which NCCL refused

If the benchmark has left no JSON, one is written that has only the session.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
from collections import Counter
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import gpu_report

Row = dict[str, Any]

CHECKS = ("sanitize", "memcheck", "racecheck", "initcheck")
COUNTS = re.compile(r"(?P<cases>\d+) of (?P<of>\d+) cases .* (?P<comparisons>\d+) comparisons, ")
WRONG = re.compile(r"comparisons, (\d+) wrong")
SUMMARY = re.compile(r"\w+ SUMMARY: .*")


def lines_of(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []


def stages_of(folder: Path) -> list[Row]:
    rows = [line.split("\t", 3) for line in lines_of(folder / "parts" / "stages.tsv")]
    keys = ("name", "status", "seconds", "last")
    whole = [row for row in rows if len(row) == len(keys)]  # the last one may be cut short
    found = [dict(zip(keys, row, strict=True)) for row in whole]
    return [row | {key: int(row[key]) for key in ("status", "seconds")} for row in found]


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


def sanitizer_of(folder: Path) -> Row:
    tools = {}
    for name in CHECKS:
        text = "\n".join(lines_of(folder / f"{name}.log"))
        counts, wrong, summary = COUNTS.search(text), WRONG.search(text), SUMMARY.findall(text)
        row: Row = {key: int(n) for key, n in counts.groupdict().items()} if counts else {}
        if wrong:
            row["wrong"] = int(wrong[1])
        if summary:
            row["summary"] = summary[-1]
        if row:
            tools[name] = row
    return tools


def json_of(path: Path, otherwise: Any) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else otherwise
    except ValueError as error:  # a stage that was killed while it wrote
        print(f"{path}: can't be read, and is left out: {error}")
        return otherwise


def merged(folder: Path) -> Path:
    """The file that has all."""
    parts = folder / "parts"
    session: Row = {
        "stages": stages_of(folder),
        "facts": lines_of(folder / "facts.log")[1:],  # the first line is the command
        "compile": json_of(parts / "compile.json", {}),
        "tests": tests_of(parts / "tests.xml"),
        "sanitizer": sanitizer_of(folder),
        "processes": json_of(parts / "processes.json", []),
    }
    told = [line for line in lines_of(folder / "benchmark.log") if line.startswith("written: ")]
    if told:
        path = Path(told[-1].removeprefix("written: "))
        results = json_of(path, {})
    else:
        date, commit = datetime.date.today(), os.environ.get("SYNCBN_COMMIT", "unknown")
        path, results = folder / f"gpu-{date}-no-benchmark-{commit}.json", {}
    path.write_text(gpu_report.as_lines(results | {"session": session}), encoding="utf-8")
    return path


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    print(f"written: {merged(parser.parse_args().folder)}")
