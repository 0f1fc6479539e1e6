"""The `slow` list of progress.json and status.json: GPUs that are slower than their peers, and the signs.

The watchdog writes it, and everybody who shows a run reads it. What is not of this form counts as absent.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

from .attempt_files import SlowEntry
from .schema import sound_list
from .values import printable, shortened

if TYPE_CHECKING:
    from collections.abc import Mapping


_MOST_ENTRIES, _MOST_SIGNS, _LONGEST_SIGN = 256, 16, 120


class SlowDevice(NamedTuple):
    """A GPU: `device` is NVML's index on its node, `uuid` its name."""

    node: str
    device: int
    uuid: str | None
    factor: float  # so many times slower than its peers
    since: float  # unix seconds
    signs: tuple[str, ...]

    def as_json(self) -> SlowEntry:
        return {
            "node": self.node,
            "device": self.device,
            "uuid": self.uuid,
            "factor": round(self.factor, 2),
            "since": math.floor(self.since),
            "signs": list(self.signs),
        }

    @property
    def name(self) -> str:
        """Return `GPU 3 of node2`."""
        return f"GPU {self.device} of {self.node}"

    def sentence(self) -> str:
        """Return what to tell a person, without a full stop."""
        signs = f" ({'; '.join(self.signs)})" if self.signs else ""
        return f"{self.name} is {self.factor:.1f} times slower than its peers{signs}"


def slow_devices(record: Mapping[str, Any]) -> list[SlowDevice]:
    """Return the slow devices that a progress.json or status.json names."""
    return [_slow_device(entry) for entry in sound_list(SlowEntry, record.get("slow"))[:_MOST_ENTRIES]]


def _slow_device(entry: SlowEntry) -> SlowDevice:
    signs = entry.get("signs", [])[:_MOST_SIGNS]
    shown = tuple(shortened(" ".join(printable(sign).split()), _LONGEST_SIGN) for sign in signs)
    factor = min(entry["factor"], 999.0)
    return SlowDevice(entry["node"], entry["device"], entry.get("uuid"), factor, entry["since"], shown)
