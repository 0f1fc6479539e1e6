"""What `make soak` found, as benchmarks/SOAK.md: how often each fault was tried, whether every peak survived, and the
goodput of a simulated week.

Reads the files that `pytest --junitxml` wrote, and those of `benchmarks/week --json`: the first is the one that is
stated, others are shown beside it. Where only one kind is given, the part of the other stays as it was.

    python benchmarks/soak.py [JUNIT_XML...] [WEEK_JSON...] MARKDOWN
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("nvidia-ml-py", "torch", "sqlalchemy", "psycopg", "pytest")
PROGRAMS = (("slurmctld", "-V"), ("/usr/lib/postgresql/*/bin/postgres", "--version"))
REPEATS = 20  # of `make soak`
HEAD = """\
# Faults, tried again and again

Written by `make soak` (`benchmarks/soak.py`). Each row is a test of the marker `faults`, and how often it was tried. In
those named `chain` and `power`, a judge that shares no code with llmlaunch's readers compared what was on disk at the
moment of the fault with what `llmlaunch measurements export` wrote after `llmlaunch collect`. Seconds are those pytest
waited for: the runs of `test_kill` are begun side by side.
"""


WEEK = "## A week on 128 nodes"
WEEK_TEXT = ROOT / "benchmarks/week/soak.md"


@dataclass
class Row:
    tried: int = 0
    failed: int = 0
    seconds: float = 0.0


def rows(paths: Iterable[Path]) -> tuple[str, dict[tuple[str, str], Row]]:
    """When pytest began, and what became of each test, its repeats together."""
    found: dict[tuple[str, str], Row] = defaultdict(Row)
    began = []
    for suite in (suite for path in paths for suite in ElementTree.parse(path).getroot().iter("testsuite")):
        began.append(suite.get("timestamp", "")[:16].replace("T", " "))
        for case in (case for case in suite.iter("testcase") if case.get("name")):  # else what broke it off
            name = re.sub(r"-?repeat\d+-?", "", case.get("name", "")).replace("[]", "")
            row = found[case.get("classname", "").removeprefix("tests."), name]
            row.tried += 1
            row.failed += any(case.find(word) is not None for word in ("failure", "error", "skipped"))
            row.seconds += float(case.get("time", 0))
    return min(began), found


def machine() -> Iterable[str]:
    yield f"{platform.system()} {platform.release()}, {os.cpu_count()} cores, {_memory_gib():.0f} GiB"
    yield "by root" if os.getuid() == 0 else "by a normal user"
    yield f"Python {platform.python_version()}"
    for name in PACKAGES:
        try:
            yield f"{name} {version(name)}"
        except PackageNotFoundError:
            yield f"no {name}"
    for pattern, word in PROGRAMS:
        program = str(next(iter(sorted(Path("/").glob(pattern.lstrip("/")))), "")) if "/" in pattern else pattern
        try:
            yield subprocess.run([program, word], capture_output=True, text=True, check=True).stdout.strip()
        except OSError:
            yield f"no {pattern}"
    yield "llmlaunch at commit " + _git("rev-parse", "--short", "HEAD")


def _memory_gib() -> float:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30


def _git(*words: str) -> str:
    return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=False).stdout.strip()


def markdown(paths: Iterable[Path]) -> str:
    began, found = rows(paths)
    total = Row(*(sum(getattr(row, name) for row in found.values()) for name in ("tried", "failed", "seconds")))
    lines = [HEAD, f"Begun {began}. " + "; ".join(machine()) + ".", ""]
    if min(row.tried for row in found.values()) < REPEATS:
        lines += [f"Broken off before each test was tried {REPEATS} times.", ""]
    lines += ["| test | | tried | failed | seconds |", "|---|---|---|---|---|"]
    for (module, name), row in sorted(found.items()):
        lines.append(f"| {module} | {name} | {row.tried} | {row.failed} | {row.seconds:.0f} |")
    lines.append(f"| **all** | | **{total.tried}** | **{total.failed}** | **{total.seconds:.0f}** |")
    return "\n".join(lines) + "\n"


def week_markdown(paths: Iterable[Path]) -> str:
    first, *others = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    facts = {
        **first,
        "heading": WEEK,
        "percent": 100.0 * first["goodput"],
        "queue_hours": first["queue_seconds"] / 3600,
        "gpu_hours": first["gpu_hours_between_stops"],
        "half_interval": first["nodes"] * 8 * first["save_minutes"] / 120 / first["gpu_hours_between_stops"],
        "pause_share": first["pause_seconds"] / 60 / (first["non_persistent_minutes"] or first["save_minutes"]),
        "spare_share": first["spare_nodes"] / (first["nodes"] + first["spare_nodes"]),
    }
    lines = [
        WEEK_TEXT.read_text(encoding="utf-8").format(**facts),
        "| stop | how often | steps lost at most | lost steps | hours of them |",
        "|---|---|---|---|---|",
    ]
    for kind, count in sorted(first["stops"].items(), key=lambda item: -item[1]):
        lost = [stop["lost_steps"] for stop in first["each_stop"] if stop["kind"] == kind]
        hours = sum(lost) * first["step_seconds"] / 3600
        lines.append(f"| {kind} | {count} | {max(lost)} | {sum(lost)} | {hours:.1f} |")
    lines += ["", *_checked(first), ""]
    runs = [first, *others]
    lines += [
        "| seed | a checkpoint that stays every | another every | stops | goodput | own account |",
        "|---|---|---|---|---|---|",
    ]
    for run in runs:
        stops = sum(run["stops"].values())
        shares = f"{run['goodput']:.1%} | {run['own_goodput']:.1%}"
        often = run["non_persistent_minutes"]
        between = f"{often:g} minutes" if often else "none"
        lines.append(f"| {run['seed']} | {run['save_minutes']:g} minutes | {between} | {stops} | {shares} |")
    command = f"python benchmarks/week --seed {first['seed']}"
    lines += ["", f"Again: `{command}`. " + "; ".join(first["at"]) + "."]
    return "\n".join(lines) + "\n"


def _checked(week: dict[str, Any]) -> list[str]:
    """What held after every event, or what did not."""
    held = [f"- Broken: {violation}" for violation in week["violations"]]
    return ["", *held] if held else ["All of it held."]


def main(words: list[str]) -> int:
    *sources, target = map(Path, words)
    weeks = [path for path in sources if path.suffix == ".json"]
    tests = [path for path in sources if path not in weeks]
    old = target.read_text(encoding="utf-8") if target.exists() else ""
    before, _, week = old.partition(WEEK)
    faults = markdown(tests) if tests else before.rstrip() + "\n"
    week = week_markdown(weeks) if weeks else WEEK + week if week else ""
    target.write_text(f"{faults}\n{week}" if week else faults, encoding="utf-8")
    print(target)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
