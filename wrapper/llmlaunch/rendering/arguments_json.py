"""arguments.json: every rendered argument, variable, setting and directive, and what each follows from."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from llmlaunch.backends.argument import NodeVariable, Reason, Word
from llmlaunch.backends.base import Rendered
from llmlaunch.errors import UserError
from llmlaunch.planner.plan import Plan
from llmlaunch.recipe.types import Recipe
from llmlaunch.rendering.directives import DIRECTIVE_REASONS, sbatch_options
from llmlaunch.rendering.origins import Origins
from llmlaunch.rendering.recovery_json import warning_seconds
from llmlaunch.rendering.scripts import OUR_VARIABLES, exported
from llmlaunch.rundir.files import object_in

__all__ = ["arguments_json", "read_arguments"]

SCHEMA = 1
Entry = dict[str, object]


def arguments_json(recipe: Recipe, plan: Plan, rendered: Rendered) -> dict[str, object]:
    """The whole file as a value (docs/run-directory.md)."""
    origins = Origins(recipe, plan)
    return {
        "schema": SCHEMA,
        "program": [_shown(word) for word in rendered.program[: -_explained(recipe, rendered) or None]],
        "entries": [
            *_arguments(recipe, rendered, origins),
            *_variables(recipe, rendered, origins),
            *_settings(rendered, origins),
            *_directives(recipe, plan, origins),
        ],
    }


def _explained(recipe: Recipe, rendered: Rendered) -> int:
    """Words of the program after the script: the person's own for it, llmlaunch's, the person's own at the end."""
    planned = sum(len(argument.words) for argument in rendered.arguments)
    return len(recipe.backend.script_args) + planned + len(recipe.backend.extra_args)


def _arguments(recipe: Recipe, rendered: Rendered, origins: Origins) -> Iterator[Entry]:
    yield from _own("backend.script_args", recipe.backend.script_args, origins)
    for argument in rendered.arguments:
        value = " ".join(_shown(word) for word in argument.values)
        yield _entry("train.sh", "argument", argument.flag, value, argument.reason, origins)
    yield from _own("backend.extra_args", recipe.backend.extra_args, origins)


def _own(key: str, arguments: Sequence[str], origins: Origins) -> Iterator[Entry]:
    """The person's own words."""
    for flag, value in _grouped(arguments):
        yield _entry("train.sh", "argument", flag, value, Reason((key,)), origins)


def _grouped(arguments: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Each flag with the words up to the next one."""
    rest = list(arguments)
    while rest:
        flag, values = rest.pop(0), []
        while rest and not rest[0].startswith("--"):
            values.append(rest.pop(0))
        yield flag, " ".join(values)


def _variables(recipe: Recipe, rendered: Rendered, origins: Origins) -> Iterator[Entry]:
    for name, value in sorted(exported(recipe, rendered).items()):
        if name in recipe.environment or name in recipe.cluster.environment:
            owner = "environment" if name in recipe.environment else "cluster.environment"
            reason = Reason((f"{owner}.{name}",))
        else:
            reason = {**OUR_VARIABLES, **rendered.variables}.get(name, Reason())
        yield _entry("train.sh", "variable", name, value, reason, origins)


def _settings(rendered: Rendered, origins: Origins) -> Iterator[Entry]:
    if not rendered.settings_file:
        return
    whole = json.loads(rendered.files[rendered.settings_file])
    for name, value in _leaves(whole, ""):
        reason = rendered.settings.get(name, Reason())
        yield _entry(rendered.settings_file, "setting", name, json.dumps(value), reason, origins)


def _leaves(value: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, inner in value.items():
        if isinstance(inner, Mapping) and inner:
            yield from _leaves(inner, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", inner


def _directives(recipe: Recipe, plan: Plan, origins: Origins) -> Iterator[Entry]:
    for name, value in sbatch_options(recipe, warning_seconds(recipe, plan)).items():
        if value is False:
            continue
        reason = _of_directive(recipe, name, origins)
        yield _entry("job.sbatch", "directive", f"--{name}", "" if value is True else str(value), reason, origins)


def _of_directive(recipe: Recipe, name: str, origins: Origins) -> Reason:
    """What recipe or profile ask for wins over what the job needs; `exclude` and `gres` join both."""
    ours = DIRECTIVE_REASONS.get(name)
    if ours is not None and (name not in recipe.slurm or name in ("exclude", "gres")):
        return ours
    written = (key for key in (f"slurm.{name}", f"slurm_plugins.{name}") if origins.written(key))
    return Reason((next(written, f"cluster.slurm.{name}"),))


def _entry(file: str, kind: str, name: str, value: str, reason: Reason, origins: Origins) -> Entry:
    origins_of_keys = [origins.of(key) for key in reason.keys]
    written = [
        origin for origin in origins_of_keys if origin.source != "default"
    ]  # of several keys those that say something
    return {
        "file": file,
        "kind": kind,
        "name": name,
        "value": value,
        "from": [origin.as_json() for origin in written or origins_of_keys],
        "why": reason.why,
    }


def _shown(word: Word) -> str:
    return f"${word.name}{word.suffix}" if isinstance(word, NodeVariable) else word


def read_arguments(directory: Path) -> dict[str, Any]:
    """Raises UserError where there is none, or none this llmlaunch can read."""
    path = directory / "arguments.json"
    try:
        value = object_in(path)
    except FileNotFoundError:
        raise UserError(
            f"{directory}: holds no arguments.json: it is no run directory, or an older llmlaunch rendered it; render "
            "the recipe again"
        ) from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read: {error}; render the recipe again") from error
    if value.get("schema") != SCHEMA:
        raise UserError(f"{path}: this llmlaunch reads schema {SCHEMA}; use the version that rendered it")
    return value
