"""`python -m support.corpus draw|write|compare`, with PYTHONPATH=tests (CONTRIBUTING.md, "The frozen corpus").

draw     draws the recipes anew and writes everything: only to put other cases into the corpus
write    answers the stored cases anew, names those that changed, and writes them
compare  answers the stored cases anew, shows what changed, and ends with 1 if anything did
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
from collections.abc import Iterable
from typing import Any

from support.corpus.compare import answered, changed_rows
from support.corpus.storage import PARTS, read_part, write_part

Row = dict[str, Any]
MOST_LINES = 60  # shown of one case


def main() -> int:
    options = _options()
    with multiprocessing.Pool(options.processes) as pool:
        if options.act == "draw":
            return _draw(options.part, pool)
        code = 0
        for part in options.part:
            rows = [row for row in read_part(part) if not options.only or options.only in row["name"]]
            changed = 0
            today = []
            for row, answer, lines in pool.imap(changed_rows, rows, chunksize=1):
                today.append(row | {"answer": answer})
                changed += bool(lines)
                if lines:
                    _show(row["name"], lines, options.lines)
            print(f"{part}: {len(rows)} cases, {changed} changed", flush=True)
            code |= bool(changed)
            if options.act == "write" and changed:
                new = {row["name"]: row for row in today}
                write_part(part, [new.get(row["name"], row) for row in read_part(part)])
    return code if options.act == "compare" else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="support.corpus", description=__doc__)
    parser.add_argument("act", choices=("draw", "write", "compare"))
    parser.add_argument("--part", choices=PARTS, action="append", help="only this part")
    parser.add_argument("--only", metavar="NAME", default="", help="only cases with NAME in their names")
    parser.add_argument("--lines", type=int, default=MOST_LINES, help="lines shown of one case")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    options = parser.parse_args()
    options.part = options.part or list(PARTS)
    return options


def _show(name: str, lines: list[str], most: int) -> None:
    shown = "\n".join(lines).splitlines()
    print(f"\n{name}:", *shown[:most], sep="\n  ")
    if len(shown) > most:
        print(f"  ... and {len(shown) - most} lines more: --lines {len(shown)} --only {name}")


def _draw(parts: Iterable[str], pool: Any) -> int:
    from support.corpus.draw import drawn, gallery_cases, places, script_cases

    for part in parts:
        rows = []
        if part in ("gallery", "scripts"):
            found = pool.imap(answered, gallery_cases() if part == "gallery" else script_cases())
        else:
            found = pool.imap(drawn, places(part))
        for row in found:
            rows.append(row)
            print(row["name"], flush=True)
        write_part(part, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
