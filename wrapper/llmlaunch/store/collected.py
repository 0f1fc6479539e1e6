"""What collecting did about a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmlaunch.rundir.messages import counted

__all__ = ["Outcome"]


@dataclass(frozen=True)
class Outcome:
    """What was done about one run. `did` is "collected", "unchanged" (collected before), "waiting" (submitted or
    running, and not named) or "unreadable"; `measurements` counts its records, `reason` says why there is no more,
    `damaged` how many lines of which files (paths in the run directory) could not be read."""

    run_id: str | None
    directory: Path
    did: str
    state: str | None = None
    measurements: int = 0
    reason: str | None = None
    damaged: Mapping[str, int] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        return {**vars(self), "directory": str(self.directory), "damaged": dict(self.damaged)}

    def sentence(self) -> str:
        """One line for a person."""
        name = self.run_id or str(self.directory)
        if self.did == "unreadable":
            return str(self.reason)
        count = counted(self.measurements, "measurement")
        done = {"unchanged": "nothing new", "waiting": "not collected"}.get(self.did, f"collected, {count}")
        more = [*([self.reason] if self.reason else []), *(_damage(*one) for one in sorted(self.damaged.items()))]
        return "; ".join([f"{name} ({self.state}): {done}", *more])


def _damage(path: str, lines: int) -> str:
    return f"{counted(lines, 'damaged line')} in {path} {'were' if lines > 1 else 'was'} left out"
