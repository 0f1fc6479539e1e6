"""How far long work is, for whoever shows it to a waiting person: the rooms below say it, a command listens."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

Listener = Callable[[str, int, int], None]
"""Hears what is counted, how many are done, and of how many."""

Item = TypeVar("Item")

_listeners: list[Listener] = []


def report(what: str, done: int, total: int) -> None:
    """Say how many of `what` are done. Where nobody listens this costs nothing."""
    if _listeners:
        _listeners[-1](what, done, total)


def counting(what: str, items: Sequence[Item]) -> Iterator[Item]:
    """Yield the items, and say before each how many are done."""
    for done, item in enumerate(items):
        report(what, done, len(items))
        yield item


@contextlib.contextmanager
def heard_by(listener: Listener) -> Iterator[None]:
    """Hand every report of what is done meanwhile to the listener."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)
