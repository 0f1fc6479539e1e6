"""The screens of `check` and `plan`, as a terminal of 80 x 24 shows them, held against stored ones. Those of a wider
one and of the quickstart are in tests/newcomer.

UPDATE_GOLDEN=1 (and no -n) rewrites tests/golden/screens/; read each as a person would who sees it for the first time.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
from pathlib import Path

import pytest

from llmlaunch.cli import planning

ROOT = Path(__file__).resolve().parents[3]
GOLDEN = ROOT / "tests" / "golden" / "screens"
SCRIPT = """\
#!/bin/bash
#SBATCH --job-name=ours
#SBATCH --nodes=2
ARGS=( --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention
  --num-query-groups 8 --swiglu --disable-bias-linear --normalization RMSNorm --position-embedding-type rope
  --untie-embeddings-and-output-weights --vocab-size 128256 --seq-length 8192
  --max-position-embeddings 8192 --tensor-model-parallel-size 4 --sequence-parallel --bf16 --use-distributed-optimizer
  --micro-batch-size 1 --global-batch-size 128 --train-iters 1000 --lr 1e-4 --mock-data --tokenizer-type NullTokenizer )
srun torchrun --nnodes $SLURM_NNODES --nproc_per_node 8 --rdzv_backend c10d --rdzv_endpoint gpu01:29500 \\
  pretrain_gpt.py "${ARGS[@]}"
"""
ONE_LAYOUT = """\
layout: {tensor: 1, zero_stage: 1, context: 1, micro_batch_size: 1, recompute: none, offload_optimizer: 0}
memory: {limit: 0.55}
"""
SCREENS = {
    "safe": (("check", "recipes/llama3-70b.yaml"), 0),
    "tight": (("check", "tight.yaml"), 3),
    "unsafe": (("check", "recipes/llama3-70b.yaml", "nodes=1", "layout.tensor=4", "layout.offload_optimizer=0"), 3),
    "pipeline-of-16": (("check", "recipes/llama3-405b.yaml"), 0),
    "script": (("check", "job.sbatch", "--cluster", "h100-80gb-x8"), 0),
    "plan": (("plan", "recipes/llama3-8b.yaml"), 0),
    "plan-unsafe": (("plan", "recipes/llama3-70b.yaml", "nodes=1", "layout.tensor=4", "layout.offload_optimizer=0"), 3),
}
COLUMNS, ROWS = 80, 24


class Screen(io.StringIO):
    """Both streams of a command, as a terminal shows them."""

    encoding = "utf-8"  # type: ignore[assignment]

    def isatty(self) -> bool:
        return True


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    (tmp_path / "job.sbatch").write_text(SCRIPT)
    safe = (ROOT / "recipes" / "llama2-7b-deepspeed.yaml").read_text()
    (tmp_path / "tight.yaml").write_text(safe.replace("layout: auto\n", ONE_LAYOUT))
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MEGATRON_LM_PATH", raising=False)
    monkeypatch.setenv("LLMLAUNCH_PYTHON", sys.executable)  # has torch, unlike the first on some PATHs
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr(planning, "waiting_for", lambda _: contextlib.nullcontext())  # how long differs
    return tmp_path


def shown(monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], code: int) -> str:
    from llmlaunch.cli.main import main

    screen = Screen()
    monkeypatch.setenv("COLUMNS", str(COLUMNS))
    monkeypatch.setattr(sys, "argv", ["llmlaunch", *arguments])
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setattr(sys, "stderr", screen)
    with pytest.raises(SystemExit) as end:
        main()
    monkeypatch.undo()
    assert end.value.code == code, screen.getvalue()
    return screen.getvalue()


@pytest.mark.usefixtures("folder", "all_advice")
@pytest.mark.parametrize("name", SCREENS)
def test_a_screen_is_the_stored_one_and_fits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text = shown(monkeypatch, *SCREENS[name])
    stored = GOLDEN / f"{name}-{COLUMNS}x{ROWS}.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        stored.write_text(text)
    assert text == stored.read_text()
    lines = text.splitlines()
    assert len(lines) < ROWS, "one row is the prompt's"
    wide = [line for line in lines if len(line) > COLUMNS]
    assert [line for line in wide if not re.search(r"llmlaunch (check|plan|submit) ", line)] == []
    assert any(line.startswith("Next: llmlaunch ") for line in lines[-6:])
