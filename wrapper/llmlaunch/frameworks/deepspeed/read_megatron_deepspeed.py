"""A command of Megatron-DeepSpeed's pretrain_gpt.py, read into a recipe: Megatron-LM's words of 2023 with DeepSpeed's.

Its flags are put into those of Megatron-LM, whose reader does the rest. What its own parser has beside them
(deepspeedai/Megatron-DeepSpeed and bigscience-workshop/Megatron-DeepSpeed, megatron/arguments.py) is handed on as it
was written, since a rendered job runs the same script.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llmlaunch.command_lines.command import TrainerCommand, is_unset
from llmlaunch.command_lines.options import ScriptOptions
from llmlaunch.command_lines.recipe_draft import RecipeDraft
from llmlaunch.documents.yaml_strict import Document
from llmlaunch.errors import UserError
from llmlaunch.frameworks.argument import command_words
from llmlaunch.frameworks.deepspeed.megatron_deepspeed import TAKEN, megatron_deepspeed_arguments
from llmlaunch.frameworks.deepspeed.megatron_deepspeed_facts import accumulates_in_fp32
from llmlaunch.frameworks.deepspeed.read_config import DsConfig, keep_precision, read_precision, read_rest, read_zero
from llmlaunch.frameworks.megatron.command_line import with_stand_ins
from llmlaunch.frameworks.megatron.differences import ADDED, REASONS, VOCABULARY, equal, pinned_layout
from llmlaunch.frameworks.megatron.namespace import Namespace, namespace_of
from llmlaunch.frameworks.megatron.read_layout import read_layout
from llmlaunch.frameworks.megatron.read_model import read_model
from llmlaunch.frameworks.megatron.read_training import missing_data, missing_training, read_data, read_training
from llmlaunch.frameworks.megatron.versions import NEWEST
from llmlaunch.frameworks.megatron.words import MegatronWords, read_words
from llmlaunch.recipe.load import recipe_from
from llmlaunch.recipe.training import OF_MEGATRON
from llmlaunch.rundir.values import shortened

__all__ = ["MegatronJob", "add_megatron", "is_megatron", "kept_words", "tell_of_differences"]

# The fork's flags and Megatron-LM's words for them; {} is where the value goes.
SAME: Mapping[str, tuple[str, ...]] = {
    "--num-key-value-heads": ("--group-query-attention", "--num-query-groups", "{}"),
    "--rotary-position-embeddings-theta": ("--rotary-base", "{}"),
    "--checkpoint-activations": ("--recompute-granularity", "full", "--recompute-method", "uniform"),
    "--deepspeed-activation-checkpointing": ("--recompute-granularity", "full", "--recompute-method", "uniform"),
    "--ds-sequence-parallel-size": ("--context-parallel-size", "{}"),
    "--pad-vocab-size-to": ("--vocab-size", "{}"),
    "--tokenizer-name-or-path": ("--tokenizer-model", "{}"),
    **dict.fromkeys(("--train-tokens", "--lr-decay-tokens", "--lr-warmup-tokens"), ()),
    "--zero-stage": (),
    "--no-pipeline-parallel": (),
    "--deepspeed": (),
    "--deepspeed_config": (),
    "--local_rank": (),
}
TOKENIZERS = {"HFTokenizer": "HuggingFaceTokenizer", "PretrainedFromHF": "HuggingFaceTokenizer"}
NORMS = {"rmsnorm": "RMSNorm", "layernorm": "LayerNorm"}
_GROUPED = re.compile(r"\d{1,3}(_\d{3})+")  # 9_765_625, which Python reads
_TODAY = frozenset(word for words in SAME.values() for word in words if word.startswith("--"))
# Left out: said by what is rendered instead. All else that the fork alone has is handed on.
REPLACED = frozenset(
    (
        *("--checkpoint-activations", "--tokenizer-name-or-path", "--position-embedding-type", "--train-samples"),
        *("--lr-warmup-samples", "--lr-decay-samples", "--lr-decay-iters", "--local_rank"),
        *("--pad-vocab-size-to", "--mmap-warmup"),
    )
)


def is_megatron(options: ScriptOptions) -> bool:
    """Return whether a script takes Megatron's arguments."""
    return options.has("num_layers", "encoder_num_layers") and options.has("hidden_size") and options.has("seq_length")


@dataclass(frozen=True)
class MegatronJob:
    """What the arguments of a Megatron-DeepSpeed job say, in the words of Megatron-LM, and how many ranks it has."""

    words: MegatronWords
    space: Namespace
    ranks: int | None


def add_megatron(
    command: TrainerCommand, options: ScriptOptions, config: DsConfig | None, draft: RecipeDraft
) -> MegatronJob:
    """Add all that the Megatron arguments and ds_config.json of a Megatron-DeepSpeed job say.

    Raises UserError for an argument that the parser refuses.
    """
    words = read_words(tuple(_words_of_today(command.arguments)), NEWEST, command.place)
    world = command.nodes * command.devices_per_node if command.nodes and command.devices_per_node else None
    space = namespace_of(words.values, NEWEST, world, command.place)
    _end_after_tokens(space, options, draft)
    _add_model(space, options, draft)
    training, notes = read_training(space)
    draft.training |= _spelled_out(training, space)
    draft.notes += notes
    _missing(space, draft)
    data, data_notes = read_data(space)
    draft.keys["data"] = data or {"mock": True}
    draft.notes += data_notes
    draft.layout |= _layout(space)
    _stages(space, options, draft)
    _zero(options, config or DsConfig(), draft)
    return MegatronJob(words, space, world)


def _words_of_today(words: Sequence[str]) -> Iterator[str]:
    """Yield the words as Megatron-LM's parser of today takes them; positions by bias and mere switches are left out."""
    groups: list[list[str]] = []
    for word in words:
        if word.startswith("--") and "=" in word:
            groups.append(word.split("=", 1))
        elif word.startswith("-") and not re.fullmatch(r"-[\d.]+", word):
            groups.append([word])
        elif groups:
            groups[-1].append(word)
    for flag, *values in groups:
        plain = [value.replace("_", "") if _GROUPED.fullmatch(value) else value for value in values]
        if flag in SAME:
            yield from (value for word in SAME[flag] for value in (plain[:1] if word == "{}" else [word]))
        elif flag == "--position-embedding-type" and plain[:1] == ["alibi"]:
            continue
        else:
            yield flag
            yield from (TOKENIZERS.get(NORMS.get(value, value), NORMS.get(value, value)) for value in plain)


def _end_after_tokens(space: Namespace, options: ScriptOptions, draft: RecipeDraft) -> None:
    """Let the steps end where --train-tokens ends them, and the learning rate decay over what it did (training.py
    train, optimizer_param_scheduler.py)."""
    tokens, steps = options.whole("train_tokens"), space.get("train_iters")
    batch, length = space.get("global_batch_size"), space.get("seq_length")
    if not (tokens and steps and batch and length) or options.has("curriculum_learning_legacy"):
        return
    last = -(-tokens // (batch * length))
    if last < steps:
        space["train_iters"], space["lr_decay_iters"] = last, space.get("lr_decay_iters") or steps
        space.converted = {name: flag for name, flag in space.converted.items() if name != "train_iters"}
        draft.notes.append(f"training.steps: {last} steps see the tokens that --train-tokens names")


def _add_model(space: Namespace, options: ScriptOptions, draft: RecipeDraft) -> None:
    reading = read_model(space)
    draft.missing += reading.missing
    draft.notes += reading.notes
    model = reading.model
    if model is None:
        return
    if options.text("position_embedding_type") == "alibi":
        model = {**(model if isinstance(model, dict) else {"base": model}), "position_embedding": "alibi"}
    if options.has("embed_layernorm"):
        draft.notes.append("--embed-layernorm: the norm after the embedding is counted, as in all such jobs")
    draft.keys["model"] = model


def _spelled_out(training: Mapping[str, Any], space: Namespace) -> dict[str, Any]:
    """Return the training with what is left out for being Megatron-LM's default and is another one's on DeepSpeed."""
    decay = training.get("learning_rate_decay") or space.get("lr_decay_style") or "linear"
    spelled = {"learning_rate_decay": decay} if decay in ("linear", "cosine", "constant") else {}
    return {key: value for key, value in {**training, **spelled}.items() if key not in OF_MEGATRON}


def _missing(space: Namespace, draft: RecipeDraft) -> None:
    for sentence in missing_training(space):
        draft.missing.append(sentence)
    draft.missing += missing_data(space)


def _layout(space: Namespace) -> dict[str, Any]:
    whole = read_layout(space)
    layout = {name: whole[name] for name in ("tensor", "pipeline", "context") if whole.get(name)}
    if "micro_batch_size" in whole:
        layout["micro_batch_size"] = whole["micro_batch_size"]
    return layout | {"recompute": whole["recompute"]}


def _stages(space: Namespace, options: ScriptOptions, draft: RecipeDraft) -> None:
    """Add stages in which embedding and head count as a layer each, as in BLOOM's `type:transformer|embedding`."""
    layers, stages = space.get("num_layers") or 0, draft.layout.get("pipeline", 1)
    method = options.text("pp_partition_method") or ""
    if stages < 2 or "embedding" not in method or (layers + 2) % stages:
        return
    each = (layers + 2) // stages
    draft.layout["layers_by_stage"] = [each - 1, *([each] * (stages - 2)), each - 1]


def _zero(options: ScriptOptions, config: DsConfig, draft: RecipeDraft) -> None:
    """Add the ZeRO stage, by which of the two says it, and what else ds_config.json says."""
    read_precision(config)
    precision = str(draft.training["precision"])
    keep_precision(config, precision)
    stage = options.whole("zero_stage")
    if stage is not None:
        config.put("zero_optimization.stage", stage)
    wide = accumulates_in_fp32(precision, draft.training.get("gradient_dtype"))
    if wide and config.section("zero_optimization").get("stage", 0) == 0:
        config.put("zero_optimization.stage", 1)
        draft.leave_out(
            options.written("zero_stage") or ("zero_optimization.stage",),
            "bf16 runs under BF16_Optimizer, which shards the optimizer whatever the stage says: zero_stage is 1 here",
        )
    read_zero(config, draft, "ds_config.json")
    draft.layout.pop("offload_parameters", None)
    for key in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"):
        config.take(key)
    clipping = config.take("gradient_clipping")
    if isinstance(clipping, (int, float)):
        draft.training["gradient_clipping"] = float(clipping)
    else:
        draft.notes.append("rendering adds gradient_clipping to ds_config.json, as --clip-grad says")
    read_rest(config, draft)


def tell_of_differences(job: MegatronJob, draft: RecipeDraft, document: Mapping[str, Any]) -> None:
    """Tell what rendering the recipe makes different from the command, or why it cannot be rendered."""
    try:
        whole = with_stand_ins(document, job.space, job.ranks)
        recipe = recipe_from(Document("the recipe", "", whole, {}, {}))
        arguments = megatron_deepspeed_arguments(recipe, pinned_layout(recipe))
    except UserError as error:
        draft.not_rendered = str(error).removeprefix("the recipe: ")
        return
    rendered_words = [word for word in command_words(arguments) if isinstance(word, str)]
    parsed = read_words(tuple(_words_of_today(rendered_words)), NEWEST)
    rendered = namespace_of(parsed.values, NEWEST, recipe.world_size)
    for dest, group in sorted(job.words.words.items()):
        rendered_again = group[0] in TAKEN or group[0] in _TODAY
        if dest == "data_path" and len(group) == len(("--data-path", "weight", "path")):
            continue  # of one dataset the weight says nothing
        if rendered_again and dest not in VOCABULARY and not equal(job.space.get(dest), rendered.get(dest)):
            draft.leave_out(group, REASONS.get(dest, f"the recipe renders {shortened(str(rendered.get(dest)))}"))
    added = [
        f"{group[0]} ({ADDED[dest]})"
        for dest, group in sorted(parsed.words.items())
        if dest not in job.words.words and dest in ADDED and not equal(job.space.get(dest), rendered.get(dest))
    ]
    if added:
        draft.notes.append(f"rendering adds {', '.join(added)}")


def kept_words(options: ScriptOptions, job: MegatronJob) -> tuple[tuple[str, ...], ...]:
    """Return the options that rendering does not say again, which are handed on to the script; a decay over samples as
    one over steps, since the rendered job is long by steps."""
    decay = job.space.get("lr_decay_iters")
    flags = TAKEN | REPLACED
    groups = (group for group in options.rest() if group[0].partition("=")[0] not in flags)
    handed_on = tuple(group for group in groups if not any(map(is_unset, group)))
    return (*handed_on, ("--lr-decay-iters", str(decay))) if decay else handed_on
