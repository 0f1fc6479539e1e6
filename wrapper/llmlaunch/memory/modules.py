"""The modules of a Hugging Face model that have parameters of their own, in the order in which they run forward.

Transformers keeps queries, keys and values, and gate and up, as linears of their own, all experts of a layer as two
tensors of one module (models/<family>/modeling_<family>.py, 5.23). A part that no such class computes is one tensor.
The elements add up to those of `memory.weights.rank_parameters` on one pipeline rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache

from llmlaunch.frozen import frozen
from llmlaunch.models.kinds import attention_kinds, layer_parts
from llmlaunch.models.parameters import LayerParameters, count_parameters, indexer_parameters
from llmlaunch.models.shape import ModelShape
from llmlaunch.models.vision import Vision
from llmlaunch.techniques import Adapters

__all__ = ["FUSED_LINEARS", "Module", "ModuleSplit", "modules_of"]

FUSED_LINEARS = ("phi3", "gpt2")
"""Families whose models have one linear for queries, keys and values, and one for gate and up."""
# Families whose mixture DeepSpeed gathers as one module (deepspeed/runtime/zero/leaf_module_config.py
# DEFAULT_LEAF_MODULE_CLASSES, 0.19.8).
LEAF_MIXTURES = ("mixtral", "qwen2_moe", "qwen3_moe")


@frozen
class Module:
    """A module as hooks see it: the elements of its own parameters on one device, and how many of the modules behind it
    are inside it. `layer` marks one that full recompute runs again as a whole, `shares_table` the head that is tied to
    the embedding, whose table is counted there, `frozen_table` the embedding that no backward pass reads, and `leaf` a
    mixture that stands for all that is inside it."""

    parameters: tuple[int, ...] = ()
    inside: int = 0
    layer: bool = False
    shares_table: bool = False
    frozen_table: bool = False
    leaf: bool = False


@frozen
class ModuleSplit:
    """How many devices share linears, experts and the inside of an expert; `table_whole` leaves the embedding whole."""

    tensor: int = 1
    expert: int = 1
    expert_tensor: int = 1
    table_whole: bool = True


Sizes = tuple[int, ...]  # the elements of each parameter of a module
EMPTY = Module()  # an activation, or rotary positions


@lru_cache(maxsize=64)
def modules_of(shape: ModelShape, split: ModuleSplit, adapters: Adapters | None) -> tuple[Module, ...]:
    """Return the modules of a whole model on one device, those of low-rank adapters among them, each before what is
    inside it."""
    counts, hidden = count_parameters(shape), shape.hidden_size
    divided, tied = counts.embedding // split.tensor, shape.tied_embeddings
    table = counts.embedding if split.table_whole else divided
    body = [Module((table,), frozen_table=adapters is not None and not tied)]
    if counts.positions:
        body.append(Module((counts.positions,)))
    if shape.vision is not None:
        body.extend(_encoder(shape.vision, hidden, split.tensor))
    body.append(EMPTY)
    kinds = attention_kinds(shape)
    alike: dict[tuple[object, ...], list[Module]] = {}
    for number, (layer, part) in enumerate(zip(counts.layers, layer_parts(shape), strict=True)):
        kind = next(each.shape for each in kinds if part != "attention" or each.layers[number])
        key = (id(kind), part, layer)
        if key not in alike:
            alike[key] = _container(_layer(shape, kind, part, split, adapters, layer), layer=True)
        body.extend(alike[key])
    body.append(Module((counts.final_norm,)))
    head = Module(() if tied else (divided,), shares_table=tied)
    further = [Module((counts.mtp,))] if counts.mtp else []
    return tuple(_container([*_container(body), head, *further]))


def _container(modules: Iterable[Module], layer: bool = False) -> list[Module]:
    inside = list(modules)
    return [Module(inside=len(inside), layer=layer), *inside]


def _each(sizes: Iterable[Sizes]) -> Iterator[Module]:
    return map(Module, sizes)


def _layer(
    shape: ModelShape,
    kind: ModelShape,
    part: str,
    split: ModuleSplit,
    adapters: Adapters | None,
    counts: LayerParameters,
) -> Iterator[Module]:
    """Yield the modules inside one layer, whose attention is of a `kind`, or has another `part` in its place."""
    norms = [Module((counts.norms // shape.norms_per_layer,))] * shape.norms_per_layer
    pair = _pairs(adapters)
    yield norms[0]
    if part != "attention" or shape.compressed_attention is not None:
        if counts.attention:
            yield Module((counts.attention,))
    else:
        latent = kind.mla is not None
        yield from _container(_each((_latent_attention if latent else _attention)(kind, split.tensor, pair)))
    yield from norms[1:]
    if counts.experts:
        yield from _mixture(shape, split, pair, counts)
    elif counts.mlp:
        yield from _container(_mlp(shape, shape.ffn_hidden_size, split.tensor, pair))


Pairs = Callable[[str, int, int], Iterator[Sizes]]


def _pairs(adapters: Adapters | None) -> Pairs:
    """Return what yields both matrices of the adapter beside a linear with so many inputs and outputs, where it has
    one."""

    def pair(name: str, inputs: int, outputs: int) -> Iterator[Sizes]:
        if adapters is not None and name in adapters.targets:
            yield (adapters.rank * inputs,)
            yield (adapters.rank * outputs,)

    return pair


def _linear(inputs: int, outputs: int, bias: int) -> Sizes:
    return (inputs * outputs, bias) if bias else (inputs * outputs,)


def _attention(shape: ModelShape, tensor: int, pair: Pairs) -> Iterator[Sizes]:
    """Yield the projections of softmax attention, with norms of queries and keys and the sinks of heads."""
    hidden, query = shape.hidden_size, shape.query_width // tensor
    queries = (2 if shape.attention_gate else 1) * query
    groups = max(shape.num_query_groups // tensor, 1)
    keys = groups * shape.head_dim
    biased = shape.linear_bias or shape.qkv_bias
    outputs = {"q_proj": queries, "k_proj": keys, **({"v_proj": keys} if shape.projected_groups == 2 else {})}
    if shape.family in FUSED_LINEARS:
        width = sum(outputs.values())
        yield _linear(hidden, width, width * biased)
        yield from pair("q_proj", hidden, width)
    else:
        for name, width in outputs.items():
            yield _linear(hidden, width, width * biased)
            yield from pair(name, hidden, width)
    if shape.qk_layernorm:
        of_all = (query, groups * shape.head_dim)
        widths = of_all if shape.qk_norm_of_all_heads else (shape.head_dim, shape.head_dim)
        yield from ((width * (1 if shape.normalization == "RMSNorm" else 2),) for width in widths)
    if shape.attention_sinks:
        yield (shape.num_attention_heads // tensor,)
    yield _linear(query, hidden, hidden * shape.linear_bias)
    yield from pair("o_proj", query, hidden)


def _latent_attention(shape: ModelShape, tensor: int, pair: Pairs) -> Iterator[Sizes]:
    """Yield the projections of latent attention and the norms of latents; all have an adapter, or none."""
    mla = shape.mla
    assert mla is not None
    hidden, heads = shape.hidden_size, shape.num_attention_heads
    queries = heads * (mla.qk_head_dim + mla.qk_pos_emb_head_dim) // tensor
    down = mla.kv_lora_rank + mla.qk_pos_emb_head_dim
    up, values = heads * (mla.qk_head_dim + mla.v_head_dim) // tensor, heads * mla.v_head_dim // tensor
    latent = mla.q_lora_rank
    linears: list[tuple[int, int]] = [(hidden, queries)] if latent is None else [(hidden, latent), (latent, queries)]
    norm = 1 if shape.normalization == "RMSNorm" else 2
    for inputs, outputs in (*linears, (hidden, down), (mla.kv_lora_rank, up), (values, hidden)):
        yield (inputs * outputs,)
        yield from pair("o_proj", inputs, outputs)
    yield from ((norm * width,) for width in (latent, mla.kv_lora_rank) if width)
    indexer = indexer_parameters(shape)
    if indexer:
        yield (indexer,)


def _mlp(shape: ModelShape, width: int, tensor: int, pair: Pairs) -> Iterator[Module]:
    """Yield the modules inside an MLP that is so wide."""
    hidden, inner = shape.hidden_size, width // tensor
    fused = shape.family in FUSED_LINEARS and shape.gated_mlp
    gate = {"gate_proj": inner} if shape.gated_mlp and not fused else {}
    outputs = gate | {"up_proj": 2 * inner if fused else inner}
    first, *others = (
        [_linear(hidden, columns, columns * shape.linear_bias), *pair(name, hidden, columns)]
        for name, columns in outputs.items()
    )
    yield from _each(first)
    yield EMPTY
    for sizes in others:
        yield from _each(sizes)
    yield from _each([_linear(inner, hidden, hidden * shape.linear_bias), *pair("down_proj", inner, hidden)])


def _mixture(shape: ModelShape, split: ModuleSplit, pair: Pairs, counts: LayerParameters) -> Iterator[Module]:
    """Yield router, experts and shared expert, or one module where DeepSpeed gathers them together."""
    moe = shape.moe
    assert moe is not None
    here, inner = moe.num_experts // split.expert, moe.ffn_hidden_size // split.expert_tensor
    outer, gates = shape.expert_width, 2 if shape.gated_mlp else 1
    first, second = here * gates * outer * inner, here * outer * inner
    biases = (here * gates * inner, here * outer) if shape.linear_bias else ()
    parts = [Module((counts.router,)), Module((first, second, *biases))]
    for name in ("gate_proj", "up_proj")[2 - gates :]:
        parts.extend(_each(pair(name, here * outer, here * inner)))
    parts.extend(_each(pair("down_proj", here * inner, here * outer)))
    if moe.shared_expert_ffn_hidden_size:
        parts.extend(_container(_mlp(shape, moe.shared_expert_ffn_hidden_size, split.tensor, pair)))
    if shape.family in LEAF_MIXTURES:
        yield Module(tuple(size for part in parts for size in part.parameters), leaf=True)
    else:
        yield from _container(parts)


def _encoder(vision: Vision, hidden: int, tensor: int) -> Iterator[Module]:
    """Yield the modules of a vision encoder."""
    h, ffn, merged = vision.hidden_size, vision.ffn_hidden_size, vision.merged_width
    yield Module((vision.patch_width * h, h))
    yield Module((vision.position_embeddings * h,))
    linears = ((h, 3 * h, 3 * h), (h, h, h), (h, ffn, ffn), (ffn, h, h))
    block = [(2 * h, 2 * h), *((inputs * outputs // tensor, bias) for inputs, outputs, bias in linears)]
    for _ in range(vision.depth):
        yield from _container(_each(block), layer=True)
    for number in range(vision.projectors):
        norm = 2 * (merged if number else h)
        sizes = ((norm,), (merged * merged // tensor, merged), (merged * hidden // tensor, hidden))
        yield from _container(_each(sizes))
