"""`llmlaunch runs`: narrowed by the database, with the state SLURM says of what goes on, in one question."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.command_line import CommandLine
from support.store_run_dirs import STARTED, RunDir, finished_cpu_run

NOW = STARTED + 10 * 86400


@pytest.fixture(autouse=True)
def now(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", lambda: NOW)


def ids(llmlaunch: CommandLine, *options: str) -> list[str]:
    return [run["run_id"] for run in llmlaunch.json("runs", *options)["runs"]]


@pytest.fixture
def questions(tmp_path: Path, put_commands: Callable[..., Path]) -> Path:
    """A squeue that knows of jobs 901, which waits, and 902, which runs, and a sacct that knows none; they note what
    they are asked."""
    note = tmp_path / "questions"
    rows = "901|PENDING|0|N/A|Resources|\n902|RUNNING|1|N/A|None|\n"
    noted = {name: f'echo {name} "$@" >> {note}\n' for name in ("squeue", "sacct")}
    put_commands(squeue=f"{noted['squeue']}printf '%s' '{rows}'", sacct=noted["sacct"])
    return note


def ongoing(path: Path, run_id: str, job: str, submitted_at: float = NOW - 60) -> RunDir:
    run = RunDir(path, run_id=run_id)
    run.write(
        "submission.json",
        {"schema": 1, "launcher": "slurm", "job_id": job, "submitted_at": submitted_at, "cluster": None},
    )
    return run


def finished(path: Path, run_id: str, **status: Any) -> RunDir:
    run = finished_cpu_run(path, run_id)
    if status:
        run.status(**status)
    return run


def test_what_goes_on_is_as_slurm_says_in_one_question(llmlaunch: CommandLine, tmp_path: Path, questions: Path) -> None:
    waits, runs = ongoing(tmp_path / "1", "waits", "901"), ongoing(tmp_path / "2", "runs", "902", NOW - 7200)
    runs.rank(0, "902.1", ended_at=None, exit_code=None)
    runs.write("attempts/902.0/attempt.json", {"layout": "", "cluster": "alps"})
    runs.write("attempts/902.0/progress.json", {"step": 40, "steps": 100})
    runs.write("attempts/902.1/attempt.json", {"layout": "fallback/1", "cluster": "alps"})
    done = finished(tmp_path / "3", "done")
    llmlaunch("collect", waits.path, runs.path, done.path)
    questions.unlink(missing_ok=True)
    out, _ = llmlaunch("runs")
    commands = [line.split()[0] for line in questions.read_text().splitlines()]
    assert commands.count("squeue") == 1
    assert commands.count("sacct") <= 1  # started beside it, and not waited for where all jobs still go on
    assert "901,902" in questions.read_text() or "902,901" in questions.read_text()
    rows = {line.split()[0]: line for line in out.splitlines()}
    assert "pending (Resources)" in rows["waits"]
    assert " 60 s " in rows["waits"]
    assert " 2: planned > fallback/1 " in rows["runs"]
    assert " 40/100 " in rows["runs"]
    assert " 2 h 0 min " in rows["runs"]
    assert " succeeded " in rows["done"]
    by_id = {run["run_id"]: run for run in llmlaunch.json("runs")["runs"]}
    assert (by_id["waits"]["state"], by_id["waits"]["phase"]) == ("submitted", "pending")
    assert by_id["waits"]["live"]["reason"] == "Resources"
    assert by_id["runs"]["attempts"][1] == {"attempt": "902.1", "layout": "fallback/1"}
    assert (by_id["done"]["phase"], by_id["done"]["live"]) == ("succeeded", None)
    assert ids(llmlaunch, "--state", "pending") == ["waits"]
    assert ids(llmlaunch, "--state", "running", "--state", "succeeded") == ["runs", "done"]
    assert ids(llmlaunch, "--state", "running", "--limit", "1") == ["runs"]
    assert ids(llmlaunch, "--cluster", "alps") == ["runs"]


def test_the_filters(llmlaunch: CommandLine, tmp_path: Path) -> None:
    good = finished(tmp_path / "1", "good")
    bad = finished(tmp_path / "2", "bad", state="failed", exit_code=1)
    other = finished(tmp_path / "3", "other")
    (other.path / "recipe.yaml").write_text("schema: 1\nname: other\n")
    other.write("run.json", {**other.run, "name": "other", "recipe_digest": "d2"})
    here = {"schema": 1, "launcher": "local", "job_id": "local-5-6", "submitted_at": NOW - 90_000, "cluster": "desk"}
    other.write("submission.json", here)
    llmlaunch("collect", good.path, bad.path, other.path)
    assert ids(llmlaunch) == ["other", "good", "bad"]
    assert ids(llmlaunch, "--state", "failed") == ["bad"]
    assert ids(llmlaunch, "--recipe", "other") == ["other"]
    assert ids(llmlaunch, "--recipe", "tiny", "--limit", "1") == ["good"]
    assert ids(llmlaunch, "--launcher", "local") == ids(llmlaunch, "--cluster", "desk") == ["other"]
    assert ids(llmlaunch, "--since", "2d") == ["other"]
    assert ids(llmlaunch, "--since", "2w") == ["other", "good", "bad"]
    assert ids(llmlaunch, "--since", "2100-01-01") == []
    assert llmlaunch("runs", "--state", "cancelled") == ("", "no such runs\n")
    assert "not 30m, 12h, 7d" in llmlaunch("runs", "--since", "yesterday", code=2).stderr


def test_where_slurm_cannot_be_asked_the_last_known_state_is_shown(
    llmlaunch: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = ongoing(tmp_path / "1", "waits", "901")
    llmlaunch("collect", run.path)
    monkeypatch.setenv("PATH", str(tmp_path))
    out, err = llmlaunch("runs")
    assert out.splitlines()[1].split()[1] == "unknown"
    assert "shown as it was last known" in err


def test_every_state_of_the_help_can_be_asked_for_and_no_other(llmlaunch: CommandLine, tmp_path: Path) -> None:
    llmlaunch("collect", finished(tmp_path / "1", "good").path)
    shown = " ".join(llmlaunch("runs", "--help").stdout.split()).partition("--state S Now ")[2].partition(".")[0]
    states = shown.split(", ")
    assert {"pending", "running", "succeeded", "failed", "cancelled", "stopped", "unknown"} <= set(states)
    for state in states:
        assert ids(llmlaunch, "--state", state) == (["good"] if state == "succeeded" else [])
    _, refused = llmlaunch("runs", "--state", "suceeded", code=2)
    assert all(f"'{state}'" in refused for state in states)


def test_a_run_has_one_name_and_answers_to_all_it_may_be_called(
    llmlaunch: CommandLine, tmp_path: Path, questions: Path
) -> None:
    waits, other = tmp_path / "sweep" / "0-tiny", tmp_path / "other" / "0-small"
    for path, run_id, job in ((waits, "tiny-1", "901"), (other, "tiny-2", "902")):
        path.parent.mkdir()
        llmlaunch("collect", ongoing(path, run_id, job).path)
    assert [line.split()[0] for line in llmlaunch("status").stdout.splitlines()[1:]] == ["tiny-2", "tiny-1"]
    for word in ("tiny-1", "0-tiny", "0-t", "901", str(waits)):
        assert llmlaunch.json("status", word)["run_id"] == "tiny-1"
        assert llmlaunch.json("collect", word)["runs"][0]["run_id"] == "tiny-1"
        assert llmlaunch("measurements", "list", "--run", word) == ("", "no measurements\n")
    for command in ("status", "logs", "cancel", "resume", "collect", "explain-args"):
        refused = llmlaunch(command, "tiny-", code=2).stderr
        assert "'tiny-' is the beginning of the name of 2 runs; name one by its id:" in refused
        assert f"\n  tiny-1 in {waits}\n" in refused


def test_last_is_the_newest_run_of_this_person_and_the_message_says_which(
    llmlaunch: CommandLine, tmp_path: Path, questions: Path
) -> None:
    missing = llmlaunch("status", "last", code=2).stderr
    assert missing == "error: last: there is no run yet; `llmlaunch submit RECIPE` starts one\n"
    for number, (run_id, job) in enumerate((("tiny-1", "901"), ("last-but-two", "902"), ("tiny-3", "903"))):
        llmlaunch("collect", ongoing(tmp_path / str(number + 1), run_id, job, NOW - 60 + number).path)
    said = llmlaunch("status", "last", "--json")
    assert json.loads(said.stdout)["run_id"] == "tiny-3"
    assert said.stderr == f"last: the newest run, tiny-3 in {tmp_path / '3'}\n"
    for command in ("logs", "cancel", "resume", "collect", "explain-args", "report"):
        assert "last: the newest run, tiny-3 in " in llmlaunch(command, "last", code=(0, 2)).stderr
    assert "last: the newest run, tiny-3 in " in llmlaunch("diff", "last", "tiny-1", code=(0, 1, 2)).stderr
    assert "last: the newest run" in llmlaunch("measurements", "list", "--run", "last").stderr
    shutil.rmtree(tmp_path / "3")  # nothing of it can be shown any more
    assert llmlaunch.json("status", "last")["run_id"] == "last-but-two"


def test_a_run_that_is_called_last_is_that_run_and_a_folder_hides_none(
    llmlaunch: CommandLine, tmp_path: Path, questions: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "last").mkdir()
    llmlaunch("collect", ongoing(tmp_path / "1", "tiny-1", "901").path)
    assert llmlaunch.json("status", "last")["run_id"] == "tiny-1"
    assert "not a run directory" in llmlaunch("status", "./last", code=2).stderr
    llmlaunch("collect", ongoing(tmp_path / "elsewhere" / "last", "tiny-2", "902").path)
    llmlaunch("collect", ongoing(tmp_path / "3", "tiny-3", "903").path)
    assert llmlaunch("status", "last", "--json") == llmlaunch("status", "tiny-2", "--json")


def test_what_a_site_has_removed_is_said_and_costs_nothing_that_was_collected(
    llmlaunch: CommandLine, tmp_path: Path, put_commands: Callable[..., Path]
) -> None:
    """A purge of old files takes the records of a run that failed, then files without which no job starts."""
    put_commands(squeue="echo 'error: Invalid job id specified' >&2; exit 1", sacct="exit 1", sbatch="echo 903")
    run = finished(tmp_path / "run", "purged", state="failed", exit_code=1)
    run.write(
        "submission.json",
        {"schema": 1, "launcher": "slurm", "job_id": "901", "submitted_at": NOW - 9e5, "cluster": None},
    )
    for name in ("job.sbatch", "command.txt", "node.pyz"):
        (run.path / name).write_text("#!/bin/bash\n")
    described = json.loads((run.path / "run.json").read_text())
    run.write("run.json", {**described, "files": ["command.txt", "job.sbatch", "node.pyz", "run.json"]})
    llmlaunch("collect", run.path)
    before = llmlaunch("measurements", "list").stdout
    attempt = llmlaunch.json("runs")["runs"][0]["attempt"]

    for name in ("attempts", "peaks"):
        shutil.rmtree(run.path / name)
    assert f"the records of attempt {attempt} are gone" in llmlaunch("collect", run.path).stdout
    assert llmlaunch("measurements", "list").stdout == before
    assert ids(llmlaunch, "--state", "failed") == ["purged"]
    lost = llmlaunch("resume", run.path, "--anyway", code=2).stderr
    assert f"{run.path}/attempts/{attempt}: is gone (the site may have removed old files)" in lost
    assert f"llmlaunch resume {run.path} --from-older" in lost

    (run.path / "command.txt").unlink()
    (run.path / "node.pyz").unlink()
    gone = "command.txt, node.pyz are gone; the site may have removed old files"
    assert gone in llmlaunch("status", run.path).stdout.replace("\n  ", " ")
    assert llmlaunch.json("status", run.path)["missing"] == ["command.txt", "node.pyz"]
    refused = llmlaunch("resume", run.path, "--anyway", "--from-older", code=2).stderr
    assert f"{run.path}: {gone}; nothing was submitted. Put them back, or submit the recipe again" in refused
    shutil.rmtree(run.path)
    assert "is not there any more; what was collected of its runs stays" in llmlaunch("status", "purged", code=2).stderr
