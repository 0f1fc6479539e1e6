"""Where ranks are rehearsed: on one GPU, here or under SLURM, or traced in an environment of its own; and what to do
where nothing is at hand."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from llmlaunch.calibration.support import same_minor
from llmlaunch.errors import UserError
from llmlaunch.frameworks.megatron.parser import KNOWN_VERSIONS, known_version, rendered_version
from llmlaunch.launchers.choose import LauncherChoice, choose
from llmlaunch.launchers.local_gpus import gpu_at_hand
from llmlaunch.recipe.types import Recipe
from llmlaunch.rehearsal.install import is_installed, python_of, user_folder, versions_in
from llmlaunch.user_data import with_home

__all__ = [
    "VARIABLE",
    "RehearsalPlace",
    "TraceEnvironment",
    "chosen_place",
    "find_trace_environment",
    "how_to_get_one",
    "refuse_another_version",
]


GPU, TRACE = "gpu", "trace"
MEGATRON, DEEPSPEED, BRIDGE = "megatron-lm", "deepspeed", "megatron-bridge"


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
    accelerator, on_bridge = recipe.cluster.accelerator, recipe.backend.name == BRIDGE
    if on_bridge and place == GPU:
        raise UserError(f"{recipe.path}: {_traced_alone(recipe)}")
    if accelerator.kind == "cpu" and (place != TRACE or recipe.backend.name == DEEPSPEED):
        raise UserError(f"{recipe.path}: trains on CPUs: there is no GPU's memory to rehearse; submit runs it here")
    gpu = None if place == TRACE or on_bridge else gpu_at_hand(accelerator)
    if gpu is not None:
        return _launched(choose(True, say), f"On a GPU of this machine: {gpu.name}.")
    if place == GPU:
        if shutil.which("sbatch") is None:
            raise UserError(_nothing_at_hand(recipe))
        return _launched(choose(False, say), "On one GPU of a node that SLURM gives.")
    environment = find_trace_environment(recipe.backend.name)
    if environment is None:
        raise UserError(_nothing_at_hand(recipe))
    return RehearsalPlace(environment, None, f"Traced without a GPU, with {environment.folder}.")


def _launched(choice: LauncherChoice, why: str) -> RehearsalPlace:
    return RehearsalPlace(None, LauncherChoice(choice.launcher, why), why)


def _nothing_at_hand(recipe: Recipe) -> str:
    trace = (
        f"Without a GPU, its ranks are traced in an environment of their own: {how_to_get_one(recipe.backend.name)}. "
    )
    return (
        f"{recipe.path}: nothing here to rehearse on. {trace}With one: on a machine that has a "
        f"{recipe.cluster.accelerator.name} or its like, or --on gpu where there is SLURM (sbatch on PATH)"
    )


VARIABLE = "LLMLAUNCH_FRAMEWORKS"
CHECKOUT = Path(__file__).resolve().parents[3]
IN_CHECKOUT = ".venv-frameworks"
CORE = "megatron-core"
WITH_DEEPSPEED = ("deepspeed", "torch", "transformers", "peft")

# Of the variables of the person who asks, those that would make another Python of this one.
_LEAKS = ("PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP", "VIRTUAL_ENV", "LD_PRELOAD")


@dataclass(frozen=True)
class TraceEnvironment:
    """A folder with the frameworks of a backend beside a CPU build of torch; `versions` by package. For Megatron-LM
    these are Megatron core and Transformer Engine."""

    folder: Path
    versions: Mapping[str, str]

    @property
    def python(self) -> Path:
        return python_of(self.folder)

    def variables(self) -> dict[str, str]:
        """Those its Python is started with: one thread each, since ranks are traced side by side."""
        variables = {name: value for name, value in os.environ.items() if name not in _LEAKS}
        return variables | {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}


def _traced_alone(recipe: Recipe) -> str:
    """Return why no rank of Megatron-Bridge runs on a GPU by itself, and what does instead, in a sentence."""
    why = "backend: a rank of megatron-bridge is traced (--on trace); on a GPU rehearse runs Megatron-LM's script, "
    if recipe.techniques.adapters is not None:
        return f"{why}which has no adapters"
    behind = f"backend={MEGATRON}" + ("" if recipe.data.sft is None else " 'data={mock: true}'")
    return f"{why}which configures the same Megatron core with {behind} behind the recipe"


def find_trace_environment(backend: str = MEGATRON) -> TraceEnvironment | None:
    """The one `LLMLAUNCH_FRAMEWORKS` names, else the checkout's, else the person's own; None where there is none. Ranks
    of DeepSpeed may also be traced by the very Python that runs llmlaunch.

    Raises:
        UserError: the variable names something else.
    """
    if backend == DEEPSPEED:
        return _environment_with_deepspeed()
    named = _named_folder(backend)
    if named is not None:
        environment = TraceEnvironment(named, versions_in(named))
        if CORE not in environment.versions:
            raise UserError(f"{VARIABLE}: {os.environ[VARIABLE]} holds no {CORE}; {how_to_get_one(backend)}")
        return environment
    for folder in (CHECKOUT / IN_CHECKOUT, user_folder()):
        if is_installed(folder):
            return TraceEnvironment(folder, versions_in(folder))
    return None


def _environment_with_deepspeed() -> TraceEnvironment | None:
    """An environment that the variable names for Megatron-LM does not stand in the way of this one."""
    named = _named_folder(DEEPSPEED)
    for folder in (*((named,) if named is not None else ()), Path(sys.prefix)):
        versions = versions_in(folder, WITH_DEEPSPEED)
        if len(versions) == len(WITH_DEEPSPEED):
            return TraceEnvironment(folder, versions)
    return None


def _named_folder(backend: str) -> Path | None:
    """The folder the variable names. Raises UserError where that is no environment."""
    named = os.environ.get(VARIABLE)
    if not named:
        return None
    folder = with_home(named).absolute()
    if not python_of(folder).exists():
        raise UserError(f"{VARIABLE}: {named} is no such environment (it has no bin/python); {how_to_get_one(backend)}")
    return folder


def how_to_get_one(backend: str = MEGATRON) -> str:
    """What a person types to have one, here."""
    if backend == DEEPSPEED:
        return (
            "pip install --index-url https://download.pytorch.org/whl/cpu torch, then pip install 'llmlaunch[local]', "
            f"beside llmlaunch or in a folder that {VARIABLE} names"
        )
    if (CHECKOUT / "Makefile").is_file():
        return f"make install-frameworks in {CHECKOUT} makes one"
    return "llmlaunch rehearse --install-frameworks makes one"


def refuse_another_version(environment: TraceEnvironment, recipe: Recipe) -> tuple[str, ...]:
    """Sentences for the person where the job's version is not the environment's, but takes the same arguments.

    Raises:
        UserError: the recipe's version takes other arguments than the environment's.
    """
    if recipe.backend.name == DEEPSPEED:
        return _refuse_another_deepspeed(environment, recipe)
    if recipe.backend.name == BRIDGE:
        return _refuse_another_bridge(environment, recipe)
    job_version, here = recipe.backend.runs_version, environment.versions.get(CORE, "unknown")
    rendered_as = rendered_version(recipe)
    if known_version(here) is None:
        raise UserError(
            f"{environment.folder}: holds Megatron core {here}, and a trace knows {', '.join(KNOWN_VERSIONS)} alone; "
            f"{how_to_get_one()}"
        )
    if known_version(here) != rendered_as:
        raise UserError(
            f"{recipe.path}: backend.version: the job runs Megatron core {job_version or rendered_as}, and "
            f"{environment.folder} holds {here}: what that keeps in memory is another job's. "
            f"backend.version={known_version(here)} rehearses the job as of that version; "
            f"{VARIABLE}=FOLDER names an environment with core {rendered_as}"
        )
    if job_version is not None and known_version(job_version) is None:
        return (f"the job runs Megatron core {job_version}; this is {here}, whose arguments were rendered for it",)
    return ()


FIELDS_UNREAD = "fields of Bridge's that backend.extra_args sets are not in the trace"


def _refuse_another_bridge(environment: TraceEnvironment, recipe: Recipe) -> tuple[str, ...]:
    """Bridge's own package is needed for adapters alone."""
    here = environment.versions.get(BRIDGE)
    if here is None and recipe.techniques.adapters is not None:
        raise UserError(
            f"{recipe.path}: training.adapters: {environment.folder} holds no {BRIDGE}, whose LoRA stands beside the "
            f"layers; {how_to_get_one()}"
        )
    notes = () if here is None else _refuse_another(environment, recipe, "Megatron-Bridge", here)
    return (*notes, FIELDS_UNREAD) if recipe.backend.extra_args else notes


def _refuse_another_deepspeed(environment: TraceEnvironment, recipe: Recipe) -> tuple[str, ...]:
    return _refuse_another(environment, recipe, "DeepSpeed", environment.versions[DEEPSPEED])


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
