"""A Megatron-LM command line, or the namespace that a Megatron log prints, read into a recipe."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import PurePath
from typing import Any

from llmlaunch.command_lines.command import Reading, TrainerCommand, UnreadWords, Unset, is_unset
from llmlaunch.command_lines.recipe_draft import RecipeDraft, add_job, recipe_name
from llmlaunch.command_lines.trainers import not_read
from llmlaunch.documents.secrets import known_secret
from llmlaunch.errors import NoVerdict, UserError
from llmlaunch.frameworks.megatron.differences import OF_TOKENIZER, Differences, compared
from llmlaunch.frameworks.megatron.flags.attention import DELTA_NETS, SPARSE, SPARSE_KERNELS, VARIANTS, linear_period
from llmlaunch.frameworks.megatron.flags.row import PATTERN
from llmlaunch.frameworks.megatron.flags.table import column, read_section
from llmlaunch.frameworks.megatron.namespace import Namespace, namespace_of
from llmlaunch.frameworks.megatron.parser import NEWEST, known_version
from llmlaunch.frameworks.megatron.read_hybrid import refuse_other_parts
from llmlaunch.frameworks.megatron.read_model import read_model
from llmlaunch.frameworks.megatron.read_training import (
    missing_data,
    missing_training,
    read_data,
    read_training,
)
from llmlaunch.frameworks.megatron.words import MegatronWords, Values, read_words
from llmlaunch.recipe.layout_keys import ASKED_ONLY

__all__ = ["read_megatron", "read_values", "with_stand_ins"]

SCRIPTS = ("pretrain_gpt.py", "pretrain_hybrid.py")
KIND = "megatron-lm"
# Models that are no decoder of equal layers, by `dest`.
OTHER_MODELS = {
    **dict.fromkeys(
        ("is_hybrid_model", "hybrid_attention_ratio", "hybrid_mlp_ratio"),
        "of a hybrid of attention and state spaces without --hybrid-layer-pattern (pretrain_mamba.py of older cores)",
    ),
    "decoder_num_layers": "of an encoder with a decoder",
    "heterogeneous_layers_config_path": "of a model whose layers differ",
}
# What decides memory and is not in the arguments themselves, by `dest`.
NOT_READ = {
    "yaml_cfg": "a file in place of the arguments",
    "use_mp_args_from_checkpoint_args": "the split of a checkpoint",
    "use_torch_fsdp2": "FSDP2",
}
# Stand-ins for what a command line does not tell, with which the rest is compared.
STAND_IN_CLUSTER = "h100-80gb-x8"
STAND_IN_LENGTH, STAND_IN_TOKENS = 2048, 32000
EXTRA = "backend.extra_args"
ALTERNATIVES = {"--train-samples"}  # named in a sentence beside the flag that lacks a value
NO_WORDS = MegatronWords()


def read_megatron(command: TrainerCommand) -> Reading:
    """Return the recipe of a command that starts a trainer with Megatron-LM's arguments.

    Raises UserError for an argument that Megatron's parser refuses, NoVerdict for a model that no recipe describes.
    """
    parsed = read_words(command.arguments, NEWEST, command.place)
    asked_for = {dest: "${}" for dest in OF_TOKENIZER if dest in parsed.unset}  # which says the type of a tokenizer
    reading = read_values(
        parsed.values | asked_for,
        nodes=command.nodes,
        devices_per_node=command.devices_per_node,
        trainer=command.trainer,
        parsed=parsed,
        unset=command.unset,
        place=command.place,
    )
    job_name = command.slurm.get("job-name")
    name = recipe_name(None if job_name is None or is_unset(str(job_name)) else str(job_name), reading.document["name"])
    draft = RecipeDraft(name, unread=[_without_secrets(each) for each in (*parsed.unread, *reading.unread)])
    add_job(draft, command)
    document = {**reading.document, "name": name}
    document |= {key: draft.keys[key] for key in ("slurm", "environment", "secrets") if draft.keys[key]}
    return replace(
        reading,
        document=document,
        unread=tuple(draft.unread),
        notes=(*reading.notes, *draft.notes),
    )


def read_values(
    values: Values,
    *,
    nodes: int | None = None,
    devices_per_node: int | None = None,
    version: str | None = None,
    trainer: str | None = None,
    parsed: MegatronWords = NO_WORDS,
    unset: tuple[Unset, ...] = (),
    place: str = "the command line",
) -> Reading:
    """Return the recipe of a namespace: values by the `dest` of Megatron's parser, all of them as a log prints them
    (text or typed), or those that a command line sets.

    `parsed` is what `read_words` makes of a command line, where there is one: what no key says becomes an extra
    argument; `unset` are variables in it without a value. Raises UserError for a value of the wrong type, and for a
    model that no recipe describes.
    """
    parser = known_version(version) or NEWEST
    world = nodes * devices_per_node if nodes and devices_per_node else None
    space = namespace_of(values, parser, world, place)
    _refuse_other_models(space, place, trainer)
    model, (training, notes), (data, data_notes) = read_model(space), read_training(space), read_data(space)
    document: dict[str, Any] = {"schema": 1, "name": _model_name(model.model)}
    document |= {"model": model.model} if model.model is not None else {}
    document["backend"] = _backend(trainer, version)
    document |= {"nodes": nodes} if nodes else {}
    document["training"] = training
    document |= {"data": data} if data is not None else {}
    tracking = read_section(space, "tracking")
    document |= {"tracking": tracking} if tracking else {}
    document["layout"] = {"techniques": ASKED_ONLY} | read_section(space, "layout")
    differences, not_rendered = _differences(space, parsed, document, world, parser)
    absent = [*model.missing, *missing_training(space), *missing_data(space)]
    if nodes is None:
        absent.append("nodes: neither the launcher nor sbatch tells how many; write nodes")
    missing = (*_without_unset(absent, parsed), *_unset(parsed, unset, differences))
    if differences.extra_args:
        backend = document["backend"] if isinstance(document["backend"], dict) else {"name": KIND}
        document["backend"] = backend | {"extra_args": differences.extra_args}
    all_notes = (*model.notes, *notes, *data_notes, *differences.notes)
    return Reading(KIND, document, tuple(differences.unread), missing, all_notes, not_rendered)


def _without_secrets(unread: UnreadWords) -> UnreadWords:
    """These words end up in files and on screens."""
    return UnreadWords(tuple("***" if known_secret(word) else word for word in unread.words), unread.reason)


def _refuse_other_models(space: Namespace, place: str, trainer: str | None) -> None:
    if PurePath(trainer or "").name == "pretrain_mamba.py" and not space.get(PATTERN):
        raise not_read("Megatron-LM's pretrain_mamba.py without --hybrid-layer-pattern", place)
    for dest, what in NOT_READ.items():
        if space.get(dest):
            raise not_read(f"--{dest.replace('_', '-')} ({what})", place)
    for dest, what in OTHER_MODELS.items():
        if space.get(dest):
            flag = f"--{dest.replace('_', '-')}"
            raise NoVerdict.on(
                place,
                f"{flag} is {what}, which is not read: recipes describe decoders alone, layer by "
                "layer; `llmlaunch observe --` measures it",
            )
    if space.get(PATTERN):
        refuse_other_parts(space, place)
    variant = space.get("experimental_attention_variant")
    if variant not in (None, *VARIANTS):
        known = " and ".join(VARIANTS)
        raise NoVerdict.on(place, f"--experimental-attention-variant {variant} is not read: recipes describe {known}")
    kernels = space.get("dsa_kernel_backend") or "none"  # its default; core 0.16 has no others
    if variant == SPARSE and kernels != SPARSE_KERNELS:
        raise NoVerdict.on(
            place,
            f"--dsa-kernel-backend {kernels} is not read: recipes describe sparse attention with the kernels of "
            f"{SPARSE_KERNELS}, without which scores of all keys stand in memory; `llmlaunch observe --` measures it",
        )
    if variant == DELTA_NETS and linear_period(space) is None:
        raise UserError(
            f"{place}: --linear-attention-freq: recipes describe linear attention in all layers, or in all but every "
            "N-th; write the number N"
        )


def _backend(trainer: str | None, version: str | None) -> str | dict[str, Any]:
    backend: dict[str, Any] = {"name": KIND}
    backend |= {"version": version} if version else {}
    if trainer and not is_unset(trainer):
        own, script = PurePath(trainer).name not in SCRIPTS, PurePath(trainer)
        backend |= {"script": trainer} if own else {"path": str(script.parent)} if script.is_absolute() else {}
    return backend if len(backend) > 1 else KIND


def _model_name(model: str | Mapping[str, Any] | None) -> str:
    base = model if isinstance(model, str) else (model or {}).get("base")
    return f"megatron-{base}" if base else "megatron"


def _differences(
    space: Namespace, parsed: MegatronWords, document: Mapping[str, Any], world: int | None, version: str
) -> tuple[Differences, str | None]:
    """Compare what the document renders to with the namespace; where no recipe can be made of it, say why."""
    try:
        differences = compared(space, parsed, document, with_stand_ins(document, space, world), version)
    except UserError as error:
        return Differences(), str(error)
    return differences, "; ".join(differences.refused) or None


def with_stand_ins(document: Mapping[str, Any], space: Namespace, world: int | None) -> dict[str, Any]:
    """Return the document with stand-ins for what it lacks: a cluster, a batch of one micro-batch."""
    layout, whole = document["layout"], dict(document)
    model = layout["tensor"] * layout["pipeline"] * layout["context"]
    devices = world or model * max(layout.get("expert", 1), 1)
    per_node = next(size for size in (8, 4, 2, 1) if devices % size == 0)
    if not (document.get("nodes") and world and world // document["nodes"] <= 1024):
        whole["nodes"] = max(devices // per_node, 1)
    else:
        per_node = world // document["nodes"]
    whole["cluster"] = {"base": STAND_IN_CLUSTER, "devices_per_node": per_node}
    if isinstance(whole.get("model"), Mapping) and "base" not in whole["model"]:
        whole["model"] = {"vocab_size": STAND_IN_TOKENS} | whole["model"]
    whole.setdefault("model", "llama3-8b")
    if "data" not in whole:
        whole["data"] = read_data(Namespace(space | {"data_path": ["/data"]}))[0]
    micro = layout.get("micro_batch_size", 1)
    lengths = {
        "sequence_length": STAND_IN_LENGTH,
        "global_batch_size": micro * max(devices // model, 1),
        "steps": 10**6,
    }
    whole["training"] = lengths | whole["training"]
    return whole


def _without_unset(sentences: Iterable[str], parsed: MegatronWords) -> Iterator[str]:
    """Yield those that are not only about flags which the command line has, though without a value."""
    flags = {group[0] for group in parsed.unset.values()}
    for sentence in sentences:
        named = set(re.findall(r"--[a-z-]+", sentence))
        if not named & flags or named - flags - ALTERNATIVES:
            yield sentence


def _unset(parsed: MegatronWords, unset: tuple[Unset, ...], differences: Differences) -> Iterator[str]:
    lines = {each.name: each.line for each in unset}
    groups = [*parsed.unset.items(), *((None, group) for group in parsed.unknown if any(map(is_unset, group)))]
    for dest, group in groups:
        names = dict.fromkeys(re.findall(r"\$\{(\w+)\}", " ".join(group)))
        where = ", ".join(f"{name} (line {lines[name]})" if name in lines else name for name in names)
        key = differences.keys.get(dest or "") or column("key").get(dest or "", EXTRA)
        remedy = "add it there with its value, or leave it out" if key == EXTRA else f"write {key}"
        yield f"{key}: {group[0]} reads {where}, which has no value in the script; {remedy}"
