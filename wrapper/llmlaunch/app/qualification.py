"""Six short runs that qualify a cluster: planned, written into one directory, and submitted, each once.

The directory is a sweep's, so it says itself which runs belong to it. A command that is repeated goes on where it was
left: what was submitted is not submitted again.
"""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmlaunch.app.evidence import Notify, lessons_of, qualification_name
from llmlaunch.app.planned_run import PlannedRun, plan_loaded
from llmlaunch.app.submission import default_directory, idle_trainer_bytes, refuse_elsewhere, resubmit
from llmlaunch.assets import asset
from llmlaunch.documents.yaml_strict import read_document
from llmlaunch.errors import UserError
from llmlaunch.frameworks.registry import backend_for, framework_named
from llmlaunch.planner.qualification import ChosenTrial, choose_trials, kept_techniques
from llmlaunch.planner.setting import Setting, setting_of
from llmlaunch.progress import counting
from llmlaunch.recipe.frameworks import DEFAULT_FRAMEWORK, FRAMEWORKS
from llmlaunch.recipe.load import load_recipe
from llmlaunch.recipe.overrides import apply_overrides
from llmlaunch.recipe.types import Recipe
from llmlaunch.rundir import file_names
from llmlaunch.rundir.files import read_object
from llmlaunch.rundir.values import is_path_component
from llmlaunch.units import GIB

if TYPE_CHECKING:
    from llmlaunch.launchers.base import Submission
    from llmlaunch.launchers.choose import LauncherChoice

__all__ = [
    "QualificationRequest",
    "QualifyingRun",
    "base_recipe",
    "has_ended",
    "place_of_qualification",
    "plan_qualification",
    "run_directories",
    "submit_unless_submitted",
    "write_qualification",
]

HOW = "qualification"
LATER = re.compile(r"-\d{8}-\d{6}-[0-9a-f]{4}")  # what `default_directory` puts behind a name
CPU_RECIPE = "quickstart"


@dataclass(frozen=True)
class QualificationRequest:
    """What is to be qualified: a recipe with overrides that says model, backend, cluster and site."""

    recipe: str
    overrides: tuple[str, ...]


@dataclass(frozen=True)
class QualifyingRun:
    """One of the six: how it was sized, and its plan, which may be unsafe."""

    trial: ChosenTrial
    run: PlannedRun

    def to_json(self) -> dict[str, Any]:
        """Return an entry of `layouts` in `qualify --dry-run --json`."""
        plan = self.run.plan
        return {
            "name": self.run.recipe.name,
            "layout": plan.chosen.describe(),
            "num_layers": self.trial.num_layers,
            "sequence_length": self.trial.sequence_length,
            "expectation": self.trial.trial.expectation,
            "predicted_bytes": plan.estimate.worst.device_bytes,
            "stated_risk": plan.stated_risk,
            "peak_kind": plan.estimate.peak_kind,
            "predicted_step_seconds": plan.chosen.step_seconds,
            "overrides": list(self.trial.words),
        }


def base_recipe(
    recipe: str | None,
    overrides: Sequence[str],
    cluster: str | None,
    backend: str | None,
    model: str | None,
    nodes: int,
) -> QualificationRequest:
    """Return the recipe to start from: the person's own without its split, else the gallery's for the backend and the
    kind of cluster.

    Raises UserError where neither a recipe nor a cluster is named.
    """
    if recipe is None and cluster is None:
        raise UserError(
            "qualify: name what is to be qualified: a RECIPE, or --cluster NAME (a profile; `llmlaunch init --site` "
            "drafts one of this cluster)"
        )
    options = {"cluster": cluster, "backend": backend, "model": model}
    all_overrides = [
        *(f"{key}={value}" for key, value in options.items() if value is not None),
        f"nodes={nodes}",
        *overrides,
    ]
    if recipe is not None:
        techniques = kept_techniques(apply_overrides(read_document(Path(recipe)), all_overrides))
        return QualificationRequest(recipe, (*all_overrides, f"layout={json.dumps(techniques)}"))
    from llmlaunch.cluster.load import load_cluster

    assert cluster is not None
    on_cpu = load_cluster(cluster).accelerator.kind == "cpu"
    framework = framework_named(backend if backend is not None and backend in FRAMEWORKS else DEFAULT_FRAMEWORK)
    name = CPU_RECIPE if on_cpu else framework.qualification_recipe
    if model is not None:
        all_overrides.insert(0, f"training.sequence_length={_sequence_length(model)}")
    return QualificationRequest(str(asset("recipes", f"{name}.yaml")), tuple(all_overrides))


def _sequence_length(model: str) -> int:
    from llmlaunch.families.lookup import find_model

    return min(find_model(model).max_position_embeddings, 4096)


def place_of_qualification(recipe: Recipe, again: bool) -> Path:
    """Return where a qualification lies unless told otherwise: the place of the last one, so that it is gone on with,
    or a new place `again`."""
    model = re.sub(r"[^A-Za-z0-9._-]+", "-", recipe.model.name)
    name = f"{qualification_name(recipe.cluster.name, recipe.backend.name)}-{model}"
    new = default_directory(name)
    if again:
        return new
    later = [path for path in new.parent.glob(f"{name}-*") if LATER.fullmatch(path.name.removeprefix(name))]
    return max(later, default=new.with_name(name))


def plan_qualification(request: QualificationRequest, choice: LauncherChoice, notify: Notify) -> list[QualifyingRun]:
    """Choose the six layouts and plan each.

    Raises:
        UserError: the recipe is invalid or trains with a script of its own, this machine cannot run it where it is to
            run here, or no size of its model comes near the limit.
    """
    base = _versioned(load_recipe(request.recipe, request.overrides), notify)
    if base.backend.script is not None:
        raise UserError(
            f"{base.path}: backend.script: qualify measures the trainer that llmlaunch ships, on made-up data; add "
            f"backend={base.backend.name}"
        )
    baseline_bytes = None
    if choice.launcher.name == "local":
        refuse_elsewhere(base, choice.why)
        baseline_bytes = idle_trainer_bytes(base, notify)
    lessons, backend = lessons_of(base, notify), backend_for(base)

    def recipe_of(overrides: Sequence[str]) -> Recipe:
        recipe = load_recipe(request.recipe, (*request.overrides, *overrides))
        return replace(recipe, backend=base.backend)

    def setting(overrides: Sequence[str]) -> Setting:
        return setting_of(recipe_of(overrides), backend, baseline_bytes, lessons)

    trials = choose_trials(setting, qualification_name(base.cluster.name, base.backend.name))
    runs = [
        QualifyingRun(trial, plan_loaded(recipe_of(trial.words), notify, baseline_bytes))
        for trial in counting("layouts", trials)
    ]
    _refuse_too_little_memory(base, runs, choice)
    for qualifying in runs[:1]:
        qualifying.run.refuse_missing()
    return runs


def _versioned(recipe: Recipe, notify: Notify) -> Recipe:
    from llmlaunch.frameworks.framework_version import with_framework_version
    from llmlaunch.launchers.environment_cache import probed_packages

    versioned, warnings = with_framework_version(recipe, os.environ, probed_packages)
    for warning in warnings:
        notify(f"warning: {warning}")
    return versioned


def _refuse_too_little_memory(recipe: Recipe, runs: Sequence[QualifyingRun], choice: LauncherChoice) -> None:
    """Raise UserError where the layout that is to exceed a CPU process's memory would exceed the machine's."""
    if choice.launcher.name != "local" or recipe.cluster.accelerator.kind != "cpu":
        return
    import psutil

    free_bytes = psutil.virtual_memory().available
    needed_bytes = max(each.trial.predicted_bytes for each in runs) * recipe.cluster.devices_per_node
    if needed_bytes > free_bytes:
        raise UserError(
            f"{recipe.path}: qualify: the layout that is to exceed a process's memory needs {needed_bytes / GIB:.1f} "
            f"GiB, and this machine has {free_bytes / GIB:.1f} GiB free; let a process have less: "
            "cluster.accelerator.memory_gib=1"
        )


def write_qualification(
    directory: Path, runs: Sequence[QualifyingRun], request: QualificationRequest, notify: Notify
) -> None:
    """Write the six run directories and sweep.json, whole or not at all. Raises UserError where something is there."""
    from llmlaunch.rendering.sweep import render_sweep

    writers: dict[str, Callable[[Path], None]] = {
        each.run.recipe.name: functools.partial(each.run.write, notify=notify) for each in runs
    }
    described = [
        {"recipe": each.run.recipe.name, "file": request.recipe, "overrides": list(each.run.recipe.overrides)}
        for each in runs
    ]
    render_sweep(directory, directory.name, HOW, writers, described)


def run_directories(directory: Path, request: QualificationRequest) -> list[Path]:
    """Return the run directories of the qualification in `directory`, in order; none where there is no such folder.

    Raises UserError where the folder is no qualification's, or is that of another request.
    """
    if not directory.exists():
        return []
    sweep = read_object(directory / file_names.SWEEP) or {}
    listed = sweep.get("runs")
    runs = [run for run in listed if isinstance(run, dict)] if isinstance(listed, list) else []
    names = [str(run.get("directory")) for run in runs]
    if sweep.get("how") != HOW or not names or not all(map(is_path_component, names)):
        raise UserError(f"{directory}: exists and holds no qualification; name another folder with -o")
    overrides = list(request.overrides)
    if any(
        run.get("file") != request.recipe or run.get("overrides", [])[: len(overrides)] != overrides for run in runs
    ):
        raise UserError(
            f"{directory}: holds a qualification of {runs[0].get('file')} with other overrides; name another folder "
            "with -o, or start anew with --again"
        )
    return [directory.resolve() / name for name in names]


def submit_unless_submitted(run_dir: Path, local: bool, notify: Notify) -> Submission:
    """Submit a run directory, or return the submission it has; one that was interrupted is found again."""
    from llmlaunch.launchers import run_files, submit_mark

    run_files.refuse_foreign(run_dir)
    submission = run_files.read_submission(run_dir)
    if submission is not None and submit_mark.was_submitting(run_dir) is None:
        return submission
    return resubmit(run_dir, (), notify, anyway=False, local=local, from_older=False, exclude_nodes=True)


def has_ended(submission: Submission) -> bool:
    """Whether a run is known to have ended, by its own files: then it does not come back."""
    from llmlaunch.launchers import run_files

    return run_files.read_end(submission) is not None or run_files.end_noted(submission) is not None
