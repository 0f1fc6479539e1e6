"""One argument of a rendered program with the recipe keys that decide it, shown by `llmlaunch explain-args`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from llmlaunch.errors import UserError
from llmlaunch.frozen import frozen
from llmlaunch.layout import Layout
from llmlaunch.recipe.datasets import BlendPart
from llmlaunch.recipe.types import Recipe


@frozen
class NodeVariable:
    """A command-line word expanded on the node: the value of the variable `name` there, followed by `suffix`."""

    name: str
    suffix: str = ""


Word = str | NodeVariable
RUN_DIR = "LLMLAUNCH_RUN_DIR"  # the run directory, on the node


@frozen
class Reason:
    """Why an argument is rendered as it is.

    `keys` are the recipe keys whose values decide it, dotted as a person writes them: "training.sequence_length",
    "model.moe.topk", "layout.tensor" (a pin of the person's, or the planner's choice). None where llmlaunch chose;
    `why` then says why, and otherwise what a reader would not guess from the key.
    """

    keys: tuple[str, ...] = ()
    why: str = ""


@frozen
class Argument:
    """A flag as the framework spells it, with its values and the reason for it."""

    flag: str
    values: tuple[Word, ...]
    reason: Reason

    @property
    def words(self) -> tuple[Word, ...]:
        return (self.flag, *self.values)


def argument(flag: str, *values: object, of: str | tuple[str, ...] = (), why: str = "") -> Argument:
    """Return `flag` with `values`; `of` names the recipe key or keys that decide it, `why` says more."""
    keys = (of,) if isinstance(of, str) else of
    as_words = tuple(value if isinstance(value, NodeVariable) else str(value) for value in values)
    return Argument(flag, as_words, Reason(keys, why))


def optional(flag: str, value: object, of: str | tuple[str, ...] = (), why: str = "") -> tuple[Argument, ...]:
    """Return `flag` with `value`: the flag alone where that is True, and nothing where it is None or False."""
    if value is None or value is False:
        return ()
    return (argument(flag, *(() if value is True else (value,)), of=of, why=why),)


def planned_value(recipe: Recipe, layout: Layout, key: str) -> Any:
    """Return what the recipe or the plan has under a dotted key; None where a section of it is absent."""
    section, *names = key.split(".")
    owner: Any = {"model": recipe.model, "training": recipe.training}.get(section, recipe)
    if section == "layout":
        owner = layout if hasattr(layout, names[0]) else recipe.techniques
    elif owner is recipe:
        names = [section, *names]
    for name in names:
        owner = getattr(owner, name, None)
    return owner


def number(value: float) -> str:
    """Format a number as briefly as possible without losing precision: 1, 0.1, 500000."""
    return str(int(value)) if float(value).is_integer() else repr(float(value))


def blend_words(parts: Sequence[BlendPart]) -> list[str]:
    """Return the datasets of a blend, each behind its weight, as Megatron-LM and the DeepSpeed trainer take them
    (get_blend_from_list, core/datasets/utils.py, core 0.19); one alone has no weight."""
    if len(parts) == 1:
        return [parts[0].path]
    return [word for part in parts for word in (number(part.weight), part.path)]


def command_words(arguments: Iterable[Argument]) -> tuple[Word, ...]:
    """Return the words of the command line that `arguments` make, in order."""
    return tuple(word for each in arguments for word in each.words)


def flag_groups(command: Iterable[Word]) -> Iterator[list[Word]]:
    """Yield each flag of a command line together with its values: the words up to the next flag."""
    group: list[Word] = []
    for word in command:
        if isinstance(word, str) and word.startswith("--") and group:
            yield group
            group = []
        group.append(word)
    if group:
        yield group


def flag_of(group: Sequence[Word]) -> str:
    """Return the flag of a group of `flag_groups`, also when its value follows an equals sign."""
    return str(group[0]).split("=", 1)[0]


def refuse_repeats(recipe: Recipe, planned: Iterable[str | NodeVariable]) -> None:
    """Raises UserError where `backend.extra_args` repeats a flag that is planned."""
    mine = {word for word in planned if isinstance(word, str) and word.startswith("--")}
    for word in recipe.backend.extra_args:
        flag = word.split("=", 1)[0]
        if flag in mine:
            raise UserError(
                f"{recipe.path}: backend.extra_args: {flag} is planned by llmlaunch already; say it in the recipe "
                "(layout, training, model) and remove it there"
            )


ALLOCATOR_SETTINGS = "PYTORCH_CUDA_ALLOC_CONF"
ALLOCATOR_NAMES = (ALLOCATOR_SETTINGS, "PYTORCH_ALLOC_CONF")
"""The variables that torch's allocator reads, the one that wins first (c10/cuda/CUDAAllocatorConfig.h, torch 2.13)."""
EXPANDABLE_SEGMENTS, WHOLE_SEGMENTS = "expandable_segments:True", "expandable_segments:False"
ENVIRONMENT_REASONS: Mapping[str, Reason] = {
    "OMP_NUM_THREADS": Reason(why="one CPU thread per rank, as torchrun would set"),
    ALLOCATOR_SETTINGS: Reason(
        why="expandable segments keep long runs from dying of fragmentation well under the card's size"
    ),
}
"""Why both frameworks' jobs export these variables."""


def expands_segments(recipe: Recipe) -> bool:
    """Whether torch's allocator may grow its segments: as rendered, unless the recipe's own environment says less.

    Not where another process reads them (training.async_save): it would need the system call pidfd_getfd, which
    containers and Ubuntu's default refuse (CUDACachingAllocator.cpp, ExpandableSegment::fromShared, torch 2.13).
    """
    stated = (recipe.environment[name] for name in ALLOCATOR_NAMES if name in recipe.environment)
    return not recipe.training.async_save and EXPANDABLE_SEGMENTS in next(stated, EXPANDABLE_SEGMENTS)


def merged_environment(
    recipe: Recipe, wanted: Mapping[str, str], required: Mapping[str, str], because: str
) -> dict[str, str]:
    """Return the environment to export: `wanted`, overridden by the recipe's own settings, and `required`.

    Raises UserError where the recipe sets a `required` variable to another value; `because` names what needs it.
    """
    for name, value in required.items():
        setting = recipe.environment.get(name)
        if setting is not None and setting != value:
            raise UserError(
                f"{recipe.path}: environment.{name}: is {setting!r}, but {because} needs {value!r}; remove the line"
            )
    own = {k: v for k, v in recipe.environment.items() if k in wanted or k in ALLOCATOR_NAMES}
    if any(name in own for name in ALLOCATOR_NAMES):  # either of the names replaces what is wanted
        wanted = {name: value for name, value in wanted.items() if name not in ALLOCATOR_NAMES}
    return {**wanted, **required, **own}
