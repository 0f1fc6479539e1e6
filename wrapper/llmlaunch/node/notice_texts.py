"""What notices say: whole sentences for somebody who sees nothing else of the job."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..rundir.values import counted, to_type

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from ..rundir.attempt_files import AttemptStart, Hang, Progress, Status
    from ..rundir.slow_devices import SlowDevice
    from .restart_policy import Next

MOST_NODES, MOST_DEVICES = 4, 4  # names in a sentence

_FOLLOWS = {
    "restart": "It starts again in its allocation",
    "requeue": "The job goes back into the queue",
    "chain": "The next job of the chain goes on",
    "fallback": "The next layout goes on in the same allocation",
    "again": "It is tried again in the same allocation",
    "rollback": "It goes on from an older checkpoint in the same allocation",
}

_TO_TYPE = {"succeeded": "report", "stopped": "resume"}


def start_text(began: AttemptStart, steps: object, earlier: Status | None) -> str:
    """Return that an attempt begins, on which nodes and after which step. `earlier` is the status of the attempt
    before it, empty where that left none, and None for the first one."""
    nodes = began["nodes"]
    names = ", ".join(nodes[:MOST_NODES]) + (", ..." if len(nodes) > MOST_NODES else "")
    where = f"{counted(len(nodes), 'node')} ({names})"
    text = f"training starts on {where}" if earlier is None else f"training starts again on {where}"
    text += f" after step {_number(began['from_step'])}{_of(steps)}." if began["from_step"] else "."
    if began["note"]:
        text += f" {began['note']}."
    if earlier is not None and not earlier:
        text += (
            " The attempt before it left no word of its end: the node of its batch script was lost, or SLURM ended it."
        )
    return text


def first_step_text(progress: Progress) -> str:
    """Return the first step that was logged, with its loss and pace."""
    parts = [f"first step: {_number(progress['step'])}{_of(progress['steps'])}"]
    if progress["loss"] is not None:
        parts.append(f"loss {progress['loss']:.6g}")
    if progress["step_seconds"] is not None:
        parts.append(f"{progress['step_seconds']:.3g} s a step")
    return ", ".join(parts) + "."


def stall_text(hung: Hang, progress: Progress) -> str:
    """Return what was waited for when the watchdog ended the training, and where the ranks stood."""
    where = f" {hung['where'][0].upper()}{hung['where'][1:]}." if hung.get("where") else ""
    return (
        f"training hangs after step {_number(progress['step'])}{_of(progress['steps'])}: no sign of {hung['what']} for "
        f"{hung['since_seconds']:.0f} s (limit {hung['allowed_seconds']:.0f} s). It is ended.{where}"
    )


def slow_text(devices: Sequence[SlowDevice]) -> str:
    """Return which GPUs are slower than their peers, and by what that shows."""
    more = f"; and {len(devices) - MOST_DEVICES} more" if len(devices) > MOST_DEVICES else ""
    return f"slow: {'; '.join(device.sentence() for device in devices[:MOST_DEVICES])}{more}."


def end_text(
    run_directory: Path, status: Status, progress: Progress, follows: Next, goodput: float | None = None
) -> str:
    """Return how an attempt ended, how far the training came, with which goodput, what follows, and what to type."""
    text = f"{status['state']}: {status['why']}."
    if progress.get("step") is not None:
        share = "" if goodput is None else f", goodput {100 * goodput:.0f} %"
        text += f" Step {_number(progress['step'])}{_of(progress.get('steps'))}{share}."
    if follows.action == "end":
        text += "" if follows.why in (status["why"], "done") else f" Nothing follows: {follows.why}."
        return f"{text} Type: {to_type(_TO_TYPE.get(status['state'], 'status'), str(run_directory))}"
    wait = f", in {follows.seconds} s at the earliest" if follows.seconds else ""
    newest = status.get("saved_step") if follows.action != "rollback" else None
    after = f" after step {_number(newest)}" if newest else ""
    return (
        f"{text} {_FOLLOWS[follows.action]}{after}{wait} ({follows.why}). Type: {to_type('status', str(run_directory))}"
    )


def _number(step: object) -> str:
    return f"{step:,}" if isinstance(step, int) else "?"


def _of(steps: object) -> str:
    return f" of {steps:,}" if isinstance(steps, int) else ""
