"""What the trainers' logs say of their progress, read as they are written."""

from __future__ import annotations

import math
import os
import re
from typing import TYPE_CHECKING, NamedTuple

from ..rundir.files import open_regular

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path
    from re import Match, Pattern

    from .files import Record

# A log that grew by more than this between two looks is read from its end: the last lines are those that count.
MOST_BYTES_A_LOOK = 4 * 2**20
MOST_BYTES_A_LINE = 4096  # the rest of a longer line is not looked at: a step line of Megatron-LM has 400
NEWLINES = re.compile(rb"[\r\n]+")  # a progress bar goes back to the line's start
LOGS_AT_A_TIME = 32  # of those that have said nothing yet
LOOKS_FOR_ALL = 30  # so many looks go by until every log was read, once it is known who speaks
LOOKS_BETWEEN_LISTINGS = 15


class Step(NamedTuple):
    """One line about one step. None = the line does not say."""

    step: int | None
    steps: int | None
    loss: float | None  # NaN and infinity, too
    tokens_per_second: float | None
    seconds: float | None  # of one step


class News(NamedTuple):
    """What the logs said since the last look."""

    steps: list[Step]
    slow: bool  # a checkpoint or an evaluation was begun, and no step line came after that in the same log


class Words:
    """The regular expressions of `run.json`'s "progress". Raises re.error for what is none.

    Groups of a step pattern: step, steps, loss, tokens_per_second, seconds, milliseconds, nan; any may lack.
    """

    def __init__(self, progress: Record) -> None:
        self._steps = [_compiled(pattern) for pattern in progress.get("step_patterns") or []]
        self._slow = [_compiled(pattern) for pattern in progress.get("slow_patterns") or []]

    def read(self, lines: Iterable[bytes]) -> News:
        steps: list[Step] = []
        slow = False
        for line in lines:
            found = _first(self._steps, line)
            if found is not None:
                steps.append(_step(found))
                slow = False
            elif _first(self._slow, line) is not None:
                slow = True
        return News(steps, slow)


class LogTail:
    """The new lines of one file that others append to. It may not exist yet, be cut, replaced, or be unreadable."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inode = 0
        self._offset = 0
        self._torn = b""  # a line whose end was not there yet

    def lines(self) -> list[bytes]:
        """Opened anew each time: that is when a network file system asks the server for the file's true length."""
        try:
            with open_regular(self._path) as file:
                state = os.fstat(file.fileno())
                if state.st_ino != self._inode or state.st_size < self._offset:
                    self._inode, self._offset, self._torn = state.st_ino, 0, b""
                if state.st_size - self._offset > MOST_BYTES_A_LOOK:
                    self._offset, self._torn = state.st_size - MOST_BYTES_A_LOOK, b""
                file.seek(self._offset)
                fresh = file.read(MOST_BYTES_A_LOOK) or b""
        except OSError:
            return []
        self._offset += len(fresh)
        whole = NEWLINES.split(self._torn + fresh)
        self._torn = whole.pop()[:MOST_BYTES_A_LINE]
        return [line[:MOST_BYTES_A_LINE] for line in whole]


class NodeLogs:
    """The logs of an attempt's nodes, `logs/<attempt>.<node>.log`.

    Which node prints the steps is not known before: the first for some trainers, the last for others. Those that
    have said something are read at every look, the others in turn, so that a look costs the same on 2 and on 2000
    nodes.
    """

    def __init__(self, directory: Path, attempt: str, words: Words, nodes: int) -> None:
        self._directory = directory
        self._nodes = nodes
        self._prefix = f"{attempt}."
        self._words = words
        self._tails: dict[str, LogTail] = {}
        self._speaking: list[str] = []
        self._turn = 0
        self._looks = 0

    def look(self, everywhere: bool = False) -> News:
        """What is new: in the logs whose turn it is, or `everywhere`."""
        missing = len(self._tails) < self._nodes  # else not listed: the folder holds the logs of every attempt
        if missing and (everywhere or not self._tails or self._looks % LOOKS_BETWEEN_LISTINGS == 0):
            self._list()
        self._looks += 1
        silent = [name for name in self._tails if name not in self._speaking]
        steps: list[Step] = []
        slow = False
        for name in [*self._speaking, *(silent if everywhere else self._next(silent))]:
            news = self._words.read(self._tails[name].lines())
            steps += news.steps
            slow = slow or news.slow
            if (news.steps or news.slow) and name not in self._speaking:
                self._speaking.append(name)
        return News(steps, slow)

    def _next(self, silent: list[str]) -> list[str]:
        most = math.ceil(len(silent) / LOOKS_FOR_ALL) if self._speaking else LOGS_AT_A_TIME
        start = self._turn if self._turn < len(silent) else 0
        chosen = silent[start : start + most]
        self._turn = start + most
        return chosen

    def _list(self) -> None:
        try:
            paths = sorted(self._directory.iterdir())
        except OSError:
            return
        for path in paths:
            if path.name not in self._tails and self._is_of_a_node(path.name):
                self._tails[path.name] = LogTail(path)

    def _is_of_a_node(self, name: str) -> bool:
        other = name.endswith((".monitor.log", ".job.log"))
        return name.startswith(self._prefix) and name.endswith(".log") and not other


def _compiled(pattern: str) -> Pattern[bytes]:
    return re.compile(pattern.encode())


def _first(patterns: list[Pattern[bytes]], line: bytes) -> Match[bytes] | None:
    for pattern in patterns:
        found = pattern.search(line)
        if found is not None:
            return found
    return None


def _step(found: Match[bytes]) -> Step:
    groups = found.groupdict()
    step, steps = _finite(groups.get("step")), _finite(groups.get("steps"))
    milliseconds = _finite(groups.get("milliseconds"))
    return Step(
        step=None if step is None else int(step),
        steps=None if steps is None else int(steps),
        loss=math.nan if groups.get("nan") else _number(groups.get("loss")),
        tokens_per_second=_finite(groups.get("tokens_per_second")),
        seconds=_finite(groups.get("seconds")) if milliseconds is None else milliseconds / 1000.0,
    )


def _finite(text: bytes | None) -> float | None:
    """None for what is no number, and for one JSON cannot hold."""
    number = _number(text)
    return number if number is not None and math.isfinite(number) else None


def _number(text: bytes | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        return None
