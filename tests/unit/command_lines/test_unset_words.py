"""Words that hold nothing but variables without a value disappear as in bash, except where a value is needed."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmlaunch.command_lines.command import option_values
from llmlaunch.command_lines.launch import trainer_commands
from llmlaunch.command_lines.sbatch import srun_options
from llmlaunch.command_lines.shell import read_script
from llmlaunch.imports.command import read_command

MODEL = (
    "pretrain_gpt.py --num-layers 2 --hidden-size 512 --num-attention-heads 8 --seq-length 512 "
    "--max-position-embeddings 512 --micro-batch-size 1 --global-batch-size 16 --train-iters 10 --vocab-size 32000 "
    "--mock-data --lr 1e-4 --bf16"
)


@pytest.mark.parametrize(
    ("words", "takes", "values", "beyond"),
    [
        ("${X}", 0, "", ""), ("${X}", 1, "${X}", ""), ("aux_loss ${X}", 1, "aux_loss", ""),
        ("${X} aux_loss", 1, "aux_loss", ""), ("a ${X} b", "+", "a b", ""), ("a${X}", 1, "a${X}", ""),
        ("${X}${Y} extra", 0, "", "extra"),
    ],
)  # fmt: skip
def test_a_word_of_unset_variables_is_a_value_only_where_one_is_missing(
    words: str, takes: int | str, values: str, beyond: str
) -> None:
    assert option_values(words.split(), takes) == (values.split(), beyond.split())


@pytest.mark.parametrize(
    "command",
    [
        'srun "${ARGS[@]}" torchrun --nproc-per-node 8 TRAINER',
        "srun -N 1 $SRUN_ARGS $MORE torchrun $DISTRIBUTED --nproc-per-node 8 TRAINER",
        "$LAUNCHER torchrun --nproc-per-node 8 $MORE TRAINER",
        "torchrun --nproc-per-node 8 TRAINER --moe-router-load-balancing-type aux_loss $OPTION",
        "torchrun --nproc-per-node 8 TRAINER --swiglu $OPTION $MORE --untie-embeddings-and-output-weights",
    ],
)
def test_an_optional_word_hides_neither_a_training_nor_an_argument(command: str, tmp_path: Path) -> None:
    script = read_script(command.replace("TRAINER", MODEL), "train.sh", tmp_path)
    (training,) = trainer_commands(script)
    assert (training.launcher, training.trainer, training.devices_per_node) == ("torchrun", "pretrain_gpt.py", 8)
    reading = read_command(training)
    assert "$" not in str((reading.missing, reading.unread, reading.document))


def test_an_optional_word_is_named_with_its_line(tmp_path: Path) -> None:
    script = read_script(f"\nsrun $SRUN_ARGS torchrun --nproc-per-node 8 {MODEL}", "train.sh", tmp_path)
    assert "train.sh:2: SRUN_ARGS is not set: ${SRUN_ARGS} disappears, as in bash" in "\n".join(script.notes)


def test_the_value_of_a_flag_is_asked_for_in_the_scripts_words(tmp_path: Path) -> None:
    command = f"torchrun --nnodes 1 --nproc-per-node 8 {MODEL.replace('--train-iters 10', '--train-iters $STEPS')}"
    (training,) = trainer_commands(read_script(command, "train.sh", tmp_path))
    assert [unset.name for unset in training.unset] == ["STEPS"]
    assert read_command(training).missing == (
        "training.steps: --train-iters reads STEPS (line 1), which has no value in the script; give --set STEPS=VALUE",
    )


def test_the_value_of_an_option_of_srun_stays() -> None:
    assert srun_options(["-N", "${NODES}", "${ARGS}", "-u", "torchrun"]) == (
        {"nodes": "${NODES}", "unbuffered": True},
        ["torchrun"],
    )
