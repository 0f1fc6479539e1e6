"""A run directory that the version before rendered, whose job is two shell scripts, trains on under this version.

tests/data/runs/two_scripts.tar.xz was rendered by the code of 30 November 2026, before its scripts became programs:
recipes/quickstart.yaml with a tiny model, 400 steps and checkpoints in /path/of/home, without bytecode in node.pyz.
"""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

import pytest

from support.command_line import CommandLine
from support.node_rig import until

RENDERED = Path(__file__).resolve().parents[1] / "data" / "runs" / "two_scripts.tar.xz"

# In place of its trainer, which needs torch: it goes on from its last step, and saves when it is told to end.
TRAINER = """
import os, signal, sys, time, zipfile
from pathlib import Path
saved, told = Path(sys.argv[sys.argv.index("--save") + 1]), []
for number in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, lambda *_: told.append(1))
saved.mkdir(exist_ok=True)
latest, rank = saved / "latest", int(os.environ["RANK"])
step = int(latest.read_text().rpartition("-")[2]) if latest.exists() else 0
seconds = 0 if step else 0.1
while step < 400 and not told:
    step += 1
    time.sleep(seconds)
    if rank == 0:
        print(f"step {step}/400 | loss {9 / step:.4f} | 0.20 s/step | 1000 tokens/s", flush=True)
    if rank == 0 and (told or step % 40 == 0):
        (saved / f"step-{step}").mkdir()
        with zipfile.ZipFile(saved / f"step-{step}" / "mp_rank_00_model_states.pt", "w") as states:
            states.writestr("archive/data.pkl", b"")
        latest.write_text(f"step-{step}")
"""

pytestmark = pytest.mark.frameworks


@pytest.fixture
def run(tmp_path: Path) -> Path:
    directory = tmp_path / "run"
    with tarfile.open(RENDERED) as archive:
        archive.extractall(directory)
    (directory / "trainer" / "train.py").write_text(TRAINER)
    for name in ("run.json", "arguments.json", "train.sh"):
        path = directory / name
        path.write_text(path.read_text().replace("/path/of/home", str(tmp_path)))
    return directory


def status_of(run: Path) -> dict[str, Any]:
    status: dict[str, Any] = json.loads((run / "status.json").read_text())
    return status


def test_an_old_run_is_started_cancelled_resumed_reported_and_collected(
    run: Path, tmp_path: Path, llmlaunch: CommandLine
) -> None:
    llmlaunch("resume", run, "--local")
    until(lambda: (tmp_path / "checkpoints" / "latest").exists(), "it has saved")
    llmlaunch("cancel", run)
    until(lambda: (run / "status.json").exists(), "its job has ended")
    assert "llmlaunch resume" in llmlaunch("status", run, code=(0, 1, 3)).stdout
    llmlaunch("resume", run, "--local")
    until(lambda: status_of(run)["step"] == 400, "it has trained to its end")
    status = status_of(run)
    assert (status["state"], [rank["exit_code"] for rank in status["ranks"]]) == ("succeeded", [0, 0])
    assert "2 attempts" in llmlaunch("report", run).stdout
    llmlaunch("collect", run)
    records = llmlaunch.json("measurements", "list")["measurements"]
    assert {record.get("global_rank") for record in records} >= {0, 1}
