"""What sinks show of a run, as texts and numbers by name, and what every sink does. Pure: a stored run in, plain values
out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from llmlaunch.rundir.values import whole_number

_FACTS = ("backend", "backend_version", "gpu", "world_size", "sequence_length", "global_batch_size")


@dataclass(frozen=True)
class MeasuredPeak:
    """One measured peak of the newest attempt; `kind` is device, resident, reserved, allocated or host."""

    kind: str
    peak_bytes: int
    predicted_bytes: int | None = None
    stage: int | None = None
    rank: int | None = None
    node: str = ""
    gpu_uuid: str = ""
    source: str = ""


@dataclass(frozen=True)
class Figures:
    """`texts` tell what became of the run, `settings` what was run (never changed), `numbers` what was predicted and
    measured; `peaks` are those of each rank, stage and node. Times are unix seconds. `tracked_as` are project, entity
    and name of the W&B run that the training itself writes, None where it writes none."""

    run_id: str
    recipe: str
    attempt: str
    state: str
    began: float | None
    ended: float | None
    texts: dict[str, str]
    settings: dict[str, str | int | float | bool]
    numbers: dict[str, float]
    peaks: tuple[MeasuredPeak, ...]
    tracked_as: Mapping[str, str] | None = None

    def of_kind(self, *kinds: str) -> list[MeasuredPeak]:
        return [peak for peak in self.peaks if peak.kind in kinds]


def figures_of(run: Mapping[str, Any]) -> Figures:
    """Return the figures of a run as `store.history.stored_run` has it."""
    records = [record for record in run.get("records") or () if isinstance(record, dict)]
    newest = str(run.get("attempt") or "")
    own = [record for record in records if record.get("attempt") == newest]
    if not any(record.get("peak_bytes") is not None for record in own):  # the last attempt died before a monitor wrote
        newest = next((str(r["attempt"]) for r in reversed(records) if r.get("peak_bytes") is not None), newest)
        own = [record for record in records if record.get("attempt") == newest]
    peaks = tuple(peak for peak in map(_peak, own) if peak is not None)
    plan = run.get("plan") if isinstance(run.get("plan"), dict) else {}
    return Figures(
        run_id=str(run["run_id"]),
        recipe=str(run.get("recipe") or ""),
        attempt=newest,
        state=str(run.get("state")),
        began=run.get("started_at") or run.get("submitted_at"),
        ended=run.get("ended_at"),
        texts=_texts(run),
        settings=_settings(run, plan or {}, records),
        numbers=_numbers(run, plan or {}, own, peaks),
        peaks=peaks,
        tracked_as=_tracked(run.get("tracking")),
    )


def _tracked(tracking: Any) -> dict[str, str] | None:
    if not isinstance(tracking, dict):
        return None
    return {name: str(tracking[name]) for name in ("project", "entity", "name") if tracking.get(name)}


def _peak(record: Mapping[str, Any]) -> MeasuredPeak | None:
    if type(record.get("peak_bytes")) is not int:
        return None
    return MeasuredPeak(
        kind=str(record.get("peak_kind")),
        peak_bytes=record["peak_bytes"],
        predicted_bytes=whole_number(record.get("predicted_bytes")),
        stage=whole_number(record.get("pipeline_rank")),
        rank=whole_number(record.get("global_rank")),
        node=str(record.get("node") or ""),
        gpu_uuid=str(record.get("gpu_uuid") or ""),
        source=str(record.get("peak_source") or ""),
    )


def _texts(run: Mapping[str, Any]) -> dict[str, str]:
    names = ("state", "why", "cause", "attempt", "launcher", "job_id", "cluster", "recipe_digest")
    return {name: str(run[name]) for name in names if run.get(name) is not None}


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
    run: Mapping[str, Any], plan: Mapping[str, Any], own: Iterable[Mapping[str, Any]], peaks: Iterable[MeasuredPeak]
) -> dict[str, float]:
    """Return the worst rank's peak of each stage and what was predicted for it, for the layout that the attempt ran;
    the plan's prediction if no record has one."""
    memory = plan.get("memory")
    memory = memory if isinstance(memory, dict) else {}
    numbers = _planned(memory)
    for peak in peaks:
        where = (
            peak.kind if peak.kind == "host" else f"{peak.kind}/stage{'_unknown' if peak.stage is None else peak.stage}"
        )
        _raise(numbers, f"peak_bytes/{where}", peak.peak_bytes)
        if peak.predicted_bytes is not None:
            numbers[f"predicted_bytes/{where}"] = peak.predicted_bytes
    for name, value in (
        ("predicted_bytes/worst", run.get("predicted_bytes")),
        ("limit_bytes", memory.get("limit_bytes")),
        ("predicted_step_seconds", plan.get("step_seconds")),
        ("predicted_tokens_per_second_per_gpu", plan.get("tokens_per_second_per_gpu")),
    ):
        if isinstance(value, (int, float)):
            numbers[name] = value
    worst = max(
        (peak for peak in peaks if peak.kind in ("device", "resident")), key=lambda peak: peak.peak_bytes, default=None
    )
    if worst is not None:
        numbers["peak_bytes/worst"] = worst.peak_bytes
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


def _raise(numbers: dict[str, float], name: str, value: float) -> None:
    numbers[name] = max(value, numbers.get(name, value))


def _text(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


class Sink(ABC):
    """A place where runs are shown. A method may raise anything: then the runs not yet sent are sent the next time."""

    @abstractmethod
    def due(self, marks: Mapping[str, str]) -> list[str]:
        """Return the runs to send: those that are not there, or not as they are now. `marks` has a text for each run,
        the newest first, that changes with the run."""

    @abstractmethod
    def send(self, run: Figures, mark: str) -> None:
        """Write one run, over what is there of it."""

    def finish(self) -> None:  # noqa: B027 - most have nothing to do
        """Clean up after the last run."""


def changed_runs(marks: Mapping[str, str], sent: Mapping[str, str]) -> list[str]:
    """Return the runs whose mark is not the one in `sent`."""
    return [run_id for run_id, mark in marks.items() if sent.get(run_id) != mark]
