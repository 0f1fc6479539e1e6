"""Where a recipe key got its value: a line of the recipe, a word of the command line, the model, the cluster's profile,
the planner, or the key's own default."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llmlaunch.documents.yaml_strict import Document, KeyPath
from llmlaunch.layout import LAYOUT_FIELDS
from llmlaunch.planner.plan import Candidate, Plan
from llmlaunch.recipe.overrides import written_document
from llmlaunch.recipe.types import Recipe
from llmlaunch.techniques import Techniques

__all__ = ["Origin", "Origins"]

# Parts of a recipe that are named by one word: what is not written inside came with the word.
NAMED = ("model", "cluster")
LONGEST = 60


@dataclass(frozen=True)
class Origin:
    """`source` is "recipe", "command line", "model", "cluster", "planner" or "default". `place` is a line of the run
    directory's recipe.yaml ("recipe.yaml:12") or a word of the command line ("training.steps=100"), None for what
    stands nowhere; `said` is what stands there or was decided."""

    key: str
    source: str
    place: str | None
    said: str

    def as_json(self) -> dict[str, object]:
        return {"key": self.key, "source": self.source, "place": self.place, "said": self.said}


class Origins:
    """The origins of one recipe's keys under one plan. A key is dotted, as a person writes it."""

    def __init__(self, recipe: Recipe, plan: Plan) -> None:
        self._recipe, self._plan = recipe, plan
        self._document = written_document(recipe)

    def of(self, key: str) -> Origin:
        path = tuple(key.split("."))
        written = self._written(path)
        planned = _is_planned(key)
        if written is not None and not (planned and _left_open(written[0])):
            return self._said(key, path, *written)
        if planned:
            return self._planned(key, path, written)
        if path[0] in NAMED and len(path) > 1:
            return self._named(key, path[0])
        return Origin(key, "default", None, f"{key} is not written: its default")

    def written(self, key: str) -> bool:
        """The recipe or the command line says it."""
        return self._written(tuple(key.split("."))) is not None

    def _written(self, path: KeyPath) -> tuple[Any, Document] | None:
        if self._document is None:
            return None
        value: Any = self._document.value
        for part in path:
            if not isinstance(value, Mapping) or part not in value:
                return None
            value = value[part]
        return value, self._document

    def _said(self, key: str, path: KeyPath, value: Any, document: Document) -> Origin:
        return Origin(key, *self._place(document, path), f"{key}: {_shown(value)}")

    def _named(self, key: str, part: str) -> Origin:
        """Return the origin of a key that a preset, a profile or a configuration named by the recipe decides."""
        for path in ((part, "base"), (part,)):
            written = self._written(path)
            if written is not None and isinstance(written[0], str):
                return Origin(key, part, self._place(written[1], path)[1], f"of {part} {written[0]}")
        return Origin(key, "default", None, f"{key} is not written: its default, or follows from other sizes")

    def _planned(self, key: str, path: tuple[str, ...], written: tuple[Any, Document] | None) -> Origin:
        place = None if written is None else self._place(written[1], path)[1]
        return Origin(key, "planner", place, _why_chosen(self._plan, path[-1]))

    def _place(self, document: Document, path: KeyPath) -> tuple[str, str]:
        """Source and place of what is written; the words of the command line are documents of their own."""
        place = document.where(path)
        word = place.removeprefix("override ")
        if word != place:
            return "command line", word.partition(":")[0]
        return "recipe", "recipe.yaml" + place.removeprefix(self._recipe.path)


def _left_open(value: Any) -> bool:
    """`auto`, or several values to choose from, as pins of the layout may be."""
    return value == "auto" or isinstance(value, list)


def _is_planned(key: str) -> bool:
    part, _, name = key.partition(".")
    planned = (*LAYOUT_FIELDS, "layers_by_stage", *Techniques.__dataclass_fields__)
    return (part == "layout" and name in planned) or key in ("training.gradient_dtype", "nodes")


def _why_chosen(plan: Plan, name: str) -> str:
    """How much slower the best of the runners-up with another value is."""
    if name == "nodes":
        return "the planner: the fewest that fit and meet the budget"
    chosen = _value(plan.chosen, name)
    others = [candidate for candidate in plan.alternatives if _value(candidate, name) != chosen]
    if not others:
        return f"the planner, among {plan.searched} layouts; the runners-up have it, too"
    best = min(others, key=lambda candidate: candidate.step_seconds)
    slower = 100 * (best.step_seconds / plan.chosen.step_seconds - 1)
    other = _shown(_value(best, name))
    return f"the planner, among {plan.searched} layouts; the best runner-up with {other} takes {slower:.1f} % longer"


def _value(candidate: Candidate, name: str) -> Any:
    if name == "gradient_dtype":
        return candidate.gradient_dtype
    layout = candidate.layout.as_json()
    return layout[name] if name in layout else getattr(candidate.techniques, name, None)


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= LONGEST else text[: LONGEST - 3] + "..."
