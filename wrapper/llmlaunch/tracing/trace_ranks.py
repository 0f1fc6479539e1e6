"""Traces ranks of Megatron or DeepSpeed jobs, several at a time, without a GPU.

    echo '{"name": "first", "world_size": 512, "pipeline_rank": 0, "arguments": ["--num-layers", "32", ...]}' |
        .venv-frameworks/bin/python trace_ranks.py --framework megatron --processes 2

One job a line in; one line out for each as it is done: {"name", "trace"}, or {"name", "failure": {"kind", "what",
"detail"}}: one sentence, and the traceback. `arguments` are those of Megatron's `pretrain_gpt.py`; with `--framework
deepspeed` they are those of the shipped trainer, and "files" holds by name the JSON files they name as
"$LLMLAUNCH_RUN_DIR/NAME". A job may have "environment", variables by name, and "all_microbatches": true, which runs
those that show nothing new, too; and of Megatron-Bridge "adapters", the settings of its LoRA, with "package", whose
version is reported, and "packed": true, where a sequence holds several rows. Frameworks are imported once, then each
job has a process of its own, because the frameworks keep their state in the process.

Whatever becomes of a process, there is an answer: one that the kernel ends, that hangs or that says nothing gives a
failure for its job. SIGINT, SIGTERM, a reader of stdout who has left, and the death of this process by any signal, end
all that it started.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import importlib
import io
import json
import logging
import os
import select
import signal
import sys
import time
import warnings
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from trace_checks import ERROR, failed, failure_of

Job = dict[str, Any]
Answer = dict[str, Any]

PR_SET_PDEATHSIG = 1  # linux/prctl.h
ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
LONGEST_LOOK_SECONDS = 1.0
READ_BYTES = 2**20
LONGEST_SECONDS = 900
OF_RANKS = "_rank"


class ReaderLeft(Exception):
    """Nobody reads the answers."""


@dataclass
class _Running:
    """A job under way: its process, the reading end of its pipe, and when it has had its time."""

    job: Job
    process: int
    pipe: int
    deadline: float
    output: bytearray = field(default_factory=bytearray)


def end_on_signals() -> None:
    """SIGTERM and SIGHUP end this process as an exit does, which ends what it started."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda received, frame: sys.exit(128 + received))


def answers_of(
    jobs: Sequence[Job], work: Callable[[Job], Answer], processes: int, seconds: float, reader: int | None = None
) -> Generator[Answer, None, None]:
    """One answer for each job, as each is done: what `work` gives, or {"name", "failure"}.

    `seconds` is the time a job has; `reader` a descriptor whose other end must stay open. Raises ReaderLeft.
    """
    waiting, running = list(jobs), list[_Running]()
    gc.collect()
    gc.freeze()  # a child's collector leaves alone, and does not copy, what was imported once for all
    try:
        while waiting or running:
            while waiting and len(running) < max(processes, 1):
                _start(waiting.pop(0), work, seconds, running)
            for rank in _finished(running, reader):
                running.remove(rank)
                yield _answer(rank)
    finally:
        for rank in running:
            _end(rank)


def _start(job: Job, work: Callable[[Job], Answer], seconds: float, running: list[_Running]) -> None:
    reading, writing = os.pipe()
    # Python drops what a handler raises inside the hooks of a fork, of which logging has some. Signals wait for it.
    unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING_SIGNALS)
    parent, process = os.getpid(), os.fork()
    if process:
        os.close(writing)
        os.set_blocking(reading, False)
        running.append(_Running(job, process, reading, time.monotonic() + seconds))
        signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
        return
    code = 1
    try:
        _die_with(parent)
        signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
        for descriptor in (reading, *(other.pipe for other in running)):
            os.close(descriptor)
        answer = json.dumps(work(job)).encode()
        with os.fdopen(writing, "wb") as out:
            out.write(answer)
        code = 0
    finally:
        os._exit(code)  # nothing of the parent's is run to its end twice


def _die_with(parent: int) -> None:
    """In a child: to be ended by the kernel when its parent is, and by the signals that the parent only passes on."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    for number in ENDING_SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    if os.getppid() != parent:
        os._exit(1)


def _finished(running: Sequence[_Running], reader: int | None) -> list[_Running]:
    """Those that have said all, or have had their time; waits a moment for rank."""
    poll = select.poll()
    for rank in running:
        poll.register(rank.pipe, select.POLLIN)
    if reader is not None:
        poll.register(reader, 0)  # errors alone
    ready = dict(poll.poll(LONGEST_LOOK_SECONDS * 1000))
    if reader is not None and ready.get(reader, 0) & (select.POLLERR | select.POLLHUP):
        raise ReaderLeft
    done = [rank for rank in running if rank.pipe in ready and _read_to_the_end(rank)]
    return done + [rank for rank in running if rank not in done and time.monotonic() > rank.deadline]


def _read_to_the_end(rank: _Running) -> bool:
    with contextlib.suppress(BlockingIOError):
        while chunk := os.read(rank.pipe, READ_BYTES):
            rank.output += chunk
        return True
    return False


def _answer(rank: _Running) -> Answer:
    late = time.monotonic() > rank.deadline
    status = _end(rank) if late else _reap(rank)
    with contextlib.suppress(json.JSONDecodeError):
        answer: Answer = json.loads(rank.output)
        return answer
    if late:
        why = "it took longer than the time that a rank has"
    elif os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        why = f"its process was ended by {signal.Signals(number).name}"
        why += ", as the kernel does where memory runs out" if number == signal.SIGKILL else ""
    else:
        why = f"its process ended with code {os.waitstatus_to_exitcode(status)} and without an answer"
    return {"name": rank.job.get("name"), "failure": failed(ERROR, f"the rank was not traced: {why}")}


def _end(rank: _Running) -> int:
    with contextlib.suppress(ProcessLookupError):
        os.kill(rank.process, signal.SIGKILL)
    return _reap(rank)


def _reap(rank: _Running) -> int:
    os.close(rank.pipe)
    return os.waitpid(rank.process, 0)[1]


def _frameworks() -> list[str]:
    """Return the frameworks whose ranks can be traced: each has a module here, with a function `trace_of`."""
    return sorted(path.stem.removesuffix(OF_RANKS) for path in Path(__file__).parent.glob(f"*{OF_RANKS}.py"))


def _traced(trace: Callable[[Job], dict[str, Any]], job: Job) -> Answer:
    complaints = io.StringIO()
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(complaints):
            os.environ.update(job.get("environment") or {})
            return {"name": job["name"], "trace": trace(job)}
    except (Exception, SystemExit) as error:  # a parser exits where it refuses an argument
        return {"name": job["name"], "failure": failure_of(error, complaints.getvalue())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="ranks traced at a time")
    parser.add_argument("--seconds", type=float, default=LONGEST_SECONDS, help="the longest that one may take")
    parser.add_argument("--framework", choices=_frameworks(), required=True)
    options = parser.parse_args()
    end_on_signals()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    gc.disable()  # nothing that is imported is garbage; each rank is a process of its own, whose collector is on
    # once for all ranks; before torch, for which it fakes CUDA
    trace_of = importlib.import_module(f"{options.framework}{OF_RANKS}").trace_of

    # isort: split
    import torch._dynamo  # noqa: F401 (every optimizer imports it, which takes a second)

    gc.enable()
    jobs = [json.loads(line) for line in sys.stdin if line.strip()]
    answers = answers_of(jobs, partial(_traced, trace_of), options.processes, options.seconds, sys.stdout.fileno())
    try:
        with contextlib.closing(answers):  # which ends what still runs
            for answer in answers:
                print(json.dumps(answer), flush=True)
    except (ReaderLeft, BrokenPipeError):
        os._exit(1)  # closing stdout would complain once more
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
