"""Megatron core's own rerun state machine, on a CPU: which node its verdict blames, from the logs of a run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from judges import Say, line_for_line, megatron_python

from llmlaunch.causes.attempt_cause import cause_of
from llmlaunch.causes.suspects import nodes_to_leave_out, signs_against
from llmlaunch.rundir.attempt import Attempt

pytestmark = pytest.mark.frameworks


@pytest.fixture(scope="module")
def machine() -> Iterator[Say]:
    with line_for_line(megatron_python(), Path(__file__).with_name("rerun_machine.py")) as say:
        yield say


class Run:
    """Attempts of one rank each, on a node after the other."""

    def __init__(self, machine: Say, directory: Path, error: str) -> None:
        self.machine, self.directory, self.error = machine, directory, error
        (directory / "logs").mkdir()
        self.causes: list[dict[str, Any]] = []

    def attempt(self, node: str) -> dict[str, Any]:
        name = f"7.{len(self.causes)}"
        folder = self.directory / "attempts" / name
        folder.mkdir(parents=True)
        (folder / "attempt.json").write_text(
            json.dumps({"attempt": name, "nodes": [node], "started_at": 1.0 + len(self.causes)})
        )
        log = self.directory / "logs" / f"{name}.{node}.log"
        state = self.directory / "state.pkl"
        job = {"error": self.error, "state": str(state), "node": node, "log": str(log)}
        code = int(self.machine(json.dumps(job)))
        rank = {"rank": 0, "local_rank": 0, "node": node, "exit_code": code, "signal": None, "ended_at": 9.0}
        cause = cause_of(Attempt(self.directory, name), [rank], code)
        assert cause is not None, log.read_text()
        (folder / "status.json").write_text(json.dumps({"attempt": name, "state": "failed", "cause": cause}))
        self.causes.append(cause)
        return {**cause, "exit_code": code}


def test_another_result_on_the_same_gpu_is_one_sign_against_it(machine: Say, tmp_path: Path) -> None:
    cause = Run(machine, tmp_path, "transient").attempt("n1")
    assert (cause["exit_code"], cause["kind"], cause["rank"], cause["numbers"]) == (
        17,
        "silent_corruption",
        0,
        {"device": 1},
    )
    assert signs_against(cause) == {"n1": 1}


def test_another_result_on_a_second_gpu_blames_the_first(machine: Say, tmp_path: Path) -> None:
    run = Run(machine, tmp_path, "persistent")
    first = run.attempt("n1")
    assert (first["exit_code"], first["kind"], first["node"], signs_against(first)) == (16, "rerun", "n1", {})
    assert nodes_to_leave_out(run.causes) == ["n1"]  # where it has to be computed again
    assert (run.attempt("n1")["exit_code"], run.causes[-1]["kind"]) == (16, "rerun")  # it got the same GPU
    verdict = run.attempt("n2")
    assert (verdict["exit_code"], verdict["kind"], verdict["node"]) == (17, "silent_corruption", "n1")
    assert signs_against(verdict) == {"n1": 2}
    assert nodes_to_leave_out(run.causes) == ["n1"]


def test_the_same_result_on_a_second_gpu_is_the_programs(machine: Say, tmp_path: Path) -> None:
    run = Run(machine, tmp_path, "application")
    assert run.attempt("n1")["kind"] == "rerun"
    verdict = run.attempt("n2")
    assert (verdict["exit_code"], verdict["kind"], signs_against(verdict)) == (17, "unexpected_result", {})
