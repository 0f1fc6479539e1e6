"""The search space of a recipe: every split, and every combination of techniques to try with each split.

Both are the backend's offer, narrowed by the user's pins. Anything that the recipe sets itself replaces the backend's
offer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, field, fields, replace
from functools import cached_property
from itertools import groupby, product
from operator import itemgetter
from typing import Any

import numpy as np

from llmlaunch.columns import BoolColumn
from llmlaunch.errors import UserError
from llmlaunch.frameworks.base import Backend, Space, StateTechniques, StepTechniques
from llmlaunch.frozen import frozen
from llmlaunch.layers.model import model_of
from llmlaunch.layout import (
    AMOUNTS,
    EVEN,
    LAYOUT_FIELDS,
    OFFLOAD_LAYERS,
    RECOMPUTE_FULL,
    RECOMPUTE_LAYERS,
    RECOMPUTE_NAMES,
    TECHNIQUE_FIELDS,
    Layout,
    LayoutColumns,
)
from llmlaunch.recipe.layout_keys import ASKED_ONLY, BIT_EQUAL_ONLY
from llmlaunch.recipe.types import Recipe
from llmlaunch.techniques import (
    NO_TECHNIQUES,
    SPARING_SWITCHES,
    SWITCH_NAMES,
    ActivationTreatments,
    StateTreatments,
    Techniques,
)
from llmlaunch.techniques.technique import declarations, parameter_owners
from llmlaunch.techniques.treatments import Recompute

MOST_CONTEXT = 64
MOST_CHUNKS = 128  # per rank: as many as the deepest published models have layers
MOST_UNEVEN_CHUNKS = 8
MOST_MICRO_BATCH = 64
DIVIDING = ("tensor", "context")  # with the pipeline, they divide the devices; data parallelism takes up the rest
SPLIT_FIELDS = tuple(name for name in LAYOUT_FIELDS if name not in TECHNIQUE_FIELDS)
DECLARED = declarations(Techniques)
_, METHOD = declarations(Recompute)


def enumerate_splits(recipe: Recipe, space: Space) -> LayoutColumns:
    """Return all combinations of sizes. Data parallelism is what the other sizes leave of the world size, and
    techniques have their neutral values.

    Combinations whose product does not divide the world size are not layouts and are left out. Everything else that may
    be wrong with a combination is left to the backend's rules.
    """
    pipelines, chunks = _values(recipe, space, "pipeline"), _values(recipe, space, "virtual_pipeline")
    pinned = recipe.layers_by_stage or ()
    split = () if len(set(pinned)) == 1 else pinned
    stages = [(p, v, split) for p, v in product(pipelines, chunks) if not pinned or p * v == len(pinned)]
    return _splits(recipe, space, stages)


def enumerate_uneven(recipe: Recipe, space: Space) -> LayoutColumns:
    """Return the same combinations for stages that cannot be even, or need not be, as nearly even as possible: the
    starting point of the stage search.

    There is one chunk per rank, since its ends may balance better, and several chunks if they do not divide the layers.
    There are no combinations if layers differ in their attention, because the stage search knows only kinds of MLPs.
    """
    shape, layers = recipe.model, recipe.model.num_layers
    if not space.uneven or recipe.layers_by_stage is not None or model_of(shape).first_blocks_differ:
        return _splits(recipe, space, [])
    pipelines = pinned_numbers(recipe, "pipeline") or divisors(recipe.world_size, layers)
    chunks = pinned_numbers(recipe, "virtual_pipeline") or range(1, MOST_UNEVEN_CHUNKS + 1)
    empty = int(recipe.techniques.heads_before_loss)  # the stage of the loss
    pairs = [(p, v) for p, v in product(pipelines, chunks) if p > 1 and p * v - empty <= layers]
    stages = [(p, v, p * v - empty) for p, v in pairs if v == 1 or empty or layers % (p * v)]
    return _splits(recipe, space, [(p, v, (*_nearly_even(layers, full), *(0,) * empty)) for p, v, full in stages])


def _nearly_even(layers: int, stages: int) -> tuple[int, ...]:
    each, left = divmod(layers, stages)
    return tuple(each + (stages - left <= stage) for stage in range(stages))


def _splits(recipe: Recipe, space: Space, stages: Sequence[tuple[int, int, tuple[int, ...]]]) -> LayoutColumns:
    """Return all combinations of (pipeline, chunks, layers by stage) with the other sizes. Sizes that decide whether
    the devices can be divided come first, so that the others are combined with few."""
    others = [name for name in SPLIT_FIELDS if name not in ("data", "pipeline", "virtual_pipeline", *DIVIDING)]
    values = {name: np.array(_values(recipe, space, name), dtype=np.int64) for name in (*DIVIDING, *others)}
    pipeline = np.array([pipeline for pipeline, _, _ in stages], dtype=np.int64)
    split = pipeline
    for name in DIVIDING:
        split = np.multiply.outer(split, values[name])
    data = np.where(recipe.world_size % split == 0, recipe.world_size // split, 0)
    pinned = pinned_numbers(recipe, "data")
    stage, *divided = np.nonzero(np.isin(data, pinned) if pinned else data)
    rest = [column.ravel() for column in np.meshgrid(*(values[name] for name in others), indexing="ij")]
    each = math.prod(len(values[name]) for name in others)
    partitions = tuple(dict.fromkeys((*EVEN, *(split for _, _, split in stages))))
    place = {split: index for index, split in enumerate(partitions)}
    chunks = np.array([chunks for _, chunks, _ in stages], dtype=np.int64)
    partition = np.array([place[split] for _, _, split in stages], dtype=np.int64)
    whole = {"pipeline": pipeline[stage], "virtual_pipeline": chunks[stage], "partition": partition[stage]}
    whole |= {name: values[name][index] for name, index in zip(DIVIDING, divided, strict=True)}
    whole["data"] = recipe.world_size // np.prod([whole[name] for name in ("pipeline", *DIVIDING)], axis=0)
    columns: dict[str, Any] = {name: np.repeat(column, each) for name, column in whole.items()}
    columns |= {name: np.tile(column, len(stage)) for name, column in zip(others, rest, strict=True)}
    columns |= dict.fromkeys(TECHNIQUE_FIELDS, np.broadcast_to(np.int64(0), len(stage) * each))
    return LayoutColumns(**columns, partitions=partitions)


def _values(recipe: Recipe, space: Space, name: str) -> tuple[int, ...]:
    return pinned_numbers(recipe, name) or offered_values(recipe, space, name)


def pinned_numbers(recipe: Recipe, name: str) -> tuple[int, ...]:
    """Return the values that a pin allows, as numbers of a layout; empty if the field is not pinned."""
    pin = recipe.pins.get(name)
    return () if pin is None else as_ints(name, pin)


def as_ints(name: str, pinned: object) -> tuple[int, ...]:
    """Return the values of a pin as numbers of a layout."""
    values = pinned if isinstance(pinned, tuple) else (pinned,)
    if name == "recompute":
        return tuple(RECOMPUTE_NAMES.index(str(v)) for v in values)
    return tuple(int(v) for v in values)


def offered_values(recipe: Recipe, space: Space, name: str) -> tuple[int, ...]:
    """Return the values of a layout field when nobody pins it; `data` follows from the others."""
    if name == "zero_stage":
        return tuple(dict.fromkeys(state.zero_stage for state in space.state_techniques))
    if name in ("recompute", *AMOUNTS):
        return tuple(dict.fromkeys(getattr(step, name) for step in space.step_techniques))
    offered: tuple[int, ...] = getattr(space, name, ())
    if offered:
        return offered
    shape, world = recipe.model, recipe.world_size
    if name == "micro_batch_size":
        return divisors(recipe.workload.global_batch_size, MOST_MICRO_BATCH)
    if name == "context":
        return divisors(world, MOST_CONTEXT)
    if name == "expert":
        return divisors(shape.moe.num_experts, shape.moe.num_experts) if shape.moe else (1,)
    stages = len(recipe.layers_by_stage or ()) or shape.num_layers
    return divisors(stages, MOST_CHUNKS if name == "virtual_pipeline" else world)


def searched_values(recipe: Recipe, space: Space, name: str) -> tuple[int, ...]:
    """Return the values of a layout field that a search without pins tries, including those of uneven stages
    (`enumerate_uneven`)."""
    offered, layers = offered_values(recipe, space, name), recipe.model.num_layers
    if not space.uneven or recipe.layers_by_stage is not None or name not in ("pipeline", "virtual_pipeline"):
        return offered
    uneven = divisors(recipe.world_size, layers) if name == "pipeline" else range(1, MOST_UNEVEN_CHUNKS + 1)
    return tuple(sorted({*offered, *uneven}))


def divisors(n: int, most: int) -> tuple[int, ...]:
    return tuple(d for d in range(1, min(n, most) + 1) if n % d == 0)


@frozen
class TechniqueSpace:
    """All techniques to try with every split of a recipe: each of `step` with each of `state`. `own` has the switches
    as the recipe sets them."""

    recipe: Recipe
    step: tuple[StepTechniques, ...]
    state: tuple[StateTechniques, ...]
    own: StepTechniques = StepTechniques()

    @cached_property
    def steps(self) -> frozenset[StepTechniques]:
        """The content of `step` as a set, for look-ups."""
        return frozenset(self.step)

    @cached_property
    def switches(self) -> tuple[tuple[str, ...], ...]:
        """For each of `step`, the switches that the recipe did not ask for."""
        return tuple(switches_beside(self.own, step) for step in self.step)

    @cached_property
    def sparing_steps(self) -> tuple[int, ...]:
        """Indices of the step techniques whose only switches are those that may save memory. Anything that is safe with
        other switches is safe with one of these."""
        return tuple(i for i, names in enumerate(self.switches) if SPARING_SWITCHES.issuperset(names))

    @cached_property
    def step_without_amounts(self) -> tuple[int, ...]:
        """Indices of the step techniques that leave no amount to solve."""
        return tuple(i for i, step in enumerate(self.step) if step.solved is None)


def technique_space(recipe: Recipe, backend: Backend) -> TechniqueSpace:
    """Return the techniques to try.

    Raises:
        UserError: the recipe asks for something that the backend cannot do with any layout, or for a ZeRO stage that it
            does not have.
    """
    backend.rules(recipe)
    space = backend.space(recipe)
    own = StepTechniques(**{name: getattr(recipe.techniques, name) for name in SWITCH_NAMES})
    state = state_variants(recipe, space)
    if not state:
        stages = ", ".join(str(stage) for stage in offered_values(recipe, space, "zero_stage"))
        raise UserError(
            f"{recipe.path}: layout.zero_stage: {recipe.pins['zero_stage']} is none of what {recipe.backend.name} has "
            f"({stages}); use one of those"
        )
    steps = (step for step in step_variants(recipe, space) if _accepted(recipe, backend, step, state))
    return TechniqueSpace(recipe, tuple(steps), state, own)


def _accepted(recipe: Recipe, backend: Backend, step: StepTechniques, state: Sequence[StateTechniques]) -> bool:
    """Whether the backend can combine the recipe's own techniques with the offered ones."""
    try:
        backend.rules(recipe_with_techniques(recipe, step, state[0]))
    except UserError:
        return False
    return True


def step_variants(recipe: Recipe, space: Space) -> tuple[StepTechniques, ...]:
    """Return the step techniques to try, without duplicates, in the order of the backend's offer."""
    own, codes = _named_by_recipe(recipe, StepTechniques), pinned_numbers(recipe, "recompute")
    # A granularity that nobody offers is accepted as it is: a user's script may recompute anything.
    others = [
        StepTechniques(recompute=code)
        for code in codes
        if all(step.recompute != code for step in space.step_techniques)
    ]
    offered = [step for step in space.step_techniques if not codes or step.recompute in codes]
    if set(codes) == {RECOMPUTE_FULL} and METHOD not in recipe.fixed:
        offered = [step for step in offered if step.solved != RECOMPUTE_LAYERS]  # "full" means all layers
    variants = (step for offer in (*offered, *others) for step in _with_amounts(recipe, replace(offer, **own)))
    return tuple(dict.fromkeys(step for step in variants if _allowed(recipe, step)))


def _with_amounts(recipe: Recipe, step: StepTechniques) -> Iterator[StepTechniques]:
    """Yield the techniques with every pinned amount. An amount that is not pinned is solved, if there is one."""
    block = step.recompute == RECOMPUTE_FULL and step.recompute_method == "block"
    solved = RECOMPUTE_LAYERS if block else step.solved if step.solved == OFFLOAD_LAYERS else None
    if solved == OFFLOAD_LAYERS and (step.offload_modules or OFFLOAD_LAYERS in recipe.pins):
        return  # modules or layers, not both; and a pinned number of layers comes with the other techniques
    groups = pinned_numbers(recipe, RECOMPUTE_LAYERS) if step.recompute == RECOMPUTE_FULL else ()
    if groups:
        solved = None
    for recomputed in groups or (0,):
        for offloaded in pinned_numbers(recipe, OFFLOAD_LAYERS) or (0,):
            yield replace(step, recompute_layers=recomputed, offload_layers=offloaded, solved=solved)


def state_variants(recipe: Recipe, space: Space) -> tuple[StateTechniques, ...]:
    """Return the state techniques to try, without duplicates, in the order of the backend's offer."""
    own, stages = _named_by_recipe(recipe, StateTechniques), pinned_numbers(recipe, "zero_stage")
    variants = (replace(offer, **own) for offer in space.state_techniques if not stages or offer.zero_stage in stages)
    return tuple(dict.fromkeys(state for state in variants if _allowed(recipe, state)))


def _allowed(recipe: Recipe, techniques: StepTechniques | StateTechniques) -> bool:
    """Whether `layout.techniques` allows a search to choose these techniques."""
    names = {f.name for f in fields(techniques)}.intersection(excluded_techniques(recipe))
    return all(getattr(techniques, name) == getattr(NO_TECHNIQUES, name) for name in names)


def excluded_techniques(recipe: Recipe) -> tuple[str, ...]:
    """Return the techniques that stay off because of `layout.techniques`, except those that the recipe itself asks
    for."""
    rounding = [name for name, declared in DECLARED.items() if declared.rounding is not None]
    excluded = {BIT_EQUAL_ONLY: rounding, ASKED_ONLY: SWITCH_NAMES}.get(recipe.technique_limit or "", ())
    return tuple(name for name in excluded if name not in recipe.fixed)


def _named_by_recipe(recipe: Recipe, kind: type[StepTechniques] | type[StateTechniques]) -> dict[str, Any]:
    """Return the settings of one kind of technique that the recipe itself names."""
    own = {name: getattr(recipe.techniques, name) for name in declarations(kind) if name in recipe.fixed}
    if kind is StateTechniques and "gradient_dtype" in recipe.fixed:
        own["gradient_dtype"] = recipe.training.gradient_dtype
    return own


def switches_beside(own: StepTechniques, step: StepTechniques) -> tuple[str, ...]:
    """Return the switches in which `step` differs from the recipe's `own`."""
    differing = [name for name in SWITCH_NAMES if getattr(step, name) != getattr(own, name)]
    return tuple(name for name in differing if parameter_owners(StepTechniques).get(name) not in differing)


def switches_matter(names: Sequence[str], layouts: LayoutColumns) -> BoolColumn:
    """Whether each of these switches changes anything in each layout."""
    matter = np.ones(len(layouts), dtype=np.bool_)
    for sizes in {DECLARED[name].matters for name in names if DECLARED[name].matters}:
        matter &= np.any([getattr(layouts, size) > 1 for size in sizes], axis=0)
    return matter


def technique_values(step: StepTechniques, state: StateTechniques) -> dict[str, int]:
    """Return the layout fields that techniques set. A solved amount is 1."""
    return {
        "zero_stage": state.zero_stage,
        "recompute": step.recompute,
        RECOMPUTE_LAYERS: step.recompute_layers or int(step.solved == RECOMPUTE_LAYERS),
        OFFLOAD_LAYERS: step.offload_layers or int(step.solved == OFFLOAD_LAYERS),
    }


def all_techniques(recipe: Recipe, step: StepTechniques, state: StateTechniques) -> Techniques:
    """Return the techniques of a candidate: those that a search chose, and the recipe's own for the others."""
    chosen = {name: getattr(kind, name) for kind in (step, state) for name in declarations(type(kind))}
    return replace(recipe.techniques, **chosen)


def recipe_with_techniques(recipe: Recipe, step: StepTechniques, state: StateTechniques) -> Recipe:
    """Return the recipe with these techniques and their gradient format, for a backend to judge or describe."""
    training = recipe.training
    if training.gradient_dtype != state.gradient_dtype:
        training = replace(training, gradient_dtype=state.gradient_dtype)
    return replace(recipe, techniques=all_techniques(recipe, step, state), training=training)


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
