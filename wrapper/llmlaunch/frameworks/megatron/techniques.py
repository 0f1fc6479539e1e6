"""Techniques on Megatron-LM: what it accepts, as data, and the arguments and variables that switch them on.

Flags and checks are taken from megatron-core 0.19.2 (arguments.py and transformer_config.py in the wheel).
Communication that overlaps without a request is handled elsewhere: gradients and parameters of data parallelism overlap
wherever they are sharded (arguments.py, sharding.py), and interleaved stages overlap their transfers by Megatron's
default.
"""

from __future__ import annotations

import numpy as np

from llmlaunch.columns import BoolColumn
from llmlaunch.frameworks.base import Requirement, implies, of_techniques, pinned_least
from llmlaunch.layout import OFFLOAD_LAYERS, RECOMPUTE_FULL, RECOMPUTE_NONE, RECOMPUTE_SELECTIVE, Rule, Situation
from llmlaunch.techniques import Techniques

Words = tuple[str, ...]
ARGUMENTS = "megatron/training/arguments.py validate_args, core 0.19"
CONFIG = "megatron/core/transformer/transformer_config.py, core 0.19"
INSIDE_EXPERTS = frozenset({"moe_act", "expert_fc1"})
DEFAULT_MODULES = ("core_attn",)


def modules_of(techniques: Techniques) -> Words:
    """Return the modules that selective recompute recomputes."""
    return techniques.recompute_modules or DEFAULT_MODULES


REQUIREMENTS: tuple[Requirement, ...] = (
    Requirement(
        "no-adapters",
        "training.adapters",
        "pretrain_gpt.py has no adapters; backend: deepspeed and megatron-bridge have them",
        "megatron/training/arguments.py, core 0.19",
        lambda r: r.techniques.adapters is not None,
    ),
    Requirement(
        "no-frozen-layers",
        "training.trained_layers",
        "--freeze-all-layers is all that pretrain_gpt.py can freeze; backend: deepspeed freezes the first layers",
        "megatron/training/training.py, core 0.19",
        lambda r: r.techniques.trained_layers is not None,
    ),
    Requirement(
        "no-parameter-offload",
        "layout.offload_parameters",
        "parameters stay on the device; backend: deepspeed with zero_stage: 3 streams them",
        "megatron/core/optimizer/optimizer_config.py, core 0.19",
        lambda r: r.techniques.offload_parameters,
    ),
    Requirement(
        "no-checkpoint-offload",
        "layout.offload_checkpoints",
        "layers that are recomputed cannot be offloaded; backend: deepspeed offloads their inputs",
        CONFIG,
        lambda r: r.techniques.offload_checkpoints,
    ),
    Requirement(
        "no-te-loss",
        "layout.loss",
        "te: --cross-entropy-fusion-impl te is refused as unstable; write loss: native",
        ARGUMENTS,
        lambda r: r.techniques.loss == "te",
    ),
    Requirement(
        "no-tiled-loss",
        "layout.loss",
        "the loss is fused (native) or not, never tiled or fused with the head; backend: deepspeed has loss: tiled",
        "megatron/core/model_parallel_config.py cross_entropy_fusion_impl, core 0.19",
        lambda r: r.techniques.loss in ("tiled", "fused_linear"),
    ),
    Requirement(
        "recomputed-mlp-is-whole",
        "layout.mlp_chunks",
        "an MLP that is recomputed is never chunked; remove mlp from recompute_modules, or mlp_chunks",
        "megatron/core/transformer/transformer_layer.py _forward_mlp, core 0.19",
        lambda r: r.techniques.mlp_chunks > 1 and "mlp" in r.techniques.recompute_modules,
    ),
    Requirement(
        "projection-needs-attention",
        "layout.offload_modules",
        "attn_proj needs core_attn: the projection's input is the attention's output, which its backward pass needs",
        CONFIG,
        lambda r: "attn_proj" in r.techniques.offload_modules and "core_attn" not in r.techniques.offload_modules,
    ),
    Requirement(
        "recomputed-experts-stay",
        "layout.offload_modules",
        "moe_act and expert_fc1 cannot be offloaded while recompute_modules holds the whole moe; remove one of the two",
        CONFIG,
        lambda r: "moe" in r.techniques.recompute_modules and bool(INSIDE_EXPERTS & set(r.techniques.offload_modules)),
    ),
    Requirement(
        "some-layers-stay",
        "layout.offload_layers",
        "at least one layer must stay on the device; offload fewer layers than the model has",
        CONFIG,
        lambda r: pinned_least(r, OFFLOAD_LAYERS) >= r.model.num_layers,
    ),
)


def recomputed_mlp_unbiased(s: Situation) -> BoolColumn:
    """Whether no recomputed MLP has biases. A recomputed MLP returns its bias as an output of its own, so autograd
    makes it a result of the recomputed function, whose backward pass then calls itself."""
    dense = s.shape.moe is None or not all(s.shape.moe.layer_pattern)
    biased = "mlp" in s.techniques.recompute_modules and s.shape.linear_bias and dense and s.numbers.narrow is None
    return implies(biased, np.not_equal(s.layouts.recompute, RECOMPUTE_SELECTIVE))


def instances_divide(s: Situation) -> BoolColumn:
    lay, instances = s.layouts, s.techniques.optimizer_instances
    ranks = lay.data * lay.context
    column: BoolColumn = ranks % instances == 0
    if s.shape.moe is not None:
        column = column & (ranks * lay.tensor // (lay.expert * lay.expert_tensor) % instances == 0)
    return column


TECHNIQUE_RULES: tuple[Rule, ...] = of_techniques(
    Rule(
        "offload-layers-one-stage",
        "offload_layers needs --pipeline-model-parallel-size 1",
        CONFIG,
        lambda s: implies(s.layouts.offload_layers > 0, np.equal(s.layouts.pipeline, 1)),
    ),
    Rule(
        "offload-layers-no-recompute",
        "offload_layers needs recompute: none",
        CONFIG,
        lambda s: implies(s.layouts.offload_layers > 0, np.equal(s.layouts.recompute, RECOMPUTE_NONE)),
    ),
    Rule(
        "offload-layers-some-stay",
        "offload_layers must be less than the layers of the model",
        CONFIG,
        lambda s: implies(s.layouts.offload_layers > 0, s.layouts.offload_layers < s.shape.num_layers),
    ),
    Rule(
        "recomputed-mlp-unbiased",
        "recompute_modules: mlp needs linear_bias: false: the backward pass of a recomputed MLP with biases never ends",
        "megatron/core/transformer/transformer_layer.py _forward_mlp, core 0.19",
        recomputed_mlp_unbiased,
    ),
    Rule(
        "offload-layers-no-modules",
        "offload_layers and offload_modules exclude each other",
        CONFIG,
        lambda s: implies(bool(s.techniques.offload_modules), np.equal(s.layouts.offload_layers, 0)),
    ),
    Rule(
        "offload-modules-no-full",
        "offload_modules needs recompute none or selective: full keeps nothing of a module",
        "megatron/core/transformer/transformer_block.py checkpointed_forward, core 0.19",
        lambda s: implies(bool(s.techniques.offload_modules), np.not_equal(s.layouts.recompute, RECOMPUTE_FULL)),
    ),
    Rule(
        "instances-distributed",
        "optimizer_instances need zero_stage 1: they are groups that share one --use-distributed-optimizer",
        "megatron/core/distributed/distributed_data_parallel.py, core 0.19",
        lambda s: implies(s.techniques.optimizer_instances > 1, np.equal(s.layouts.zero_stage, 1)),
    ),
    Rule(
        "instances-divide",
        "optimizer_instances must divide data times context parallelism, and what expert parallelism leaves of it",
        "megatron/core/parallel_state.py initialize_model_parallel, core 0.19",
        instances_divide,
    ),
    Rule(
        "offload-optimizer-distributed",
        "offload_optimizer needs zero_stage 1: --optimizer-cpu-offload needs --use-precision-aware-optimizer, and that "
        "--use-distributed-optimizer",
        "megatron/core/optimizer/optimizer_config.py, core 0.19",
        lambda s: implies(s.techniques.offload_optimizer > 0, s.layouts.zero_stage > 0),
    ),
    Rule(
        "offload-optimizer-half",
        "offload_optimizer needs precision bf16 or fp16: the optimizer is handed views of fp32 parameters, and refuses",
        "megatron/core/optimizer/distrib_optimizer.py _build_model_and_main_param_groups, core 0.19",
        lambda s: np.full(len(s.layouts), not (s.techniques.offload_optimizer > 0 and s.workload.precision == "fp32")),
    ),
)


def technique_environment(techniques: Techniques) -> dict[str, str]:
    """Return the environment variables that the techniques need.

    Without NVTE_CPU_OFFLOAD_V1, Transformer Engine from 2.10 on would offload weights as well, and arguments.py refuses
    to start (core 0.19). Without NVTE_CUTEDSL_FUSED_GROUPED_MLP, it multiplies gated experts in separate kernels, and
    moe/experts.py refuses a fixed number of rows for these.
    """
    offloading = {"NVTE_CPU_OFFLOAD_V1": "1"} if techniques.offload_modules else {}
    fixed = techniques.expert_rank_capacity_factor is not None
    return offloading | ({"NVTE_CUTEDSL_FUSED_GROUPED_MLP": "1"} if fixed else {})


def all_to_all_heads(s: Situation) -> BoolColumn:
    """Whether the heads of each tensor rank can be distributed over the context ranks. Each rank holds at least one
    query group."""
    tensor, context = s.layouts.tensor, s.layouts.context
    groups = s.shape.num_attention_heads if s.shape.mla is not None else s.shape.num_query_groups
    heads = np.equal(s.shape.num_attention_heads // tensor % context, 0)
    dealt = heads & np.equal(np.maximum(groups // tensor, 1) % context, 0)
    return implies(s.techniques.context_comm == "a2a", dealt)


OVERLAP_RULES: tuple[Rule, ...] = of_techniques(
    Rule(
        "hidden-tensor-sequence",
        "tp_comm_overlap needs --sequence-parallel",
        ARGUMENTS,
        lambda s: implies(s.techniques.tp_comm_overlap, np.greater(s.layouts.sequence_parallel, 0)),
    ),
    Rule(
        "all-to-all-heads",
        "context_comm: a2a needs heads and query groups of a tensor rank that --context-parallel-size divides",
        "transformer_engine/pytorch/attention/dot_product_attention/context_parallel.py AttnFuncWithCPAndQKVOA2A, 2.20",
        all_to_all_heads,
    ),
)
