"""The `#SBATCH` lines of job.sbatch: what the job needs, what its site wants, what the recipe asks for."""

from __future__ import annotations

from llmlaunch.backends.argument import Reason
from llmlaunch.documents.slurm_options import GPU_OPTIONS, refused_sbatch_option, sbatch_value_problem
from llmlaunch.errors import UserError
from llmlaunch.recipe.types import Recipe
from llmlaunch.rendering.recovery_json import restart_by
from llmlaunch.rendering.shell import ShellText, directive

__all__ = ["DIRECTIVE_REASONS", "directives", "sbatch_options"]

Option = str | int | float | bool

DIRECTIVE_REASONS = {
    "job-name": Reason(("name",)),
    "nodes": Reason(("nodes", "spare_nodes")),
    "ntasks-per-node": Reason(why="one train.sh for each node; torchrun starts a trainer for each device"),
    "cpus-per-task": Reason(("cluster.cpus_per_node",), "all cores of the node"),
    "gres": Reason(("cluster.devices_per_node", "cluster.gpu_request")),
    "gpus-per-node": Reason(("cluster.devices_per_node", "cluster.gpu_request")),
    "gpus-per-task": Reason(("cluster.devices_per_node", "cluster.gpu_request")),
    "switches": Reason(("cluster.nodes_per_switch", "placement"), "nodes under few switches"),
    "segment": Reason(("cluster.nodes_per_block", "placement"), "whole parts of a block"),
    "signal": Reason(("restart", "training.save_interval"), "told to save so long before its time limit"),
    "requeue": Reason(("restart",)),
    "no-requeue": Reason(("restart",)),
    "output": Reason(why="the way to the job's real log, which is in logs/"),
    "open-mode": Reason(why="a job that comes back goes on in the same file"),
    "exclude": Reason(("slurm.exclude", "cluster.exclude")),
}


def directives(recipe: Recipe, warning_seconds: int | None) -> list[ShellText]:
    """The lines of `sbatch_options`. Raises UserError as it does, and for what no directive can hold."""
    lines = [directive(option, value) for option, value in sbatch_options(recipe, warning_seconds).items()]
    return [line for line in lines if line]


def sbatch_options(recipe: Recipe, warning_seconds: int | None) -> dict[str, Option]:
    """What the job itself needs, then what recipe and cluster profile ask for, by name; theirs win. False = left out.

    `warning_seconds` before its time limit the job is told; None where it does not come back. Raises UserError for
    what none of them may say.
    """
    for option in recipe.slurm:
        problem = refused_sbatch_option(option)
        if problem is not None:
            raise UserError(f"slurm.{option}: {problem}")
    wrong = sbatch_value_problem(recipe.slurm)
    if wrong is not None:
        raise UserError(f"slurm.{': '.join(wrong)}")
    options: dict[str, Option] = {
        "job-name": recipe.name,
        "nodes": recipe.nodes + recipe.spare_nodes,
        "ntasks-per-node": 1,
        **_cpu_request(recipe),
        **_gpu_request(recipe),
        **_near_each_other(recipe),
        **_coming_back(recipe, warning_seconds),
        # Relative to where sbatch is called, and in no folder: sbatch makes none, and a job whose output cannot be
        # opened dies without a word. The job's real log is in logs/.
        "output": "slurm-%j.out",
        "open-mode": "append",
    }
    options.update({name: value for name, value in sorted(recipe.slurm.items()) if name != "gres"})
    options.setdefault("gres", recipe.slurm.get("gres", False))  # ours, if any, holds the recipe's already
    options["exclude"] = _excluded(recipe)
    return options


def _excluded(recipe: Recipe) -> Option:
    """The nodes of the cluster profile and those of the recipe; none where the recipe says `exclude: false`."""
    requested = recipe.slurm.get("exclude", "")
    names = [] if requested is False else [*recipe.cluster.site.exclude, *([str(requested)] if requested else [])]
    return ",".join(names) or False


def _cpu_request(recipe: Recipe) -> dict[str, Option]:
    """All cores of the node, where the profile knows them and the recipe does not ask by another measure."""
    cpus, requested = recipe.cluster.cpus_per_node, recipe.slurm
    # sbatch refuses both (src/common/slurm_opt.c, _validate_cpus_per_gres)
    by_gpu = bool(requested.get("cpus-per-gpu")) or "cpu" in str(requested.get("tres-per-task"))
    return {"cpus-per-task": cpus} if cpus and not by_gpu else {}


def _gpu_request(recipe: Recipe) -> dict[str, Option]:
    """The devices of a node, in the form the cluster profile names; nothing where the recipe asks for them itself."""
    cluster, requested = recipe.cluster, recipe.slurm
    total = str(requested.get("gpus") or "")
    if total and not any(requested.get(option) for option in ("gres", *GPU_OPTIONS[1:])) and "," not in total:
        # SLURM may deal a total out as 1 and 3 (seen with 22.05)
        of_type, colon, _ = total.rpartition(":")
        return {"gpus-per-node": f"{of_type}{colon}{cluster.devices_per_node}"}
    gres = str(requested.get("gres") or "")
    by_name = any(option in requested for option in GPU_OPTIONS) or "gpu" in f"{gres} {requested.get('tres-per-task')}"
    if cluster.accelerator.kind == "cpu" or by_name:
        return {}
    kind, count = cluster.site.gpu_type, cluster.devices_per_node
    if cluster.gpu_request == "gres":
        ours = ":".join(filter(None, ["gpu", kind, str(count)]))
        return {"gres": ",".join(filter(None, [ours, gres]))}
    if cluster.gpu_request in ("gpus-per-node", "gpus-per-task"):  # one task per node: the same number
        return {cluster.gpu_request: f"{kind}:{count}" if kind else count}
    if cluster.gpu_request == "none":
        return {}
    raise UserError(
        f"cluster {cluster.name}: gpu_request is {cluster.gpu_request!r}; "
        "one of gpus-per-node, gres, gpus-per-task, none"
    )


def _near_each_other(recipe: Recipe) -> dict[str, Option]:
    """Nodes under few switches, or in whole parts of blocks, where the cluster profile says that SLURM knows them. Both
    wishes cost waiting only: a job that cannot have so few switches starts after the site's max_switch_wait."""
    cluster, nodes = recipe.cluster, recipe.nodes
    if recipe.placement != "auto" or nodes == 1:
        return {}
    wishes: dict[str, Option] = {}
    if cluster.nodes_per_switch:
        wishes["switches"] = -(-nodes // cluster.nodes_per_switch)
    if cluster.nodes_per_block:
        # more nodes than a segment must be whole segments (sbatch, SLURM 24.05 on)
        size = max(size for size in range(1, min(nodes, cluster.nodes_per_block) + 1) if nodes % size == 0)
        if size > 1:
            wishes["segment"] = size
    return wishes


def _coming_back(recipe: Recipe, warning: int | None) -> dict[str, Option]:
    """Told in time, and put back into the queue. Where the job does not come back, the site's own habit holds."""
    if warning is None:
        return {}
    # to the batch script alone: it knows then that time is short, and tells the nodes
    options: dict[str, Option] = {} if "signal" in recipe.slurm else {"signal": f"B:USR1@{warning}"}
    if "requeue" in recipe.slurm or "no-requeue" in recipe.slurm:
        return options
    return options | {"requeue" if restart_by(recipe) == "requeue" else "no-requeue": True}
