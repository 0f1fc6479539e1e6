"""Whether a checkpoint of Megatron-LM or Megatron-Bridge matches the job that would go on from it: its split, format,
model, optimizer and schedule."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from itertools import product
from math import prod
from pathlib import Path

from llmlaunch.errors import UserError
from llmlaunch.findings import NOTE, Finding, doubtful, missing, note
from llmlaunch.frameworks.argument import flag_groups
from llmlaunch.frameworks.checkpoints import KEY, NEW_FOLDER
from llmlaunch.frameworks.megatron.parser import rendered_version
from llmlaunch.frameworks.megatron.saved_job import RUN_CONFIG, SavedJob, bridge_job, megatron_job, sizes_in
from llmlaunch.frameworks.resharding import FSDP_STAGE, MODEL_SPLIT, RESHARDING_FLAG
from llmlaunch.layout import Layout
from llmlaunch.recipe.types import Recipe

# Names of megatron/training/checkpointing.py get_checkpoint_name, core 0.19: tensor rank, then pipeline rank where
# there is a pipeline, then expert rank where experts are spread.
SPLIT_FOLDER = re.compile(r"mp_rank_(\d{1,6})(?:_(\d{1,6}))?(?:_(\d{1,6}))?")
# Words of the person's own that decide what is loaded, and how.
OTHER_LOADING = frozenset(
    (
        *("--load", "--ckpt-step", "--finetune", "--use-checkpoint-args", "--auto-detect-ckpt-format", "--ckpt-format"),
        *("--ckpt-convert-format", "--override-ckpt-iteration", "--non-persistent-global-ckpt-dir"),
        *("checkpoint.load", "checkpoint.ckpt_step", "checkpoint.finetune", "checkpoint.ckpt_format"),
    )
)
NO_OPTIMIZER = {"megatron-lm": ("--no-load-optim", ""), "megatron-bridge": ("checkpoint.load_optim", "false")}
# DistributedOptimizer.checkpoint_fully_reshardable_formats, core/optimizer/distrib_optimizer.py, core 0.19.
RESHARDABLE = ("fully_reshardable", "fully_sharded_model_space", "fsdp_dtensor")
# What a distributed optimizer takes for flat parts of parameters, which core 0.19 refuses to load.
FLATTENED = ("", "fully_sharded_model_space")
NO_FLATTENED_PARTS = "0.19"
MUON = "muon"
# Words of the person's own that settle or change the schedule of the learning rate.
SCHEDULE_WORDS = re.compile(
    r"--(?:override-opt|use-checkpoint-opt|lr-|train-|rampup|global-batch).*|(?:scheduler|train)\..*"
)


def megatron_findings(recipe: Recipe, layout: Layout, folder: Path, names: Collection[str]) -> Iterator[Finding]:
    """Yield what a trainer of Megatron core would make of the checkpoint in `folder`, whose entries are `names`."""
    own = _own_words(recipe)
    if not OTHER_LOADING.isdisjoint(own):
        return
    ours = recipe.training.checkpoint_format or ("fsdp_dtensor" if layout.zero_stage >= FSDP_STAGE else "torch_dist")
    theirs = _format(names)
    if theirs == "torch" and recipe.backend.name == "megatron-lm":
        split = _other_folders(recipe, layout, folder, names)
        if split is not None:
            yield split
            return
    if theirs and theirs != ours:
        other = _other_format(recipe, folder, theirs, ours)
        yield other
        if other.kind != NOTE:
            return
    if recipe.backend.name == "megatron-lm" and RUN_CONFIG in names:
        yield doubtful(
            KEY,
            f"{folder} was saved by megatron-bridge, and megatron-lm finds no arguments in it: it would take the "
            "split for tensor 1 and pipeline 1, and begin the data anew; train with backend: megatron-bridge, or "
            f"{NEW_FOLDER}",
        )
        return
    saved = saved_job(recipe, folder, names)
    if saved is None:
        return
    differing = differing_sizes(recipe, layout, saved.sizes)
    if differing:
        yield doubtful(KEY, f"{folder} is another model than the recipe's: {differing}; {NEW_FOLDER}")
    elif not _keeps_optimizer_out(recipe, own):
        found = list(_other_optimizer(recipe, layout, folder, saved, theirs))
        yield from found or _other_schedule(recipe, folder, saved.schedule, own)


def saved_job(recipe: Recipe, folder: Path, names: Collection[str]) -> SavedJob | None:
    """Return what the recipe's trainer reads in a checkpoint of the job that saved it; None where it says nothing.
    Megatron-Bridge reads Megatron-LM's checkpoints, too."""
    saved = bridge_job(folder, names) if recipe.backend.name == "megatron-bridge" else None
    return saved or megatron_job(folder, names)


def _own_words(recipe: Recipe) -> dict[str, str]:
    """Return the flags of the person's own with their first value, and for Megatron-Bridge the fields."""
    if recipe.backend.name == "megatron-bridge":
        return {name: value for name, _, value in (word.partition("=") for word in recipe.backend.extra_args)}
    words: dict[str, str] = {}
    for group in flag_groups(recipe.backend.extra_args):
        first, *values = map(str, group)
        name, _, value = first.partition("=")
        words[name] = value or (values[0] if values else "")
    return words


def _keeps_optimizer_out(recipe: Recipe, own: Mapping[str, str]) -> bool:
    name, value = NO_OPTIMIZER[recipe.backend.name]
    return name in own and own[name].lower() == value


def _format(names: Collection[str]) -> str:
    """Return the format of a checkpoint of Megatron-LM as it tells formats apart (_get_checkpoint_format, training/
    checkpointing.py, core 0.19); empty where it would not know it."""
    if "metadata.json" in names:
        return "torch_dist"
    if any(SPLIT_FOLDER.fullmatch(name) for name in names):
        return "torch"
    return "fsdp_dtensor" if ".metadata" in names else ""


def _other_format(recipe: Recipe, folder: Path, theirs: str, ours: str) -> Finding:
    """Return what a job of one format makes of a checkpoint in another.

    Megatron-LM reads the format torch also where it writes torch_dist. Everything else ends it (load_checkpoint and
    _load_base_checkpoint, training/checkpointing.py, core 0.19); Megatron-Bridge asserts that both are the same
    (_load_base_checkpoint, training/checkpointing.py, 0.6)."""
    text = f"{folder} is of the format {theirs}, and this job writes {ours}"
    if recipe.backend.name == "megatron-lm" and (theirs, ours) == ("torch", "torch_dist"):
        return note(KEY, f"{text}: the job reads it, and writes the next one as {ours}")
    go_on = f"set training.checkpoint_format: {theirs} to go on in it, or "
    if "fsdp_dtensor" in (theirs, ours):
        go_on = f"pin layout.zero_stage: {'2 or 3' if theirs == 'fsdp_dtensor' else '1'} to go on in it, or "
    if recipe.backend.name == "megatron-bridge" and theirs == "torch":
        go_on = ""
    return doubtful(KEY, f"{text}, and reads no other; {go_on}{NEW_FOLDER}")


def _other_folders(recipe: Recipe, layout: Layout, folder: Path, names: Collection[str]) -> Finding | None:
    """Return that a checkpoint of the format torch was saved under another split: each rank reads the folder of its
    own name, whose arguments must be the same (get_checkpoint_name and check_checkpoint_args, training/
    checkpointing.py, core 0.19). Folders that form no grid are damage, and nothing is said of them."""
    places = {match.groups() for match in map(SPLIT_FOLDER.fullmatch, names) if match is not None}
    ranks = {tuple(int(part) for part in place if part is not None) for place in places}
    depth = len(next(iter(ranks)))
    sizes = [
        1 + max(rank[part] for rank in ranks) for part in range(depth) if all(len(rank) == depth for rank in ranks)
    ]
    if len(sizes) != depth or len(ranks) != prod(sizes):
        return None
    wanted = [range(layout.tensor)]
    wanted += [range(size) for size in (layout.pipeline, layout.expert) if size > 1]
    if ranks == set(product(*wanted)):
        return None
    saved = {"tensor": sizes[0], "pipeline": 1, "expert": 1}
    known = megatron_job(folder, names)
    if known is not None and known.split:
        saved |= {name: known.split.get(name, 1) for name in saved}
    elif depth == 3 or recipe.model.moe is None:
        saved |= dict(zip(("pipeline", "expert"), sizes[1:], strict=False))
    else:
        return None
    keys = [name for name in saved if name != "expert" or recipe.model.moe is not None or saved[name] > 1]
    theirs, ours = (_listed({key: split[key] for key in keys}) for split in (saved, layout.as_json()))
    pins = " and ".join(f"layout.{key}: {saved[key]}" for key in keys)
    return missing(
        KEY,
        f"{folder} is split by {theirs}, and this plan by {ours}: the format torch loads under the same split alone; "
        f"pin {pins}, or {NEW_FOLDER}",
    )


def _listed(split: Mapping[str, object]) -> str:
    """Return "tensor 2, pipeline 4 and expert 8"."""
    parts = [f"{name.replace('_', ' ')} {size}" for name, size in split.items()]
    return " and ".join(filter(None, (", ".join(parts[:-1]), parts[-1])))


def differing_sizes(recipe: Recipe, layout: Layout, saved: Mapping[str, int]) -> str:
    """Return how a model with the sizes `saved` differs from the recipe's; empty where it does not.

    Tensors of other shapes are not loaded (check_checkpoint_args, training/checkpointing.py, and the loading of
    dist_checkpointing, core 0.19), but for the vocabulary's: rows are cut off or left as they are."""
    ours = _planned_sizes(recipe, layout)
    differing = [
        f"{name} is {saved[name]} there and {ours[name]} in the recipe"
        for name in ours
        if name in saved
        and name not in ("vocab_size", "vocab_padding")
        and saved[name] != ours[name]
        and not (name == "ffn_hidden_size" and (saved.get("num_experts") or recipe.model.moe is not None))
    ]
    vocabulary, rows = recipe.model.vocab_size, saved.get("vocab_size")
    if rows is not None and not vocabulary <= rows < vocabulary + saved.get("vocab_padding", 1):
        differing.append(f"vocab_size is {rows} there, with padding, and {vocabulary} in the recipe")
    return "; ".join(differing)


def _planned_sizes(recipe: Recipe, layout: Layout) -> dict[str, int]:
    """Return the sizes of the model under Megatron's names as the job would be given them; empty where it could not
    be."""
    try:
        if recipe.backend.name == "megatron-bridge":
            from llmlaunch.frameworks.bridge.settings import settings_of

            settings = settings_of(recipe, layout)
            values = {name.removeprefix("model."): value for name, (value, _) in settings.items()}
            experts = values.get("num_moe_experts")
        else:
            from llmlaunch.frameworks.megatron.arguments import planned_arguments

            flags = {each.flag: each.values[0] for each in planned_arguments(recipe, layout) if each.values}
            texts = {flag.removeprefix("--").replace("-", "_"): str(text) for flag, text in flags.items()}
            values = {name: int(text) for name, text in texts.items() if text.isdecimal()}
            experts = values.get("num_experts")
    except UserError:
        return {}
    return sizes_in(values | {"num_experts": experts, "num_moe_experts": experts})


def _other_optimizer(recipe: Recipe, layout: Layout, folder: Path, saved: SavedJob, form: str) -> Iterator[Finding]:
    """Yield why the optimizer states of a checkpoint cannot be loaded, though the weights can."""
    way_out = _without_optimizer(recipe)
    own = _own_words(recipe)
    ours = own.get("--optimizer") or own.get("optimizer.optimizer") or (MUON if recipe.training.muon else "adam")
    if saved.optimizer and saved.optimizer != ours.removeprefix("dist_"):
        yield doubtful(
            KEY,
            f"{folder} holds the states of the optimizer {saved.optimizer}, and this job has {ours}, which cannot load "
            f"them; keep {saved.optimizer}, {way_out}, or {NEW_FOLDER}",
        )
        return
    if form != "torch_dist" or saved.sharding is None or not saved.split or MUON in (saved.optimizer, ours):
        return
    if layout.zero_stage == 0:
        if saved.sharding == "dp_reshardable":
            yield doubtful(
                KEY,
                f"{folder} holds the states of a distributed optimizer in its own buckets ({saved.sharding}), and this "
                f"plan has none, which cannot load them; pin layout.zero_stage: 1, {way_out}, or {NEW_FOLDER}",
            )
        return
    if layout.zero_stage == 1 and saved.sharding in FLATTENED and rendered_version(recipe) == NO_FLATTENED_PARTS:
        yield _other_form(folder, saved.sharding, way_out)
        return
    changed = {
        name: saved.split[name]
        for name in MODEL_SPLIT
        if saved.split.get(name, _size(layout, name)) != _size(layout, name)
    }
    if layout.zero_stage == 1 and changed and saved.sharding not in RESHARDABLE:
        yield _other_split(layout, folder, changed, saved.sharding, way_out)


def _other_form(folder: Path, sharding: str, way_out: str) -> Finding:
    """Return that a distributed optimizer cannot take the states of an optimizer that was none, or of an old core's: it
    would load flat parts of parameters (sharded_param_state_fs_model_space, core/optimizer/distrib_optimizer.py), and
    core 0.19 has no such parts any more (ShardedTensor.validate_metadata_integrity, core/dist_checkpointing/
    mapping.py; tried with 0.19.2)."""
    kind = f"of the type {sharding}" if sharding else "that were not distributed"
    pin = "pin layout.zero_stage: 0, " if not sharding else ""
    return doubtful(
        KEY,
        f"{folder} holds optimizer states {kind}, and this plan has a distributed optimizer, which cannot load them; "
        f"{pin}{way_out}, or {NEW_FOLDER}",
    )


def _other_schedule(
    recipe: Recipe, folder: Path, saved: Mapping[str, float], own: Mapping[str, str]
) -> Iterator[Finding]:
    """Yield that the learning rate of a checkpoint follows another schedule.

    Megatron asserts that both are the same, unless it is told which to take (OptimizerParamScheduler._check_and_set,
    core/optimizer_param_scheduler.py, core 0.19). The states of a parameter are found by its learning rates, so these
    must be the same in any case (tried with 0.19.2)."""
    training = recipe.training
    rates = {"max_lr": training.learning_rate, "min_lr": training.minimum_learning_rate or 0.0}
    words = {"max_lr": "learning_rate", "min_lr": "minimum_learning_rate"}
    if changed := [name for name in rates if name in saved and saved[name] != rates[name]]:
        differing = " and ".join(f"{words[name]} was {saved[name]:g} and is {rates[name]:g}" for name in changed)
        yield doubtful(
            KEY,
            f"{folder} was trained otherwise: {differing}, by which Megatron finds the optimizer states again; keep "
            f"what it was, {_without_optimizer(recipe)}, or {NEW_FOLDER}",
        )
        return
    steps = _planned_schedule(recipe) if not any(map(SCHEDULE_WORDS.fullmatch, own)) else {}
    if changed := [name for name in steps if name in saved and saved[name] != steps[name]]:
        words = {"lr_warmup_steps": "the warm-up took", "lr_decay_steps": "the learning rate fell over"}
        differing = " and ".join(f"{words[name]} {saved[name]} samples and takes {steps[name]}" for name in changed)
        yield doubtful(
            KEY,
            f"{folder} was trained on another schedule: {differing}, and Megatron ends where both are not the same; "
            f"{_either_schedule(recipe)}, or write the training.steps and training.warmup_steps of before",
        )


def _planned_schedule(recipe: Recipe) -> dict[str, int]:
    """Return the schedule of the job, in samples."""
    from llmlaunch.frameworks.megatron.flags.training import warmup_steps

    samples = recipe.workload.global_batch_size
    return {"lr_warmup_steps": warmup_steps(recipe) * samples, "lr_decay_steps": recipe.training.steps * samples}


def _either_schedule(recipe: Recipe) -> str:
    words = ("--override-opt_param-scheduler", "--use-checkpoint-opt_param-scheduler")
    if recipe.backend.name == "megatron-bridge":
        words = ("scheduler.override_opt_param_scheduler=true", "scheduler.use_checkpoint_opt_param_scheduler=true")
    return f"add {words[0]} to backend.extra_args to take the recipe's, or {words[1]} to keep the checkpoint's"


def _other_split(layout: Layout, folder: Path, saved: Mapping[str, int], sharding: str, way_out: str) -> Finding:
    """Return that optimizer states were saved for one split of the model: "dp_reshardable" names its buckets by the
    model parallel rank, and they have other sizes under another split. A tensor or pipeline size that differs is
    refused by name (load_checkpoint, training/checkpointing.py, core 0.19 and Megatron-Bridge 0.6), others end in
    missing or misshapen buckets (sharded_param_state_dp_reshardable, core/optimizer/distrib_optimizer.py, core 0.19).
    """
    theirs, ours = _listed(saved), _listed({name: _size(layout, name) for name in saved})
    kind = f"are cut for that split alone ({sharding})" if sharding else "were saved without a distributed optimizer"
    pins = " and ".join(f"layout.{name}: {size}" for name, size in saved.items())
    return doubtful(
        KEY,
        f"{folder} was saved with {theirs}, and this plan has {ours}: the weights load under any split, but the "
        f"optimizer states {kind}, so the job would end; pin {pins}, {way_out}, or {NEW_FOLDER}. Checkpoints saved "
        f"with {RESHARDING_FLAG} load under any split",
    )


def _size(layout: Layout, name: str) -> int:
    value = getattr(layout, name)
    return value if isinstance(value, int) else 0


def _without_optimizer(recipe: Recipe) -> str:
    name, value = NO_OPTIMIZER[recipe.backend.name]
    return f"add {name}{'=' if value else ''}{value} to backend.extra_args to begin with new optimizer states"
