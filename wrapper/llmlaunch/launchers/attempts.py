"""What the files of an attempt say while it runs and after (docs/run-directory.md)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmlaunch.launchers.base import Submission
from llmlaunch.launchers.logs import attempt_order
from llmlaunch.rundir.files import open_regular, parse_json, read_object, read_text
from llmlaunch.rundir.identifiers import is_attempt, is_fallback, is_host
from llmlaunch.rundir.values import byte_count

__all__ = ["AttemptFiles", "HowFar", "attempt_names", "fullest_bytes", "how_far", "read_attempt"]

_LAST_BYTES = 1 << 18
_WORD_BYTES = 1 << 12


@dataclass(frozen=True)
class AttemptFiles:
    """One attempt. `told` is by node, in the words of `attempts/A/told/<node>`; records are empty where there is no
    file yet."""

    name: str
    began: Mapping[str, Any]
    """attempt.json."""
    told: Mapping[str, str]
    progress: Mapping[str, Any]
    status: Mapping[str, Any]
    fell: bool
    """A node has said what ended its trainers: what the others are told from then on is srun ending the step."""

    @property
    def layout(self) -> str:
        """The folder of the fallback layout it runs; "" is the planned layout, also where the file names neither."""
        layout = self.began.get("layout")
        return str(layout) if is_fallback(layout) else ""

    @property
    def nodes(self) -> list[str]:
        nodes = self.began.get("nodes")
        return [node for node in nodes if is_host(node)] if isinstance(nodes, list) else []


def attempt_names(submission: Submission) -> list[str]:
    """The submission's attempts so far, the oldest first."""
    names = (path.name for path in (submission.run_dir / "attempts").glob("*"))
    return sorted((name for name in names if submission.owns(name)), key=attempt_order)


def read_attempt(run_dir: Path, name: str) -> AttemptFiles:
    """What there is to read of it now; nothing is raised for a file that is missing or torn."""
    folder = run_dir / "attempts" / name
    status = read_object(folder / "status.json") or {}
    if not status:
        whole = read_object(run_dir / "status.json") or {}  # of the newest attempt alone
        status = whole if whole.get("attempt") == name else {}
    return AttemptFiles(
        name=name,
        began=read_object(folder / "attempt.json") or {},
        told={path.name: _first_words(path) for path in sorted((folder / "told").glob("*"))},
        progress=read_object(folder / "progress.json") or {},
        status=status,
        fell=status.get("state") == "failed" or any((folder / "causes").glob("*.json")),
    )


@dataclass(frozen=True)
class HowFar:
    """What the files of a run say of its way: its attempts and their layouts, oldest first, and the step reached."""

    attempts: tuple[str, ...]
    layouts: tuple[str, ...]
    step: int | None
    steps: int | None

    @property
    def chain(self) -> str:
        """How many attempts, and the layouts where any was not the planned one: `3`, `2: planned > fallback/1`."""
        changes = [layout for n, layout in enumerate(self.layouts) if n == 0 or layout != self.layouts[n - 1]]
        count = str(len(self.attempts)) if self.attempts else "-"
        return f"{count}: {' > '.join(layout or 'planned' for layout in changes)}" if any(changes) else count


def how_far(run_dir: Path) -> HowFar:
    """Of a run directory; nothing is raised for what is missing or torn."""
    folders = (run_dir / "attempts").glob("*")
    names = sorted((path.name for path in folders if is_attempt(path.name)), key=attempt_order)
    read = [read_attempt(run_dir, name) for name in names]
    steps_of = [step for files in read for step in (files.progress.get("step"), files.status.get("step"))]
    said = [steps for files in read for steps in (files.progress.get("steps"),) if type(steps) is int]
    if not said:
        progress = (read_object(run_dir / "run.json") or {}).get("progress")
        planned = progress.get("steps") if isinstance(progress, dict) else None
        said = [planned] if type(planned) is int else []
    return HowFar(
        attempts=tuple(names),
        layouts=tuple(files.layout for files in read),
        step=max((step for step in steps_of if type(step) is int), default=None),
        steps=said[-1] if said else None,
    )


def fullest_bytes(run_dir: Path, attempt: str, peak_kind: str) -> int | None:
    """The largest peak so far of a rank's device, or, where `peak_kind` is resident, of a rank's memory; from the
    last lines of `peaks/<node>.jsonl`. None where no monitor has said any."""
    peaks = [
        peak
        for path in (run_dir / "peaks").glob("*.jsonl")
        for line in _last_line(path)
        if line.get("attempt") == attempt
        for peak in _peaks(line, peak_kind)
    ]
    return max(peaks, default=None)


def _peaks(line: Mapping[str, Any], peak_kind: str) -> list[int]:
    if peak_kind == "resident":
        return [size for process in _objects(line.get("processes")) for size in _sizes(process, "resident_peak_bytes")]
    found = []
    for gpu in _objects(line.get("gpus")):
        own = [
            size
            for name in ("process_peak_bytes", "accounting_peak_bytes")
            for size in _values(gpu.get(name))
            if type(size) is int and size <= (byte_count(gpu.get("total_bytes")) or size)
        ]
        found += own or _sizes(gpu, "device_peak_bytes")
    return found


def _sizes(record: Mapping[str, Any], name: str) -> list[int]:
    value = record.get(name)
    return [value] if type(value) is int else []


def _values(value: object) -> list[Any]:
    return list(value.values()) if isinstance(value, dict) else []


def _objects(value: object) -> list[Mapping[str, Any]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _last_line(path: Path) -> list[Mapping[str, Any]]:
    """The last of a monitor's lines that is whole and has peaks; they are cumulative, so one is enough."""
    try:
        with open_regular(path) as file:
            file.seek(max(0, file.seek(0, 2) - _LAST_BYTES))
            lines = file.read(_LAST_BYTES).split(b"\n")
    except OSError:
        return []
    for line in reversed(lines):
        try:
            record = parse_json(line)
        except ValueError:
            continue
        if isinstance(record, dict) and "gpus" in record:
            return [record]
    return []


def _first_words(path: Path) -> str:
    try:
        return read_text(path, _WORD_BYTES).strip()[:80]
    except OSError:
        return ""
