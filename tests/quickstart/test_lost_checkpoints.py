"""Real DeepSpeed training on this machine whose checkpoints are damaged or taken away between two jobs."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from test_quickstart import RECIPE, llmlaunch

from support.node_rig import until

TINY = (
    "model={num_layers: 2, hidden_size: 64, ffn_hidden_size: 160, num_attention_heads: 4, num_query_groups: 2, "
    "vocab_size: 256}",
    "training.sequence_length=64", "training.global_batch_size=8", "training.steps=12", "training.save_interval=4",
    "cluster=cpu-x1", "restart.within=queue",
)  # fmt: skip

pytestmark = pytest.mark.frameworks


class Job:
    """A run directory that was trained to its end once; each test begins with a copy of its checkpoints."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.run, self.checkpoints = folder, folder / "run", folder / "checkpoints"
        place = f"training.checkpoint_path={self.checkpoints}"
        python = f"python={sys.executable}"
        llmlaunch(folder, "submit", RECIPE, *TINY, place, python, "-o", self.run, "--local", "--follow")
        shutil.copytree(self.checkpoints, folder / "whole")

    def again(self, *options: str) -> tuple[str, dict[str, Any], str]:
        """Resumed and followed to its end: what was said, the state, and the new attempt's logs."""
        before, earlier = set(self.run.glob("logs/*")), self.status()["attempt"]
        llmlaunch(self.folder, "resume", self.run, "--anyway", "--local", *options)
        until(lambda: self.status()["attempt"] != earlier, "the job has ended")
        said = llmlaunch(self.folder, "status", self.run, code=None)
        logs = [path.read_text() for path in self.run.glob("logs/*") if path not in before]
        return said.stdout, self.status(), "\n".join(logs)

    def status(self) -> dict[str, Any]:
        status: dict[str, Any] = json.loads((self.run / "status.json").read_text())
        return status

    def restore(self) -> None:
        shutil.rmtree(self.checkpoints, ignore_errors=True)
        shutil.copytree(self.folder / "whole", self.checkpoints)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Job:
    return Job(tmp_path_factory.mktemp("lost"))


def test_a_last_checkpoint_cut_short_is_left_for_the_one_before(trained: Job) -> None:
    trained.restore()
    torn = next((trained.checkpoints / "step-12").glob("*model_states.pt"))
    torn.write_bytes(torn.read_bytes()[: torn.stat().st_size // 2])
    _, status, log = trained.again()
    assert f"step-12/{torn.name} is cut short; continuing from step 8, the one before it" in log
    assert "resumed after step 8" in log
    assert re.findall(r"^\[rank\d+\]: step (\d+)/", log, re.MULTILINE) == ["9", "10", "11", "12"]
    assert status["state"] == "succeeded"


def test_checkpoints_that_vanished_end_the_job_before_it_trains(trained: Job) -> None:
    trained.restore()
    shutil.rmtree(trained.checkpoints)
    said, status, log = trained.again()
    assert (status["state"], status["cause"]["kind"]) == ("failed", "checkpoint")
    assert f"{trained.checkpoints}/latest names no checkpoint" in said
    assert "had saved step 12" in said
    assert not re.search(r"^\[rank\d+\]: step \d+/", log, re.MULTILINE)

    _, status, log = trained.again("--from-older")
    assert status["state"] == "succeeded"
    assert re.findall(r"^\[rank\d+\]: step (\d+)/", log, re.MULTILINE)[0] == "1"


def test_checkpoints_that_look_whole_and_do_not_load_are_left_one_by_one(trained: Job) -> None:
    trained.restore()
    for step in (12, 8):
        spoilt = next((trained.checkpoints / f"step-{step}").glob("*model_states.pt"))
        content = spoilt.read_bytes()
        spoilt.write_bytes(content[:64] + bytes(len(content) // 2) + content[64 + len(content) // 2 :])
    for step in (12, 8):
        said, status, _ = trained.again()
        assert (status["state"], status["cause"]["kind"], status["tracker_step"]) == ("failed", "checkpoint", step)
    assert "began before the damaged checkpoint of step 12" in said
    _, status, log = trained.again()
    assert status["state"] == "succeeded"
    assert re.findall(r"^\[rank\d+\]: step (\d+)/", log, re.MULTILINE)[0] == "5"
