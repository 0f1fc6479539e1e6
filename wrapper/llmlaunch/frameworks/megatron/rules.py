"""What Megatron-LM accepts and refuses, as data: rules for parallel sizes and batch here, and the rules of other
modules, in one list for the planner, `check`, the docs and the oracle's tests.

Megatron checks in four places: arguments, transformer config, process groups and run time. A launcher must apply all of
these checks before a job waits in a queue.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmlaunch.columns import BoolColumn
from llmlaunch.frameworks.base import MACHINE_REQUIREMENTS, Requirement, implies
from llmlaunch.frameworks.megatron import model_rules, techniques
from llmlaunch.frameworks.megatron.model_rules import asks_for_mixture
from llmlaunch.frameworks.megatron.offered_techniques import searches_graphs
from llmlaunch.frameworks.megatron.parser import NEWEST, rendered_version
from llmlaunch.frameworks.megatron.sharding import asks_for_sharding
from llmlaunch.layers.mlp import Mlp
from llmlaunch.layers.model import model_of
from llmlaunch.layout import Rule, Situation
from llmlaunch.recipe.types import Recipe
from llmlaunch.workload import NO_NUMBER_FORMATS

ARGUMENTS = "megatron/training/arguments.py validate_args, core 0.19"
CONFIG = "megatron/core/transformer/transformer_config.py, core 0.19"
BLOCK = "megatron/core/transformer/transformer_block.py get_num_layers_to_build, core 0.19"
GROUPS = "megatron/core/parallel_state.py initialize_model_parallel, core 0.19"
WRITTEN = "megatron/core/transformer/pipeline_parallel_layer_layout.py, core 0.19"
LINEAR = "megatron/core/extensions/transformer_engine.py, core 0.19"
EXPERTS = "megatron/core/transformer/moe/experts.py TEGroupedMLP, core 0.19"
ATTENTION = "transformer_engine/pytorch/attention/dot_product_attention/dot_product_attention.py, 2.20"
SCHEDULES = "megatron/core/pipeline_parallel/schedules.py, core 0.19"


def divides(part: NDArray[Any] | int, whole: NDArray[Any] | int) -> BoolColumn:
    column: BoolColumn = np.equal(np.asarray(whole) % part, 0)
    return column


def product_text(s: Situation, *names: str) -> str:
    """Return a product of sizes of the first layout, such as "16 x 1 x 4 = 64"."""
    sizes = [int(getattr(s.layouts, name)[0]) for name in names]
    return f"{' x '.join(map(str, sizes))} = {math.prod(sizes)}"


def query_columns(s: Situation) -> BoolColumn:
    """Whether tensor parallelism divides the columns of queries, keys and values. If there are fewer query groups than
    ranks, the columns of a group are divided. Latent attention has other matrices."""
    columns = s.shape.query_width + 2 * s.shape.key_value_width
    return divides(s.layouts.tensor, columns) if s.shape.mla is None else np.ones(len(s.layouts), dtype=np.bool_)


def ffn(s: Situation) -> BoolColumn:
    """Whether tensor parallelism divides the FFN of dense layers. A model with mixture layers only has no such FFN."""
    return divides(s.layouts.tensor, s.shape.ffn_hidden_size if model_of(s.shape).has(Mlp) else 0)


def stages_hold_some(s: Situation) -> BoolColumn:
    """Whether every stage holds a layer, except stages that hold something else."""
    before = s.techniques.heads_before_loss
    between = of_stages(s, lambda split: min(split[1 : -2 if before else -1], default=1))
    ends = of_stages(s, lambda split: split[0] if before else min(split[0], split[-1]))
    enough = np.greater(between, 0) & np.greater_equal(ends, s.layouts.virtual_pipeline == 1)
    return implies(s.layouts.uneven, enough)


def loss_is_alone(s: Situation) -> BoolColumn:
    alone = s.layouts.uneven & np.equal(of_stages(s, lambda split: split[-1]), 0)
    return implies(s.techniques.heads_before_loss, alone & np.greater(s.layouts.pipeline, 2))


def of_stages(s: Situation, figure: Callable[[Sequence[int]], int]) -> NDArray[np.int64]:
    """Return a figure of the uneven stages of each layout; 0 if the stages are even."""
    figures = np.array([figure(split) if split else 0 for split in s.layouts.partitions], dtype=np.int64)
    return figures[s.layouts.partition]


def sequence_length(s: Situation) -> BoolColumn:
    split = s.layouts.tensor * s.layouts.context
    return implies(s.layouts.sequence_parallel > 0, divides(split, s.workload.sequence_length))


def experts(s: Situation) -> BoolColumn:
    if s.shape.moe is None:
        return np.equal(s.layouts.expert, 1) & np.equal(s.layouts.expert_tensor, 1)
    return divides(s.layouts.expert, s.shape.moe.num_experts)


def mixture_needs_sequence(s: Situation) -> BoolColumn:
    if s.shape.moe is None:
        return np.ones(len(s.layouts), dtype=np.bool_)
    return implies(s.layouts.tensor > 1, s.layouts.sequence_parallel > 0)


def latents_need_sequence(s: Situation) -> BoolColumn:
    """Whether latent attention with tensor parallelism has sequence parallelism. The positions of keys are one part for
    all heads: each tensor rank has the gradient of its own heads only, and core 0.19 sums these only under sequence
    parallelism (pull request 6839)."""
    if s.shape.mla is None or not s.shape.mla.qk_pos_emb_head_dim:
        return np.ones(len(s.layouts), dtype=np.bool_)
    return implies(s.layouts.tensor > 1, s.layouts.sequence_parallel > 0)


def unknown_beside_heads(recipe: Recipe) -> bool:
    """Whether a recipe uses anything that was not tried with prediction heads on a stage before the loss."""
    used = recipe.techniques
    beside = used.overlaps_experts or used.cuda_graphs or used.adapters or used.trained_layers or used.what_ifs
    return bool(beside) or asks_for_sharding(recipe) or recipe.model.residual_streams > 1


STAGE_REQUIREMENTS: tuple[Requirement, ...] = (
    Requirement(
        "heads-with-the-loss",
        "layout.mtp_stage",
        "layers of one part each (model.mamba) have their prediction heads on the stage of the loss; write last",
        "megatron/core/models/hybrid/hybrid_model.py HybridModel.__init__, core 0.19",
        lambda r: r.techniques.heads_before_loss and r.model.mamba is not None,
    ),
    Requirement(
        "plain-beside-heads",
        "layout.mtp_stage",
        "before-last was not tried with overlap_expert_communication, delay_weight_gradients, cuda_graphs, adapters, "
        "trained_layers, what_if, zero_stage 2 and 3 and residual_streams; remove those, or write last",
        WRITTEN,
        lambda r: r.techniques.heads_before_loss and unknown_beside_heads(r),
    ),
)

RULES: tuple[Rule, ...] = (
    Rule(
        "heads",
        "--tensor-model-parallel-size must divide the attention heads",
        CONFIG,
        lambda s: divides(s.layouts.tensor, s.shape.num_attention_heads),
        figures=lambda s: f"{s.layouts.tensor[0]} and {s.shape.num_attention_heads}",
    ),
    Rule(
        "query-groups",
        "the query groups must be a multiple or a divisor of --tensor-model-parallel-size",
        CONFIG,
        lambda s: (
            divides(s.layouts.tensor, s.shape.num_query_groups) | divides(s.shape.num_query_groups, s.layouts.tensor)
        ),
    ),
    Rule(
        "query-columns",
        "--tensor-model-parallel-size must divide (attention heads + 2 x query groups) x --kv-channels",
        "megatron/core/transformer/attention.py SelfAttention.__init__, core 0.19",
        query_columns,
    ),
    Rule("ffn", "--tensor-model-parallel-size must divide the FFN hidden size of dense layers", LINEAR, ffn),
    Rule(
        "shared-expert",
        "--tensor-model-parallel-size must divide --moe-shared-expert-intermediate-size",
        LINEAR,
        lambda s: divides(s.layouts.tensor, s.shape.moe.shared_expert_ffn_hidden_size if s.shape.moe else 0),
    ),
    Rule(
        "layers",
        "--pipeline-model-parallel-size must divide the layers, unless layers_by_stage says how they are split",
        ARGUMENTS,
        lambda s: s.layouts.uneven | divides(s.layouts.pipeline, s.shape.num_layers),
        figures=lambda s: f"{s.layouts.pipeline[0]} and {s.shape.num_layers}",
    ),
    Rule(
        "virtual-needs-pipeline",
        "virtual pipeline stages need --pipeline-model-parallel-size above 1",
        ARGUMENTS,
        lambda s: implies(s.layouts.virtual_pipeline > 1, s.layouts.pipeline > 1),
    ),
    Rule(
        "virtual-layers",
        "pipeline size x --num-virtual-stages-per-pipeline-rank must divide the layers, unless layers_by_stage says "
        "how they are split",
        BLOCK,
        lambda s: s.layouts.uneven | divides(s.layouts.pipeline * s.layouts.virtual_pipeline, s.shape.num_layers),
        figures=lambda s: f"{product_text(s, 'pipeline', 'virtual_pipeline')} and {s.shape.num_layers}",
    ),
    Rule(
        "stages-named",
        "layers_by_stage must name a stage for each pipeline rank and virtual stage",
        WRITTEN,
        lambda s: implies(
            s.layouts.uneven, np.equal(of_stages(s, len), s.layouts.pipeline * s.layouts.virtual_pipeline)
        ),
    ),
    Rule(
        "stages-hold-all",
        "layers_by_stage must add up to --num-layers",
        WRITTEN,
        lambda s: implies(s.layouts.uneven, np.equal(of_stages(s, sum), s.shape.num_layers)),
    ),
    Rule(
        "stages-hold-some",
        "every stage must hold a layer; with virtual stages the first and the last may hold the embedding or the loss "
        "alone, and with mtp_stage: before-last the last but one its prediction heads",
        WRITTEN,
        stages_hold_some,
    ),
    Rule(
        "loss-is-alone",
        "mtp_stage: before-last leaves the last stage the loss alone, so layers_by_stage must end with 0, and "
        "--pipeline-model-parallel-size must be 3 or more",
        WRITTEN,
        loss_is_alone,
    ),
    Rule(
        "batch",
        "data parallel size x --micro-batch-size must divide --global-batch-size",
        ARGUMENTS,
        lambda s: divides(s.layouts.data * s.layouts.micro_batch_size, s.workload.global_batch_size),
        figures=lambda s: f"{product_text(s, 'data', 'micro_batch_size')} and {s.workload.global_batch_size}",
    ),
    Rule(
        "interleaved-microbatches",
        "with virtual stages, the pipeline size must divide the number of micro-batches",
        SCHEDULES,
        lambda s: implies(
            s.layouts.virtual_pipeline > 1,
            divides(s.layouts.pipeline, s.workload.global_batch_size // (s.layouts.data * s.layouts.micro_batch_size)),
        ),
        figures=lambda s: f"{s.layouts.pipeline[0]} and {s.layouts.num_microbatches(s.workload.global_batch_size)[0]}",
    ),
    Rule(
        "context-length",
        "2 x --context-parallel-size must divide --seq-length",
        ARGUMENTS,
        lambda s: implies(s.layouts.context > 1, divides(2 * s.layouts.context, s.workload.sequence_length)),
    ),
    Rule(
        "context-precision",
        "--context-parallel-size above 1 needs precision bf16 or fp16: no attention of Transformer Engine splits fp32",
        ATTENTION,
        lambda s: implies(s.layouts.context > 1, s.workload.precision != "fp32"),
    ),
    Rule(
        "sequence-needs-tensor",
        "--sequence-parallel needs --tensor-model-parallel-size above 1 (Megatron would silently switch it off)",
        ARGUMENTS,
        lambda s: implies(s.layouts.sequence_parallel > 0, s.layouts.tensor > 1),
    ),
    Rule(
        "sequence-length",
        "with --sequence-parallel, tensor x context parallel size must divide --seq-length",
        "megatron/core/tensor_parallel/mappings.py _split_along_first_dim, core 0.19",
        sequence_length,
    ),
    Rule("experts", "--expert-model-parallel-size must divide the experts, and needs some", ARGUMENTS, experts),
    Rule(
        "expert-ffn",
        "--expert-tensor-parallel-size must divide the experts' FFN hidden size",
        LINEAR,
        lambda s: divides(
            s.layouts.expert_tensor, s.shape.moe.ffn_hidden_size if s.shape.moe else s.shape.ffn_hidden_size
        ),
    ),
    Rule(
        "expert-world",
        "expert x expert-tensor x pipeline parallel size must divide the number of devices",
        GROUPS,
        lambda s: divides(s.layouts.expert * s.layouts.expert_tensor * s.layouts.pipeline, s.world_size),
        figures=lambda s: f"{product_text(s, 'expert', 'expert_tensor', 'pipeline')} and {s.world_size}",
    ),
    Rule(
        "mixture-needs-sequence",
        "a mixture of experts with --tensor-model-parallel-size above 1 needs --sequence-parallel to train",
        "megatron/core/transformer/moe/moe_layer.py forward, core 0.19",
        mixture_needs_sequence,
    ),
    Rule(
        "latents-need-sequence",
        "latent attention with --tensor-model-parallel-size above 1 needs --sequence-parallel: without it Megatron "
        "core 0.19 trains the positions of keys with the gradients of one tensor rank's heads",
        "megatron/core/transformer/multi_latent_attention.py get_query_key_value_tensors, core 0.19",
        latents_need_sequence,
    ),
)


# Modules with rules for what few recipes use, each by the prefix of their names and by who asks for them. They are
# imported for these recipes alone.
RARE: Mapping[str, tuple[str, Callable[[Recipe], object]]] = {
    "pooled_rules": (
        "POOLED",  # DeepSeek-V4's layers and mixtures
        lambda r: (
            r.model.compressed_attention is not None
            or r.model.moe is not None
            or r.model.residual_streams != 1
            or r.model.activation_limit is not None
        ),
    ),
    "vision_rules": ("VISION", lambda r: r.model.vision is not None),
    "mixture_rules": ("MIXTURE", asks_for_mixture),
    "hybrid": ("HYBRID", lambda r: r.model.mamba is not None),
    "sharding_rules": ("SHARDING", asks_for_sharding),  # which no search turns on by itself
    # a search overlaps the exchange of mixtures
    "expert_exchange": ("EXCHANGE", lambda r: r.model.moe is not None or r.techniques.overlaps_experts),
    "cuda_graphs": ("GRAPH", lambda r: r.techniques.cuda_graphs or searches_graphs(r)),
    "checkpoint_rules": (
        "CHECKPOINT",
        lambda r: (
            r.training.async_save
            or r.training.non_persistent_save_interval is not None
            or r.training.checkpoint_format is not None
        ),
    ),
    "fixed_rows": ("FIXED_ROW", asks_for_mixture),
    "number_formats": ("NUMBER", lambda r: r.training.numbers != NO_NUMBER_FORMATS),
    "muon": ("MUON", lambda r: r.training.muon),
}


def _rare(recipe: Recipe | None, kind: str, *modules: str) -> Iterator[Any]:
    """Return the rows of a kind, "REQUIREMENTS" or "RULES", of those of the modules that this recipe can violate."""
    for name in modules:
        prefix, asks = RARE[name]
        if recipe is None or asks(recipe):
            yield from getattr(import_module(f"{__package__}.{name}"), f"{prefix}_{kind}")


def _of_versions(recipe: Recipe | None) -> tuple[tuple[Requirement, ...], tuple[Rule, ...]]:
    """Return the rules for features that versions before the newest lack."""
    if recipe is not None and rendered_version(recipe) == NEWEST:
        return (), ()
    from llmlaunch.frameworks.megatron.versions import rules_of_version, version_requirements

    if recipe is None:
        return version_requirements(), ()
    return version_requirements(asks_for_mixture(recipe)), rules_of_version(recipe)


def requirements_for(recipe: Recipe | None = None) -> tuple[Requirement, ...]:
    """Return the requirements that this recipe can violate, or all of them without a recipe. Modules for rarely used
    features are imported only for recipes that use them."""
    rare = partial(_rare, recipe, "REQUIREMENTS")
    return (
        *MACHINE_REQUIREMENTS,
        *model_rules.MODEL_REQUIREMENTS,
        *rare("pooled_rules", "vision_rules", "mixture_rules"),
        *STAGE_REQUIREMENTS,
        *rare("hybrid"),
        *techniques.REQUIREMENTS,
        *rare("sharding_rules", "expert_exchange", "cuda_graphs", "checkpoint_rules"),
        *_of_versions(recipe)[0],
        *rare("fixed_rows", "number_formats", "muon"),
    )


def _rules(recipe: Recipe | None = None) -> tuple[Rule, ...]:
    """Return the rules of all versions that can refuse a layout of this recipe, or all rules without a recipe."""
    rare = partial(_rare, recipe, "RULES")
    return (
        *RULES,
        *rare("mixture_rules"),
        *model_rules.MODEL_RULES,
        *rare("pooled_rules", "vision_rules", "hybrid"),
        *techniques.TECHNIQUE_RULES,
        *rare("expert_exchange", "fixed_rows", "sharding_rules"),
        *techniques.OVERLAP_RULES,
        *rare("cuda_graphs", "number_formats"),
    )


def rules_for(recipe: Recipe | None = None) -> tuple[Rule, ...]:
    """Return the rules that can refuse a layout of this recipe, or without a recipe the rules for recipes of every
    version."""
    if recipe is None:
        return _rules()
    rules = (*_rules(recipe), *_of_versions(recipe)[1])
    if not recipe.backend.has_own_arguments:
        return rules
    from llmlaunch.frameworks.megatron.arguments import unknown_library

    if not unknown_library(recipe):
        return rules
    from llmlaunch.frameworks.megatron.mixture_rules import OF_DEEPEP

    return tuple(rule for rule in rules if rule.key not in OF_DEEPEP)
