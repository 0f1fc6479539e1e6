"""What the layouts of a recipe are priced with and judged by: the job, the cluster, and the memory limits."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from llmlaunch.backends.base import Backend
from llmlaunch.calibration.margins import FUJII_SHARE, Margin, no_margin
from llmlaunch.calibration.support import NO_LESSONS, Lessons
from llmlaunch.cluster.matrix import slurm_order
from llmlaunch.cluster.profile import Accelerator, Cluster
from llmlaunch.errors import UserError
from llmlaunch.memory.host import HostNode
from llmlaunch.memory.job import Correction, Job
from llmlaunch.planner.plan import Limit
from llmlaunch.recipe.types import MemoryPolicy, Recipe
from llmlaunch.techniques import Techniques
from llmlaunch.units import GIB

__all__ = ["Setting", "host_limit", "memory_limit", "node_of", "setting_of", "timed_cluster"]

SIZE_UNITS = {"": 2**20, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}  # sbatch: megabytes where no unit is given
SIZE = re.compile(r"(\d+)([KMGT]?)(?:i?B)?", re.IGNORECASE)


@dataclass(frozen=True)
class Setting:
    """One recipe with its backend, the job its layouts are priced as, the cluster they are timed on, and how far
    devices and nodes may be filled. Everything that searches, judges, sizes or explains takes this one object.

    A recipe with `nodes: auto` is priced on one node until `make_sized_plan` chooses. `baseline_bytes` and `lessons`
    are kept so that `with_recipe` can build the setting of a changed recipe.
    """

    recipe: Recipe
    backend: Backend
    job: Job
    cluster: Cluster
    limit: Limit
    host_limit: Limit
    baseline_bytes: int | None
    lessons: Lessons

    def with_recipe(self, recipe: Recipe) -> Setting:
        """Return the setting of another recipe with the same backend, baseline and lessons."""
        return setting_of(recipe, self.backend, self.baseline_bytes, self.lessons)

    def job_of(self, recipe: Recipe) -> Job:
        """Return the job of the same recipe with other techniques, built once for each recipe object."""
        jobs: dict[int, tuple[Recipe, Job]] = vars(self).setdefault("jobs", {})
        if id(recipe) not in jobs:  # the recipe stays beside its job, so no other one gets its id
            jobs[id(recipe)] = recipe, _job(recipe, self.backend, self.baseline_bytes, self.lessons.correction)
        return jobs[id(recipe)][1]


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
    limit = memory_limit(recipe.cluster.accelerator, recipe.memory, lessons.margin)
    return Setting(
        recipe=recipe,
        backend=backend,
        job=_job(sized, backend, baseline_bytes, lessons.correction),
        cluster=timed_cluster(sized),
        limit=replace(limit, support=lessons.support),
        host_limit=host_limit(recipe),
        baseline_bytes=baseline_bytes,
        lessons=lessons,
    )


def _job(recipe: Recipe, backend: Backend, baseline_bytes: int | None, correction: Correction) -> Job:
    facts = backend.facts(recipe)
    if baseline_bytes is not None:
        facts = replace(facts, context_bytes=float(baseline_bytes))
    on_cpu = recipe.cluster.accelerator.kind == "cpu"
    techniques = _without_offload(recipe.techniques) if on_cpu else recipe.techniques
    return Job(recipe.model, recipe.workload, facts, techniques=techniques, correction=correction)


def _without_offload(techniques: Techniques) -> Techniques:
    """On a CPU the host is the device, so nothing moves."""
    return replace(
        techniques,
        offload_modules=(),
        offload_checkpoints=False,
        offload_optimizer=0.0,
        offload_parameters=False,
        swapped_share=0.0,
    )


def timed_cluster(recipe: Recipe) -> Cluster:
    """Return the recipe's cluster with the measured network between the nodes of the job. Nodes stand in the order in
    which the job uses them: SLURM's where the recipe keeps it (`placement`), else the best one."""
    cluster = recipe.cluster
    if cluster.bandwidth is None or recipe.placement == "auto":
        return cluster.between(recipe.nodes)
    return cluster.between(recipe.nodes, slurm_order(cluster.bandwidth, recipe.nodes))


def memory_limit(accelerator: Accelerator, policy: MemoryPolicy, margin: Margin | None = None) -> Limit:
    """Return the bytes a device may be filled to, with the reason: the bound at the recipe's risk where measured runs
    give one (`margin`), else the share of device memory."""
    by_share = _limit_by_share(accelerator, policy)
    if policy.risk is None:
        return by_share
    margin = margin or no_margin(policy.risk, 0)
    if margin.upper_ratio is None:
        fujii = policy.limit == FUJII_SHARE and by_share.limit_bytes == int(by_share.memory_bytes * FUJII_SHARE)
        decides = "the 80 % rule decides" if fujii else by_share.reason
        return replace(by_share, reason=f"{margin.sentence}: {decides}", risk=policy.risk, runs=margin.runs)
    # A ratio below 1 never lifts the limit above the card: no comparable run came that close to it.
    bytes_at_risk = accelerator.memory_bytes / max(margin.upper_ratio, 1.0) - _free_bytes(accelerator, policy)
    if margin.widened is not None and by_share.limit_bytes < bytes_at_risk:
        reason = f"{margin.sentence}: {by_share.reason}"
        return replace(by_share, reason=reason, risk=policy.risk, runs=margin.runs)
    free_bytes = _free_bytes(accelerator, policy)
    reason = margin.sentence + (f", and {free_bytes / GIB:.1f} GiB stay free" if free_bytes else "")
    return replace(by_share, limit_bytes=max(int(bytes_at_risk), 0), reason=reason, risk=policy.risk, runs=margin.runs)


def _limit_by_share(accelerator: Accelerator, policy: MemoryPolicy) -> Limit:
    """Fujii et al.'s rule: at most 80 % of the device (454 runs on A100 and H100, arXiv 2411.06465), and never less
    free than a fixed floor, because 20 % of a 40 GB card is too thin. A CPU process has no driver beside it: there the
    share alone decides."""
    share = int(accelerator.memory_bytes * policy.limit)
    free_bytes = _free_bytes(accelerator, policy)
    by_floor = accelerator.memory_bytes - free_bytes
    if by_floor < share:
        reason = f"{free_bytes / GIB:.1f} GiB stay free, more than {policy.limit:.0%} of the device would leave"
        return Limit(max(by_floor, 0), accelerator.memory_bytes, accelerator.memory_source, reason)
    rule = "the 80 % rule of Fujii et al." if policy.limit == FUJII_SHARE else "as the recipe says"
    reason = f"{policy.limit:.0%} of device memory, {rule}"
    return Limit(share, accelerator.memory_bytes, accelerator.memory_source, reason)


def _free_bytes(accelerator: Accelerator, policy: MemoryPolicy) -> int:
    return policy.floor_bytes if accelerator.kind == "gpu" else 0


def node_of(recipe: Recipe) -> HostNode:
    """Return what runs on the fullest node of the job."""
    training = recipe.training
    return HostNode(
        processes=min(recipe.cluster.devices_per_node, recipe.world_size),
        checkpoints=training.save_interval is not None and training.checkpoint_path is not None,
        resident=recipe.cluster.accelerator.kind == "cpu",
    )


def host_limit(recipe: Recipe) -> Limit:
    """Return the bytes a node's host memory may be filled to: the recipe's share of what SLURM is asked for
    (`slurm.mem`, `slurm.mem-per-gpu`), or of the node's memory.

    Raises:
        UserError: the request is no size sbatch knows.
    """
    requested, source = _requested_host_bytes(recipe)
    node_bytes = _node_bytes(recipe)
    available = node_bytes if requested is None else min(requested, node_bytes)
    share = recipe.memory.limit
    where = "the node's host memory" if requested is None or node_bytes < requested else source
    by_request = requested is not None and requested <= node_bytes
    return Limit(
        limit_bytes=int(available * share),
        memory_bytes=available,
        memory_source=source if by_request else f"profile of cluster {recipe.cluster.name}",
        reason=f"{share:.0%} of {where} ({available / GIB:.0f} GiB)",
    )


def _requested_host_bytes(recipe: Recipe) -> tuple[int | None, str]:
    """Return the bytes of a node that sbatch is asked for (None: all of it), and the recipe key that asks."""
    for option, times in (("mem", 1), ("mem-per-gpu", recipe.cluster.devices_per_node)):
        value = recipe.slurm.get(option)
        if value is None or isinstance(value, bool):
            continue
        size = times * _size_bytes(f"{recipe.path}: slurm.{option}", str(value).strip())
        return (size or None), f"slurm.{option}"
    return None, ""


def _size_bytes(where: str, text: str) -> int:
    size = SIZE.fullmatch(text)
    if size is None:
        raise UserError(f"{where}: {text!r} is no amount of memory; write a whole number with K, M, G or T, e.g. 480G")
    return int(size[1]) * SIZE_UNITS[size[2].upper()]


def _node_bytes(recipe: Recipe) -> int:
    """On a CPU-only machine the devices' memory is the node's own, so a node has at least what its devices have."""
    cluster = recipe.cluster
    if cluster.accelerator.kind == "cpu":
        return max(cluster.host_memory_bytes, cluster.devices_per_node * cluster.accelerator.memory_bytes)
    return cluster.host_memory_bytes
