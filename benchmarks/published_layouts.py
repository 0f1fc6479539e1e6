"""NVIDIA's published layouts beside the planner's choices, as the table of docs/choices.md.

    python benchmarks/published_layouts.py [NAME...] [--write]

Each workload of tests/data/published_layouts.json whose name holds one of NAME is planned with the same precision,
batch and cluster, with the preference and without it; where the margin by measured runs refuses NVIDIA's layout, again
with a limit that it fits. --write puts the rows into the table of docs/choices.md.

Bars: where NVIDIA's layout is safe, the choice is predicted at most 0.5 % slower than it on average with the preference
switched off and 1.5 % with it, and never above 4 %.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "wrapper")]

from support.published_layouts import (  # noqa: E402
    PricedLayout,
    compared,
    priced,
    summary,
    table_row,
    with_table,
    workloads,
)

PAGE = ROOT / "docs" / "choices.md"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    rows: list[str] = []
    for workload in workloads():
        if arguments.names and not any(name in workload.name for name in arguments.names):
            continue
        theirs = priced(workload, workload.published[0])
        if not isinstance(theirs, PricedLayout):
            raise SystemExit(f"{workload.name}: refused by {theirs}")
        for limit in (None, theirs.share_needed) if theirs.bytes_beyond else (None,):
            rows.append(table_row(compared(workload, theirs, limit)))
            print(rows[-1], end="", flush=True)
        if arguments.write:
            PAGE.write_text(with_table(PAGE.read_text("utf-8"), rows), "utf-8")
    print(summary(rows))


if __name__ == "__main__":
    main()
