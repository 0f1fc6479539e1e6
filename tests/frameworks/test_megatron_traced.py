"""The estimator against real Megatron core: one rank of a large job, run under fake tensors on this machine.

Megatron core 0.19.2 (its parser, DDP, distributed optimizer and schedules) and TransformerEngine 2.20.2 (its Python
layer over stand-ins for compiled kernels) allocate; every live "CUDA" storage is counted. What lasts must agree to the
byte, the peak within 3 %. The formula is not theirs: nothing is shared but the description of the job.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
from concurrent.futures import Future
from pathlib import Path
from subprocess import PIPE
from threading import Thread
from typing import Any

import pytest
from traced_cases import CASES, PADDED, TECHNIQUES, Case

pytestmark = pytest.mark.frameworks

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".venv-frameworks" / "bin" / "python"
TRACER = Path(__file__).with_name("traced") / "trace_ranks.py"
PEAK_TOLERANCE = 0.03
ITERATIONS = 2  # the first makes the optimizer states, the second runs beside them
LONGEST_WAIT_SECONDS = 300

PARAMETER_BYTES, GRADIENT_BYTES, STATE_BYTES = 2, 4, 4  # bf16, fp32 accumulation, fp32 master and moments
Trace = dict[str, Any]


def job(case: Case) -> str:
    words = {
        "name": case.name,
        "world_size": case.layout.world_size,
        "pipeline_rank": case.rank,
        "arguments": case.arguments(),
    }
    return json.dumps(words)


def run_tracer(cases: list[Case], answers: dict[str, Future[Trace]]) -> None:
    """Fill in the answers as they come; whoever waits for one that never comes learns why."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen([PYTHON, TRACER], stdin=PIPE, stdout=PIPE, stderr=PIPE, text=True, env=environment) as tracer:
        assert tracer.stdin is not None
        assert tracer.stdout is not None
        assert tracer.stderr is not None
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
                answers[answer["name"]].set_exception(AssertionError(answer["failure"]))
        listener.join()
    for waiting in answers.values():
        if not waiting.done():
            waiting.set_exception(AssertionError("the tracer ended early: " + "".join(complaints)[-3000:]))


@pytest.fixture(scope="session")
def traces(request: pytest.FixtureRequest) -> dict[str, Future[Trace]]:
    """Every case that a test of this run asks for, traced side by side; a test waits for its own."""
    if not (PYTHON.parent.parent / ".installed").exists():
        pytest.fail(f"{PYTHON.parent.parent} is missing: `make install-frameworks` makes it")
    asked = [
        item.callspec.params["case"] for item in request.session.items if "traces" in getattr(item, "fixturenames", ())
    ]
    cases = list({case.name: case for case in asked}.values())
    answers: dict[str, Future[Trace]] = {case.name: Future() for case in cases}
    Thread(target=run_tracer, args=(cases, answers), daemon=True).start()
    return answers


every_case = pytest.mark.parametrize("case", CASES, ids=[case.name.replace(" ", "-") for case in CASES])


@every_case
def test_the_trace_is_honest(case: Case, traces: dict[str, Future[Trace]]) -> None:
    """Every micro-batch of every chunk ran forward and backward, and the optimizer stepped and has its states."""
    traced = traces[case.name].result(LONGEST_WAIT_SECONDS)
    runs = ITERATIONS * case.num_microbatches * case.layout.virtual_pipeline
    assert traced["calls"] == {"forward": runs, "backward": runs, "optimizer step": ITERATIONS}
    assert traced["chunks"] == case.layout.virtual_pipeline
    assert traced["state"]["optimizer_state_count"] > 0
    assert traced["parallel"]["data"] == case.layout.data


@every_case
def test_what_lasts_agrees_to_the_byte(case: Case, traces: dict[str, Future[Trace]]) -> None:
    state = traces[case.name].result(LONGEST_WAIT_SECONDS)["state"]
    terms = case.estimate().terms
    assert state["padded_count"] == state["parameter_count"]  # of these cases
    assert terms["parameters"] == PARAMETER_BYTES * state["parameter_count"]
    assert terms["gradients"] == GRADIENT_BYTES * state["parameter_count"] == state["bytes"]["gradients"]
    assert terms["optimizer_states"] == STATE_BYTES * state["optimizer_state_count"]


@every_case
def test_the_peak_agrees_within_three_percent(case: Case, traces: dict[str, Future[Trace]]) -> None:
    traced = traces[case.name].result(LONGEST_WAIT_SECONDS)
    assert case.estimate().allocated_bytes == pytest.approx(traced["peak_bytes"], rel=PEAK_TOLERANCE)


@pytest.mark.parametrize("case", TECHNIQUES, ids=[case.name.replace(" ", "-") for case in TECHNIQUES])
def test_peaks_under_techniques_agree_within_three_percent(case: Case, traces: dict[str, Future[Trace]]) -> None:
    traced = traces[case.name].result(LONGEST_WAIT_SECONDS)
    assert case.estimate().allocated_bytes == pytest.approx(traced["peak_bytes"], rel=PEAK_TOLERANCE)


@pytest.mark.parametrize("case", [PADDED], ids=["six-ways"])
def test_padding_of_gradient_buckets_is_too_small_to_model(case: Case, traces: dict[str, Future[Trace]]) -> None:
    """Each bucket ends at a multiple of lcm(data x context, 128) elements (megatron/core/optimizer/param_layout.py
    bucket_end_divisor, core 0.19), and there is a bucket for every 40 million parameters."""
    state = traces[case.name].result(LONGEST_WAIT_SECONDS)["state"]
    padding = state["padded_count"] - state["parameter_count"]
    buckets = math.ceil(state["parameter_count"] / 40e6)
    assert 0 < padding < buckets * math.lcm(case.layout.data * case.layout.context, 128)
    assert case.estimate().terms["gradients"] == GRADIENT_BYTES * state["parameter_count"]
