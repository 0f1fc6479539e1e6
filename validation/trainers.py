"""Every trainer whose public runs are priced: those that a recipe can choose, and those that nobody can launch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from llmlaunch.calibration.records import Record
from llmlaunch.calibration.stated.trainers import (
    DEEPSPEED,
    OFF,
    TRAINERS,
    UNREAD,
    Trainer,
    Unread,
    deepspeed_record_facts,
    expects,
)
from llmlaunch.cluster.cards import capability_of_card
from llmlaunch.facts import MemoryFacts
from llmlaunch.layout import Layout
from llmlaunch.models.shape import ModelShape
from llmlaunch.techniques import Techniques
from validation.atorch_pipeline import atorch_pipeline_facts
from validation.defaults import public_defaults_of
from validation.fsdp import atorch_facts, composer_facts, internevo_facts, torchtitan_facts, torchtune_facts
from validation.megatron_deepspeed import DROPOUT, ForkOptions, accumulates_in_fp32, megatron_deepspeed_facts

MEGATRON_DEEPSPEED = "megatron-deepspeed"
TORCHTITAN, TORCHTUNE = "torchtitan-fsdp2", "torchtune single-device"
COMPOSER, ATORCH, INTERNEVO = "fsdp (composer)", "fsdp (atorch)", "internevo-fsdp"
SWIFT, ATORCH_PIPELINE = "deepspeed (ms-swift/HF trainer)", "deepspeed (pipeline 3D, atorch TP)"
MEGATRON_SWIFT = "megatron-lm (ms-swift)"
FLOAT8 = "float8-linear"  # torchao's
# torchtitan compiles its loss with the model since early 2025; at these commits it does not (train.py).
LOSS_NOT_COMPILED = ("9dec370",)

FORK = (MEGATRON_DEEPSPEED,)
FULLY_SHARDED = (TORCHTITAN, TORCHTUNE, COMPOSER, ATORCH, INTERNEVO)
WITHOUT_TUNE = tuple(trainer for trainer in FULLY_SHARDED if trainer != TORCHTUNE)
WITHOUT_TITAN = tuple(trainer for trainer in FULLY_SHARDED if trainer != TORCHTITAN)
# Fields of a record that these trainers do not read either, for the same reason as DeepSpeed with a Hugging Face model.
AS_DEEPSPEED = {
    "optimizer.state_bytes_per_parameter": FORK,
    "optimizer.state_dtype": FORK + WITHOUT_TUNE,
    "optimizer.parameter_dtype": FORK,
    "optimizer.optimizer_instances": FORK + FULLY_SHARDED,
    "parallelism.virtual_pipeline": FORK,
    "parallelism.expert": FORK,
    "parallelism.expert_tensor": FORK,
    "parallelism.sequence_parallel": FORK,
    "recompute.granularity": FORK + WITHOUT_TITAN,
    "precision.fp8_param_gather": FORK + WITHOUT_TITAN,
    "implementation.torch_compile": FORK,
    "implementation.cuda_graph": FORK + FULLY_SHARDED,
    "implementation.optimizer_in_backward": FORK + WITHOUT_TUNE,
    "implementation.tp_comm_overlap": FORK,
}

PUBLIC_UNREAD: tuple[Unread, ...] = (
    *(
        replace(unread, tables=AS_DEEPSPEED[unread.field])
        for unread in UNREAD
        if unread.field in AS_DEEPSPEED and DEEPSPEED[0] in unread.tables
    ),
    Unread(FULLY_SHARDED, "optimizer.state_bytes_per_parameter", expects(), "the trainer's own optimizer is counted"),
    Unread(
        (TORCHTUNE,), "optimizer.state_dtype", expects("bf16"), "moments are counted in bf16, of adamw8bit in 8 bits"
    ),
    Unread(FULLY_SHARDED, "optimizer.offload", OFF, "what FSDP keeps on the host is not counted"),
    Unread(FORK, "optimizer.zero_stage", expects(0, 1), "only ZeRO 0 and 1 of DeepSpeed 0.6 are counted"),
    Unread(
        FORK + WITHOUT_TUNE,
        "implementation.cross_entropy_fusion",
        expects("none"),
        "the loss is counted as it is without",
    ),
    Unread(
        (TORCHTUNE,),
        "implementation.cross_entropy_fusion",
        expects("none", "chunked"),
        "only the chunked loss is counted",
    ),
)


def _torchtitan(record: Record, techniques: Techniques, assumed: dict[str, Any]) -> MemoryFacts:
    compiled = bool(record["implementation"].get("torch_compile"))
    old = any(commit in (record.get("backend_version") or "") for commit in LOSS_NOT_COMPILED)
    gathered = bool(record["precision"].get("fp8_param_gather"))
    return torchtitan_facts(compiled, compiled and not old, gathered, record["parallelism"]["tensor"])


def _torchtune(record: Record, techniques: Techniques, assumed: dict[str, Any]) -> MemoryFacts:
    implementation = record["implementation"]
    return torchtune_facts(
        record["precision"]["compute"],
        compiled=bool(implementation.get("torch_compile")),
        chunked_loss=implementation.get("cross_entropy_fusion") == "chunked",
        optimizer_in_backward=bool(implementation.get("optimizer_in_backward")),
        state_bytes=1.0 if record["optimizer"]["name"] == "adamw8bit" else 2.0,
        fused_optimizer=implementation.get("fused_optimizer") is not False,
    )


def _torchtitan_split(shape: ModelShape, layout: Layout) -> list[int] | None:
    """Return the layers of each pipeline rank if torchtitan splits them unevenly, else None: ranks after the first and
    before the last take the remainder, one layer each (parallelisms/pipelining_utils.py `generate_split_points`,
    9dec370)."""
    each, left = divmod(shape.num_layers, layout.pipeline)
    if layout.virtual_pipeline > 1 or not left:
        return None
    middle = [each + (i < left) for i in range(layout.pipeline - 2)]
    return [each, *middle, shape.num_layers - each - sum(middle)]


def _megatron_deepspeed(record: Record, techniques: Techniques, assumed: dict[str, Any]) -> MemoryFacts:
    implementation = record["implementation"]
    options = ForkOptions(
        fused_optimizer=implementation.get("fused_optimizer") is not False,
        embedding_norm=bool(implementation.get("embedding_norm")),
        compute_capability=capability_of_card(record["gpu"]),
    )
    facts = megatron_deepspeed_facts(record["precision"]["compute"], record["optimizer"]["gradient_dtype"], options)
    fused = facts.layer.gated_activation_fused and bool(implementation.get("gated_activation_fused"))
    return replace(facts, layer=replace(facts.layer, gated_activation_fused=fused))


def _as_megatron_deepspeed_runs(
    record: Record, shape: ModelShape, layout: Layout, assumed: dict[str, Any]
) -> tuple[ModelShape, Layout]:
    """Return both as the fork runs them. Its dropout applies if a record names none: the runs' launch scripts leave
    both at their default. Its bf16 optimizer shards the states whatever ZeRO stage is set."""
    if not shape.attention_dropout:
        assumed["model.attention_dropout"] = DROPOUT
    if not shape.hidden_dropout:
        assumed["model.hidden_dropout"] = DROPOUT
    shape = replace(
        shape,
        attention_dropout=shape.attention_dropout or DROPOUT,
        hidden_dropout=shape.hidden_dropout or DROPOUT,
    )
    if accumulates_in_fp32(record["precision"]["compute"], record["optimizer"]["gradient_dtype"]):
        layout = replace(layout, zero_stage=max(layout.zero_stage, 1))
    return shape, layout


def _atorch_pipeline(record: Record, techniques: Techniques, assumed: dict[str, Any]) -> MemoryFacts:
    return atorch_pipeline_facts(deepspeed_record_facts(record, techniques, assumed))


def _with_tied_head(
    record: Record, shape: ModelShape, layout: Layout, assumed: dict[str, Any]
) -> tuple[ModelShape, Layout]:
    """ATorch's pipeline ties its head to the embedding (tie_first, ds_pipe_utils.py, 11bf2fb)."""
    return replace(shape, tied_embeddings=True), layout


def _unread_of(table: str) -> tuple[Unread, ...]:
    return tuple(unread for unread in PUBLIC_UNREAD if table in unread.tables)


def _fully_sharded(backend: str, facts: Any, **details: Any) -> Trainer:
    return Trainer(backend, facts, public_defaults_of(backend), _unread_of(backend), **details)


PUBLIC_TRAINERS: Mapping[str, Trainer] = {
    **TRAINERS,
    MEGATRON_SWIFT: TRAINERS["megatron-lm"],
    SWIFT: TRAINERS["deepspeed"],
    ATORCH_PIPELINE: replace(
        TRAINERS["deepspeed"],
        facts=_atorch_pipeline,
        unread=tuple(row for row in TRAINERS["deepspeed"].unread if row.field != "parallelism.pipeline"),
        adapted=_with_tied_head,
    ),
    MEGATRON_DEEPSPEED: Trainer(
        MEGATRON_DEEPSPEED,
        _megatron_deepspeed,
        public_defaults_of(MEGATRON_DEEPSPEED),
        _unread_of(MEGATRON_DEEPSPEED),
        adapted=_as_megatron_deepspeed_runs,
    ),
    TORCHTITAN: _fully_sharded(TORCHTITAN, _torchtitan, formats=(FLOAT8,), split=_torchtitan_split),
    # its activation offload moves all kept tensors (torchtune/training/_activation_offloading.py)
    TORCHTUNE: _fully_sharded(TORCHTUNE, _torchtune, optimizers=("adamw8bit",), offloads_all=True),
    COMPOSER: _fully_sharded(COMPOSER, lambda record, techniques, assumed: composer_facts()),
    ATORCH: _fully_sharded(ATORCH, lambda record, techniques, assumed: atorch_facts()),
    INTERNEVO: _fully_sharded(INTERNEVO, lambda record, techniques, assumed: internevo_facts()),
}
"""The trainers whose public runs are priced, by the backend of their records."""


def table_of(record: Record) -> str | None:
    """Return the table of facts of a record's trainer, None for one that is not priced."""
    trainer = PUBLIC_TRAINERS.get(str(record.get("backend")))
    return None if trainer is None else trainer.table
