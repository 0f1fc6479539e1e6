"""Each file of a rendered run directory, replaced by what an attacker or a broken disk may put there: every command
that reads answers, writes no traceback, has no effect elsewhere, and sends no control character to the terminal."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import signal
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from rich.console import Console

from llmlaunch.app.planned_run import plan
from llmlaunch.assets import asset
from llmlaunch.errors import UserError
from llmlaunch.launchers.base import JobState
from llmlaunch.launchers.run_files import read_submission
from llmlaunch.launchers.run_status import RunStatus, read_statuses
from llmlaunch.launchers.submit_mark import was_submitting
from llmlaunch.rundir.memory_files import attempt_summary
from llmlaunch.rundir.run import run_history
from llmlaunch.store.read_directory import read_directory
from llmlaunch.watch.follow import EventReader
from llmlaunch.watch.frames import RunsFrame
from llmlaunch.watch.loop import JsonView, LineView
from llmlaunch.watch.run_reader import RunReader
from support.command_line import CommandLine
from support.soak import SOAK
from support.store_run_dirs import ATTEMPT, STARTED, RunDir, gpu

RUN_ID = "quickstart-20260101T000000Z-0001"
MARK = {"since": STARTED, "host": "elsewhere", "pid": 1, "started": 1, "touched_at": STARTED}  # of a submit under way
LONGEST_SECONDS = 240  # that a healthy command never uses up; without the mends it hangs for ever

ESCAPES = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202egpj\x85\x7f\r\ud800"
OF_ATTEMPT = ("attempt", "progress", "status", "summary", "versions", "causes/n0", "memory/0.1000")
JSON_FILES = (
    *("run.json", "plan.json", "arguments.json", "submission.json", "status.json", "ended.json", "submitting"),
    *(f"attempts/{ATTEMPT}/{name}.json" for name in OF_ATTEMPT),
    *(f"attempts/{ATTEMPT}/ranks/n0.jsonl", "peaks/n0.jsonl"),
)
OTHER_FILES = (
    *("recipe.yaml", "run.id", "job.sbatch", "slurm-77.out"),
    *(f"logs/{ATTEMPT}.{name}.log" for name in ("n0", "job")),
    *(f"attempts/{ATTEMPT}/{name}" for name in ("told/n0", "done/n0", "prepare.log", "import/n0.log")),
)
COMMANDS = (
    ("status",), ("status", "--json"), ("logs", "--attempt", "all"), ("collect",), ("explain-args",), ("cancel",),
    ("diff",),
)  # fmt: skip
RUNS = {("diff",): 2}  # that a command takes


def text(content: bytes) -> Callable[[Path], None]:
    return lambda path: path.write_bytes(content) and None


HOSTILE: dict[str, Callable[[Path], None]] = {
    "fifo": os.mkfifo,
    "link to /dev/zero": lambda path: path.symlink_to("/dev/zero"),
    "link to itself": lambda path: path.symlink_to(path.name), "folder": Path.mkdir, "missing": lambda path: None,
    "empty": text(b""), "brackets": text(b"[" * 200_000), "objects": text(b'{"a":' * 200_000),
    "deep but whole": text(b'{"cause": ' + b"[" * 900 + b"]" * 900 + b"}"),
    "1e400": text(b"1e400"), "NaN": text(b'{"step": NaN, "attempt": Infinity}'),
    "digits": text(b'{"step": ' + b"9" * 5000 + b"}"), "invalid UTF-8": text(b'{"attempt": "\xff\xfe"}\n\xc3\x28'),
    "zeros": text(b"\0" * 4096),
    "escapes": text(ESCAPES.encode("utf-8", "surrogatepass") + b"\n"),
    "surrogates": text(b'{"why": "\\ud800", "attempt": "\\udfff"}'),
}  # fmt: skip
VALUES: tuple[Any, ...] = (
    *(None, True, -1, 10**30, 2**63 - 1, 1e308, float("nan")),
    *("../../x", ESCAPES, ["x"], [{}], {"x": []}),
)
# One change of 61 is made, each of them in `make soak`. There are twelve values, so each place gets others.
EVERY = 1 if SOAK else 61
OF_OTHER_EVENTS = {"gpu": {}, "why": ""}  # what a monitor's line may hold besides


def write(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))


@pytest.fixture(scope="module")
def rendered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory as `render` writes it, and one failed attempt as nodes leave it."""
    run_dir = tmp_path_factory.mktemp("rendered") / "run"
    recipe = asset("recipes", "quickstart.yaml")
    plan(recipe, ["cluster=cpu-x1"]).write(run_dir, print)
    (run_dir / "run.id").write_text(RUN_ID + "\n")
    submission = {"schema": 1, "launcher": "slurm", "job_id": "77", "submitted_at": STARTED, "cluster": None}
    write(run_dir / "submission.json", {**submission, "chain": ["77", "78"], "earlier": [submission]})
    end = {"schema": 1, "job_id": "78", "phase": "failed", "state": "FAILED", "reason": "r", "exit_code": 1}
    write(run_dir / "ended.json", {**end, "restarts": 1, "link": 2})
    lay_attempt(run_dir)
    return run_dir


def lay_attempt(run_dir: Path) -> None:
    run, attempt = RunDir.rendered(run_dir), f"attempts/{ATTEMPT}"
    start = {"schema": 1, "attempt": ATTEMPT, "layout": "", "fallback": False, "cluster": "alps", "nodes": ["n0"]}
    run.write(f"{attempt}/attempt.json", {**start, "started_at": STARTED, "from_step": 0})
    hung = {"since_seconds": 600.0, "allowed_seconds": 300.0, "what": "a step", "where": "rank 0 in x"}
    progress = {"schema": 1, "step": 5, "steps": 40, "loss": 3.1, "tokens_per_second": 9.0, "step_seconds": 0.5}
    run.write(f"{attempt}/progress.json", {**progress, "at": STARTED + 60, "hung": hung})
    run.rank(0, exit_code=7)
    cause = {"schema": 1, "kind": "oom", "node": "n0", "rank": 0, "line": "CUDA out of memory.", "source": "log"}
    cause |= {"numbers": {"requested_bytes": 1}, "sick": False, "consequence": False, "at": STARTED + 99}
    run.write(f"{attempt}/causes/n0.json", {**cause, "ranks": [{"rank": 0, "line": "x", "numbers": {}}]})
    card = {"device": 0, "uuid": "GPU-n0-0", "total_bytes": 2**36, "allocated_peak_bytes": 2**30, "reserved_bytes": 1}
    card |= {"active_peak_bytes": 1, "reserved_peak_bytes": 2**31, "ooms": 1}
    probe = {"v": 1, "rank": 0, "local_rank": 0, "node": "n0", "pid": 1000, "at": STARTED + 90, "ended": True}
    run.write(f"{attempt}/memory/0.1000.json", {**probe, "devices": [card]})
    run.write(f"{attempt}/versions.json", {"torch": "2.9"})
    run.line(
        "n0",
        gpus=[gpu(0)],
        processes=[{"rank": 0, "pid": 1000, "resident_bytes": 5, "resident_peak_bytes": 2**30}],
        host={"used_peak_bytes": 5, "total_bytes": 9},
        logged=[{"rank": 0, "allocated_peak_bytes": 1}],
    )
    exited = "srun: error: n0: task 0: Exited with exit code 7\n"
    for name, text in (
        *((f"{attempt}/{name}", "SIGTERM\n") for name in ("told/n0", "done/n0", "prepare.log", "import/n0.log")),
        (f"logs/{ATTEMPT}.n0.log", "step 5/40 | loss 3.1\n"),
        *((name, exited) for name in (f"logs/{ATTEMPT}.job.log", "slurm-77.out")),
    ):
        (run_dir / name).parent.mkdir(exist_ok=True)
        (run_dir / name).write_text(text)
    following = {"action": "requeue", "why": "x", "layout": "", "seconds": 60}
    steps = {"step": 5, "saved_step": 0, "restarts": 0, "fruitless": 1}
    run.status(state="failed", exit_code=7, layout="", cause=cause, next=following, **steps)
    shutil.copy(run_dir / "status.json", run_dir / attempt)
    run.write(f"{attempt}/summary.json", attempt_summary(run_dir, ATTEMPT).as_json())


@pytest.fixture
def run_dir(rendered: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(rendered, tmp_path / "run", symlinks=True))


@pytest.fixture(autouse=True)
def noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, put_commands: Callable[..., Path]
) -> Callable[[], list[str]]:
    """SLURM's commands at their edge: each writes down how it was called, and knows no job. Nothing else is signalled
    or kept: a store of its own, and an alarm for what hangs."""
    notes = tmp_path / "notes"
    names = ("sbatch", "scancel", "scontrol", "squeue", "sacct", "sinfo")
    put_commands(**{name: f'echo "{name} $*" >> {notes}' for name in names})
    monkeypatch.setenv("LLMLAUNCH_STORE", str(tmp_path / "store.db"))
    monkeypatch.setattr("os.kill", lambda *arguments: pytest.fail(f"kill{arguments}"))
    return lambda: notes.read_text().splitlines() if notes.exists() else []


@pytest.fixture(autouse=True)
def no_hang() -> Iterator[None]:
    def too_long(number: int, frame: FrameType | None) -> None:
        raise AssertionError("a reading command hangs")

    before = signal.signal(signal.SIGALRM, too_long)
    signal.alarm(LONGEST_SECONDS)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def names_below(folder: Path) -> list[str]:
    return sorted(os.fsdecode(path) for path in folder.rglob("*"))


SAFE_CALL = re.compile(r"(squeue|sacct|scancel|scontrol)( (-[hrnXPDM]|-t all|--me|-[jSEsouO] [\w,:%|.;-]+|7[78]|\w+))*")


TOGETHER = sorted({*JSON_FILES, *OTHER_FILES} - {"run.json", "submission.json", "status.json"})


@pytest.mark.parametrize(
    "names", [["run.json"], ["submission.json"], ["status.json"], TOGETHER], ids=lambda names: names[0]
)
def test_every_command_answers_whatever_lies_where_a_file_should_be(
    run_dir: Path, tmp_path: Path, llmlaunch: CommandLine, noted: Callable[[], list[str]], names: list[str]
) -> None:
    outside = names_below(tmp_path.parent)
    for number, put in enumerate(HOSTILE.values()):
        for path in (run_dir / name for name in names):
            if path.is_dir() and not path.is_symlink():
                path.rmdir()
            else:
                path.unlink(missing_ok=True)
            put(path)
        for command in COMMANDS if SOAK else COMMANDS[number % 3 :: 3]:
            out, err = llmlaunch(*command, *[run_dir] * RUNS.get(command, 1), code=(0, 2, 4))
            assert [c for c in out + err if not c.isprintable() and c not in "\n\t"] == []
    assert [call for call in noted() if not SAFE_CALL.fullmatch(call)] == []
    written = {os.path.relpath(path, tmp_path) for path in set(names_below(tmp_path.parent)) - set(outside)}
    allowed = re.compile(r"notes|store\.db.*|run/.*")
    assert [path for path in written if not allowed.fullmatch(path)] == []


@pytest.mark.parametrize("name", [name for name in JSON_FILES if name not in ("plan.json", "arguments.json")])
def test_whatever_a_field_holds_it_is_read(run_dir: Path, name: str) -> None:
    whole = MARK if name == "submitting" else json.loads((run_dir / name).read_text())
    whole |= OF_OTHER_EVENTS if name.startswith("peaks/") else {}
    shown: list[str] = []
    for changed in islice(changes_of(whole, 1 if name == "run.json" else 3), 0, None, EVERY):
        (run_dir / name).write_text(json.dumps(changed))
        try:
            read_all(run_dir, shown.append)
        except UserError as message:
            shown.append(str(message))
        except Exception as error:  # what of the file it was
            raise AssertionError(f"{name}: {json.dumps(changed)[:2000]}") from error


def changes_of(whole: Any, depth: int) -> Iterator[Any]:
    """`whole` with each value in it, down to a depth, replaced by each of VALUES, one at a time."""
    yield from VALUES
    if depth == 0:
        return
    members = whole.items() if isinstance(whole, dict) else enumerate(whole) if isinstance(whole, list) else ()
    for key, value in members:
        for changed in changes_of(value, depth - 1):
            if isinstance(whole, dict):
                yield {**whole, key: changed}
            else:
                yield [*whole[:key], changed, *whole[key + 1 :]]


CONSOLE = Console(file=io.StringIO(), width=100)


def read_all(run_dir: Path, say: Callable[[str], None]) -> None:
    """All that reads a run directory: the looks, what is watched, the account, and collecting into a store."""
    run_history(run_dir)
    was_submitting(run_dir)
    try:
        read_directory(run_dir, {}, named=True)
    except UserError as message:
        say(str(message))
    submission = read_submission(run_dir)
    if submission is None:
        return
    look = RunStatus(submission, JobState("running"), ATTEMPT, {}, {}, False)
    for shown in (look, *read_statuses([submission], say)):
        shown.sentence()
        shown.cells()
        json.dumps(shown.as_json())
        watched = RunReader(submission).read(shown)
        for view in (LineView(say), JsonView(say)):
            view.show([shown], [watched], STARTED + 200, "")
        for runs in ([watched], [watched, watched]):
            CONSOLE.print(RunsFrame(runs, STARTED + 200), height=40)
    for event in EventReader(submission, 20).read(look).events:
        say(event.text)
