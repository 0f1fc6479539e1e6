"""Notices of what becomes of an attempt, for a person who is elsewhere: posted to a webhook, or handed to a command.

`notify` returns at once. A process of its own, with no descriptor of its caller, delivers the notice or gives up after
ALTOGETHER_SECONDS. What became of it is in `attempts/<attempt>/notices.jsonl`. The address of a webhook is a secret: it
is read from the environment, and never written or named.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..causes.redaction import harmless, masked, secret_values
from ..rundir import file_names
from ..rundir.file_names import attempt_folder
from ..rundir.notices import notice_lines
from ..rundir.run_file import read_run_file
from ..rundir.values import counted, job_of, printable, time_or_none, to_type
from .files import PeaksFile

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from ..rundir.attempt_files import AttemptStart, Hang, Progress, Status
    from ..rundir.run_file import NoticeTarget
    from ..rundir.slow_devices import SlowDevice
    from .files import Record
    from .restart_policy import Next


MOST_NODES, MOST_DEVICES = 4, 4  # names in a sentence

_FOLLOWS = {
    "restart": "It starts again in its allocation",
    "requeue": "The job goes back into the queue",
    "chain": "The next job of the chain goes on",
    "fallback": "The next layout goes on in the same allocation",
    "again": "It is tried again in the same allocation",
    "rollback": "It goes on from an older checkpoint in the same allocation",
}

_TO_TYPE = {"succeeded": "report", "stopped": "resume"}


def start_text(began: AttemptStart, steps: object, earlier: Status | None) -> str:
    """Return that an attempt begins, on which nodes and after which step. `earlier` is the status of the attempt
    before it, empty where that left none, and None for the first one."""
    nodes = began["nodes"]
    names = ", ".join(nodes[:MOST_NODES]) + (", ..." if len(nodes) > MOST_NODES else "")
    where = f"{counted(len(nodes), 'node')} ({names})"
    text = f"training starts on {where}" if earlier is None else f"training starts again on {where}"
    text += f" after step {_number(began['from_step'])}{_of(steps)}." if began["from_step"] else "."
    if began["note"]:
        text += f" {began['note']}."
    if earlier is not None and not earlier:
        text += (
            " The attempt before it left no word of its end: the node of its batch script was lost, or SLURM ended it."
        )
    return text


def first_step_text(progress: Progress) -> str:
    """Return the first step that was logged, with its loss and pace."""
    parts = [f"first step: {_number(progress['step'])}{_of(progress['steps'])}"]
    if progress["loss"] is not None:
        parts.append(f"loss {progress['loss']:.6g}")
    if progress["step_seconds"] is not None:
        parts.append(f"{progress['step_seconds']:.3g} s a step")
    return ", ".join(parts) + "."


def stall_text(hung: Hang, progress: Progress) -> str:
    """Return what was waited for when the watchdog ended the training, and where the ranks stood."""
    where = f" {hung['where'][0].upper()}{hung['where'][1:]}." if hung.get("where") else ""
    return (
        f"training hangs after step {_number(progress['step'])}{_of(progress['steps'])}: no sign of {hung['what']} for "
        f"{hung['since_seconds']:.0f} s (limit {hung['allowed_seconds']:.0f} s). It is ended.{where}"
    )


def slow_text(devices: Sequence[SlowDevice]) -> str:
    """Return which GPUs are slower than their peers, and by what that shows."""
    more = f"; and {len(devices) - MOST_DEVICES} more" if len(devices) > MOST_DEVICES else ""
    return f"slow: {'; '.join(device.sentence() for device in devices[:MOST_DEVICES])}{more}."


def end_text(
    run_directory: Path, status: Status, progress: Progress, follows: Next, goodput: float | None = None
) -> str:
    """Return how an attempt ended, how far the training came, with which goodput, what follows, and what to type."""
    text = f"{status['state']}: {status['why']}."
    if progress.get("step") is not None:
        share = "" if goodput is None else f", goodput {100 * goodput:.0f} %"
        text += f" Step {_number(progress['step'])}{_of(progress.get('steps'))}{share}."
    if follows.action == "end":
        text += "" if follows.why in (status["why"], "done") else f" Nothing follows: {follows.why}."
        return f"{text} Type: {to_type(_TO_TYPE.get(status['state'], 'status'), str(run_directory))}"
    wait = f", in {follows.seconds} s at the earliest" if follows.seconds else ""
    newest = status.get("saved_step") if follows.action != "rollback" else None
    after = f" after step {_number(newest)}" if newest else ""
    return (
        f"{text} {_FOLLOWS[follows.action]}{after}{wait} ({follows.why}). Type: {to_type('status', str(run_directory))}"
    )


def _number(step: object) -> str:
    return f"{step:,}" if isinstance(step, int) else "?"


def _of(steps: object) -> str:
    return f" of {steps:,}" if isinstance(steps, int) else ""


ALTOGETHER_SECONDS = 20.0  # for one notice, its retries and the resolution of names included
TRY_SECONDS = 8.0  # for one answer
BACKOFF_SECONDS = (0.5, 2.0)  # before the second and the third try
LAST_SECONDS = 0.9  # the most that the end of a job waits for its last notices
MOST_AN_HOUR = 20  # of one run; its end is told in any case
MOST_CHARACTERS = 3000  # Slack cuts a longer message
ELSEWHERE = "redirects to another host"

_deliveries: list[int] = []  # pipes of this process's notices; each closes when its notice is delivered or given up


def notify(run_directory: Path, attempt: str, event: str, text: str) -> None:
    """Send `text` to the webhook and the command of the recipe's `notify`, if it names `event` or names no events.

    Nothing is raised, and nothing is waited for. The same event with the same text is sent once per attempt.
    """
    with contextlib.suppress(Exception):
        run = read_run_file(run_directory)
        target = run.get("notify")
        if not target or event not in (target.get("events") or [event]):
            return
        notice = {
            "event": event,
            "text": text,
            "run": run.get("name") or run_directory.name,
            "run_directory": str(run_directory),
            "attempt": attempt,
            "job": job_of(attempt),
            "host": socket.gethostname(),
            "at": time.time(),
        }
        _deliveries.append(_in_background(lambda: _deliver(run_directory, target, notice)))


def wait_for_deliveries(seconds: float = LAST_SECONDS) -> None:
    """Wait in a SLURM job until this process's notices are delivered or given up, at most `seconds` in all.

    What the batch script of a job started is killed when the script ends, the process that delivers included.
    """
    if not os.environ.get("SLURM_JOB_ID"):
        return
    until = time.monotonic() + seconds
    for pipe in _deliveries:
        ready = select.poll()
        ready.register(pipe, select.POLLIN | select.POLLHUP)
        ready.poll(max(0.0, until - time.monotonic()) * 1000)


def _in_background(act: Callable[[], None]) -> int:
    """Run `act` in a session of its own, as nobody's child. Returns a pipe that closes when it has ended."""
    ended, open_end = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.setsid()
            if os.fork() == 0:
                _let_go(open_end)
                act()
        finally:
            os._exit(0)
    os.close(open_end)
    os.waitpid(child, 0)  # it has only forked
    return ended


def _let_go(kept: int) -> None:
    """Close every descriptor but `kept`, outlive the signals that end a job, and be killed if all else fails."""
    signal.set_wakeup_fd(-1)  # a loop's pipe is closed here, too, and its number may be a file's next
    null = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(null, standard)
    for descriptor in [int(path.name) for path in Path("/proc/self/fd").iterdir()]:
        if descriptor > 2 and descriptor != kept:
            with contextlib.suppress(OSError):
                os.close(descriptor)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda *_: None)  # not SIG_IGN, which a command would inherit
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    signal.alarm(int(ALTOGETHER_SECONDS) + 10)  # a file system may hang


def _deliver(run_directory: Path, target: NoticeTarget, notice: Record) -> None:
    """Send the notice to every receiver at once, and note what became of it."""
    until = time.monotonic() + ALTOGETHER_SECONDS
    webhook = target.get("webhook")
    secrets = secret_values(os.environ, [str(webhook)])
    notice["text"] = printable(masked(notice["text"][:MOST_CHARACTERS], secrets))
    journal = _Journal(run_directory, notice)
    if journal.has_it() or (notice["event"] != "end" and journal.is_full()):
        return
    receivers: dict[str, Callable[[], str]] = {}
    if webhook is not None:
        message = f"{notice['run']} (job {notice['job']}): {notice['text']}"
        receivers["webhook"] = lambda: _post(webhook, message, until)
    command = target.get("command")
    if command:
        receivers["command"] = lambda: _run(command, run_directory, notice, until)
    for receiver in receivers:
        journal.write(receiver, None, None)
    threads = [threading.Thread(target=_attend, args=(journal, *item), daemon=True) for item in receivers.items()]
    for thread in threads:
        thread.start()
    for thread, receiver in zip(threads, receivers):
        thread.join(max(0.0, until - time.monotonic()) + 0.5)  # the resolution of a name knows no time limit
        if thread.is_alive():
            journal.write(receiver, False, f"no end within {ALTOGETHER_SECONDS:.0f} s")


def _attend(journal: _Journal, receiver: str, send: Callable[[], str]) -> None:
    try:
        failure = send()
    except Exception as error:  # its text may hold the address
        failure = type(error).__name__
    journal.write(receiver, not failure, failure or None)


class _Journal:
    """`notices.jsonl` of an attempt: a line when a notice is sent, and one when it is delivered or given up."""

    def __init__(self, run_directory: Path, notice: Record) -> None:
        self._run_directory = run_directory
        self._path = attempt_folder(run_directory, notice["attempt"]) / file_names.NOTICES
        self._notice = notice

    def write(self, receiver: str, delivered: bool | None, why: str | None) -> None:
        """Append a line. Where the disk is full there is none."""
        line = {"v": 1, "at": time.time(), **{name: self._notice[name] for name in ("event", "text")}}
        line.update({"to": receiver, "delivered": delivered, "why": why})
        file = PeaksFile(self._path)
        file.append(json.dumps(line).encode() + b"\n")
        file.close()

    def has_it(self) -> bool:
        """Whether the same notice was sent already."""
        lines = notice_lines(self._run_directory, self._notice["attempt"])
        return any(all(line.get(name) == self._notice[name] for name in ("event", "text")) for line in lines)

    def is_full(self) -> bool:
        """Whether the run has sent MOST_AN_HOUR notices in the last hour. The first that is too many is noted."""
        hour_ago = time.time() - 3600
        attempts = [
            path.parent.name for path in self._run_directory.glob(f"{file_names.ATTEMPTS}/*/{file_names.NOTICES}")
        ]
        lines = [line for attempt in attempts for line in notice_lines(self._run_directory, attempt)]
        recent = [line for line in lines if (time_or_none(line.get("at")) or 0) > hour_ago]
        if len({(line.get("event"), line.get("text")) for line in recent if line.get("to")}) < MOST_AN_HOUR:
            return False
        if all(line.get("to") for line in recent):
            self.write("", False, f"more than {MOST_AN_HOUR} notices in an hour; further ones are left out")
        return True


def _post(variable: str, message: str, until: float) -> str:
    """Post the message as Slack takes it. Returns why it was not delivered; empty where it was."""
    from urllib.parse import urlsplit
    from urllib.request import build_opener

    address = os.environ.get(variable, "").strip()
    if not address:
        return f"{variable} is not set where the job runs"
    if urlsplit(address).scheme not in ("http", "https") or not urlsplit(address).hostname:
        return f"{variable} holds no http or https address"
    escaped = message.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    body = json.dumps({"text": escaped}).encode()
    opener = build_opener(_redirects_at_home())
    for pause in (*BACKOFF_SECONDS, None):
        failure, again = _post_once(opener, address, body, min(TRY_SECONDS, until - time.monotonic()))
        if not again or pause is None or time.monotonic() + pause >= until:
            break
        time.sleep(pause)
    return failure


def _post_once(opener: Any, address: str, body: bytes, seconds: float) -> tuple[str, bool]:
    """Return why it was not delivered, and whether another try may help and cannot deliver it twice."""
    from http.client import HTTPException
    from urllib.error import HTTPError, URLError
    from urllib.request import Request

    headers = {"Content-Type": "application/json", "User-Agent": "llmlaunch"}
    try:
        with opener.open(Request(address, body, headers, method="POST"), timeout=max(0.1, seconds)):
            return "", False
    except HTTPError as error:
        error.close()
        elsewhere = f", {ELSEWHERE}" if error.reason == ELSEWHERE else ""
        return f"HTTP {error.code}{elsewhere}", error.code == 429 or error.code >= 500
    except URLError as error:  # before the request was sent
        return _without_address(str(error.reason), address), True
    except OSError as error:
        return f"no answer: {_without_address(str(error), address)}", False
    except (HTTPException, ValueError) as error:  # of which the text may hold the address in another spelling
        return type(error).__name__, False


def _without_address(text: str, address: str) -> str:
    from urllib.parse import urlsplit

    parts = urlsplit(address)
    secrets = [address, parts.path, parts.query, parts.username or "", parts.password or ""]
    return harmless(masked(text, [secret for secret in secrets if len(secret) > 3]), {})[:200]


def _redirects_at_home() -> Any:
    """Return the handler that posts again where the same host says so, and follows to no other host."""
    from urllib.error import HTTPError
    from urllib.parse import urlsplit
    from urllib.request import HTTPRedirectHandler, Request

    class Redirects(HTTPRedirectHandler):
        def redirect_request(self, req: Request, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Request:
            old, new = urlsplit(req.full_url), urlsplit(newurl)
            if new.netloc != old.netloc or new.scheme not in (old.scheme, "https"):
                raise HTTPError("", code, ELSEWHERE, headers, fp)
            return Request(newurl, req.data, dict(req.headers), method="POST")

        http_error_308 = HTTPRedirectHandler.http_error_302  # Python before 3.11 knows none

    return Redirects()


def _run(command: list[str], run_directory: Path, notice: Record, until: float) -> str:
    """Run the command with the notice as JSON on its stdin. Returns why that was no success; empty where it was."""
    variables = {"EVENT": notice["event"], "TEXT": notice["text"], "RUN_DIR": str(run_directory)}
    environment = {**os.environ, **{f"LLMLAUNCH_{name}": value for name, value in variables.items()}}
    environment["LLMLAUNCH_ATTEMPT"] = notice["attempt"]
    silent = subprocess.DEVNULL
    try:
        process = subprocess.Popen(
            command,
            cwd=run_directory,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=silent,
            stderr=silent,
            start_new_session=True,
        )
    except OSError as error:
        return f"{command[0]} does not start: {error.strerror}"
    try:
        process.communicate(json.dumps(notice).encode(), timeout=max(0.1, until - time.monotonic()))
    except subprocess.TimeoutExpired:
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        return f"the command did not end within {ALTOGETHER_SECONDS:.0f} s"
    return f"exit code {process.returncode}" if process.returncode else ""
