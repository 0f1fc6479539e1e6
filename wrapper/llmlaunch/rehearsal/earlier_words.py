"""What an earlier rehearsal says of a plan: one line for a person, and JSON."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from llmlaunch.rehearsal.comparison import headline
from llmlaunch.rehearsal.rehearsed import ON_GPU, RehearsedRank
from llmlaunch.rehearsal.verdict import Judged

__all__ = ["sentence_of", "told_of"]

Found = Sequence[tuple[RehearsedRank, float]]  # with unix seconds
GIB = 2**30


def sentence_of(found: Found, judgement: Judged, package: str) -> str:
    """When, where, which ranks, how far off the estimate, and what follows."""
    newest = max(at for _, at in found)
    day = time.strftime("%Y-%m-%d %H:%M", time.localtime(newest))
    places = " and ".join(dict.fromkeys("on a GPU" if rank.on == ON_GPU else "as a trace" for rank, _ in found))
    versions = ", ".join(dict.fromkeys(rank.versions[package] for rank, _ in found if package in rank.versions))
    numbers = [str(rank.pipeline_rank) for rank, _ in found]
    which = f"pipeline rank{'' if len(numbers) == 1 else 's'} {', '.join(numbers)}"
    verdict = f"{judgement.verdict} by it: {'; '.join(judgement.sentences)}"
    framework = f" of {package} {versions}" if versions else ""
    return f"rehearsed {day} {places}{framework}, {which}{_difference(found)}; {verdict}"


def _difference(found: Found) -> str:
    """The largest between what was predicted and what was seen."""
    peaks = [(rank, headline(rank)) for rank, _ in found]
    known = [(rank, peak, peak.difference) for rank, peak in peaks if peak.difference is not None and not rank.ran_out]
    if not known:
        return ""
    rank, peak, share = max(known, key=lambda one: abs(one[2]))
    sizes = f"{(peak.rehearsed_bytes or 0) / GIB:.2f} GiB {peak.kind}, {peak.predicted_bytes / GIB:.2f} predicted"
    return f", at most {share:+.1%} from the estimate (rank {rank.pipeline_rank}: {sizes})"


def told_of(found: Found, judgement: Judged, sentence: str) -> dict[str, Any]:
    """`memory.rehearsed` of a plan's JSON."""
    worst = judgement.worst
    return {
        "verdict": judgement.verdict,
        "sentence": sentence,
        "worst_pipeline_rank": worst.pipeline_rank,
        "device_bytes": worst.device_bytes,
        "limit_bytes": worst.limit_bytes,
        "ranks": [
            {
                "pipeline_rank": rank.pipeline_rank,
                "stands_for": list(rank.stands_for),
                "on": rank.on,
                "at": at,
                "versions": dict(rank.versions),
                "peak_kind": headline(rank).kind,
                "predicted_bytes": headline(rank).predicted_bytes,
                "rehearsed_bytes": headline(rank).rehearsed_bytes,
                "ran_out": rank.ran_out,
            }
            for rank, at in found
        ],
    }
