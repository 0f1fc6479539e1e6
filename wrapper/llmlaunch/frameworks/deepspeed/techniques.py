"""Techniques on DeepSpeed: what ds_config.json and the shipped script can do, as data, and how they are asked for it.

A script of the person's own decides for itself what it chunks, adapts or freezes: the recipe then tells the estimate
what the script does, and only the sections of ds_config.json are rendered.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from llmlaunch.families.registry import family_named
from llmlaunch.frameworks.argument import Argument, argument, optional
from llmlaunch.frameworks.base import (
    MACHINE_REQUIREMENTS,
    Requirement,
    implies,
    of_techniques,
    parts_fused_modules,
    pinned_least,
)
from llmlaunch.frameworks.deepspeed.number_formats import FORMAT_REQUIREMENTS
from llmlaunch.layers.mamba import Mamba2
from llmlaunch.layers.model import model_of
from llmlaunch.layers.short_convolution import ShortConvolution
from llmlaunch.layout import OFFLOAD_LAYERS, RECOMPUTE_FULL, RECOMPUTE_LAYERS, Layout, Rule
from llmlaunch.recipe.types import Recipe
from llmlaunch.techniques import Techniques
from llmlaunch.techniques.requests import FUSED_MODULES, Adapters

TRAINER = "llmlaunch/trainers/deepspeed/train.py"
CHECKPOINTING = "transformers/modeling_layers.py GradientCheckpointingLayer, 5.23"
ZERO = "deepspeed/runtime/zero/config.py, 0.19.8"
OFFLOAD = "deepspeed/runtime/zero/offload_config.py, 0.19.8"


def _shipped(asks: Callable[[Recipe], bool]) -> Callable[[Recipe], bool]:
    """Asked of the shipped script; a script of one's own may do as it likes."""
    return lambda recipe: recipe.backend.script is None and asks(recipe)


def _targets(adapters: Adapters | None, names: str) -> bool:
    return adapters is not None and not adapters.targets.isdisjoint(names.split())


def _quantized(recipe: Recipe) -> bool:
    return recipe.techniques.adapters is not None and recipe.techniques.adapters.base is not None


REQUIREMENTS: tuple[Requirement, ...] = (
    *MACHINE_REQUIREMENTS,
    Requirement(
        "no-indexer",
        "model.indexer",
        "the classes of Transformers choose keys without a gradient, so that nothing teaches the indexer; "
        "backend: megatron-lm trains it",
        "transformers/models/deepseek_v32/modeling_deepseek_v32.py DeepseekV32Indexer.forward, 5.23",
        lambda r: r.model.indexer is not None,
    ),
    Requirement(
        "every-expert-sees-all",
        "model.moe.router.weighted_inputs",
        "the class of Transformers gives every expert all tokens, which is not priced; "
        "backend: megatron-lm dispatches them",
        "transformers/models/llama4/modeling_llama4.py Llama4TextMoe.forward, 5.23",
        lambda r: r.model.moe is not None and r.model.moe.router.weighted_inputs,
    ),
    Requirement(
        "delta-nets",
        "model.linear_attention",
        "what transformers' gated delta nets keep depends on which kernels are installed, and is not counted yet; "
        "backend: megatron-lm trains them",
        "transformers/models/qwen3_next/modeling_qwen3_next.py torch_chunk_gated_delta_rule, 5.23",
        lambda r: r.model.linear_attention is not None,
    ),
    Requirement(
        "pooled-keys-on-deepspeed",
        "model.compressed_attention",
        "the classes of Transformers choose pooled keys without a gradient, so that nothing teaches the indexer; "
        "backend: megatron-lm prices them",
        "transformers/models/deepseek_v4/modeling_deepseek_v4.py DeepseekV4Indexer.forward, 5.23",
        lambda r: r.model.compressed_attention is not None or r.model.residual_streams > 1,
    ),
    Requirement(
        "adapters-of-one-kind",
        "training.adapters",
        "stand beside heads of one width: those of layers that see everything are not priced; remove it",
        "transformers/models/gemma4/modeling_gemma4.py Gemma4TextAttention, 5.23",
        lambda r: r.techniques.adapters is not None and model_of(r.model).heads_differ,
    ),
    Requirement(
        "mixers-without-adapters",
        "training.adapters",
        "the fused kernel of a Mamba-2 mixer reads the weight of its last projection and would pass by an adapter "
        "beside it, and peft refuses those; remove it",
        "transformers/models/falcon_h1/modeling_falcon_h1.py FalconH1Mixer.forward, 5.23; peft/tuners/tuners_utils.py "
        "_check_lora_target_modules_mamba, 0.21",
        lambda r: r.techniques.adapters is not None and model_of(r.model).has(Mamba2),
    ),
    Requirement(
        "mamba-mixers",
        "model.mamba",
        "what transformers' layers of one part each keep is not counted yet; backend: megatron-lm trains them",
        "transformers/models/nemotron_h/modeling_nemotron_h.py NemotronHBlock, 5.23",
        lambda r: r.model.mamba is not None and model_of(r.model).layers_are_branches,
    ),
    Requirement(
        "vision-without-adapters",
        "model.vision",
        "an encoder is not priced with adapters and trained_layers; remove them, or the encoder",
        "transformers/models/qwen3_vl/modeling_qwen3_vl.py Qwen3VLVisionModel, 5.23",
        lambda r: (
            r.model.vision is not None
            and (r.techniques.adapters is not None or r.techniques.trained_layers is not None)
        ),
    ),
    Requirement(
        "no-images-in-the-script",
        "model.vision",
        "the shipped script trains on tokens alone; memory and time are those of Transformers' encoder, which a script "
        "of your own can train: backend.script",
        TRAINER,
        _shipped(lambda r: r.model.vision is not None),
        priced=True,
    ),
    Requirement(
        "every-layer-recomputed",
        "layout.recompute_method",
        "block: gradient checkpointing recomputes every layer; backend: megatron-lm has --recompute-method block",
        CHECKPOINTING,
        _shipped(lambda r: r.techniques.recompute_method == "block"),
    ),
    Requirement(
        "one-layer-groups",
        "layout.recompute_layers",
        "gradient checkpointing keeps the input of every layer; backend: megatron-lm has --recompute-num-layers",
        CHECKPOINTING,
        _shipped(lambda r: pinned_least(r, RECOMPUTE_LAYERS) > 1),
    ),
    Requirement(
        "one-optimizer",
        "layout.optimizer_instances",
        "all data-parallel ranks share one optimizer here; backend: megatron-lm has "
        "--num-distributed-optimizer-instances",
        "deepspeed/runtime/zero/stage_1_and_2.py, 0.19.8",
        lambda r: r.techniques.optimizer_instances > 1,
    ),
    Requirement(
        "no-module-offload",
        "layout.offload_modules",
        "single modules cannot be offloaded; backend: megatron-lm has --offload-modules, here is offload_checkpoints",
        TRAINER,
        _shipped(lambda r: bool(r.techniques.offload_modules)),
    ),
    Requirement(
        "no-layer-offload",
        "layout.offload_layers",
        "single layers cannot be offloaded; backend: megatron-lm has --cpu-offloading-num-layers, here is "
        "offload_checkpoints",
        TRAINER,
        _shipped(lambda r: pinned_least(r, OFFLOAD_LAYERS) > 0),
    ),
    Requirement(
        "checkpoints-leave-a-gpu",
        "layout.offload_checkpoints",
        "on a CPU the host is the device: nothing would be saved, and cpu_checkpointing fails there; remove it",
        "deepspeed/runtime/activation_checkpointing/checkpointing.py get_cpu_activations_for_backward, 0.19.8",
        lambda r: r.techniques.offload_checkpoints and r.cluster.accelerator.kind == "cpu",
    ),
    Requirement(
        "whole-optimizer-offload",
        "layout.offload_optimizer",
        "a share needs DeepSpeedCPUAdam, which would be compiled on the node; write 1.0, or use a script of your own",
        "deepspeed/runtime/zero/stage3.py __init__, 0.19.8",
        _shipped(lambda r: 0 < r.techniques.offload_optimizer < 1),
    ),
    Requirement(
        "whole-or-tiled-loss",
        "layout.loss",
        "the shipped script's loss is torch's own, whole (leave loss out) or tiled; backend: megatron-lm has native",
        TRAINER,
        _shipped(lambda r: r.techniques.loss not in (None, "tiled")),
    ),
    Requirement(
        "counted-loss",
        "layout.loss",
        "what a script's native or te loss spares is not counted; write tiled or fused_linear, or leave loss out",
        "llmlaunch/memory/loss.py",
        lambda r: r.backend.script is not None and r.techniques.loss in ("native", "te"),
    ),
    Requirement(
        "dense-tiles",
        "layout.loss",
        "tiled: the shipped script tiles the loss of dense models; a mixture's balancing loss would be lost",
        TRAINER,
        _shipped(lambda r: r.techniques.loss == "tiled" and r.model.moe is not None),
    ),
    Requirement(
        "dense-chunks",
        "layout.mlp_chunks",
        "the shipped script chunks dense MLPs, not experts; backend: megatron-lm chunks both",
        TRAINER,
        _shipped(lambda r: r.techniques.mlp_chunks > 1 and r.model.moe is not None),
    ),
    Requirement(
        "dense-adapters",
        "training.adapters",
        "the shipped script adapts linear layers, and a mixture's experts are none; write training.adapters."
        "target_modules: [q_proj, k_proj, v_proj, o_proj], or use a script of your own",
        "transformers/models/mixtral/modeling_mixtral.py MixtralExperts, 5.23",
        _shipped(lambda r: r.model.moe is not None and _targets(r.techniques.adapters, "gate_proj up_proj down_proj")),
    ),
    Requirement(
        "quantized-weights-are-loaded",
        "training.adapters.base",
        "weights are quantized as they are loaded; name them in training.start_from",
        "transformers/quantizers/quantizer_bnb_4bit.py Bnb4BitHfQuantizer, 5.23",
        _shipped(lambda r: _quantized(r) and r.training.start_from is None),
    ),
    Requirement(
        "quantized-linear-layers",
        "training.adapters.base",
        "experts are no linear layers, and stay as wide as they are, which is not priced; remove it",
        "transformers/integrations/bitsandbytes.py replace_with_bnb_linear, 5.23",
        lambda r: _quantized(r) and r.model.moe is not None,
    ),
    Requirement(
        "whole-fused-layers",
        "training.adapters.target_modules",
        "models of this family have one layer for queries, keys and values, or for gate and up: name all of them, or "
        "linear_qkv and linear_fc1",
        "transformers/models/phi3/modeling_phi3.py, transformers/models/gpt2/modeling_gpt2.py, 5.23",
        _shipped(lambda r: family_named(r.model.family).fuses_linears and parts_fused_modules(r)),
    ),
    Requirement(
        "no-async-save",
        "training.async_save",
        "the shipped script names a checkpoint when all of it is on the disk, and DeepSpeed's decoupled writer has it "
        "there some steps later; remove it, or take backend: megatron-lm, which has --async-save",
        "deepspeed/runtime/engine.py save_checkpoint and _commit_decoupled_checkpoint, 0.19.8",
        lambda r: r.training.async_save,
    ),
    Requirement(
        "no-non-persistent-saves",
        "training.non_persistent_save_interval",
        "is Megatron-LM's, and the shipped script waits for every save; remove it, and lower training.save_interval: "
        "training.keep_checkpoints removes old ones",
        TRAINER,
        lambda r: r.training.non_persistent_save_interval is not None,
    ),
    Requirement(
        "evaluation-of-a-script",
        "training.evaluation",
        "a script of one's own evaluates by its own arguments, but with script_kind hugging-face; remove it, and use "
        "script_args",
        TRAINER,
        lambda r: (
            r.training.evaluation is not None
            and r.backend.script_kind in ("own", "pipeline")
            and r.backend.script is not None
        ),
    ),
    Requirement(
        "evaluation-writes-logits",
        "training.evaluation",
        "Liger's fused loss writes all logits out where the model does not train, which is not counted; remove it, or "
        "layout.loss: fused_linear",
        "liger_kernel/transformers/model/llama.py lce_forward: skip_logits = self.training and ...",
        lambda r: r.training.evaluation is not None and r.techniques.loss == "fused_linear",
    ),
    Requirement(
        "validation-of-a-script",
        "data.validation",
        "the shipped script reads it; one of your own has its data in its own arguments (script_args)",
        TRAINER,
        lambda r: bool(r.data.validation) and r.backend.script is not None,
    ),
    Requirement(
        "rows-of-a-script",
        "data.format",
        "the shipped script reads rows; one of your own has its data in its own arguments (script_args)",
        TRAINER,
        lambda r: r.data.format is not None and r.backend.script is not None,
    ),
    Requirement(
        "packed-rows-without-states",
        "data.packed",
        "a state or a convolution runs over the ends of rows, so that a row would be told of those before it; remove "
        "it, or take a model with attention alone",
        "transformers/models/falcon_h1/modeling_falcon_h1.py FalconH1Mixer.forward, lfm2/modeling_lfm2.py "
        "Lfm2ShortConv.forward, qwen3_next/modeling_qwen3_next.py Qwen3NextGatedDeltaNet.forward, 5.23",
        lambda r: (
            r.data.packed
            and (
                r.model.linear_attention is not None
                or model_of(r.model).has(Mamba2)
                or model_of(r.model).has(ShortConvolution)
            )
        ),
    ),
    Requirement(
        "packed-rows-without-sinks",
        "data.packed",
        "masks of models with attention sinks do not follow positions, so that a row would attend to those before it; "
        "remove it",
        "transformers/models/gpt_oss/modeling_gpt_oss.py GptOssModel.forward, 5.23",
        lambda r: r.data.packed and r.model.attention_sinks,
    ),
    Requirement(
        "no-delayed-gradients",
        "layout.delay_weight_gradients",
        "weight gradients come with those of the inputs; backend: megatron-lm has --delay-wgrad-compute",
        TRAINER,
        _shipped(lambda r: r.techniques.delay_weight_gradients),
    ),
    Requirement(
        "no-hidden-exchange",
        "layout.overlap_expert_communication",
        "every rank holds all experts, so no token travels; remove it",
        TRAINER,
        _shipped(lambda r: r.techniques.overlap_expert_communication),
    ),
    Requirement(
        "no-hidden-tensor",
        "layout.tp_comm_overlap",
        "AutoTP waits for its all-reduces; backend: megatron-lm has --tp-comm-overlap",
        "deepspeed/module_inject/layers.py, 0.19.8",
        lambda r: r.techniques.tp_comm_overlap,
    ),
    Requirement(
        "no-graphs",
        "layout.cuda_graphs",
        "nothing of a step is captured; backend: megatron-lm has --cuda-graph-impl",
        "deepspeed/runtime/engine.py, 0.19.8",
        lambda r: bool(r.techniques.cuda_graphs),
    ),
    Requirement(
        "no-ring",
        "layout.context_comm",
        "context parallelism is Ulysses here, which is an all-to-all; remove it",
        "deepspeed/runtime/sequence_parallel/ulysses_sp.py, 0.19.8",
        lambda r: r.techniques.context_comm is not None,
    ),
    Requirement(
        "no-dispatcher",
        "layout.token_dispatcher",
        "every rank holds all experts, so no token travels; backend: megatron-lm has --moe-token-dispatcher-type",
        TRAINER,
        _shipped(lambda r: r.techniques.token_dispatcher is not None),
    ),
    Requirement(
        "no-fixed-rows",
        "layout.expert_rank_capacity_factor",
        "every rank holds all experts, so no token travels; backend: megatron-lm has --moe-expert-rank-capacity-factor",
        TRAINER,
        lambda r: r.techniques.expert_rank_capacity_factor is not None or r.techniques.paged_stash is not None,
    ),
    *FORMAT_REQUIREMENTS,
)


TECHNIQUE_RULES: tuple[Rule, ...] = of_techniques(
    Rule(
        "quantized-base-whole",
        "4-bit weights (training.adapters.base) cannot be split: zero_stage must be at most 2",
        "transformers/modeling_utils.py from_pretrained: no quantized model under zero.Init, 5.23",
        lambda s: implies(
            s.techniques.adapters is not None and s.techniques.adapters.base is not None,
            np.less(s.layouts.zero_stage, 3),
        ),
    ),
    Rule(
        "offload-optimizer-zero",
        "offload_optimizer needs zero_stage 1, 2 or 3",
        OFFLOAD,
        lambda s: implies(s.techniques.offload_optimizer > 0, s.layouts.zero_stage > 0),
    ),
    Rule(
        "offload-part-zero-3",
        "offload_optimizer below 1 needs zero_stage 3",
        f"{ZERO} offload_ratio_check",
        lambda s: implies(0 < s.techniques.offload_optimizer < 1, np.equal(s.layouts.zero_stage, 3)),
    ),
    Rule(
        "offload-parameters-zero-3",
        "offload_parameters needs zero_stage 3 (DeepSpeed would silently ignore it below)",
        OFFLOAD,
        lambda s: implies(s.techniques.offload_parameters, np.equal(s.layouts.zero_stage, 3)),
    ),
)


def technique_arguments(techniques: Techniques, layout: Layout) -> tuple[Argument, ...]:
    """What the shipped script is told."""
    chunks = techniques.mlp_chunks if techniques.mlp_chunks > 1 else None
    tiles = techniques.loss_tiles if techniques.loss == "tiled" else None
    adapters = techniques.adapters
    arguments = (
        *optional("--gradient-checkpointing", layout.recompute == RECOMPUTE_FULL, of="layout.recompute"),
        *optional("--offload-checkpoints", techniques.offload_checkpoints, of="layout.offload_checkpoints"),
        *optional("--mlp-chunks", chunks, of="layout.mlp_chunks"),
        *optional("--loss-tiles", tiles, of=("layout.loss", "layout.loss_tiles")),
    )
    if adapters is not None:
        arguments += (argument("--adapter-rank", adapters.rank, of="training.adapters.rank"),)
        if adapters.target_modules:
            names = [name for parts in FUSED_MODULES.values() for name in parts if name in adapters.targets]
            arguments += (argument("--adapter-targets", *names, of="training.adapters.target_modules"),)
        arguments += optional("--frozen-adapter-down", adapters.frozen_down, of="training.adapters.frozen_down")
        arguments += optional("--adapter-base", adapters.base, of="training.adapters.base")
    return (*arguments, *optional("--trained-layers", techniques.trained_layers, of="training.trained_layers"))
