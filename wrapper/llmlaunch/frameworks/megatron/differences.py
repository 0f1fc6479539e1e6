"""What a recipe that was read of a Megatron-LM command line renders to, compared with that command line by `dest`.

What the recipe's keys do not say goes into `backend.extra_args`; what rendering changes or leaves out is unread, with
its reason; what it adds is said in the notes. So a round trip loses nothing silently, whichever flags come.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from llmlaunch.command_lines.command import UnreadWords, is_unset
from llmlaunch.documents.secrets import is_secret_variable, known_secret
from llmlaunch.documents.yaml_strict import Document
from llmlaunch.frameworks.argument import Argument, NodeVariable
from llmlaunch.frameworks.megatron.arguments import PLANNED_BY, STAGE_FLAGS, planned_arguments
from llmlaunch.frameworks.megatron.namespace import HEADS, STAGES, Namespace, namespace_of
from llmlaunch.frameworks.megatron.own_choices import COMPANIONS, is_own_choice
from llmlaunch.frameworks.megatron.rules import ALL_REQUIREMENTS
from llmlaunch.frameworks.megatron.versions import core_parser
from llmlaunch.frameworks.megatron.words import MegatronWords, read_words
from llmlaunch.layout import RECOMPUTE_NAMES, Layout
from llmlaunch.recipe.load import recipe_from
from llmlaunch.recipe.types import Recipe

__all__ = [
    "ADDED",
    "OF_TOKENIZER",
    "REASONS",
    "VOCABULARY",
    "Differences",
    "compared",
    "equal",
    "pinned_layout",
    "rendered_namespace",
]

# Why rendering adds an argument that a command line may lack, by `dest`; and those that change nothing of the training.
ADDED: Mapping[str, str] = {
    "log_throughput": "more in the log",
    "log_device_memory_used": "more in the log",
    "log_timers_to_tensorboard": "seconds and throughput of a step are among the curves",
    "eval_interval": "no default, and training.py divides by it",
    "eval_iters": "a recipe without training.evaluation evaluates nothing",
    "exit_signal_handler": "saves and ends when it is told to",
    "create_attention_mask_in_dataloader": "fused attention is causal by itself",
    "load": "a job that comes back goes on from its last checkpoint",
    "dist_ckpt_optim_fully_reshardable": "another layout may have to load the checkpoint",
    "overlap_grad_reduce": "hides communication of the distributed optimizer",
    "overlap_param_gather": "hides communication of the distributed optimizer",
    "overlap_cpu_optimizer_d2h_h2d": "hides the copies of the offloaded optimizer",
    "use_precision_aware_optimizer": "the offloaded optimizer needs it",
    "moe_grouped_gemm": "all experts of a rank in one kernel",
    "use_fused_weighted_squared_relu": "one kernel squares and weighs what experts put out",
    "moe_router_dtype": "many experts want fp32 scores",
    "moe_router_pre_softmax": "one score that sums to 1 would teach the router nothing",
    "fp8_amax_history_len": "a scale from the largest value of many steps",
    "fp8_amax_compute_algo": "a scale from the largest value of many steps",
    "reuse_grad_buf_for_mxfp8_param_ag": "spares a buffer of its own",
    "gradient_accumulation_fusion": "fused, Megatron-FSDP needs Transformer Engine 2.10",
    "init_model_with_meta_device": "no device ever holds the whole model",
    "megatron_fsdp_main_grads_dtype": "Megatron-FSDP accumulates in bf16 by itself",
    "bias_gelu_fusion": "the fused kernel adds a bias",
    "apply_rope_fusion": "the fused kernel of latent attention is for yarn alone",
    "qk_layernorm": "latents have norms, always",
    "te_rng_tracker": "a graph cannot replay the usual generator's offsets",
    "check_for_nan_in_loss_and_grad": "a graph of the whole iteration cannot look at the loss",
    "tokenizer_type": "tokens are numbers already",
    "ckpt_format": "the format that any other layout can load",
    "split": "a hundredth is kept apart",
    "lr": "training.learning_rate has a default",
}
# Why an argument of the command line is not in the recipe as it stands, by `dest`.
REASONS: Mapping[str, str] = {
    "tokenizer_type": "tokens are numbers where no tokenizer of the recipe reads them; model.vocab_size says how many",
    "tokenizer_model": "made-up data has no tokenizer; model.vocab_size says how many tokens there are",
    "load": "a job goes on from where it saves; training.start_from names other weights to begin with",
    "finetune": "training.start_from begins with weights of another training",
    "use_checkpoint_args": "the sizes stand in a checkpoint; write them as arguments, or as keys of the recipe",
    "lr_warmup_iters": "a recipe leaves at least one step after the warm-up",
    "eval_iters": "a recipe without training.evaluation evaluates nothing",
    "eval_interval": "a recipe without training.evaluation evaluates nothing",
    "cross_entropy_fusion_impl": "Transformer Engine's kernel is refused as unstable by core 0.19",
    "fp8": "training.fp8 names the recipe, which decides the format",
    "moe_router_load_balancing_type": "a recipe knows aux_loss, seq_aux_loss and none",
    "data_args_path": "a recipe names the datasets themselves",
    "train_data_path": "a recipe names one blend and its split",
    "valid_data_path": "a recipe names one blend and its split",
    "test_data_path": "a recipe names one blend and its split",
}
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
    rendered argument follows from, by `dest`. `refused` says what Megatron-LM cannot run of the recipe, whatever the
    layout."""

    extra_args: list[str] = field(default_factory=list)
    keys: dict[str, str] = field(default_factory=dict)
    refused: list[str] = field(default_factory=list)
    unread: list[UnreadWords] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def compared(
    original: Namespace, parsed: MegatronWords, document: Mapping[str, Any], whole: Mapping[str, Any], version: str
) -> Differences:
    """Return what rendering a recipe makes different from `original`. `whole` is the `document` with stand-ins for what
    it lacks, which are not compared. Raises UserError where that is no recipe that loads."""
    recipe = recipe_from(Document("the recipe", "", whole, {}, {}))
    arguments, rendered = rendered_namespace(recipe, version)
    refused = [f"{each.recipe_key}: {each.sentence}" for each in ALL_REQUIREMENTS if each.broken(recipe)]
    keys = {dest: each.reason.keys[0] for dest, each in arguments.items() if each.reason.keys}
    result = Differences(refused=refused, keys=keys)
    _vocabulary(original, rendered, parsed, recipe.model.vocab_size, result)
    added: list[str] = []
    if "data" not in document:
        groups = (parsed.words[dest] for dest in OF_DATA if dest in parsed.words)
        result.unread += [UnreadWords(group, "belongs to data, whose source is missing") for group in groups]
    idle = ((parsed.words[dest], reason) for dest, reason in original.idle.items() if dest in parsed.words)
    result.unread += [UnreadWords(group, reason) for group, reason in idle]
    for dest in sorted(original.keys() | rendered.keys()):
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
            added += [f"{_flag(dest, arguments)} ({ADDED[dest]})"] if dest in ADDED else []
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
    choice = COMPANIONS.get(dest, "")
    if dest in OWN_WORD or is_own_choice(dest, group[1:]) or is_own_choice(choice, _items(original.get(choice))):
        _extra(group, result)
        return
    decided = unused or dest in ELSEWHERE or dest in PLANNED_BY or dest in (STAGES, HEADS) or group[0] in STAGE_FLAGS
    if dest in rendered.explicit or decided:
        value = rendered.get(dest)
        instead = (
            f"rendered as {value}" if dest in rendered.explicit else f"{PLANNED_BY.get(dest, 'the layout')} decides"
        )
        reason = REASONS["tokenizer_model"] if unused else REASONS.get(dest, instead)
        result.unread.append(UnreadWords(group, reason))
    else:
        _extra(group, result)


def _extra(group: Sequence[str], result: Differences) -> None:
    name = group[0].lstrip("-").partition("=")[0]
    if any(known_secret(word) or is_secret_variable(name, word) for word in group[1:]):
        result.unread.append(UnreadWords((group[0].partition("=")[0],), "looks like a secret, which is never written"))
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
