"""The accuracy of predictions, as text and as JSON."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from llmlaunch.accuracy.scoring import ScoredRecord
from llmlaunch.accuracy.summary import by_size, families, grouped, throughput, underestimates, verdicts
from llmlaunch.report.terminal import shown_on
from llmlaunch.report.text import one_line, percent, signed_percent, table
from llmlaunch.units import gib
from llmlaunch.verdicts import JUDGED

Family = Mapping[str, Any]
OUTCOMES = ("records", "supported", "called_safe", "called_tight", "called_unsafe", "above_card", "flags_unknown")
ERRORS = ["MAPE", "median", "bias", "p95", "worst", "worst record"]
SPARED = ("worst record", "median")  # on a narrow screen; --records shows each record


def accuracy_text(answer: Mapping[str, Any]) -> str:
    """Return what `accuracy` prints: measured peaks by size, then by family, outcomes, assumptions, and the records
    that are not compared or not supported, with the reason. `answer` is what `accuracy --json` prints."""
    families: Mapping[str, Family] = answer["families"]
    parts = [
        _sizes(answer["sizes"]),
        _underestimates(answer["underestimates"]),
        _peaks(families),
        _outcomes(families),
        _verdicts(answer["verdicts"]),
        _throughput(families),
        _assumed(answer["records"]),
        _reasons("Priced and not compared", families, "not_compared"),
        _reasons("Not supported", families, "unsupported"),
    ]
    return _harmless("\n\n".join(part for part in parts if part))


def records_text(answer: Mapping[str, Any]) -> str:
    rows = []
    for record in answer["records"]:
        measured, predicted = record["measured_bytes"], record["predicted_bytes"]
        error = signed_percent(predicted / measured - 1) if measured and predicted else "-"
        outcome = record["verdict"] or "-" if record["supported"] else record["reason"]
        sizes = ["-" if size is None else gib(size) for size in (measured, predicted)]
        rows.append([record["id"], record["peak_kind"], *sizes, error, outcome])
    return _harmless("Records\n" + table(["record", "peak", "measured GiB", "predicted GiB", "error", "verdict"], rows))


def _harmless(text: str) -> str:
    """Return the text with "?" for anything that a terminal would obey. Names come from a file."""
    return "\n".join(one_line(line) for line in text.split("\n"))


def error_cells(family: Family) -> list[str]:
    parts = [percent(family["mape"]), percent(family["median"]), signed_percent(family["bias"]), percent(family["p95"])]
    return [*parts, signed_percent(family["worst"]), family["worst_id"]]


def _section(title: str, head: Sequence[str], rows: Sequence[Sequence[str]], end: str = "") -> str:
    return f"{title}\n{fitting_table(head, rows)}{end}" if rows else ""


def fitting_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return the table, without those columns of SPARED for which the screen has no room."""
    width = shown_on().width
    for column in SPARED:
        if width is None or len(table(head, rows, columns=sys.maxsize).partition("\n")[0]) <= width:
            break
        if column in head:
            at = head.index(column)
            head, *rows = ([*row[:at], *row[at + 1 :]] for row in (head, *rows))
    return table(head, rows)


SIZE_NAMES = {"above_40_gib": "above 40 GiB", "from_8_to_40_gib": "8 to 40 GiB", "below_8_gib": "below 8 GiB"}


def _sizes(rows: Sequence[Family]) -> str:
    cells = [
        [SIZE_NAMES[row["size"]], f"{row['backend']}/{row['peak_kind']}", str(row["records"]), *error_cells(row)]
        for row in rows
    ]
    title = "Predicted against measured peaks by size (- is too low)"
    return _section(title, ["measured", "backend/peak", "records", *ERRORS], cells)


def _underestimates(rows: Sequence[Family]) -> str:
    cells = [
        [
            *(row["id"], row["backend"], row["peak_kind"]),
            *(gib(row["measured_bytes"]), gib(row["predicted_bytes"]), signed_percent(row["error"])),
        ]
        for row in rows
    ]
    head = ["record", "backend", "peak", "measured GiB", "predicted GiB", "error"]
    return _section("Predictions furthest too low, of peaks of 8 GiB and more", head, cells)


def _peaks(families: Mapping[str, Family]) -> str:
    rows = [[n, str(f["records"]), str(f["supported"]), *error_cells(f)] for n, f in families.items() if "mape" in f]
    title = "Predicted against measured peaks by family (- is too low)"
    return _section(title, ["family/peak", "records", "priced", *ERRORS], rows)


def _outcomes(families: Mapping[str, Family]) -> str:
    rows = [[n, *(str(f.get(k, "-")) for k in OUTCOMES)] for n, f in families.items() if "called_safe" in f]
    head = ["family/outcome", "records", "priced", *JUDGED, "above the card", "flags unknown"]
    title = "Runs known only to have fitted or died, by the margin without their own family"
    return _section(title, head, rows)


def _verdicts(classes: Sequence[Mapping[str, Any]]) -> str:
    rows = [
        [
            *(c["class"], c["family"], f"{c['deaths_called_safe']} of {c['deaths']}", _at_most(c)),
            *(f"{c['fits_called_tight']} + {c['fits_called_unsafe']} of {c['fits']}", f"{c['stated_risk']:g}"),
            f"{c['fujii_deaths_called_safe']}, {c['fujii_fits_not_called_safe']}",
        ]
        for c in classes
    ]
    head = ["class", "family", "deaths called safe", "at most", "fits called tight + unsafe", "risk", "80 % rule"]
    title = "Verdicts by class (at most: 95 % bound of the share of deaths; the 80 % rule: deaths safe, fits refused)"
    return _section(title, head, rows)


def _at_most(c: Mapping[str, Any]) -> str:
    share = c["deaths_called_safe_at_most"]
    return "-" if share is None else percent(share)


def _throughput(families: Mapping[str, Family]) -> str:
    rows = [[name, *_speeds(family["throughput"])] for name, family in families.items() if "throughput" in family]
    head = ["family/peak", "records", "MAPE", "bias", "p95", "worst", "Spearman", "worst record"]
    return _section("Predicted against measured step times (- is too fast)", head, rows)


def _speeds(f: Mapping[str, Any]) -> list[str]:
    order = f["rank_correlation"]
    errors = [percent(f["mape"]), signed_percent(f["bias"]), percent(f["p95"]), signed_percent(f["worst"])]
    return [str(f["records"]), *errors, "-" if order is None else f"{order:.3f}", f["worst_id"]]


def _assumed(records: Sequence[Mapping[str, Any]]) -> str:
    counts = Counter(
        (f"{record['family']}/{record['peak_kind']}", f"{field} = {value}")
        for record in records
        for field, value in record["assumed"].items()
    )
    return _counts("Assumed where a record does not say", counts)


def _reasons(title: str, families: Mapping[str, Family], key: str) -> str:
    reasons = {(name, why): n for name, family in families.items() for why, n in family.get(key, {}).items()}
    return _counts(title, reasons)


def _counts(title: str, counts: Mapping[tuple[str, str], int]) -> str:
    lines = [f"  {count:>4}  {name}: {what}" for (name, what), count in counts.items()]
    return "\n".join([title, *lines]) if lines else ""


def accuracy_json(records: Sequence[ScoredRecord]) -> dict[str, Any]:
    """Return `records` in input order, `families` by "family/kind", and `sizes` and `underestimates` over all
    records."""
    answer: dict[str, Any] = {
        "records": [scored.as_json() for scored in records],
        "families": families(records),
        "verdicts": verdicts(records),
        "sizes": by_size(records),
        "underestimates": underestimates(records),
    }
    for name, group in grouped(records).items():
        if speeds := throughput(group):
            answer["families"][name]["throughput"] = speeds
    return answer
