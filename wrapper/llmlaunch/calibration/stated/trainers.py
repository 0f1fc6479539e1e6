"""The facts and defaults that price each trainer's measured runs, and the fields of a record that decide bytes although
its formula does not read them.

A record is priced while such a field has the value that the formula assumes. With any other value the prediction would
be that of another run, so the record is refused, and the refusal names the field.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llmlaunch.calibration.cases import Unsupported
from llmlaunch.calibration.records import Record
from llmlaunch.calibration.stated.completion import Default, defaults_of
from llmlaunch.calibration.stated.deepspeed_records import as_deepspeed_ran, deepspeed_record_facts
from llmlaunch.calibration.stated.megatron_records import (
    FP8_RECIPES,
    captured_graphs,
    fsdp_record_facts,
    megatron_record_facts,
)
from llmlaunch.facts import MemoryFacts
from llmlaunch.frameworks.deepspeed.facts import MEGATRON_FORK_KIND
from llmlaunch.frameworks.megatron.facts import LOSSES
from llmlaunch.frameworks.recorded import MEGATRON_FSDP, RECORDED_TRAINERS, RecordedTrainer
from llmlaunch.layout import Layout
from llmlaunch.models.shape import ModelShape
from llmlaunch.techniques import Techniques

Assumed = dict[str, Any]
"""Values that are assumed because a record does not have them, by field. Pricing a record adds to them."""


@dataclass(frozen=True)
class Unread:
    """A field, "section.name", that the formula of `tables` does not read. `expected` tells whether a known value is
    what the formula takes for granted, `why` what that is."""

    tables: tuple[str, ...]
    field: str
    expected: Callable[[Any, Record], bool]
    why: str


def expects(*values: Any) -> Callable[[Any, Record], bool]:
    return lambda value, record: value in values


def _the_precision(value: Any, record: Record) -> bool:
    return bool(value == record["precision"]["compute"])


def _stages(value: Any, record: Record) -> bool:
    return bool(value == 1 or record["implementation"].get("trainer") == "pipeline")


def _whole_sequence(value: Any, record: Record) -> bool:
    return not value or (record["parallelism"]["tensor"] or 1) == 1


def _no_wider_than_tensor(value: Any, record: Record) -> bool:
    return value in (1, record["parallelism"]["tensor"])


def _bytes_recorded(value: Any, record: Record) -> bool:
    optimizer = record["optimizer"]
    return bool(value == "fp32" or optimizer.get("formats") or optimizer.get("state_bytes_per_parameter"))


# The tables of facts with which Megatron core trains, and those of DeepSpeed with a Hugging Face model.
CORE = tuple(dict.fromkeys(t.table for t in RECORDED_TRAINERS.values() if t.framework.on_megatron_core))
DEEPSPEED = tuple(dict.fromkeys(t.table for t in RECORDED_TRAINERS.values() if t.table not in CORE))
OFF = expects(False, 0, "none")
ONE = expects(1)

UNREAD: tuple[Unread, ...] = (
    Unread(
        DEEPSPEED,
        "implementation.trainer",
        lambda trainer, record: trainer != MEGATRON_FORK_KIND,
        "Megatron-DeepSpeed trains another model than Hugging Face's, and is shown as it was measured",
    ),
    Unread(
        DEEPSPEED,
        "optimizer.state_bytes_per_parameter",
        expects(12),
        "masters and moments are counted in fp32, 12 bytes",
    ),
    Unread(DEEPSPEED, "optimizer.state_dtype", expects("fp32"), "moments are counted in fp32"),
    Unread(CORE, "optimizer.state_dtype", _bytes_recorded, "state_bytes_per_parameter must say their bytes"),
    Unread(DEEPSPEED + CORE, "optimizer.parameter_dtype", _the_precision, "parameters are counted in the precision"),
    Unread(DEEPSPEED, "optimizer.optimizer_instances", ONE, "all ranks share the states that are counted"),
    Unread(DEEPSPEED, "parallelism.pipeline", _stages, "a Hugging Face model is not split into stages"),
    Unread(DEEPSPEED, "parallelism.virtual_pipeline", ONE, "DeepSpeed's pipeline has one chunk to a stage"),
    Unread(DEEPSPEED, "parallelism.expert", ONE, "experts are counted as whole on every rank"),
    Unread(DEEPSPEED, "parallelism.expert_tensor", _no_wider_than_tensor, "experts are split as the layers are"),
    Unread(
        DEEPSPEED, "parallelism.sequence_parallel", _whole_sequence, "tensor ranks are counted with whole sequences"
    ),
    Unread(DEEPSPEED, "recompute.granularity", expects("none", "full"), "checkpoints are of whole layers"),
    Unread(DEEPSPEED, "recompute.num_layers", expects(0, 1), "every layer is a checkpoint of its own"),
    Unread(DEEPSPEED, "precision.fp8_param_gather", OFF, "parameters are gathered as they are"),
    Unread(
        DEEPSPEED,
        "implementation.cross_entropy_fusion",
        expects("none", "liger"),
        "of fused losses, Liger's is counted",
    ),
    Unread(
        CORE, "implementation.cross_entropy_fusion", expects(*LOSSES), f"the losses counted are {', '.join(LOSSES)}"
    ),
    Unread(DEEPSPEED, "implementation.torch_compile", OFF, "what compiled kernels spare is not counted"),
    Unread(DEEPSPEED, "implementation.cuda_graph", OFF, "the pool of a CUDA graph is not counted"),
    Unread(
        DEEPSPEED + CORE,
        "implementation.optimizer_in_backward",
        OFF,
        "gradients are counted until the optimizer's step",
    ),
    Unread(DEEPSPEED, "implementation.tp_comm_overlap", OFF, "user buffers are not counted"),
)


def unread_of(table: str) -> tuple[Unread, ...]:
    """Return the fields that the facts of a table do not read."""
    return tuple(unread for unread in UNREAD if table in unread.tables)


def refuse_unread(record: Record, fields: Sequence[Unread]) -> None:
    """Refuse a record with one of the fields that its trainer's facts do not read, unless the value is null, which is
    not known, or what the formula takes for granted.

    Raises:
        Unsupported: there is such a field.
    """
    for unread in fields:
        section, name = unread.field.split(".")
        value = record[section].get(name)
        if value is not None and not unread.expected(value, record):
            raise Unsupported(f"{unread.field} {value!r} is not priced for {record['backend']}: {unread.why}")


def _as_priced(record: Record, shape: ModelShape, facts: MemoryFacts, assumed: Assumed) -> MemoryFacts:
    return facts


def _as_recorded(record: Record, shape: ModelShape, layout: Layout, assumed: Assumed) -> tuple[ModelShape, Layout]:
    return shape, layout


def _no_graphs(record: Record) -> tuple[str, ...]:
    return ()


@dataclass(frozen=True)
class Trainer:
    """How the records of one backend are priced.

    `table` names its facts: runs of trainers that share a table say something of one another. `facts` returns them for
    a complete record, and `as_ran` what its kind of script and its machine change about them. `adapted` returns model
    and layout as they are trained where that is not what the record says, and `split` the layers of each pipeline rank
    where the trainer has a split of its own. `formats` are the narrow number formats that are priced, and `optimizers`
    those besides Adam. `ends_count` is whether embedding and head stand for a layer each where only so the stages come
    out even, and `offloads_all` whether activation offload moves everything that is kept.
    """

    table: str
    facts: Callable[[Record, Techniques, Assumed], MemoryFacts]
    defaults: tuple[Default, ...]
    unread: tuple[Unread, ...]
    as_ran: Callable[[Record, ModelShape, MemoryFacts, Assumed], MemoryFacts] = _as_priced
    adapted: Callable[[Record, ModelShape, Layout, Assumed], tuple[ModelShape, Layout]] = _as_recorded
    split: Callable[[ModelShape, Layout], Sequence[int] | None] = lambda shape, layout: None
    graphs: Callable[[Record], tuple[str, ...]] = _no_graphs
    formats: Collection[str] = ()
    optimizers: tuple[str, ...] = ()
    runs_on_cpus: bool = False
    ends_count: bool = False
    offloads_all: bool = False


MUON = ("muon", "dist_muon")  # the second is the first with its layers' states spread over data parallel ranks


def _trainer(recorded: RecordedTrainer) -> Trainer:
    """Return how the records of a trainer are priced."""
    defaults, unread = defaults_of(recorded.name), unread_of(recorded.table)
    if not recorded.framework.on_megatron_core:
        return Trainer(
            recorded.table,
            deepspeed_record_facts,
            defaults,
            unread,
            as_ran=as_deepspeed_ran,
            runs_on_cpus=True,
        )
    if recorded.name == MEGATRON_FSDP:
        return Trainer(recorded.table, fsdp_record_facts, defaults, unread, formats=FP8_RECIPES, ends_count=True)
    return Trainer(
        recorded.table,
        megatron_record_facts,
        defaults,
        unread,
        graphs=captured_graphs,
        formats=FP8_RECIPES,
        optimizers=MUON,
        ends_count=True,
    )


TRAINERS: Mapping[str, Trainer] = {name: _trainer(recorded) for name, recorded in RECORDED_TRAINERS.items()}
"""The trainers that a recipe can choose, by the backend of their records."""
