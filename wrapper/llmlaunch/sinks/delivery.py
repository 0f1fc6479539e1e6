"""Which sinks are turned on, and the delivery of stored runs to them. A sink never fails a command, and none is waited
for long."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from llmlaunch.errors import UserError
from llmlaunch.rundir.values import counted
from llmlaunch.store.database import Store
from llmlaunch.store.history import RunMark, run_marks, stored_run
from llmlaunch.user_data import with_home

_USER = re.compile(r"://\S*@")  # up to the last @: a password may hold one
_QUERY = re.compile(r"(://[^\s?]*)\?\S*")


@dataclass(frozen=True)
class Kind:
    """A kind of sink. `package` is the module it needs, `place` describes what a person names."""

    name: str
    variable: str
    package: str
    place: str

    @property
    def installed(self) -> bool:
        return importlib.util.find_spec(self.package) is not None


KINDS = {
    kind.name: kind
    for kind in (
        Kind("prometheus", "LLMLAUNCH_PROMETHEUS", "prometheus_client", "the folder of node_exporter's textfiles"),
        Kind("mlflow", "LLMLAUNCH_MLFLOW", "mlflow", "a tracking URI, or a folder"),
        Kind("wandb", "LLMLAUNCH_WANDB", "wandb", "a folder for offline runs"),
    )
}


@dataclass(frozen=True)
class Chosen:
    """A sink and its place, which may hold a password: left out of `repr`."""

    kind: Kind
    place: str = field(repr=False)


def chosen_sinks(options: Iterable[str] = (), environment: Mapping[str, str] | None = None) -> list[Chosen]:
    """Return the sinks that the options name (`NAME=PLACE`, or `NAME` with the place in the environment), else all that
    the environment names. Raises UserError for an unknown sink, and for a named one that is not installed."""
    env = os.environ if environment is None else environment
    named = [_named(option, env) for option in options]
    for chosen in named:
        if not chosen.kind.installed:
            raise UserError(missing(chosen.kind))
    return named or [_placed(kind, place) for kind in KINDS.values() if (place := env.get(kind.variable, "").strip())]


def missing(kind: Kind) -> str:
    return f"{kind.name}: its package is not installed here; type: pip install 'llmlaunch[{kind.name}]'"


def harmless(text: str) -> str:
    """Return the text without what may be a secret: user and password of an address, and its query."""
    return _QUERY.sub(r"\1", _USER.sub("://", text))


def _named(option: str, env: Mapping[str, str]) -> Chosen:
    name, _, place = option.partition("=")
    kind = KINDS.get(name)
    if kind is None:
        raise UserError(f"--sink {harmless(name)!r}: is no sink; there are {', '.join(KINDS)}")
    place = place.strip() or env.get(kind.variable, "").strip()
    if not place:
        raise UserError(f"--sink {name}: say where: {name}=PLACE ({kind.place}), or set {kind.variable}")
    return _placed(kind, place)


def _placed(kind: Kind, place: str) -> Chosen:
    """Make a path absolute, because the sink's process may have another working directory."""
    is_address = "://" in place or (kind.name == "mlflow" and place.partition(":")[0] in ("databricks", "file"))
    return Chosen(kind, place if is_address else str(with_home(place).absolute()))


ANSWER_SECONDS = 120.0
"""For one answer: starting MLflow on a busy login node takes 20 s, a new SQLite file of its own another 12 s."""

_ENVIRONMENT = {
    "mlflow": {
        # a server that is gone is not waited for: MLflow's own limits are 120 s, seven times over
        "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
        "MLFLOW_ALLOW_FILE_STORE": "true",
        "MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING": "false",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "GIT_PYTHON_REFRESH": "quiet",
    },
    "wandb": {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_ERROR_REPORTING": "false"},
}
_WITHHELD = {"wandb": ("WANDB_API_KEY",)}  # offline: nobody is logged in


@dataclass(frozen=True)
class Passed:
    """The result for one sink: how many runs were sent, and why not all that were due."""

    sink: str
    place: str
    sent: int
    due: int
    why: str | None = None

    def as_json(self) -> dict[str, Any]:
        return dict(vars(self))

    def sentence(self) -> str | None:
        """Return one line for a person, None if there was nothing to do."""
        of = f"{self.sink} ({self.place})"
        if self.why is not None:
            done = f"; {self.sent} of {self.due} runs were sent" if self.due else ""
            return (
                f"warning: {of}: {self.why}{done}. The store has all; the next llmlaunch collect sends what is missing"
            )
        return f"{of}: {counted(self.sent, 'run')} sent" if self.sent else None


def pass_on(
    store: Store, sinks: Sequence[Chosen], only: Collection[str] | None = None, answer_seconds: float = ANSWER_SECONDS
) -> list[Passed]:
    """Send every collected run that a sink lacks or has in an older state; only those of `only` unless it is None.
    Sending twice changes nothing."""
    if not sinks:
        return []
    marks = run_marks(store)
    return [_passed(store, sink, marks, only, answer_seconds) for sink in sinks]


def _passed(
    store: Store, sink: Chosen, marks: Sequence[RunMark], only: Collection[str] | None, answer_seconds: float
) -> Passed:
    name, place = sink.kind.name, harmless(sink.place)
    if not sink.kind.installed:
        return Passed(name, place, 0, 0, missing(sink.kind).partition(": ")[2])
    sent, due, whys = 0, [], []
    try:
        with _started(name, answer_seconds) as process:
            begin = {"place": sink.place, "marks": [[run.run_id, run.mark] for run in marks]}
            due = [run_id for run_id in process.ask(begin)["due"] if only is None or run_id in only]
            mark_of = {run.run_id: run.mark for run in marks}
            for run_id in due:
                run = stored_run(store, run_id)
                try:
                    process.ask({"run": run, "mark": mark_of[run_id]})
                    sent += 1
                except _Refused as error:  # one run; the next may do
                    whys.append(f"{run_id}: {error}")
            process.ask({})
    except (_Refused, OSError) as error:
        whys.append(str(error))
    why = harmless("; ".join([*whys[:3], *([f"and {len(whys) - 3} more"] if len(whys) > 3 else [])]))
    return Passed(name, place, sent, len(due), why.replace(sink.place, place) or None)


class _Refused(Exception):
    """A sink refused a run or did not answer; the message is the reason."""


class _Process:
    """The process of a sink. It may hang anywhere, so neither writing to it nor waiting for it takes longer than the
    limit."""

    def __init__(self, process: subprocess.Popen[bytes], answer_seconds: float) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._process = process
        self._seconds = answer_seconds
        self._to, self._from = process.stdin.fileno(), process.stdout.fileno()
        self._read = b""
        for number in (self._to, self._from):
            os.set_blocking(number, False)

    def ask(self, value: Mapping[str, Any]) -> dict[str, Any]:
        """Return the answer to one request. Raises _Refused for an error and if there is no answer in time."""
        unwritten = memoryview(json.dumps(value).encode() + b"\n")
        until = time.monotonic() + self._seconds
        with selectors.DefaultSelector() as selector:
            selector.register(self._from, selectors.EVENT_READ)
            selector.register(self._to, selectors.EVENT_WRITE)
            while b"\n" not in self._read:
                ready = selector.select(max(0.0, until - time.monotonic()))
                if not ready:
                    raise _Refused(f"no answer within {self._seconds:g} s")
                for key, _ in ready:
                    if key.fd == self._from:
                        self._take(os.read(self._from, 1 << 16))
                    elif unwritten:
                        unwritten = unwritten[self._written(unwritten) :]
                    if not unwritten and self._to in selector.get_map():
                        selector.unregister(self._to)
        line, _, self._read = self._read.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise _Refused(answer["error"])
        return answer

    def _take(self, chunk: bytes) -> None:
        if not chunk:
            raise _Refused("its process ended without a word")
        self._read += chunk

    def _written(self, rest: memoryview) -> int:
        try:
            return os.write(self._to, rest[: 1 << 16])
        except BrokenPipeError:
            raise _Refused("its process ended without a word") from None


@contextlib.contextmanager
def _started(name: str, answer_seconds: float) -> Iterator[_Process]:
    """Run the process of a sink. It and everything it started are gone afterwards."""
    withheld = _WITHHELD.get(name, ())
    environment = {key: value for key, value in os.environ.items() if key not in withheld}
    process = subprocess.Popen(
        [sys.executable, "-m", "llmlaunch.sinks", name],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**_ENVIRONMENT.get(name, {}), **environment},
        start_new_session=True,  # Ctrl-C is ours to handle
    )
    try:
        yield _Process(process, answer_seconds)
    finally:
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    for stream in (process.stdin, process.stdout):
        with contextlib.suppress(OSError):
            if stream is not None:
                stream.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(2.0)  # it ends by itself where all went well
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(2.0)  # a process that hangs in the kernel is left to it
