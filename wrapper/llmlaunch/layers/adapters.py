"""What a branch saves for its backward pass where it is frozen and low-rank adapters stand beside some of its linear
layers, or where these keep a share of their inputs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from llmlaunch.layers.block import Block, Saved, Tensors
from llmlaunch.layers.columns import LayerColumns
from llmlaunch.layers.matrix import Matrix
from llmlaunch.techniques import FUSED_MODULES, Adapters

__all__ = ["adapted", "beside_adapters", "fused_adapted", "sampled"]

READ_THE_STREAM = ("linear_qkv", "linear_fc1")  # linear layers of Megatron core behind a norm


def adapted(matrices: Sequence[Matrix], adapters: Adapters) -> list[tuple[Matrix, float]]:
    """Return the linear layers that have an adapter, as Hugging Face's models have them: the matrix of each, and
    the columns of that matrix that are its part."""
    targets = adapters.targets
    return [(matrix, part.columns) for matrix in matrices for part in matrix.parts if part.name in targets]


def fused_adapted(matrices: Sequence[Matrix], adapters: Adapters) -> list[Matrix]:
    """Return the linear layers of Megatron core that have an adapter (megatron/bridge/peft/lora.py LoRA,
    Megatron-Bridge 0.6)."""
    names = _fused_names(adapters)
    return [matrix for matrix in matrices if matrix.fused in names]


def _fused_names(adapters: Adapters) -> frozenset[str]:
    """Return the linear layers of Megatron core whose parts all have an adapter; not every MLP has a gate."""
    targets = adapters.targets
    return frozenset(name for name, parts in FUSED_MODULES.items() if {*parts} - {"gate_proj"} <= targets)


def beside_adapters(c: LayerColumns, blocks: Sequence[Block], tensors: dict[str, Saved]) -> dict[str, Saved]:
    """Return what a branch of these `blocks` saves beside adapters, of the `tensors` that it saves without."""
    adapters = c.techniques.adapters
    if adapters is None:
        return tensors
    return (_fused if c.facts.adapters.adapters_fused else _apart)(c, adapters, blocks, tensors)


def _apart(c: LayerColumns, adapters: Adapters, blocks: Sequence[Block], tensors: dict[str, Saved]) -> dict[str, Saved]:
    """Adapters keep their own rank-wide tensor beside the input of their linear layer, which a frozen layer alone does
    not need; with frozen first matrices nothing needs that input (LoRA-FA, Zhang et al. 2023, section 3). A wider or
    dropped input is a copy for each linear layer, with dropout's mask (peft/tuners/lora/layer.py Linear.forward, 0.19).
    A frozen unfused norm lets go of the copy its weight's gradient would need
    (transformers/models/llama/modeling_llama.py LlamaRMSNorm, 5.23)."""
    facts, n, role = c.facts, c.tokens, blocks[0].role
    e, wide = facts.layer.activation_bytes, facts.adapters.adapter_bytes or facts.layer.activation_bytes
    beside = [matrix for block in blocks for matrix, _ in adapted(block.matrices, adapters)]
    copied = wide > e or facts.adapters.adapter_dropout
    kept = _without_unread(tensors, frozenset() if adapters.frozen_down or copied else adapters.targets)
    kept[f"{role}_adapters"] = Saved(sum(matrix.topk for matrix in beside) * wide * adapters.rank * n)
    if facts.layer.norm_extra_bytes >= e:
        norm = kept[f"{role}_norm_input"]
        smaller = norm.bytes - c.stream_tokens * e * blocks[0].hidden
        kept[f"{role}_norm_input"] = Saved(smaller, moved_by=norm.moved_by)
    if copied:
        per_input = (0.0 if adapters.frozen_down else wide) + (1.0 if facts.adapters.adapter_dropout else 0.0)
        inputs = sum(matrix.inputs * matrix.topk for matrix in beside)
        kept[f"{role}_adapter_inputs"] = Saved(per_input * inputs * n)
    return kept


def _without_unread(tensors: Tensors, readers: frozenset[str]) -> dict[str, Saved]:
    """Return the tensors without inputs of linear layers that none of the `readers` reads. The first layer of a model
    has nothing before its first adapter that needs a gradient, and keeps less: that is not counted."""
    return {
        name: tensor for name, tensor in tensors.items() if not tensor.read_by or not readers.isdisjoint(tensor.read_by)
    }


def _fused(c: LayerColumns, adapters: Adapters, blocks: Sequence[Block], tensors: dict[str, Saved]) -> dict[str, Saved]:
    """Each adapter keeps what is between its matrices, as wide as the rank on every tensor-parallel rank. Those behind
    a norm keep their input gathered where sequence parallelism splits it: all of it, beside the share that the norm
    keeps. Without an adapter, a frozen linear keeps no input, but a router does (megatron/bridge/peft/utils.py
    ParallelLinearAdapter, Megatron-Bridge 0.6; traced)."""
    e, names = c.facts.layer.activation_bytes, _fused_names(adapters)
    kept = _without_unread(tensors, adapters.targets)
    if "linear_qkv" not in names:  # norms of latents are fused into their projections
        kept.pop("attn_latents_normed", None)
    for block in blocks:
        gathered = np.where(c.stream_tokens < c.tokens, e * block.hidden * c.tokens, 0.0)
        for group in block.adapter_groups(c):
            beside = [matrix for matrix in group.matrices if matrix.fused in names]
            size = e * adapters.rank * float(len(beside)) * group.tokens
            if group.of_stream and any(matrix.fused in READ_THE_STREAM for matrix in beside):
                size = size + gathered
            kept[group.name] = Saved(size, group.freed_by)
        if block.norm_always_read:
            kept[f"{block.role}_norm_output"] = tensors[f"{block.role}_norm_output"]
    return kept


def sampled(c: LayerColumns, tensors: dict[str, Saved]) -> dict[str, Saved]:
    """Return the tensors where a linear layer keeps a share of its input's rows for an unbiased weight gradient
    (WTA-CRS, Liu et al. 2023, section 3). The attention keeps the whole of what the projection after it reads.
    What-if."""
    share = c.techniques.sampled_share
    if share >= 1.0:
        return tensors
    return {
        name: Saved(share * each.bytes, each.freed_by, each.moved_by, each.with_module, each.read_by)
        if each.read_by
        else each
        for name, each in tensors.items()
    }
