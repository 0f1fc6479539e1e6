"""Runs one process where a training would run, in its container or under its interpreter, and hears what is installed.

The script travels in an environment variable and the answer on stdout: node and this host need share no folder.
"""

from __future__ import annotations

import glob
import os
import shlex
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from llmlaunch.errors import UserError
from llmlaunch.frameworks.framework import trained_with
from llmlaunch.launchers.bandwidth import last_lines, reported, run_probe
from llmlaunch.launchers.run_environment import INTERPRETER_VARIABLE
from llmlaunch.recipe.containers import Container
from llmlaunch.recipe.types import Recipe
from llmlaunch.rendering.scripts import paths_to_mount, sbatch_options, setup_lines
from llmlaunch.rendering.shell import shell_word
from llmlaunch.trainers import FRAMEWORK_VERSIONS
from llmlaunch.user_data import with_home

MINUTES = 10
# Of the options of a recipe, those by which SLURM says who may run where; the rest is about the training's size.
WHO_AND_WHERE = ("account", "partition", "qos", "constraint", "reservation", "exclude", "nodelist", "licenses")
GPU_OPTIONS = ("gres", "gpus-per-node", "gpus-per-task")
APPTAINER_IMAGES = (".sif", "docker://", "oras://", "library://")

# The first interpreter with torch trains (node/node_environment.py). Where none has it, the first of them tells
# what else is there.
_PYTHON = """python=$LLMLAUNCH_PROBE_PYTHON
for candidate in python3 python; do
  [[ -z $python ]] || break
  if "$candidate" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("torch") is None)' 2>/dev/null; then
    python=$candidate
  fi
done
exec "${python:-$(command -v python3 || command -v python)}" -c "$LLMLAUNCH_PROBE_SCRIPT" </dev/null"""


@dataclass(frozen=True)
class Environment:
    """Where trainers run. `python` None is the first on PATH there; `setup` are shell lines, `options` those of srun
    that name a node, `checkout` a Megatron-LM checkout, `gpus` whether a container gets the devices. A container also
    gets the `paths` that the recipe names, and trainers the `variables` of the site and the recipe."""

    container: Container | None
    python: str | None
    setup: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    checkout: str | None = None
    gpus: bool = False
    paths: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)


def environment_of(recipe: Recipe) -> Environment:
    """The one a recipe names, on one node with one device. Raises UserError for options that SLURM may not be given."""
    gpu = recipe.cluster.accelerator.kind == "gpu"
    slurm_options = {name: value for name, value in recipe.slurm.items() if name in (*WHO_AND_WHERE, *GPU_OPTIONS)}
    small = replace(
        recipe, nodes=1, spare_nodes=0, slurm=slurm_options, cluster=replace(recipe.cluster, devices_per_node=1)
    )
    wanted = {
        name: value
        for name, value in sbatch_options(small, None).items()
        if name in (*WHO_AND_WHERE, *GPU_OPTIONS) and value is not False
    }
    options = tuple(f"--{name}" if value is True else f"--{name}={value}" for name, value in wanted.items())
    checkout = recipe.backend.path or os.environ.get("MEGATRON_LM_PATH")
    python = recipe.python if recipe.container else recipe.python or os.environ.get(INTERPRETER_VARIABLE)
    variables = {**recipe.cluster.environment, **recipe.environment}
    paths = tuple(paths_to_mount(recipe))
    return Environment(recipe.container, python, tuple(setup_lines(recipe)), options, checkout, gpu, paths, variables)


def environment_named(image: str | None, python: str | None) -> Environment:
    """An image or an interpreter alone, on a node of SLURM's choice."""
    if image is None:
        return Environment(None, python)
    runtime = "apptainer" if image.endswith(".sif") or image.startswith(APPTAINER_IMAGES) else "pyxis"
    place = str(with_home(image).absolute()) if image.endswith((".sif", ".sqsh")) else image
    return Environment(Container(place, (), runtime), python, gpus=True)


def probe_environment(place: Environment, local: bool, say: Callable[[str], None]) -> dict[str, Any]:
    """What is installed there (trainers/framework_versions.py). `local`: on this machine, without SLURM.

    Raises:
        UserError: it cannot be started, or fails; with its last words.
    """
    command = _command(place, local)
    say("Looking at the training environment on this machine..." if local else "Waiting for a node of SLURM...")
    variables = {"LLMLAUNCH_PROBE_SCRIPT": FRAMEWORK_VERSIONS.read_text(encoding="utf-8")}
    variables |= {"LLMLAUNCH_PROBE_PYTHON": place.python or ""}
    variables |= {"LLMLAUNCH_PROBE_PACKAGES": " ".join(trained_with())}
    variables |= {"MEGATRON_LM_PATH": place.checkout} if place.checkout else {}
    answer = run_probe(command, variables)
    report = reported(answer, "packages")
    packages = None if report is None else report["packages"]
    if report is None or not isinstance(packages, Mapping) or not all(isinstance(v, str) for v in packages.values()):
        raise UserError(f"the probe failed with exit code {answer.returncode}; its last words:\n{last_lines(answer)}")
    return report


def _command(place: Environment, local: bool) -> list[str]:
    """Setup lines run where the training's would have effect: on the node, or before srun where that makes the
    container."""
    container = place.container
    mounts = _mounts(place)
    python = "\n".join([*(f"export {name}={shell_word(value)}" for name, value in place.variables.items()), _PYTHON])
    if not local and shutil.which("srun") is None:
        raise UserError("srun: not found on this host; run it where SLURM's commands are, or look here with --local")
    srun = [] if local else [*_srun(), *place.options]
    if container is None:
        return [*srun, "bash", "-c", "\n".join([*place.setup, python])]
    if container.runtime == "apptainer":
        enter = ["exec", "--no-home", *(["--nv"] if place.gpus else [])]
        enter += [word for mount in mounts for word in ("--bind", mount)]
        inside = shlex.join([*enter, container.image, "bash", "-c", python])
        find = 'enter=$(command -v apptainer || command -v singularity) || { echo "no apptainer on PATH" >&2; exit 1; }'
        return [*srun, "bash", "-c", "\n".join([*place.setup, find, f'exec "$enter" {inside}'])]
    if local:
        raise UserError(
            f"{container.image}: pyxis is a part of srun, so its containers start under SLURM alone; leave out --local"
        )
    boxed = [*srun, f"--container-image={container.image}", "--no-container-mount-home"]
    boxed += [f"--container-mounts={','.join(mounts)}"] if mounts else []
    return ["bash", "-c", "\n".join([*place.setup, f"exec {shlex.join([*boxed, 'bash', '-c', python])}"])]


def _srun() -> list[str]:
    if os.environ.get("SLURM_JOB_ID"):
        return ["srun", "--nodes=1", "--ntasks=1", "--overlap", "--export=ALL"]
    return ["srun", "--nodes=1", "--ntasks=1", f"--time={MINUTES}", "--job-name=llmlaunch-doctor", "--export=ALL"]


def _mounts(place: Environment) -> list[str]:
    """The container's own, and what the recipe names and the checkout, each at its place, where this host has it and no
    mount brings it."""
    mounts = list(place.container.mounts) if place.container else []
    for path in (*place.paths, *([place.checkout] if place.checkout else [])):
        folder = Path(path) if Path(path).is_dir() else Path(path).parent
        exists = folder.is_dir() and (folder == Path(path) or any(folder.glob(glob.escape(Path(path).name) + "*")))
        if exists and not any(folder.is_relative_to(mount.split(":")[1]) for mount in mounts):
            mounts.append(f"{folder}:{folder}")
    return mounts
