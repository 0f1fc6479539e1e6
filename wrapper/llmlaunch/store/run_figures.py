"""The figures of a run, as `llmlaunch runs --export` writes them for other tools (docs/export.md)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from llmlaunch.rundir.values import whole_number

_FACTS = ("backend", "backend_version", "gpu", "world_size", "sequence_length", "global_batch_size")


def figures_of(run: Mapping[str, Any]) -> dict[str, Any]:
    """Return one line of the export, of a run as `history.stored_run` has it."""
    records = [record for record in run.get("records") or () if isinstance(record, dict)]
    attempt = run.get("attempt")
    own = [record for record in records if record.get("attempt") == attempt]
    if not any(record.get("peak_bytes") is not None for record in own):  # the last attempt died before a monitor wrote
        attempt = next((r["attempt"] for r in reversed(records) if r.get("peak_bytes") is not None), attempt)
        own = [record for record in records if record.get("attempt") == attempt]
    peaks = [_peak(record) for record in own if type(record.get("peak_bytes")) is int]
    plan = run.get("plan")
    plan = plan if isinstance(plan, dict) else {}
    names = ("why", "cause", "launcher", "job_id", "cluster", "recipe_digest")
    return {
        "schema": 1,
        "run_id": run["run_id"],
        "recipe": run.get("recipe"),
        "attempt": attempt,
        "state": run.get("state"),
        "began": run.get("started_at") or run.get("submitted_at"),
        "ended": run.get("ended_at"),
        **{name: run.get(name) for name in names},
        "settings": _settings(run, plan, records),
        "numbers": _numbers(run, plan, own, peaks),
        "peaks": peaks,
        "wandb": _tracked(str(run["run_id"]), run.get("tracking")),
    }


def _tracked(run_id: str, tracking: Any) -> dict[str, str] | None:
    """Return the run of Weights & Biases that the training itself writes, by the id that its nodes give it."""
    if not isinstance(tracking, dict):
        return None
    named = {name: str(tracking[name]) for name in ("project", "entity", "name") if tracking.get(name)}
    return {"id": re.sub(r"[^A-Za-z0-9_-]", "-", run_id), **named}


def _peak(record: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "kind": record.get("peak_kind"),
        "peak_bytes": record["peak_bytes"],
        "predicted_bytes": whole_number(record.get("predicted_bytes")),
        "stage": whole_number(record.get("pipeline_rank")),
        "rank": whole_number(record.get("global_rank")),
        "node": record.get("node"),
        "gpu_uuid": record.get("gpu_uuid"),
        "source": record.get("peak_source"),
    }


def _settings(
    run: Mapping[str, Any], plan: Mapping[str, Any], records: Iterable[Mapping[str, Any]]
) -> dict[str, str | int | float | bool]:
    """Return the recipe, what the first record tells of the job, and the planned layout: none of it changes later."""
    first = next(iter(records), {})
    recipe = first.get("recipe")
    model = recipe.get("model") if isinstance(recipe, dict) else first.get("model")  # where earlier records have it
    settings = {
        "recipe": run.get("recipe"),
        "overrides": " ".join(str(word) for word in run.get("overrides") or ()) or None,
        "model": model.get("name") if isinstance(model, dict) else None,
        **{name: first.get(name) for name in _FACTS},
    }
    layout = plan.get("layout")
    for name, value in (layout if isinstance(layout, dict) else {}).items():
        settings[f"layout.{name}"] = value
    return {
        name: value if isinstance(value, (int, float, bool)) else _text(value)
        for name, value in settings.items()
        if value is not None and value != [] and value != ""
    }


def _numbers(
    run: Mapping[str, Any], plan: Mapping[str, Any], own: Iterable[Mapping[str, Any]], peaks: list[dict[str, Any]]
) -> dict[str, float]:
    """Return the worst rank's peak of each stage and what was predicted for it, for the layout that the attempt ran;
    the plan's prediction if no record has one."""
    memory = plan.get("memory")
    memory = memory if isinstance(memory, dict) else {}
    numbers = _planned(memory)
    for peak in peaks:
        kind, stage = peak["kind"], "_unknown" if peak["stage"] is None else peak["stage"]
        where = kind if kind == "host" else f"{kind}/stage{stage}"
        name = f"peak_bytes/{where}"
        numbers[name] = max(peak["peak_bytes"], numbers.get(name, 0.0))
        if peak["predicted_bytes"] is not None:
            numbers[f"predicted_bytes/{where}"] = peak["predicted_bytes"]
    for name, value in (
        ("predicted_bytes/worst", run.get("predicted_bytes")),
        ("limit_bytes", memory.get("limit_bytes")),
        ("predicted_step_seconds", plan.get("step_seconds")),
        ("predicted_tokens_per_second_per_gpu", plan.get("tokens_per_second_per_gpu")),
    ):
        if isinstance(value, (int, float)):
            numbers[name] = value
    of_ranks = [peak["peak_bytes"] for peak in peaks if peak["kind"] in ("device", "resident")]
    if of_ranks:
        numbers["peak_bytes/worst"] = max(of_ranks)
    for record in own:
        observed = record.get("observed")
        for name in ("step_seconds", "tokens_per_second", "steps_run"):
            value = observed.get(name) if isinstance(observed, dict) else None
            value = record.get(name) if value is None else value
            if isinstance(value, (int, float)):
                numbers[name] = value
    return {name: float(value) for name, value in sorted(numbers.items())}


def _planned(memory: Mapping[str, Any]) -> dict[str, float]:
    """Return what the plan predicted for each stage, by kind of peak, and for a node's main memory."""
    own = str(memory.get("peak_kind") or "device")
    listed = memory.get("ranks")
    numbers: dict[str, float] = {
        f"predicted_bytes/{kind}/stage{rank.get('pipeline_rank')}": rank[name]
        for rank in (listed if isinstance(listed, list) else ())
        for kind, name in (("allocated", "allocated_bytes"), ("reserved", "reserved_bytes"), (own, "device_bytes"))
        if whole_number(rank.get(name)) is not None
    }
    if whole_number(memory.get("host_bytes_per_node")) is not None:
        numbers["predicted_bytes/host"] = memory["host_bytes_per_node"]
    return numbers


def _text(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)
