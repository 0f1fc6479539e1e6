"""What comes after an attempt: the end, another layout, or the same training again from its last checkpoint. It depends
on what earlier attempts of the run did."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ..causes.cause_kind import AT_ONCE, IF_TRAINED, LATER, LATER_IF_STEPPED, NEVER
from ..causes.kinds import kind_of
from ..causes.suspects import ENOUGH_SIGNS, signs_against
from ..rundir import file_names
from ..rundir.files import read_object
from ..rundir.run_file import LossPolicy
from ..rundir.schema import sound
from ..rundir.submission_files import SubmissionFile
from ..rundir.values import counted, is_fallback, is_for_fewer_nodes, job_of
from .checkpoint import is_load_failure
from .restart_bounds import Bounds

if TYPE_CHECKING:
    from pathlib import Path

    from ..rundir.attempt import Attempt
    from ..rundir.attempt_files import NextStep
    from ..rundir.run_file import FallbackLayout, RestartPolicy, RunFile, SmallerLayout


FIRST_LAYOUT = "."
WITHIN_JOB = "job"  # restart.within: the same allocation first, then the queue
PREEMPTED = "preempted"
"""Preemption with grace time: SLURM tells the steps to end, and the batch script nothing (seen in 22.05.8). A step that
ends in time ends the job, and SLURM does not put it back."""

_MOST_BACKOFF_SECONDS = 3600.0
_MOST_IDLE_SECONDS = 600.0  # the nodes are paid for while they wait
_MOST_TRIES = 3


class BadLossFacts(NamedTuple):
    """The facts that decide what follows a bad loss."""

    since_step: int
    at_once: bool  # no step was good after the checkpoint of `from_step`
    from_step: int
    older_step: int | None  # step of the checkpoint to go back to; None if there is none
    rollbacks: int  # of this submission so far


class Facts(NamedTuple):
    """All facts on which the decision depends."""

    state: str  # succeeded, failed or stopped
    kind: str  # kind of the cause; empty if unknown
    stop_signal: str  # USR1 (time limit, stop file), TERM (SLURM or a person), PREEMPTED, or empty
    stop_file: bool
    made_a_step: bool  # in this attempt
    trained_before: bool  # an earlier attempt of this run made a step
    layout: str
    saved_step: int
    restarts: int  # automatic restarts of this submission so far
    fruitless: int  # attempts in a row, this one included, that got no further than saved_step
    run: RunFile
    bad_loss: BadLossFacts | None = None  # set if a bad loss ended it
    tries: int = 1  # attempts in this job, this one included, that ended for a cause that is retried at once
    bounds: Bounds = Bounds()  # what this attempt and earlier ones of this submission have used up
    nodes: tuple[str, ...] = ()  # nodes of this allocation on which it may train again; none if too few are left
    held_nodes: int = 0  # number of nodes in this allocation, without lost ones


class Next(NamedTuple):
    """What comes next. `action` is end, fallback, requeue or chain, or in the same allocation: again, which is not a
    restart because nothing began; rollback, from an older checkpoint; restart, on `nodes`."""

    action: str
    why: str
    layout: str = ""
    seconds: int = 0
    nodes: tuple[str, ...] = ()

    def as_json(self) -> NextStep:
        action, why, layout, seconds, nodes = self
        return {"action": action, "why": why, "layout": layout, "seconds": seconds, "nodes": list(nodes)}


def decide(facts: Facts) -> Next:
    """Apply the first rule that holds: done, asked to end, out of memory, and then the rules of restart."""
    if facts.state == "succeeded":
        return Next("end", "done")
    if facts.stop_file:
        return Next("end", "stopped by the stop file")
    if facts.stop_signal == "TERM":
        return Next("end", "cancelled by SLURM or a person; not restarted")
    if facts.bad_loss is not None and not facts.stop_signal:
        following = _after_bad_loss(facts, facts.bad_loss)
        if following is not None:
            return following
    if facts.kind == "oom" and not facts.stop_signal and not is_for_fewer_nodes(facts.layout):
        return _after_oom(facts)
    kind = kind_of({"kind": facts.kind})
    if kind.retry == AT_ONCE and not facts.stop_signal and not facts.made_a_step and facts.tries < _MOST_TRIES:
        return Next("again", kind.words, layout=facts.layout)
    return _restart(facts)


def _after_bad_loss(facts: Facts, bad: BadLossFacts) -> Next | None:
    """Return what the recipe's on_bad_loss asks for, or None if a bad loss is only reported and the trainers ended by
    themselves."""
    policy = facts.run.get("on_bad_loss") or LossPolicy()
    if bad.at_once:
        return Next("end", f"the first loss after the checkpoint of step {bad.from_step} was bad again")
    if policy.get("action") == "stop":
        return Next("end", f"the loss was bad from step {bad.since_step} on (on_bad_loss: stop)")
    if policy.get("action") != "rollback":
        return None
    if bad.older_step is None:
        return Next(
            "end", f"the loss was bad from step {bad.since_step} on, and there is no whole checkpoint before it"
        )
    if bad.rollbacks >= policy.get("times", 0):
        return Next("end", f"already rolled back {counted(bad.rollbacks, 'time')} (on_bad_loss.times)")
    why = f"the loss was bad from step {bad.since_step} on"
    return Next("rollback", f"{why}; back to the checkpoint of step {bad.older_step}", layout=facts.layout)


def _after_oom(facts: Facts) -> Next:
    fallbacks = facts.run.get("fallbacks") or []
    if not fallbacks:
        return Next(
            "end", "this layout would run out of memory again; on_oom: fallback tries layouts with more headroom"
        )
    names = [fallback["layout"] for fallback in fallbacks]
    left = fallbacks[names.index(facts.layout) + 1 :] if facts.layout in names else fallbacks
    if not left:
        return Next("end", "out of memory with the last fallback layout, too")
    if not facts.saved_step:
        return Next("fallback", "out of memory", layout=left[0]["layout"])
    return _after_checkpoint(facts, left)


def _after_checkpoint(facts: Facts, left: list[FallbackLayout]) -> Next:
    """Choose the first remaining layout that can load the checkpoint. If none can, do what the recipe asks for."""
    after, step = facts.run.get("after_checkpoint"), facts.saved_step
    if after == "stop":
        return Next("end", f"there is a checkpoint of step {step} (on_oom.after_checkpoint: stop)")
    mine = facts.layout if facts.layout.startswith("fallback/") else ""
    able = [fallback["layout"] for fallback in left if mine in fallback.get("loads", [])]
    if able:
        return Next("fallback", f"out of memory; it can load the checkpoint of step {step}", layout=able[0])
    names = " and ".join(fallback["layout"] for fallback in left)
    if after == "restart":
        why = f"out of memory; {names} cannot load the checkpoint of step {step}, and save in another folder"
        return Next("fallback", why, layout=left[0]["layout"])
    lost = f"{names} cannot load the checkpoint of step {step}"
    return Next("end", f"{lost}; on_oom.after_checkpoint: restart would begin again at step 0")


def _restart(facts: Facts) -> Next:
    policy = facts.run.get("restart")
    if policy is None:
        return Next("end", "the recipe asks for no restart")
    kind = kind_of({"kind": facts.kind})
    is_certain = kind.retry == NEVER or (kind.retry == LATER_IF_STEPPED and not facts.made_a_step)
    if is_certain and not (facts.kind == "oom" and is_for_fewer_nodes(facts.layout)):
        return Next("end", f"a restart would end in {facts.kind} again")
    not_loaded = kind.damages_checkpoint and not facts.made_a_step and not is_for_fewer_nodes(facts.layout)
    if not_loaded and stops_at_bad_checkpoint(policy):
        return Next(
            "end", f"the checkpoint of step {facts.saved_step} could not be loaded (restart.bad_checkpoint: stop)"
        )
    # A run that has trained once has arguments, data and memory that work; a later failure may be due to the node.
    certain = kind.retry == IF_TRAINED or (not_loaded and not facts.saved_step)
    if certain and not facts.made_a_step and not facts.trained_before and not facts.stop_signal:
        return Next("end", "it failed before its first step and would fail again")
    if facts.restarts >= policy["times"]:
        return Next("end", f"already restarted {counted(facts.restarts, 'time')} (restart.times)")
    if facts.fruitless >= policy["fruitless"]:
        tried = "1 attempt" if facts.fruitless == 1 else f"{facts.fruitless} attempts in a row"
        return Next("end", f"{tried} got no further than step {facts.saved_step} (restart.fruitless)")
    reached = "" if facts.stop_signal else facts.bounds.reached(policy)
    if reached:
        return Next("end", reached)
    if not_loaded:
        why = "continues from the checkpoint before the one that could not be loaded"
    else:
        why = "saved; continues later" if facts.state == "stopped" else "continues from the last checkpoint"
    backoff_seconds = _backoff_seconds(facts, policy["backoff_seconds"])
    if _layout_failed(facts):
        why = f"{facts.layout} made no step, or ran out of memory; {why} with all nodes"
    elif facts.nodes and not facts.stop_signal:
        at_once = facts.fruitless <= 1 and kind.retry not in (LATER, LATER_IF_STEPPED)
        seconds = 0 if at_once else min(backoff_seconds, round(_MOST_IDLE_SECONDS))
        layout = layout_on(facts.run, facts.layout, len(facts.nodes))
        why = "continues without the slow nodes" if facts.state == "stopped" else why
        cost = cost_of_fewer_nodes(facts.run, len(facts.nodes), facts.saved_step, facts.held_nodes)
        why = f"{why}, {cost}" if cost else why
        return Next("restart", why, layout=layout, seconds=seconds, nodes=facts.nodes)
    if policy.get("by") == "chain":
        return Next("chain", why)
    return Next("requeue", why, seconds=backoff_seconds)


def _layout_failed(facts: Facts) -> bool:
    """Whether the layout for fewer nodes itself seems to have failed. The queue gives all nodes again, and the planned
    layout has trained."""
    if not is_for_fewer_nodes(facts.layout) or facts.stop_signal:
        return False
    return facts.kind == "oom" or (not facts.made_a_step and facts.kind != "node_fail")


def _backoff_seconds(facts: Facts, first: float) -> int:
    """Return 0 after a time limit, otherwise seconds that double with each consecutive attempt without progress."""
    if facts.stop_signal:
        return 0
    doubled = first * 2.0 ** max(0, facts.fruitless - 1)
    return round(min(doubled, max(first, _MOST_BACKOFF_SECONDS)))


def stops_at_bad_checkpoint(policy: RestartPolicy | None) -> bool:
    """Whether the recipe's `restart` asks to end the training at a checkpoint that cannot be loaded."""
    return policy is not None and policy.get("bad_checkpoint") == "stop"


def may_restart_here(run: RunFile) -> bool:
    """Whether the recipe asks to restart a failed attempt in the same allocation first."""
    policy = run.get("restart")
    return policy is not None and policy.get("within") == WITHIN_JOB


def layout_of(attempt: Attempt) -> str:
    """Return the folder of the layout that an attempt ran, in the form that the commands of node.pyz use."""
    return attempt.layout or FIRST_LAYOUT


def of_this_submission(attempts: list[Attempt], run_directory: Path, attempt: str) -> list[Attempt]:
    """Return the attempts of the same job or chain of jobs as `attempt`. When a person resumes a run, counting starts
    anew."""
    job = job_of(attempt)
    submission = sound(SubmissionFile, read_object(run_directory / file_names.SUBMISSION)) or SubmissionFile()
    jobs = {submission.get("job_id", ""), *submission.get("chain", [])}
    if job not in jobs:  # submitted with sbatch by hand
        jobs = {job}
    return [earlier for earlier in attempts if job_of(earlier.name) in jobs]


def made_a_step(attempt: Attempt) -> bool:
    """Whether the attempt's trainers have logged a step or it started after one, even if the attempt was killed."""
    steps = (attempt.from_step or None, attempt.status.get("step"), attempt.progress.get("step"))
    return any(step is not None for step in steps)


def fruitless(attempts: list[Attempt], layout: str, step: int) -> int:
    """Return how many of the latest attempts in a row got no further than `step` with `layout`.

    If no checkpoint is known at all, an attempt that made steps and ended in order counts as progress. An attempt that
    could not load its checkpoint does not count, since the next one continues from an older checkpoint. Nor does an
    attempt that was ended by a node with enough signs against it to be excluded.
    """
    count = 0
    tried = [item for item in attempts if not item.was_retried and not item.was_rolled_back]
    for attempt in reversed([item for item in tried if counts_as_try(item, item.status.get("cause"))]):
        orderly = step == 0 and attempt.status.get("state") == "stopped" and attempt.status.get("step") is not None
        if layout_of(attempt) != layout or attempt.from_step < step or orderly:
            break
        count += 1
    return count


def counts_as_try(attempt: Attempt, cause: object) -> bool:
    """Whether an attempt that ended for this cause says anything about the next attempt's chances."""
    signs = signs_against(cause if isinstance(cause, dict) else None)
    next_is_without_it = made_a_step(attempt) and max(signs.values(), default=0) >= ENOUGH_SIGNS
    return not next_is_without_it and not is_load_failure(attempt, cause)


_DAY_SECONDS, _HOUR_SECONDS = 86_400.0, 3600.0


def node_counts(run: RunFile, layout: str) -> list[int]:
    """Return on how many nodes a job that has run `layout` may go on, the most first; empty where it is always as many.

    A fallback layout has none for fewer nodes: its job needs more memory than predicted.
    """
    full, fewer = run.get("nodes"), [*_layouts(run)]
    return [] if not full or not fewer or is_fallback(layout) else sorted({full, *fewer}, reverse=True)


def layout_on(run: RunFile, layout: str, nodes: int) -> str:
    """Return the layout that goes on on so many nodes after `layout`."""
    if nodes in _layouts(run):
        return _layouts(run)[nodes]["layout"]
    return "." if is_for_fewer_nodes(layout) else layout


def cost_of_fewer_nodes(run: RunFile, nodes: int, saved_step: int, held_nodes: int) -> str:
    """Return in words what it costs to go on on so many nodes of those that the job still holds, `held_nodes`; empty
    where they are as many as planned."""
    reduced = _layouts(run).get(nodes)
    if reduced is None:
        return ""
    described = run["fewer_nodes"]
    step_seconds, planned = reduced.get("step_seconds"), described.get("step_seconds")
    full = run.get("nodes") or nodes
    text = f"on {nodes} of {counted(full, 'node')} (nodes.at_least)"
    if held_nodes > nodes:
        text += f", {held_nodes - nodes} more idle"
    if step_seconds is None or planned is None:
        return text
    text += f"; a step takes {step_seconds:,.3g} s in place of {planned:,.3g}"
    steps = run.get("progress", {}).get("steps")
    if steps is None or steps <= saved_step:
        return text
    left = steps - saved_step
    text += f", {_time(left * step_seconds)} to go in place of {_time(left * planned)}"
    price = described.get("usd_per_node_hour")
    if price is None:
        return text
    dollars = price * left / _HOUR_SECONDS
    return f"{text}, ${dollars * step_seconds * held_nodes:,.0f} in place of ${dollars * planned * full:,.0f}"


def _layouts(run: RunFile) -> dict[int, SmallerLayout]:
    """The layouts of run.json for fewer nodes, by their number."""
    layouts = run.get("fewer_nodes", {}).get("layouts", [])
    return {
        nodes: layout
        for layout in layouts
        if (nodes := layout.get("nodes", 0)) and layout.get("layout") == f"nodes/{nodes}"
    }


def _time(seconds: float) -> str:
    if seconds >= 2 * _DAY_SECONDS:
        return f"{seconds / _DAY_SECONDS:.1f} days"
    return f"{seconds / _HOUR_SECONDS:.1f} h" if seconds >= _HOUR_SECONDS else f"{seconds / 60.0:.0f} min"
