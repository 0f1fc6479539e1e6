"""The form in which a recipe writes a model inline."""

from __future__ import annotations

from functools import cache
from typing import Annotated, Any, Literal

from pydantic import Field
from typing_extensions import NotRequired

from llmlaunch.documents.keys import form, keys_of
from llmlaunch.documents.text import Line
from llmlaunch.families.registry import family_names
from llmlaunch.models.sections import Mamba, Vision
from llmlaunch.models.shape import MlaShape, ModelShape, MoeShape, Multipliers, Router

PARTS = {"moe": MoeShape, "mla": MlaShape, "mamba": Mamba, "multipliers": Multipliers, "vision": Vision}
"""Sections that are written over those of a base; the others replace them."""
_literal: Any = Literal  # mypy knows only values that are written out


@cache
def model_form() -> Any:
    """Return the type of a model written inline: over a `base`, only what differs from it is given."""
    base = Annotated[Line | None, Field(description="Preset or config.json this shape starts from")]
    router = form("Router", keys_of(Router, over_base=True), description=Router.__doc__)
    written: dict[str, Any] = {"family": _literal[family_names()] | None}
    for name, section in PARTS.items():
        within = {"router": router | None} if section is MoeShape else {}
        description = None if section is MoeShape else section.__doc__
        section_keys = keys_of(section, over_base=True, written=within)
        written[name] = form(section.__name__, section_keys, description=description) | None
    keys = {"base": NotRequired[base], **keys_of(ModelShape, over_base=True, written=written)}
    return form("Model", keys, description="A decoder-only model. With `base`, only what differs from it.")
