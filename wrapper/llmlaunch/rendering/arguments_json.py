"""arguments.json: every rendered argument, variable, setting and directive, and what each follows from: a line of the
recipe, a word of the command line, the model, the cluster's profile, the planner, or a key's own default."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from llmlaunch.documents.nested import leaves
from llmlaunch.documents.yaml_strict import KeyPath
from llmlaunch.errors import UserError
from llmlaunch.frameworks.argument import NodeVariable, Reason, Word
from llmlaunch.frameworks.base import Rendered
from llmlaunch.layout import LAYOUT_FIELDS
from llmlaunch.planner.plan import Candidate, Plan
from llmlaunch.planner.setting import group_nodes
from llmlaunch.recipe.types import Recipe
from llmlaunch.recipe.written import place_of, written_document
from llmlaunch.rendering.launch import OUR_VARIABLES, exported
from llmlaunch.rendering.restarts import warning_seconds
from llmlaunch.rendering.scripts import DIRECTIVE_REASONS, sbatch_options
from llmlaunch.rundir import file_names
from llmlaunch.rundir.files import object_in
from llmlaunch.rundir.values import shortened
from llmlaunch.techniques import Techniques
from llmlaunch.units import gib

SCHEMA = 1
Entry = dict[str, object]
# Parts of a recipe that are named by one word: what is not written inside came with the word.
NAMED = ("model", "cluster")
_UNWRITTEN = object()


@dataclass(frozen=True)
class Origin:
    """`source` is "recipe", "command line", "model", "cluster", "planner" or "default". `place` is a line of the run
    directory's recipe.yaml ("recipe.yaml:12") or a word of the command line ("training.steps=100"), None for what
    stands nowhere; `said` is what stands there or was decided."""

    key: str
    source: str
    place: str | None
    said: str


class Origins:
    """The origins of one recipe's keys under one plan. A key is dotted, as a person writes it."""

    def __init__(self, recipe: Recipe, plan: Plan) -> None:
        document = written_document(recipe)
        self._recipe, self._plan, self._values = recipe, plan, {} if document is None else document.value

    def of(self, key: str) -> Origin:
        path = tuple(key.split("."))
        value, planned = self._value(path), _is_planned(key)
        if value is not _UNWRITTEN and not (planned and _left_open(value)):
            return Origin(key, *self._place(path), f"{key}: {_shown(value)}")
        if planned:
            place = None if value is _UNWRITTEN else self._place(path)[1]
            return Origin(key, "planner", place, _why_chosen(self._plan, path[-1]))
        if path[0] in NAMED and len(path) > 1:
            return self._named(key, path[0])
        return Origin(key, "default", None, f"{key} is not written: its default")

    def written(self, key: str) -> bool:
        """Whether the recipe or the command line has the key."""
        return self._value(tuple(key.split("."))) is not _UNWRITTEN

    def _value(self, path: KeyPath) -> Any:
        value: Any = self._values
        for part in path:
            if not isinstance(value, Mapping) or part not in value:
                return _UNWRITTEN
            value = value[part]
        return value

    def _named(self, key: str, part: str) -> Origin:
        """Return the origin of a key that a preset, a profile or a configuration named by the recipe decides."""
        for path in ((part, "base"), (part,)):
            name = self._value(path)
            if isinstance(name, str):
                return Origin(key, part, self._place(path)[1], f"of {part} {name}")
        return Origin(key, "default", None, f"{key} is not written: its default, or follows from other sizes")

    def _place(self, path: KeyPath) -> tuple[str, str]:
        """Source and place of what is written; the words of the command line are documents of their own."""
        place = place_of(self._recipe, path)
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
    return (part == "layout" and name in planned) or key in (
        "training.gradient_dtype",
        "training.save_interval",
        "nodes",
    )


def _why_chosen(plan: Plan, name: str) -> str:
    """How much slower the best of the runners-up with another value is."""
    if plan.locked_by:
        return f"{plan.locked_by}, which keeps the recipe to an earlier plan"
    if name == "nodes":
        return "the planner: the fewest that fit and meet the budget"
    if name == "save_interval":
        end = plan.expected
        return "as the planned layout saves" if end is None else f"the planner: {end.save_interval_reason}"
    chosen = _value(plan.chosen, name)
    others = [candidate for candidate in plan.alternatives if _value(candidate, name) != chosen]
    if not others:
        return f"the planner, among {plan.searched} layouts; the runners-up have it, too"
    best = min(others, key=lambda candidate: candidate.step_seconds)
    return f"the planner, among {plan.searched:,} layouts; {comparison(plan.chosen, best, _shown(_value(best, name)))}"


def comparison(chosen: Candidate, best: Candidate, value: str) -> str:
    """Say how the best layout with another value compares with the chosen one, which a habit may have preferred."""
    slower = round(100 * (best.step_seconds / chosen.step_seconds - 1), 1)
    more_bytes = best.device_bytes - chosen.device_bytes
    if slower > 0:
        return f"the best layout with {value} is {slower:.1f} % slower"
    needs = f"needs {gib(abs(more_bytes))} GiB {'more' if more_bytes > 0 else 'less'}"
    if slower < 0:
        return f"the best layout with {value} is {-slower:.1f} % faster {'but' if more_bytes > 0 else 'and'} {needs}"
    return f"the best layout with {value} is as fast and {needs}"


def _value(candidate: Candidate, name: str) -> Any:
    if name == "gradient_dtype":
        return candidate.gradient_dtype
    layout = candidate.layout.as_json()
    return layout[name] if name in layout else getattr(candidate.techniques, name, None)


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return shortened(text)


def arguments_json(recipe: Recipe, plan: Plan, rendered: Rendered) -> dict[str, object]:
    """The whole file as a value (docs/run-directory.md)."""
    origins = Origins(recipe, plan)
    return {
        "schema": SCHEMA,
        "program": [_shown_word(word) for word in rendered.program[: -_explained(recipe, rendered) or None]],
        "entries": [
            *_arguments(recipe, plan, rendered, origins),
            *_variables(recipe, rendered, origins),
            *_settings(rendered, origins),
            *_directives(recipe, plan, origins),
        ],
    }


def _explained(recipe: Recipe, rendered: Rendered) -> int:
    """Words of the program after the script: the person's own for it, llmlaunch's, the person's own at the end."""
    planned = sum(len(argument.words) for argument in rendered.arguments)
    return len(recipe.backend.script_args) + planned + len(recipe.backend.command_line_args)


def _arguments(recipe: Recipe, plan: Plan, rendered: Rendered, origins: Origins) -> Iterator[Entry]:
    classes = {argument.text: argument.sentence for argument in plan.arguments.arguments}
    yield from _own("backend.script_args", recipe.backend.script_args, origins, classes)
    for argument in rendered.arguments:
        value = " ".join(_shown_word(word) for word in argument.values)
        yield _entry(file_names.COMMAND, "argument", argument.flag, value, argument.reason, origins)
    yield from _own("backend.extra_args", recipe.backend.command_line_args, origins, classes)


def _own(key: str, arguments: Sequence[str], origins: Origins, classes: Mapping[str, str]) -> Iterator[Entry]:
    """The person's own words, with the class of each."""
    for flag, value in _grouped(arguments):
        why = classes.get(" ".join(filter(None, (flag.replace("=", " ", 1), value))), "")
        yield _entry(file_names.COMMAND, "argument", flag, value, Reason((key,), why), origins)


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
        yield _entry(file_names.RUN, "variable", name, value, reason, origins)


def _settings(rendered: Rendered, origins: Origins) -> Iterator[Entry]:
    if not rendered.settings_file:
        return
    whole = json.loads(rendered.files[rendered.settings_file])
    for name, value in leaves(whole):
        reason = rendered.settings.get(name, Reason())
        yield _entry(rendered.settings_file, "setting", name, json.dumps(value), reason, origins)


def _directives(recipe: Recipe, plan: Plan, origins: Origins) -> Iterator[Entry]:
    group = group_nodes(recipe.cluster, plan.layout)
    for name, value in sbatch_options(recipe, warning_seconds(recipe, plan), group).items():
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
    # of several keys those that say something
    written = [origin for origin in origins_of_keys if origin.source != "default"]
    return {
        "file": file,
        "kind": kind,
        "name": name,
        "value": value,
        "from": [asdict(origin) for origin in written or origins_of_keys],
        "why": reason.why,
    }


def _shown_word(word: Word) -> str:
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
