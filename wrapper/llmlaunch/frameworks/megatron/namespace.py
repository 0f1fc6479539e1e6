"""The namespace that Megatron-LM trains with: what a command line sets, its parser's defaults, and what validate_args
makes of both (megatron/training/arguments.py, core 0.19).

Two command lines that mean the same have equal namespaces, however each one writes it: stages in whichever notation,
lengths in samples or in steps, a flag of an earlier version or its successor.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args

from llmlaunch.errors import UserError
from llmlaunch.frameworks.megatron.flags.row import HEADS, STAGES
from llmlaunch.frameworks.megatron.hybrid import one_pattern
from llmlaunch.frameworks.megatron.words import Value, Values, default_values, typed_value
from llmlaunch.techniques.switches import GraphScope

MOST_LAYERS = 10_000
_OPERATORS = {ast.Add: operator.add, ast.Mult: operator.mul}


def layer_pattern(value: object, layers: int) -> tuple[int, ...] | None:
    """Return 1 for each mixture layer and 0 for each dense one, as Megatron reads --moe-layer-freq: every N-th layer,
    or a pattern such as ([0]*3+[1]*58). None for what is neither."""
    if isinstance(value, str):
        text = value.strip()
        value = int(text) if re.fullmatch(r"\d{1,9}", text) else _pattern(text)
    if isinstance(value, bool) or value is None or layers > MOST_LAYERS:
        return None
    if isinstance(value, int):
        return tuple(int(value > 0 and layer % value == 0) for layer in range(layers))
    items = tuple(value) if isinstance(value, Sequence) else ()
    return items if all(item in (0, 1) for item in items) and items else None


def _pattern(text: str) -> Any:
    if len(text) > MOST_LAYERS * 4 or not re.fullmatch(r"[\[\]()\d,*+\s]+", text):
        return None
    try:
        return _evaluated(ast.parse(text, mode="eval").body)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None


def _evaluated(node: ast.expr) -> Any:
    if isinstance(node, ast.Constant) and isinstance(node.value, int) and node.value <= MOST_LAYERS:
        return node.value
    if isinstance(node, (ast.List, ast.Tuple)):
        return [_evaluated(item) for item in node.elts]
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        left, right = _evaluated(node.left), _evaluated(node.right)
        if isinstance(node.op, ast.Mult) and _length(left) * _length(right) > MOST_LAYERS:
            raise ValueError("is too long")
        return _OPERATORS[type(node.op)](left, right)
    raise ValueError("is no pattern")


def _length(value: Any) -> int:
    return len(value) if isinstance(value, list) else max(int(value), 1)


DEFAULT_TOKENIZER = "GPT2BPETokenizer"  # of pretrain_gpt.py
LEGACY_SPLIT = "969,30,1"
PIPELINE_NOTATIONS = (
    "num_layers_per_virtual_pipeline_stage",
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
    "pipeline_model_parallel_layout",
)
# of earlier versions, or what today's validate_args replaces
REPLACED = ("recompute_activations", "checkpoint_activations", "use_rotary_position_embeddings", "warmup", "batch_size")
MOST_STAGES = 4096
MOST_LENGTH = 4096
MOST_STEPS = 10**18


class Namespace(dict[str, Any]):
    """Values by `dest`; `explicit` are the names that the command line, or the log, set itself, and `converted` those
    among them that it said in another unit, with the name it used. `idle` are those that change nothing of this model,
    with the reason; they stand at their defaults here."""

    explicit: frozenset[str] = frozenset()
    converted: Mapping[str, str] = {}
    idle: Mapping[str, str] = {}


def namespace_of(values: Values, version: str, world_size: int | None = None, place: str = "") -> Namespace:
    """Return all values by `dest`. Raises UserError for a value of the wrong type and for stages that hold no model."""
    explicit: dict[str, Value] = {}
    for dest, value in values.items():
        try:
            explicit[dest] = typed_value(dest, value, version)
        except ValueError as error:
            raise UserError(f"{place}: {dest}: {ascii(value)[:60]} {error}; correct it") from None
    space = Namespace(default_values(version) | explicit)
    space.explicit = frozenset(explicit)
    _earlier_spellings(space)
    space.idle = dict(_idle(space))
    space |= {dest: default_values(version).get(dest) for dest in space.idle}
    segments = one_pattern(space)
    _sizes(space)
    _parallel(space, world_size)
    _lengths(space)
    _recompute(space)
    _graphs(space)
    _numbers(space)
    _experts(space)
    _stages(space, segments, place)
    if space.get("data_path") or space.get("split"):
        space["split"] = re.sub(r"\s", "", str(space.get("split") or LEGACY_SPLIT))
    if isinstance(space.get("window_size"), str):
        space["window_size"] = tuple(int(part) for part in re.findall(r"-?\d{1,9}", str(space["window_size"])))
    return space


def _earlier_spellings(space: Namespace) -> None:
    if space.get("tokenizer_type") is None and space.get("vocab_file"):
        space["tokenizer_type"] = DEFAULT_TOKENIZER
    if space.get("use_rotary_position_embeddings"):
        space["position_embedding_type"] = "rope"
    if space.get("recompute_activations"):
        space["recompute_granularity"] = "selective"
    if space.get("checkpoint_activations"):
        space |= {"recompute_granularity": "full", "recompute_method": space.get("recompute_method") or "uniform"}
    if space.get("add_position_embedding") is False and space.get("position_embedding_type") == "learned_absolute":
        space["position_embedding_type"] = "none"
    for old, new in (("model_parallel_size", "tensor_model_parallel_size"), ("batch_size", "micro_batch_size")):
        if space.get(old) is not None:
            space[new] = space[old]
    if space.get("warmup") is not None:
        space["lr_warmup_fraction"] = space["warmup"]
    if space.get("moe_enable_deepep"):
        space["moe_flex_dispatcher_backend"] = "deepep"
    for earlier, today in (("encoder_num_layers", "num_layers"), ("encoder_seq_length", "seq_length")):
        if space.get(today) is None:
            space[today] = space.get(earlier)
    for name in (*REPLACED, "model_parallel_size", "moe_enable_deepep", "encoder_num_layers", "encoder_seq_length"):
        space.pop(name, None)


def _idle(space: Namespace) -> Iterator[tuple[str, str]]:
    """Yield what is set and changes nothing, with the reason (core 0.19)."""
    if space.get("deprecated_use_mcore_models"):
        yield "deprecated_use_mcore_models", "is ignored: there are no other models"
    if space.get("add_position_embedding") is False and space.get("position_embedding_type") != "learned_absolute":
        yield "add_position_embedding", "speaks of learned positions alone"
    if space.get("rotary_seq_len_interpolation_factor") == 1:
        yield "rotary_seq_len_interpolation_factor", "1 stretches nothing"
    if space.get("moe_router_pre_softmax") and space.get("moe_router_score_function") in ("sigmoid", "sqrtsoftplus"):
        yield "moe_router_pre_softmax", "other scores have no softmax"
    if space.get("moe_shared_expert_overlap") and not space.get("moe_shared_expert_intermediate_size"):
        yield "moe_shared_expert_overlap", "there is no shared expert"
    if (space.get("moe_expert_capacity_factor") or 0) < 0:
        yield "moe_expert_capacity_factor", "Megatron takes a negative factor for none"
    if space.get("multi_latent_attention"):
        for dest in ("kv_channels", "use_rope_scaling"):
            if space.get(dest):
                yield dest, "latent attention has widths and positions of its own"


def _sizes(space: Namespace) -> None:
    hidden, heads = space.get("hidden_size"), space.get("num_attention_heads")
    if hidden and space.get("ffn_hidden_size") is None:
        space["ffn_hidden_size"] = int((4 * hidden * 2 / 3) / 64) * 64 if space.get("swiglu") else 4 * hidden
    if hidden and heads and not space.get("multi_latent_attention") and space.get("kv_channels") is None:
        space["kv_channels"] = hidden // heads if hidden % heads == 0 else None
    if not space.get("group_query_attention"):
        space["num_query_groups"] = heads
    elif space.get("num_query_groups") == heads:  # as many keys and values as queries: the same without it
        space["group_query_attention"] = False
    if space.get("multi_latent_attention"):
        space["rope_type"] = space.get("rope_type") or "yarn"


def _parallel(space: Namespace, world_size: int | None) -> None:
    tensor = space.get("tensor_model_parallel_size") or 1
    if space.get("expert_tensor_parallel_size") is None:
        space["expert_tensor_parallel_size"] = tensor
    if tensor == 1:
        space["sequence_parallel"] = False
    model = tensor * (space.get("pipeline_model_parallel_size") or 1) * (space.get("context_parallel_size") or 1)
    micro, batch = space.get("micro_batch_size"), space.get("global_batch_size")
    if batch is None and micro and world_size and world_size % model == 0:
        space["global_batch_size"] = micro * (world_size // model)
    if space.get("use_megatron_fsdp"):
        space["use_distributed_optimizer"] = True
    else:
        space.pop("data_parallel_sharding_strategy", None)


def _lengths(space: Namespace) -> None:
    """Lengths in samples become steps, as training.py update_train_iters has them without a ramp of the batch."""
    batch = space.get("global_batch_size")
    for samples, steps in (
        ("train_samples", "train_iters"),
        ("lr_decay_samples", "lr_decay_iters"),
        ("lr_warmup_samples", "lr_warmup_iters"),
        ("lr_wsd_decay_samples", "lr_wsd_decay_iters"),
    ):
        if space.get(samples) and batch and not space.get(steps):
            space[steps] = space[samples] // batch
            if samples in space.explicit:
                space.explicit |= {steps}
                space.converted = {**space.converted, steps: samples}
            space.pop(samples)
    fraction, length = space.get("lr_warmup_fraction"), space.get("lr_decay_iters") or space.get("train_iters")
    if fraction is not None and length:
        space["lr_warmup_iters"] = int(max(min(fraction * length, MOST_STEPS), -MOST_STEPS))
        space.pop("lr_warmup_fraction")
    if space.get("lr_decay_iters") == space.get("train_iters"):  # its default
        space["lr_decay_iters"] = None


def _recompute(space: Namespace) -> None:
    granularity = space.get("recompute_granularity")
    if granularity == "full":
        space["recompute_method"] = space.get("recompute_method") or "uniform"
        space["recompute_num_layers"] = space.get("recompute_num_layers") or 1
    else:
        space |= {"recompute_method": None, "recompute_num_layers": None}
    if granularity == "selective":
        space["recompute_modules"] = sorted(space.get("recompute_modules") or ["core_attn"])
    else:
        space.pop("recompute_modules", None)


def _graphs(space: Namespace) -> None:
    """One spelling for all versions: `cuda_graph_impl` "full_iteration" (core 0.16: a scope of "local"), or the modules
    in one order, none for whole layers. --enable-cuda-graph and --external-cuda-graph were its two implementations."""
    implementation = space.get("cuda_graph_impl") or "none"
    for old, meant in (("enable_cuda_graph", "local"), ("external_cuda_graph", "transformer_engine")):
        if space.pop(old, None) and implementation == "none":
            implementation = meant
            space.explicit |= {"cuda_graph_impl"}
            space.converted = {**space.converted, "cuda_graph_impl": old}
    names = ("cuda_graph_modules", "cuda_graph_scope", "cuda_graph_scope_deprecated")
    stated = [name for value in (space.pop(name, None) for name in names) for name in _names(value)]
    scopes = {name.rpartition(".")[2] for name in stated} - {"full"}
    if "full_iteration" in scopes:
        implementation, scopes = "full_iteration", set()
    elif implementation in ("none", "full_iteration"):
        scopes = set()
    known = [name for name in get_args(GraphScope) if name in scopes]
    space |= {"cuda_graph_impl": implementation, "cuda_graph_modules": known + sorted(scopes - set(known))}


def _names(value: Value) -> list[str]:
    return [str(item) for item in value] if isinstance(value, (list, tuple)) else [str(value)] if value else []


def _numbers(space: Namespace) -> None:
    narrow = space.get("bf16") and not space.get("accumulate_allreduce_grads_in_fp32")
    if narrow and _dtype(space.get("main_grads_dtype")) == "bf16":
        space["grad_reduce_in_bf16"] = True  # the buffer of gradients is then in the format of the parameters
    if space.get("grad_reduce_in_bf16"):
        space["accumulate_allreduce_grads_in_fp32"] = False
    elif space.get("bf16") and _dtype(space.get("main_grads_dtype")) in (None, "fp32"):
        space["accumulate_allreduce_grads_in_fp32"] = True
    for name in ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"):
        space[name] = _dtype(space.get(name))
    if not space.get("fp8"):
        for name in ("fp8_recipe", "fp8_amax_history_len", "fp8_amax_compute_algo", "fp8_margin", "fp8_interval"):
            space.pop(name, None)
    if not space.get("cross_entropy_loss_fusion"):
        space.pop("cross_entropy_fusion_impl", None)
    if not space.get("optimizer_cpu_offload"):
        space.pop("optimizer_offload_fraction", None)


def _dtype(value: Value) -> str | None:
    """A torch.dtype as a log prints it, in the words of the flags."""
    names = {"torch.float32": "fp32", "torch.bfloat16": "bf16", "torch.float16": "fp16", "torch.uint8": "fp8"}
    return None if value is None else names.get(str(value), str(value))


def _experts(space: Namespace) -> None:
    if not space.get("num_experts"):
        for name in [name for name in space if name.startswith("moe_")]:
            space.pop(name)
        space.pop("expert_tensor_parallel_size", None)
        return
    if space.get("moe_ffn_hidden_size") is None:
        space["moe_ffn_hidden_size"] = space.get("ffn_hidden_size")
    if space.get("num_layers"):
        space["moe_layer_freq"] = layer_pattern(space.get("moe_layer_freq", 1), space["num_layers"])
    for name in ("moe_aux_loss_coeff", "moe_router_load_balancing_type"):
        value = space.get(name)
        if isinstance(value, (list, tuple)) and len(value) == 1:
            space[name] = value[0]
    if space.get("moe_router_load_balancing_type") == "none":
        space.pop("moe_aux_loss_coeff", None)
    if space.get("moe_token_dispatcher_type") != "flex":
        space.pop("moe_flex_dispatcher_backend", None)


def _stages(space: Namespace, segments: tuple[str, ...], place: str) -> None:
    """Chunks of each rank under `num_virtual_stages_per_pipeline_rank` and uneven stages under STAGES. `segments` are
    the layers of each stage where one pattern says them all."""
    layers, pipeline = space.get("num_layers"), space.get("pipeline_model_parallel_size") or 1
    # what a log holds beside the flags, once validate_args has worked it out
    chunks = space.pop("virtual_pipeline_model_parallel_size", None) or space.get(
        "num_virtual_stages_per_pipeline_rank"
    )
    per_stage = space.get("num_layers_per_virtual_pipeline_stage")
    written = space.get("pipeline_model_parallel_layout")
    notation = {name: space.pop(name, None) for name in PIPELINE_NOTATIONS}
    split: tuple[int, ...] = ()
    if layers and 0 < layers <= MOST_LAYERS and 0 < pipeline <= MOST_STAGES:
        if written or len(segments) > 1:
            stages = written_stages(str(written)) if written else segments
            split = tuple(stage.count("t") for stage in stages) if written else tuple(map(len, stages))
            if not split or len(split) % pipeline or sum(split) != layers:
                flag, value = "pipeline-model-parallel-layout", written or "|".join(segments)
                raise UserError(
                    f"{place}: --{flag if written else 'hybrid-layer-pattern'} {ascii(value)[:60]}: holds no {layers} "
                    f"layers in a multiple of {pipeline} stages; correct it"
                )
            chunks = len(split) // pipeline
            if written and any("m" in stage for stage in stages[:-1]):
                space[HEADS] = _stage_of_heads(stages, str(written), place)
        elif per_stage and not chunks:
            slots = layers + sum(bool(notation[name]) for name in notation if name.startswith("account_for"))
            chunks = max(slots // pipeline // per_stage, 1)
        split = split or _split(notation, layers, pipeline, min(chunks or 1, MOST_STAGES))
    space["num_virtual_stages_per_pipeline_rank"] = chunks or 1
    space[STAGES] = split if len(set(split)) > 1 else ()


def _stage_of_heads(stages: tuple[str, ...], written: str, place: str) -> str:
    if any("m" in stage for stage in stages[:-2]):
        raise UserError(
            f"{place}: --pipeline-model-parallel-layout {ascii(written)[:60]}: its prediction heads (m) lie before the "
            "last but one stage, which no recipe says; move them to one of the last two"
        )
    return "before-last"


def _split(notation: Mapping[str, Value], layers: int, pipeline: int, chunks: int) -> tuple[int, ...]:
    """Decoder layers of each virtual stage, from counts of the first and the last rank or from slots that embedding and
    loss take. Empty where stages are even, or the counts do not add up, which Megatron refuses."""
    first, last = notation["decoder_first_pipeline_num_layers"], notation["decoder_last_pipeline_num_layers"]
    if isinstance(first, int) or isinstance(last, int):
        rest = layers - sum(count for count in (first, last) if isinstance(count, int))
        between = pipeline - isinstance(first, int) - isinstance(last, int)
        each = rest // between if between > 0 else 0
        ranks = [each] * pipeline
        ranks[0] = first if isinstance(first, int) else ranks[0]
        ranks[-1] = last if isinstance(last, int) else ranks[-1]
        return tuple(count // chunks for count in ranks) * chunks if sum(ranks) == layers else ()
    embedding = bool(notation["account_for_embedding_in_pipeline_split"])
    loss = bool(notation["account_for_loss_in_pipeline_split"])
    slots, stages = layers + embedding + loss, pipeline * chunks
    if not (embedding or loss) or slots % stages or stages < 2:
        return ()
    split = [slots // stages] * stages
    split[0] -= embedding
    split[-1] -= loss
    return tuple(split)


def written_stages(text: str) -> tuple[str, ...]:
    """Return each stage of a layout such as "Et*3|(t*4|)*2t*3mL", its letters one by one; empty for what is none."""
    flat = text.replace(" ", "").replace(",", "")
    if len(flat) > MOST_LENGTH or not re.fullmatch(r"[EtmL|()*\d]+", flat):
        return ()
    for _ in range(8):  # the innermost parentheses first
        flat, changes = re.subn(r"\(([^()]*)\)(?:\*(\d{1,5}))?", _repeated, flat)
        if len(flat) > MOST_LAYERS * 4:
            return ()
        if not changes:
            break
    flat = re.sub(r"([EtmL|])\*(\d{1,5})", lambda match: match[1] * min(int(match[2]), MOST_LAYERS), flat)
    return tuple(flat.split("|")) if re.fullmatch(r"[EtmL|]+", flat) else ()


def _repeated(match: re.Match[str]) -> str:
    return match[1] * min(int(match[2] or 1), MOST_LAYERS // max(len(match[1]), 1) + 1)
