"""The training frameworks by the names that a recipe gives them, and what a recipe's own keys ask of each.

All else that is known of a framework is in its folder (llmlaunch.frameworks), which a recipe is read without.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Literal

from llmlaunch.frozen import frozen

FrameworkName = Literal["megatron-lm", "deepspeed", "megatron-bridge"]


@frozen
class FrameworkTraits:
    """What a recipe's keys ask of a framework.

    `title` is the framework as its makers call it, `folder` the one below llmlaunch/frameworks, and `package` the
    package whose version is the framework's. `on_megatron_core`: Megatron core trains. `has_checkout`: it is run from a
    checkout of its source. `takes_settings`: it is configured by fields of a file, and takes neither arguments nor a
    script of the person's own. `ships_trainer`: llmlaunch ships the trainer that builds the model and steps it.
    """

    name: FrameworkName
    title: str
    folder: str
    package: str
    on_megatron_core: bool = False
    has_checkout: bool = False
    takes_settings: bool = False
    ships_trainer: bool = False


FRAMEWORKS: Mapping[str, FrameworkTraits] = {
    traits.name: traits
    for traits in (
        FrameworkTraits(
            "megatron-lm", "Megatron-LM", "megatron", "megatron-core", on_megatron_core=True, has_checkout=True
        ),
        FrameworkTraits("deepspeed", "DeepSpeed", "deepspeed", "deepspeed", ships_trainer=True),
        FrameworkTraits(
            "megatron-bridge",
            "Megatron-Bridge",
            "bridge",
            "megatron-bridge",
            on_megatron_core=True,
            takes_settings=True,
        ),
    )
}
DEFAULT_FRAMEWORK: FrameworkName = "megatron-lm"
"""What a command takes where a person names none."""


def named_by_packages(packages: Collection[str]) -> FrameworkTraits:
    """Return the framework that trains where these packages are installed. Megatron-Bridge brings Megatron core along,
    so the later one counts; Megatron-LM, of which a checkout needs no package, where there is none."""
    latest_first = reversed(tuple(FRAMEWORKS.values()))
    return next((traits for traits in latest_first if traits.package in packages), FRAMEWORKS[DEFAULT_FRAMEWORK])
