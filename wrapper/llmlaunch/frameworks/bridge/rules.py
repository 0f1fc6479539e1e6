"""What Megatron-Bridge cannot be asked for, beside what Megatron core refuses."""

from __future__ import annotations

import numpy as np

from llmlaunch.columns import BoolColumn
from llmlaunch.frameworks.base import Requirement, implies, parts_fused_modules, pinned_least
from llmlaunch.frameworks.megatron import rules as megatron_rules
from llmlaunch.frameworks.megatron.backend import MegatronLM
from llmlaunch.frameworks.megatron.sharding import asks_for_sharding
from llmlaunch.layout import OFFLOAD_LAYERS, Rule, Situation
from llmlaunch.recipe.types import Recipe
from llmlaunch.techniques import NO_TECHNIQUES
from llmlaunch.techniques.requests import Adapters

SETUP = "megatron/bridge/models/gpt/gpt_builder.py and training/config.py, Megatron-Bridge 0.6"

# Megatron core could, and pretrain_gpt.py has no flag; or its parser refuses what core only warns of (the loss `te`:
# megatron/training/arguments.py against core/model_parallel_config.py, core 0.19, which Bridge 0.6 takes in its
# performance recipes); or it reads weights as they are, and Bridge turns their columns
OF_ITS_SCRIPT = ("no-adapters", "no-vision", "no-te-loss", "fixed-rows-begin-anew")
UNTRIED = (
    *("offload_modules", "offload_optimizer", "mlp_chunks", "delay_weight_gradients", "tp_comm_overlap"),
    *("cuda_graphs", "overlap_shared_expert", "expert_rank_capacity_factor"),
)
LORA = "megatron/bridge/peft/lora.py LoRA, Megatron-Bridge 0.6"
ADAPTER = "megatron/bridge/peft/utils.py ParallelLinearAdapter, Megatron-Bridge 0.6"


def _unlike(recipe: Recipe) -> bool:
    """Whether mixers are not attention as it was."""
    shape = recipe.model
    others = (shape.linear_attention, shape.mamba, shape.compressed_attention)
    return shape.attention_gate or any(part is not None for part in others)


def _adapts(adapters: Adapters | None, *names: str) -> bool:
    return adapters is not None and not adapters.targets.isdisjoint(names)


def _rank_divides(s: Situation) -> BoolColumn:
    adapters = s.techniques.adapters
    if adapters is None or not _adapts(adapters, "q_proj", "up_proj"):
        return np.ones(len(s.layouts), dtype=np.bool_)
    column: BoolColumn = np.equal(adapters.rank % s.layouts.tensor, 0)
    return column


def _experts_whole(s: Situation) -> BoolColumn:
    beside = s.shape.moe is not None and _adapts(s.techniques.adapters, "up_proj", "down_proj")
    return implies(beside, np.equal(s.layouts.expert_tensor, 1))


def _latents_whole(s: Situation) -> BoolColumn:
    beside = s.shape.mla is not None and _adapts(s.techniques.adapters, "q_proj")
    return implies(beside, np.equal(s.layouts.tensor, 1))


def _untried_beside_adapters(recipe: Recipe) -> bool:
    techniques, numbers = recipe.techniques, recipe.training
    if techniques.adapters is None:
        return False
    others = any(getattr(techniques, name) != getattr(NO_TECHNIQUES, name) for name in UNTRIED)
    narrow = numbers.fp8_parameters or numbers.fp4 is not None
    again = recipe.model.moe is not None and "moe" in techniques.recompute_modules
    return others or narrow or again or asks_for_sharding(recipe) or pinned_least(recipe, OFFLOAD_LAYERS) > 0


BRIDGE_REQUIREMENTS: tuple[Requirement, ...] = (
    Requirement(
        "positions-as-long",
        "training.sequence_length",
        "with learned positions, megatron-bridge makes as many as a sequence is long; set it to "
        "model.max_position_embeddings, or take backend: megatron-lm",
        SETUP,
        lambda r: (
            r.model.position_embedding == "learned_absolute"
            and r.model.max_position_embeddings > r.workload.sequence_length
        ),
    ),
    Requirement(
        "tensorwise-parameters-load",
        "training.fp8_parameters",
        "with fp8: tensorwise, Bridge 0.6 would read 8-bit weights of a checkpoint in slices, each with another scale; "
        "remove it, or write no checkpoints and start from none",
        "megatron/training/arguments.py validate_args, core 0.19; megatron/bridge/training/checkpointing.py "
        "_load_global_dist_base_checkpoint, Megatron-Bridge 0.6",
        lambda r: (
            r.training.fp8 == "tensorwise"
            and r.training.fp8_parameters
            and (r.training.checkpoint_path is not None or r.training.start_from is not None)
        ),
    ),
    Requirement(
        "no-non-persistent-on-bridge",
        "training.non_persistent_save_interval",
        "Bridge 0.6 names these in another file than Megatron-LM, which a job that comes back does not read; remove "
        "it, or take backend: megatron-lm",
        "megatron/bridge/training/checkpointing.py _get_non_persistent_iteration, Megatron-Bridge 0.6",
        lambda r: r.training.non_persistent_save_interval is not None,
    ),
    Requirement(
        "weights-to-finetune",
        "data.format",
        "goes on from weights that are there; name them in training.start_from",
        "megatron/bridge/training/finetune.py finetune, Megatron-Bridge 0.6",
        lambda r: r.data.format is not None and r.training.start_from is None,
    ),
    Requirement(
        "packed-rows-attend",
        "data.packed",
        "Mamba-2 mixers, gated delta nets and keys in pools keep rows apart in other ways, which are not priced yet; "
        "remove it, or take another model",
        "megatron/core/ssm and megatron/core/transformer/experimental_attention_variant, core 0.19",
        lambda r: r.data.packed and _unlike(r),
    ),
    Requirement(
        "packed-rows-in-kernels",
        "data.packed",
        "without flash or fused attention (fp32, GPUs before Ampere), every row's scores are as many as the longest "
        "row's, which is not priced; remove it, or set training.precision: bf16",
        "transformer_engine/pytorch/attention/dot_product_attention/backends.py UnfusedDotProductAttention, 2.20",
        lambda r: r.data.packed and MegatronLM().facts(r).attention.attention_scores_saved,
    ),
    Requirement(
        "packed-rows-stay-apart",
        "data.packed",
        "where the exchange of experts hides behind computation, Bridge 0.6 does not tell the layers where rows end, "
        "so that a row would attend to those before it, and nothing says so; remove "
        "layout.overlap_expert_communication and delay_weight_gradients",
        "megatron/bridge/training/gpt_step.py _forward_step_common, Megatron-Bridge 0.6",
        lambda r: r.data.packed and r.techniques.overlaps_experts,
    ),
    Requirement(
        "packed-rows-without-graphs",
        "data.packed",
        "CUDA graphs with attention in them want as many rows in every sequence, and others were not tried; remove "
        "layout.cuda_graphs",
        "megatron/bridge/training/config.py ConfigContainer.validate, Megatron-Bridge 0.6",
        lambda r: r.data.packed and bool(r.techniques.cuda_graphs),
    ),
    Requirement(
        "weights-to-adapt",
        "training.adapters",
        "stand beside weights that are there; name them in training.start_from",
        "megatron/bridge/training/config.py ConfigContainer.validate, Megatron-Bridge 0.6",
        lambda r: r.techniques.adapters is not None and r.training.start_from is None,
    ),
    Requirement(
        "both-matrices-adapt",
        "training.adapters.frozen_down",
        "Bridge trains both matrices of an adapter; remove it, or take backend: deepspeed",
        LORA,
        lambda r: r.techniques.adapters is not None and r.techniques.adapters.frozen_down,
    ),
    Requirement(
        "no-quantized-base-on-bridge",
        "training.adapters.base",
        "Bridge keeps frozen weights in the compute format; remove it, or take backend: deepspeed",
        LORA,
        lambda r: r.techniques.adapters is not None and r.techniques.adapters.base is not None,
    ),
    Requirement(
        "whole-modules-on-bridge",
        "training.adapters.target_modules",
        "Bridge's LoRA stands beside linear_qkv and linear_fc1 as a whole; name q_proj, k_proj and v_proj together, "
        "and gate_proj with up_proj, or take backend: deepspeed",
        LORA,
        parts_fused_modules,
    ),
    Requirement(
        "priced-adapters-on-bridge",
        "training.adapters",
        "stand beside Mamba-2 mixers, gated delta nets and gated attention in other ways, which are not priced yet; "
        "take another model",
        LORA,
        lambda r: r.techniques.adapters is not None and _unlike(r),
    ),
    Requirement(
        "plain-beside-adapters",
        "training.adapters",
        "were tried beside fp8 and recompute alone; remove fp8_parameters, fp4, zero_stage 2 and 3, offload, "
        "mlp_chunks, delay_weight_gradients, tp_comm_overlap, overlap_shared_expert, expert_rank_capacity_factor, "
        "cuda_graphs and recompute_modules: [moe]",
        "tests/frameworks/test_megatron_traced.py",
        _untried_beside_adapters,
    ),
    Requirement(
        "no-muon-on-bridge",
        "training.optimizer",
        "Bridge 0.6 has muon give each rank whole tables, too, as Megatron core did before 0.19, which is not priced; "
        "take backend: megatron-lm",
        "megatron/bridge/training/optim.py setup_optimizer, Megatron-Bridge 0.6",
        lambda r: r.training.muon,
    ),
    Requirement(
        "no-sparse-attention-on-bridge",
        "model.indexer",
        "Bridge 0.6 builds layers with sparse attention for its own GLM-5 recipe alone; take backend: megatron-lm",
        "megatron/bridge/models/glm_moe_dsa/glm5_bridge.py, Megatron-Bridge 0.6",
        lambda r: r.model.indexer is not None,
    ),
    Requirement(
        "no-vision-on-bridge",
        "model.vision",
        "Bridge trains it from its own recipes, which read images with the model's processor and step in another way "
        "than its text models; llmlaunch renders neither",
        "megatron/bridge/models/qwen_vl/qwen3_vl_step.py and recipes/qwen_vl/h100/qwen3_vl.py, Megatron-Bridge 0.6",
        lambda r: r.model.vision is not None,
        priced=True,
    ),
    Requirement(
        "no-trainers-on-cpus",
        "cluster",
        "megatron-bridge trains on GPUs alone; take a cluster with GPUs, or backend: deepspeed",
        "megatron/bridge/training/setup.py setup, Megatron-Bridge 0.6",
        lambda r: r.cluster.accelerator.kind == "cpu",
    ),
)

BRIDGE_RULES: tuple[Rule, ...] = (
    Rule(
        "hybrid-in-one-chunk",
        "layers of one part each (model.mamba) lie in one chunk on each device; set layout.virtual_pipeline to 1",
        "megatron/bridge/models/hybrid/hybrid_provider.py HybridModelProvider.provide, Megatron-Bridge 0.6",
        lambda s: implies(s.shape.mamba is not None, np.equal(s.layouts.virtual_pipeline, 1)),
    ),
    Rule(
        "adapter-rank-divides",
        "tensor parallelism splits an adapter inside, too: tensor must divide training.adapters.rank",
        ADAPTER,
        _rank_divides,
    ),
    Rule(
        "adapted-experts-whole",
        "beside experts over several ranks, adapters of Bridge 0.6 add up wrongly and nothing says so: expert_tensor "
        "must be 1 (github.com/NVIDIA-NeMo/Megatron-Bridge/issues/5634)",
        ADAPTER,
        _experts_whole,
    ),
    Rule(
        "adapted-latents-whole",
        "beside projections to latents, which are whole on every tensor rank, adapters of Bridge 0.6 are split and mix "
        "the tokens of several ranks, and nothing says so: tensor must be 1 "
        "(github.com/NVIDIA-NeMo/Megatron-Bridge/pull/5900)",
        ADAPTER,
        _latents_whole,
    ),
)

PACKED_RULES: tuple[Rule, ...] = (
    Rule(
        "packed-rows-one-by-one",
        "with data.packed, a micro-batch is one sequence: micro_batch_size must be 1",
        "megatron/bridge/training/config.py ConfigContainer.validate, Megatron-Bridge 0.6",
        lambda s: np.equal(s.layouts.micro_batch_size, 1),
    ),
    Rule(
        "packed-predictions-whole",
        "with data.packed, prediction heads (mtp_num_layers) look for the ends of rows where context parallelism has "
        "moved them from, and nothing says so: context must be 1",
        "megatron/core/transformer/multi_token_prediction.py _roll_tensor_packed_seq, core 0.19; "
        "megatron/bridge/data/packing/gpt_sft.py collate_fn, Megatron-Bridge 0.6",
        lambda s: implies(s.shape.mtp_num_layers > 0, np.equal(s.layouts.context, 1)),
    ),
)
"""What packed rows (data.packed) ask of a layout."""

ALL_REQUIREMENTS: tuple[Requirement, ...] = (
    *BRIDGE_REQUIREMENTS,
    *(each for each in megatron_rules.requirements_for() if each.key not in OF_ITS_SCRIPT),
)
"""What Bridge asks of a recipe, and what Megatron core asks of it."""
