"""Ranks on one GPU: a job of one device and some minutes for each, rendered, submitted, followed and read.

Under SLURM all wait in the queue together; on this machine one runs after the other, since there is one device.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from llmlaunch.backends.base import RankAlone, Rendered
from llmlaunch.backends.registry import rank_alone
from llmlaunch.errors import UserError
from llmlaunch.launchers.base import JobState, Launcher, Submission
from llmlaunch.launchers.choose import LauncherChoice
from llmlaunch.launchers.run_files import latest_attempt
from llmlaunch.planner.plan import Plan
from llmlaunch.recipe.types import Recipe
from llmlaunch.rehearsal.collected import nothing_shown
from llmlaunch.rehearsal.lone_rank import lone_rank
from llmlaunch.rehearsal.ranks import ON_GPU, RankChoice, RehearsedRank
from llmlaunch.rehearsal.records import shape_of
from llmlaunch.rendering.run_directory import render_run
from llmlaunch.report.run_text import cause_text, waiting_text
from llmlaunch.rundir import file_names
from llmlaunch.rundir.files import read_object
from llmlaunch.rundir.memory_files import attempt_summary
from llmlaunch.rundir.summary import RankSummary
from llmlaunch.rundir.values import to_type

__all__ = ["STEPS", "run_alone"]

STEPS = 3  # the optimizer's states come with the first, and the allocator settles in the second
POLL_SECONDS = 0.5
SLOWEST_POLL_SECONDS = 12.0
PATIENCE_SECONDS = 60.0  # with a job that nobody knows
OUT_OF_DEVICE_MEMORY = "oom"

Say = Callable[[str], None]


@dataclass(frozen=True)
class _Run:
    """One rank and the job it was submitted as."""

    asked: RankChoice
    alone: RankAlone
    submission: Submission


def run_alone(
    recipe: Recipe,
    plan: Plan,
    plan_json: Mapping[str, object],
    rendered: Rendered,
    chosen: Sequence[RankChoice],
    launcher_choice: LauncherChoice,
    directory: Path,
    say: Say,
) -> Iterator[RehearsedRank]:
    """Each rank as its job ends. The run directories are `directory`/rank0 and so on; whoever stops asking leaves jobs
    that were submitted in the queue.

    Raises:
        UserError: a rank that cannot run alone (before anything is written), a job that cannot be submitted, that ended
            by anything but its device's memory, or that did less than it was asked to.
    """
    if recipe.cluster.accelerator.kind != "gpu":
        raise UserError(f"{recipe.path}: is planned for {recipe.cluster.accelerator.name}, which is no GPU: submit it")
    stage = {rank_to_run.pipeline_rank: rank_to_run for rank_to_run in chosen}
    alone = {rank: rank_alone(recipe, plan.layout, rendered, rank, STEPS) for rank in stage}
    launcher = launcher_choice.launcher
    say(launcher_choice.why)

    def begin(rank: int) -> _Run:
        target = directory / f"rank{rank}"
        _render(recipe, plan, plan_json, rendered, stage[rank], alone[rank], target)
        submission = launcher.submit(target)
        say(f"pipeline rank {rank}: job {submission.job_id} in {target}")
        return _Run(stage[rank], alone[rank], submission)

    if launcher.name == "slurm":
        runs: Iterator[_Run] = iter([begin(rank) for rank in stage])
    else:
        runs = (begin(rank) for rank in stage)
    for run in runs:
        yield _read(run, _wait(launcher, run.submission, say))


def _render(
    recipe: Recipe,
    plan: Plan,
    plan_json: Mapping[str, object],
    rendered: Rendered,
    chosen: RankChoice,
    alone: RankAlone,
    target: Path,
) -> None:
    about = {
        "pipeline_rank": chosen.pipeline_rank,
        "stands_for": list(chosen.stands_for),
        "on": ON_GPU,
        "notes": list(alone.notes),
        **shape_of(recipe, plan, rendered),
    }
    lone = lone_rank(recipe, plan, rendered, alone, about, STEPS)
    render_run(lone.recipe, lone.plan, plan_json, lone.rendered, target, lone.described)


def _wait(launcher: Launcher, submission: Submission, say: Say) -> JobState:
    """Until the job has ended. Raises UserError where nobody knows it any more, or the person no longer waits."""
    last_reason, pause, last_known = "", POLL_SECONDS, time.monotonic()
    try:
        while True:
            state = launcher.states([submission])[submission.job_id]
            if state.ended:
                return state
            if state.phase != "unknown":
                last_known = time.monotonic()
            elif time.monotonic() - last_known > PATIENCE_SECONDS:
                raise UserError(
                    f"job {submission.job_id} is not known any more ({state.reason or 'no reason given'}); "
                    f"what it left is in {submission.run_dir}"
                )
            waiting = (
                waiting_text(state.reason, state.expected_start, datetime.now()) if state.phase == "pending" else ""
            )
            if waiting and state.reason != last_reason:
                last_reason = state.reason
                say(f"job {submission.job_id} {waiting}")
            time.sleep(pause)
            pause = min(pause * 1.3, SLOWEST_POLL_SECONDS)
    except KeyboardInterrupt:
        raise UserError(
            f"no longer waiting; job {submission.job_id} goes on. Its peak, when it has ended: "
            f"{to_type('collect', submission.run_dir)}; end it: {to_type('cancel', submission.run_dir)}"
        ) from None


def _read(run: _Run, state: JobState) -> RehearsedRank:
    """What the job's own account says. Raises UserError where it says nothing of the rank's peak."""
    where, rank = run.submission.run_dir, run.asked.pipeline_rank
    attempt = latest_attempt(run.submission)
    status = read_object(where / file_names.STATUS) or {}
    cause = status.get("cause")
    cause = cause if isinstance(cause, dict) else {}
    ran_out = state.phase != "succeeded" and cause.get("kind") == OUT_OF_DEVICE_MEMORY
    if attempt is None or not (state.phase == "succeeded" or ran_out):
        why = cause_text(cause) if cause else state.reason or state.state or "no reason is known"
        raise UserError(f"pipeline rank {rank} did not run to its end: {why}; its log is in {where / file_names.LOGS}")
    account = attempt_summary(where, attempt)
    ran = read_object(where / file_names.ATTEMPTS / attempt / file_names.VERSIONS) or {}
    used = next(
        (rank_summary for rank_summary in account.ranks if rank_summary.rank == run.alone.rank),
        RankSummary(run.alone.rank),
    )
    missing = nothing_shown(read_object(where / file_names.RUN) or {}, account, ran_out)
    if missing is not None:
        raise UserError(f"pipeline rank {rank} shows no peak: {missing}; its log is in {where / file_names.LOGS}")
    return RehearsedRank(
        pipeline_rank=rank,
        on=ON_GPU,
        predicted=run.asked.predicted,
        allocated_bytes=used.allocated_peak_bytes,
        reserved_bytes=used.reserved_peak_bytes,
        process_bytes=used.peak_bytes,
        ran_out=ran_out,
        stands_for=run.asked.stands_for,
        versions={name: str(version) for name, version in ran.items()},
        seconds=_seconds(status, used),
        remarks=(*run.alone.notes, *([cause_text(cause)] if ran_out else [])),
    )


def _seconds(status: Mapping[str, object], used: RankSummary) -> float:
    ended = status.get("ended_at")
    return float(ended) - used.started_at if isinstance(ended, (int, float)) and used.started_at else 0.0
