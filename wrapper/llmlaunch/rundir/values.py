"""Values from the files of a run directory: checked by form, and made fit to be shown in messages.

Anybody who can write into a run directory chooses what its files say. A job id becomes an argument of `scancel`, an
attempt a part of a path, and a reason goes to a terminal: each is checked or cleaned here. A number or text that is not
what it should be counts as None.
"""

from __future__ import annotations

import re
import shlex
from pathlib import PurePath
from typing import Any

_INT64 = 2**63


def byte_count(value: object) -> int | None:
    """Return a whole number that is not negative and fits a database, else None."""
    return value if type(value) is int and 0 <= value < _INT64 else None


def bytes_within(total: int | None, value: object) -> int | None:
    """Return a number of bytes, None where the device has fewer in total and so it is no measurement: interposers have
    returned 17 TiB (Project-HAMi/HAMi issue 1181)."""
    count = byte_count(value)
    return None if count is None or (total and count > total) else count


def whole_number(value: object) -> int | None:
    return value if type(value) is int else None


def count_above_zero(value: object) -> int | None:
    return value if type(value) is int and value > 0 else None


def number(value: object) -> float | None:
    """Return a finite number that is not negative, else None."""
    return float(value) if type(value) in (int, float) and 0 <= value < 1e300 else None  # type: ignore[operator, arg-type]


def time_or_none(value: object) -> float | None:
    """Return unix seconds, else None."""
    return value if type(value) in (int, float) and 0 < value < 1e11 else None  # type: ignore[operator, return-value]


def text_or_none(value: object) -> str | None:
    """Return a text that is not empty, else None."""
    return value if isinstance(value, str) and value else None


def objects_in(values: object) -> list[dict[str, Any]]:
    """Return the JSON objects of a list; none where it is no list."""
    return [value for value in values if isinstance(value, dict)] if isinstance(values, list) else []


# SLURM numbers jobs with 32 bits and tasks of an array below MaxArraySize, at most 4,000,001 (slurm.conf(5)).
_SLURM_JOB = re.compile(r"[1-9][0-9]{0,9}(?:_[0-9]{1,7})?", re.ASCII)
_LOCAL_JOB = re.compile(r"local-[0-9]{1,12}-[1-9][0-9]{0,9}", re.ASCII)
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,254}", re.ASCII)
_RUN_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:+@-]{0,199}", re.ASCII)
_RESTARTS = re.compile(r"[0-9]{1,6}", re.ASCII)
_NUMBERS = re.compile(r"\[([0-9]{1,9}(?:-[0-9]{1,9})?(?:,[0-9]{1,9}(?:-[0-9]{1,9})?)*)\]", re.ASCII)
# what is between two commas outside of brackets; every alternative takes a character that no other does
_PARTS = re.compile(r"(?:[^,\[]|\[[^\[\]]*\]|\[(?![^\[\]]*\]))+")
MOST_BRACKETS = 16  # of one name; SLURM itself knows as many dimensions as a cluster has, at most 5
MOST_HOSTS = 100_000  # of one expression; SLURM itself stops at 64,000 (MAX_RANGE in its hostlist.c)
_FALLBACK = re.compile(r"fallback/[1-9][0-9]{0,3}", re.ASCII)
_FEWER_NODES = re.compile(r"nodes/[1-9][0-9]{0,5}", re.ASCII)

# CSI and OSC sequences of ECMA-48, introduced by ESC or by their single C1 character. An OSC that never ends is left
# to the replacement of its introducer, so that it cannot swallow the rest of the text.
_TERMINAL_SEQUENCE = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]{0,64}[ -/]{0,8}[@-~]|(?:\x1b\]|\x9d)[^\x07\x1b\x9c\n]{0,4096}(?:\x07|\x1b\\|\x9c)"
)


def is_slurm_job(text: object) -> bool:
    """Whether `text` is `12` or, as one task of an array, `12_3`."""
    return isinstance(text, str) and _SLURM_JOB.fullmatch(text) is not None


def is_local_job(text: object) -> bool:
    """Whether `text` is `local-<unix seconds>-<process id>`."""
    return isinstance(text, str) and _LOCAL_JOB.fullmatch(text) is not None


def is_job_id(text: object) -> bool:
    """Whether `text` is the id of a SLURM job or of a local one."""
    return is_slurm_job(text) or is_local_job(text)


def is_attempt(text: object) -> bool:
    """Whether `text` is `<job id>.<restarts>`."""
    if not isinstance(text, str):
        return False
    job, _, restarts = text.rpartition(".")
    return is_job_id(job) and _RESTARTS.fullmatch(restarts) is not None


def host_names(expression: str) -> list[str]:
    """Return the names a SLURM host list stands for: `n[1-2,07]` is n1, n2, n07. What is not understood, or stands for
    more than MOST_HOSTS or has more than MOST_BRACKETS, stays as it is."""
    parts = [match[0] for match in _PARTS.finditer(expression)]
    return [name for part in parts for name in (_expanded(part) if part.count("[") <= MOST_BRACKETS else [part])]


def _expanded(part: str) -> list[str]:
    numbers = _NUMBERS.search(part)
    if numbers is None:
        return [part]
    head, tails = part[: numbers.start()], _expanded(part[numbers.end() :])
    names: list[str] = []
    for span in numbers[1].split(","):
        first, _, last = span.partition("-")
        if (int(last or first) - int(first) + 1) * len(tails) + len(names) > MOST_HOSTS:
            return [part]
        names += [
            f"{head}{n:0{len(first)}d}{tail}" for n in range(int(first), int(last or first) + 1) for tail in tails
        ]
    return names


def job_of(attempt: str) -> str:
    """The job id in the name of an attempt."""
    return attempt.rpartition(".")[0]


def is_host(text: object) -> bool:
    """Whether `text` is the name of a host or node: letters, digits, `.`, `_`, `-`; never an option or a path."""
    return isinstance(text, str) and _NAME.fullmatch(text) is not None


is_cluster = is_host
is_path_component = is_host


def is_run_id(text: object) -> bool:
    """Whether `text` may name a run in the store, in a job's comment and in what sinks pass on."""
    return isinstance(text, str) and _RUN_ID.fullmatch(text) is not None


def is_fallback(text: object) -> bool:
    """Whether `text` is the folder of a fallback layout, `fallback/<number>`."""
    return isinstance(text, str) and _FALLBACK.fullmatch(text) is not None


def is_for_fewer_nodes(text: object) -> bool:
    """Whether `text` is the folder of a layout for fewer nodes than planned, `nodes/<number>`."""
    return isinstance(text, str) and _FEWER_NODES.fullmatch(text) is not None


def printable(text: str) -> str:
    """`text` as it may go to a terminal: without escape sequences, and with "?" for each other character that a
    terminal would obey or that hides or reorders its neighbours (C0, C1, bidirectional overrides, lone surrogates).

    Line breaks and tabs stay; `report.text.one_line` replaces them, too.
    """
    if text.isprintable():
        return text
    plain = _TERMINAL_SEQUENCE.sub("", text)
    return "".join(c if c.isprintable() or c in "\n\t" else "?" for c in plain)


# Controls, what reorders or hides its neighbours (bidirectional and zero-width characters), lone surrogates, line and
# paragraph separators. Spaces of other widths are what they look like.
_MISLEADING = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u0600-\u0605\u061c\u06dd\u070f\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff"
    "\ufeff\ufff9-\ufffb\U000e0001\U000e0020-\U000e007f]"
)


def with_escapes(text: str) -> str:
    """`text` as it may go to a page: `\\u202e` and the like stand for characters that hide or reorder their neighbours.
    Line breaks and tabs stay."""
    return text if text.isascii() and text.isprintable() else _MISLEADING.sub(_escape, text)


def _escape(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def shortened(text: str, most: int = 60) -> str:
    """Return `text`, or its beginning and `...` if it has more than `most` characters."""
    return text if len(text) <= most else f"{text[: most - 3]}..."


def counted(count: float, noun: str, form: str = "") -> str:
    """Return `1 sequence` or `2 sequences`; `form` is how the number is formatted, such as `,`."""
    plural = "" if count == 1 else "es" if noun.endswith(("s", "x", "ch", "sh")) else "s"
    return f"{count:{form}} {noun}{plural}"


def to_type(*arguments: object) -> str:
    """Return the llmlaunch command with these arguments for a person to copy into a shell, quoted where they need it.

    A path that begins with a dash gets `./` before it, so that it is not read as an option.
    """
    texts = [
        f"./{argument}" if isinstance(argument, PurePath) and str(argument).startswith("-") else str(argument)
        for argument in arguments
    ]
    return " ".join(["llmlaunch", *map(shlex.quote, texts)])
