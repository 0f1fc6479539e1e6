"""The length of the planned job, and the sentences on what a plan assumes of SLURM's time limit and the host link."""

from __future__ import annotations

import re
from dataclasses import replace

from llmlaunch.layout import RECOMPUTE_NONE, Layout, LayoutColumns
from llmlaunch.memory.activations import kept_by_layer, swapped_bytes
from llmlaunch.memory.job import Job, candidate_ranks
from llmlaunch.planner.plan import JobLength
from llmlaunch.recipe.types import Recipe
from llmlaunch.timing.host import host_link, host_link_bytes_per_second
from llmlaunch.timing.split import split_of
from llmlaunch.timing.stages import pieces
from llmlaunch.units import DAY, GB, GIB, HOUR, MINUTE, duration

__all__ = ["host_link_notes", "job_length", "time_limit_note"]

# What sbatch takes as --time (man sbatch, SLURM 23.11): minutes, or fields counted from the hours where there are days.
_WITH_DAYS = re.compile(r"(\d+)-(\d+)(?::(\d+))?(?::(\d+))?")
_WITHOUT_DAYS = re.compile(r"(?:(\d+):)??(\d+)(?::(\d+))?")


def job_length(recipe: Recipe, step_seconds: float) -> JobLength:
    """Return the length of all steps at `step_seconds` each: computing alone, no queue, no checkpoint, no restart."""
    steps = recipe.training.steps
    seconds = steps * step_seconds
    return JobLength(
        steps=steps,
        tokens=steps * recipe.workload.tokens_per_step,
        seconds=seconds,
        gpu_hours=seconds * recipe.world_size / HOUR,
    )


def time_limit_note(recipe: Recipe, length: JobLength) -> tuple[str, ...]:
    """Return one sentence where SLURM would end the job before its last step, else nothing. That is no error, because
    a job with checkpoints can be resumed."""
    requested = recipe.slurm.get("time")
    no_text = requested is None or isinstance(requested, bool)
    limit = None if no_text else _limit_seconds(str(requested).strip())
    if limit is None or length.seconds <= limit:
        return ()
    resumed = "it goes on from its last checkpoint when submitted again"
    if recipe.training.save_interval is None:
        resumed = "it writes no checkpoints to go on from (training.save_interval)"
    return (
        f"SLURM ends the job after {duration(limit)} (slurm.time), before {duration(length.seconds)} are over; "
        f"{resumed}",
    )


def _limit_seconds(text: str) -> int | None:
    """Return the seconds of a --time value. None: no limit (0, UNLIMITED), or a value sbatch rejects itself."""
    with_days = _WITH_DAYS.fullmatch(text)
    if with_days:
        days, hours, minutes, seconds = (int(part or 0) for part in with_days.groups())
        return days * DAY + hours * HOUR + minutes * MINUTE + seconds
    without_days = _WITHOUT_DAYS.fullmatch(text)
    if without_days is None:
        return None
    hours, minutes, seconds = (int(part or 0) for part in without_days.groups())
    return (hours * HOUR + minutes * MINUTE + seconds) or None


def host_link_notes(recipe: Recipe, job: Job, layout: Layout) -> tuple[str, ...]:
    """Return what the plan assumes of the link between device and host; nothing where no technique uses it."""
    if not (job.techniques.moves_to_host or layout.offload_layers):
        return ()
    link, shared = host_link(recipe.cluster), host_link_bytes_per_second(recipe.cluster)
    notes = [
        f"what waits in host memory travels over {link.name}, {link.bytes_per_second / GB:.1f} GB/s each way at best "
        f"and {shared / GB:.1f} GB/s with all devices of a node; the step time shows what no computation hides"
    ]
    if job.techniques.swapped_share:
        notes.append(_swap_note(recipe, job, layout))
    return tuple(notes)


def _swap_note(recipe: Recipe, job: Job, layout: Layout) -> str:
    """Swapping is hidden where a layer's share travels no longer than the layer computes (MEMO, Zhao et al. 2025,
    section 4.1)."""
    columns = LayoutColumns.of([replace(layout, recompute=RECOMPUTE_NONE)])
    rows = candidate_ranks(job, columns)
    by_kind = kept_by_layer(job, rows)
    layer_bytes, swapped = max((float(kind[0]), float(swapped_bytes(job, rows, kind)[0])) for kind in by_kind)
    layers = pieces(job, recipe.cluster, split_of(job, columns))
    seconds = max(float(layer.forward[0]) for layer in (layers.dense, layers.mixture) if layer is not None)
    needed = swapped / seconds
    name, shared = host_link(recipe.cluster).name, host_link_bytes_per_second(recipe.cluster)
    hidden = "it is hidden" if needed <= shared else "it is not hidden"
    return (
        f"swapping {swapped / GIB:.2f} of a layer's {layer_bytes / GIB:.2f} GiB while the layer computes "
        f"({seconds * 1e3:.1f} ms) needs {needed / GB:.0f} GB/s of the {shared / GB:.1f} that {name} can carry; "
        f"{hidden}"
    )
