"""The memory formula against real DeepSpeed: the shipped trainer, the engine and the Hugging Face model, traced under
fake tensors without a GPU (llmlaunch/tracing). What lasts agrees to the byte, peaks within 3 %; wrong formulas do not.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from deepspeed_traced_cases import CASES, HIDDEN, LAYERS, RANKS, Case
from judges import deepspeed_versions
from traces import Trace, traces_of
from wrong_formulas import Patch, everywhere, left_out

from llmlaunch.effects import recompute
from llmlaunch.facts import NONE
from llmlaunch.frameworks.deepspeed.trace import deepspeed_terms
from llmlaunch.memory import loss
from llmlaunch.memory.job import Job
from llmlaunch.techniques.requests import Adapters
from llmlaunch.tracing import TRACER
from support.changed_facts import changed
from support.recorded import recorded

pytestmark = [pytest.mark.frameworks, pytest.mark.timeout(2400)]  # the first may wait for all traces: 10 minutes

TraceOf = Callable[[Case], Trace]
Change = Callable[[Job], Job]

PEAK_TOLERANCE = 0.03
ALLOCATION_BYTES = 512  # to which torch rounds every tensor up
STEPS = 2
NAMED = {case.name: case for case in CASES}

LIVE = ()  # in each `make test` a rehearsal traces ZeRO 2 (test_rehearsals.py)


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TraceOf]:
    jobs = {case.name: json.dumps(case.as_job()) for case in CASES}
    tracer = (sys.executable, TRACER, "--framework", "deepspeed", "--processes", "2")
    with (
        recorded("deepspeed_traces", deepspeed_versions(), LIVE) as record,
        traces_of(jobs, tracer, record, tmp_path_factory.mktemp("tracer") / "errors") as trace_of,
    ):
        yield lambda case: trace_of(case.name)


def same(job: Job) -> Job:
    return job


def check_what_lasts(case: Case, traced: Trace, change: Change = same) -> None:
    """Parameters, gradients and optimizer states, to the byte but for what torch rounds each tensor up to."""
    state, terms = traced["state"], case.estimate(change).terms
    tensors = ALLOCATION_BYTES * traced["lasting_tensors"]
    assert terms.get("optimizer_states", 0) == pytest.approx(state["bytes"]["optimizer"], abs=tensors)
    assert terms.get("gradients", 0) == pytest.approx(state["bytes"]["gradients"], abs=tensors)
    if case.layout.zero_stage < 3:
        assert terms["parameters"] == 2 * state["parameter_count"]
        assert terms["parameters"] == pytest.approx(state["bytes"]["parameters"], abs=tensors)
    elif terms.get("optimizer_states") and change(case_job(case)).techniques.adapters is None:
        # a shard of each, and the norms, which are too small to be sharded, whole; so are adapters
        norms = 2 * (2 * LAYERS + 1) * HIDDEN
        shards = 2 * state["parameter_count"] / RANKS
        assert shards + norms == pytest.approx(state["bytes"]["parameters"], abs=tensors + norms)


def check_host_buffer(case: Case, traced: Trace, change: Change = same) -> None:
    """What else lasts where gradients go to the host: a buffer of the largest parameter."""
    facts = change(case_job(case)).facts
    assert traced["state"]["bytes"]["other"] == pytest.approx(
        facts.zero.host_transfer_bytes[case.layout.zero_stage] * 32000 * HIDDEN, abs=4 * ALLOCATION_BYTES
    )


def case_job(case: Case) -> Job:
    jobs: list[Job] = []
    case.estimate(lambda job: jobs.append(job) or job)  # type: ignore[func-returns-value]
    return jobs[0]


def check_peak(case: Case, traced: Trace, change: Change = same) -> None:
    """The most that torch handed out at once."""
    assert case.estimate(change).allocated_bytes == pytest.approx(traced["peak_bytes"], rel=PEAK_TOLERANCE)


every_case = pytest.mark.parametrize("case", CASES, ids=[case.name.replace(" ", "-") for case in CASES])


@every_case
def test_a_whole_step_is_traced(case: Case, trace: TraceOf) -> None:
    traced = trace(case)
    microbatches = STEPS * case.microbatches
    assert traced["microbatches_run"] == [case.microbatches] * STEPS
    assert (traced["calls"]["forward"], traced["calls"]["backward"]) == (microbatches, microbatches)
    assert traced["state"]["optimizer_state_count"] >= traced["state"]["least_state_count"] > 0
    assert traced["parallel"]["data"] == case.layout.data


@every_case
def test_what_lasts_agrees_to_the_byte(case: Case, trace: TraceOf) -> None:
    check_what_lasts(case, trace(case))


def test_gradients_pass_a_buffer_on_their_way_to_the_host(trace: TraceOf) -> None:
    case = NAMED["ZeRO 2, optimizer on the host"]
    check_host_buffer(case, trace(case))


@every_case
def test_peaks_agree_within_three_percent(case: Case, trace: TraceOf) -> None:
    check_peak(case, trace(case))


@every_case
def test_what_was_alive_is_told_apart(case: Case, trace: TraceOf) -> None:
    traced, predicted = trace(case), case.estimate()
    terms = deepspeed_terms(traced, predicted)
    assert sum(terms.values()) == traced["peak_bytes"]
    assert terms.get("other", 0) <= 0.03 * traced["peak_bytes"]


@dataclass(frozen=True)
class Wrong:
    """A mistake one could make, the check that must notice it, and the case it must be noticed in."""

    what: str
    change: Change
    check: Callable[..., None]
    case: str
    patch: Callable[[Patch], None] = lambda patch: None


def facts(**changes: Any) -> Change:
    return lambda job: replace(job, facts=changed(job.facts, **changes))


def life(**changes: Any) -> Change:
    def change(job: Job) -> Job:
        assert job.facts.zero.gradient_life is not None
        return replace(job, facts=changed(job.facts, gradient_life=replace(job.facts.zero.gradient_life, **changes)))

    return change


def techniques(**changes: Any) -> Change:
    return lambda job: replace(job, techniques=replace(job.techniques, **changes))


def whole_sequence(job: Any, rows: Any) -> Any:
    return np.full(len(rows), float(job.workload.sequence_length))


LASTING, PEAK = check_what_lasts, check_peak
WRONG = (
    Wrong("one moment instead of two", facts(optimizer_bytes=8.0), LASTING, "ZeRO 2"),
    Wrong("no main parameters without ZeRO", facts(optimizer_bytes_unsharded=8.0), LASTING, "ZeRO 0"),
    Wrong("states not sharded over the ranks of a sequence", facts(shard_over_context=False), LASTING, "Ulysses"),
    Wrong("fp32 gradients let go", life(lasting=NONE), LASTING, "ZeRO 1, gradients in fp32"),
    Wrong("gradients of ZeRO 3 let go", life(lasting_sharded=NONE), LASTING, "ZeRO 3"),
    Wrong("AutoTP splits the embedding", facts(embedding_whole=False), LASTING, "AutoTP"),
    Wrong("first matrices trained", techniques(adapters=Adapters(16)), LASTING, "ZeRO 3, LoRA-FA"),
    Wrong(
        "no buffer on the way to the host",
        facts(host_transfer_bytes=NONE),
        check_host_buffer,
        "ZeRO 2, optimizer on the host",
    ),
    Wrong("no buffer at the peak", facts(host_transfer_bytes=NONE), PEAK, "ZeRO 2, optimizer on the host"),
    Wrong("no gradient of the fp32 loss", facts(logit_bytes=8.0), PEAK, "ZeRO 0"),
    Wrong("fused norms", facts(norm_extra_bytes=0.0), PEAK, "activations"),
    Wrong("fused SwiGLU", facts(gated_activation_fused=True), PEAK, "activations"),
    Wrong("fused norms run backward", facts(norm_backward_bytes=0.0), PEAK, "a long sequence over ranks"),
    Wrong("no gradients of earlier micro-batches", life(accumulated=NONE), PEAK, "ZeRO 1"),
    Wrong("nothing gathered", facts(gathering=None), PEAK, "ZeRO 3"),
    Wrong("a loss in one piece", techniques(loss=None), PEAK, "a long sequence"),
    Wrong("MLPs in one piece", techniques(mlp_chunks=1), PEAK, "a long sequence over ranks"),
    Wrong("AutoTP splits the logits", facts(logits_gathered=False), PEAK, "AutoTP"),
    Wrong("nothing computed again", same, PEAK, "a long sequence over ranks", left_out(recompute.recomputed_layer)),
    Wrong("no logits", same, PEAK, "GPT-2", left_out(loss.logits)),
    Wrong(
        "a sequence that is not split",
        same,
        PEAK,
        "a long sequence over ranks",
        lambda patch: everywhere(patch, loss.tokens, whole_sequence),
    ),
)


@pytest.mark.parametrize("wrong", [pytest.param(wrong, id=wrong.what.replace(" ", "-")) for wrong in WRONG])
def test_a_formula_wrong_in_one_term_is_caught(wrong: Wrong, trace: TraceOf, monkeypatch: pytest.MonkeyPatch) -> None:
    case = NAMED[wrong.case]
    wrong.check(case, trace(case))  # the right one passes
    wrong.patch(monkeypatch)
    with pytest.raises(AssertionError):
        wrong.check(case, trace(case), wrong.change)
