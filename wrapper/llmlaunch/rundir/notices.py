"""The notices of a run as their files tell: `notices.jsonl` of each attempt (docs/notices.md)."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from . import file_names
from .attempt_files import NoticeLine
from .files import parse_json, read_tail
from .schema import sound
from .values import printable

if TYPE_CHECKING:
    from pathlib import Path


EVENTS = ("start", "first_step", "stall", "restart", "slow", "bad_loss", "end")

_MOST_BYTES = 2**20


def notice_lines(run_directory: Path, attempt: str) -> list[NoticeLine]:
    """Return the lines of an attempt's notices, the newest MiB of them; none of what is missing or torn."""
    lines = []
    with contextlib.suppress(OSError):
        path = file_names.attempt_folder(run_directory, attempt) / file_names.NOTICES
        for line in read_tail(path, _MOST_BYTES).splitlines():
            with contextlib.suppress(ValueError):
                notice = sound(NoticeLine, parse_json(line))
                if notice is not None:
                    lines.append(notice)
    return lines


def undelivered_notices(run_directory: Path, attempt: str) -> list[str]:
    """Return what kept each notice of an attempt from its receiver, as `end to the webhook: HTTP 404`.

    One that is on its way counts as delivered: nobody can tell it from one that was killed with its job.
    """
    outcomes: dict[tuple[str, str, str], NoticeLine] = {}
    for line in notice_lines(run_directory, attempt):
        outcomes[line.get("event", ""), line.get("text", ""), line.get("to", "")] = line
    return [
        printable(f"{event} to the {receiver}: {why}" if receiver else why)
        for (event, _, receiver), line in outcomes.items()
        if line.get("delivered") is False and (why := line.get("why"))
    ]
