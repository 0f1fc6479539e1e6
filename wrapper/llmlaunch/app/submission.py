"""Render runs, submit them away from nodes that failed before, and record them in the store; also for a second time."""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmlaunch.app.messages import Notify, ignore
from llmlaunch.app.planned_run import PlannedRun, plan, plan_loaded
from llmlaunch.app.run_lookup import note_ends, submission_in
from llmlaunch.app.variants import SweepOptions, Variant, warn_of_memory
from llmlaunch.errors import SchedulerRefused, UserError
from llmlaunch.launchers.run_environment import INTERPRETER_VARIABLE
from llmlaunch.layout import Layout
from llmlaunch.rundir import file_names
from llmlaunch.rundir.values import counted, to_type
from llmlaunch.store.location import store_exists

if TYPE_CHECKING:
    from llmlaunch.launchers.base import Submission
    from llmlaunch.launchers.choose import LauncherChoice
    from llmlaunch.recipe.types import Recipe
    from llmlaunch.store.sick_nodes import SickNode


ONE_RUN = SweepOptions()


@dataclass(frozen=True)
class SubmittedRun:
    """A run that the scheduler took: `llmlaunch submit --json` prints it."""

    recipe: str
    run_id: str | None
    run_dir: Path
    launcher: str
    """"slurm" or "local"."""
    job_id: str
    layout: Layout
    submission: Submission

    @property
    def sentence(self) -> str:
        """Which job it is, and where its files lie."""
        return f"job {', '.join(self.submission.jobs)} in {self.run_dir}"

    def to_json(self) -> dict[str, Any]:
        """Return what `llmlaunch submit --json` prints."""
        return {
            "recipe": self.recipe,
            "run_id": self.run_id,
            "run_dir": str(self.run_dir),
            "launcher": self.launcher,
            "job_id": self.job_id,
            "layout": self.layout.as_json(),
        }


def submit(
    run: PlannedRun | Recipe | str | Path,
    directory: str | Path | None = None,
    overrides: Sequence[str] = (),
    *,
    local: bool = False,
    notify: Notify = ignore,
) -> SubmittedRun:
    """Render a run, submit it to SLURM, or start it on this machine where there is no SLURM or `local` is true.

    `run` is a plan, or a recipe that is planned first. `directory` is the run directory, which must be new;
    runs/NAME-TIME unless given. `notify` is called with each line a person may want to read.

    Raises:
        NothingSafe: the plan is not safe (nor tight and accepted), or exceeds the budget; nothing is written.
        SchedulerRefused: SLURM did not take the job.
        UserError: any other mistake that can be mended.
    """
    from llmlaunch.launchers.choose import choose

    planned = run if isinstance(run, PlannedRun) else plan(run, overrides, notify)
    planned.refuse_unsafe()
    warn_of_memory(planned, notify)
    choice = choose(local, notify)
    planned.refuse_missing(of_slurm=choice.launcher.name == "slurm")
    submitted = submit_runs([planned], choice, None if directory is None else Path(directory), notify)[0]
    notify(submitted.sentence)
    return submitted


def submit_runs(
    runs: Sequence[PlannedRun],
    choice: LauncherChoice,
    output: Path | None,
    notify: Notify,
    options: SweepOptions = ONE_RUN,
    variants: Sequence[Variant] = (),
    exclude_nodes: bool = True,
) -> list[SubmittedRun]:
    """Render all runs, submit all, record all; all or none. `variants` are the words of several runs, one each."""
    from llmlaunch.launchers.sweep import submit_sweep

    if len(runs) > 1:
        _refuse_sweep(runs, variants, choice, options)
    elif choice.launcher.name == "local":
        runs = [_planned_for_this_machine(runs[0], choice.why, notify)]
    waits = options.dependency_options(notify)
    directory, run_dirs = _rendered(runs, output, options, variants, notify)
    notify(choice.why)
    by_directory = dict(zip(run_dirs, runs, strict=True))

    def sbatch_options(run_dir: Path) -> tuple[str, ...]:
        if not exclude_nodes or choice.launcher.name != "slurm":
            return ()
        return exclusion_options(run_dir, notify)

    def record(submission: Submission) -> None:
        if len(runs) > 1:  # of a single run the caller says it with all that belongs to it
            notify(f"job {submission.job_id} in {submission.run_dir}")
        _record(by_directory[submission.run_dir], submission.run_dir, asdict(submission), notify)

    with refusals_recorded(run_dirs[0], notify) if len(runs) == 1 else contextlib.nullcontext():
        submissions = submit_sweep(choice.launcher, directory, run_dirs, options.how, waits, sbatch_options, record)
    return [_submitted(run, submission) for run, submission in zip(runs, submissions, strict=True)]


def _refuse_sweep(
    runs: Sequence[PlannedRun], variants: Sequence[Variant], choice: LauncherChoice, options: SweepOptions
) -> None:
    """Raise UserError where several runs cannot be submitted at once; SLURM is asked how long an array may be."""
    from llmlaunch.launchers.slurm.site import max_array_size
    from llmlaunch.launchers.sweep import refuse_array
    from llmlaunch.rendering.restarts import restart_by

    if choice.launcher.name != "slurm":
        raise UserError(
            f"several runs at once need SLURM, which shares out the machines; submit one by one. {choice.why}"
        )
    if not options.array:
        return
    for variant, run in zip(variants, runs, strict=True):
        if restart_by(run.recipe) == "chain":
            raise UserError(
                f"--array: {variant.label}: comes back by follow-up jobs (restart.by: chain), which a task of an array "
                "cannot have; say restart.by=requeue, restart=none, or leave out --array"
            )
    refuse_array(len(runs), max_array_size())


def _planned_for_this_machine(run: PlannedRun, why: str, notify: Notify) -> PlannedRun:
    """Return the plan of a local run, after everything that can be refused at once. Where the peak is resident memory,
    the run is planned again with the bytes of an idle trainer."""
    refuse_elsewhere(run.recipe, why)
    baseline_bytes = idle_trainer_bytes(run.recipe, notify)
    if baseline_bytes is None:
        return run
    planned = plan_loaded(run.recipe, notify, baseline_bytes, run.plan.sizing, run.unlocked)
    planned.refuse_unsafe()
    return planned


def refuse_elsewhere(recipe: Recipe, why: str) -> None:
    """Raise UserError for a recipe that this machine cannot run: it has several nodes, or other GPUs. `why` says why it
    would run here."""
    from llmlaunch.launchers.local_gpus import refuse_missing_gpus

    if recipe.nodes > 1:
        raise UserError(
            f"{recipe.path}: nodes: is {recipe.nodes}, and this machine is one; submit where there is SLURM, or try "
            f"nodes=1. {why}"
        )
    if recipe.cluster.accelerator.kind != "cpu":
        accelerator = recipe.cluster.accelerator
        refuse_missing_gpus(recipe.path, accelerator.name, recipe.cluster.devices_per_node, accelerator.memory_bytes)


def idle_trainer_bytes(recipe: Recipe, notify: Notify) -> int | None:
    """Return the measured bytes of an idle trainer under the interpreter of a local run, where the peak is resident
    memory; else None."""
    from llmlaunch.launchers.local import measured_baseline

    python = recipe.python or os.environ.get(INTERPRETER_VARIABLE) or sys.executable
    if recipe.cluster.accelerator.kind != "cpu" or not recipe.backend.traits.ships_trainer:
        return None
    return measured_baseline(python, notify)


def _rendered(
    runs: Sequence[PlannedRun],
    output: Path | None,
    options: SweepOptions,
    variants: Sequence[Variant],
    notify: Notify,
) -> tuple[Path, list[Path]]:
    """Write the run directory of one run, or a sweep's directory of several; return it and the run directories."""
    if len(runs) == 1:
        directory = output or default_directory(runs[0].recipe.name)
        runs[0].write(directory, notify)
        return directory.resolve(), [directory.resolve()]
    from llmlaunch.rendering.sweep import render_sweep, run_names

    name = sweep_name(runs)
    directory = output or default_directory(name)
    names = run_names([run.recipe.name for run in runs])
    writers = {of: functools.partial(run.write, notify=notify) for of, run in zip(names, runs, strict=True)}
    described = [variant.to_json(run.recipe.name) for variant, run in zip(variants, runs, strict=True)]
    run_dirs = render_sweep(directory, name, options.how, writers, described, options.array_limit)
    return directory.resolve(), run_dirs


def default_directory(name: str) -> Path:
    """Return a new place below LLMLAUNCH_RUNS, or below runs/."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    return runs_folder() / f"{name}-{stamp}-{secrets.token_hex(2)}"


def runs_folder() -> Path:
    """Return the folder of run directories: LLMLAUNCH_RUNS, or runs/."""
    return Path(os.environ.get("LLMLAUNCH_RUNS", "runs"))


def sweep_name(runs: Sequence[PlannedRun]) -> str:
    """Return the name of a sweep: its recipe's, if there is one recipe."""
    names = {run.recipe.name for run in runs}
    return f"{runs[0].recipe.name}-sweep" if len(names) == 1 else "sweep"


def _submitted(run: PlannedRun, submission: Submission) -> SubmittedRun:
    from llmlaunch.rundir.files import read_run_id

    directory = submission.run_dir
    return SubmittedRun(
        run.recipe.name,
        read_run_id(directory),
        directory,
        submission.launcher,
        submission.job_id,
        run.plan.layout,
        submission,
    )


def _record(run: PlannedRun, run_dir: Path, submission: Mapping[str, Any], notify: Notify) -> None:
    """The store is an index: where it cannot be written the job runs on, and `collect` can name it later."""
    from llmlaunch.store.database import open_store
    from llmlaunch.store.runs import record_submission

    try:
        with open_store() as store:
            record_submission(store, run.recipe, run.json, run_dir, submission)
    except UserError as failure:
        _warn_not_recorded(run_dir, failure, notify)


def _warn_not_recorded(run_dir: Path, failure: UserError, notify: Notify) -> None:
    notify(
        f"warning: the run goes on, but the store does not know it ({failure}); later: {to_type('collect', run_dir)}"
    )


def earlier_submission(output: Path, notify: Notify) -> Submission | None:
    """Return the job of a run directory whose submit was interrupted, if SLURM has it; None where `output` is no run
    directory. Raises UserError for one that needs another command."""
    from llmlaunch.launchers import run_files, submit_mark

    if not (output / file_names.JOB_SCRIPT).is_file():
        return None
    run_files.refuse_foreign(output)
    if submit_mark.was_submitting(output) is not None:
        submission = submission_in(output.resolve(), notify)
        notify(f"job {', '.join(submission.jobs)} in {output}: nothing was submitted again")
        return submission
    earlier = run_files.read_submission(output)
    if earlier is not None:
        raise UserError(
            f"{output}: already submitted as {earlier.launcher} job {earlier.job_id}; when that has ended, "
            f"{to_type('resume', output)} submits it again; another -o renders another run"
        )
    raise UserError(
        f"{output}: rendered before, and not submitted; {to_type('resume', output)} submits it as it is; another -o "
        "renders another run"
    )


def resubmit(
    directory: Path,
    options: Sequence[str],
    notify: Notify,
    *,
    anyway: bool,
    local: bool,
    from_older: bool,
    exclude_nodes: bool,
) -> Submission:
    """Submit a run directory again whose last job has ended, or one that was never submitted.

    `options` go to sbatch. `anyway` also submits where it is unknown whether the last job has ended, or it succeeded;
    `from_older` allows an older checkpoint than the last one saved. Raises UserError where the run must not be
    submitted, and SchedulerRefused.
    """
    from llmlaunch.app.rendered_job import checkpoint_warnings
    from llmlaunch.launchers import run_files, submit_mark
    from llmlaunch.launchers.choose import choose

    run_files.refuse_foreign(directory)
    if not from_older:
        _refuse_lost_history(directory)
    before = run_files.read_submission(directory)
    if submit_mark.was_submitting(directory) is None:
        _refuse_unless_ended(directory, before, anyway, notify)
    choice = choose(local or (before is not None and before.launcher == "local"), notify)
    if run_files.remove_stop(directory):
        notify("Removed the stop file; the run may continue")
    if from_older:
        run_files.allow_older_checkpoint(directory)
    notify(choice.why)
    for sentence in checkpoint_warnings(directory):
        notify(f"warning: {sentence}")
    exclusions = exclusion_options(directory, notify) if exclude_nodes and choice.launcher.name == "slurm" else ()
    with refusals_recorded(directory, notify):
        submission = choice.launcher.submit(directory, (*exclusions, *options), again=before is not None)
    notify(f"job {', '.join(submission.jobs)} in {directory}")
    _collect(directory, notify)
    return submission


def _refuse_lost_history(directory: Path) -> None:
    """Raise UserError where the store knows of an attempt whose records are gone: a job that finds neither them nor a
    checkpoint would begin at step 0 without a word."""
    from llmlaunch.rundir.files import read_run_id
    from llmlaunch.store.database import open_store
    from llmlaunch.store.runs import list_runs

    run_id = read_run_id(directory)
    if run_id is None or not store_exists():
        return
    try:
        with open_store() as store:
            attempt = next((run.attempt for run in list_runs(store) if run.run_id == run_id), None)
    except UserError:  # it is an index
        return
    folder = directory / file_names.ATTEMPTS
    if attempt is None or (folder / attempt).is_dir():
        return
    raise UserError(
        f"{folder / attempt}: is gone (the site may have removed old files), so nobody knows which checkpoint it had "
        "reached; nothing was submitted. Look at the checkpoints. To go on from the newest whole one there is, or from "
        f"step 0: {to_type('resume', directory, '--from-older')}"
    )


def _refuse_unless_ended(directory: Path, submitted: Submission | None, anyway: bool, notify: Notify) -> None:
    from llmlaunch.launchers.choose import launcher_of
    from llmlaunch.launchers.run_files import seen_at_work
    from llmlaunch.launchers.slurm.by_hand import queued_by_hand

    before = submitted or queued_by_hand(directory, notify) or seen_at_work(directory)
    if before is None:
        return
    state = launcher_of(before, notify).states([before])[before.job_id]
    if submitted is not None:
        note_ends([(submitted, state)], notify)
    job = before.jobs[max(0, state.link - 1)]
    if state.phase == "unknown" and not anyway:
        raise UserError(
            f"{before.run_dir}: nobody knows whether its job {job} has ended ({state.reason}); two jobs in one "
            "directory would spoil each other's checkpoints. Where you know that it has: --anyway"
        )
    if state.phase == "succeeded" and not anyway:
        raise UserError(
            f"{before.run_dir}: its job {job} succeeded, so nothing is left to do; submit it again: --anyway"
        )
    if state.phase in ("pending", "running"):
        raise UserError(
            f"{before.run_dir}: its job {job} is {state.phase}; when it has ended it can be submitted again "
            f"({to_type('cancel', before.run_dir)} ends it)"
        )


@contextlib.contextmanager
def refusals_recorded(directory: Path, notify: Notify) -> Iterator[None]:
    """Record a run that the scheduler refuses in the store, too, and let the mistake go on."""
    try:
        yield
    except SchedulerRefused:
        _collect(directory, notify)
        raise


def _collect(directory: Path, notify: Notify) -> None:
    from llmlaunch.store.collect import collect
    from llmlaunch.store.database import open_store

    try:
        with open_store() as store:
            collect(store, [directory])
    except UserError as failure:
        _warn_not_recorded(directory, failure, notify)


def exclusion_options(run_dir: Path, notify: Notify) -> tuple[str, ...]:
    """Return options of sbatch for the run in `run_dir`; none where no node of this cluster failed earlier runs.

    Each node is announced with its reason. A store or a SLURM that does not answer must not keep anybody from
    submitting: then no node is excluded.
    """
    sick = _sick_nodes(notify) if "SBATCH_CLUSTERS" not in os.environ else []
    if not sick:
        return ()
    from llmlaunch.launchers import run_environment
    from llmlaunch.launchers.run_files import job_script
    from llmlaunch.launchers.slurm.site import cluster_name, exclusion, nodes_of_cluster

    try:
        cluster = cluster_name(notify)
        sick = [node for node in sick if node.cluster in (cluster, "")]
        listed = nodes_of_cluster(notify) if sick else None
    except UserError:  # sbatch will say it
        return ()
    if not listed:
        return ()
    chosen = exclusion([node.node for node in sick], run_environment.directives(job_script(run_dir)), listed)
    _announce([node for node in sick if node.node in chosen.names], chosen.too_few, notify)
    if chosen.beyond:
        limit = f"no more than {counted(chosen.most, 'node')} of the partition may be left out (5 %)"
        notify(f"{', '.join(chosen.beyond)} failed runs, too, but {limit}; the job may get them")
    return chosen.words


def _sick_nodes(notify: Notify) -> list[SickNode]:
    if not store_exists():
        return []
    from llmlaunch.store.collect import open_collected
    from llmlaunch.store.sick_nodes import sick_nodes_of

    try:
        with open_collected(notify) as store:
            return sick_nodes_of(store, time.time())
    except UserError as failure:
        notify(f"warning: nodes that failed before are not left out: {failure}")
        return []


def _announce(nodes: Sequence[SickNode], too_few: bool, notify: Notify) -> None:
    for node in nodes:
        day, until = (time.strftime("%Y-%m-%d", time.localtime(at)) for at in (node.since, node.until))
        action = "would be left out, but too few nodes remain" if too_few else f"left out until {until}"
        notify(f"{node.node} {action}: {node.reason} ({node.kind}, {day}, run {node.run_id})")
    if nodes and not too_few:
        notify(f"use it again: {to_type('nodes', '--forgive', nodes[0].node)}, or submit --no-exclude")
