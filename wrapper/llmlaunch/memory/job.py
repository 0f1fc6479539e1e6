"""The inputs of the estimator: one job with its correction by measured runs, and the pipeline ranks of its layouts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import field, replace
from functools import cached_property, reduce
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmlaunch.columns import FloatColumn, IntColumn
from llmlaunch.facts import MemoryFacts
from llmlaunch.frozen import frozen
from llmlaunch.layers.columns import Size
from llmlaunch.layers.model import Model, model_of
from llmlaunch.layout import LayoutColumns
from llmlaunch.models.shape import ModelShape
from llmlaunch.techniques import NO_TECHNIQUES, Techniques
from llmlaunch.workload import Workload


@frozen
class Correction:
    """The correction of a prediction by measured runs, in two parts: torch's memory, and what is outside it.

    Of a rank that is predicted to reserve R bytes and to hold O outside torch, the corrected prediction is
    rint(R (1 + torch_share)) + max(O + rint(outside_bytes), 0). What is allocated grows in the same proportion, so the
    worst moment stays the worst, allocated <= reserved <= device, and more layers still never need less.

    `torch_share` of what torch's allocator is predicted to hold is added to it (0.03: 3 % more; above -1), and
    `outside_bytes` to the context and the communicators. Both may be negative. `calibration_id` is that of the
    calibration it comes from.
    """

    torch_share: float = 0.0
    outside_bytes: float = 0.0
    calibration_id: str | None = None

    def __post_init__(self) -> None:
        if not self.torch_share > -1.0:
            raise ValueError(f"a correction leaves nothing of torch's memory: torch_share {self.torch_share}")

    @property
    def torch_factor(self) -> float:
        """The factor for torch's bytes."""
        return 1.0 + self.torch_share

    def outside(self, context: FloatColumn, communicators: FloatColumn) -> tuple[FloatColumn, FloatColumn]:
        """Return both columns with the outside part. The context takes it; a negative rest goes to the communicators,
        and neither falls below zero."""
        if not self.outside_bytes:
            return context, communicators
        moved = context + round(self.outside_bytes)
        return np.maximum(moved, 0.0), np.maximum(communicators + np.minimum(moved, 0.0), 0.0)


NO_CORRECTION = Correction()


class JobAnswers:
    """What was worked out of a job when it was first asked for: the effects that its techniques have on memory and on
    time, which of them write a method, and the same job without what effects say of moments alone."""

    def __init__(self) -> None:
        self.effects: tuple[Any, ...] | None = None
        self.effects_by_method: dict[object, tuple[Callable[..., Any], ...]] | None = None
        self.time_effects: tuple[Any, ...] | None = None
        self.of_split: Job | None = None


@frozen
class Job:
    """What all layouts of a recipe share. `microbatch_group` is how many micro-batches an interleaved
    schedule runs through one chunk before the next; None is its default, the pipeline size. `answers` are kept as long
    as the job is."""

    shape: ModelShape
    workload: Workload
    facts: MemoryFacts
    microbatch_group: int | None = None
    techniques: Techniques = NO_TECHNIQUES
    correction: Correction = NO_CORRECTION
    answers: JobAnswers = field(default_factory=JobAnswers, init=False, repr=False, compare=False)


Groups = tuple[tuple[int, ...], ...]


class RankAnswers:
    """What functions answered of a job and the ranks at some rows, by function and with the job: `of_splits` whatever
    is recomputed and offloaded, which rows of the same splits share, and `of_techniques` with the rows' own."""

    def __init__(self) -> None:
        self.of_splits: dict[Callable[..., Any], tuple[Job, Any]] = {}
        self.of_techniques: dict[Callable[..., Any], tuple[Job, Any]] = {}


@frozen
class RankColumns:
    """One row per (layout, pipeline rank). `layout_index` says which layout a row belongs to: layout by layout, or,
    where these are the `ends` of even pipelines, the first ranks of all layouts and then the last ranks of all, unless
    no layout has more than one.

    `counts` are the layers that a rank holds over all its chunks, a column for each of the `groups`: the kinds of the
    model's layers, one by one. Where a group has several kinds, its layers are of any of these, and take the least of
    what these take, so that all that follows is a lower bound. `answers` are kept as long as the rows are
    (`answers.py`); nobody may write into a column."""

    layouts: LayoutColumns
    layout_index: IntColumn
    rank: IntColumn
    microbatches: IntColumn  # per pipeline and step
    counts: tuple[FloatColumn, ...]
    groups: Groups
    ends: bool = False
    answers: RankAnswers = field(default_factory=RankAnswers, init=False, repr=False, compare=False)

    @cached_property
    def first(self) -> NDArray[np.bool_]:
        return np.equal(self.rank, 0)

    @cached_property
    def last(self) -> NDArray[np.bool_]:
        return np.equal(self.rank, self.layouts.pipeline - 1)

    @cached_property
    def tensor(self) -> FloatColumn:
        """The tensor-parallel size, to divide by."""
        return self.layouts.tensor.astype(np.float64)

    @cached_property
    def layers(self) -> FloatColumn:
        """All layers of the rank."""
        return reduce(np.add, self.counts)

    def __len__(self) -> int:
        return len(self.rank)

    def sum_of(self, of_groups: Sequence[Size]) -> FloatColumn:
        """Return what all layers of a rank take together, of what a layer of each group takes."""
        return reduce(np.add, (count * size for count, size in zip(self.counts, of_groups, strict=True)))

    def most_of(self, of_groups: Sequence[Size]) -> FloatColumn:
        """Return what the layer of a rank that takes most takes, and 0 where it has none."""
        sizes = zip(self.counts, of_groups, strict=True)
        return reduce(np.maximum, (np.where(count > 0, size, 0.0) for count, size in sizes))

    def with_layouts(self, layouts: LayoutColumns) -> RankColumns:
        """Return the same ranks of the same splits with other recompute and offload settings."""
        other = replace(self, layouts=layouts)
        other.answers.of_splits = self.answers.of_splits
        return other


def least(of_kinds: Sequence[Size], kinds: Sequence[int]) -> Size:
    """Return the least of what layers of some kinds take, row by row; 0 of none."""
    if not kinds:
        return 0.0
    smallest: Size = reduce(np.minimum, (of_kinds[kind] for kind in kinds))
    return smallest


def all_ranks(job: Job, layouts: LayoutColumns, microbatches: IntColumn | None = None) -> RankColumns:
    """Return every pipeline rank of every layout, rank by rank in order."""
    repeat = layouts.pipeline
    index = np.repeat(np.arange(len(layouts)), repeat)
    starts = np.cumsum(repeat) - repeat
    rank = np.arange(len(index)) - starts[index]
    return ranks_at(job, layouts, index, rank, microbatches)


def one_rank(job: Job, layouts: LayoutColumns, rank: IntColumn) -> RankColumns:
    """Return one pipeline rank of each layout."""
    return ranks_at(job, layouts, np.arange(len(layouts)), rank, None)


def without_layers(job: Job, layouts: LayoutColumns) -> RankColumns:
    """Return a row of each layout that holds no layer, for what one layer takes: it is the same on every rank."""
    count, groups = len(layouts), model_of(job.shape).single_groups
    first = np.zeros(count, dtype=np.int64)
    counts = (np.zeros(count),) * len(groups)
    return RankColumns(layouts, np.arange(count), first, np.ones(count, dtype=np.int64), counts, groups)


def of_classes(
    job: Job,
    layouts: LayoutColumns,
    rank: IntColumn,
    microbatches: IntColumn,
    dense: FloatColumn | IntColumn,
    mixture: FloatColumn | IntColumn,
) -> RankColumns:
    """Return a rank of each layout that holds so many layers that are no mixtures, and so many that are; where either
    may be of several kinds, they are the least of these."""
    index, counts = np.arange(len(layouts)), (dense.astype(np.float64), mixture.astype(np.float64))
    return RankColumns(layouts, index, rank, microbatches, counts, model_of(job.shape).classes)


def mixture_layers(job: Job, rows: RankColumns) -> FloatColumn:
    """Return how many mixtures each row's rank holds."""
    kinds = model_of(job.shape).kinds
    held = [
        count for group, count in zip(rows.groups, rows.counts, strict=True) if group and kinds[group[0]].is_mixture
    ]
    return reduce(np.add, held, np.zeros(len(rows)))


def ranks_at(
    job: Job,
    layouts: LayoutColumns,
    index: IntColumn,
    rank: IntColumn,
    microbatches: IntColumn | None,
    ends: bool = False,
) -> RankColumns:
    """Return a rank of each of the layouts at `index`; `ends` says that these are all first and then all last ranks."""
    if microbatches is None:
        microbatches = layouts.num_microbatches(job.workload.global_batch_size)
    rows = _in_order(layouts, len(index)) if ends else layouts.take(index)
    counts, groups = layer_counts(model_of(job.shape), rows, rank)
    batches = np.maximum(microbatches[index], 1)
    return RankColumns(rows, index, rank, batches, counts, groups, ends)


def _in_order(layouts: LayoutColumns, rows: int) -> LayoutColumns:
    """All layouts in order, once or twice: faster than taking them row by row."""
    if rows == len(layouts):
        return layouts
    return layouts.take(np.tile(np.arange(len(layouts)), 2))


def layer_counts(model: Model, rows: LayoutColumns, rank: IntColumn) -> tuple[tuple[FloatColumn, ...], Groups]:
    """Return the layers of each kind that each row's rank holds, over all its model chunks, and the kinds."""
    if len(model.kinds) == 1 and not np.any(rows.uneven):
        return (len(model.order) / rows.pipeline,), model.single_groups
    example, same = _same_stages(rows, rank)
    of_row, start, stop = _all_chunks(len(model.order), rows, rank, example)
    counts = []
    for before in model.before:
        held = np.bincount(of_row, before[stop] - before[start], minlength=len(example))
        counts.append(np.asarray(held, dtype=np.float64)[same])
    return tuple(counts), model.single_groups


def _same_stages(rows: LayoutColumns, rank: IntColumn) -> tuple[IntColumn, IntColumn]:
    """Return row numbers of the different stages, and for each row the number of its stage. There are few."""
    code = np.zeros(len(rank), dtype=np.int64)
    for column in (rows.partition, rows.pipeline, rows.virtual_pipeline, rank):
        code = code * (int(column.max(initial=0)) + 1) + column
    _, example, same = np.unique(code, return_index=True, return_inverse=True)
    return example, same


def layer_kinds(shape: ModelShape) -> Sequence[int]:
    """Return 1 for each mixture layer, 0 for each dense layer."""
    return shape.moe.layer_pattern if shape.moe else (0,) * shape.num_layers


def chunk_ranges(num_layers: int, layouts: LayoutColumns, rank: IntColumn) -> Iterator[tuple[IntColumn, IntColumn]]:
    """Yield the first and one past the last layer of every model chunk of each row's rank, chunk by chunk; empty where
    it has fewer chunks."""
    p, v = layouts.pipeline, layouts.virtual_pipeline
    for chunk in range(int(v.max(initial=1))):
        stage = np.where(chunk < v, chunk * p + rank, 0)
        start, stop = _stage_range(num_layers, layouts.partitions, layouts.partition, p * v, stage)
        yield start, np.where(chunk < v, stop, start)


def _all_chunks(
    num_layers: int, layouts: LayoutColumns, rank: IntColumn, rows: IntColumn
) -> tuple[IntColumn, IntColumn, IntColumn]:
    """Return for every model chunk of the ranks of some `rows` whose it is, by its place in `rows`, and its first and
    one past its last layer."""
    p, v = layouts.pipeline[rows], layouts.virtual_pipeline[rows]
    of_row = np.repeat(np.arange(len(rows)), v)
    chunk = np.arange(len(of_row)) - (np.cumsum(v) - v)[of_row]
    stage = chunk * p[of_row] + rank[rows][of_row]
    return of_row, *_stage_range(
        num_layers, layouts.partitions, layouts.partition[rows][of_row], (p * v)[of_row], stage
    )


def _stage_range(
    num_layers: int, partitions: Sequence[Sequence[int]], partition: IntColumn, stages: IntColumn, stage: IntColumn
) -> tuple[IntColumn, IntColumn]:
    """Return the first and one past the last layer of a virtual stage of each row, of so many `stages`, which are cut
    as the `partitions` at `partition` are."""
    size = num_layers // stages
    start = np.minimum(stage * size, num_layers)
    stop = np.minimum(start + size, num_layers)
    if np.any(partition):
        ends = _stage_ends(partitions)
        place = np.minimum(stage, ends.shape[1] - 2)
        start = np.where(partition > 0, ends[partition, place], start)
        stop = np.where(partition > 0, ends[partition, place + 1], stop)
    return start, stop


def _stage_ends(partitions: Sequence[Sequence[int]]) -> IntColumn:
    """Return the number of layers before each virtual stage, and after the last: one row for each partition."""
    table = np.zeros((len(partitions), max(map(len, partitions)) + 2), dtype=np.int64)
    for row, layers in zip(table, partitions, strict=True):
        row[1 : len(layers) + 1] = np.cumsum(layers)
    return table


def head_rank(job: Job, layouts: LayoutColumns) -> IntColumn:
    """Return the pipeline rank that holds the layers of multi-token prediction."""
    return layouts.pipeline - 1 - int(job.techniques.heads_before_loss)


def final_norm_rank(job: Job, layouts: LayoutColumns) -> IntColumn:
    """Return the pipeline rank that holds the norm behind the decoder: the last, and where prediction heads lie before
    it, that of the last decoder layer (megatron/core/transformer/transformer_block.py TransformerBlock
    has_final_layernorm_in_this_stage, core 0.19)."""
    if not job.techniques.heads_before_loss:
        return layouts.pipeline - 1
    stages = [max((stage for stage, layers in enumerate(split) if layers), default=0) for split in layouts.partitions]
    return np.array(stages, dtype=np.int64)[layouts.partition] % layouts.pipeline
