"""The tables of docs/accuracy.md: public runs as predicted and as measured, with published formulas on the same runs.

python -m validation.accuracy_tables               writes the tables, and prints the sentence of README.md
python -m validation.accuracy_tables --anchors     prints all errors and verdicts, with these formulas
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from llmlaunch.accuracy.scoring import ScoredRecord
from llmlaunch.accuracy.summary import SIZES, grouped
from llmlaunch.calibration.records import read_records
from llmlaunch.cluster.cards import machines
from llmlaunch.report.accuracy_text import ERRORS, SIZE_NAMES, accuracy_json, accuracy_text, error_cells, fitting_table
from llmlaunch.report.text import percent, signed_percent, table
from validation.anchors import ANCHORS, anchor_bytes, anchor_summary
from validation.scoring import scores_of

ROOT = Path(__file__).resolve().parents[1]
MEASUREMENTS = ROOT / "tests" / "data" / "measurements"
PAGE = ROOT / "docs" / "accuracy.md"
START, END = "<!-- accuracy -->", "<!-- end of accuracy -->"

Family = Mapping[str, Any]


def public_accuracy(scores: Sequence[ScoredRecord]) -> dict[str, Any]:
    """Return what `accuracy --json` prints of these records, with the published formulas: `anchors` of each record and
    family, and what each formula is and ignores."""
    answer = accuracy_json(scores)
    for scored, record in zip(scores, answer["records"], strict=True):
        record["anchors"] = anchor_bytes(scored)
    for name, group in grouped(scores).items():
        answer["families"][name]["anchors"] = {anchor: anchor_summary(group, anchor) for anchor in ANCHORS}
    answer["anchors"] = {name: {"title": a.title, "ignores": a.ignores} for name, a in ANCHORS.items()}
    return answer


def anchors_text(answer: Mapping[str, Any]) -> str:
    """Return the errors and verdicts of the published formulas, with what each leaves out."""
    parts = []
    for name, about in answer["anchors"].items():
        measured = {n: f["anchors"][name] for n, f in answer["families"].items() if f["anchors"][name]["records"]}
        peaks = [[n, str(f["records"]), *error_cells(f)] for n, f in measured.items() if "mape" in f]
        outcomes = [
            [n, str(f["records"]), *(str(f[k]) for k in ("called_safe", "called_unsafe", "above_card"))]
            for n, f in measured.items()
            if "called_safe" in f
        ]
        lines = [f"{about['title']}, on the same records; it ignores {about['ignores']}"]
        lines += [fitting_table(["family/peak", "records", *ERRORS], peaks)] if peaks else []
        head = ["family/outcome", "records", "called safe", "called unsafe", "above the card"]
        lines += [table(head, outcomes)] if outcomes else []
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def accuracy_markdown(answer: Mapping[str, Any]) -> str:
    """Return Markdown tables: errors of measured peaks by size and by family, verdicts on runs that fitted or died.

    `answer` is what `public_accuracy` returns. An anchor that applies to fewer records than ours says to how
    many, and what our error on those is."""
    families: Mapping[str, Family] = answer["families"]
    names = list(answer["anchors"])
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
            _markdown_table(["backend", "peak", *SIZE_NAMES.values()], _size_cells(answer["sizes"])),
            _markdown_table([*head, *(f"{title}: MAPE" for title in titles)], peaks),
            _markdown_table([*outcome_head, *(f"{title}: called safe" for title in titles)], outcomes),
            "\n".join(_remarks(answer)),
        ]
    )


def accuracy_sentence(answer: Mapping[str, Any]) -> str:
    """Return two sentences, on the errors of Megatron-LM and DeepSpeed peaks of 8 GiB and more and on the verdicts of
    runs that ran out of memory. `answer` is what `public_accuracy` returns."""
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


def _size_cells(rows: Sequence[Family]) -> list[list[str]]:
    """Return a row for each backend and kind of peak, with MAPE, bias and records of each size."""
    cells: dict[tuple[str, str], dict[str, str]] = {}
    for row in rows:
        text = f"{percent(row['mape'])} (bias {signed_percent(row['bias'])}) of {row['records']}"
        cells.setdefault((row["backend"], row["peak_kind"]), {})[row["size"]] = text
    return [[*key, *(by_size.get(size, "-") for size in SIZES)] for key, by_size in cells.items()]


def _peak(name: str, f: Family) -> list[str]:
    return [*name.rsplit("/", 1), str(f["records"]), str(f["supported"]), *error_cells(f)[:-1]]


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
    for about in answer["anchors"].values():
        yield f"- {about['title']} ignores {about['ignores']}."
    priced = sum(family["supported"] for family in answer["families"].values())
    yield f"- Of {len(answer['records'])} records {priced} are priced; the command says why not for each of the others."


def page_with_tables(page: str, answer: Mapping[str, Any]) -> str:
    """Return the text of docs/accuracy.md with its tables made anew.

    Raises:
        ValueError: the page does not have both markers, each once and in order.
    """
    before, rest = page.split(START)
    _, after = rest.split(END)
    return f"{before}{START}\n{accuracy_markdown(answer)}\n{END}{after}"


def _markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return the rows as a table of Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main() -> None:
    """Score the public records, and write or print what the options ask for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--anchors", action="store_true", help="print the published formulas with our errors, and write nothing"
    )
    prints = parser.parse_args().anchors
    records = [record for file in sorted(MEASUREMENTS.glob("*.jsonl")) for record in read_records(file)]
    answer = public_accuracy(scores_of(records, machines()))
    if prints:
        print(f"{accuracy_text(answer)}\n\n{anchors_text(answer)}")
        return
    PAGE.write_text(page_with_tables(PAGE.read_text("utf-8"), answer), encoding="utf-8")
    print(accuracy_sentence(answer))


if __name__ == "__main__":
    main()
