"""Where the reading of a script ends before its last line, the line and the reason are named."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmlaunch.command_lines.shell import read_script
from llmlaunch.errors import UserError
from llmlaunch.imports.recipe_file import read_source

TRAIN = "torchrun pretrain_gpt.py --num-layers 4\n"


@pytest.mark.parametrize(
    ("text", "ended"),
    [
        ("echo a\nexit 3\n" + TRAIN, "reading ended at `exit 3`, line 2"),
        ('\nif [ -z "$MODEL_SIZE" ]; then\n  mkdir x\n  exit 1\nfi\n' + TRAIN,
         "reading ended at `exit 1`, line 4, because MODEL_SIZE is not set"),
        ('[ -n "$A" ] || [ "$B" = x ] || { mkdir x; exit 1; }\n' + TRAIN,
         "reading ended at `exit 1`, line 1, because A is not set and B is not set"),
        ('case "$SIZE" in\n 7b) ;;\n *) rm x; exit 2;;\nesac\n' + TRAIN,
         "reading ended at `exit 2`, line 3, because SIZE is not set"),
        ('if [ "$1" != train ]; then mkdir x; exit; fi\n' + TRAIN,
         "reading ended at `exit`, line 1, because $1 has no value here (--set 1=VALUE)"),
        ("if [ $# -lt 1 ]; then mkdir x; exit; fi\n" + TRAIN,
         "reading ended at `exit`, line 1, because the script has no arguments (write them after it)"),
        ("exec ./other\n" + TRAIN, "reading ended at `exec ./other`, line 1"),
    ],
)  # fmt: skip
def test_the_end_is_named_with_its_line_and_reason(text: str, ended: str, tmp_path: Path) -> None:
    script = read_script(text, "train.sh", tmp_path)
    assert script.ended == ended
    assert "torchrun" not in [command.words[0] for command in script.commands]
    (tmp_path / "train.sh").write_text(text)
    with pytest.raises(UserError, match="starts no training") as error:
        read_source(tmp_path / "train.sh")
    assert ended in str(error.value)


@pytest.mark.parametrize(
    ("text", "note"),
    [
        ('if [ -z "$A" ]; then echo "usage: x"; exit 1; fi\n', "`exit 1` would end the script, because A is not set"),
        ('A=""\nif [ -z "$A" ]; then exit 1; fi\n', "`exit 1` would end the script, because A is empty"),
        ('[[ -z "${A:-}" ]] && { echo no; exit 1; }\n', "`exit 1` would end the script, because A is not set"),
        ("[[ -n $1 ]] || { echo usage; exit 2; }\n", "`exit 2` would end the script, because $1 has no value here"),
        (
            "usage() { echo usage; exit 1; }\nif [ $# -lt 1 ]; then usage; fi\n",
            "`exit 1` would end the script, because",
        ),
        ("A=${A:?set it}\n", "`${A:?set it}` would end the script, because A is not set"),
        ("set -eu\ncd $A\n", "`$A` would end the script, because A is not set and `set -u` forbids it"),
    ],
)
def test_a_complaint_about_a_missing_value_is_noted_and_read_past(text: str, note: str, tmp_path: Path) -> None:
    script = read_script(text + TRAIN, "train.sh", tmp_path)
    assert note in "\n".join(script.notes)
    assert [command.words[0] for command in script.commands] == ["torchrun"]


def test_an_end_after_the_training_is_no_complaint(tmp_path: Path) -> None:
    script = read_script(TRAIN + "exit 0\n", "train.sh", tmp_path)
    assert [command.words[0] for command in script.commands] == ["torchrun"]


def test_an_end_in_a_sourced_file_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "env.sh").write_text("\nexit 4\n")
    script = read_script("source env.sh\n" + TRAIN, "train.sh", tmp_path)
    assert script.ended == "reading ended at `exit 4`, line 2 of env.sh"


def test_a_file_that_is_not_here_is_a_command_for_the_setup(tmp_path: Path) -> None:
    script = read_script("source /opt/venv/bin/activate x\n. gone.sh\n", "train.sh", tmp_path)
    assert [command.words for command in script.commands] == [
        ("source", "/opt/venv/bin/activate", "x"),
        ("source", "gone.sh"),
    ]


def test_files_are_also_looked_for_beside_the_script_and_in_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "a.sh").write_text("A=1\n")
    (tmp_path / "b.sh").write_text("B=2\n")
    monkeypatch.chdir(tmp_path)
    script = read_script("cd /somewhere\nsource a.sh\nsource b.sh\nrun $A $B\n", "train.sh", tmp_path / "scripts")
    assert script.commands[-1].words == ("run", "1", "2")


@pytest.mark.parametrize("line", ["[[ $A == @(7|13)b ]]", "case $A in +(7)) ;; esac", "A=${A/#+([0-9])/x}"])
def test_patterns_that_bash_has_on_request_alone_are_not_read(line: str, tmp_path: Path) -> None:
    script = read_script(f"run 1\n{line}\nrun 2\n", "train.sh", tmp_path)
    assert [command.words for command in script.commands] == [("run", "1")]
    assert script.notes[0].startswith("train.sh:2: what follows is not read: a pattern of extglob")
