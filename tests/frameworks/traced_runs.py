"""Ranks traced by the real frameworks for the tests of this run, side by side."""

from __future__ import annotations

import json
import os
import subprocess
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from subprocess import PIPE
from threading import Thread
from typing import Any

import pytest
from traced_cases import Case

from llmlaunch.tracing import TRACER

__all__ = ["GRADIENT_BYTES", "LONGEST_WAIT_SECONDS", "PYTHON", "Trace", "check_peak", "check_what_lasts", "run_tracer"]

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".venv-frameworks" / "bin" / "python"
LONGEST_WAIT_SECONDS = 300

Trace = dict[str, Any]


def job(case: Case) -> str:
    words = {
        "name": case.name,
        "world_size": case.layout.world_size,
        "pipeline_rank": case.rank,
        "arguments": case.arguments(),
        "all_microbatches": case.all_microbatches,
    }
    return json.dumps(words)


def run_tracer(cases: list[Case], answers: dict[str, Future[Trace]]) -> None:
    """Fill in the answers as they come; whoever waits for one that never comes learns why."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen([PYTHON, TRACER], stdin=PIPE, stdout=PIPE, stderr=PIPE, text=True, env=environment) as tracer:
        assert tracer.stdin is not None
        assert tracer.stdout is not None
        assert tracer.stderr is not None
        with suppress(BrokenPipeError):  # a tracer that ended early says why below
            tracer.stdin.write("\n".join(job(case) for case in cases))
            tracer.stdin.close()
        complaints: list[str] = []
        listener = Thread(target=lambda stream: complaints.extend(stream), args=(tracer.stderr,))
        listener.start()
        for line in tracer.stdout:
            answer = json.loads(line)
            if "trace" in answer:
                answers[answer["name"]].set_result(answer["trace"])
            else:
                failure = answer["failure"]
                answers[answer["name"]].set_exception(AssertionError(f"{failure['what']}\n{failure['detail']}"))
        listener.join()
    for waiting in answers.values():
        if not waiting.done():
            waiting.set_exception(AssertionError("the tracer ended early: " + "".join(complaints)[-3000:]))


PEAK_TOLERANCE = 0.03
PARAMETER_BYTES, GRADIENT_BYTES, STATE_BYTES = 2, 4, 4  # bf16, fp32 accumulation, fp32 master and moments


def check_what_lasts(case: Case, traced: Trace) -> None:
    """Parameters, gradients and optimizer states, to the byte."""
    state, terms = traced["state"], case.estimate().terms
    assert state["padded_count"] == state["parameter_count"]  # of these cases
    assert terms["parameters"] == PARAMETER_BYTES * state["parameter_count"]
    assert terms["gradients"] == GRADIENT_BYTES * state["parameter_count"] == state["bytes"]["gradients"]
    assert terms["optimizer_states"] == STATE_BYTES * state["optimizer_state_count"]


def check_peak(case: Case, traced: Trace) -> None:
    """The most that torch handed out at once."""
    assert case.estimate().allocated_bytes == pytest.approx(traced["peak_bytes"], rel=PEAK_TOLERANCE)
