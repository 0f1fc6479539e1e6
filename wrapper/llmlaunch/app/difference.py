"""What differs between two recipes, plans or runs: what was asked for, what was chosen and rendered, what that is
predicted to cost, and what runs have measured."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmlaunch import __version__
from llmlaunch.app.messages import Notify, ignore
from llmlaunch.app.planned_run import plan
from llmlaunch.app.run_lookup import directory_of
from llmlaunch.documents.nested import leaves
from llmlaunch.documents.secrets import is_secret_variable, secret_in
from llmlaunch.documents.yaml_strict import read_document
from llmlaunch.errors import UserError
from llmlaunch.recipe.overrides import apply_overrides
from llmlaunch.recipe.written import written_document
from llmlaunch.rundir import file_names
from llmlaunch.rundir.attempt import Attempt
from llmlaunch.rundir.files import object_in, read_object
from llmlaunch.rundir.memory_files import attempt_summary
from llmlaunch.rundir.run import RunDirectoryError, read_run
from llmlaunch.techniques import CHOOSABLE, Techniques

if TYPE_CHECKING:
    from llmlaunch.app.existing_job import ExistingJob
    from llmlaunch.app.planned_run import PlannedRun


HIDDEN = "(not shown)"
LOCK_KEYS = frozenset({"llmlaunch", "job", "layout", "predicted"})

Leaves = Mapping[str, Any]


@dataclass(frozen=True)
class Described:
    """One side of a comparison. `kind` is "recipe", "plan", "lock" or "run". The mappings have one entry a leaf, by its
    dotted name; None is what such a side does not tell. `terms` are bytes of the worst pipeline rank, and seconds of a
    step; `totals` and `measured` are figures of the whole."""

    name: str
    kind: str
    recipe: Leaves | None = None
    layout: Leaves | None = None
    techniques: Leaves | None = None
    arguments: Leaves | None = None
    environment: Leaves = field(default_factory=dict)
    memory_terms: Leaves | None = None
    time_terms: Leaves | None = None
    totals: Leaves = field(default_factory=dict)
    measured: Leaves = field(default_factory=dict)
    unplanned: str = ""  # why a recipe has no plan
    changed_by_runs: str = ""  # the sentence on the measured run that changed a plan


SECTIONS = ("recipe", "layout", "techniques", "arguments", "environment", "memory_terms", "time_terms", "totals")


def difference(first: Described, second: Described) -> dict[str, Any]:
    """Return what `diff --json` prints. A section holds the entries that differ, and is null where a side does not tell
    it. What was measured decides nothing: two runs never measure the same."""
    sections = {name: _changes(first, second, name) for name in SECTIONS}
    return {
        "a": _side(first),
        "b": _side(second),
        "differ": any(sections.values()),
        **sections,
        "measured": _changes(first, second, "measured", of_either=True),
    }


def _side(described: Described) -> dict[str, Any]:
    unplanned, changed = described.unplanned or None, described.changed_by_runs or None
    return {"name": described.name, "kind": described.kind, "unplanned": unplanned, "changed_by_runs": changed}


def _changes(first: Described, second: Described, section: str, of_either: bool = False) -> list[dict[str, Any]] | None:
    before, after = getattr(first, section), getattr(second, section)
    if before is None or after is None:
        return None
    names = dict.fromkeys((*before, *after))
    if section in ("environment", "totals"):  # of these each kind of side tells some
        names = {name: None for name in names if name in before and name in after}
    if section == "techniques" and "lock" in (first.kind, second.kind):
        names = {name: None for name in names if name.partition(".")[0] in CHOOSABLE}
    changed = (name for name in names if of_either or before.get(name) != after.get(name))
    return [{"name": name, "a": _shown(name, before.get(name)), "b": _shown(name, after.get(name))} for name in changed]


def _shown(name: str, value: Any) -> Any:
    """Return a value as it may be shown: without what is or may be a secret."""
    text = str(value)
    own_variable = name.startswith(("environment.", "cluster.environment.", "slurm.export"))
    secret = value is not None and (
        own_variable or is_secret_variable(name.rpartition(" ")[2].lstrip("-"), text) or secret_in(text) is not None
    )
    return HIDDEN if secret else value


def describe(name: str, notify: Notify = ignore, job: ExistingJob | None = None) -> Described:
    """Read one side: a recipe, a lock, a file of what `check --json` printed, or a run by its directory or id. `job` is
    that of a script, which is a recipe here.

    Raises:
        UserError: there is no such thing, or it cannot be read.
    """
    if job is not None:
        document = written_document(job.run.recipe)
        return _described_plan(name, dict(leaves({} if document is None else document.value)), job.run)
    path = Path(name)
    try:
        if not os.path.isfile(path):  # noqa: PTH113 (pathlib raises for names that are too long)
            return _described_run(directory_of(name, notify))
        if path.suffix == ".json":
            return Described(name, "plan", **_of_plan(_json(path)))
    except RunDirectoryError as error:
        raise UserError(str(error)) from None
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise UserError(f"{name}: a file of it is damaged: {type(error).__name__}: {error}"[:400]) from None
    if set(read_document(path).value) >= LOCK_KEYS:
        return _described_lock(name, path)
    return _described_recipe(name, notify)


def _json(path: Path) -> Mapping[str, Any]:
    """Return a plan in the form of `check --json`. Raises UserError for a file that holds none."""
    try:
        value = object_in(path)
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from None
    if not isinstance(value.get("layout"), dict) or not isinstance(value.get("memory"), dict):
        raise UserError(f"{path}: is no plan; name a plan.json, or what check --json printed")
    return value


def _described_recipe(name: str, notify: Notify) -> Described:
    """A recipe as `check` plans it, kept to the lock beside it. One without a legal layout has its keys alone."""
    from llmlaunch.recipe.load import load_recipe

    document = written_document(load_recipe(name))
    keys = dict(leaves({} if document is None else document.value))
    try:
        run = plan(name, notify=notify)
    except UserError as mistake:
        return Described(name, "recipe", recipe=keys, unplanned=str(mistake))
    return _described_plan(name, keys, run)


def _described_plan(name: str, keys: Leaves, run: PlannedRun) -> Described:
    versions = {"llmlaunch": __version__, run.recipe.backend.name: run.recipe.backend.runs_version}
    return Described(
        name,
        "recipe",
        recipe=keys,
        arguments=_rendered_arguments(run),
        environment=versions,
        **_of_plan(run.json),
    )


def _rendered_arguments(run: PlannedRun) -> Leaves | None:
    """Return the arguments of a plan; None where nothing can be rendered of it."""
    from llmlaunch.rendering.arguments_json import arguments_json

    try:
        return _argument_leaves(arguments_json(run.recipe, run.plan, run.rendered))
    except UserError:
        return None


def _argument_leaves(arguments: Mapping[str, Any]) -> dict[str, Any]:
    program = " ".join(arguments["program"])
    return {"program": program} | {f"{entry['file']} {entry['name']}": entry["value"] for entry in arguments["entries"]}


def _described_lock(name: str, path: Path) -> Described:
    from llmlaunch.planner.lock import read_lock

    lock = read_lock(path)
    return Described(
        name,
        "lock",
        layout=dict(leaves(lock.layout)),
        techniques=dict(leaves(Techniques.from_json(lock.techniques).as_json())),
        environment={"llmlaunch": lock.llmlaunch},
        totals={"device_bytes": lock.predicted.device_bytes, "step_seconds": lock.predicted.step_seconds},
    )


def _described_run(directory: Path) -> Described:
    """A run as it was rendered, with what its newest attempt measured so far."""
    from llmlaunch.rendering.arguments_json import read_arguments

    files = read_run(directory)
    written = (read_object(directory / file_names.RUN) or {}).get("overrides") or ()  # of which none may be dropped
    document = apply_overrides(read_document(directory / file_names.RECIPE), written)
    arguments = read_arguments(directory) if (directory / file_names.ARGUMENTS).exists() else None
    content = _json(directory / file_names.PLAN)
    code = read_object(directory / "code.json") or {}
    measurement = files.run.get("measurement") or {}
    environment: dict[str, Any] = {
        "llmlaunch": code.get("llmlaunch_version"),
        str(files.run.get("backend")): measurement.get("backend_version"),
    }
    environment |= {f"code.{key}": value for key, value in leaves(code.get("git") or {})}
    environment |= {f"container.{key}": value for key, value in leaves(code.get("container") or {})}
    return Described(
        str(directory),
        "run",
        recipe=dict(leaves(document.value)),
        arguments=None if arguments is None else _argument_leaves(arguments),
        environment=environment,
        measured=_measured(directory, files.attempts[-1]) if files.attempts else {},
        **_of_plan(content),
    )


def _measured(directory: Path, attempt: Attempt) -> dict[str, Any]:
    """Return what an attempt measured, and under which layout where that was not the planned one."""
    summary = attempt_summary(directory, attempt.name)
    peaks = [rank.peak_bytes for rank in summary.ranks if rank.peak_bytes is not None]
    figures = {"peak_bytes": max(peaks, default=None), "step_seconds": summary.step_seconds, "layout": attempt.layout}
    return {name: value for name, value in figures.items() if value}


def _of_plan(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `Described` that a plan in the form of `check --json` fills."""
    ranks = content["memory"]["ranks"]
    worst = max(ranks, key=lambda rank: rank["device_bytes"])
    techniques = {**content.get("techniques", {}), "gradient_dtype": content.get("gradient_dtype")}
    job = content.get("job") or {}
    totals = {
        "verdict": content.get("verdict"),
        "device_bytes": worst["device_bytes"],
        "host_bytes_per_node": content["memory"].get("host_bytes_per_node"),
        "step_seconds": content.get("step_seconds"),
        "seconds": job.get("seconds"),
        "gpu_hours": job.get("gpu_hours"),
    }
    return {
        "changed_by_runs": str((content.get("changed_by_runs") or {}).get("sentence") or ""),
        "layout": dict(leaves(content["layout"])),
        "techniques": dict(leaves(techniques)),
        "memory_terms": dict(worst["terms"]),
        "time_terms": dict(content.get("step_terms") or {}),
        "totals": totals,
    }
