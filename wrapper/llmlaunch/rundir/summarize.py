"""The account of one attempt from all files that say what it used (docs/run-directory.md, "summary.json")."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from .attempt_files import counted_files, read_attempt
from .files import MOST_BYTES, open_regular, read_object
from .rank_peaks import rank_account
from .summary import AttemptSummary, NodeSummary, summary_of_json
from .traces import rank_traces
from .values import byte_count, number

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from .monitor_samples import NodePeaks

__all__ = ["SUMMARY", "attempt_summary", "node_summary", "still_whole", "summarize", "whole_summary"]

SUMMARY = "summary.json"  # of an attempt's folder


def attempt_summary(run_directory: Path, attempt: str, spools: Sequence[Path] = ()) -> AttemptSummary:
    """The summary that the job wrote, where it is still whole and no spool has more, else a new one."""
    written = None if spools else whole_summary(run_directory, attempt)
    return written or summarize(run_directory, attempt, spools)


def whole_summary(run_directory: Path, attempt: str) -> AttemptSummary | None:
    """The summary that the job wrote; None where it did not, or where there is more to know by now."""
    record = read_object(run_directory / "attempts" / attempt / SUMMARY)
    written = None if record is None else summary_of_json(record)
    if written is None or written.attempt != attempt or not still_whole(written, run_directory):
        return None
    return written


def still_whole(summary: AttemptSummary, run_directory: Path) -> bool:
    """Whether every file that says what the attempt used is as long as it was, and none was added. A monitor's file
    holds all attempts of its node: what was appended of others is nothing new."""
    now = dict(counted_files(run_directory, summary.attempt))
    if now.keys() != summary.files.keys():
        return False
    changed = [name for name, size in now.items() if size != summary.files[name]]
    return all(_is_of_others(run_directory / name, summary.files[name], summary.attempt) for name in changed)


def _is_of_others(path: Path, length: int, attempt: str) -> bool:
    """Whether what a monitor's file has gained beyond `length` never names `attempt`."""
    if path.suffix != ".jsonl":
        return False
    try:
        with open_regular(path) as file:
            file.seek(length)
            added = file.read(MOST_BYTES + 1) or b""
    except OSError:
        return False
    return 0 < len(added) <= MOST_BYTES and json.dumps(attempt).encode() not in added


def summarize(run_directory: Path, attempt: str, spools: Sequence[Path] = ()) -> AttemptSummary:
    """`spools` are folders laid out as the run directory is, with what a node could not write there. Never raises for
    what the files hold; those that cannot be read are in `damaged`."""
    files = read_attempt(run_directory, attempt, spools)
    resident = files.described.get("peak_kind") == "resident"
    step, seconds = byte_count(files.progress.get("step")), number(files.progress.get("step_seconds"))
    before = byte_count(files.began.get("from_step")) or 0
    return AttemptSummary(
        attempt=attempt,
        ranks=tuple(rank_account(traces, resident) for traces in rank_traces(files)),
        nodes=tuple(node_summary(node) for _, node in sorted(files.nodes.items())),
        step=step,
        steps_run=None if step is None else max(step - before, 0),
        step_seconds=seconds,
        tokens_per_second=number(files.progress.get("tokens_per_second")),
        files=files.sizes,
        damaged=files.damaged,
    )


def node_summary(node: NodePeaks) -> NodeSummary:
    """Of main memory the lesser of two numbers that both count more than the job's own: the node's has the system's and
    neighbours', the cgroup's the file cache. A cgroup with less than one rank held is not the job's."""
    used, cgroup = node.host_used_peak_bytes, node.cgroup_peak_bytes
    if cgroup is not None and cgroup < max(node.resident_peak_bytes.values(), default=0):
        cgroup = None
    known = [(used, "MemTotal - MemAvailable"), (cgroup, "cgroup")]
    host, source = min(((peak, name) for peak, name in known if peak is not None), default=(None, None))
    return NodeSummary(
        node=node.node,
        ended=node.ended,
        gpus=len(node.gpus),
        host_peak_bytes=host,
        host_peak_source=source,
        host_total_bytes=node.host_total_bytes,
        cgroup_peak_bytes=node.cgroup_peak_bytes,
        cgroup_limit_bytes=node.cgroup_limit_bytes,
        remarks=tuple(sorted(node.remarks, key=lambda remark: (node.remarks[remark], remark))),
    )
