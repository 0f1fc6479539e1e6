"""What every sink does, inside its own process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from llmlaunch.sinks.figures import Figures

__all__ = ["Mark", "Sink", "unlike"]


@dataclass(frozen=True)
class Mark:
    """A run that the store holds; `mark` changes with it."""

    run_id: str
    mark: str


class Sink(Protocol):
    """May raise anything: then the runs not yet sent are sent the next time."""

    def due(self, marks: Sequence[Mark]) -> list[str]:
        """The runs (the newest first in `marks`) that are to be sent: those that are not there, or not as they are."""
        ...

    def send(self, run: Figures, mark: str) -> None:
        """Write one run, over what is there of it."""
        ...

    def finish(self) -> None:
        """After the last run."""
        ...


def unlike(marks: Sequence[Mark], held: Mapping[str, str]) -> list[str]:
    """The runs whose mark is not the one that is `held` by their id."""
    return [one.run_id for one in marks if held.get(one.run_id) != one.mark]
