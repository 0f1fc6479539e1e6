"""Reads the logs of a job: from their start, from their end, and while it writes them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from llmlaunch.errors import UserError
from llmlaunch.launchers.base import Submission
from llmlaunch.launchers.run_files import attempt_names, node_count
from llmlaunch.rundir import file_names
from llmlaunch.rundir.attempt import Attempt
from llmlaunch.rundir.files import LogTail
from llmlaunch.rundir.foreign_values import is_whole_number
from llmlaunch.rundir.regular_files import open_regular
from llmlaunch.rundir.run import attempt_order

JOB = "job"
"""What stands for a node in the name of the batch script's own log."""

_MOST_BYTES_A_READ = 1 << 20
_LONGEST_LINE_BYTES = 1 << 24
_BLOCK_BYTES = 1 << 16
_MONITOR = ".monitor"
_TELLING = ("stacks", "flight")
"""Folders of an attempt that hold what a hang left."""


@dataclass(frozen=True)
class LogLine:
    """One line of `logs/<attempt>.<node>.log`."""

    attempt: str
    node: str
    text: str


class _Log:
    def __init__(self, path: Path, attempt: str, node: str, offset: int) -> None:
        self.attempt, self.node = attempt, node
        self.tail = LogTail(path, _MOST_BYTES_A_READ, _LONGEST_LINE_BYTES, offset=offset)

    def read(self) -> list[LogLine]:
        """Return the lines completed since the last call."""
        return [self._shown(line) for line in self.tail.lines()]

    def rest(self) -> list[LogLine]:
        """Return a last line that was never ended."""
        line = self.tail.rest()
        return [self._shown(line)] if line else []

    def _shown(self, line: bytes) -> LogLine:
        # Of a progress bar, which goes back to the line's start, the last state.
        text = line.rstrip(b"\r").rpartition(b"\r")[2].decode("utf-8", errors="replace")
        return LogLine(self.attempt, self.node, text)


@dataclass
class JobLogs:
    """The lines of the logs of a submission, each once. With several nodes each is told by its log's name.

    A log may appear at any time, another attempt's with a requeue. The monitor's own log is not shown. `nodes` and
    `attempts` narrow what is read, None reads all; `later` adds the attempts that begin after the first look. Of
    logs that are there at the first look the last `tail` lines are read, all where it is None.
    """

    submission: Submission
    nodes: frozenset[str] | None = None
    attempts: frozenset[str] | None = None
    later: bool = True
    tail: int | None = None
    logs: dict[Path, _Log] = field(default_factory=dict)
    _before: frozenset[str] | None = field(default=None, init=False)
    """The attempts of the first look."""

    def __post_init__(self) -> None:
        self.several = node_count(self.submission.run_dir) > 1

    def new_lines(self) -> list[str]:
        """`new_entries` as text."""
        return [self.text(line) for line in self.new_entries()]

    def new_entries(self) -> list[LogLine]:
        """The lines completed since the last call, of at most 1 MiB of each log."""
        self._look()
        return [line for log in self.logs.values() for line in log.read()]

    def to_end(self) -> Iterator[str]:
        """All that is written by now, however long, log by log, with last lines that were never ended."""
        self._look()
        for log in self.logs.values():
            before = -1
            while log.tail.offset > before:
                before = log.tail.offset
                yield from map(self.text, log.read())
            yield from map(self.text, log.rest())

    def text(self, line: LogLine) -> str:
        return f"{line.node}: {line.text}" if self.several else line.text

    def _look(self) -> None:
        paths = {key: path for key, path in log_files(self.submission).items() if not key[1].endswith(_MONITOR)}
        first = self._before is None
        if self._before is None:
            self._before = frozenset(attempt for attempt, _ in paths)
        for (attempt, node), path in paths.items():
            if path not in self.logs and self._wanted(attempt, node, self._before):
                offset = _start_of_last(path, self.tail) if first and self.tail is not None else 0
                self.logs[path] = _Log(path, attempt, node, offset)

    def _wanted(self, attempt: str, node: str, before: frozenset[str]) -> bool:
        timely = self.attempts is None or attempt in self.attempts or (self.later and attempt not in before)
        return timely and (self.nodes is None or node in self.nodes)


def log_files(submission: Submission) -> dict[tuple[str, str], Path]:
    """Every log of a submission by attempt and node, in the order of attempts, the batch script's first. A monitor's
    log has `<node>.monitor` for a node."""
    paths = {}
    for path in (submission.run_dir / file_names.LOGS).glob("*.log"):
        job, restart, name = [*path.name.split(".", 2), "", ""][:3]
        if submission.owns(f"{job}.{restart}"):
            paths[f"{job}.{restart}", name.removesuffix(".log")] = path
    return dict(sorted(paths.items(), key=lambda item: (attempt_order(item[0][0]), _node_order(item[0][1]))))


def the_attempts(submission: Submission, word: str) -> frozenset[str] | None:
    """What `all`, `last` or an attempt's name means; None: all. Raises UserError for one that left no log."""
    attempts = list(dict.fromkeys(attempt for attempt, _ in log_files(submission)))
    if word == "all" or (word == "last" and not attempts):
        return None
    if word == "last":
        return frozenset(attempts[-1:])
    short = [attempt for attempt in attempts if attempt.rpartition(".")[2] == word]
    matches = [word] if word in attempts else short if len(short) == 1 else []
    if matches:
        return frozenset(matches)
    there = f"there are {', '.join(attempts)}" if attempts else "there are none yet"
    raise UserError(f"{submission.run_dir}: no attempt {word!r} left a log; {there} (also: last, all)")


def the_nodes(
    submission: Submission, word: str, attempts: frozenset[str] | None, later: bool = False
) -> frozenset[str] | None:
    """What `all`, a node's name or its rank means; None: all. A node that has not written yet is taken where `later`
    and the attempt names it. Raises UserError for one that is not among them."""
    if word == "all":
        return None
    logs = [(attempt, node) for attempt, node in log_files(submission) if attempts is None or attempt in attempts]
    wrote = list(dict.fromkeys(node for _, node in logs if node != JOB and not node.endswith(_MONITOR)))
    ranked = _nodes_by_rank(submission, attempts)
    if word in wrote or (later and word in ranked):
        return frozenset({word})
    if is_whole_number(word) and int(word) < len(ranked):
        return frozenset({ranked[int(word)]})
    there = f"there are {', '.join(wrote)}" if wrote else "there are none yet"
    raise UserError(
        f"{submission.run_dir}: no node {word!r} left a log; {there} (also: all; --job for the batch script)"
    )


def other_files(submission: Submission, attempts: frozenset[str] | None) -> list[Path]:
    """What else tells of these attempts: monitors' logs, stacks, NCCL's flight recorder; files, or folders of many."""
    logs = [
        path
        for (attempt, node), path in log_files(submission).items()
        if node.endswith(_MONITOR) and (attempts is None or attempt in attempts)
    ]
    folders = [
        submission.run_dir / file_names.ATTEMPTS / attempt / name
        for attempt in attempt_names(submission)
        for name in _TELLING
        if attempts is None or attempt in attempts
    ]
    return [*logs, *(folder for folder in folders if any(folder.glob("*")))]


def _nodes_by_rank(submission: Submission, attempts: frozenset[str] | None) -> list[str]:
    """Return the nodes in rank order, from the newest of these attempts that names them."""
    for name in reversed(attempt_names(submission)):
        nodes = Attempt(submission.run_dir, name).nodes
        if nodes and (attempts is None or name in attempts):
            return nodes
    return []


def _node_order(node: str) -> tuple[bool, list[tuple[bool, int, str]]]:
    """node2 before node10."""
    return node != JOB, [
        (is_whole_number(part), int(part) if is_whole_number(part) else 0, part) for part in re.split(r"(\d+)", node)
    ]


def _start_of_last(path: Path, count: int) -> int:
    """Where the last `count` lines of a file begin, in bytes; reads blocks from the end, no more than these lines."""
    try:
        with open_regular(path) as file:
            at = end = file.seek(0, 2)
            if count == 0:
                return end
            missing = count + 1  # the end of the line before them
            while at > 0:
                size = min(_BLOCK_BYTES, at)
                at -= size
                file.seek(at)
                block = file.read(size)
                if at + size == end and not block.endswith(b"\n"):
                    missing -= 1  # the last line was never ended
                newlines = block.count(b"\n")
                if newlines >= missing:
                    for _ in range(missing):
                        size = block.rindex(b"\n", 0, size)
                    return at + size + 1
                missing -= newlines
    except OSError:
        pass
    return 0
