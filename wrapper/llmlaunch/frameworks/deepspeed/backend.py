"""DeepSpeed as a backend: ZeRO over data parallel ranks, with the shipped training script or a person's own, what a
recipe's `backend.ds_config` says of ZeRO, and the classes of a person's own arguments."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np

from llmlaunch.columns import BoolColumn
from llmlaunch.documents.nested import value_at, with_values
from llmlaunch.errors import UserError
from llmlaunch.facts import Gathering, MemoryFacts
from llmlaunch.frameworks.argument import RUN_DIR, NodeVariable, Word, command_words, expands_segments, refuse_repeats
from llmlaunch.frameworks.base import (
    ProgressLines,
    Rendered,
    Space,
    StateTechniques,
    StepTechniques,
    refuse_unmet,
    refuse_what_ifs,
    unrendered,
)
from llmlaunch.frameworks.classed_arguments import (
    BY_WORD,
    DECIDES,
    NEUTRAL,
    NO_FLAG,
    OF_THE_SCRIPT,
    PRICED,
    UNKNOWN,
    ClassedArgument,
    ClassedArguments,
    FlagClass,
    class_arguments,
    flags_with_values,
    group_of,
)
from llmlaunch.frameworks.deepspeed.arguments import CONFIG_FILE, MODEL_FILE, REASONS, TRAINER_FILE, environment
from llmlaunch.frameworks.deepspeed.config import (
    ds_config,
    model_config,
    refuse_odd_settings,
    refuse_planned_settings,
    refuse_what_the_trainer_cannot_build,
    settings,
    to_json,
)
from llmlaunch.frameworks.deepspeed.facts import (
    DEFAULT_GATHERING,
    HUGGING_FACE_KINDS,
    LOADING_NOTE,
    DeepSpeedOptions,
    ZeroSettings,
    bucket_bytes,
    deepspeed_facts,
    loading_facts,
    resident_facts,
    script_facts,
)
from llmlaunch.frameworks.deepspeed.family_facts import shipped_facts, with_family
from llmlaunch.frameworks.deepspeed.number_formats import adds_up_in_fp32, number_rules, optimizer_states
from llmlaunch.frameworks.deepspeed.own_settings import AUTO, bucket_elements, live_parameters, own_number, set_keys
from llmlaunch.frameworks.deepspeed.rules import PACKED_RULES, context_sizes, tensor_sizes
from llmlaunch.frameworks.deepspeed.scripts import ScriptKind, kind_of
from llmlaunch.frameworks.deepspeed.settings import SETTINGS, setting_groups
from llmlaunch.frameworks.deepspeed.techniques import REQUIREMENTS, TECHNIQUE_RULES
from llmlaunch.frameworks.deepspeed.trainer_table import is_of_named_trainers, shipped_groups, trainer_group
from llmlaunch.frameworks.logs import any_script_lines, deepspeed_lines
from llmlaunch.layout import Layout, Rule, Situation
from llmlaunch.recipe.types import Recipe
from llmlaunch.rundir.foreign_values import is_whole_number
from llmlaunch.rundir.values import counted
from llmlaunch.trainers import TRAINER_MODULES

# transformers/integrations/deepspeed.py deepspeed_optim_sched, 5.23
OPTIMIZER_OF_THE_FILE = FlagClass(NEUTRAL, "the Trainer takes the optimizer that ds_config.json names")
WEIGHT_FORMATS, NARROW = ("torch_dtype", "dtype"), (("bfloat16",), ("bf16",), ("float16",), ("fp16",))
# transformers/trainer.py, 5.23: without DeepSpeed nothing casts, and torch's AdamW has states in the weights' format
NARROW_STATES = FlagClass(
    UNKNOWN, "without DeepSpeed gradients and optimizer states are bf16 or fp16, too", effect=DECIDES
)
# transformers/training_args.py, 5.23: nothing is evaluated unless one of these is set
EVALUATION_SWITCHES = ("do_eval", "do_predict", "eval_on_start", "eval_strategy", "evaluation_strategy")
EVALUATION_BATCH = "per_device_eval_batch_size"
EVALUATION_SEQUENCES = 8  # its default


def classed_arguments(recipe: Recipe, layout: Layout) -> ClassedArguments:
    """Return the class of each argument of the person's own.

    Raises:
        UserError: one of them repeats a planned one, as rendering it would.
    """
    settings = tuple(_classed_settings(recipe))
    if not (recipe.backend.extra_args or recipe.backend.script_args):
        return ClassedArguments(settings)
    refuse_repeats(recipe, _planned_words(recipe, layout))
    kind = "shipped" if recipe.backend.script is None else recipe.backend.script_kind
    classed = class_arguments(recipe, lambda flag, values, of_script: _class_of(recipe, layout, kind, flag, values))
    return ClassedArguments((*classed.arguments, *settings))


def _classed_settings(recipe: Recipe) -> Iterator[ClassedArgument]:
    """Yield each key of `backend.ds_config` with its class."""
    for key, value in set_keys(recipe.backend.ds_config):
        shown = value if isinstance(value, str) else json.dumps(value)
        group = group_of(setting_groups(), key, (shown,))
        known = NO_FLAG if group is None else group.flag_class
        flag_class = BY_WORD if key in recipe.backend.neutral_args else known
        yield ClassedArgument(f"backend.ds_config.{key}", (shown,), flag_class)


def _planned_words(recipe: Recipe, layout: Layout) -> tuple[Word, ...]:
    """Return the words that would be rendered; none of a recipe that can only be priced, as rendering it would say."""
    try:
        return () if recipe.techniques.what_ifs else command_words(kind_of(recipe).arguments(recipe, layout))
    except UserError:
        return ()


def _class_of(recipe: Recipe, layout: Layout, kind: str, flag: str, values: tuple[str, ...]) -> FlagClass:
    """Return the class of a flag. What the recipe says too is priced as it says. A script of one's own may know nothing
    of the recipe: what a recipe key says of the job is said to it in its own words, so there such a flag is the
    script's."""
    name = flag.lstrip("-").replace("-", "_")
    group = group_of(shipped_groups(), name, values) if kind == "shipped" else trainer_group(name, values)
    if group is None:
        return NO_FLAG if kind == "shipped" else OF_THE_SCRIPT
    if kind in ("own", "pipeline") and (group.flag_class.key or is_of_named_trainers(group)):
        return OF_THE_SCRIPT
    if kind == "hugging-face" and _is_said(recipe, group.flag_class.key, values):
        return FlagClass(PRICED, "the recipe says it too", group.flag_class.key)
    if kind == "hugging-face" and name.startswith("optim") and "optimizer" in recipe.backend.ds_config:
        return OPTIMIZER_OF_THE_FILE
    if kind == "hugging-face" and name in WEIGHT_FORMATS and values[:1] in NARROW and _may_replicate(recipe, layout):
        return NARROW_STATES
    if kind == "hugging-face" and group.flag_class.key == "training.evaluation":
        return _validation_class(recipe, group.flag_class, layout)
    return group.flag_class


def _may_replicate(recipe: Recipe, layout: Layout) -> bool:
    """Return whether the recipe may have been read of a script that trains by torch's own data parallelism."""
    return layout.zero_stage == 0 and not recipe.backend.ds_config and recipe.techniques.adapters is None


def _validation_class(recipe: Recipe, flag_class: FlagClass, layout: Layout) -> FlagClass:
    """Return the class of a flag about validation: neutral without validation, else by how many sequences it validates
    at once."""
    values_of = {
        flag.lstrip("-").replace("-", "_"): values for flag, values in flags_with_values(recipe.backend.script_args)
    }
    switches = (trainer_group(name, values_of[name]) for name in EVALUATION_SWITCHES if name in values_of)
    if not any(group is not None and group.flag_class.key == flag_class.key for group in switches):
        return FlagClass(NEUTRAL, "nothing turns validation on")
    size = next(iter(values_of.get(EVALUATION_BATCH, ())), "")
    sequences = int(size) if is_whole_number(size) else EVALUATION_SEQUENCES
    if sequences <= layout.micro_batch_size:
        return FlagClass(NEUTRAL, "validation of no more sequences than a micro-batch keeps less than training on them")
    return replace(flag_class, times=sequences / layout.micro_batch_size)


def _is_said(recipe: Recipe, key: str, values: tuple[str, ...]) -> bool:
    """Return whether the recipe says of adapters or of the sequence's length what a flag of these keys says."""
    if key == "training.adapters":
        return recipe.techniques.adapters is not None
    return "training.sequence_length" in key and values == (str(recipe.workload.sequence_length),)


ZERO = "zero_optimization"


def stated_settings(recipe: Recipe, bucket: int, live: int) -> ZeroSettings:
    """Return the settings of a rendered job: those of `backend.ds_config` over what llmlaunch renders, which prefetches
    a `bucket` and lets `live` parameters live. "auto" is what Hugging Face's Trainer fills in
    (transformers/integrations/deepspeed.py trainer_config_finalize, 5.23).

    Raises:
        UserError: a size is no whole number of at least 0.
    """
    limits: dict[str, Any] = {"prefetch_elements": bucket, "live_elements": live, "reuse_elements": live}
    for row in SETTINGS:
        if not row.prices:
            continue
        default = getattr(DEFAULT_GATHERING, row.prices)
        number = own_number(recipe, row.key, row.automatic(recipe) if row.automatic is not None else default)
        if number is not None and row.prices != "live_elements":
            limits[row.prices] = number
    limits["sequential"] = value_at(recipe.backend.ds_config, f"{ZERO}.stage3_allgather_sequential") is True
    return ZeroSettings(
        gathering=Gathering(**limits),
        sub_group_elements=own_number(recipe, f"{ZERO}.sub_group_size", 0) or None,
        secondary_ranks=own_number(recipe, f"{ZERO}.zero_hpz_partition_size", 1) or 1,
        overlap_comm=_switch(recipe, "overlap_comm", recipe.cluster.accelerator.kind == "gpu"),
        contiguous_gradients=_switch(recipe, "contiguous_gradients", True),
        memory_efficient_linear=_switch(recipe, "memory_efficient_linear", True),
        optimizer_states=optimizer_states(recipe),
    )


def setting_rules(recipe: Recipe) -> tuple[Rule, ...]:
    """Return the rules of keys of `backend.ds_config` that DeepSpeed refuses with some layouts."""
    ranks = own_number(recipe, f"{ZERO}.zero_hpz_partition_size", 1) or 1
    rules = list(_version_rules(recipe))
    if ranks > 1:
        rules.append(
            Rule(
                "second-shards",
                f"zero_hpz_partition_size {ranks} must divide the number of devices",
                "deepspeed/utils/groups.py _create_zero_param_parallel_group, 0.19.8",
                lambda s: np.full(len(s.layouts), s.world_size % min(ranks, s.world_size) == 0),
            )
        )
    return tuple(rules)


def _version_rules(recipe: Recipe) -> Iterator[Rule]:
    """Yield a rule for each split whose keys the job's DeepSpeed does not have, where its version is known."""
    version = recipe.backend.runs_version
    missing = {row.splits: row for row in SETTINGS if row.splits and version is not None and not row.is_in(version)}
    for split, row in missing.items():
        yield Rule(
            f"{split}-version",
            f"{split} above 1 is rendered with {row.key}, which DeepSpeed {version} does not have (it came with "
            f"{row.since}); set {split} to 1 or use a newer version",
            "llmlaunch/frameworks/deepspeed/settings.py SETTINGS",
            partial(_is_whole, split=split),
        )


def _is_whole(s: Situation, split: str) -> BoolColumn:
    unsplit: BoolColumn = np.equal(getattr(s.layouts, split), 1)
    return unsplit


def _switch(recipe: Recipe, key: str, rendered: bool) -> bool:
    value = value_at(recipe.backend.ds_config, f"{ZERO}.{key}")
    return rendered if value is None or value == AUTO else value is True


MAMBA_KERNELS = (
    "Mamba-2 mixers need the packages mamba-ssm and causal-conv1d in the job's image or environment: without them "
    "Transformers computes in torch, slower and in several times the memory, which is not what is planned"
)

PACKED_ROWS = (
    "data.packed: global_batch_size counts sequences of several rows. A mask keeps rows apart, so that attention works "
    "out the whole square, in twice the time at least, and a layer that is not recomputed keeps a copy of the mask"
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
        packed = PACKED_RULES if recipe.data.packed else ()
        return (*kind_of(recipe).rules, *packed, *TECHNIQUE_RULES, *number_rules(recipe), *setting_rules(recipe))

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
            facts = shipped_facts(facts, recipe.model, recipe.workload.sequence_length, recipe.data.packed)
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
            progress=_progress(recipe),
        )


def _progress(recipe: Recipe) -> ProgressLines:
    training = recipe.training
    if recipe.backend.script is not None:
        return any_script_lines(training.steps)
    return deepspeed_lines(exports=training.export is not None)


def _loads_weights(recipe: Recipe) -> bool:
    """Whether `from_pretrained` reads a checkpoint: in the shipped script where the recipe names one, and in one of
    Hugging Face's Trainer, whose model has a name."""
    if recipe.backend.script is None:
        return recipe.training.start_from is not None
    return recipe.backend.script_kind == "hugging-face"


def _notes(recipe: Recipe) -> tuple[str, ...]:
    """Return what a person should know of the model's kernels and of the script's evaluation."""
    kernels = () if recipe.model.mamba is None else (MAMBA_KERNELS,)
    if recipe.data.packed:
        kernels = (*kernels, PACKED_ROWS)
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
