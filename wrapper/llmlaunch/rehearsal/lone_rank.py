"""A run directory for one rank of a job by itself: a job of one device and some minutes.

It says of the memory what the job would: plan, predicted bytes and measurement record are the job's. Everything a job
of many nodes and days needs is left out: whole nodes, spare ones, preflight, checkpoints, restarts, fallbacks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil

from llmlaunch.backends.base import RankAlone, Rendered
from llmlaunch.documents.slurm_options import other_gres
from llmlaunch.planner.plan import Plan
from llmlaunch.recipe.recovery import OnOom
from llmlaunch.recipe.types import Recipe
from llmlaunch.rendering.run_json import measurement_template, run_description

__all__ = ["LoneRank", "lone_rank"]

STARTING_SECONDS = 15 * 60.0  # importing torch from a slow file system, building kernels, drawing weights
SLOWER_ALONE = 2.0  # the first step is slower than the planned one
UNIT_MINUTES = 5

# What recipe or site asks of SLURM for a job of whole nodes, or for its length.
OF_WHOLE_NODES = frozenset(
    (
        *("exclusive", "contiguous", "spread-job", "use-min-nodes", "switches", "segment", "nodelist", "nodefile"),
        *("nodes", "ntasks", "ntasks-per-node", "ntasks-per-gpu", "ntasks-per-socket", "ntasks-per-core"),
        *("cpus-per-task", "cores-per-socket", "sockets-per-node", "mincpus", "mem", "tmp"),
        *("gpus", "gpus-per-node", "gpus-per-task", "gpus-per-socket", "tres-per-task", "gres"),
        *("time", "time-min", "deadline", "signal", "requeue", "no-requeue", "array", "dependency"),
    )
)


@dataclass(frozen=True)
class LoneRank:
    """What `render_run` takes: `described` is run.json."""

    recipe: Recipe
    plan: Plan
    rendered: Rendered
    described: Mapping[str, object]


def lone_rank(
    recipe: Recipe, plan: Plan, rendered: Rendered, alone: RankAlone, rehearsal: Mapping[str, object], steps: int
) -> LoneRank:
    """`recipe`, `plan` and `rendered` are the job's; `rehearsal` goes into run.json, with "pipeline_rank" in it."""
    lone = _recipe(recipe, plan, alone, f"{recipe.name}-rank{rehearsal['pipeline_rank']}", steps)
    single = replace(plan, fallbacks=None)
    rendered_alone = replace(
        rendered,
        program=alone.program,
        arguments=alone.arguments,
        environment={**rendered.environment, **alone.environment},
        files={**rendered.files, **alone.files},
        check=(),
        prepare=(),
        notes=(*rendered.notes, *alone.notes),
        by_itself=True,
    )
    described = {
        **run_description(lone, single, rendered_alone),
        "measurement": measurement_template(recipe, plan, rendered),
        "rehearsal": dict(rehearsal),
    }
    return LoneRank(lone, single, rendered_alone, described)


def _recipe(recipe: Recipe, plan: Plan, alone: RankAlone, name: str, steps: int) -> Recipe:
    """As a person would write it for this rank; its text and digest stay the job's."""
    cluster, devices = recipe.cluster, recipe.cluster.devices_per_node
    cpus = cluster.cpus_per_node
    return replace(
        recipe,
        name=name,
        nodes=1,
        spare_nodes=0,
        preflight=False,
        placement="slurm",
        restart=None,
        on_oom=OnOom(layouts=0),
        monitor=replace(recipe.monitor, probe=True),
        backend=replace(recipe.backend, extra_args=alone.own_words),
        cluster=replace(cluster, devices_per_node=1, cpus_per_node=cpus and max(1, cpus // devices)),
        training=replace(
            recipe.training,
            steps=steps,
            log_interval=1,
            save_interval=None,
            checkpoint_path=None,
            start_from=None,
            tensorboard=None,
        ),
        slurm=_slurm(recipe, plan, steps),
    )


def _slurm(recipe: Recipe, plan: Plan, steps: int) -> dict[str, str | int | float | bool]:
    """Where and for whom as the recipe says; of a node one device and what is with it."""
    options = {name: value for name, value in recipe.slurm.items() if name not in OF_WHOLE_NODES}
    if recipe.slurm.get("mem", False) is not False:  # 0 is all of a node: memory is shared out there
        share = recipe.cluster.host_memory_bytes * 9 // 10 // recipe.cluster.devices_per_node
        options["mem"] = f"{share // 2**20}M"
    others = other_gres(recipe.slurm)
    if others:
        options["gres"] = ",".join(others)
    options["time"] = _minutes(STARTING_SECONDS + SLOWER_ALONE * steps * plan.chosen.step_seconds)
    return options


def _minutes(seconds: float) -> str:
    minutes = ceil(seconds / 60 / UNIT_MINUTES) * UNIT_MINUTES
    return f"{minutes // 60:02d}:{minutes % 60:02d}:00"
