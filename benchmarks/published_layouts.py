"""NVIDIA's published layouts beside the planner's choices, as the table of docs/choices.md.

    python benchmarks/published_layouts.py [NAME...] [--write]

Each workload of tests/data/published_layouts.json whose name holds one of NAME is planned with the same precision,
batch and cluster, with the preference and without it; where the margin by measured runs refuses NVIDIA's layout, again
with a limit that it fits. --write puts the table into docs/choices.md.

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
    Comparison,
    PricedLayout,
    compared,
    priced,
    summary,
    table,
    with_table,
    workloads,
)

PAGE = ROOT / "docs" / "choices.md"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    comparisons: list[Comparison] = []
    for workload in workloads():
        if arguments.names and not any(name in workload.name for name in arguments.names):
            continue
        theirs = priced(workload, workload.published[0])
        if not isinstance(theirs, PricedLayout):
            print(f"{workload.name}: refused by {theirs}")
            continue
        comparisons.append(compared(workload, theirs))
        if theirs.bytes_beyond:
            comparisons.append(compared(workload, theirs, theirs.share_needed))
        print(table(comparisons[-1 - bool(theirs.bytes_beyond) :]).split("\n", 2)[2], end="", flush=True)
    print(summary(comparisons))
    if arguments.write:
        PAGE.write_text(with_table(PAGE.read_text("utf-8"), comparisons), "utf-8")


if __name__ == "__main__":
    main()
