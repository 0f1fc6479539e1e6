"""The command line of Megatron-LM's `pretrain_gpt.py`, core 0.19.

Every flag here stands in the parser of megatron-core 0.19.2; unknown flags are fatal there, abbreviations too.
Uneven stages have three notations beside even ones, which exclude each other (transformer_config.py __post_init__,
arguments.py validate_args): layer counts of the first and the last rank, a layer's place for the embedding or the loss,
and all stages written out.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from itertools import groupby

from llmlaunch.errors import UserError
from llmlaunch.frameworks.argument import Argument, argument, flag_groups, optional
from llmlaunch.frameworks.megatron.cuda_graphs import graph_arguments
from llmlaunch.frameworks.megatron.hybrid import pattern_arguments
from llmlaunch.frameworks.megatron.model_arguments import model_arguments
from llmlaunch.frameworks.megatron.own_choices import own_choices
from llmlaunch.frameworks.megatron.sharding import sharding_arguments
from llmlaunch.frameworks.megatron.techniques import overlap_arguments, technique_arguments
from llmlaunch.frameworks.megatron.training_arguments import checkpoint_arguments, data_arguments, training_arguments
from llmlaunch.frameworks.megatron.versions import core_parser, rendered_version
from llmlaunch.layout import Layout
from llmlaunch.models.shape import ModelShape
from llmlaunch.recipe.types import Recipe
from llmlaunch.techniques import Techniques

__all__ = ["PLANNED_BY", "STAGE_FLAGS", "decided_names", "planned_arguments", "stage_flags"]


def planned_arguments(recipe: Recipe, layout: Layout) -> tuple[Argument, ...]:
    """Return the arguments of the script without `backend.extra_args`, each with the recipe keys that decide it. Where
    those choose what no key says, the choice takes the place of the planned argument.

    Raises:
        UserError: `backend.extra_args` repeats or contradicts a planned argument.
    """
    planned = (
        *model_arguments(recipe),
        *_parallel_arguments(recipe.model, recipe.techniques, layout),
        *sharding_arguments(recipe, layout),
        *technique_arguments(recipe, layout),
        *overlap_arguments(recipe),
        *graph_arguments(recipe, rendered_version(recipe)),
        *training_arguments(recipe, layout),
        *data_arguments(recipe, layout),
        *checkpoint_arguments(recipe, layout),
    )
    own = own_choices(recipe)
    planned = tuple(each for each in planned if _parsed_name(recipe, each.flag) not in own)
    _refuse_contradictions(recipe, planned)
    return planned


def _parallel_arguments(shape: ModelShape, techniques: Techniques, layout: Layout) -> tuple[Argument, ...]:
    """Return the sizes of all parallel groups, the stages, and the overlap of gradient and parameter communication."""
    expert, expert_tensor = (layout.expert, layout.expert_tensor) if shape.moe is not None else (None, None)
    default = "its default is the tensor parallel size, not 1"
    sharded, why = layout.zero_stage == 1, "hides communication"
    return (
        argument("--tensor-model-parallel-size", layout.tensor, of="layout.tensor"),
        argument("--pipeline-model-parallel-size", layout.pipeline, of="layout.pipeline"),
        argument("--context-parallel-size", layout.context, of="layout.context"),
        *(
            _stage_arguments(layout, shape.mtp_num_layers, techniques.heads_before_loss)
            if shape.mamba is None
            else pattern_arguments(shape, shape.mamba, layout)
        ),
        *optional("--sequence-parallel", bool(layout.sequence_parallel), of="layout.sequence_parallel"),
        *optional("--expert-model-parallel-size", expert, of="layout.expert"),
        *optional("--expert-tensor-parallel-size", expert_tensor, of="layout.expert_tensor", why=default),
        *optional("--use-distributed-optimizer", sharded, of="layout.zero_stage"),
        *optional("--overlap-grad-reduce", sharded, of="layout.zero_stage", why=why),
        *optional("--overlap-param-gather", sharded, of="layout.zero_stage", why=why),
    )


Words = tuple[str, ...]
Split = tuple[int, ...]

FIRST, LAST = "--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers"
EMBEDDING, LOSS = "--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split"
CHUNKS, WRITTEN = "--num-virtual-stages-per-pipeline-rank", "--pipeline-model-parallel-layout"
# none of them may stand in backend.extra_args
STAGE_FLAGS = (FIRST, LAST, EMBEDDING, LOSS, CHUNKS, WRITTEN, "--num-layers-per-virtual-pipeline-stage")


def stage_flags(layout: Layout, mtp_layers: int = 0, before_loss: bool = False) -> Words:
    """The flags of the stages of `layout`. `mtp_layers` heads of multi-token prediction stand before the loss, on the
    last stage, where Megatron puts them without a layout too, or on the stage before it (`before_loss`)."""
    chunks = (CHUNKS, str(layout.virtual_pipeline)) if layout.virtual_pipeline > 1 else ()
    if before_loss and layout.uneven:
        return (WRITTEN, written_layout(layout.layers_by_stage, mtp_layers, before_loss))
    if len(set(layout.layers_by_stage)) <= 1:
        return chunks
    for notation in (_first_and_last, _slots):
        flags = notation(layout)
        if flags is not None:
            return (*flags, *chunks)
    return (WRITTEN, written_layout(layout.layers_by_stage, mtp_layers))


def _stage_arguments(layout: Layout, mtp_layers: int, before_loss: bool) -> tuple[Argument, ...]:
    """`stage_flags` with what each follows from."""
    split = ("layout.layers_by_stage", "layout.mtp_stage") if before_loss else "layout.layers_by_stage"
    keys: dict[str, str | tuple[str, ...]] = {CHUNKS: "layout.virtual_pipeline"}
    groups = (map(str, group) for group in flag_groups(stage_flags(layout, mtp_layers, before_loss)))
    return tuple(argument(flag, *values, of=keys.get(flag, split)) for flag, *values in groups)


def _first_and_last(layout: Layout) -> Words | None:
    """Layers of the first and the last rank, where all its chunks are alike and so are the ranks between."""
    p, split = layout.pipeline, layout.layers_by_stage
    ranks = split[:p]
    if split != ranks * layout.virtual_pipeline or not all(ranks):
        return None
    first, last = ranks[0] * layout.virtual_pipeline, ranks[-1] * layout.virtual_pipeline
    if p == 2:  # both counts leave no rank between, which transformer_layer.py divides by where ranks have chunks
        return (FIRST, str(first))
    middle = set(ranks[1:-1])
    if len(middle) != 1:
        return None
    usual = middle.pop()
    flags = (FIRST, str(first)) if ranks[0] != usual else ()
    return (*flags, *((LAST, str(last)) if ranks[-1] != usual else ()))


def _slots(layout: Layout) -> Words | None:
    """The first virtual stage holds one layer less for the embedding, the last one for the loss."""
    split = layout.layers_by_stage
    usual = max(split)
    embedding, loss = split[0] < usual, split[-1] < usual
    if split != (usual - embedding, *(usual,) * (len(split) - 2), usual - loss):
        return None
    return (*((EMBEDDING,) if embedding else ()), *((LOSS,) if loss else ()))


def written_layout(split: Split, mtp_layers: int = 0, before_loss: bool = False) -> str:
    """The stages written out: E embedding, t layer, m prediction head, L loss, | between stages, *n repeats
    (core/transformer/pipeline_parallel_layer_layout.py parse_str_to_list): "Et*3|(t*4|)*2t*3mL"."""
    stages = [_repeated("t", count) for count in split]
    stages[0] = "E" + stages[0]
    stages[-2 if before_loss else -1] += _repeated("m", mtp_layers)
    *before, last = stages
    runs = ((stage, len(list(run))) for stage, run in groupby(before))
    text = "".join(f"{stage}|" if times == 1 else f"({stage}|)*{times}" for stage, times in runs)
    return text + last + "L"


def _repeated(letter: str, times: int) -> str:
    return letter * times if times < 3 else f"{letter}*{times}"


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
    "activation_offload_fraction": "layout.offload_fraction",
    "num_distributed_optimizer_instances": "layout.optimizer_instances",
    "optimizer_cpu_offload": "layout.offload_optimizer",
    "optimizer_offload_fraction": "layout.offload_optimizer",
    "cross_entropy_loss_fusion": "layout.loss",
    "cross_entropy_fusion_impl": "layout.loss",
    "mlp_chunks_for_training": "layout.mlp_chunks",
    "overlap_moe_expert_parallel_comm": "layout.overlap_expert_communication",
    "tp_comm_overlap": "layout.tp_comm_overlap",
    "delay_wgrad_compute": "layout.delay_weight_gradients",
    "cuda_graph_impl": "layout.cuda_graphs",
    "cuda_graph_modules": "layout.cuda_graphs",
    "cuda_graph_scope": "layout.cuda_graphs",
    "cuda_graph_scope_deprecated": "layout.cuda_graphs",
    "enable_cuda_graph": "layout.cuda_graphs",
    "external_cuda_graph": "layout.cuda_graphs",
    "moe_token_dispatcher_type": "layout.token_dispatcher",
    "moe_expert_rank_capacity_factor": "layout.expert_rank_capacity_factor",
    "moe_paged_stash": "layout.paged_stash",
    "moe_paged_stash_page_size": "layout.paged_stash",
    "moe_paged_stash_buffer_size_factor_cuda": "layout.paged_stash",
    "moe_paged_stash_buffer_size_factor_cpu": "layout.paged_stash",
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
    "train_data_path": "data.path",
    "valid_data_path": "data.validation",
    "per_split_data_args_path": "data.validation",
    "eval_micro_batch_size": "layout.micro_batch_size",
    "eval_global_batch_size": "training.global_batch_size",
    "num_experts": "model.moe",
    "hybrid_layer_pattern": "model.mamba",
    "hybrid_override_pattern": "model.mamba",
    "mtp_hybrid_override_pattern": "model.mamba",
}


def _refuse_contradictions(recipe: Recipe, planned: Iterable[Argument]) -> None:
    """Raise UserError for a flag of the person's own (`backend.extra_args`, `backend.script_args`) that repeats or
    contradicts a planned argument.

    The parser keeps one value under each name (`dest`), whichever flag sets it: of two flags with one `dest` the later
    would win silently. So flags are compared by `dest`, as the parser of the recipe's version has it (versions.py).
    """
    name, decided = partial(_parsed_name, recipe), decided_names(recipe)
    mine = {name(each.flag): each for each in planned}
    extra = [("extra_args", word) for word in recipe.backend.extra_args]
    for key, word in [*extra, *(("script_args", word) for word in recipe.backend.script_args)]:
        flag = word.split("=", 1)[0]
        if not flag.startswith("--"):
            continue
        if name(flag) in mine:
            raise UserError(f"{recipe.path}: backend.{key}: {_again(flag, mine[name(flag)])}")
        if name(flag) in decided:
            raise UserError(
                f"{recipe.path}: backend.{key}: {flag} would change what is planned; say it as "
                f"{decided[name(flag)]} and remove it there"
            )


def decided_names(recipe: Recipe) -> dict[str, str]:
    """Return the names (`dest`) of flags that no recipe may pass on by itself, each with the recipe key to use."""
    decided = {_parsed_name(recipe, flag): "layout.layers_by_stage" for flag in STAGE_FLAGS} | PLANNED_BY
    own = own_choices(recipe)
    return {name: key for name, key in decided.items() if name not in own}


def _parsed_name(recipe: Recipe, option: str) -> str:
    flags = core_parser(rendered_version(recipe)).flags
    return flags[option].dest if option in flags else option.lstrip("-").replace("-", "_")


def _again(flag: str, each: Argument) -> str:
    same = "" if flag == each.flag else f" says what {each.flag} does, and that"
    by = f" (by {', '.join(each.reason.keys)})" if each.reason.keys else ""
    return f"{flag}{same} is planned by llmlaunch already{by}; say it in the recipe and remove it there"
