"""What a person reads at 2 a.m.: what happened, how far it came, what follows, what to type."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from llmlaunch.node.notices import end_text, first_step_text, slow_text, stall_text, start_text
from llmlaunch.node.restart_policy import Next
from llmlaunch.rundir.slow_devices import SlowDevice
from support.node_rig import NodeRig, until
from support.webhook import webhook

RUN = Path("/runs/a b")
BEGAN: dict[str, Any] = {"nodes": ["n1", "n2", "n3", "n4", "n5"], "from_step": 0, "note": ""}
FAILED = {"state": "failed", "why": "rank 1 on node n2 was ended by SIGKILL", "saved_step": 1000}
KILLED = "failed: rank 1 on node n2 was ended by SIGKILL. Step 1,200 of 4,000, goodput 87 %."


@pytest.mark.parametrize(
    ("changes", "earlier", "text"),
    [
        ({}, None, "training starts on 5 nodes (n1, n2, n3, n4, ...)."),
        ({"nodes": ["n1"], "from_step": 1000, "note": "continuing from step 1000, the one before it"},
         {"state": "failed"},
         "training starts again on 1 node (n1) after step 1,000 of 4,000. continuing from step 1000, the one before "
         "it."),
        ({"nodes": ["n1"]}, {},
         "training starts again on 1 node (n1). The attempt before it left no word of its end: the node of its "
         "batch script was lost, or SLURM ended it."),
    ],
)  # fmt: skip
def test_a_start(changes: dict[str, Any], earlier: dict[str, Any] | None, text: str) -> None:
    assert start_text({**BEGAN, **changes}, 4000, earlier) == text


def test_the_first_step_and_one_of_which_little_is_known() -> None:
    progress = {"step": 1001, "steps": 4000, "loss": 2.3125, "step_seconds": 1.2345}
    assert first_step_text(progress) == "first step: 1,001 of 4,000, loss 2.3125, 1.23 s a step."
    assert first_step_text(dict.fromkeys(progress)) == "first step: ?."


def test_a_stall() -> None:
    hung = {"what": "a step", "since_seconds": 700.2, "allowed_seconds": 600.0, "where": "no answer from rank 4 on n2"}
    assert stall_text(hung, {"step": 12, "steps": None}) == (
        "training hangs after step 12: no sign of a step for 700 s (limit 600 s). It is ended. No "
        "answer from rank 4 on n2."
    )


def test_slow_devices() -> None:
    devices = [SlowDevice("n1", number, "GPU-1", 1.84, 0.0, ("SM clock 900 of 1980 MHz",)) for number in range(6)]
    slower = "is 1.8 times slower than its peers (SM clock 900 of 1980 MHz)"
    names = "; ".join(f"GPU {number} of n1 {slower}" for number in range(4))
    assert slow_text(devices) == f"slow: {names}; and 2 more."


@pytest.mark.parametrize(
    ("status", "follows", "text"),
    [
        ({"state": "succeeded", "why": "all done"}, Next("end", "done"),
         "succeeded: all done. Step 1,200 of 4,000, goodput 87 %. Type: llmlaunch report '/runs/a b'"),
        (FAILED, Next("end", "a restart would end in oom again"),
         f"{KILLED} Nothing follows: a restart would end in oom again. Type: llmlaunch status '/runs/a b'"),
        (FAILED, Next("requeue", "continues from the last checkpoint", seconds=60),
         f"{KILLED} The job goes back into the queue after step 1,000, in 60 s at the earliest (continues from the "
         "last checkpoint). Type: llmlaunch status '/runs/a b'"),
    ],
)  # fmt: skip
def test_an_end(status: dict[str, Any], follows: Next, text: str) -> None:
    assert end_text(RUN, status, {"step": 1200, "steps": 4000}, follows, 0.874) == text


def test_what_follows_is_told_as_a_restart_only_where_slurm_can_start_it(
    cpu_node: NodeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    restart = {"by": "requeue", "times": 3, "fruitless": 3, "backoff_seconds": 60}
    cpu_node.write(
        "run.json", {"restart": restart, "notify": {"webhook": "CHANNEL", "command": [], "events": ["restart"]}}
    )
    cpu_node.write_attempt("progress.json", {"step": 7, "steps": 9})
    with webhook() as receiver:
        monkeypatch.setenv("CHANNEL", receiver.address)
        monkeypatch.delenv("SLURM_JOB_ID", raising=False)
        cpu_node.finish(1, 1)
        monkeypatch.setenv("SLURM_JOB_ID", "4711")
        cpu_node.finish(1, 1)
        until(lambda: receiver.texts, "the notice")
        (text,) = receiver.texts
    assert "Step 7 of 9. The job goes back into the queue, in 60 s at the earliest" in text
