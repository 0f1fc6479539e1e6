"""The command line of Megatron-LM's `pretrain_gpt.py`, core 0.19.

Every flag here stands in the parser of megatron-core 0.19.2; unknown flags are fatal there, abbreviations too.
"""

from __future__ import annotations

from collections.abc import Iterable

from llmlaunch.backends.argument import Argument
from llmlaunch.backends.megatron.layout_arguments import STAGE_FLAGS, parallel_arguments
from llmlaunch.backends.megatron.model_arguments import model_arguments
from llmlaunch.backends.megatron.overlap import overlap_arguments
from llmlaunch.backends.megatron.sharding import sharding_arguments
from llmlaunch.backends.megatron.techniques import technique_arguments
from llmlaunch.backends.megatron.training_arguments import checkpoint_arguments, data_arguments, training_arguments
from llmlaunch.backends.megatron.versions import core_parser, rendered_version
from llmlaunch.errors import UserError
from llmlaunch.layout import Layout
from llmlaunch.recipe.types import Recipe

__all__ = ["PLANNED_BY", "planned_arguments", "refuse_contradictions"]


def planned_arguments(recipe: Recipe, layout: Layout) -> tuple[Argument, ...]:
    """All that stands after the script's name but `backend.extra_args`, each with what it follows from.

    Raises:
        UserError: `backend.extra_args` contradicts what is planned here (extra_words.py).
    """
    planned = (
        *model_arguments(recipe),
        *parallel_arguments(recipe.model, layout),
        *sharding_arguments(recipe, layout),
        *technique_arguments(recipe, layout),
        *overlap_arguments(recipe),
        *training_arguments(recipe, layout),
        *data_arguments(recipe, layout),
        *checkpoint_arguments(recipe, layout),
    )
    refuse_contradictions(recipe, planned)
    return planned


# What the plan decides even where it renders nothing for it, by the parser's name for it, and the recipe key that says
# it. Beside the plan it would make the job another one than was priced.
PLANNED_BY = {
    "use_distributed_optimizer": "layout.zero_stage",
    "use_megatron_fsdp": "layout.zero_stage",
    "use_torch_fsdp2": "layout.zero_stage",
    "data_parallel_sharding_strategy": "layout.zero_stage",
    "sequence_parallel": "layout.sequence_parallel",
    "expert_model_parallel_size": "layout.expert",
    "expert_tensor_parallel_size": "layout.expert_tensor",
    "recompute_activations": "layout.recompute",
    "recompute_granularity": "layout.recompute",
    "recompute_modules": "layout.recompute_modules",
    "recompute_method": "layout.recompute_method",
    "recompute_num_layers": "layout.recompute_layers",
    "cpu_offloading_num_layers": "layout.offload_layers",
    "fine_grained_activation_offloading": "layout.offload_modules",
    "offload_modules": "layout.offload_modules",
    "optimizer_cpu_offload": "layout.offload_optimizer",
    "optimizer_offload_fraction": "layout.offload_optimizer",
    "cross_entropy_loss_fusion": "layout.loss",
    "cross_entropy_fusion_impl": "layout.loss",
    "mlp_chunks_for_training": "layout.mlp_chunks",
    "overlap_moe_expert_parallel_comm": "layout.overlap_expert_communication",
    "tp_comm_overlap": "layout.tp_comm_overlap",
    "delay_wgrad_compute": "layout.delay_weight_gradients",
    "moe_token_dispatcher_type": "layout.token_dispatcher",
    "fp16": "training.precision",
    "bf16": "training.precision",
    "fp8": "training.fp8",
    "grad_reduce_in_bf16": "training.gradient_dtype",
    "accumulate_allreduce_grads_in_fp32": "training.gradient_dtype",
    "train_samples": "training.steps",
    "pretrained_checkpoint": "training.start_from",
    "finetune": "training.start_from",
    "mock_data": "data.mock",
    "data_path": "data.path",
    "data_args_path": "data.blend",
    "num_experts": "model.moe",
}


def refuse_contradictions(recipe: Recipe, planned: Iterable[Argument]) -> None:
    """Raises UserError for a word of `backend.extra_args` that says again, or otherwise, what is planned."""
    flags = core_parser(rendered_version(recipe)).flags

    def name(flag: str) -> str:
        return flags[flag].dest if flag in flags else flag.lstrip("-").replace("-", "_")

    mine = {name(each.flag): each for each in planned}
    decided = {name(flag): "layout.layers_by_stage" for flag in STAGE_FLAGS} | PLANNED_BY
    for word in recipe.backend.extra_args:
        said = word.split("=", 1)[0]
        if not said.startswith("--"):
            continue
        if name(said) in mine:
            raise UserError(f"{recipe.path}: backend.extra_args: {_again(said, mine[name(said)])}")
        if name(said) in decided:
            raise UserError(
                f"{recipe.path}: backend.extra_args: {said} would change what is planned; say it as "
                f"{decided[name(said)]} and remove it there"
            )


def _again(said: str, each: Argument) -> str:
    same = "" if said == each.flag else f" says what {each.flag} does, and that"
    by = f" (by {', '.join(each.reason.keys)})" if each.reason.keys else ""
    return f"{said}{same} is planned by llmlaunch already{by}; say it in the recipe and remove it there"
