"""The accuracy table of the README, with the anchors beside our own errors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from llmlaunch.documents.writing import write_whole
from llmlaunch.errors import UserError
from llmlaunch.report.accuracy_text import signed
from llmlaunch.report.text import percent

__all__ = ["END", "START", "accuracy_markdown", "write_between_markers"]

START, END = "<!-- accuracy -->", "<!-- end of accuracy -->"
Family = Mapping[str, Any]


def accuracy_markdown(answer: Mapping[str, Any]) -> str:
    """Two Markdown tables: errors of measured peaks, verdicts on runs that fitted or died. `answer` is what
    `accuracy --anchors --json` prints. An anchor that applies to fewer records than ours says to how many, and what our
    error on those is."""
    families: Mapping[str, Family] = answer["families"]
    names = list(answer.get("anchors", {}))
    titles = [answer["anchors"][name]["title"] for name in names]
    head = ["measured runs", "peak", "records", "priced", "MAPE", "median", "bias", "p95", "worst"]
    peaks = [[*_peak(name, f), *_anchor_errors(f, names)] for name, f in families.items() if "mape" in f]
    outcome_head = ["runs", "outcome", "priced", "called safe", "called unsafe", "flags unknown", "above the card"]
    outcomes = [[*_outcome(name, f), *_anchor_verdicts(f, names)] for name, f in families.items() if _judged(f)]
    return "\n\n".join(
        [
            _table([*head, *(f"{title}: MAPE" for title in titles)], peaks),
            _table([*outcome_head, *(f"{title}: called safe" for title in titles)], outcomes),
            "\n".join(_remarks(answer)),
        ]
    )


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


def _peak(name: str, f: Family) -> list[str]:
    figures = [percent(f["mape"]), percent(f["median"]), signed(f["bias"]), percent(f["p95"]), signed(f["worst"])]
    return [*name.rsplit("/", 1), str(f["records"]), str(f["supported"]), *figures]


def _anchor_errors(f: Family, names: list[str]) -> Iterator[str]:
    for name in names:
        anchor = f["anchors"][name]
        some = "mape" in anchor and anchor["records"] != f["supported"]
        of = f" (ours {percent(anchor['our_mape'])}) on {anchor['records']}" if some else ""
        yield percent(anchor["mape"]) + of if "mape" in anchor else "-"


def _judged(f: Family) -> bool:
    return bool(f.get("called_safe", 0) + f.get("called_unsafe", 0))


def _outcome(name: str, f: Family) -> list[str]:
    counts = [str(f[key]) for key in ("supported", "called_safe", "called_unsafe", "flags_unknown")]
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


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
