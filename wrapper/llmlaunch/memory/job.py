"""The inputs of the estimator: one job with its correction by measured runs, and the pipeline ranks of its layouts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from functools import cached_property, reduce, wraps
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from llmlaunch.columns import BoolColumn, FloatColumn, IntColumn
from llmlaunch.facts import MemoryFacts
from llmlaunch.frozen import frozen
from llmlaunch.layers.columns import Size
from llmlaunch.layers.model import Model, model_of
from llmlaunch.layout import LayoutColumns, Modules
from llmlaunch.models.kinds import attention_kinds, is_mixed, kind_shares, layer_parts, part_kinds
from llmlaunch.models.shape import ModelShape
from llmlaunch.techniques import NO_TECHNIQUES, Techniques
from llmlaunch.workload import Workload

__all__ = [
    "NO_CORRECTION",
    "Correction",
    "Job",
    "RankColumns",
    "alike_parts",
    "all_are_candidates",
    "all_ranks",
    "by_recompute",
    "candidate_ranks",
    "chunk_ranges",
    "layer_counts",
    "layer_kinds",
    "mean_of_kinds",
    "mean_of_parts",
    "offloads",
    "offloads_modules",
    "once_for_rows",
    "one_rank",
    "parts_differ",
    "pattern_is_uniform",
    "recomputes",
    "with_mean_parts",
    "without_layers",
    "without_offload",
]


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


Result = TypeVar("Result")


@frozen
class Job:
    """What all layouts of a recipe share. `microbatch_group` is how many micro-batches an interleaved
    schedule runs through one chunk before the next; None is its default, the pipeline size."""

    shape: ModelShape
    workload: Workload
    facts: MemoryFacts
    microbatch_group: int | None = None
    techniques: Techniques = NO_TECHNIQUES
    correction: Correction = NO_CORRECTION

    @cached_property
    def without_recompute(self) -> Job:
        """The same job without settings of recompute, offload and graphs."""
        moved = [f for f in fields(Techniques) if f.name.startswith(("recompute_", "offload_", "cuda_graphs"))]
        without: dict[str, Any] = {f.name: f.default for f in moved}
        return replace(self, techniques=replace(self.techniques, swapped_share=0.0, **without))

    @property
    def stages_alike(self) -> bool:
        """Whether all pipeline ranks of even stages hold and train equally many layers of each kind."""
        alike = pattern_is_uniform(self.shape) and not parts_differ(self.shape) and not is_mixed(self.shape)
        return self.techniques.trained_layers is None and alike

    @cached_property
    def by_attention(self) -> tuple[Job, ...]:
        """The job once for each kind of softmax attention, as if all layers had it."""
        kinds = attention_kinds(self.shape)
        return (self,) if len(kinds) == 1 else tuple(replace(self, shape=kind.shape) for kind in kinds)


Groups = tuple[tuple[int, ...], ...]


@frozen
class RankColumns:
    """One row per (layout, pipeline rank). `layout_index` says which layout a row belongs to: layout by layout, or,
    where these are the `ends` of even pipelines, the first ranks of all layouts and then the last ranks of all, unless
    no layout has more than one.

    `shares` are the shares of a rank's layers that have each part in the place of attention (`layer_parts`), where not
    all have the same; of layers of one part each, mixtures are counted apart. What a layer holds is their mean. None:
    what takes least of them, of each thing a layer holds, so that it is a bound. `kind_shares` are the parts that have
    each kind of softmax attention (`attention_kinds`) where there are several; None likewise.

    `counts` are the layers that a rank holds over all its chunks, a column for each of the `groups`: the kinds of the
    model's layers, one by one. Where a group has several kinds, its layers are of any of these, and take the least of
    what these take, so that all that follows is a lower bound."""

    layouts: LayoutColumns
    layout_index: IntColumn
    rank: IntColumn
    microbatches: IntColumn  # per pipeline and step
    dense_layers: FloatColumn
    moe_layers: FloatColumn
    ends: bool = False
    shares: Mapping[str, FloatColumn] | None = None
    kind_shares: tuple[FloatColumn, ...] | None = None
    counts: tuple[FloatColumn, ...] = ()
    groups: Groups = ()

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

    def of_groups(self, of_kinds: Sequence[Size]) -> list[Size]:
        """Return what a layer of each group takes, of what one of each kind takes."""
        return [of_kinds[kinds[0]] if len(kinds) == 1 else least(of_kinds, kinds) for kinds in self.groups]

    def sum_of(self, of_kinds: Sequence[Size]) -> FloatColumn:
        """Return what all layers of a rank take together, of what one of each kind takes."""
        products = zip(self.counts, self.of_groups(of_kinds), strict=True)
        return reduce(np.add, (count * size for count, size in products))

    def most_of(self, of_kinds: Sequence[Size]) -> FloatColumn:
        """Return what the layer of a rank that takes most takes, and 0 where it has none."""
        sizes = zip(self.counts, self.of_groups(of_kinds), strict=True)
        return reduce(np.maximum, (np.where(count > 0, size, 0.0) for count, size in sizes))

    def with_layouts(self, layouts: LayoutColumns) -> RankColumns:
        """Return the same ranks of the same splits with other recompute and offload settings."""
        other = replace(self, layouts=layouts)
        vars(self).setdefault("answers", {})
        vars(other).update({**vars(self), "layouts": layouts})
        return other


def least(of_kinds: Sequence[Size], kinds: Sequence[int]) -> Size:
    """Return the least of what layers of some kinds take, row by row; 0 of none."""
    if not kinds:
        return 0.0
    smallest: Size = reduce(np.minimum, (of_kinds[kind] for kind in kinds))
    return smallest


def once_for_rows(function: Callable[[Job, RankColumns], Result]) -> Callable[[Job, RankColumns], Result]:
    """Cache a result for the same split, however many terms ask for it: a result that depends neither on what a layout
    recomputes and offloads nor on what `Job.without_recompute` leaves out. The rows carry the answers, so they are
    gone with them; nobody may write into a column."""

    @wraps(function)
    def answer(job: Job, rows: RankColumns) -> Result:
        answers: dict[Any, tuple[Job, Any]] = vars(rows).setdefault("answers", {})
        cached = answers.get(function)
        if cached is None or not (cached[0] is job or cached[0].without_recompute == job.without_recompute):
            cached = answers[function] = (job, function(job, rows))
        result: Result = cached[1]
        return result

    return answer


def all_ranks(job: Job, layouts: LayoutColumns, microbatches: IntColumn | None = None) -> RankColumns:
    """Return every pipeline rank of every layout, rank by rank in order."""
    repeat = layouts.pipeline
    index = np.repeat(np.arange(len(layouts)), repeat)
    starts = np.cumsum(repeat) - repeat
    rank = np.arange(len(index)) - starts[index]
    return _rows(job, layouts, index, rank, microbatches)


def all_are_candidates(job: Job, layouts: LayoutColumns) -> bool:
    """Whether any pipeline rank may be the worst of a layout, not only the first or the last.

    It may where stages differ, where inner ranks communicate with both neighbours, where prediction heads are on a
    stage before the last, where later ranks keep more weight gradients waiting (ZB-H1) while earlier ones keep more
    activations, and where matrices are packed whole into buffers whose padding does not grow with the rank's
    parameters (`layer_wise`). Otherwise no term of an inner rank exceeds that of the first rank.
    """
    techniques = job.techniques
    inner = techniques.zero_bubble or techniques.heads_before_loss or job.facts.matrices_whole
    return inner or not job.stages_alike or "neighbours" in job.facts.groups or bool(np.any(layouts.uneven))


def one_rank(job: Job, layouts: LayoutColumns, rank: IntColumn) -> RankColumns:
    """Return one pipeline rank of each layout."""
    return _rows(job, layouts, np.arange(len(layouts)), rank, None)


def without_layers(layouts: LayoutColumns) -> RankColumns:
    """Return a row of each layout that holds no layer, for what one layer takes: it is the same on every rank."""
    count = len(layouts)
    first, none = np.zeros(count, dtype=np.int64), np.zeros(count)
    return RankColumns(layouts, np.arange(count), first, np.ones(count, dtype=np.int64), none, none)


def candidate_ranks(job: Job, layouts: LayoutColumns, microbatches: IntColumn | None = None) -> RankColumns:
    """Return the pipeline ranks that can be a layout's worst.

    With even, alike stages, in-flight micro-batches fall from rank to rank and only the first and the last rank
    hold embeddings: the worst is one of those two. Otherwise every rank is a candidate (`all_are_candidates`).
    """
    if all_are_candidates(job, layouts):
        return all_ranks(job, layouts, microbatches)
    n = len(layouts)
    if not np.any(layouts.pipeline > 1):
        return _rows(job, layouts, np.arange(n), np.zeros(n, dtype=np.int64), microbatches, ends=True)
    index = np.concatenate([np.arange(n)] * 2)
    rank = np.concatenate([np.zeros(n, dtype=np.int64), layouts.pipeline - 1])
    return _rows(job, layouts, index, rank, microbatches, ends=True)


def pattern_is_uniform(shape: ModelShape) -> bool:
    return shape.moe is None or len(set(shape.moe.layer_pattern)) == 1


def _rows(
    job: Job,
    layouts: LayoutColumns,
    index: IntColumn,
    rank: IntColumn,
    microbatches: IntColumn | None,
    ends: bool = False,
) -> RankColumns:
    if microbatches is None:
        microbatches = layouts.num_microbatches(job.workload.global_batch_size)
    rows = _in_order(layouts, len(index)) if ends else layouts.take(index)
    dense, moe = _layers(job, rows, rank)
    shares, kinds = _shares(job, rows, rank), _kind_shares(job, rows, rank)
    counts, groups = layer_counts(model_of(job.shape), rows, rank)
    batches = np.maximum(microbatches[index], 1)
    return RankColumns(rows, index, rank, batches, dense, moe, ends, shares, kinds, counts, groups)


def _in_order(layouts: LayoutColumns, rows: int) -> LayoutColumns:
    """All layouts in order, once or twice: faster than taking them row by row."""
    if rows == len(layouts):
        return layouts
    return layouts.take(np.tile(np.arange(len(layouts)), 2))


def _layers(job: Job, rows: LayoutColumns, rank: IntColumn) -> tuple[FloatColumn, FloatColumn]:
    """Dense and mixture layers each row's rank holds, over all its model chunks."""
    shape = job.shape
    layers = shape.num_layers / rows.pipeline
    pattern = layer_kinds(shape)
    if pattern_is_uniform(shape) and not np.any(rows.uneven):
        share = float(pattern[0]) if len(pattern) else 0.0
        return layers * (1.0 - share), layers * share
    before = np.concatenate([[0], np.cumsum(pattern)])  # mixture layers before layer i
    example, same = _same_stages(rows, rank)
    of_row, start, stop = _all_chunks(shape.num_layers, rows, rank, example)
    assigned = np.asarray(np.bincount(of_row, stop - start, minlength=len(example)), dtype=float)
    moe = np.asarray(np.bincount(of_row, before[stop] - before[start], minlength=len(example)), dtype=float)
    layers = np.where(rows.uneven, assigned[same], layers)
    return layers - moe[same], moe[same]


def layer_counts(model: Model, rows: LayoutColumns, rank: IntColumn) -> tuple[tuple[FloatColumn, ...], Groups]:
    """Return the layers of each kind that each row's rank holds, over all its model chunks, and the kinds."""
    kinds = len(model.kinds)
    if kinds == 1 and not np.any(rows.uneven):
        return (len(model.order) / rows.pipeline,), ((0,),)
    example, same = _same_stages(rows, rank)
    of_row, start, stop = _all_chunks(len(model.order), rows, rank, example)
    counts = []
    for before in model.before:
        held = np.bincount(of_row, before[stop] - before[start], minlength=len(example))
        counts.append(np.asarray(held, dtype=np.float64)[same])
    return tuple(counts), tuple((kind,) for kind in range(kinds))


def _same_stages(rows: LayoutColumns, rank: IntColumn) -> tuple[IntColumn, IntColumn]:
    """Return row numbers of the different stages, and for each row the number of its stage. There are few."""
    code = np.zeros(len(rank), dtype=np.int64)
    for column in (rows.partition, rows.pipeline, rows.virtual_pipeline, rank):
        code = code * (int(column.max(initial=0)) + 1) + column
    _, example, same = np.unique(code, return_index=True, return_inverse=True)
    return example, same


def parts_differ(shape: ModelShape) -> bool:
    """Whether layers differ in what they have in the place of attention."""
    return shape.linear_attention is not None or shape.mamba is not None


def _shares(job: Job, rows: LayoutColumns, rank: IntColumn) -> Mapping[str, FloatColumn] | None:
    """Return the shares of each row's layers that have each part; None where all layers of the model are alike."""
    if not parts_differ(job.shape):
        return None
    parts, kinds = layer_parts(job.shape), part_kinds(job.shape)
    patterns = [[int(part == kind) for part in parts] for kind in kinds]
    return dict(zip(kinds, _shares_of(job.shape, rows, rank, patterns), strict=True))


def _kind_shares(job: Job, rows: LayoutColumns, rank: IntColumn) -> tuple[FloatColumn, ...] | None:
    """Return the shares of each row's layers that have each kind of softmax attention; None where there is one."""
    if not is_mixed(job.shape):
        return None
    return tuple(_shares_of(job.shape, rows, rank, [kind.layers for kind in attention_kinds(job.shape)]))


def _shares_of(
    shape: ModelShape, rows: LayoutColumns, rank: IntColumn, patterns: Sequence[Sequence[int]]
) -> list[FloatColumn]:
    """Return for each pattern, with 1 for each layer of its kind, its part of each row's layers that are of any."""
    example, same = _same_stages(rows, rank)
    of_row, start, stop = _all_chunks(shape.num_layers, rows, rank, example)
    before = [np.concatenate([[0], np.cumsum(pattern)]) for pattern in patterns]  # layers of the kind before layer i
    counts = [np.bincount(of_row, of_kind[stop] - of_kind[start], minlength=len(example)) for of_kind in before]
    layers = np.maximum(reduce(np.add, counts), 1.0)
    return [(count / layers)[same] for count in counts]


def mean_of_kinds(rows: RankColumns, of_kinds: Sequence[FloatColumn]) -> FloatColumn:
    """Return the mean over a rank's layers of what each kind of softmax attention has (`Job.by_attention`), or the
    least of them where no shares are known."""
    if len(of_kinds) == 1 or rows.kind_shares is None:
        return reduce(np.minimum, of_kinds)
    return reduce(np.add, (share * column for share, column in zip(rows.kind_shares, of_kinds, strict=True)))


def mean_of_parts(rows: RankColumns, of_parts: Mapping[str, FloatColumn]) -> FloatColumn:
    """Return what a layer has in the mean of a row's layers, given what it has with each part of the model: the least
    of all where the shares are not known."""
    if rows.shares is None:
        return reduce(np.minimum, of_parts.values())
    return reduce(np.add, (share * of_parts[kind] for kind, share in rows.shares.items()))


def alike_parts(job: Job, rows: RankColumns) -> tuple[RankColumns, ...]:
    """Return the rows once for each part that layers have, or each kind of softmax attention, as if all layers of a
    rank had it where any has: for what is as large as the largest layer."""
    shares, kinds = rows.shares, rows.kind_shares
    if kinds is not None:
        alike = [
            tuple(np.where(one > 0, float(i == j), each) for j, each in enumerate(kinds)) for i, one in enumerate(kinds)
        ]
        return tuple(replace(rows, kind_shares=each) for each in alike)
    if shares is None:
        return (rows,)
    alone = [
        {other: np.where(share > 0, float(other == kind), column) for other, column in shares.items()}
        for kind, share in shares.items()
    ]
    return tuple(replace(rows, shares=each) for each in alone)


def with_mean_parts(job: Job, rows: RankColumns) -> RankColumns:
    """Return the rows as if each had of every part, and every kind of attention, what the whole model has in the
    mean."""
    if is_mixed(job.shape):
        rows = replace(rows, kind_shares=tuple(np.full(len(rows), share) for _, share in kind_shares(job.shape)))
    if not parts_differ(job.shape):
        return rows
    parts = [part for part in layer_parts(job.shape) if part != "mixture"]
    shares = {kind: np.full(len(rows), parts.count(kind) / len(parts)) for kind in part_kinds(job.shape)}
    return replace(rows, shares=shares)


def layer_kinds(shape: ModelShape) -> Sequence[int]:
    """Return 1 for each mixture layer, 0 for each dense layer."""
    return shape.moe.layer_pattern if shape.moe else (0,) * shape.num_layers


def chunk_ranges(shape: ModelShape, layouts: LayoutColumns, rank: IntColumn) -> Iterator[tuple[IntColumn, IntColumn]]:
    """Yield the first and one past the last layer of every model chunk of each row's rank, chunk by chunk; empty where
    it has fewer chunks."""
    p, v = layouts.pipeline, layouts.virtual_pipeline
    for chunk in range(int(v.max(initial=1))):
        stage = np.where(chunk < v, chunk * p + rank, 0)
        start, stop = _stage_range(shape.num_layers, layouts.partitions, layouts.partition, p * v, stage)
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


DEFAULT_MODULES = ("core_attn",)  # of selective recompute


def recomputes(job: Job, layouts: LayoutColumns, module: str) -> bool | BoolColumn:
    """Whether selective recompute takes `module`: of all layouts alike, or a column where they differ in it."""
    if layouts.modules is None:
        return module in (job.techniques.recompute_modules or DEFAULT_MODULES)
    return _in_sets(layouts, [module in (modules.recompute or DEFAULT_MODULES) for modules in layouts.module_sets])


def offloads(job: Job, layouts: LayoutColumns, module: str) -> bool | BoolColumn:
    """Whether the activations of `module` wait in host memory: of all layouts alike, or a column where they differ."""
    if layouts.modules is None:
        return module in job.techniques.offload_modules
    return _in_sets(layouts, [module in modules.offload for modules in layouts.module_sets])


def _in_sets(layouts: LayoutColumns, holds: Sequence[bool]) -> bool | BoolColumn:
    if all(holds) or not any(holds):
        return holds[0]
    assert layouts.modules is not None
    column: BoolColumn = np.array(holds)[layouts.modules]
    return column


def offloads_modules(job: Job, layouts: LayoutColumns) -> bool:
    """Whether the activations of any module of any layout wait in host memory."""
    if layouts.modules is None:
        return bool(job.techniques.offload_modules)
    return any(modules.offload for modules in layouts.module_sets)


def without_offload(job: Job, layouts: LayoutColumns) -> tuple[Job, LayoutColumns]:
    """Return job and layouts with the activations of all modules on the device."""
    here = replace(job, techniques=replace(job.techniques, offload_modules=()))
    module_sets = tuple(Modules(modules.recompute) for modules in layouts.module_sets)
    return here, replace(layouts, module_sets=module_sets)


Column = Callable[[], FloatColumn]


def by_recompute(rows: RankColumns, none: Column, selective: Column, full: Column) -> FloatColumn:
    """Select each row's value from the column of its recompute granularity, in the order of the RECOMPUTE_ codes. Only
    columns of granularities that occur are computed."""
    columns, recompute = (none, selective, full), rows.layouts.recompute
    chosen: FloatColumn | None = None
    for code in np.flatnonzero(np.bincount(recompute, minlength=len(columns))):
        column = columns[code]()
        chosen = column if chosen is None else np.where(recompute == code, column, chosen)
    return np.zeros(0) if chosen is None else chosen
