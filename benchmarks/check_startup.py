"""How long `llmlaunch check recipes/llama3-70b.yaml` takes, as a multiple of a process that only imports.

The yardstick imports numpy, click and yaml and defines one pydantic model. Both run as whole processes, in turn, so
that a machine whose speed drifts slows both; the ratio of each pair is what counts, once of the seconds that pass and
once of processor time, which other programs of the machine hardly change. Modules are compiled already, as they are
after any install: compiled code is kept in a folder of this benchmark, whatever PYTHONDONTWRITEBYTECODE says. Bar: both
at most 3, without a store and with a SQLite store whose calibration of 1,000 runs is in use. Where earlier runs of the
recipe are to be shown, SQLAlchemy is imported too.

    python benchmarks/check_startup.py [PAIRS]
"""

from __future__ import annotations

import os
import resource
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


def seconds(command: list[str]) -> tuple[float, float]:
    """Run a command and return the seconds that passed, and its user and system time."""
    start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=ROOT)
    passed, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    return passed, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


# one process apart, so that this one imports nothing of it
CALIBRATED = """
from llmlaunch.calibration.calibrations import MEMORY, Calibration, Errors, TrainingData
from llmlaunch.calibration.ratios import Score
from llmlaunch.calibration.calibrations import estimator_digest
from llmlaunch.memory.job import Correction
from llmlaunch.store.calibrations import put, use
from llmlaunch.store.database import open_store
scores = tuple(Score(0.9 + i / 10000, "device", "dense gated", "0.19.0", i / 1000) for i in range(1000))
errors, data = Errors(0.0, 0.0, 0.0, 0.0, ()), TrainingData(1000, 8000, 0, "0" * 64, {}, {})
name = ("megatron", "h100-80gb")
one = Calibration(MEMORY, "an-id", *name, 0.0, "", estimator_digest(), data, Correction(0.01), errors, errors, scores)
with open_store() as store, store.write() as connection:
    put(connection, one)
    use(connection, *name, one.id, 0.0)
"""


def main() -> None:
    with tempfile.TemporaryDirectory() as compiled:
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        os.environ["PYTHONPYCACHEPREFIX"] = compiled
        compare_all()


def compare_all() -> None:
    for store in ("no store", "a calibration in use"):
        with tempfile.TemporaryDirectory() as home:
            os.environ["XDG_DATA_HOME"] = home
            if store != "no store":
                seconds([sys.executable, "-c", CALIBRATED])
            print(store)
            compare()


def compare() -> None:
    pairs = int(sys.argv[1]) if len(sys.argv) > 1 else 10
    yardstick = [sys.executable, "-c", YARDSTICK]
    check = [sys.executable, "-m", "llmlaunch", "check", "recipes/llama3-70b.yaml"]
    seconds(yardstick), seconds(check)  # warm the file cache
    times = [(seconds(check), seconds(yardstick)) for _ in range(pairs)]
    for place, clock in enumerate(("seconds", "processor time")):
        checks, yardsticks = ([both[side][place] for both in times] for side in (0, 1))
        ratios = sorted(a / b for a, b in zip(checks, yardsticks, strict=True))
        medians = f"check {statistics.median(checks):.3f}, yardstick {statistics.median(yardsticks):.3f}"
        spread = f"min {ratios[0]:.2f}, max {ratios[-1]:.2f}"
        print(f"  {clock:15} {medians} (medians of {pairs}); ratio {statistics.median(ratios):.2f} ({spread}); bar: 3")


if __name__ == "__main__":
    main()
