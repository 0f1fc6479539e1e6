"""The beginning of an attempt: what is looked at before anything starts (setup lines that failed, secrets that are not
set, an allocation of another size), whether there is anything left to train, and with which layout.

SLURM may start a job again that was finished or given up, after a requeue because of a node failure or as the next link
of a chain.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from ..causes.cause import cause, sentence
from ..rundir import file_names
from ..rundir.file_names import attempt_folder
from ..rundir.files import replace_json
from ..rundir.run import begun_attempts, next_layout
from ..rundir.run_file import ProgressRules, read_run_file
from ..rundir.values import counted, job_of
from . import slurm_steps
from .checkpoint import Start, attempts_in_folder, checkpoint_of, choose_start, read_tracker, saved_step
from .files import COMES_BACK_LATER, say, write_status
from .notices import end_text, notify, start_text, wait_for_deliveries
from .restart_bounds import bounds_of
from .restart_policy import FIRST_LAYOUT, Next, fruitless, of_this_submission, stops_at_bad_checkpoint
from .rollback import choose_rollback, earlier_skips

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from ..rundir.attempt import Attempt
    from ..rundir.attempt_files import AttemptStart, Cause, Status

    Run = Mapping[str, Any]  # run.json


class Beginning(NamedTuple):
    """An attempt that is to begin on `nodes`. `layout` is the one with which it continues in the same allocation, and
    empty at the start of the job. `is_restart` means that it counts as a restart."""

    run_dir: Path
    attempt: str
    nodes: tuple[str, ...]
    layout: str = ""
    is_restart: bool = False


class Begun(NamedTuple):
    """The layout to train with, or the exit code of the job if there is nothing to train."""

    layout: str
    exit_code: int | None = None


def begin(options: Beginning) -> Begun:
    """Decide whether to train, and with which layout. Writes `attempt.json` of the attempt, or the reason not to train
    to `status.json`."""
    earlier = [attempt for attempt in begun_attempts(options.run_dir) if attempt.name != options.attempt]
    layout = options.layout or next_layout(earlier) or FIRST_LAYOUT
    ended = None if options.layout else _earlier_end(options, earlier)
    if ended is not None:
        return _end(options, layout, *ended)
    checkpoint = checkpoint_of(options.run_dir, layout)
    in_folder = attempts_in_folder(earlier, options.run_dir, checkpoint)
    latest = in_folder[-1] if in_folder else None
    run = read_run_file(options.run_dir)
    rollback = choose_rollback(run, checkpoint, in_folder)
    if rollback is None:
        start = choose_start(options.run_dir, checkpoint, in_folder, stops=stops_at_bad_checkpoint(run.get("restart")))
    else:
        start = rollback.start
    if start.problem:
        unusable = cause("checkpoint", None, start.problem, "begin")
        return _end(options, layout, "failed", 1, f"{sentence(unusable)}. {start.remedy}", unusable, notice=True)
    if start.note:
        say(start.note)
    ended = None if options.layout else _bound(options, earlier, layout)
    if ended is not None:
        return _end(options, layout, *ended, notice=True)
    own = attempt_folder(options.run_dir, options.attempt) / file_names.ATTEMPT
    record = _record(options, layout, start)
    record["skips"] = earlier_skips(latest) if rollback is None else rollback.skips
    record["rollback"] = None if rollback is None else rollback.record
    record["loss_limit"] = None if rollback is None else rollback.limit
    notify(options.run_dir, options.attempt, "start", _start_text(options, record, earlier))
    try:
        replace_json(own, record)
        (options.run_dir / file_names.FROM_OLDER).unlink()
    except FileNotFoundError:
        pass
    except OSError as error:
        say(f"attempt {options.attempt} is not written down: {error.strerror}")
    return Begun(layout)


def end_untrained(run_dir: Path, attempt: str, why: str, reason: Cause | None = None) -> int:
    """Record that the job cannot train, and why. Return its exit code."""
    begun = _end(Beginning(run_dir, attempt, ()), FIRST_LAYOUT, "failed", 1, why, reason, notice=True)
    return begun.exit_code or 1


def _start_text(options: Beginning, record: AttemptStart, earlier: list[Attempt]) -> str:
    steps = (read_run_file(options.run_dir).get("progress") or ProgressRules()).get("steps")
    return start_text(record, steps, earlier[-1].status if earlier else None)


def _end(
    options: Beginning,
    layout: str,
    state: str,
    code: int,
    why: str,
    reason: Cause | None = None,
    notice: bool = False,
) -> Begun:
    """Record that nothing is trained. With `notice`, send a notice, because nobody has heard of this end before."""
    say(why)
    status: Status = {**_status(options.attempt, state, code, why, layout), "cause": reason}
    write_status(options.run_dir, status)
    if notice:
        notify(options.run_dir, options.attempt, "end", end_text(options.run_dir, status, {}, Next("end", why)))
    wait_for_deliveries()
    return Begun(layout, code)


def _earlier_end(options: Beginning, earlier: list[Attempt]) -> tuple[str, int, str] | None:
    """Return state, exit code and reason if the run has been finished, stopped or given up, or None if it may
    continue."""
    ours = of_this_submission(earlier, options.run_dir, options.attempt)
    if ours and ours[-1].status.get("state") == "succeeded":
        return "succeeded", 0, f"the training was finished by attempt {ours[-1].name}"
    if (options.run_dir / file_names.STOP).exists():
        return (
            "stopped",
            COMES_BACK_LATER,
            f"the stop file {options.run_dir / file_names.STOP} is there; remove it to continue",
        )
    if not ours:
        return None
    last = ours[-1].status
    follow_up = last.get("next") or {}
    given_up = follow_up.get("action") == "end" and job_of(ours[-1].name) != job_of(options.attempt)
    if given_up and last.get("why"):
        why = f"attempt {ours[-1].name} was the last: {follow_up.get('why') or last['why']}"
        return last.get("state", ""), last.get("exit_code") or COMES_BACK_LATER, why
    return None


def _bound(options: Beginning, earlier: list[Attempt], layout: str) -> tuple[str, int, str] | None:
    """Return state, exit code and the limit of the recipe's `restart` that is reached, or None if none is."""
    ours = of_this_submission(earlier, options.run_dir, options.attempt)
    run = read_run_file(options.run_dir)
    policy = run.get("restart")
    if not ours or policy is None:
        return None
    code = ours[-1].status.get("exit_code") or COMES_BACK_LATER
    step = saved_step(options.run_dir, layout)
    restarts = len([attempt for attempt in ours if not attempt.is_fallback])
    if restarts > policy["times"]:
        return "failed", code, f"already restarted {policy['times']} times (restart.times); resume it when you know why"
    tried = fruitless(ours, layout, step)
    if tried >= policy["fruitless"]:
        return (
            "failed",
            code,
            f"{counted(tried, 'attempt')} in a row got no further than step {step} (restart.fruitless)",
        )
    if ours[-1].status.get("state") == "stopped":
        return None
    reached = bounds_of(ours, run, step, time.time()).reached(policy)
    return ("failed", code, reached) if reached else None


def _record(options: Beginning, layout: str, start: Start) -> AttemptStart:
    return {
        "schema": 1,
        "attempt": options.attempt,
        "layout": "" if layout == FIRST_LAYOUT else layout,
        "fallback": bool(options.layout) and not options.is_restart,
        "cluster": os.environ.get("SLURM_CLUSTER_NAME"),
        "nodes": list(options.nodes),
        "started_at": time.time(),
        "from_step": saved_step(options.run_dir, layout),
        "tracker_step": read_tracker(checkpoint_of(options.run_dir, layout)),
        "checkpoint_changed_ns": start.changed_ns,
        "skipped": [{"step": skipped.step, "why": skipped.why} for skipped in start.skipped],
        "note": start.note,
    }


def _status(attempt: str, state: str, code: int, why: str, layout: str) -> Status:
    return {
        "schema": 1,
        "attempt": attempt,
        "state": state,
        "exit_code": code,
        "nodes": [],
        "ranks": [],
        "ended_at": time.time(),
        "why": why,
        "layout": "" if layout == FIRST_LAYOUT else layout,
        "next": {"action": "end", "why": why},
    }


class JobError(Exception):
    """Why the job cannot train: one sentence for a person."""


def refuse_job(run_directory: Path, run: Run, environment: Mapping[str, str]) -> list[str]:
    """Return warnings. Raises JobError for what would only fail on the nodes."""
    spec = run.get("job")
    if not spec:
        raise JobError(f"{run_directory / file_names.RUN} says nothing of how to run the job")
    failed = failed_setup_lines(environment.get("LLMLAUNCH_SETUP", ""))
    if failed:
        line, code = failed[0]
        raise JobError(
            f"line {line} of job.sbatch, a setup line, failed with exit code {code}: "
            f"{_script_line(run_directory, line)} (a line that may fail ends in `|| true`)"
        )
    for name in spec["secrets"]:
        if not environment.get(name):
            raise JobError(f"{name}: a secret of the recipe; export it where you submit, sbatch carries it along")
    webhook = (run.get("notify") or {}).get("webhook")
    if webhook and not environment.get(webhook):
        return [f"{webhook} is not set, so no notice of this job is posted (notify.webhook)"]
    return []


def allocation_of(run: Run, environment: Mapping[str, str]) -> tuple[tuple[str, ...], list[str]]:
    """Return the nodes of the allocation, and warnings. Raises JobError where they are not as many as planned."""
    planned, devices, nodes = int(run["job"]["allocated"]), int(run["devices_per_node"]), int(run["nodes"])
    if not environment.get("SLURM_JOB_ID"):
        if nodes != 1:
            raise JobError(f"planned for {nodes} nodes; without SLURM it runs on one. Submit it with sbatch")
        return (os.uname().nodename.partition(".")[0],), []
    names = slurm_steps.allocated_nodes(environment)
    if len(names) != planned:
        raise JobError(
            f"planned for {planned} node(s), but this allocation has {len(names)}; render again with nodes={len(names)}"
        )
    cpus = environment.get("SLURM_CPUS_ON_NODE", "")
    if cpus.isdigit() and int(cpus) < devices:
        return tuple(names), [
            f"SLURM gives this job {cpus} CPU core(s) a node for {devices} trainers; ask for more (cpus_per_node in "
            "the cluster profile, or slurm: {cpus-per-gpu: N} or {exclusive: true})"
        ]
    return tuple(names), []


def _script_line(run_directory: Path, number: int) -> str:
    try:
        lines = (run_directory / file_names.JOB_SCRIPT).read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        return ""
    return lines[number - 1] if 0 < number <= len(lines) else ""


def failed_setup_lines(noted: str) -> list[tuple[int, int]]:
    """Return line and exit code of each setup line that failed, as the script's trap notes them: ` LINE:CODE:DEPTH`.
    A command within a file that a line reads (`source`) is deeper than 1; what counts is the line itself."""
    failed = []
    for word in noted.split():
        line, code, depth = (int(number) for number in word.split(":"))
        if depth == 1:
            failed.append((line, code))
    return failed
