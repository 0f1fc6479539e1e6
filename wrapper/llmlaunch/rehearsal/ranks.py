"""One pipeline rank that is run alone, what it showed, and the planned job without what takes the other ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Literal

from llmlaunch.errors import UserError
from llmlaunch.frameworks.base import OmittedTechnique, Rendered
from llmlaunch.frameworks.framework import framework_of
from llmlaunch.layout import Layout
from llmlaunch.memory.estimator import RankEstimate, estimate
from llmlaunch.memory.peak import OUTSIDE_TORCH
from llmlaunch.models.shape import ModelShape
from llmlaunch.planner.plan import Plan, as_planned
from llmlaunch.planner.setting import Setting
from llmlaunch.recipe.types import Recipe
from llmlaunch.rendering.run_json import measurement_template
from llmlaunch.rundir.foreign_values import is_whole_number

Place = Literal["gpu", "trace"]
ON_GPU: Place = "gpu"
ON_TRACE: Place = "trace"
CACHE = "allocator_cache"


@dataclass(frozen=True)
class RankChoice:
    """A pipeline rank to run alone, and those that hold the same (itself among them)."""

    predicted: RankEstimate
    stands_for: tuple[int, ...]

    @property
    def pipeline_rank(self) -> int:
        return self.predicted.pipeline_rank


@dataclass(frozen=True)
class Omission:
    """A technique of the plan that a rank ran without: its `technique` as a plan lists it, and `why`.

    `terms` are the bytes that the estimate has with the technique beyond those without it, by term; negative where it
    needs less. NCCL's communicators are not among them: no rank alone shows those. None: the estimate has no price.
    """

    technique: str
    why: str
    terms: Mapping[str, int] | None

    @property
    def allocated_bytes(self) -> int:
        return sum(count for name, count in self._prices() if name not in (CACHE, *OUTSIDE_TORCH))

    @property
    def reserved_bytes(self) -> int:
        return self.allocated_bytes + dict(self._prices()).get(CACHE, 0)

    @property
    def device_bytes(self) -> int:
        return sum(count for _, count in self._prices())

    @property
    def added_to_allocated(self) -> int:
        """What is added to a peak of what torch's allocator handed out. Where the planned job needs less of that than
        what ran, nothing is taken off."""
        return max(self.allocated_bytes, 0)

    @property
    def added_to_process(self) -> int:
        """What is added to a peak of the whole process; again, nothing is taken off what torch reserved."""
        return max(self.reserved_bytes, 0) + self.device_bytes - self.reserved_bytes

    def as_json(self) -> dict[str, object]:
        """Plain values, as the record of a rehearsal keeps them."""
        return {"technique": self.technique, "why": self.why, "terms": None if self.terms is None else dict(self.terms)}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Omission:
        """As `as_json` wrote it."""
        terms = document["terms"]
        prices = None if terms is None else {str(name): int(count) for name, count in terms.items()}
        return cls(str(document["technique"]), str(document["why"]), prices)

    def _prices(self) -> Iterable[tuple[str, int]]:
        return () if self.terms is None else self.terms.items()


@dataclass(frozen=True)
class RehearsedRank:
    """One pipeline rank, and those in `stands_for` (itself among them), which hold the same.

    `allocated_bytes` is the peak of what torch's allocator handed out: counted in a trace, read from torch on a GPU.
    `reserved_bytes` is what that allocator took from the device for it: a replay of its rules in a trace
    (unvalidated), torch's own number on a GPU. `process_bytes` is what NVML says of the process on a GPU, with CUDA's
    context and without NCCL; None in a trace. All are what the rank had reached where it `ran_out` of memory, and None
    where nobody saw them. `terms` are the rehearsed bytes by the names of the estimate's terms, as far as what was
    alive at the peak can be told apart; they sum to `allocated_bytes`; empty where that is not known (on a GPU).
    `versions` are those of the frameworks that ran, by package; `remarks` are sentences for the person.
    `tracer_bytes` is the resident peak of the process that traced it, on this machine. `omissions` are the techniques
    of the plan that it ran without; `predicted` is of the plan, with them.
    """

    pipeline_rank: int
    on: Place
    predicted: RankEstimate
    allocated_bytes: int | None
    reserved_bytes: int | None = None
    process_bytes: int | None = None
    ran_out: bool = False
    stands_for: tuple[int, ...] = ()
    terms: Mapping[str, int] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    step_seconds: float | None = None  # of a step of this rank alone, on a GPU; None: nobody timed it
    remarks: tuple[str, ...] = ()
    tracer_bytes: int | None = None
    omissions: tuple[Omission, ...] = ()

    @property
    def priced(self) -> Mapping[str, int]:
        """Return what is added to the measured peak for each technique left out that the estimate has a price for. What
        is outside of torch counts where the process was measured; elsewhere all of that is the estimate's."""
        whole = self.process_bytes is not None
        return {
            omission.technique: omission.added_to_process if whole else omission.added_to_allocated
            for omission in self.omissions
            if omission.terms is not None
        }

    @property
    def unpriced(self) -> tuple[str, ...]:
        """Return the techniques left out that the estimate has no price for."""
        return tuple(omission.technique for omission in self.omissions if omission.terms is None)

    @property
    def predicted_as_run(self) -> RankEstimate:
        """Return the prediction without the techniques that the rank ran without: what was measured is beside that."""
        predicted, terms = self.predicted, dict(self.predicted.terms)
        for omission in self.omissions:
            for name, count in (omission.terms or {}).items():
                if name in terms:
                    terms[name] -= count
        return replace(
            predicted,
            terms=terms,
            allocated_bytes=predicted.allocated_bytes - sum(each.allocated_bytes for each in self.omissions),
            reserved_bytes=predicted.reserved_bytes - sum(each.reserved_bytes for each in self.omissions),
            device_bytes=predicted.device_bytes - sum(each.device_bytes for each in self.omissions),
        )


WORST, ALL = "worst", "all"

# Traced and estimated peaks differ by up to 3 % either way (tests/frameworks/test_megatron_traced.py), so that a rank
# predicted at 0.97 / 1.03 of the worst, 6 % below it, may be the true worst.
NEARLY_WORST = 0.94


def chosen_ranks(plan: Plan, shape: ModelShape, word: str) -> tuple[RankChoice, ...]:
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
    return (RankChoice(plan.estimate.ranks[rank], mine.stands_for),)


def _number(word: str) -> int | None:
    return int(word) if is_whole_number(word) and len(word) < 7 else None


def _alike(plan: Plan, shape: ModelShape) -> tuple[RankChoice, ...]:
    """Ranks that hold the same together; the first of them is run. Equal terms mean equal micro-batches in flight,
    too: activations are one of them."""
    groups: dict[object, list[RankEstimate]] = {}
    for rank in plan.estimate.ranks:
        number = rank.pipeline_rank
        place = number == 0, number == plan.layout.pipeline - 1, _layer_kinds(plan.layout, shape, number)
        groups.setdefault((tuple(rank.terms.items()), *place), []).append(rank)
    return tuple(RankChoice(same[0], tuple(rank.pipeline_rank for rank in same)) for same in groups.values())


def _layer_kinds(layout: Layout, shape: ModelShape, rank: int) -> tuple[tuple[int, ...], ...]:
    """Return the layers of each of a rank's model chunks in order, 1 for a mixture of experts."""
    stages = layout.pipeline * layout.virtual_pipeline
    sizes: Sequence[int] = layout.layers_by_stage or (shape.num_layers // stages,) * stages
    pattern = shape.moe.layer_pattern if shape.moe else (0,) * shape.num_layers
    ends = [sum(sizes[:stage]) for stage in range(len(sizes) + 1)]
    chunks = [tuple(pattern[start:stop]) for start, stop in pairwise(ends)]
    return tuple(chunks[rank :: layout.pipeline])


@dataclass(frozen=True)
class Line:
    """One term of what torch's allocator handed out. `rehearsed_bytes` None: what was alive could not be told apart."""

    term: str
    predicted_bytes: int
    rehearsed_bytes: int | None


@dataclass(frozen=True)
class Peak:
    """The same peak predicted and rehearsed. `kind` is "allocated", or "device" of what a process has on a GPU by NVML,
    without NCCL. `rehearsed_bytes` None: nobody saw it."""

    kind: str
    predicted_bytes: int
    rehearsed_bytes: int | None

    @property
    def difference(self) -> float | None:
        """How far the rehearsed peak is above the predicted one, as a share of it: 0.02 is 2 % more."""
        if self.rehearsed_bytes is None or not self.predicted_bytes:
            return None
        return self.rehearsed_bytes / self.predicted_bytes - 1.0


def compared(rank: RehearsedRank) -> tuple[Line, ...]:
    """By the estimate's terms, in its order; then terms that only the rehearsal knows. Terms that are nothing in both
    are left out."""
    terms = rank.predicted_as_run.terms
    predicted = {name: count for name, count in terms.items() if name not in (CACHE, *OUTSIDE_TORCH)}
    names = dict.fromkeys((*predicted, *rank.terms))
    lines = (Line(name, predicted.get(name, 0), rank.terms.get(name, 0) if rank.terms else None) for name in names)
    return tuple(line for line in lines if line.predicted_bytes or line.rehearsed_bytes)


def headline(rank: RehearsedRank) -> Peak:
    """The one peak that is compared: what a trace counts exactly, or all that a process has on a GPU but NCCL's. Both
    sides are without what the rank ran without."""
    predicted = rank.predicted_as_run
    if rank.on == ON_TRACE or rank.process_bytes is None:
        return Peak("allocated", predicted.allocated_bytes, rank.allocated_bytes)
    alone = predicted.device_bytes - predicted.terms.get("communicators", 0)
    return Peak("device", alone, rank.process_bytes)


COMMUNICATORS = "communicators"


@dataclass(frozen=True)
class JobAlone:
    """`recipe`, `plan` and `rendered` are of the job that runs: the planned one, without what was left out. `omissions`
    says of each pipeline rank, in order, what that is and what it is priced at."""

    recipe: Recipe
    plan: Plan
    rendered: Rendered
    omissions: Sequence[tuple[Omission, ...]]

    def measurement(self) -> dict[str, object]:
        """Return the measurement record of what runs, without a peak."""
        return measurement_template(self.recipe, self.plan)


def job_alone(setting: Setting, recipe: Recipe, plan: Plan, rendered: Rendered, traced: bool) -> JobAlone:
    """Return what runs on a GPU, or is `traced`. `recipe`, `plan` and `rendered` are the planned job's, which is
    returned as it is where nothing has to be left out."""
    omitted = framework_of(recipe).omitted_alone(recipe, traced)
    ranks = _estimated_ranks(setting, recipe, plan)
    omissions: list[tuple[Omission, ...]] = [()] * len(ranks)
    alone, chosen = recipe, plan.chosen
    for technique in omitted:
        chosen = replace(chosen, techniques=replace(chosen.techniques, **technique.instead))
        alone = as_planned(recipe, chosen)
        fewer = _estimated_ranks(setting, alone, plan)
        omissions = [
            (*before, _omission(technique, *pair)) for before, *pair in zip(omissions, ranks, fewer, strict=True)
        ]
        ranks = fewer
    if chosen == plan.chosen:
        return JobAlone(recipe, plan, rendered, omissions)
    rendered_alone = setting.backend.render(alone, plan.layout)
    return JobAlone(alone, replace(plan, chosen=chosen), rendered_alone, omissions)


def _estimated_ranks(setting: Setting, recipe: Recipe, plan: Plan) -> tuple[RankEstimate, ...]:
    return estimate(setting.job_of(recipe), plan.layout).ranks


def _omission(technique: OmittedTechnique, planned: RankEstimate, without: RankEstimate) -> Omission:
    if not technique.instead:
        return Omission(technique.name, technique.why, None)
    return Omission(technique.name, technique.why, _difference(planned.terms, without.terms))


def _difference(planned: Mapping[str, int], without: Mapping[str, int]) -> dict[str, int]:
    names = dict.fromkeys((*planned, *without))
    more = {name: planned.get(name, 0) - without.get(name, 0) for name in names if name != COMMUNICATORS}
    return {name: count for name, count in more.items() if count}
