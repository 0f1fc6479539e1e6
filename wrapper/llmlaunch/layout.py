"""How a job is split: the one layout type, one row or a million columns, and the shape of a legality rule.

Estimator, planner and backends share these types. A backend's rules are data (`Rule`); planner, check and docs
read the same list.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, fields, replace
from itertools import groupby
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmlaunch.cluster.profile import Cluster
from llmlaunch.columns import BoolColumn, IntColumn
from llmlaunch.frozen import frozen
from llmlaunch.models.shape import ModelShape
from llmlaunch.techniques import NO_TECHNIQUES, Techniques
from llmlaunch.workload import NO_NUMBER_FORMATS, NumberFormats, Workload

RECOMPUTE_NONE, RECOMPUTE_SELECTIVE, RECOMPUTE_FULL = 0, 1, 2
RECOMPUTE_NAMES = ("none", "selective", "full")
EVEN: tuple[tuple[int, ...], ...] = ((),)


@frozen
class Layout:
    """One way to split a job.

    `data` excludes context parallelism: world size = tensor x pipeline x context x data. `zero_stage` 1 is also
    Megatron's distributed optimizer. `virtual_pipeline` counts model chunks per pipeline rank, 1 = not
    interleaved. `recompute` is one of RECOMPUTE_*; full recompute keeps each layer's input alone, and
    `recompute_layers` is how many layers its method counts (`Techniques.recompute_method`): those of a group for
    "uniform", those recomputed of each model chunk for "block"; 0 is 1 for uniform and all for block. The first
    `offload_layers` layers of each pipeline rank wait in host memory, whole. `layers_by_stage` is empty where stages
    are even, else the decoder layers of each virtual stage in the order of the model: virtual stage c x pipeline + r is
    chunk c of rank r.
    """

    tensor: int = 1
    pipeline: int = 1
    virtual_pipeline: int = 1
    context: int = 1
    data: int = 1
    expert: int = 1
    expert_tensor: int = 1
    micro_batch_size: int = 1
    sequence_parallel: int = 0
    zero_stage: int = 0
    recompute: int = RECOMPUTE_NONE
    recompute_layers: int = 0
    offload_layers: int = 0
    layers_by_stage: tuple[int, ...] = ()

    @property
    def layers_by_rank(self) -> tuple[int, ...]:
        """Decoder layers of each pipeline rank over all its chunks; empty where stages are even."""
        return tuple(sum(self.layers_by_stage[r :: self.pipeline]) for r in range(self.pipeline if self.uneven else 0))

    @property
    def uneven(self) -> bool:
        return bool(self.layers_by_stage)

    @property
    def world_size(self) -> int:
        return self.tensor * self.pipeline * self.context * self.data

    def num_microbatches(self, global_batch_size: int) -> int:
        """Micro-batches each pipeline runs in one step."""
        return global_batch_size // (self.data * self.micro_batch_size)

    def as_json(self) -> dict[str, int | bool | str | list[int]]:
        """Plain values for JSON and for people: flags as booleans, recompute by name."""
        row: dict[str, int | bool | str | list[int]] = dict(asdict(self))
        row["layers_by_stage"] = list(self.layers_by_stage)
        row["sequence_parallel"] = bool(self.sequence_parallel)
        row["recompute"] = RECOMPUTE_NAMES[self.recompute]
        return row

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Layout:
        """Return the layout that `as_json` wrote. Raises KeyError, TypeError or ValueError for another."""
        numbers = {name: int(document[name]) for name in LAYOUT_FIELDS if name != "recompute"}
        recompute, layers = RECOMPUTE_NAMES.index(document["recompute"]), map(int, document["layers_by_stage"])
        return cls(**numbers, recompute=recompute, layers_by_stage=tuple(layers))

    def describe(self) -> str:
        """One line for a person, leaving out what is switched off."""
        parts = [f"TP{self.tensor}", f"PP{self.pipeline}"]
        if self.virtual_pipeline > 1:
            parts.append(f"VPP{self.virtual_pipeline}")
        if self.context > 1:
            parts.append(f"CP{self.context}")
        parts.append(f"DP{self.data}")
        if self.expert > 1:
            parts.append(f"EP{self.expert}")
        if self.expert_tensor > 1:
            parts.append(f"ETP{self.expert_tensor}")
        parts.append(f"MBS{self.micro_batch_size}")
        if self.sequence_parallel:
            parts.append("SP")
        if self.zero_stage:
            parts.append(f"ZeRO-{self.zero_stage}")
        if self.recompute:
            layers = f":{self.recompute_layers}" if self.recompute_layers else ""
            parts.append(f"recompute={RECOMPUTE_NAMES[self.recompute]}{layers}")
        if self.offload_layers:
            parts.append(f"offload={self.offload_layers} layers")
        if self.uneven:
            parts.append(f"layers={self.layer_runs()}")
        return " ".join(parts)

    def layer_runs(self) -> str:
        """Return the layers of each stage, equal neighbours together: 21+20x2+19."""
        groups = ((count, len(list(run))) for count, run in groupby(self.layers_by_stage))
        return "+".join(f"{count}x{times}" if times > 1 else str(count) for count, times in groups)


LARGEST_CODE = 2**62  # of a combination of fields, as one number
_FEW = 10_000  # layouts: a column of one value for so many is written sooner than a view of it is made
SPARSE = 8  # codes to a layout beyond which sorting finds the different ones sooner than a table
RECOMPUTE_LAYERS, OFFLOAD_LAYERS = AMOUNTS = ("recompute_layers", "offload_layers")  # that count layers; 0 = none
TECHNIQUE_FIELDS = ("zero_stage", "recompute", *AMOUNTS)  # tried with every split
LAYOUT_FIELDS = tuple(f.name for f in fields(Layout) if f.name != "layers_by_stage")  # those that are one number


@frozen
class Modules:
    """The modules that selective recompute computes again and those whose activations wait in host memory, by their
    names in `Techniques`."""

    recompute: tuple[str, ...] = ()
    offload: tuple[str, ...] = ()


_SPLIT = attrgetter(*LAYOUT_FIELDS[: LAYOUT_FIELDS.index("zero_stage")])  # what is no technique


@frozen
class LayoutColumns:
    """The same fields as `Layout`, each an int64 column of equal length: a million layouts at once.

    Few splits of the layers are shared by many layouts: `partition` is the place of each one's `layers_by_stage` in
    `partitions`, whose first is the empty one of even stages. Where layouts differ in the modules they recompute or
    offload, `modules` is the place of each one's in `module_sets`; elsewhere the techniques of the job say them.
    """

    tensor: IntColumn
    pipeline: IntColumn
    virtual_pipeline: IntColumn
    context: IntColumn
    data: IntColumn
    expert: IntColumn
    expert_tensor: IntColumn
    micro_batch_size: IntColumn
    sequence_parallel: IntColumn
    zero_stage: IntColumn
    recompute: IntColumn
    recompute_layers: IntColumn
    offload_layers: IntColumn
    partition: IntColumn
    partitions: tuple[tuple[int, ...], ...] = EVEN
    modules: IntColumn | None = None
    module_sets: tuple[Modules, ...] = ()

    @classmethod
    def of(cls, layouts: Iterable[Layout]) -> LayoutColumns:
        rows = list(layouts)
        partitions = tuple(dict.fromkeys((*EVEN, *(r.layers_by_stage for r in rows))))
        partition = np.array([partitions.index(r.layers_by_stage) for r in rows], dtype=np.int64)
        columns: dict[str, Any] = {n: np.array([getattr(r, n) for r in rows], dtype=np.int64) for n in LAYOUT_FIELDS}
        return cls(**columns, partition=partition, partitions=partitions)

    def __len__(self) -> int:
        return len(self.tensor)

    def num_microbatches(self, global_batch_size: int) -> IntColumn:
        """Micro-batches each pipeline runs in one step."""
        return np.asarray(global_batch_size // (self.data * self.micro_batch_size), dtype=np.int64)

    def row(self, index: int) -> Layout:
        numbers = {n: int(getattr(self, n)[index]) for n in LAYOUT_FIELDS}
        return Layout(**numbers, layers_by_stage=self.partitions[self.partition[index]])

    def with_techniques(
        self,
        zero_stage: int,
        recompute: int | IntColumn,
        recompute_layers: int | IntColumn,
        offload_layers: int | IntColumn,
    ) -> LayoutColumns:
        """The same splits with other techniques; each argument is a scalar for all rows or a column."""
        techniques = map(self._column, (zero_stage, recompute, recompute_layers, offload_layers))
        rest: tuple[Any, ...] = (self.partition, self.partitions, self.modules, self.module_sets)
        # A search does this some thousand times: `replace` would look at every field by its name.
        return LayoutColumns(*_SPLIT(self), *techniques, *rest)

    def _column(self, value: int | IntColumn) -> IntColumn:
        if isinstance(value, int) and len(self) < _FEW:
            return np.full(len(self), value, dtype=np.int64)
        return np.broadcast_to(np.int64(value), len(self))

    def with_amount(self, name: str, amount: IntColumn) -> LayoutColumns:
        """The same layouts with other numbers in one of AMOUNTS."""
        column: dict[str, Any] = {name: amount}
        return replace(self, **column)

    def take(self, index: NDArray[Any] | slice) -> LayoutColumns:
        """The rows a slice, a boolean mask or an index array selects (rows may repeat); a slice copies nothing."""
        columns = {n: getattr(self, n)[index] for n in (*LAYOUT_FIELDS, "partition")}
        modules = None if self.modules is None else self.modules[index]
        return LayoutColumns(**columns, partitions=self.partitions, modules=modules, module_sets=self.module_sets)

    @classmethod
    def joined(cls, blocks: Sequence[LayoutColumns]) -> LayoutColumns:
        """One after the other; the techniques of the job say the modules of all."""
        partitions = tuple(dict.fromkeys((*EVEN, *(split for block in blocks for split in block.partitions))))
        place = {split: i for i, split in enumerate(partitions)}
        moved = [np.array([place[split] for split in block.partitions])[block.partition] for block in blocks]
        columns: dict[str, Any] = {n: np.concatenate([getattr(block, n) for block in blocks]) for n in LAYOUT_FIELDS}
        return cls(**columns, partition=np.concatenate(moved), partitions=partitions)

    def distinct(self, names: Iterable[str]) -> tuple[LayoutColumns, IntColumn]:
        """One row of each combination of values in the fields `names`, and for each layout the index of its row."""
        code, size = np.zeros(len(self), dtype=np.int64), 1
        for name in names:
            column = getattr(self, name)
            values = int(column.max(initial=0)) + 1
            if size * values > LARGEST_CODE:
                used, code = np.unique(code, return_inverse=True)
                size = len(used)
            code, size = code * values + column, size * values
        if size > SPARSE * len(self):
            _, first, row_of = np.unique(code, return_index=True, return_inverse=True)
            return self.take(first), row_of
        first_of = np.full(size, -1, dtype=np.int64)
        first_of[code[::-1]] = np.arange(len(self))[::-1]  # of equal ones the first is written last
        there = first_of >= 0
        return self.take(first_of[there]), (np.cumsum(there) - 1)[code]

    @property
    def uneven(self) -> BoolColumn:
        return np.not_equal(self.partition, 0)


@frozen
class Situation:
    """All a legality rule may look at."""

    layouts: LayoutColumns
    shape: ModelShape
    workload: Workload
    cluster: Cluster
    nodes: int
    techniques: Techniques = NO_TECHNIQUES
    numbers: NumberFormats = NO_NUMBER_FORMATS

    @property
    def world_size(self) -> int:
        return self.nodes * self.cluster.devices_per_node


@frozen
class Rule:
    """One legality rule as data.

    `allows(situation)` is a boolean column: True where the layout passes. `sentence` is shown when it fails;
    `where` names the place in the framework that checks it, with the version it was read in. `of_techniques`: the rule
    looks at what is tried with every split (ZeRO stage, recompute, amounts, techniques), so it is evaluated for each.
    `figures(situation)` says of its one layout, which fails, which numbers break the rule: "3 x 2 = 6 and 8".
    """

    key: str
    sentence: str
    where: str
    allows: Callable[[Situation], BoolColumn]
    of_techniques: bool = False
    figures: Callable[[Situation], str] | None = None


def refusal_counts(rules: Iterable[Rule], first_failed: IntColumn) -> Mapping[str, int]:
    """How many layouts each rule refused, given each layout's first failed rule (-1 = passed)."""
    listed = list(rules)
    counts = np.bincount(first_failed[first_failed >= 0], minlength=len(listed))
    return {rule.key: int(n) for rule, n in zip(listed, counts, strict=True) if n}
