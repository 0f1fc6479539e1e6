"""What Megatron-FSDP (core 0.19) keeps in memory, and what Megatron-LM refuses of it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from llmlaunch.columns import BoolColumn
from llmlaunch.facts import FullSharding, MemoryFacts
from llmlaunch.frameworks.base import Requirement, of_techniques
from llmlaunch.frameworks.megatron.facts import MXFP8_SCALE_BYTES, MegatronOptions, megatron_facts
from llmlaunch.frameworks.megatron.sharding import FIRST_STAGE, asks_for_sharding, made_in_shards, pinned_stages
from llmlaunch.layout import Rule, Situation
from llmlaunch.memory.constants import constant
from llmlaunch.recipe.types import Recipe
from llmlaunch.workload import ELEMENT_BYTES

CHECKPOINTS = "megatron/training/checkpointing.py"


SHARDING_REQUIREMENTS: tuple[Requirement, ...] = (
    Requirement(
        "sharding-by-itself",
        "layout.zero_stage",
        "2 and 3 are Megatron-FSDP, another implementation than 0 and 1; write stages of one of the two",
        "megatron/training/training.py get_model, core 0.19",
        lambda r: asks_for_sharding(r) and min(pinned_stages(r)) < FIRST_STAGE,
    ),
    Requirement(
        "sharded-starts-anew",
        "training.start_from",
        "zero_stage 2 and 3 cannot start from weights alone: the optimizer's copies of them are never made; remove it, "
        "or take zero_stage 1",
        "megatron/core/optimizer/distrib_optimizer.py _copy_model_params_to_main_params, core 0.19",
        lambda r: asks_for_sharding(r) and r.training.start_from is not None,
    ),
    Requirement(
        "sharded-checkpoints-of-halves",
        "training.precision",
        "fp32 cannot be saved with zero_stage 2 or 3 and a gated MLP: its halves are looked for below the wrapper that "
        "bf16 and fp16 have; write bf16, or remove training.checkpoint_path",
        "megatron/core/transformer/fsdp_dtensor_checkpoint.py handle_swiglu_in_state_dict, core 0.19",
        lambda r: (
            asks_for_sharding(r)
            and r.workload.precision == "fp32"
            and r.model.gated_mlp
            and r.training.checkpoint_path is not None
        ),
    ),
)


def sharded(s: Situation) -> BoolColumn:
    column: BoolColumn = np.greater_equal(s.layouts.zero_stage, FIRST_STAGE)
    return column


SHARDING_RULES: tuple[Rule, ...] = of_techniques(
    Rule(
        "sharded-one-stage",
        "zero_stage 2 and 3 need --pipeline-model-parallel-size 1: a checkpoint names the layers of every stage from 0 "
        "on, so those of one stage would stand for all",
        f"{CHECKPOINTS} generate_state_dict, preprocess_fsdp_dtensor_state_dict, core 0.19",
        lambda s: ~sharded(s) | np.equal(s.layouts.pipeline, 1),
    ),
    Rule(
        "sharded-optimizer-stays",
        "zero_stage 2 and 3 keep the optimizer on the device: the one that is offloaded knows no sharded tensors",
        "megatron/core/optimizer/cpu_offloading/hybrid_optimizer.py, core 0.19",
        lambda s: ~sharded(s) | np.bool_(s.techniques.offload_optimizer == 0.0),
    ),
)


# Megatron-FSDP: elements gathered ahead, and elements that wait for their reduction.
PREFETCHED_ELEMENTS = 5e8
QUEUED_ELEMENTS = 1e9


def sharding_facts(recipe: Recipe, options: MegatronOptions) -> MemoryFacts:
    """Return what the recipe keeps in memory under Megatron-FSDP."""
    facts = megatron_fsdp_facts(replace(options, gradient_accumulation_fusion=False))
    return replace(facts, states=replace(facts.states, placed_whole=not made_in_shards(recipe.model)))


def megatron_fsdp_facts(options: MegatronOptions) -> MemoryFacts:
    """Return the facts of Megatron core 0.19 with --use-megatron-fsdp.

    optim_grads_params is ZeRO stage 3. optim_grads is stage 2, which leaves the parameters whole
    (param_and_grad_buffer.py `_init_each_parameter_group_buffers`).

    The shards of parameters, main gradients and fp32 main parameters are persistent buffers. A transformer layer is one
    unit, gathered before it runs and released afterwards (megatron_fsdp/megatron_fsdp.py, mcore_fsdp_adapter.py, core
    0.19). Whole units are gathered ahead until half of max(1e9, two units) elements are in flight, and gradients wait
    for their reduction up to max(1e9, two units) elements (`suggested_AG_prefetch_size`,
    `suggested_RS_queue_capacity`). The embedding and the head are not units and stay gathered. The gradient of a linear
    layer is copied into the unit's bucket unless it is accumulated there.

    Narrow parameters are stored in shards of one byte per element. For mxfp8 there is a second orientation as well,
    which other recipes create when a unit is gathered (`_init_each_parameter_group_buffers`,
    `transpose_weight_buffer`). The buffers hold raw data only; scales stay whole next to the parameters
    (mixed_precision.py `fp8_set_raw_data`). Without narrow parameters, narrow weights are a cache of Transformer
    Engine, which knows no units.
    """
    base = megatron_facts(options)
    states, quantized = base.states, base.layer.quantized
    copies = 0.0 if quantized is None else quantized.weight_copy_bytes
    narrow = quantized is not None and quantized.replaces_parameters
    linear_gradient_bytes = 0.0 if options.gradient_accumulation_fusion else ELEMENT_BYTES[options.precision]
    sharding = FullSharding(
        gathered_bytes=copies if narrow else states.parameter_bytes,
        root_bytes=states.parameter_bytes,
        gradient_bytes=linear_gradient_bytes,
        reduced_bytes=states.gradient_bytes,
        gathered_blocks=2.0,
        gathered_elements=PREFETCHED_ELEMENTS,
        reduced_blocks=2.0,
        reduced_elements=QUEUED_ELEMENTS,
        first_stage=3,
        narrow_bytes=2.0 if options.fp8_recipe == "mxfp8" else 1.0,
        narrow_scale_bytes=MXFP8_SCALE_BYTES if options.fp8_recipe == "mxfp8" else 0.0,
    )
    stubs = options.gradient_accumulation_fusion and base.layer.weight_gradient_stubs
    return replace(
        base,
        backend="megatron-fsdp",
        source="megatron/core/distributed/fsdp/src/megatron_fsdp, core 0.19",
        states=replace(states, moved_to_buffers=False, full_sharding=sharding),
        layer=replace(base.layer, weight_gradient_fused=True, weight_gradient_stubs=stubs),
        # no parameters are allocated separately before they move; its streams were not replayed
        allocator=replace(base.allocator, whole_segments=False, cache_share=constant("cache_share")),
    )
