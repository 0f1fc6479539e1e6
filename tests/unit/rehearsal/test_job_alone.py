"""A rank alone runs without the techniques that take other ranks: what it ran without is said, priced and recorded."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from llmlaunch.assets import asset
from llmlaunch.frameworks.framework import framework_of
from llmlaunch.planner.plan import Plan
from llmlaunch.recipe.types import MemoryPolicy
from llmlaunch.rehearsal.ranks import ON_GPU, ON_TRACE, Omission, Place, RehearsedRank, headline
from llmlaunch.rehearsal.records import shape_of
from llmlaunch.rehearsal.report import rehearsal_text
from llmlaunch.rehearsal.verdict import Judgement, judge_plan, rehearsals_of, rehearsed_ranks, unseen_by_a_trace
from llmlaunch.units import GIB
from support.recipes import recipe_of
from support.rehearsed_plans import PINS, alone, on_gpu, planned, records, traced

OVERLAPPED = planned(*PINS, "layout.recompute=none", "layout.tp_comm_overlap=true")
BY_DEEPEP = (
    *("layout={tensor: 1, pipeline: 2, virtual_pipeline: 1, context: 1, expert: 8, micro_batch_size: 1}", "nodes=4"),
    *("layout.token_dispatcher=flex", "layout.recompute=full", "training.global_batch_size=256"),
)
UNSEEN = unseen_by_a_trace(OVERLAPPED.setting.job_of(OVERLAPPED.recipe), OVERLAPPED.plan.layout)


def rehearsed(on: Place, ratio: float = 1.0) -> RehearsedRank:
    """The first rank as it ran without the overlap, at `ratio` times what is predicted of that."""
    omissions = alone(OVERLAPPED, on).omissions[0]
    whole = on_gpu(OVERLAPPED, omissions=omissions) if on == ON_GPU else traced(OVERLAPPED, omissions=omissions)
    run = whole.predicted_as_run
    process = run.device_bytes - run.terms["communicators"] if on == ON_GPU else None
    return replace(
        whole,
        allocated_bytes=round(run.allocated_bytes * ratio),
        reserved_bytes=round(run.reserved_bytes * ratio),
        process_bytes=None if process is None else round(process * ratio),
    )


def judged(rank: RehearsedRank, plan: Plan = OVERLAPPED.plan) -> Judgement:
    return judge_plan(plan, [rank], MemoryPolicy(), UNSEEN)


@pytest.mark.parametrize("on", [ON_GPU, ON_TRACE])
def test_the_overlap_of_tensor_parallelism_is_left_out_and_nothing_else_changes(on: Place) -> None:
    job = alone(OVERLAPPED, on)
    words = [str(word) for word in OVERLAPPED.rendered.program]
    assert "--tp-comm-overlap" in words
    assert [str(word) for word in job.rendered.program] == [word for word in words if word != "--tp-comm-overlap"]
    assert [omission.technique for omission in job.omissions[0]] == ["tp_comm_overlap"]


def test_a_job_whose_ranks_can_run_alone_is_run_as_it_is() -> None:
    plain = planned(*PINS, "layout.tp_comm_overlap=false")
    job = alone(plain, ON_GPU)
    assert (job.recipe, job.plan, job.rendered) == (plain.recipe, plain.plan, plain.rendered)
    assert not any(job.omissions)


def test_what_is_left_out_is_priced_at_what_the_estimate_has_with_it_beyond_without() -> None:
    (omission,) = alone(OVERLAPPED, ON_GPU).omissions[0]
    planned_rank = OVERLAPPED.plan.estimate.ranks[0]
    assert omission.terms is not None
    assert omission.terms["user_buffers"] == planned_rank.terms["user_buffers"] > 0
    assert set(omission.terms) == {"user_buffers", "workspace", "allocator_cache"}


def test_deepeps_buffers_are_priced_and_an_all_to_all_runs_in_their_place() -> None:
    mixture = planned(*BY_DEEPEP, recipe=str(asset("recipes", "mixtral-8x7b.yaml")))
    job = alone(mixture, ON_GPU)
    assert {"alltoall"} <= set(map(str, job.rendered.program))
    assert not {"flex", "deepep"} & set(map(str, job.rendered.program))
    omission = job.omissions[0][0]
    assert omission.technique == "token_dispatcher=flex"
    assert omission.added_to_process >= mixture.plan.estimate.ranks[0].terms["exchange_buffers"] > 0


def test_a_trace_lacks_graphs_which_a_gpu_runs() -> None:
    """Overlapped micro-batches are traced as they run."""
    recipe = recipe_of("mixtral-8x7b", "layout.cuda_graphs=[attn]", "layout.overlap_expert_communication=true")
    assert [each.name for each in framework_of(recipe).omitted_alone(recipe, traced=False)] == []
    names = [each.name for each in framework_of(recipe).omitted_alone(recipe, traced=True)]
    assert names == ["cuda_graphs"]


def test_a_rank_alone_saves_nothing_so_its_writer_is_not_rehearsed() -> None:
    saved = ("training.checkpoint_path=/ckpt", "training.save_interval=10", "training.async_save=true")
    job = alone(planned(*PINS, "layout.tp_comm_overlap=false", *saved), ON_GPU)
    assert [(each.technique, each.terms) for each in job.omissions[0]] == [("async_save", None)]


def test_what_no_key_of_a_recipe_prices_is_said_and_keeps_the_rules_limit() -> None:
    registered = planned(*PINS, "layout.tp_comm_overlap=false", "backend.extra_args=[--use-nccl-ub]")
    job = alone(registered, ON_GPU)
    assert [(each.technique, each.terms) for each in job.omissions[0]] == [("--use-nccl-ub", None)]
    assert job.rendered == registered.rendered
    rank = on_gpu(registered, omissions=job.omissions[0])
    limited = replace(registered.plan, limit=replace(registered.plan.limit, limit_bytes=60 * GIB))
    judgement = judge_plan(limited, [rank], MemoryPolicy(), UNSEEN)
    assert judgement.ranks[0].limit_bytes == 60 * GIB
    without = judge_plan(limited, [replace(rank, omissions=())], MemoryPolicy(), UNSEEN)
    assert without.ranks[0].limit_bytes > 60 * GIB
    assert "--use-nccl-ub was left out, and the estimate has no price for it" in judgement.sentences
    small = replace(rank, process_bytes=GIB, stands_for=tuple(range(registered.plan.layout.pipeline)))
    verdicts = [judged(each, registered.plan).verdict for each in (small, replace(small, omissions=()))]
    assert verdicts == ["tight", "safe"]


@pytest.mark.parametrize("on", [ON_GPU, ON_TRACE])
def test_measured_and_priced_bytes_together_judge_the_planned_layout(on: Place) -> None:
    """A rank that holds exactly what is predicted of what ran is judged as the whole plan is predicted."""
    rank = judged(rehearsed(on)).ranks[0]
    assert rank.parts["tp_comm_overlap"] > 0
    cache = OVERLAPPED.plan.estimate.ranks[0].terms["allocator_cache"]
    unseen = sum(UNSEEN[0].values()) if on == ON_TRACE else 0
    assert abs(rank.device_bytes - unseen - rank.predicted.device_bytes) <= 0.05 * cache + 2
    priced = rehearsed(on).priced["tp_comm_overlap"]
    assert rank.device_bytes - judged(replace(rehearsed(on), omissions=())).ranks[0].device_bytes == priced


def test_what_ran_is_compared_with_what_is_predicted_of_it() -> None:
    for on in (ON_GPU, ON_TRACE):
        peak = headline(rehearsed(on))
        assert peak.difference == pytest.approx(0.0, abs=1e-6)
        assert peak.predicted_bytes < headline(replace(rehearsed(on), omissions=())).predicted_bytes


def test_where_the_planned_job_needs_less_nothing_is_taken_off_what_was_measured() -> None:
    fewer = Omission("token_dispatcher=flex", "why", {"layer_backward": -GIB, "exchange_buffers": 3 * GIB})
    assert (fewer.added_to_allocated, fewer.added_to_process) == (0, 3 * GIB)


def test_it_says_what_was_left_out_and_what_was_added() -> None:
    rank = rehearsed(ON_GPU)
    judgement = judged(rank)
    added = f"{rank.priced['tp_comm_overlap'] / GIB:.2f} GiB"
    text = rehearsal_text(OVERLAPPED.plan, [rank], judgement, None)
    assert "Left out: tp_comm_overlap of the planned job (Transformer Engine" in text
    assert f"it was run without tp_comm_overlap, for which the estimate adds {added}" in text.replace("\n", " ")
    assert any(line.strip().startswith("tp comm overlap *") for line in text.splitlines())


def test_a_record_keeps_apart_what_was_measured_and_what_was_priced() -> None:
    rank = rehearsed(ON_GPU)
    kept = json.loads(json.dumps(records(OVERLAPPED, rank)))
    everything = records(OVERLAPPED, replace(rank, omissions=()))
    assert not {record["id"] for record in kept} & {record["id"] for record in everything}
    (device,) = [record for record in kept if record["peak_kind"] == "device"]
    assert device["peak_bytes"] == rank.process_bytes
    assert device["predicted_bytes"] == rank.predicted_as_run.device_bytes
    assert "tp_comm_overlap" not in device["recipe"].get("techniques", {}), "the peak is of what ran"
    assert device["rehearsal"]["techniques"]["tp_comm_overlap"] is True, "it speaks for what was planned"
    assert device["rehearsal"]["left_out"] == [omission.as_json() for omission in rank.omissions]
    assert "run without tp_comm_overlap" in device["source"]["note"]


def test_a_later_plan_of_the_same_layout_is_judged_by_both() -> None:
    rank = rehearsed(ON_GPU)
    (rehearsal, as_run) = rehearsals_of(records(OVERLAPPED, rank), OVERLAPPED.setting)
    assert (rehearsal.techniques.tp_comm_overlap, as_run.techniques.tp_comm_overlap) == (True, False)
    assert rehearsal.device_bytes == judged(rank).worst.device_bytes
    (left_out,) = rehearsal.details["ranks"][0]["left_out"]
    assert left_out["technique"] == "tp_comm_overlap"


def test_it_is_a_rehearsal_of_the_job_that_ran_as_well_which_lacks_nothing() -> None:
    """Otherwise the plan without the technique would be chosen next, although that is what ran out of memory."""
    ran = alone(OVERLAPPED, ON_GPU)
    shape = shape_of(ran.recipe, ran.plan)["shape"]
    (rank,) = rehearsed_ranks(records(OVERLAPPED, rehearsed(ON_GPU)), shape, ran.recipe, ran.plan)
    assert rank.omissions == ()
    assert rank.process_bytes == rehearsed(ON_GPU).process_bytes


def test_one_that_ran_everything_goes_before_one_that_did_not() -> None:
    shape = shape_of(OVERLAPPED.recipe, OVERLAPPED.plan)["shape"]
    whole = records(OVERLAPPED, replace(rehearsed(ON_GPU), omissions=()))
    found = rehearsed_ranks(
        [*whole, *records(OVERLAPPED, rehearsed(ON_GPU), at=2e9)], shape, OVERLAPPED.recipe, OVERLAPPED.plan
    )
    assert [rank.omissions for rank in found] == [()]
