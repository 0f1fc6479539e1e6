"""benchmarks/gpu/trace_against_gpu.py asks for both rehearsals and compares them, with a stand-in for llmlaunch."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = ROOT / "benchmarks" / "gpu" / "trace_against_gpu.py"
STAND_IN = """
import json, os, sys
assert not os.path.exists(os.environ["LLMLAUNCH_STORE"])
place = sys.argv[sys.argv.index("--on") + 1]
held = {"trace": (97, None), "gpu": (100, 120)}[place]
rank = {"pipeline_rank": 3, "allocated_bytes": held[0], "reserved_bytes": held[1]}
print(json.dumps({"layout": {"tensor": int(WIDE) if place == "gpu" else 2}, "ranks": [rank]}))
sys.exit(3)  # unsafe, which is an answer
"""


def run(tmp_path: Path, wide: int) -> subprocess.CompletedProcess[str]:
    stand_in = tmp_path / "stand_in.py"
    stand_in.write_text(STAND_IN.replace("WIDE", str(wide)))
    command = f"{shlex.quote(sys.executable)} {shlex.quote(str(stand_in))}"
    words = [str(PROGRAM), str(tmp_path / "records"), "mine.yaml", "layout.tensor=2", "--command", command]
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False)


def test_both_are_compared_rank_by_rank(tmp_path: Path) -> None:
    done = run(tmp_path, wide=2)
    assert done.returncode == 0, done.stderr
    (path,) = (tmp_path / "records").glob("trace_against_gpu-mine-*.json")
    rows: list[dict[str, Any]] = json.loads(path.read_text())["rows"]
    assert [(row["rank"], row["kind"], row["trace"], row["gpu"]) for row in rows] == [
        (3, "allocated_bytes", 97, 100),
        (3, "reserved_bytes", None, 120),
    ]
    assert "at most 3.00 % apart" in done.stdout


def test_two_layouts_are_not_compared(tmp_path: Path) -> None:
    done = run(tmp_path, wide=4)
    assert done.returncode != 0
    assert "different layouts" in done.stderr
