"""What only the run of a script decides is said, no script takes for ever to read, and nothing of one is executed."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from llmlaunch.command_lines.launch import trainer_commands
from llmlaunch.command_lines.shell import Script, read_script
from llmlaunch.errors import UserError


def read(text: str, folder: Path, *arguments: str, **variables: str) -> Script:
    return read_script(text, "train.sh", folder, arguments, variables)


def runs(script: Script) -> list[list[str]]:
    """The words that a script gives to `run`."""
    return [list(command.words[1:]) for command in script.commands if command.words[0] == "run"]


def test_what_only_the_run_knows_stays_in_the_word_and_is_named_by_line(tmp_path: Path) -> None:
    script = read('HOST=$(scontrol show hostnames | head -n 1)\nrun $1 "$DATA/x" $HOST $((NODES*8))\n', tmp_path)
    assert runs(script) == [["${1}", "${DATA}/x", "${HOST}", "${NODES}"]]
    assert {unset.name: unset.line for unset in script.unset} == {"HOST": 1, "1": 2, "DATA": 2, "NODES": 2}
    given = read('run $1 "$DATA/x" $HOST $((NODES*8))\n', tmp_path, "7b", DATA="/d", HOST="h0", NODES="4")
    assert runs(given) == [["7b", "/d/x", "h0", "32"]]
    assert given.unset == ()


def test_a_place_that_an_author_left_open_is_unset(tmp_path: Path) -> None:
    script = read("CHECKPOINT=<Specify path>\nrun --load $CHECKPOINT/x <input >output\n", tmp_path)
    assert runs(script) == [["--load", "${Specify_path}/x"]]


@pytest.mark.parametrize(
    ("text", "expected", "note"),
    [
        ("if nvidia-smi; then run 1; else run 2; fi", ["1"], "train.sh:1: if"),
        ('if [ "$#" -ne 2 ]; then echo usage; exit 1; fi\nrun $1', ["${1}"], "would end the script, because"),
        ('case "$1" in\n 7b) run a;;\n 13b) run b;;\n *) exit 1;;\nesac', ["a"], "lines 2, 3, 4"),
        ('if [ "$DEBUG" = 1 ]; then run slow; else run fast; fi', ["fast"], "DEBUG is taken as not set"),
        ("if [ ! -f /nowhere/x ]; then exit 1; fi; run 1", ["1"], "ends the script"),
        ('A=$(hostname); [ "$A" = x ] && run 1', ["1"], "train.sh:1: &&: only the run shows whether line 1 is taken"),
        ("[ -f /nowhere/x ] && exit 0; run 1", ["1"], "ends the script"),
    ],
)
def test_a_branch_that_only_the_run_decides_is_noted(text: str, expected: list[str], note: str, tmp_path: Path) -> None:
    script = read(text, tmp_path)
    assert runs(script) == [expected]
    assert note in "\n".join(script.notes)


def test_a_file_beside_the_script_is_sourced_and_one_that_is_missing_is_noted(tmp_path: Path) -> None:
    (tmp_path / "env.sh").write_text("SIZE=8\n")
    text = 'source "$(dirname "$0")/env.sh"\n. ./gone.sh\nrun $SIZE\n'
    script = read(text, tmp_path)
    assert runs(script) == [["8"]]
    assert script.notes == ("train.sh:2: ./gone.sh is not here and was not read",)


def test_files_that_a_script_writes_go_with_its_commands(tmp_path: Path) -> None:
    text = 'MBS=2\ncat <<EOF > ./ds.json\n{"train_micro_batch_size_per_gpu": $MBS}\nEOF\nrun x\n'
    files = read(text, tmp_path).commands[0].files
    assert files["./ds.json"] == files[f"{tmp_path}/ds.json"] == '{"train_micro_batch_size_per_gpu": 2}\n'
    assert list(tmp_path.iterdir()) == []


SBATCH = """#!/bin/bash
#SBATCH --job-name=pretrain -N 4   # nodes
#SBATCH --gres=gpu:h100:8
#SBATCH --ntasks-per-node 1
#SBATCH -p gpu -t 24:00:00 --exclusive
run $SLURM_NNODES $SLURM_GPUS_ON_NODE $((SLURM_NNODES * SLURM_NTASKS_PER_NODE)) $SLURM_PROCID
#SBATCH --mem=1G
"""


def test_options_of_sbatch_and_what_slurm_sets_by_them(tmp_path: Path) -> None:
    script = read(SBATCH, tmp_path)
    assert script.slurm == {
        "job-name": "pretrain", "nodes": 4, "gres": "gpu:h100:8", "ntasks-per-node": 1, "partition": "gpu",
        "time": "24:00:00", "exclusive": True,
    }  # fmt: skip
    assert runs(script) == [["4", "8", "4", "0"]]


HOSTILE = {
    "nested": "(" * 5000, "nested substitutions": "$(" * 3000 + "x" + ")" * 3000,
    "nested defaults": "run " + "${A:-" * 3000, "nested tests": "if true; then " * 2000,
    "doubling": "A=xxxxxxxx\n" + "A=$A$A$A$A\n" * 40 + "run $A", "a loop without an end": "while true; do A=$A.; done",
    "loops in loops": "for i in {1..900}; do for j in {1..900}; do run $i; done; done",
    "recursion": "f() { f; f; }; f", "mutual sourcing": "source ./train.sh\n" * 3, "braces": "run " + "{1,2}" * 40,
    "huge numbers": "run $((9**9**9**9)) $((1/0)) $((1<<999999999))",
    "patterns": "A=" + "a" * 3000 + '\nrun "${A##*a*a*a*a*a*a*a*b}"',
    "marks": "run \ue000X\ue001", "eval of itself": 'E=\'eval "$E"\'; eval "$E"',
    "a regular expression": "[[ " + "a" * 150 + "b =~ (a+)+$ ]] && run",
    "patterns of patterns": "case " + "a" * 5000 + " in " + "+(" * 15 + "a" + ")" * 15 + "b) run;; esac",
    "a width": "X=$(printf '%999999999d' 1)",
    "a reference to itself": "declare -n A=B; declare -n B=A; A=1; run $A",
    "arithmetic of arithmetic": "A=B+B; B=C+C; C=D+D; D=E+E; E=A+A; run $((A))",
    "odd indexes": "A=(1); A[-5]=3; A[99999999999999999999]=1; run ${A[-9]} ${A[99999999999]}",
}  # fmt: skip


def message_of(text: str, folder: Path) -> str | None:
    """The message that a script is refused with; None where it is read."""
    try:
        trainer_commands(read(text, folder))
    except UserError as error:
        return str(error)
    return None


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
@pytest.mark.timeout(20)
def test_a_hostile_script_ends_in_one_message_or_is_read(text: str, tmp_path: Path) -> None:
    (tmp_path / "train.sh").write_text(text)
    message = message_of(text, tmp_path)
    assert message is None or (message.startswith("train.sh") and "\n" not in message)


LARGE = "x" * 300_000
# what asks for more than the budget of a reader: what it is refused for
TOO_MUCH = {
    "folders in a loop": ("for i in {1..9999}; do cd " + "a/" * 30 + "; done", "characters"),
    "a large file in a loop": ("for i in {1..9999}; do source large.sh; done", "parsed characters"),
    "a large file read in a loop": ("for i in {1..9999}; do A=$(cat large.sh); done", "file bytes"),
    "a file in a loop": ("for i in {1..9999}; do source small.sh; done", "files"),
    "braces before much text": ("echo {1..9999}" + LARGE, "characters"),
    "braces before a variable": (f"A={LARGE}\necho {{1..9999}}$A", "characters"),
    "braces of braces": ("run " + "{1..9}" * 9, "words"),
    "a long series": ("for i in {1..999999999}; do run; done", "words"),
    "exports between programs": ("".join(f"export A{i}={'x' * 900}\np{i}\n" for i in range(900)), "characters"),
    "directives": ("#SBATCH -v -v\n" * 70_000, "words"),
    "a directive": ("#SBATCH " + "-v " * 330_000, "words"),
    "letters": ("#SBATCH -" + "v" * 300_000 + "\nwhile :; do X+=xx; done", "commands"),
    "doubling": ("X=x\nwhile :; do X=$X$X; done", "characters"),
    "doubling arrays": ('A=(x x)\nwhile :; do A=("${A[@]}" "${A[@]}"); done', "words"),
    "replacing": (f"B={LARGE}\nX={LARGE}\nX=${{X//x/$B}}", "characters"),
    "sed": (f'B={LARGE}\nX={LARGE}\necho $X | sed "s/x/$B/g"', "characters"),
    "cat": (f"X={LARGE}\necho $X > f; cat " + "f " * 9000, "characters"),
    "widths": ("X=$(printf '%999d' {1..9999})\n" * 50, "characters"),
    "variables copied for subshells": (
        "".join(f"A{i}=x\n" for i in range(9000)) + "for i in {1..9999}; do X=$(echo a); done", "characters"
    ),
    "loops": ("for i in {1..900}; do for j in {1..900}; do :; done; done", "commands"),
    "inner scripts": ("for i in {1..9999}; do bash inner.sh; done", "commands"),
    "inner commands": ("for i in {1..9999}; do bash -c 'for j in {1..900}; do :; done'; done", "commands"),
    "files of inner scripts": ("for i in {1..999}; do bash small.sh; done", "files"),
    "redirections": ("=<a" * 300_000, "words"),
    "dollars": ("run " + "$" * 900_000, "words"),
}  # fmt: skip


@pytest.mark.parametrize(("text", "kind"), TOO_MUCH.values(), ids=TOO_MUCH)
def test_one_budget_ends_what_asks_for_too_much(text: str, kind: str, tmp_path: Path) -> None:
    (tmp_path / "large.sh").write_text("A=1 # " + "x" * 900_000)
    (tmp_path / "small.sh").write_text("A=1")
    (tmp_path / "inner.sh").write_text("for j in {1..900}; do :; done")
    message = message_of(text, tmp_path)
    assert message is not None
    assert re.search(
        rf"^train.sh: takes more than [0-9,]+ {kind} to read; write out the command that it starts$", message
    )


@pytest.mark.parametrize("text", ["source {}", "X=$(cat {}); run $X", "X=$(< {}); run $X", "read X < {}", "bash {}"])
def test_nothing_but_a_regular_file_is_opened(text: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in ("pipe", "/dev/zero", ".", "gone"):
        assert message_of(text.format(path) + "\nrun on", tmp_path) is None


TOKENS = r"""touch canary@$(touch canary)@`touch canary`@;@(@)@{@}@if @then @fi@do @done@
@for i in @case @ in @esac@;;@[[ @
@ ]@$@${@A@=@+=@((@))@"@'@\\@<<E
E
@> f@<(@#@ @torchrun @python train.py @--lr 1 @eval @source f@$@:-@*@~@&@|"""
PIECES = st.sampled_from(re.split("@", TOKENS))


@settings(max_examples=60, deadline=None)
@given(st.lists(PIECES, max_size=40).map("".join) | st.text(max_size=80))
@example("eval '$(touch canary)'")
def test_nothing_is_executed_and_nothing_but_a_message_comes_of_any_text(
    tmp_path_factory: pytest.TempPathFactory, text: str
) -> None:
    folder = tmp_path_factory.getbasetemp() / "hostile"
    folder.mkdir(exist_ok=True)
    message_of(text, folder)
    assert list(folder.iterdir()) == []


LONG = "9" * 5000


@pytest.mark.parametrize(
    "line",
    [
        "echo $²", f"shift {LONG}", "a[²]=1", f"echo ${{{LONG}}}", f"A=abc; echo ${{A:{LONG}}}", f"X=$(({LONG}))",
        f"X=$(( 1 << {LONG[:900]} ))", "X=$((²))", "X=$(echo a,b | cut -d, -f0)", f"X=$(echo a,b | cut -d, -f{LONG})",
        "X=$(echo abc | tr -d '[:bogus:]')", "X=$(echo abc | tr '' x)", "X=$(echo abc | tr a b c)",
        f"X=$(echo abc | head -n {LONG})", f"X=$(seq {LONG})", f"X=$(printf '%{LONG}d' 1)",
        f"if [ {LONG} -gt 1 ]; then echo; fi", f"for i in {{1..{LONG}}}; do echo; done", f"#SBATCH --nodes={LONG}",
    ],
)  # fmt: skip
def test_a_number_that_bash_does_not_read_hides_no_training(line: str, tmp_path: Path) -> None:
    script = read(f"#!/bin/bash\n#SBATCH --nodes=1\n{line}\ntorchrun pretrain_gpt.py --num-layers 4\n", tmp_path)
    assert [command.trainer for command in trainer_commands(script)] == ["pretrain_gpt.py"]
