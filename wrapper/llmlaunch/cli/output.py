"""The standard streams of a command: its result alone on stdout, messages beside it on stderr, each warning once.

Where stdout cannot be written (`| head`, a full disk), the command ends with `OutputLost`. Where stderr cannot be
written, the command goes on without messages. A stream that was closed (`>&-`) becomes /dev/null: otherwise its number
would go to the next file that is opened, into which others would then write.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TextIO, cast

import click

from llmlaunch.cli.waiting import waiting_line_erased
from llmlaunch.errors import OutputLost
from llmlaunch.report.terminal import filled, shown_on
from llmlaunch.rundir.foreign_values import number_in
from llmlaunch.rundir.values import printable

ASKED_ON = "llmlaunch.on"
"""Key of click's context: the host, and its folder, that somebody elsewhere named behind --on to run this command."""


def say(text: object, err: bool = False) -> None:
    """Write a line to stdout, or to stderr, without what a terminal would obey: text may have come from a file."""
    with waiting_line_erased():
        click.echo(printable(str(text)), err=err)


def say_next(*steps: tuple[str, str]) -> None:
    """Write the commands a person may want to type now to stdout, the likeliest first, each with its purpose beside it
    where it has one: the last lines of a screen. Commands come from `to_type`; nothing of this belongs to `--json`."""
    for line in next_lines(steps):
        say(line)


def next_lines(steps: Sequence[tuple[str, str]]) -> list[str]:
    """Return the lines of `say_next`, for a screen that outlives its terminal. Purposes stand in one column; one that
    has no room there right behind its command, or below it."""
    room = shown_on().width
    steps = _as_typed_elsewhere(steps)
    width = max((len(command) for command, purpose in steps if purpose), default=0)
    lines = []
    for i, (command, purpose) in enumerate(steps):
        head = "Next: " if i == 0 else "      "
        remark = f"  # {purpose}" if purpose else ""
        aligned, close = f"{head}{command:<{width}}{remark}".rstrip(), f"{head}{command}{remark}"
        if room is None or len(aligned) <= room:
            lines.append(aligned)
        elif len(close) <= room:
            lines.append(close)
        else:
            lines += [f"{head}{command}", *(filled(purpose, room, "        # ", "        # ") if purpose else [])]
    return lines


def _as_typed_elsewhere(steps: Sequence[tuple[str, str]]) -> Sequence[tuple[str, str]]:
    """Return the steps as a person types them who named this machine behind --on: those that take it, with it."""
    context = click.get_current_context(silent=True)
    on = None if context is None else context.meta.get(ASKED_ON)
    if context is None or not on:
        return steps
    root = context.find_root()
    changed = []
    for command, purpose in steps:
        llmlaunch, name, *words = command.split(" ", 2)
        known = root.command.get_command(root, name) if isinstance(root.command, click.Group) else None
        if getattr(known, "runs_on_hosts", False):
            changed.append((" ".join([llmlaunch, name, "--on", shlex.quote(on), *words]), purpose))
    return changed


def say_next_of_table(*steps: tuple[str, str]) -> None:
    """Say the same of output that people pipe into other programs (tables, logs, records): on stderr, and only where
    stdout is a terminal, so that a pipe holds the rows alone and a log stays quiet."""
    if sys.stdout.isatty():
        for line in next_lines(steps):
            say(line, err=True)


def notify(message: str, colour: str | None = None) -> None:
    """Write a message to stderr: on a terminal in lines that fit, and in its colour unless NO_COLOR asks for none;
    elsewhere as it is, so that a log can be searched. Several runs of one command share their warnings, and what is
    worth a colour, so each is written once."""
    context = click.get_current_context(silent=True)
    shown = set() if context is None else context.meta.setdefault("llmlaunch.warnings", set())
    if message.startswith("warning: ") or colour is not None:
        if message in shown:
            return
        shown.add(message)
    if not sys.stderr.isatty():
        say(message, err=True)
        return
    surface, lines = shown_on(sys.stderr), printable(message).split("\n")
    text = "\n".join(part for line in lines for part in filled(line, surface.width))
    with waiting_line_erased():
        click.echo(click.style(text, fg=colour) if colour is not None and surface.colours else text, err=True)


def print_json(value: Any) -> None:
    """Write the result to stdout, in ASCII: JSON's own escapes stand for what a terminal would obey."""
    click.echo(json.dumps(value, indent=2))


@contextlib.contextmanager
def standard_streams() -> Iterator[None]:
    """Make the standard streams usable, and restore them at the end."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free, which is this one
    before = sys.stdout, sys.stderr
    out, err = (stream or _null_stream(number) for number, stream in ((1, sys.stdout), (2, sys.stderr)))
    if hasattr(out, "reconfigure"):
        # file names need not be text, and a terminal's encoding need not have our characters
        out.reconfigure(errors="backslashreplace")
    sys.stdout = cast("TextIO", _Stream(out, _raise))
    sys.stderr = cast("TextIO", _Stream(err, lambda _: None))
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def _null_stream(number: int) -> TextIO:
    return open(number, "w", encoding="utf-8", closefd=False)


def _raise(failure: OSError) -> None:
    raise OutputLost(failure) from failure


class _Stream:
    """A text stream whose failing writes are handed to `failed`; what its buffers still hold is thrown away."""

    def __init__(self, stream: TextIO, failed: Callable[[OSError], None]) -> None:
        self._stream, self._failed = stream, failed

    def write(self, text: str) -> int:
        if text != "":  # click writes nothing to test a stream, and ignores the outcome
            self._attempt(lambda: self._stream.write(text))
        return len(text)

    def writelines(self, lines: list[str]) -> None:
        self.write("".join(lines))

    def flush(self) -> None:
        self._attempt(self._stream.flush)

    def _attempt(self, act: Callable[[], object]) -> None:
        try:
            act()
        except OSError as failure:
            redirect_to_null(self._stream)
            self._failed(failure)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def redirect_to_null(stream: TextIO) -> None:
    """Redirect a broken stream to /dev/null, or what is left in its buffers would fail again at exit."""
    with contextlib.suppress(OSError, ValueError):
        void = os.open(os.devnull, os.O_WRONLY)
        os.dup2(void, stream.fileno())
        os.close(void)


class FiniteRange(click.FloatRange):
    """A finite decimal number within bounds."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, str) and number_in(value) is None:
            self.fail(f"{value[:40]!r} is no finite number", param, ctx)
        return super().convert(value, param, ctx)
