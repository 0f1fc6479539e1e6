"""What became of a job: squeue's word, sacct's and its own put together, of one job and of a chain."""

from __future__ import annotations

import json
import os
import pwd
from collections.abc import Mapping
from pathlib import Path

import pytest

from llmlaunch.launchers.base import JobState, Phase, Submission
from llmlaunch.launchers.run_files import cancel_mark, end_noted, note_end
from llmlaunch.launchers.slurm.launcher import SlurmAnswers, is_settled, job_state
from llmlaunch.launchers.slurm.text import Row

NOTHING: Mapping[str, Row] = {}


def submission(run_dir: Path, *jobs: str) -> Submission:
    return Submission("slurm", jobs[0], run_dir, 1700000000.0, chain=jobs if len(jobs) > 1 else ())


def state_of(
    job: Submission, live: Mapping[str, Row] = NOTHING, past: Mapping[str, Row] = NOTHING, silence: str = ""
) -> JobState:
    """Return the state that squeue's and sacct's rows come to."""
    return job_state(job, SlurmAnswers(dict(live), dict(past), silence=silence))


def end(run_dir: Path, attempt: str, state: str, code: int) -> None:
    """What the job writes: for the attempt, and for the run over whatever the attempts before wrote."""
    text = json.dumps({"schema": 1, "attempt": attempt, "state": state, "exit_code": code, "why": "its own words"})
    folder = run_dir / "attempts" / attempt
    folder.mkdir(parents=True)
    (folder / "status.json").write_text(text)
    (run_dir / "status.json").write_text(text)


def test_who_cancelled_it_is_named(tmp_path: Path) -> None:
    job, live = submission(tmp_path, "12"), {"12": Row("CANCELLED")}
    name = pwd.getpwuid(os.getuid()).pw_name
    assert state_of(job, live, {"12": Row("CANCELLED", by=str(os.getuid()))}).reason == f"by {name}"
    state = state_of(job, live, {"12": Row("CANCELLED", by="4000000000")})
    assert state == JobState("cancelled", "CANCELLED", "by user 4000000000")


def test_the_node_that_slurm_lost_is_named_where_the_job_had_no_last_word(tmp_path: Path) -> None:
    folder = tmp_path / "attempts" / "12.0"
    folder.mkdir(parents=True)
    (folder / "attempt.json").write_text(json.dumps({"attempt": "12.0", "nodes": ["n1", "n2"]}))
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "12.0.job.log").write_text("srun: error: Node failure on n2\n")
    state = state_of(submission(tmp_path, "12"), past={"12": Row("NODE_FAIL", reason="NodeDown", exit_code=0)})
    assert state.phase == "failed"
    assert state.reason == "NodeDown; the node failed (n2): srun: error: Node failure on n2"


def test_requeues_are_counted_by_whoever_saw_more(tmp_path: Path) -> None:
    live, past = ({"12": Row("RUNNING", restarts=restarts)} for restarts in (1, 2))
    assert state_of(submission(tmp_path, "12"), live, past).restarts == 2


@pytest.mark.parametrize(
    ("states", "phase", "link"),
    [
        (("COMPLETED", "RUNNING", "PENDING"), "running", 2),
        (("TIMEOUT", "PENDING", "PENDING"), "pending", 2),
        (("TIMEOUT", "FAILED", "NODE_FAIL"), "failed", 3),
        (("CANCELLED", "CANCELLED", "CANCELLED"), "cancelled", 3),
    ],
)
def test_a_chain_is_where_its_jobs_have_got_to(
    tmp_path: Path, states: tuple[str, ...], phase: Phase, link: int
) -> None:
    chain = submission(tmp_path, "12", "13", "14")
    state = state_of(chain, {job: Row(state) for job, state in zip(chain.jobs, states, strict=True)})
    assert (state.phase, state.link) == (phase, link)


def test_a_chain_has_succeeded_when_a_link_reached_the_end_of_the_training(tmp_path: Path) -> None:
    end(tmp_path, "12.0", "stopped", 75)
    end(tmp_path, "13.0", "succeeded", 0)
    live = {"12": Row("FAILED"), "13": Row("COMPLETED"), "14": Row("PENDING", "Dependency")}
    state = state_of(submission(tmp_path, "12", "13", "14"), live)
    assert state == JobState("succeeded", "COMPLETED", "its own words", 0, link=2)


def test_a_link_s_own_word_outlives_the_next_link_s(tmp_path: Path) -> None:
    end(tmp_path, "12.0", "stopped", 75)
    end(tmp_path, "13.0", "failed", 3)
    assert not note_end(submission(tmp_path, "13"), JobState("failed")), "what it wrote itself needs no note"
    assert not (tmp_path / "ended.json").exists()
    past = {"12": Row("FAILED", exit_code=75), "13": Row("FAILED", exit_code=3)}
    assert state_of(submission(tmp_path, "12", "13"), past=past).phase == "failed"
    alone = state_of(submission(tmp_path, "12"), past=past)
    assert alone == JobState("stopped", "FAILED", "its own words", 75)  # told and saved, and not failed


def test_an_end_that_was_noted_is_known_when_slurm_has_forgotten_the_job(tmp_path: Path) -> None:
    job = submission(tmp_path, "12")
    assert state_of(job).phase == "unknown"
    cancelled = JobState("cancelled", "CANCELLED", "by ada", restarts=1)
    assert note_end(job, cancelled)
    assert not note_end(job, cancelled)  # once
    assert state_of(job) == state_of(job, {"12": Row("CANCELLED")}) == cancelled
    assert state_of(job, {"12": Row("RUNNING")}).phase == "running"  # put back into the queue by hand
    assert end_noted(submission(tmp_path, "13")) is None
    assert state_of(submission(tmp_path, "13")).phase == "unknown"


def test_sacct_is_needed_only_where_nobody_else_knows(tmp_path: Path) -> None:
    job = submission(tmp_path, "12")
    settled = {state: is_settled(job, {"12": Row(state)}) for state in ("PENDING", "RUNNING", "CANCELLED")}
    assert settled == {"PENDING": True, "RUNNING": True, "CANCELLED": False}
    assert not is_settled(job, {})
    assert note_end(job, JobState("cancelled"))
    assert is_settled(job, {})
    chain = submission(tmp_path, "13", "14")
    assert not is_settled(chain, {"14": Row("RUNNING")})
    end(tmp_path, "13.0", "stopped", 75)
    assert is_settled(chain, {"14": Row("RUNNING")})


def test_our_own_cancel_counts_only_where_slurm_answered_and_the_accounting_alone_is_said_to_be_so(
    tmp_path: Path,
) -> None:
    job = submission(tmp_path, "12_3")
    (tmp_path / "logs").mkdir()
    cancel_mark(job).touch()
    assert state_of(job).phase == "cancelled"
    assert state_of(job, silence="no answer").phase == "unknown"
    state = state_of(job, past={"12_3": Row("RUNNING")}, silence="no answer")
    assert state == JobState("running", "RUNNING", "by sacct alone; squeue: no answer")
