"""What a shell completes: commands, options, names of the gallery, runs, recipe files, and keys with their values."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.command_line import CommandLine
from support.store_run_dirs import finished_cpu_run


@pytest.fixture
def complete(llmlaunch: CommandLine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Complete:
    monkeypatch.chdir(tmp_path)
    return Complete(llmlaunch, monkeypatch)


class Complete:
    """Asks as bash does: its words in a variable, the last of them to be completed."""

    def __init__(self, llmlaunch: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
        self._llmlaunch, self._monkeypatch = llmlaunch, monkeypatch

    def __call__(self, *words: str) -> list[str]:
        with self._monkeypatch.context() as patched:
            patched.setenv("_LLMLAUNCH_COMPLETE", "bash_complete")
            patched.setenv("COMP_WORDS", "\n".join(("llmlaunch", *(word or "''" for word in words))))
            patched.setenv("COMP_CWORD", str(len(words)))
            answer = self._llmlaunch()
        assert answer.stderr == ""
        return [line.partition(",")[2] for line in answer.stdout.split()]


def test_commands_and_options_are_completed(complete: Complete) -> None:
    assert complete("s") == ["schema", "submit", "status"]
    assert complete("check", "--re") == ["--replan"]
    assert complete("calibrate", "sh") == ["show"]


def test_names_of_the_gallery_of_schemas_and_of_clusters(complete: Complete) -> None:
    assert complete("init", "quick") == ["quickstart"]
    assert complete("schema", "clu") == ["cluster"]
    assert complete("init", "--cluster", "b3") == ["b300-x8"]


def test_recipe_files_and_folders_are_completed_and_other_files_are_not(complete: Complete, tmp_path: Path) -> None:
    for name in ("mine.yaml", "mine.txt", "my/inner.yml"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert complete("check", "m") == ["mine.yaml", "my/"]
    assert complete("submit", "my/") == ["my/inner.yml"]
    assert complete("diff", "mi") == ["mine.yaml"]


def test_keys_are_completed_level_by_level_with_the_words_they_take(complete: Complete) -> None:
    assert complete("check", "r.yaml", "lay") == ["layout.", "layout="]
    assert complete("plan", "r.yaml", "layout.te") == ["layout.tensor=", "layout.techniques="]
    assert complete("submit", "r.yaml", "mode") == ["model.", "model="]
    assert complete("check", "r.yaml", "training.precision=b") == ["training.precision=bf16"]
    assert complete("check", "r.yaml", "nodes=2", "layout.preference=") == [
        "layout.preference=true",
        "layout.preference=false",
    ]
    # bash takes words apart at "="
    assert complete("check", "r.yaml", "backend", "=", "d") == ["deepspeed"]
    assert complete("check", "r.yaml", "backend", "=") == ["megatron-lm", "deepspeed", "megatron-bridge"]
    assert complete("check", "r.yaml", "nodes", "=", "2", "cluster", "=", "b3") == ["b300-x8"]
    assert complete("check", "r.yaml", "nodes", "=", "2", "spare") == ["spare_nodes="]


@pytest.mark.parametrize("command", ["status", "diff"])
def test_runs_are_completed_by_their_names(
    complete: Complete, llmlaunch: CommandLine, tmp_path: Path, command: str
) -> None:
    assert complete(command, "las") == ["last"]
    llmlaunch("collect", finished_cpu_run(tmp_path / "run", "tiny-1").path)
    assert complete(command, "ti") == ["tiny-1"]


def test_a_store_that_cannot_be_read_is_no_message_in_the_middle_of_a_line(
    complete: Complete, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "store.db").write_text("this is no database")
    monkeypatch.setenv("LLMLAUNCH_STORE", str(tmp_path / "store.db"))
    assert complete("status", "l") == ["last"]


def test_a_real_bash_completes_with_the_printed_script(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "llmlaunch"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m llmlaunch "$@"\n')
    program.chmod(0o755)
    (tmp_path / "mine.yaml").touch()
    script = """
eval "$(llmlaunch completion bash)"
compopt() { printf "%s " "$2"; }
try() {
  COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=()
  _llmlaunch_completion llmlaunch
  echo "${COMPREPLY[*]}"
}
complete -p llmlaunch
try llmlaunch rehe
try llmlaunch check mi
try llmlaunch check mine.yaml spare
try llmlaunch check mine.yaml placement = s
"""
    environment = {**os.environ, "PATH": f"{program.parent}:{os.environ['PATH']}", "XDG_DATA_HOME": str(tmp_path)}
    answer = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    assert answer.stderr == ""
    assert answer.stdout.splitlines() == [
        "complete -o nosort -F _llmlaunch_completion llmlaunch",
        "rehearse",
        "mine.yaml",
        "nospace spare_nodes=",
        "slurm",
    ]


@pytest.mark.parametrize(
    ("shell", "part"), [("bash", "complete -o nosort"), ("zsh", "#compdef llmlaunch"), ("fish", "complete --no-files")]
)
def test_the_script_is_printed_for_the_shell_named_or_the_persons_own(
    llmlaunch: CommandLine, monkeypatch: pytest.MonkeyPatch, shell: str, part: str
) -> None:
    script = llmlaunch("completion", shell).stdout
    assert part in script
    assert "_LLMLAUNCH_COMPLETE" in script
    monkeypatch.setenv("SHELL", f"/usr/bin/{shell}")
    assert llmlaunch("completion").stdout == script
    monkeypatch.setenv("SHELL", "/bin/tcsh")
    assert "SHELL is tcsh; name one of bash, zsh, fish" in llmlaunch("completion", code=2).stderr
