"""Rehearsed ranks as measurement records, and records as rehearsed ranks. Pure: no database, no clock.

A rehearsal speaks for its own shape and framework version and for nothing else: its records are of a family and an
evidence of their own, which nothing that learns from runs takes in (llmlaunch.calibration.records).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from llmlaunch.calibration.records import REHEARSED
from llmlaunch.memory.estimator import RankEstimate
from llmlaunch.planner.plan import Plan
from llmlaunch.recipe.frameworks import FRAMEWORKS
from llmlaunch.recipe.types import Recipe
from llmlaunch.rehearsal.ranks import ON_GPU, ON_TRACE, JobAlone, Omission, RehearsedRank
from llmlaunch.rendering.run_json import measurement_template
from llmlaunch.rundir.summary import AttemptSummary, RankSummary
from llmlaunch.rundir.values import byte_count
from llmlaunch.units import GIB

Record = Mapping[str, Any]

ALLOCATED, RESERVED, DEVICE, OOM = "allocated", "reserved", "device", "oom"
# kind of peak -> what `observed` calls it, the counter of torch's allocator, and who says so on a GPU
KINDS = {
    ALLOCATED: ("allocated_peak_bytes", "allocated_bytes.all.peak", "torch, one rank alone"),
    RESERVED: ("reserved_peak_bytes", "reserved_bytes.all.peak", "torch, one rank alone"),
    DEVICE: ("process_peak_bytes", None, "nvml process, one rank alone"),
}
TRACED = "live tensors of the real framework under fake tensors, one rank alone"
REPLAYED = "replayed_reserved_bytes"  # never a peak: no GPU has said yet that the replay is right
NOTES = {
    ON_TRACE: "counted under fake tensors on a CPU: no CUDA context, no NCCL; the reserved bytes are an unvalidated "
    "replay of torch's allocator",
    ON_GPU: "one rank alone over a fake process group: NCCL's memory is not in it",
}


def records_of(
    recipe: Recipe,
    plan: Plan,
    job: JobAlone,
    rehearsed: Iterable[RehearsedRank],
    at: float,
    command: str,
) -> list[dict[str, Any]]:
    """Return a record for each rank and each kind of peak that was measured: `allocated` of a trace; `allocated`,
    `reserved` and `device` on a GPU; one of kind `oom` without bytes where the rank ran out of memory.

    `recipe` and `plan` are of the planned job, whose shape the records speak for; what was measured is of
    `job`. `at` is in unix seconds, `command` what the person typed. The same rehearsal made again has the same ids.
    """
    common = job.measurement()
    shape = shape_with_job(recipe, plan, job)
    return [record for rank in rehearsed for record in _of_rank(common, shape, rank, recipe.backend.name, at, command)]


def records_in(run: Record, rank: RehearsedRank, at: float) -> list[dict[str, Any]]:
    """The same of a rank that ran in a directory of its own; `run` is its run.json. What the person typed is not known
    there."""
    section = run["rehearsal"]
    shape = {name: section[name] for name in OF_SHAPE} | {name: section[name] for name in (AS_RUN,) if name in section}
    return _of_rank(run["measurement"], shape, rank, str(run["backend"]), at, None)


def place_of(shape: str, on: str, versions: Mapping[str, str], pipeline_rank: int, left_out: Iterable[str] = ()) -> str:
    """What the ids of a rank's records begin with, up to the kind of peak. `left_out` are the techniques of the plan
    that it ran without."""
    which = ",".join(f"{name}-{version}" for name, version in sorted(versions.items())) or "unknown"
    without = ",".join(sorted(left_out))
    return f"{REHEARSED}/{shape}/{on}/{which}/rank{pipeline_rank}" + (f"/without-{without}" if without else "")


def left_out_of(section: Record) -> tuple[Omission, ...]:
    """What the rank of a record's section "rehearsal" ran without; nothing where an older llmlaunch wrote it, which
    refused such plans."""
    return tuple(map(Omission.from_json, section.get("left_out") or ()))


def rank_of(records: Sequence[Record], predicted: RankEstimate) -> RehearsedRank:
    """The rank that the records of one rehearsal of it show, beside what is predicted of it now."""
    newest = records[-1]
    section, observed = newest["rehearsal"], newest["observed"]
    return RehearsedRank(
        pipeline_rank=int(newest["pipeline_rank"]),
        on=section["on"],
        predicted=predicted,
        allocated_bytes=observed.get(KINDS[ALLOCATED][0]),
        reserved_bytes=observed.get(REPLAYED if section["on"] == ON_TRACE else KINDS[RESERVED][0]),
        process_bytes=observed.get(KINDS[DEVICE][0]),
        ran_out=any(record["peak_kind"] == OOM for record in records),
        stands_for=tuple(section["stands_for"]),
        terms=dict(section.get("terms") or {}),
        versions=dict(section["versions"]),
        seconds=float(section.get("seconds") or 0.0),
        step_seconds=section.get("step_seconds"),
        remarks=tuple(section.get("remarks") or ()),
        omissions=left_out_of(section),
    )


def _of_rank(
    common: Record, shape: Record, rank: RehearsedRank, backend: str, at: float, command: str | None
) -> list[dict[str, Any]]:
    of_rank = {
        **common,
        "schema": 1,
        "family": REHEARSED,
        "backend_version": rank.versions.get(FRAMEWORKS[backend].package, common["backend_version"]),
        "pipeline_rank": rank.pipeline_rank,
        "rank_scope": "stage",
        "started_at": at,
        "source": {"citation": "llmlaunch rehearse", "license": None, "evidence": REHEARSED, "note": _note(rank)},
        "rehearsal": {
            **shape,
            "on": rank.on,
            "stands_for": list(rank.stands_for or (rank.pipeline_rank,)),
            "versions": dict(sorted(rank.versions.items())),
            "command": command,
            "seconds": rank.seconds,
            **({} if rank.step_seconds is None else {"step_seconds": rank.step_seconds}),
            "terms": dict(rank.terms),
            "remarks": list(rank.remarks),
            "left_out": [omission.as_json() for omission in rank.omissions],
        },
        "observed": _observed(rank),
    }
    techniques = [omission.technique for omission in rank.omissions]
    prefix = place_of(shape["shape"], rank.on, rank.versions, rank.pipeline_rank, techniques)
    return [{**of_rank, "id": f"{prefix}/{kind}", "peak_kind": kind, **_peak(rank, kind)} for kind in _kinds_of(rank)]


def _note(rank: RehearsedRank) -> str:
    """What the peak of a record is not: it is of what ran, and the bytes beside it are priced."""
    left_out = ", ".join(omission.technique for omission in rank.omissions)
    return NOTES[rank.on] + (f"; run without {left_out} of the planned job, so it is none of that" if left_out else "")


def _kinds_of(rank: RehearsedRank) -> list[str]:
    """What a rank had reached when it ran out is not what it needs: then there is no peak."""
    if rank.ran_out:
        return [OOM]
    kinds = (ALLOCATED,) if rank.on == ON_TRACE else tuple(KINDS)
    return [kind for kind in kinds if _bytes(rank)[kind] is not None]


def _peak(rank: RehearsedRank, kind: str) -> dict[str, Any]:
    predicted = rank.predicted_as_run
    by_kind = {ALLOCATED: predicted.allocated_bytes, RESERVED: predicted.reserved_bytes}
    _, statistic, source = KINDS.get(kind, ("", None, "message"))
    return {
        "peak_bytes": _bytes(rank).get(kind),
        "allocator_statistic": statistic,
        "peak_source": TRACED if kind == ALLOCATED and rank.on == ON_TRACE else source,
        "predicted_bytes": by_kind.get(kind, predicted.device_bytes),
    }


def _bytes(rank: RehearsedRank) -> dict[str, int | None]:
    return {ALLOCATED: rank.allocated_bytes, RESERVED: rank.reserved_bytes, DEVICE: rank.process_bytes}


def _observed(rank: RehearsedRank) -> dict[str, int]:
    """All that was seen of the rank, what it had reached where it ran out included."""
    named = {KINDS[kind][0]: size for kind, size in _bytes(rank).items()}
    if rank.on == ON_TRACE:
        named[REPLAYED] = named.pop(KINDS[RESERVED][0])
    return {name: size for name, size in named.items() if size is not None}


OF_SHAPE = ("shape", "recipe", "recipe_digest", "nodes", "layout", "techniques", "gradient_dtype")  # keys of `shape_of`

# Of a pipeline of p ranks no schedule keeps more than its first 4 p micro-batches apart (llmlaunch.memory.schedule).
TURNS = 4


def shape_of(recipe: Recipe, plan: Plan) -> dict[str, Any]:
    """What a record, or the run.json of a rank that runs alone, says of the job it stands for: which recipe, which
    layout with which words, and the key of its shape. `recipe` is as planned, with the words llmlaunch chose."""
    return {
        "shape": shape_key(measurement_template(recipe, plan)),
        "recipe": recipe.name,
        "recipe_digest": recipe.digest,
        "nodes": recipe.nodes,
        "layout": plan.layout.as_json(),
        "techniques": plan.chosen.techniques.as_json(),
        "gradient_dtype": plan.chosen.gradient_dtype,
    }


AS_RUN = "as_run"


def shape_with_job(recipe: Recipe, plan: Plan, job: JobAlone) -> dict[str, Any]:
    """The same, and where techniques of the planned job were left out, shape and techniques of what ran ("as_run"): the
    rehearsal is one of that job, too, and leaves nothing of it out."""
    planned = shape_of(recipe, plan)
    ran = shape_of(job.recipe, job.plan)
    if ran == planned:
        return planned
    return planned | {AS_RUN: {name: ran[name] for name in ("shape", "techniques")}}


def each_as_run(records: Iterable[Record]) -> Iterator[Record]:
    """Yield the records, and of a rank that ran without techniques of its plan a second one of the job that ran."""
    for record in records:
        yield record
        section = record.get("rehearsal")
        ran = section.get(AS_RUN) if isinstance(section, Mapping) else None
        if isinstance(section, Mapping) and isinstance(ran, Mapping):
            others = {name: value for name, value in section.items() if name != AS_RUN}
            yield {**record, "rehearsal": {**others, **ran, "left_out": []}}


def shape_key(template: Mapping[str, Any]) -> str:
    """16 hexadecimal digits. `template` is a measurement record without a peak. A model's name makes no difference, and
    the batch does by the micro-batches in flight alone."""
    recipe, layout = template["recipe"], template["layout"]
    named = {"model": "name", "training": "global_batch_size"}
    sections = {
        section: {name: value for name, value in recipe[section].items() if name != left_out}
        for section, left_out in named.items()
    }
    content = {
        **{name: template[name] for name in ("backend", "gpu", "layout")},
        "recipe": {**recipe, **sections},
        "in_flight": min(int(template["num_microbatches"]), TURNS * int(layout["pipeline"])),
    }
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode("ascii")).hexdigest()[:16]


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
        rank = _rank(run, used, ran_out, versions, summary.step_seconds)
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


def _rank(run: Record, used: RankSummary, ran_out: bool, versions: Record, step_seconds: float | None) -> RehearsedRank:
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
        step_seconds=step_seconds,
        remarks=tuple(map(str, rehearsal.get("notes") or ())),
        omissions=left_out_of(rehearsal),
    )


def _predicted(run: Record, pipeline_rank: int) -> RankEstimate:
    """As the plan had said of the job; its terms are in plan.json and not needed here."""
    kinds = run["predicted_by_kind"]
    lists = kinds["allocated"], kinds["reserved"], run["predicted_bytes"]
    allocated, reserved, device = (byte_count(by_rank[pipeline_rank]) or 0 for by_rank in lists)
    return RankEstimate(pipeline_rank, {}, allocated, reserved, device)
