"""How a technique is declared: by the fields of a small section, one class and one file for each technique.

The first field of a section is the technique's key; those after it are its parameters. Beside what `documents.keys.key`
takes, a field declares what recipe, planner and pages ask of a technique. The lists that they need are derived from
that.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from typing import Any

from llmlaunch.documents.keys import key
from llmlaunch.frozen import frozen

LAYOUT, TRAINING, WHAT_IF = "layout", "training", "what_if"  # the mappings of a recipe that hold the keys
# parts that a model may lack
EXPERTS, SHARED_EXPERT, LATENT_ATTENTION = "experts", "a shared expert", "multi-latent attention"
PREDICTION_HEADS = "prediction heads"


@frozen
class TechniqueHabit:
    """What a technique costs by habit, as a share of the step, in addition to its time: an expert wants so much in
    return (planner/preference.py)."""

    name: str
    price: float
    reason: str


ACTIVATIONS_ON_HOST = TechniqueHabit(
    "activations on the host",
    0.10,
    "what the host's link does not hide depends on everything else the node does",
)


@frozen
class Declaration:
    """What a technique, or a parameter of one, declares beside its key.

    `place` is the mapping of a recipe that holds its key. `bit_equal` says why it changes not even a rounding,
    `rounding` what it adds up in another order. `matters` names fields of a layout: where none of them is above 1, the
    job is the same without it. `belongs` is the key without which it means nothing, and the value of that key, None for
    any. `needs` is the part of a model that it needs, or maps those of its values that need one to the part.
    `elsewhere` says why it has no meaning but on Megatron core. `on_host` is the word for what of the device's memory
    waits on the host. `words` maps written words to the values they stand for; `mapping` is the section of a mapping
    that is written. `source` is the paper, or where none is known the framework; `saves` and `costs` say for a person
    what it saves and what it costs. A parameter without a source shares that of its technique.
    """

    place: str
    bit_equal: str | None
    rounding: str | None
    matters: tuple[str, ...]
    belongs: tuple[str, str | None] | None
    needs: Mapping[str, str] | str | None
    elsewhere: str | None
    habit: TechniqueHabit | None
    on_host: str | None
    words: Mapping[str, Any]
    mapping: type[Any] | None
    effects: tuple[str, ...]
    source: str
    saves: str
    costs: str


def technique(
    description: str,
    *,
    default: Any,
    place: str = LAYOUT,
    written: Any = None,
    bit_equal: str | None = None,
    rounding: str | None = None,
    matters: tuple[str, ...] = (),
    belongs: tuple[str, str | None] | None = None,
    needs: Mapping[str, str] | str | None = None,
    elsewhere: str | None = None,
    habit: TechniqueHabit | None = None,
    on_host: str | None = None,
    words: Mapping[str, Any] | None = None,
    mapping: type[Any] | None = None,
    effects: tuple[str, ...] = (),
    source: str = "",
    saves: str = "",
    costs: str = "",
    **limits: Any,
) -> Any:
    """Define the field of a technique: its key (`documents.keys.key`) and what is declared beside it."""
    declared = Declaration(
        place,
        bit_equal,
        rounding,
        matters,
        belongs,
        needs,
        elsewhere,
        habit,
        on_host,
        words or {},
        mapping,
        effects,
        source,
        saves,
        costs,
    )
    return key(description, default=default, place=place, written=written, metadata={"technique": declared}, **limits)


def declarations(section: Any) -> Mapping[str, Declaration]:
    """Return what the techniques among the fields of a class declare, by their keys."""
    return _declarations(section)


@cache
def _declarations(section: Any) -> Mapping[str, Declaration]:
    return {item.name: item.metadata["technique"] for item in fields(section) if "technique" in item.metadata}


@cache
def parameter_owners(section: Any) -> Mapping[str, str]:
    """Return the parameters among the techniques of a class, each with the key of the technique it belongs to."""
    owners: dict[str, str] = {}
    for base in section.__mro__:
        own = [name for name in inspect.get_annotations(base) if name in declarations(section)]
        owners |= dict.fromkeys(own[1:], own[0]) if own else {}
    return owners


def key_of(section: type[Any]) -> str:
    """Return the key of the technique that a section declares."""
    return fields(section)[0].name
