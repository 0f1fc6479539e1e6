"""The case of any measurement record: by the recipe that it holds, or by the sections that state its job."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from llmlaunch.calibration.cases import NO_RECORD, NO_SIZES, SIZES, Case, Unsupported, case_of
from llmlaunch.calibration.records import Record
from llmlaunch.cluster.profile import Cluster
from llmlaunch.errors import UserError


def case_or_reason(record: Record, clusters: Mapping[str, Cluster]) -> Case | str:
    """Return the estimator's inputs for a record, or why it cannot be priced. `clusters` are the machines of known
    accelerators (`cluster.cards.machines`). The store takes over any JSON object with an id, so a record may only look
    like a measurement."""
    return reason_unless_priced(lambda: _case(record, clusters))


def reason_unless_priced(case: Callable[[], Case]) -> Case | str:
    """Return the case, or why the record cannot be priced."""
    try:
        priced = case()
        return priced if min(getattr(priced.layout, name) for name in SIZES) >= 1 else NO_SIZES
    except (Unsupported, UserError) as refusal:
        return str(refusal)
    except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError):
        return NO_RECORD


def _case(record: Record, clusters: Mapping[str, Cluster]) -> Case:
    if "parallelism" not in record or "recipe" in record:
        return case_of(record, clusters)
    from llmlaunch.calibration.stated import cases  # of runs that were measured elsewhere, which few stores have

    return cases.case_of(record, clusters)
