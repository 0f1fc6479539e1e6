"""Logs of jobs that somebody else launched, as measurement records: what ran is told by the log, or by a recipe."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from llmlaunch.app.messages import Notify
from llmlaunch.cluster.load import load_cluster
from llmlaunch.cluster.profile import Cluster
from llmlaunch.command_lines.trainers import MEGATRON_DEEPSPEED
from llmlaunch.command_lines.training_log import TrainingLog
from llmlaunch.errors import UserError
from llmlaunch.frameworks.argument import ALLOCATOR_SETTINGS, WHOLE_SEGMENTS
from llmlaunch.frameworks.deepspeed.training_log import printed_by_megatron_deepspeed
from llmlaunch.frameworks.framework import backend_for, framework_of
from llmlaunch.frameworks.megatron.command_line import read_values
from llmlaunch.imports.logs import is_record_file, read_logs
from llmlaunch.layout import OFFLOAD_LAYERS, Layout
from llmlaunch.planner.plan import Candidate, as_planned
from llmlaunch.planner.planning import plan_of
from llmlaunch.planner.search import SearchResult, search
from llmlaunch.planner.setting import setting_of
from llmlaunch.progress import counting
from llmlaunch.recipe.layout_keys import ASKED_ONLY
from llmlaunch.recipe.load import load_recipe
from llmlaunch.recipe.types import AUTO_NODES, Recipe
from llmlaunch.rendering.run_json import measurement_template
from llmlaunch.rundir.values import to_type
from llmlaunch.store.database import open_to_write
from llmlaunch.store.log_records import log_records
from llmlaunch.store.measurements import import_file, import_records
from llmlaunch.store.record_files import BadLine
from llmlaunch.techniques import MOVING_NAMES

# name of Megatron's argument -> how the recipe's layout calls it
_SIZES = {
    "tensor_model_parallel_size": "tensor",
    "pipeline_model_parallel_size": "pipeline",
    "context_parallel_size": "context",
    "expert_model_parallel_size": "expert",
    "micro_batch_size": "micro_batch_size",
}
# name of Megatron's argument, and a value that changes what is in memory and that no key of a recipe says
_VALUES: tuple[tuple[str, object], ...] = (
    ("transformer_impl", "local"),
    ("gradient_accumulation_fusion", False),
    ("defer_embedding_wgrad_compute", True),
)
CPU_PEAKS = "on a CPU no allocator of a device counts, so its peaks are left out"
# keys of a recipe that neither a peak nor a step time depends on: what is odd in them is no reason to refuse a log
_OF_NO_PEAK = (
    *("learning_rate", "learning_rate_decay", "minimum_learning_rate", "warmup_steps", "weight_decay", "adam_betas"),
    *("seed", "log_interval", "save_interval", "checkpoint_path", "checkpoint_format", "tensorboard", "start_from"),
    *("keep_checkpoints", "non_persistent_save_interval", "tracking", "slurm", "secrets", "notify"),
    *("samples", "export"),
)
MOST_LAYOUTS = 1000  # looked at; a recipe that leaves more open pins nothing


@dataclass(frozen=True)
class JobSource:
    """What a person gives beside the logs: a recipe of the job, overrides of it, and the cluster it ran on. `one_job`
    says that all files are of one job, such as those of its ranks: what one of them says of it holds for all."""

    recipe: str | None = None
    overrides: tuple[str, ...] = ()
    cluster: str | None = None
    one_job: bool = False


@dataclass(frozen=True)
class ImportOptions:
    """How files of measurement records are taken over (`store.measurements.import_file`)."""

    replace: bool = False
    skip_bad: bool = False


@dataclass(frozen=True)
class Imported:
    """How many records were new, replaced others, or were there already; `bad` are the lines left out, by file, and
    `store` is where the store lies."""

    added: int
    replaced: int
    unchanged: int
    bad: tuple[tuple[Path, BadLine], ...]
    store: str


def split_words(words: Sequence[str]) -> tuple[list[Path], tuple[str, ...]]:
    """Return the files and the overrides among the words of a command line. A pattern that no shell has expanded names
    the files that match it."""
    paths: list[Path] = []
    overrides: list[str] = []
    for word in words:
        if "=" in word and not Path(word).exists():
            overrides.append(word)
        elif any(sign in word for sign in "*?[") and not Path(word).exists():
            pattern = Path(word)
            folder = Path(pattern.anchor)
            paths += sorted(folder.glob(str(pattern.relative_to(folder)))) or [pattern]
        else:
            paths.append(Path(word))
    if not paths:
        raise UserError("measurements import: names no file; put the files before the overrides")
    return paths, tuple(overrides)


def import_files(paths: Sequence[Path], source: JobSource, options: ImportOptions, notify: Notify) -> Imported:
    """Import measurement records and logs. All logs are read before anything is written."""
    record_files = [path for path in paths if is_record_file(path)]
    logs = [path for path in paths if path not in record_files]
    if record_files and not logs and (source != JobSource()):
        raise UserError(
            f"{record_files[0]}: holds measurement records, which say themselves what ran; leave out the recipe"
        )
    records = records_of_logs(logs, source, notify, options.skip_bad)
    with open_to_write() as store:
        for warning in store.warnings:
            notify(f"warning: {warning}")
        results = [
            import_file(store, path, options.replace, options.skip_bad) for path in counting("files", record_files)
        ]
        bad = [(path, line) for path, result in zip(record_files, results, strict=True) for line in result.bad]
        results += [import_records(store, records)] if logs else []
        return Imported(
            added=sum(result.added for result in results),
            replaced=sum(result.replaced for result in results),
            unchanged=sum(result.unchanged for result in results),
            bad=tuple(bad),
            store=store.location.shown,
        )


def records_of_logs(
    paths: Sequence[Path], source: JobSource, notify: Notify, skip_bad: bool = False
) -> list[dict[str, Any]]:
    """Return the records of all runs in these files. Raises UserError for a file that is no log, and for one that does
    not say what ran where `source` does not either; with `skip_bad` it is left out with a warning."""
    left_out: list[UserError] = []
    runs: list[tuple[Path, TrainingLog]] = []
    records: list[dict[str, Any]] = []
    for path in counting("files", paths):
        try:
            runs += [(path, log) for log in read_logs(path)]
        except UserError as error:
            left_out.append(error)
    if source.one_job and source.recipe is None:
        runs = _with_arguments_of_their_job(runs)
    for path, log in counting("logs", runs):
        try:
            records += _records_of_run(path, log, source, notify)
        except UserError as error:
            left_out.append(error)
    for failure in left_out:
        if not skip_bad:
            raise failure
        notify(f"warning: {failure}; left out")
    return records


def _records_of_run(path: Path, log: TrainingLog, source: JobSource, notify: Notify) -> list[dict[str, Any]]:
    """Return the records of one run. One that nothing was measured of is a warning."""
    place = str(path) if log.first_line == 1 else f"{path}:{log.first_line}"
    if log.unreadable is not None:
        notify(f"warning: {place}: {log.unreadable}")
    if not log.says_nothing:
        template = _template(_recipe_of(log, path, source), log, place)
        if template["gpu"] == "cpu":
            log = replace(log, peaks=(), notes=(*log.notes, CPU_PEAKS))
        if not log.says_nothing:
            return log_records(template, log, str(path.absolute()))
    notes = f" ({'; '.join(log.notes)})" if log.notes else ""
    notify(f"warning: {place}: names no peak, no step time and no end for lack of memory{notes}; left out")
    return []


def _with_arguments_of_their_job(runs: Sequence[tuple[Path, TrainingLog]]) -> list[tuple[Path, TrainingLog]]:
    """Return the logs of one job's ranks, each with the arguments that its first rank printed."""
    printed = [log for _, log in runs if log.values]
    if len(printed) != 1:
        raise UserError(
            f"--one-job: {len(printed)} of the files print Megatron's arguments, where the first rank of a job "
            "alone does; give the files of one job, or its recipe with --recipe"
        )
    [job] = printed
    return [
        (path, log if log.values else replace(log, values=job.values, identity=f"{job.identity}-{log.identity}"))
        for path, log in runs
    ]


def _recipe_of(log: TrainingLog, path: Path, source: JobSource) -> Recipe:
    cluster = () if source.cluster is None else (f"cluster={source.cluster}",)
    place, again = str(path), to_type("measurements", "import", path)
    if printed_by_megatron_deepspeed(log):
        raise UserError(
            f"{place}: was printed by {MEGATRON_DEEPSPEED}, whose memory and step times are not predicted, so its "
            "figures say nothing of another job; leave it out"
        )
    if source.recipe is not None:
        overrides = (*cluster, *source.overrides)
        recipe = load_recipe(source.recipe, overrides)
        return load_recipe(source.recipe, (*overrides, *framework_of(recipe).overrides_for_log(recipe, log)))
    if not log.values:
        raise UserError(
            f"{place}: says what was measured, and not of which job; give the job's recipe with its layout pinned: "
            f"{again} --recipe RECIPE.yaml (or, together with the file in which its first rank prints Megatron's "
            "arguments, --one-job)"
        )
    if source.cluster is None:
        raise UserError(f"{place}: does not say on which machine it ran; name it: {again} --cluster NAME")
    return _recipe_of_arguments(log, place, source)


def _recipe_of_arguments(log: TrainingLog, place: str, source: JobSource) -> Recipe:
    """Return the recipe of the arguments that Megatron-LM printed, on `source.cluster`."""
    assert source.cluster is not None
    cluster = load_cluster(source.cluster, Path())
    nodes, per_node = _nodes(log, cluster, place)
    reading = read_values(log.values, nodes=nodes, devices_per_node=per_node, place=place)
    named = source.cluster if not Path(source.cluster).is_file() else str(Path(source.cluster).absolute())
    training = {name: value for name, value in reading.document["training"].items() if name not in _OF_NO_PEAK}
    backend = reading.document["backend"]
    words = [word for name, value in _VALUES if log.values.get(name) == value for word in _written(name, value)]
    document = {
        **{name: value for name, value in reading.document.items() if name not in _OF_NO_PEAK},
        "training": training,
        "backend": {**({"name": backend} if isinstance(backend, str) else backend), "extra_args": words},
        "cluster": named if per_node == cluster.devices_per_node else {"base": named, "devices_per_node": per_node},
        "nodes": nodes,
        "data": {"mock": True},  # no part of a measurement
    }
    with tempfile.TemporaryDirectory(prefix="llmlaunch-") as folder:
        path = Path(folder) / "recipe.yaml"
        path.write_text(yaml.safe_dump(document, sort_keys=False, allow_unicode=True), encoding="utf-8")
        try:
            return load_recipe(path, source.overrides)
        except UserError as error:
            reasons = "; ".join([str(error).replace(str(path), "the recipe read of it"), *reading.missing])
            raise UserError(
                f"{place}: its arguments make no recipe: {reasons}; add what is missing as KEY=VALUE, or give the "
                "job's recipe with --recipe"
            ) from None


def _written(name: str, value: object) -> tuple[str, ...]:
    """Return how Megatron's command line says that an argument has a value."""
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return (f"--{flag}" if value else f"--no-{flag}",)
    return (f"--{flag}", str(value))


def _nodes(log: TrainingLog, cluster: Cluster, place: str) -> tuple[int, int]:
    world = log.values.get("world_size")
    if type(world) is not int or world < 1:
        raise UserError(f"{place}: its arguments do not name world_size; give the job's recipe with --recipe")
    if world < cluster.devices_per_node:
        return 1, world
    if world % cluster.devices_per_node:
        raise UserError(
            f"{place}: {world} ranks do not fill nodes of {cluster.devices_per_node} devices; name the cluster that it "
            "ran on"
        )
    return world // cluster.devices_per_node, cluster.devices_per_node


def _template(recipe: Recipe, log: TrainingLog, place: str) -> Mapping[str, Any]:
    """Return the record of the job without its peak. Raises UserError for a recipe that leaves the layout open, that no
    backend runs, or that contradicts the log."""
    if recipe.nodes == AUTO_NODES:
        raise UserError(f"{recipe.path}: nodes: auto: {place} is of one number of nodes; write it")
    recipe = replace(recipe, technique_limit=ASKED_ONLY)  # whoever launched the job turned on what the recipe names
    backend = backend_for(recipe)
    setting = setting_of(recipe, backend)
    result = search(setting, whole=True)
    if not len(result.points):
        from llmlaunch.planner.no_legal_layout import no_layout

        raise no_layout(setting)
    index = _index_of_what_ran(recipe, result, log, place)
    plan = plan_of(setting, replace(result, first=np.array([index])), 0)
    wrong = _contradictions(recipe, plan.layout, log)
    if wrong:
        raise UserError(f"{place}: says {'; '.join(wrong)}; give the recipe of the job that wrote it")
    planned = as_planned(recipe, plan.chosen)
    if ALLOCATOR_SETTINGS not in recipe.environment:  # llmlaunch would set it; whoever launched the job may not have
        planned = replace(planned, environment={**recipe.environment, ALLOCATOR_SETTINGS: WHOLE_SEGMENTS})
    template = measurement_template(planned, plan)
    template.pop("calibration_id", None)
    return template


def _index_of_what_ran(recipe: Recipe, result: SearchResult, log: TrainingLog, place: str) -> int:
    """Return the point of the layout that the recipe pins, or the log tells where the recipe does not. What moves
    states or activations to the host, and uneven stages, count as used only where the recipe names them. Raises
    UserError for a recipe that leaves more than one layout."""
    candidates = {n: result.at(recipe, n) for n in range(min(len(result.points), MOST_LAYOUTS))}
    plain = {n: candidate for n, candidate in candidates.items() if _is_plain(recipe, candidate)}
    as_logged = {n: candidate for n, candidate in plain.items() if not _contradictions(recipe, candidate.layout, log)}
    plain = as_logged or plain
    if len(plain) == 1:
        return next(iter(plain))
    values = [{**asdict(c.layout), **asdict(c.techniques)} for c in (plain or candidates).values()]
    free = [name for name in values[0] if any(value[name] != values[0][name] for value in values) and name != "data"]
    raise UserError(
        f"{recipe.path}: leaves {result.searched:,} layouts open, and {place} is of one; pin under layout what the job "
        f"ran: {', '.join(free)}"
    )


def _is_plain(recipe: Recipe, candidate: Candidate) -> bool:
    layout, techniques, own = candidate.layout, candidate.techniques, recipe.techniques
    offloads = bool(layout.offload_layers) and OFFLOAD_LAYERS not in recipe.pins
    added = any(getattr(techniques, name) != getattr(own, name) for name in MOVING_NAMES)
    return not offloads and not added and not (layout.uneven and recipe.layers_by_stage is None)


def _contradictions(recipe: Recipe, layout: Layout, log: TrainingLog) -> list[str]:
    """Return what the log says otherwise than the recipe: its peaks would be learned for another job."""
    facts, values = log.facts, log.values
    pairs = [
        ("world size", facts.world_size or values.get("world_size"), recipe.world_size),
        ("training.global_batch_size", facts.global_batch_size, recipe.workload.global_batch_size),
        ("training.global_batch_size", values.get("global_batch_size"), recipe.workload.global_batch_size),
        ("training.sequence_length", values.get("seq_length"), recipe.workload.sequence_length),
        ("model.num_layers", values.get("num_layers"), recipe.model.num_layers),
        ("model.hidden_size", values.get("hidden_size"), recipe.model.hidden_size),
        ("layout.data", facts.data, layout.data),
        ("layout.micro_batch_size", facts.micro_batch_size, layout.micro_batch_size),
        ("layout.zero_stage", facts.zero_stage, layout.zero_stage),
        *((f"layout.{name}", values.get(argument), getattr(layout, name)) for argument, name in _SIZES.items()),
    ]
    return [
        f"{name} {logged}, the recipe {planned}"
        for name, logged, planned in pairs
        if type(logged) is int and logged != planned
    ]
