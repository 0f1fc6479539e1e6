"""What is rendered, from the shipped templates or, file by file, from those of the person's own folder."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmlaunch.assets import asset
from llmlaunch.errors import UserError

if TYPE_CHECKING:
    from jinja2.sandbox import SandboxedEnvironment


TEMPLATES_VARIABLE = "LLMLAUNCH_TEMPLATES"


def has_own_templates() -> bool:
    """Whether the person has named a folder of templates, which are rendered in place of the shipped ones."""
    return bool(os.environ.get(TEMPLATES_VARIABLE))


def render(
    name: str, context: Mapping[str, object], functions: Mapping[str, Callable[..., Any]], **settings: Any
) -> str:
    """The template `name` of `LLMLAUNCH_TEMPLATES`, else the shipped one, filled in; `settings` are Jinja's own.

    Raises UserError where a template of the person's own does not render; a shipped one that does not is our bug.
    """
    from jinja2 import TemplateError  # `check` renders nothing and starts sooner

    folders = _folders(os.environ)
    environment = _environment(folders, tuple(functions.items()), tuple(settings.items()))
    try:
        return environment.get_template(name).render(context)
    except TemplateError as error:
        if len(folders) == 1:
            raise
        line = getattr(error, "lineno", None)
        at = f"{name}, line {line}" if line else name
        raise UserError(f"{at} (searched in {folders[0]} first): {error.message}") from error


@cache
def _environment(
    folders: tuple[Path, ...],
    functions: tuple[tuple[str, Callable[..., Any]], ...],
    settings: tuple[tuple[str, Any], ...],
) -> SandboxedEnvironment:
    """Return Jinja's environment, which compiles a template once, and anew where its file has changed."""
    from jinja2 import FileSystemLoader, StrictUndefined
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(
        loader=FileSystemLoader([str(folder) for folder in folders]),
        undefined=StrictUndefined,
        trim_blocks=True,
        **dict(settings),
    )
    environment.globals.update(functions)
    return environment


def _folders(environ: Mapping[str, str]) -> tuple[Path, ...]:
    """Return the folders searched for templates, in order. Raises `UserError` if the person's folder is none."""
    shipped = asset("templates")
    named = environ.get(TEMPLATES_VARIABLE)
    if not named:
        return (shipped,)
    own = Path(named)
    if not own.is_dir():
        raise UserError(
            f"{TEMPLATES_VARIABLE}={named} is not a folder; name the one that holds your templates, or unset it"
        )
    return (own, shipped)
