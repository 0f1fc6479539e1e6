"""What the run directory of a rank that ran alone on a GPU says, as a rehearsal. Reads no file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmlaunch.memory.estimate import RankEstimate
from llmlaunch.rehearsal.ranks import ON_GPU, RehearsedRank
from llmlaunch.rehearsal.records import records_in
from llmlaunch.rundir.summary import AttemptSummary, RankSummary
from llmlaunch.rundir.values import byte_count
from llmlaunch.units import GIB

__all__ = ["collected_rehearsal", "is_rehearsal", "nothing_shown"]

Record = Mapping[str, Any]

NEARLY = 0.95  # what the driver calls the memory of a device and what its data sheet does differ by a little
LACKING = "the description of this rehearsal lacks what its records need; rehearse again with this llmlaunch"


def is_rehearsal(run: Record) -> bool:
    """Whether a run.json is of a rank by itself."""
    return isinstance(run.get("rehearsal"), Mapping)


def collected_rehearsal(
    run: Record, run_id: str, summary: AttemptSummary, state: str, ran_out: bool, versions: Record
) -> tuple[list[dict[str, Any]], str | None]:
    """The records of one attempt, and why there is none: a rank that ended otherwise than well or by its device's
    memory has shown nothing. `run` is its run.json, `versions` what its trainer wrote down of its packages."""
    used = _most(summary)
    if state != "succeeded" and not ran_out:
        return [], f"attempt {summary.attempt} ended as {state}, which shows no peak"
    missing = nothing_shown(run, summary, ran_out)
    if missing is not None:
        return [], f"attempt {summary.attempt}: {missing}"
    try:
        rank = _rank(run, used, ran_out, versions)
        where = {"run_id": run_id, "attempt": summary.attempt, "node": used.node, "gpu_uuid": used.gpu_uuid}
        return [{**record, **where} for record in records_in(run, rank, used.started_at or 0.0)], None
    except (AttributeError, IndexError, KeyError, TypeError, ValueError):
        return [], LACKING


def nothing_shown(run: Record, summary: AttemptSummary, ran_out: bool) -> str | None:
    """Why a rank that ended well, or by its device's memory, has shown no peak all the same; None where it has."""
    used, progress = _most(summary), run.get("progress") or {}
    planned, total = (run.get("measurement") or {}).get("gpu_memory_bytes"), used.device_total_bytes
    if planned and total is not None and total < NEARLY * planned:
        return (
            f"it was given a {used.gpu_name or 'device'} of {total / GIB:.1f} GiB, and the job is planned for "
            f"{planned / GIB:.1f} GiB; name a partition or a constraint that has those alone (slurm.partition=, "
            "slurm.constraint=)"
        )
    if ran_out:
        return None
    done, planned_steps = summary.step or 0, progress.get("steps") or 0
    if progress.get("promised") and done < planned_steps:
        return f"it ended without an error, yet after {done} of {planned_steps} steps"
    if used.allocated_peak_bytes is None and used.peak_bytes is None:
        return "nobody saw what it took of its device: neither torch's counters nor NVML told"
    return None


def _most(summary: AttemptSummary) -> RankSummary:
    """The one rank there is; none of it where nobody saw it."""
    return max(
        summary.ranks, key=lambda rank: (rank.peak_bytes or 0, rank.allocated_peak_bytes or 0), default=RankSummary(0)
    )


def _rank(run: Record, used: RankSummary, ran_out: bool, versions: Record) -> RehearsedRank:
    rehearsal = run["rehearsal"]
    number = int(rehearsal["pipeline_rank"])
    return RehearsedRank(
        pipeline_rank=number,
        on=ON_GPU,
        predicted=_predicted(run, number),
        allocated_bytes=used.allocated_peak_bytes,
        reserved_bytes=used.reserved_peak_bytes,
        process_bytes=used.peak_bytes,
        ran_out=ran_out,
        stands_for=tuple(map(int, rehearsal["stands_for"])),
        versions={str(name): str(version) for name, version in versions.items()},
        remarks=tuple(map(str, rehearsal.get("notes") or ())),
    )


def _predicted(run: Record, pipeline_rank: int) -> RankEstimate:
    """As the plan had said of the job; its terms are in plan.json and not needed here."""
    kinds = run["predicted_by_kind"]
    lists = kinds["allocated"], kinds["reserved"], run["predicted_bytes"]
    allocated, reserved, device = (byte_count(by_rank[pipeline_rank]) or 0 for by_rank in lists)
    return RankEstimate(pipeline_rank, {}, allocated, reserved, device)
