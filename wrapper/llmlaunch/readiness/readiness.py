"""What a job needs and may lack, looked for where it is submitted, so that it does not wait in the queue to fail."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping

from llmlaunch.findings import DOUBTFUL, MISSING, NOTE, UNSEEN, Finding, doubtful, missing
from llmlaunch.frozen import frozen
from llmlaunch.layout import Layout
from llmlaunch.recipe.sections import webhook_host
from llmlaunch.recipe.types import Recipe
from llmlaunch.recipe.written import place_of

Environment = Mapping[str, str]
Look = Callable[[Recipe, Layout, Environment], Iterator[Finding]]


@frozen
class Readiness:
    """`missing` are sentences on what the job would fail without, `doubtful` on what may not be as it is wanted, and
    `notes` on what cannot be seen from this machine. Each begins with the line and the key of the recipe."""

    missing: tuple[str, ...] = ()
    doubtful: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def readiness_of(recipe: Recipe, layout: Layout, environment: Environment) -> Readiness:
    """Look for everything the job reads and writes. `environment` is that of the person who submits."""
    return in_sentences(recipe, (found for look in _looks(recipe) for found in look(recipe, layout, environment)))


def script_inputs(recipe: Recipe, layout: Layout, environment: Environment) -> Readiness:
    """Look for what the job of a person's own script reads and writes. What runs it is the script's business."""
    return in_sentences(recipe, (found for look in _files(recipe) for found in look(recipe, layout, environment)))


def in_sentences(recipe: Recipe, findings: Iterable[Finding]) -> Readiness:
    """Return the findings by kind, each with its line in the recipe and each once; unseen paths are one warning."""
    sentences: dict[str, dict[str, None]] = {MISSING: {}, DOUBTFUL: {}, UNSEEN: {}, NOTE: {}}
    for finding in findings:
        key = ".".join(map(str, finding.key))
        line = f"{place_of(recipe, finding.key)}: {key}: {finding.sentence}"
        sentences[finding.kind][f"{key} {finding.sentence}" if finding.kind == UNSEEN else line] = None
    warnings = list(sentences[DOUBTFUL])
    if sentences[UNSEEN]:
        paths = ", ".join(sentences[UNSEEN])
        warnings.append(f"{recipe.path}: not checked, because this machine cannot see the path: {paths}")
    return Readiness(tuple(sentences[MISSING]), tuple(warnings), tuple(sentences[NOTE]))


def _looks(recipe: Recipe) -> Iterator[Look]:
    """Yield what there is to look for. Modules are imported where a recipe needs them: `check` should feel instant."""
    yield _secrets
    yield _notices
    from llmlaunch.readiness.trainer_files import trainer_findings

    yield trainer_findings
    yield from _files(recipe)


def _files(recipe: Recipe) -> Iterator[Look]:
    """Yield what there is to look for of data, weights and folders."""
    if not recipe.data.mock:
        from llmlaunch.readiness.data_files import data_findings

        yield data_findings
    if recipe.training.start_from is not None:
        from llmlaunch.readiness.weights import weight_findings

        yield weight_findings
    from llmlaunch.readiness.written_folders import folder_findings

    yield folder_findings
    if recipe.training.checkpoint_path is not None:
        from llmlaunch.readiness.checkpoints import checkpoint_findings

        yield checkpoint_findings


def _secrets(recipe: Recipe, _: Layout, environment: Environment) -> Iterator[Finding]:
    for name in recipe.secrets:
        if not environment.get(name):
            yield missing(("secrets",), f"{name} is not set here; export it where you submit")


def _notices(recipe: Recipe, _: Layout, environment: Environment) -> Iterator[Finding]:
    """Yield what keeps notices from arriving. No message holds the address."""
    notices = recipe.notify
    if notices is None:
        return
    if notices.webhook is not None and not environment.get(notices.webhook):
        yield missing(("notify", "webhook"), f"{notices.webhook} is not set here; export it where you submit")
    elif notices.webhook is not None and webhook_host(environment[notices.webhook]) is None:
        problem = "holds no http or https address; export the whole address, such as https://HOST/PATH"
        yield missing(("notify", "webhook"), f"{notices.webhook} {problem}")
    if notices.command and shutil.which(notices.command[0]) is None:
        problem = "is no program of this machine; name it by a path that the job's first node has, too"
        yield doubtful(("notify", "command"), f"{notices.command[0]} {problem}")
