"""A plan of the gallery, and ranks of it as a rehearsal would show them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from llmlaunch.assets import asset
from llmlaunch.frameworks.base import Rendered
from llmlaunch.frameworks.framework import backend_for
from llmlaunch.planner.plan import Plan, as_planned
from llmlaunch.planner.planning import make_sized_plan
from llmlaunch.planner.setting import Setting, setting_of
from llmlaunch.recipe.load import load_recipe
from llmlaunch.recipe.types import Recipe
from llmlaunch.rehearsal.ranks import ON_GPU, ON_TRACE, JobAlone, Place, RehearsedRank, job_alone
from llmlaunch.rehearsal.records import records_of

GALLERY = str(asset("recipes", "llama3-8b.yaml"))
PINS = (
    *("layout.tensor=2", "layout.pipeline=4", "layout.micro_batch_size=1", "layout.virtual_pipeline=1"),
    *("layout.context=1", "layout.zero_stage=1"),
)
FOUR_STAGES = "layout={tensor: 4, pipeline: 4, virtual_pipeline: 1, context: 1, micro_batch_size: 1}"
VERSIONS = {"megatron-core": "0.19.2", "torch": "2.13.0+cpu", "transformer_engine": "2.20.2"}
AT = 1_760_000_000.0
COMMAND = "llmlaunch rehearse llama3-8b.yaml"


@dataclass(frozen=True)
class Planned:
    recipe: Recipe
    plan: Plan
    rendered: Rendered
    setting: Setting


@cache
def planned(*words: str, recipe: str = GALLERY) -> Planned:
    """As `check` plans it, with no store."""
    loaded = load_recipe(recipe, words or PINS)
    backend = backend_for(loaded)
    setting, plan = make_sized_plan(setting_of(loaded, backend))
    said = as_planned(setting.recipe, plan.chosen)
    return Planned(said, plan, backend.render(said, plan.layout), setting)


def traced(one: Planned, pipeline_rank: int = 0, ratio: float = 1.0, **changed: Any) -> RehearsedRank:
    """A rank counted in a trace, at `ratio` times what is predicted."""
    predicted = one.plan.estimate.ranks[pipeline_rank]
    rank = RehearsedRank(
        pipeline_rank=pipeline_rank,
        on=ON_TRACE,
        predicted=predicted,
        allocated_bytes=round(predicted.allocated_bytes * ratio),
        reserved_bytes=round(predicted.reserved_bytes * ratio),
        stands_for=(pipeline_rank,),
        terms={"activations": round(predicted.allocated_bytes * ratio)},
        versions=VERSIONS,
        seconds=7.5,
        remarks=("said so",),
    )
    return replace(rank, **changed)


def on_gpu(one: Planned, pipeline_rank: int = 0, ratio: float = 1.0, **changed: Any) -> RehearsedRank:
    """The same on a GPU."""
    predicted = one.plan.estimate.ranks[pipeline_rank]
    seen = {
        "on": ON_GPU,
        "process_bytes": round(predicted.device_bytes * ratio),
        "terms": {},
        "versions": {"megatron-core": "0.19.0", "torch": "2.12.0"},
    }
    return traced(one, pipeline_rank, ratio, **(seen | changed))


def alone(one: Planned, on: Place) -> JobAlone:
    """What runs of the planned job, on a GPU or traced."""
    return job_alone(one.setting, one.recipe, one.plan, one.rendered, traced=on == ON_TRACE)


def records(one: Planned, *ranks: RehearsedRank, at: float = AT) -> list[dict[str, Any]]:
    """Of ranks that ran all of the planned job, or of all that left out the same."""
    everything = JobAlone(one.recipe, one.plan, one.rendered, [()] * one.plan.layout.pipeline)
    job = alone(one, ranks[0].on) if ranks and ranks[0].omissions else everything
    return records_of(one.recipe, one.plan, job, ranks, at, COMMAND)
