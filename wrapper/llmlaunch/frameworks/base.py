"""What every training framework supplies, facts, legality and arguments, and helpers its rules share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import field, replace
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from llmlaunch.columns import BoolColumn
from llmlaunch.errors import UserError
from llmlaunch.facts import MemoryFacts
from llmlaunch.frameworks.argument import Argument, Reason, Word
from llmlaunch.frameworks.classed_arguments import ClassedArguments
from llmlaunch.frozen import frozen
from llmlaunch.layout import RECOMPUTE_NONE, Layout, Rule
from llmlaunch.recipe.types import Recipe
from llmlaunch.techniques import SWITCH_NAMES, ActivationTreatments, StateTreatments, Switches


@frozen
class StepTechniques(Switches, ActivationTreatments):
    """Techniques that change what a step adds to the model states or how long it takes, and the fields of `Layout` that
    do, with the same defaults: off. `solved` names the one of its AMOUNTS that the planner solves for,
    None for none."""

    recompute: int = RECOMPUTE_NONE
    recompute_layers: int = 0
    offload_layers: int = 0
    solved: str | None = None

    @cached_property
    def keeping_all(self) -> StepTechniques:
        """The same techniques with nothing recomputed or offloaded: the fastest of those with the same switches."""
        return StepTechniques(**{name: getattr(self, name) for name in SWITCH_NAMES})

    @cached_property
    def without_modules(self) -> StepTechniques:
        """The same techniques with nothing recomputed and no module offloaded."""
        return replace(self, recompute=RECOMPUTE_NONE, recompute_modules=(), recompute_layers=0, offload_modules=())


@frozen
class StateTechniques(StateTreatments):
    """Techniques that change the model states: parameters, gradients and optimizer states, and what else does.
    `gradient_dtype` None is the backend's default."""

    zero_stage: int = 0
    gradient_dtype: str | None = None


@frozen
class Space:
    """The values of each layout field this backend can be asked for; empty = the planner enumerates all divisors.
    `step_techniques` and `state_techniques` list the combinations worth a search; a recipe's own settings replace them.
    `uneven`: stages may hold different numbers of layers. `libraries` are those of `backend.libraries` that could be
    used, the better first."""

    tensor: tuple[int, ...] = (1,)
    pipeline: tuple[int, ...] = ()
    virtual_pipeline: tuple[int, ...] = ()
    context: tuple[int, ...] = ()
    expert: tuple[int, ...] = ()
    expert_tensor: tuple[int, ...] = (1,)
    sequence_parallel: tuple[int, ...] = (0,)
    step_techniques: tuple[StepTechniques, ...] = (StepTechniques(),)
    state_techniques: tuple[StateTechniques, ...] = (StateTechniques(),)
    uneven: bool = False
    libraries: tuple[str, ...] = ()


@frozen
class ProgressLines:
    """Regular expressions for log lines that report a step, and for lines that announce something slow: a save or an
    evaluation (llmlaunch.frameworks.logs). `promised`: the trainer is known to print step lines."""

    step_patterns: tuple[str, ...] = ()
    slow_patterns: tuple[str, ...] = ()
    promised: bool = False


@frozen
class Rendered:
    """What a backend puts into the run directory.

    `program` is the words after the launcher: the script and its arguments. `environment` is exported before the
    trainers start. `files` are written as they are, by path relative to the run directory. `prepare` is the words after
    the interpreter of what one node builds once, before the first attempt; empty = nothing. `check` is the same of what
    asks the framework there, before that, whether it takes the arguments; it fails where it does not. `arguments` are
    those words of `program` that llmlaunch chose, `variables` the reasons of those of `environment`, `settings` those
    of the keys of the JSON file `settings_file`, dotted ("zero_optimization.stage"). `notes` are sentences for the
    person who renders: what was left out, and what nobody here can check. `by_itself`: the program is one process,
    which finds its place among the ranks in its environment; else each node starts one for each device. `python_path`
    are folders whose packages the program imports, after those beside its script; a variable that is not set on the
    node names none.
    """

    program: tuple[Word, ...]
    environment: Mapping[str, str]
    files: Mapping[str, bytes]
    required_variables: tuple[str, ...] = ()  # must be set on the node, e.g. MEGATRON_LM_PATH
    prepare: tuple[Word, ...] = ()
    check: tuple[Word, ...] = ()
    progress: ProgressLines = ProgressLines()
    arguments: tuple[Argument, ...] = ()
    variables: Mapping[str, Reason] = field(default_factory=dict)
    settings: Mapping[str, Reason] = field(default_factory=dict)
    settings_file: str = ""
    notes: tuple[str, ...] = ()
    by_itself: bool = False
    python_path: tuple[Word, ...] = ()


NO_PROGRAM = Rendered(program=(), environment={}, files={})


@frozen
class RankAlone:
    """One pipeline rank of a rendered job, started by itself: one process, without the others.

    `program` is in place of the job's own (`Rendered.program`), and so are `arguments`, those of its words that
    llmlaunch chose: the job's, where this does not need them otherwise; `own_words` are those of the person's own
    (`backend.extra_args`) that stay. `environment` is exported beside the job's, and names the place of the rank
    ("RANK", "WORLD_SIZE", "LOCAL_RANK"). `files` are written beside the job's. `notes` are sentences for the person:
    what runs otherwise than in the job, and why.
    """

    program: tuple[Word, ...]
    environment: Mapping[str, str]
    notes: tuple[str, ...] = ()
    arguments: tuple[Argument, ...] = ()
    own_words: tuple[str, ...] = ()
    files: Mapping[str, bytes] = field(default_factory=dict)

    @property
    def rank(self) -> int:
        """Its number among all of the job."""
        return int(self.environment["RANK"])


@frozen
class OmittedTechnique:
    """What one rank alone runs without, because it takes the other ranks or what the place has not.

    `name` is the technique as a plan lists it, or a flag of the person's own. `instead` are values of `Techniques` that
    the rank runs with; they are empty for a flag, which no recipe key prices. `why` is a sentence for the person.
    """

    name: str
    instead: Mapping[str, Any]
    why: str


@frozen
class Requirement:
    """One thing a backend cannot do: `broken(recipe)` is True where the recipe asks for it.

    `recipe_key` is the key to change, `sentence` gives the reason and the way out, and `where` names the framework file
    (with its version) that was read. Where `priced`, memory and time are those of the model that is asked for: check
    and plan answer, and only what is to be rendered is refused.
    """

    key: str
    recipe_key: str
    sentence: str
    where: str
    broken: Callable[[Recipe], bool]
    priced: bool = False


MACHINE_REQUIREMENTS: tuple[Requirement, ...] = (
    Requirement(
        "no-rocm",
        "cluster.accelerator",
        "no job of llmlaunch has run on an AMD GPU: memory and time are formulas alone, with the workspace of Hopper, "
        "and jobs, monitor and environment are written for CUDA; launch with an NVIDIA accelerator",
        "node.pyz reads NVML, which ROCm does not have",
        lambda r: r.cluster.accelerator.platform == "rocm",
        priced=True,
    ),
)
"""Machines that are priced, and for which no job is written, whatever the backend."""


def implies(condition: BoolColumn | bool, consequence: BoolColumn | bool) -> BoolColumn:
    """Return True for each layout where `condition` does not hold, or `consequence` does: how a rule with a premise
    is written over the columns of all layouts."""
    column: BoolColumn = np.logical_or(np.logical_not(condition), consequence)
    return column


def of_techniques(*rules: Rule) -> tuple[Rule, ...]:
    """Return rules as those that look at what is tried with every split."""
    return tuple(replace(rule, of_techniques=True) for rule in rules)


def pinned_least(recipe: Recipe, name: str) -> int:
    """Return the smallest number that the pin `name` of the layout allows, or 0 where the layout leaves it free."""
    pin = recipe.pins.get(name, 0)
    return min(int(value) for value in (pin if isinstance(pin, tuple) else (pin,)))


def parts_fused_modules(recipe: Recipe) -> bool:
    """Return whether adapters stand beside a part of what is one linear layer in Megatron core."""
    adapters = recipe.techniques.adapters
    return adapters is not None and adapters.fused_targets(recipe.model.gated_mlp) is None


def refuse_unmet(recipe: Recipe, requirements: Iterable[Requirement], to_render: bool = True) -> None:
    """Raise UserError for the first requirement that the recipe breaks; unless it is `to_render`, only for those whose
    price would be another model's."""
    for requirement in requirements:
        if requirement.broken(recipe) and (to_render or not requirement.priced):
            raise UserError(f"{recipe.path}: {_said(requirement)}")


def unrendered(recipe: Recipe, requirements: Iterable[Requirement]) -> tuple[str, ...]:
    """Return what `render` refuses of a recipe that is priced all the same, a sentence each."""
    return tuple(_said(each) for each in requirements if each.priced and each.broken(recipe))


def _said(requirement: Requirement) -> str:
    return f"{requirement.recipe_key}: {requirement.sentence} ({requirement.where})"


def refuse_what_ifs(recipe: Recipe) -> None:
    """Raise UserError where a recipe that is to be rendered asks for techniques that can only be priced."""
    what_ifs = recipe.techniques.what_ifs
    if what_ifs:
        raise UserError(
            f"{recipe.path}: what_if.{what_ifs[0]}: no backend runs it; check and plan price it; remove it to render"
        )


class Backend(Protocol):
    """A training framework as the planner and the renderer see it. All methods are pure."""

    name: str

    def rules(self, recipe: Recipe) -> tuple[Rule, ...]: ...

    def space(self, recipe: Recipe) -> Space: ...

    def facts(self, recipe: Recipe) -> MemoryFacts: ...

    def unrendered(self, recipe: Recipe) -> tuple[str, ...]:
        """Return what `render` refuses of a recipe that can be priced."""
        ...

    def classed_arguments(self, recipe: Recipe, layout: Layout) -> ClassedArguments: ...

    def notes(self, recipe: Recipe, layout: Layout) -> tuple[str, ...]:
        """Return sentences on what the framework itself would choose for such a job."""
        ...

    def always_renders(self, recipe: Recipe) -> bool:
        """Return whether `render` takes every legal layout of a recipe of which `unrendered` says nothing, and writes
        no text but ours and what was checked when the recipe was read. `check` then renders no arguments to know."""
        ...

    def render(self, recipe: Recipe, layout: Layout) -> Rendered: ...
