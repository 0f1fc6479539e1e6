"""What happens to a run, in words: its causes, its attempts, its steps."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from llmlaunch.causes.cause import advice_to, sentence
from llmlaunch.report.slurm_words import pending_advice
from llmlaunch.report.text import one_line
from llmlaunch.rundir.slow_devices import slow_devices
from llmlaunch.rundir.values import is_for_fewer_nodes
from llmlaunch.units import duration

_MOST_SLOW = 3
_SIGNALS = {"USR1": "its time is nearly up", "TERM": "it is being preempted or cancelled"}


def cause_text(cause: Mapping[str, Any]) -> str:
    """Return a cause on one printable line: `out of GPU memory (rank 3 on node2): CUDA out of memory. Tried ...`."""
    return one_line(sentence(cause)).strip()


def advice_text(cause: Mapping[str, Any], *, submitted: bool) -> str:
    """Return what a person can do about a cause, on one printable line, as every screen shows it; "" where nothing is
    known. `submitted` is False for a run that `llmlaunch resume` cannot submit: the text does not propose it then."""
    return one_line(advice_to(cause, submitted=submitted)).strip()


def attempt_began(
    number: int, name: str, nodes: Sequence[str], layout: str, from_step: object, note: object = ""
) -> str:
    """Return the line about an attempt's beginning. `note` (attempt.json) says what is unusual about its checkpoint."""
    where = f" on {_few(nodes)}" if nodes else ""
    what = f", layout {layout}" if layout else ""
    since = f", from step {from_step:,}" if isinstance(from_step, int) and from_step > 0 else ""
    unusual = f"; {one_line(note).strip()}" if isinstance(note, str) and note else ""
    return f"Attempt {number} ({name}) begins{where}{what}{since}{unusual}"


def attempt_stopping(number: int, signal: str) -> str:
    name = signal.removeprefix("SIG")
    because = f" ({name}: {_SIGNALS[name]})" if name in _SIGNALS else f" ({name})" if name else ""
    return f"Attempt {number} got the signal to save and stop{because}"


def attempt_hangs(number: int, hung: Mapping[str, Any]) -> str:
    since, allowed, what = hung.get("since_seconds"), hung.get("allowed_seconds"), hung.get("what")
    waited = f" for {duration(since)}" if isinstance(since, int | float) else ""
    limit = f"; the limit for {what} is {duration(allowed)}" if isinstance(allowed, int | float) else ""
    return f"Attempt {number} hangs: no new step{waited}{limit}. Its stacks are being collected, then it is ended"


def attempt_loss(number: int, progress: Mapping[str, Any]) -> str:
    """Return what became of the loss of an attempt that runs, or "" while it was never bad."""
    text = bad_loss_text(progress)
    return f"Attempt {number}: loss {text}" if text else ""


def attempt_ended(number: int, status: Mapping[str, Any]) -> str:
    """Return how an attempt that is not the last ended, and what comes next."""
    cause = status.get("cause")
    state = {"stopped": "saved and stopped", "succeeded": "is done"}.get(str(status.get("state")), "failed")
    at = f" at step {status['step']:,}" if isinstance(status.get("step"), int) else ""
    why = cause_text(cause) if isinstance(cause, Mapping) else one_line(str(status.get("why") or ""))
    following = status.get("next") if isinstance(status.get("next"), Mapping) else {}
    return f"Attempt {number} {state}{at}" + (f": {why}" if why else "") + _next_step(following or {})


def _next_step(following: Mapping[str, Any]) -> str:
    action, seconds = following.get("action"), following.get("seconds")
    soon = f" in {duration(seconds)}" if isinstance(seconds, int | float) and seconds else ""
    then = {
        "again": "the same again in the same allocation, on another port",
        "restart": f"{_restarted(following.get('layout'))} in the same allocation{soon}",
        "rollback": "from an older checkpoint, in the same allocation",
        "fallback": f"layout {following.get('layout')} in the same allocation",
        "requeue": f"back into the queue{soon}",
        "chain": f"the follow-up job{soon}",
    }.get(str(action), "")
    why = one_line(str(following.get("why") or ""))
    return (f"\n  next: {then}" + (f" ({why})" if why else "")) if then else ""


def _restarted(layout: object) -> str:
    return f"layout {layout}" if is_for_fewer_nodes(layout) else "the same"


def not_finite_text(progress: Mapping[str, Any]) -> str:
    """Return `NaN since step 120` from an attempt's progress.json, or "" while the loss is finite."""
    record = progress.get("not_finite")
    if not isinstance(record, dict) or record.get("loss") not in ("nan", "inf", "-inf"):
        return ""
    since = record.get("since_step")
    return loss_text(float(record["loss"]), since if type(since) is int else None)


def bad_loss_text(progress: Mapping[str, Any]) -> str:
    """Return `NaN since step 120` or `spike since step 120 (4.1, was 2.3), over at step 131` from an attempt's
    progress.json, or "" where its loss was never bad."""
    record = progress.get("bad_loss")
    if not isinstance(record, dict):
        return ""
    since, recovered, loss, usual = (record.get(key) for key in ("since_step", "recovered_step", "loss", "usual"))
    step = f" since step {since:,}" if type(since) is int else ""
    over = f", over at step {recovered:,}" if type(recovered) is int else ""
    if record.get("kind") != "spike":
        return f"{'NaN' if loss == 'nan' else 'infinite'}{step}{over}"
    numbers = [f"{value:.4g}" for value in (loss, usual) if type(value) in (int, float)]
    return f"spike{step}" + (f" ({', was '.join(numbers)})" if numbers else "") + over


def slow_texts(record: Mapping[str, Any]) -> list[str]:
    """Return a sentence for each of the first slow devices in a progress.json or status.json, and how many more there
    are."""
    devices = slow_devices(record)
    more = [f"{len(devices) - _MOST_SLOW} more are slow"] if len(devices) > _MOST_SLOW else []
    return [device.sentence() for device in devices[:_MOST_SLOW]] + more


def loss_text(loss: float, since_step: int | None) -> str:
    if math.isfinite(loss):
        return f"{loss:.4f}"
    since = "" if since_step is None else f" since step {since_step:,}"
    return f"{'NaN' if math.isnan(loss) else 'infinite'}{since}"


def waiting_text(reason: str, expected: datetime | None, now: datetime) -> str:
    advice = pending_advice(reason)
    because = f": {reason}" + (f" ({advice})" if advice else "") if reason else ""
    if expected is None or expected <= now:
        return f"is waiting{because}"
    wait = duration((expected - now).total_seconds())
    return f"is waiting{because}; SLURM expects it to start at {expected:%Y-%m-%d %H:%M}, in {wait}"


def _few(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 4 else f"{names[0]}, {names[1]} ... {names[-1]} ({len(names)} nodes)"
