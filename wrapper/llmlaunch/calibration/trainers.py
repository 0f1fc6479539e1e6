"""What each measured trainer is priced by: the facts of trainers that no recipe can choose, and the fields of a record
that decide bytes and that the formula of its backend does not read.

As long as such a field says what the formula takes for granted, the record is priced. With any other value the
prediction would be one of another run, so the record is refused, by the field's name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from llmlaunch.calibration.completion import Unsupported
from llmlaunch.calibration.records import ATORCH_PIPELINE, TORCHTITAN, TORCHTUNE, Record
from llmlaunch.frameworks.fsdp import atorch_facts, composer_facts, internevo_facts, torchtitan_facts, torchtune_facts
from llmlaunch.frameworks.megatron.facts import LOSSES
from llmlaunch.layout import Layout
from llmlaunch.memory.facts import MemoryFacts
from llmlaunch.models.shape import ModelShape

__all__ = ["FORMATS", "OFFLOADS_ALL", "OPTIMIZERS", "TRAINERS", "UNREAD", "Unread", "default_split", "refuse_unread"]


FLOAT8 = "float8-linear"  # torchao's
FORMATS = {TORCHTITAN: (FLOAT8,)}  # narrow number formats by backend
OPTIMIZERS = {TORCHTUNE: ("adamw8bit",)}  # beside Adam
OFFLOADS_ALL = (TORCHTUNE,)  # activation offload moves all kept tensors (torchtune/training/_activation_offloading.py)
# torchtitan compiles its loss with the model since early 2025; at these commits it does not (train.py).
LOSS_NOT_COMPILED = ("9dec370",)


def default_split(backend: str, shape: ModelShape, layout: Layout) -> list[int] | None:
    """Return the layers of each pipeline rank if torchtitan splits them unevenly, else None: ranks after the first and
    before the last take the remainder, one layer each (parallelisms/pipelining_utils.py `generate_split_points`,
    9dec370)."""
    each, left = divmod(shape.num_layers, layout.pipeline)
    if backend != TORCHTITAN or layout.virtual_pipeline > 1 or not left:
        return None
    middle = [each + (i < left) for i in range(layout.pipeline - 2)]
    return [each, *middle, shape.num_layers - each - sum(middle)]


def _torchtitan(record: Record) -> MemoryFacts:
    compiled = bool(record["implementation"].get("torch_compile"))
    old = any(commit in (record.get("backend_version") or "") for commit in LOSS_NOT_COMPILED)
    gathered = bool(record["precision"].get("fp8_param_gather"))
    return torchtitan_facts(compiled, compiled and not old, gathered, record["parallelism"]["tensor"])


def _torchtune(record: Record) -> MemoryFacts:
    implementation = record["implementation"]
    return torchtune_facts(
        record["precision"]["compute"],
        compiled=bool(implementation.get("torch_compile")),
        chunked_loss=implementation.get("cross_entropy_fusion") == "chunked",
        optimizer_in_backward=bool(implementation.get("optimizer_in_backward")),
        state_bytes=1.0 if record["optimizer"]["name"] == "adamw8bit" else 2.0,
        fused_optimizer=implementation.get("fused_optimizer") is not False,
    )


TRAINERS: dict[str, Callable[[Record], MemoryFacts]] = {
    TORCHTITAN: _torchtitan,
    TORCHTUNE: _torchtune,
    "fsdp (composer)": lambda record: composer_facts(),
    "fsdp (atorch)": lambda record: atorch_facts(),
    "internevo-fsdp": lambda record: internevo_facts(),
}


@dataclass(frozen=True)
class Unread:
    """A field, "section.name", that the formula of `tables` does not read. `expected` tells whether a known value is
    what the formula takes for granted, `why` what that is."""

    tables: tuple[str, ...]
    field: str
    expected: Callable[[Any, Record], bool]
    why: str


def _is(*values: Any) -> Callable[[Any, Record], bool]:
    return lambda value, record: value in values


def _the_precision(value: Any, record: Record) -> bool:
    return bool(value == record["precision"]["compute"])


def _stages(value: Any, record: Record) -> bool:
    trainer = record["implementation"].get("trainer")
    return bool(value == 1 or trainer == "pipeline" or record["backend"] == ATORCH_PIPELINE)


def _whole_sequence(value: Any, record: Record) -> bool:
    return not value or (record["parallelism"]["tensor"] or 1) == 1


def _no_wider_than_tensor(value: Any, record: Record) -> bool:
    return value in (1, record["parallelism"]["tensor"])


def _bytes_recorded(value: Any, record: Record) -> bool:
    optimizer = record["optimizer"]
    return bool(value == "fp32" or optimizer.get("formats") or optimizer.get("state_bytes_per_parameter"))


HUGGING_FACE, FORK, CORE = ("deepspeed",), ("megatron-deepspeed",), ("megatron", "megatron-fsdp")
DEEPSPEED, FULLY_SHARDED = HUGGING_FACE + FORK, tuple(TRAINERS)
WITHOUT_TUNE = tuple(trainer for trainer in TRAINERS if trainer != TORCHTUNE)
WITHOUT_TITAN = tuple(trainer for trainer in TRAINERS if trainer != TORCHTITAN)
OFF = _is(False, 0, "none")
ONE = _is(1)

UNREAD: tuple[Unread, ...] = (
    Unread(
        DEEPSPEED, "optimizer.state_bytes_per_parameter", _is(12), "masters and moments are counted in fp32, 12 bytes"
    ),
    Unread(FULLY_SHARDED, "optimizer.state_bytes_per_parameter", _is(), "the trainer's own optimizer is counted"),
    Unread(DEEPSPEED + WITHOUT_TUNE, "optimizer.state_dtype", _is("fp32"), "moments are counted in fp32"),
    Unread((TORCHTUNE,), "optimizer.state_dtype", _is("bf16"), "moments are counted in bf16, of adamw8bit in 8 bits"),
    Unread(CORE, "optimizer.state_dtype", _bytes_recorded, "state_bytes_per_parameter must say their bytes"),
    Unread(DEEPSPEED + CORE, "optimizer.parameter_dtype", _the_precision, "parameters are counted in the precision"),
    Unread(
        DEEPSPEED + FULLY_SHARDED, "optimizer.optimizer_instances", ONE, "all ranks share the states that are counted"
    ),
    Unread(FULLY_SHARDED, "optimizer.offload", OFF, "what FSDP keeps on the host is not counted"),
    Unread(FORK, "optimizer.zero_stage", _is(0, 1), "only ZeRO 0 and 1 of DeepSpeed 0.6 are counted"),
    Unread(HUGGING_FACE, "parallelism.pipeline", _stages, "a Hugging Face model is not split into stages"),
    Unread(DEEPSPEED, "parallelism.virtual_pipeline", ONE, "DeepSpeed's pipeline has one chunk to a stage"),
    Unread(DEEPSPEED, "parallelism.expert", ONE, "experts are counted as whole on every rank"),
    Unread(DEEPSPEED, "parallelism.expert_tensor", _no_wider_than_tensor, "experts are split as the layers are"),
    Unread(
        DEEPSPEED, "parallelism.sequence_parallel", _whole_sequence, "tensor ranks are counted with whole sequences"
    ),
    Unread(DEEPSPEED + WITHOUT_TITAN, "recompute.granularity", _is("none", "full"), "checkpoints are of whole layers"),
    Unread(HUGGING_FACE, "recompute.num_layers", _is(0, 1), "every layer is a checkpoint of its own"),
    Unread(DEEPSPEED + WITHOUT_TITAN, "precision.fp8_param_gather", OFF, "parameters are gathered as they are"),
    Unread(
        HUGGING_FACE, "implementation.cross_entropy_fusion", _is("none", "liger"), "of fused losses, Liger's is counted"
    ),
    Unread(CORE, "implementation.cross_entropy_fusion", _is(*LOSSES), f"the losses counted are {', '.join(LOSSES)}"),
    Unread(
        FORK + WITHOUT_TUNE, "implementation.cross_entropy_fusion", _is("none"), "the loss is counted as it is without"
    ),
    Unread(
        (TORCHTUNE,), "implementation.cross_entropy_fusion", _is("none", "chunked"), "only the chunked loss is counted"
    ),
    Unread(DEEPSPEED, "implementation.torch_compile", OFF, "what compiled kernels spare is not counted"),
    Unread(DEEPSPEED + FULLY_SHARDED, "implementation.cuda_graph", OFF, "the pool of a CUDA graph is not counted"),
    Unread(
        DEEPSPEED + CORE + WITHOUT_TUNE,
        "implementation.optimizer_in_backward",
        OFF,
        "gradients are counted until the optimizer's step",
    ),
    Unread(DEEPSPEED, "implementation.tp_comm_overlap", OFF, "user buffers are not counted"),
)


def refuse_unread(record: Record, table: str) -> None:
    """Refuse a record with a field that the fact table does not read, unless its value is null, which is not known, or
    what the formula takes for granted.

    Raises:
        Unsupported: there is such a field.
    """
    for unread in UNREAD:
        section, name = unread.field.split(".")
        value = record[section].get(name)
        if table in unread.tables and value is not None and not unread.expected(value, record):
            raise Unsupported(f"{unread.field} {value!r} is not priced for {record['backend']}: {unread.why}")
