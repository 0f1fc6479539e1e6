"""Where both sides look for what could not be delivered."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from llmlaunch.rundir.spool_place import RUN_FILE, is_private, spool_folder, spool_root, spooled


def put(root: Path, run_directory: str) -> Path:
    folder = spool_folder(root, run_directory)
    folder.mkdir(mode=0o700)
    (folder / RUN_FILE).write_bytes(os.fsencode(run_directory))
    return folder


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "spool"
    folder.mkdir(mode=0o700)
    return folder


def test_the_place_is_named_or_the_users_own() -> None:
    assert spool_root({"LLMLAUNCH_SPOOL": "/scratch/s"}) == Path("/scratch/s")
    assert spool_root({"LLMLAUNCH_SPOOL": ""}) == spool_root({}) == Path(f"/var/tmp/llmlaunch-{os.getuid()}")
    assert spool_folder(Path("/s"), "/runs/a") == Path("/s/704e1951db552e57")  # sha256 of the path as it is written


def test_folders_are_found_by_the_directory_they_are_for(root: Path, tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "runs")
    folders = [put(root, f"{tmp_path}/{name}/a\udcff") for name in ("runs", "link")]  # one directory, two names
    (root / "half").mkdir()  # does not name its run yet
    (root / "relative").mkdir()
    (root / "relative" / RUN_FILE).write_text("runs/a")
    assert spooled(root) == {tmp_path / "runs" / "a\udcff": sorted(folders)}


def test_what_others_may_write_to_is_not_read(root: Path, tmp_path: Path) -> None:
    folder = put(root, "/runs/a")
    assert list(spooled(root)) == [Path("/runs/a")]
    folder.chmod(0o777)
    assert spooled(root) == {}
    folder.chmod(0o700)
    root.chmod(0o770)
    assert spooled(root) == {}
    (tmp_path / "link").symlink_to(root)
    assert not is_private(tmp_path / "link")
    assert spooled(tmp_path / "nowhere") == {}
