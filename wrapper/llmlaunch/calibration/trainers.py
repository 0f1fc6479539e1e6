"""Measured trainers that no recipe can choose, and the facts that price their records."""

from __future__ import annotations

from collections.abc import Callable

from llmlaunch.backends.fsdp import (
    atorch_facts,
    composer_facts,
    internevo_facts,
    torchtitan_facts,
    torchtune_facts,
)
from llmlaunch.calibration.records import TORCHTITAN, TORCHTUNE, Record
from llmlaunch.layout import Layout
from llmlaunch.memory.facts import MemoryFacts
from llmlaunch.models.shape import ModelShape

__all__ = ["FORMATS", "OFFLOADS_ALL", "OPTIMIZERS", "TRAINERS", "default_split"]

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
    )


TRAINERS: dict[str, Callable[[Record], MemoryFacts]] = {
    TORCHTITAN: _torchtitan,
    TORCHTUNE: _torchtune,
    "fsdp (composer)": lambda record: composer_facts(),
    "fsdp (atorch)": lambda record: atorch_facts(),
    "internevo-fsdp": lambda record: internevo_facts(),
}
