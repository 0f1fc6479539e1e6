"""What a job needs on another machine, which is asked whether it is there: paths of the recipe and variables.

What lies in files there is not read: a dataset's index or a checkpoint is judged by who submits on the cluster itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path, PurePath

from llmlaunch.documents.yaml_strict import KeyPath
from llmlaunch.findings import Finding, host_path, missing, path_state
from llmlaunch.frameworks.registry import framework_of
from llmlaunch.frozen import frozen
from llmlaunch.readiness.data_files import datasets
from llmlaunch.readiness.weights import learning_rate_findings
from llmlaunch.readiness.written_folders import written_folders
from llmlaunch.recipe.containers import is_path
from llmlaunch.recipe.types import Recipe

Lacking = Callable[[Sequence[str], Sequence[str], Sequence[str]], frozenset[str]]
"""Of the paths that are read, those that are written and the variables: what the machine lacks."""


@frozen
class Need:
    """A path or a variable by the key that names it."""

    key: KeyPath
    name: str


def findings_elsewhere(recipe: Recipe, machine: str, code: Path | None, lacking: Lacking) -> Iterator[Finding]:
    """Yield what the job would fail without on `machine`. `code` is the folder of this machine that travels with the
    run: what lies in it is looked for here."""
    read = [Need(need.key, str(host_path(recipe, need.name))) for need in _read(recipe)]
    travelling = [need for need in read if code is not None and PurePath(need.name).is_relative_to(code)]
    for need in travelling:
        if path_state(Path(need.name)) != "here":
            yield missing(need.key, f"{need.name} is not there, in the code that travels with the run; name what is")
    read = [need for need in read if need not in travelling]
    written = [Need(key, str(host_path(recipe, path))) for key, path in written_folders(recipe)]
    variables = [Need(("secrets",), name) for name in recipe.secrets]
    if recipe.notify is not None and recipe.notify.webhook is not None:
        variables.append(Need(("notify", "webhook"), recipe.notify.webhook))
    variable = framework_of(recipe).needed_variable(recipe)
    if variable is not None and recipe.container is None:
        variables.append(Need(("backend",), variable))
    yield from learning_rate_findings(recipe)
    lacks = lacking(*([need.name for need in needs] for needs in (read, written, variables)))
    for need in read:
        if need.name in lacks:
            yield missing(need.key, f"{need.name} is not there on {machine}; copy it there, or name what is there")
    for need in written:
        if need.name in lacks:
            yield missing(need.key, f"{need.name}: you may not write there on {machine}; name a folder of yours there")
    for need in variables:
        if need.name in lacks:
            yield missing(
                need.key, f"{need.name} is not set on {machine}; export it in ~/.bash_profile there: none travels"
            )


def _read(recipe: Recipe) -> Iterator[Need]:
    """Yield the absolute paths that the job reads."""
    backend, data = recipe.backend, recipe.data
    named: list[tuple[KeyPath, str | None]] = [
        (("backend", "script"), backend.script),
        (("backend", "path"), backend.path),
        (("training", "start_from"), recipe.training.start_from),
        (("python",), recipe.python if recipe.container is None else None),
    ]
    if not data.mock and backend.reads_data_keys:
        named += [*datasets(recipe), (("data", "tokenizer"), data.tokenizer)]
    if recipe.container is not None:
        image = recipe.container.image
        named.append((("container", "image"), image if is_path(image) else None))
    for key, path in named:
        if path is not None and path.startswith("/"):
            yield Need(key, path)
