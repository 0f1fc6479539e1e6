"""Random recipes of every backend, as a person may write them: the one generator of the laws that any recipe keeps.

A recipe is a mapping as YAML has it. Most can be planned; some contradict themselves, which a message must say.
"""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st

PRESETS = (
    "llama3-8b",
    "llama3.2-1b",
    "qwen3-8b",
    "gpt3-13b",
    "gemma2-9b",
    "mixtral-8x7b",
    "qwen3-30b-a3b",
    "gpt-oss-20b",
)
CLUSTERS = ("h100-80gb-x8", "a100-40gb-x8", "h200-141gb-x8", "b200-x8", "mi325x-x8")
BACKENDS = ("megatron-lm", "megatron-bridge", "deepspeed")
SIZES = st.sampled_from([1, 1, 2, 2, 4, 8])


@st.composite
def inline_models(draw: st.DrawFn) -> dict[str, Any]:
    """Models written inline, dense or mixtures, some with dense layers between."""
    layers, heads = draw(st.sampled_from([1, 4, 12, 40, 46])), draw(st.sampled_from([8, 32, 40]))
    hidden = draw(st.sampled_from([1024, 2560, 8192]))
    model: dict[str, Any] = {
        "num_layers": layers,
        "hidden_size": hidden,
        "ffn_hidden_size": 4 * hidden,
        "num_attention_heads": heads,
        "vocab_size": draw(st.sampled_from([32000, 151936])),
    }
    if draw(st.booleans()):
        model["num_query_groups"] = draw(st.sampled_from([2, 4, 8]))
    if draw(st.booleans()):
        model["head_dim"] = draw(st.sampled_from([64, 128]))
    if draw(st.booleans()):
        model["tied_embeddings"] = True
    if draw(st.booleans()):
        experts = draw(st.sampled_from([2, 8, 64]))
        model["moe"] = {"num_experts": experts, "topk": min(experts, 2), "ffn_hidden_size": 1408}
        if draw(st.booleans()):
            model["moe"]["layer_pattern"] = [int(layer % 3 != 1) for layer in range(layers)]
    return model


PINS: dict[str, st.SearchStrategy[Any]] = {
    "tensor": SIZES,
    "pipeline": SIZES,
    "virtual_pipeline": st.sampled_from([1, 2]),
    "context": st.sampled_from([1, 1, 2]),
    "expert": SIZES,
    "micro_batch_size": SIZES,
    "sequence_parallel": st.booleans(),
    "zero_stage": st.sampled_from([0, 1, 1, 3]),
    "recompute": st.sampled_from(["none", "selective", "full"]),
    "loss": st.sampled_from(["native", "te", "tiled"]),
    "techniques": st.just("asked"),
}


@st.composite
def layouts(draw: st.DrawFn) -> Any:
    """Layouts: free, a few pins, or most of them."""
    names = draw(st.lists(st.sampled_from(sorted(PINS)), unique=True, max_size=draw(st.sampled_from([0, 3, 11]))))
    return {name: draw(PINS[name]) for name in names} or "auto"


@st.composite
def recipes(draw: st.DrawFn, layout: st.SearchStrategy[Any] | None = None) -> dict[str, Any]:
    """Recipes, with layouts of a strategy where one is given."""
    cluster: Any = draw(st.sampled_from(CLUSTERS))
    if draw(st.integers(0, 5)) == 0:
        cluster = {"base": cluster, "devices_per_node": draw(st.sampled_from([1, 3, 4]))}
    training: dict[str, Any] = {
        "sequence_length": draw(st.sampled_from([512, 4096, 32768])),
        "global_batch_size": draw(st.sampled_from([3, 16, 64, 256, 1536])),
        "steps": 10,
    }
    if draw(st.integers(0, 3)) == 0:
        training["gradient_dtype"] = draw(st.sampled_from(["fp32", "bf16"]))
    recipe = {
        "schema": 1,
        "name": "random",
        "model": draw(st.sampled_from(PRESETS) | inline_models()),
        "backend": draw(st.sampled_from(BACKENDS)),
        "cluster": cluster,
        "nodes": draw(st.sampled_from([1, 1, 2, 4])),
        "training": training,
        "data": {"mock": True},
        "layout": draw(layouts() if layout is None else layout),
    }
    if draw(st.integers(0, 9)) == 0:
        recipe["code"] = {"snapshot": True}
    return recipe


def text_of(recipe: dict[str, Any]) -> str:
    """Return a recipe as a file has it; JSON is YAML."""
    return json.dumps(recipe, indent=1)
