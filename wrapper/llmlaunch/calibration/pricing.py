"""Predictions of many configurations at once: jobs that are equal are priced together, their layouts as columns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from llmlaunch.calibration.records import Case, Unsupported, case_of
from llmlaunch.columns import FloatColumn
from llmlaunch.layout import LayoutColumns
from llmlaunch.memory.job import Job, all_ranks
from llmlaunch.memory.terms import rank_terms
from llmlaunch.models.shape import ModelShape

__all__ = ["Priced", "priced"]

Record = Mapping[str, Any]

NO_SIZES = "its sizes are no sizes of a layout"
SIZES = ("tensor", "pipeline", "virtual_pipeline", "context", "data", "expert", "expert_tensor", "micro_batch_size")
RANKS_AT_ONCE = 20_000  # a rank has some hundred columns of eight bytes


@dataclass(frozen=True)
class Priced:
    """What is predicted of one configuration, without any correction: bytes by pipeline rank."""

    shape: ModelShape
    allocated: FloatColumn
    reserved: FloatColumn
    outside: FloatColumn  # of torch


def priced(records: Sequence[Record]) -> list[Priced | str]:
    """For each record its prediction, or why there is none."""
    found: list[Priced | str] = []
    cases: list[tuple[int, Case]] = []
    for index, record in enumerate(records):
        case = _case(record)
        found.append(case if isinstance(case, str) else "")
        if not isinstance(case, str):
            cases.append((index, case))
    by_job: dict[Job, list[tuple[int, Case]]] = {}
    for index, case in cases:
        by_job.setdefault(case.job, []).append((index, case))
    for job, members in by_job.items():
        for some in _pieces(members):
            for (index, _), prediction in zip(some, _together(job, [case for _, case in some]), strict=True):
                found[index] = prediction
    return found


def _case(record: Record) -> Case | str:
    """The store takes over any JSON object with an id: one that only looks like a measurement speaks for nobody."""
    try:
        case = case_of(record)
        return case if min(getattr(case.layout, name) for name in SIZES) >= 1 else NO_SIZES
    except Unsupported as refusal:
        return str(refusal)
    except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError):
        return "no whole measurement record"


def _pieces(members: Sequence[tuple[int, Case]]) -> Iterator[Sequence[tuple[int, Case]]]:
    ranks = np.cumsum([case.layout.pipeline for _, case in members])
    cuts = np.flatnonzero(np.diff(ranks // RANKS_AT_ONCE)) + 1
    return (members[start:stop] for start, stop in pairwise([0, *cuts.tolist(), len(members)]))


def _together(job: Job, cases: Sequence[Case]) -> list[Priced | str]:
    """All in one go; each by itself where one of them holds numbers that nothing can be priced with."""
    try:
        return list(_predicted(job, cases))
    except (ArithmeticError, IndexError, TypeError, ValueError):
        if len(cases) == 1:
            return [NO_SIZES]
        return [one for case in cases for one in _together(job, [case])]


def _predicted(job: Job, cases: Sequence[Case]) -> Iterator[Priced]:
    microbatches = np.array([case.num_microbatches for case in cases])
    rows = all_ranks(job, LayoutColumns.of([case.layout for case in cases]), microbatches)
    terms = rank_terms(job, rows)
    allocated, reserved, outside = terms.allocated, terms.reserved, terms.device - terms.reserved
    ends = np.cumsum([case.layout.pipeline for case in cases])
    for start, stop in pairwise([0, *ends.tolist()]):
        yield Priced(job.shape, allocated[start:stop], reserved[start:stop], outside[start:stop])
