"""`llmlaunch` as processes of their own, forked from one that has imported it: starting one takes no time."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Mapping
from functools import cache
from multiprocessing import forkserver, get_context
from multiprocessing.connection import Connection
from pathlib import Path
from subprocess import CompletedProcess
from threading import Lock, Timer

from sqlalchemy import Engine, event

import llmlaunch.store.collect
import llmlaunch.store.database
import llmlaunch.store.history
from llmlaunch.cli.main import main

PATIENCE_SECONDS = 240.0
FORKS = get_context("forkserver")
FORKS.set_forkserver_preload([__name__, "support.forked_imports"])
TESTS = Path(__file__).parents[1]
_ONE_AT_A_TIME = Lock()  # starting a process asks all others whether they have ended


@cache
def _start_server() -> None:
    """It takes no notice of this process's path, and says nothing of what it could not import."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(TESTS), before)))
    try:
        forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


class Command:
    """`llmlaunch WORDS` in `folder`; each of `prepare` is called in it before it begins."""

    def __init__(
        self, words: tuple[str, ...], folder: Path, environment: Mapping[str, str], *prepare: Callable[[], None]
    ) -> None:
        self._pipes = [FORKS.Pipe(duplex=False) for _ in range(2)]
        writers = [writer for _, writer in self._pipes]
        self._process = FORKS.Process(target=_run, args=(words, folder, dict(environment), writers, prepare))
        with _ONE_AT_A_TIME:
            _start_server()
            self._process.start()
        for writer in writers:
            writer.close()

    def poll(self) -> int | None:
        with _ONE_AT_A_TIME:
            return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()

    def communicate(self) -> tuple[int | None, str, str]:
        """The exit code, stdout and stderr of a command that has ended by itself."""
        out, err = (_read(reader) for reader, _ in self._pipes)
        with _ONE_AT_A_TIME:
            self._process.join(PATIENCE_SECONDS)
            return self._process.exitcode, out, err


def run_forked(
    words: tuple[str, ...], folder: Path, environment: Mapping[str, str], seconds: float = PATIENCE_SECONDS
) -> CompletedProcess[str]:
    """Run `llmlaunch WORDS` in `folder` to its end, or kill it after so long."""
    command = Command(words, folder, environment)
    overdue = Timer(seconds, command.kill)
    overdue.start()
    try:
        code, out, err = command.communicate()
    finally:
        overdue.cancel()
    return CompletedProcess(words, -signal.SIGKILL if code is None else code, out, err)


def limit_files(size: int) -> None:
    """What is written beyond that size, to any file, is refused as on a full disk."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def as_an_ordinary_owner() -> None:
    """Permissions hold for root, too, in a process without this capability."""
    libc, header, sets = ctypes.CDLL(None), (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    assert libc.capget(header, sets) == 0
    sets[0] &= ~2  # CAP_DAC_OVERRIDE, of the effective set
    assert libc.capset(header, sets) == 0


def small_transactions() -> None:
    """Transactions of the store are small, so that there are many to be caught in."""
    llmlaunch.store.collect.MOST_RECORDS = 50
    llmlaunch.store.database.WRITER_SECONDS = float(os.environ.get("WRITER_SECONDS", 30))
    llmlaunch.store.database.SILENT_SECONDS = float(os.environ.get("SILENT_SECONDS", 90))


def pause_at(folder: Path, moment: str) -> None:
    """At a moment of the second transaction, `written` or `commit`, the command writes `here` into the folder, and
    waits until somebody has written `go`."""
    written = 0

    def pause() -> None:
        if written == 2 and not (folder / "here").exists():
            (folder / "here").touch()
            give_up_at = time.monotonic() + PATIENCE_SECONDS
            while not (folder / "go").exists() and time.monotonic() < give_up_at:
                time.sleep(0.01)

    def executed(connection: object, cursor: object, statement: str, *_: object) -> None:
        nonlocal written
        written += statement.startswith("INSERT INTO measurements")
        if moment == "written":
            pause()

    event.listen(Engine, "after_cursor_execute", executed)
    if moment == "commit":
        event.listen(Engine, "commit", lambda connection: pause())


def _read(reader: Connection) -> str:
    with os.fdopen(os.dup(reader.fileno()), "rb") as file:
        content = file.read()
    reader.close()
    return content.decode()


def _run(
    words: tuple[str, ...],
    folder: Path,
    environment: dict[str, str],
    writers: list[Connection],
    prepare: tuple[Callable[[], None], ...],
) -> None:
    for descriptor, writer in enumerate(writers, start=1):
        os.dup2(writer.fileno(), descriptor)
        writer.close()
    sys.stdout, sys.stderr = (os.fdopen(descriptor, "w", closefd=False) for descriptor in (1, 2))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    for each in prepare:
        each()
    sys.argv = ["llmlaunch", *words]
    main()
