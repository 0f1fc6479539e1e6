"""What a recipe asks for and no search chooses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Literal

from llmlaunch.documents.keys import key, section
from llmlaunch.techniques.technique import EXPERTS, PREDICTION_HEADS, TRAINING, technique

LAST = "last"


@section
class HeadsStage:
    """The stage of the prediction heads of a pipeline. The heads lie on the stage of the loss, or on the one before
    it."""

    mtp_stage: str = technique(
        "megatron-lm: stage of the prediction heads (model.mtp_num_layers): last = that of the loss; before-last = the "
        "one before it, and the loss has no layers beside it; absent = last",
        default=LAST,
        written=Literal["last", "before-last"] | None,
        needs={"before-last": PREDICTION_HEADS},
        source="Megatron core, pipeline layouts with MTP before the loss",
        saves="prediction heads on a stage of their own or with other layers: the stage of the loss holds neither",
        costs="a longer message to the loss; the heads' activations of two or three micro-batches",
    )

    @property
    def heads_before_loss(self) -> bool:
        """Whether prediction heads lie on a stage before that of the loss."""
        return self.mtp_stage != LAST


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
class StashedExperts:
    """Pages for what experts save. None keeps what experts save with the rows that no token fills."""

    paged_stash: PagedStash | None = technique(
        "megatron-lm with expert_rank_capacity_factor: activations of experts wait in pages, without the rows that no "
        "token fills; {} = Megatron's own page size and factors",
        default=None,
        mapping=PagedStash,
        needs=EXPERTS,
        effects=("paged_stash",),
        source="Megatron core, paged_stash.py",
        saves="of what experts save, the rows that no token fills",
        costs="copies to pages and back, beside the rest of a layer; a step that fills them is run again",
    )


@section
class ExpertCapacity:
    """Rows for the tokens of a device's experts, as many as are fixed beforehand. None has as many rows as tokens
    arrive."""

    expert_rank_capacity_factor: float | None = technique(
        "megatron-lm with flex_backend: hybridep: rows for the tokens of a device's experts, as a multiple of an equal "
        "share; a step with more tokens is run again without; absent = as many rows as tokens arrive",
        default=None,
        ge=1,
        le=1000,
        needs=EXPERTS,
        effects=("expert_capacity",),
        source="Megatron core, HybridEP; Transformer Engine, GroupedMLP",
        saves="nothing: rows that no token fills are kept, too; experts are one kernel, and the host asks for no sizes",
        costs="memory of all rows; a step with more tokens than rows is run again",
    )


@section
class TrainedLayers:
    """The last layers of a model alone are trained. None trains all layers."""

    trained_layers: int | None = technique(
        "Train only the last so many layers, the final norm and the head; absent = all",
        default=None,
        place=TRAINING,
        ge=1,
        le=10_000,
        effects=("trained_layers",),
        source="SHERL (Diao et al. 2024)",
        saves="gradients, states and activations of the first layers",
        costs="the first layers stay as they are",
    )


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


@section
class Adapters:
    """Low-rank adapters beside linear layers of the blocks; the rest of the model is frozen.

    `frozen_down` is LoRA-FA (Zhang et al. 2023): the first matrix of each pair is frozen too, so a linear layer keeps
    the r-wide projection of its input instead of the input. `base` is QLoRA (Dettmers et al. 2023).
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
    base: str | None = key(
        "deepspeed: QLoRA: frozen linear layers are kept in 4 bits (bitsandbytes, nf4 with quantized scales); absent = "
        "as `precision`",
        default=None,
        written=Literal["nf4"] | None,
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
        """Return what is written of it: without `target_modules` where all have an adapter, and without a `base` as
        wide as all else."""
        targets = {"target_modules": list(self.target_modules)} if self.target_modules else {}
        base = {"base": self.base} if self.base is not None else {}
        return {"rank": self.rank, "frozen_down": self.frozen_down, **targets, **base}


@section
class TrainedAdapters:
    """Low-rank adapters in place of a trained model. None trains the model itself."""

    adapters: Adapters | None = technique(
        "Train low-rank adapters (LoRA) instead of the model",
        default=None,
        place=TRAINING,
        mapping=Adapters,
        effects=("adapters", "quantized_base"),
        source="LoRA (Hu et al. 2021); LoRA-FA (Zhang et al. 2023); QLoRA (Dettmers et al. 2023)",
        saves="gradients and states of all but the adapters; LoRA-FA also the inputs of linear layers; QLoRA three "
        "quarters of the frozen weights",
        costs="what can be learned is of low rank",
    )


@section
class OptimizerInstances:
    """Several groups of data-parallel ranks shard the optimizer, each for itself. Megatron's
    `--num-distributed-optimizer-instances`."""

    optimizer_instances: int = technique(
        "megatron-lm: groups of data-parallel ranks that shard the optimizer each for itself; absent = 1, all ranks",
        default=1,
        written=int | None,
        ge=1,
        le=2**16,
        source="MiCS (Zhang et al. 2022)",
        saves="nothing: each group keeps all states of the optimizer",
        costs="states of more groups; gradients and parameters travel in smaller groups, as in one rack",
    )
