"""A candidate of a search: a layout with its techniques and what they cost; and what a plan says of candidates that it
did not choose: a faster one, a fuller one, and the one that would be chosen if nothing had been measured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, field
from itertools import groupby
from operator import itemgetter
from typing import Any

from llmlaunch.frozen import frozen
from llmlaunch.layout import Layout
from llmlaunch.recipe.types import Recipe
from llmlaunch.techniques import NO_TECHNIQUES, SWITCH_NAMES, ActivationTreatments, StateTreatments, Techniques
from llmlaunch.techniques.technique import declarations

# the order in which a label names what is on the host
AWAY = (*declarations(ActivationTreatments), *reversed([*declarations(StateTreatments)]))


@frozen
class Candidate:
    """One layout with its worst rank's device bytes and its step time, and the techniques chosen with it and the format
    gradients accumulate in (None: the backend's own choice)."""

    layout: Layout
    device_bytes: int
    worst_pipeline_rank: int
    step_seconds: float
    tokens_per_second_per_gpu: float
    techniques: Techniques = NO_TECHNIQUES
    gradient_dtype: str | None = None

    def describe(self) -> str:
        """Return the layout and its techniques on one line, leaving out what is switched off."""
        kind = self.recompute_kind
        return " ".join([self.layout.describe(), *([f"({kind})"] if kind else []), *self.technique_labels()])

    @property
    def recompute_kind(self) -> str:
        """What is recomputed: the modules, or the method where it is not the usual one; "" where nothing is to say."""
        techniques = self.techniques
        if techniques.recompute_modules and self.layout.recompute:
            return "+".join(techniques.recompute_modules)
        return techniques.recompute_method if techniques.recompute_method != "uniform" and self.layout.recompute else ""

    def technique_labels(self) -> list[str]:
        """Return what is on the host, the switches that are on, and the format of gradients, a label each."""
        away = host_labels(self.techniques, AWAY)
        labels = [f"offload={'+'.join(away)}"] if away else []
        labels += _switch_labels(self.techniques)
        return labels + ([f"gradients={self.gradient_dtype}"] if self.gradient_dtype else [])

    def as_json(self) -> dict[str, Any]:
        return {
            "layout": self.layout.as_json(),
            **self.techniques_json(),
            "device_bytes": self.device_bytes,
            "worst_pipeline_rank": self.worst_pipeline_rank,
            "step_seconds": self.step_seconds,
            "tokens_per_second_per_gpu": self.tokens_per_second_per_gpu,
        }

    def techniques_json(self) -> dict[str, Any]:
        return {"techniques": self.techniques.as_json(), "gradient_dtype": self.gradient_dtype}


@frozen
class HabitPrice:
    """One habit that a layout goes against: the share of a step that this costs it in the ranking, and why."""

    name: str
    price: float
    reason: str


@frozen
class FasterLayout:
    """The fastest safe layout by the model of time, where the preference chose a plainer one. `gain` is the share by
    which the chosen layout's step takes longer; `habits` are those that count against this layout and not as much
    against the chosen one."""

    candidate: Candidate
    gain: float
    habits: tuple[HabitPrice, ...]

    def as_json(self) -> dict[str, Any]:
        return {"gain": self.gain, "habits": [asdict(habit) for habit in self.habits], **self.candidate.as_json()}


@frozen
class FullerLayout:
    """The layout that the ranking chose, where a roomier one is planned in its place. `gain` is the share by which the
    planned layout's step takes longer; `stated_risk` is this layout's own."""

    candidate: Candidate
    gain: float
    stated_risk: float

    def as_json(self) -> dict[str, Any]:
        return {"gain": self.gain, "stated_risk": self.stated_risk, **self.candidate.as_json()}


@frozen
class ChangedChoice:
    """The layout that would be planned if nothing had been measured on this site. `because` is a clause that says what
    changed the choice, `run_id` the newest run that did, where runs of this very layout were timed."""

    was: Candidate
    because: str
    run_id: str | None = None

    def sentence(self, now: Candidate) -> str:
        """Return that the choice is another one than it was, and why, without a full stop."""
        return f"Measured: was {self.was.describe()}, now {now.describe()}, because {self.because}"

    def as_json(self, now: Candidate) -> dict[str, Any]:
        return {"sentence": self.sentence(now), "run_id": self.run_id, "was": self.was.as_json()}


def host_labels(techniques: ActivationTreatments | StateTreatments, names: Iterable[str]) -> list[str]:
    """Return what techniques move to the host, those of these names: moe_act, checkpoints, optimizer:0.5."""
    labels: list[str] = []
    for name in names:
        word, value = declarations(Techniques)[name].on_host, getattr(techniques, name)
        if word is not None and value:
            labels += value if isinstance(value, tuple) else [word if value is True else f"{word}:{value:g}"]
    return labels


def _switch_labels(techniques: Techniques) -> list[str]:
    """Return the switches that are on, by their names: tp_comm_overlap, loss=native, cuda_graphs=attn."""
    labels = []
    for name in SWITCH_NAMES:
        value = getattr(techniques, name)
        if value != getattr(NO_TECHNIQUES, name):
            shown = "+".join(value) if isinstance(value, tuple) else value
            labels.append(name if value is True else f"{name}={shown}")
    return labels


@frozen
class Change:
    """A change of a recipe. `settings` maps dotted keys to what to write there, None to remove the key; `before` holds
    the present values of those keys. `recipe` is the changed recipe and `layout` its fastest safe layout. `smallest`
    says that no smaller change is safe; otherwise not all smaller ones were searched."""

    settings: Mapping[str, Any]
    recipe: Recipe
    layout: Layout
    before: Mapping[str, Any] = field(default_factory=dict)
    smallest: bool = True

    def sentence(self) -> str:
        """Return the change as one clause: `set layout.tensor: 8 (from 4) and layout.data: 4 (from 8)`."""
        clauses = [self._clause(key, value) for key, value in self.settings.items()]
        runs = (f"{verb} {' and '.join(what for _, what in run)}" for verb, run in groupby(clauses, key=itemgetter(0)))
        return " and ".join(runs)

    def _clause(self, key: str, value: Any) -> tuple[str, str]:
        if value is None:
            return "remove", key
        if key not in self.before:
            return "add", f"{key}: {yaml_text(value)}"
        return "set", f"{key}: {yaml_text(value)} (from {yaml_text(self.before[key])})"


def yaml_text(value: Any) -> str:
    """Return a value as YAML writes it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"[{', '.join(map(yaml_text, value))}]" if isinstance(value, (list, tuple)) else str(value)
