"""Megatron-LM's rerun state machine (core 0.19, megatron/core/rerun_state_machine.py): which GPU computed wrongly.

It computes a step with an unexpected result again. Another result on the same GPU is a transient error. After the same
result it saves, exits with 16, and wants the rank on another GPU. There the same result is the program's or the data's,
and another one means that the first GPU is at fault; the line that says so names the second. After every verdict it
exits with 17.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..rundir.run import begun_attempts
from .kinds import RERUN, SILENT_CORRUPTION
from .redaction import harmless

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ..rundir.attempt import Attempt
    from ..rundir.attempt_files import Cause, RankRecord
    from .log_scan import Hit


EXIT_CODES = (16, 17)  # EXIT_CODE_RESUME_TO_DISAMBIGUATE, EXIT_CODE_FAILED_ON_RESULT_VALIDATION
_KINDS = (RERUN, SILENT_CORRUPTION, "unexpected_result")


def without_reruns(hits: Sequence[Hit], ranks: Sequence[RankRecord]) -> list[Hit]:
    """Return the hits without those of the machine, where no rank ended by its word: some of its checks only warn.
    Where one did, without the bad loss that the machine looked into."""
    ended = any(rank.get("exit_code") in EXIT_CODES for rank in ranks) and any(hit.kind in _KINDS for hit in hits)
    left_out = ("bad_loss",) if ended else _KINDS
    return [hit for hit in hits if hit.kind not in left_out]


def with_first_gpu(cause: Cause, attempt: Attempt) -> Cause:
    """Return the cause of a persistent error with the GPU of the attempt before in place of the one that showed it up.
    Two GPUs disagree, and the first was wrong by what the program expects: these are two signs."""
    if cause["kind"] != SILENT_CORRUPTION or cause["sick"]:
        return cause
    earlier = [item for item in begun_attempts(attempt.run_directory) if item.name != attempt.name]
    first = next((it for it in map(_cause, reversed(earlier)) if it.get("kind") == RERUN and it.get("node")), None)
    if first is None:
        return {**cause, "node": None, "rank": None}
    numbers = dict(first.get("numbers") or {})
    why = f"device {numbers.get('device')} of {first['node']} gave another result than a second GPU"
    return {
        **cause,
        "node": first["node"],
        "rank": first.get("rank"),
        "numbers": numbers,
        "line": harmless(f"{why}: {cause['line']}"),
        "sick": True,
        "suspects": {first["node"]: ["same_result_again", "other_result_elsewhere"]},
    }


def _cause(attempt: Attempt) -> Mapping[str, Any]:
    return attempt.status.get("cause") or {}


def is_judged_step(cause: Mapping[str, Any]) -> bool:
    """Whether the attempt judged the step that its checkpoint was saved for: whoever loads it ends there again."""
    return cause.get("kind") == SILENT_CORRUPTION and bool(cause.get("suspects"))
