"""A Megatron-LM command line, or the namespace that a Megatron log prints, read into a recipe, and
what that recipe renders to compared with the command line."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePath
from typing import Any

from llmlaunch.command_lines.command import Reading, TrainerCommand, UnreadWords, Unset, is_unset
from llmlaunch.command_lines.recipe_draft import RecipeDraft, add_job, is_file, recipe_name, wanted_value
from llmlaunch.command_lines.trainers import not_read
from llmlaunch.documents.secrets import is_secret_variable, known_secret
from llmlaunch.documents.yaml_strict import Document
from llmlaunch.errors import NoVerdict, UserError
from llmlaunch.frameworks.argument import Argument, NodeVariable, flag_groups
from llmlaunch.frameworks.base import Requirement
from llmlaunch.frameworks.classed_arguments import NEUTRAL, group_of
from llmlaunch.frameworks.megatron.arguments import is_own_choice, planned_arguments
from llmlaunch.frameworks.megatron.extra_arguments import megatron_groups
from llmlaunch.frameworks.megatron.flags.attention import DELTA_NETS, SPARSE, SPARSE_KERNELS, VARIANTS, linear_period
from llmlaunch.frameworks.megatron.flags.row import HEADS, PATTERN, STAGES
from llmlaunch.frameworks.megatron.flags.table import column, read_section
from llmlaunch.frameworks.megatron.hybrid import refuse_other_parts
from llmlaunch.frameworks.megatron.namespace import Namespace, namespace_of
from llmlaunch.frameworks.megatron.parser import NEWEST, core_parser, dest_of, known_version
from llmlaunch.frameworks.megatron.read_model import read_data, read_model, read_training
from llmlaunch.frameworks.megatron.rules import requirements_for
from llmlaunch.frameworks.megatron.words import MegatronWords, Values, read_words
from llmlaunch.layout import RECOMPUTE_NAMES, Layout
from llmlaunch.recipe.layout_keys import ASKED_ONLY
from llmlaunch.recipe.load import recipe_from
from llmlaunch.recipe.overrides import absolute_paths
from llmlaunch.recipe.types import Recipe

OF_DATA = ("split", "data_cache_path", "tokenizer_type", "tokenizer_model")
OF_TOKENIZER = ("tokenizer_model", "vocab_file", "merge_file", "vocab_extra_ids", "null_tokenizer_eod_id")
# What rendering leaves to the extra arguments where the recipe's key is absent, by `dest`.
OWN_WORD = ("lr_decay_style",)
# What takes sizes from elsewhere, which a plan cannot see, by `dest`.
ELSEWHERE = ("use_checkpoint_args",)
VOCABULARY = ("vocab_size", "padded_vocab_size", "make_vocab_size_divisible_by")
DIVISOR = 128


@dataclass
class Differences:
    """`extra_args` say what no key says; `unread` and `notes` are those of a Reading. `keys` has the key that each
    rendered argument follows from, by `dest`."""

    extra_args: list[str] = field(default_factory=list)
    keys: dict[str, str] = field(default_factory=dict)
    unread: list[UnreadWords] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def compared(
    original: Namespace, parsed: MegatronWords, document: Mapping[str, Any], recipe: Recipe, version: str
) -> Differences:
    """Return what rendering a recipe makes different from `original`. The recipe is the `document` with stand-ins for
    what it lacks, which are not compared. Raises UserError for a recipe that contradicts itself."""
    arguments, rendered = rendered_namespace(recipe, version)
    keys = {dest: each.reason.keys[0] for dest, each in arguments.items() if each.reason.keys}
    result = Differences(keys=keys)
    _vocabulary(original, rendered, parsed, recipe.model.vocab_size, result)
    added: list[str] = []
    if "data" not in document:
        groups = (parsed.words[dest] for dest in OF_DATA if dest in parsed.words)
        result.unread += [UnreadWords(group, "belongs to data, whose source is missing") for group in groups]
    idle = ((parsed.words[dest], reason) for dest, reason in original.idle.items() if dest in parsed.words)
    result.unread += [UnreadWords(group, reason, matters=False) for group, reason in idle]
    for dest in sorted(original.keys() | rendered.keys()):
        if "data" not in document and dest in OF_DATA:
            continue
        if dest in VOCABULARY or equal(original.get(dest), rendered.get(dest)):
            continue
        if dest in arguments and (_stands_in(arguments[dest], document) or _worked_out(arguments[dest])):
            continue
        group = parsed.words.get(dest)
        if dest in original.converted:
            group = (f"--{dest.replace('_', '-')}", str(original[dest]))
        if dest == "save_interval" and {"save", "load"} & parsed.unset.keys():
            result.unread.append(
                UnreadWords(parsed.words[dest], "belongs to training.checkpoint_path, which is missing")
            )
        elif dest in original.explicit and group is not None:
            _kept(dest, group, original, rendered, result)
        elif dest in rendered.explicit:
            added += [f"{_flag(dest, arguments)} ({column('added')[dest]})"] if dest in column("added") else []
    if added:
        result.notes.append(f"rendering adds {', '.join(added)}")
    for group in parsed.unknown:
        if any(map(is_unset, group)):
            continue
        _extra(group, result)
        longer = [flag for flag in core_parser(version).flags if flag.startswith(group[0].partition("=")[0])]
        if len(longer) == 1:
            result.notes.append(f"{group[0]}: Megatron takes no abbreviations; write {longer[0]} where that is meant")
    return result


def rendered_namespace(recipe: Recipe, version: str) -> tuple[dict[str, Argument], Namespace]:
    """Return the arguments that a recipe renders to with its layout pinned, by `dest`, and their namespace."""
    arguments = planned_arguments(recipe, pinned_layout(recipe))
    rendered_words = [
        "${" + word.name + "}" if isinstance(word, NodeVariable) else word for each in arguments for word in each.words
    ]
    parsed = read_words(rendered_words, version)
    flags = {each.flag: each for each in arguments}
    by_dest = {dest: flags[group[0]] for dest, group in (parsed.words | parsed.unset).items() if group[0] in flags}
    return by_dest, namespace_of(parsed.values, version, recipe.world_size)


def pinned_layout(recipe: Recipe) -> Layout:
    """Return the one layout that all pins of a recipe describe."""
    sizes = {name: int(value) for name, value in recipe.pins.items() if isinstance(value, (int, bool))}
    layout = Layout(**sizes, layers_by_stage=recipe.layers_by_stage or ())
    granularity = RECOMPUTE_NAMES.index(str(recipe.pins.get("recompute", "none")))
    data = recipe.world_size // (layout.tensor * layout.pipeline * layout.context)
    return Layout(**{**sizes, "recompute": granularity, "data": max(data, 1)}, layers_by_stage=layout.layers_by_stage)


def equal(value: object, other: object) -> bool:
    """Compare values of two namespaces; what is off, absent or empty is the same."""
    if isinstance(value, (list, tuple)) or isinstance(other, (list, tuple)):
        return _items(value) == _items(other)
    return value == other or (value in (None, False, "") and other in (None, False, ""))


def _items(value: object) -> list[str]:
    return [str(item) for item in value] if isinstance(value, (list, tuple)) else [] if value is None else [str(value)]


def _worked_out(each: Argument) -> bool:
    """Return whether the value of an argument is known on the node alone, where its keys decide it."""
    return any(isinstance(value, NodeVariable) for value in each.values)


def _stands_in(each: Argument, document: Mapping[str, Any]) -> bool:
    """Return whether an argument follows from keys that the document lacks alone."""
    sections = {key.partition(".")[0] for key in each.reason.keys}
    return bool(sections & {"model", "data"}) and not sections & document.keys()


def _kept(dest: str, group: tuple[str, ...], original: Namespace, rendered: Namespace, result: Differences) -> None:
    """Put an argument that no key says into the extra arguments, unless rendering decides it."""
    unused = dest in OF_TOKENIZER and rendered.get("tokenizer_type") == "NullTokenizer"
    choice, planned_by = column("companion").get(dest, ""), column("decides")
    if dest in OWN_WORD or is_own_choice(dest, group[1:]) or is_own_choice(choice, _items(original.get(choice))):
        _extra(group, result)
        return
    decided = (
        unused or dest in ELSEWHERE or dest in planned_by or dest in (STAGES, HEADS) or dest_of(group[0]) in planned_by
    )
    if dest in rendered.explicit or decided:
        value = rendered.get(dest)
        instead = (
            f"rendered as {value}" if dest in rendered.explicit else f"{planned_by.get(dest, 'the layout')} decides"
        )
        reason = column("unread")["tokenizer_model"] if unused else column("unread").get(dest, instead)
        known = group_of(megatron_groups(), dest, group[1:])
        neutral = known is not None and known.flag_class.kind == NEUTRAL
        result.unread.append(UnreadWords(group, reason, matters=not neutral))
    else:
        _extra(group, result)


def _extra(group: Sequence[str], result: Differences) -> None:
    name = group[0].lstrip("-").partition("=")[0]
    if any(known_secret(word) or is_secret_variable(name, word) for word in group[1:]):
        name = group[0].partition("=")[0]
        result.unread.append(UnreadWords((name,), "looks like a secret, which is never written", matters=False))
    else:
        result.extra_args += group


def _flag(dest: str, arguments: Mapping[str, Argument]) -> str:
    return arguments[dest].flag if dest in arguments else f"--{dest.replace('_', '-')}"


def _vocabulary(
    original: Namespace, rendered: Namespace, parsed: MegatronWords, tokens: int, result: Differences
) -> None:
    """Compare rows of the embedding, whichever arguments say them."""
    tensor = original.get("tensor_model_parallel_size") or 1
    multiple = (original.get("make_vocab_size_divisible_by") or DIVISOR) * tensor
    shown = rendered.get("padded_vocab_size") or _padded(tokens, DIVISOR * tensor)
    rows = original.get("padded_vocab_size") or _padded(original.get("vocab_size") or tokens, multiple)
    divisor = parsed.words.get("make_vocab_size_divisible_by")
    if rows == shown:
        return
    if divisor and rendered.get("vocab_size"):
        result.extra_args += divisor
    elif divisor:
        result.unread.append(UnreadWords(divisor, f"the embedding has {shown} rows instead of {rows}"))
    else:
        result.notes.append(f"the embedding is planned with {shown} rows instead of {rows}")


def _padded(tokens: int, multiple: int) -> int:
    return -(-tokens // multiple) * multiple


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
