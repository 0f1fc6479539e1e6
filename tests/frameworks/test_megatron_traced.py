"""The estimator against real Megatron core: one rank of a large job, run under fake tensors on this machine.

Megatron core 0.19.2 (its parser, DDP, distributed optimizer and schedules) and TransformerEngine 2.20.2 (its Python
layer over stand-ins for compiled kernels) allocate; every live "CUDA" storage is counted. What lasts must agree to the
byte, the peak within 3 %. The formula is not theirs: nothing is shared but the description of the job.
"""

from __future__ import annotations

import math
from concurrent.futures import Future
from dataclasses import replace

import pytest
from traced_cases import CASES, MANY_MICROBATCHES, PADDED, TECHNIQUES, Case
from traced_runs import GRADIENT_BYTES, LONGEST_WAIT_SECONDS, Trace, check_peak, check_what_lasts

pytestmark = pytest.mark.frameworks

ITERATIONS = 2  # the first makes the optimizer states, the second runs beside them

every_case = pytest.mark.parametrize("case", CASES, ids=[case.name.replace(" ", "-") for case in CASES])


@every_case
def test_the_trace_is_honest(case: Case, traces: dict[str, Future[Trace]]) -> None:
    """Every micro-batch of every chunk ran forward and backward, and the optimizer stepped and has its states."""
    traced = traces[case.name].result(LONGEST_WAIT_SECONDS)
    assert traced["microbatches"] == case.num_microbatches
    runs = sum(traced["microbatches_run"]) * case.layout.virtual_pipeline
    assert traced["calls"] == {"forward": runs, "backward": runs, "optimizer step": ITERATIONS}
    assert traced["chunks"] == case.layout.virtual_pipeline
    assert traced["state"]["optimizer_state_count"] > 0
    assert traced["parallel"]["data"] == case.layout.data
    assert traced["versions"]["megatron-core"] == "0.19.2"
    assert traced["resident_peak_bytes"] > 0


@every_case
def test_what_lasts_agrees_to_the_byte(case: Case, traces: dict[str, Future[Trace]]) -> None:
    check_what_lasts(case, traces[case.name].result(LONGEST_WAIT_SECONDS))


@every_case
def test_the_peak_agrees_within_three_percent(case: Case, traces: dict[str, Future[Trace]]) -> None:
    check_peak(case, traces[case.name].result(LONGEST_WAIT_SECONDS))


@pytest.mark.parametrize("case", TECHNIQUES, ids=[case.name.replace(" ", "-") for case in TECHNIQUES])
def test_peaks_under_techniques_agree_within_three_percent(case: Case, traces: dict[str, Future[Trace]]) -> None:
    check_peak(case, traces[case.name].result(LONGEST_WAIT_SECONDS))


@pytest.mark.parametrize("case", [PADDED], ids=["six-ways"])
def test_padding_of_gradient_buckets_is_too_small_to_model(case: Case, traces: dict[str, Future[Trace]]) -> None:
    """Each bucket ends at a multiple of lcm(data x context, 128) elements (megatron/core/optimizer/param_layout.py
    bucket_end_divisor, core 0.19), and there is a bucket for every 40 million parameters."""
    state = traces[case.name].result(LONGEST_WAIT_SECONDS)["state"]
    padding = state["padded_count"] - state["parameter_count"]
    buckets = math.ceil(state["parameter_count"] / 40e6)
    assert 0 < padding < buckets * math.lcm(case.layout.data * case.layout.context, 128)
    assert case.estimate().terms["gradients"] == GRADIENT_BYTES * state["parameter_count"]


ALLOCATION_BYTES = 512  # torch hands out no less
PHASES = ("forward", "backward")
WITH_ALL = [(case, replace(case, name=f"{case.name}, all", all_microbatches=True)) for case in MANY_MICROBATCHES]


@pytest.mark.parametrize(
    ("case", "all_of_it"), WITH_ALL, ids=[case.name.replace(" ", "-") for case in MANY_MICROBATCHES]
)
def test_a_few_micro_batches_show_the_peak_of_all(
    case: Case, all_of_it: Case, traces: dict[str, Future[Trace]]
) -> None:
    """In every phase, but for what the last stage keeps of the loss of each micro-batch."""
    few, every = (traces[one.name].result(LONGEST_WAIT_SECONDS) for one in (case, all_of_it))
    assert every["microbatches_run"] == [case.num_microbatches] * 2
    assert few["microbatches_run"][1] < case.num_microbatches == few["microbatches"]
    last = case.rank == case.layout.pipeline - 1
    losses = (case.num_microbatches - few["microbatches_run"][1]) * ALLOCATION_BYTES if last else 0
    assert every["peak_bytes"] - few["peak_bytes"] == losses
    assert every["peak_phase"] == few["peak_phase"]
    assert {phase: every["peak_by_phase"][phase] - few["peak_by_phase"][phase] for phase in PHASES} == dict.fromkeys(
        PHASES, losses
    )
