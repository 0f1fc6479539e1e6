"""Memory a GPU that authors of public scripts state (tests/data/authors_memory.yaml), beside the
prediction for their jobs.

`PYTHONPATH=tests python -m support.authors_memory` predicts anew, records the predictions and writes the table of
docs/accuracy.md.
"""

from __future__ import annotations

import os
import re
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from support.public_scripts import PublicScript, public_scripts, written_bytes

DATA = Path(__file__).parents[1] / "data" / "authors_memory.yaml"
PAGE = Path(__file__).parents[2] / "docs" / "accuracy.md"
BEGIN, END = "<!-- authors -->\n", "<!-- end of authors -->"
GIB = 2**30


@cache
def authors_rows() -> tuple[Mapping[str, Any], ...]:
    """Return the rows, in the order of the file."""
    return tuple(yaml.safe_load(DATA.read_text("utf-8"))["jobs"])


def predicted_gib(row: Mapping[str, Any], folder: Path) -> float:
    """Return the memory of the worst rank of a row's job. `folder` takes the recipe's file."""
    return written_bytes(_job(row), folder) / GIB


def _job(row: Mapping[str, Any]) -> PublicScript:
    if "script" in row:
        return next(script for script in public_scripts() if script.name == row["script"])
    name = re.sub(r"[^a-z0-9.]+", "-", row["name"].lower())[:60]
    model = public_scripts()[0]
    environment = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    return replace(model, name=name, answer={"cluster": "", "recipe": row["recipe"], "environment": environment})


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the table of the documentation, with what it says in a sentence above it."""
    lines = ["| job | script of ms-swift | stated | predicted GiB | difference |", "| --- | --- | --- | --- | --- |"]
    for row in rows:
        difference = f"{row['predicted_gib'] / row['gib'] - 1:+.0%}".replace("%", " %")
        bound = "" if row["full_sequences"] else " (bound)"
        card = f", {row['gpu']}" if row.get("gpu") else ""
        stated = f"{row['stated']}{card} | {row['predicted_gib']:.1f}"
        lines.append(f"| {row['name']} | `{row['path']}` | {stated} | {difference}{bound} |")
    return f"{_summary(rows)}\n\n" + "\n".join(lines) + "\n"


def _summary(rows: Sequence[Mapping[str, Any]]) -> str:
    full = [row["predicted_gib"] / row["gib"] - 1 for row in rows if row["full_sequences"]]
    within = sum(abs(error) <= 0.1 for error in full)
    return (
        (
            f"Of {len(full)} jobs whose sequences are full, {within} are within 10 %; the median difference is "
            f"{statistics.median(full):+.0%}, the mean absolute one {statistics.fmean(map(abs, full)):.0%}."
        )
        .replace("%", " %")
        .replace("  %", " %")
    )


def with_table(page: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the page with the table of the rows between its marks."""
    before, _, rest = page.partition(BEGIN)
    return before + BEGIN + table(rows) + END + rest.partition(END)[2]


def main() -> None:
    text = DATA.read_text("utf-8")
    rows: list[Mapping[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_DATA_HOME"] = folder
        for row in authors_rows():
            predicted = round(predicted_gib(row, Path(folder)), 1)
            rows.append({**row, "predicted_gib": predicted})
            entry = text.index(f"- name: {row['name']}\n")
            end = text.find("\n- name: ", entry + 1)
            body = re.sub(r"\n  predicted_gib: .*", "", text[entry : end if end > 0 else None]).rstrip("\n")
            text = text[:entry] + f"{body}\n  predicted_gib: {predicted}\n" + (text[end + 1 :] if end > 0 else "")
            print(f"{row['name']:60} {row['stated']:18} {predicted:6.1f} {predicted / row['gib'] - 1:+.0%}")
    DATA.write_text(text, "utf-8")
    PAGE.write_text(with_table(PAGE.read_text("utf-8"), rows), "utf-8")


if __name__ == "__main__":
    main()
