"""A clock that jumps from event to event, for real processes: they read it and sleep by it (clock.c), and it stands
still until every one of them waits. So a slow or loaded machine changes no result, but for the milliseconds that Python
sleeps until a child has ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import heapq
import mmap
import os
import selectors
import signal
import socket
import struct
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path

SLEEP = struct.Struct("@cid")  # clock.c
PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
POLL_SECONDS, PATIENCE_SECONDS = 0.001, 0.02  # between two looks at the processes; where one is to sleep again soon
LONGEST_DECISION_SECONDS = 300.0  # by the machine's own clock; then something hangs

Action = Callable[[], None]


class Timer:
    """An action to come, unless it is cancelled."""

    def __init__(self, at: float, action: Action) -> None:
        self.at = at
        self.action = action
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


class Command:
    """A command of SLURM that a process of the job calls, and that waits for its answer. `on_line` hears each line of
    its standard input, `on_end` that it ended without an answer."""

    def __init__(self, connection: socket.socket, message: bytes) -> None:
        self.words = message[1:].decode().split("\0")[:-1]
        self.on_line: Callable[[str], None] = lambda line: None
        self.on_end: Action = lambda: None
        self._connection = connection
        self._is_answered = False
        self._rest = ""

    def say(self, text: str) -> None:
        """Print something, and go on."""
        if not self._is_answered:
            self._send(b"O" + text.encode())

    def answer(self, code: int = 0, text: str = "") -> None:
        if not self._is_answered:
            self._is_answered = True
            self._send(b"A" + bytes([code]) + text.encode())

    def _send(self, message: bytes) -> None:
        with contextlib.suppress(OSError):  # killed in the meantime
            self._connection.send(message)

    def take_input(self, text: bytes) -> None:
        *lines, self._rest = (self._rest + text.decode()).split("\n")
        for line in lines:
            self.on_line(line)

    def take_end(self) -> None:
        if not self._is_answered:
            self._is_answered = True
            self.on_end()


class SimulatedClock:
    """`command` takes what the job asks of SLURM, `moved` hears of each step of the clock, `ended` of the end of a
    child by its process id and exit code. While `is_ordinary` and nothing is watched closely, the loop of a process
    waits for `look_seconds` instead of as often as it wants to."""

    def __init__(self, folder: Path, start: float, look_seconds: float) -> None:
        self.now = start
        self.longest_decision_seconds = 0.0
        self.command: Callable[[Command], None] = lambda command: None
        self.moved: Action = lambda: None
        self.ended: Callable[[int, int], None] = lambda pid, code: None
        self.is_ordinary: Callable[[], bool] = lambda: False
        self._look_seconds = look_seconds
        self._closely_until = start
        self._timers: list[tuple[float, int, Timer]] = []
        self._numbers = count()
        self._quiet: list[tuple[Timer, float]] = []  # that would look sooner, and after how many seconds
        self._tasks: dict[str, tuple[bytes, bytes]] = {}  # when all waited last
        self._woken_threads: set[str] = set()
        self._asleep_again: set[str] = set()
        self._only_asleep: set[str] = set()  # that wait for nothing but the clock
        self._path = folder / "clock"
        self._path.write_bytes(struct.pack("@d", start))
        with self._path.open("r+b") as file:
            self._page = mmap.mmap(file.fileno(), 8)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.bind(str(folder / "socket"))
        self._socket.listen(1024)
        self._selector = selectors.EpollSelector()
        self._selector.register(self._socket, selectors.EVENT_READ, self._accept)
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self.environment = {
            "LD_PRELOAD": str(folder / "clock.so"),
            "LLMLAUNCH_WEEK_CLOCK": str(self._path),
            "LLMLAUNCH_WEEK_SOCKET": str(folder / "socket"),
        }

    def after(self, seconds: float, action: Action) -> Timer:
        timer = Timer(self.now + max(0.0, seconds), action)
        self._enter(timer, timer.at)
        return timer

    def _enter(self, timer: Timer, at: float) -> None:
        heapq.heappush(self._timers, (at, next(self._numbers), timer))

    @property
    def is_quiet(self) -> bool:
        return self.now >= self._closely_until and self.is_ordinary()

    def watch_closely(self, seconds: float) -> None:
        """Let the job's program look as often as it wants to for so long, the one that waits now included."""
        self._closely_until = max(self._closely_until, self.now + seconds)
        for timer, wanted in self._quiet:
            self._enter(timer, self.now + wanted)
        self._quiet.clear()

    def run(self, until: float) -> None:
        """Run until this time, or until nothing is to come any more."""
        while True:
            self._settle()
            while self._timers and self._timers[0][2].cancelled:
                heapq.heappop(self._timers)
            if not self._timers and descendants(os.getpid()):
                raise RuntimeError(f"the job's processes wait for nothing that will come: {sorted(self._tasks)}")
            if not self._timers or self._timers[0][0] > until:
                self._move(until)
                self._settle()
                return
            at, _, timer = heapq.heappop(self._timers)
            self._move(at)
            if not timer.cancelled:
                timer.cancel()  # it may be entered twice
                timer.action()

    def _move(self, at: float) -> None:
        self.now = at
        self._page[:8] = struct.pack("@d", at)
        self.moved()

    # --- what the processes ask ------------------------------------------------------------------------------

    def _serve(self, seconds: float) -> bool:
        """Take in what processes have sent. Returns whether there was anything."""
        events = self._selector.select(seconds)
        for key, _ in events:
            key.data()
        return bool(events)

    def _accept(self) -> None:
        connection, _ = self._socket.accept()
        connection.setblocking(True)
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._first_message(connection))

    def _first_message(self, connection: socket.socket) -> None:
        message = self._message(connection)
        if message[:1] == b"C":
            command = Command(connection, message)
            self._selector.modify(connection, selectors.EVENT_READ, lambda: self._next_message(connection, command))
            self.command(command)
        elif message:
            kind, number, seconds = SLEEP.unpack(message)
            thread = str(number)
            self._asleep_again.add(thread)
            if kind == b"S":
                self._only_asleep.add(thread)
            is_longer = kind == b"L" and self.is_quiet
            timer = self.after(self._look_seconds if is_longer else seconds, lambda: self._wake(connection, thread))
            if is_longer:
                self._quiet.append((timer, seconds))
            self._selector.modify(connection, selectors.EVENT_READ, lambda: self._woken(connection, timer, thread))

    def _wake(self, connection: socket.socket, thread: str) -> None:
        self._woken_threads.add(thread)
        self._forget(connection)

    def _woken(self, connection: socket.socket, timer: Timer, thread: str) -> None:
        """By what it waited for, by a signal, or killed."""
        timer.cancel()
        if not self._message(connection):
            self._forget(connection)
            self._asleep_again.discard(thread)
            self._only_asleep.discard(thread)

    def _next_message(self, connection: socket.socket, command: Command) -> None:
        message = self._message(connection)
        if message:
            command.take_input(message[1:])
        else:
            self._forget(connection)
            command.take_end()

    def _message(self, connection: socket.socket) -> bytes:
        try:
            return connection.recv(256 * 1024)
        except OSError:
            return b""

    def _forget(self, connection: socket.socket) -> None:
        try:
            self._selector.unregister(connection)
        except KeyError:
            return
        connection.close()

    # --- when they all wait ----------------------------------------------------------------------------------

    def _settle(self) -> None:
        """Return once every process of the job waits: for the simulator, for another process or for a signal."""
        began = time.perf_counter()
        before: dict[str, tuple[bytes, bytes]] | None = None
        while True:
            while self._serve(0.0 if self._woken_threads <= self._asleep_again else PATIENCE_SECONDS):
                pass
            self._reap()
            tasks = self._look_at_tasks()
            if tasks is not None and not self._serve(0.0) and (tasks == before or self._only_slept(tasks)):
                break
            before = tasks
            self._serve(POLL_SECONDS)
            if time.perf_counter() - began > LONGEST_DECISION_SECONDS:
                raise RuntimeError(f"the job's processes do not come to rest: {before}")
        self._tasks = tasks
        self._woken_threads.clear()
        self._asleep_again.clear()
        self._only_asleep.clear()
        self.longest_decision_seconds = max(self.longest_decision_seconds, time.perf_counter() - began)

    def _only_slept(self, tasks: dict[str, tuple[bytes, bytes]]) -> bool:
        """Whether nothing happened since all waited but that those who were woken went to sleep again."""
        if not self._woken_threads or self._woken_threads != self._asleep_again or tasks.keys() != self._tasks.keys():
            return False
        return all(state == self._tasks[task] for task, state in tasks.items() if task not in self._woken_threads)

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            self.ended(pid, os.waitstatus_to_exitcode(status))

    def _look_at_tasks(self) -> dict[str, tuple[bytes, bytes]] | None:
        """Return the state of every thread below this process, and how often it has run; None where one runs now."""
        tasks = {}
        try:
            below = descendants(os.getpid())
        except OSError:  # no file can be opened for the moment
            return None
        for pid in below:
            try:
                for thread in _names(f"/proc/{pid}/task"):
                    if thread in self._only_asleep:  # or about to be: it has nothing else to do
                        tasks[thread] = (b"S", b"")
                        continue
                    folder = f"/proc/{pid}/task/{thread}"
                    state = _read(f"{folder}/stat").rpartition(b") ")[2][:1]
                    if state in b"RDX" and state:
                        return None
                    if state == b"S" and _read(f"{folder}/wchan") == b"0":  # about to sleep, and has yet to get there
                        return None
                    tasks[thread] = (state, _read(f"{folder}/schedstat").split()[-1])
            except (OSError, IndexError):
                return None  # it ended meanwhile
        return tasks


def descendants(parent: int) -> list[int]:
    found = []
    waiting = [parent]
    while waiting:
        pid = waiting.pop()
        try:
            children = [
                int(child)
                for thread in _names(f"/proc/{pid}/task")
                for child in _read(f"/proc/{pid}/task/{thread}/children").split()
            ]
        except (FileNotFoundError, ProcessLookupError):
            continue
        found += children
        waiting += children
    return found


def kill_all(parent: int) -> None:
    """Kill everything below `parent`, and it as well unless it is this process."""
    for pid in [*([] if parent == os.getpid() else [parent]), *descendants(parent)]:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def _read(path: str) -> bytes:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return os.read(descriptor, 65536)
    finally:
        os.close(descriptor)


def _names(folder: str) -> list[str]:
    with os.scandir(folder) as entries:
        return [entry.name for entry in entries]
