"""What the layouts of a recipe are priced with and judged by."""

from __future__ import annotations

from dataclasses import dataclass, replace

from llmlaunch.backends.base import Backend
from llmlaunch.calibration.lessons import NO_LESSONS, Lessons
from llmlaunch.cluster.matrix import slurm_order
from llmlaunch.cluster.profile import Cluster
from llmlaunch.memory.correction import Correction
from llmlaunch.memory.job import Job
from llmlaunch.planner.host import host_limit
from llmlaunch.planner.limit import memory_limit
from llmlaunch.planner.plan import Limit
from llmlaunch.planner.search import Found, search
from llmlaunch.recipe.types import Recipe
from llmlaunch.techniques import Techniques

__all__ = ["Setting", "setting_of", "timed_cluster"]


@dataclass(frozen=True)
class Setting:
    """One recipe with its backend, the job its layouts are priced as, the cluster they are timed on, and how far
    devices and nodes may be filled.

    `baseline_bytes` and `lessons` are kept to make the setting of a changed recipe.
    """

    recipe: Recipe
    backend: Backend
    job: Job
    cluster: Cluster
    limit: Limit
    host_limit: Limit
    baseline_bytes: int | None
    lessons: Lessons

    def of(self, recipe: Recipe) -> Setting:
        """The same for another recipe."""
        return setting_of(recipe, self.backend, self.baseline_bytes, self.lessons)

    def job_of(self, recipe: Recipe) -> Job:
        """The job of the same recipe with other words."""
        return _job(recipe, self.backend, self.baseline_bytes, self.lessons.correction)

    def search(self) -> Found:
        return search(self)


def setting_of(
    recipe: Recipe, backend: Backend, baseline_bytes: int | None = None, lessons: Lessons = NO_LESSONS
) -> Setting:
    """`baseline_bytes` replaces what the facts hold outside torch: on a CPU, the measured resident memory of a trainer
    that has imported everything and does nothing. `lessons` is what measured runs say of the recipe's plans.

    Raises:
        UserError: the recipe asks SLURM for what is no amount of memory.
    """
    return Setting(
        recipe,
        backend,
        _job(recipe, backend, baseline_bytes, lessons.correction),
        timed_cluster(recipe),
        replace(memory_limit(recipe.cluster.accelerator, recipe.memory, lessons.margin), support=lessons.support),
        host_limit(recipe),
        baseline_bytes,
        lessons,
    )


def timed_cluster(recipe: Recipe) -> Cluster:
    """The recipe's cluster with the measured network between the nodes of the job, in the order in which it will use
    them: SLURM's where the recipe keeps that."""
    cluster = recipe.cluster
    if cluster.bandwidth is None or recipe.placement == "auto":
        return cluster.between(recipe.nodes)
    return cluster.between(recipe.nodes, slurm_order(cluster.bandwidth, recipe.nodes))


def _job(recipe: Recipe, backend: Backend, baseline_bytes: int | None, correction: Correction) -> Job:
    facts = backend.facts(recipe)
    if baseline_bytes is not None:
        facts = replace(facts, context_bytes=float(baseline_bytes))
    on_cpu = recipe.cluster.accelerator.kind == "cpu"
    techniques = _at_home(recipe) if on_cpu else recipe.techniques
    return Job(recipe.model, recipe.workload, facts, techniques=techniques, correction=correction)


def _at_home(recipe: Recipe) -> Techniques:
    """On a CPU the host is the device: what moves there stays."""
    return replace(
        recipe.techniques,
        offload_modules=(),
        offload_checkpoints=False,
        offload_optimizer=0.0,
        offload_parameters=False,
        swapped_share=0.0,
    )
