"""Which pipeline ranks of a plan are run alone.

Tensor, context and data peers of a pipeline rank hold the same, so one process speaks for a whole rank. Ranks of one
pipeline differ by the layers they hold, by the embedding and the output layer, and by how many micro-batches they keep
in flight.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from llmlaunch.errors import UserError
from llmlaunch.layout import Layout
from llmlaunch.memory.estimate import RankEstimate
from llmlaunch.models.shape import ModelShape
from llmlaunch.planner.plan import Plan
from llmlaunch.rehearsal.rehearsed import AskedRank

__all__ = ["ALL", "NEARLY_WORST", "WORST", "asked_ranks"]

WORST, ALL = "worst", "all"

# Traced and estimated peaks differ by up to 3 % either way (tests/frameworks/test_megatron_traced.py), so that a rank
# predicted at 0.97 / 1.03 of the worst, 6 % below it, may be the true worst.
NEARLY_WORST = 0.94

Kinds = tuple[tuple[int, ...], ...]  # of every model chunk of a rank: its layers, 1 for a mixture of experts
Held = tuple[tuple[tuple[str, int], ...], bool, bool, Kinds]


def asked_ranks(plan: Plan, shape: ModelShape, word: str) -> tuple[AskedRank, ...]:
    """The ranks that `word` means, each with those that hold the same: "worst" (every distinct one whose predicted
    device peak is so near the largest that it may be the true worst), "all" (every distinct one), or a rank's number.

    Raises:
        UserError: `word` is none of these, or the plan has no such rank.
    """
    groups = _alike(plan, shape)
    if word == ALL:
        return groups
    if word == WORST:
        enough = NEARLY_WORST * plan.estimate.worst.device_bytes
        near = (group for group in groups if group.predicted.device_bytes >= enough)
        return tuple(sorted(near, key=lambda group: -group.predicted.device_bytes))
    rank, last = _number(word), plan.layout.pipeline - 1
    if rank is None or not 0 <= rank <= last:
        ranks = "there is only pipeline rank 0" if last == 0 else f"pipeline ranks are 0 to {last}"
        raise UserError(
            f"--rank {word}: the planned layout, {plan.layout.describe()}, has none such: {ranks}; or say worst or all"
        )
    mine = next(group for group in groups if rank in group.stands_for)
    return (AskedRank(plan.estimate.ranks[rank], mine.stands_for),)


def _number(word: str) -> int | None:
    return int(word) if word.isascii() and word.isdigit() and len(word) < 7 else None


def _alike(plan: Plan, shape: ModelShape) -> tuple[AskedRank, ...]:
    """Ranks that hold the same together; the first of them is run. Equal terms mean equal micro-batches in flight,
    too: activations are one of them."""
    found: dict[Held, list[RankEstimate]] = {}
    for rank in plan.estimate.ranks:
        found.setdefault(_held(plan.layout, shape, rank), []).append(rank)
    return tuple(AskedRank(same[0], tuple(rank.pipeline_rank for rank in same)) for same in found.values())


def _held(layout: Layout, shape: ModelShape, rank: RankEstimate) -> Held:
    place = rank.pipeline_rank
    return tuple(rank.terms.items()), place == 0, place == layout.pipeline - 1, _kinds(layout, shape, place)


def _kinds(layout: Layout, shape: ModelShape, rank: int) -> Kinds:
    """Whether each layer of the rank's model chunks is a mixture, in order."""
    stages = layout.pipeline * layout.virtual_pipeline
    sizes: Sequence[int] = layout.layers_by_stage or (shape.num_layers // stages,) * stages
    pattern = shape.moe.layer_pattern if shape.moe else (0,) * shape.num_layers
    ends = [sum(sizes[:stage]) for stage in range(len(sizes) + 1)]
    chunks = [tuple(pattern[start:stop]) for start, stop in pairwise(ends)]
    return tuple(chunks[rank :: layout.pipeline])
