"""What every training framework supplies: facts, legality, arguments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from llmlaunch.layout import Layout, Rule
from llmlaunch.memory.facts import MemoryFacts
from llmlaunch.recipe.types import Recipe

__all__ = ["Backend", "Rendered", "Space"]


@dataclass(frozen=True)
class Space:
    """The values of each layout field this backend can be asked for; empty = the planner enumerates all divisors."""

    tensor: tuple[int, ...] = ()
    pipeline: tuple[int, ...] = ()
    virtual_pipeline: tuple[int, ...] = ()
    context: tuple[int, ...] = ()
    expert: tuple[int, ...] = ()
    expert_tensor: tuple[int, ...] = ()
    sequence_parallel: tuple[int, ...] = (0,)
    zero_stage: tuple[int, ...] = (0,)
    recompute: tuple[int, ...] = (0, 2)


@dataclass(frozen=True)
class Rendered:
    """What a backend puts into the run directory.

    `program` is the words after the launcher: the script and its arguments. A word may be a `ShellReference`
    from `llmlaunch.runs.shell` where it must be expanded on the node. `environment` is exported before the
    trainers start. `files` are written as they are, by path relative to the run directory.
    """

    program: tuple[str, ...]
    environment: Mapping[str, str]
    files: Mapping[str, bytes]
    required_variables: tuple[str, ...] = ()  # must be set on the node, e.g. MEGATRON_LM_PATH


class Backend(Protocol):
    """A training framework, as the planner and the renderer see it. All methods are pure."""

    name: str

    def rules(self, recipe: Recipe) -> tuple[Rule, ...]: ...

    def space(self, recipe: Recipe) -> Space: ...

    def facts(self, recipe: Recipe) -> MemoryFacts: ...

    def render(self, recipe: Recipe, layout: Layout) -> Rendered: ...
