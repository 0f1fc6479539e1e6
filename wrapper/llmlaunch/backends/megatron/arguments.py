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
    """Return the arguments of the script without `backend.extra_args`, each with the recipe keys that decide it.

    Raises:
        UserError: `backend.extra_args` repeats or contradicts a planned argument.
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


# What the plan decides even where it renders no flag for it: the parser's `dest` and the recipe key to use instead. Set
# in `backend.extra_args` it would change the job that was priced.
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
    """Raise UserError for a flag in `backend.extra_args` that repeats or contradicts a planned argument.

    The parser keeps one value under each name (`dest`), whichever flag sets it: of two flags with one `dest` the later
    would win silently. So flags are compared by `dest`, as the parser of the recipe's version has it (versions.py).
    """
    flags = core_parser(rendered_version(recipe)).flags

    def name(option: str) -> str:
        return flags[option].dest if option in flags else option.lstrip("-").replace("-", "_")

    mine = {name(each.flag): each for each in planned}
    decided = {name(flag): "layout.layers_by_stage" for flag in STAGE_FLAGS} | PLANNED_BY
    for word in recipe.backend.extra_args:
        flag = word.split("=", 1)[0]
        if not flag.startswith("--"):
            continue
        if name(flag) in mine:
            raise UserError(f"{recipe.path}: backend.extra_args: {_again(flag, mine[name(flag)])}")
        if name(flag) in decided:
            raise UserError(
                f"{recipe.path}: backend.extra_args: {flag} would change what is planned; say it as "
                f"{decided[name(flag)]} and remove it there"
            )


def _again(flag: str, each: Argument) -> str:
    same = "" if flag == each.flag else f" says what {each.flag} does, and that"
    by = f" (by {', '.join(each.reason.keys)})" if each.reason.keys else ""
    return f"{flag}{same} is planned by llmlaunch already{by}; say it in the recipe and remove it there"
