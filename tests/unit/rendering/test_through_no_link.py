"""Nothing that llmlaunch writes at a person's word goes where somebody else's link points."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from git_checkouts import commit, git
from run_samples import recipe
from test_render_run import JOBS

from llmlaunch.cluster.profile_text import destination
from llmlaunch.documents.writing import new_place, replacing, write_whole
from llmlaunch.errors import UserError
from llmlaunch.node.files import PeaksFile
from llmlaunch.recipe.types import Code
from llmlaunch.rendering.provenance import copy_snapshot, list_snapshot
from llmlaunch.rendering.run_directory import render_run
from llmlaunch.rendering.sweep import render_sweep
from llmlaunch.report.page import write_page
from llmlaunch.rundir.files import replace_json
from llmlaunch.store.measurements import write_lines
from support.command_line import CommandLine

PROFILE = "base: h100-80gb-x8\n"


def render(place: Path) -> None:
    of, plan, rendered = JOBS["deepspeed-cpu"]
    render_run(of, plan, {}, rendered, place)


WRITERS: dict[str, Callable[[Path], object]] = {
    "render": render,
    "sweep": lambda place: render_sweep(place, "sweep", "independent", {"0-a": render}, [{}]),
    "page": lambda place: write_page(place, lambda: "<html/>"),
    "export": lambda place: write_lines(["{}"], place),
    "profile": lambda place: destination(str(place)),
}


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """A folder like /tmp: everybody may write there, and remove only what is their own."""
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(0o1777)
    return folder


@pytest.mark.parametrize("dangling", [True, False])
@pytest.mark.parametrize("writer", WRITERS)
def test_a_link_in_the_place_of_what_is_written_is_refused(
    writer: str, dangling: bool, shared: Path, tmp_path: Path
) -> None:
    victim = tmp_path / "victim"
    ending = {"page": ".html", "profile": ".yaml"}.get(writer, "")
    content = {"profile": PROFILE}.get(writer, "precious")
    if writer == "profile" or not dangling:
        if writer in ("render", "sweep"):
            victim.mkdir()
        else:
            victim.write_text(content)
    link = shared / f"place{ending}"
    link.symlink_to(victim)
    with pytest.raises(UserError, match="is a link to"):
        WRITERS[writer](link)
    assert link.is_symlink()
    assert not victim.exists() or victim.is_dir() or victim.read_text() == content
    assert not victim.is_dir() or not any(victim.iterdir())


def test_init_leaves_a_link_and_what_it_points_to_alone(shared: Path, tmp_path: Path, llmlaunch: CommandLine) -> None:
    (shared / "recipe.yaml").symlink_to(tmp_path / "victim")
    llmlaunch("init", "llama3-8b", "-o", shared / "recipe.yaml", code=2)
    assert not (tmp_path / "victim").exists()


def test_a_folder_that_is_another_users_link_in_a_shared_folder_is_not_entered(
    shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "victim").mkdir()
    (shared / "runs").symlink_to(tmp_path / "victim")
    place = shared / "runs" / "mine"
    assert new_place(place) == (tmp_path / "victim" / "mine").resolve()  # a link of one's own
    owner = os.lstat(shared / "runs").st_uid
    lstat = Path.lstat

    def of_a_stranger(path: Path) -> os.stat_result:
        real = list(lstat(path))
        real[4] = owner + 4321 if path == shared / "runs" else real[4]
        return os.stat_result(real)

    monkeypatch.setattr(Path, "lstat", of_a_stranger)
    with pytest.raises(UserError, match="another user left in"):
        render(place)
    assert not any((tmp_path / "victim").iterdir())
    shared.chmod(0o700)  # nobody else writes there: whoever made the link was allowed to
    assert new_place(place).name == "mine"


def test_a_persons_own_links_on_the_way_are_followed(tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir()
    (tmp_path / "runs").symlink_to("scratch")
    render(tmp_path / "runs" / "first")
    assert (tmp_path / "scratch" / "first" / "job.sbatch").is_file()


def test_what_was_there_stays_whole_where_writing_fails_and_keeps_its_permissions(tmp_path: Path) -> None:
    path = tmp_path / "table"
    write_whole(path, "old")
    path.chmod(0o640)

    def interrupted() -> None:
        with replacing(path) as file:
            file.write("half of the ne")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert path.read_text() == "old"
    write_whole(path, "new")
    assert (path.read_text(), path.stat().st_mode & 0o777) == ("new", 0o640)
    assert [each.name for each in tmp_path.iterdir()] == ["table"]


def test_files_of_a_run_directory_are_not_written_through_links(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    for name in ("status.json", f".status.json.{os.getpid()}.tmp", "node1.jsonl"):
        (tmp_path / name).symlink_to(victim)
    replace_json(tmp_path / "status.json", {"state": "running"})
    assert not PeaksFile(tmp_path / "node1.jsonl").append(b"{}\n")
    assert victim.read_text() == "precious"
    assert not (tmp_path / "status.json").is_symlink()


def test_a_snapshot_takes_nothing_from_behind_a_link(tmp_path: Path) -> None:
    tree, elsewhere = tmp_path / "tree", tmp_path / "elsewhere"
    (tree / "pkg").mkdir(parents=True)
    git(tree, "init", "-q")
    commit(tree, {"pkg/a.py": "1\n", "b.py": "2\n"})
    (tree / "pkg").rename(elsewhere)
    (tree / "pkg").symlink_to(elsewhere)
    snapshot = list_snapshot(recipe(code=Code(path=str(tree), snapshot=True)), tree, "")
    assert snapshot.files == ("b.py",)
    copy_snapshot(snapshot, tmp_path / "copy")
    assert [path.name for path in (tmp_path / "copy").iterdir()] == ["b.py"]
