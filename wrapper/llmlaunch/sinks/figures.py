"""What sinks say of a run: words and numbers by name. Pure: a stored run in, plain values out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

__all__ = ["Figures", "Mark", "Peak", "Sink", "figures_of", "unlike"]


_FACTS = ("backend", "backend_version", "gpu", "world_size", "sequence_length", "global_batch_size")


@dataclass(frozen=True)
class Peak:
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
    """`words` say what became of the run, `settings` what was run (they never change), `numbers` what was predicted and
    measured; `peaks` are those of each rank, stage and node. Times are unix seconds."""

    run_id: str
    recipe: str
    attempt: str
    state: str
    began: float | None
    ended: float | None
    words: dict[str, str]
    settings: dict[str, str | int | float | bool]
    numbers: dict[str, float]
    peaks: tuple[Peak, ...]

    def of_kind(self, *kinds: str) -> list[Peak]:
        return [peak for peak in self.peaks if peak.kind in kinds]


def figures_of(run: Mapping[str, Any]) -> Figures:
    """`run` is as `store.stored_run` has it."""
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
        words=_words(run),
        settings=_settings(run, plan or {}, records),
        numbers=_numbers(run, plan or {}, own, peaks),
        peaks=peaks,
    )


def _peak(record: Mapping[str, Any]) -> Peak | None:
    if type(record.get("peak_bytes")) is not int:
        return None
    return Peak(
        kind=str(record.get("peak_kind")),
        peak_bytes=record["peak_bytes"],
        predicted_bytes=_whole(record.get("predicted_bytes")),
        stage=_whole(record.get("pipeline_rank")),
        rank=_whole(record.get("global_rank")),
        node=str(record.get("node") or ""),
        gpu_uuid=str(record.get("gpu_uuid") or ""),
        source=str(record.get("peak_source") or ""),
    )


def _words(run: Mapping[str, Any]) -> dict[str, str]:
    names = ("state", "why", "cause", "attempt", "launcher", "job_id", "cluster", "recipe_digest")
    return {name: str(run[name]) for name in names if run.get(name) is not None}


def _settings(
    run: Mapping[str, Any], plan: Mapping[str, Any], records: Iterable[Mapping[str, Any]]
) -> dict[str, str | int | float | bool]:
    """The recipe, what the first record says of the job, and the planned layout: none of it changes later."""
    first = next(iter(records), {})
    model = first.get("model")
    said = {
        "recipe": run.get("recipe"),
        "overrides": " ".join(str(word) for word in run.get("overrides") or ()) or None,
        "model": model.get("name") if isinstance(model, dict) else None,
        **{name: first.get(name) for name in _FACTS},
    }
    layout = plan.get("layout")
    for name, value in (layout if isinstance(layout, dict) else {}).items():
        said[f"layout.{name}"] = value
    return {
        name: value if isinstance(value, (int, float, bool)) else _text(value)
        for name, value in said.items()
        if _is_said(value)
    }


def _numbers(
    run: Mapping[str, Any], plan: Mapping[str, Any], own: Iterable[Mapping[str, Any]], peaks: Iterable[Peak]
) -> dict[str, float]:
    """Of each stage the worst rank's peak and what was predicted for it, of the layout that the attempt ran; what the
    plan says where no record does."""
    memory = plan.get("memory")
    memory = memory if isinstance(memory, dict) else {}
    found = _planned(memory)
    for peak in peaks:
        where = (
            peak.kind if peak.kind == "host" else f"{peak.kind}/stage{'_unknown' if peak.stage is None else peak.stage}"
        )
        _raise(found, f"peak_bytes/{where}", peak.peak_bytes)
        if peak.predicted_bytes is not None:
            found[f"predicted_bytes/{where}"] = peak.predicted_bytes
    for name, value in (
        ("predicted_bytes/worst", run.get("predicted_bytes")),
        ("limit_bytes", memory.get("limit_bytes")),
        ("predicted_step_seconds", plan.get("step_seconds")),
        ("predicted_tokens_per_second_per_gpu", plan.get("tokens_per_second_per_gpu")),
    ):
        if isinstance(value, (int, float)):
            found[name] = value
    worst = max((peak for peak in peaks if peak.kind in ("device", "resident")), key=_size, default=None)
    if worst is not None:
        found["peak_bytes/worst"] = worst.peak_bytes
    for record in own:
        observed = record.get("observed")
        for name in ("step_seconds", "tokens_per_second", "steps_run"):
            value = observed.get(name) if isinstance(observed, dict) else None
            value = record.get(name) if value is None else value
            if isinstance(value, (int, float)):
                found[name] = value
    return {name: float(value) for name, value in sorted(found.items())}


def _planned(memory: Mapping[str, Any]) -> dict[str, float]:
    """What the plan predicted for each stage, by kind of peak, and for a node's main memory."""
    own = str(memory.get("peak_kind") or "device")
    listed = memory.get("ranks")
    found: dict[str, float] = {
        f"predicted_bytes/{kind}/stage{rank.get('pipeline_rank')}": rank[name]
        for rank in (listed if isinstance(listed, list) else ())
        for kind, name in (("allocated", "allocated_bytes"), ("reserved", "reserved_bytes"), (own, "device_bytes"))
        if _whole(rank.get(name)) is not None
    }
    if _whole(memory.get("host_bytes_per_node")) is not None:
        found["predicted_bytes/host"] = memory["host_bytes_per_node"]
    return found


def _size(peak: Peak) -> int:
    return peak.peak_bytes


def _raise(found: dict[str, float], name: str, value: float) -> None:
    found[name] = max(value, found.get(name, value))


def _is_said(value: object) -> bool:
    return value is not None and value != [] and value != ""


def _text(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def _whole(value: object) -> int | None:
    return value if type(value) is int else None


@dataclass(frozen=True)
class Mark:
    """A run that the store holds; `mark` changes with it."""

    run_id: str
    mark: str


class Sink(Protocol):
    """May raise anything: then the runs not yet sent are sent the next time."""

    def due(self, marks: Sequence[Mark]) -> list[str]:
        """The runs (the newest first in `marks`) that are to be sent: those that are not there, or not as they are."""
        ...

    def send(self, run: Figures, mark: str) -> None:
        """Write one run, over what is there of it."""
        ...

    def finish(self) -> None:
        """After the last run."""
        ...


def unlike(marks: Sequence[Mark], held: Mapping[str, str]) -> list[str]:
    """The runs whose mark is not the one that is `held` by their id."""
    return [one.run_id for one in marks if held.get(one.run_id) != one.mark]
