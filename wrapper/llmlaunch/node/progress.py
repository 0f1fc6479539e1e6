"""The logs of an attempt's nodes, read for steps as they are written."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

from ..rundir.files import LogTail
from ..rundir.step_lines import LONGEST_LINE, StepNews

if TYPE_CHECKING:
    from pathlib import Path

    from ..rundir.step_lines import Step, StepLines

# A log that grew by more than this between two looks is read from its end: the last lines are those that count.
MOST_BYTES_A_LOOK = 4 * 2**20
LINE_ENDS = re.compile(rb"[\r\n]+")  # a progress bar goes back to the line's start
LOGS_AT_A_TIME = 32  # of those that have said nothing yet
LOOKS_FOR_ALL = 30  # so many looks go by until every log was read, once it is known who speaks
LOOKS_BETWEEN_LISTINGS = 15


def node_log_tail(path: Path) -> LogTail:
    """Return the reader of one node's log: new lines, the last 4 MiB where more is new."""
    return LogTail(path, MOST_BYTES_A_LOOK, LONGEST_LINE, skips=True, line_end=LINE_ENDS)


class NodeLogs:
    """The logs of an attempt's nodes, `logs/<attempt>.<node>.log`.

    Which node prints the steps is not known before: the first for some trainers, the last for others. Those that
    have said something are read at every look, the others in turn, so that a look costs the same on 2 and on 2000
    nodes.
    """

    def __init__(self, directory: Path, attempt: str, step_lines: StepLines, nodes: int) -> None:
        self._directory = directory
        self._nodes = nodes
        self._prefix = f"{attempt}."
        self._step_lines = step_lines
        self._tails: dict[str, LogTail] = {}
        self._speaking: list[str] = []
        self._turn = 0
        self._looks = 0

    def look(self, everywhere: bool = False) -> StepNews:
        """What is new: in the logs whose turn it is, or `everywhere`."""
        missing = len(self._tails) < self._nodes  # else not listed: the folder holds the logs of every attempt
        if missing and (everywhere or not self._tails or self._looks % LOOKS_BETWEEN_LISTINGS == 0):
            self._list()
        self._looks += 1
        silent = [name for name in self._tails if name not in self._speaking]
        steps: list[Step] = []
        slow = False
        for name in [*self._speaking, *(silent if everywhere else self._next(silent))]:
            news = self._step_lines.read(self._tails[name].lines())
            steps += news.steps
            slow = slow or news.slow
            if (news.steps or news.slow) and name not in self._speaking:
                self._speaking.append(name)
        return StepNews(steps, slow)

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
                self._tails[path.name] = node_log_tail(path)

    def _is_of_a_node(self, name: str) -> bool:
        other = name.endswith((".monitor.log", ".job.log"))
        return name.startswith(self._prefix) and name.endswith(".log") and not other
