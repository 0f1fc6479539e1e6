"""A run that is watched: its description and its files; and a stream that takes itself for a terminal."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

from llmlaunch.units import GIB

# Logged as "it 1/100 loss=3.5 took 100 ms".
STEP = r"it (?P<step>\d+)/(?P<steps>\d+) loss=(?P<loss>\S+) took (?P<milliseconds>\d+) ms"
RUN: dict[str, Any] = {
    "schema": 1,
    "name": "sample",
    "nodes": 1,
    "devices_per_node": 2,
    "pipeline": 1,
    "peak_kind": "device",
    "predicted_bytes": [60 * GIB],
    "measurement": {"global_batch_size": 16, "sequence_length": 1000, "world_size": 2},
    "progress": {"step_patterns": [STEP], "slow_patterns": ["saving checkpoint"], "steps": 100},
}


def write(path: Path, content: Any) -> None:
    """Write a file, as JSON unless it is text."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))


def append(path: Path, *lines: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.writelines(f"{line}\n" for line in lines)


class TerminalStream(io.StringIO):
    def isatty(self) -> bool:
        return True
