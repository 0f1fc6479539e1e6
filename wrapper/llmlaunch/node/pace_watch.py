"""The watchdog's view of the pace: it reads what the nodes' monitors say, in turn, and has it judged.

A monitor appends two lines a minute to a file that it keeps open. Of two thousand nodes half are read each minute, of
five hundred and fewer each of them twice, so that the job's file server sees a thousand opens a minute at most.
"""

from __future__ import annotations

import math
import time
from collections import deque
from typing import TYPE_CHECKING

from ..rundir import file_names
from ..rundir.files import LogTail, parse_json
from ..rundir.values import is_host, whole_number
from .files import say
from .notice_texts import slow_text
from .notices import notify
from .pace import PaceJudge, windows_of

if TYPE_CHECKING:
    from pathlib import Path

    from ..rundir.slow_devices import SlowDevice
    from .pace import GpuWindow, Key

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
