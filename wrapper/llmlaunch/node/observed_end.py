"""How an observed command ended: what each observer writes about its own command, and the verdict over all of them."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from ..causes.attempt_cause import slurm_end
from ..causes.cause import advice_to, is_vague, sentence
from ..causes.cause import cause as cause_record
from ..causes.log_scan import read_log
from ..rundir import file_names
from ..rundir.attempt import Attempt, rank_records
from ..rundir.file_names import attempt_folder
from ..rundir.files import create, read_object, replace_json
from ..rundir.memory_files import attempt_summary
from ..rundir.node_files import ObservedEnd
from ..rundir.reached_steps import reached_step
from ..rundir.schema import sound
from ..rundir.values import counted, printable, to_type
from .attempt_diagnosis import cause_within
from .diagnose import cause_on_node_within
from .files import COMES_BACK_LATER, say, write_status
from .signals import signal_name, signal_number

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from ..rundir.attempt_files import Cause, NodeEnd, RankRecord, Status
    from ..rundir.summary import AttemptSummary
    from .files import Record
    from .observed_job import ObservedJob


def end_of(message: Record) -> ObservedEnd:
    """Return the exit code or signal, and the time. If nobody saw the end, return only the time at which the command
    was gone."""
    status = message.get("status")
    end: ObservedEnd = {"ended_at": message.get("ended_at"), "exit_code": None, "signal": None}
    if status is None:
        return end
    if os.WIFSIGNALED(status):
        end["signal"] = signal_name(os.WTERMSIG(status))
    else:
        end["exit_code"] = os.WEXITSTATUS(status)
    return {**end, "resident_peak_bytes": message.get("resident_peak_bytes")}


def write_end(run_directory: Path, attempt: str, job: ObservedJob, record: ObservedEnd) -> bool:
    """Write what is known about an observer's command. Once the command has ended, also write the cause, and the
    verdict if no other command is still running. Return whether a verdict was written. Raises OSError."""
    folder = attempt_folder(run_directory, attempt)
    own: ObservedEnd = {"schema": 1, "node": job.node, "process": job.process, "observers": job.observers, **record}
    replace_json(folder / file_names.OBSERVERS / f"{job.node}.{job.process}.json", own)
    if record.get("ended_at") is None:
        return False
    if _failed(own):
        _write_cause(run_directory, attempt, own)
    status = verdict(run_directory, attempt, time.time())
    if status is not None:
        write_status(run_directory, status)
    return status is not None


def verdict(run_directory: Path, attempt: str, now: float) -> Status | None:
    """Return the status of an attempt, or None while one of its commands may still run and none has failed."""
    folder = attempt_folder(run_directory, attempt)
    paths = sorted((folder / file_names.OBSERVERS).glob("[!.]*.json"))
    every = [record for path in paths if (record := sound(ObservedEnd, read_object(path))) is not None]
    ended = [record for record in every if record.get("ended_at") is not None]
    failures = sorted(filter(_failed, ended), key=lambda record: record.get("ended_at") or 0.0)
    expected = max((record.get("observers") or 1 for record in every), default=1)
    if not failures and len(ended) < expected:
        return None
    files = Attempt(run_directory, attempt)
    ranks = rank_records(folder)
    first = failures[0] if failures else ended[0]
    cause = _cause(files, ranks, first) if failures else None
    nodes: list[NodeEnd] = [{"node": record.get("node"), "done": not _failed(record)} for record in ended]
    state, code, why = _judged(files, ranks, first, cause, bool(failures))
    return {
        "schema": 1, "attempt": attempt, "state": state, "exit_code": code, "nodes": nodes, "ranks": ranks,
        "ended_at": now, "why": why, "layout": "", "cause": cause, "step": files.progress.get("step"),
        "next": {"action": "end", "why": "an observed command is started again by nobody but its own script"},
    }  # fmt: skip


def _judged(
    files: Attempt, ranks: Sequence[RankRecord], first: ObservedEnd, cause: Cause | None, failed: bool
) -> tuple[str, int, str]:
    """Return state, exit code and reason."""
    step, steps = files.progress.get("step"), files.progress.get("steps")
    told = first.get("stop_signal")
    if failed:
        of_signal = None if first.get("signal") is None else 128 + signal_number(str(first["signal"]))
        code = of_signal or first.get("exit_code") or 1
        line = f"the command on {first.get('node')} {_end_words(first)}"
        return "failed", code, line if cause is None else f"{line}; {sentence(cause)}"
    if told and step is not None and steps is not None and step < steps:
        return "stopped", COMES_BACK_LATER, f"told to stop ({told}) and ended in order after step {step} of {steps}"
    return "succeeded", 0, counted(len(ranks), "rank")


def _failed(record: ObservedEnd) -> bool:
    return record.get("signal") is not None or record.get("exit_code") not in (None, 0)


def _end_words(record: ObservedEnd) -> str:
    signal = record.get("signal")
    return f"exited with {record.get('exit_code')}" if signal is None else f"was ended by {signal}"


def _write_cause(run_directory: Path, attempt: str, record: ObservedEnd) -> None:
    """Write what ended the ranks of this node, unless another command on the node has already written it."""
    path = attempt_folder(run_directory, attempt) / file_names.CAUSES / f"{record['node']}.json"
    if path.exists():
        return
    try:
        code = record.get("exit_code") or 1
        text = log_text(Attempt(run_directory, attempt))
        before = record.get("memory_before")
        cause = cause_on_node_within(run_directory, attempt, str(record.get("node")), code, before, text)
        replace_json(path, _on_its_node(cause, rank_records(attempt_folder(run_directory, attempt))))
    except Exception as error:
        say(f"observe: {type(error).__name__}: {error}; the cause remains unknown")


def _cause(files: Attempt, ranks: Sequence[RankRecord], first: ObservedEnd) -> Cause | None:
    """Return the cause that the nodes found. If that says no more than how the command ended, return SLURM's message in
    the job's log, or who asked the command to stop."""
    cause = cause_within(files, ranks, first.get("exit_code") or 1)
    if cause is not None and not is_vague(cause):
        return _on_its_node(cause, ranks)
    end = slurm_end(log_text(files))
    if end is not None:
        return cause_record(end[0], None, end[1], "slurm")
    if first.get("stop_signal") and (cause is None or cause["consequence"] or cause["source"] == "ranks"):
        return cause_record("cancelled", None, f"told to stop ({first['stop_signal']})", "job")
    return cause


def _on_its_node(cause: Cause, ranks: Sequence[RankRecord]) -> Cause:
    """Return the cause with the node of its rank. The tasks of a step share one log, so a rank that it names is on the
    node that the rank itself has named."""
    node = next((rank.get("node") for rank in ranks if rank.get("rank") == cause.get("rank")), None)
    return {**cause, "node": node} if cause.get("rank") is not None and node is not None else cause


def log_text(files: Attempt) -> str:
    """Return the attempt's part of the job's own log; empty if the log is unknown."""
    path = files.began.get("log")
    return read_log(Path(path), begin=files.began.get("log_offset", 0)) if path else ""


GIB = 2**30
LONGEST_LINE = 500
_CLAIM = ".reported"  # hidden: records of observers are not


def claims_report(run_directory: Path, attempt: str) -> bool:
    """Return whether this observer is the one that reports the attempt: the first that asks, of those of a job. Raises
    OSError."""
    return create(attempt_folder(run_directory, attempt) / file_names.OBSERVERS / _CLAIM, "")


def report_lines(run_directory: Path, attempt: str) -> list[str]:
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
