"""Who hears what becomes of a job while nobody looks: a webhook, a command, or both."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal
from urllib.parse import urlsplit

from llmlaunch.documents.keys import key, section
from llmlaunch.documents.text import EnvironmentName, Line

__all__ = ["Notices", "receivers", "webhook_host"]

Event = Literal["start", "first_step", "stall", "restart", "slow", "bad_loss", "end"]


@section
class Notices:
    """Notices of what becomes of a job."""

    webhook: EnvironmentName | None = key(
        "Name of a variable, set where you submit, with the address to which notices are posted as Slack's JSON",
        default=None,
    )
    command: tuple[Line, ...] = key(
        "Program and arguments, run on the job's first node with each notice as JSON on its standard input", default=()
    )
    events: tuple[str, ...] | None = key(
        "The events that are told; absent = all",
        default=None,
        written=tuple[Event, ...] | None,
        min_length=1,
    )

    @staticmethod
    def check_keys(keys: Mapping[str, Any]) -> None:
        """Raise ValueError where nobody would hear of anything, or the variable may be one of job.sbatch's own."""
        if keys.get("webhook") is None and not keys.get("command"):
            raise ValueError("names neither a webhook nor a command; name one of them, or remove notify")
        if (name := keys.get("webhook")) and name != name.upper():
            raise ValueError(
                f"webhook is {name}; write the variable in capitals, as the job script has its own in small ones"
            )


def receivers(notices: Notices, environment: Mapping[str, str]) -> str:
    """Return where notices go, of an address its host alone, and which: the row of a dry run."""
    parts = []
    if notices.webhook is not None:
        host = webhook_host(environment.get(notices.webhook, ""))
        parts.append(f"{host or 'an address that is missing'} (${notices.webhook})")
    if notices.command:
        parts.append(f"the command {notices.command[0]}")
    events = "all" if notices.events is None else ", ".join(notices.events)
    return f"{' and '.join(parts)}: {events}"


def webhook_host(address: str) -> str | None:
    """Return the host of an http or https address; None for anything else."""
    try:
        parts = urlsplit(address.strip())
        return parts.hostname if parts.scheme in ("http", "https") else None
    except ValueError:
        return None
