"""What the reader of a stream can see: how wide its lines are, whether it draws blocks and shows colours."""

from __future__ import annotations

import os
import re
import sys
from textwrap import wrap
from typing import TextIO

from llmlaunch.frozen import frozen
from llmlaunch.rundir.foreign_values import is_whole_number

LEAST_WIDTH = 40  # columns: nothing is made to fit a narrower screen
BLOCKS = "█▓░│▏"


@frozen
class Surface:
    """`width` is the number of columns, None where nothing needs to fit: a pipe gets whole lines, which scripts can
    search. `blocks` says whether the encoding has Unicode's blocks, `colours` whether they are shown."""

    width: int | None = None
    blocks: bool = True
    colours: bool = False


PIPE = Surface()


def shown_on(stream: TextIO | None = None) -> Surface:
    """Return what the reader of `stream`, stdout unless another is named, can see. COLUMNS says how wide the screen is,
    in a pipe too; NO_COLOR asks for no colours."""
    stream = sys.stdout if stream is None else stream
    on_terminal = stream.isatty()
    return Surface(_columns(stream, on_terminal), _has_blocks(stream), on_terminal and not os.environ.get("NO_COLOR"))


def _columns(stream: TextIO, on_terminal: bool) -> int | None:
    stated = os.environ.get("COLUMNS", "")
    if is_whole_number(stated) and int(stated) > 0:
        return max(int(stated), LEAST_WIDTH)
    if not on_terminal:
        return None
    try:
        columns = os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError):
        return None
    return max(columns, LEAST_WIDTH) if columns else None


def _has_blocks(stream: TextIO) -> bool:
    try:
        BLOCKS.encode(stream.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


# what a person copies: a command with its arguments, text in backticks, a short mapping of YAML
_ARGUMENT = r"-[^\s,;]+|'[^']*'|[A-Z]+\b|[^\s,;()]*[/=.][^\s,;()]*[^\s,;().]"
_ARGUMENT = r"-[^\s,;]+|'[^']*'|[A-Z]+\b|[^\s,;()]*[/=.][^\s,;()]*[^\s,;().]"
_WHOLE = re.compile(rf"llmlaunch [a-z-]+(?: (?:{_ARGUMENT}))*|`[^`]*`|\{{[^{{}}\n]{{,40}}\}}")
_KEPT_SPACE = "\0"


def filled(text: str, width: int | None, first: str = "", others: str = "") -> list[str]:
    """Return the text in lines of at most `width` columns, after `first` and then after `others`. Lines break between
    words alone: a path or a command stays whole, so that it can be copied, though it be longer than the line."""
    if width is None or len(first) + len(text) <= width:
        return [f"{first}{text}".rstrip()]
    lines = wrap(
        _WHOLE.sub(lambda match: match[0].replace(" ", _KEPT_SPACE), text),
        width,
        initial_indent=first,
        subsequent_indent=others,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [line.replace(_KEPT_SPACE, " ") for line in lines]
