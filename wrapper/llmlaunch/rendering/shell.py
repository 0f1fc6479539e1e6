"""Text into shell scripts: every value is quoted unless it is marked as shell, and what quoting cannot save is refused.

Templates render in Jinja's sandbox. `finalize` sends each `{{ expression }}` through `shell_word`, so a template
author has to do something (`ShellText`) to leave a value unquoted, never to quote it. That is sound only where an
expression stands at a word position: not inside quotes, comments or here-documents. tests/unit/rendering checks the
shipped templates for it.
"""

from __future__ import annotations

import dataclasses
import re
import shlex
from collections.abc import Callable, Mapping

from llmlaunch.documents.templates import render
from llmlaunch.errors import UserError
from llmlaunch.frameworks.argument import NodeVariable

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_OPTION = re.compile(r"[a-z][a-z0-9-]*")
_CONTROL = re.compile("[\x00-\x1f\x7f\x85\u2028\u2029]")  # everything some reader takes for the end of a line, too
_PLAIN_DIRECTIVE = re.compile(r"[\w@%+=:,./\[\]*-]+", re.ASCII)  # sbatch asks the locale what a blank is


class ShellText(str):
    """Text that is shell already; the one way past the quoting."""

    __slots__ = ()


def shell_word(value: object) -> str:
    """The shell form of a value: one word, or the words of a sequence joined by spaces.

    Raises UserError for text no shell word can hold (NUL, lone surrogates) and TypeError for what has no shell
    form at all (None, mappings): that is a mistake in a template.
    """
    if isinstance(value, ShellText):
        return value
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, NodeVariable):
        return node_word(value)
    if isinstance(value, (list, tuple)):
        return " ".join(shell_word(item) for item in value)
    if value is None or isinstance(value, Mapping):
        raise TypeError(f"{type(value).__name__} has no shell form")
    return shlex.quote(_storable(str(value)))  # an undefined name raises here


def node_word(word: NodeVariable) -> str:
    """`"${NAME}"` followed by the quoted suffix: expanded where the script runs, then never split."""
    variable_name(word.name)
    suffix = shlex.quote(_storable(word.suffix)) if word.suffix else ""
    return '"${' + word.name + '}"' + suffix


def variable_name(name: str) -> str:
    """The name itself, if a shell accepts it as a variable. Raises UserError."""
    if not _VARIABLE.fullmatch(name):
        raise UserError(f"environment: {name!r} is not a variable name: letters, digits and _, no digit first")
    return name


def export(name: str, value: object) -> ShellText:
    """`export NAME=value`, quoted."""
    return ShellText(f"export {variable_name(name)}={shell_word(value)}")


def import_from(folder: object) -> ShellText:
    """A line that puts a folder first on PYTHONPATH, or nothing where it is a variable that the node has not set."""
    line = f'export PYTHONPATH={shell_word(folder)}"${{PYTHONPATH:+:$PYTHONPATH}}"'
    return ShellText(f"[[ -z ${{{folder.name}:-}} ]] || {line}" if isinstance(folder, NodeVariable) else line)


def required(name: str, advice: str) -> ShellText:
    """A line that ends the script with `advice` where the variable is unset or empty. It never shows the value.

    `advice` is our own text: it stands inside `${...:?...}` and must not hold quotes, braces, `$` or backslashes.
    """
    if re.search(r"""["'`$\\{}]""", advice):
        raise ValueError(f"not fit for a message inside an expansion: {advice!r}")
    return ShellText(f': "${{{variable_name(name)}:?{advice}}}"')


def directive(option: str, value: str | int | float | bool) -> ShellText:
    """One `#SBATCH` line, or nothing for False. True renders the bare option.

    sbatch reads these lines itself, with quoting of its own (slurm src/sbatch/opt.c, _get_argument: double quotes
    protect blanks and `#`, a backslash escapes the next character). So control characters, double quotes and
    backslashes are refused, and everything unusual is put in double quotes. Raises UserError.
    """
    where = f"slurm.{option}"
    if not _OPTION.fullmatch(option):
        raise UserError(f"{where}: not the name of an sbatch option: lower-case letters, digits and -")
    if value is False:
        return ShellText("")
    if value is True:
        return ShellText(f"#SBATCH --{option}")
    text = str(value)
    if not text.strip():
        raise UserError(f"{where}: is empty; give a value, or false to leave the option out")
    if _CONTROL.search(text):
        raise UserError(f"{where}: {text!r} holds a line break or control character; sbatch would read a second option")
    if '"' in text or "\\" in text:
        raise UserError(f"{where}: {text!r} holds a double quote or a backslash, which sbatch reads as its own")
    quoted = text if _PLAIN_DIRECTIVE.fullmatch(_storable(text)) else f'"{text}"'
    return ShellText(f"#SBATCH --{option}={quoted}")


def refuse_unwritable(value: object) -> None:
    """Raise UserError for text anywhere within `value` that no shell word can hold: what a shipped template, filled in
    with it, would refuse."""
    if isinstance(value, Mapping):
        for part in (*value.keys(), *value.values()):
            refuse_unwritable(part)
    elif isinstance(value, (list, tuple)):
        for part in value:
            refuse_unwritable(part)
    elif dataclasses.is_dataclass(value) and not isinstance(value, (type, NodeVariable)):
        for field in dataclasses.fields(value):
            refuse_unwritable(getattr(value, field.name))
    elif value is not None:
        shell_word(value)


def render_template(name: str, context: Mapping[str, object]) -> str:
    """A shell script's template, filled in (`documents.templates.render`), every expression quoted."""
    functions: dict[str, Callable[..., ShellText]] = {
        "directive": directive,
        "export": export,
        "import_from": import_from,
        "required": required,
    }
    return render(
        name,
        context,
        functions,
        autoescape=False,  # shell, not HTML: finalize does the quoting
        finalize=shell_word,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )


def _storable(text: str) -> str:
    if "\x00" in text:
        raise UserError(f"{text!r} holds a NUL character, which no argument or variable can hold")
    try:
        text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError as error:
        raise UserError(f"{text!r} holds half of a character (a lone surrogate); write the whole character") from error
    return text
