"""What ended the trainers of this node, where they failed, goes into `attempts/<attempt>/causes/<node>.json`.

It looks at the node's log, the ranks' own ends, the kernel's counters and its log, and at what the monitor saw. The
job's fate is not its own: what it has not found out within SECONDS it leaves out.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..causes.cause import (
    cause,
    cause_from_log,
    cause_from_ranks,
    is_vague,
    likelier,
    was_killed,
)
from ..causes.log_scan import read_log, scan, with_last_message
from ..rundir import file_names
from ..rundir.file_names import attempt_folder
from ..rundir.files import replace_json
from ..rundir.foreign_values import is_whole_number
from ..rundir.monitor_samples import add_lines
from ..rundir.rank_records import node_rank_records
from ..rundir.values import counted
from .files import say
from .host_memory import memory_counters
from .own_process import answer_within

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ..causes.log_scan import Hit
    from ..rundir.attempt_files import Cause, RankRecord
    from ..rundir.monitor_samples import GpuPeaks, NodePeaks

SECONDS = 30
_KILLS = ("killed", "host_oom")  # what a log calls a process that was killed
MOST_RECORDS = 200_000


def write_cause(run_dir: Path, attempt: str, node: str, code: int, before: Mapping[str, Any] | None) -> None:
    """Write down what ended the trainers of this node, and say it on stderr. `before` has the kernel's counters from
    before the training (`memory_counters`, and `at`, when they were read). Raises nothing."""
    try:
        record = cause_on_node_within(run_dir, attempt, node, code, before)
        replace_json(attempt_folder(run_dir, attempt) / file_names.CAUSES / f"{node}.json", record)
        say(f"{node}: {record['kind']}: {record['line']}")
    except Exception as error:
        say(f"diagnose: {type(error).__name__}: {error}; the cause remains unknown")


def write_why(run_dir: Path, attempt: str, node: str, why: str) -> None:
    """Write down why this node started no trainer. Raises nothing."""
    with contextlib.suppress(OSError):
        path = attempt_folder(run_dir, attempt) / file_names.CAUSES / f"{node}.json"
        replace_json(path, cause("crash", node, why, "job", at=time.time()))


def cause_on_node_within(
    run_dir: Path, attempt: str, node: str, code: int, before: Mapping[str, Any] | None, text: str | None = None
) -> Cause:
    """Return the same as `cause_on_node`; how the ranks ended, where that fails or takes longer than SECONDS. Raises
    nothing, and says on stderr why it is not more."""
    answer = answer_within(SECONDS, lambda _: cause_on_node(run_dir, attempt, node, code, before, text))
    if not answer.problem:
        return answer.value  # type: ignore[no-any-return]
    say(f"diagnose: {answer.problem}; no more is known of {node} than how its ranks ended")
    unknown = cause("crash", node, f"the trainers of {node} ended with exit code {code}", "ranks")
    try:
        return cause_from_ranks(node, node_rank_records(attempt_folder(run_dir, attempt), node)) or unknown
    except Exception:  # records of an odd form
        return unknown


def cause_on_node(
    run_dir: Path, attempt: str, node: str, code: int, before: Mapping[str, Any] | None, text: str | None = None
) -> Cause:
    """The cause for this node, `crash` with its exit code where nothing better is known.

    A fault of the device goes first, whoever saw it; then the first telling line of the log; then the kernel's count
    of kills for want of memory, where a process was killed: `before` has the counters from before the training. `text`
    is the log where it is not the node's own file.
    """
    directory = attempt_folder(run_dir, attempt)
    before = before or {}
    since = float(before.get("at") or time.time() - 3600)
    ranks = node_rank_records(directory, node)
    text = text if text is not None else read_log(run_dir / file_names.LOGS / f"{attempt}.{node}.log")
    hits = scan(text)
    gpus = _monitored_gpus(run_dir / file_names.PEAKS / f"{node}.jsonl", attempt, node)
    logged = cause_from_log(hits, node, ranks)
    if logged is not None and logged["sick"]:
        return logged
    lost = [gpu for gpu in gpus if gpu.lost_code is not None]
    if lost:
        return _lost_gpu(min(lost, key=lambda gpu: gpu.lost_at or 0.0), node)
    kernel = _hits_on_our_gpus(scan("\n".join(kernel_lines(since))), gpus)
    if kernel:
        return cause(kernel[0].kind, node, kernel[0].line, "kernel", numbers=dict(kernel[0].numbers), sick=True)
    if logged is not None and not is_vague(logged):
        return _with_shared_memory_size(logged) if logged["kind"] == "shm_full" else logged
    killed = _killed_by_the_kernel(node, ranks, hits, before)
    if killed is not None:
        return killed
    if _full(run_dir):
        return cause("disk_full", node, f"no space left in {run_dir}", "disk")
    best = with_last_message(likelier(logged, cause_from_ranks(node, ranks)), text)
    return best or cause("crash", node, f"the trainers of {node} ended with exit code {code}", "ranks")


def _killed_by_the_kernel(
    node: str, ranks: Sequence[RankRecord], hits: Sequence[Hit], before: Mapping[str, Any]
) -> Cause | None:
    """`host_oom` where a process was killed while the kernel's count of such kills rose."""
    now = memory_counters()
    rose = (now["oom_kills"] or 0) - (before.get("oom_kills") or 0)
    if now["oom_kills"] is None or before.get("oom_kills") is None or rose <= 0:
        return None
    if not was_killed(ranks) and not any(hit.kind in _KILLS for hit in hits):
        return None
    victim = next((rank for rank in ranks if rank.get("signal") == "SIGKILL" or rank.get("ended_at") is None), None)
    numbers = {"oom_kills": rose, **{key: now[key] for key in ("limit_bytes", "peak_bytes") if now[key] is not None}}
    line = f"the kernel killed {counted(rose, 'process')} of this job for want of main memory"
    rank, at = (None, None) if victim is None else (victim["rank"], victim.get("ended_at"))
    return cause("host_oom", node, line, "kernel", rank=rank, numbers=numbers, at=at)


def _with_shared_memory_size(record: Cause) -> Cause:
    """The cause with `shm_bytes`, the size of /dev/shm as this process sees it, in the container if any."""
    try:
        status = os.statvfs("/dev/shm")
    except OSError:
        return record
    return {**record, "numbers": {**record["numbers"], "shm_bytes": status.f_blocks * status.f_frsize}}


def _lost_gpu(gpu: GpuPeaks, node: str) -> Cause:
    line = f"GPU {gpu.index} ({gpu.uuid}) was lost: NVML code {gpu.lost_code}"
    return cause("gpu_lost", node, line, "monitor", sick=True, at=gpu.lost_at)


def _hits_on_our_gpus(hits: Sequence[Hit], gpus: Sequence[GpuPeaks]) -> list[Hit]:
    """Faults of GPUs the monitor saw (all, where it saw none): a shared node's kernel tells of its neighbours, too."""
    ours = {gpu.pci.lower()[-12:-2] for gpu in gpus}
    faults = [hit for hit in hits if "xid" in hit.numbers]
    return [hit for hit in faults if not ours or any(pci in hit.line.lower() for pci in ours)]


def _monitored_gpus(path: Path, attempt: str, node: str) -> list[GpuPeaks]:
    """Return the GPUs of this attempt in the monitor's lines, of its file's first MiB and last four."""
    nodes: dict[str, NodePeaks] = {}
    add_lines(nodes, read_log(path).encode().splitlines(), attempt, node)
    return list(nodes[node].gpus.values()) if node in nodes else []


def _full(run_dir: Path) -> bool:
    try:
        status = os.statvfs(run_dir)
    except OSError:
        return False
    return status.f_blocks > 0 and status.f_bavail * status.f_frsize < 64 * 1024


def kernel_lines(since: float, path: str = "/dev/kmsg") -> list[str]:
    """Lines of the kernel's log from `since` (unix seconds) on; none where it may not be read (kernel.dmesg_restrict).

    Never waits: the descriptor does not block, and a reader that falls behind (EPIPE) goes on with the next record.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return []
    booted = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    lines = []
    try:
        for _ in range(MOST_RECORDS):
            try:
                record = os.read(descriptor, 8192)
            except BrokenPipeError:
                continue
            if not record:
                break
            line = _line(record, since - booted)
            if line is not None:
                lines.append(line)
    except OSError:
        pass  # EAGAIN: all of it was read
    finally:
        os.close(descriptor)
    return lines


def _line(record: bytes, since_boot: float) -> str | None:
    """`6,1234,98765432,-;text`: priority, number, microseconds since boot (Documentation/ABI/testing/dev-kmsg)."""
    head, _, text = record.decode("utf-8", errors="replace").partition(";")
    fields = head.split(",")
    if len(fields) < 3 or not is_whole_number(fields[2]) or int(fields[2]) / 1e6 < since_boot:
        return None
    return text.split("\n", 1)[0]
