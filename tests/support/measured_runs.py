"""Measured runs made up for tests: like one public record, with the peak put at a chosen multiple of the prediction."""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path
from typing import Any

from llmlaunch.accuracy.scoring import score
from llmlaunch.calibration.records import read_records

DATA = Path(__file__).parents[1] / "data" / "measurements"
CARD = 80 * 2**30


@cache
def template() -> dict[str, Any]:
    """A Megatron-LM run without a peak, on a card of 80 GiB."""
    record = next(r for r in read_records(DATA / "fit.jsonl") if r["family"] == "SimuMax" and not r["model"]["moe"])
    return {**record, "gpu": "H100", "gpu_memory_bytes": CARD, "peak_kind": "device", "peak_bytes": None}


def run(number: int, ratio: float | None, kind: str = "device", **changed: Any) -> dict[str, Any]:
    """Run `number`, a configuration of its own, that peaked at `ratio` times its prediction; None: it died."""
    record = copy.deepcopy(template())
    record.update(id=f"run-{number}", sequence_length=1024 + number, peak_kind="oom" if ratio is None else kind)
    record["parallelism"].update(tensor=8, sequence_parallel=True)
    record.update(backend_version=None, **changed)
    if ratio is not None:
        record["peak_bytes"] = 1
        record["peak_bytes"] = round((score(record, {}).predicted_bytes or 0) * ratio)
    return record
