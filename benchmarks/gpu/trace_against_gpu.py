"""The same ranks of the same recipes, traced without a GPU and run alone on one, against each other.

    python benchmarks/gpu/trace_against_gpu.py RECORDS RECIPE [KEY=VALUE ...] [--rank all]

Both are `llmlaunch rehearse`, so the GPU must be of the recipe's kind, with Megatron-LM and Transformer Engine there,
and beside them what `make install-frameworks` installs. Worth trying: 8B whole and 70B in fewer layers
(model.num_layers=8), full recompute, sequence parallelism off. Bar: 3 % of what torch allocates. A record goes into the
folder RECORDS; nothing goes into the store. Never run on a GPU yet.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from llmlaunch.units import GIB

BAR = 0.03
COMMAND = f"{shlex.quote(sys.executable)} -m llmlaunch"


def rehearsed(command: str, place: str, recipe: list[str], rank: str) -> dict[str, Any]:
    """What `rehearse --json` says. An unsafe verdict is an answer, too."""
    words = [*shlex.split(command), "rehearse", *recipe, "--on", place, "--rank", rank, "--json"]
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "LLMLAUNCH_STORE": f"{folder}/store.db"}
        said = subprocess.run(words, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    if said.returncode not in (0, 3) or not said.stdout.strip():
        sys.exit(f"{shlex.join(words)} ended with {said.returncode}")
    found: dict[str, Any] = json.loads(said.stdout)
    return found


def compared(traced: dict[str, Any], on_gpu: dict[str, Any]) -> list[dict[str, Any]]:
    """Rank by rank, allocated and reserved: bytes traced, bytes on the GPU, and the ratio of both less 1."""
    if traced["layout"] != on_gpu["layout"]:
        sys.exit("the two rehearsed different layouts: pin the layout in the recipe")
    real = {rank["pipeline_rank"]: rank for rank in on_gpu["ranks"]}
    rows = []
    for rank in traced["ranks"]:
        there = real[rank["pipeline_rank"]]
        for kind in ("allocated_bytes", "reserved_bytes"):
            one, other = rank[kind], there[kind]
            off = None if not one or not other else one / other - 1.0
            rows.append({"rank": rank["pipeline_rank"], "kind": kind, "trace": one, "gpu": other, "off": off})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", type=Path)
    parser.add_argument("recipe", nargs="+", help="a recipe, and key=value words")
    parser.add_argument("--rank", default="all")
    parser.add_argument("--command", default=COMMAND, help="llmlaunch, as it is started here")
    options = parser.parse_args()
    traced, on_gpu = (rehearsed(options.command, place, options.recipe, options.rank) for place in ("trace", "gpu"))
    rows = compared(traced, on_gpu)
    date = time.strftime("%Y-%m-%dT%H%M%SZ", time.gmtime())
    options.records.mkdir(parents=True, exist_ok=True)
    path = options.records / f"trace_against_gpu-{Path(options.recipe[0]).stem}-{date}.json"
    record = {"what": "trace_against_gpu", "date": date, "words": options.recipe, "layout": traced["layout"]}
    path.write_text(json.dumps(record | {"rows": rows}, indent=1) + "\n")
    for row in rows:
        held = "  ".join("unknown" if row[k] is None else f"{row[k] / GIB:.3f} GiB" for k in ("trace", "gpu"))
        off = "" if row["off"] is None else f"{100 * row['off']:+.2f} %"
        print(f"rank {row['rank']} {row['kind']:16} {held}  {off}")
    allocated = (row["off"] for row in rows if row["kind"] == "allocated_bytes")
    worst = max((abs(off) for off in allocated if off is not None), default=0.0)
    print(f"allocated: at most {100 * worst:.2f} % apart; bar: {100 * BAR:g} %")
    print(path)


if __name__ == "__main__":
    main()
