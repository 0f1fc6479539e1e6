"""Techniques that trade time for memory or overlap the two, beside the layout, and the recipe's keys for them.

Every default changes nothing. Estimator, recipe and backends share this type; which backend can do what is in the
backend's rules.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Annotated, Any, Literal

from pydantic import Field

from llmlaunch.documents.keys import key, section

__all__ = [
    "BIT_EQUAL",
    "CHANGES_ROUNDING",
    "FULL_ITERATION",
    "FUSED_MODULES",
    "NO_TECHNIQUES",
    "OF_ATTENTION",
    "SOLVED_SHARE",
    "WHOLE_LAYER",
    "Adapters",
    "GraphScope",
    "PagedStash",
    "Techniques",
]

LAYOUT, TRAINING, WHAT_IF = "layout", "training", "what_if"  # the mappings of a recipe that hold the keys

RecomputeModule = Literal["core_attn", "layernorm", "mla_up_proj", "mlp", "moe", "moe_act", "shared_experts"]
OffloadModule = Literal["attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm", "expert_fc1", "moe_act"]
GraphScope = Literal["full_iteration", "layer", "attn", "mlp", "moe_router", "moe_preprocess"]
# fmt: off
TargetModule = Literal[
    "linear_qkv", "linear_proj", "linear_fc1", "linear_fc2",
    "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
]
# fmt: on
FUSED_MODULES: Mapping[str, tuple[str, ...]] = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "linear_proj": ("o_proj",),
    "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc2": ("down_proj",),
}
"""The linear layers of a block as Megatron core has them, each with those that Hugging Face's models have for it."""
OF_ATTENTION = (*FUSED_MODULES["linear_qkv"], *FUSED_MODULES["linear_proj"])
FULL_ITERATION, WHOLE_LAYER = "full_iteration", "layer"
SOLVED_SHARE = -1.0  # in place of a `swapped_share` that a plan solves for its layout


@section
class Adapters:
    """Low-rank adapters beside linear layers of the blocks; the rest of the model is frozen.

    `frozen_down` is LoRA-FA (Zhang et al. 2023): the first matrix of each pair is frozen too, so a linear layer keeps
    the r-wide projection of its input instead of the input.
    """

    rank: int = key("Inner width of each adapter", ge=1, le=2**16)
    frozen_down: bool = key("LoRA-FA: the first matrix of each adapter is frozen too", default=False)
    target_modules: tuple[str, ...] = key(
        "Linear layers that have an adapter, by their names in Hugging Face's models or in Megatron core "
        "([linear_qkv, linear_proj] = attention alone); absent = all",
        default=(),
        written=tuple[TargetModule, ...] | None,
        min_length=1,
    )

    @property
    def targets(self) -> frozenset[str]:
        """The linear layers that have an adapter, by their names in Hugging Face's models."""
        names = self.target_modules or tuple(FUSED_MODULES)
        return frozenset(each for name in names for each in FUSED_MODULES.get(name, (name,)))

    def fused_targets(self, gated_mlp: bool) -> tuple[str, ...] | None:
        """Return the linear layers that have an adapter, by their names in Megatron core; None where of one of these a
        part alone has an adapter."""
        whole = []
        for name, every in FUSED_MODULES.items():
            parts = {part for part in every if gated_mlp or part != "gate_proj"}
            if parts <= self.targets:
                whole.append(name)
            elif parts & self.targets:
                return None
        return tuple(whole)

    def as_json(self) -> dict[str, object]:
        """Return what is written of it: without `target_modules` where all have an adapter."""
        targets = {"target_modules": list(self.target_modules)} if self.target_modules else {}
        return {"rank": self.rank, "frozen_down": self.frozen_down, **targets}


@section
class PagedStash:
    """Pages in which activations of experts wait for their backward pass, in one buffer for all layers of a device.

    Both factors count room for what all layers and micro-batches in flight hold of equally shared tokens. What the
    pages on the device cannot take goes to those of the host.
    """

    page_size: int = key("Tokens of a page", default=64, ge=1, le=2**20)
    device_factor: float = key(
        "Room on the device, as a multiple of what equally shared tokens take", default=1.1, gt=0, le=100
    )
    host_factor: float = key(
        "The same in host memory, for what the device's pages cannot take; 0 = none", default=0.0, ge=0, le=100
    )

    def as_json(self) -> dict[str, object]:
        """Return all that is written of it."""
        return {f.name: getattr(self, f.name) for f in fields(self)}


@section
class Techniques:
    """What a job does beside its layout. docs/backends.md, "Techniques", says which backend runs what.

    Names of modules are those of Megatron's selective recompute and fine-grained offload. Without
    `recompute_modules`, selective recompute takes the backend's default. How many layers a `recompute_method` counts is
    the layout's to say.
    """

    recompute_modules: tuple[str, ...] = key(
        "What recompute: selective recomputes; absent = searched",
        default=(),
        place=LAYOUT,
        written=tuple[RecomputeModule, ...] | None,
        min_length=1,
    )
    recompute_method: str = key(
        "recompute: full keeps the input of groups of layers (uniform), or recomputes some layers of each model chunk "
        "only (block); absent = uniform where full is pinned, else searched",
        default="uniform",
        place=LAYOUT,
        written=Literal["uniform", "block"] | None,
    )
    offload_modules: tuple[str, ...] = key(
        "Modules whose saved inputs wait in host memory; [] = none, absent = searched",
        default=(),
        place=LAYOUT,
        written=tuple[OffloadModule, ...] | None,
    )
    offload_fraction: float = key(
        "megatron-lm: share of offload_modules' tensors that leave the device, those of the first layers of each chunk",
        default=1.0,
        place=LAYOUT,
        gt=0,
        le=1,
    )
    # DeepSpeed's cpu_checkpointing
    offload_checkpoints: bool = key(
        "The layer inputs recompute: full keeps wait in host memory; absent = searched", default=False, place=LAYOUT
    )
    offload_optimizer: float = key(
        "Share of the optimizer states held and updated on the host; absent = searched",
        default=0.0,
        place=LAYOUT,
        ge=0,
        le=1,
    )
    # Megatron's --num-distributed-optimizer-instances
    optimizer_instances: int = key(
        "megatron-lm: groups of data-parallel ranks that shard the optimizer each for itself; absent = 1, all ranks",
        default=1,
        place=LAYOUT,
        written=int | None,
        ge=1,
        le=2**16,
    )
    # DeepSpeed's offload_param of ZeRO 3
    offload_parameters: bool = key(
        "Parameters rest on the host and are streamed in (ZeRO 3); absent = searched", default=False, place=LAYOUT
    )
    loss: str | None = key(
        "Kernel of the loss: unfused, fused, Transformer Engine's, fused with the head, in tiles; absent = searched",
        default=None,
        place=LAYOUT,
        written=Literal["none", "native", "te", "fused_linear", "tiled"] | None,
    )
    loss_tiles: int = key(
        "Pieces of the sequence for loss: tiled; absent = 8",
        default=8,
        place=LAYOUT,
        written=int | None,
        ge=2,
        le=2**20,
    )
    mlp_chunks: int = key(
        "Pieces of the sequence the MLP computes one after the other; absent = searched",
        default=1,
        place=LAYOUT,
        written=int | None,
        ge=1,
        le=2**20,
    )
    adapters: Adapters | None = key("Train low-rank adapters (LoRA) instead of the model", default=None, place=TRAINING)
    trained_layers: int | None = key(
        "Train only the last so many layers, the final norm and the head; absent = all",
        default=None,
        place=TRAINING,
        ge=1,
        le=10_000,
    )  # SHERL
    # 2BP
    delay_weight_gradients: bool = key(
        "Weight gradients in a pass of their own; absent = searched",
        default=False,
        place=LAYOUT,
        written=bool | None,
    )
    token_dispatcher: str | None = key(
        "How tokens reach their experts; absent = searched",
        default=None,
        place=LAYOUT,
        written=Literal["alltoall", "allgather", "flex"] | None,
    )
    flex_backend: str | None = key(
        "megatron-lm: library that carries them with token_dispatcher: flex; absent = deepep",
        default=None,
        place=LAYOUT,
        written=Literal["deepep", "hybridep"] | None,
    )
    expert_rank_capacity_factor: float | None = key(
        "megatron-lm with flex_backend: hybridep: rows for the tokens of a device's experts, as a multiple of an equal "
        "share; a step with more tokens is run again without; absent = as many rows as tokens arrive",
        default=None,
        place=LAYOUT,
        ge=1,
        le=1000,
    )
    paged_stash: PagedStash | None = key(
        "megatron-lm with expert_rank_capacity_factor: activations of experts wait in pages, without the rows that no "
        "token fills; {} = Megatron's own page size and factors",
        default=None,
        place=LAYOUT,
    )
    overlap_shared_expert: bool = key(
        "megatron-lm: the shared expert computes while tokens travel to the others; absent = searched",
        default=False,
        place=LAYOUT,
        written=bool | None,
    )
    overlap_expert_communication: bool = key(
        "megatron-lm: tokens of one micro-batch travel to experts while another one computes; absent = searched",
        default=False,
        place=LAYOUT,
        written=bool | None,
    )
    tp_comm_overlap: bool = key(
        "megatron-lm: gathers and scatters of tensor parallelism run beside the products (user buffers); absent = "
        "searched",
        default=False,
        place=LAYOUT,
        written=bool | None,
    )
    context_comm: str | None = key(
        "megatron-lm: keys and values travel in a ring, or heads by all-to-all; absent = searched",
        default=None,
        place=LAYOUT,
        written=Literal["p2p", "a2a"] | None,
    )
    cuda_graphs: tuple[str, ...] = key(
        "megatron-lm: what is captured once and replayed as CUDA graphs: the whole iteration, whole layers, or parts "
        "of each layer; [] = nothing, absent = searched",
        default=(),
        place=LAYOUT,
        written=tuple[GraphScope, ...] | None,
    )
    mtp_stage: str = key(
        "megatron-lm: stage of the prediction heads (model.mtp_num_layers): last = that of the loss; before-last = the "
        "one before it, and the loss has no layers beside it; absent = last",
        default="last",
        place=LAYOUT,
        written=Literal["last", "before-last"] | None,
    )
    swapped_share: float = key(
        "MEMO: share of each layer's activations swapped to the host, the rest recomputed; auto = as much as the link "
        "and host memory take",
        default=0.0,
        place=WHAT_IF,
        written=Annotated[float, Field(ge=0, le=1)] | Literal["auto"],
    )
    sampled_share: float = key(
        "WTA-CRS: share of each linear layer's input rows kept for the weight gradient",
        default=1.0,
        place=WHAT_IF,
        gt=0,
        le=1,
    )
    weight_versions: int = key(
        "Versions of the weights in flight; PipeDream-2BW keeps 2", default=1, place=WHAT_IF, ge=1, le=8
    )
    zero_bubble: bool = key(
        "ZB-H1: weight gradients wait for the gaps in which a stage would idle", default=False, place=WHAT_IF
    )

    @property
    def what_ifs(self) -> tuple[str, ...]:
        """The techniques in use that no backend runs, by their keys."""
        neutral = {"swapped_share": 0.0, "sampled_share": 1.0, "weight_versions": 1, "zero_bubble": False}
        return tuple(name for name, value in neutral.items() if getattr(self, name) != value)

    @property
    def overlaps_experts(self) -> bool:
        """Whether tokens of one micro-batch travel to their experts while another one computes: Megatron-LM delays
        weight gradients in no other schedule."""
        return self.overlap_expert_communication or self.delay_weight_gradients

    @property
    def heads_before_loss(self) -> bool:
        """Whether prediction heads lie on a stage before that of the loss."""
        return self.mtp_stage != "last"

    @property
    def moves_to_host(self) -> bool:
        """Whether some of the device's memory waits in host memory, whatever the layout."""
        activations = self.offload_modules or self.offload_checkpoints or self.swapped_share
        spilled = self.paged_stash is not None and self.paged_stash.host_factor
        return bool(activations or spilled or self.offload_optimizer or self.offload_parameters)

    @property
    def steps_on_the_host(self) -> bool:
        """Whether CPU cores take part in the optimizer step: DeepSpeed's CPU Adam, Megatron's hybrid optimizer."""
        return self.offload_optimizer > 0

    def as_json(self) -> dict[str, object]:
        """Return what differs from the defaults, as plain values."""
        changed = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
        return {name: _plain(value) for name, value in changed.items()}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Techniques:
        """Return the techniques that `as_json` wrote. Raises TypeError for an unknown name."""
        values: dict[str, Any] = {
            n: tuple(value) if isinstance(value, list) else value for n, value in document.items()
        }
        if "adapters" in values:
            named = values["adapters"]
            values["adapters"] = Adapters(**named | {"target_modules": tuple(named.get("target_modules", ()))})
        if "paged_stash" in values:
            values["paged_stash"] = PagedStash(**values["paged_stash"])
        return cls(**values)


def _plain(value: Any) -> object:
    if isinstance(value, (Adapters, PagedStash)):
        return value.as_json()
    return list(value) if isinstance(value, tuple) else value


NO_TECHNIQUES = Techniques()

# Techniques a search may choose keep the mathematics. These change not even a rounding, for the reason beside each.
BIT_EQUAL: Mapping[str, str] = {
    "recompute_modules": "the same kernels run again, on the same input and with the same random numbers",
    "recompute_method": "the same kernels run again, on the same input and with the same random numbers",
    "offload_modules": "copies come back from the host as they left",
    "offload_checkpoints": "copies come back from the host as they left",
    "offload_parameters": "copies come back from the host as they left",
    "delay_weight_gradients": "the same products, later, added up in the same order of micro-batches",
    "overlap_shared_expert": "the same kernels, on a stream beside the others",
    "overlap_expert_communication": "the passes of two micro-batches take turns, gradients are added up in their order",
    "cuda_graphs": "the same kernels, launched at once",
}
# These sum the same numbers up in another order, or with another kernel.
CHANGES_ROUNDING: Mapping[str, str] = {
    "offload_optimizer": "Adam on the host's cores rounds otherwise than the fused one on the device",
    "loss": "another kernel adds the exponentials of a row up",
    "loss_tiles": "the head's weight gradient is a sum over the tiles",
    "mlp_chunks": "an MLP's weight gradient is a sum over the chunks",
    "token_dispatcher": "the outputs of a token's experts are added up in another order",
    "flex_backend": "the outputs of a token's experts are added up in another order",
    "tp_comm_overlap": "the sums over tensor ranks are made piece by piece",
    "context_comm": "a ring merges attention over parts of the sequence, an all-to-all computes it whole",
}
