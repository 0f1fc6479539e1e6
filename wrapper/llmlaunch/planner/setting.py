"""What the layouts of a recipe are priced with and judged by: the job, the cluster, and the memory limits."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace

from llmlaunch.calibration.evidence import DEFAULT_RISK, ENOUGH, EvidenceMargin, evidence_margin, job_class
from llmlaunch.calibration.margins import FUJII_SHARE, Margin, no_margin, runs_needed
from llmlaunch.calibration.support import NO_LESSONS, Lessons
from llmlaunch.cluster.profile import Accelerator, Cluster
from llmlaunch.errors import UserError
from llmlaunch.frameworks.base import Backend
from llmlaunch.frameworks.priced_job import job_of
from llmlaunch.memory.host import HostNode
from llmlaunch.memory.job import Job
from llmlaunch.planner.plan import Limit
from llmlaunch.recipe.types import MemoryPolicy, Recipe
from llmlaunch.techniques import Techniques
from llmlaunch.timing.correction import corrected_cluster
from llmlaunch.units import GIB

SIZE_UNITS = {"": 2**20, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}  # sbatch: megabytes where no unit is given
SIZE = re.compile(r"(\d+)([KMGT]?)(?:i?B)?", re.IGNORECASE)


@dataclass(frozen=True)
class Setting:
    """One recipe with its backend, the job its layouts are priced as, the cluster they are timed on (with what measured
    runs correct: `lessons.time`), and how far
    devices and nodes may be filled. Everything that searches, judges, sizes or explains takes this one object.

    A recipe with `nodes: auto` is priced on one node until `make_sized_plan` chooses. `baseline_bytes` and `lessons`
    are kept so that `with_recipe` can build the setting of a changed recipe. Where `widened` is true, `limit` is one of
    tight layouts (`planner.tight`), which then count as safe. `jobs` are those of the recipe with other techniques
    and another format of gradients that were asked for.
    """

    recipe: Recipe
    backend: Backend
    job: Job
    cluster: Cluster
    limit: Limit
    host_limit: Limit
    baseline_bytes: int | None
    lessons: Lessons
    widened: bool = False
    jobs: dict[tuple[Techniques, str | None], Job] = field(default_factory=dict, init=False, repr=False, compare=False)

    def with_recipe(self, recipe: Recipe) -> Setting:
        """Return the setting of another recipe with the same backend, baseline and lessons, widened as this one is."""
        setting = setting_of(recipe, self.backend, self.baseline_bytes, self.lessons)
        return replace(setting, limit=self.limit, widened=True) if self.widened else setting

    def with_lessons(self, lessons: Lessons) -> Setting:
        """Return the setting of the same recipe with what else was learned; margin and correction stay as they are."""
        timed = corrected_cluster(timed_cluster(replace(self.recipe, nodes=self.recipe.nodes or 1)), lessons.time)
        return replace(self, lessons=lessons, cluster=timed)

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
    limit = memory_limit(recipe, lessons)
    return Setting(
        recipe=recipe,
        backend=backend,
        job=job_of(sized, backend, baseline_bytes, lessons.correction),
        cluster=corrected_cluster(timed_cluster(sized), lessons.time),
        limit=replace(limit, support=lessons.support),
        host_limit=host_limit(recipe),
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


def memory_limit(recipe: Recipe, lessons: Lessons = NO_LESSONS) -> Limit:
    """Return the bytes a device may be filled to, with the reason.

    The recipe's share of device memory decides where it names one and no risk. Else measured runs do: those of the
    store where they bound the risk, the shipped ones with them where they do not. A bound of the store on jobs that are
    new to its runs never allows more than the shipped ones do. On a CPU, on a card that nobody measured and at a risk
    that nothing bounds the share decides, which is Fujii's 80 % where the recipe names none. What a desktop holds of
    each device is subtracted.
    """
    limit, held_bytes = _limit_of_card(recipe, lessons), int(recipe.cluster.desktop_gib * GIB)
    if not held_bytes:
        return limit
    fits_bytes = None if limit.fits_bytes is None else max(limit.fits_bytes - held_bytes, 0)
    reason = f"a desktop holds {recipe.cluster.desktop_gib:g} GiB of each device (cluster.desktop_gib); {limit.reason}"
    return replace(limit, limit_bytes=max(limit.limit_bytes - held_bytes, 0), fits_bytes=fits_bytes, reason=reason)


def _limit_of_card(recipe: Recipe, lessons: Lessons) -> Limit:
    """Return the limit of a device that only the job uses."""
    accelerator, policy, margin = recipe.cluster.accelerator, recipe.memory, lessons.margin
    on_gpu = accelerator.kind == "gpu"
    by_share = _limit_by_share(accelerator, policy)
    if not (policy.by_runs if on_gpu else policy.risk is not None):
        return by_share
    risk = DEFAULT_RISK if policy.risk is None else policy.risk
    shipped = None
    if on_gpu:
        shipped = evidence_margin(job_class(recipe), accelerator.memory_bytes, risk, own_runs=lessons.own_runs)
    if margin is not None and margin.upper_ratio is not None:
        # A ratio below 1 never lifts the limit above the card: no comparable run came that close to it.
        free_bytes = _free_bytes(accelerator, policy)
        most = max(int(accelerator.memory_bytes / max(margin.upper_ratio, 1.0)) - free_bytes, 0)
        others = by_share if shipped is None else _limit_by_evidence(by_share, shipped, policy)
        if margin.widened is None or most <= others.limit_bytes:
            reason = margin.sentence + (f", and {free_bytes / GIB:.1f} GiB stay free" if free_bytes else "")
            return replace(others, limit_bytes=most, reason=reason, risk=risk, runs=margin.runs)
        return replace(others, reason=f"{margin.sentence}: {others.reason}", risk=risk, runs=margin.runs)
    if shipped is not None:
        return _limit_by_evidence(by_share, shipped, policy)
    return replace(by_share, reason=f"{_why_share(recipe, risk, margin)}: {by_share.reason}", risk=risk, runs=0)


def _limit_by_evidence(by_share: Limit, margin: EvidenceMargin, policy: MemoryPolicy) -> Limit:
    most, reason = margin.limit_bytes, margin.sentence
    if policy.floor_gib is not None and margin.memory_bytes - policy.floor_bytes < most:
        most, reason = max(margin.memory_bytes - policy.floor_bytes, 0), f"{policy.floor_gib:g} GiB stay free; {reason}"
    fits_bytes = margin.memory_bytes
    missing_bytes = by_share.memory_bytes - fits_bytes
    if missing_bytes:
        reason = f"{missing_bytes / GIB:.1f} GiB may be lost in fragments of segments that do not expand; {reason}"
    limit = replace(by_share, limit_bytes=most, fits_bytes=fits_bytes, reason=reason)
    return replace(limit, risk=margin.risk, runs=margin.runs, evidence=margin)


def _why_share(recipe: Recipe, risk: float, margin: Margin | None) -> str:
    accelerator = recipe.cluster.accelerator
    if accelerator.kind == "cpu":
        return (margin or no_margin(risk, 0)).sentence
    shipped = evidence_margin(job_class(recipe), accelerator.memory_bytes)
    if shipped is None:
        return f"no measured run is of a card like {accelerator.name}"
    return f"risk {risk:g} needs {ENOUGH * runs_needed(risk)} measured runs"


def _limit_by_share(accelerator: Accelerator, policy: MemoryPolicy) -> Limit:
    """Fujii et al.'s rule: at most 80 % of the device (454 runs on A100 and H100, arXiv 2411.06465), and never less
    free than a fixed floor, because 20 % of a 40 GB card is too thin. A CPU process has no driver beside it: there the
    share alone decides."""
    on_gpu, memory = accelerator.kind == "gpu", accelerator.memory_bytes
    share = FUJII_SHARE if policy.limit is None else policy.limit
    rule = "the 80 % rule of Fujii et al." if share == FUJII_SHARE else "as the recipe says"
    reason = f"{share:.0%} of device memory, {rule}"
    limit = Limit(int(memory * share), memory, accelerator.memory_source, reason, fits_bytes=memory if on_gpu else None)
    if on_gpu and memory - policy.floor_bytes < limit.limit_bytes:
        reason = f"{policy.floor_bytes / GIB:.1f} GiB stay free, more than {share:.0%} of the device would leave"
        return replace(limit, limit_bytes=max(memory - policy.floor_bytes, 0), reason=reason)
    return limit


def _free_bytes(accelerator: Accelerator, policy: MemoryPolicy) -> int:
    """What the recipe itself wants free; measured runs have their own margin."""
    return policy.floor_bytes if accelerator.kind == "gpu" and policy.floor_gib is not None else 0


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
    share = FUJII_SHARE if recipe.memory.limit is None else recipe.memory.limit
    where = "the node's host memory" if requested is None or node_bytes < requested else source
    by_request = requested is not None and requested <= node_bytes
    return Limit(
        limit_bytes=int(available * share),
        memory_bytes=available,
        memory_source=source if by_request else f"profile of cluster {recipe.cluster.name}",
        reason=f"{share:.0%} of {where} ({available / GIB:.{0 if available >= GIB else 1}f} GiB)",
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
