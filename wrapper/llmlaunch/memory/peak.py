"""The peak of a rank, from the sums of its model states and its transient bytes: the worst moment, what torch's
allocator reserves at that moment, and what lies outside torch.

Torch's peak is what lasts plus the worst of a few moments (`moments`). The terms of the worst moment are the terms of
the rank, so they sum to its peak exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce

import numpy as np
from numpy.typing import NDArray

from llmlaunch.columns import FloatColumn, IntColumn
from llmlaunch.frozen import frozen
from llmlaunch.layout import LayoutColumns
from llmlaunch.memory.activations import cut_parameters
from llmlaunch.memory.effects import Effect, effects_of
from llmlaunch.memory.guard import IMPOSSIBLE_BYTES, least_torch_bytes, negative_rows
from llmlaunch.memory.job import Job, RankColumns, head_rank
from llmlaunch.memory.loss import logit_piece, table_gradient
from llmlaunch.memory.moments import HOLES, Moment, MomentTerms, state_terms, transient_terms
from llmlaunch.memory.states import States, states

LAYER_BACKWARD = 2  # of the moments
Members = Callable[[RankColumns], FloatColumn]


def _neighbours(rows: RankColumns) -> FloatColumn:
    return (~rows.first).astype(np.float64) + (~rows.last)


def _several(size: Callable[[LayoutColumns], IntColumn]) -> Members:
    return lambda rows: (size(rows.layouts) > 1).astype(np.float64)


def _expert_replicas(lay: LayoutColumns) -> IntColumn:
    """Return how many ranks hold the same experts; none where experts are not spread over ranks of their own."""
    return np.where(lay.expert > 1, lay.tensor * lay.context * lay.data // (lay.expert * lay.expert_tensor), 1)


TABLES = "tied_embeddings"
# The number of communicators of each kind that a row's rank holds, but for TABLES.
GROUPS: Mapping[str, Members] = {
    "world": _several(lambda lay: lay.tensor * lay.pipeline * lay.context * lay.data),
    "tensor": _several(lambda lay: lay.tensor),
    "pipeline": _several(lambda lay: lay.pipeline),
    "context": _several(lambda lay: lay.context),
    "data": _several(lambda lay: lay.data),
    "expert": _several(lambda lay: lay.expert),
    "expert_data": _several(_expert_replicas),
    "data_and_context": _several(lambda lay: np.minimum(lay.data, lay.context)),
    "model": _several(lambda lay: lay.tensor * lay.pipeline),
    # the shares of a stage's output are gathered only where there is another stage
    "stage_output": _several(lambda lay: np.minimum(lay.tensor, lay.pipeline)),
    "neighbours": _neighbours,
}


def communicators(job: Job, rows: RankColumns) -> FloatColumn:
    """Return the bytes of all communicators of each row's rank.

    Each process group of more than one rank holds a communicator with buffers of its own. PyTorch makes an NCCL
    communicator at a group's first collective, and one for every pair of ranks that send to each other
    (torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp, getNCCLComm). A framework that builds two groups of the same
    ranks therefore pays twice."""
    count = np.zeros(len(rows))
    for name in job.facts.exchange.groups:
        count = count + (_holds_table(job, rows) if name == TABLES else GROUPS[name](rows))
    return np.asarray(job.facts.exchange.communicator_bytes * count)


def _holds_table(job: Job, rows: RankColumns) -> FloatColumn:
    """Return 1 for each of several ranks that have a copy of the embedding table, and add its gradients up: the last
    one where the head is tied to it, and that of prediction heads (Megatron-LM pretrain_gpt.py get_embedding_ranks,
    core 0.19)."""
    shape, holds = job.shape, np.zeros(len(rows), dtype=np.bool_)
    if shape.tied_embeddings:
        holds |= rows.first | rows.last
    if shape.mtp_num_layers:
        holds |= rows.first | (rows.rank == head_rank(job, rows.layouts))
    return np.where(rows.layouts.pipeline > 1, holds, False).astype(np.float64)


@frozen
class TransientSums:
    """Whole transient bytes at each moment, the lasting ones included. A column is None where the facts know no such
    thing, and `broken` is None where no term is negative. `outside` torch is what exchanges of tokens hold."""

    moments: tuple[FloatColumn, ...]
    outside: FloatColumn
    holes: FloatColumn | None  # free at the first moment, in pieces the cache keeps
    cut: FloatColumn | None  # wasted beside the backward pass where blocks of another size are cut
    lone: FloatColumn | None  # a tensor of the layers' backward pass that gets a segment of its own
    broken: NDArray[np.bool_] | None

    @classmethod
    def of(cls, job: Job, rows: RankColumns, terms: MomentTerms) -> TransientSums:
        return cls(
            moments=_moments(terms),
            outside=_exchange_bytes(job, rows),
            holes=terms.moments[0].get(HOLES),
            cut=_cut(job, rows),
            lone=np.rint(_lone(job, rows)) if job.facts.allocator.whole_segments else None,
            broken=_broken(terms),
        )


def _cut(job: Job, rows: RankColumns) -> FloatColumn | None:
    allocator = job.facts.allocator
    if allocator.cut_checkpoints:
        return np.rint(
            reduce(np.add, (effect(job, rows) for effect in effects_of(job, Effect.wasted)), np.zeros(len(rows)))
        )
    return np.rint(cut_parameters(job, rows)) if allocator.whole_segments else None


def _lone(job: Job, rows: RankColumns) -> FloatColumn:
    """Return the gradient of the first rank's table, unless the logits that are free by then leave room for it."""
    table = table_gradient(job, rows)
    return np.where(rows.first & (table > logit_piece(job, rows)), table, 0.0)


@frozen
class StateSums:
    """Whole bytes of model states at each moment, the lasting ones included, and the bytes outside torch. Torch's bytes
    are multiplied by `torch_factor`, the correction by measured runs; `outside` and `least`, below which torch cannot
    be, are corrected already. `broken` is None where no term is negative."""

    cache_share: float
    torch_factor: float
    moments: tuple[FloatColumn, ...]
    outside: FloatColumn
    placed: FloatColumn | None  # a moment of its own, before the first step
    flat: FloatColumn | None  # bytes of the single tensors of a step
    other_streams: tuple[FloatColumn, ...]  # by moment, that of the whole model last: cached though not alive
    least: FloatColumn
    broken: NDArray[np.bool_] | None

    @classmethod
    def of(cls, job: Job, rows: RankColumns, terms: MomentTerms, state: States) -> StateSums:
        facts = job.facts
        return cls(
            cache_share=cache_share(job),
            torch_factor=job.correction.torch_factor,
            moments=_moments(terms),
            outside=sum_of(_outside_torch(job, rows).values()),
            placed=np.rint(state.placed) if facts.states.placed_whole or facts.states.moved_to_buffers else None,
            flat=np.rint(state.flat) if facts.step.flat_step else None,
            other_streams=() if facts.states.full_sharding is None else _other_streams(state, terms),
            least=least_torch_bytes(job, rows),
            broken=_broken(terms),
        )

    @classmethod
    def joined(cls, several: Sequence[StateSums]) -> StateSums:
        """Return the rows of one after those of the other; their jobs have the same facts and correction."""

        def optional(name: str) -> FloatColumn | None:
            columns = [getattr(each, name) for each in several]
            return None if columns[0] is None else np.concatenate(columns)

        broken = [np.zeros(len(each.least), dtype=np.bool_) if each.broken is None else each.broken for each in several]
        return cls(
            cache_share=several[0].cache_share,
            torch_factor=several[0].torch_factor,
            moments=tuple(map(np.concatenate, zip(*(each.moments for each in several), strict=True))),
            outside=np.concatenate([each.outside for each in several]),
            placed=optional("placed"),
            flat=optional("flat"),
            other_streams=tuple(map(np.concatenate, zip(*(each.other_streams for each in several), strict=True))),
            least=np.concatenate([each.least for each in several]),
            broken=None if all(each.broken is None for each in several) else np.concatenate(broken),
        )

    def take(self, index: IntColumn) -> StateSums:
        """Return the rows at `index`, which may repeat."""

        def rows(column: FloatColumn) -> FloatColumn:
            return np.take(column, index)

        return StateSums(
            cache_share=self.cache_share,
            torch_factor=self.torch_factor,
            moments=tuple(map(rows, self.moments)),
            outside=rows(self.outside),
            placed=None if self.placed is None else rows(self.placed),
            flat=None if self.flat is None else rows(self.flat),
            other_streams=tuple(map(rows, self.other_streams)),
            least=rows(self.least),
            broken=None if self.broken is None else self.broken[index],
        )


def rank_sums(job: Job, rows: RankColumns) -> tuple[TransientSums, StateSums]:
    """Return transient and state sums of every row."""
    state = states(job, rows)
    transient = TransientSums.of(job, rows, transient_terms(job, rows))
    return transient, StateSums.of(job, rows, state_terms(job, rows, state), state)


def outside_bytes(job: Job, rows: RankColumns) -> FloatColumn:
    """Return what is outside torch: the device's context, communicators, and what exchanges of tokens hold."""
    return sum_of(_outside_torch(job, rows).values()) + _exchange_bytes(job, rows)


def _exchange_bytes(job: Job, rows: RankColumns) -> FloatColumn:
    return np.rint(_connections(job, rows)) + sum(map(np.rint, _terms_outside_torch(job, rows).values()))


def _connections(job: Job, rows: RankColumns) -> FloatColumn:
    return sum((effect(job, rows) for effect in effects_of(job, Effect.connections)), np.zeros(len(rows)))


def _terms_outside_torch(job: Job, rows: RankColumns) -> Moment:
    effects = effects_of(job, Effect.outside_torch)
    return {name: column for effect in effects for name, column in effect(job, rows).items()}


def _outside_torch(job: Job, rows: RankColumns) -> Moment:
    context = np.full(len(rows), float(round(job.facts.allocator.context_bytes)))
    names = ("context", "communicators")
    return dict(zip(names, job.correction.outside(context, np.rint(communicators(job, rows))), strict=True))


def moment_totals(transient: TransientSums, state_sums: StateSums) -> list[FloatColumn]:
    """Return the bytes at each moment; the whole model before it is sharded comes last."""
    totals = [runs + holds for runs, holds in zip(transient.moments, state_sums.moments, strict=True)]
    return totals if state_sums.placed is None else [*totals, state_sums.placed]


def device_bytes(transient: TransientSums, state_sums: StateSums) -> FloatColumn:
    """Return the bytes of the device at its worst moment, with the allocator's cache and what is outside torch, or
    IMPOSSIBLE_BYTES where they break a law (`guard`)."""
    totals = moment_totals(transient, state_sums)
    most = reduce(np.maximum, totals)
    reserved = most + cache_bytes(transient, state_sums, totals, most)
    torch = corrected(reserved, state_sums.torch_factor)
    broken = torch < state_sums.least
    for negative in (transient.broken, state_sums.broken):
        broken = broken if negative is None else broken | negative
    total = torch + state_sums.outside + transient.outside
    return np.where(broken, IMPOSSIBLE_BYTES, total) if broken.any() else total


def corrected(torch_bytes: FloatColumn, torch_factor: float) -> FloatColumn:
    """Return whole bytes of torch, corrected by measured runs. The correction keeps the order of any two amounts."""
    return torch_bytes if torch_factor == 1.0 else np.rint(torch_bytes * torch_factor)


def cache_bytes(
    transient: TransientSums, state_sums: StateSums, totals: Sequence[FloatColumn], most: FloatColumn
) -> FloatColumn:
    """Return what the allocator holds beyond `most`, what is alive at the worst moment: its usual share, what freed
    blocks are cut up for, and what another moment holds more where pieces lie free beside what is alive."""
    apart = _apart(transient, state_sums, totals, most) + _beside(transient, state_sums, totals, most)
    return np.rint(state_sums.cache_share * most + apart)


def _beside(
    transient: TransientSums, state_sums: StateSums, totals: Sequence[FloatColumn], most: FloatColumn
) -> FloatColumn | float:
    """Return what is reserved beyond `most` because at some moment pieces are free that nothing there fits into: those
    of the logits at the loss, and what other streams allocated. The allocator gives nothing back between moments."""
    if transient.holes is None and not state_sums.other_streams:
        return 0.0
    reserved = list(totals)
    if state_sums.other_streams:
        reserved = [alive + free for alive, free in zip(totals, state_sums.other_streams, strict=False)]
    if transient.holes is not None:
        reserved[0] = reserved[0] + transient.holes
    return reduce(np.maximum, reserved) - most


def _apart(
    transient: TransientSums, state_sums: StateSums, totals: Sequence[FloatColumn], most: FloatColumn
) -> FloatColumn | float:
    """Return what the allocator reserves beyond the worst moment because freed blocks are cut for other sizes.

    Freed blocks merge only inside the segment they were cut from (c10/cuda/CUDACachingAllocator.cpp, free_block,
    without expandable segments). Kept layer inputs waste a part of the blocks they are cut from; and blocks of the size
    of a layer's tensors never make room for one tensor of the size of the rank's gradients or of a table, so where the
    step's temporaries are single large tensors, or a table has a gradient, their segments lie beside those of the
    backward pass.
    """
    if state_sums.flat is None and transient.cut is None:
        return 0.0
    backward = reduce(np.maximum, totals[: len(transient.moments) - 1])
    if transient.lone is not None:
        backward = np.maximum(backward, totals[LAYER_BACKWARD] + transient.lone)
    for beside in (transient.cut, state_sums.flat):
        backward = backward if beside is None else backward + beside
    return np.maximum(backward - most, 0.0)


def cache_share(job: Job) -> float:
    """Return the share of what is alive that the allocator's cache holds besides."""
    mixture = job.facts.allocator.mixture_cache_share
    return job.facts.allocator.cache_share if mixture is None or job.shape.moe is None else mixture


def _other_streams(state: States, terms: MomentTerms) -> tuple[FloatColumn, ...]:
    """torch's allocator reuses memory within a stream alone (c10/cuda/CUDACachingAllocator.cpp, 2.13). FSDP gathers and
    reduces on streams of its own, so what it allocated there stays in the cache when the peak is another moment's."""
    theirs = np.rint(state.gradients) + np.rint(state.gathered)
    alive = (moment.get(name, 0.0) for moment in terms.moments for name in ("gradients", "gathered_parameters"))
    return (*(theirs - gradients - gathered for gradients, gathered in zip(alive, alive, strict=True)), theirs)


def _moments(terms: MomentTerms) -> tuple[FloatColumn, ...]:
    lasting = sum_of(terms.lasting.values())
    return tuple(
        reduce(np.add, (column for name, column in moment.items() if name != HOLES), lasting)
        for moment in terms.moments
    )


def _broken(terms: MomentTerms) -> NDArray[np.bool_] | None:
    columns = {id(column): column for moment in (terms.lasting, *terms.moments) for column in moment.values()}
    return negative_rows(columns.values())


def sum_of(columns: Iterable[FloatColumn]) -> FloatColumn:
    return reduce(np.add, columns)


CACHE = "allocator_cache"
RESIDUAL = "measured_residual"  # bytes that measured runs allocate beyond the prediction; may be negative
STATE = ("parameters", "weight_copies", "gradients", "optimizer_states")  # shown first, whatever moment is the worst
OUTSIDE_TORCH = ("context", "communicators", "exchange_buffers")
# the terms of model states at any moment (`state_terms`), and what is placed before the first step
MODEL_STATES = (
    *STATE,
    "weight_versions",
    "weight_gradient_stubs",
    "gathered_parameters",
    "gradient_buffers",
    "unreduced_gradients",
    "gradient_norm",
    "optimizer_step",
    "whole_model",
)


@frozen
class Terms:
    """Columns of bytes by term, with allocated <= reserved <= device. `least` is what torch must hold (`guard`)."""

    terms: Mapping[str, FloatColumn]
    least: FloatColumn

    @property
    def allocated(self) -> FloatColumn:
        return sum_of(c for n, c in self.terms.items() if n != CACHE and n not in OUTSIDE_TORCH)

    @property
    def reserved(self) -> FloatColumn:
        return self.allocated + self.terms[CACHE]

    @property
    def device(self) -> FloatColumn:
        return self.reserved + sum_of(self.terms[n] for n in OUTSIDE_TORCH if n in self.terms)


def rank_terms(job: Job, rows: RankColumns) -> Terms:
    """Return whole bytes by term for every row."""
    state = states(job, rows)
    runs, holds = transient_terms(job, rows), state_terms(job, rows, state)
    transient, state_sums = TransientSums.of(job, rows, runs), StateSums.of(job, rows, holds, state)
    totals = moment_totals(transient, state_sums)
    worst = np.argmax(totals, axis=0)
    lasting = {**holds.lasting, **runs.lasting}
    alternatives: list[Moment] = [{**a, **b} for a, b in zip(runs.moments, holds.moments, strict=True)]
    if state_sums.placed is not None:
        alternatives.append(_before_the_first_step(job, state_sums.placed, lasting, holds.moments[-1]))
    terms = {**lasting, **_of_moment(worst, alternatives)}
    terms.pop(HOLES, None)
    terms = {name: terms[name] for name in dict.fromkeys((*STATE, *terms))}
    cache = cache_bytes(transient, state_sums, totals, reduce(np.maximum, totals))
    residual = (
        {} if state_sums.torch_factor == 1.0 else _residual(sum_of(terms.values()), cache, state_sums.torch_factor)
    )
    outside = dict(_outside_torch(job, rows))
    outside["communicators"] = outside["communicators"] + np.rint(_connections(job, rows))
    outside |= {name: np.rint(column) for name, column in _terms_outside_torch(job, rows).items()}
    return Terms({**terms, CACHE: cache, **residual, **outside}, state_sums.least)


def _before_the_first_step(job: Job, placed: FloatColumn, lasting: Moment, step: Moment) -> Moment:
    """Return the terms before the first step: what is there beyond the terms that last."""
    there = {"gradients": step["gradients"]} if job.facts.states.moved_to_buffers else {}
    return {**there, "whole_model": np.maximum(placed - sum_of([*lasting.values(), *there.values()]), 0.0)}


def _residual(allocated: FloatColumn, cache: FloatColumn, torch_factor: float) -> Moment:
    """Return what measured runs allocate beside the terms, and the cache in the same proportion: together exactly the
    corrected reserved bytes of `device_bytes`."""
    total = corrected(allocated, torch_factor)
    return {RESIDUAL: total - allocated, CACHE: corrected(allocated + cache, torch_factor) - total}


def _of_moment(worst: IntColumn, alternatives: Sequence[Moment]) -> Moment:
    """Return for every row the terms of its worst moment."""
    rows = [worst == i for i in range(len(alternatives))]
    names = dict.fromkeys(name for moment in alternatives for name in moment)
    zero = np.zeros(len(worst))
    return {name: _by_moment(rows, [moment.get(name, zero) for moment in alternatives]) for name in names}


def _by_moment(rows: Sequence[NDArray[np.bool_]], columns: Sequence[FloatColumn]) -> FloatColumn:
    """Select each row's value from the column of its moment. Most terms are the same column at several moments."""
    chosen = columns[0]
    for mine, column in zip(rows[1:], columns[1:], strict=True):
        if column is not columns[0]:
            chosen = np.where(mine, column, chosen)
    return chosen
