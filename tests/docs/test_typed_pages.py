"""What a newcomer types from the README, and a coding agent from the skill file, does what the page says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from support.command_line import data_folders
from support.screens import missing_words
from support.snippets import DOCS, ROOT, walk
from support.soak import in_soak

SKILL = DOCS / "skills" / "llmlaunch" / "SKILL.md"
JOB = """#!/bin/bash
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
HOST=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun torchrun --nnodes 4 --nproc_per_node 8 --rdzv_backend c10d --rdzv_endpoint "$HOST:29500" \\
    pretrain_gpt.py --num-layers 32 --hidden-size 4096 \\
    --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention --num-query-groups 8 --swiglu \\
    --normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights --seq-length 8192 \\
    --max-position-embeddings 8192 --position-embedding-type rope --micro-batch-size 1 --global-batch-size 512 \\
    --train-iters 1000 --lr 0.0003 --bf16 --tensor-model-parallel-size 4 --sequence-parallel \\
    --use-distributed-optimizer --mock-data --tokenizer-type NullTokenizer --vocab-size 128256
"""


def test_the_readme_can_be_typed(tmp_path: Path) -> None:
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    (tmp_path / "job.sbatch").write_text(JOB)  # the job that the reader has
    printed = walk(ROOT / "README.md", tmp_path, **data_folders(tmp_path))
    assert missing_words("check", printed["check"]) == set(), "make docs-screens"
    assert (tmp_path / "llama3-8b.yaml").exists()
    assert (tmp_path / "mine.yaml").exists()


def test_the_first_two_screens_of_the_readme_say_for_whom_how_to_install_and_what_to_type_first() -> None:
    two_screens = "\n".join((ROOT / "README.md").read_text("utf-8").splitlines()[:60])
    for part in ("For engineers who", "pip install .", "llmlaunch check job.sbatch", "llmlaunch observe -- "):
        assert part in two_screens
    table = (ROOT / "README.md").read_text("utf-8").split("## Ten commands")[1].split("\n\n")[0]
    assert len(re.findall(r"(?m)^\| `llmlaunch ", table)) == 10


@pytest.mark.parametrize("page", [SKILL, *in_soak(DOCS / "qualify.md")], ids=lambda page: page.stem)
def test_a_page_can_be_typed_and_submits_nothing(tmp_path: Path, page: Path) -> None:
    walk(page, tmp_path, **data_folders(tmp_path))
    assert not (tmp_path / "runs").exists()


def test_the_skill_file_says_when_to_use_it() -> None:
    head = SKILL.read_text("utf-8").split("---\n")[1]
    assert [line.partition(":")[0] for line in head.splitlines()] == ["name", "description"]
