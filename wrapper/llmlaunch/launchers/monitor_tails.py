"""What monitors have written since the last look: the new end of each `peaks/<node>.jsonl`, and no more."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmlaunch.rundir.files import open_regular, parse_json
from llmlaunch.rundir.monitor_samples import NodePeaks, take_line
from llmlaunch.rundir.values import time_or_none

__all__ = ["MonitorTails", "Seen"]

_FIRST_BYTES = 1 << 18
"""Of a file that is met for the first time: its lines are cumulative, the last ones are enough."""


@dataclass
class Seen:
    """One node in one attempt: its peaks, the last line with GPUs, its time, and what the monitor itself met."""

    peaks: NodePeaks
    line: Mapping[str, Any] = field(default_factory=dict)
    at: float = 0.0
    stalled: bool = False
    problem: str = ""


@dataclass
class _Tail:
    offset: int = 0
    torn: bytes = b""


@dataclass
class MonitorTails:
    """The monitors' files of a run directory. `look` reads what is new; nothing is raised for what is missing."""

    run_dir: Path
    nodes: dict[tuple[str, str], Seen] = field(default_factory=dict)
    """By attempt and node."""
    _tails: dict[str, _Tail] = field(default_factory=dict)

    @property
    def files(self) -> int:
        return len(self._tails)

    def look(self) -> None:
        try:
            paths = sorted(path for path in (self.run_dir / "peaks").iterdir() if path.suffix == ".jsonl")
        except OSError:
            return
        for path in paths:
            for raw in self._new_lines(path, self._tails.setdefault(path.name, _Tail())):
                self._take(raw, path.stem)

    def of(self, attempt: str) -> dict[str, Seen]:
        """By node."""
        return {node: seen for (name, node), seen in self.nodes.items() if name == attempt}

    def _new_lines(self, path: Path, tail: _Tail) -> list[bytes]:
        try:
            with open_regular(path) as file:  # opened anew: so NFS shows what others wrote
                size = file.seek(0, os.SEEK_END)
                if size < tail.offset:  # begun again
                    tail.offset, tail.torn = 0, b""
                if size == tail.offset:
                    return []
                start = max(tail.offset, size - _FIRST_BYTES)
                file.seek(start)
                data = file.read(size - start)
        except OSError:
            return []
        if start > tail.offset:  # in the middle of a line
            tail.torn, data = b"", data.partition(b"\n")[2]
        tail.offset = size
        *lines, tail.torn = (tail.torn + data).split(b"\n")
        return lines

    def _take(self, raw: bytes, name: str) -> None:
        try:
            line = parse_json(raw)
        except ValueError:
            return
        if not isinstance(line, dict) or not isinstance(line.get("attempt"), str):
            return
        node = line["node"] if isinstance(line.get("node"), str) else name
        key = (line["attempt"], node)
        seen = self.nodes.setdefault(key, Seen(NodePeaks(*key)))
        take_line(seen.peaks, line)
        seen.at = max(seen.at, time_or_none(line.get("time")) or 0.0)
        if isinstance(line.get("gpus"), list):
            seen.line = line
        event = line.get("event")
        if event in ("nvml_stalled", "nvml_back"):
            seen.stalled = event == "nvml_stalled"
        if event == "no_nvml":
            seen.problem = str(line.get("why") or "NVML failed")
