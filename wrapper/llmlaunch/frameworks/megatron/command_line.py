"""A Megatron-LM command line, or the namespace that a Megatron log prints, read into a recipe."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePath
from typing import Any

from llmlaunch.command_lines.command import Reading, TrainerCommand, UnreadWords, Unset, is_unset
from llmlaunch.command_lines.recipe_draft import RecipeDraft, add_job, is_file, recipe_name, wanted_value
from llmlaunch.command_lines.trainers import not_read
from llmlaunch.documents.secrets import known_secret
from llmlaunch.documents.yaml_strict import Document
from llmlaunch.errors import NoVerdict, UserError
from llmlaunch.frameworks.argument import flag_groups
from llmlaunch.frameworks.base import Requirement
from llmlaunch.frameworks.megatron.arguments import planned_arguments
from llmlaunch.frameworks.megatron.differences import OF_TOKENIZER, Differences, compared
from llmlaunch.frameworks.megatron.flags.attention import DELTA_NETS, SPARSE, SPARSE_KERNELS, VARIANTS, linear_period
from llmlaunch.frameworks.megatron.flags.row import PATTERN
from llmlaunch.frameworks.megatron.flags.table import column, read_section
from llmlaunch.frameworks.megatron.namespace import Namespace, namespace_of
from llmlaunch.frameworks.megatron.parser import NEWEST, known_version
from llmlaunch.frameworks.megatron.read_hybrid import refuse_other_parts
from llmlaunch.frameworks.megatron.read_model import read_model
from llmlaunch.frameworks.megatron.read_training import read_data, read_training
from llmlaunch.frameworks.megatron.rules import requirements_for
from llmlaunch.frameworks.megatron.words import MegatronWords, Values, read_words
from llmlaunch.layout import Layout
from llmlaunch.recipe.layout_keys import ASKED_ONLY
from llmlaunch.recipe.load import recipe_from
from llmlaunch.recipe.overrides import absolute_paths

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
# What stands in for sizes that a command line does not say while the rest is compared.
STAND_IN_CLUSTER = "h100-80gb-x8"
STAND_IN_LENGTH, MOST_DEVICES = 2048, 1024
STAND_IN_RECIPE = {
    **{"schema": 1, "name": "model", "backend": KIND, "cluster": STAND_IN_CLUSTER, "nodes": 1},
    **{"data": {"mock": True}, "training": {"sequence_length": STAND_IN_LENGTH, "global_batch_size": 8, "steps": 1000}},
}
EXTRA = "backend.extra_args"
# keys that no default of Megatron's may stand for where their flag has a value that is not known
OF_MEMORY = (
    "model.", "layout.", "training.sequence_length", "training.global_batch_size", "training.precision", "training.fp",
    "training.gradient_dtype", "training.optimizer",
)  # fmt: skip
ALTERNATIVES = {"--train-samples", "--set"}  # named in a sentence with the flag that lacks a value


def read_megatron(command: TrainerCommand) -> Reading:
    """Return the recipe of a command that starts a trainer with Megatron-LM's arguments.

    Raises UserError for an argument that Megatron's parser refuses, NoVerdict for a model that no recipe describes.
    """
    parsed = read_words(command.arguments, NEWEST, command.place)
    job = str(command.slurm.get("job-name") or "${NONE}")
    name = "" if is_unset(job) else recipe_name(job, "megatron")
    draft = RecipeDraft(name, KIND, unread=list(parsed.unread))
    add_job(draft, command)
    asked_for = {dest: "${}" for dest in OF_TOKENIZER if dest in parsed.unset}  # which says the type of a tokenizer
    draft.keys["backend"] = _backend(_trainer_path(command), None)
    reading = read_namespace(draft, parsed.values | asked_for, parsed, command)
    if is_unset(str(command.folder)):
        return reading
    return replace(reading, document=absolute_paths(reading.document, str(command.folder.absolute())))


def _trainer_path(command: TrainerCommand) -> str:
    """Return the trainer's path, absolute where the script enters its folder or it is there."""
    place = command.folder / command.trainer
    known = command.workdir is not None or is_file(place)
    return str(place.absolute()) if known and not is_unset(str(place)) else command.trainer


def read_values(
    values: Values,
    *,
    nodes: int | None = None,
    devices_per_node: int | None = None,
    version: str | None = None,
    parsed: MegatronWords | None = None,
    place: str = "the command line",
) -> Reading:
    """Return the recipe of a namespace: values by the `dest` of Megatron's parser, all of them as a log prints them,
    text or typed. `parsed` is how a command line wrote them, where there is one.

    Raises UserError for a value of the wrong type, and for a model that no recipe describes.
    """
    command = TrainerCommand("", (), nodes=nodes, devices_per_node=devices_per_node, place=place)
    draft = RecipeDraft("", KIND)
    add_job(draft, command)
    draft.keys["backend"] = _backend("", version)
    return read_namespace(draft, values, parsed or MegatronWords(), command, version)


def read_namespace(
    draft: RecipeDraft,
    values: Values,
    parsed: MegatronWords,
    command: TrainerCommand,
    version: str | None = None,
    extra_argument: Callable[[Sequence[str]], list[str]] = list,
    requirements: Sequence[Requirement] | None = None,
) -> Reading:
    """Read values by `dest` into a draft that has the backend, and the model where its sizes are no arguments. `parsed`
    is how a command line wrote them: what no key says becomes an extra argument, in the form that `extra_argument`
    returns. Keys of the layout that the draft has count. `requirements` are those of the backend, by
    default of Megatron-LM."""
    world = command.nodes * command.devices_per_node if command.nodes and command.devices_per_node else None
    space = namespace_of(values, known_version(version) or NEWEST, world, command.place)
    _refuse_other_models(space, command.place, command.trainer)
    draft.keys["model"] = draft.keys.get("model") or read_model(space, draft)
    draft.name = draft.name or _model_name(draft.keys["model"])
    draft.keys["tracking"] = read_section(space, "tracking")
    draft.training |= read_training(space, draft)
    draft.keys["data"] = read_data(space, draft)
    draft.layout = {"techniques": ASKED_ONLY} | read_section(space, "layout") | draft.layout
    differences = _differences(space, parsed, draft, world, known_version(version) or NEWEST, requirements)
    draft.missing[:] = _without_unset(draft.missing, parsed)
    for key, sentence in _unset(parsed, command.unset, differences):
        (draft.ask if key.startswith(OF_MEMORY) and key not in draft.stand_ins else draft.lack)(key, sentence)
    extra = [word for group in flag_groups(differences.extra_args) for word in extra_argument(tuple(map(str, group)))]
    if extra:
        backend = draft.keys["backend"]
        backend = backend if isinstance(backend, dict) else {"name": backend}
        draft.keys["backend"] = backend | {"extra_args": [*backend.get("extra_args", ()), *extra]}
    draft.notes += differences.notes
    draft.unread[:] = [_without_secrets(each) for each in (*draft.unread, *differences.unread)]
    return draft.reading(draft.kind)


def model_values(model: str | Mapping[str, Any], folder: Path) -> Values:
    """Return the values that Megatron's parser has for a recipe's model. Raises UserError for what is no model."""
    words: list[str] = []
    recipe = recipe_from(Document("the model", "", {**STAND_IN_RECIPE, "model": model}, {}, {}), folder)
    for each in planned_arguments(recipe, Layout()):
        if any(key.startswith("model.") for key in each.reason.keys):
            words += (each.flag, *(word for word in each.values if isinstance(word, str)))
    return read_words(words).values


def _without_secrets(unread: UnreadWords) -> UnreadWords:
    """These words end up in files and on screens."""
    shown = tuple("***" if known_secret(word) else word for word in unread.words)
    return UnreadWords(shown, unread.reason, unread.matters)


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
    space: Namespace,
    parsed: MegatronWords,
    draft: RecipeDraft,
    world: int | None,
    version: str,
    requirements: Sequence[Requirement] | None,
) -> Differences:
    """Compare what the draft renders to with the namespace; where no recipe can be made of it, the draft says why."""
    reading = draft.reading(draft.kind)
    try:
        recipe = recipe_from(Document("the recipe", "", with_stand_ins(reading, world), {}, {}))
        differences = compared(space, parsed, reading.document, recipe, version)
    except UserError as error:
        draft.not_rendered = draft.not_rendered or str(error)
        return Differences()
    asked = requirements_for(recipe) if requirements is None else requirements
    refused = "; ".join(f"{each.recipe_key}: {each.sentence}" for each in asked if each.broken(recipe))
    draft.not_rendered = draft.not_rendered or refused or None
    return differences


def with_stand_ins(reading: Reading, world: int | None) -> dict[str, Any]:
    """Return the document of a reading with stand-ins for all that it lacks: a cluster, a batch of one micro-batch."""
    document = dict(reading.document)
    for key, assumed in reading.stand_ins.items():
        section, _, name = key.partition(".")
        document[section] = {**document.get(section, {}), name: assumed.value} if name else assumed.value
    layout, nodes = document["layout"], document.get("nodes")
    model = layout["tensor"] * layout["pipeline"] * layout["context"]
    devices = world or model * max(layout.get("expert", 1), 1)
    if nodes and world and world // nodes <= MOST_DEVICES:
        per_node = world // nodes
    else:
        per_node = next(size for size in (8, 4, 2, 1) if devices % size == 0)
        document["nodes"] = max(devices // per_node, 1)
    document["cluster"] = {"base": STAND_IN_CLUSTER, "devices_per_node": per_node}
    document.setdefault("model", "llama3-8b")
    batch = layout.get("micro_batch_size", 1) * max(devices // model, 1)
    lengths = {"sequence_length": STAND_IN_LENGTH, "global_batch_size": batch}
    document["training"] = lengths | document["training"]
    return document


def _without_unset(sentences: Iterable[str], parsed: MegatronWords) -> Iterator[str]:
    """Yield those that are not only about flags which the command line has, though without a value."""
    flags = {group[0] for group in parsed.unset.values()}
    for sentence in sentences:
        named = set(re.findall(r"--[a-z-]+", sentence))
        if not named & flags or named - flags - ALTERNATIVES:
            yield sentence


def _unset(parsed: MegatronWords, unset: tuple[Unset, ...], differences: Differences) -> Iterator[tuple[str, str]]:
    """Yield the key of each flag whose value is not known, and a sentence that asks for it."""
    groups = [*parsed.unset.items(), *((None, group) for group in parsed.unknown if any(map(is_unset, group)))]
    for dest, group in groups:
        key = differences.keys.get(dest or "") or column("key").get(dest or "", EXTRA)
        yield key, wanted_value(group[0], " ".join(group), unset) + ", or leave it out" * (key == EXTRA)
