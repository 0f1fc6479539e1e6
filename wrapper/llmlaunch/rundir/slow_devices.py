"""The `slow` list of progress.json and status.json: GPUs that are slower than their peers, and the signs.

The watchdog writes it, and everybody who shows a run reads it. What is not of this form counts as absent.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

from .values import is_host, number, objects_in, printable, shortened, time_or_none, whole_number

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

    def as_json(self) -> dict[str, Any]:
        return {
            **self._asdict(),
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
    entries = [_slow_device(entry) for entry in objects_in(record.get("slow"))[:_MOST_ENTRIES]]
    return [entry for entry in entries if entry is not None]


def _slow_device(entry: Mapping[str, Any]) -> SlowDevice | None:
    node, device = entry.get("node"), whole_number(entry.get("device"))
    factor, since, uuid = number(entry.get("factor")), time_or_none(entry.get("since")), entry.get("uuid")
    if not is_host(node) or device is None or factor is None or since is None:
        return None
    written = entry.get("signs")
    signs = [sign for sign in written if isinstance(sign, str)] if isinstance(written, list) else []
    shown = tuple(shortened(" ".join(printable(sign).split()), _LONGEST_SIGN) for sign in signs[:_MOST_SIGNS])
    name = uuid if isinstance(uuid, str) else None
    return SlowDevice(str(node), device, name, min(factor, 999.0), since, shown)
