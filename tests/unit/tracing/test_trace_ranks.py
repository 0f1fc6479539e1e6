"""Whatever becomes of the process of one rank, there is an answer for each, and nothing is left running."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any

import pytest

from llmlaunch.tracing import TRACER
from support.soak import share

PROGRAM = """
import json, os, signal, sys, time
sys.path.insert(0, {tracer!r})
from trace_ranks import ReaderLeft, answers_of, end_on_signals

def work(job):
    if "file" in job:
        with open(job["file"], "w") as out:
            out.write(str(os.getpid()))
        os.rename(job["file"], job["file"] + ".done")
    for number in job.get("signals", []):
        os.kill(os.getpid(), number)
    if "code" in job:
        os._exit(job["code"])
    time.sleep(job.get("sleep", 0))
    return {{"name": job["name"], "trace": "x" * job.get("size", 1)}}

end_on_signals()
jobs = [json.loads(line) for line in sys.stdin]
try:
    for answer in answers_of(jobs, work, 2, {seconds}, sys.stdout.fileno()):
        print(json.dumps(answer), flush=True)
except ReaderLeft:
    os._exit(1)
"""
ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGKILL)
LONG = 600  # seconds that no test waits
MORE_THAN_A_PIPE_HOLDS = 2**20


def words(seconds: float = LONG) -> list[str]:
    return [sys.executable, "-c", PROGRAM.format(tracer=str(TRACER.parent), seconds=seconds)]


def answers(*jobs: dict[str, object], seconds: float = LONG) -> dict[str, dict[str, Any]]:
    told = "".join(json.dumps(job) + "\n" for job in jobs)
    done = subprocess.run(words(seconds), input=told, capture_output=True, text=True, timeout=LONG, check=True)
    return {answer["name"]: answer for answer in map(json.loads, done.stdout.splitlines())}


@contextmanager
def sleeping(tmp_path: Path) -> Iterator[Popen[str]]:
    """A tracer of two ranks that take for ever; nothing of it is left in the end."""
    files = [tmp_path / name for name in ("one", "two")]
    with Popen(words(), stdin=PIPE, stdout=PIPE, text=True) as tracer:
        assert tracer.stdin is not None
        for file in files:
            tracer.stdin.write(json.dumps({"name": file.name, "sleep": LONG, "file": str(file)}) + "\n")
        tracer.stdin.close()
        while not all(file.with_suffix(".done").exists() for file in files):
            assert tracer.poll() is None
        processes = [int(file.with_suffix(".done").read_text()) for file in files]
        yield tracer
        tracer.wait(LONG)
    while not all(gone(process) for process in processes):  # the kernel's own part, after a SIGKILL
        pass


def gone(process: int) -> bool:
    """Ended, and at most waiting for its new parent to notice."""
    try:
        return ") Z" in Path(f"/proc/{process}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_every_rank_answers_however_much_it_says() -> None:
    said = answers(*({"name": name, "size": MORE_THAN_A_PIPE_HOLDS} for name in "0123"))
    sizes = {name: len(str(answer["trace"])) for name, answer in said.items()}
    assert sizes == dict.fromkeys("0123", MORE_THAN_A_PIPE_HOLDS)


def test_a_rank_that_the_kernel_ends_fails_alone() -> None:
    said = answers({"name": "killed", "signals": [signal.SIGKILL]}, {"name": "left", "code": 3}, {"name": "well"})
    assert said["well"]["trace"] == "x"
    killed, left = said["killed"]["failure"], said["left"]["failure"]
    assert (killed["kind"], left["kind"]) == ("error", "error")
    assert "was ended by SIGKILL, as the kernel does where memory runs out" in killed["what"]
    assert "ended with code 3 and without an answer" in left["what"]


def test_a_rank_that_hangs_has_its_time() -> None:
    said = answers({"name": "hangs", "sleep": LONG}, {"name": "stopped", "signals": [signal.SIGSTOP]}, seconds=1.0)
    late = ["it took longer than the time that a rank has" in answer["failure"]["what"] for answer in said.values()]
    assert late == [True, True]


@pytest.mark.parametrize("number", share(ENDING, [signal.SIGTERM, signal.SIGKILL]))
def test_a_signal_ends_all_that_runs(number: signal.Signals, tmp_path: Path) -> None:
    with sleeping(tmp_path) as tracer:
        tracer.send_signal(number)


def test_a_signal_in_the_middle_of_a_fork_is_not_lost(tmp_path: Path) -> None:
    """Python drops what a signal's handler raises inside a hook of `os.fork`, of which the module logging has some."""
    in_the_hook = "os.register_at_fork(after_in_parent=lambda: os.kill(os.getpid(), signal.SIGTERM))\nend_on_signals()"
    program = PROGRAM.replace("end_on_signals()", in_the_hook).format(tracer=str(TRACER.parent), seconds=LONG)
    job = json.dumps({"name": "long", "sleep": LONG})
    tracer = subprocess.run([sys.executable, "-c", program], input=job, capture_output=True, text=True, timeout=LONG)
    assert tracer.returncode == 128 + signal.SIGTERM


def test_a_reader_who_leaves_ends_all_that_runs(tmp_path: Path) -> None:
    with sleeping(tmp_path) as tracer:
        assert tracer.stdout is not None
        tracer.stdout.close()
