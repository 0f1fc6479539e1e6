"""What the monitors saw of one attempt, by node, read from `peaks/<node>.jsonl` (docs/run-directory.md).

Monitors die, hang and run out of disk space, so every line stands by itself: unreadable lines are counted and left out,
and a missing `end` costs only the last seconds. Peaks are cumulative, but the largest over all lines is used, because a
monitor that was restarted counts from zero. The order of lines therefore does not matter, nor do repeated lines, and no
line lowers a peak.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from .files import parse_json
from .node_files import GpuSample, HostSample, PrintedSample, ProcessSample
from .schema import sound, sound_list
from .values import byte_count, bytes_within, number, objects_in, time_or_none, whole_number

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping


N = TypeVar("N", int, float)
SLOW_FIELDS = (  # that most lines of a long run repeat
    *("name", "mig", "total_bytes", "reserved_bytes", "baseline_bytes", "device_peak_bytes"),
    *("process_peak_bytes", "accounting_peak_bytes"),
)
BEAT, KEPT_BEATS = b'"event":"beat"', 16  # as the monitor writes the key
PACE = b'"event":"pace"'  # nothing about memory: only the watchdog reads it
ATTEMPT_IN_LINE = re.compile(rb'"attempt"\s*:\s*"([^"\\]*)"')


@dataclass
class GpuPeaks:
    """One GPU or MIG slice over one attempt (`mig` is the UUID of the slice's GPU). Peaks by process have the process
    id as text for their key, as in the file. `baseline_bytes` is the smallest value with which any monitor started."""

    uuid: str
    pci: str
    index: int
    name: str | None = None
    mig: str | None = None
    total_bytes: int | None = None
    reserved_bytes: int | None = None
    baseline_bytes: int | None = None
    device_peak_bytes: int | None = None
    process_peak_bytes: dict[str, int] = field(default_factory=dict)
    accounting_peak_bytes: dict[str, int] = field(default_factory=dict)
    utilization_percent: float | None = None
    power_watts: float | None = None
    power_peak_watts: float | None = None
    used_bytes: int | None = None  # by the last line
    lost_code: int | None = None  # NVML's, once the GPU is lost
    lost_at: float | None = None  # unix seconds
    mean_weight: tuple[float, ...] = ()  # decides from which line the two means are taken
    last_entry: list[Any] = field(default_factory=list)  # SLOW_FIELDS of the line before


@dataclass
class PrintedPeaks:
    """What the framework printed about one rank: the largest value of each since its last reset."""

    source: str
    allocated_peak_bytes: int | None = None
    reserved_peak_bytes: int | None = None
    device_bytes: int | None = None


@dataclass
class NodePeaks:
    """One node over one attempt. `remarks` maps what the monitor could not see to the time (unix seconds) of its first
    report. `ended` is false if the monitor was lost. Times are those of the newest line, and of the newest line with
    GPUs."""

    attempt: str
    node: str
    gpus: dict[str, GpuPeaks] = field(default_factory=dict)
    resident_peak_bytes: dict[int, int] = field(default_factory=dict)  # by global rank
    rank_pids: dict[int, set[str]] = field(default_factory=dict)
    logged: dict[int, PrintedPeaks] = field(default_factory=dict)  # by global rank
    host_used_peak_bytes: int | None = None
    host_total_bytes: int | None = None
    cgroup_peak_bytes: int | None = None
    cgroup_limit_bytes: int | None = None
    remarks: dict[str, float] = field(default_factory=dict)
    ended: bool = False
    stalled_at_end: bool = False  # NVML did not answer any more when the monitor ended
    resident_bytes: dict[int, int | None] = field(default_factory=dict)  # by global rank, by the last line
    written_at: float = 0.0
    sampled_at: float = 0.0
    stalled: bool = False  # NVML hangs in the driver
    no_nvml: str = ""  # why no GPU is seen


def countable_gpus(node: NodePeaks) -> list[GpuPeaks]:
    """Return the GPUs of a node in PCI order, with MIG slices in place of the GPUs that they divide."""
    cut = {gpu.mig for gpu in node.gpus.values()}
    return sorted((gpu for gpu in node.gpus.values() if gpu.uuid not in cut), key=lambda gpu: (gpu.pci, gpu.index))


def add_lines(
    nodes: dict[str, NodePeaks], lines: Iterable[bytes], attempt: str, file_node: str, thin: bool = False
) -> int:
    """Add the lines of `attempt` in a monitor's file to what is known about `nodes`, by name. `file_node` is used for a
    line that names no node. Return the number of lines that could not be read, without those that name another attempt.
    With `thin`, beats of a long file are skipped if a later one says the same and more."""
    damaged, name = 0, attempt.encode()
    lines = (raw for raw in lines if PACE not in raw[:60])
    for raw in _without_repeats(lines) if thin else lines:
        if _attempt_of(raw) not in (None, name) and b"\\" not in raw:
            continue
        line = _object_in(raw)
        if line is None:
            damaged += bool(raw.strip())
        elif line.get("attempt") == attempt:
            node = line.get("node", file_node)
            if isinstance(node, str):
                add_line(nodes.setdefault(node, NodePeaks(attempt, node)), line)
    return damaged


def _without_repeats(lines: Iterable[bytes]) -> Iterator[bytes]:
    """Yield all lines except complete beats that are followed by another beat. A monitor's peaks are cumulative, and a
    restarted monitor announces itself. Every sixteenth beat is kept anyway, in case the lines of two monitors were
    mixed."""
    last_beat = b""
    for count, raw in enumerate(lines):
        if BEAT in raw[:200] and raw.endswith(b"}\n"):
            if last_beat and (count % KEPT_BEATS == 0 or _attempt_of(last_beat) != _attempt_of(raw)):
                yield last_beat
            last_beat = raw
        else:
            yield from (last_beat, raw) if last_beat else (raw,)
            last_beat = b""
    if last_beat:
        yield last_beat


def _attempt_of(raw: bytes) -> bytes | None:
    """Return the first attempt that a line names, even if the line is torn."""
    match = ATTEMPT_IN_LINE.search(raw)
    return None if match is None else match[1]


def _object_in(raw: bytes) -> dict[str, Any] | None:
    """Return the object in a line that names an attempt, or None."""
    try:
        line = parse_json(raw)
    except ValueError:
        return None
    return line if isinstance(line, dict) and isinstance(line.get("attempt"), str) else None


def add_line(node: NodePeaks, line: Mapping[str, Any]) -> None:
    event, time = line.get("event"), time_or_none(line.get("time")) or 0.0
    for gpu in [*objects_in(line.get("gpus")), *objects_in([line.get("gpu")])]:  # `gpu`: the last word on a lost one
        _add_gpu(node, gpu, time)
    for process in sound_list(ProcessSample, line.get("processes")):
        _add_process(node, process)
    for logged in sound_list(PrintedSample, line.get("logged")):
        _add_logged(node, logged)
    _add_host(node, sound(HostSample, line.get("host")) or HostSample())
    node.written_at = max(node.written_at, time)
    if isinstance(line.get("gpus"), list):
        node.sampled_at = time
    if event in ("nvml_stalled", "nvml_back"):
        node.stalled = event == "nvml_stalled"
    if event == "no_nvml":
        node.no_nvml = str(line.get("why") or "NVML failed")
    if event == "end":
        node.ended = True
        node.stalled_at_end |= line.get("nvml_answered") is False
    remark = _remark(event, line)
    if remark:
        node.remarks[remark] = min(time, node.remarks.get(remark, time))


def _add_gpu(node: NodePeaks, record: Mapping[str, Any], time: float) -> None:
    uuid, index = record.get("uuid"), record.get("index")
    if not isinstance(uuid, str):
        return
    gpu = node.gpus.get(uuid)
    if gpu is None:
        order = index if type(index) is int else len(node.gpus)
        gpu = node.gpus[uuid] = GpuPeaks(uuid, str(record.get("pci") or ""), order)
    entry = [record.get(name) for name in SLOW_FIELDS]
    if entry != gpu.last_entry:
        gpu.last_entry = entry
        _add_peaks(gpu, sound(GpuSample, record) or GpuSample())
    _add_use(gpu, record, time)
    if "used_bytes" in record:
        gpu.used_bytes = byte_count(record["used_bytes"])
    lost = whole_number(record.get("lost"))
    if lost is not None and gpu.lost_code is None:
        gpu.lost_code, gpu.lost_at = lost, time


def _add_peaks(gpu: GpuPeaks, sample: GpuSample) -> None:
    gpu.name = gpu.name or sample.get("name") or None
    gpu.mig = gpu.mig or sample.get("mig") or None
    gpu.total_bytes = _larger(gpu.total_bytes, sample.get("total_bytes"))
    gpu.reserved_bytes = _larger(gpu.reserved_bytes, sample.get("reserved_bytes"))
    gpu.baseline_bytes = _smaller(gpu.baseline_bytes, bytes_within(gpu.total_bytes, sample.get("baseline_bytes")))
    gpu.device_peak_bytes = _larger(
        gpu.device_peak_bytes, bytes_within(gpu.total_bytes, sample.get("device_peak_bytes"))
    )
    for by_pid, peaks in (
        (sample.get("process_peak_bytes", {}), gpu.process_peak_bytes),
        (sample.get("accounting_peak_bytes", {}), gpu.accounting_peak_bytes),
    ):
        for pid, value in by_pid.items():
            count = bytes_within(gpu.total_bytes, value)
            if count:
                peaks[pid] = max(count, peaks.get(pid, 0))


def _add_use(gpu: GpuPeaks, record: Mapping[str, Any], time: float) -> None:
    """Take the means from the monitor that saw most of the attempt, from its last line."""
    gpu.power_peak_watts = _larger(gpu.power_peak_watts, number(record.get("power_peak_watts")))
    means = (number(record.get("utilization_percent")), number(record.get("power_watts")))
    weight = (number(record.get("samples")) or 0.0, time, *(mean or 0.0 for mean in means))
    if means != (None, None) and weight > gpu.mean_weight:
        gpu.mean_weight = weight
        gpu.utilization_percent, gpu.power_watts = means


def _add_process(node: NodePeaks, process: ProcessSample) -> None:
    rank, pid, now = process["rank"], process.get("pid"), process.get("resident_bytes")
    node.resident_bytes[rank] = now
    if pid is not None:
        node.rank_pids.setdefault(rank, set()).add(str(pid))
    peak = _larger(process.get("resident_peak_bytes"), now)
    if peak:
        node.resident_peak_bytes[rank] = max(peak, node.resident_peak_bytes.get(rank, 0))


def _add_logged(node: NodePeaks, peaks: PrintedSample) -> None:
    source = peaks.get("source") or "log"
    logged = node.logged.setdefault(peaks["rank"], PrintedPeaks(source))
    logged.source = max(logged.source, source)
    logged.allocated_peak_bytes = _larger(logged.allocated_peak_bytes, peaks.get("allocated_peak_bytes"))
    logged.reserved_peak_bytes = _larger(logged.reserved_peak_bytes, peaks.get("reserved_peak_bytes"))
    logged.device_bytes = _larger(logged.device_bytes, peaks.get("device_bytes"))


def _add_host(node: NodePeaks, host: HostSample) -> None:
    total, used = host.get("total_bytes"), host.get("used_peak_bytes")
    node.host_total_bytes = _larger(node.host_total_bytes, total)
    if used is not None and not (total and used > total):
        node.host_used_peak_bytes = _larger(node.host_used_peak_bytes, used)
    node.cgroup_peak_bytes = _larger(node.cgroup_peak_bytes, host.get("cgroup_peak_bytes"))
    node.cgroup_limit_bytes = _larger(node.cgroup_limit_bytes, host.get("cgroup_limit_bytes"))


def _remark(event: object, line: Mapping[str, Any]) -> str | None:
    if event == "no_nvml":
        return f"NVML did not answer ({line.get('why')})"
    if event == "gpu_skipped":
        return f"GPU {line.get('index')} could not be opened (NVML code {line.get('code')})"
    if event == "gpu_lost":
        gpu = line.get("gpu")
        return f"GPU {gpu.get('uuid') if isinstance(gpu, dict) else '?'} was lost"
    return "NVML stopped answering for a while" if event == "nvml_stalled" else None


def _larger(first: N | None, second: N | None) -> N | None:
    return first if second is None or (first is not None and first >= second) else second


def _smaller(first: N | None, second: N | None) -> N | None:
    return first if second is None or (first is not None and first <= second) else second
