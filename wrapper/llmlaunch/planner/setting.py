"""What the layouts of a recipe are priced with and judged by: the job, the cluster, and the memory limits."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from llmlaunch.calibration.lessons import NO_LESSONS, Lessons
from llmlaunch.calibration.margins import Margin, device_margin, host_margin
from llmlaunch.cluster.profile import Cluster
from llmlaunch.frameworks.base import Backend, StateTechniques, StepTechniques
from llmlaunch.frameworks.priced_job import job_of
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
