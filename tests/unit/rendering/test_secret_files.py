"""A run directory keeps no secret of the training code's tree: neither in the diff nor in the snapshot."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from git_checkouts import commit, gathered, git, state
from test_render_run import JOBS

from llmlaunch.recipe.types import Code
from llmlaunch.rendering.run_directory import render_run

NAMED = (
    ".env",
    "conf/.env.prod",
    "server.pem",
    "site.key",
    "id_rsa",
    ".netrc",
    "credentials.json",
    "kubeconfig",
    ".npmrc",
)
TOKEN = "hf_AbCdEfGhIjKlMnOpQrStUvWxYz"
KEY = "-----BEGIN RSA PRIVATE KEY-----"
SECRET_CONTENTS = {"hub.py": f"TOKEN = '{TOKEN}'\n", "blob.bin": f"\0\1\2{KEY}\n"}
CODE = {"train.py": "print(1)\n", "tokenizer.json": "{}\n"}


def plant(tree: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text(text)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A checkout that tracks files with secrets, all of them changed."""
    folder = tmp_path / "tree"
    (folder / "conf").mkdir(parents=True)
    git(folder, "init", "-q")
    commit(folder, dict.fromkeys((*NAMED, *SECRET_CONTENTS, *CODE), "old\n"))
    plant(folder, dict.fromkeys(NAMED, "s3cret-of-mine\n") | SECRET_CONTENTS | CODE)
    return folder


def test_neither_diff_nor_snapshot_keeps_files_with_secrets_and_both_say_which(tree: Path) -> None:
    provenance = gathered(tree)
    for secret in (b"s3cret-of-mine", TOKEN.encode(), KEY.encode(), b"blob.bin", b".env"):
        assert secret not in provenance.diff
    assert provenance.snapshot is not None
    assert provenance.snapshot.files == ("tokenizer.json", "train.py")
    assert set(provenance.snapshot.left_out) == {*NAMED, *SECRET_CONTENTS}
    recorded = state(provenance)["left_out"]
    assert isinstance(recorded, list)
    assert set(recorded) == {*NAMED, *SECRET_CONTENTS}
    (note,) = provenance.notes
    assert "hub.py" in note
    assert TOKEN not in note
    git(tree, "checkout", "-q", ".")
    subprocess.run(["git", "apply"], cwd=tree, input=provenance.diff, check=True)
    assert (tree / "train.py").read_text() == "print(1)\n"
    assert (tree / "hub.py").read_text() == "old\n"


def test_only_files_with_secrets_changed_is_still_a_change(tree: Path) -> None:
    plant(tree, dict.fromkeys(CODE, "old\n"))
    provenance = gathered(tree)
    assert provenance.diff == b""
    assert state(provenance)["dirty"] is True


def test_a_secret_that_was_taken_out_is_not_in_the_diff_either(tree: Path) -> None:
    git(tree, "add", ".")
    git(tree, "commit", "-q", "-m", "with secrets")
    plant(tree, {"hub.py": "import os\n"})
    assert (gathered(tree).diff, state(gathered(tree))["left_out"]) == (b"", ["hub.py"])


def test_a_false_alarm_is_kept_at_the_recipes_word(tree: Path) -> None:
    provenance = gathered(tree, "hub.py", "site.key")
    assert TOKEN.encode() in provenance.diff
    assert provenance.snapshot is not None
    assert {"hub.py", "site.key"} <= set(provenance.snapshot.files)


def test_types_renames_conflicts_and_odd_names_leave_every_patch_with_its_file(tree: Path) -> None:
    git(tree, "commit", "-q", "-a", "-m", "all")
    plant(tree, {'odd "name"\n.py': "1\n", "moved.py": "2\n" * 50, "hub.py": "clean\n"})
    git(tree, "add", ".")
    git(tree, "commit", "-q", "-m", "odd")
    (tree / "train.py").unlink()
    (tree / "train.py").symlink_to("tokenizer.json")
    (tree / "moved.py").rename(tree / "away.py")
    git(tree, "add", "-A")
    plant(tree, {'odd "name"\n.py': "3\n", "hub.py": f"{TOKEN}\n"})
    provenance = gathered(tree)
    assert state(provenance)["left_out"] == ["hub.py"]
    git(tree, "reset", "-q", "--hard")
    subprocess.run(["git", "apply"], cwd=tree, input=provenance.diff, check=True)
    assert (tree / "train.py").is_symlink()
    assert (tree / "away.py").exists()
    assert (tree / 'odd "name"\n.py').read_text() == "3\n"


def test_a_conflict_that_is_not_resolved_is_no_reason_to_keep_nothing(tree: Path) -> None:
    git(tree, "commit", "-q", "-a", "-m", "all")
    git(tree, "checkout", "-q", "-b", "other")
    commit(tree, {"train.py": "other\n"})
    git(tree, "checkout", "-q", "-")
    commit(tree, {"train.py": "mine\n"})
    subprocess.run(
        ["git", "-c", "user.name=T", "-c", "user.email=t@x", "merge", "other"], cwd=tree, capture_output=True
    )
    plant(tree, {"tokenizer.json": "[]\n"})
    provenance = gathered(tree)
    assert b"tokenizer.json" in provenance.diff
    assert state(provenance)["diff_left_out"] is False


def test_a_tree_without_git_keeps_neither_secrets_nor_what_its_gitignore_names(tmp_path: Path) -> None:
    plant(tmp_path, dict.fromkeys(NAMED, "s3cret-of-mine\n") | SECRET_CONTENTS | CODE)
    plant(
        tmp_path,
        {".gitignore": "private/\n*.log\n", "private/notes.txt": "x\n", "pkg/run.log": "x\n", "pkg/a.py": "x\n"},
    )
    snapshot = gathered(tmp_path).snapshot
    assert snapshot is not None
    assert snapshot.files == (".gitignore", "pkg/a.py", "tokenizer.json", "train.py")


def test_a_rendered_directory_holds_none_of_them(tree: Path, tmp_path: Path) -> None:
    of, plan, rendered = JOBS["deepspeed-cpu"]
    of = replace(
        of, code=Code(path=str(tree), snapshot=True), backend=replace(of.backend, script=str(tree / "train.py"))
    )
    (note,) = render_run(of, plan, {}, rendered, tmp_path / "run")
    assert ".env" in note
    written = b"".join(path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file())
    for secret in (b"s3cret-of-mine", TOKEN.encode(), KEY.encode()):
        assert secret not in written
