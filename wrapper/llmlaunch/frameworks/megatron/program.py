"""What starts a Megatron-LM job: the script, its arguments, the environment, and what one node does first."""

from __future__ import annotations

from llmlaunch.errors import UserError
from llmlaunch.frameworks.argument import (
    ALLOCATOR_SETTINGS,
    ENVIRONMENT_REASONS,
    EXPANDABLE_SEGMENTS,
    RUN_DIR,
    WHOLE_SEGMENTS,
    NodeVariable,
    Reason,
    Word,
    command_words,
    merged_environment,
)
from llmlaunch.frameworks.base import Rendered, refuse_unmet, refuse_what_ifs
from llmlaunch.frameworks.framework_version import CHECKOUT_VARIABLE
from llmlaunch.frameworks.logs import any_script_lines, megatron_lines
from llmlaunch.frameworks.megatron.arguments import planned_arguments
from llmlaunch.frameworks.megatron.checkout import shipped_script
from llmlaunch.frameworks.megatron.cuda_graphs import graph_environment
from llmlaunch.frameworks.megatron.parser import rendered_version
from llmlaunch.frameworks.megatron.rules import requirements_for
from llmlaunch.frameworks.megatron.sharding import FIRST_STAGE
from llmlaunch.frameworks.megatron.techniques import technique_environment
from llmlaunch.frameworks.megatron.versions import rendered_arguments
from llmlaunch.layout import Layout
from llmlaunch.recipe.types import Recipe
from llmlaunch.trainers import MEGATRON_CHECK, MEGATRON_DATASET

CHECKER_FILE = "trainer/megatron_check.py"
INDEXER_FILE = "trainer/megatron_dataset.py"
MAMBA_KERNELS = "Mamba-2 mixers need the packages mamba-ssm, 2.3, and causal-conv1d in the job's image or environment"
MUON_PACKAGE = "Muon needs the package emerging-optimizers, 0.2 or newer, in the job's image or environment"
FUSED_KERNELS = (
    "experts with a fixed number of rows need HybridEP and the package nvidia-cudnn-frontend, 1.23 or newer, in the "
    "job's image or environment"
)
DELTA_KERNELS = "gated delta nets need the package flash-linear-attention, 0.4, in the job's image or environment"
OWN_SCRIPT = (
    "{script} trains in place of pretrain_gpt.py: memory and time are those of Megatron's own model with the recipe's "
    "shape; what the script builds beside it is not priced"
)


def rendered_program(recipe: Recipe, layout: Layout) -> Rendered:
    """Return the backend's part of a job's run directory. Raises UserError if `extra_args` or the recipe's environment
    contradicts the plan, or if no backend can run the recipe."""
    refuse_what_ifs(recipe)
    refuse_unmet(recipe, requirements_for(recipe))
    script, own = recipe.backend.script, recipe.backend.script is not None
    checkout: Word = recipe.backend.path or NodeVariable(CHECKOUT_VARIABLE)
    arguments, notes = rendered_arguments(recipe, planned_arguments(recipe, layout))
    program = (*_script(recipe), *command_words(arguments), *recipe.backend.extra_args)
    indexed = bool(recipe.data.datasets)
    checker = (*_alone(recipe, CHECKER_FILE), "--planned-for", rendered_version(recipe))
    files = {CHECKER_FILE: MEGATRON_CHECK.read_bytes()}
    files |= {INDEXER_FILE: MEGATRON_DATASET.read_bytes()} if indexed else {}
    return Rendered(
        program=program,
        environment=environment(recipe, layout),
        arguments=arguments,
        notes=(*notes, *kernel_notes(recipe), *([OWN_SCRIPT.format(script=script)] if own else [])),
        variables=variable_reasons(recipe),
        files=files,
        check=(*checker, *program),
        prepare=(*_alone(recipe, INDEXER_FILE), *program) if indexed else (),
        progress=any_script_lines(recipe.training.steps) if own else megatron_lines(),
        required_variables=() if own or recipe.backend.path else (CHECKOUT_VARIABLE,),
        python_path=(checkout,) if own else (),
    )


def kernel_notes(recipe: Recipe) -> tuple[str, ...]:
    """Return the packages that the model's kernels and Muon need where the job trains.

    Without them, core 0.19 ends the job (megatron/core/ssm, optimizer/__init__.py _get_megatron_emerging_optimizer,
    transformer/moe). Transformer Engine 2.20 would leave pages empty
    (transformer_engine/pytorch/ops/fused/grouped_mlp.py).
    """
    needs = {
        MAMBA_KERNELS: recipe.model.mamba is not None,
        DELTA_KERNELS: recipe.model.linear_attention is not None,
        MUON_PACKAGE: recipe.training.muon,
        FUSED_KERNELS: recipe.techniques.expert_rank_capacity_factor is not None,
    }
    return tuple(note for note, needed in needs.items() if needed)


def _script(recipe: Recipe) -> tuple[Word, ...]:
    """Return the training script, followed by its own arguments if it is the user's script."""
    own, checkout = recipe.backend.script, recipe.backend.path
    if own is not None:
        return (own, *recipe.backend.script_args)
    script = shipped_script(recipe)
    return (NodeVariable(CHECKOUT_VARIABLE, f"/{script}") if checkout is None else f"{checkout}/{script}",)


def _alone(recipe: Recipe, file: str) -> tuple[str | NodeVariable, ...]:
    """Return the words that start one of our scripts on one node before the training. The training script follows
    them."""
    program = (NodeVariable(RUN_DIR, f"/{file}"), "--world-size", str(recipe.world_size))
    capability = recipe.cluster.accelerator.compute_capability
    return (*program, "--compute-capability", capability) if capability else program


BLACKWELL = 10.0
CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
USUAL_CONNECTIONS = "8"  # CUDA's own default
MANY_CONNECTIONS = "32"  # the maximum: token exchanges overlap with two passes

REASONS = {
    **ENVIRONMENT_REASONS,
    "TORCH_NCCL_AVOID_RECORD_STREAMS": Reason(why="communication buffers are given back as soon as they are read"),
    CONNECTIONS: Reason(
        ("layout.tensor", "layout.context", "layout.zero_stage"),
        "1 orders collectives before the kernels they overlap with; arguments.py asserts it for tensor or context "
        "parallelism before Blackwell, refuses it for zero_stage 2 and 3, and wants more for expert communication "
        "that overlaps",
    ),
    "NVTE_CPU_OFFLOAD_V1": Reason(
        ("layout.offload_modules",),
        "Transformer Engine from 2.10 on would offload weights too, and arguments.py refuses to start without it",
    ),
    "NVTE_CUTEDSL_FUSED_GROUPED_MLP": Reason(
        ("layout.expert_rank_capacity_factor",),
        "Transformer Engine makes one kernel of a device's experts with it alone; moe/experts.py asserts it",
    ),
    "NCCL_GRAPH_REGISTER": Reason(
        ("layout.cuda_graphs",),
        "NCCL would register a graph's buffers by addresses that expandable segments unmap; arguments.py refuses it",
    ),
}


ASYNC_REASONS = {
    ALLOCATOR_SETTINGS: Reason(
        ("training.async_save",),
        "the process that writes a checkpoint reads the trainer's tensors, and cannot map those",
    )
}


def variable_reasons(recipe: Recipe) -> dict[str, Reason]:
    """Return the reason for each variable of `environment`."""
    return {**REASONS, **ASYNC_REASONS} if recipe.training.async_save else REASONS


def _refuse_one_connection(recipe: Recipe) -> None:
    if recipe.environment.get(CONNECTIONS) == "1":
        raise UserError(
            f"{recipe.path}: environment.{CONNECTIONS}: is '1', and with zero_stage 2 or 3 arguments.py wants another "
            "value: gathering would wait for computation; remove the line"
        )


def environment(recipe: Recipe, layout: Layout) -> dict[str, str]:
    """Return the environment variables of the ranks. Raises UserError if the recipe's environment sets a required
    variable to another value."""
    wanted = {
        "OMP_NUM_THREADS": "1",
        ALLOCATOR_SETTINGS: WHOLE_SEGMENTS if recipe.training.async_save else EXPANDABLE_SEGMENTS,
        "TORCH_NCCL_AVOID_RECORD_STREAMS": "1",
    }
    capability = recipe.cluster.accelerator.compute_capability
    blackwell = capability is not None and float(capability) >= BLACKWELL
    sharded = layout.zero_stage >= FIRST_STAGE
    split = layout.tensor > 1 or layout.context > 1
    exchanged = recipe.techniques.overlaps_experts
    required = {CONNECTIONS: "1"} if split and not blackwell and not sharded and not exchanged else {}
    if exchanged and not blackwell:
        wanted[CONNECTIONS] = MANY_CONNECTIONS
    if sharded:
        _refuse_one_connection(recipe)
        wanted[CONNECTIONS] = USUAL_CONNECTIONS
    required |= technique_environment(recipe.techniques) | graph_environment(recipe)
    return merged_environment(recipe, wanted, required, f"Megatron-LM with this layout ({layout.describe()})")
