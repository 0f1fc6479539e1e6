"""What Megatron-LM refuses for mixtures of experts, their token dispatchers, and the work that overlaps with the
dispatch."""

from __future__ import annotations

import numpy as np

from llmlaunch.columns import BoolColumn
from llmlaunch.effects.token_dispatch import DEEPEP_RANKS
from llmlaunch.frameworks.base import Requirement, implies
from llmlaunch.layout import RECOMPUTE_SELECTIVE, Rule, Situation
from llmlaunch.models.shape import Router
from llmlaunch.recipe.types import Recipe

ARGUMENTS = "megatron/training/arguments.py validate_args, core 0.19"
CONFIG = "megatron/core/transformer/transformer_config.py, core 0.19"
ROUTING = "megatron/core/transformer/moe/moe_utils.py topk_routing_with_score_function, core 0.19"
GROUPED_GEMM_CAPABILITY = 8.0  # Ampere
OF_DEEPEP = ("deepep-needs-others", "deepep-ranks")  # keys of the rules of that library alone


def grouped(recipe: Recipe) -> bool:
    """Whether all experts of a rank run in one kernel."""
    return recipe.model.moe is not None and recipe.model.moe.grouped_gemm is not False


def old_device(recipe: Recipe) -> bool:
    capability = recipe.cluster.accelerator.compute_capability
    return capability is not None and float(capability) < GROUPED_GEMM_CAPABILITY


def router_of(recipe: Recipe) -> Router:
    return recipe.model.moe.router if recipe.model.moe is not None else Router()


MIXTURE_REQUIREMENTS: tuple[Requirement, ...] = (
    Requirement(
        "shared-expert-biases",
        "model.linear_bias",
        "a shared expert has no biases; set linear_bias to false, or leave shared_expert_ffn_hidden_size out",
        "megatron/core/transformer/moe/shared_experts.py SharedExpertMLP.__init__, core 0.19",
        lambda r: r.model.linear_bias and r.model.moe is not None and r.model.moe.shared_expert_ffn_hidden_size > 0,
    ),
    Requirement(
        "weighed-one-by-one",
        "model.moe.router.weighted_inputs",
        "scores weigh inputs where a token goes to one expert alone (topk 1)",
        "megatron/core/transformer/moe/experts.py, core 0.19",
        lambda r: router_of(r).weighted_inputs and r.model.moe is not None and r.model.moe.topk > 1,
    ),
    Requirement(
        "sigmoid-sums-to-one",
        "model.moe.router.normalize_topk",
        "sigmoid and sqrtsoftplus scores always sum to 1 over the chosen experts here; write normalize_topk: true",
        ROUTING,
        lambda r: (
            router_of(r).score_function != "softmax"
            and not router_of(r).normalize_topk
            and r.model.moe is not None
            and r.model.moe.topk > 1
        ),
    ),
    Requirement(
        "expert-bias-needs-sigmoid",
        "model.moe.router.expert_bias",
        "needs score_function: sigmoid or sqrtsoftplus",
        CONFIG,
        lambda r: router_of(r).expert_bias and router_of(r).score_function == "softmax",
    ),
    Requirement(
        "shared-expert-overlap-dispatcher",
        "layout.overlap_shared_expert",
        "needs token_dispatcher: alltoall or flex",
        CONFIG,
        lambda r: r.techniques.overlap_shared_expert and r.techniques.token_dispatcher == "allgather",
    ),
    Requirement(
        "shared-expert-overlap-alone",
        "layout.overlap_shared_expert",
        "excludes delay_weight_gradients, which overlaps the whole exchange; remove one of the two",
        CONFIG,
        lambda r: r.techniques.overlap_shared_expert and r.techniques.delay_weight_gradients,
    ),
    Requirement(
        "mixture-device",
        "cluster.accelerator",
        "experts in one kernel (--moe-grouped-gemm) need compute capability 8.0 (Ampere) or more",
        ARGUMENTS,
        lambda r: grouped(r) and old_device(r),
    ),
)


def deepep_needs_others(s: Situation) -> BoolColumn:
    deepep = s.techniques.token_dispatcher == "flex" and s.techniques.flex_backend in (None, "deepep")
    return implies(deepep, s.layouts.expert * s.layouts.expert_tensor > 1)


def deepep_knows_its_ranks(s: Situation) -> BoolColumn:
    deepep = s.techniques.token_dispatcher == "flex" and s.techniques.flex_backend in (None, "deepep")
    ranks = s.layouts.expert * s.layouts.expert_tensor
    return implies(deepep, np.isin(ranks, (1, *DEEPEP_RANKS)))  # another rule refuses one rank


def overlapped_expert_is_kept(s: Situation) -> BoolColumn:
    made_again = s.techniques.overlap_shared_expert and "shared_experts" in s.techniques.recompute_modules
    return implies(made_again, np.not_equal(s.layouts.recompute, RECOMPUTE_SELECTIVE))


MIXTURE_RULES: tuple[Rule, ...] = (
    Rule(
        "biased-experts",
        "experts with biases need --expert-tensor-parallel-size 1",
        CONFIG,
        lambda s: implies(s.shape.moe is not None and s.shape.linear_bias, np.equal(s.layouts.expert_tensor, 1)),
    ),
    Rule(
        "deepep-needs-others",
        "flex_backend: deepep needs expert x expert tensor parallel size above 1",
        "megatron/core/transformer/moe/token_dispatcher.py MoEFlexTokenDispatcher, core 0.19",
        deepep_needs_others,
        of_techniques=True,
    ),
    Rule(
        "deepep-ranks",
        f"flex_backend: deepep takes expert x expert tensor parallel sizes {', '.join(map(str, DEEPEP_RANKS))} alone",
        "deep_ep/buffer.py get_dispatch_config, DeepEP 1.2.1",
        deepep_knows_its_ranks,
        of_techniques=True,
    ),
    Rule(
        "overlapped-expert-kept",
        "overlap_shared_expert cannot recompute shared_experts",
        CONFIG,
        overlapped_expert_is_kept,
        of_techniques=True,
    ),
)
