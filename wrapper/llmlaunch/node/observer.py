"""The process that runs next to an observed command. It makes the directory, receives messages from the ranks, runs the
monitor, reads the steps in the log, and records how the command ended. Whatever happens to it, the training does not
notice.

`beside` does the same without a command of its own, on a node whose ranks were started from another one (`observe --
srun torchrun ...`): the hook of the node's first rank starts it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import struct
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from ..rundir import file_names
from ..rundir.file_names import attempt_folder
from ..rundir.files import create, parse_json, replace_bytes, replace_json
from ..rundir.regular_files import read_bytes
from ..rundir.step_lines import StepLines
from ..rundir.trainer_lines import ANY_SCRIPT, SLOW
from ..rundir.values import byte_count, host_names
from .files import node_log_tail, say
from .hook_files import HOOK_FOLDER, SOURCES, hook_file
from .host_memory import memory_counters
from .line_writer import DiskThread
from .monitor import Monitor, monitor_options
from .nvml_sampler import load_small
from .observed_job import (
    batch_script,
    description,
    jobs_output,
    link_log,
    observed_job,
    own_output,
    scontrol_job,
    socket_name,
    take_attempt,
)
from .observed_ranks import ObservedRanks
from .process_tree import Process
from .progress import StepTracker

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ..rundir.attempt_files import AttemptStart
    from ..rundir.files import LogTail
    from ..rundir.node_files import ObservedEnd
    from .files import Record
    from .observed_job import ObservedJob

END_SIGNAL = signal.SIGRTMAX  # ends the monitor; other signals to this process concern the whole job
ASK_TO_STOP = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU)
TURN_SECONDS = 1.0
WRITE_SECONDS = 5.0  # between two progress.json
TAKE_OVER_SECONDS = 10.0
LAST_WORDS_SECONDS = 2.0  # for messages of ranks that have ended
LINGER_SECONDS = 30.0  # without a command: from the last rank's end to our own, since torchrun may restart ranks
CREDENTIALS = struct.Struct("3i")
OBSERVE_VARIABLE = "LLMLAUNCH_OBSERVE"  # tells trainers/hook.py what it needs, in every process below the command


class Observer:
    """The observer of one command. `link` is a socket to the process that waits for the command, and `parent` is that
    process."""

    def __init__(
        self,
        options: argparse.Namespace,
        command: Sequence[str],
        link: socket.socket,
        parent: int,
        archive: Callable[[], bytes] | None,
    ) -> None:
        self._options, self._command, self._link, self._archive = options, command, link, archive
        self._job = observed_job(os.environ, command, parent)
        self._start: ObservedEnd = {"started_at": time.time(), "child": None}
        self._end: Record = {}

    def run(self) -> None:
        """Observe until the command has ended. Never raises."""
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        output = own_output()
        with contextlib.suppress(Exception):
            os.nice(10)
            load_small("pynvml")
        try:
            directory, attempt = take_attempt(self._job, self._options.dir)
            _write_tools(directory, self._archive)
        except OSError as error:
            self._send({"environment": {}, "problem": f"{error.filename or 'observed'}: {error.strerror}"})
            return
        node = NodeObserver(directory, attempt, self._job.node, self._options.interval)
        self._send({"environment": _variables(directory, attempt, self._options.interval)})
        _redirect_output(directory, attempt, self._job)
        report: list[str] = []
        try:
            threading.Thread(target=self._hear_command, args=(node,), daemon=True).start()
            node.give(lambda: self._describe(node, output))
            node.run()
            report = self._write_end(node)
        except Exception as error:
            say(f"observe: {type(error).__name__}: {error}; the training continues unobserved")
        self._send({"done": True, "report": report})

    def _hear_command(self, node: NodeObserver) -> None:
        """Wait for the message that the command has ended, or, if nobody is there to send it, until the command is
        gone."""
        while "status" not in self._end:
            try:
                data = self._link.recv(2**16)
            except OSError:
                data = b""
            if not data:
                child = self._start["child"]
                process = None if child is None else Process(child)
                while process is not None and process.alive():
                    time.sleep(TURN_SECONDS)
                break
            message = json.loads(data)
            self._start.update({"child": message["child"]} if "child" in message else {})
            self._end.update(message if "status" in message else {})
            if message.get("told") in ASK_TO_STOP:
                self._start["stop_signal"] = signal.Signals(message["told"]).name
        self._end["ended_at"] = time.time()
        node.stop()

    def _describe(self, node: NodeObserver, output: tuple[str, int] | None) -> None:
        """Record what is known at the beginning. The first observer of a job also records what is the same for all."""
        from .observed_end import write_end  # here: the command does not wait for all that knows of causes

        memory = memory_counters()
        self._start["memory_before"] = {
            "at": time.time(),
            "oom_kills": memory["oom_kills"],
            "limit_bytes": memory["limit_bytes"],
            "peak_bytes": memory["peak_bytes"],
        }
        write_end(node.directory, node.attempt, self._job, self._start)
        if not self._job.first:
            return
        described = description(self._job, self._command, os.environ)
        run = {"schema": 1, "name": self._job.name, "observed": True, "nodes": self._job.nodes}
        run["peak_kind"] = "device" if os.path.exists("/dev/nvidiactl") else "resident"  # noqa: PTH110
        run["progress"] = {"step_patterns": list(ANY_SCRIPT), "slow_patterns": list(SLOW), "promised": False}
        create(node.directory / file_names.RUN, json.dumps(run, indent=1) + "\n")
        self._write_submission(node.directory)
        begun: AttemptStart = {
            "schema": 1,
            "attempt": node.attempt,
            "layout": "",
            "fallback": False,
            "cluster": os.environ.get("SLURM_CLUSTER_NAME"),
            "nodes": host_names(described["node_list"] or self._job.node),
            "started_at": self._start["started_at"],
            "child": self._start["child"],
            "observed": described,
        }
        replace_json(node.folder / file_names.ATTEMPT, begun)
        said = scontrol_job(self._job)
        output = output or jobs_output(said)
        if output is not None:
            link_log(node.directory, node.attempt, self._job.node, output[0])
            node.follow(*output)
        described["batch_script"] = batch_script(self._job, said, os.environ)
        if output is not None:
            begun["log"], begun["log_offset"] = output
        replace_json(node.folder / file_names.ATTEMPT, begun)

    def _write_submission(self, directory: Path) -> None:
        """Write what `status`, `logs` and `collect` identify the job by. The first attempt's file is kept."""
        at = self._start["started_at"]
        host = os.uname().nodename if self._job.launcher == "local" else None
        record = {"schema": 1, "launcher": self._job.launcher, "job_id": self._job.job_id, "submitted_at": at}
        create(directory / file_names.SUBMISSION, json.dumps({**record, "cluster": host}, indent=1) + "\n")
        stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(at))
        create(directory / file_names.RUN_ID, f"{self._job.name}-{stamp}-{os.urandom(2).hex()}\n")

    def _write_end(self, node: NodeObserver) -> list[str]:
        """Write how the command ended, and return what is to be reported if this observer reports for the job."""
        from .observed_end import claims_report, end_of, report_lines, write_end

        record: ObservedEnd = {**self._start, **end_of(self._end)}
        if self._start["child"] is not None:
            node.ranks.note_end(self._start["child"], record)
        judged = write_end(node.directory, node.attempt, self._job, record)
        if not judged or not claims_report(node.directory, node.attempt):
            return []
        return report_lines(node.directory, node.attempt)

    def _send(self, message: Record) -> None:
        with contextlib.suppress(OSError):  # who waits for the command may be gone
            self._link.send(json.dumps(message).encode(), socket.MSG_DONTWAIT)


class NodeObserver:
    """What one process observes on its node. Among several, the one that holds the node's socket receives messages from
    the ranks and runs the monitor; when it ends, another takes its place. The monitor has the main thread. Files are
    written by a separate thread, which may hang."""

    def __init__(self, directory: Path, attempt: str, node: str, interval: float, alone: bool = False) -> None:
        self.directory, self.attempt, self.node = directory, attempt, node
        self.folder = attempt_folder(directory, attempt)
        self.ranks = ObservedRanks(self.folder, node)
        self._interval, self._alone = interval, alone
        self._name = socket_name(str(directory), attempt, node)
        self._listener = self._bound()  # before any rank can send a message
        self._log: LogTail | None = None
        self._monitor: Monitor | None = None
        self._log_place: tuple[Path, int] | None = None
        self._disk = DiskThread()
        self._stopped = threading.Event()
        self._all_heard = threading.Event()
        self._tracker = StepTracker({}, time.monotonic())
        self._lines = StepLines(ANY_SCRIPT, SLOW)
        self._written_at = 0.0
        self._unwritten = False
        self._step_at: float | None = None
        self._quiet_since = time.monotonic()
        self.give = self._disk.give  # to the thread that reads and writes files

    def follow(self, path: str, offset: int) -> None:
        """Read the steps in this log, from `offset` on."""
        self._log = node_log_tail(Path(path), offset)
        self._log_place = (Path(path), offset)
        if self._monitor is not None:
            self._monitor.follow_log(*self._log_place)

    def stop(self) -> None:
        """End the monitor once all messages of ranks have been received. `run` returns when the last files are
        written."""
        if self._listener is not None:
            with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
                sender.settimeout(LAST_WORDS_SECONDS)
                sender.sendto(b"", self._name)  # it queues behind the ranks' messages
                self._all_heard.wait(LAST_WORDS_SECONDS)
        self._stopped.set()
        os.kill(os.getpid(), END_SIGNAL)

    def run(self, first: Record | None = None) -> None:
        """Observe until `stop`. `first` is the message of the rank that started this process."""
        self._disk.start()
        threading.Thread(target=self._look_again_and_again, daemon=True).start()
        while not self._stopped.is_set():
            if self._listener is not None:
                if first is not None:
                    self.give(lambda: self.ranks.hear(first["pid"], first))
                threading.Thread(target=self._listen, args=(self._listener,), daemon=True).start()
                self._run_monitor()
                break
            if self._alone:  # the node has an observer
                return
            signal.sigtimedwait({END_SIGNAL}, TAKE_OVER_SECONDS)
            self._listener = self._bound()
        self._stopped.set()
        self.give(lambda: self._look(last=True))
        self._disk.finish(threading.TIMEOUT_MAX)

    def _bound(self) -> socket.socket | None:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        try:
            listener.bind(self._name)
        except OSError:
            listener.close()
            return None
        return listener

    def _listen(self, listener: socket.socket) -> None:
        """Receive messages from ranks. The kernel tells which process of which user sends one, by its process id here,
        even if it runs in a container with process ids of its own."""
        while True:
            data, ancillary, _, _ = listener.recvmsg(2**16, socket.CMSG_SPACE(CREDENTIALS.size))
            for level, kind, content in ancillary:
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS):
                    pid, user, _ = CREDENTIALS.unpack(content[: CREDENTIALS.size])
                    if pid == os.getpid() and not data:
                        self._all_heard.set()
                    elif user == os.getuid():
                        self._hear(data, pid)

    def _hear(self, data: bytes, pid: int) -> None:
        with contextlib.suppress(ValueError):
            message = parse_json(data)
            if isinstance(message, dict) and byte_count(message.get("rank")) is not None:
                self.give(lambda: self.ranks.hear(pid, message))

    def _run_monitor(self) -> None:
        options = monitor_options(self.directory, self.attempt, self.node, self._interval)
        self._monitor = Monitor(options, frozenset({END_SIGNAL}))
        if self._log_place is not None:
            self._monitor.follow_log(*self._log_place)
        self._monitor.run()

    def _look_again_and_again(self) -> None:
        while not self._stopped.wait(TURN_SECONDS):
            if self._disk.idle:
                self.give(self._look)

    # --- in the thread of the files

    def _look(self, last: bool = False) -> None:
        """Read the new steps of the log, and write the newest now and then, or if this is the `last` look."""
        if self._alone:
            self._stop_if_quiet()
        if self._log is None:
            return
        lines = self._log.lines()
        if last:
            lines = [*lines, self._log.rest()]
        if self._tracker.update(self._lines.read(lines), time.monotonic()):
            self._step_at, self._unwritten = time.time(), True
        if self._unwritten and (last or time.monotonic() - self._written_at >= WRITE_SECONDS):
            self._unwritten, self._written_at = False, time.monotonic()
            record = {"schema": 1, **self._tracker.record(), "at": self._step_at, "tracker_step": None}
            replace_json(self.folder / file_names.PROGRESS, {**record, "hung": None, "behind": None})

    def _stop_if_quiet(self) -> None:
        if self.ranks.any_alive():
            self._quiet_since = time.monotonic()
        elif time.monotonic() - self._quiet_since > LINGER_SECONDS and not self._stopped.is_set():
            self.stop()


def beside(argv: list[str]) -> int:
    """Observe a node whose ranks were started from another one, until they have ended. Always returns 0."""
    options = argparse.ArgumentParser(prog="node.pyz beside")
    for name in ("--run-dir", "--attempt", "--node", "--interval", "--first"):
        options.add_argument(name, required=True)
    words = options.parse_args(argv)
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    with contextlib.suppress(Exception):
        os.nice(10)
        load_small("pynvml")
    try:
        observer = NodeObserver(Path(words.run_dir), words.attempt, words.node, float(words.interval), alone=True)
        observer.run(json.loads(words.first))
    except Exception as error:
        say(f"observe: {type(error).__name__}: {error}; the training continues unobserved")
    return 0


def is_observed(environment: Mapping[str, str]) -> bool:
    """Whether this process already runs below an observed command. sbatch passes variables on to other jobs."""
    try:
        return bool(json.loads(environment[OBSERVE_VARIABLE])["job"] == environment.get("SLURM_JOB_ID", ""))
    except (KeyError, ValueError, TypeError):
        return False


def _variables(directory: Path, attempt: str, interval: float) -> dict[str, str]:
    """Return the variables added to the environment of the command's processes: the hook, and where it sends its
    messages."""
    own_job = os.environ.get("SLURM_JOB_ID", "")
    place = {"run": str(directory), "attempt": attempt, "job": own_job, "interval": interval}
    hook, others = str(directory / HOOK_FOLDER), os.environ.get("PYTHONPATH")
    return {OBSERVE_VARIABLE: json.dumps(place), "PYTHONPATH": f"{hook}:{others}" if others else hook}


def _write_tools(directory: Path, archive: Callable[[], bytes] | None) -> None:
    """Write the hook for the trainers' Python, and the node.pyz with which the hook starts an observer on another node.
    Existing files are kept, because other nodes may be reading them. Raises OSError if the hook cannot be written."""
    for folder in (file_names.LOGS, file_names.PEAKS):
        (directory / folder).mkdir(exist_ok=True)
    for name in SOURCES:
        _write_once(directory / name, hook_file(name))
    with contextlib.suppress(OSError):
        _write_once(directory / file_names.NODE_ARCHIVE, _own_archive() if archive is None else archive())


def _write_once(path: Path, content: bytes) -> None:
    try:
        same = read_bytes(path) == content
    except OSError:
        same = False
    if not same:
        replace_bytes(path, content, lasting=False)


def _own_archive() -> bytes:
    return Path(sys.argv[0]).read_bytes()


def _redirect_output(directory: Path, attempt: str, job: ObservedJob) -> None:
    """Leave the command's streams to the command, so that nobody who waits for the end of its output waits for this
    process."""
    path = file_names.node_log(directory, attempt, f"{job.node}.{job.process}.monitor")
    null = os.open(os.devnull, os.O_RDWR)
    try:
        log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    except OSError:
        log = null
    for number, file in ((0, null), (1, log), (2, log)):
        os.dup2(file, number)
