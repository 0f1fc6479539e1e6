"""What the layouts of a recipe are priced with and judged by: the job, the cluster, the memory limits, the racks, and
how many candidates advice may price: the same recipe gets the same advice everywhere."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import TypeVar

from llmlaunch.calibration.lessons import NO_LESSONS, Lessons
from llmlaunch.calibration.margins import Margin, device_margin, host_margin
from llmlaunch.cluster.profile import Cluster
from llmlaunch.frameworks.base import Backend, StateTechniques, StepTechniques
from llmlaunch.frameworks.priced_job import job_of
from llmlaunch.layout import Layout
from llmlaunch.memory.host import HostNode
from llmlaunch.memory.job import Job
from llmlaunch.planner.search_space import recipe_with_techniques
from llmlaunch.recipe.types import Recipe
from llmlaunch.timing.correction import corrected_cluster


@dataclass(frozen=True)
class Setting:
    """One recipe with its backend, the job its layouts are priced as, the cluster they are timed on (with what measured
    runs correct: `lessons.time`), and how far
    devices and nodes may be filled. Everything that searches, judges, sizes or explains takes this one object.

    A recipe with `nodes: auto` is priced on one node until `make_sized_plan` chooses. `baseline_bytes` and `lessons`
    are kept so that `with_recipe` can build the setting of a changed recipe. Where `widened` is true, `limit` is one of
    tight layouts (`planner.tight`), which then count as safe. `jobs` are those that were asked for, by techniques.
    """

    recipe: Recipe
    backend: Backend
    job: Job
    cluster: Cluster
    limit: Margin
    host_limit: Margin
    baseline_bytes: int | None
    lessons: Lessons
    widened: bool = False
    jobs: dict[object, Job] = field(default_factory=dict, init=False, repr=False, compare=False)

    def with_recipe(self, recipe: Recipe) -> Setting:
        """Return the setting of another recipe with the same backend, baseline and lessons, widened as this one is."""
        setting = setting_of(recipe, self.backend, self.baseline_bytes, self.lessons)
        return replace(setting, limit=self.limit, widened=True) if self.widened else setting

    def with_lessons(self, lessons: Lessons) -> Setting:
        """Return the setting of the same recipe with what else was learned; margin and correction stay as they are."""
        timed = corrected_cluster(timed_cluster(replace(self.recipe, nodes=self.recipe.nodes or 1)), lessons.time)
        return replace(self, lessons=lessons, cluster=timed)

    def job_with(self, step: StepTechniques, state: StateTechniques) -> Job:
        """Return the recipe's job with these techniques, built once: a backend states its facts of a recipe."""
        if (step, state) not in self.jobs:
            self.jobs[step, state] = self.job_of(recipe_with_techniques(self.recipe, step, state))
        return self.jobs[step, state]

    def job_of(self, recipe: Recipe) -> Job:
        """Return the job of the same recipe with other techniques, built once for each set of them."""
        key = recipe.techniques, recipe.training.gradient_dtype
        if key not in self.jobs:
            self.jobs[key] = job_of(recipe, self.backend, self.baseline_bytes, self.lessons.correction)
        return self.jobs[key]


def setting_of(
    recipe: Recipe, backend: Backend, baseline_bytes: int | None = None, lessons: Lessons = NO_LESSONS
) -> Setting:
    """Build the setting of `recipe`. `baseline_bytes` replaces the context bytes of the facts: on a CPU, the measured
    resident memory of a trainer that has imported everything and is idle. `lessons` is what measured runs say of the
    recipe's plans.

    Raises:
        UserError: the recipe asks SLURM for what is no amount of memory.
    """
    sized = replace(recipe, nodes=recipe.nodes or 1)
    return Setting(
        recipe=recipe,
        backend=backend,
        job=job_of(sized, backend, baseline_bytes, lessons.correction),
        cluster=corrected_cluster(timed_cluster(sized), lessons.time),
        limit=replace(device_margin(recipe, lessons), support=lessons.support),
        host_limit=host_margin(recipe),
        baseline_bytes=baseline_bytes,
        lessons=lessons,
    )


def timed_cluster(recipe: Recipe) -> Cluster:
    """Return the recipe's cluster with the measured network between the nodes of the job. Nodes stand in the order in
    which the job uses them: SLURM's where the recipe keeps it (`placement`), else the best one."""
    cluster = recipe.cluster
    if cluster.bandwidth is None or recipe.placement == "auto":
        return cluster.between(recipe.nodes)
    from llmlaunch.cluster.matrix import slurm_order

    return cluster.between(recipe.nodes, slurm_order(cluster.bandwidth, recipe.nodes))


def node_of(recipe: Recipe) -> HostNode:
    """Return what runs on the fullest node of the job."""
    training = recipe.training
    return HostNode(
        processes=min(recipe.cluster.devices_per_node, recipe.world_size),
        checkpoints=training.save_interval is not None and training.checkpoint_path is not None,
        resident=recipe.cluster.accelerator.kind == "cpu",
    )


def group_nodes(cluster: Cluster, layout: Layout) -> int:
    """Return the nodes of the widest group of tensor or expert ranks that exchanges over NVLink beyond a node; 1 where
    there is none."""
    widths = (layout.tensor, layout.expert * layout.expert_tensor)
    inside = [width for width in widths if cluster.devices_per_node < width <= cluster.nvlink_domain_devices]
    return -(-max(inside, default=1) // cluster.devices_per_node)


def segment_nodes(nodes: int, nodes_per_block: int, group: int) -> int:
    """Return the largest segment that divides a job's nodes, fits a block and cuts no group of so many nodes; where no
    segment cuts none, the largest."""
    sizes = [size for size in range(1, min(nodes, nodes_per_block) + 1) if nodes % size == 0]
    return max([size for size in sizes if size % group == 0] or sizes)


def rack_note(cluster: Cluster, nodes: int, layout: Layout) -> tuple[str, ...]:
    """Return one sentence where the step time holds only if SLURM gives whole parts of a rack, and nothing asks for
    them or no part holds whole groups."""
    group, rack = group_nodes(cluster, layout), cluster.nvlink_domain_devices // cluster.devices_per_node
    if group == 1 or nodes <= rack:
        return ()
    width = group * cluster.devices_per_node
    priced = f"groups of {width} devices are priced inside one rack of {cluster.nvlink_domain_devices}"
    if cluster.nodes_per_block is None:
        size = segment_nodes(nodes, rack, group)
        return (
            f"{priced}: where SLURM knows the racks (topology/block), write nodes_per_block: {rack} in the profile, "
            f"which asks for segments of {size} nodes; elsewhere a group may lie across two racks and take longer",
        )
    if segment_nodes(nodes, cluster.nodes_per_block, group) % group:
        return (
            f"{priced}, but {nodes} nodes are no whole segments of {group} nodes or a multiple within a block of "
            f"{cluster.nodes_per_block}: some lie across two and take longer; choose a multiple of {group} nodes",
        )
    return ()


Item = TypeVar("Item")


class BudgetSpent(Exception):
    """The searches within a budget have priced as many candidates as it allows. `safe_layout` is a safe one that the
    search knew by then."""

    safe_layout: Layout | None = None


# What looking at a layout costs, as a share of pricing one by itself: of a whole space many are priced together, and
# the rules judge far more at a time.
WHOLE_SHARE, SPLIT_SHARE = 1 / 8, 1 / 64


class PricingBudget:
    """A number of candidates that searches may still price."""

    def __init__(self, candidates: float) -> None:
        self.left = candidates

    @property
    def spent(self) -> bool:
        """Return whether nothing is left."""
        return self.left <= 0

    @contextlib.contextmanager
    def limiting(self) -> Iterator[None]:
        """Count what is searched meanwhile. Raises BudgetSpent within where more would be looked at than is left."""
        token = _limiting.set(self)
        try:
            yield
        finally:
            _limiting.reset(token)

    def count(self, candidates: float) -> None:
        """Take candidates off what is left. Raises BudgetSpent where nothing is left for them."""
        if self.left <= 0 or candidates > self.left:
            self.left = 0
            raise BudgetSpent
        self.left -= candidates


_limiting: ContextVar[PricingBudget | None] = ContextVar("limiting", default=None)


def within_budget(candidates: float, items: Iterable[Item]) -> tuple[list[Item], bool]:
    """Return those of `items`, which searches yield, that come before so many candidates are priced, and whether these
    are all."""
    some: list[Item] = []
    try:
        with PricingBudget(candidates).limiting():
            for item in items:
                some.append(item)  # those before the budget is spent stay
    except BudgetSpent:
        return some, False
    return some, True


def count_candidates(candidates: float) -> None:
    """Count candidates before they are looked at. Raises BudgetSpent where the caller's caller set a budget and it is
    used up; a search without one costs nothing more."""
    budget = _limiting.get()
    if budget is not None:
        budget.count(candidates)
