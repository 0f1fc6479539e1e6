"""What Megatron-LM refuses together with an expert token exchange that overlaps with other work."""

from __future__ import annotations

import numpy as np

from llmlaunch.columns import BoolColumn
from llmlaunch.frameworks.base import Requirement, implies, of_techniques
from llmlaunch.layout import RECOMPUTE_FULL, Rule, Situation
from llmlaunch.recipe.types import Recipe

CONFIG = "megatron/core/transformer/transformer_config.py, core 0.19"
EXCHANGE = "layout.overlap_expert_communication"


def _exchanged(recipe: Recipe) -> bool:
    return recipe.techniques.overlap_expert_communication


EXCHANGE_REQUIREMENTS: tuple[Requirement, ...] = (
    Requirement(
        "delayed-gradients-need-half",
        "layout.delay_weight_gradients",
        "overlapped expert communication needs precision bf16 or fp16",
        CONFIG,
        lambda r: r.techniques.delay_weight_gradients and r.workload.precision == "fp32",
    ),
    Requirement(
        "delayed-gradients-need-alltoall",
        "layout.delay_weight_gradients",
        "overlapped expert communication needs token_dispatcher: alltoall",
        CONFIG,
        lambda r: r.techniques.delay_weight_gradients and r.techniques.token_dispatcher == "allgather",
    ),
    Requirement(
        "delayed-gradients-keep-experts",
        "layout.delay_weight_gradients",
        "overlapped expert communication cannot recompute the whole moe; remove moe from recompute_modules",
        CONFIG,
        lambda r: r.techniques.delay_weight_gradients and "moe" in r.techniques.recompute_modules,
    ),
    Requirement(
        "hidden-exchange-needs-half",
        EXCHANGE,
        "needs precision bf16 or fp16",
        CONFIG,
        lambda r: _exchanged(r) and r.workload.precision == "fp32",
    ),
    Requirement(
        "hidden-exchange-needs-alltoall",
        EXCHANGE,
        "needs experts with token_dispatcher: alltoall or flex",
        CONFIG,
        lambda r: _exchanged(r) and (r.model.moe is None or r.techniques.token_dispatcher == "allgather"),
    ),
    Requirement(
        "hidden-exchange-keeps-experts",
        EXCHANGE,
        "cannot recompute the whole moe; remove moe from recompute_modules",
        CONFIG,
        lambda r: _exchanged(r) and "moe" in r.techniques.recompute_modules,
    ),
    Requirement(
        "hidden-exchange-alone",
        EXCHANGE,
        "hides the whole exchange, and overlap_shared_expert a part of it; remove one of the two",
        CONFIG,
        lambda r: _exchanged(r) and r.techniques.overlap_shared_expert,
    ),
    Requirement(
        "hidden-exchange-prediction",
        EXCHANGE,
        "takes one module of multi-token prediction at most",
        CONFIG,
        lambda r: _exchanged(r) and r.model.mtp_num_layers > 1,
    ),
)


def interleaved(s: Situation) -> BoolColumn:
    """Whether the pipeline has one stage only, or several chunks per stage."""
    column: BoolColumn = (s.layouts.pipeline == 1) | (s.layouts.virtual_pipeline > 1)
    return column


EXCHANGE_RULES: tuple[Rule, ...] = of_techniques(
    Rule(
        "delayed-gradients-experts",
        "delay_weight_gradients needs --expert-model-parallel-size above 1: --delay-wgrad-compute needs "
        "--overlap-moe-expert-parallel-comm",
        CONFIG,
        lambda s: implies(s.techniques.delay_weight_gradients, s.layouts.expert > 1),
    ),
    Rule(
        "delayed-gradients-no-full",
        "delay_weight_gradients needs recompute none or selective",
        CONFIG,
        lambda s: implies(s.techniques.delay_weight_gradients, np.not_equal(s.layouts.recompute, RECOMPUTE_FULL)),
    ),
    Rule(
        "delayed-gradients-interleaved",
        "delay_weight_gradients with pipeline stages needs virtual stages",
        CONFIG,
        lambda s: implies(s.techniques.delay_weight_gradients, interleaved(s)),
    ),
    Rule(
        "delayed-gradients-prediction",
        "delay_weight_gradients takes one module of multi-token prediction at most",
        CONFIG,
        lambda s: np.full(len(s.layouts), not s.techniques.delay_weight_gradients or s.shape.mtp_num_layers <= 1),
    ),
    Rule(
        "hidden-exchange-experts",
        "overlap_expert_communication needs --expert-model-parallel-size above 1",
        CONFIG,
        lambda s: implies(s.techniques.overlap_expert_communication, np.greater(s.layouts.expert, 1)),
    ),
    Rule(
        "hidden-exchange-no-full",
        "overlap_expert_communication needs recompute none or selective",
        CONFIG,
        lambda s: implies(s.techniques.overlap_expert_communication, np.not_equal(s.layouts.recompute, RECOMPUTE_FULL)),
    ),
    Rule(
        "hidden-exchange-interleaved",
        "overlap_expert_communication with pipeline stages needs virtual stages",
        CONFIG,
        lambda s: implies(s.techniques.overlap_expert_communication, interleaved(s)),
    ),
)
