"""The words a search tries with every split: what the backend offers, with the recipe's own in their place."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import product
from typing import Any

from llmlaunch.backends.base import Backend, Space, StateTechniques, StepTechniques
from llmlaunch.errors import UserError
from llmlaunch.layout import RECOMPUTE_FULL, RECOMPUTE_NAMES, LayoutColumns
from llmlaunch.recipe.types import Recipe
from llmlaunch.techniques import Techniques

__all__ = ["Words", "as_ints", "every_way", "pinned_numbers", "recipe_with", "spoken", "words_of"]


@dataclass(frozen=True)
class Words:
    """All that is tried with every split: each of `running` with each of `held`."""

    running: tuple[StepTechniques, ...]
    held: tuple[StateTechniques, ...]

    @property
    def without_amounts(self) -> tuple[int, ...]:
        """Places of the running words that leave no amount to solve."""
        return tuple(i for i, way in enumerate(self.running) if way.solved is None)


def words_of(recipe: Recipe, backend: Backend) -> Words:
    """Raises UserError where the recipe asks for what the backend cannot do whatever the layout, or for a ZeRO stage it
    has not."""
    backend.rules(recipe)
    space = backend.space(recipe)
    held = held_variants(recipe, space)
    if not held:
        stages = ", ".join(str(stage) for stage in dict.fromkeys(offer.zero_stage for offer in space.state_techniques))
        raise UserError(
            f"{recipe.path}: layout.zero_stage: {recipe.pins['zero_stage']} is none of what {recipe.backend.name} has "
            f"({stages}); use one of those"
        )
    return Words(tuple(way for way in running_variants(recipe, space) if _accepted(recipe, backend, way, held)), held)


def _accepted(recipe: Recipe, backend: Backend, way: StepTechniques, held: Sequence[StateTechniques]) -> bool:
    """The recipe's own words and an offered way together may be more than the backend can do."""
    try:
        backend.rules(recipe_with(recipe, way, held[0]))
    except UserError:
        return False
    return True


def spoken(
    recipe: Recipe, words: Words, places: tuple[int, int], splits: LayoutColumns
) -> tuple[Recipe, LayoutColumns]:
    """The recipe that says the running and the held words at `places`, and the splits with them. An amount that is
    solved stands at 1: rules ask whether there is any."""
    way, holding = words.running[places[0]], words.held[places[1]]
    recomputed = way.recompute_layers or int(way.solved == "recompute_layers")
    offloaded = way.offload_layers or int(way.solved == "offload_layers")
    layouts = splits.with_words(holding.zero_stage, way.recompute, recomputed, offloaded)
    return recipe_with(recipe, way, holding), layouts


def every_way(recipe: Recipe, words: Words, splits: LayoutColumns) -> Iterator[tuple[Recipe, LayoutColumns]]:
    """`spoken` for every pair of words."""
    for places in product(range(len(words.running)), range(len(words.held))):
        yield spoken(recipe, words, places, splits)


def running_variants(recipe: Recipe, space: Space) -> tuple[StepTechniques, ...]:
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


def held_variants(recipe: Recipe, space: Space) -> tuple[StateTechniques, ...]:
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


def recipe_with(recipe: Recipe, running: StepTechniques, held: StateTechniques) -> Recipe:
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
