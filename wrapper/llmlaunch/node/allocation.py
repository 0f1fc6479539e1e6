"""The allocation in which a training that failed may start again: which of its nodes are lost or at fault, and on which
of the others it trains next.

SLURM takes `SlurmdTimeout` (300 s by default) to notice that a node is gone, so a node that did not report how its
trainers ended is asked here whether it still starts a task.
"""

from __future__ import annotations

import os
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from ..causes.cause import cause
from ..rundir.attempt_files import Status
from ..rundir.run import begun_attempts
from ..rundir.values import host_names, is_host, job_of
from .restart_policy import of_this_submission
from .slurm_steps import step_environment

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence
    from pathlib import Path

    from ..rundir.attempt import Attempt
    from ..rundir.attempt_files import Cause
    from ..rundir.slow_devices import SlowDevice

ANSWER_SECONDS = 12.0  # a node that is well answers within a second, or a few under load
ALL_ANSWERS_SECONDS = 60.0
ASKED_AT_ONCE = 32
# One task that shares whatever the job's other steps have: a step that still waits for the lost node holds the others'
# memory and devices, too (seen in 22.05).
ASK = ("srun", "--overlap", "--mem=0", "--gres=none", "--nodes=1", "--ntasks=1", "--input=none", "--quiet")


def nodes_without_answer(silent: Sequence[str], others: Sequence[str]) -> list[str]:
    """Return those of the `silent` nodes that start no task any more. None where no other one does either, silent or
    not: then it is not the nodes. (All are silent where one of them was lost before its step was launched.)"""
    give_up_at = time.monotonic() + ALL_ANSWERS_SECONDS
    with ThreadPoolExecutor(ASKED_AT_ONCE) as pool:
        answers = list(pool.map(lambda node: _answers(node, give_up_at), silent))
    lost = [node for node, answer in zip(silent, answers) if answer is False]
    if not lost or True in answers:
        return lost
    return lost if others and _answers(others[0], time.monotonic() + ANSWER_SECONDS) else []


def _answers(node: str, give_up_at: float) -> bool | None:
    """Whether the node starts a task; None where there is no time left to ask, or no srun."""
    seconds = min(ANSWER_SECONDS, give_up_at - time.monotonic())
    if seconds <= 0.0:
        return None
    try:
        done = subprocess.run(
            [*ASK, f"--nodelist={node}", "true"],
            env=step_environment(os.environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return False
    except OSError:
        return None
    return done.returncode == 0


def node_failure(lost: Sequence[str]) -> Cause:
    """Return the cause of an attempt whose nodes were `lost`."""
    names, starts = ", ".join(lost), "starts" if len(lost) == 1 else "start"
    line = f"{names} did not report how the training ended, and no longer {starts} tasks"
    return cause("node_fail", lost[0], line, "finish", sick=True, nodes=list(lost))


def left_out(run_directory: Path, attempt: str, bad: Iterable[str]) -> list[str]:
    """Return the nodes that the job is not to train on again while it keeps its allocation: those that are `bad`, those
    that a preflight found faulty, and those that the attempts before left out. After a requeue all that SLURM gives may
    be trained on, as the preflight chooses; else each failure from then on would be a requeue, too."""
    nodes: set[str] = set()
    for item in begun_attempts(run_directory):
        if job_of(item.name) != job_of(attempt):
            continue
        nodes |= {*item.began.get("preflight", {}).get("bad", {}), *(item.verdict or Status()).get("left_out", [])}
        if item.name != attempt and not item.stays:
            nodes.clear()
    return sorted(node for node in {*nodes, *bad} if is_host(node))


def replaceable_nodes(attempt: Attempt, slow: Iterable[SlowDevice]) -> list[str]:
    """Return the nodes of the devices that are `slow`. Empty where the recipe does not want them replaced, the
    allocation has too few spare nodes for all of them (the rest would hold the training up as before), or `attempt`
    was the last restart that the recipe allows."""
    policy = attempt.run.get("restart")
    if policy is None or policy.get("slow_nodes") != "replace":
        return []
    ours = of_this_submission(begun_attempts(attempt.run_directory), attempt.run_directory, attempt.name)
    restarts = len([item for item in ours if not item.is_fallback]) - 1
    allocated = host_names(os.environ.get("SLURM_JOB_NODELIST", ""))
    spare = {*allocated}.difference(attempt.nodes, left_out(attempt.run_directory, attempt.name, ()))
    nodes = sorted({device.node for device in slow})
    return nodes if len(nodes) <= len(spare) and restarts < policy["times"] else []


def next_nodes(
    allocated: Sequence[str],
    trained: Collection[str],
    unfit: Collection[str],
    suspected: Collection[str] = (),
    counts: Sequence[int] = (),
) -> tuple[str, ...]:
    """Return nodes for the next attempt, in the order of `allocated`: those that have `trained`, and spare ones in the
    place of those that are `unfit` or, as far as there are any, `suspected`. They are as many as the first of `counts`
    for which there are enough, without `counts` as many as have trained; empty where too few are left."""
    fit = [node for node in allocated if node not in unfit]
    count = next((count for count in counts or (len(trained),) if count <= len(fit)), 0)
    preferred = sorted(fit, key=lambda node: (node in suspected, node not in trained))
    chosen = {*preferred[:count]} if trained else set()
    return tuple(node for node in fit if node in chosen)
