"""Rendering reads the checkout of the training code, and runs nothing that its configuration names."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from git_checkouts import commit, gathered, git, state


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    folder = tmp_path / "checkout"
    folder.mkdir()
    git(folder, "init", "-q")
    commit(folder, {"train.py": "print(1)\n", "model.bin": "pointer\n", "odd.txt": "odd\n", "same": "same\n"})
    return folder


@pytest.fixture
def trap(tmp_path: Path) -> tuple[Path, Path]:
    """A program that shows that it ran, and the file that it leaves."""
    trace, program = tmp_path / "ran", tmp_path / "trap.sh"
    program.write_text(f'#!/bin/sh\necho "$0 $*" >> {trace}\ncat\n')
    program.chmod(0o755)
    return program, trace


def filters(folder: Path, program: Path) -> None:
    (folder / ".git" / "info" / "attributes").write_text("*.bin filter=evil\n*.txt filter=a=b\n*.py diff=evil\n")
    git(folder, "config", "filter.evil.clean", str(program))
    git(folder, "config", "filter.evil.required", "true")
    with (folder / ".git" / "config").open("a") as config:  # a name that `git -c filter.a=b.clean=` does not reach
        config.write(f'[filter "a=b"]\n\tprocess = {program}\n')


def programs(folder: Path, program: Path) -> None:
    of_core = ("fsmonitor", "pager", "sshCommand", "askPass", "editor", "alternateRefsCommand")
    of_diffs = ("diff.external", "diff.evil.command", "diff.evil.textconv")
    others = ("credential.helper", "gpg.program", "uploadpack.packObjectsHook")
    for name in (*(f"core.{name}" for name in of_core), *of_diffs, *others):
        git(folder, "config", name, str(program))


def hooks(folder: Path, program: Path) -> None:
    for place in (folder / ".git" / "hooks", folder / "hooks"):
        place.mkdir(exist_ok=True)
        (place / "post-index-change").symlink_to(program)
    git(folder, "config", "core.hooksPath", str(folder / "hooks"))


def submodules(folder: Path, program: Path) -> None:
    inner = folder / "inner"
    inner.mkdir()
    git(inner, "init", "-q")
    commit(inner, {"inner.bin": "pointer\n"})
    git(folder, "-c", "advice.addEmbeddedRepo=false", "add", "inner")
    git(folder, "commit", "-q", "-m", "a submodule")
    filters(inner, program)
    programs(inner, program)
    hooks(inner, program)
    (inner / "inner.bin").write_text("changed\n")


def missing_objects(folder: Path, program: Path) -> None:
    """A partial clone fetches what it lacks with programs of its configuration."""
    blob = git(folder, "rev-parse", "HEAD:train.py")
    git(folder, "config", "remote.origin.url", f"ext::{program} %S")
    git(folder, "config", "remote.origin.promisor", "true")
    git(folder, "config", "extensions.partialClone", "origin")
    git(folder, "config", "core.repositoryFormatVersion", "1")
    git(folder, "config", "protocol.ext.allow", "always")
    (folder / ".git" / "objects" / blob[:2] / blob[2:]).unlink()


@pytest.mark.parametrize("plant", [filters, programs, hooks, submodules, missing_objects])
def test_nothing_that_a_checkout_configures_runs(
    plant: Callable[[Path, Path], None], checkout: Path, trap: tuple[Path, Path]
) -> None:
    program, trace = trap
    plant(checkout, program)
    trace.unlink(missing_ok=True)  # planting itself may have run it
    index = (checkout / ".git" / "index").read_bytes()
    (checkout / "train.py").write_text("print(2)\n")
    (checkout / "model.bin").write_text("changed\n")
    (checkout / "odd.txt").write_text("changed\n")
    (checkout / "same").write_text("same\n")  # a new time alone: git notes it in the index, and calls a hook
    gathered(checkout)
    assert not trace.exists(), trace.read_text()
    assert (checkout / ".git" / "index").read_bytes() == index  # nothing of it is written, either


def test_changes_of_a_checkout_with_filters_are_kept_and_those_of_filtered_files_are_said_to_be_unknown(
    checkout: Path, trap: tuple[Path, Path]
) -> None:
    filters(checkout, trap[0])
    assert state(gathered(checkout))["dirty"] is False  # the index knows their times
    (checkout / "model.bin").write_text("other weights\n")
    unsure = gathered(checkout)
    assert (state(unsure)["dirty"], state(unsure)["not_compared"], unsure.diff) == (None, ["model.bin"], b"")
    assert "whether they were changed is not known" in str(unsure.code["note"])
    (checkout / "train.py").write_text("print(2)\n")
    (checkout / "odd.txt").unlink()
    changed = gathered(checkout)
    assert (state(changed)["dirty"], state(changed)["not_compared"]) == (True, ["model.bin"])
    git(checkout, "config", "--remove-section", "filter.evil")
    git(checkout, "checkout", "-q", ".")
    subprocess.run(["git", "apply"], cwd=checkout, input=changed.diff, check=True)
    assert (checkout / "train.py").read_text() == "print(2)\n"
    assert not (checkout / "odd.txt").exists()


def test_a_filter_that_nobody_defined_converts_nothing(checkout: Path) -> None:
    (checkout / ".git" / "info" / "attributes").write_text("*.bin filter=lfs\n")
    (checkout / "model.bin").write_text("another pointer\n")
    changed = gathered(checkout)
    assert (state(changed)["not_compared"], state(changed)["dirty"]) == ([], True)
    assert b"+another pointer" in changed.diff


def test_a_persons_own_settings_change_neither_what_is_a_change_nor_the_form_of_the_diff(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / ".gitconfig").write_text("[diff]\n\tnoprefix = true\n\trenames = copies\n[color]\n\tdiff = always\n")
    monkeypatch.setenv("HOME", str(home))
    git(checkout, "config", "core.fileMode", "false")
    (checkout / "odd.txt").chmod(0o755)
    assert state(gathered(checkout))["dirty"] is False
    (checkout / "train.py").write_text("print(2)\n")
    assert gathered(checkout).diff.startswith(b"diff --git a/train.py b/train.py\n")


def test_a_worktree_and_a_split_index_are_read_like_any_other(checkout: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    git(checkout, "worktree", "add", "-q", str(other))
    git(other, "update-index", "--split-index")
    (other / "train.py").write_text("print(3)\n")
    (other / "new.py").write_text("print(4)\n")
    git(other, "add", "new.py")
    diff = gathered(other).diff
    assert b"+print(3)" in diff
    assert b"+print(4)" in diff
    assert state(gathered(other))["branch"] == "other"


def test_a_change_inside_a_submodule_is_said(checkout: Path, trap: tuple[Path, Path]) -> None:
    submodules(checkout, trap[0])
    assert state(gathered(checkout))["changed_submodules"] == ["inner"]
    assert "inside these submodules: inner" in str(gathered(checkout).code["note"])
