"""What stands in the way of a vision encoder: Megatron-LM's script has none, and Bridge splits its own in few ways."""

from __future__ import annotations

import numpy as np

from llmlaunch.columns import BoolColumn
from llmlaunch.frameworks.base import Requirement, implies
from llmlaunch.frameworks.megatron.model_rules import PARSER
from llmlaunch.frameworks.megatron.sharding import asks_for_sharding
from llmlaunch.layout import Rule, Situation
from llmlaunch.memory.job import chunk_ranges
from llmlaunch.recipe.types import Recipe

MODEL = "megatron/bridge/models/qwen_vl/modelling_qwen3_vl/model.py Qwen3VLModel, Megatron-Bridge 0.6"
PROVIDER = "megatron/bridge/models/qwen_vl/qwen3_vl_provider.py Qwen3VLModelProvider.provide, Megatron-Bridge 0.6"
LINEAR = "megatron/core/extensions/transformer_engine.py, core 0.19"


def _unpriced(recipe: Recipe) -> bool:
    techniques = recipe.techniques
    other = techniques.adapters is not None or techniques.trained_layers is not None
    return other or recipe.training.muon or recipe.model.mtp_num_layers > 0 or asks_for_sharding(recipe)


VISION_REQUIREMENTS: tuple[Requirement, ...] = (
    Requirement(
        "vision-priced",
        "model.vision",
        "an encoder is not priced with adapters, trained_layers, muon, prediction heads (mtp_num_layers) and "
        "zero_stage 2 and 3; remove them, or the encoder",
        PROVIDER,
        lambda r: r.model.vision is not None and _unpriced(r),
    ),
    Requirement(
        "no-vision",
        "model.vision",
        "pretrain_gpt.py builds a decoder alone, and no image reaches it; memory and time are those of "
        "Megatron-Bridge's encoder",
        PARSER,
        lambda r: r.model.vision is not None,
        priced=True,
    ),
)


def _split(s: Situation) -> BoolColumn:
    vision, tensor = s.shape.vision, s.layouts.tensor
    if vision is None:
        return np.ones(len(s.layouts), dtype=np.bool_)
    sizes = (vision.num_attention_heads, vision.ffn_hidden_size, vision.merged_width)
    column: BoolColumn = np.all([np.equal(size % tensor, 0) for size in sizes], axis=0)
    return column


def _first_layers(s: Situation) -> BoolColumn:
    vision = s.shape.vision
    if vision is None:
        return np.ones(len(s.layouts), dtype=np.bool_)
    start, stop = next(iter(chunk_ranges(s.shape.num_layers, s.layouts, np.zeros(len(s.layouts), dtype=np.int64))))
    column: BoolColumn = stop - start >= len(vision.deepstack)
    return column


VISION_RULES: tuple[Rule, ...] = (
    Rule(
        "vision-in-one-chunk",
        "beside a vision encoder each device holds one chunk of layers; set layout.virtual_pipeline to 1",
        PROVIDER,
        lambda s: implies(s.shape.vision is not None, np.equal(s.layouts.virtual_pipeline, 1)),
    ),
    Rule(
        "vision-split",
        "--tensor-model-parallel-size must divide the heads, the MLP and the merged patches of the vision encoder",
        LINEAR,
        _split,
    ),
    Rule(
        "vision-first-layers",
        "the first stage must hold a layer for each block of model.vision.deepstack, whose output is added there",
        MODEL,
        _first_layers,
    ),
)
