"""The accuracy table for a person, as JSON, and as the README's tables with the anchors beside our own errors."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from llmlaunch.accuracy.anchors import ANCHORS, anchor_bytes, anchor_summary
from llmlaunch.accuracy.coverage import comparable_runs, coverage
from llmlaunch.accuracy.scoring import ScoredRecord
from llmlaunch.accuracy.summary import SIZES, by_size, families, grouped, throughput, underestimates
from llmlaunch.accuracy.verdicts import verdicts
from llmlaunch.cluster.profile import Cluster
from llmlaunch.documents.writing import write_whole
from llmlaunch.errors import UserError
from llmlaunch.report.terminal import shown_on
from llmlaunch.report.text import markdown_table, one_line, percent, signed_percent, table
from llmlaunch.units import gib
from llmlaunch.verdicts import JUDGED

__all__ = [
    "END",
    "START",
    "accuracy_json",
    "accuracy_markdown",
    "accuracy_sentence",
    "accuracy_text",
    "records_text",
    "write_between_markers",
]


Family = Mapping[str, Any]
OUTCOMES = ("records", "supported", "called_safe", "called_tight", "called_unsafe", "above_card", "flags_unknown")
ERRORS = ["MAPE", "median", "bias", "p95", "worst", "worst record"]
SPARED = ("worst record", "median")  # on a narrow screen; --records shows each record


def accuracy_text(answer: Mapping[str, Any]) -> str:
    """Measured peaks by size first, then by family and parts of families, outcomes, the anchors, margins, what was
    assumed, and what is not compared or not supported and why. `answer` is what `accuracy --json` prints."""
    families: Mapping[str, Family] = answer["families"]
    parts = [
        _sizes(answer["sizes"]),
        _underestimates(answer["underestimates"]),
        _peaks(families),
        _groups(families),
        _outcomes(families),
        _verdicts(answer["verdicts"]),
        _throughput(families),
        _anchors(answer),
        _margins(answer["margins"]),
        _assumed(answer["records"]),
        _reasons("Priced and not compared", families, "not_compared"),
        _reasons("Not supported", families, "unsupported"),
    ]
    return _harmless("\n\n".join(part for part in parts if part))


def records_text(answer: Mapping[str, Any]) -> str:
    """One line for each record."""
    rows = []
    for record in answer["records"]:
        measured, predicted = record["measured_bytes"], record["predicted_bytes"]
        error = signed_percent(predicted / measured - 1) if measured and predicted else "-"
        outcome = record["verdict"] or "-" if record["supported"] else record["reason"]
        sizes = ["-" if size is None else gib(size) for size in (measured, predicted)]
        rows.append([record["id"], record["peak_kind"], *sizes, error, outcome])
    return _harmless("Records\n" + table(["record", "peak", "measured GiB", "predicted GiB", "error", "verdict"], rows))


def _harmless(text: str) -> str:
    """Names come from a file: what a terminal would obey is shown as "?"."""
    return "\n".join(one_line(line) for line in text.split("\n"))


def _errors(family: Family) -> list[str]:
    parts = [percent(family["mape"]), percent(family["median"]), signed_percent(family["bias"]), percent(family["p95"])]
    return [*parts, signed_percent(family["worst"]), family["worst_id"]]


def _section(title: str, head: Sequence[str], rows: Sequence[Sequence[str]], end: str = "") -> str:
    return f"{title}\n{_fitting_table(head, rows)}{end}" if rows else ""


def _fitting_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return the table, without the columns of SPARED for which the screen has no room."""
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
        [SIZE_NAMES[row["size"]], f"{row['backend']}/{row['peak_kind']}", str(row["records"]), *_errors(row)]
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
    rows = [[n, str(f["records"]), str(f["supported"]), *_errors(f)] for n, f in families.items() if "mape" in f]
    title = "Predicted against measured peaks by family (- is too low)"
    return _section(title, ["family/peak", "records", "priced", *ERRORS], rows)


def _groups(families: Mapping[str, Family]) -> str:
    rows = [
        [f"{n}: {group.replace('_', ' ')}", str(f["records"]), *_errors(f)]
        for n, family in families.items()
        for group, f in family.get("groups", {}).items()
        if "mape" in f and group != "from_8_gib"  # the two larger sizes stand there
    ]
    return _section("Parts of these families", ["part", "priced", *ERRORS], rows)


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


def _anchors(answer: Mapping[str, Any]) -> str:
    parts = []
    for name, about in answer.get("anchors", {}).items():
        measured = {n: f["anchors"][name] for n, f in answer["families"].items() if f["anchors"][name]["records"]}
        peaks = [[n, str(f["records"]), *_errors(f)] for n, f in measured.items() if "mape" in f]
        outcomes = [
            [n, str(f["records"]), *(str(f[k]) for k in ("called_safe", "called_unsafe", "above_card"))]
            for n, f in measured.items()
            if "called_safe" in f
        ]
        lines = [f"{about['title']}, on the same records; it ignores {about['ignores']}"]
        lines += [_fitting_table(["family/peak", "records", *ERRORS], peaks)] if peaks else []
        head = ["family/outcome", "records", "called safe", "called unsafe", "above the card"]
        lines += [table(head, outcomes)] if outcomes else []
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def _margins(pools: Sequence[Mapping[str, Any]]) -> str:
    """Where a bound exists: how far above its prediction a run may peak, and how often that held for each run
    bounded by the others."""
    rows = [
        [*_pool(pool), f"{row['risk']:g}", f"{row['upper_ratio']:.3f}", *_covered(row)]
        for pool in pools
        for row in pool["risks"]
        if row["upper_ratio"] is not None
    ]
    head = ["backend, accelerator, peak", "runs", "died", "risk", "ratio", "held", "near the limit", "fastest safe"]
    refused = len([1 for pool in pools for row in pool["risks"] if row["upper_ratio"] is None])
    title = "Measured / predicted is at most this ratio, but for the risk; and where it held for runs left out of it"
    end = f"\n  {refused} more have too few runs, or too many that died, for a bound" if refused else ""
    return _section(title, head, rows, end)


def _pool(pool: Mapping[str, Any]) -> list[str]:
    return [f"{pool['backend']}, {pool['accelerator']}, {pool['peak_kind']}", str(pool["runs"]), str(pool["died"])]


def _covered(row: Mapping[str, Any]) -> list[str]:
    names = ("all", "near_limit", "fastest_safe")
    if row["covered"] is None:
        return ["-" for _ in names]
    shares = [row["covered"][name] for name in names]
    return ["-" if not s["runs"] else f"{percent(s['share'])} of {s['runs']}" for s in shares]


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


def accuracy_json(
    records: Sequence[ScoredRecord], clusters: Mapping[str, Cluster], anchors: bool = False
) -> dict[str, Any]:
    """`records` in input order, `families` by "family/kind", `sizes` and `underestimates` over all of them, `margins`
    by backend, accelerator and kind. With `anchors` the published formulas stand beside each record and family, and
    `anchors` says what each ignores."""
    answer: dict[str, Any] = {
        "records": [scored.as_json() for scored in records],
        "families": families(records),
        "verdicts": verdicts(records),
        "sizes": by_size(records),
        "underestimates": underestimates(records),
        "margins": coverage(comparable_runs(records, clusters)),
    }
    for name, group in grouped(records).items():
        if speeds := throughput(group):
            answer["families"][name]["throughput"] = speeds
    if anchors:
        for scored, record in zip(records, answer["records"], strict=True):
            record["anchors"] = anchor_bytes(scored)
        for name, group in grouped(records).items():
            answer["families"][name]["anchors"] = {anchor: anchor_summary(group, anchor) for anchor in ANCHORS}
        answer["anchors"] = {name: {"title": a.title, "ignores": a.ignores} for name, a in ANCHORS.items()}
    return answer


START, END = "<!-- accuracy -->", "<!-- end of accuracy -->"


def accuracy_markdown(answer: Mapping[str, Any]) -> str:
    """Markdown tables: errors of measured peaks by size and by family, verdicts on runs that fitted or died.

    `answer` is what `accuracy --anchors --json` prints. An anchor that applies to fewer records than ours says to how
    many, and what our error on those is."""
    families: Mapping[str, Family] = answer["families"]
    names = list(answer.get("anchors", {}))
    titles = [answer["anchors"][name]["title"] for name in names]
    head = ["measured runs", "peak", "records", "priced", "MAPE", "median", "bias", "p95", "worst"]
    peaks = [[*_peak(name, f), *_anchor_errors(f, names)] for name, f in families.items() if "mape" in f]
    outcome_head = [
        "runs",
        "outcome",
        "priced",
        "called safe",
        "called tight",
        "called unsafe",
        "flags unknown",
        "above the card",
    ]
    outcomes = [[*_outcome(name, f), *_anchor_verdicts(f, names)] for name, f in families.items() if _judged(f)]
    return "\n\n".join(
        [
            markdown_table(["backend", "peak", *SIZE_NAMES.values()], _size_cells(answer["sizes"])),
            markdown_table([*head, *(f"{title}: MAPE" for title in titles)], peaks),
            markdown_table([*outcome_head, *(f"{title}: called safe" for title in titles)], outcomes),
            "\n".join(_remarks(answer)),
        ]
    )


def accuracy_sentence(answer: Mapping[str, Any]) -> str:
    """Return two sentences, on the errors of Megatron-LM and DeepSpeed peaks of 8 GiB and more and on the verdicts of
    runs that ran out of memory. `answer` is what `accuracy --json` prints."""
    errors = {name: _mean_error(answer["sizes"], name) for name in ("megatron", "deepspeed")}
    deaths = [family for name, family in answer["families"].items() if name.endswith("/oom") and _judged(family)]
    safe = sum(family["called_safe"] for family in deaths)
    judged = safe + sum(family["called_tight"] + family["called_unsafe"] for family in deaths)
    errors_text = f"{percent(errors['megatron'])} with Megatron-LM and {percent(errors['deepspeed'])} with DeepSpeed"
    return (
        f"On public runs, predicted peaks above 8 GiB are off on average by {errors_text}. Of {judged} runs that ran "
        f"out of memory, {safe} would have been called safe."
    )


def _mean_error(sizes: Sequence[Family], backend: str) -> float:
    rows = [row for row in sizes if row["backend"] == backend and row["size"] != "below_8_gib"]
    return float(sum(row["mape"] * row["records"] for row in rows) / sum(row["records"] for row in rows))


def write_between_markers(path: Path, text: str) -> None:
    """Replace what stands between the two markers of `path`.

    Raises:
        UserError: the file cannot be read or written, or has not both markers once and in order.
    """
    try:
        before = path.read_text("utf-8")
        head, rest = before.split(START)
        _, tail = rest.split(END)
    except OSError as failure:
        raise UserError(f"{path}: cannot be read: {failure.strerror}") from None
    except ValueError:
        raise UserError(f"{path}: needs a line {START} and after it a line {END}, each once; add them") from None
    write_whole(path, f"{head}{START}\n{text}\n{END}{tail}")


def _size_cells(rows: Sequence[Family]) -> list[list[str]]:
    """Return a row for each backend and kind of peak, with MAPE, bias and records of each size."""
    cells: dict[tuple[str, str], dict[str, str]] = {}
    for row in rows:
        text = f"{percent(row['mape'])} (bias {signed_percent(row['bias'])}) of {row['records']}"
        cells.setdefault((row["backend"], row["peak_kind"]), {})[row["size"]] = text
    return [[*key, *(by_size.get(size, "-") for size in SIZES)] for key, by_size in cells.items()]


def _peak(name: str, f: Family) -> list[str]:
    return [*name.rsplit("/", 1), str(f["records"]), str(f["supported"]), *_errors(f)[:-1]]


def _anchor_errors(f: Family, names: list[str]) -> Iterator[str]:
    for name in names:
        anchor = f["anchors"][name]
        some = "mape" in anchor and anchor["records"] != f["supported"]
        of = f" (ours {percent(anchor['our_mape'])}) on {anchor['records']}" if some else ""
        yield percent(anchor["mape"]) + of if "mape" in anchor else "-"


def _judged(f: Family) -> bool:
    return bool(f.get("called_safe", 0) + f.get("called_tight", 0) + f.get("called_unsafe", 0))


def _outcome(name: str, f: Family) -> list[str]:
    counts = [str(f[key]) for key in ("supported", "called_safe", "called_tight", "called_unsafe", "flags_unknown")]
    return [*name.rsplit("/", 1), *counts, str(f.get("above_card", "-"))]


def _anchor_verdicts(f: Family, names: list[str]) -> Iterator[str]:
    for name in names:
        anchor = f["anchors"][name]
        judged = anchor.get("called_safe", 0) + anchor.get("called_unsafe", 0)
        yield f"{anchor['called_safe']} of {judged}" if judged else "-"


def _remarks(answer: Mapping[str, Any]) -> Iterator[str]:
    for about in answer.get("anchors", {}).values():
        yield f"- {about['title']} ignores {about['ignores']}."
    priced = sum(family["supported"] for family in answer["families"].values())
    yield f"- Of {len(answer['records'])} records {priced} are priced; the command says why not for each of the others."
