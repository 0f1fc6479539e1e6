"""The accuracy table for a person."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmlaunch.report.text import percent, table

__all__ = ["accuracy_text"]


def accuracy_text(families: Mapping[str, Mapping[str, Any]]) -> str:
    """Measured peaks first, then outcomes, then what is not supported and why."""
    peaks = [(n, f) for n, f in families.items() if "mape" in f]
    outcomes = [(n, f) for n, f in families.items() if "called_safe" in f]
    parts = []
    if peaks:
        head = ["family/peak", "records", "priced", "MAPE", "median", "bias", "p95", "worst"]
        parts.append("Predicted against measured peaks\n" + table(head, [_peak_row(n, f) for n, f in peaks]))
    if outcomes:
        head = ["family/outcome", "records", "priced", "called safe", "called unsafe"]
        rows = [
            [n, *(str(f[k]) for k in ("records", "supported", "called_safe", "called_unsafe"))] for n, f in outcomes
        ]
        parts.append("Runs known only to have fitted or died, judged by the 80 % rule\n" + table(head, rows))
    reasons = [
        f"  {count:>4}  {name}: {why}" for name, f in families.items() for why, count in f["unsupported"].items()
    ]
    if reasons:
        parts.append("Not supported\n" + "\n".join(reasons))
    return "\n\n".join(parts)


def _peak_row(name: str, family: Mapping[str, Any]) -> list[str]:
    figures = [percent(family[key]) for key in ("mape", "median")]
    signed = [f"{100 * family['bias']:+.1f} %", percent(family["p95"]), f"{100 * family['worst']:+.1f} %"]
    return [name, str(family["records"]), str(family["supported"]), *figures, *signed]
