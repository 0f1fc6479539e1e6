"""How long `llmlaunch calibrate` takes on a store of 100,000 measurements: the whole process, SQLite on a local disk.

Runs are of six model sizes, 18 splits over 64 devices and many sequence lengths, on one accelerator. *usual*: each run
leaves a record for each of its 64 ranks with what the probe saw, and two for each pipeline rank; half of the
configurations ran twice. *all distinct*: every record is another configuration, the worst there is: of these the
newest 10,000 count. Peaks are the predictions, 5 % and 0.8 GiB more and 1 % of noise. Beside the seconds stand those of
processors, which other programs on the machine do not stretch, and a yardstick taken in the same minute: reading the
same store and parsing every record, which nobody can do without.

    python benchmarks/calibrate.py [RECORDS [usual|distinct]]
"""

from __future__ import annotations

import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "wrapper")]

from llmlaunch.calibration.cases import Prediction  # noqa: E402
from llmlaunch.store.database import open_store  # noqa: E402
from llmlaunch.store.location import where  # noqa: E402
from llmlaunch.store.measurements import put_collected  # noqa: E402
from support.hidden_bias import GIB, LAYOUTS, MODELS, configuration  # noqa: E402
from support.measured_runs import predictions  # noqa: E402

RANKS = 64
PARSE = """
import json, sqlite3, sys
for (text,) in sqlite3.connect(sys.argv[1]).execute("SELECT content FROM measurements ORDER BY position"):
    json.loads(text)
"""
Record = dict[str, Any]


def configurations(rng: random.Random) -> Iterator[tuple[Record, Prediction]]:
    """One after the other, never the same twice, all predicted to fit their card."""
    for length in range(1024, 10**6, 8):
        records = [configuration(model, layout, length) for model in MODELS for layout in LAYOUTS]
        rng.shuffle(records)
        for record, one in zip(records, predictions(records), strict=True):
            if isinstance(one, Prediction) and float((one.reserved + one.outside).max()) <= record["gpu_memory_bytes"]:
                yield record, one


def usual(rng: random.Random) -> Iterator[Record]:
    for number, (record, one) in enumerate(configurations(rng)):
        for repeat in range(1 + number % 2):
            yield from run(rng, record, one, f"run-{number}-{repeat}")


def run(rng: random.Random, record: Record, one: Prediction, name: str) -> Iterator[Record]:
    stages, common = len(one.reserved), rng.gauss(0.05, 0.01)
    for rank in range(RANKS):
        stage = rank * stages // RANKS
        torch = round(float(one.reserved[stage]) * (1.0 + common + rng.gauss(0.0, 0.002)))
        outside = round(float(one.outside[stage]) + 0.8 * GIB + rng.gauss(0.0, 0.05 * GIB))
        place = {"run_id": name, "attempt": "1.0", "pipeline_rank": stage, "run_state": "succeeded"}
        seen = {
            "reserved_peak_bytes": torch,
            "allocated_peak_bytes": round(0.95 * torch),
            "outside_torch_bytes": outside,
        }
        yield {**record, **place, "id": f"{name}/{rank}", "peak_bytes": torch + outside, "observed": seen}
        if rank * stages % RANKS == 0:
            for kind, peak in (("reserved", torch), ("allocated", round(0.95 * torch))):
                yield {**record, **place, "id": f"{name}/{stage}/{kind}", "peak_kind": kind, "peak_bytes": peak}


def distinct(rng: random.Random) -> Iterator[Record]:
    """The batch tells them apart: what full pipelines hold on a device does not depend on it."""
    base = list(islice(configurations(rng), 3000))
    for number, batch in enumerate(range(512, 10**6, 64)):
        for place, (record, one) in enumerate(base):
            peak = float((one.reserved * rng.gauss(1.05, 0.01) + one.outside).max()) + 0.8 * GIB
            changed = {"global_batch_size": batch, "num_microbatches": None, "peak_bytes": round(peak)}
            yield {**record, **changed, "id": f"run-{number}-{place}", "run_state": "succeeded"}


def fill(path: Path, found: Iterator[Record], count: int) -> None:
    with open_store(where({"LLMLAUNCH_STORE": str(path)})) as store:
        for start in range(0, count, 5000):
            with store.write() as connection:
                put_collected(connection, [next(found) for _ in range(min(5000, count - start))])


def timed(*words: str) -> tuple[float, float, str]:
    """Seconds by the clock, seconds of processors, and what was printed."""
    start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    answer = subprocess.run([sys.executable, *words], check=True, capture_output=True, text=True, cwd=ROOT)
    took, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    return took, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, answer.stdout


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 100_000
    wanted = sys.argv[2:] or ["usual", "distinct"]
    for name in wanted:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "store.db"
            fill(path, {"usual": usual, "distinct": distinct}[name](random.Random(1)), count)
            os.environ["LLMLAUNCH_STORE"] = str(path)
            yardstick, parsing, _ = timed("-c", PARSE, str(path))
            seconds, busy, said = timed("-m", "llmlaunch", "calibrate", "--json")
            (answer,) = json.loads(said)["answers"]
            runs, correction = answer["runs"], answer["calibration"]["correction"]
            most = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss // 1024
            print(f"{name:9} {count} records, {runs} configurations, {path.stat().st_size / 2**20:.0f} MiB of store")
            print(f"          {answer['did']}: {correction}")
            print(f"          calibrate {seconds:.1f} s ({busy:.1f} s of processors), at most {most} MiB; bar: 10 s")
            print(f"          yardstick {yardstick:.1f} s ({parsing:.1f} s); ratio {busy / parsing:.1f}")


if __name__ == "__main__":
    main()
