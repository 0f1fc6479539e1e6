"""A training framework as the rooms above see it beside its backend: what it is called, what it needs, how its
checkpoints, its rehearsed ranks and its logs are read. Each framework's folder holds one, in its `framework.py`.

A module of this kind is imported wherever a framework is asked for anything, so it imports the folder's other modules
inside its methods.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from llmlaunch.frameworks.base import Backend
from llmlaunch.recipe.frameworks import FRAMEWORKS
from llmlaunch.recipe.types import Recipe

if TYPE_CHECKING:
    from llmlaunch.command_lines.training_log import TrainingLog
    from llmlaunch.findings import Finding
    from llmlaunch.frameworks.base import Backend, OmittedTechnique, RankAlone, Rendered
    from llmlaunch.layout import Layout
    from llmlaunch.memory.estimator import RankEstimate
    from llmlaunch.recipe.types import Recipe


REMAINDER = "other"
"""The term of a trace that holds what no rule of the framework's knows."""
FORWARD = "layer_forward"
"""The term of what a layer's forward pass allocates and frees again: the estimate has no such moment."""
TRACE_VARIABLE = "LLMLAUNCH_FRAMEWORKS"
"""Names the environment in which ranks are traced."""


class Framework:
    """What is common to all frameworks, and what holds for one that says nothing else.

    `requirement` is what a person must have installed, in one word. `packages` are those whose versions `doctor` shows,
    `required_packages` those without which the trainer does not start. `starter_lines` replace the line `backend:` of a
    starter.
    """

    name: ClassVar[str]
    requirement: ClassVar[str]
    packages: ClassVar[tuple[str, ...]]
    required_packages: ClassVar[tuple[str, ...]] = ()
    starter_lines: ClassVar[tuple[str, ...]] = ()

    def backend(self) -> Backend:
        """Return the backend that prices and renders a job."""
        raise NotImplementedError

    def recorded_name(self, recipe: Recipe) -> str:
        """Return the backend's name in measurement records: what a framework runs that keeps other things in memory has
        a name of its own."""
        return self.name

    def timed_name(self, recipe: Recipe) -> str:
        """Return the name by which step times are told apart: that of the records, or that of the kind of script where
        scripts of one framework take other times."""
        return self.recorded_name(recipe)

    def default_version(self) -> str | None:
        """Return the version that a recipe is rendered for which names none; None where that does not matter."""
        return None

    # --- a person's own script

    saves_at_the_end: ClassVar[tuple[str, ...]] = ()
    """Flags with which the trainer writes a checkpoint when its time is over."""

    def spellings(self) -> Mapping[str, tuple[str, ...]]:
        """Return the flags of a command line that say each recipe key, and after them the settings of a file, without
        dashes."""
        return {}

    def flags_for_speed(self) -> frozenset[str]:
        """Return the flags without which a training is the same, only slower."""
        return frozenset()

    # --- what a job needs and may lack

    def trainer_findings(self, recipe: Recipe, environment: Mapping[str, str]) -> Iterator[Finding]:
        """Yield what is wrong with the framework's own source tree, where it is run from one."""
        yield from ()

    def checkpoint_findings(
        self, recipe: Recipe, layout: Layout, folder: Path, names: Collection[str]
    ) -> Iterator[Finding]:
        """Yield what the framework's own script would make of the checkpoint in `folder`, whose entries are `names`."""
        raise NotImplementedError

    def has_own_weights(self, folder: Path) -> bool:
        """Return whether training starts from `folder` as a checkpoint in the framework's own format; else it is one of
        Hugging Face's."""
        return False

    def own_weights_problem(self, folder: Path) -> str | None:
        """Return why the framework finds no checkpoint of its own in `folder`, None where it finds one."""
        return None

    def own_weights_findings(self, recipe: Recipe, layout: Layout, folder: Path) -> Iterator[Finding]:
        """Yield how the model of the checkpoint in `folder` differs from the recipe's."""
        yield from ()

    # --- one rank alone
    #
    # `trains_on_cpus`: on a cluster without GPUs it really trains there, so there is nothing to rehearse. `tracer` is
    # what tracing/trace_ranks.py calls its program, `traced_title` what refuses arguments in a trace. `traced_packages`
    # are those a trace cannot do without. `traced_apart`: they are installed in an environment of their own, else they
    # are also looked for beside llmlaunch, and `how_to_trace` says how they get there.

    trains_on_cpus: ClassVar[bool] = False
    tracer: ClassVar[str]
    traced_title: ClassVar[str]
    traced_packages: ClassVar[tuple[str, ...]]
    traced_apart: ClassVar[bool] = True
    how_to_trace: ClassVar[str] = ""

    def rank_alone(
        self, recipe: Recipe, layout: Layout, rendered: Rendered, pipeline_rank: int, steps: int
    ) -> RankAlone:
        """Return one pipeline rank of the rendered job as a program of its own. Raises UserError where it cannot run
        alone."""
        raise NotImplementedError

    def omitted_alone(self, recipe: Recipe, traced: bool) -> tuple[OmittedTechnique, ...]:
        """Return the techniques of a planned recipe that one rank alone runs without."""
        return ()

    def gpu_refusal(self, recipe: Recipe) -> str:
        """Return why no rank runs on a GPU by itself, in a sentence with the key; empty where it does."""
        return ""

    def traced_job(self, recipe: Recipe, rendered: Rendered, layout: Layout, pipeline_rank: int) -> dict[str, Any]:
        """Return the job of one rank as tracing/trace_ranks.py reads it. Raises UserError where it cannot be traced."""
        raise NotImplementedError

    def traced_terms(self, trace: Mapping[str, Any], predicted: RankEstimate) -> dict[str, int]:
        """Return the bytes alive at the peak of a trace by the estimate's terms, the largest first."""
        raise NotImplementedError

    def compared_version(self, versions: Mapping[str, str]) -> str | None:
        """Return the version in a trace environment that must agree with the job's in major.minor; None where there is
        none, or where `trace_notes` compares versions itself."""
        return None

    def trace_notes(
        self, recipe: Recipe, folder: Path, versions: Mapping[str, str], how_to_get_one: str
    ) -> tuple[str, ...]:
        """Return sentences on how a trace in the environment `folder` differs from the job. Raises UserError where its
        packages cannot stand for the job's; `how_to_get_one` says how a person gets those that can."""
        return ()

    # --- logs of other people's jobs

    def overrides_for_log(self, recipe: Recipe, log: TrainingLog) -> tuple[str, ...]:
        """Return overrides that make the recipe one of the trainer that printed the log."""
        return ()


def framework_named(name: str) -> Framework:
    """Return the framework of that name; the modules of the others are not imported. Raises KeyError for a name that no
    recipe can have."""
    framework: Framework = import_module(f"llmlaunch.frameworks.{FRAMEWORKS[name].folder}.framework").FRAMEWORK
    return framework


def trained_with() -> tuple[str, ...]:
    """Return the packages that any framework trains with, torch first."""
    packages = (package for name in FRAMEWORKS for package in framework_named(name).packages)
    return tuple(dict.fromkeys(("torch", *packages)))


def framework_of(recipe: Recipe) -> Framework:
    """Return the framework of a validated recipe."""
    return framework_named(recipe.backend.name)


def backend_for(recipe: Recipe) -> Backend:
    """Return the backend of a validated recipe."""
    return framework_of(recipe).backend()
