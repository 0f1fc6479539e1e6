"""What the runs of a qualification showed, read from the store: memory and step time beside what was predicted."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmlaunch.app.evidence import Notify, farthest, newest_qualification
from llmlaunch.errors import UserError
from llmlaunch.frameworks.trials import NUMBER_OF_TRIALS
from llmlaunch.layout import RECOMPUTE_NAMES, Layout
from llmlaunch.planner.qualification import DIES, expectation_of
from llmlaunch.store.location import store_exists

if TYPE_CHECKING:
    from llmlaunch.recipe.types import Recipe
    from llmlaunch.store.database import Store
    from llmlaunch.store.reading import NamedRun

__all__ = ["LayoutResult", "QualificationResult", "qualification_result"]

OUT_OF_MEMORY = ("oom", "host_oom")
RESIDENT = "resident"
KINDS = ("device", RESIDENT, "reserved", "allocated")


@dataclass(frozen=True)
class LayoutResult:
    """One of the six. `peaks` maps a kind of peak to (predicted, measured) bytes of the rank that used most; predicted
    is None where run.json does not say. `outcome` is "as predicted", "died", "survived", "failed", "cancelled", or the
    state of a run that has not ended. `overfull`: nothing ended it, but it used more than a CPU process may."""

    number: int
    run_id: str
    directory: str
    layout: str
    num_layers: str
    sequence_length: str
    expectation: str
    outcome: str
    cause: str | None
    overfull: bool
    peak_kind: str
    peaks: Mapping[str, tuple[int | None, int]]
    predicted_bytes: int
    limit_bytes: int
    stated_risk: float | None
    memory_bytes: int
    predicted_step_seconds: float
    step_seconds: float | None

    @property
    def ended(self) -> bool:
        return self.outcome not in ("submitted", "pending", "running", "unknown")

    @property
    def error(self) -> float | None:
        """Return predicted / measured - 1 of the peak; None where the peak is not known, or is not what was needed,
        because the run was ended before."""
        lived = self.outcome in ("as predicted", "survived", "died") and self.cause is None
        measured = self.peaks.get(self.peak_kind, (None, 0))[1]
        return self.predicted_bytes / measured - 1 if lived and measured else None

    @property
    def step_error(self) -> float | None:
        """Return predicted / measured - 1 of the seconds of a step."""
        return self.predicted_step_seconds / self.step_seconds - 1 if self.step_seconds else None

    def to_json(self) -> dict[str, Any]:
        peaks = {kind: {"predicted_bytes": each[0], "measured_bytes": each[1]} for kind, each in self.peaks.items()}
        return asdict(self) | {"peaks": peaks, "error": self.error, "step_error": self.step_error}


@dataclass(frozen=True)
class QualificationResult:
    """All that is known of a qualification. `calibration` is what `calibrate --dry-run` says of backend and
    accelerator; None where it has nothing to learn from."""

    cluster: str
    backend: str
    model: str
    accelerator: str
    directory: str
    changed_at: float
    layouts: tuple[LayoutResult, ...]
    calibration: Mapping[str, Any] | None

    @property
    def complete(self) -> bool:
        return len(self.layouts) == NUMBER_OF_TRIALS and all(each.ended for each in self.layouts)

    @property
    def as_predicted(self) -> bool:
        """Whether every layout that has ended ended as it was predicted to."""
        return all(each.outcome == "as predicted" for each in self.layouts if each.ended)

    def to_json(self) -> dict[str, Any]:
        """Return what `llmlaunch qualify --json` prints."""
        return {
            **{name: getattr(self, name) for name in ("cluster", "backend", "model", "accelerator", "directory")},
            "changed_at": self.changed_at,
            "complete": self.complete,
            "as_predicted": self.as_predicted,
            "worst_error": farthest([each.error for each in self.layouts]),
            "worst_step_error": farthest([each.step_error for each in self.layouts]),
            "layouts": [each.to_json() for each in self.layouts],
            "calibration": self.calibration,
        }


def qualification_result(
    recipe: Recipe, directory: Path | None, run_dirs: Sequence[Path], notify: Notify
) -> QualificationResult | None:
    """Return what the qualification in `directory`, or the last one of the recipe's cluster and backend, showed. The
    runs in `run_dirs` and all finished ones are collected first. None where the store holds none."""
    if not run_dirs and not store_exists():
        return None
    from llmlaunch.store.collect import collect, open_collected

    with open_collected(notify) as store:
        collect(store, run_dirs)
        runs = newest_qualification(recipe.cluster.name, recipe.backend.name, directory)
        results = [_layout_result(store, run) for run in runs]
        layouts = [result for result in results if result is not None]
        calibration = _calibration(store, recipe) if layouts else None
    if not layouts:
        return None
    return QualificationResult(
        cluster=recipe.cluster.name,
        backend=recipe.backend.name,
        model=recipe.model.name,
        accelerator=recipe.cluster.accelerator.name,
        directory=str(Path(runs[0].directory).parent),
        changed_at=max(run.changed_at for run in runs),
        layouts=tuple(layouts),
        calibration=calibration,
    )


def _layout_result(store: Store, run: NamedRun) -> LayoutResult | None:
    """Return what the store holds of one run; None where its plan could not be read when it was collected."""
    from llmlaunch.store.history import stored_run

    whole = stored_run(store, run.run_id)
    if whole is None or whole["plan"] is None:
        return None
    plan, records = whole["plan"], whole["records"]
    memory = plan["memory"]
    predicted = max(rank["device_bytes"] for rank in memory["ranks"])
    expectation = expectation_of(predicted, memory["limit_bytes"], memory["memory_bytes"])
    peaks = _peaks(records)
    resident = peaks.get(RESIDENT, (None, 0))[1]
    overfull = run.cause not in OUT_OF_MEMORY and resident > memory["memory_bytes"]
    overrides = dict(word.partition("=")[::2] for word in whole["overrides"])
    return LayoutResult(
        number=int(run.name.rpartition("-")[2]),
        run_id=run.run_id,
        directory=run.directory,
        layout=_described(plan["layout"]),
        num_layers=overrides.get("model.num_layers", "-"),
        sequence_length=overrides.get("training.sequence_length", "-"),
        expectation=expectation,
        outcome=_outcome(run.state, expectation, run.cause in OUT_OF_MEMORY or overfull),
        cause=run.cause,
        overfull=overfull,
        peak_kind=str(run.peak_kind),
        peaks=peaks,
        predicted_bytes=run.predicted_bytes or predicted,
        limit_bytes=memory["limit_bytes"],
        stated_risk=memory.get("stated_risk"),
        memory_bytes=memory["memory_bytes"],
        predicted_step_seconds=plan["step_seconds"],
        step_seconds=next((record["step_seconds"] for record in records if record.get("step_seconds")), None),
    )


def _outcome(state: str, expectation: str, died: bool) -> str:
    if state not in ("succeeded", "failed"):
        return state
    if died:
        return "as predicted" if expectation == DIES else "died"
    if state == "failed":
        return "failed"
    return "survived" if expectation == DIES else "as predicted"


def _described(layout: Mapping[str, Any]) -> str:
    values = {**layout, "recompute": RECOMPUTE_NAMES.index(layout["recompute"]), "layers_by_stage": ()}
    return Layout(**values | {"sequence_parallel": int(layout["sequence_parallel"])}).describe()


def _peaks(records: Sequence[Mapping[str, Any]]) -> dict[str, tuple[int | None, int]]:
    """Return by kind the predicted and measured bytes of the record with the highest peak."""
    peaks: dict[str, tuple[int | None, int]] = {}
    for record in records:
        kind, measured = record.get("peak_kind"), record.get("peak_bytes")
        if kind in KINDS and isinstance(measured, int) and measured > peaks.get(str(kind), (None, 0))[1]:
            peaks[str(kind)] = record.get("predicted_bytes"), measured
    return peaks


def _calibration(store: Store, recipe: Recipe) -> Mapping[str, Any] | None:
    """Return what `calibrate` would learn now, without keeping it, and how many more runs it needs."""
    from llmlaunch.calibration.learning import FEWEST_RUNS
    from llmlaunch.store.calibrations import calibrate

    if recipe.cluster.accelerator.kind == "cpu":
        return None
    try:
        answers = calibrate(
            store, time.time(), recipe.backend.name, recipe.cluster.accelerator.name, dry_run=True
        ).answers
    except UserError:  # none of the runs could be priced, or none has a peak yet
        return None
    (answer,) = answers
    lived = answer.result.runs - answer.result.died
    return answer.as_json() | {"runs_needed": max(FEWEST_RUNS - lived, 0)}
