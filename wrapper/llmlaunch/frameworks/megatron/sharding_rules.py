"""What Megatron-LM refuses of Megatron-FSDP (core 0.19)."""

from __future__ import annotations

import numpy as np

from llmlaunch.columns import BoolColumn
from llmlaunch.frameworks.base import Requirement, of_techniques
from llmlaunch.frameworks.megatron.sharding import FIRST_STAGE, asks_for_sharding, pinned_stages
from llmlaunch.layout import Rule, Situation

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
