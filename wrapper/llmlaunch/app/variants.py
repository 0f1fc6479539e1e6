"""The runs of one submit: which recipes and overrides, and how their jobs depend on each other. A run is a sweep of
one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmlaunch.app.messages import Notify
from llmlaunch.app.planned_run import PlannedRun, plan
from llmlaunch.errors import UserError
from llmlaunch.progress import counting
from llmlaunch.recipe.overrides import shown_word
from llmlaunch.units import gib
from llmlaunch.verdicts import UNKNOWN

if TYPE_CHECKING:
    from llmlaunch.launchers.sweep import How
    from llmlaunch.planner.plan import Plan


RUN = "{run}"
"""In an override of several runs: the number of the run, from 0 on."""


@dataclass(frozen=True)
class Variant:
    """One run to plan: a recipe file and its overrides; `differences` are those in which it differs from other runs of
    the same recipe."""

    recipe: str
    overrides: tuple[str, ...]
    differences: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        return " ".join([self.recipe, *(shown_word(override) for override in self.differences)])

    def to_json(self, name: str) -> dict[str, Any]:
        """Return the run's entry in sweep.json; `name` is its recipe's."""
        return {"recipe": name, "file": self.recipe, "overrides": list(self.overrides)}


@dataclass(frozen=True)
class SweepOptions:
    """How several jobs relate to each other, and what the first of them waits for. `replan` leaves locks aside."""

    array: bool = False
    array_limit: int | None = None
    chain: str | None = None
    dependency: str | None = None
    after: str | None = None
    grid: tuple[str, ...] = ()
    replan: bool = False

    @property
    def how(self) -> How:
        if self.array:
            return "array"
        return "afterany" if self.chain == "afterany" else "afterok" if self.chain else "independent"

    @property
    def description(self) -> str:
        limit = f", {self.array_limit} at a time" if self.array_limit else ""
        return {
            "array": f"one array{limit}",
            "independent": "jobs of their own",
            "afterok": "each when the one before has succeeded",
            "afterany": "each when the one before has ended",
        }[self.how]

    def variants(self, recipe: str, words: Sequence[str]) -> list[Variant]:
        """Return the runs that `recipe` and `words` name: `words` are more recipes, and overrides that apply to every
        recipe. Raises UserError where the options contradict each other."""
        from llmlaunch.recipe.overrides import variants

        recipes = [recipe, *(word for word in words if _is_recipe(word))]
        overrides = [word for word in words if not _is_recipe(word)]
        runs: list[Variant] = []
        for path in recipes:
            combinations = variants(path, overrides, self.grid)
            shared = set(combinations[0]).intersection(*combinations[1:])
            runs += [Variant(path, own, tuple(word for word in own if word not in shared)) for own in combinations]
        self._refuse_contradictions(len(runs))
        return [_numbered(variant, number) for number, variant in enumerate(runs)] if len(runs) > 1 else runs

    def dependency_options(self, notify: Notify) -> list[str]:
        """Return the options of sbatch that say which jobs the first run waits for."""
        if self.dependency:
            return [f"--dependency={self.dependency}"]
        if self.after is None:
            return []
        from llmlaunch.app.run_lookup import submission_of
        from llmlaunch.launchers.sweep import after

        submission = submission_of(self.after, notify)
        if submission.launcher != "slurm":
            raise UserError(f"--after {self.after}: that run is no SLURM job, so none can wait for it")
        return after(submission)

    def _refuse_contradictions(self, count: int) -> None:
        if self.array and self.chain:
            raise UserError("--array, --chain: tasks of an array do not wait for each other; choose one")
        if self.array_limit is not None and not self.array:
            raise UserError("--array-limit: says how many tasks of an array run at a time; add --array")
        if self.dependency and self.after:
            raise UserError("--dependency, --after: both say what the job waits for; choose one")
        if count == 1 and (self.array or self.chain):
            raise UserError(
                f"{'--array' if self.array else '--chain'}: there is one run only; name several recipes, or several "
                "values (training.steps=100,200; --grid model=llama3-8b,llama3-70b)"
            )


def _numbered(variant: Variant, number: int) -> Variant:
    return replace(variant, overrides=tuple(word.replace(RUN, str(number)) for word in variant.overrides))


def _is_recipe(word: str) -> bool:
    return "=" not in word or Path(word).is_file()


def plan_variants(variants: Sequence[Variant], options: SweepOptions, notify: Notify) -> list[PlannedRun]:
    """Plan each of several runs, in order.

    Raises UserError for the first that is invalid, may not run or lacks an input, and where runs that may run at the
    same time would write and read each other's checkpoints.
    """
    runs = []
    for number, variant in enumerate(counting("runs", variants), start=1):
        notify(f"run {number} of {len(variants)}: {variant.label}")
        try:
            run = plan(variant.recipe, variant.overrides, notify, replan=options.replan)
            run.refuse_unsafe()
            run.refuse_missing()
        except UserError as mistake:
            raise _none_submitted(mistake, variant, len(variants)) from None
        warn_of_memory(run, notify)
        runs.append(run)
    if options.how in ("independent", "array"):
        _refuse_shared_checkpoints(variants, runs)
    return runs


def warn_of_memory(run: PlannedRun, notify: Notify) -> None:
    """Warn of a tight plan, of a locked one that is not safe by what is known today, and where fewer layouts than
    wanted would follow one that runs out of memory."""
    if run.plan.accepted:
        from llmlaunch.planner.refusal import tightness

        notify(f"warning: tight, accepted by memory.accept: {tightness(run.plan)}")
    elif run.plan.locked_by and not run.plan.safe:
        notify(
            f"warning: {run.plan.verdict} by what is known today, and kept by {run.plan.locked_by}: {excess(run.plan)}"
        )
    if run.plan.fallbacks is not None and run.plan.fallbacks.missing is not None:
        notify(f"warning: {run.plan.fallbacks.missing}")


def excess(plan: Plan) -> str:
    """Return by how much a plan exceeds its limit, on the device or on the host; why there is no verdict, of one
    without."""
    if plan.verdict == UNKNOWN:
        return plan.reason
    needs, limit = plan.device_bytes, plan.limit.limit_bytes
    if needs > limit:
        return (
            f"pipeline rank {plan.estimate.worst.pipeline_rank} needs {gib(needs)} GiB, and the limit is {gib(limit)}"
        )
    return f"a node needs {gib(plan.host_bytes_beyond)} GiB more host memory than its limit"


def _none_submitted(mistake: UserError, variant: Variant, count: int) -> UserError:
    lists = [word for word in variant.overrides if "," in word]
    hint = f" To try each value of a list: --grid {shown_word(lists[0])}" if lists and mistake.exit_code == 2 else ""
    return type(mistake)(f"{variant.label}: {mistake} None of the {count} was submitted.{hint}")


def _refuse_shared_checkpoints(variants: Sequence[Variant], runs: Sequence[PlannedRun]) -> None:
    numbers: dict[str, int] = {}
    for number, run in enumerate(runs, start=1):
        path = run.recipe.training.checkpoint_path
        if path is not None and numbers.setdefault(path, number) != number:
            raise UserError(
                f"{variants[number - 1].label}: runs {numbers[path]} and {number} would write their checkpoints into "
                f"the same folder, {path}, and go on from each other's; give each its own, by its number: "
                f"training.checkpoint_path={path}/{RUN}, or run them one after the other (--chain)"
            )
