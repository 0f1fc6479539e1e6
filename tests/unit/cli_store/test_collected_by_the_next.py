"""The job's last act writes a summary, by the node's own program; whatever reads the store next takes it in."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from llmlaunch.assets import asset
from llmlaunch.cli.main import main
from llmlaunch.rendering.node_archive import node_archive
from support.store_run_dirs import ATTEMPT, GIB, RUN_ID, RunDir

RECIPE = str(asset("recipes", "llama3-8b.yaml"))


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("archive") / "node.pyz"
    path.write_bytes(node_archive())
    return path


class Person:
    def __init__(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        self._capsys, self._monkeypatch = capsys, monkeypatch

    def types(self, *words: str) -> tuple[str, str]:
        self._monkeypatch.setattr(sys, "argv", ["llmlaunch", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = self._capsys.readouterr()
        assert ended.value.code == 0, err
        return out, err


@pytest.fixture
def person(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Person:
    return Person(capsys, monkeypatch)


@pytest.fixture
def ended(person: Person, archive: Path, tmp_path: Path) -> RunDir:
    """A run that the store knows of, and that has ended since."""
    run = RunDir(tmp_path / "run")
    person.types("collect", str(run.path))
    run.ranks()
    run.line("n0", processes=[{"rank": 0, "pid": 1000, "resident_bytes": 5, "resident_peak_bytes": 3 * GIB}])
    run.write(f"attempts/{ATTEMPT}/done/n0", "")
    finish = [sys.executable, str(archive), "finish", "--run-dir", str(run.path), "--attempt", ATTEMPT]
    subprocess.run([*finish, "--nodes", "1", "--code", "0"], check=True, capture_output=True)
    assert (run.path / "attempts" / ATTEMPT / "summary.json").exists()
    return run


@pytest.mark.parametrize(
    "words",
    [["runs"], ["measurements", "list"], ["measurements", "export"], ["check", RECIPE, "memory.risk=0.05"], ["nodes"]],
    ids=["runs", "list", "export", "check", "nodes"],
)
def test_whatever_reads_the_store_next_collects_the_run(person: Person, ended: RunDir, words: list[str]) -> None:
    _, err = person.types(*words)
    assert f"{RUN_ID} (succeeded): collected, 2 measurements\n" in err
    _, err = person.types(*words)
    assert "collected" not in err
    held = json.loads(person.types("measurements", "list", "--json")[0])["measurements"]
    assert [record["peak_bytes"] for record in held] == [3 * GIB, 2 * GIB]


def test_the_summary_alone_is_enough(person: Person, ended: RunDir) -> None:
    """It holds what the store takes, whatever became of the nodes' own files, as long as none says otherwise."""
    summary = json.loads((ended.path / "attempts" / ATTEMPT / "summary.json").read_text())
    for path in (ended.path / "peaks" / "n0.jsonl", *(ended.path / "attempts" / ATTEMPT / "ranks").iterdir()):
        path.write_bytes(b"\0" * path.stat().st_size)  # as long as before, and nothing one could read
    assert summary["files"]["peaks/n0.jsonl"] > 0
    person.types("collect")
    held = json.loads(person.types("measurements", "list", "--json")[0])["measurements"]
    assert [record["peak_bytes"] for record in held] == [3 * GIB, 2 * GIB]


def test_a_run_without_a_summary_is_collected_from_its_files(person: Person, ended: RunDir) -> None:
    (ended.path / "attempts" / ATTEMPT / "summary.json").unlink()
    shutil.rmtree(ended.path / "attempts" / ATTEMPT / "done")
    assert "collected, 2 measurements" in person.types("runs")[1]
