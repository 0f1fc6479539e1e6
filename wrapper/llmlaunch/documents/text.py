"""Text that people write and that ends up in scripts, job names and environments: what is allowed where.

Everything here is a pydantic type, or a check one is made of; a check returns the value or raises `ValueError`
with a sentence that says how to mend it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Annotated, Any

from pydantic import AfterValidator, WithJsonSchema

from llmlaunch.documents.slurm_options import (
    plugin_option_problem,
    sbatch_option_problem,
    sbatch_value_problem,
    srun_option_problem,
)

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_MAX_LINE = 4096
_MOST_LEVELS = 8

# set by the launcher and by torchrun on every node; another value would break the rendezvous
_RESERVED = frozenset({"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"})


def _line(text: str) -> str:
    if _CONTROL.search(text):
        raise ValueError("contains a line break or control character; write it in one line")
    if len(text) > _MAX_LINE:
        raise ValueError(f"is longer than {_MAX_LINE} characters; shorten it")
    return text


def _name(text: str) -> str:
    if not _NAME.fullmatch(text):
        raise ValueError(
            "must be a safe file and job name: 1 to 64 letters, digits, '.', '_' or '-', not beginning with '.' or '-'"
        )
    return text


def _path(text: str) -> str:
    if not text.strip():
        raise ValueError("is empty; give a path or remove the line")
    if text.startswith("-"):
        raise ValueError("must not begin with '-', it would be read as an option; write ./ before it")
    return _line(text)


class WrongEntry(ValueError):
    """A wrong value of one entry of a mapping; the message is shown at the place of that entry."""

    def __init__(self, entry: str, problem: str) -> None:
        super().__init__(problem)
        self.entry = entry


def _slurm_value(value: Any) -> Any:
    if isinstance(value, str) and ('"' in value or "\\" in value):  # sbatch's own quoting (slurm src/sbatch/opt.c)
        raise ValueError("contains a double quote or backslash, which no #SBATCH line can hold; remove it")
    return _srun_value(value)


def _slurm_options(options: dict[str, Any]) -> dict[str, Any]:
    problem = sbatch_value_problem(options)
    if problem is not None:
        raise WrongEntry(*problem)
    return options


def _option(problem_of: Callable[[str], str | None]) -> AfterValidator:
    """Return a check that the text is an option of which `problem_of` says nothing."""

    def check(text: str) -> str:
        problem = problem_of(text)
        if problem is not None:
            raise ValueError(problem)
        return text

    return AfterValidator(check)


def _srun_value(value: Any) -> Any:
    if isinstance(value, str):
        return _line(value)
    if isinstance(value, (int, bool)):
        return value
    raise ValueError("must be text, a whole number, or true (an option without a value)")


def _mount(text: str) -> str:
    parts = text.split(":")
    if len(parts) not in (2, 3) or not all(parts) or not all(part.startswith("/") for part in parts[:2]) or "," in text:
        raise ValueError("must be /source:/destination or /source:/destination:flags")
    return _line(text)


def _word(pattern: re.Pattern[str], what: str) -> AfterValidator:
    def check(text: str) -> str:
        if not pattern.fullmatch(text):
            raise ValueError(f"is not {what}")
        return text

    return AfterValidator(check)


def is_set_by_launcher(name: str) -> bool:
    """Return whether every rendered job sets an environment variable itself."""
    return name in _RESERVED or name.startswith("LLMLAUNCH_")


def _environment_name(text: str) -> str:
    if not _VARIABLE.fullmatch(text):
        raise ValueError("is not a name of an environment variable; use letters, digits and '_'")
    if is_set_by_launcher(text):
        raise ValueError("is set by the launcher itself; remove it")
    return text


def _environment_value(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        raise ValueError("must be text")
    return _line(str(value))


def mount_problem(mount: str) -> str | None:
    """Say why `container.mounts` may not hold this mount; None if it may."""
    try:
        _mount(mount)
    except ValueError as error:
        return str(error)
    return None


def variable_problem(name: str, value: str) -> str | None:
    """Say why `environment:` may not hold this variable; None if it may."""
    try:
        _environment_name(name)
        _environment_value(value)
    except ValueError as error:
        return str(error)
    return None


def _settings(value: dict[str, Any], depth: int = 0) -> dict[str, Any]:
    if depth > _MOST_LEVELS:
        raise ValueError(f"is nested more than {_MOST_LEVELS} levels deep")
    for name, item in value.items():
        _line(name)
        for leaf in item if isinstance(item, list) else [item]:
            if isinstance(leaf, dict):
                _settings(leaf, depth + 1)
            elif isinstance(leaf, str):
                _line(leaf)
            elif isinstance(leaf, list) or (isinstance(leaf, float) and not math.isfinite(leaf)):
                raise ValueError(f"{name}: must be a finite number, text, true, false, a list of these or a mapping")
    return value


Line = Annotated[str, AfterValidator(_line)]
JsonSettings = Annotated[dict[str, Any], AfterValidator(_settings), WithJsonSchema({"type": "object"})]
Name = Annotated[str, AfterValidator(_name), WithJsonSchema({"type": "string", "pattern": f"^{_NAME.pattern}$"})]
PathText = Annotated[str, AfterValidator(_path)]
SlurmOption = Annotated[str, _option(sbatch_option_problem)]
SlurmValue = Annotated[Any, AfterValidator(_slurm_value), WithJsonSchema({"type": ["string", "integer", "boolean"]})]
SlurmOptions = Annotated[dict[SlurmOption, SlurmValue], AfterValidator(_slurm_options)]
PluginOptions = dict[Annotated[str, _option(plugin_option_problem)], SlurmValue]
SrunOption = Annotated[str, _option(srun_option_problem)]
SrunValue = Annotated[Any, AfterValidator(_srun_value), WithJsonSchema({"type": ["string", "integer", "boolean"]})]
SetupLine = Line
Mount = Annotated[str, AfterValidator(_mount)]
CudaCapability = Annotated[str, _word(re.compile(r"[0-9]{1,2}\.[0-9]"), "a CUDA compute capability, such as 9.0")]
GpuType = Annotated[str, _word(re.compile(r"[A-Za-z0-9_.-]+"), "the type of a GPU as SLURM has it, such as h100")]
HostList = Annotated[
    str,
    _word(
        re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]|\[[0-9,-]+\])*"),
        "a node name, or names as SLURM writes them, such as node[1-4,7]; give each its own line",
    ),
]
ModuleName = Annotated[
    str, _word(re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+/@:=-]*"), "the name of a module, such as cuda/12.4")
]
MpiType = Annotated[
    str, _word(re.compile(r"(?!list$)[a-z0-9_]+"), "one of those `srun --mpi=list` shows, such as none or pmix")
]
EnvironmentName = Annotated[str, AfterValidator(_environment_name)]
SecretName = EnvironmentName
EnvironmentValue = Annotated[Any, AfterValidator(_environment_value), WithJsonSchema({"type": ["string", "integer"]})]
