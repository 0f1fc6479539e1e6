"""The programs of benchmarks/gpu run through and write their records: allocator_replay.py with the model in the place
of torch, trace_against_gpu.py with a stand-in for llmlaunch. What a GPU would say is not known from here."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from llmlaunch.units import GIB

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "benchmarks" / "gpu"
sys.path.insert(0, str(FOLDER))

from allocation_events import made_up, read_events, write_events  # noqa: E402

STAND_IN = """
import json, os, sys
assert not os.path.exists(os.environ["LLMLAUNCH_STORE"])
place = sys.argv[sys.argv.index("--on") + 1]
held = {"trace": (97, None), "gpu": (100, 120)}[place]
rank = {"pipeline_rank": 3, "allocated_bytes": held[0], "reserved_bytes": held[1]}
print(json.dumps({"layout": {"tensor": int(WIDE) if place == "gpu" else 2}, "ranks": [rank]}))
sys.exit(3)  # unsafe, which is an answer
"""


def run(program: str, *words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(FOLDER / program), *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_file_of_events_holds_them_in_order(tmp_path: Path) -> None:
    events = list(made_up(seed=3, count=500))
    write_events(tmp_path / "events.xz", events)
    assert list(read_events(tmp_path / "events.xz")) == events


@pytest.mark.parametrize("seed", range(4))
def test_made_up_events_let_go_of_all_they_make_and_stay_within_bounds(seed: int) -> None:
    live: dict[int, int] = {}
    for key, size in made_up(seed, count=2000, most_bytes=4 * GIB):
        if size:
            assert key not in live
            live[key] = size
        else:
            del live[key]
        assert sum(live.values()) <= 4 * GIB + 512 * len(live)
    assert live == {}


def test_events_of_traced_ranks_let_go_of_nothing_twice() -> None:
    for path in (FOLDER / "events").glob("*.xz"):
        live: set[int] = set()
        for key, size in read_events(path):
            (live.add if size else live.remove)(key)


def test_the_program_compares_both_settings_and_a_device_that_is_too_small(tmp_path: Path) -> None:
    write_events(tmp_path / "events.xz", made_up(seed=0, count=400))
    words = (tmp_path / "records", tmp_path / "events.xz", "--made-up", "1", "--stand-in")
    done = run("allocator_replay.py", *words)
    assert done.returncode == 0, done.stderr
    (path,) = (tmp_path / "records").glob("*.json")
    assert str(path) in done.stdout
    record = json.loads(path.read_text())
    assert record["gpu"] == "stand-in"  # nobody takes it for a GPU's
    rows = [row for part in record["parts"].values() for row in part["result"]]
    whole, bounded = ([r for r in rows if (r["device_bytes"] is None) is free] for free in (True, False))
    assert [(row["events"], row["setting"]) for row in whole] == [
        (name, setting) for name in ("events.xz", "made-up-0") for setting in ("default", "expandable")
    ]
    assert all(row["reserved_ratio"] == 1.0 and row["largest_difference_bytes"] == 0 for row in rows)
    assert len(bounded) == 2
    assert all(row["torch"]["retries"] > 0 or row["torch"]["ran_out"] for row in bounded)
    assert all(row["torch"]["reserved_bytes"] >= row["torch"]["allocated_bytes"] > 0 for row in whole)
    assert all(row["looks"] >= 400 for row in whole)


def compare(tmp_path: Path, wide: int) -> subprocess.CompletedProcess[str]:
    stand_in = tmp_path / "stand_in.py"
    stand_in.write_text(STAND_IN.replace("WIDE", str(wide)))
    command = f"{shlex.quote(sys.executable)} {shlex.quote(str(stand_in))}"
    return run("trace_against_gpu.py", tmp_path / "records", "mine.yaml", "layout.tensor=2", "--command", command)


def test_both_are_compared_rank_by_rank(tmp_path: Path) -> None:
    done = compare(tmp_path, wide=2)
    assert done.returncode == 0, done.stderr
    (path,) = (tmp_path / "records").glob("trace_against_gpu-mine-*.json")
    rows: list[dict[str, Any]] = json.loads(path.read_text())["rows"]
    assert [(row["rank"], row["kind"], row["trace"], row["gpu"]) for row in rows] == [
        (3, "allocated_bytes", 97, 100),
        (3, "reserved_bytes", None, 120),
    ]
    assert "at most 3.00 % apart" in done.stdout


def test_two_layouts_are_not_compared(tmp_path: Path) -> None:
    done = compare(tmp_path, wide=4)
    assert done.returncode != 0
    assert "different layouts" in done.stderr
