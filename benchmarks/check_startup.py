"""How long `llmlaunch check recipes/llama3-70b.yaml` takes, as a multiple of a process that only imports.

The yardstick imports numpy, click and yaml and defines one pydantic model. Both run as whole processes, in turn, so
that a machine whose speed drifts slows both; the ratio of each pair is what counts. Bar: at most 3. The store is empty:
where there are earlier runs to show, SQLAlchemy is imported too.

    python benchmarks/check_startup.py [PAIRS]
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
YARDSTICK = """
import numpy, click, yaml, pydantic
class Model(pydantic.BaseModel):
    name: str
    size: int
Model(name="x", size=1)
"""


def seconds(command: list[str]) -> float:
    start = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=ROOT)
    return time.perf_counter() - start


def main() -> None:
    with tempfile.TemporaryDirectory() as empty:
        os.environ["XDG_DATA_HOME"] = empty
        compare()


def compare() -> None:
    pairs = int(sys.argv[1]) if len(sys.argv) > 1 else 10
    yardstick = [sys.executable, "-c", YARDSTICK]
    check = [sys.executable, "-m", "llmlaunch", "check", "recipes/llama3-70b.yaml"]
    seconds(yardstick), seconds(check)  # warm the file cache
    times = [(seconds(check), seconds(yardstick)) for _ in range(pairs)]
    ratios = sorted(a / b for a, b in times)
    print(f"check      {statistics.median(a for a, _ in times):.3f} s (median of {pairs})")
    print(f"yardstick  {statistics.median(b for _, b in times):.3f} s")
    print(f"ratio      {statistics.median(ratios):.2f} (min {ratios[0]:.2f}, max {ratios[-1]:.2f}); bar: 3")


if __name__ == "__main__":
    main()
