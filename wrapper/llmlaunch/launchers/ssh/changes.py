"""Prints what the job of a run wrote since it was last brought home. Sent to the host and run there, by its python3.

Python 3.8 and the standard library. The first line of stdin is the request: {"runs": [{"directory", "known"}, ...],
"wanted": "state" | "peaks" | "all", "every": seconds, 0: once}, where `known` has size and time of change of the files
that are at home. Each answer is a line of JSON, {"run", "path", "offset", "bytes", "packed", "changed", "whole"}, and
as many bytes as `packed` says (zlib); {"run", "gone": path}; and after each look {"looked": true}. The program ends
when the connection does, which stdin tells, and after ten minutes.
"""

from __future__ import annotations

import json
import os
import select
import stat
import sys
import time
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

if TYPE_CHECKING:
    from collections.abc import Iterator

    Known = dict[str, tuple[int, int]]

TOP = ("status.json", "stop", "from_older", "prepared")
APPENDED = (".jsonl", ".log", ".out")
MOST_BYTES = 1 << 25
CHUNK_BYTES = 1 << 20
LIFE_SECONDS = 600.0


def wanted_files(directory: Path, wanted: str) -> Iterator[Path]:
    """Yield the files of a run that are wanted. "state" leaves out the logs of the nodes, and the peaks unless the run
    is over and an attempt has no summary of them; "peaks" leaves out the logs alone."""
    everything = wanted == "all"
    attempts = entries(directory / "attempts")
    over = (directory / "status.json").exists()
    with_peaks = wanted != "state" or (over and not all((each / "summary.json").exists() for each in attempts))
    for path in entries(directory):
        if path.name in TOP or (path.name.startswith("slurm-") and path.name.endswith(".out")):
            yield path
    for attempt in attempts:
        for path in entries(attempt):
            if not path.is_dir():
                yield path
            elif (
                everything or path.name not in ("memory", "stacks", "flight") or (with_peaks and path.name == "memory")
            ):
                yield from entries(path)
    for path in entries(directory / "logs"):
        if everything or path.name.endswith(".job.log"):
            yield path
    if with_peaks:
        yield from entries(directory / "peaks")


def entries(folder: Path) -> list[Path]:
    """Return what a folder holds, in order; nothing of one that is not there."""
    try:
        return sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    except OSError:
        return []


def send_changes(number: int, directory: Path, known: Known, wanted: str, out: BinaryIO) -> None:
    """Print what is new of one run, and keep in `known` what was printed."""
    for path in wanted_files(directory, wanted):
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            continue  # it has gone meanwhile, is a link, or may not be read
        with os.fdopen(descriptor, "rb") as file:
            if stat.S_ISREG(os.fstat(descriptor).st_mode):
                send_file(number, str(path.relative_to(directory)), file, known, out)
    for name in TOP:
        if name in known and not (directory / name).exists():
            del known[name]
            send(out, {"run": number, "gone": name})


def send_file(number: int, name: str, file: BinaryIO, known: Known, out: BinaryIO) -> None:
    """Print what is new of one file: all of it, or, of one that only grows, what was appended."""
    state, appended = os.fstat(file.fileno()), name.endswith(APPENDED)
    before = known.get(name)
    if before is not None and (
        state.st_size == before[0] if appended else before == (state.st_size, state.st_mtime_ns)
    ):
        return
    most = CHUNK_BYTES if appended else MOST_BYTES
    if not appended and state.st_size > most:
        return
    anew = before is not None and before[0] > state.st_size
    offset = before[0] if before is not None and appended and not anew else 0
    file.seek(offset)
    more = True
    while more:
        content = file.read(most)
        packed = zlib.compress(content, 1)
        answer = {"run": number, "path": name, "offset": offset, "bytes": len(content), "packed": len(packed)}
        whole = not appended or (anew and offset == 0)
        send(out, {**answer, "changed": state.st_mtime_ns, "whole": whole}, packed)
        offset += len(content)
        known[name] = (offset, state.st_mtime_ns)
        more = appended and len(content) == most


def send(out: BinaryIO, record: dict[str, Any], content: bytes = b"") -> None:
    """Print one answer."""
    out.write(json.dumps(record).encode() + b"\n" + content)


def main() -> None:
    """Answer the request on stdin until the connection ends."""
    request = json.loads(sys.stdin.buffer.readline().decode())
    known = [{path: tuple(state) for path, state in run["known"].items()} for run in request["runs"]]
    out, until = sys.stdout.buffer, time.monotonic() + LIFE_SECONDS
    while True:
        for number, run in enumerate(request["runs"]):
            send_changes(number, Path(run["directory"]), known[number], request["wanted"], out)
        send(out, {"looked": True})
        out.flush()
        every = request["every"]
        if not every or time.monotonic() > until or select.select([0], [], [], every)[0]:
            return


if __name__ == "__main__":
    main()
