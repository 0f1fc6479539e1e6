"""One planning session: a recipe, what its layouts are judged by, and the plan. Every command and `llmlaunch.plan` use
it, from `check` to the last run of a sweep."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmlaunch.app.evidence import lessons_of, with_own_layouts
from llmlaunch.app.messages import Notify, ignore
from llmlaunch.documents.yaml_strict import STANDARD_INPUT_NAME
from llmlaunch.errors import UserError
from llmlaunch.frameworks.base import NO_PROGRAM, Backend, Rendered
from llmlaunch.frameworks.framework import backend_for
from llmlaunch.layout import Layout
from llmlaunch.planner.plan import Candidate, Plan, Sizing, as_planned, with_save_interval
from llmlaunch.planner.planning import make_sized_plan
from llmlaunch.planner.setting import Setting, setting_of
from llmlaunch.recipe.load import load_recipe
from llmlaunch.recipe.types import Recipe

if TYPE_CHECKING:
    from llmlaunch.memory.estimator import Estimate
    from llmlaunch.planner.hints import Hint
    from llmlaunch.planner.neighbours import Neighbour
    from llmlaunch.planner.placement import ExpectedPlacement
    from llmlaunch.planner.search import SearchResult
    from llmlaunch.readiness.readiness import Readiness


@dataclass(frozen=True)
class MemoryEstimate:
    """The predicted memory of a plan: `llmlaunch check --json` prints it under `memory`.

    `limit_bytes` is how far a device may be filled, and `margin` says why; `estimate` holds the bytes of each pipeline
    rank by term.
    """

    limit_bytes: int
    margin: str
    estimate: Estimate
    _json: Mapping[str, Any]

    def to_json(self) -> dict[str, Any]:
        """Return the value of `memory` in `llmlaunch check --json`."""
        return dict(self._json)


@dataclass(frozen=True)
class PlannedRun:
    """A recipe as planned: its number of nodes chosen, its techniques filled in, its layout found.

    `plan` is the planner's result, which may be tight or unsafe. `setting` is what the plan was searched with; its
    recipe is as the person gave it but for the number of nodes, and the fallback of a tight plan, so that it searches
    the same space again. `placement` is what the order of the nodes is worth, or None where nothing is known of the
    network. `messages` are warnings, a line each. `unlocked` is the recipe without the lock that keeps it to an earlier
    plan; None where it has none.
    """

    recipe: Recipe
    plan: Plan
    setting: Setting
    placement: ExpectedPlacement | None = None
    messages: tuple[str, ...] = ()
    unlocked: Recipe | None = None

    @property
    def backend(self) -> Backend:
        return self.setting.backend

    @property
    def verdict(self) -> str:
        """Return "safe", "tight" or "unsafe", by memory alone; "unknown", with a `reason`, where what decides memory
        was not read."""
        return self.plan.verdict

    @property
    def reason(self) -> str:
        """Return why there is no verdict; "" where there is one."""
        return self.plan.reason

    @property
    def layout(self) -> Layout:
        """Return how the job is split."""
        return self.plan.layout

    @property
    def step_seconds(self) -> float:
        """Return the predicted seconds of one training step."""
        return self.plan.chosen.step_seconds

    @property
    def tokens_per_second_per_gpu(self) -> float:
        """Return the predicted throughput of one device."""
        return self.plan.chosen.tokens_per_second_per_gpu

    @property
    def alternatives(self) -> Sequence[Candidate]:
        """Return the runners-up, ranked."""
        return self.plan.alternatives

    @property
    def refused(self) -> Mapping[str, int]:
        """Return how many layouts were refused, by reason."""
        return self.plan.refused

    @property
    def memory(self) -> MemoryEstimate:
        """Return the predicted memory of each pipeline rank, and the limit it is judged by."""
        limit = self.plan.limit
        return MemoryEstimate(limit.limit_bytes, limit.reason, self.plan.estimate, self.json["memory"])

    @cached_property
    def json(self) -> dict[str, Any]:
        """What `to_json` returns; the value is shared, so do not change it."""
        from llmlaunch.planner.plan_json import plan_json

        placement = None if self.placement is None else self.placement.as_json()
        return plan_json(self.plan) | {"placement": placement} | self._fewer_nodes

    @property
    def _fewer_nodes(self) -> dict[str, Any]:
        if self.plan.fewer_nodes is None:
            return {}
        from llmlaunch.planner.fewer_nodes import fewer_nodes_json

        return {"fewer_nodes": fewer_nodes_json(self.plan.fewer_nodes)}

    def to_json(self) -> dict[str, Any]:
        """Return what `llmlaunch check --json` prints and a run directory's plan.json holds."""
        return dict(self.json)

    @cached_property
    def rendered(self) -> Rendered:
        """The program, environment and files that the backend makes of the plan."""
        return self.backend.render(self.recipe, self.plan.layout)

    def replanned(self) -> PlannedRun | None:
        """Return what planning anew would choose in place of a locked plan; None where the plan is not locked."""
        return None if self.unlocked is None else plan_loaded(self.unlocked)

    def write_lock(self) -> Path:
        """Write the file that keeps the recipe to this plan, beside it; return its path.

        Raises:
            NothingSafe: the plan must not run.
            UserError: the file cannot be written.
        """
        from llmlaunch import __version__
        from llmlaunch.documents.writing import write_whole
        from llmlaunch.planner.lock import lock_of, lock_text

        self.refuse_unsafe()
        if self.recipe.path == STANDARD_INPUT_NAME:
            raise UserError(
                "--lock: a lock lies beside its recipe, and this one came from standard input; save it first"
            )
        path = lock_path(self.recipe.path)
        write_whole(path, lock_text(lock_of(self.recipe, self.plan, __version__), self.recipe.path))
        return path

    def neighbours(self) -> Sequence[Neighbour]:
        """Return what each neighbouring choice would cost."""
        from llmlaunch.planner.neighbours import neighbours

        return neighbours(self.setting.with_recipe(self.recipe), self.plan.layout)

    def hints(self) -> list[Hint]:
        """Return what the recipe fixes that makes the training slower, each with what to write and its gain."""
        from llmlaunch.planner.hints import faster_choices

        return faster_choices(self.setting, self.plan)

    @cached_property
    def search(self) -> SearchResult:
        """Every layout of the recipe, priced and ranked."""
        from llmlaunch.planner.headroom import search_with_headroom

        return search_with_headroom(self.setting, whole=True)

    def refuse_unsafe(self) -> None:
        """Raise NoVerdict where what decides memory was not read; NothingSafe where the plan is not safe, nor tight and
        accepted, or takes more than the recipe's budget."""
        if not self.plan.good:
            from llmlaunch.planner.refusal import refuse  # imported only for a failure

            refuse(self.plan)

    def refuse_unrenderable(self) -> None:
        """Raise UserError for what `render` and `submit` would refuse of a safe plan. Techniques that no backend runs,
        and models that the backend cannot build, are there to be priced."""
        if not self.plan.good or self.recipe.techniques.what_ifs or self.plan.unrendered:
            return
        from llmlaunch.rendering.scripts import refuse_unrenderable

        if self.recipe.code.snapshot:
            from llmlaunch.rendering.provenance import wanted_snapshot

            wanted_snapshot(self.recipe)
        rendered = NO_PROGRAM if self.backend.always_renders(self.recipe) else self.rendered
        refuse_unrenderable(self.recipe, self.plan, rendered)

    def job_script(self) -> str:
        """Return job.sbatch. Raises UserError for a recipe value that no directive or shell word can hold."""
        from llmlaunch.rendering.scripts import job_script

        return job_script(self.recipe, self.plan)

    def files(self) -> dict[str, bytes]:
        """Return every file of the run directory by relative path, as `render` writes them."""
        from llmlaunch.rendering.provenance import gather_provenance
        from llmlaunch.rendering.run_directory import run_files

        return run_files(self.recipe, self.plan, self.json, self.rendered, gather_provenance(self.recipe))

    def write(self, directory: Path, notify: Notify) -> None:
        """Write the run directory, which must be new; `notify` is called with notes on what was left out of it. Raises
        UserError."""
        from llmlaunch.rendering.run_directory import render_run

        left_out = render_run(self.recipe, self.plan, self.json, self.rendered, directory)
        for note in (*self.rendered.notes, *left_out):
            notify(f"note: {note}")

    @property
    def mock_data_warning(self) -> str | None:
        """The sentence on made-up tokens, on which a model learns nothing; None for a recipe with data, or for a script
        that reads what its arguments name."""
        from llmlaunch.recipe.written import place_of

        backend = self.recipe.backend
        reads_its_own = backend.script is not None and not backend.on_megatron_core
        if not self.recipe.data.mock or reads_its_own:
            return None
        return (
            f"{place_of(self.recipe, ('data', 'mock'))}: data.mock: trains on made-up tokens, to measure speed and "
            "memory; to train the model, write data: {path: ...} with your own"
        )

    @cached_property
    def readiness(self) -> Readiness:
        """What the job needs and may lack, as far as this machine can tell."""
        from llmlaunch.readiness.readiness import readiness_of

        return readiness_of(self.recipe, self.plan.layout, os.environ)

    @cached_property
    def slurm_request(self) -> Readiness:
        """What the job asks of this machine's SLURM and cannot have, and whether the training fits its time limit."""
        from llmlaunch.readiness.readiness import in_sentences
        from llmlaunch.readiness.slurm_request import listed_partitions, request_findings

        return in_sentences(self.recipe, request_findings(self.recipe, self.plan.length.seconds, listed_partitions()))

    @property
    def _missing_here(self) -> tuple[str, ...]:
        from llmlaunch.readiness.readiness import in_sentences
        from llmlaunch.readiness.trainer_files import local_interpreter_findings

        return in_sentences(self.recipe, local_interpreter_findings(self.recipe, os.environ)).missing

    def refuse_missing(self, of_slurm: bool = False) -> None:
        """Raise UserError where the job would start to find that something it needs is missing; with `of_slurm` also
        where SLURM could never start it, without it where no Python of this machine has torch."""
        missing = self.readiness.missing + (self.slurm_request.missing if of_slurm else self._missing_here)
        if missing:
            raise UserError("\n".join(missing))


def plan(
    recipe: Recipe | str | Path, overrides: Sequence[str] = (), notify: Notify = ignore, *, replan: bool = False
) -> PlannedRun:
    """Plan a recipe, given as loaded or by its path with `KEY=VALUE` overrides. The plan may be tight or unsafe: see
    `verdict`. A lock beside the recipe (`llmlaunch plan --lock`) keeps it to the plan that was locked, unless `replan`
    is true.

    The version of the framework is looked up where the recipe does not name it, and the store's measured runs and
    rehearsals are taken into account. `notify` is called with each warning at once; they are also in `messages`.

    Raises:
        UserError: the recipe is invalid, no layout is legal at all, or its lock is of another job.
    """
    from llmlaunch.frameworks.framework_version import with_framework_version
    from llmlaunch.launchers.environment_cache import probed_packages
    from llmlaunch.recipe.consistency import cautions

    loaded = recipe if isinstance(recipe, Recipe) else load_recipe(recipe, overrides)
    versioned, warnings = with_framework_version(loaded, os.environ, probed_packages)
    messages = [f"warning: {warning}" for warning in (*warnings, *cautions(versioned))]
    for message in messages:
        notify(message)
    locked = versioned if replan else _kept_to_lock(versioned)
    planned = plan_loaded(locked, notify, unlocked=versioned if locked.locked_by else None)
    return replace(planned, messages=(*messages, *planned.messages))


def lock_path(recipe_path: str | Path) -> Path:
    """Return where the lock of a recipe lies: recipe.yaml has recipe.lock.yaml."""
    return Path(recipe_path).with_suffix(".lock.yaml")


def _kept_to_lock(recipe: Recipe) -> Recipe:
    """Return the recipe with everything pinned that the lock beside it holds; as it is where there is none."""
    path = lock_path(recipe.path)
    if not path.is_file():
        return recipe
    from llmlaunch.planner.lock import keeping_to, read_lock

    return keeping_to(recipe, read_lock(path), path)


def plan_loaded(
    recipe: Recipe,
    notify: Notify = ignore,
    baseline_bytes: int | None = None,
    sizing: Sizing | None = None,
    unlocked: Recipe | None = None,
) -> PlannedRun:
    """Plan a recipe whose framework version is known. `baseline_bytes` replaces what the facts hold outside torch: on a
    CPU, the measured resident memory of an idle trainer. `sizing` is how an earlier plan chose the recipe's nodes.
    `unlocked` is the recipe without its lock, which layouts to fall back on, or for fewer nodes, are searched for."""
    messages: list[str] = []

    def hear(message: str) -> None:
        messages.append(message)
        notify(message)

    lessons = lessons_of(recipe, hear)
    setting = setting_of(recipe, backend_for(recipe), baseline_bytes, lessons)
    setting, result = make_sized_plan(with_own_layouts(setting, hear))
    result = result if sizing is None else replace(result, sizing=sizing)
    if result.good and (recipe.on_oom.layouts or not result.safe):
        setting, result = _with_fallbacks(setting, result, unlocked)
    if result.good and setting.recipe.at_least_nodes is not None:
        from llmlaunch.planner.fewer_nodes import find_fewer_nodes  # few jobs ask for it

        result = replace(result, fewer_nodes=find_fewer_nodes(_unlocked(setting, unlocked), result))
    planned = with_save_interval(as_planned(setting.recipe, result.chosen), result)
    return PlannedRun(planned, result, setting, _placement(setting, planned, result), tuple(messages), unlocked)


def _with_fallbacks(setting: Setting, result: Plan, unlocked: Recipe | None) -> tuple[Setting, Plan]:
    """Return the plan with its fallback layouts. A tight plan has one even where the recipe asks for none; the recipe
    of the setting then asks for it, because what is rendered for checkpoints depends on it."""
    from llmlaunch.planner.fallbacks import find_fallbacks

    on_oom = setting.recipe.on_oom
    asking = setting
    if not on_oom.layouts:
        asking = setting.with_recipe(replace(setting.recipe, on_oom=replace(on_oom, layouts=1)))
    fallbacks = find_fallbacks(_unlocked(asking, unlocked), result, asking.recipe.on_oom.layouts)
    return asking if fallbacks.layouts else setting, replace(result, fallbacks=fallbacks)


def _unlocked(setting: Setting, unlocked: Recipe | None) -> Setting:
    """Return the setting without the lock, which other layouts are searched with."""
    return setting if unlocked is None else setting.with_recipe(replace(unlocked, nodes=setting.recipe.nodes))


def _placement(setting: Setting, recipe: Recipe, result: Plan) -> ExpectedPlacement | None:
    if recipe.cluster.bandwidth is None:
        return None
    from llmlaunch.planner.placement import expected_placement

    return expected_placement(setting.with_recipe(recipe), result.layout)


def estimate(recipe: Recipe | str | Path, overrides: Sequence[str] = ()) -> MemoryEstimate:
    """Plan a recipe and return the predicted memory of the chosen layout; pin a layout (`layout={tensor: 8, ...}`) to
    estimate that one. Raises UserError as `plan` does."""
    return plan(recipe, overrides).memory


def render(run: PlannedRun | Recipe | str | Path, directory: str | Path, overrides: Sequence[str] = ()) -> Path:
    """Write the run directory of a plan, or of a recipe that is planned first; return its absolute path.

    Raises:
        NoVerdict: what decides the plan's memory was not read; nothing is written.
        NothingSafe: the plan is not safe (nor tight and accepted), or exceeds the budget; nothing is written.
        UserError: the recipe is invalid, or `directory` holds files or cannot be written.
    """
    planned = run if isinstance(run, PlannedRun) else plan(run, overrides)
    planned.refuse_unsafe()
    planned.write(Path(directory), ignore)
    return Path(directory).resolve()
