"""The estimate's terms against what real Megatron core had alive at the peak, term by term.

The traces are those of test_megatron_traced.py. Nothing else is traced for this.
"""

from __future__ import annotations

from concurrent.futures import Future

import pytest
from traced_cases import CASES, Case
from traced_runs import LONGEST_WAIT_SECONDS, Trace

from llmlaunch.memory.estimator import RankEstimate
from llmlaunch.memory.peak import OUTSIDE_TORCH
from llmlaunch.rehearsal.traced import REMAINDER, terms_at_peak

pytestmark = pytest.mark.frameworks

ALLOCATION_BYTES = 512  # a trace counts whole ones
# Of these the estimate's worst moment is the trace's. Elsewhere two moments are close, and each names its own terms; or
# a layer's backward pass has let go of what it kept, which `layer_backward` is net of.
SAME_MOMENT = (
    *("8B rank 0", "8B rank 1", "8B rank 2", "8B rank 3", "full recompute rank 0", "full recompute rank 3"),
    *("recompute of attention", "recompute of the MLP", "interleaved rank 0", "GPT rank 0", "GPT rank 1"),
    "experts rank 1",
)
NAMED = {case.name.replace(" ", "-"): case for case in CASES}
NEAR = {name: NAMED[name] for name in (each.replace(" ", "-") for each in SAME_MOMENT)}
every_case = pytest.mark.parametrize("case", NAMED.values(), ids=NAMED)
same_moment = pytest.mark.parametrize("case", NEAR.values(), ids=NEAR)


def alive(case: Case, traces: dict[str, Future[Trace]]) -> tuple[Trace, RankEstimate, dict[str, int]]:
    traced, predicted = traces[case.name].result(LONGEST_WAIT_SECONDS), case.estimate()
    return traced, predicted, terms_at_peak(traced, predicted)


@every_case
def test_all_that_is_alive_at_the_peak_has_a_name(case: Case, traces: dict[str, Future[Trace]]) -> None:
    traced, _, found = alive(case, traces)
    assert sum(found.values()) == traced["peak_bytes"]
    assert 0 <= found.get(REMAINDER, 0) < 0.002 * traced["peak_bytes"]


@every_case
def test_what_lasts_is_alive_at_the_peak(case: Case, traces: dict[str, Future[Trace]]) -> None:
    traced, predicted, found = alive(case, traces)
    assert found["parameters"] == pytest.approx(predicted.terms["parameters"], abs=ALLOCATION_BYTES)
    assert found["gradients"] == predicted.terms["gradients"]
    before_the_first_step = traced["peak_phase"] == "setup"  # when there are no states
    assert found.get("optimizer_states", 0) == (0 if before_the_first_step else traced["state"]["bytes"]["optimizer"])


@same_moment
def test_every_term_is_near_its_estimate(case: Case, traces: dict[str, Future[Trace]]) -> None:
    """Within 1 % of the peak."""
    traced, predicted, found = alive(case, traces)
    for term in {*found, *predicted.terms} - {*OUTSIDE_TORCH, "allocator_cache"}:
        expected = predicted.terms.get(term, 0)
        assert found.get(term, 0) == pytest.approx(expected, abs=0.01 * traced["peak_bytes"]), term
