"""All terms of a rank's peak, as columns that sum to it.

Torch's peak is what lasts plus the worst of a few moments (`moments`). The terms of the worst moment are the terms of
the rank, so the sum is exact.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from llmlaunch.columns import FloatColumn, IntColumn
from llmlaunch.memory.job import Job, RankColumns
from llmlaunch.memory.moments import HOLES, Moment, state_terms, transient_terms
from llmlaunch.memory.peak import StateSums, TransientSums, cache_bytes, corrected, moment_totals, outside_torch, sum_of
from llmlaunch.memory.states import states

__all__ = ["OUTSIDE_TORCH", "RESIDUAL", "Terms", "rank_terms"]

CACHE = "allocator_cache"
RESIDUAL = "measured_residual"  # bytes that measured runs allocate beyond the prediction; may be negative
STATE = ("parameters", "weight_copies", "gradients", "optimizer_states")  # shown first, whatever moment is the worst
OUTSIDE_TORCH = ("context", "communicators")


@dataclass(frozen=True)
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
        return self.reserved + sum_of(self.terms[n] for n in OUTSIDE_TORCH)


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
    cache = cache_bytes(transient, state_sums, totals, worst)
    residual = (
        {} if state_sums.torch_factor == 1.0 else _residual(sum_of(terms.values()), cache, state_sums.torch_factor)
    )
    return Terms({**terms, CACHE: cache, **residual, **outside_torch(job, rows)}, state_sums.least)


def _before_the_first_step(job: Job, placed: FloatColumn, lasting: Moment, step: Moment) -> Moment:
    """Return the terms before the first step: what is there beyond the terms that last."""
    there = {"gradients": step["gradients"]} if job.facts.moved_to_buffers else {}
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
