"""What status says of runs: one sentence for one, cells for many, and JSON whose keys stay."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from llmlaunch.errors import UserError
from llmlaunch.launchers.base import JobState, Submission
from llmlaunch.launchers.local import LocalLauncher
from llmlaunch.launchers.run_status import RunStatus, read_statuses
from llmlaunch.rundir.goodput import AttemptFacts, goodput
from llmlaunch.rundir.notices import undelivered_notices
from support.local_jobs import run_directory, wait_until


def look(state: JobState, progress: Mapping[str, Any] | None = None, **other: Any) -> RunStatus:
    submission = Submission("slurm", "12", Path("/runs/a"), 1.0, **other.pop("submission", {}))
    return RunStatus(
        submission, state, "12.0", progress or {}, other.pop("cause", {}), other.pop("stopping", False), **other
    )


def status_of(submission: Submission) -> RunStatus:
    (status,) = read_statuses([submission], lambda line: None)
    return status


def test_one_run_is_a_sentence() -> None:
    progress = {"step": 40, "steps": 100, "loss": 2.34567, "tokens_per_second": 123456.7}
    assert look(JobState("running", "RUNNING"), progress).sentence() == (
        "job 12 (slurm): running [RUNNING]; step 40 of 100, loss 2.346, 123,457 tokens/s"
    )
    cause = {"kind": "oom", "node": "n2", "rank": 3}
    failed = look(JobState("failed", "FAILED", "rank 3 exited with 1", 1), cause=cause)
    sentence = "job 12 (slurm): failed [FAILED] exit code 1 - rank 3 exited with 1; out of GPU memory on n2, rank 3"
    assert failed.sentence() == sentence


@pytest.mark.parametrize(("loss", "shown"), [("nan", "NaN since step 1,207"), ("inf", "infinite since step 1,207")])
def test_a_loss_that_is_no_number_is_said_with_the_step_it_began(loss: str, shown: str) -> None:
    not_finite = {"loss": loss, "since_step": 1207}
    progress = {"step": 1240, "steps": 5000, "loss": None, "not_finite": not_finite}
    running = look(JobState("running", "RUNNING"), progress)
    assert running.sentence() == f"job 12 (slurm): running [RUNNING]; step 1240 of 5000, loss {shown}"
    assert shown in running.cells()
    printed = json.loads(json.dumps(running.as_json(), allow_nan=False))
    assert (printed["progress"]["loss"], printed["progress"]["not_finite"]) == (None, not_finite)


def test_a_spike_of_the_loss_is_said_with_what_it_was_before() -> None:
    bad = {"kind": "spike", "since_step": 1207, "loss": 4.125, "usual": 2.25, "recovered_step": None}
    running = look(JobState("running"), {"step": 1240, "loss": 4.2, "bad_loss": bad})
    assert "running - loss: spike since step 1,207 (4.125, was 2.25); step 1240, loss 4.2" in running.sentence()
    over = look(JobState("running", "RUNNING"), {"step": 1240, "bad_loss": {**bad, "recovered_step": 1220}})
    assert "loss: spike since step 1,207 (4.125, was 2.25), over at step 1,220" in over.sentence()
    for torn in ("spike", [], {"kind": "spike", "since_step": "x", "loss": "\x1b[31m", "usual": {}}, {"kind": 3}):
        assert "\x1b" not in look(JobState("running"), {"step": 1240, "bad_loss": torn}).sentence()


def test_a_slow_gpu_is_said_with_its_signs_while_the_job_runs() -> None:
    slow = {"node": "n2", "device": 3, "factor": 2.0, "since": 1e9, "signs": ["SM clock 990 MHz, its peers 1980"]}
    running = look(JobState("running"), {"step": 9, "slow": [slow, {"node": 7}]})
    words = "GPU 3 of n2 is 2.0 times slower than its peers (SM clock 990 MHz, its peers 1980)"
    assert f"running - {words}; step 9" in running.sentence()
    assert running.cells()[-1] == words
    assert running.as_json()["progress"]["slow"][0] == slow
    assert "slower" not in look(JobState("succeeded"), {"step": 9, "slow": [slow]}).sentence()
    many = look(JobState("running"), {"slow": [{**slow, "device": device} for device in range(5)]})
    assert "GPU 2 of n2 is" in many.sentence()
    assert many.sentence().endswith("; 2 more are slow")


def test_goodput_and_a_notice_that_did_not_arrive_are_said(tmp_path: Path) -> None:
    facts = AttemptFacts(1000.0, 0, "failed", "crash", 1200.0, 1, 1021.0, 100, 1199.0, 1.0, saved_step=90)
    lines = [
        {"event": "start", "text": "a", "to": "webhook", "delivered": False, "why": "HTTP 500"},
        {"event": "start", "text": "a", "to": "webhook", "delivered": True, "why": None},
        {"event": "end", "text": "b", "to": "webhook", "delivered": None, "why": None},
        {"event": "end", "text": "b", "to": "webhook", "delivered": False, "why": "HTTP 404\x1b[2J"},
        ["no object"],
    ]
    (tmp_path / "attempts" / "12.0").mkdir(parents=True)
    journal = tmp_path / "attempts" / "12.0" / "notices.jsonl"
    journal.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"torn')
    failed = look(
        JobState("failed", "FAILED"),
        {"step": 100},
        goodput=goodput([facts]),
        undelivered_notices=tuple(undelivered_notices(tmp_path, "12.0")),
    )
    assert failed.sentence() == (
        "job 12 (slurm): failed [FAILED]; step 100, goodput 45 %; notice not delivered: end to the webhook: HTTP 404"
    )
    assert failed.as_json()["goodput"]["useful_steps"] == 90


def test_what_is_unusual_is_said() -> None:
    chain = {"chain": ("12", "13", "14")}
    waiting = JobState("pending", "PENDING", "Priority", expected_start=datetime(2026, 11, 21, 13, 4), link=2)
    assert look(waiting, submission=chain).sentence() == (
        "job 13 (slurm): pending [PENDING] - Priority; link 2 of 3; expected to start 2026-11-21 13:04"
    )
    hung = {"step": 4, "hung": {"what": "a step"}}
    stopping = look(JobState("running", "RUNNING", restarts=1), hung, stopping=True)
    assert "restarted 1 time; asked to save and stop; hangs: a step" in stopping.sentence()
    assert look(JobState("running", "COMPLETING")).sentence() == (
        "job 12 (slurm): running [COMPLETING] - ended; SLURM waits for word from every node"
    )
    torn = {"step": "many", "loss": None, "tokens_per_second": None}
    assert look(JobState("running"), torn).cells() == ["a", "12", "running", "-", "-", "-", ""]


def test_a_reason_that_waiting_does_not_clear_comes_with_what_does() -> None:
    never = look(JobState("pending", "PENDING", "QOSMaxNodePerJobLimit"))
    advice = never.as_json()["advice"]
    assert "never starts: cancel it" in advice
    assert never.sentence() == f"job 12 (slurm): pending [PENDING] - QOSMaxNodePerJobLimit; {advice}"
    assert look(JobState("pending", "PENDING", "Priority")).as_json()["advice"] is None
    assert look(JobState("running", "RUNNING", "QOSMaxNodePerJobLimit")).as_json()["advice"] is None


def test_the_keys_of_the_json_stay() -> None:
    keys = """run_dir run_id launcher job_id phase state reason exit_code cluster jobs link earlier restarts
        expected_start attempt progress cause stopping layout rehearses skipped_checkpoints
            goodput undelivered_notices advice missing"""
    assert sorted(look(JobState("running")).as_json()) == sorted(keys.split())


def test_the_newest_attempt_tells_how_far_it_got(tmp_path: Path) -> None:
    run_dir = run_directory(tmp_path / "run", "until [ -e go ]; do sleep 0.05; done\nfinish 3 'no luck'")
    described = json.loads((run_dir / "run.json").read_text())
    (run_dir / "run.json").write_text(json.dumps({**described, "rehearsal": {"pipeline_rank": 3}}))
    submission = LocalLauncher().submit(run_dir)
    wait_until(lambda: len(list(run_dir.glob("attempts/*"))) == 1)
    (attempt,) = run_dir.glob("attempts/*")
    (attempt / "progress.json").write_text(json.dumps({"schema": 1, "step": 7, "at": time.time()}))
    (run_dir / "stop").touch()
    running = status_of(submission)
    assert (running.state.phase, running.progress["step"], running.stopping) == ("running", 7, True)
    (run_dir / "go").touch()
    wait_until(lambda: status_of(submission).state.phase == "failed")
    ended = status_of(submission)
    assert (ended.state.reason, ended.stopping) == ("no luck", False)
    assert ended.as_json()["rehearses"] == 3  # a rank by itself
    assert "- rehearsal of pipeline rank 3" in ended.sentence()


def test_a_question_about_slurm_imports_little() -> None:
    """It should feel instant: sacct's own tenth of a second is most of it."""
    modules = "llmlaunch.cli.runs, llmlaunch.launchers.run_status, llmlaunch.launchers.slurm"
    program = f"import sys, {modules}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    heavy = {"sqlalchemy", "numpy", "pydantic", "yaml", "jinja2", "psutil", "rich", "llmlaunch.launchers.slurm.submit"}
    assert not heavy & set(done.stdout.split())


def test_a_launcher_s_mistake_is_the_asker_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="squeue cannot be run"):
        read_statuses([Submission("slurm", "12", tmp_path, 1.0)], lambda line: None)


def test_checkpoints_that_were_skipped_are_told() -> None:
    one = look(JobState("running"), skipped_checkpoints=(120,))
    assert "began before the damaged checkpoint of step 120" in one.sentence()
    assert one.as_json()["skipped_checkpoints"] == [120]
    assert "of step 120 and 2 others" in look(JobState("running"), skipped_checkpoints=(120, 100, 80)).sentence()
