"""An observed command as a run like any other: its command line is read into a recipe, the recipe is planned with the
layout that it ran, and what `render` would have written goes beside what was observed."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from llmlaunch.app.messages import Notify
from llmlaunch.app.planned_run import PlannedRun, plan_loaded
from llmlaunch.cluster.cards import accelerator_of_card, machines
from llmlaunch.cluster.load import profile_names
from llmlaunch.command_lines.command import Reading, TrainerCommand
from llmlaunch.documents.writing import json_bytes
from llmlaunch.errors import UserError
from llmlaunch.frameworks.argument import ALLOCATOR_NAMES, ALLOCATOR_SETTINGS, WHOLE_SEGMENTS
from llmlaunch.frameworks.base import Rendered
from llmlaunch.frameworks.framework_version import with_framework_version
from llmlaunch.frameworks.logs import any_script_lines
from llmlaunch.recipe.frameworks import FRAMEWORKS
from llmlaunch.recipe.load import load_recipe
from llmlaunch.recipe.types import Recipe
from llmlaunch.rendering.run_json import run_description
from llmlaunch.rundir import file_names
from llmlaunch.rundir.attempt import Attempt
from llmlaunch.rundir.files import read_object, replace_bytes
from llmlaunch.rundir.memory_files import summarize
from llmlaunch.rundir.node_files import ObservedCommand
from llmlaunch.rundir.run import begun_attempts
from llmlaunch.rundir.run_file import read_run_file
from llmlaunch.rundir.schema import read_as
from llmlaunch.rundir.values import count_above_zero, to_type

GIB = 2**30
PATH_SECTIONS = ("model", "backend", "training", "data")  # of a recipe: where a text may be a file of the job
OF_MEMORY = re.compile(r"PYTORCH_\w*ALLOC_CONF|NVTE_\w+")  # variables that change what a rank holds


@dataclass(frozen=True)
class Observed:
    """What an attempt of an observed command has left that a recipe is made of. `gpu_name` is None where it ran on no
    GPU, or its own was not seen."""

    directory: Path
    name: str
    described: ObservedCommand
    versions: Mapping[str, Any]
    ranks: int
    nodes: int
    devices_per_node: int
    gpu_name: str | None
    gpu_bytes: int | None
    host_bytes: int | None

    @property
    def on_gpu(self) -> bool:
        return self.gpu_name is not None


def observed_directories(path: Path) -> list[Path]:
    """Return the folder itself; where it is none of a run, those of the observed runs in it (`observed/`)."""
    if (path / file_names.RUN).exists() or not path.is_dir():
        return [path]
    return sorted(folder for folder in path.iterdir() if is_observed(folder)) or [path]


def is_observed(directory: Path) -> bool:
    """Whether it holds what `llmlaunch observe` wrote."""
    return read_run_file(directory).get("observed", False)


def describe_observed(directory: Path, recipe: Path | None, overrides: Sequence[str], notify: Notify) -> str | None:
    """Write recipe.yaml, plan.json and run.json of an observed run; with `recipe` of that one instead of the command's.
    A run that has them keeps them, unless a recipe or an override is named.

    Returns a sentence on what is missing where no recipe comes of it: the run is collected without a prediction then.
    """
    run = read_run_file(directory)
    if not run.get("observed") or ("recipe_digest" in run and recipe is None and not overrides):
        return None
    observed = _observed(directory)
    if observed is None:
        return f"{directory}: no attempt has said what command it is: it is collected without a prediction"
    again = f"name one with {to_type('collect', directory, '--recipe')} RECIPE.yaml"
    try:
        reading = None if recipe is not None else _reading(observed)
        document = None if reading is None else _document(reading, observed)
        missing = _missing(reading, document, overrides)
        if missing:
            return f"{directory}: the command is no whole recipe: {'; '.join(missing)}; add it as KEY=VALUE, or {again}"
        loaded = _loaded(directory, recipe, document, overrides)
        planned = plan_loaded(with_framework_version(loaded, os.environ, lambda _: observed.versions)[0], notify)
    except UserError as problem:
        return f"{directory}: no prediction: {problem}; {again}"
    for note in reading.notes if reading is not None else ():
        notify(f"note: {directory.name}: {note}")
    _write(directory, planned)
    return None


def _loaded(
    directory: Path, recipe: Path | None, document: Mapping[str, Any] | None, overrides: Sequence[str]
) -> Recipe:
    """Return the recipe; one that was read of the command is written first, so that a mistake in it has a line."""
    if recipe is not None:
        return load_recipe(recipe, overrides)
    text = yaml.safe_dump(document, sort_keys=False, allow_unicode=True, width=120)
    replace_bytes(directory / file_names.RECIPE, text.encode())
    return load_recipe(directory / file_names.RECIPE, overrides)


def _write(directory: Path, planned: PlannedRun) -> None:
    try:
        rendered = planned.rendered
    except UserError:  # it can be priced, and not started by llmlaunch
        rendered = Rendered((), {}, {}, progress=any_script_lines(planned.recipe.training.steps))
    described = run_description(planned.recipe, planned.plan, rendered)
    progress = {**_section(described, "progress"), "promised": False}
    # what follows an attempt is the person's own script's to say
    ours: dict[str, object] = {"restart": None, "checkpoint": None, "fallbacks": [], "progress": progress}
    replace_bytes(directory / file_names.RECIPE, planned.recipe.text.encode())
    replace_bytes(directory / file_names.PLAN, json_bytes(planned.json))
    replace_bytes(directory / file_names.RUN, json_bytes({**described, **ours, "observed": True}))


def _section(described: Mapping[str, object], name: str) -> dict[str, Any]:
    section = described[name]
    return dict(section) if isinstance(section, Mapping) else {}


# --- what was observed ------------------------------------------------------------------------------------------------


def _observed(directory: Path) -> Observed | None:
    """Return what the last attempt that tells of its command has left."""
    for attempt in reversed(begun_attempts(directory)):
        with suppress(OSError, ValueError):
            described = attempt.began.get("observed")
            if described is None:
                described = read_as(ObservedCommand, attempt.folder / file_names.EARLIER_OBSERVED)
            return _of_attempt(attempt, described)
    return None


def _of_attempt(attempt: Attempt, described: ObservedCommand) -> Observed:
    summary = summarize(attempt.run_directory, attempt.name)
    gpus = Counter((rank.gpu_name, rank.device_total_bytes) for rank in summary.ranks if rank.gpu_name)
    name, total = gpus.most_common(1)[0][0] if gpus else (None, None)
    worlds = [count_above_zero(rank.get("world_size")) or 0 for rank in attempt.ranks]
    by_node = Counter(rank.get("node") for rank in attempt.ranks)
    ranks = max([*worlds, len(attempt.ranks)], default=0)
    each = max(by_node.values(), default=0)
    hosts = [node.host_total_bytes for node in summary.nodes if node.host_total_bytes]
    return Observed(
        directory=attempt.run_directory,
        name=read_run_file(attempt.run_directory).get("name") or "observed",
        described=described,
        versions=read_object(attempt.folder / file_names.VERSIONS) or {},
        ranks=ranks,
        nodes=ranks // each if each else 0,
        devices_per_node=each,
        gpu_name=name,
        gpu_bytes=total,
        host_bytes=min(hosts, default=None),
    )


# --- the recipe -------------------------------------------------------------------------------------------------------


def _reading(observed: Observed) -> Reading:
    """Read the observed command. Raises UserError for one that no reader knows."""
    from llmlaunch.imports.command import read_command

    return read_command(_command(observed))


def _command(observed: Observed) -> TrainerCommand:
    """Return the trainer's command as it was observed: files are as they were then, and nodes and devices those that
    the ranks were on."""
    from llmlaunch.command_lines.launch import trainer_command

    described = observed.described
    words, environment = described.get("command", []), described.get("environment", {})
    folder = Path(described.get("folder") or ".")
    command = trainer_command(words, environment, folder=folder, place=observed.name)
    if command is None:
        raise UserError(f"`{' '.join(words)[:200]}` starts no trainer that llmlaunch knows")
    job = environment.get("SLURM_JOB_NAME")
    return replace(
        command,
        nodes=observed.nodes or command.nodes,
        devices_per_node=observed.devices_per_node or command.devices_per_node,
        environment={name: value for name, value in environment.items() if OF_MEMORY.fullmatch(name)},
        slurm={"job-name": job} if job else {},
        files={**command.files, **described.get("files", {})},
    )


def _document(reading: Reading, observed: Observed) -> dict[str, Any]:
    """Return the recipe that was read, with the cluster, the nodes, the allocator and the framework's version that were
    observed."""
    folder = Path(observed.described.get("folder") or ".")
    document = {
        key: _with_absolute_paths(value, folder) if key in PATH_SECTIONS else value
        for key, value in reading.document.items()
        if key not in ("slurm", "cluster", "nodes")
    }
    cluster = _cluster(observed)
    document |= {"cluster": cluster} if cluster is not None else {}
    document |= {"nodes": observed.nodes} if observed.nodes else {}
    document.setdefault("data", {"mock": True})  # what it read decides no byte of its memory
    environment = dict(document.get("environment") or {})
    if "environment" in observed.described and not environment.keys() & set(ALLOCATOR_NAMES):
        environment[ALLOCATOR_SETTINGS] = WHOLE_SEGMENTS  # torch's default, and not that of rendered jobs
    document |= {"environment": environment} if environment else {}
    backend = document.get("backend")
    keys = {"name": backend} if isinstance(backend, str) else dict(backend or {})
    framework = FRAMEWORKS.get(str(keys.get("name")))
    version = None if framework is None else observed.versions.get(framework.package)
    if version and "version" not in keys:
        document["backend"] = {**keys, "version": str(version)}
    return document


def _missing(reading: Reading | None, document: Mapping[str, Any] | None, overrides: Sequence[str]) -> list[str]:
    """Return what the recipe still lacks, but for the keys that overrides name."""
    if reading is None or document is None:
        return []
    named = tuple(word.partition("=")[0] for word in overrides)
    lacks = [] if "cluster" in document else ["cluster: the card of its ranks was not seen, or is not known"]
    lacks += [sentence for sentence in reading.missing if sentence.partition(":")[0] not in document]
    return [sentence for sentence in lacks if not f"{sentence.partition(':')[0]}.".startswith(_below(named))]


def _below(keys: Sequence[str]) -> tuple[str, ...]:
    return tuple(f"{key}." for key in keys)


def _cluster(observed: Observed) -> str | dict[str, Any] | None:
    """Return the machine that was observed: the profile that has its card and as many devices in a node, else one with
    what differs. None for an unknown card."""
    devices = observed.devices_per_node
    if not devices:
        return None
    if not observed.on_gpu:
        host = {"host_memory_gib": round(observed.host_bytes / GIB, 1)} if observed.host_bytes else {}
        return {"base": "cpu-x1", "devices_per_node": devices, **host}
    accelerator = accelerator_of_card(observed.gpu_name, observed.gpu_bytes)
    if accelerator is None:
        return None
    machine = machines()[accelerator]
    if machine.name not in profile_names():
        return {"base": "h100-80gb-x8", "accelerator": accelerator, "devices_per_node": devices}
    if machine.devices_per_node == devices:
        return machine.name
    return {"base": machine.name, "devices_per_node": devices}


def _with_absolute_paths(value: Any, folder: Path) -> Any:
    """Return a part of a recipe in which texts that name a file of the job's folder are absolute: the recipe lies
    elsewhere."""
    if isinstance(value, Mapping):
        return {key: _with_absolute_paths(item, folder) for key, item in value.items()}
    if isinstance(value, list):
        return [_with_absolute_paths(item, folder) for item in value]
    if not isinstance(value, str):
        return value
    is_file = re.search(r"[/.]", value) is not None and _exists(folder / value)
    return str(folder / value) if is_file or _exists(folder / f"{value}.idx") else value


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):
        return False
