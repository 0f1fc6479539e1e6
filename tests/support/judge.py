"""An independent judge: is every peak that was on disk in the store, once?

It shares no code with the readers of llmlaunch: it opens the files of a run directory by itself, and compares them with
what `llmlaunch measurements export` wrote. Files: docs/run-directory.md.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Json = dict[str, Any]
Peaks = dict[str, int]  # by the name they have in a record's `observed`

OF_A_GPU = ("process_peak_bytes", "accounting_peak_bytes")
OF_TORCH = ("allocated_peak_bytes", "active_peak_bytes", "reserved_peak_bytes")
TRUE = ("accounting_peak_bytes", "process_peak_bytes", "reserved_peak_bytes")  # a process held no less than each
# In no record under these names: they are what a rank's own peak may be made of.
ABOVE_BASELINE, OUTSIDE = "device_peak_bytes - baseline_bytes", "outside_bytes"


@dataclass
class OnDisk:
    """The peaks that files of one run directory hold: by attempt and global rank, and by attempt and node."""

    ranks: dict[tuple[str, int], Peaks] = field(default_factory=dict)
    nodes: dict[tuple[str, str], Peaks] = field(default_factory=dict)


def on_disk(run: Path) -> OnDisk:
    """What a run directory holds now."""
    found = OnDisk()
    nodes: dict[tuple[str, str], _Node] = {}
    homes: dict[tuple[str, int], tuple[str, Json]] = {}
    for path in sorted(run.glob("attempts/*/ranks/*.jsonl")):
        for record in lines(path):
            key = (path.parts[-3], record["rank"])
            homes[key] = (str(record["node"]), record)
            _rise(found.ranks.setdefault(key, {}), "resident_peak_bytes", record.get("resident_peak_bytes"))
    for path in sorted(run.glob("peaks/*.jsonl")):
        for line in lines(path):
            if "attempt" in line:
                nodes.setdefault((line["attempt"], line["node"]), _Node()).take(line)
    for path in sorted(run.glob("attempts/*/memory/*.jsonl")):
        for record in lines(path):
            _take_torch(found.ranks.setdefault((path.parts[-3], record["rank"]), {}), record)
    for (attempt, name), node in nodes.items():
        if node.host:
            found.nodes[(attempt, name)] = node.host
        here = {rank: record for (a, rank), (home, record) in homes.items() if (a, home) == (attempt, name)}
        for rank in sorted({*here, *node.pids, *node.resident}):
            peaks = found.ranks.setdefault((attempt, rank), {})
            _rise(peaks, "resident_peak_bytes", node.resident.get(rank))
            node.add_gpu_of(rank, here.get(rank, {}), peaks)
    found.ranks = {key: peaks for key, peaks in found.ranks.items() if peaks}
    return found


@dataclass
class _Node:
    """One node in one attempt, as its monitors' lines told it."""

    gpus: dict[str, Json] = field(default_factory=dict)
    pids: dict[int, set[str]] = field(default_factory=dict)
    resident: Peaks = field(default_factory=dict)  # type: ignore[assignment]
    host: Peaks = field(default_factory=dict)

    def take(self, line: Json) -> None:
        for seen in [*line.get("gpus", []), *([line["gpu"]] if isinstance(line.get("gpu"), dict) else [])]:
            kept = self.gpus.setdefault(seen["uuid"], {"device": {}})
            kept.update(order=(seen.get("pci") or "", seen["index"]), mig=seen.get("mig"))
            if kept.get("baseline") is None:
                kept["baseline"] = seen.get("baseline_bytes")
            _rise(kept["device"], "device_peak_bytes", seen.get("device_peak_bytes"))
            for name in OF_A_GPU:
                for pid, peak in seen.get(name, {}).items():
                    _rise(kept.setdefault(name, {}), pid, peak)
        for seen in line.get("processes", []):
            self.pids.setdefault(seen["rank"], set()).add(str(seen["pid"]))
            _rise(self.resident, seen["rank"], seen.get("resident_peak_bytes"))
        for name in ("used_peak_bytes", "cgroup_peak_bytes"):
            _rise(self.host, name, (line.get("host") or {}).get(name))

    def add_gpu_of(self, rank: int, record: Json, peaks: Peaks) -> None:
        """The GPU that the rank's process is on, else the one of its local rank in PCI order."""
        pids = self.pids.get(rank, set()) | {str(record[key]) for key in ("pid", "program_pid") if record.get(key)}
        by_process = {
            uuid: {name: max((gpu.get(name, {}).get(pid, 0) for pid in pids), default=0) for name in OF_A_GPU}
            for uuid, gpu in self.gpus.items()
        }
        on = max(by_process, key=lambda uuid: max(by_process[uuid].values()), default=None)
        if on is not None and any(by_process[on].values()):
            for name, peak in by_process[on].items():
                _rise(peaks, name, peak or None)
        else:
            cut = {gpu["mig"] for gpu in self.gpus.values()}
            in_order = sorted(self.gpus.keys() - cut, key=lambda uuid: self.gpus[uuid]["order"])
            local = record.get("local_rank")
            on = in_order[local] if isinstance(local, int) and local < len(in_order) else None
        if on is not None:
            device, idle = self.gpus[on]["device"].get("device_peak_bytes"), self.gpus[on]["baseline"]
            _rise(peaks, "device_peak_bytes", device)
            _rise(peaks, ABOVE_BASELINE, device - idle if device and idle is not None and device > idle else None)


def _take_torch(peaks: Peaks, record: Json) -> None:
    for device in record.get("devices", []):
        for name in (*OF_TORCH, OUTSIDE):
            _rise(peaks, name, device.get(name))


def judge(run_directory: Path, before: OnDisk, now: OnDisk, records: Sequence[Json]) -> list[str]:
    """What is wrong with the store's `records`, in words; nothing where every peak that was on disk `before`, at the
    fault, still is, and all that is on disk `now` is in them, once, and nothing else."""
    run = json.loads((run_directory / "run.json").read_text())
    kind = run["peak_kind"]
    wrong = [f"{name} is there {count} times" for name, count in Counter(r["id"] for r in records).items() if count > 1]
    wrong += [*_lost(before, now), *_of_nodes(now, records), *_of_stages(run, now, records)]
    for record in records:
        if record["peak_kind"] == kind and (record["attempt"], record["global_rank"]) not in now.ranks:
            wrong.append(f"{record['id']} is of a rank that left no file")
    for (attempt, rank), written in sorted(now.ranks.items()):
        where = f"rank {rank} of {attempt}"
        own = [r for r in records if (r["attempt"], r.get("global_rank"), r["peak_kind"]) == (attempt, rank, kind)]
        allowed = {written.get("resident_peak_bytes")} - {None} if kind == "resident" else _of_a_device(written)
        if len(own) != (1 if allowed else 0):
            wrong.append(f"{where}: {len(own)} records for {written}")
        for record in own:
            if record["peak_bytes"] not in allowed:
                wrong.append(f"{where}: its peak in the store is {record['peak_bytes']}, by what is on disk {allowed}")
            wrong += [
                f"{where}: {name} is {value} on disk, and the store has {record['observed'].get(name)}"
                for name, value in written.items()
                if name not in (ABOVE_BASELINE, OUTSIDE) and record["observed"].get(name) != value
            ]
    return wrong


def _of_a_device(written: Peaks) -> set[int]:
    """What a process may have held, by what was seen of it. The driver's accounting is the truth, where it is no less
    than a sample and than what torch had reserved; without it any sum that is no less than what each of them saw."""
    least = max((written[name] for name in TRUE if name in written), default=0)
    if least and written.get("accounting_peak_bytes") == least:
        return {least}
    reserved = written.get("reserved_peak_bytes", 0)
    sums = {written.get(name, 0) for name in (*TRUE, ABOVE_BASELINE)} | {reserved + written.get(OUTSIDE, 0)}
    return {value for value in sums if value and value >= least}


def _lost(before: OnDisk, now: OnDisk) -> Iterator[str]:
    """What a fault took from the disk."""
    for key, early in {**before.ranks, **before.nodes}.items():
        left = {**now.ranks, **now.nodes}.get(key, {})
        for name, value in early.items():
            if left.get(name, 0) < value:
                yield f"{key}: {name} was {value} at the fault, and the disk has {left.get(name)}"


def _of_nodes(now: OnDisk, records: Sequence[Json]) -> Iterator[str]:
    """Main memory of each node, by one of the two who saw it."""
    for (attempt, node), written in now.nodes.items():
        stored = _stored(records, (attempt, node, "host"), ("attempt", "node", "peak_kind"))
        if len(stored) != 1 or stored[0] not in written.values():
            yield f"host memory of {node} in {attempt}: {written} on disk, and the store has {stored}"


def _of_stages(run: Json, now: OnDisk, records: Sequence[Json]) -> Iterator[str]:
    """What torch's allocator held: of each pipeline rank, the worst global rank's."""
    each = run["nodes"] * run["devices_per_node"] // run["pipeline"]
    worst: dict[tuple[str, int, str], int] = {}
    for (attempt, rank), written in now.ranks.items():
        for kind in ("allocated", "reserved"):
            _rise(worst, (attempt, rank // each, kind), written.get(f"{kind}_peak_bytes"))
    for key, peak in worst.items():
        stored = _stored(records, key, ("attempt", "pipeline_rank", "peak_kind"))
        if stored != [peak]:
            yield f"{key}: {peak} on disk, and the store has {stored}"


def _stored(records: Sequence[Json], key: tuple[Any, ...], names: tuple[str, ...]) -> list[int]:
    return [record["peak_bytes"] for record in records if tuple(record.get(name) for name in names) == key]


def _rise(peaks: Any, name: Any, value: int | None) -> None:
    if value is not None:
        peaks[name] = max(value, peaks.get(name, 0))


def lines(path: Path) -> Iterator[Json]:
    """The whole lines of a file of a node; what a fault has torn is none."""
    for raw in path.read_bytes().split(b"\n"):
        try:
            line = json.loads(raw)
        except ValueError:
            continue
        if isinstance(line, dict) and "node" in line:
            yield line
