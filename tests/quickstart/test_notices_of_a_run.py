"""A run on this machine that tells a webhook what becomes of it: job.sbatch and node.pyz are real, the trainer is
a few lines."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from test_quickstart import RECIPE, folders

from support.command_line import run_llmlaunch
from support.node_rig import until
from support.webhook import SECRET, Webhook, webhook

TRAINER = """\
import os, time
print("knows", os.environ.get("TRAINING_CHANNEL"), flush=True)
if os.environ["RANK"] == "0":
    for step in range(1, 9):
        print(f"step {step}/8 | loss {9 - step} | 0.50 s/step | 1000 tokens/s", flush=True)
        time.sleep(0.5)
        if step == 6:
            time.sleep(600)
"""

pytestmark = pytest.mark.frameworks


def test_a_hanging_run_notifies_a_command_and_a_hanging_webhook(tmp_path: Path) -> None:
    """Nobody waits for the webhook's answers: the run has its verdict while not one has come."""
    trainer = tmp_path / "trainer.py"
    trainer.write_text(TRAINER)
    recipe = (
        f"backend={{name: deepspeed, script: {trainer}}}",
        "notify={webhook: TRAINING_CHANNEL, command: [sh, -c, 'cat >> heard']}",
        "training.steps=8",
        f"python={sys.executable}",
        "watchdog={floor_seconds: 2, first_step_seconds: 2}",
    )
    with webhook() as receiver:
        receiver.hold()
        variables = {"TRAINING_CHANNEL": receiver.address, "no_proxy": "*", **folders(tmp_path)}
        submit = ("submit", RECIPE, *recipe, "--local", "-o", "run")
        dry = run_llmlaunch(tmp_path, *submit, "--dry-run", timeout=300, **variables)
        assert re.search(r"notices to +127\.0\.0\.1 \(\$TRAINING_CHANNEL\) and the command sh: all", dry.stdout)
        said = run_llmlaunch(tmp_path, *submit, "--follow", "--json", code=None, timeout=300, **variables)
        assert SECRET not in dry.stdout + said.stdout + said.stderr
        submission = json.loads(said.stdout)  # alone on stdout, also while following
        run = tmp_path / "run"
        status = json.loads((run / "status.json").read_text())
        assert (submission["launcher"], submission["run_dir"]) == ("local", str(run))
        assert (status["state"], status["cause"]["kind"]) == ("failed", "hung")
        assert not receiver.released.is_set()
        start, first, stall, end = told(run, receiver, 4)
    assert start == "training starts on 1 node."
    assert re.fullmatch(r"first step: [1-8] of 8, loss [\d.]+, 0\.5 s a step\.", first)
    assert stall.startswith("training hangs after step 6 of 8: no sign of a step for ")
    assert re.fullmatch(r"failed: .* Step 6 of 8, goodput 0 %\. .* Type: llmlaunch status RUN", end)
    until(lambda: (run / "heard").read_text().count('"event"') == 4, "the command to have heard the same")
    assert "knows None" in "".join(path.read_text() for path in run.glob("logs/*"))  # not the trainers' affair
    assert not any(SECRET.encode() in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())


def told(run: Path, receiver: Webhook, count: int) -> list[str]:
    """The notices in the order they were sent, without the name of the run and its folder."""
    until(lambda: len(receiver.texts) >= count, f"{count} notices")
    texts = [text.partition("): ")[2].replace(str(run), "RUN") for text in receiver.texts]
    return [re.sub(r" on 1 node \(\S+\)", " on 1 node", text) for text in texts]
