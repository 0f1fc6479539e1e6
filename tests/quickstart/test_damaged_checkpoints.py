"""Real DeepSpeed training on this machine that meets a batch which makes its loss NaN, and then damaged checkpoints."""

from __future__ import annotations

import json
import re
import struct
import sys
from pathlib import Path
from typing import Any

import numpy
import pytest
from safetensors.numpy import save_file
from test_quickstart import RECIPE, llmlaunch

from llmlaunch.frameworks.deepspeed.config import model_config
from llmlaunch.recipe.load import load_recipe
from support.node_rig import until

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
    config = model_config(load_recipe(RECIPE, TINY))
    vocabulary, hidden, wide = config["vocab_size"], config["hidden_size"], config["intermediate_size"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    rows = {"q": hidden, "k": keys, "v": keys, "o": hidden}
    layer = {f"self_attn.{name}_proj": (count, hidden) for name, count in rows.items()}
    layer |= {"mlp.gate_proj": (wide, hidden), "mlp.up_proj": (wide, hidden), "mlp.down_proj": (hidden, wide)}
    layer |= {"input_layernorm": (hidden,), "post_attention_layernorm": (hidden,)}
    shapes: dict[str, tuple[int, ...]] = {"lm_head": (vocabulary, hidden), "model.norm": (hidden,)}
    shapes["model.embed_tokens"] = (vocabulary, hidden)
    for number in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{number}.{name}": shape for name, shape in layer.items()}
    chance = numpy.random.default_rng(SEED)
    tensors = {
        f"{name}.weight": chance.normal(1.0 if len(shape) == 1 else 0.0, 0.02, shape).astype(numpy.float32)
        for name, shape in shapes.items()
    }
    tensors["model.embed_tokens.weight"][0] = numpy.nan
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], **config}))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run directory of a training that met the batch, and was followed to its end."""
    home = tmp_path_factory.mktemp("checkpoints")
    write_tokens(home / "tokens")
    write_weights(home / "weights")
    words = (
        *TINY, f"python={sys.executable}", f"data={{path: {home}/tokens}}", f"training.start_from={home}/weights",
        "training.learning_rate=1.0e-5",
        f"training.checkpoint_path={home}/checkpoints", "training.save_interval=4", "restart.backoff_seconds=0",
        "on_bad_loss={action: rollback, skip_batches: 2}",
    )  # fmt: skip
    llmlaunch(home, "submit", RECIPE, *words, "-o", home / "run", "--local", "--follow")
    return home / "run"


class Attempt:
    """What one left: its record, its verdict and what its node logged."""

    def __init__(self, folder: Path) -> None:
        self.record: dict[str, Any] = json.loads((folder / "attempt.json").read_text())
        self.status: dict[str, Any] = json.loads((folder / "status.json").read_text())
        logs = sorted(folder.parents[1].glob(f"logs/{folder.name}.*.log"))
        self.log = "".join(path.read_text() for path in logs)

    @property
    def steps(self) -> list[int]:
        return [int(step) for step in re.findall(r"^\[rank\d+\]: step (\d+)/", self.log, re.MULTILINE)]


def attempts(run: Path) -> list[Attempt]:
    found = [Attempt(folder) for folder in run.glob("attempts/*")]
    return sorted(found, key=lambda attempt: float(attempt.record["started_at"]))


def test_training_rolls_back_before_the_bad_batch_and_skips_it(run: Path) -> None:
    first, second = attempts(run)
    assert first.steps == list(range(1, POISONED_STEP))
    assert f"step {POISONED_STEP}: the loss is nan" in first.log
    assert first.record["skips"] == []
    assert (first.status["cause"]["kind"], first.status["next"]["action"]) == ("bad_loss", "rollback")
    assert (second.record["from_step"], second.record["skips"]) == (8, [[10, 11]])
    assert "leaving out batches, from that of step 10 to that of step 11" in second.log
    assert second.steps == [9, *range(12, STEPS + 1)]
    assert second.status["state"] == "succeeded"


def test_training_falls_back_past_checkpoints_that_are_torn_or_do_not_load(run: Path) -> None:
    """The last looks whole: the trainers refuse it, and the same job goes on."""
    last, middle = (
        next((run.parent / "checkpoints" / f"step-{step}").glob("*model_states.pt")) for step in (STEPS, STEPS - 4)
    )
    content = last.read_bytes()
    last.write_bytes(content[:64] + bytes(len(content) // 2) + content[64 + len(content) // 2 :])
    middle.write_bytes(middle.read_bytes()[: middle.stat().st_size // 2])
    before = len(attempts(run))
    llmlaunch(run.parent, "resume", run, "--anyway", "--local")
    until(lambda: len(list(run.glob("attempts/*/status.json"))) == before + 2, "two more attempts have ended")
    refused, trained = attempts(run)[before:]
    assert (refused.status["state"], refused.status["cause"]["kind"]) == ("failed", "checkpoint")
    assert (refused.status["tracker_step"], refused.steps) == (STEPS, [])
    said = "".join(path.read_text() for path in run.glob("logs/*"))
    assert f"step-{STEPS - 4}/{middle.name} is cut short; continuing from step 8, the one before it" in said
    assert "resumed after step 8" in trained.log
    assert trained.steps == [9, *range(12, STEPS + 1)]
    assert trained.status["state"] == "succeeded"
