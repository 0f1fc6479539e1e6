"""Tight layouts: they fit the card if their prediction is not too low, but leave less room for its error than the limit
does. They are searched only where no layout is safe.

Of tight layouts the planner takes the fastest of those that die least often. A person who reads of a tight plan decides
by one number, its stated risk, so that number is the lowest there is: had they wanted speed at any risk, they would
have pinned the layout. Risks that differ by less than RISKS_ALIKE are one, because no number of measured runs at hand
tells them apart. Where no risk can be stated, the predictions nearest to the lowest stand in for it.
"""

from __future__ import annotations

from dataclasses import replace
from math import ceil

import numpy as np

from llmlaunch.calibration.margins import Margin
from llmlaunch.memory.guard import IMPOSSIBLE_BYTES
from llmlaunch.planner.headroom import paced
from llmlaunch.planner.search import SearchResult, search
from llmlaunch.planner.setting import Setting
from llmlaunch.units import GIB

RISKS_ALIKE = 0.01
SIZES_ALIKE = 0.01  # of device memory; in place of risks where none is known


def search_tight(setting: Setting, result: SearchResult) -> tuple[Setting, SearchResult] | None:
    """Search the tight layouts where `result`, the search under the limit itself, has no safe one. Return the setting
    in which the tight layouts of the least risk count as safe, and what its search yields; None where no layout is
    tight."""
    least_bytes = _least_bytes(setting, result)
    if least_bytes is None:
        return None
    limit_bytes = _bytes_of_least_risk(setting.limit, least_bytes)
    reason = f"of the layouts that fit the card, those that need at most {limit_bytes / GIB:.1f} GiB risk least"
    tight = replace(setting, limit=replace(setting.limit, limit_bytes=limit_bytes, reason=reason), widened=True)
    tight_result = paced(tight, search(tight))
    return (tight, _with_rehearsed_first(tight_result)) if np.any(tight_result.safe) else None


def _with_rehearsed_first(result: SearchResult) -> SearchResult:
    """Return the result with the layouts that a rehearsal showed to be safe before all that are tight."""
    rows = [row for row, rehearsal in result.rehearsed.items() if rehearsal.safe and result.safe[row]]
    rows.sort(key=lambda row: float(result.step_seconds[row]))
    others = result.first[~np.isin(result.first, rows)]
    return replace(result, first=np.concatenate([np.array(rows, dtype=others.dtype), others])) if rows else result


def _least_bytes(setting: Setting, result: SearchResult) -> int | None:
    """Return the fewest device bytes of a tight layout, by its rehearsal where there is one; None where none is
    tight."""
    most_bytes, rows = setting.limit.most_bytes, result.points.rows
    fits_node = rows.host_bytes <= min(setting.host_limit.limit_bytes, IMPOSSIBLE_BYTES)
    device_bytes = np.where(fits_node, rows.device_bytes, np.inf)
    for row, rehearsal in result.rehearsed.items():
        rehearsed_bytes = np.inf if rehearsal.refuses(most_bytes) else rehearsal.device_bytes
        device_bytes[row] = max(device_bytes[row], rehearsed_bytes)
    least: float = device_bytes.min(initial=np.inf)
    return ceil(least) if least <= most_bytes else None


def _bytes_of_least_risk(limit: Margin, least_bytes: int) -> int:
    """Return up to how many bytes the stated risk is that of the layout that needs the fewest."""
    risk = limit.risk_of(least_bytes)
    if risk is None:
        return min(least_bytes + int(SIZES_ALIKE * limit.memory_bytes), limit.most_bytes)
    return max(limit.bytes_at(risk + RISKS_ALIKE) or 0, least_bytes)
