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
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from traced_cases import CASES, PADDED, Case

pytestmark = pytest.mark.frameworks

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".venv-frameworks" / "bin" / "python"
TRACER = Path(__file__).with_name("traced") / "megatron_rank.py"
PEAK_TOLERANCE = 0.03
ITERATIONS = 2  # the first makes the optimizer states, the second runs beside them
LONGEST_TRACE_SECONDS = 300

PARAMETER_BYTES, GRADIENT_BYTES, STATE_BYTES = 2, 4, 4  # bf16, fp32 accumulation, fp32 master and moments
Trace = dict[str, Any]


def trace(case: Case) -> Trace:
    command = [
        *(str(PYTHON), str(TRACER)),
        *("--world-size", str(case.layout.world_size), "--pipeline-rank", str(case.rank)),
        *("--iterations", str(ITERATIONS), "--", *case.arguments()),
    ]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=LONGEST_TRACE_SECONDS)
    assert ran.returncode == 0, ran.stderr[-3000:]
    return dict(json.loads(ran.stdout))


@pytest.fixture(scope="session")
def traces() -> Iterator[dict[str, Future[Trace]]]:
    """Every case, traced side by side; a test waits for its own."""
    if not (PYTHON.parent.parent / ".installed").exists():
        pytest.fail(f"{PYTHON.parent.parent} is missing: `make install-frameworks` makes it")
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        yield {case.name: pool.submit(trace, case) for case in (*CASES, PADDED)}
        pool.shutdown(cancel_futures=True)


every_case = pytest.mark.parametrize("case", CASES, ids=[case.name.replace(" ", "-") for case in CASES])


@every_case
def test_the_trace_is_honest(case: Case, traces: dict[str, Future[Trace]]) -> None:
    """Every micro-batch of every chunk ran forward and backward, and the optimizer stepped and has its states."""
    traced = traces[case.name].result()
    runs = ITERATIONS * case.microbatches * case.layout.virtual_pipeline
    assert traced["calls"] == {"forward": runs, "backward": runs, "optimizer step": ITERATIONS}
    assert traced["chunks"] == case.layout.virtual_pipeline
    assert traced["state"]["optimizer_state_count"] > 0
    assert traced["parallel"]["data"] == case.layout.data


@every_case
def test_what_lasts_agrees_to_the_byte(case: Case, traces: dict[str, Future[Trace]]) -> None:
    state = traces[case.name].result()["state"]
    terms = case.estimate().terms
    assert state["padded_count"] == state["parameter_count"]  # of these cases
    assert terms["parameters"] == PARAMETER_BYTES * state["parameter_count"]
    assert terms["gradients"] == GRADIENT_BYTES * state["parameter_count"] == state["bytes"]["gradients"]
    assert terms["optimizer_states"] == STATE_BYTES * state["optimizer_state_count"]


@every_case
def test_the_peak_agrees_within_three_percent(case: Case, traces: dict[str, Future[Trace]]) -> None:
    traced = traces[case.name].result()
    assert case.estimate().allocated_bytes == pytest.approx(traced["peak_bytes"], rel=PEAK_TOLERANCE)


def test_padding_of_gradient_buckets_is_too_small_to_model(traces: dict[str, Future[Trace]]) -> None:
    """Each bucket ends at a multiple of lcm(data x context, 128) elements (megatron/core/optimizer/param_layout.py
    bucket_end_divisor, core 0.19), and there is a bucket for every 40 million parameters."""
    state = traces[PADDED.name].result()["state"]
    padding = state["padded_count"] - state["parameter_count"]
    buckets = math.ceil(state["parameter_count"] / 40e6)
    assert 0 < padding < buckets * math.lcm(PADDED.layout.data * PADDED.layout.context, 128)
    assert PADDED.estimate().terms["gradients"] == GRADIENT_BYTES * state["parameter_count"]
