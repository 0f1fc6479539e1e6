"""The environment that traces a rank: where it is, what it holds, and whether a job would be the same there."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from llmlaunch.backends.megatron.versions import KNOWN_VERSIONS, known_version, rendered_version
from llmlaunch.errors import UserError
from llmlaunch.recipe.types import Recipe
from llmlaunch.rehearsal.install import is_installed, python_of, user_folder, versions_in

__all__ = ["VARIABLE", "TraceEnvironment", "find_trace_environment", "how_to_get_one", "refuse_another_version"]

VARIABLE = "LLMLAUNCH_FRAMEWORKS"
CHECKOUT = Path(__file__).resolve().parents[3]
IN_CHECKOUT = ".venv-frameworks"
CORE = "megatron-core"

# Of the variables of the person who asks, those that would make another Python of this one.
_LEAKS = ("PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP", "VIRTUAL_ENV", "LD_PRELOAD")


@dataclass(frozen=True)
class TraceEnvironment:
    """A folder with Megatron core and Transformer Engine beside a CPU build of torch; `versions` by package."""

    folder: Path
    versions: Mapping[str, str]

    @property
    def python(self) -> Path:
        return python_of(self.folder)

    def variables(self) -> dict[str, str]:
        """Those its Python is started with: one thread each, since ranks are traced side by side."""
        variables = {name: value for name, value in os.environ.items() if name not in _LEAKS}
        return variables | {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}


def find_trace_environment() -> TraceEnvironment | None:
    """The one `LLMLAUNCH_FRAMEWORKS` names, else the checkout's, else the person's own; None where there is none.

    Raises:
        UserError: the variable names something else.
    """
    named = os.environ.get(VARIABLE)
    if named:
        folder = Path(named).expanduser().absolute()
        if not python_of(folder).exists():
            raise UserError(f"{VARIABLE}: {named} is no such environment (it has no bin/python); {how_to_get_one()}")
        environment = TraceEnvironment(folder, versions_in(folder))
        if CORE not in environment.versions:
            raise UserError(f"{VARIABLE}: {named} holds no {CORE}; {how_to_get_one()}")
        return environment
    for folder in (CHECKOUT / IN_CHECKOUT, user_folder()):
        if is_installed(folder):
            return TraceEnvironment(folder, versions_in(folder))
    return None


def how_to_get_one() -> str:
    """What a person types to have one, here."""
    if (CHECKOUT / "Makefile").is_file():
        return f"make install-frameworks in {CHECKOUT} makes one"
    return "llmlaunch rehearse --install-frameworks makes one"


def refuse_another_version(environment: TraceEnvironment, recipe: Recipe) -> tuple[str, ...]:
    """Sentences for the person where the job's version is not the environment's, but takes the same arguments.

    Raises:
        UserError: the recipe's version takes other arguments than the environment's.
    """
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
