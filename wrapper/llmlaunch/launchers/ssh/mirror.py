"""Brings home what the job of a run wrote on its host, into the run directory here: at once, or all the time.

The names come from a host, so only files that a job writes are taken, each inside the run directory. What is at home is
what is known: its sizes and times are the request, so that a lost connection loses nothing and nothing comes twice.
"""

from __future__ import annotations

import json
import os
import re
import select
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from llmlaunch.errors import UserError
from llmlaunch.launchers.bounded_answer import AnswerTooLong, refuse_endless_errors
from llmlaunch.launchers.ssh.connection import ENDLESS, Connection, text_of
from llmlaunch.launchers.ssh.home import Home, home_of
from llmlaunch.rundir import file_names
from llmlaunch.rundir.files import MOST_APPENDED_BYTES, object_of
from llmlaunch.rundir.values import text_or_none, whole_number

Wanted = Literal["state", "peaks", "all"]
"""What comes home: what tells the state of a run (and, of one that is over, its peaks); also the peaks so far; also the
logs of all nodes."""

_SCRIPT = Path(__file__).with_name("changes.py")
_RUN_SCRIPT = "exec python3 -c 'import sys; exec(sys.stdin.buffer.read(int(sys.argv[1])))'"
_LOOK_SECONDS = 1.0
_SILENT_SECONDS = 60.0
_PAUSES_SECONDS = (1.0, 2.0, 5.0, 10.0, 30.0)
_MOST_LINE_BYTES, _MOST_FRAME_BYTES = 1 << 16, 1 << 26
# of one look; a slow line that needs more begins again where it ended, since what is at home is known
_MOST_LOOK_SECONDS, _MOST_LOOK_BYTES = 1200.0, MOST_APPENDED_BYTES

_TOP = frozenset({file_names.STATUS, file_names.STOP, file_names.FROM_OLDER, "prepared"})
_SLURM_OUTPUT = re.compile(r"slurm-[0-9_]+\.out", re.ASCII)
_FOLDERS = frozenset({file_names.LOGS, file_names.PEAKS, file_names.ATTEMPTS})
_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,250}", re.ASCII)


def bring_home(run_dirs: Sequence[Path], wanted: Wanted) -> None:
    """Bring home what is new of these runs; those that live here are left alone. Raises UserError where a host is not
    reached, after the others were asked."""
    failures = [failure for _, _, failure in _asked(run_dirs, wanted) if failure is not None]
    if failures:
        raise failures[0]


def bring_each_home(run_dirs: Sequence[Path], wanted: Wanted, notify: Callable[[str], None]) -> None:
    """Bring home what is new of these runs, and warn of each host that is not reached."""
    for _, count, failure in _asked(run_dirs, wanted):
        if failure is not None:
            shown = "its run is" if count == 1 else f"its {count} runs are"
            notify(f"warning: {failure}; {shown} shown as last seen")


def _asked(run_dirs: Sequence[Path], wanted: Wanted) -> Iterator[tuple[str, int, UserError | None]]:
    """Yield each host, the number of its runs, and why they could not be brought home."""
    for host, runs in _by_host(run_dirs).items():
        try:
            with _Looks(host, runs, wanted, 0.0) as looks:
                looks.take_one()
        except UserError as failure:
            yield host, len(runs), failure
        else:
            yield host, len(runs), None


def _by_host(run_dirs: Sequence[Path]) -> dict[str, list[tuple[Path, Home]]]:
    by_host: dict[str, list[tuple[Path, Home]]] = {}
    for run_dir in dict.fromkeys(run_dirs):
        home = home_of(run_dir)
        if home is not None:
            by_host.setdefault(home.host, []).append((run_dir, home))
    return by_host


@contextmanager
def brought_home(run_dirs: Sequence[Path], notify: Callable[[str], None]) -> Iterator[Callable[[], None]]:
    """Bring home everything of these runs all the time, over one connection to each host that is made again when it is
    lost. What is yielded brings home what is new at once, as far as a host is reached."""
    over = threading.Event()
    threads = [
        threading.Thread(target=_go_on, args=(host, runs, over, notify), daemon=True)
        for host, runs in _by_host(run_dirs).items()
    ]
    for thread in threads:
        thread.start()

    def at_once() -> None:
        over.set()
        for thread in threads:
            thread.join()
        bring_each_home(run_dirs, "all", notify)

    try:
        yield at_once
    finally:
        over.set()


def _go_on(host: str, runs: Sequence[tuple[Path, Home]], over: threading.Event, notify: Callable[[str], None]) -> None:
    failures = 0
    while not over.is_set():
        try:
            with _Looks(host, runs, "all", _LOOK_SECONDS) as looks:
                while not over.is_set() and looks.take_one():
                    if failures:
                        notify(f"{host} is reached again")
                    failures = 0
        except UserError as failure:
            if not failures:
                notify(f"{failure}. It is tried again meanwhile")
            failures += 1
        over.wait(_PAUSES_SECONDS[min(failures, len(_PAUSES_SECONDS)) - 1] if failures else 0.0)


class _Looks:
    """One connection over which a host tells what is new of its runs: once, or `every` so many seconds."""

    def __init__(self, host: str, runs: Sequence[tuple[Path, Home]], wanted: Wanted, every: float) -> None:
        self._connection, self._runs = Connection(host), runs
        self._request = {
            "runs": [{"directory": home.directory, "known": _known(run_dir)} for run_dir, home in runs],
            "wanted": wanted,
            "every": every,
        }
        self._buffer = b""
        self._look_until, self._look_bytes = time.monotonic() + _MOST_LOOK_SECONDS, 0

    def __enter__(self) -> _Looks:
        script = _SCRIPT.read_bytes()
        self._errors = tempfile.TemporaryFile()
        self._process = self._connection.start(_RUN_SCRIPT + ' "$1"', str(len(script)), stderr=self._errors)
        self._until = time.monotonic() + _SILENT_SECONDS
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(script + json.dumps(self._request).encode() + b"\n")
            self._process.stdin.flush()  # and it stays open: its end is the end of the connection
        except OSError:
            pass  # why is told where the answer is missing
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()
        self._errors.close()

    def take_one(self) -> bool:
        """Write down what one look tells; False where it was the last. Raises UserError where the connection is
        lost, and where a look takes more seconds or bytes than any has."""
        self._look_until, self._look_bytes = time.monotonic() + _MOST_LOOK_SECONDS, 0
        while True:
            line = self._line()
            if line is None:
                return False
            try:
                record = object_of(line)
            except ValueError:
                raise UserError(self._connection.trouble("what came was none of the answers expected")) from None
            if "looked" in record:
                return True
            self._take(record)

    def _take(self, record: dict[str, Any]) -> None:
        number, packed = whole_number(record.get("run")), whole_number(record.get("packed"))
        if number is None or not 0 <= number < len(self._runs):
            raise UserError(self._connection.trouble("what came names no run"))
        run_dir = self._runs[number][0]
        gone = text_or_none(record.get("gone"))
        if gone is not None:
            if gone in _TOP:
                (run_dir / gone).unlink(missing_ok=True)
            return
        if packed is None or not 0 <= packed <= _MOST_FRAME_BYTES:
            raise UserError(self._connection.trouble("what came is damaged"))
        content = self._bytes(packed)
        path = _path_at_home(run_dir, record.get("path"))
        size, offset, changed = (whole_number(record.get(name)) for name in ("bytes", "offset", "changed"))
        if path is None or size is None or offset is None or changed is None or not 0 <= size <= _MOST_FRAME_BYTES:
            return
        if not 0 <= offset <= MOST_APPENDED_BYTES:
            return
        try:
            unpacked = zlib.decompressobj().decompress(content, size + 1)
            _write(path, unpacked, offset, changed, whole=record.get("whole") is True)
        except (OSError, zlib.error) as error:
            raise UserError(f"{path}: cannot be written: {error}") from error

    def _line(self) -> bytes | None:
        """Return the next line; None at the end of the stream of one that has ended well."""
        while b"\n" not in self._buffer:
            if len(self._buffer) > _MOST_LINE_BYTES:
                raise UserError(self._connection.trouble("what came is no line"))
            if not self._read():
                self._process.wait()
                reply = self._connection.reply(self._process.returncode, b"", text_of(self._errors))
                if reply.code != 0:
                    raise UserError(_python_trouble(self._connection.host, reply.code, reply.words))
                return None
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def _bytes(self, count: int) -> bytes:
        while len(self._buffer) < count:
            if not self._read():
                raise UserError(self._connection.trouble("the connection was lost"))
        content, self._buffer = self._buffer[:count], self._buffer[count:]
        return content

    def _refuse_endless_errors(self) -> None:
        try:
            refuse_endless_errors(self._errors)
        except AnswerTooLong:
            raise UserError(self._connection.trouble(ENDLESS)) from None

    def _read(self) -> bool:
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        self._refuse_endless_errors()
        if time.monotonic() > self._look_until or self._look_bytes > _MOST_LOOK_BYTES:
            raise UserError(self._connection.trouble("what it sends has no end"))
        while not select.select([descriptor], [], [], min(1.0, max(0.0, self._until - time.monotonic())))[0]:
            self._refuse_endless_errors()
            if time.monotonic() >= self._until:
                raise UserError(self._connection.trouble(f"nothing came for {_SILENT_SECONDS:.0f} s"))
        content = os.read(descriptor, 1 << 18)
        self._buffer += content
        self._look_bytes += len(content)
        self._until = time.monotonic() + _SILENT_SECONDS
        return bool(content)


def _python_trouble(host: str, code: int, words: str) -> str:
    last = words.strip().splitlines()[-1:] or [f"exit code {code}"]
    if code == 127:
        return f"{host}: no python3 on the PATH of a login shell there; let ~/.bash_profile there put one on it"
    return f"{host}: its python3 did not tell what is new ({last[0][:200]}); it must be 3.8 or later"


def _known(run_dir: Path) -> dict[str, tuple[int, int]]:
    """Return size and time of change of each file that came home, by its path."""
    known = {}
    for folder, folders, names in os.walk(run_dir):
        if Path(folder) == run_dir:
            folders[:] = [name for name in folders if name in _FOLDERS]
        for name in names:
            path = Path(folder, name)
            relative = str(path.relative_to(run_dir))
            if _path_at_home(run_dir, relative) is not None:
                state = path.lstat()
                known[relative] = (state.st_size, state.st_mtime_ns)
    return known


def _path_at_home(run_dir: Path, relative: object) -> Path | None:
    """Return the place of a file that a job writes; None for any other, and where a link is on the way."""
    if not isinstance(relative, str):
        return None
    parts = relative.split("/")
    of_job = relative in _TOP or _SLURM_OUTPUT.fullmatch(relative) if len(parts) == 1 else parts[0] in _FOLDERS
    if not of_job or len(parts) > 6 or not all(map(_PART.fullmatch, parts)):
        return None
    path = run_dir
    for part in parts[:-1]:
        path = path / part
        if path.is_symlink():
            return None
    return path / parts[-1]


def _write(path: Path, content: bytes, offset: int, changed: int, whole: bool) -> None:
    """Write what came of one file: a whole one in place of the one before, the next bytes of one that grows where they
    belong, so that two commands that bring the same home do no harm."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not whole:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            os.pwrite(descriptor, content, offset)
            os.utime(descriptor, ns=(changed, changed))
        finally:
            os.close(descriptor)
        return
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".", delete=False) as file:
        file.write(content)
    os.utime(file.name, ns=(changed, changed))
    Path(file.name).replace(path)
