"""A plan whose stated risk is above 1 % gives way to a roomier layout that is at most 3 % slower."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from llmlaunch.calibration.lessons import Lessons, Rehearsal
from llmlaunch.layout import Layout
from llmlaunch.planner.headroom import search_with_headroom, stated_risk_at, with_headroom
from llmlaunch.planner.plan import Candidate, JobLength
from llmlaunch.planner.plan_json import plan_json
from llmlaunch.planner.search import SearchResult, search
from llmlaunch.planner.setting import Setting
from llmlaunch.units import GIB
from llmlaunch.verdicts import SAFE
from support.plans import gallery_setting, plan_of
from support.soak import examples, share
from support.tight import bytes_leaving

ONE_PERCENT, THREE_PERCENT = 0.01, 0.03
BLOCKS = "layout={recompute: full, recompute_method: block, pipeline: 1, tensor: 1, micro_batch_size: 1}"
FEW = "layout={tensor: [1, 2], context: 1, micro_batch_size: [1, 2]}"
JOBS = {
    "dense": ("llama3-8b", "nodes=1", f"{FEW[:-1]}, techniques: asked}}"),
    "dense, uneven": ("llama3-8b", "nodes=1", "model.num_layers=14", FEW),
    "mixture": ("mixtral-8x7b", "nodes=2", "layout={tensor: [1, 2], micro_batch_size: 1, context: 1}"),
    "dense layers first": (
        "deepseek-v2-lite",
        "nodes=1",
        "layout={tensor: 1, micro_batch_size: 1, context: 1, expert_tensor: 1}",
    ),
    "deepspeed": ("llama2-7b-deepspeed", "nodes=1"),
}


@dataclass(frozen=True)
class Threshold:
    """Measured runs that state a high risk of whatever needs more than `roomy_bytes`, and a low one of the rest."""

    fits_bytes: int
    roomy_bytes: int
    low: float = 0.005
    high: float = 0.06

    def risk_of(self, units: float) -> float:
        return self.low if bytes_leaving(units, self.fits_bytes) <= self.roomy_bytes else self.high


def with_threshold(setting: Setting, roomy_bytes: int) -> Setting:
    assert setting.limit.fits_bytes is not None
    evidence = Threshold(setting.limit.fits_bytes, roomy_bytes)
    return replace(setting, limit=replace(setting.limit, evidence=evidence))


def identity(setting: Setting, result: SearchResult, place: int = 0) -> tuple[Layout, object]:
    candidate = result.candidate(setting.recipe, place)
    return candidate.layout, (candidate.techniques, candidate.gradient_dtype)


def roomier_of_everything(setting: Setting, result: SearchResult, roomy_bytes: int) -> tuple[SearchResult, int] | None:
    """Price everything that fits `roomy_bytes`, and return the result with the index of what the rule asks for."""
    lowered = replace(setting, limit=replace(setting.limit, limit_bytes=roomy_bytes, fits_bytes=None))
    whole = search(lowered, whole=True, exact=100_000)
    most = (1.0 + THREE_PERCENT) * result.step_seconds[result.first[0]]
    near = np.flatnonzero(whole.safe & (whole.step_seconds <= most))
    return (whole, int(near[np.argmin(whole.preferred_seconds[near])])) if len(near) else None


@examples(1)
@given(
    job=st.sampled_from(share(sorted(JOBS), ["dense"])),
    batch=st.sampled_from([16, 32, 64, 128, 256]),
    share=st.sampled_from([0.25, 0.4, 0.6, 0.9]),
    room=st.floats(0.6, 0.995),
)
def test_the_roomier_layout_is_the_one_of_the_whole_space(job: str, batch: int, share: float, room: float) -> None:
    setting = gallery_setting(*JOBS[job], f"training.global_batch_size={batch}", f"memory={{limit: {share}}}")
    result = search(setting)
    assume(np.any(result.safe))
    chosen_bytes = int(result.device_bytes[result.first[0]])
    setting = with_threshold(setting, int(room * chosen_bytes))
    kept = with_headroom(setting, result)
    expected = roomier_of_everything(setting, result, int(room * chosen_bytes))
    assert sum(kept.refused.values()) + np.count_nonzero(kept.safe) == kept.searched
    if expected is None:
        assert kept is result
    assume(expected is not None)
    assert expected is not None
    whole, index = expected
    first = int(kept.first[0])
    assert kept.preferred_seconds[first] == pytest.approx(whole.preferred_seconds[index], rel=1e-9)
    assert kept.device_bytes[first] <= room * chosen_bytes
    assert kept.step_seconds[first] <= (1.0 + THREE_PERCENT) * result.step_seconds[result.first[0]] * (1.0 + 1e-9)
    assert kept.gave_way == result.first[0]
    assert identity(setting, kept, 1) == identity(setting, result), "what gave way is the first runner-up"
    assert len(set(kept.first.tolist())) == len(kept.first)


def test_layers_are_recomputed_anew_for_the_roomier_limit() -> None:
    """How many layers are recomputed is solved for a limit: the roomier layout may be the same with more of them."""
    setting = gallery_setting("llama3-8b", "nodes=1", BLOCKS)
    result = search(setting)
    chosen = result.candidate(setting.recipe, 0)
    assert chosen.layout.recompute_layers
    setting = with_threshold(setting, chosen.device_bytes - GIB // 2)
    roomier = with_headroom(setting, result).candidate(setting.recipe, 0)
    assert roomier.layout.recompute_layers > chosen.layout.recompute_layers
    assert roomier.device_bytes <= chosen.device_bytes - GIB // 2


@pytest.mark.parametrize("name", ["llama3-70b", "llama2-7b-deepspeed"])
def test_recipes_of_the_gallery_keep_head_room(name: str) -> None:
    plan = plan_of(name)
    assert plan.verdict == SAFE
    assert plan.stated_risk is not None
    assert plan.stated_risk <= ONE_PERCENT
    assert plan.fuller is not None
    assert plan.fuller.stated_risk > ONE_PERCENT
    assert plan.fuller.gain <= THREE_PERCENT
    assert plan.fuller.candidate == plan.alternatives[0]
    assert plan_json(plan)["gave_way_for_headroom"]["stated_risk"] == plan.fuller.stated_risk


def test_a_plan_with_no_roomier_one_near_stays() -> None:
    plan = plan_of("mistral-7b")
    assert plan.verdict == SAFE
    assert plan.stated_risk is not None
    assert plan.stated_risk > ONE_PERCENT
    assert plan.fuller is None


@cache
def roomier() -> tuple[Setting, SearchResult, SearchResult]:
    """A setting with what its search finds, without and with the rule."""
    setting = gallery_setting("llama2-7b-deepspeed", FEW_WORDS)
    result = search(setting)
    kept = with_headroom(setting, result)
    assert kept is not result
    return setting, result, kept


FEW_WORDS = "layout={context: 1, offload_optimizer: 0.0, offload_parameters: false}"


def test_the_rule_leaves_alone_what_it_is_not_about() -> None:
    """The fastest is asked for; no risk is stated of a share; tight layouts are searched for their risk already."""
    setting, result, _ = roomier()
    for override in ("layout.preference=off", "memory.limit=0.95"):
        assert with_headroom(gallery_setting("llama2-7b-deepspeed", FEW_WORDS, override), result) is result
    assert with_headroom(replace(setting, widened=True), result) is result


def test_head_room_never_costs_the_budget() -> None:
    """Where the plan alone stays within the days, a slower one does not take its place."""
    setting, result, _ = roomier()
    seconds = float(result.step_seconds[result.first[0]])
    days = JobLength.of(setting.recipe, 1.001 * seconds).seconds / 86400
    plan = plan_of("llama2-7b-deepspeed", FEW_WORDS, f"budget.days={days}")
    assert plan.chosen.step_seconds <= 1.001 * seconds
    assert plan.beyond_budget is None


def test_the_grid_and_the_front_have_the_planned_layout_first() -> None:
    setting, _, kept = roomier()
    whole = search_with_headroom(setting, whole=True)
    assert whole.candidate(setting.recipe, 0) == kept.candidate(setting.recipe, 0)
    assert whole.gave_way is not None


def test_a_roomier_layout_that_a_rehearsal_refutes_is_passed_over() -> None:
    setting, _, kept = roomier()
    first = kept.candidate(setting.recipe, 0)
    refuted = replace(setting, lessons=Lessons(rehearsals=(rehearsal_of(setting, first),)))
    result = search_with_headroom(refuted)
    again = result.candidate(refuted.recipe, 0)
    assert (again.layout, again.techniques) != (first.layout, first.techniques)
    assert stated_risk_at(refuted, result, int(result.first[0])) is not None


def test_memory_risk_stays_a_limit() -> None:
    """A higher risk makes more layouts safe, and the rule applies to what is then planned; a low one leaves it nothing
    to do. The runs behind both limits are the same ones: a risk that a class bounds by itself may have a lower limit
    than one for which it is pooled wider."""
    usual, bold = plan_of("llama3-70b"), plan_of("llama3-70b", "memory.risk=0.1")
    assert usual.limit.evidence is not None
    assert bold.limit.evidence is not None
    assert usual.limit.evidence.shortfalls == bold.limit.evidence.shortfalls
    assert usual.limit.limit_bytes < bold.limit.limit_bytes
    for plan in (usual, bold):
        assert plan.stated_risk is not None
        assert plan.stated_risk <= ONE_PERCENT
        assert plan.fuller is not None
    careful = plan_of("llama3-70b", "memory.risk=0.01")
    assert careful.device_bytes <= careful.limit.limit_bytes < usual.limit.limit_bytes
    assert careful.fuller is None


def test_a_pinned_layout_is_kept() -> None:
    free = gallery_setting("llama3-70b")
    fuller = search(free).candidate(free.recipe, 0).layout
    sizes = ("tensor", "pipeline", "virtual_pipeline", "context", "micro_batch_size", "zero_stage")
    pins = ", ".join(f"{name}: {getattr(fuller, name)}" for name in sizes)
    plan = plan_of("llama3-70b", f"layout={{{pins}, recompute: none, layers_by_stage: even}}")
    assert all(getattr(plan.layout, name) == getattr(fuller, name) for name in sizes)
    assert plan.verdict == SAFE


def rehearsal_of(setting: Setting, candidate: Candidate) -> Rehearsal:
    """Return a rehearsal in which the candidate needed more than the card has."""
    card = setting.limit.memory_bytes
    return Rehearsal(
        workload=setting.recipe.workload,
        layout=candidate.layout,
        techniques=candidate.techniques,
        gradient_dtype=candidate.gradient_dtype,
        safe=False,
        device_bytes=card + GIB,
        limit_bytes=setting.limit.limit_bytes,
        short_bytes=card + GIB - candidate.device_bytes,
        sentence="it needed more than the card has",
        details={},
    )
