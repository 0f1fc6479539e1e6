"""`--on HOST[:FOLDER]`: the command runs on another machine, by ssh, in FOLDER there (docs/laptop.md)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from llmlaunch.cli.output import ASKED_ON
from llmlaunch.launchers.ssh import ON_VARIABLE

if TYPE_CHECKING:
    from llmlaunch.launchers.ssh.host import Host


FOLDERS = "llmlaunch-work"
"""Holds the folders of who names none, in the home on the host."""


class HostCommand(click.Command):
    """A command that takes --on."""

    runs_on_hosts = True

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.params.append(
            click.Option(["--on"], metavar="HOST[:FOLDER]", help="Run this there, by ssh, in FOLDER (docs/laptop.md).")
        )

    def invoke(self, ctx: click.Context) -> Any:
        typed = ctx.params.pop("on")
        if typed is None:
            ctx.meta[ASKED_ON] = os.environ.pop(ON_VARIABLE, None)  # jobs do not inherit it
            return super().invoke(ctx)
        from llmlaunch.launchers.ssh.host import host_at

        return self.run_on(host_at(typed, f"{FOLDERS}/{Path.cwd().name}"), ctx)

    def run_on(self, host: Host, ctx: click.Context) -> int:
        """Run what was typed on a host, and return its exit code."""
        return host.run(self.words(ctx))

    def words(self, ctx: click.Context, **changed: Any) -> list[str]:
        """Return the words that were typed, without --on. `changed` are values that are others there."""
        options, arguments = list[str](), list[str]()
        for parameter in self.params:
            name = str(parameter.name)
            if ctx.get_parameter_source(name) is not ParameterSource.COMMANDLINE or name == "on":
                continue
            value = changed.get(name, ctx.params[name])
            if isinstance(parameter, click.Option):
                options += _option_words(parameter, value)
            else:
                arguments += map(str, value if isinstance(value, tuple) else (value,))
        if any(word.startswith("-") for word in arguments):
            return [str(self.name), *options, "--", *arguments]
        return [str(self.name), *arguments, *options]


def _option_words(option: click.Option, value: Any) -> Iterator[str]:
    name = max(option.opts, key=len)
    if option.is_flag:
        yield from [name] if value else []
    else:
        yield from (f"{name}={each}" for each in (value if option.multiple else (value,)))
