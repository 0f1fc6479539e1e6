"""Commit, changes and digest are recorded as they are, and what cannot be known is said in code.json."""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path

import pytest
from git_checkouts import gathered, git, state
from run_samples import recipe

from llmlaunch.errors import UserError
from llmlaunch.recipe.containers import Container
from llmlaunch.recipe.types import BackendChoice, Code
from llmlaunch.rendering import git as git_room
from llmlaunch.rendering import provenance as snapshot_room
from llmlaunch.rendering.provenance import gather_provenance


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    folder = tmp_path / "checkout"
    folder.mkdir()
    (folder / "train.py").write_text("print(1)\n")
    (folder / "weights.bin").write_bytes(bytes(range(256)))
    git(folder, "init", "-q")
    git(folder, "add", ".")
    git(folder, "commit", "-q", "-m", "first")
    return folder


def test_a_clean_checkout_is_its_commit(checkout: Path) -> None:
    provenance = gathered(checkout, snapshot=False)
    assert provenance.code["git"] == {
        "commit": git(checkout, "rev-parse", "HEAD"),
        "branch": "main",
        "dirty": False,
        "diff_left_out": False,
        "untracked_files": 0,
        "not_compared": [],
        "changed_submodules": [],
        "left_out": [],
    }
    assert provenance.diff == b""


def test_changes_can_be_applied_again_binary_ones_too_and_untracked_files_stay_out(checkout: Path) -> None:
    (checkout / "train.py").write_text("print(2)\n")
    (checkout / "weights.bin").write_bytes(bytes(range(255, -1, -1)))
    (checkout / ".env").write_text("HF_TOKEN=s3cret\n")
    provenance = gathered(checkout)
    assert (state(provenance)["dirty"], state(provenance)["untracked_files"]) == (True, 1)
    assert b"s3cret" not in provenance.diff
    assert provenance.snapshot is not None
    assert provenance.snapshot.files == ("train.py", "weights.bin")
    git(checkout, "checkout", "-q", ".")
    subprocess.run(["git", "apply"], cwd=checkout, input=provenance.diff, check=True)
    assert (checkout / "train.py").read_text() == "print(2)\n"
    assert (checkout / "weights.bin").read_bytes() == bytes(range(255, -1, -1))


def test_a_diff_over_the_limit_is_left_out_and_said(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(git_room, "DIFF_LIMIT_BYTES", 100)
    (checkout / "train.py").write_text("x = 1\n" * 1000)
    provenance = gathered(checkout, snapshot=False)
    assert (state(provenance)["dirty"], state(provenance)["diff_left_out"], provenance.diff) == (True, True, b"")
    assert "100 bytes" in str(provenance.code["note"])


def test_what_is_no_checkout_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = tmp_path / "plain"
    plain.mkdir()
    provenance = gathered(plain, snapshot=False)
    assert provenance.code["git"] is None
    assert "not a git repository" in str(provenance.code["note"])
    monkeypatch.setenv("PATH", str(plain))
    assert "git is not installed" in str(gathered(plain, snapshot=False).code["note"])


def test_a_folder_another_checkout_ignores_is_not_that_checkout(checkout: Path) -> None:
    (checkout / ".gitignore").write_text("mine/\n")
    (checkout / "mine").mkdir()
    (checkout / "mine" / "train.py").write_text("")
    provenance = gathered(checkout / "mine")
    assert provenance.code["git"] is None
    assert "tracks nothing" in str(provenance.code["note"])
    assert provenance.snapshot is not None
    assert provenance.snapshot.files == ("train.py",)


def test_the_tree_is_found_from_the_backend(checkout: Path) -> None:
    megatron = recipe(backend=BackendChoice("megatron-lm", path=str(checkout)))
    script = recipe(backend=BackendChoice("deepspeed", script=str(checkout / "train.py")))
    for of in (megatron, script):
        assert gather_provenance(of).code["path"] == str(checkout)
    elsewhere = recipe(backend=BackendChoice("megatron-lm", path="/on/the/cluster"))
    assert "no folder on the machine" in str(gather_provenance(elsewhere).code["note"])
    assert "MEGATRON_LM_PATH" in str(gather_provenance(recipe(backend=BackendChoice("megatron-lm"))).code["note"])
    assert "llmlaunch's own" in str(gather_provenance(recipe()).code["note"])


def test_container_digests(tmp_path: Path) -> None:
    image = tmp_path / "image.sqsh"
    image.write_bytes(b"layers")
    pinned = "docker://org/image@sha256:" + "a" * 64
    digests = {}
    for reference in (str(image), pinned, "nvcr.io#nvidia/pytorch:25.08-py3", "/nowhere/x.sif"):
        container = gather_provenance(recipe(container=Container(reference))).code["container"]
        assert isinstance(container, dict)
        digests[reference] = container["digest"]
        assert bool(container["note"]) == (container["digest"] is None)
    layers = "sha256:" + hashlib.sha256(b"layers").hexdigest()
    assert list(digests.values()) == [layers, "sha256:" + "a" * 64, None, None]


def test_a_snapshot_without_git_takes_all_but_caches_and_old_runs(tmp_path: Path) -> None:
    for name in ("a.py", "pkg/b.py", "pkg/__pycache__/b.pyc", "old/run.json", "old/node.pyz", "old/x", ".git/config"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    (tmp_path / "link.py").symlink_to("a.py")
    provenance = gathered(tmp_path)
    assert provenance.snapshot is not None
    assert provenance.snapshot.files == ("a.py", "link.py", "pkg/b.py")


def test_a_snapshot_that_is_too_large_or_of_nothing_is_refused(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "data.bin").write_bytes(b"0" * 2000)
    monkeypatch.setattr(snapshot_room, "LIMIT_BYTES", 1000)
    with pytest.raises(UserError, match=r"code\.snapshot: .*the largest: data\.bin"):
        gathered(tmp_path)
    with pytest.raises(UserError, match="nothing to copy"):
        gather_provenance(recipe(backend=BackendChoice("megatron-lm"), code=Code(snapshot=True)))


def test_llmlaunchs_own_trainer_needs_no_snapshot_it_is_in_every_run_directory() -> None:
    own = recipe(backend=BackendChoice("deepspeed"), code=Code(snapshot=True))
    assert gather_provenance(own).snapshot is None
