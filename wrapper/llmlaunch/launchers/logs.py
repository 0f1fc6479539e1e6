"""Reads the logs of a job while it writes them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from llmlaunch.launchers.base import Submission
from llmlaunch.launchers.run_files import node_count

__all__ = ["JobLogs"]

_MOST_BYTES_A_READ = 1 << 20


@dataclass
class _Log:
    path: Path
    prefix: str
    offset: int = 0
    torn: bytes = b""
    """The start of a line whose end is not written yet."""

    def read(self) -> list[str]:
        """The lines completed since the last call. Opened anew each time: so NFS shows what others wrote."""
        try:
            with self.path.open("rb") as file:
                if file.seek(0, 2) < self.offset:  # begun again
                    self.offset, self.torn = 0, b""
                file.seek(self.offset)
                chunk = file.read(_MOST_BYTES_A_READ)
        except OSError:
            return []
        self.offset += len(chunk)
        *lines, self.torn = (self.torn + chunk).split(b"\n")
        return [self._shown(line) for line in lines]

    def rest(self) -> list[str]:
        """A last line that was never ended."""
        line, self.torn = self.torn, b""
        return [self._shown(line)] if line else []

    def _shown(self, line: bytes) -> str:
        # Of a progress bar, which goes back to the line's start, the last state.
        text = line.rstrip(b"\r").rpartition(b"\r")[2].decode("utf-8", errors="replace")
        return f"{self.prefix}{text}"


@dataclass
class JobLogs:
    """The lines of all logs of a submission, each once. With several nodes each is told by its log's name.

    `logs/<attempt>.<node>.log`; a log may appear at any time, another attempt's with a requeue. The monitor's own
    log is not shown.
    """

    submission: Submission
    logs: dict[Path, _Log] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.several = node_count(self.submission.run_dir) > 1

    def new_lines(self) -> list[str]:
        """The lines completed since the last call, of at most 1 MiB of each log."""
        self._look()
        return [line for log in self.logs.values() for line in log.read()]

    def to_end(self) -> Iterator[str]:
        """All that is written by now, however long, with last lines that were never ended."""
        seen = -1
        while (position := sum(log.offset for log in self.logs.values())) > seen:
            seen = position
            yield from self.new_lines()
        yield from self.rest()

    def rest(self) -> list[str]:
        """Last lines that were never ended."""
        return [line for log in self.logs.values() for line in log.rest()]

    def _look(self) -> None:
        for path in sorted((self.submission.run_dir / "logs").glob("*.log")):
            job, restart, name = [*path.name.split(".", 2), "", ""][:3]
            monitor = name.endswith(".monitor.log")
            if path not in self.logs and not monitor and self.submission.owns(f"{job}.{restart}"):
                prefix = f"{name.removesuffix('.log')}: " if self.several else ""
                self.logs[path] = _Log(path, prefix)
