"""Ids that a run directory names are checked before they reach scancel, kill or a path; a foreign directory is read."""

from __future__ import annotations

import io
import json
import os
import platform
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from llmlaunch.cli.output import print_json
from llmlaunch.errors import UserError
from llmlaunch.launchers.local import LocalLauncher
from llmlaunch.launchers.run_files import is_foreign, read_end, read_submission
from llmlaunch.launchers.slurm.text import strange_jobs
from llmlaunch.rundir.values import is_attempt, is_fallback, is_run_id, is_slurm_job, printable
from llmlaunch.watch.screen import Screen
from support.command_line import CommandLine
from support.local_jobs import run_directory

STARTED = 1700000000
HOSTILE_IDS = [
    "--user=root", "-u root", "../../x", "12 --me", "12,13", "12;13", "0", "", "12\n", "1_", "١٢", "99999999999",
    "12.0", "local-1-1", 12, None, ["12"], {"a": 1}, True,
]  # fmt: skip


def write_submission(run_dir: Path, **changes: Any) -> Path:
    record = {"schema": 1, "launcher": "slurm", "job_id": "12", "submitted_at": STARTED, "cluster": None}
    (run_dir / "submission.json").write_text(json.dumps({**record, **changes}))
    return run_dir


@pytest.fixture
def slurm_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """SLURM's commands at their edge: each writes down how it was called, and knows no job."""
    folder, notes = tmp_path / "bin", tmp_path / "notes"
    folder.mkdir()
    for name in ("sbatch", "scancel", "scontrol", "squeue", "sacct", "sinfo"):
        (folder / name).write_text(f'#!/bin/sh\necho "{name} $*" >> {notes}\n')
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return lambda: notes.read_text().splitlines() if notes.exists() else []


DAMAGE: dict[str, list[Any]] = {
    "job_id": HOSTILE_IDS,
    "chain": [["12", "--user=root"]],
    "earlier": [[{"launcher": "slurm", "job_id": "-u root", "submitted_at": STARTED, "cluster": None}]],
    "cluster": ["-M", "a,b", 3],
    "submitted_at": [-1, "now", 1e300],
    "launcher": ["local", ["slurm"]],
}


@pytest.mark.parametrize("field", DAMAGE)
def test_what_is_no_id_cluster_time_or_launcher_is_damage(tmp_path: Path, field: str) -> None:
    for value in DAMAGE[field]:
        write_submission(tmp_path, **{field: value})
        with pytest.raises(UserError, match=r"submission\.json: damaged"):
            read_submission(tmp_path)


@pytest.mark.parametrize("command", ["cancel", "status", "resume", "logs"])
def test_no_command_passes_a_hostile_id_on(
    tmp_path: Path, llmlaunch: CommandLine, slurm_calls: Callable[[], list[str]], command: str
) -> None:
    job = "--user=root"
    run_dir = write_submission(run_directory(tmp_path / "run", "finish 0"), job_id=job)
    before = sorted(path for path in tmp_path.rglob("*") if path != tmp_path / "notes")
    llmlaunch(command, run_dir, code=2)
    assert sorted(path for path in tmp_path.rglob("*") if path != tmp_path / "notes") == before
    assert not [call for call in slurm_calls() if job in call]


@pytest.mark.parametrize("in_run_dir", [True, False])
def test_a_process_that_is_no_job_of_the_directory_is_left_alone(tmp_path: Path, in_run_dir: bool) -> None:
    """Its id and start are known to everybody on the machine, and a person's shell may stand in the directory."""
    run_dir = run_directory(tmp_path / "run", "finish 0")
    process = subprocess.Popen(["sleep", "600"], cwd=run_dir if in_run_dir else tmp_path)
    try:
        started = int(psutil.Process(process.pid).create_time())
        job = f"local-{started}-{process.pid}"
        write_submission(run_dir, launcher="local", job_id=job, cluster=platform.node())
        submission = read_submission(run_dir)
        assert submission is not None
        with pytest.raises(UserError, match="no job of this directory"):
            LocalLauncher().cancel(submission)
        assert process.poll() is None
        assert not (run_dir / "logs").exists()
    finally:
        process.kill()
        process.wait()


def test_a_job_of_a_directory_that_was_moved_is_still_its_job(tmp_path: Path) -> None:
    run_dir = run_directory(tmp_path / "run", "exec sleep 600")
    LocalLauncher().submit(run_dir)
    moved = run_dir.rename(tmp_path / "moved")
    submission = read_submission(moved)
    assert submission is not None
    LocalLauncher().cancel(submission)
    assert LocalLauncher().states([submission])[submission.job_id].phase == "cancelled"


def foreign_directory(tmp_path: Path) -> Path:
    """Root gives one of its own away; another user finds one of root's."""
    if os.geteuid() != 0:
        return Path("/usr")
    run_dir = write_submission(run_directory(tmp_path / "run", "finish 0"))
    (run_dir / "stop").touch()
    os.chown(run_dir, 65534, 65534)
    return run_dir


@pytest.mark.parametrize("command", ["cancel", "resume"])
def test_a_directory_of_another_user_is_not_acted_on(
    tmp_path: Path, llmlaunch: CommandLine, slurm_calls: Callable[[], list[str]], command: str
) -> None:
    run_dir = foreign_directory(tmp_path)
    before = sorted(run_dir.iterdir())
    assert is_foreign(run_dir)
    assert not is_foreign(tmp_path)
    assert "belongs to" in llmlaunch(command, run_dir, code=2).stderr
    assert slurm_calls() == []
    assert sorted(run_dir.iterdir()) == before


def test_what_status_learns_is_not_written_into_a_foreign_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, llmlaunch: CommandLine, slurm_calls: Callable[[], list[str]]
) -> None:
    run_dir = write_submission(run_directory(tmp_path / "run", "finish 0"))
    (run_dir / "logs").mkdir()
    (run_dir / "logs" / "12.cancelled").touch()
    monkeypatch.setattr("llmlaunch.launchers.run_files.is_foreign", lambda directory: True)
    llmlaunch("status", run_dir)
    assert not (run_dir / "ended.json").exists()


def test_only_attempts_by_form_are_a_submission_s(tmp_path: Path) -> None:
    submission = read_submission(write_submission(tmp_path))
    assert submission is not None
    assert submission.owns("12.0")
    for name in ("12.", "12.x", "12.٣", "12.0/../..", "12.\x1b[31m", "13.0"):
        assert not submission.owns(name)
    local = replace(submission, launcher="local", job_id="local-1700000000-4711")  # known by its process
    owned = [local.owns(name) for name in ("local-1700000001-4711.0", "local-1700000000-471.0", "4711.0")]
    assert owned == [True, False, False]
    (tmp_path / "status.json").write_text(json.dumps({"attempt": "12.0/../../y", "state": "succeeded"}))
    assert read_end(submission) is None


def test_a_sweep_names_folders_beside_it_alone(
    tmp_path: Path, llmlaunch: CommandLine, slurm_calls: Callable[[], list[str]]
) -> None:
    sweep, outside = tmp_path / "sweep", tmp_path / "outside"
    for folder in (sweep, outside):
        folder.mkdir()
    run_dir = run_directory(sweep / "0-run", "finish 0")
    write_submission(sweep)
    runs = [{"directory": "0-run"}, {"directory": "../outside"}]
    (sweep / "sweep.json").write_text(json.dumps({"how": "array", "runs": runs}))
    llmlaunch("status", run_dir, code=2)
    assert list(outside.iterdir()) == []


def test_jobs_of_others_and_of_other_directories_are_strange() -> None:
    here, other = Path("/runs/a"), Path("/runs/b")
    rows = [
        f"12|1000|{here}|", f"13|1000|{other}|llmlaunch=mine", f"14|1000|{other}|llmlaunch=mine-too",
        f"15|0|{here}|llmlaunch=mine", "16|1000|/runs/abc|", "CLUSTER: alps",
    ]  # fmt: skip
    assert strange_jobs("\n".join(rows), 1000, ["llmlaunch=mine"], [here]) == ["14", "15", "16"]


def test_forms() -> None:
    assert all(map(is_slurm_job, ("1", "4294967295", "12_0", "12_4000000")))
    assert all(map(is_attempt, ("12.0", "12_3.1", "local-1700000000-4711.0")))
    assert all(map(is_fallback, ("fallback/1", "fallback/12")))
    assert not any(map(is_fallback, ("fallback/0", "fallback/../x", "../fallback/1", "", ".", None)))
    assert not any(map(is_run_id, ("", "-x", "a/b", "a b", "a\x1b[31m", "x" * 201, None)))


def test_what_a_terminal_would_obey_is_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    text = "a\x1b[31;1mb\x1b[0m\x1b]0;title\x07c\x9b2Jd\x1b]8;;http://x\x1b\\e\u202ef\x85\x1b\x07\x7f\ud800g\th\nä✓"
    assert printable(text) == "abcde?f?????g\th\nä✓"
    assert printable("\x1b]0;never ended and more") == "?]0;never ended and more"
    assert printable("plain ä✓") == "plain ä✓"
    stream = io.StringIO()
    Screen(stream).say(text)
    assert stream.getvalue() == "abcde?f?????g\th\nä✓\n"
    print_json({"why": text})
    out = capsys.readouterr().out
    assert out.isascii()
    assert "\x1b" not in out
    assert json.loads(out) == {"why": text}
