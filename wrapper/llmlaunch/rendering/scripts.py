"""job.sbatch and train.sh: what their templates are filled with."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import PurePath

from llmlaunch.backends.argument import NodeVariable, Reason
from llmlaunch.backends.base import Rendered
from llmlaunch.documents.secrets import is_secret_variable
from llmlaunch.documents.slurm_options import other_gres
from llmlaunch.errors import UserError
from llmlaunch.planner.plan import Plan
from llmlaunch.recipe.types import Recipe
from llmlaunch.rendering.directives import directives
from llmlaunch.rendering.recovery_json import late_end_seconds, warning_seconds
from llmlaunch.rendering.run_json import is_placed
from llmlaunch.rendering.shell import ShellText, render_template, shell_word, variable_name

__all__ = [
    "OUR_VARIABLES",
    "SNAPSHOT_FOLDER",
    "exported",
    "job_script",
    "paths_to_mount",
    "setup_lines",
    "train_script",
]

SNAPSHOT_FOLDER = "code"

PREFLIGHT_SECONDS = 180
FILES_OF_A_NODE = 512
"""Open files of a process beside its connections to other ranks: libraries, data, devices, pipes."""

OUR_VARIABLES = {
    "PYTHONUNBUFFERED": Reason(why="a line of the log appears when it is written"),
    "CUDA_DEVICE_ORDER": Reason(why="the order NVML counts in, so that ranks and peaks match"),
}


def job_script(recipe: Recipe, plan: Plan, prepares: bool = False) -> str:
    """job.sbatch; with `prepares` one node checks or builds something first. Raises UserError for a recipe value no
    directive or shell word can hold."""
    try:
        return render_template(
            "job.sbatch.j2",
            {
                "directives": directives(recipe, warning_seconds(recipe, plan)),
                "name": recipe.name,
                "nodes": recipe.nodes,
                "allocated": recipe.nodes + recipe.spare_nodes,
                "waits_for_devices": recipe.cluster.accelerator.kind == "gpu",
                "late_end_seconds": late_end_seconds(recipe, plan),
                "preflight": recipe.preflight,
                "preflight_seconds": PREFLIGHT_SECONDS,
                "prepare": prepares,
                "setup": setup_lines(recipe),
                "secrets": recipe.secrets,
                "container": recipe.container,
                "mounted": paths_to_mount(recipe),
                "checkpoints": _unless_brought(recipe, recipe.training.checkpoint_path, written=True),
                "gpus": recipe.cluster.accelerator.kind == "gpu",
                "devices_per_node": recipe.cluster.devices_per_node,
                "step_gres": _step_gres(recipe),
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
                "world_size": recipe.world_size,
                "host_optimizer": recipe.techniques.steps_on_the_host,
                "tokenizer": recipe.hub_tokenizer or "",
                "open_files": FILES_OF_A_NODE + 2 * recipe.world_size,
                "environment": sorted(_environment(recipe, rendered, code_root).items()),
                "required_variables": rendered.required_variables,
                "container": recipe.container is not None,
                "python": recipe.python or "",
                "program": [_in_snapshot(word, code_root) for word in rendered.program],
                "preflight": recipe.preflight,
                "kind": recipe.cluster.accelerator.kind,
                "by_itself": rendered.by_itself,
                "check": [_in_snapshot(word, code_root) for word in rendered.check],
                "prepare": [_in_snapshot(word, code_root) for word in rendered.prepare],
                "monitor_interval_seconds": recipe.monitor.interval_seconds,
                "snapshot": code_root is not None,
                "flight_recorder": recipe.cluster.accelerator.kind == "gpu" and recipe.watchdog is not None,
            },
        )
    except UserError as error:
        raise type(error)(f"{recipe.path}: {error}") from error


def setup_lines(recipe: Recipe) -> list[ShellText]:
    """The site's lines (which may say where modules are), its modules, the recipe's lines. A line is shell; the name of
    a module is a word."""
    site = recipe.cluster.site
    modules = [ShellText(f"module load {shell_word(name)}") for name in site.modules]
    return [*map(ShellText, site.setup), *modules, *map(ShellText, recipe.setup)]


def _srun_options(recipe: Recipe) -> list[str]:
    """What the site wants of srun beside our own options."""
    site = recipe.cluster.site
    options = {**({"mpi": site.mpi} if site.mpi else {}), **site.srun}
    given_options = {name: value for name, value in options.items() if value is not False}
    return [f"--{name}" if value is True else f"--{name}={value}" for name, value in given_options.items()]


def _step_gres(recipe: Recipe) -> str:
    """Return the devices of one node as srun's --gres, with the other resources that the recipe names: a step that
    names any gets no others."""
    return ",".join([f"gpu:{recipe.cluster.devices_per_node}", *other_gres(recipe.slurm)])


def paths_to_mount(recipe: Recipe) -> list[str]:
    """What the recipe names by its path and no mount brings into the container. Raises UserError for a path no mount
    can hold."""
    training, data, backend = recipe.training, recipe.data, recipe.backend
    # a layout tried after another may keep its checkpoints beside the first one's, and a cache may not be there yet
    written = (_folder(training.checkpoint_path), _folder(data.cache_path), _folder(training.tensorboard))
    read = (*data.datasets, _if_a_path(data.tokenizer), training.start_from, backend.path, backend.script)
    brought = [_unless_brought(recipe, path, written=True) for path in written]
    unmounted = [*brought, *(_unless_brought(recipe, path) for path in read)]
    wanted = [path for path in unmounted if path]
    for path in wanted:
        if re.search("[,:]", path):
            raise UserError(f"container: no mount can hold the comma or colon of {path}; mount it at another place")
    return list(dict.fromkeys(wanted))


def _unless_brought(recipe: Recipe, path: str | None, written: bool = False) -> str:
    """The path, or nothing where a mount has it in the container, or there is no container. A place that is `written`
    is not brought by a mount of a host's folder at its own place that is read-only."""
    if path is None or recipe.container is None:
        return ""
    for mount in recipe.container.mounts:
        source, place, *flags = mount.split(":")
        unfit = written and source == place and "ro" in re.split(r"[+,:]", ":".join(flags))
        if PurePath(path).is_relative_to(place) and not unfit:
            return ""
    return path


def _if_a_path(name: str | None) -> str | None:
    """A tokenizer may be named by its path, or otherwise."""
    return name if name is not None and name.startswith("/") else None


def _folder(path: str | None) -> str | None:
    """The folder a path lies in, or the path itself where that is the root."""
    if path is None:
        return None
    return path if PurePath(path).parent == PurePath("/") else str(PurePath(path).parent)


def _environment(recipe: Recipe, rendered: Rendered, code_root: PurePath | None) -> dict[str, str | NodeVariable]:
    """What train.sh exports. Raises UserError for a name that looks like a secret's."""
    for name, value in recipe.environment.items():
        if is_secret_variable(variable_name(name), value) and f"environment.{name}" not in recipe.not_secrets:
            raise UserError(
                f"environment.{name}: looks like a secret, and a run directory holds none; list the name under "
                "secrets: and export it where you submit"
            )
    return {name: _in_snapshot(value, code_root) for name, value in exported(recipe, rendered).items()}


def exported(recipe: Recipe, rendered: Rendered) -> Mapping[str, str]:
    """The variables of the trainers: ours, the backend's, the site's, the recipe's; the later wins."""
    ours = {"PYTHONUNBUFFERED": "1"}
    if recipe.cluster.accelerator.kind == "gpu":
        ours["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    return {**ours, **rendered.environment, **recipe.cluster.environment, **recipe.environment}


def _in_snapshot(word: str | NodeVariable, code_root: PurePath | None) -> str | NodeVariable:
    """The same place in the run directory's copy of the code, for a word that names one below `code_root`."""
    if code_root is None or isinstance(word, NodeVariable) or not word.startswith(str(code_root)):
        return word
    rest = word[len(str(code_root)) :]
    if rest and not rest.startswith("/"):
        return word
    return NodeVariable("LLMLAUNCH_RUN_DIR", f"/{SNAPSHOT_FOLDER}{rest}")
