"""Where ranks are rehearsed: on one GPU, here or under SLURM, or traced in an environment of its own; and what to do
where nothing is at hand."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from llmlaunch.calibration.ratios import same_minor
from llmlaunch.errors import UserError
from llmlaunch.frameworks.framework import TRACE_VARIABLE, Framework, framework_named, framework_of
from llmlaunch.launchers.choose import LauncherChoice, choose
from llmlaunch.launchers.local_gpus import gpu_at_hand
from llmlaunch.recipe.frameworks import DEFAULT_FRAMEWORK
from llmlaunch.recipe.types import Recipe
from llmlaunch.rehearsal.install import is_installed, python_of, user_folder, versions_in
from llmlaunch.user_data import with_home

GPU, TRACE = "gpu", "trace"


@dataclass(frozen=True)
class RehearsalPlace:
    """Exactly one of both: the environment that traces, or the launcher of one process on a GPU. `why` is a sentence
    for the person."""

    environment: TraceEnvironment | None
    launcher: LauncherChoice | None
    why: str


def chosen_place(recipe: Recipe, place: str, say: Callable[[str], None]) -> RehearsalPlace:
    """`place` is "gpu", "trace" or "auto": a GPU of this machine, else a trace. A GPU is waited for under SLURM only
    where a person asks for one. `say` is told what a launcher waits for.

    Raises:
        UserError: there is nothing to rehearse on, with every way to have something; or the job has no trace.
    """
    accelerator, framework = recipe.cluster.accelerator, framework_of(recipe)
    refusal = framework.gpu_refusal(recipe)
    if refusal and place == GPU:
        raise UserError(f"{recipe.path}: {refusal}")
    if accelerator.kind == "cpu" and (place != TRACE or framework.trains_on_cpus):
        raise UserError(f"{recipe.path}: trains on CPUs: there is no GPU's memory to rehearse; submit runs it here")
    gpu = None if place == TRACE or refusal else gpu_at_hand(accelerator)
    if gpu is not None:
        return _launched(choose(True, say), f"On a GPU of this machine: {gpu.name}.")
    if place == GPU:
        if shutil.which("sbatch") is None:
            raise UserError(_nothing_at_hand(recipe))
        return _launched(choose(False, say), "On one GPU of a node that SLURM gives.")
    environment = find_trace_environment(framework)
    if environment is None:
        raise UserError(_nothing_at_hand(recipe))
    return RehearsalPlace(environment, None, f"Traced without a GPU, with {environment.folder}.")


def _launched(choice: LauncherChoice, why: str) -> RehearsalPlace:
    return RehearsalPlace(None, LauncherChoice(choice.launcher, why), why)


def _nothing_at_hand(recipe: Recipe) -> str:
    trace = (
        f"Without a GPU, its ranks are traced in an environment of their own: {how_to_get_one(framework_of(recipe))}. "
    )
    return (
        f"{recipe.path}: nothing here to rehearse on. {trace}With one: on a machine that has a "
        f"{recipe.cluster.accelerator.name} or its like, or --on gpu where there is SLURM (sbatch on PATH)"
    )


VARIABLE = TRACE_VARIABLE
CHECKOUT = Path(__file__).resolve().parents[3]
IN_CHECKOUT = ".venv-frameworks"

# Of the variables of the person who asks, those that would make another Python of this one.
_LEAKS = ("PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP", "VIRTUAL_ENV", "LD_PRELOAD")


@dataclass(frozen=True)
class TraceEnvironment:
    """A folder with a framework's packages beside a CPU build of torch; `versions` by package."""

    folder: Path
    versions: Mapping[str, str]

    @property
    def python(self) -> Path:
        return python_of(self.folder)

    def variables(self) -> dict[str, str]:
        """Those its Python is started with: one thread each, since ranks are traced side by side."""
        variables = {name: value for name, value in os.environ.items() if name not in _LEAKS}
        return variables | {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}


def find_trace_environment(framework: Framework | None = None) -> TraceEnvironment | None:
    """Return the environment that `LLMLAUNCH_FRAMEWORKS` names, else the checkout's, else the person's own; None where
    there is none. A framework that needs no environment apart may also be traced by the very Python that runs
    llmlaunch. Without a framework it is that of the first of all.

    Raises:
        UserError: the variable names something else.
    """
    framework = framework or framework_named(DEFAULT_FRAMEWORK)
    if not framework.traced_apart:
        return _environment_beside(framework)
    named = _named_folder(framework)
    if named is not None:
        environment = TraceEnvironment(named, versions_in(named))
        for package in framework.traced_packages:
            if package not in environment.versions:
                raise UserError(f"{VARIABLE}: {os.environ[VARIABLE]} holds no {package}; {how_to_get_one(framework)}")
        return environment
    for folder in (CHECKOUT / IN_CHECKOUT, user_folder()):
        if is_installed(folder):
            return TraceEnvironment(folder, versions_in(folder))
    return None


def _environment_beside(framework: Framework) -> TraceEnvironment | None:
    """Return the environment that the variable names, or this Python's, whichever has all packages of the framework;
    one that the variable names for another framework is passed over."""
    named = _named_folder(framework)
    for folder in (*((named,) if named is not None else ()), Path(sys.prefix)):
        versions = versions_in(folder, framework.traced_packages)
        if len(versions) == len(framework.traced_packages):
            return TraceEnvironment(folder, versions)
    return None


def _named_folder(framework: Framework) -> Path | None:
    """The folder the variable names. Raises UserError where that is no environment."""
    named = os.environ.get(VARIABLE)
    if not named:
        return None
    folder = with_home(named).absolute()
    if not python_of(folder).exists():
        raise UserError(
            f"{VARIABLE}: {named} is no such environment (it has no bin/python); {how_to_get_one(framework)}"
        )
    return folder


def how_to_get_one(framework: Framework | None = None) -> str:
    """Return what a person types to have an environment for that framework here; without one, for those that are
    installed apart."""
    if framework is not None and framework.how_to_trace:
        return framework.how_to_trace
    if (CHECKOUT / "Makefile").is_file():
        return f"make install-frameworks in {CHECKOUT} makes one"
    return "llmlaunch rehearse --install-frameworks makes one"


def refuse_another_version(environment: TraceEnvironment, recipe: Recipe) -> tuple[str, ...]:
    """Return sentences for the person where the environment is not the job's, but takes the same arguments.

    Raises:
        UserError: the recipe's version takes other arguments than the environment's.
    """
    framework = framework_of(recipe)
    notes = framework.trace_notes(recipe, environment.folder, environment.versions, how_to_get_one(framework))
    here = framework.compared_version(environment.versions)
    return notes if here is None else (*_refuse_another(environment, recipe, recipe.backend.framework, here), *notes)


def _refuse_another(environment: TraceEnvironment, recipe: Recipe, framework: str, here: str) -> tuple[str, ...]:
    job_version = recipe.backend.runs_version
    if job_version is None:
        return (f"assumed that the job runs {framework} {here} too (set backend.version to say another)",)
    if not same_minor(job_version, here):
        raise UserError(
            f"{recipe.path}: backend.version: the job runs {framework} {job_version}, and {environment.folder} holds "
            f"{here}: what that keeps in memory is another job's. {VARIABLE}=FOLDER names an environment with it"
        )
    return ()
