"""`llmlaunch completion`: what a shell runs to complete commands, runs, recipes and keys; and the words it is answered.

A shell asks by the environment variable `_LLMLAUNCH_COMPLETE` (click's protocol). What an argument is completed with
follows from its metavar, so a command needs nothing of its own here.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import click
from click.shell_completion import BashComplete, CompletionItem, add_completion_class, get_completion_class

from llmlaunch.errors import UserError
from llmlaunch.store.location import LAST
from llmlaunch.user_data import with_home

VARIABLE = "_LLMLAUNCH_COMPLETE"
SHELLS = ("bash", "zsh", "fish")
_MOST_RUNS = 50
_RECIPES, _SCRIPTS = (".yaml", ".yml"), (".sbatch", ".sh", ".slurm")
Words = Callable[[Sequence[str], str], Iterable[str]]
"""From the words before, and the beginning of this one, to those it may become."""


@click.command("completion")
@click.argument("shell", type=click.Choice(SHELLS), required=False)
def completion_command(shell: str | None) -> int:
    """Print what makes SHELL complete commands, options, runs, recipes and KEY=VALUE; SHELL is yours unless named.

    \b
    eval "$(llmlaunch completion bash)"                        in ~/.bashrc
    eval "$(llmlaunch completion zsh)"                         in ~/.zshrc
    llmlaunch completion fish > ~/.config/fish/completions/llmlaunch.fish
    """
    name = shell or Path(os.environ.get("SHELL", "")).name
    _register()
    kind = get_completion_class(name) if name in SHELLS else None
    if kind is None:
        raise UserError(f"completion: SHELL is {name or 'not set'}; name one of {', '.join(SHELLS)}")
    commands = click.get_current_context().find_root().command
    click.echo(kind(commands, {}, "llmlaunch", VARIABLE).source())
    return 0


class _Bash(BashComplete):
    """click's, without a space behind what goes on: `layout.`, `nodes=` and `folder/`."""

    source_template = BashComplete.source_template.replace(
        "COMPREPLY+=($value)",
        'COMPREPLY+=("$value")\n            [[ $value == *[=./] ]] && compopt -o nospace',
    )


def _register() -> None:
    add_completion_class(_Bash, "bash")


def completed(command: click.Command) -> click.Command:
    """Return the command with arguments that know what they may be. Only a shell that asks needs it."""
    _register()
    for parameter in command.params:
        words = _words_of(command, parameter)
        if words:
            parameter.type = _Completed(words)
    return command


def _words_of(command: click.Command, parameter: click.Parameter) -> list[Words]:
    by_metavar = [words for part, words in _BY_METAVAR.items() if part in (parameter.metavar or "")]
    return by_metavar or list(_BY_NAME.get((command.name, parameter.name), ()))


class _Completed(click.types.StringParamType):
    """Any text, completed with the words of `sources`; with file names where there are none."""

    name = "text"

    def __init__(self, sources: Sequence[Words]) -> None:
        self._sources = sources

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        before = ctx.params.get(param.name or "") or ()
        words = (
            word
            for source in self._sources
            for word in source((before,) if isinstance(before, str) else before, incomplete)
        )
        items = [CompletionItem(word) for word in dict.fromkeys(words)]
        return items or [CompletionItem(incomplete, type="file")]


def _gallery(before: Sequence[str], incomplete: str) -> Iterator[str]:
    from llmlaunch.app.gallery import gallery

    return (name for name in gallery() if name.startswith(incomplete))


def _schemas(before: Sequence[str], incomplete: str) -> Iterator[str]:
    from llmlaunch.recipe.key_reference import schema_names

    return (name for name in schema_names() if name.startswith(incomplete))


def _clusters(before: Sequence[str], incomplete: str) -> Iterator[str]:
    from llmlaunch.cluster.load import profile_names

    return (name for name in profile_names() if name.startswith(incomplete))


def _models(before: Sequence[str], incomplete: str) -> Iterator[str]:
    from llmlaunch.families.hub_ids import preset_names

    return (name for name in preset_names() if name.startswith(incomplete))


def _runs(before: Sequence[str], incomplete: str) -> Iterator[str]:
    """Return `last` and the newest runs' ids; nothing where the store cannot be read, since nobody asked for it."""
    from llmlaunch.store.location import store_exists

    names = [LAST]
    with contextlib.suppress(UserError):
        if store_exists():
            from llmlaunch.store.database import open_store
            from llmlaunch.store.runs import RunFilter, list_runs

            with open_store() as store:
                names += [run.run_id for run in list_runs(store, RunFilter(limit=_MOST_RUNS))]
    return (name for name in names if name.startswith(incomplete) and name not in before)


def _recipe_files(before: Sequence[str], incomplete: str) -> Iterator[str]:
    return _files(incomplete, _RECIPES)


def _script_files(before: Sequence[str], incomplete: str) -> Iterator[str]:
    return _files(incomplete, _SCRIPTS)


def _files(incomplete: str, endings: tuple[str, ...]) -> Iterator[str]:
    folder, slash, start = incomplete.rpartition("/")
    place = with_home(f"{folder}/" if slash else ".")
    with contextlib.suppress(OSError):
        for entry in sorted(place.iterdir()):
            if entry.name.startswith(start) and (start or not entry.name.startswith(".")):
                if entry.is_dir():
                    yield f"{folder}{slash}{entry.name}/"
                elif entry.suffix in endings:
                    yield f"{folder}{slash}{entry.name}"


def _overrides(before: Sequence[str], incomplete: str) -> Iterator[str]:
    """Return the keys level by level, `layout.` before `layout.tensor=`, and behind `=` what a key takes.

    Bash takes words apart at `=` and replaces only what stands behind it; other shells replace the whole word.
    """
    from llmlaunch.recipe.key_reference import recipe_keys

    keys = recipe_keys()
    apart = [word for word in before[-2:] if word != "="]
    if before and (before[-1] == "=" or before[-1] in keys) and apart[-1:] and apart[-1] in keys:
        yield from (value for value in _values(apart[-1], incomplete))
        return
    key, equals, value = incomplete.partition("=")
    if equals:
        yield from (f"{key}={word}" for word in _values(key, value))
        return
    for name, entry in keys.items():
        if name.startswith(incomplete) and "." not in name[len(incomplete) :].rstrip("."):
            if entry.is_mapping:
                yield f"{name}."
            if entry.is_value:
                yield f"{name}="


def _values(key: str, start: str) -> Iterable[str]:
    from llmlaunch.recipe.key_reference import recipe_keys

    named = {"model": _models, "cluster": _clusters}.get(key)
    if named is not None:
        return named((), start)
    entry = recipe_keys().get(key)
    return (word for word in (entry.words if entry else ()) if word.startswith(start))


_BY_NAME: dict[tuple[str | None, str | None], tuple[Words, ...]] = {
    ("init", "names"): (_gallery,),
    ("init", "cluster"): (_clusters,),
    ("check", "cluster"): (_clusters,),
    ("schema", "name"): (_schemas,),
    ("diff", "first"): (_recipe_files, _runs),
    ("diff", "second"): (_recipe_files, _runs),
}
_BY_METAVAR: dict[str, Words] = {
    "RUN": _runs,
    "RECIPE": _recipe_files,
    "SCRIPT": _script_files,
    "KEY=VALUE": _overrides,
}
