"""The end of an attempt: whether every trainer succeeded, and if not, which failed first and how; and what comes next.

The summary of the attempt comes last, so that readers of the store need not open the files of every node. By then the
verdict has been written and printed. If the summary fails or takes too long, nothing changes: `collect` makes the same
summary from the same files.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ..causes.attempt_cause import ended_for_loss
from ..causes.cause import cause as cause_record
from ..causes.cause import ended_badly, failed, rank_end, sentence
from ..causes.kinds import kind_of
from ..causes.suspects import nodes_to_leave_out, signs_against
from ..rundir import file_names
from ..rundir.attempt import STAYS, Attempt, rank_records
from ..rundir.file_names import SUMMARY, attempt_folder
from ..rundir.files import replace_json
from ..rundir.goodput import goodput_of
from ..rundir.memory_files import summarize
from ..rundir.run import begun_attempts
from ..rundir.run_file import read_run_file
from ..rundir.slow_devices import slow_devices
from ..rundir.values import counted, job_of
from .allocation import left_out, next_nodes, node_failure
from .attempt_diagnosis import cause_within
from .checkpoint import checkpoint_of, read_tracker, saved_step
from .files import COMES_BACK_LATER, say, write_status
from .notices import end_text, notify, wait_for_deliveries
from .prune import prune
from .restart_bounds import bounds_of
from .restart_policy import (
    FIRST_LAYOUT,
    PREEMPTED,
    BadLossFacts,
    Facts,
    Next,
    counts_as_try,
    decide,
    fruitless,
    layout_of,
    made_a_step,
    may_restart_here,
    node_counts,
    of_this_submission,
)
from .rollback import bad_loss_of, checkpoint_before, rolls_back
from .signals import signal_number

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from ..rundir.attempt_files import Cause, NodeEnd, Progress, RankRecord, Status

POLL_SECONDS = 0.5
ENDED_FROM_OUTSIDE = (128 + signal.SIGINT, 128 + signal.SIGTERM)  # as a shell reports them
PATIENCE_SECONDS = 30.0  # the allocation is paid for, and a file system may hang
PATIENCE_NODE_SECONDS = 1000.0  # wait for the summary, summed over all nodes: 0.5 s with 2,000 nodes


class Verdict(NamedTuple):
    """How the attempt ended, before the next step is decided."""

    state: str  # succeeded, failed or stopped
    exit_code: int
    why: str
    cause: Cause | None  # None if it did not fail, or if nothing is known
    stop_signal: str  # what asked the trainers to stop: USR1, TERM, PREEMPTED, or empty


class Ending(NamedTuple):
    """An attempt whose step has ended.

    `code` is the exit code of the step, `done` are nodes that reported a good end, and `lost` are nodes that are gone.
    `pool` are the nodes that the allocation still has, in SLURM's order; it is empty if the job may not train on in its
    allocation.
    """

    run_dir: Path
    attempt: str
    nodes: int
    code: int
    stop_signal: str = ""  # what asked it to stop: USR1, TERM, PREEMPTED, or empty
    done: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()
    pool: tuple[str, ...] = ()
    marker_seconds: float = 60.0  # wait for markers that a file system shows late


class Finished(NamedTuple):
    """The exit code of the job, what comes next, and the nodes to exclude when the job starts again."""

    exit_code: int
    follows: Next
    at_fault: tuple[str, ...] = ()


def finish(ending: Ending) -> Finished:
    """Judge the attempt: write `status.json` and one line to stderr, and finally `summary.json`."""
    directory = attempt_folder(ending.run_dir, ending.attempt)
    done = _done_markers(directory, ending)
    ranks = rank_records(directory)
    nodes = _nodes(done, ranks, ending.nodes)
    progress = Attempt(ending.run_dir, ending.attempt).progress
    verdict = _verdict(ending, ranks, nodes, progress)
    at_fault = _at_fault(ending.run_dir, ending.attempt, verdict.cause)
    facts = gather(ending.run_dir, ending.attempt, verdict, progress)
    unfit: list[str] = []
    if _may_train_on(ending):
        unfit = left_out(ending.run_dir, ending.attempt, [*ending.lost, *at_fault, *progress.get("replaced", [])])
        facts = facts._replace(nodes=_next_nodes(ending, facts, verdict, unfit), held_nodes=len(ending.pool))
    follows = _decided(facts)
    status: Status = {
        "schema": 1,
        "attempt": ending.attempt,
        "state": verdict.state,
        "exit_code": verdict.exit_code,
        "nodes": nodes,
        "ranks": ranks,
        "ended_at": time.time(),
        "why": verdict.why,
        "layout": "" if facts.layout == FIRST_LAYOUT else facts.layout,
        "cause": verdict.cause,
        "step": progress.get("step"),
        "saved_step": facts.saved_step,
        "tracker_step": read_tracker(checkpoint_of(ending.run_dir, facts.layout)),
        "slow": [device.as_json() for device in slow_devices(progress)],
        "restarts": facts.restarts,
        "fruitless": facts.fruitless,
        "left_out": unfit,
        "next": follows.as_json(),
    }
    write_status(ending.run_dir, status)
    _notify(ending, status, progress, follows)
    _say_what_comes(ending, verdict, facts, follows)
    _write_the_rest(ending, verdict, facts, follows)
    return Finished(verdict.exit_code, follows, tuple(at_fault))


def _say_what_comes(ending: Ending, verdict: Verdict, facts: Facts, follows: Next) -> None:
    say(f"attempt {ending.attempt} {verdict.state}: {verdict.why}")
    if verdict.state != "succeeded" and (facts.run.get("restart") or facts.run.get("fallbacks")):
        where = " ".join(follows.nodes) or follows.layout
        say(f"next: {follows.action} {where}".rstrip() + f" ({follows.why})")


def _write_the_rest(ending: Ending, verdict: Verdict, facts: Facts, follows: Next) -> None:
    """Write what may take long, and whose absence changes nothing."""
    write_summary(ending.run_dir, ending.attempt, min(PATIENCE_SECONDS, PATIENCE_NODE_SECONDS / ending.nodes))
    if verdict.state == "succeeded":  # the next attempt prunes after any other end
        in_time(lambda: prune(ending.run_dir, ending.attempt, facts.layout), PATIENCE_SECONDS)
    if follows.action not in STAYS:
        wait_for_deliveries()


def _may_train_on(ending: Ending) -> bool:
    """Whether the job may continue to train in its allocation. It may not if the preflight found too few good nodes."""
    if not ending.pool or not may_restart_here(read_run_file(ending.run_dir)):
        return False
    tried = Attempt(ending.run_dir, ending.attempt).began.get("preflight")
    return tried is None or bool(tried.get("nodes"))


def _next_nodes(ending: Ending, facts: Facts, verdict: Verdict, unfit: Sequence[str]) -> tuple[str, ...]:
    trained = Attempt(ending.run_dir, ending.attempt).nodes
    counts = node_counts(facts.run, facts.layout)
    return next_nodes(ending.pool, trained, unfit, signs_against(verdict.cause), counts)


def _notify(ending: Ending, status: Status, progress: Progress, follows: Next) -> None:
    """Send the notice of the end, or of the restart after it. Without SLURM, nothing puts a job back into a queue."""
    if follows.action not in ("end", *STAYS) and not os.environ.get("SLURM_JOB_ID"):
        follows = Next("end", "without SLURM no job starts again by itself")
    event = "end" if follows.action == "end" else "restart"
    try:
        goodput = goodput_of(begun_attempts(ending.run_dir)).share
        text = end_text(ending.run_dir, status, progress, follows, goodput)
    except Exception as error:  # a notice must not prevent the verdict
        say(f"notice not written: {type(error).__name__}: {error}")
        return
    notify(ending.run_dir, ending.attempt, event, text)


def _verdict(ending: Ending, ranks: Sequence[RankRecord], nodes: list[NodeEnd], progress: Progress) -> Verdict:
    code, why = judge(ending.code, ranks, nodes)
    stop_signal = ending.stop_signal
    replaced = progress.get("replaced", [])
    ended_by_us = progress.get("hung") or progress.get("behind") or ended_for_loss(progress) or replaced
    if stop_signal == PREEMPTED and ended_by_us:
        stop_signal = ""
    if code == 0 and stop_signal and not _is_complete(progress):
        return Verdict("stopped", COMES_BACK_LATER, _stopped(stop_signal, progress), None, stop_signal)
    if code == 0 and replaced and not _is_complete(progress):
        why = f"saved{_after(progress)}, so that spare nodes take the place of {', '.join(replaced)}: too slow"
        return Verdict("stopped", COMES_BACK_LATER, why, None, "")
    if code == 0:
        return Verdict("succeeded", 0, why, None, stop_signal)
    node_lost = node_failure(ending.lost) if ending.lost else None
    cause = cause_within(Attempt(ending.run_dir, ending.attempt), ranks, code, node_lost)
    if stop_signal and _ended_by_order(cause):
        if progress.get("step") is None:  # it had nothing to save
            why = f"{_order(stop_signal)} before any step was logged"
            return Verdict("stopped", COMES_BACK_LATER, why, None, stop_signal)
        if stop_signal == "TERM":
            cause = cause_record("cancelled", None, f"{_order(stop_signal)}, and it ended without saving", "job")
    if cause is not None and cause["source"] != "ranks":  # which `why` already states
        why = f"{why}; {sentence(cause)}"
    if stop_signal == PREEMPTED and cause and not cause["consequence"] and not kind_of(cause).planned:
        stop_signal = ""  # one failed by itself, and `srun --kill-on-bad-exit` ended the others
    return Verdict("failed", code, why, cause, stop_signal)


def gather(run_directory: Path, attempt: str, verdict: Verdict, progress: Progress) -> Facts:
    # an attempt is judged again if its step lingered: its first verdict is not that of an earlier attempt
    every = begun_attempts(run_directory)
    for item in every:
        if item.name == attempt:
            item.forget_verdict()
    ours = of_this_submission(every, run_directory, attempt)
    layout = next((layout_of(item) for item in ours if item.name == attempt), FIRST_LAYOUT)
    step = saved_step(run_directory, layout)
    run = read_run_file(run_directory)
    counting = [item for item in ours if item.name != attempt or counts_as_try(item, verdict.cause)]
    return Facts(
        state=verdict.state,
        kind="" if verdict.cause is None else verdict.cause["kind"],
        stop_signal=verdict.stop_signal,
        stop_file=(run_directory / file_names.STOP).exists(),
        made_a_step=progress.get("step") is not None,
        trained_before=any(made_a_step(earlier) for earlier in every if earlier.name != attempt),
        layout=layout,
        saved_step=step,
        restarts=max(0, len([item for item in ours if not item.is_fallback]) - 1),
        fruitless=fruitless(counting, layout, step),
        run=run,
        bad_loss=_bad_loss_facts(run_directory, ours, attempt, layout, verdict.cause, progress),
        tries=1 + len([item for item in ours if job_of(item.name) == job_of(attempt) and item.was_retried]),
        bounds=bounds_of(ours, run, step, time.time(), {"state": verdict.state, "cause": verdict.cause}),
    )


def _bad_loss_facts(
    run_directory: Path, ours: list[Attempt], attempt: str, layout: str, cause: Cause | None, progress: Progress
) -> BadLossFacts | None:
    from_step = next((item.from_step for item in ours if item.name == attempt), 0)
    bad = bad_loss_of(cause, progress, from_step)
    if bad is None:
        return None
    run = read_run_file(run_directory)
    checkpoint = checkpoint_of(run_directory, layout) if rolls_back(run) else None
    return BadLossFacts(
        since_step=bad.since_step,
        at_once=bad.at_once,
        from_step=from_step,
        older_step=checkpoint_before(checkpoint, bad, ours),
        rollbacks=len([item for item in ours if item.was_rollback]),
    )


def _decided(facts: Facts) -> Next:
    """Return what comes next; it is the end if a damaged file prevents the decision. The verdict is written in both
    cases."""
    try:
        return decide(facts)
    except Exception as error:
        return Next(
            "end", f"a damaged file does not let it be decided what comes next: {type(error).__name__}: {error}"
        )


def _is_complete(progress: Progress) -> bool:
    step, steps = progress.get("step"), progress.get("steps")
    return step is not None and steps is not None and step >= steps


def _stopped(stop_signal: str, progress: Progress) -> str:
    return f"{_order(stop_signal)} and ended in order{_after(progress)}"


def _after(progress: Progress) -> str:
    step, steps = progress.get("step"), progress.get("steps")
    return "" if step is None else f" after step {step}" + ("" if steps is None else f" of {steps}")


def _order(stop_signal: str) -> str:
    return "preempted" if stop_signal == PREEMPTED else f"told to stop (SIG{stop_signal})"


def _ended_by_order(cause: Cause | None) -> bool:
    """Whether nothing is known except that the trainers were ended from outside, as the end of a job does."""
    if cause is None or cause["consequence"]:
        return True
    return cause["source"] == "ranks" and cause["numbers"].get("exit_code") in ENDED_FROM_OUTSIDE


def _at_fault(run_directory: Path, attempt: str, reason: Cause | None) -> list[str]:
    """Return the nodes to exclude when the job starts again, judged by the signs in all attempts of the run."""
    earlier = [item.status.get("cause") for item in begun_attempts(run_directory) if item.name != attempt]
    return nodes_to_leave_out([*earlier, reason])


def judge(launcher_code: int, ranks: Sequence[RankRecord], nodes: list[NodeEnd]) -> tuple[int, str]:
    """Return the exit code of the job and the reason in words.

    The code is 0 only if the launcher returned 0, every node left its done marker, and no rank failed. A rank whose
    record has no end has not failed for that reason alone: a full disk may have prevented the record.
    """
    # ranks that torchrun ended with SIGTERM after another failure come last
    failures = sorted(
        filter(failed, ranks), key=lambda rank: (not ended_badly(rank), rank.get("ended_at") or float("inf"))
    )
    missing = [node["node"] for node in nodes if not node["done"]]
    if launcher_code == 0 and not failures and not missing:
        return 0, f"{counted(len(nodes), 'node')}, {counted(len(ranks), 'rank')}"
    if failures:
        first = failures[0]
        others = f" (first of {len(failures)} failed ranks)" if len(failures) > 1 else ""
        why = f"rank {first['rank']} on node {first.get('node')} {rank_end(first)}{others}"
        signal_name, exit_code = first.get("signal"), first.get("exit_code")
        own_code = exit_code if signal_name is None else 128 + signal_number(signal_name)
        return launcher_code or own_code or 1, why
    if missing:
        names = [node for node in missing if node is not None]
        parts = [f"node {node} left no done marker" for node in names]
        if len(names) < len(missing):
            parts.append(f"{counted(len(missing) - len(names), 'node')} left no trace")
        why = "; ".join(parts)
        return launcher_code or 1, f"the launcher returned {launcher_code}; {why}" if launcher_code else why
    return launcher_code, f"the launcher returned {launcher_code}, though every trainer ended with 0"


def _done_markers(directory: Path, ending: Ending) -> list[str]:
    """Return the names of the nodes that are done: those that reported it, and those whose marker exists.

    If the step ended well but some markers are missing, look again for `marker_seconds`, because an NFS client may show
    an old listing for as long as `acdirmax`, 60 s (nfs(5)).
    """
    patience = ending.marker_seconds if ending.code == 0 and ending.nodes > 1 else 0.0
    give_up_at = time.monotonic() + patience
    while True:
        try:
            markers = {path.name for path in (directory / file_names.DONE).iterdir()}
        except OSError:
            markers = set()
        done = sorted({*markers, *ending.done})
        if len(done) >= ending.nodes or time.monotonic() >= give_up_at:
            return done
        time.sleep(POLL_SECONDS)


def _nodes(done: list[str], ranks: Sequence[RankRecord], count: int) -> list[NodeEnd]:
    """Return every node by name, and `null` for each that left neither a marker nor a rank record."""
    names = sorted({*done, *(node for rank in ranks if (node := rank.get("node")))})
    nodes: list[NodeEnd] = [{"node": name, "done": name in done} for name in names]
    return nodes + [{"node": None, "done": False} for _ in range(count - len(names))]


def write_summary(run_directory: Path, attempt: str, patience_seconds: float = PATIENCE_SECONDS) -> None:
    """Write `summary.json` of the attempt, or say in one line why there is none. The caller must leave by `os._exit`,
    so that nothing waits for a thread that still hangs in the file system."""
    if not in_time(lambda: _write(run_directory, attempt), patience_seconds):
        say(f"{SUMMARY} was not ready in {patience_seconds:g} s; collect will read the nodes' own files")


def in_time(work: Callable[[], None], patience_seconds: float) -> bool:
    """Do `work` in a thread. Return False if it did not end in time; a thread that hangs in a file system cannot be
    ended."""
    worker = threading.Thread(target=work, daemon=True)
    worker.start()
    worker.join(patience_seconds)
    return not worker.is_alive()


def _write(run_directory: Path, attempt: str) -> None:
    try:
        summary = summarize(run_directory, attempt)
        replace_json(attempt_folder(run_directory, attempt) / SUMMARY, summary.as_json())
    except Exception as error:
        say(f"{SUMMARY} not written: {type(error).__name__}: {error}; collect will read the nodes' own files")
