"""Commit, changes and digest are recorded as they are, what cannot be known is said in code.json, and neither diff nor
snapshot keeps a secret of the tree."""

from __future__ import annotations

import hashlib
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from git_checkouts import commit, copied, gathered, git, state
from run_samples import recipe
from test_render_run import JOBS

from llmlaunch.errors import UserError
from llmlaunch.recipe.containers import Container
from llmlaunch.recipe.types import BackendChoice, Code
from llmlaunch.rendering import git as git_room
from llmlaunch.rendering import provenance as snapshot_room
from llmlaunch.rendering.provenance import gather_provenance
from llmlaunch.rendering.run_directory import render_run


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
    assert copied(provenance) == ("train.py", "weights.bin")
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
    assert copied(provenance) == ("train.py",)


def test_the_tree_is_found_from_the_backend(checkout: Path) -> None:
    megatron = recipe(backend=BackendChoice("megatron-lm", path=str(checkout)))
    script = recipe(backend=BackendChoice("deepspeed", script=str(checkout / "train.py")))
    beside = recipe(backend=BackendChoice("megatron-lm", path="/opt/Megatron-LM", script=str(checkout / "train.py")))
    for of in (megatron, script, beside):
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
    assert copied(gathered(tmp_path)) == ("a.py", "link.py", "pkg/b.py")


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
    assert copied(provenance) == ("tokenizer.json", "train.py")
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
    assert {"hub.py", "site.key"} <= set(copied(provenance))


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
    assert copied(gathered(tmp_path)) == (".gitignore", "pkg/a.py", "tokenizer.json", "train.py")


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
