"""A plan: the chosen layout, what it needs, how long a step and the whole job take, and why the others were
not chosen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from typing import Any

from llmlaunch.calibration.evidence import FUJII_SHARE
from llmlaunch.calibration.lessons import NO_TIME_EVIDENCE, Rehearsal, TimeEvidence
from llmlaunch.calibration.margins import Margin
from llmlaunch.frameworks.classed_arguments import NO_ARGUMENTS, ClassedArguments
from llmlaunch.frozen import frozen
from llmlaunch.layout import Layout
from llmlaunch.memory.estimator import Estimate
from llmlaunch.memory.job import NO_CORRECTION, Correction
from llmlaunch.planner.search_space import Candidate, Change, ChangedChoice, FasterLayout, FullerLayout
from llmlaunch.recipe.training import AUTO_INTERVAL
from llmlaunch.recipe.types import NO_BUDGET, Budget, Recipe
from llmlaunch.timing.step import evaluation_seconds
from llmlaunch.units import DAY, GIB, HOUR
from llmlaunch.verdicts import SAFE, TIGHT, UNSAFE


@frozen
class ExpectedEnd:
    """When the job is expected to end, with its saves, stops that nobody planned and the error of the predicted step
    time; waiting in the queue is not in it. Times are None where the job may never end.

    `step_time_spread` is the relative standard deviation of real step times from predicted ones. It is None where no
    run of such a job was measured, as `step_time_source` says; then nobody knows `p95_seconds` and `within_budget`
    either, and `p50_seconds` holds if steps take as long as predicted.

    `goodput` is the share of the time in which it makes steps that last, `stops` the mean number of stops,
    `save_interval` the steps between two saves that stay, with `save_interval_reason` where the recipe leaves it open,
    `non_persistent_interval` those between two others, `within_budget` the probability to end within `budget.days`."""

    p50_seconds: float | None
    p95_seconds: float | None
    goodput: float
    stops: float | None
    device_hours_between_stops: float
    stops_source: str
    save_interval: int | None
    save_interval_reason: str | None
    save_seconds: float | None
    resume_seconds: float
    step_time_spread: float | None
    step_time_source: str
    within_budget: float | None = None
    non_persistent_interval: int | None = None


@frozen
class FasterOnFewer:
    """Fewer nodes on which a step takes less time, with the safe layout that does. `network_share` is the share of the
    planned step that waits for the network."""

    nodes: int
    step_seconds: float
    layout: Layout
    network_share: float

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "layout": self.layout.as_json()}


__all__ = [
    "NO_LAYOUT",
    "Candidate",
    "ChangedChoice",
    "Fallback",
    "Fallbacks",
    "FewerNodes",
    "FullerLayout",
    "JobLength",
    "NodeTrial",
    "Plan",
    "Sizing",
    "as_planned",
    "fujii_verdict",
    "risk_words",
    "verdict_with_risk",
    "with_save_interval",
]

NO_LAYOUT = "no_layout"  # why a number of nodes was refused


def with_save_interval(recipe: Recipe, plan: Plan) -> Recipe:
    """Return the recipe with the steps between two saves that the plan chose, where the recipe leaves them open."""
    training = recipe.training
    if training.save_interval != AUTO_INTERVAL or plan.expected is None:
        return recipe
    return replace(recipe, training=replace(training, save_interval=plan.expected.save_interval))


def as_planned(recipe: Recipe, chosen: Candidate) -> Recipe:
    """Return the recipe with the chosen techniques in place of those left free: what is rendered and recorded."""
    training = replace(recipe.training, gradient_dtype=chosen.gradient_dtype)
    return replace(recipe, techniques=chosen.techniques, training=training)


@frozen
class JobLength:
    """The whole training as planned. `gpu_hours` sums over all devices, CPUs too. `evaluation_seconds` are those of
    `seconds` that evaluate."""

    steps: int
    seconds: float
    gpu_hours: float
    tokens: int
    evaluation_seconds: float = 0.0

    @classmethod
    def of(cls, recipe: Recipe, step_seconds: float) -> JobLength:
        """Return the length of all steps at `step_seconds` each, and of the evaluations: computing alone, no queue, no
        checkpoint, no restart."""
        steps, evaluation = recipe.training.steps, recipe.training.evaluation
        batches = 0 if evaluation is None else evaluation.times(steps) * evaluation.iterations
        evaluating = evaluation_seconds(batches, step_seconds)
        seconds = steps * step_seconds + evaluating
        tokens = steps * recipe.workload.tokens_per_step
        return cls(steps, seconds, seconds * recipe.world_size / HOUR, tokens, evaluating)


@frozen
class NodeTrial:
    """The outcome for one number of nodes. `refused` is "no_layout", "tight", "memory", "host_memory",
    "broken_estimate", "rehearsed", "days" or "gpu_hours", and None where the fastest safe layout stays within the
    budget; a tight one counts as safe where the recipe accepts it. `device_bytes` is the worst rank's of the best
    layout, None where none is legal or its estimate is broken; `length` and `layout` are those of the fastest safe one,
    None where none is safe. All are None where nothing was searched."""

    nodes: int
    refused: str | None
    reason: str
    device_bytes: int | None = None
    length: JobLength | None = None
    layout: Layout | None = None

    def as_json(self) -> dict[str, Any]:
        trial = asdict(self)
        length = trial.pop("length")
        del trial["layout"]
        return {**trial, "job": length}


@frozen
class Sizing:
    """The numbers of nodes tried, ascending; only the last may have succeeded."""

    tried: tuple[NodeTrial, ...]

    @property
    def nodes(self) -> int | None:
        """The fewest nodes that succeeded; None where none of those tried did."""
        return self.tried[-1].nodes if self.tried and self.tried[-1].refused is None else None

    def as_json(self) -> dict[str, Any]:
        return {"nodes": self.nodes, "tried": [trial.as_json() for trial in self.tried]}


@frozen
class WhatIf:
    """What one technique changes of the plan's layout: bytes of its fullest device and of a node's host memory, and
    seconds of a step, each with it less without it."""

    key: str
    value: object
    device_bytes: int
    host_bytes: int
    step_seconds: float

    @property
    def sentence(self) -> str:
        host = "" if not self.host_bytes else f", {_more(self.host_bytes / GIB, 'GiB', 1)} host memory a node"
        device = f"{_more(self.device_bytes / GIB, 'GiB', 1)} on the fullest device"
        value = str(self.value).lower() if isinstance(self.value, bool) else self.value
        return f"{self.key.partition('.')[2]}: {value}: {device}{host}, {_more(self.step_seconds, 's', 3)} a step"

    def as_json(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}


def _more(amount: float, unit: str, digits: int) -> str:
    return f"{abs(amount):.{digits}f} {unit} {'less' if amount < 0 else 'more'}"


@frozen
class Plan:
    """The chosen layout with everything a reader asks of it. `verdict` is one of `verdicts.VERDICTS`, by memory alone;
    TIGHT and UNSAFE only where no layout is safe; UNKNOWN, with its `reason`, where what decides memory was not read:
    the figures are then those without it. An unsafe plan carries the closest layout. A tight or unsafe one has in
    `advice` the smallest change that would be safe, which is `change` where one is known. `accepts_tight` is what the
    recipe says of tight plans. `beyond_budget` says by how much a plan that may run exceeds the recipe's budget, and
    the nearest that would do. `fallbacks` follow where a device runs out of memory; None where neither the recipe asks
    for one nor the plan is tight. `rehearsed` is the result of ranks of this very layout that ran alone, and decides
    the verdict. `arguments` are the person's own; what unknown ones do to the verdict is in `planner.doubt`."""

    recipe: str
    verdict: str
    chosen: Candidate
    estimate: Estimate
    limit: Margin
    step_terms: Mapping[str, float]  # seconds of the step by what they are spent on
    mfu: float | None  # model FLOPs over the devices' dense peak; None: the peak of this precision is not known
    length: JobLength
    searched: int
    refused: Mapping[str, int]  # rule key, "memory", "host_memory", "broken_estimate" or "rehearsed" -> layouts
    refusal_sentences: Mapping[str, str]  # rule key -> its sentence and where it is checked
    alternatives: tuple[Candidate, ...]
    not_modelled: tuple[str, ...]
    assumptions: tuple[str, ...]
    advice: str | None = None
    change: Change | None = None
    host_limit: Margin | None = None  # None: the nodes' memory is not known
    sizing: Sizing | None = None  # None: the recipe says how many nodes
    budget: Budget = NO_BUDGET
    beyond_budget: str | None = None
    fallbacks: Fallbacks | None = None
    fewer_nodes: FewerNodes | None = None  # for where nodes are lost; None: the recipe does not ask
    correction: Correction = NO_CORRECTION  # from measured runs, included in every number of bytes here
    rehearsed: Rehearsal | None = None  # None: nobody rehearsed it
    accepts_tight: bool = False
    locked_by: str = ""  # name of the file that keeps the recipe to this plan; "" where it was chosen now
    arguments: ClassedArguments = NO_ARGUMENTS
    what_ifs: tuple[WhatIf, ...] = ()  # what each technique that no backend runs changes of this layout
    unrendered: tuple[str, ...] = ()  # what `render` refuses of a recipe that is priced all the same
    faster: FasterLayout | None = None  # None: no safe layout is faster by more than nothing can tell apart
    fuller: FullerLayout | None = None  # None: the rule of head-room changed nothing
    expected: ExpectedEnd | None = None  # None: of a plan that is no whole job's, such as a fallback's
    time: TimeEvidence = NO_TIME_EVIDENCE
    reason: str = ""  # why there is no verdict; "" where there is one
    faster_on_fewer: FasterOnFewer | None = None  # None: no layout near the chosen one is faster on fewer nodes
    changed: ChangedChoice | None = None  # None: without what was measured on this site the plan would be the same

    @property
    def layout(self) -> Layout:
        return self.chosen.layout

    @property
    def changes(self) -> Mapping[str, Any] | None:
        """The recipe keys that `change` sets, None for a key that it removes; None where no change is known."""
        return None if self.change is None else self.change.settings

    @property
    def stated_risk(self) -> float | None:
        """The share of comparable runs that would need more than the card has; None where no measured run can tell."""
        return self.limit.risk_of(self.device_bytes)

    @property
    def verdict_with_risk(self) -> str:
        """The verdict as screens and pages show it, with the stated risk."""
        return verdict_with_risk(self.verdict, self.stated_risk, self.estimate.peak_kind)

    @property
    def host_bytes_beyond(self) -> int:
        """Bytes a node needs beyond its host memory's limit; 0 where it fits."""
        if self.host_limit is None or self.estimate.host_bytes_per_node is None:
            return 0
        return max(self.estimate.host_bytes_per_node - self.host_limit.limit_bytes, 0)

    @property
    def safe(self) -> bool:
        return self.verdict == SAFE

    @property
    def verdict_by_estimate(self) -> str:
        """The verdict if nobody had rehearsed the plan."""
        if self.host_bytes_beyond or self.estimate.fault is not None:
            return UNSAFE
        return self.limit.verdict_of(self.estimate.worst.device_bytes)

    @property
    def tight_by_arguments(self) -> bool:
        """Whether nothing but arguments whose memory nobody knows keeps the plan from being safe."""
        return self.verdict == TIGHT and bool(self.arguments.costing) and self.verdict_by_estimate == SAFE

    @property
    def accepted(self) -> bool:
        """Whether the plan is tight, and the recipe accepts that."""
        return self.verdict == TIGHT and self.accepts_tight

    @property
    def may_run(self) -> bool:
        """Whether the plan is safe, or tight and accepted, or was so when it was locked; the budget is apart."""
        return self.safe or self.accepted or bool(self.locked_by)

    @property
    def verdict_with_budget(self) -> str:
        """The verdict, UNSAFE where the plan exceeds the budget: the colour it is shown in."""
        return self.verdict if self.beyond_budget is None else UNSAFE

    @property
    def good(self) -> bool:
        """Whether the plan may run, and stays within the budget."""
        return self.may_run and self.beyond_budget is None

    @property
    def device_bytes(self) -> int:
        """The device peak the verdict rests on: the rehearsed one where there is one."""
        return self.estimate.worst.device_bytes if self.rehearsed is None else self.rehearsed.device_bytes


@frozen
class Fallback:
    """The plan that takes over where the layout before it ran out of memory. `loads` says for each layout before it,
    the planned one first, whether this plan can load its checkpoints. `change` says what it changes of the recipe's
    pins; None where it keeps them."""

    plan: Plan
    loads: tuple[bool, ...]
    change: str | None = None

    @property
    def keeps_checkpoints(self) -> bool:
        """Whether this layout loads the checkpoints of the layout just before it, so that training continues."""
        return self.loads[-1]


@frozen
class Fallbacks:
    """The layouts to fall back on, each with more head-room than the one before. `missing` says why there are fewer
    than the recipe asks for."""

    layouts: tuple[Fallback, ...]
    missing: str | None = None


@frozen
class FewerNodes:
    """Layouts for fewer nodes, the most first, with their numbers: all load each other's checkpoints and those of the
    planned layout. `without` says of numbers that were searched why they have none."""

    plans: tuple[tuple[int, Plan], ...]
    without: Mapping[int, str]


def risk_words(stated_risk: float | None, name: str = "risk") -> str:
    """Return the stated risk of running out of memory as screens and pages show it: `risk 0.45 %`."""
    return f"{name} not known" if stated_risk is None else f"{name} {100 * stated_risk:.2g} %"


def verdict_with_risk(verdict: str, stated_risk: float | None, peak_kind: str | None) -> str:
    """Return a verdict with its stated risk beside it: `safe (risk 0.45 %)`. What does not fit, and a process on a CPU,
    which nobody measured like that, have none."""
    stated = verdict in (SAFE, TIGHT) and peak_kind == "device"
    return f"{verdict} ({risk_words(stated_risk)})" if stated else verdict


def fujii_verdict(device_bytes: int, memory_bytes: int) -> str:
    """Return what Fujii et al.'s rule says of a peak: at most 80 % of device memory is safe."""
    return SAFE if device_bytes <= FUJII_SHARE * memory_bytes else UNSAFE


DAYS, GPU_HOURS = "days", "gpu_hours"


def budget_shares(budget: Budget, length: JobLength) -> dict[str, float]:
    """Map each limited key of the budget to the share of it that the job takes."""
    needed = {DAYS: length.seconds / DAY, GPU_HOURS: length.gpu_hours}
    allowed = {DAYS: budget.days, GPU_HOURS: budget.gpu_hours}
    return {key: needed[key] / most for key, most in allowed.items() if most is not None}


def most_exceeded(budget: Budget, length: JobLength) -> str | None:
    """Return the key of the budget that the job exceeds most; None where it stays within."""
    over = {key: share for key, share in budget_shares(budget, length).items() if share > 1.0}
    return max(over, key=lambda key: over[key]) if over else None
