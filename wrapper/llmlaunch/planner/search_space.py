"""Every split a recipe could mean: the product of the backend's values, narrowed by the person's pins."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import product
from typing import Any

import numpy as np

from llmlaunch.backends.base import Backend, Space, StateTechniques, StepTechniques
from llmlaunch.errors import UserError
from llmlaunch.layout import EVEN, LAYOUT_FIELDS, RECOMPUTE_FULL, RECOMPUTE_NAMES, LayoutColumns
from llmlaunch.recipe.types import Recipe
from llmlaunch.techniques import Techniques

__all__ = [
    "MOST_CONTEXT",
    "SPLIT_FIELDS",
    "TechniqueSpace",
    "apply_techniques",
    "as_ints",
    "enumerate_splits",
    "enumerate_uneven",
    "offered_values",
    "pinned_numbers",
    "recipe_with_techniques",
    "technique_layouts",
    "technique_space",
]


MOST_CONTEXT = 64
MOST_UNEVEN_CHUNKS = 8
MOST_MICRO_BATCH = 64
# Tried with every split (planner/variants.py).
WORDS = ("zero_stage", "recompute", "recompute_layers", "offload_layers")
SPLIT_FIELDS = tuple(name for name in LAYOUT_FIELDS if name not in WORDS)


def divisors(n: int, most: int) -> tuple[int, ...]:
    return tuple(d for d in range(1, min(n, most) + 1) if n % d == 0)


def enumerate_splits(recipe: Recipe, space: Space) -> LayoutColumns:
    """All combinations of sizes; data parallelism is what the others leave of the world size, and the words of
    techniques are at their neutral values.

    Combinations whose product does not divide the world size are no layouts at all and are left out; whatever else
    is wrong with one is for the backend's rules to say.
    """
    pipelines, chunks = _values(recipe, space, "pipeline"), _values(recipe, space, "virtual_pipeline")
    named = recipe.layers_by_stage or ()
    split = () if len(set(named)) == 1 else named
    stages = [(p, v, split) for p, v in product(pipelines, chunks) if not named or p * v == len(named)]
    return _splits(recipe, space, stages)


def enumerate_uneven(recipe: Recipe, space: Space) -> LayoutColumns:
    """The same for stages that cannot be or need not be even, as nearly even as can be: a start for those who solve
    them. One chunk for each rank, whose ends may balance better; several where they do not divide the layers."""
    layers = recipe.model.num_layers
    if not space.uneven or recipe.layers_by_stage is not None:
        return _splits(recipe, space, [])
    pipelines = pinned_numbers(recipe, "pipeline") or divisors(recipe.world_size, layers)
    chunks = pinned_numbers(recipe, "virtual_pipeline") or range(1, MOST_UNEVEN_CHUNKS + 1)
    pairs = [(p, v) for p, v in product(pipelines, chunks) if p > 1 and p * v <= layers]
    return _splits(recipe, space, [(p, v, _nearly_even(layers, p * v)) for p, v in pairs if v == 1 or layers % (p * v)])


def _nearly_even(layers: int, stages: int) -> tuple[int, ...]:
    each, left = divmod(layers, stages)
    return tuple(each + (stages - left <= stage) for stage in range(stages))


def _splits(recipe: Recipe, space: Space, stages: Sequence[tuple[int, int, tuple[int, ...]]]) -> LayoutColumns:
    """All combinations of (pipeline, chunks, layers by stage) with the other sizes."""
    others = [name for name in SPLIT_FIELDS if name not in ("data", "pipeline", "virtual_pipeline")]
    axes = [np.arange(len(stages)), *(np.array(_values(recipe, space, name), dtype=np.int64) for name in others)]
    grid = [column.ravel() for column in np.meshgrid(*axes, indexing="ij", copy=False)]
    columns = dict(zip(others, grid[1:], strict=True))
    table = np.array([stage[:2] for stage in stages], dtype=np.int64).reshape(-1, 2)
    columns["pipeline"], columns["virtual_pipeline"] = table[grid[0]].T
    partitions = tuple(dict.fromkeys((*EVEN, *(split for _, _, split in stages))))
    columns["partition"] = np.array([partitions.index(split) for _, _, split in stages], dtype=np.int64)[grid[0]]
    split = columns["tensor"] * columns["pipeline"] * columns["context"]
    whole = (recipe.world_size % split) == 0
    columns = {name: column[whole] for name, column in columns.items()}
    zero = np.zeros(np.count_nonzero(whole), dtype=np.int64)
    layouts = LayoutColumns(
        data=recipe.world_size // split[whole], **columns, **dict.fromkeys(WORDS, zero), partitions=partitions
    )
    wanted = pinned_numbers(recipe, "data")
    return layouts.take(np.isin(layouts.data, np.array(wanted))) if wanted else layouts


def _values(recipe: Recipe, space: Space, name: str) -> tuple[int, ...]:
    return pinned_numbers(recipe, name) or offered_values(recipe, space, name)


def offered_values(recipe: Recipe, space: Space, name: str) -> tuple[int, ...]:
    """What a layout field may be where nobody pins it; `data` follows from the others."""
    if name == "zero_stage":
        return tuple(dict.fromkeys(held.zero_stage for held in space.state_techniques))
    if name in ("recompute", "recompute_layers", "offload_layers"):
        return tuple(dict.fromkeys(getattr(way, name) for way in space.step_techniques))
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
    return divisors(stages, stages if name == "virtual_pipeline" else world)


@dataclass(frozen=True)
class TechniqueSpace:
    """All that is tried with every split: each of `running` with each of `held`."""

    running: tuple[StepTechniques, ...]
    held: tuple[StateTechniques, ...]

    @property
    def without_amounts(self) -> tuple[int, ...]:
        """Places of the running words that leave no amount to solve."""
        return tuple(i for i, way in enumerate(self.running) if way.solved is None)


def technique_space(recipe: Recipe, backend: Backend) -> TechniqueSpace:
    """Raises UserError where the recipe asks for what the backend cannot do whatever the layout, or for a ZeRO stage it
    has not."""
    backend.rules(recipe)
    space = backend.space(recipe)
    held = state_variants(recipe, space)
    if not held:
        stages = ", ".join(str(stage) for stage in dict.fromkeys(offer.zero_stage for offer in space.state_techniques))
        raise UserError(
            f"{recipe.path}: layout.zero_stage: {recipe.pins['zero_stage']} is none of what {recipe.backend.name} has "
            f"({stages}); use one of those"
        )
    return TechniqueSpace(
        tuple(way for way in step_variants(recipe, space) if _accepted(recipe, backend, way, held)), held
    )


def _accepted(recipe: Recipe, backend: Backend, way: StepTechniques, held: Sequence[StateTechniques]) -> bool:
    """The recipe's own words and an offered way together may be more than the backend can do."""
    try:
        backend.rules(recipe_with_techniques(recipe, way, held[0]))
    except UserError:
        return False
    return True


def apply_techniques(
    recipe: Recipe, words: TechniqueSpace, places: tuple[int, int], splits: LayoutColumns
) -> tuple[Recipe, LayoutColumns]:
    """The recipe that says the running and the held words at `places`, and the splits with them. An amount that is
    solved stands at 1: rules ask whether there is any."""
    way, holding = words.running[places[0]], words.held[places[1]]
    recomputed = way.recompute_layers or int(way.solved == "recompute_layers")
    offloaded = way.offload_layers or int(way.solved == "offload_layers")
    layouts = splits.with_techniques(holding.zero_stage, way.recompute, recomputed, offloaded)
    return recipe_with_techniques(recipe, way, holding), layouts


def technique_layouts(
    recipe: Recipe, words: TechniqueSpace, splits: LayoutColumns
) -> Iterator[tuple[Recipe, LayoutColumns]]:
    """`spoken` for every pair of words."""
    for places in product(range(len(words.running)), range(len(words.held))):
        yield apply_techniques(recipe, words, places, splits)


def step_variants(recipe: Recipe, space: Space) -> tuple[StepTechniques, ...]:
    """What is done to activations, each once, in the order of the backend's offer."""
    said, codes = _said(recipe, StepTechniques), pinned_numbers(recipe, "recompute")
    # a granularity nobody offers is taken as it is: a script of one's own recomputes what it likes
    unheard = [StepTechniques(code) for code in codes if all(way.recompute != code for way in space.step_techniques)]
    offered = [way for way in space.step_techniques if not codes or way.recompute in codes]
    if set(codes) == {RECOMPUTE_FULL} and "recompute_method" not in recipe.fixed:
        offered = [way for way in offered if way.solved != "recompute_layers"]  # full is said, not some layers
    ways = (way for offer in (*offered, *unheard) for way in _with_amounts(recipe, replace(offer, **said)))
    return tuple(dict.fromkeys(ways))


def _with_amounts(recipe: Recipe, way: StepTechniques) -> Iterator[StepTechniques]:
    """The way with every pinned amount; what is not pinned is solved where the way has an amount at all."""
    block = way.recompute == RECOMPUTE_FULL and way.recompute_method == "block"
    solved = "recompute_layers" if block else way.solved if way.solved == "offload_layers" else None
    if solved == "offload_layers" and (way.offload_modules or "offload_layers" in recipe.pins):
        return  # modules or layers, not both; and a pinned number of layers comes with the other ways
    groups = pinned_numbers(recipe, "recompute_layers") if way.recompute == RECOMPUTE_FULL else ()
    if groups:
        solved = None
    for recomputed in groups or (0,):
        for offloaded in pinned_numbers(recipe, "offload_layers") or (0,):
            yield replace(way, recompute_layers=recomputed, offload_layers=offloaded, solved=solved)


def state_variants(recipe: Recipe, space: Space) -> tuple[StateTechniques, ...]:
    """What is done to parameters, gradients and states, each once, in the order of the backend's offer."""
    said, stages = _said(recipe, StateTechniques), pinned_numbers(recipe, "zero_stage")
    ways = (replace(offer, **said) for offer in space.state_techniques if not stages or offer.zero_stage in stages)
    return tuple(dict.fromkeys(ways))


def _said(recipe: Recipe, words: type[StepTechniques] | type[StateTechniques]) -> dict[str, Any]:
    """The recipe's own words among those of a kind."""
    names = [f.name for f in fields(words) if f.name in recipe.fixed and f.name in OWN]
    said = {name: getattr(recipe.techniques, name) for name in names}
    if words is StateTechniques and "gradient_dtype" in recipe.fixed:
        said["gradient_dtype"] = recipe.training.gradient_dtype
    return said


OWN = {f.name for f in fields(Techniques)}


def recipe_with_techniques(recipe: Recipe, running: StepTechniques, held: StateTechniques) -> Recipe:
    """The recipe that says these words."""
    words = {f.name: getattr(way, f.name) for way in (running, held) for f in fields(way) if f.name in OWN}
    training = replace(recipe.training, gradient_dtype=held.gradient_dtype)
    return replace(recipe, techniques=replace(recipe.techniques, **words), training=training)


def pinned_numbers(recipe: Recipe, name: str) -> tuple[int, ...]:
    """The values a pin allows, as numbers of a layout; nothing where it is free."""
    pin = recipe.pins.get(name)
    return () if pin is None else as_ints(name, pin)


def as_ints(name: str, pinned: object) -> tuple[int, ...]:
    """The values of a pin as numbers of a layout."""
    values = pinned if isinstance(pinned, tuple) else (pinned,)
    if name == "recompute":
        return tuple(RECOMPUTE_NAMES.index(str(v)) for v in values)
    return tuple(int(v) for v in values)
