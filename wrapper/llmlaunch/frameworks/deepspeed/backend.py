"""DeepSpeed as a backend: ZeRO over data parallel ranks, with the shipped training script or a person's own."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product

from llmlaunch.documents.nested import with_values
from llmlaunch.facts import MemoryFacts
from llmlaunch.frameworks.argument import RUN_DIR, NodeVariable, Word, command_words, expands_segments, refuse_repeats
from llmlaunch.frameworks.base import (
    Rendered,
    Space,
    StateTechniques,
    StepTechniques,
    refuse_unmet,
    refuse_what_ifs,
    unrendered,
)
from llmlaunch.frameworks.classed_arguments import ClassedArguments
from llmlaunch.frameworks.deepspeed.arguments import CONFIG_FILE, MODEL_FILE, REASONS, TRAINER_FILE, environment
from llmlaunch.frameworks.deepspeed.bucket_sizes import bucket_elements, live_parameters
from llmlaunch.frameworks.deepspeed.checked_settings import refuse_odd_settings, refuse_planned_settings
from llmlaunch.frameworks.deepspeed.config import (
    ds_config,
    model_config,
    refuse_what_the_trainer_cannot_build,
    settings,
    to_json,
)
from llmlaunch.frameworks.deepspeed.extra_arguments import classed_arguments
from llmlaunch.frameworks.deepspeed.facts import (
    HUGGING_FACE_KINDS,
    LOADING_NOTE,
    DeepSpeedOptions,
    bucket_bytes,
    deepspeed_facts,
    loading_facts,
    resident_facts,
    script_facts,
)
from llmlaunch.frameworks.deepspeed.family_facts import shipped_facts, with_family
from llmlaunch.frameworks.deepspeed.number_formats import adds_up_in_fp32, number_rules
from llmlaunch.frameworks.deepspeed.rules import context_sizes, tensor_sizes
from llmlaunch.frameworks.deepspeed.scripts import ScriptKind, kind_of
from llmlaunch.frameworks.deepspeed.stated_zero import setting_rules, stated_settings
from llmlaunch.frameworks.deepspeed.techniques import REQUIREMENTS, TECHNIQUE_RULES
from llmlaunch.frameworks.deepspeed.zero_settings import ZeroSettings
from llmlaunch.frameworks.logs import any_script_lines, deepspeed_lines
from llmlaunch.layout import Layout, Rule
from llmlaunch.recipe.types import Recipe
from llmlaunch.rundir.values import counted
from llmlaunch.trainers import TRAINER_MODULES

MAMBA_KERNELS = (
    "Mamba-2 mixers need the packages mamba-ssm and causal-conv1d in the job's image or environment: without them "
    "Transformers computes in torch, slower and in several times the memory, which is not what is planned"
)


class DeepSpeed:
    """ds_config.json and a training script, DeepSpeed 0.19."""

    name = "deepspeed"

    def rules(self, recipe: Recipe) -> tuple[Rule, ...]:
        """Raises UserError for a model the shipped script cannot build, or a technique nothing here runs."""
        if recipe.backend.script is None:
            refuse_what_the_trainer_cannot_build(recipe)
        refuse_unmet(recipe, REQUIREMENTS, to_render=False)
        refuse_planned_settings(recipe)
        refuse_odd_settings(recipe)
        return (*kind_of(recipe).rules, *TECHNIQUE_RULES, *number_rules(recipe), *setting_rules(recipe))

    def unrendered(self, recipe: Recipe) -> tuple[str, ...]:
        return unrendered(recipe, REQUIREMENTS)

    def space(self, recipe: Recipe) -> Space:
        """Tensor and context parallelism are searched for the shipped script on GPUs: whether a script of the person's
        own obeys them only a pin can say, and on a CPU they only cost."""
        unsplit, kind = (1,), kind_of(recipe)
        on_gpus = recipe.cluster.accelerator.kind == "gpu"
        return Space(
            tensor=tensor_sizes(recipe) if on_gpus and "tensor" in kind.searched else unsplit,
            pipeline=() if "pipeline" in kind.searched else unsplit,
            virtual_pipeline=unsplit,
            context=context_sizes(recipe) if on_gpus and "context" in kind.searched else unsplit,
            expert=unsplit,
            expert_tensor=unsplit,
            sequence_parallel=(0,),
            step_techniques=_step_techniques(recipe, kind),
            state_techniques=_state_techniques(recipe, kind.most_zero),
        )

    def facts(self, recipe: Recipe) -> MemoryFacts:
        options = _options(recipe)
        precision, facts = recipe.workload.precision, deepspeed_facts(options)
        if recipe.backend.script is not None:
            facts = script_facts(facts, recipe.backend.script_kind)
        buckets = bucket_bytes(options.reduce_bucket_elements, precision, options.zero.overlap_comm)
        facts = replace(facts, zero=replace(facts.zero, bucket_bytes=buckets))
        if recipe.backend.script is None:
            facts = shipped_facts(facts, recipe.model, recipe.workload.sequence_length)
        elif recipe.backend.script_kind in HUGGING_FACE_KINDS:
            facts = with_family(facts, recipe.model, recipe.workload.sequence_length)
        if _loads_weights(recipe):
            facts = loading_facts(facts)
        return facts if recipe.cluster.accelerator.kind == "gpu" else resident_facts(facts)

    def classed_arguments(self, recipe: Recipe, layout: Layout) -> ClassedArguments:
        """Raises UserError where one repeats a planned one."""
        return classed_arguments(recipe, layout)

    def notes(self, recipe: Recipe, layout: Layout) -> tuple[str, ...]:
        return (LOADING_NOTE,) if _loads_weights(recipe) else ()

    def always_renders(self, recipe: Recipe) -> bool:
        return False

    def render(self, recipe: Recipe, layout: Layout) -> Rendered:
        """Raises UserError where `extra_args` or the recipe's environment contradict the plan, and for what no backend
        runs."""
        refuse_what_ifs(recipe)
        refuse_unmet(recipe, REQUIREMENTS)
        refuse_planned_settings(recipe)
        refuse_odd_settings(recipe)
        kind = kind_of(recipe)
        own, planned = recipe.backend.ds_config, kind.arguments(recipe, layout)
        config = with_values(ds_config(recipe, layout), own)
        files = {CONFIG_FILE: to_json(config)}
        if recipe.backend.script is None:
            refuse_what_the_trainer_cannot_build(recipe)
            files[MODEL_FILE] = to_json(model_config(recipe))
            files |= {f"trainer/{path.name}": path.read_bytes() for path in TRAINER_MODULES}
            script: tuple[Word, ...] = (NodeVariable(RUN_DIR, f"/{TRAINER_FILE}"),)
        else:
            script = (recipe.backend.script, *recipe.backend.script_args)
        refuse_repeats(recipe, command_words(planned))
        return Rendered(
            program=(*script, *command_words(planned), *recipe.backend.extra_args),
            environment=environment(recipe),
            arguments=planned,
            notes=_notes(recipe),
            variables=REASONS,
            settings=settings(config, own),
            settings_file=CONFIG_FILE,
            files=files,
            progress=deepspeed_lines() if recipe.backend.script is None else any_script_lines(recipe.training.steps),
        )


def _loads_weights(recipe: Recipe) -> bool:
    """Whether `from_pretrained` reads a checkpoint: in the shipped script where the recipe names one, and in one of
    Hugging Face's Trainer, whose model has a name."""
    if recipe.backend.script is None:
        return recipe.training.start_from is not None
    return recipe.backend.script_kind == "hugging-face"


def _notes(recipe: Recipe) -> tuple[str, ...]:
    """Return what a person should know of the model's kernels and of the script's evaluation."""
    kernels = () if recipe.model.mamba is None else (MAMBA_KERNELS,)
    evaluation = recipe.training.evaluation
    if evaluation is None or recipe.backend.script is None or recipe.backend.script_kind != "hugging-face":
        return kernels
    return (
        *kernels,
        "training.evaluation.iterations: Hugging Face's Trainer goes through all validation data each time; the time "
        f"is that of {counted(evaluation.iterations, 'batch')}",
    )


def _step_techniques(recipe: Recipe, kind: ScriptKind) -> tuple[StepTechniques, ...]:
    """Return what the script recomputes and offloads, each as it is and in pieces of the sequence where it can run in
    them. On a CPU nothing is offloaded, and memory is not what a search is short of."""
    if recipe.cluster.accelerator.kind != "gpu":
        return tuple(step for step in kind.step_techniques if not step.offload_checkpoints)
    tiles = [StepTechniques(), *(StepTechniques(loss="tiled", loss_tiles=count) for count in kind.loss_tiles)]
    chunks = (1, *kind.mlp_chunks)
    if recipe.model.moe is not None:
        tiles, chunks = tiles[:1], chunks[:1]
    return tuple(
        replace(step, loss=tiled.loss, loss_tiles=tiled.loss_tiles, mlp_chunks=pieces)
        for tiled, pieces in product(tiles, chunks)
        for step in kind.step_techniques
    )


def _state_techniques(recipe: Recipe, most: int) -> tuple[StateTechniques, ...]:
    """On a CPU the host is the device: nothing leaves it."""
    stages = tuple(
        StateTechniques(zero_stage=stage, gradient_dtype=recipe.training.gradient_dtype) for stage in range(most + 1)
    )
    if recipe.cluster.accelerator.kind != "gpu":
        return stages
    offloaded = tuple(replace(choice, offload_optimizer=1.0) for choice in stages[1:])
    streamed = (replace(offloaded[-1], offload_parameters=True),) if most == 3 else ()
    return (*stages, *offloaded, *streamed)


def _options(recipe: Recipe) -> DeepSpeedOptions:
    """What is rendered: a model made in shards, buckets and limits as in ds_config.json. A script of the person's own
    is taken to make its model under zero.Init, as Hugging Face's Trainer does. On a CPU the host is the device: no
    state leaves it."""
    leaving = recipe.techniques.offload_optimizer if recipe.cluster.accelerator.kind == "gpu" else 0.0
    return DeepSpeedOptions(
        precision=recipe.workload.precision,
        accumulation="fp32" if adds_up_in_fp32(recipe) else None,
        offload_optimizer=leaving == 1.0,
        fused_optimizer=_fused_optimizer(recipe),
        eager_attention=_eager_attention(recipe),
        offloaded_share=leaving % 1.0,
        reduce_bucket_elements=bucket_elements(recipe),
        zero=_zero_settings(recipe),
        split_from_start=True,
        expandable_segments=expands_segments(recipe),
    )


def _zero_settings(recipe: Recipe) -> ZeroSettings:
    return stated_settings(recipe, bucket_elements(recipe), live_parameters(recipe))


def _fused_optimizer(recipe: Recipe) -> bool:
    """Whether AdamW is surely fused: the shipped script's is, and that of Hugging Face's Trainer unless it is told
    otherwise (transformers/training_args.py `default_optim`, 5.23 on torch 2.8 and later). Of other scripts nothing is
    known, and one that is not fused takes more."""
    if recipe.backend.script is None:
        return True
    other = re.search(r"--optim[= ]adamw_torch(?!_fused)", _script_words(recipe))
    return recipe.backend.script_kind == "hugging-face" and not other


def _eager_attention(recipe: Recipe) -> bool:
    """Whether a script of the person's own is told to write attention scores out, by the name that Transformers' and
    TRL's scripts have for it."""
    return bool(re.search(r"--attn[-_]implementation[= ]eager\b", _script_words(recipe)))


def _script_words(recipe: Recipe) -> str:
    """Return the arguments of a script of the person's own as one text."""
    backend = recipe.backend
    return " ".join(map(str, (*backend.script_args, *backend.extra_args))) if backend.script is not None else ""
