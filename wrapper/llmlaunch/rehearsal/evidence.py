"""What records of rehearsals say of a plan: those of its very shape and framework version, and of no other. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from llmlaunch.backends.megatron.versions import NEWEST
from llmlaunch.calibration.support import same_minor
from llmlaunch.memory.estimate import RankEstimate
from llmlaunch.planner.plan import Plan
from llmlaunch.recipe.types import Recipe
from llmlaunch.rehearsal.records import place_of, rank_of
from llmlaunch.rehearsal.rehearsed import ON_GPU, RehearsedRank

__all__ = ["MALFORMED", "dated_ranks", "rehearsed_ranks"]

Record = Mapping[str, Any]
NOBODYS = RankEstimate(0, {}, 0, 0, 0)
# the store takes over any JSON object: one that only looks like a rehearsal says nothing
MALFORMED = (AttributeError, IndexError, KeyError, TypeError, ValueError)


def rehearsed_ranks(records: Iterable[Record], shape: str, recipe: Recipe, plan: Plan) -> tuple[RehearsedRank, ...]:
    """Of each pipeline rank of the plan the best rehearsal there is, by rank: on a GPU before a trace, the newer before
    the older. `shape` is the plan's, `records` any measurement records.

    A framework's version is the plan's where major and minor agree, as among measured runs.
    """
    return tuple(rank for rank, _ in dated_ranks(records, shape, recipe, plan))


def dated_ranks(
    records: Iterable[Record], shape: str, recipe: Recipe, plan: Plan
) -> tuple[tuple[RehearsedRank, float], ...]:
    """The same, each with the unix seconds of when it ran."""
    ranks, groups = plan.estimate.ranks, _best(records, shape, recipe)
    return tuple(
        (rank_of(groups[number], ranks[number]), float(groups[number][-1].get("started_at") or 0.0))
        for number in sorted(groups)
        if 0 <= number < len(ranks)
    )


def _best(records: Iterable[Record], shape: str, recipe: Recipe) -> dict[int, list[Record]]:
    """By pipeline rank the records of its best rehearsal."""
    found: dict[str, list[Record]] = {}
    for record in records:
        said = record.get("rehearsal")
        if isinstance(said, Mapping) and said.get("shape") == shape and _same_version(record, recipe):
            with suppress(*MALFORMED):
                rank_of([record], NOBODYS)
                place = place_of(shape, said["on"], said["versions"], record["pipeline_rank"])
                found.setdefault(place, []).append(record)
    return {int(group[-1]["pipeline_rank"]): group for group in sorted(found.values(), key=_worth)}


def _worth(group: Sequence[Record]) -> tuple[bool, float]:
    return group[-1]["rehearsal"]["on"] == ON_GPU, float(group[-1].get("started_at") or 0.0)


def _same_version(record: Record, recipe: Recipe) -> bool:
    """A Megatron recipe that names no version is rendered for the newest that llmlaunch knows."""
    newest = NEWEST if recipe.backend.name == "megatron-lm" else None
    return same_minor(record.get("backend_version"), recipe.backend.runs_version or newest)
