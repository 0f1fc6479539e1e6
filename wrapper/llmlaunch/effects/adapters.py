"""Low-rank adapters beside linear layers of the blocks; the rest of the model is frozen."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from llmlaunch.columns import FloatColumn
from llmlaunch.layers.block import Block, Saved, Tensors
from llmlaunch.layers.columns import LayerColumns, Size
from llmlaunch.layers.layer import Branch
from llmlaunch.layers.matrix import Matrix, adapted, fused_adapted, fused_names
from llmlaunch.layers.model import model_of
from llmlaunch.memory.effects import Effect
from llmlaunch.memory.job import Job, RankColumns, head_rank
from llmlaunch.memory.layer_bytes import layers_of
from llmlaunch.memory.weights import tables
from llmlaunch.techniques.requests import Adapters

READ_THE_STREAM = ("linear_qkv", "linear_fc1")  # linear layers of Megatron core behind a norm


class AdaptersEffect(Effect):
    """Adapters alone have gradients and optimizer states (LoRA, Hu et al. 2021)."""

    order = 2  # whatever else of the model is frozen

    def on(self, job: Job) -> bool:
        return job.techniques.adapters is not None

    def saved(self, c: LayerColumns, branch: Branch, tensors: dict[str, Saved]) -> dict[str, Saved]:
        """What adapters read, and what linear layers that have one need no more."""
        adapters = c.techniques.adapters
        assert adapters is not None
        return (_fused if c.facts.adapters.adapters_fused else _apart)(c, adapters, branch.blocks, tensors)

    def trains_all(self, job: Job) -> bool:
        """The model is frozen."""
        return False

    def trains_head(self, job: Job) -> bool:
        """The head is, too."""
        return False

    def trained_parameters(
        self, job: Job, rows: RankColumns, dense: FloatColumn, expert: FloatColumn
    ) -> tuple[FloatColumn, FloatColumn]:
        """Those of the adapters."""
        assert job.techniques.adapters is not None
        return adapter_parameters(job, rows, frozen=job.techniques.adapters.frozen_down)

    def trained_matrices(
        self,
        job: Job,
        rows: RankColumns,
        trained: tuple[FloatColumn, FloatColumn],
        matrices: tuple[FloatColumn, FloatColumn],
    ) -> tuple[FloatColumn, FloatColumn]:
        """All parameters of adapters are matrices."""
        return trained

    def added_parameters(self, job: Job, rows: RankColumns) -> tuple[FloatColumn, FloatColumn]:
        """The adapters."""
        return adapter_parameters(job, rows)

    def unread_parameters(self, job: Job, rows: RankColumns) -> Size:
        """No backward pass reads a frozen embedding, unless the head is tied to it."""
        return 0.0 if job.shape.tied_embeddings else np.where(rows.first, tables(job, rows)[0], 0.0)

    def stubs(self, job: Job, rows: RankColumns, elements: FloatColumn) -> FloatColumn:
        """Frozen weights have none: they are those of the adapters, of which few are alike."""
        return rows.most_of(_layer_adapters(job, rows)) if job.facts.adapters.adapters_fused else elements


def adapter_parameters(job: Job, rows: RankColumns, frozen: bool = False) -> tuple[FloatColumn, FloatColumn]:
    """Return the (dense, expert) parameters of the adapters on a device. Layers of multi-token-prediction modules of
    Megatron core have adapters as the others have; the projections before them have none. `frozen` leaves out the first
    matrices where these are apart (LoRA-FA, Zhang et al. 2023)."""
    layers = layers_of(job, rows)
    (dense, expert), fused = _adapters_by_kind(job, layers.columns, frozen), job.facts.adapters.adapters_fused
    totals = [rows.sum_of(layers.by_group(each)) for each in (dense, expert)]
    if fused and job.shape.mtp_num_layers:
        modules = np.where(np.equal(rows.rank, head_rank(job, rows.layouts)), job.shape.mtp_modules, 0)
        totals = [total + modules * layers.predicted(each) for total, each in zip(totals, (dense, expert), strict=True)]
    return totals[0], totals[1]


def _layer_adapters(job: Job, rows: RankColumns) -> list[FloatColumn]:
    """Return the parameters of the adapters of one layer of each group on a device."""
    layers = layers_of(job, rows)
    pairs = zip(*_adapters_by_kind(job, layers.columns, frozen=False), strict=True)
    return layers.by_group([dense + expert for dense, expert in pairs])


def _adapters_by_kind(job: Job, c: LayerColumns, frozen: bool) -> tuple[list[Size], list[Size]]:
    count = _fused_pairs if job.facts.adapters.adapters_fused else _pairs
    kinds = model_of(job.shape).kinds
    dense, expert = (
        [count(job, c, [each for each in layer.matrices if each.of_experts == experts], frozen) for layer in kinds]
        for experts in (False, True)
    )
    return dense, expert


def _pairs(job: Job, c: LayerColumns, matrices: list[Matrix], frozen: bool) -> Size:
    """Return rank x (inputs + outputs) of every linear layer that has an adapter (LoRA, Hu et al. 2021, section 4.2).
    Tensor parallelism splits one side of each pair, the one its linear layer is split on."""
    adapters = job.techniques.adapters
    assert adapters is not None
    total: Size = 0.0
    for matrix in matrices:
        ranks = matrix.ranks(c)
        for part in matrix.parts:
            if part.name in adapters.targets:
                outputs = part.on_device(ranks) if matrix.divided == "outputs" else part.columns
                sides = outputs if frozen else matrix.inputs_on_device(c) + outputs
                total = total + matrix.count_on_device(c) * sides
    return adapters.rank * total


def _fused_pairs(job: Job, c: LayerColumns, matrices: list[Matrix], frozen: bool) -> Size:
    """Return the parameters of adapters beside the linears that Megatron core 0.19 has. Tensor parallelism splits both
    matrices of a pair. All experts of a device share one pair for each of their two linears, and a shared expert has
    its own (megatron/bridge/peft/lora.py LoRA, `share_expert_adapters`, Megatron-Bridge 0.6)."""
    adapters = job.techniques.adapters
    assert adapters is not None
    beside = fused_adapted(matrices, adapters)
    total: Size = 0.0
    for matrix in beside:
        total = total + (matrix.inputs + matrix.outputs) / matrix.ranks(c)
    return adapters.rank * total


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
    e, names = c.facts.layer.activation_bytes, fused_names(adapters)
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
