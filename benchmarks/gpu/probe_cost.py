"""How much longer a step of a small GPT takes with the memory probe than without.

    python benchmarks/gpu/probe_cost.py RECORDS [--pairs N] [--stand-in] [words of small_training.py]

Pairs of whole processes, one with the probe and one without, in turn and in changing order, so that a device whose
clock drifts slows both; what counts is the ratio of their median steps. The counters are reset at every step, as
torchtitan does at every log: with the probe each reset is a look more. Bar: 1.002. A record goes into the folder
RECORDS. About five minutes; no pair begins after the time limit.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from gpu_records import LIMIT_SECONDS, require_cuda
from probed import driver_version, result, start, write_record


def pair(number: int, words: list[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(with, without)"""
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        for probe in (True, False) if number % 2 else (False, True):
            results[probe] = result(start(Path(folder), probe, words))
    return results[True], results[False]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", type=Path)
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--limit-seconds", type=float, default=LIMIT_SECONDS)
    parser.add_argument("--stand-in", action="store_true")
    options, more = parser.parse_known_args()
    if not options.stand_in:
        require_cuda(Path(__file__).name)
    words = ["--reset-every", "1", *(["--stand-in"] if options.stand_in else []), *more]
    end, pairs = time.monotonic() + options.limit_seconds, [pair(0, words)]
    while len(pairs) < options.pairs and time.monotonic() < end:
        pairs.append(pair(len(pairs), words))
    medians = [tuple(statistics.median(one["step_seconds"]) for one in both) for both in pairs]
    ratios = sorted(probed / plain for probed, plain in medians)
    of = pairs[0][0]
    record = {
        "gpu": of["gpu"],
        "driver": driver_version(),
        **{name: of[name] for name in ("torch", "cuda", "python")},
        "training": words,
        "steps": len(of["step_seconds"]),
        "with_probe_step_seconds": [probed for probed, _ in medians],
        "without_step_seconds": [plain for _, plain in medians],
        "ratio": statistics.median(ratios),
    }
    path = write_record(options.records, "probe_cost", record)
    print(f"without  {1e3 * statistics.median(plain for _, plain in medians):.3f} ms a step (median of {len(pairs)})")
    print(f"ratio    {record['ratio']:.4f} (min {ratios[0]:.4f}, max {ratios[-1]:.4f}); bar: 1.002")
    print(path)


if __name__ == "__main__":
    main()
