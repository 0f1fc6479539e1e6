"""What DeepSpeed with ZeRO accepts, as data."""

from __future__ import annotations

import numpy as np

from llmlaunch.columns import BoolColumn
from llmlaunch.families.registry import family_named
from llmlaunch.frameworks.base import implies
from llmlaunch.layers.mamba import Mamba2
from llmlaunch.layers.model import model_of
from llmlaunch.layers.short_convolution import ShortConvolution
from llmlaunch.layout import RECOMPUTE_SELECTIVE, Rule, Situation
from llmlaunch.recipe.types import Recipe

CONFIG = "deepspeed/runtime/config.py _batch_assertion, 0.19.8"
TRAINER = "llmlaunch/trainers/deepspeed/train.py"


def not_split(name: str, field: str, where: str = TRAINER) -> Rule:
    """The size must be 1."""
    sentence = f"the script has no {name} parallelism: its size must be 1 (Megatron-LM can split it)"
    return Rule(field.replace("_", "-"), sentence, where, lambda s: np.equal(getattr(s.layouts, field), 1))


# Rules of every script.
ANY_RULES: tuple[Rule, ...] = (
    not_split("virtual pipeline", "virtual_pipeline"),
    not_split("expert", "expert"),
    not_split("expert tensor", "expert_tensor"),
    Rule(
        "vision-unsplit",
        "a model with a vision encoder is split by ZeRO alone: tensor, context and pipeline must be 1",
        "transformers/models/qwen3_vl/modeling_qwen3_vl.py Qwen3VLModel, 5.23",
        lambda s: implies(
            s.shape.vision is not None, np.equal(s.layouts.tensor * s.layouts.context * s.layouts.pipeline, 1)
        ),
    ),
    Rule(
        "sequence-parallel",
        "AutoTP leaves the sequence whole: sequence_parallel must be false (context splits it)",
        "deepspeed/module_inject/layers.py LinearLayer.forward, 0.19.8",
        lambda s: np.equal(s.layouts.sequence_parallel, 0),
    ),
    Rule(
        "batch",
        "train_batch_size must be a multiple of train_micro_batch_size_per_gpu x data parallel size",
        CONFIG,
        lambda s: np.equal(s.workload.global_batch_size % (s.layouts.data * s.layouts.micro_batch_size), 0),
    ),
    Rule(
        "fp16-needs-gpu",
        "fp16 needs a GPU; on a CPU use fp32 or bf16",
        "deepspeed/runtime/engine.py _do_sanity_check, 0.19.8",
        lambda s: np.full(len(s.layouts), s.workload.precision != "fp16" or s.cluster.accelerator.kind != "cpu"),
    ),
    Rule(
        "no-selective-recompute",
        "gradient checkpointing recomputes whole layers: recompute must be none or full",
        "transformers/modeling_utils.py gradient_checkpointing_enable, 5.23",
        lambda s: np.not_equal(s.layouts.recompute, RECOMPUTE_SELECTIVE),
        of_techniques=True,
    ),
)
SHARDS = "deepspeed/module_inject/tp_shard.py get_shard_size, 0.19.8"
PLAN = "deepspeed/module_inject/tp_plan_converter.py TPPlanConverter.convert, 0.19.8"
ULYSSES = "deepspeed/runtime/sequence_parallel/ulysses_sp.py UlyssesSPAttentionHF.__init__, 0.19.8"
GROUPS = (
    "deepspeed/utils/groups.py _init_tp_mesh_device, runtime/sequence_parallel/parallel_state_sp.py "
    "initialize_sequence_parallel, 0.19.8"
)
ADAPTED = "deepspeed/module_inject/auto_tp.py _replace_with_config, 0.19.8"
TILED = "deepspeed/runtime/sequence_parallel/ulysses_sp.py SequenceTiledCompute.backward, 0.19.8"


def tensor_sizes(recipe: Recipe) -> tuple[int, ...]:
    """Those inside one NVLink domain: every half layer ends in an all-reduce."""
    return _divisors(recipe.world_size, recipe.cluster.nvlink_domain_devices)


def context_sizes(recipe: Recipe) -> tuple[int, ...]:
    """No more than there are heads to exchange for sequence."""
    return _divisors(recipe.world_size, recipe.model.num_attention_heads)


def _divisors(number: int, most: int) -> tuple[int, ...]:
    return tuple(size for size in range(1, most + 1) if number % size == 0)


def tensor_plan(s: Situation) -> BoolColumn:
    split = family_named(s.shape.family).has_plain_plan
    planned = split and s.shape.moe is None and s.shape.mla is None and s.shape.position_embedding == "rope"
    return implies(s.layouts.tensor > 1, planned)


def convolutions_unsplit(s: Situation) -> BoolColumn:
    model = model_of(s.shape)
    whole = family_named(s.shape.family).whole_sequences
    convolved = whole or model.has(ShortConvolution) or model.has(Mamba2)
    return implies(s.layouts.tensor * s.layouts.context > 1, not convolved)


def context_unmasked(s: Situation) -> BoolColumn:
    window = s.shape.sliding_window
    masked = window is not None and window.tokens < s.workload.sequence_length
    return implies(
        s.layouts.context > 1, not masked and s.shape.attention_softcap is None and not s.shape.attention_sinks
    )


TOGETHER = Rule(
    "tensor-or-context",
    "AutoTP and Ulysses both make groups of neighbouring ranks, so a job is split by one of the two: set tensor or "
    "context to 1",
    GROUPS,
    lambda s: implies(s.layouts.tensor > 1, np.equal(s.layouts.context, 1)),
)

SPLIT_RULES: tuple[Rule, ...] = (
    TOGETHER,
    Rule(
        "tensor-plan",
        "the tensor-parallel plans of Hugging Face's mixtures, of multi-latent attention, of Phi, OLMo and Gemma 4 "
        "have styles AutoTP refuses, and GPT-2 and Falcon-H1 have no plan: tensor must be 1",
        PLAN,
        tensor_plan,
    ),
    Rule(
        "tensor-query-groups",
        "query groups (key/value heads) must be divisible by tensor: AutoTP would give some ranks more heads than "
        "others, or none, and memory is planned for equal ranks",
        SHARDS,
        lambda s: implies(s.layouts.tensor > 1, s.shape.num_query_groups % s.layouts.tensor == 0),
    ),
    Rule(
        "tensor-ffn",
        "the FFN size must be divisible by tensor: AutoTP would split it unevenly, and memory is planned for equal "
        "ranks",
        SHARDS,
        lambda s: implies(s.layouts.tensor > 1, s.shape.ffn_hidden_size % s.layouts.tensor == 0),
    ),
    Rule(
        "tensor-adapters",
        "AutoTP does not know the layers adapters stand beside and would leave them whole: tensor must be 1",
        ADAPTED,
        lambda s: implies(s.layouts.tensor > 1, s.techniques.adapters is None),
        of_techniques=True,
    ),
    Rule(
        "tensor-tiles",
        "tiles of the sequence run their part of the model again by themselves, with AutoTP's reductions in it: not "
        "tried with tensor above 1",
        TILED,
        lambda s: implies(s.layouts.tensor > 1, s.techniques.loss != "tiled" and s.techniques.mlp_chunks <= 1),
        of_techniques=True,
    ),
    Rule(
        "context-heads",
        "attention heads must be divisible by context",
        ULYSSES,
        lambda s: implies(s.layouts.context > 1, s.shape.num_attention_heads % s.layouts.context == 0),
    ),
    Rule(
        "context-query-groups",
        "query groups (key/value heads) must be divisible by context, or context by them",
        ULYSSES,
        lambda s: implies(
            s.layouts.context > 1,
            (s.shape.num_query_groups % s.layouts.context == 0) | (s.layouts.context % s.shape.num_query_groups == 0),
        ),
    ),
    Rule(
        "context-sequence",
        "the sequence length must be divisible by context",
        "deepspeed/runtime/sequence_parallel/ulysses_sp.py UlyssesSPDataLoaderAdapter, 0.19.8",
        lambda s: implies(s.layouts.context > 1, s.workload.sequence_length % s.layouts.context == 0),
    ),
    Rule(
        "context-latents",
        "Ulysses wants heads of one width, for keys and values and in all layers, which multi-latent attention and "
        "Gemma 4 have not: context must be 1",
        "deepspeed/runtime/sequence_parallel/ulysses_sp.py UlyssesSPAttentionHF.forward, 0.19.8",
        lambda s: implies(s.layouts.context > 1, s.shape.mla is None and not model_of(s.shape).heads_differ),
    ),
    Rule(
        "convolutions-unsplit",
        "LFM2 and models with Mamba-2 mixers have no tensor-parallel plan, and Ulysses gathers the sequence for "
        "attention alone, where a convolution and a scan read the tokens before their own: tensor and context must be "
        "1",
        "transformers/models/lfm2/modeling_lfm2.py Lfm2ShortConv.forward, falcon_h1/modeling_falcon_h1.py "
        "FalconH1Mixer.forward, 5.23",
        convolutions_unsplit,
    ),
    Rule(
        "context-masks",
        "Ulysses drops the attention mask and needs torch's own attention: no window shorter than the sequence and no "
        "capped scores with context above 1",
        "deepspeed/runtime/sequence_parallel/ulysses_sp.py register_with_transformers, 0.19.8",
        context_unmasked,
    ),
)
PACKED_RULES: tuple[Rule, ...] = (
    Rule(
        "packed-rows-whole",
        "with data.packed a mask keeps rows apart, and Ulysses drops it, so that a row would attend to those before "
        "it: context must be 1",
        "deepspeed/runtime/sequence_parallel/ulysses_sp.py register_with_transformers, 0.19.8",
        lambda s: np.equal(s.layouts.context, 1),
    ),
)
"""What packed rows (data.packed) ask of a layout."""
# Rules of a script without pipeline stages; which of its splits it supports is not known beyond that.
OWN_RULES: tuple[Rule, ...] = (not_split("pipeline", "pipeline"), TOGETHER, *ANY_RULES)
# Rules of the shipped script, and of any script that trains a Transformers model.
RULES: tuple[Rule, ...] = (not_split("pipeline", "pipeline"), *SPLIT_RULES, *ANY_RULES)
