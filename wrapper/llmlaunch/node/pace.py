"""Which GPU is slower than its peers: a judgement over windows of the monitors, without a file or a clock.

GPUs are judged by their clocks. A clock that the power limit holds down while the GPU draws as much as its peers is
ordinary: it has more work (a fuller pipeline stage, a popular expert) or poorer silicon. Sinha et al. (SC 2022) found
GPUs of one model 8 % apart on average.
"""

from __future__ import annotations

import math
import time
from collections import deque
from statistics import median, median_high
from typing import TYPE_CHECKING, NamedTuple

from ..rundir import file_names
from ..rundir.files import LogTail, parse_json
from ..rundir.node_files import PaceSample
from ..rundir.schema import sound_list
from ..rundir.slow_devices import SlowDevice
from ..rundir.values import is_host, whole_number
from .files import say
from .notices import notify, slow_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from .files import Record

    Key = tuple[str, int]  # node, and the GPU's number there
    from pathlib import Path

    from ..rundir.slow_devices import SlowDevice


FEWEST_PEERS = 3  # of two nobody can say which is the outlier
FEWEST_SAMPLES = 3  # of a window in which the GPU was busy
OUTLYING = 1.10  # times slower; also more than SCATTER times the group's own scatter
SCATTER = 3.5 * 1.4826  # median absolute deviations; 1.4826 of them are a standard deviation of a normal distribution
HALF_SPEED, HALF_SPEED_WINDOWS = 1.5, 2
SLOW, SLOW_WINDOWS, SLOW_SHARE = 1.15, 20, 0.9
RECOVERED_WINDOWS = 10  # in a row without a sign
SAME_POWER = 0.93  # of its peers' watts: who draws as much at the power limit is no fault
WARMER_CELSIUS, WARM_CELSIUS = 10, 80
MANY_ERRORS = 100
MOST_DEVICES = 64  # of a node
FAULTS = {
    "hw_thermal": "hardware thermal slowdown",
    "sw_thermal": "software thermal slowdown",
    "power_brake": "power brake",
    "hw_slowdown": "hardware slowdown",
}
NO_REASONS: Mapping[str, float] = {}


class GpuWindow(NamedTuple):
    node: str
    device: int
    uuid: str | None
    group: str  # the model of the GPU
    clock_mhz: float
    watts: float | None = None
    celsius: float | None = None
    reasons: Mapping[str, float] = NO_REASONS  # share of the samples
    corrected_ecc: int = 0
    remapped_rows: int = 0

    @property
    def key(self) -> Key:
        return self.node, self.device


class Outlier(NamedTuple):
    """What one window says of one device."""

    factor: float
    signs: tuple[str, ...] = ()


LEVEL = Outlier(1.0)


def windows_of(line: Record, node: str) -> list[GpuWindow]:
    """Return what a monitor's line says of its node's GPUs."""
    gpus = [_gpu_window(entry, node) for entry in sound_list(PaceSample, line.get("devices"))[:MOST_DEVICES]]
    return [gpu for gpu in gpus if gpu is not None]


def _gpu_window(pace: PaceSample, node: str) -> GpuWindow | None:
    index, clock = pace.get("index"), pace.get("clock_mhz")
    if index is None or not clock or (pace.get("samples") or 0) < FEWEST_SAMPLES:
        return None
    return GpuWindow(
        node,
        index,
        pace.get("uuid") or None,
        pace.get("name") or "",
        clock,
        watts=pace.get("watts"),
        celsius=pace.get("celsius"),
        reasons=pace.get("reasons") or NO_REASONS,
        corrected_ecc=pace.get("corrected_ecc") or 0,
        remapped_rows=pace.get("remapped_rows") or 0,
    )


def outliers(windows: Iterable[GpuWindow]) -> dict[Key, Outlier]:
    """Compare the devices of one window with their peers. Returns every device that has enough of them, LEVEL where it
    keeps their pace."""
    groups: dict[str, list[GpuWindow]] = {}
    for window in windows:
        groups.setdefault(window.group, []).append(window)
    judged: dict[Key, Outlier] = {}
    for members in groups.values():
        if len(members) >= FEWEST_PEERS:
            judged.update(_gpu_outliers(members))
    return judged


def _gpu_outliers(members: Sequence[GpuWindow]) -> dict[Key, Outlier]:
    clocks = [member.clock_mhz for member in members]
    peers = _Peers(members)
    scatter = SCATTER * _deviation(clocks, peers.clock_mhz)
    judged = {}
    for member in members:
        factor = peers.clock_mhz / member.clock_mhz
        low = factor >= OUTLYING and peers.clock_mhz - member.clock_mhz > scatter
        judged[member.key] = Outlier(factor, peers.signs(member)) if low and not peers.explain(member) else LEVEL
    return judged


class _Peers:
    """The medians of all GPUs of one model."""

    def __init__(self, members: Sequence[GpuWindow]) -> None:
        self.clock_mhz = median(member.clock_mhz for member in members)
        self.watts = _median(member.watts for member in members)
        self.celsius = _median(member.celsius for member in members)
        self.reasons = {name: median(member.reasons.get(name, 0.0) for member in members) for name in FAULTS}
        self.corrected_ecc = median(member.corrected_ecc for member in members)
        self.remapped_rows = median(member.remapped_rows for member in members)

    def explain(self, member: GpuWindow) -> bool:
        """Whether the work explains its clock: it is at its power limit, draws what the others draw, and nothing else
        holds it down."""
        capped = member.reasons.get("power_cap", 0.0) >= 0.5 and not self._faults(member)
        return capped and (member.watts is None or self.watts is None or member.watts > SAME_POWER * self.watts)

    def signs(self, member: GpuWindow) -> tuple[str, ...]:
        signs = [f"SM clock {member.clock_mhz:.0f} MHz, its peers {self.clock_mhz:.0f}", *self._faults(member)]
        if member.reasons.get("power_cap", 0.0) >= 0.5 and member.watts is not None and self.watts is not None:
            signs.append(f"held at {member.watts:.0f} W, its peers draw {self.watts:.0f}")
        if member.celsius is not None and self.celsius is not None:
            warmer = member.celsius >= self.celsius + WARMER_CELSIUS and member.celsius >= WARM_CELSIUS
            signs += [f"{member.celsius:.0f} °C, its peers {self.celsius:.0f}"] if warmer else []
        if member.corrected_ecc >= MANY_ERRORS and member.corrected_ecc > 10 * self.corrected_ecc:
            signs.append(f"{member.corrected_ecc} corrected ECC errors")
        if member.remapped_rows > self.remapped_rows:
            signs.append(f"{member.remapped_rows} rows of memory remapped")
        return tuple(signs)

    def _faults(self, member: GpuWindow) -> list[str]:
        return [
            text for name, text in FAULTS.items() if member.reasons.get(name, 0.0) >= 0.25 and self.reasons[name] < 0.1
        ]


class PaceJudge:
    """Takes the windows in their order and keeps, of those that were outliers lately, what the last windows said."""

    def __init__(self) -> None:
        self._recent: dict[Key, deque[tuple[float, Outlier]]] = {}
        self._named: dict[Key, SlowDevice] = {}

    @property
    def slow(self) -> list[SlowDevice]:
        """Return the devices that are slow now, by node."""
        return [self._named[key] for key in sorted(self._named)]

    def add(self, windows: Sequence[GpuWindow], at: float) -> tuple[list[SlowDevice], list[SlowDevice]]:
        """Take in the windows of all devices that began at `at` (unix seconds). Returns which are newly slow, and which
        have recovered."""
        judged = outliers(windows)
        uuids = {window.key: window.uuid for window in windows}
        fresh, recovered = [], []
        for key in [key for key, outlier in judged.items() if outlier.signs or key in self._recent]:
            recent = self._recent.setdefault(key, deque(maxlen=SLOW_WINDOWS))
            recent.append((at, judged[key]))
            before = self._named.get(key)
            if before is not None and _has_recovered(recent):
                recovered.append(self._named.pop(key))
                recent.clear()
            elif before is not None or _is_slow(recent):
                self._named[key] = _slow_device(key, recent, uuids.get(key), before)
                fresh += [] if before is not None else [self._named[key]]
            if not any(outlier.signs for _, outlier in recent):
                del self._recent[key]
        return fresh, recovered


def _is_slow(recent: Sequence[tuple[float, Outlier]]) -> bool:
    factors = [outlier.factor for _, outlier in recent]
    if len(factors) >= HALF_SPEED_WINDOWS and min(factors[-HALF_SPEED_WINDOWS:]) >= HALF_SPEED:
        return True
    outlying = sum(factor >= OUTLYING for factor in factors)
    return len(factors) >= SLOW_WINDOWS and median(factors) >= SLOW and outlying >= SLOW_SHARE * SLOW_WINDOWS


def _has_recovered(recent: Sequence[tuple[float, Outlier]]) -> bool:
    last = list(recent)[-RECOVERED_WINDOWS:]
    return len(last) == RECOVERED_WINDOWS and not any(outlier.signs for _, outlier in last)


def _slow_device(
    key: Key, recent: Sequence[tuple[float, Outlier]], uuid: str | None, before: SlowDevice | None
) -> SlowDevice:
    outlying = [(at, outlier) for at, outlier in recent if outlier.signs]
    node, device = key
    return SlowDevice(
        node=node,
        device=device,
        uuid=uuid,
        factor=median_high(outlier.factor for _, outlier in outlying[-RECOVERED_WINDOWS:]),
        since=before.since if before is not None else outlying[0][0],
        signs=outlying[-1][1].signs,
    )


def _deviation(values: Sequence[float], middle: float) -> float:
    return median(abs(value - middle) for value in values)


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


READS_A_MINUTE = 1000.0
MOST_BYTES_A_READ, LONGEST_LINE = 256 * 1024, 64 * 1024
LATE_WINDOWS = 1.5  # until a line is seen: it is written within a sample, and a file server may show it late
MOST_WINDOWS = 64  # waiting to be judged; more is a clock that is wrong
MARK = b'"event":"pace"'


class PaceWatch:
    """The pace of one attempt. Times are unix seconds, since windows are."""

    def __init__(self, run_directory: Path, attempt: str, nodes: object, window_seconds: float) -> None:
        names = [node for node in nodes if is_host(node)] if isinstance(nodes, list) else []
        folder = run_directory / file_names.PEAKS
        self._tails = deque(
            (node, LogTail(folder / f"{node}.jsonl", MOST_BYTES_A_READ, LONGEST_LINE, skips=True)) for node in names
        )
        self._run_directory, self._attempt = run_directory, attempt
        self._seconds = window_seconds
        self._round_seconds = max(window_seconds, len(names) * 60.0 / READS_A_MINUTE)
        self._judge = PaceJudge()
        self._windows: dict[int, dict[Key, GpuWindow]] = {}
        self._turn = 0.0
        self._looked_at = time.time()

    @property
    def slow(self) -> list[SlowDevice]:
        return self._judge.slow

    def look(self) -> bool:
        """Read the nodes whose turn it is and judge the windows that are complete. Returns whether there is something
        new to write down, and says what it is. A mistake in here ends this alone."""
        if not self._tails:
            return False
        before = self._judge.slow
        try:
            self._look(time.time())
        except Exception as error:
            say(f"watchdog: the pace is judged no more: {type(error).__name__}: {error}")
            self._tails.clear()
        return self._judge.slow != before

    def _look(self, now: float) -> None:
        self._read(now)
        late = LATE_WINDOWS * self._seconds + self._round_seconds
        for number in sorted(self._windows):
            if (number + 1) * self._seconds + late <= now or len(self._windows) > MOST_WINDOWS:
                self._add(number)

    def _read(self, now: float) -> None:
        """Read as many nodes as have their turn since the last look, each at most once."""
        passed, self._looked_at = max(0.0, now - self._looked_at), now
        self._turn += min(len(self._tails) * passed / self._round_seconds, float(len(self._tails)))
        for _ in range(math.floor(self._turn)):
            node, tail = self._tails[0]
            self._tails.rotate(-1)
            for raw in tail.lines():
                if MARK in raw[:60]:
                    self._take(node, raw)
        self._turn -= math.floor(self._turn)

    def _take(self, node: str, raw: bytes) -> None:
        try:
            line = parse_json(raw)
        except ValueError:
            return
        number = whole_number(line.get("window")) if isinstance(line, dict) else None
        if number is None or line.get("attempt") != self._attempt or line.get("seconds") != self._seconds:
            return
        if abs((number + 1) * self._seconds - self._looked_at) > MOST_WINDOWS * self._seconds:
            return
        windows = self._windows.setdefault(number, {})
        windows.update({window.key: window for window in windows_of(line, node)})

    def _add(self, number: int) -> None:
        windows = list(self._windows.pop(number).values())
        fresh, recovered = self._judge.add(windows, number * self._seconds)
        for device in fresh:
            say(f"watchdog: slow: {device.sentence()}")
        if fresh:
            notify(self._run_directory, self._attempt, "slow", slow_text(fresh))
        for device in recovered:
            say(f"watchdog: {device.name} keeps its peers' pace again")
