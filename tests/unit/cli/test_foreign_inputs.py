"""Files, folders and numbers that a command does not expect: one message each, and no wait without end."""

from __future__ import annotations

import json
import resource
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from llmlaunch.assets import asset
from llmlaunch.rundir.values import with_escapes
from support.calibrated import calibration, score
from support.command_line import CommandLine
from support.store_run_dirs import RunDir

RECIPE = asset("recipes", "llama3-8b.yaml")
PINNED = "layout={tensor: 2, pipeline: 2, virtual_pipeline: 1, context: 1, micro_batch_size: 1, layers_by_stage: even}"


@contextmanager
def full_disk() -> Iterator[None]:
    """No file of this process may grow, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("words", [("init", "--from"), ("check",)])
def test_the_job_of_a_run_directory_is_answered_with_its_recipe(
    llmlaunch: CommandLine, tmp_path: Path, words: tuple[str, ...]
) -> None:
    run = RunDir(tmp_path / "run").path
    (run / "job.sbatch").write_text("#!/bin/bash\n#SBATCH --nodes=1\nexec python3 node.pyz job\n")
    message = llmlaunch(*words, run / "job.sbatch", "--cluster", "h100-80gb-x8", code=2).stderr
    assert f"this is a run directory; its recipe is {run}/recipe.yaml" in message


def test_a_schema_is_not_written_over_a_device(llmlaunch: CommandLine) -> None:
    assert "is no schema of llmlaunch" in llmlaunch("schema", "-o", "/dev/zero", code=2).stderr


@pytest.mark.parametrize("seconds", ["nan", "1e999", "1_0"])
def test_an_interval_that_is_no_number_of_seconds_is_refused(llmlaunch: CommandLine, seconds: str) -> None:
    for command in (("status", "--watch"), ("observe",)):
        message = llmlaunch(*command, "--interval", seconds, "true", code=2).stderr
        assert "--interval" in message


def test_a_full_disk_is_one_message_and_leaves_no_file(llmlaunch: CommandLine, tmp_path: Path) -> None:
    target = tmp_path / "mine.yaml"
    with full_disk():
        message = llmlaunch("init", "quickstart", "-o", target, code=2).stderr
    assert f"init: {target} cannot be written" in message
    assert not target.exists()


def test_a_link_to_an_endless_file_is_no_schema(llmlaunch: CommandLine, tmp_path: Path) -> None:
    (tmp_path / "llmlaunch.schema.json").symlink_to("/dev/zero")
    message = llmlaunch("init", "quickstart", "-o", tmp_path / "mine.yaml").stderr
    assert "cannot be read, so an editor will not check it" in message


def test_check_needs_no_home(llmlaunch: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOME", "XDG_DATA_HOME", "XDG_CACHE_HOME", "LLMLAUNCH_STORE"):
        monkeypatch.delenv(name, raising=False)
    assert llmlaunch.json("check", RECIPE, PINNED)["verdict"]


def test_a_home_of_nobody_is_no_traceback(llmlaunch: CommandLine) -> None:
    llmlaunch("check", RECIPE, PINNED, "data.path=~no_such_user/data", code=(0, 2, 3))


@pytest.mark.parametrize("damage", [b"\xff\xfe", b'{"id": 1}'])
def test_a_store_with_flipped_bits_is_one_message_and_check_goes_on(
    llmlaunch: CommandLine, store_file: Path, damage: bytes
) -> None:
    from llmlaunch.store.calibrations import put, use
    from llmlaunch.store.database import open_store

    entry = calibration([score(0.97 + i / 1000) for i in range(40)], accelerator="h100-80gb")
    with open_store() as store, store.write() as connection:
        put(connection, entry)
        use(connection, entry.backend, entry.accelerator, entry.id, 100.0)
    with sqlite3.connect(store_file) as writer:
        writer.execute("UPDATE calibrations SET content = CAST(? AS TEXT)", [damage])
    out, err = llmlaunch("check", RECIPE, PINNED, "--json")
    assert json.loads(out)["memory"]["correction"] is None
    assert err.count("warning: measured runs are not used") == 1
    assert "is damaged" in err
    assert llmlaunch("calibrate", "list", code=2).stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\u202egpj", "a\\u202egpj"),
        ("\x1b[2J", "\\x1b[2J"),
        ("zero\u200bwidth\ufeff", "zero\\u200bwidth\\ufeff"),
        ("\u2066x\u2069\U000e0041", "\\u2066x\\u2069\\U000e0041"),
        ("\ud800", "\\ud800"),
        ("Grüße 漢字 a\u00a0b\n\tc", "Grüße 漢字 a\u00a0b\n\tc"),
    ],
)
def test_misleading_characters_of_a_page_are_shown_as_escapes(text: str, shown: str) -> None:
    assert with_escapes(text) == shown
