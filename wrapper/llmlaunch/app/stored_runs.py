"""Runs and measurements of the store, as `llmlaunch runs` and `llmlaunch measurements list` show them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmlaunch.app.messages import Notify, ignore
from llmlaunch.app.run_lookup import note_ends
from llmlaunch.errors import UserError
from llmlaunch.launchers.base import PHASES
from llmlaunch.rundir.values import counted
from llmlaunch.store.location import existing_store, stored_json

if TYPE_CHECKING:
    from llmlaunch.calibration.records import MeasurementRecord
    from llmlaunch.launchers.run_status import RunStatus
    from llmlaunch.rundir.run import RunHistory
    from llmlaunch.store.runs import Run


@dataclass(frozen=True)
class RunState:
    """One run as things are now. `run` is what the store holds of it, `live` what its launcher says while it goes on,
    else None, and `progress` its attempts and steps, as its files have them."""

    run: Run
    live: RunStatus | None
    progress: RunHistory

    @property
    def run_id(self) -> str:
        return self.run.run_id

    @property
    def directory(self) -> Path:
        return self.run.directory

    @property
    def phase(self) -> str:
        """Return one of PHASES: "pending", "running", "succeeded", ... ; "unknown" where no more is known than that
        the run was submitted."""
        return _phase(self.run, self.live)

    @property
    def predicted_bytes(self) -> int | None:
        """Return the predicted peak of the worst rank."""
        return self.run.predicted_bytes

    @property
    def measured_bytes(self) -> int | None:
        """Return the measured peak of the worst rank; None before the run was collected."""
        return self.run.measured_bytes

    @property
    def verdict(self) -> str | None:
        """Return the verdict with which the run was planned, one of `verdicts.VERDICTS`; None where its
        files do not say."""
        return self.progress.verdict

    @property
    def stated_risk(self) -> float | None:
        """Return the stated risk of the plan; None where no measured run could tell, and where its files do not say."""
        return self.progress.stated_risk

    @property
    def fujii_verdict(self) -> str | None:
        """Return what Fujii et al.'s 80 % rule would have said of the plan, "safe" or "unsafe"; None of a run on CPUs,
        and where its files do not say."""
        from llmlaunch.planner.plan import fujii_verdict

        memory_bytes, predicted = self.progress.memory_bytes, self.predicted_bytes
        if self.run.peak_kind != "device" or memory_bytes is None or predicted is None:
            return None
        return fujii_verdict(predicted, memory_bytes)

    def to_json(self) -> dict[str, Any]:
        """Return one entry of `runs` in `llmlaunch runs --json`."""
        attempts = zip(self.progress.attempts, self.progress.layouts, strict=True)
        return {
            **self.run.as_json(),
            "verdict": self.verdict,
            "stated_risk": self.stated_risk,
            "fujii_verdict": self.fujii_verdict,
            "phase": self.phase,
            "live": None if self.live is None else self.live.as_json(),
            "attempts": [{"attempt": name, "layout": layout} for name, layout in attempts],
            "step": self.progress.step,
            "steps": self.progress.steps,
            "goodput": None if self.progress.goodput is None else self.progress.goodput.as_json(),
        }


def runs(
    states: Sequence[str] = (),
    recipe: str | None = None,
    since: float | None = None,
    cluster: str | None = None,
    launcher: str | None = None,
    limit: int | None = None,
    notify: Notify = ignore,
) -> list[RunState]:
    """Return the runs in the store, the newest first. Finished runs are collected first, and SLURM is asked once about
    all that go on.

    `states` are of PHASES, `recipe` is a recipe's name, `since` unix seconds of the submission, `launcher` "slurm" or
    "local"; `limit` keeps the newest. `notify` is called with each warning. Raises UserError where the store cannot be
    read.
    """
    if existing_store() is None:
        return []
    from llmlaunch.rundir.run import run_history
    from llmlaunch.store.collect import open_collected
    from llmlaunch.store.runs import ONGOING, RunFilter, list_runs

    wanted = RunFilter(tuple(states), recipe, since, cluster, launcher, limit)
    query = wanted
    if wanted.states:  # a run that goes on may be in any state by now
        query = replace(wanted, states=(*wanted.states, *ONGOING), limit=None)
    with open_collected(notify) as store:
        stored = list_runs(store, query)
    live = _live([run.directory for run in stored if run.state in ONGOING], notify)
    listed = [run for run in stored if not states or _phase(run, live.get(run.directory)) in states]
    return [RunState(run, live.get(run.directory), run_history(run.directory)) for run in listed[:limit]]


def figures(listed: Sequence[RunState], notify: Notify = ignore) -> list[dict[str, Any]]:
    """Return the figures of runs that `runs` has listed, for other tools (docs/export.md). `notify` is called with each
    warning. Raises UserError where the store cannot be read."""
    if not listed:
        return []
    from llmlaunch.store.database import open_store
    from llmlaunch.store.history import stored_run
    from llmlaunch.store.run_figures import figures_of

    with open_store() as store:
        for warning in store.warnings:
            notify(f"warning: {warning}")
        stored = [(entry.phase, stored_run(store, entry.run_id)) for entry in listed]
    return [figures_of({**run, "state": phase}) for phase, run in stored if run is not None]


def _phase(run: Run, live: RunStatus | None) -> str:
    phase = run.state if live is None else live.state.phase
    return phase if phase in PHASES else "unknown"


def _live(directories: Sequence[Path], notify: Notify) -> Mapping[Path, RunStatus]:
    """Return what the launchers say of the runs in these directories; a scheduler that does not answer is a warning."""
    from llmlaunch.launchers.run_files import read_submission
    from llmlaunch.launchers.run_status import read_statuses

    submissions = []
    for directory in directories:
        try:
            submission = read_submission(directory)
        except UserError as damaged:
            notify(f"warning: {damaged}")
            continue
        submissions += [submission] if submission else []
    try:
        looks = read_statuses(submissions, notify, briefly=True) if submissions else []
    except UserError as failure:
        notify(f"warning: what goes on is shown as it was last known: {failure}")
        return {}
    note_ends(((look.submission, look.state) for look in looks), notify)
    return {look.submission.run_dir: look for look in looks}


@dataclass(frozen=True)
class Measurement:
    """One measurement record of the store, in the format of docs/store.md. `text` is its JSON as it was written, in
    which numbers stay as they were measured."""

    text: str

    @cached_property
    def record(self) -> MeasurementRecord:
        """The record's values by key."""
        record: MeasurementRecord = stored_json(self.text)
        return record

    @property
    def id(self) -> str:
        return str(self.record["id"])

    @property
    def peak_kind(self) -> str:
        """Return which peak it is: "allocated", "reserved", "device", "resident", "host", "oom" or "fits"."""
        return str(self.record["peak_kind"])

    @property
    def peak_bytes(self) -> int | None:
        """Return the measured peak; None of a run known only to have fitted or run out of memory."""
        return self.record.get("peak_bytes")

    @property
    def predicted_bytes(self) -> int | None:
        """Return what was predicted of this peak before the run."""
        return self.record.get("predicted_bytes")

    @property
    def pipeline_rank(self) -> int | None:
        return self.record.get("pipeline_rank")

    @property
    def run_id(self) -> str | None:
        """Return the run it was measured in; None of an imported record."""
        return self.record.get("run_id")

    def to_json(self) -> dict[str, Any]:
        """Return one entry of `measurements` in `llmlaunch measurements list --json`."""
        return dict(self.record)


def measurements(
    run: str | None = None,
    kind: str | None = None,
    gpu: str | None = None,
    backend: str | None = None,
    family: str | None = None,
    notify: Notify = ignore,
) -> list[Measurement]:
    """Return the measurement records in the store, in the order they came in. Finished runs are collected first.

    `run` is any name of a run, `kind` a kind of peak such as "device"; None narrows nothing. Raises UserError where the
    store cannot be read or holds no such run.
    """
    if existing_store() is None:
        return []
    from llmlaunch.store.collect import open_collected
    from llmlaunch.store.measurements import Filters, contents
    from llmlaunch.store.runs import find_run

    with open_collected(notify) as store:
        run_id = None if run is None else find_run(store, run, notify).run_id
        filters = Filters(family=family, backend=backend, gpu=gpu, kind=kind, run=run_id)
        return [Measurement(text) for text in contents(store, filters)]


def whole_records(notify: Notify = ignore) -> list[MeasurementRecord]:
    """Return the measurement records in the store that have every field a record must have, in the order they came in.
    Finished runs are collected first, and how many objects are left out is one warning.

    Raises UserError where the store cannot be read.
    """
    from llmlaunch.calibration.records import problem

    records = [stored_json(measurement.text) for measurement in measurements(notify=notify)]
    whole = [record for record in records if problem(record) is None]
    if len(whole) < len(records):
        count = counted(len(records) - len(whole), "object")
        notify(f"warning: {count} of the store left out: not whole measurement records")
    return whole
