"""From a file to a validated recipe."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from llmlaunch import __version__
from llmlaunch.assets import asset
from llmlaunch.cluster.load import load_cluster
from llmlaunch.documents.keys import key_names
from llmlaunch.documents.secrets import refuse_secrets
from llmlaunch.documents.slurm_options import over_site_options
from llmlaunch.documents.validate import BadKey, validate
from llmlaunch.documents.yaml_strict import Document, KeyPath, read_document
from llmlaunch.errors import UserError
from llmlaunch.families.lookup import resolve_model
from llmlaunch.models.shape import ModelShape
from llmlaunch.recipe.consistency import disagreements, fine_tuning_problems
from llmlaunch.recipe.containers import container_at, container_problems
from llmlaunch.recipe.datasets import data_problems, evaluation_problems, with_absolute_paths
from llmlaunch.recipe.digest import recipe_digest
from llmlaunch.recipe.layout_keys import (
    fixed_names,
    layout_problems,
    pins_from,
    techniques_from,
)
from llmlaunch.recipe.sections import tracking_problems, tracking_with_absolute_paths
from llmlaunch.recipe.training import number_notes, training_from, training_problems
from llmlaunch.recipe.types import NO_RESTART, SCHEMA, VOCABULARY, Recipe, Restart, recipe_form
from llmlaunch.rundir.foreign_values import is_whole_number
from llmlaunch.rundir.values import to_type
from llmlaunch.user_data import with_home

Resolved = TypeVar("Resolved")


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Return the recipe in the file at `path`, checked and resolved; `overrides` are `key=value` words.

    Relative paths in the file start where it lies, and those in overrides in the working directory. The digest is of
    what was written, with the paths of overrides made absolute, so it does not depend on where the file lies. A `path`
    of - is standard input, which lies in the working directory. Raises `UserError` with one line for each of the first
    few mistakes: file and line, key, what is wrong, how to mend it.
    """
    _refuse_model_name(Path(path))
    if overrides:
        from llmlaunch.recipe.overrides import from_working_directory

        overrides = from_working_directory(overrides)
    return load_written(read_document(Path(path)), overrides, Path(path).parent)


def _refuse_model_name(path: Path) -> None:
    """Raise UserError where no file is there, and what was given names a model or a recipe of the gallery."""
    name = path.as_posix()
    if path.suffix in (".yaml", ".yml"):
        return
    from llmlaunch.families.hub_ids import hub_model, is_hub_id

    if not (is_hub_id(name) or path == Path(path.name)) or path.exists():
        return
    starters = [starter.stem for starter in asset("recipes").glob("*.yaml")]
    model = hub_model(name)
    known = {name, Path(name).name.lower(), "" if model is None else model.preset} & set(starters)
    from llmlaunch.documents.likely_meaning import nearest

    near = sorted(known) or nearest(path.name, starters)
    if near:
        command = to_type("init", near[0])
        raise UserError(f"{name}: is no file; `{command}` writes a recipe to start from: {near[0]}.yaml")


def load_written(written: Document, overrides: Sequence[str], folder: Path) -> Recipe:
    """Return the recipe of a document; relative paths start in `folder`. Raises UserError as `load_recipe` does."""
    document = written
    if overrides:
        from llmlaunch.recipe.overrides import apply_overrides

        document = apply_overrides(written, overrides)
    allowed_secrets = refuse_written_secrets(written, overrides, document.value.get("not_secrets"))
    recipe = recipe_from(document, folder)
    recipe = replace(recipe, text=written.text, overrides=tuple(overrides))
    if allowed_secrets:
        note = f"no secret stands in {', '.join(allowed_secrets)}, though it looks so (not_secrets)"
        recipe = replace(recipe, assumptions=(*recipe.assumptions, note))
    return _with_absolute_paths(replace(recipe, digest=recipe_digest(recipe)), folder)


def recipe_from(document: Document, base_dir: Path = Path()) -> Recipe:
    """Return the recipe of a parsed document: paths as written, no text and no digest. Raises `UserError`."""
    _refuse_newer(document)
    named = tuple(key for key in ("model", "cluster") if not isinstance(document.value.get(key), Mapping))
    keys = validate(recipe_form(named), document, VOCABULARY)
    recipe = _resolve(keys, document, base_dir)
    problems = [
        *data_problems(recipe.data, recipe.backend.traits, recipe.training.start_from is not None),
        *evaluation_problems(recipe.data, recipe.training.evaluation is not None),
        *layout_problems(keys.get("layout", {}), recipe.model, recipe.backend.name),
        *training_problems(recipe.training, recipe.techniques, recipe.model, recipe.backend.name),
        *container_problems(recipe.container, recipe.cluster.name),
        *tracking_problems(recipe.tracking, recipe.training),
        *disagreements(recipe),
        *([] if "learning_rate" in keys["training"] else fine_tuning_problems(recipe)),
    ]
    if problems:
        from llmlaunch.documents.problems import report

        raise report(document, problems)
    return replace(recipe, document=document)


def _refuse_newer(document: Document) -> None:
    """Raise UserError for the schema of a later llmlaunch: whatever else it could not read would only confuse."""
    schema = document.value.get("schema")
    if isinstance(schema, int) and schema > SCHEMA:
        raise UserError(
            f"{document.where(('schema',))}: schema: {schema} is of a newer llmlaunch; this one, {__version__}, reads "
            f"schema: {SCHEMA}. Upgrade it: pip install --upgrade llmlaunch"
        )


def refuse_written_secrets(written: Document, overrides: Sequence[str], allowed: Any) -> tuple[str, ...]:
    """Raise UserError where the file or an override holds a secret, and return the keys that `not_secrets` allowed.

    Both are searched as they stand, also what a later override replaces: they are copied into the run directory.
    """
    passed = refuse_secrets(written, allowed)
    for word in overrides:
        from llmlaunch.recipe.overrides import parse_override

        path, value = parse_override(word)
        passed += refuse_secrets(value, allowed, tuple(int(part) if is_whole_number(part) else part for part in path))
    return tuple(dict.fromkeys(passed))


def _with_absolute_paths(recipe: Recipe, base_dir: Path) -> Recipe:
    """Return the recipe with absolute paths: the job runs in its run directory."""

    def absolute(path: str) -> str:
        return str((base_dir / with_home(path)).absolute())

    def absolute_or_none(path: str | None) -> str | None:
        return None if path is None else absolute(path)

    training, backend = recipe.training, recipe.backend
    return replace(
        recipe,
        backend=replace(backend, path=absolute_or_none(backend.path), script=absolute_or_none(backend.script)),
        training=replace(
            training,
            checkpoint_path=absolute_or_none(training.checkpoint_path),
            start_from=absolute_or_none(training.start_from),
            tensorboard=absolute_or_none(training.tensorboard),
            export=training.export and replace(training.export, path=absolute(training.export.path)),
        ),
        data=with_absolute_paths(recipe.data, absolute, backend.traits.ships_trainer),
        tracking=tracking_with_absolute_paths(recipe.tracking, absolute_or_none),
        code=replace(recipe.code, path=absolute_or_none(recipe.code.path)),
        workdir=absolute_or_none(recipe.workdir),
    )


def _resolve(keys: dict[str, Any], document: Document, base_dir: Path) -> Recipe:
    """Return the recipe with every key in its place; what its parts name is looked up from `base_dir`."""
    layout, training = keys.get("layout", {}), training_from(keys["training"])
    length = training.sequence_length
    backend = keys["backend"]
    of_transformers = backend.traits.ships_trainer and backend.script is None
    model, notes = _part("model", document, lambda spec: resolve_model(spec, base_dir, length, of_transformers))
    cluster = _part("cluster", document, lambda spec: load_cluster(spec, base_dir))
    nodes = keys["nodes"] if isinstance(keys["nodes"], dict) else {"count": keys["nodes"]}
    restart = keys.get("restart") or (Restart() if training.checkpoint_path is not None else None)
    resolved = {
        "model": model,
        "cluster": cluster,
        "nodes": nodes["count"],
        "training": training,
        "pins": pins_from(layout),
        "techniques": techniques_from(layout, keys["training"], keys.get("what_if", {})),
        "slurm": {**over_site_options(cluster.slurm, keys.get("slurm", {})), **keys.get("slurm_plugins", {})},
        "secrets": tuple(dict.fromkeys(keys.get("secrets", ()))),
        "container": container_at(cluster.site, keys["container"], base_dir) if keys.get("container") else None,
        "restart": None if restart == NO_RESTART else restart,
        "preflight": keys.get("preflight", False) or keys.get("spare_nodes", 0) > 0,
    }
    return Recipe(
        **{name: keys[name] for name in key_names(Recipe) if name in keys} | resolved,
        at_least_nodes=nodes.get("at_least"),
        path=str(document.name),
        assumptions=(
            *notes,
            *_stretched(model, length),
            *number_notes(training.numbers, cluster.accelerator),
        ),
        fixed=fixed_names(layout, keys["training"]),
        layers_by_stage=layout.get("layers_by_stage"),
        preference=layout.get("preference", True),
        technique_limit=layout.get("techniques"),
    )


def _part(name: str, document: Document, resolve: Callable[[Any], Resolved]) -> Resolved:
    """Resolve a part of the recipe that may name a file. Raises its UserError at the recipe's own line."""
    spec = document.value[name]
    try:
        return resolve(spec)
    except UserError as error:
        raise _at(document, name, spec, error) from None


def _at(document: Document, key: str, spec: str | Mapping[str, Any], error: UserError) -> UserError:
    from llmlaunch.documents.problems import report

    inside: KeyPath = ()
    if isinstance(error, BadKey) and not isinstance(spec, str):
        return report(document, [((key, *error.key), error.problem)])
    if not isinstance(spec, str) and "base" in spec:
        inside = ("base",)
    return report(document, [((key, *inside), str(error))])


def _stretched(model: ModelShape, sequence_length: int) -> tuple[str, ...]:
    if sequence_length <= model.max_position_embeddings or model.position_embedding == "learned_absolute":
        return ()
    return (
        f"sequences of {sequence_length} are longer than the {model.max_position_embeddings} {model.name} is built for",
    )
