"""Ranks on one GPU: a job of one device and some minutes for each, rendered, submitted, followed and read.

Under SLURM all wait in the queue together; on this machine one runs after the other, since there is one device.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from math import ceil
from pathlib import Path

from llmlaunch.documents.slurm_options import other_gres
from llmlaunch.errors import UserError
from llmlaunch.frameworks.base import RankAlone, Rendered
from llmlaunch.frameworks.framework import framework_of
from llmlaunch.launchers.base import JobState, Launcher, Submission
from llmlaunch.launchers.choose import LauncherChoice
from llmlaunch.launchers.run_files import latest_attempt
from llmlaunch.planner.plan import Plan
from llmlaunch.recipe.sections import NO_TRACKING
from llmlaunch.recipe.types import OnBadLoss, OnOom, Recipe
from llmlaunch.rehearsal.ranks import ON_GPU, JobAlone, Omission, RankChoice, RehearsedRank
from llmlaunch.rehearsal.records import nothing_shown, shape_with_job
from llmlaunch.rendering.run_directory import render_run
from llmlaunch.rendering.run_json import run_description
from llmlaunch.report.run_text import cause_text, waiting_text
from llmlaunch.rundir import file_names
from llmlaunch.rundir.files import read_object
from llmlaunch.rundir.memory_files import attempt_summary
from llmlaunch.rundir.run_file import read_run_file
from llmlaunch.rundir.summary import RankSummary
from llmlaunch.rundir.values import to_type

STEPS = 3  # the optimizer's states come with the first, and the allocator settles in the second
POLL_SECONDS = 0.5
SLOWEST_POLL_SECONDS = 12.0
PATIENCE_SECONDS = 60.0  # with a job that nobody knows
OUT_OF_DEVICE_MEMORY = "oom"

Say = Callable[[str], None]


def run_alone(
    recipe: Recipe,
    plan: Plan,
    plan_json: Mapping[str, object],
    rendered: Rendered,
    job: JobAlone,
    chosen: Sequence[RankChoice],
    launcher_choice: LauncherChoice,
    directory: Path,
    say: Say,
) -> Iterator[RehearsedRank]:
    """Each rank as its job ends. `rendered` is the planned job, `job` what runs of it. The run directories are
    `directory`/rank0 and so on; whoever stops asking leaves jobs that were submitted in the queue.

    Raises:
        UserError: a rank that cannot run alone (before anything is written), a job that cannot be submitted, that ended
            by anything but its device's memory, or that did less than it was asked to.
    """
    if recipe.cluster.accelerator.kind != "gpu":
        raise UserError(f"{recipe.path}: is planned for {recipe.cluster.accelerator.name}, which is no GPU: submit it")
    jobs_alone = [
        framework_of(job.recipe).rank_alone(job.recipe, plan.layout, job.rendered, choice.pipeline_rank, STEPS)
        for choice in chosen
    ]
    launcher = launcher_choice.launcher
    say(launcher_choice.why)

    def begin(choice: RankChoice, alone: RankAlone) -> Submission:
        target = directory / f"rank{choice.pipeline_rank}"
        about = {
            "pipeline_rank": choice.pipeline_rank,
            "stands_for": list(choice.stands_for),
            "on": ON_GPU,
            "notes": list(alone.notes),
            "left_out": [omission.as_json() for omission in job.omissions[choice.pipeline_rank]],
            **shape_with_job(recipe, plan, job),
        }
        lone = lone_rank(job, alone, about, STEPS)
        render_run(lone.recipe, lone.plan, plan_json, lone.rendered, target, lone.described)
        submission = launcher.submit(target)
        say(f"pipeline rank {choice.pipeline_rank}: job {submission.job_id} in {target}")
        return submission

    submissions: Iterable[Submission] = map(begin, chosen, jobs_alone)  # each begins when the one before has been read
    if launcher.name == "slurm":
        submissions = list(submissions)
    for choice, alone, submission in zip(chosen, jobs_alone, submissions, strict=True):
        ended = _wait(launcher, submission, say)
        yield _read(choice, alone, job.omissions[choice.pipeline_rank], submission, ended)


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


def _read(
    choice: RankChoice,
    alone: RankAlone,
    omissions: tuple[Omission, ...],
    submission: Submission,
    state: JobState,
) -> RehearsedRank:
    """What the job's own account says. Raises UserError where it says nothing of the rank's peak."""
    where, rank = submission.run_dir, choice.pipeline_rank
    attempt = latest_attempt(submission)
    status = read_object(where / file_names.STATUS) or {}
    cause, ended = status.get("cause"), status.get("ended_at")
    cause = cause if isinstance(cause, dict) else {}
    ran_out = state.phase != "succeeded" and cause.get("kind") == OUT_OF_DEVICE_MEMORY
    if attempt is None or not (state.phase == "succeeded" or ran_out):
        why = cause_text(cause) if cause else state.reason or state.state or "no reason is known"
        raise UserError(f"pipeline rank {rank} did not run to its end: {why}; its log is in {where / file_names.LOGS}")
    account = attempt_summary(where, attempt)
    ran = read_object(where / file_names.ATTEMPTS / attempt / file_names.VERSIONS) or {}
    used = next((summary for summary in account.ranks if summary.rank == alone.rank), RankSummary(alone.rank))
    missing = nothing_shown(read_run_file(where), account, ran_out)
    if missing is not None:
        raise UserError(f"pipeline rank {rank} shows no peak: {missing}; its log is in {where / file_names.LOGS}")
    return RehearsedRank(
        pipeline_rank=rank,
        on=ON_GPU,
        predicted=choice.predicted,
        allocated_bytes=used.allocated_peak_bytes,
        reserved_bytes=used.reserved_peak_bytes,
        process_bytes=used.peak_bytes,
        ran_out=ran_out,
        stands_for=choice.stands_for,
        versions={name: str(version) for name, version in ran.items()},
        seconds=float(ended) - used.started_at if isinstance(ended, (int, float)) and used.started_at else 0.0,
        step_seconds=account.step_seconds,
        remarks=(*alone.notes, *([cause_text(cause)] if ran_out else [])),
        omissions=omissions,
    )


STARTING_SECONDS = 15 * 60.0  # importing torch from a slow file system, building kernels, drawing weights
SLOWER_ALONE = 2.0  # the first step is slower than the planned one
UNIT_MINUTES = 5

# What recipe or site asks of SLURM for a job of whole nodes, or for its length.
OF_WHOLE_NODES = frozenset(
    (
        *("exclusive", "contiguous", "spread-job", "use-min-nodes", "switches", "segment", "nodelist", "nodefile"),
        *("nodes", "ntasks", "ntasks-per-node", "ntasks-per-gpu", "ntasks-per-socket", "ntasks-per-core"),
        *("cpus-per-task", "cores-per-socket", "sockets-per-node", "mincpus", "mem", "tmp"),
        *("gpus", "gpus-per-node", "gpus-per-task", "gpus-per-socket", "tres-per-task", "gres"),
        *("time", "time-min", "deadline", "signal", "requeue", "no-requeue", "array", "dependency"),
    )
)


@dataclass(frozen=True)
class LoneRank:
    """What `render_run` takes: `described` is run.json."""

    recipe: Recipe
    plan: Plan
    rendered: Rendered
    described: Mapping[str, object]


def lone_rank(job: JobAlone, alone: RankAlone, rehearsal: Mapping[str, object], steps: int) -> LoneRank:
    """Return a job for one rank by itself, which says of the memory what the job would: predicted bytes are the planned
    job's, the measurement record is of what runs. Everything a job of many nodes and days needs is left out: whole
    nodes, spare ones, preflight, checkpoints, restarts, other layouts.

    `rehearsal` goes into run.json, with "pipeline_rank" in it.
    """
    recipe, plan, rendered = job.recipe, job.plan, job.rendered
    lone = _recipe(recipe, plan, alone, f"{recipe.name}-rank{rehearsal['pipeline_rank']}", steps)
    single = replace(plan, fallbacks=None, fewer_nodes=None)
    rendered_alone = replace(
        rendered,
        program=alone.program,
        arguments=alone.arguments,
        environment={**rendered.environment, **alone.environment},
        files={**rendered.files, **alone.files},
        check=(),
        prepare=(),
        notes=(*rendered.notes, *alone.notes),
        by_itself=True,
    )
    described = {
        **run_description(lone, single, rendered_alone),
        "measurement": job.measurement(),
        "rehearsal": dict(rehearsal),
    }
    return LoneRank(lone, single, rendered_alone, described)


def _recipe(recipe: Recipe, plan: Plan, alone: RankAlone, name: str, steps: int) -> Recipe:
    """As a person would write it for this rank; its text and digest stay the job's."""
    cluster, devices = recipe.cluster, recipe.cluster.devices_per_node
    cpus = cluster.cpus_per_node
    return replace(
        recipe,
        name=name,
        nodes=1,
        spare_nodes=0,
        preflight=False,
        placement="slurm",
        restart=None,
        on_oom=OnOom(layouts=0),
        on_bad_loss=OnBadLoss(),
        monitor=replace(recipe.monitor, probe=True),
        tracking=NO_TRACKING,
        notify=None,
        backend=replace(recipe.backend, extra_args=alone.own_words),
        cluster=replace(cluster, devices_per_node=1, cpus_per_node=cpus and max(1, cpus // devices)),
        training=replace(
            recipe.training,
            steps=steps,
            log_interval=1,
            save_interval=None,
            non_persistent_save_interval=None,
            checkpoint_path=None,
            start_from=None,
            tensorboard=None,
        ),
        slurm=_slurm(recipe, plan, steps),
    )


def _slurm(recipe: Recipe, plan: Plan, steps: int) -> dict[str, str | int | float | bool]:
    """Where and for whom as the recipe says; of a node one device and what is with it."""
    options = {name: value for name, value in recipe.slurm.items() if name not in OF_WHOLE_NODES}
    if recipe.slurm.get("mem", False) is not False:  # 0 is all of a node: memory is shared out there
        share = recipe.cluster.host_memory_bytes * 9 // 10 // recipe.cluster.devices_per_node
        options["mem"] = f"{share // 2**20}M"
    others = other_gres(recipe.slurm)
    if others:
        options["gres"] = ",".join(others)
    seconds = STARTING_SECONDS + SLOWER_ALONE * steps * plan.chosen.step_seconds
    minutes = ceil(seconds / 60 / UNIT_MINUTES) * UNIT_MINUTES
    options["time"] = f"{minutes // 60:02d}:{minutes % 60:02d}:00"
    return options
