"""Which measured records speak for future runs: what margins and calibrations both leave out, and what they call one
configuration. Said of the record alone, before it is priced."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from llmlaunch.calibration.records import TABLES
from llmlaunch.cluster.profile import Cluster

__all__ = [
    "REHEARSED",
    "accelerator_of",
    "card_bytes",
    "configuration",
    "left_out",
    "ran_long_enough",
    "ran_out",
    "table_of",
    "took_back_its_cache",
    "usable",
]

Record = Mapping[str, Any]

REHEARSED = "rehearsed"  # `source.evidence` and `family` of one rank that ran alone: it speaks for its own shape
FULL = 0.9  # a failed run of our own that had filled this share of its card counts as out of memory
FEWEST_STEPS = (
    2  # the second step is the first with the optimizer's states, and communicators are made as they are used
)
CONFIGURATION = (
    *("backend", "gpu", "gpu_memory_bytes", "world_size", "model", "sequence_length", "micro_batch_size"),
    *("global_batch_size", "parallelism", "optimizer", "recompute", "precision", "implementation", "techniques"),
)


def configuration(record: Record) -> str:
    """Equal for records that say the same of everything that was chosen."""
    return json.dumps({key: record.get(key) for key in CONFIGURATION}, sort_keys=True)


def table_of(record: Record) -> str | None:
    """The table of facts, which versions of one backend share; None of a backend nobody knows."""
    return TABLES.get(str(record.get("backend")))


def accelerator_of(record: Record, clusters: Mapping[str, Cluster]) -> str:
    """As recipes name it, where a profile stands for the record's card."""
    cluster = clusters.get(record["gpu"])
    return cluster.accelerator.name if cluster else str(record["gpu"])


def card_bytes(record: Record, clusters: Mapping[str, Cluster]) -> int | None:
    told, cluster = record.get("gpu_memory_bytes"), clusters.get(record["gpu"])
    if isinstance(told, int | float) and told > 0:
        return int(told)
    return cluster.accelerator.memory_bytes if cluster else None


def usable(record: Record) -> bool:
    return left_out(record) is None


def left_out(record: Record) -> str | None:
    """Why a record speaks for no other run, in a few words; None where it does. The peak of a run that failed is what
    it reached, not what it needed; of one that still runs, or that ended before its second step, it may rise. That its
    GPU was full says that it needed more. What others held on the same card is nobody's prediction. One rank that was
    rehearsed alone speaks for its own shape."""
    source = record.get("source")
    if record.get("flags_known") is False:
        return "flags not known"
    if isinstance(source, Mapping) and source.get("evidence") in ("failed", REHEARSED):
        return str(source["evidence"])
    if ran_out(record):
        return None
    if record.get("peak_kind") == "oom":
        return "ran out of memory that others held, or that its program kept from it"
    if record.get("run_state") not in (None, "succeeded"):
        return f"{record.get('run_state')}"
    if not ran_long_enough(record):
        return f"fewer than {FEWEST_STEPS} steps"
    return "others on the card" if _shared_its_card(record) else None


def ran_out(record: Record) -> bool:
    """Whether the run died because what it had planned did not fit the card."""
    return _filled_its_card(record) or (record.get("peak_kind") == "oom" and _had_its_card_alone(record))


def ran_long_enough(record: Record) -> bool:
    """Whether it made as many steps as a peak needs; yes where nobody counted."""
    steps = _observed(record).get("steps_run")
    return not isinstance(steps, int) or steps >= FEWEST_STEPS


def took_back_its_cache(record: Record) -> bool:
    """torch's allocator gave its cache back to go on: the card was full, and the peak is less than it would have been
    on a larger one."""
    retries = _observed(record).get("alloc_retries")
    return isinstance(retries, int) and retries > 0


def _filled_its_card(record: Record) -> bool:
    card, peak = record.get("gpu_memory_bytes"), record.get("peak_bytes")
    of_a_card = record.get("peak_kind") not in ("host", "host_oom")
    return bool(of_a_card and record.get("run_state") == "failed" and card and peak and peak >= FULL * card)


def _had_its_card_alone(record: Record) -> bool:
    """Whether the allocator's message names neither a neighbour with a share of the card nor a limit of the program's
    own: then the plan was not what ran out."""
    numbers = record.get("numbers")
    said = numbers if isinstance(numbers, Mapping) else {}
    total, ours = said.get("total_bytes"), said.get("process_bytes")
    others = said.get("other_processes_bytes") if ours else None  # alone, it may be this process under another pid
    return said.get("allowed_bytes") is None and not (total and others and others > (1 - FULL) * total)


def _shared_its_card(record: Record) -> bool:
    """Whether others held a share of the card, before the trainer began or beside it."""
    seen = _observed(record)
    total, whole = seen.get("device_total_bytes") or record.get("gpu_memory_bytes"), seen.get("device_peak_bytes")
    before, own = seen.get("baseline_bytes") or 0, seen.get("process_peak_bytes")
    if not isinstance(total, int) or not isinstance(before, int):
        return False
    beside = whole - before - max(own, _bytes(record)) if isinstance(whole, int) and isinstance(own, int) else 0
    return max(before, beside) > (1 - FULL) * total


def _bytes(record: Record) -> int:
    """Of the process, where the record is of a device."""
    peak = record.get("peak_bytes")
    return peak if record.get("peak_kind") == "device" and isinstance(peak, int) else 0


def _observed(record: Record) -> Record:
    seen = record.get("observed")
    return seen if isinstance(seen, Mapping) else {}
