"""From a file to a validated recipe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from llmlaunch.cluster.load import load_cluster
from llmlaunch.cluster.profile import Cluster
from llmlaunch.documents.secrets import refuse_secrets
from llmlaunch.documents.slurm_options import over_site_options
from llmlaunch.documents.validate import BadKey, given, report, validate
from llmlaunch.documents.yaml_strict import Document, KeyPath, read_document
from llmlaunch.errors import UserError
from llmlaunch.models.presets import resolve_model
from llmlaunch.models.shape import ModelShape
from llmlaunch.recipe.consistency import disagreements
from llmlaunch.recipe.containers import container, container_problems
from llmlaunch.recipe.datasets import data, data_problems, with_places_found
from llmlaunch.recipe.digest import recipe_digest
from llmlaunch.recipe.numbers import number_formats, number_notes, number_problems, schedule, schedule_problems
from llmlaunch.recipe.overrides import apply_overrides, parse_override
from llmlaunch.recipe.recovery import on_oom, restart, watchdog
from llmlaunch.recipe.schema import HINTS, BackendFile, BudgetFile, MemoryFile, PinsFile, RecipeFile, TrainingFile
from llmlaunch.recipe.techniques import dispatched, fixed_words, technique_problems, techniques
from llmlaunch.recipe.types import (
    BackendChoice,
    Budget,
    Code,
    MemoryPolicy,
    Recipe,
    Training,
)
from llmlaunch.units import GIB
from llmlaunch.workload import Workload

__all__ = ["load_recipe"]


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read, check and resolve a recipe; `overrides` are `key=value` words.

    Relative paths start where the recipe lies; the digest is of what was written, so it does not depend on that
    place. Raises `UserError` with one line for each of
    the first few mistakes: file and line, key, what is wrong, how to mend it.
    """
    written = read_document(Path(path))
    document = apply_overrides(written, overrides)
    passed = _refuse_secrets(written, overrides, document.value.get("not_secrets"))
    file = validate(RecipeFile, document, HINTS)
    recipe = _resolve(file, document, Path(path).parent)
    problems = [
        *_backend_and_pins(file),
        *data_problems(file.data, recipe.backend.name),
        *technique_problems(file, recipe.model),
        *number_problems(file),
        *schedule_problems(recipe),
        *container_problems(recipe.container, recipe.cluster.name),
        *disagreements(recipe),
    ]
    if problems:
        raise report(document, problems)
    recipe = replace(recipe, text=written.text, overrides=tuple(overrides), not_secrets=tuple(file.not_secrets))
    if passed:
        note = f"no secret stands in {', '.join(passed)}, though it looks so (not_secrets)"
        recipe = replace(recipe, assumptions=(*recipe.assumptions, note))
    return _absolute(replace(recipe, digest=recipe_digest(recipe)), Path(path).parent)


def _refuse_secrets(written: Document, overrides: Sequence[str], allowed: Any) -> tuple[str, ...]:
    """The file and each word are looked at as they stand: both are copied into the run directory, also what a later
    word replaces."""
    passed = refuse_secrets(written, allowed)
    for word in overrides:
        path, value = parse_override(word)
        passed += refuse_secrets(value, allowed, tuple(int(part) if part.isdigit() else part for part in path))
    return tuple(dict.fromkeys(passed))


def _absolute(recipe: Recipe, base_dir: Path) -> Recipe:
    """The job runs in its run directory: what the recipe names relative to itself must still be found there."""

    def place(path: str) -> str:
        return str((base_dir / Path(path).expanduser()).absolute())

    def found(path: str | None) -> str | None:
        return None if path is None else place(path)

    training, backend = recipe.training, recipe.backend
    return replace(
        recipe,
        backend=replace(backend, path=found(backend.path), script=found(backend.script)),
        training=replace(
            training,
            checkpoint_path=found(training.checkpoint_path),
            start_from=found(training.start_from),
            tensorboard=found(training.tensorboard),
        ),
        data=with_places_found(recipe.data, place),
        code=replace(recipe.code, path=found(recipe.code.path)),
    )


def _resolve(file: RecipeFile, document: Document, base_dir: Path) -> Recipe:
    model, notes = _model(file, document, base_dir)
    cluster = _cluster(file, document, base_dir)
    backend = BackendFile.model_construct(name=file.backend) if isinstance(file.backend, str) else file.backend
    code = file.code
    return Recipe(
        name=file.name,
        model=dispatched(file, model),
        backend=BackendChoice(
            name=backend.name,
            version=backend.version,
            path=backend.path,
            script=backend.script,
            script_args=tuple(backend.script_args),
            script_kind=backend.script_kind,
            extra_args=tuple(backend.extra_args),
        ),
        cluster=cluster,
        nodes=file.nodes,
        training=_training(file.training),
        data=data(file.data),
        pins=_pins(file.layout) if isinstance(file.layout, PinsFile) else {},
        memory=_memory(file.memory),
        slurm={**over_site_options(cluster.slurm, file.slurm), **file.slurm_plugins},
        environment=file.environment,
        secrets=tuple(dict.fromkeys(file.secrets)),
        setup=tuple(file.setup),
        container=container(file.container, cluster.site, base_dir),
        code=Code(snapshot=True) if isinstance(code, str) else Code(code.path, code.snapshot),
        monitor_interval_seconds=float(file.monitor.interval_seconds),
        memory_probe=file.monitor.probe,
        path=str(document.name),
        text="",
        assumptions=(
            *notes,
            *_stretched(model, file.training.sequence_length),
            *number_notes(number_formats(file.training), cluster.accelerator),
        ),
        budget=_budget(file.budget),
        placement=file.placement,
        python=file.python,
        restart=restart(file.restart, checkpoints=file.training.checkpoint_path is not None),
        on_oom=on_oom(file.on_oom),
        watchdog=watchdog(file.watchdog),
        preflight=file.preflight or file.spare_nodes > 0,
        spare_nodes=file.spare_nodes,
        techniques=techniques(file),
        fixed=fixed_words(file),
        layers_by_stage=file.layout.layers_by_stage if isinstance(file.layout, PinsFile) else None,
    )


def _model(file: RecipeFile, document: Document, base_dir: Path) -> tuple[ModelShape, tuple[str, ...]]:
    spec: str | Mapping[str, Any] = file.model if isinstance(file.model, str) else given(file.model)
    try:
        return resolve_model(spec, base_dir, default_positions=file.training.sequence_length)
    except UserError as error:
        raise _at(document, "model", spec, error) from None


def _cluster(file: RecipeFile, document: Document, base_dir: Path) -> Cluster:
    spec: str | Mapping[str, Any] = file.cluster if isinstance(file.cluster, str) else given(file.cluster)
    try:
        return load_cluster(spec, base_dir)
    except UserError as error:
        raise _at(document, "cluster", spec, error) from None


def _at(document: Document, key: str, spec: str | Mapping[str, Any], error: UserError) -> UserError:
    """An error of a part, said of the recipe's own line."""
    inside: KeyPath = ()
    if isinstance(error, BadKey) and not isinstance(spec, str):
        return report(document, [((key, *error.key), error.problem)])
    if not isinstance(spec, str) and "base" in spec:
        inside = ("base",)
    return report(document, [((key, *inside), str(error))])


def _training(file: TrainingFile) -> Training:
    return Training(
        workload=Workload(file.sequence_length, file.global_batch_size, file.precision),
        steps=_steps(file),
        learning_rate=float(file.learning_rate),
        seed=file.seed,
        log_interval=file.log_interval,
        save_interval=file.save_interval,
        checkpoint_path=file.checkpoint_path,
        gradient_dtype=None if file.gradient_dtype == "auto" else file.gradient_dtype,
        start_from=file.start_from,
        checkpoint_format=file.checkpoint_format,
        tensorboard=file.tensorboard,
        numbers=number_formats(file),
        schedule=schedule(file),
    )


def _steps(file: TrainingFile) -> int:
    """As said, or those that see at least `tokens`."""
    if file.tokens is None:
        assert file.steps is not None  # the schema wants one of the two
        return file.steps
    return -(-file.tokens // (file.sequence_length * file.global_batch_size))


def _budget(file: BudgetFile) -> Budget:
    days, hours = file.days, file.gpu_hours
    return Budget(None if days is None else float(days), None if hours is None else float(hours), file.max_nodes)


def _memory(file: MemoryFile) -> MemoryPolicy:
    return MemoryPolicy(float(file.limit), int(file.floor_gib * GIB), file.risk, file.calibration)


def _pins(file: PinsFile) -> dict[str, Any]:
    pins = {name: value for name, value in given(file).items() if name in PinsFile.model_fields and value is not None}
    pins.pop("layers_by_stage", None)
    flag = pins.pop("distributed_optimizer", None)
    return pins if flag is None else pins | {"zero_stage": int(flag)}


def _backend_and_pins(file: RecipeFile) -> list[tuple[KeyPath, str]]:
    name = file.backend if isinstance(file.backend, str) else file.backend.name
    if name == "megatron-lm":
        return []
    wrong: list[tuple[KeyPath, str]] = [
        (("training", word), f"is a word of megatron-lm; remove it for {name}")
        for word in ("checkpoint_format", "tensorboard")
        if getattr(file.training, word) is not None
    ]
    if not isinstance(file.layout, PinsFile):
        return wrong
    if file.layout.distributed_optimizer is not None:
        wrong.append((("layout", "distributed_optimizer"), f"is a word of megatron-lm; for {name} write zero_stage"))
    if file.layout.layers_by_stage:
        wrong.append((("layout", "layers_by_stage"), f"{name} runs without pipeline stages here; remove it"))
    return wrong


def _stretched(model: ModelShape, sequence_length: int) -> tuple[str, ...]:
    if sequence_length <= model.max_position_embeddings or model.position_embedding == "learned_absolute":
        return ()
    return (
        f"sequences of {sequence_length} are longer than the {model.max_position_embeddings} {model.name} is built for",
    )
