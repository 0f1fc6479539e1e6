"""job.sbatch and train.sh: what their templates are filled with."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from pathlib import PurePath

from llmlaunch.backends.base import NodeVariable, Rendered
from llmlaunch.documents.slurm_options import sbatch_option_problem, sbatch_value_problem
from llmlaunch.documents.text import looks_secret
from llmlaunch.errors import UserError
from llmlaunch.planner.plan import Plan
from llmlaunch.recipe.types import Recipe
from llmlaunch.runs.placement_json import is_placed
from llmlaunch.runs.recovery_json import late_end_seconds, restart_by, warning_seconds
from llmlaunch.runs.shell import ShellText, directive, render_template, shell_word, variable_name

__all__ = ["SNAPSHOT_FOLDER", "job_script", "train_script"]

SNAPSHOT_FOLDER = "code"

Option = str | int | float | bool

_GPU_OPTIONS = ("gpus", "gpus-per-node", "gpus-per-task", "gpus-per-socket")


def job_script(recipe: Recipe, plan: Plan) -> str:
    """job.sbatch. Raises UserError for a recipe value no directive or shell word can hold."""
    try:
        return render_template(
            "job.sbatch.j2",
            {
                "directives": _directives(recipe, warning_seconds(recipe, plan)),
                "name": recipe.name,
                "nodes": recipe.nodes,
                "allocated": recipe.nodes + recipe.spare_nodes,
                "waits_for_devices": recipe.cluster.accelerator.kind == "gpu",
                "late_end_seconds": late_end_seconds(recipe, plan),
                "setup": _setup(recipe),
                "secrets": recipe.secrets,
                "container": recipe.container,
                "mounted": _mounted(recipe),
                "checkpoints": _unless_brought(recipe, recipe.training.checkpoint_path),
                "gpus": recipe.cluster.accelerator.kind == "gpu",
                "srun": _srun_options(recipe),
                "python": recipe.python or "",
                "placed": is_placed(recipe),
            },
        )
    except UserError as error:
        raise type(error)(f"{recipe.path}: {error}") from error


def train_script(recipe: Recipe, rendered: Rendered, code_root: PurePath | None) -> str:
    """train.sh. `code_root` is the source tree a snapshot was taken of, None without one: words and variables that
    name a place below it then name the copy in the run directory. Raises UserError as `job_script` does."""
    try:
        return render_template(
            "train.sh.j2",
            {
                "nodes": recipe.nodes,
                "devices_per_node": recipe.cluster.devices_per_node,
                "environment": sorted(_environment(recipe, rendered, code_root).items()),
                "required_variables": rendered.required_variables,
                "python": recipe.python or "",
                "program": [_in_snapshot(word, code_root) for word in rendered.program],
                "monitor_interval_seconds": recipe.monitor_interval_seconds,
                "snapshot": code_root is not None,
                "flight_recorder": recipe.cluster.accelerator.kind == "gpu" and recipe.watchdog is not None,
            },
        )
    except UserError as error:
        raise type(error)(f"{recipe.path}: {error}") from error


def _directives(recipe: Recipe, warning: int | None) -> list[ShellText]:
    """What the job itself needs, then what recipe and cluster profile ask for, by name; theirs win."""
    for option in recipe.slurm:
        problem = sbatch_option_problem(option)
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
        **_coming_back(recipe, warning),
        # Relative to where sbatch is called, and in no folder: sbatch makes none, and a job whose output cannot be
        # opened dies without a word. The job's real log is in logs/.
        "output": "slurm-%j.out",
        "open-mode": "append",
    }
    options.update({name: value for name, value in sorted(recipe.slurm.items()) if name != "gres"})
    options.setdefault("gres", recipe.slurm.get("gres", False))  # ours, if any, holds the recipe's already
    options["exclude"] = _excluded(recipe)
    lines = [directive(option, value) for option, value in options.items()]
    return [line for line in lines if line]


def _excluded(recipe: Recipe) -> Option:
    """The nodes of the cluster profile and those of the recipe; none where the recipe says `exclude: false`."""
    asked = recipe.slurm.get("exclude", "")
    names = [] if asked is False else [*recipe.cluster.site.exclude, *([str(asked)] if asked else [])]
    return ",".join(names) or False


def _cpu_request(recipe: Recipe) -> dict[str, Option]:
    cpus = recipe.cluster.cpus_per_node
    return {"cpus-per-task": cpus} if cpus else {}


def _gpu_request(recipe: Recipe) -> dict[str, Option]:
    """The devices of a node, in the form the cluster profile names; nothing where the recipe asks for them itself."""
    cluster, asked = recipe.cluster, recipe.slurm
    gres = str(asked.get("gres") or "")
    by_name = any(option in asked for option in _GPU_OPTIONS) or "gpu" in f"{gres} {asked.get('tres-per-task')}"
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


def _setup(recipe: Recipe) -> list[ShellText]:
    """The site's modules, its lines, the recipe's. A line is shell; the name of a module is a word."""
    site = recipe.cluster.site
    modules = [ShellText(f"module load {shell_word(name)}") for name in site.modules]
    return [*modules, *(ShellText(line) for line in (*site.setup, *recipe.setup))]


def _srun_options(recipe: Recipe) -> list[str]:
    """What the site wants of srun beside our own options."""
    site = recipe.cluster.site
    asked = {**({"mpi": site.mpi} if site.mpi else {}), **site.srun}
    kept = {name: value for name, value in asked.items() if value is not False}
    return [f"--{name}" if value is True else f"--{name}={value}" for name, value in kept.items()]


def _mounted(recipe: Recipe) -> list[str]:
    """What the recipe names by its path and no mount brings into the container. Raises UserError for a path no mount
    can hold."""
    training, data, backend = recipe.training, recipe.data, recipe.backend
    # a layout tried after another may keep its checkpoints beside the first one's
    named = [_folder(training.checkpoint_path), data.path, backend.path, _folder(backend.script)]
    wanted = [path for path in map(partial(_unless_brought, recipe), named) if path]
    for path in wanted:
        if re.search("[,:]", path):
            raise UserError(f"container: no mount can hold the comma or colon of {path}; mount it at another place")
    return list(dict.fromkeys(wanted))


def _unless_brought(recipe: Recipe, path: str | None) -> str:
    """The path, or nothing where a mount has it in the container, or there is no container."""
    if path is None or recipe.container is None:
        return ""
    places = (mount.split(":")[1] for mount in recipe.container.mounts)
    return "" if any(PurePath(path).is_relative_to(place) for place in places) else path


def _folder(path: str | None) -> str | None:
    """The folder a path lies in, or the path itself where that is the root."""
    if path is None:
        return None
    return path if PurePath(path).parent == PurePath("/") else str(PurePath(path).parent)


def _environment(recipe: Recipe, rendered: Rendered, code_root: PurePath | None) -> dict[str, str | NodeVariable]:
    """Ours, the backend's, the site's, the recipe's; the later wins."""
    for name in (*recipe.environment, *recipe.cluster.environment):
        if looks_secret(variable_name(name)):
            raise UserError(
                f"environment.{name}: looks like a secret, and a run directory holds none; list the name under "
                "secrets: and export it where you submit"
            )
    ours = {"PYTHONUNBUFFERED": "1"}  # a line of the log appears when it is written
    if recipe.cluster.accelerator.kind == "gpu":
        ours["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # the order NVML counts in, so that ranks and peaks match
    merged: Mapping[str, str] = {
        **ours,
        **rendered.environment,
        **recipe.cluster.environment,
        **recipe.environment,
    }
    return {name: _in_snapshot(value, code_root) for name, value in merged.items()}


def _in_snapshot(word: str | NodeVariable, code_root: PurePath | None) -> str | NodeVariable:
    """The same place in the run directory's copy of the code, for a word that names one below `code_root`."""
    if code_root is None or isinstance(word, NodeVariable) or not word.startswith(str(code_root)):
        return word
    rest = word[len(str(code_root)) :]
    if rest and not rest.startswith("/"):
        return word
    return NodeVariable("LLMLAUNCH_RUN_DIR", f"/{SNAPSHOT_FOLDER}{rest}")
