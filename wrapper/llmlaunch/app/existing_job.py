"""A job that somebody already has, as its script or its arguments say it: read into a recipe and planned as it is."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmlaunch.app.messages import Notify, ignore
from llmlaunch.app.planned_run import PlannedRun, plan
from llmlaunch.cluster.load import load_cluster
from llmlaunch.command_lines.command import LaunchProblem, StandIn, TrainerCommand, Undecided
from llmlaunch.documents.slurm_options import limit_seconds
from llmlaunch.documents.yaml_strict import Document
from llmlaunch.errors import NoVerdict, UserError
from llmlaunch.frameworks.argument import ALLOCATOR_NAMES, ALLOCATOR_SETTINGS, EXPANDABLE_SEGMENTS, WHOLE_SEGMENTS
from llmlaunch.frameworks.framework import framework_of
from llmlaunch.imports.command import read_command
from llmlaunch.imports.recipe_file import (
    RecipeSource,
    dumped,
    read_with_settings,
    recipe_text,
    undecided_keys,
    with_cluster,
    without_devices,
)
from llmlaunch.imports.script_words import ScriptWords
from llmlaunch.layout import RECOMPUTE_NAMES
from llmlaunch.recipe.load import load_written, recipe_from
from llmlaunch.recipe.overrides import apply_overrides, from_working_directory
from llmlaunch.recipe.types import Recipe
from llmlaunch.rundir.values import counted
from llmlaunch.units import duration
from llmlaunch.verdicts import UNKNOWN

if TYPE_CHECKING:
    from llmlaunch.planner.hints import Hint


MEGATRON_TRAINER = "pretrain_gpt.py"
EXPORT = f"{ALLOCATOR_SETTINGS}={EXPANDABLE_SEGMENTS}"


@dataclass(frozen=True)
class _OfScript:
    """What is known of a job whether or not it has a plan."""

    source: RecipeSource

    @property
    def launch(self) -> tuple[LaunchProblem, ...]:
        """What is wrong with the way in which the script starts its ranks."""
        return () if self.source.command is None else self.source.command.launch_problems

    @property
    def launch_failures(self) -> list[str]:
        """What makes its launch fail, each with its line and how to fix it."""
        return [f"{_at(self.source.path, each)}: {each.problem}; {each.fix}" for each in self.launch if each.fatal]


@dataclass(frozen=True)
class ExistingJob(_OfScript):
    """A job as it was read, and its plan: the layout is the job's own. `with_export` is the plan with segments that
    expand, where the script leaves torch's allocator at its default and that export would make the plan good."""

    run: PlannedRun
    notes: tuple[str, ...]
    with_export: PlannedRun | None = None

    def as_json(self) -> dict[str, Any]:
        """Return the plan in the shape of docs/schemas/plan.schema.json."""
        return self.run.json | launch_json(self.launch)


@dataclass(frozen=True)
class AssumedJob:
    """The plan of a job if a key that was not read has `value`."""

    key: str
    value: int
    run: PlannedRun


@dataclass(frozen=True)
class UndecidedJob(_OfScript):
    """A job of which a key that decides memory was not read, so that there is no verdict: the `reason`, and what each
    value of the key would mean."""

    name: str
    reason: str
    assumed: tuple[AssumedJob, ...]
    notes: tuple[str, ...]

    @property
    def error(self) -> NoVerdict:
        """The error that `check` ends with."""
        first = self.assumed[-1]
        return NoVerdict.on(self.name, f"{self.reason}; {first.key}={first.value} on the command line, say, decides it")

    def as_json(self) -> dict[str, Any]:
        """Return the answer in the shape of docs/schemas/plan.schema.json without a plan."""
        return no_verdict_json(self.name, self.reason, self.launch) | {
            "assumed": [
                {"assumption": {each.key: each.value}, "verdict": each.run.verdict, "memory": each.run.json["memory"]}
                for each in self.assumed
            ]
        }


def no_verdict_json(name: str, reason: str, launch: Sequence[LaunchProblem] = ()) -> dict[str, Any]:
    """Return what `check --json` prints of a job that has no plan, because what decides its memory was not read."""
    return {"recipe": name, "verdict": UNKNOWN, "reason": reason} | launch_json(launch)


def launch_json(launch: Sequence[LaunchProblem]) -> dict[str, Any]:
    """Return what is wrong with the launch of a job under its key of docs/schemas/plan.schema.json."""
    return {"launch": [{"line": each.line, "problem": each.problem, "fix": each.fix} for each in launch]}


def job_of_arguments(
    arguments: str,
    cluster: str | None,
    overrides: Sequence[str] = (),
    notify: Notify = ignore,
    settings: Sequence[str] = (),
) -> ExistingJob | UndecidedJob:
    """Plan the training that `pretrain_gpt.py` with these arguments, one text as typed in a shell, would run.

    Raises:
        UserError: the text is no command line, or does not say all that a plan needs.
    """
    try:
        words = shlex.split(arguments)
    except ValueError as error:
        raise UserError(f"--megatron-args: {error}; quote the whole text once, and its parts as in a shell") from None
    if not words:
        raise UserError("--megatron-args: is empty; give the arguments of pretrain_gpt.py")
    command = TrainerCommand(MEGATRON_TRAINER, tuple(words), place="--megatron-args")
    source = RecipeSource(Path(command.place), read_command(command), command, keys=tuple(settings))
    return job_of_source(source, cluster, overrides, notify)


def job_of_script(
    path: Path,
    cluster: str | None,
    overrides: Sequence[str] = (),
    notify: Notify = ignore,
    *,
    settings: Sequence[str] = (),
    number: int | None = None,
) -> ExistingJob | UndecidedJob:
    """Plan the training that a shell script starts; nothing of it is executed. `settings` are the `NAME=VALUE` words
    of `read_with_settings`; `number` chooses among several trainings.

    Raises:
        NoVerdict: the trainer is one that is not read.
        UserError: the script cannot be read, starts no training, or does not say all that a plan needs.
    """
    return job_of_source(read_with_settings(path, settings, number=number, cluster=cluster), cluster, overrides, notify)


def job_of_source(
    source: RecipeSource, cluster: str | None, overrides: Sequence[str] = (), notify: Notify = ignore
) -> ExistingJob | UndecidedJob:
    """Plan a job as it was read. Raises UserError where what was read is not all that a plan needs."""
    undecided = next((each for each in undecided_keys(source, overrides) if each.values), None)
    if undecided is not None:
        return _undecided(source, undecided, cluster, overrides, notify)
    return _decided(source, cluster, overrides, notify)


def _undecided(
    source: RecipeSource, undecided: Undecided, cluster: str | None, overrides: Sequence[str], notify: Notify
) -> UndecidedJob:
    """Plan the job with each value of a key that was not read; a value that no layout may have is left out.

    Raises:
        UserError: the job cannot be planned with any value.
    """
    assumed: list[AssumedJob] = []
    notes: tuple[str, ...] = ()
    for value in undecided.values:
        try:
            job = _decided(source, cluster, (*overrides, f"{undecided.key}={value}"), ignore if assumed else notify)
        except UserError:
            continue
        assumed.append(AssumedJob(undecided.key, value, job.run))
        notes = job.notes
    if not assumed:
        _decided(source, cluster, overrides, notify)  # raises the error that names all that is missing
    name = str(source.reading.document["name"])
    return UndecidedJob(source, name, undecided.reason, tuple(assumed), notes)


def _decided(source: RecipeSource, cluster: str | None, overrides: Sequence[str], notify: Notify) -> ExistingJob:
    words = source.words
    recipe, notes = _judged_recipe(source, words, cluster, overrides)
    run = plan(recipe, notify=notify, replan=True)
    with_export = _with_export(recipe, run)
    return ExistingJob(source, _in_script_words(run, words, with_export), notes, with_export)


def _judged_recipe(
    source: RecipeSource, words: ScriptWords, cluster: str | None, overrides: Sequence[str]
) -> tuple[Recipe, tuple[str, ...]]:
    """Return the recipe of a job as it runs: without what rendering would set otherwise, with stand-ins for what its
    memory does not depend on, and with the notes on these.

    Raises:
        UserError: the job does not say what its memory depends on, or contradicts itself.
    """
    keys = (*source.keys, *overrides)
    document, notes = with_cluster(source, cluster)
    document = without_devices(document)
    given = {word.partition("=")[0] for word in keys}
    stand_ins = {key: each for key, each in source.reading.stand_ins.items() if key not in given}
    if "nodes" not in document.keys() | given:
        nodes = _fewest_nodes(document)
        stand_ins["nodes"] = StandIn(nodes, f"nothing says how many there are; {counted(nodes, 'node')} is assumed")
    for key, each in stand_ins.items():
        document = _with_value(document, key.split("."), each.value)
    folder = source.path.parent if source.command is None else source.command.folder
    written = Document(words.place, dumped(document), document, words.places(document), {})
    try:
        recipe = load_written(written, from_working_directory(keys), folder)
        if open_keys := [each.key for each in undecided_keys(source, overrides) if not each.values]:
            raise UserError(f"{source.path}: {open_keys[0]} has no value")
    except UserError as error:
        asked = [
            sentence
            for sentence in source.reading.missing
            if sentence.partition(":")[0] not in given | stand_ins.keys()
        ]
        raise _lacking(source, asked, error) from None
    stood = (f"{key}: {each.reason}" for key, each in stand_ins.items())
    return _with_its_allocator(recipe), (*notes, *stood)


def _fewest_nodes(document: Mapping[str, Any]) -> int:
    """Return how many nodes one replica of the model takes, as the job is split."""
    cluster = document["cluster"]
    devices = cluster["devices_per_node"] if isinstance(cluster, Mapping) else load_cluster(cluster).devices_per_node
    layout = document.get("layout", {})
    sizes = (layout.get(name, 1) for name in ("tensor", "pipeline", "context"))
    return max(-(-prod(size for size in sizes if isinstance(size, int)) // devices), 1)


def _with_value(document: dict[str, Any], path: Sequence[str], value: Any) -> dict[str, Any]:
    first, *rest = path
    section = document.get(first)
    if not rest:
        return document | {first: value} if section is None else document
    return document | {first: _with_value(dict(section) if isinstance(section, Mapping) else {}, rest, value)}


def _lacking(source: RecipeSource, asked: Sequence[str], error: UserError) -> UserError:
    """Return the error for a job that does not say what its memory depends on, in the words of its script."""
    keys = {sentence.partition(":")[0] for sentence in asked}
    lacks = set(re.findall(r" ([\w.]+): is missing", str(error)))
    needed = {key for key in keys if {key, key.partition(".")[0]} & lacks}
    needed |= {each.key for each in source.reading.undecided} & keys
    if not needed:
        return error
    lines = []
    for sentence in (each for each in asked if each.partition(":")[0] in needed):
        key, _, text = sentence.partition(": ")
        unset = [each for each in source.unset if re.search(rf"\b{re.escape(each.name)}\b", text)]
        for each in unset:
            text = re.sub(rf"(?<![$\w]){re.escape(each.name)}\b", f"${each.name}", text)
        asks = ", ".join(f"--set {name}=VALUE" for name in [each.name for each in unset] or [key])
        text = re.split(r"; (?:write |add |give |--set )", text)[0].replace(" in the script", " here")
        lines.append(f"\n  {'' if unset else f'{key}: '}{text}; {asks}")
    # a script often chooses a model by its arguments
    lines += [f"\n  {note}" for note in source.notes if "counts as empty; --set" in note]
    if len(source.trainings) > 1:
        lines.append(
            f"\n  it starts {len(source.trainings)} trainings ({'; '.join(source.trainings)}); --command N chooses one"
        )
    return UserError(f"{source.path}: what its memory depends on is not known:{''.join(lines)}")


def _with_its_allocator(recipe: Recipe) -> Recipe:
    """Return the recipe with torch's own way to make segments where neither the script nor the site exports another:
    what rendering would export is no part of the job."""
    if any(name in recipe.environment for name in ALLOCATOR_NAMES):
        return recipe
    site = recipe.cluster.environment
    known = {name: site[name] for name in ALLOCATOR_NAMES if name in site} or {ALLOCATOR_SETTINGS: WHOLE_SEGMENTS}
    return replace(recipe, environment={**recipe.environment, **known})


def _with_export(recipe: Recipe, run: PlannedRun) -> PlannedRun | None:
    """Return the plan of a job that is not good with torch's default allocator, and is with segments that expand."""
    left_open = recipe.environment.get(ALLOCATOR_SETTINGS) == WHOLE_SEGMENTS and not recipe.training.async_save
    if run.plan.good or not left_open or run.plan.device_bytes > run.plan.limit.memory_bytes:
        return None
    exported = plan(replace(recipe, environment={**recipe.environment, ALLOCATOR_SETTINGS: EXPANDABLE_SEGMENTS}))
    return exported if exported.plan.good else None


def _in_script_words(run: PlannedRun, words: ScriptWords, with_export: PlannedRun | None) -> PlannedRun:
    """Return the plan with its advice in flags and lines of the script."""
    advice, change = run.plan.advice or "", run.plan.change
    if change is not None:
        advice = advice.replace(change.sentence(), _clause(run, words))
    if with_export is not None:
        advice = f"With `export {EXPORT}` before the trainer it is {with_export.verdict}. {advice}"
    limit = limit_seconds(run.recipe.slurm.get("time"))
    assumptions = tuple(each for each in run.plan.assumptions if limit is None or "(slurm.time)" not in each)
    return replace(run, plan=replace(run.plan, advice=advice.strip() or None, assumptions=assumptions))


def _clause(run: PlannedRun, words: ScriptWords) -> str:
    """Return the smallest change that makes a plan safe, in flags of the script; in recipe keys where the changed job
    cannot be rendered."""
    change = run.plan.change
    if change is None:
        return ""
    try:
        before = run.backend.render(run.recipe, run.layout)
        after = run.backend.render(change.recipe, change.layout)
    except UserError:
        return change.sentence()
    return words.change(change.settings, before, after)


def change_in_words(job: ExistingJob) -> str:
    """Return the smallest change that makes the job safe, as a person makes it in the script; "" without one."""
    return _clause(job.run, job.source.words)


def hint_in_words(job: ExistingJob, hint: Hint) -> str:
    """Return what makes a job faster, as a person makes it in the script; in recipe keys where that cannot be said."""
    run, field, document = job.run, hint.key.partition(".")[2], job.run.recipe.document
    value = RECOMPUTE_NAMES.index(hint.value) if field == "recompute" else hint.value
    sizes: dict[str, Any] = {field: value} if hasattr(run.layout, field) else {}
    layout = replace(run.layout, **sizes)
    if document is None:
        return hint.sentence()
    try:
        changed = recipe_from(apply_overrides(document, [f"{hint.key}={json.dumps(hint.value)}"]))
        after = run.backend.render(changed, layout)
        words = job.source.words.change({hint.key: hint.value}, run.backend.render(run.recipe, run.layout), after)
    except UserError:
        return hint.sentence()
    return f"{words}: {hint.sentence().partition('): ')[2]}"


def recipe_settings(job: ExistingJob, cluster: str | None, overrides: Sequence[str] = ()) -> tuple[str, ...] | None:
    """Return the `KEY=VALUE` words for what was assumed of a job and its recipe has to say; None where a recipe takes
    more than that."""
    source = job.source
    given = {word.partition("=")[0] for word in (*source.keys, *overrides)}
    assumed = {key: each.value for key, each in source.reading.stand_ins.items() if key not in given}
    words = tuple(f"{key}={json.dumps(value)}" for key, value in assumed.items())
    for settings in ((), words):
        try:
            recipe_text(source, source.path, cluster, (*overrides, *settings))
        except UserError:
            continue
        return settings
    return None


def reading_lines(job: ExistingJob | UndecidedJob) -> list[str]:
    """Return what a person should know of how the job was read, a line each. What rendering it would change is for
    those who make a recipe of it (`llmlaunch init --from`)."""
    source, reading = job.source, job.source.reading
    notes = [note for note in (*source.notes, *reading.notes) if not note.startswith("rendering ")]
    lines = [f"note: {source.path}: {note}" for note in (*notes, *job.notes)]
    lines += [
        f"warning: {source.path}: {shlex.join(words.words)}: {words.reason}"
        for words in reading.unread
        if words.matters
    ]
    lines += [f"warning: {_at(source.path, each)}: {each.problem}; {each.fix}" for each in job.launch if not each.fatal]
    if len(source.trainings) > 1:
        lines.append(
            f"note: {source.path}: starts {len(source.trainings)} trainings (--command N): "
            + "; ".join(source.trainings)
        )
    run = job.run if isinstance(job, ExistingJob) else job.assumed[-1].run
    lines += [f"warning: {sentence}" for sentence in _never_saved(run, source.words)]
    assumed = run.backend.facts(run.recipe).host.loading_assumed
    lines += [f"note: {source.path}: {assumed}"] if assumed else []
    if reading.not_rendered is not None:
        lines.append(f"note: {source.path}: it can be checked and not rendered: {reading.not_rendered}")
    return lines


def _at(source: Path, problem: LaunchProblem) -> str:
    return f"{source}:{problem.line}" if problem.line else str(source)


def _never_saved(run: PlannedRun, words: ScriptWords) -> list[str]:
    """Return the sentence on a job whose time ends before its first checkpoint, or before its last step."""
    recipe = run.recipe
    limit, interval = limit_seconds(recipe.slurm.get("time")), recipe.training.save_interval
    seconds = run.plan.length.seconds
    if limit is None or seconds <= limit:
        return []
    time = words.line_of(r"^#SBATCH.*(--time\b|-t\b)")
    ends = f"{words.path.name}:{time}" if time else words.place
    sentence = f"{ends}: the job ends after {duration(limit)}, and its steps take {duration(seconds)}"
    flags = framework_of(recipe).saves_at_the_end
    if any(flag.lstrip("-").replace("_", "-") in words.flags for flag in flags):
        return []
    if recipe.training.checkpoint_path is None or interval is None:
        return [f"{sentence}: it saves nothing to go on from"]
    first = interval * run.step_seconds
    if first <= limit:
        return []
    spellings = framework_of(recipe).spellings().get("training.save_interval", ())
    stated = next((flag for flag in spellings if flag.lstrip("-").replace("_", "-") in words.flags), None)
    saves = f"{words.at(stated)}: {stated} {interval}" if stated else f"a save every {interval} steps"
    fewer = max(int(limit / 2 / run.step_seconds), 1)
    option = f"{stated or 'the save interval'} {fewer} saves every {duration(fewer * run.step_seconds)}"
    alone = f", or {flags[0]} with --signal of sbatch saves before it ends" if flags else ""
    return [
        f"{sentence}: it never reaches a checkpoint, since {saves} is one every {duration(first)}, and each start "
        f"begins anew; {option}{alone}"
    ]
