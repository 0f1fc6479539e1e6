"""How many steps an attempt, and a run, has made: the one count that `status`, `runs`, `report` and `--follow` show."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

from . import file_names
from .files import LINE_END, read_tail
from .step_lines import StepLines
from .trainer_lines import ANY_SCRIPT

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from .attempt import Attempt


TAIL_BYTES = 2**16  # of a log: some hundred step lines of Megatron-LM
_MOST_LOGS = 10_000


def reached_step(attempt: Attempt) -> int | None:
    """Return the last step that an attempt made, by its progress.json, its status.json and the end of the log that
    reports steps; None before the first one.

    The watchdog writes progress.json every few seconds, so the log of a job that was killed knows more.
    """
    noted = [attempt.progress.get("step"), attempt.status.get("step"), _logged_step(attempt)]
    return max((step for step in noted if step is not None), default=None)


def run_step(attempts: Iterable[Attempt]) -> int | None:
    """Return the step that a run has reached: of the newest attempt that made one. `attempts` are the oldest first."""
    steps = (reached_step(attempt) for attempt in reversed(list(attempts)))
    return next((step for step in steps if step is not None), None)


def ended_before_first_step(attempt: Attempt) -> bool:
    """Return whether an attempt made no step, as far as anybody knows, and did not succeed: the memory that was
    measured is then no peak of a step. A script whose steps nobody can read is taken at its word that it succeeded."""
    return attempt.status.get("state") != "succeeded" and reached_step(attempt) is None


def _logged_step(attempt: Attempt) -> int | None:
    """Megatron-LM's last rank reports steps, DeepSpeed's first. The log of an observed command is its job's, in which
    other commands may report theirs, so that only the observer's own count is taken."""
    if attempt.began.get("log"):
        return None
    lines = StepLines(attempt.run.get("progress", {}).get("step_patterns"), lenient=True)
    lines = lines if lines else StepLines(ANY_SCRIPT)
    for path in _likely_logs(attempt):
        try:
            tail = read_tail(path, TAIL_BYTES)
        except OSError:
            continue
        for line in reversed(LINE_END.split(tail)):
            step = lines.step_of(line)
            if step is not None and step.step is not None:
                return step.step
    return None


def _likely_logs(attempt: Attempt) -> list[Path]:
    nodes = attempt.nodes or nodes_with_logs(attempt)
    likely = dict.fromkeys([*nodes[-1:], *nodes[:1]])
    return [file_names.node_log(attempt.run_directory, attempt.name, node) for node in likely]


def nodes_with_logs(attempt: Attempt) -> list[str]:
    start = attempt.name + "."
    logs = islice((attempt.run_directory / file_names.LOGS).glob("*.log"), _MOST_LOGS)
    names = sorted(path.name[len(start) : -len(".log")] for path in logs if path.name.startswith(start))
    return [name for name in names if name != file_names.BATCH_LOG_NODE and not name.endswith(".monitor")]
