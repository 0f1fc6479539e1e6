"""Communication that a recipe asks Megatron-LM to hide or to do otherwise (core 0.19): rules and words.

What needs no asking stands elsewhere: gradients and parameters of data parallelism overlap wherever they are sharded
(layout_arguments.py, sharding.py), and interleaved stages overlap their transfers by Megatron's own default.
"""

from __future__ import annotations

import numpy as np

from llmlaunch.backends.argument import Argument, argument
from llmlaunch.backends.requirements import Requirement, implies
from llmlaunch.columns import BoolColumn
from llmlaunch.layout import RECOMPUTE_FULL, Rule, Situation
from llmlaunch.recipe.types import Recipe

__all__ = ["OVERLAP_REQUIREMENTS", "OVERLAP_RULES", "overlap_arguments"]

ARGUMENTS = "megatron/training/arguments.py validate_args, core 0.19"
CONFIG = "megatron/core/transformer/transformer_config.py, core 0.19"
EXCHANGE = "layout.overlap_expert_communication"


def _exchanged(recipe: Recipe) -> bool:
    return recipe.techniques.overlap_expert_communication


OVERLAP_REQUIREMENTS: tuple[Requirement, ...] = (
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
        lambda r: _exchanged(r) and (r.model.moe is None or r.model.moe.token_dispatcher == "allgather"),
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


def hidden_exchange_experts(s: Situation) -> BoolColumn:
    return implies(s.techniques.overlap_expert_communication, np.greater(s.layouts.expert, 1))


def hidden_exchange_no_full(s: Situation) -> BoolColumn:
    return implies(s.techniques.overlap_expert_communication, np.not_equal(s.layouts.recompute, RECOMPUTE_FULL))


def hidden_exchange_interleaved(s: Situation) -> BoolColumn:
    interleaved = (s.layouts.pipeline == 1) | (s.layouts.virtual_pipeline > 1)
    return implies(s.techniques.overlap_expert_communication, interleaved)


def hidden_tensor_sequence(s: Situation) -> BoolColumn:
    return implies(s.techniques.tp_comm_overlap, np.greater(s.layouts.sequence_parallel, 0))


def all_to_all_heads(s: Situation) -> BoolColumn:
    """Each tensor rank's heads are dealt out over the context ranks; a rank holds a query group at least."""
    tensor, context = s.layouts.tensor, s.layouts.context
    groups = s.shape.num_attention_heads if s.shape.mla is not None else s.shape.num_query_groups
    heads = np.equal(s.shape.num_attention_heads // tensor % context, 0)
    dealt = heads & np.equal(np.maximum(groups // tensor, 1) % context, 0)
    return implies(s.techniques.context_comm == "a2a", dealt)


OVERLAP_RULES: tuple[Rule, ...] = (
    Rule(
        "hidden-exchange-experts",
        "overlap_expert_communication needs --expert-model-parallel-size above 1",
        CONFIG,
        hidden_exchange_experts,
    ),
    Rule(
        "hidden-exchange-no-full",
        "overlap_expert_communication needs recompute none or selective",
        CONFIG,
        hidden_exchange_no_full,
        of_techniques=True,
    ),
    Rule(
        "hidden-exchange-interleaved",
        "overlap_expert_communication with pipeline stages needs virtual stages",
        CONFIG,
        hidden_exchange_interleaved,
    ),
    Rule(
        "hidden-tensor-sequence",
        "tp_comm_overlap needs --sequence-parallel",
        ARGUMENTS,
        hidden_tensor_sequence,
    ),
    Rule(
        "all-to-all-heads",
        "context_comm: a2a needs heads and query groups of a tensor rank that --context-parallel-size divides",
        "transformer_engine/pytorch/attention/dot_product_attention/context_parallel.py AttnFuncWithCPAndQKVOA2A, 2.20",
        all_to_all_heads,
    ),
)


def overlap_arguments(recipe: Recipe) -> tuple[Argument, ...]:
    """Empty where the recipe asks for none. `delay_weight_gradients` brings its own --overlap-moe-expert-parallel-comm
    (techniques.py)."""
    techniques = recipe.techniques
    arguments: list[Argument] = []
    if techniques.tp_comm_overlap:
        arguments += [argument("--tp-comm-overlap", of="layout.tp_comm_overlap")]
    if techniques.context_comm is not None:
        arguments += [argument("--cp-comm-type", techniques.context_comm, of="layout.context_comm")]
    if techniques.overlap_expert_communication and not techniques.delay_weight_gradients:
        arguments += [argument("--overlap-moe-expert-parallel-comm", of=EXCHANGE)]
    return tuple(arguments)
