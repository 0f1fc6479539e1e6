"""What `observe` says at the end of a command: what was measured, how it ended, what to do, and what to type next."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..causes.cause import sentence
from ..causes.shown_advice import advice_to
from ..rundir import file_names
from ..rundir.attempt import Attempt
from ..rundir.file_names import attempt_folder
from ..rundir.files import create
from ..rundir.memory_files import attempt_summary
from ..rundir.reached_steps import reached_step
from ..rundir.values import counted, printable, to_type

if TYPE_CHECKING:
    from pathlib import Path

    from ..rundir.summary import AttemptSummary


GIB = 2**30
LONGEST_LINE = 500
_CLAIM = ".reported"  # hidden: records of observers are not


def claims_report(run_directory: Path, attempt: str) -> bool:
    """Return whether this observer is the one that reports the attempt: the first that asks, of those of a job. Raises
    OSError."""
    return create(attempt_folder(run_directory, attempt) / file_names.OBSERVERS / _CLAIM, "")


def report_lines(run_directory: Path, attempt: str) -> list[str]:
    """Return the lines of the report of an attempt that has its verdict."""
    files = Attempt(run_directory, attempt)
    status, summary = files.status, attempt_summary(run_directory, attempt)
    cause = status.get("cause")
    lines = [f"observe: the command {_end(status.get('state'), status.get('why'), cause)}"]
    if isinstance(cause, dict):
        lines += [f"observe: {line}" for line in [advice_to(cause, submitted=False)] if line]
    lines.append(f"observe: {_steps(files)}; {_memory(summary, files.run.get('peak_kind'))}")
    lines.append(f"observe: next: {to_type('report', run_directory)}")
    return [printable(line).replace("\n", " ")[:LONGEST_LINE] for line in lines]


def _end(state: object, why: object, cause: object) -> str:
    words = {"succeeded": "succeeded", "stopped": "was told to stop"}.get(str(state), "failed")
    if words == "succeeded":
        return words
    because = sentence(cause) if isinstance(cause, dict) else str(why or "")
    return words + (f": {because}" if because else "")


def _steps(files: Attempt) -> str:
    step, steps = reached_step(files), files.progress.get("steps")
    if step is None:
        return "no step was seen in its output"
    return f"step {step}" + (f" of {steps}" if isinstance(steps, int) else "")


def _memory(summary: AttemptSummary, kind: object) -> str:
    """What was measured, as `collect` takes it: the peaks of ranks, and the main memory of nodes."""
    peaks = [(rank.peak_bytes, rank) for rank in summary.ranks if rank.peak_bytes is not None]
    parts = []
    if peaks:
        most, rank = max(peaks, key=lambda peak: (peak[0], -peak[1].rank))
        least = "at least " if "peak_bytes" in (rank.at_least or ()) else ""
        what = "resident memory" if kind == "resident" else "device memory"
        whose = f"rank {rank.rank} on {rank.node}"
        parts.append(f"peak of {counted(len(peaks), 'rank')}: {least}{_gib(most)} of {what} ({whose})")
    else:
        parts.append("no peak of a rank was measured")
    hosts = [(node.host_peak_bytes, node.node) for node in summary.nodes if node.host_peak_bytes is not None]
    if hosts:
        most, name = max(hosts)
        parts.append(f"main memory of {name}: {_gib(most)}")
    return "; ".join(parts)


def _gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB"
