"""Weights from Hugging Face's format through Megatron-Bridge's own AutoBridge and the model that our program configures
for it, and back by `--export`: tiny models with random weights, on the CPU."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from judges import TRACED, line_for_line, megatron_python

from llmlaunch.frameworks.bridge.backend import MegatronBridge
from llmlaunch.layout import Layout
from support.recipes import recipe_of
from support.soak import in_soak
from support.words import word_tokenizer

pytestmark = pytest.mark.frameworks

RoundTrip = Callable[..., dict[str, Any]]
ONE_NODE = Layout(data=8, zero_stage=1)
DENSE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
MIXTURE = DENSE | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "mlp_only_layers": [],
    "decoder_sparse_step": 1,
}


@pytest.fixture(scope="module")
def round_trip() -> Iterator[RoundTrip]:
    """What comes back of a model with this config.json, trained by a recipe with these lines."""
    with line_for_line(megatron_python(), TRACED / "bridge_round_trip.py") as say:

        def come_back(folder: Path, config: dict[str, Any], *overrides: str) -> dict[str, Any]:
            source = word_tokenizer(folder / "hf")
            (source / "config.json").write_text(json.dumps(config), "utf-8")
            lines = (
                *("backend=megatron-bridge", f"model={source}", "nodes=1", "training.sequence_length=128"),
                *("training.global_batch_size=8", f"training.start_from={source}", "training.save_interval=10"),
                f"training.checkpoint_path={folder}/trained",
            )
            rendered = MegatronBridge().render(recipe_of("llama3-8b", *lines, *overrides), ONE_NODE)
            folders = {name: str(folder / name) for name in ("imported", "exported")}
            settings = json.loads(rendered.files["bridge.json"])
            asked = {"hugging_face": str(source), "settings": settings, **folders}
            answer: dict[str, Any] = json.loads(say(json.dumps(asked)))
            assert "failure" not in answer, answer["failure"]
            return answer

        yield come_back


@pytest.mark.parametrize(("config", "tensors"), [(MIXTURE, 45), *in_soak((DENSE, 21))])
def test_trained_weights_come_back_to_hugging_face(
    round_trip: RoundTrip, tmp_path: Path, config: dict[str, Any], tensors: int
) -> None:
    answer = round_trip(tmp_path, config)
    assert (answer["unlike"], len(answer["names"])) == ([], tensors)
    written = json.loads((tmp_path / "exported" / "config.json").read_text("utf-8"))
    assert written["architectures"] == config["architectures"]
    assert (tmp_path / "exported" / "tokenizer.json").is_file()


def test_adapters_come_back_as_peft_reads_them(round_trip: RoundTrip, tmp_path: Path) -> None:
    answer = round_trip(tmp_path, DENSE, "training.adapters={rank: 4}")
    assert answer["unlike"] == []
    linears = [f"self_attn.{name}_proj" for name in "qkvo"] + [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
    assert answer["names"] == sorted(
        f"base_model.model.model.layers.{layer}.{linear}.lora_{matrix}.weight"
        for layer in range(2)
        for linear in linears
        for matrix in "AB"
    )
    assert json.loads((tmp_path / "exported" / "adapter_config.json").read_text("utf-8"))["r"] == 4
