"""The verdict of a run whose files were made to hang, crash or mislead whoever looks into them: it is written all the
same, with what is known without them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from llmlaunch.app.run_report import run_report
from llmlaunch.causes import hang_blame
from llmlaunch.node import attempt_diagnosis, diagnose, observed_end
from llmlaunch.node.finish import Ending, finish
from llmlaunch.rundir import plain_pickle
from llmlaunch.rundir.run import read_run
from llmlaunch.store.run_outcome import attempt_causes, attempt_outcomes
from support.flight_dumps import Recorder, write_dumps
from support.hostile_dumps import dump_with, nested, shared_lists
from support.node_rig import ATTEMPT, NODE

HUNG = {"hung": {"since_seconds": 600.0, "allowed_seconds": 300.0, "what": "a step"}, "step": 3, "steps": 9}


class Run:
    """A run of two ranks that hung and were ended, judged in this process."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.attempt = directory / "attempts" / ATTEMPT
        for folder in ("ranks", "done", "causes", "observers"):
            (self.attempt / folder).mkdir(parents=True)
        (directory / "logs").mkdir()
        self.write("run.json", {"schema": 1, "name": "r", "nodes": 1, "devices_per_node": 2})
        self.write(f"attempts/{ATTEMPT}/attempt.json", {"schema": 1, "attempt": ATTEMPT, "nodes": [NODE]})
        self.write(f"attempts/{ATTEMPT}/progress.json", HUNG)
        for rank in (0, 1):
            self.rank(rank)

    def write(self, name: str, value: Any) -> None:
        (self.directory / name).write_text(json.dumps(value))

    def rank(self, number: int, **more: Any) -> None:
        record = {"rank": number, "local_rank": number, "node": NODE, "started_at": 10.0 + number, "ended_at": 50.0}
        line = json.dumps({**record, "exit_code": None, "signal": "SIGKILL", **more})
        with (self.attempt / "ranks" / f"{NODE}.jsonl").open("a") as file:
            file.write(f"\n{line}\n")

    def dump(self, content: bytes, rank: int = 0) -> None:
        (self.attempt / "flight").mkdir(exist_ok=True)
        (self.attempt / "flight" / f"rank_{rank}").write_bytes(content)

    def finish(self, code: int = 137) -> dict[str, Any]:
        assert finish(Ending(self.directory, ATTEMPT, 1, code)).exit_code == code
        return self.status()

    def status(self) -> dict[str, Any]:
        status: dict[str, Any] = json.loads((self.directory / "status.json").read_text())
        return status


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


HOSTILE = [  # more of them are in causes/test_flight_recorder.py
    pytest.param(
        dump_with({"state": shared_lists(60), "profiling_name": nested(50_000)}), id="shared lists, deep nesting"
    ),
    pytest.param(b"\x80\x02cos\nsystem\n(X\x04\x00\x00\x00trueR.", id="code"),
]


@pytest.mark.parametrize("content", HOSTILE)
def test_a_hostile_dump_keeps_no_run_from_its_verdict(content: bytes, run: Run) -> None:
    run.dump(content)
    status = run.finish()
    assert (status["state"], status["exit_code"], status["cause"]["kind"]) == ("failed", 137, "hung")
    assert json.loads((run.attempt / "status.json").read_text()) == status


def test_such_a_dump_is_named_and_its_rank_is_not_blamed_for_it(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain_pickle, "MOST_INSTRUCTIONS", 1000)
    first = Recorder(0, {"0": [0, 1]})
    first.collective("0", 1, "started")
    write_dumps(run.attempt / "flight", first)
    run.dump(b"\x80\x02" + b"]" * 2000, rank=1)
    cause = run.finish()["cause"]
    assert "blame" not in cause
    assert "flight/rank_1: not read: it has more than 1,000 instructions" in cause["line"]


def crash(*_: Any, **__: Any) -> Any:
    os.abort()


@pytest.mark.parametrize("failing", ["read_dumps", "ranks_that_wrote"])
def test_a_diagnosis_that_fails_midway_leaves_what_was_known(
    failing: str, run: Run, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    monkeypatch.setattr(hang_blame, failing, crash)
    status = run.finish()
    assert (status["state"], status["exit_code"], status["cause"]["kind"]) == ("failed", 137, "hung")
    assert f"what ended attempt {ATTEMPT} is not looked into to the end: " in capfd.readouterr().err


def test_a_diagnosis_that_knows_nothing_leaves_how_the_ranks_ended(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempt_diagnosis, "cause_of", crash)
    status = run.finish()
    assert (status["state"], status["exit_code"]) == ("failed", 137)
    assert status["why"].startswith(f"rank 0 on node {NODE} was ended by SIGKILL")
    assert (status["cause"]["source"], status["cause"]["node"], status["cause"]["rank"]) == ("ranks", NODE, 0)


def test_a_node_that_cannot_look_into_its_log_says_how_its_ranks_ended(
    run: Run, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    monkeypatch.setattr(diagnose, "scan", crash)
    diagnose.write_cause(run.directory, ATTEMPT, NODE, 1, None)
    cause = json.loads((run.attempt / "causes" / f"{NODE}.json").read_text())
    assert (cause["node"], cause["rank"], cause["source"]) == (NODE, 0, "ranks")
    assert "no more is known of" in capfd.readouterr().err


def test_an_observed_command_has_its_verdict_without_a_diagnosis(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempt_diagnosis, "cause_of", crash)
    end = {"node": NODE, "process": 1, "observers": 1, "ended_at": 60.0, "exit_code": 3, "signal": None}
    run.write(f"attempts/{ATTEMPT}/observers/{NODE}.1.json", end)
    status = observed_end.verdict(run.directory, ATTEMPT, 70.0)
    assert status is not None
    assert (status["state"], status["exit_code"], status["cause"]["source"]) == ("failed", 3, "ranks")


OBSERVED = ("node", "process", "observers", "ended_at", "exit_code", "signal", "stop_signal")


def test_an_observers_record_of_the_wrong_kind_keeps_nobody_from_the_verdict(run: Run) -> None:
    for value in WRONG:
        run.write(f"attempts/{ATTEMPT}/observers/{NODE}.1.json", dict.fromkeys(OBSERVED, value))
        status = observed_end.verdict(run.directory, ATTEMPT, 70.0)
        assert status is None or status["state"] in ("failed", "succeeded", "stopped"), value


WRONG: list[Any] = [None, True, -1, "9" * 500, [[1]], {"a": {"b": []}}]
PROGRESS = ("step", "steps", "hung", "behind", "bad_loss", "replaced", "slow", "step_seconds", "saved_step")


@pytest.mark.parametrize("code", [0, 1])
def test_values_of_the_wrong_kind_in_progress_json_count_as_absent(code: int, run: Run) -> None:
    """What is of its kind is in rundir/test_run_files_page.py."""
    (run.attempt / "done" / NODE).touch()
    (run.attempt / "ranks" / f"{NODE}.jsonl").unlink()
    run.rank(0, signal=None, exit_code=code)
    for value in WRONG:
        run.write(f"attempts/{ATTEMPT}/progress.json", dict.fromkeys(PROGRESS, value))
        finish(Ending(run.directory, ATTEMPT, 1, code, "TERM"))
        assert run.status()["state"] in ("succeeded", "failed", "stopped"), value
        (run.directory / "status.json").unlink()


@pytest.mark.parametrize("name", ["attempt.json", "run.json", "cause", "earlier"])
def test_other_files_of_a_run_keep_it_from_no_verdict_either(name: str, run: Run) -> None:
    earlier = "attempts/17.9/status.json"
    path = {
        "attempt.json": f"attempts/{ATTEMPT}/attempt.json",
        "run.json": "run.json",
        "cause": f"attempts/{ATTEMPT}/causes/{NODE}.json",
        "earlier": earlier,
    }[name]
    (run.directory / "attempts" / "17.9").mkdir()
    run.write("attempts/17.9/attempt.json", {"schema": 1, "attempt": "17.9", "nodes": [NODE]})
    keys = {
        "attempt.json": ("nodes", "layout", "fallback", "from_step", "skips", "rollback", "skipped", "cluster", "log"),
        "run.json": ("nodes", "devices_per_node", "restart", "fallbacks", "progress", "launcher"),
        "cause": ("kind", "line", "rank", "numbers", "at", "ranks", "sick", "nodes"),
        "earlier": ("cause", "next", "state", "ranks", "ended_at", "step", "saved_step", "exit_code"),
    }[name]
    before = json.loads((run.directory / path).read_text()) if (run.directory / path).exists() else {"kind": "oom"}
    for value in WRONG:
        run.write(path, {**before, **dict.fromkeys(keys, value)})
        assert run.finish()["state"] == "failed", value


@pytest.mark.parametrize("content", HOSTILE)
def test_report_and_collect_read_such_a_run_without_its_verdict(content: bytes, run: Run) -> None:
    run.dump(content)
    run.write("status.json", {"schema": 1, "attempt": "another"})
    outcome = attempt_outcomes(read_run(run.directory), None)[-1]
    first = attempt_causes(run.directory, outcome, "").first
    assert first is None or first["kind"] == "hung"
    report = run_report(run.directory, lambda _: None)
    assert report["attempts"]
