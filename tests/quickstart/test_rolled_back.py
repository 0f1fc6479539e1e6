"""Real DeepSpeed training on this machine that meets a batch which makes its loss NaN."""

from __future__ import annotations

import json
import re
import struct
import sys
from pathlib import Path
from typing import Any

import pytest
from test_quickstart import RECIPE, llmlaunch

from llmlaunch.frameworks.deepspeed.config import model_config
from llmlaunch.recipe.load import load_recipe

STEPS, BATCH, LENGTH, SEED = 16, 8, 64, 1234
POISONED_STEP = 11
TINY = (
    "model={num_layers: 2, hidden_size: 64, ffn_hidden_size: 160, num_attention_heads: 4, num_query_groups: 2, "
    "vocab_size: 256}",
    f"training.sequence_length={LENGTH}", f"training.global_batch_size={BATCH}", f"training.steps={STEPS}",
    "cluster=cpu-x1", f"training.seed={SEED}",
)  # fmt: skip

pytestmark = pytest.mark.frameworks


def windows(step: int, characters: int) -> list[int]:
    """Where the samples of a step begin in the text (trainers/deepspeed/data.py)."""
    import torch

    starts = []
    for sample in range((step - 1) * BATCH, step * BATCH):
        random = torch.Generator().manual_seed(SEED * 1_000_000_007 + sample)
        starts.append(int(torch.randint(0, characters - LENGTH, (), generator=random)))
    return starts


def write_tokens(path: Path) -> None:
    """An indexed dataset with one token 0, which the batch of the poisoned step alone contains."""
    text = bytearray(b"the quick brown fox jumps over the lazy dog. " * 20_000)
    taken = {
        start // LENGTH for step in range(1, STEPS + 1) if step != POISONED_STEP for start in windows(step, len(text))
    }
    place = next(
        start + 1
        for start in windows(POISONED_STEP, len(text))
        if not taken.intersection(range(start // LENGTH - 2, start // LENGTH + 3))
    )
    text[place] = 0
    path.with_suffix(".bin").write_bytes(text)
    head = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 1, 1, 2)  # tokens of one byte, one sequence
    path.with_suffix(".idx").write_bytes(head + struct.pack("<iqqq", len(text), 0, 0, 1))


def write_weights(folder: Path) -> None:
    """A model whose embedding of the zero byte is NaN, and no other weight."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**model_config(load_recipe(RECIPE, TINY))))
    with torch.no_grad():
        model.get_input_embeddings().weight[0] = float("nan")
    model.save_pretrained(str(folder))


@pytest.fixture
def poisoned(tmp_path: Path) -> tuple[str, ...]:
    write_tokens(tmp_path / "tokens")
    write_weights(tmp_path / "weights")
    return (
        *TINY,
        f"python={sys.executable}",
        f"data={{path: {tmp_path}/tokens}}",
        f"training.start_from={tmp_path}/weights",
        f"training.checkpoint_path={tmp_path}/checkpoints",
        "training.save_interval=4",
    )


def attempts(run: Path) -> list[tuple[dict[str, Any], str]]:
    """Each attempt's attempt.json and what its nodes logged, in order."""
    folders = sorted(run.glob("attempts/*"))
    logs = [[path for path in run.glob(f"logs/{folder.name}.*.log") if ".job." not in path.name] for folder in folders]
    texts = ["".join(path.read_text() for path in sorted(paths)) for paths in logs]
    return [
        (json.loads((folder / "attempt.json").read_text()), text) for folder, text in zip(folders, texts, strict=True)
    ]


def steps(log: str) -> list[int]:
    return [int(step) for step in re.findall(r"^\[rank\d+\]: step (\d+)/", log, re.MULTILINE)]


def test_it_goes_back_to_the_checkpoint_before_leaves_the_batch_out_and_finishes(
    tmp_path: Path, poisoned: tuple[str, ...]
) -> None:
    run = tmp_path / "run"
    policy = "on_bad_loss={action: rollback, skip_batches: 2}"
    llmlaunch(tmp_path, "submit", RECIPE, *poisoned, policy, "-o", run, "--local", "--follow")
    (first, first_log), (second, second_log) = attempts(run)
    assert steps(first_log) == list(range(1, POISONED_STEP))
    assert f"step {POISONED_STEP}: the loss is nan" in first_log
    assert first["skips"] == []
    assert (second["from_step"], second["skips"]) == (8, [[10, 11]])
    assert "leaving out batches, from that of step 10 to that of step 11" in second_log
    assert steps(second_log) == [9, *range(12, STEPS + 1)]
    status = json.loads((run / "status.json").read_text())
    assert status["state"] == "succeeded"
    said = (run / "attempts" / str(first["attempt"]) / "status.json").read_text()
    verdict = json.loads(said)
    assert (verdict["cause"]["kind"], verdict["next"]["action"]) == ("bad_loss", "rollback")
