"""Nodes with signs against them, by cluster: recorded by `collect`, excluded from new jobs for a while where the signs
are enough, suspected where they are not, and forgiven."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, select

from llmlaunch.causes.suspects import ENOUGH_SIGNS
from llmlaunch.store.database import Store
from llmlaunch.store.tables import sick_nodes

DAY_SECONDS = 86400.0
CRASH = "crash"  # the kind of cause
FIRST_DAYS, MOST_DAYS = 7.0, 60.0
SIGN_DAYS = 14.0
"""So long a sign waits for another one. On a large cluster every node is pointed at once in a while."""


@dataclass(frozen=True)
class Failure:
    """One attempt with signs against a node. `since` is the time of the failure in unix seconds, `signs` how many
    independent ones there were."""

    cluster: str
    node: str
    run_id: str
    attempt: str
    kind: str
    reason: str
    since: float
    signs: int = ENOUGH_SIGNS


@dataclass(frozen=True)
class SickNode:
    """A node that jobs should avoid until `until` (unix seconds): a week after its last failure, twice that with each
    further one, at most 60 days. A failure is an attempt by which the signs of the last two weeks were enough.

    With `failures` 0 it is only suspected, and `until` is when that is forgotten. The rest is of the last attempt.
    """

    cluster: str
    node: str
    kind: str
    reason: str
    since: float
    until: float
    failures: int
    run_id: str

    def as_json(self) -> dict[str, Any]:
        return dict(vars(self))


def put_failures(connection: Connection, failures: Iterable[Failure]) -> None:
    """Insert or update failures inside the caller's transaction. A forgiven one stays forgiven."""
    for failure in failures:
        key = {name: getattr(failure, name) for name in ("cluster", "node", "run_id", "attempt")}
        rest = {"kind": failure.kind, "reason": failure.reason, "since": failure.since, "signs": failure.signs}
        mine = [sick_nodes.c[name] == value for name, value in key.items()]
        if connection.execute(sick_nodes.update().where(*mine).values(rest)).rowcount == 0:
            connection.execute(sick_nodes.insert(), {**key, **rest})


def sick_nodes_of(store: Store, now: float, clusters: Sequence[str] | None = None) -> list[SickNode]:
    """Return the nodes to avoid at `now`, of all clusters unless some are named, the latest failure first."""
    return [node for node in _judged_nodes(store, now, clusters) if node.failures]


def suspects_of(store: Store, now: float, clusters: Sequence[str] | None = None) -> list[SickNode]:
    """Return the nodes against which there is a sign at `now`, but not enough of them to avoid the node."""
    return [node for node in _judged_nodes(store, now, clusters) if not node.failures]


def _judged_nodes(store: Store, now: float, clusters: Sequence[str] | None) -> list[SickNode]:
    wanted = select(sick_nodes).where(sick_nodes.c.forgiven_at.is_(None)).order_by(sick_nodes.c.since)
    by_node: dict[tuple[str, str], list[Any]] = {}
    with store.read() as connection:
        for row in connection.execute(wanted):
            by_node.setdefault((row.cluster, row.node), []).append(row)
    chosen = {key: rows for key, rows in by_node.items() if clusters is None or key[0] in clusters}
    nodes = [node for key, rows in chosen.items() for node in (_judged(key, rows, now),) if node is not None]
    return sorted(nodes, key=lambda sick: (-sick.since, sick.node))


def _judged(key: tuple[str, str], rows: Sequence[Any], now: float) -> SickNode | None:
    """The node as its attempts, the oldest first, make it at `now`; None where nothing counts against it any more."""
    failures = [place for place in range(len(rows)) if _signs(rows[: place + 1]) >= ENOUGH_SIGNS]
    if failures:
        last, days = rows[failures[-1]], min(FIRST_DAYS * 2.0 ** (len(failures) - 1), MOST_DAYS)
        until = last.since + days * DAY_SECONDS
        if until > now:
            return SickNode(*key, last.kind, last.reason, last.since, until, len(failures), last.run_id)
    last = rows[-1]
    until = last.since + SIGN_DAYS * DAY_SECONDS
    return SickNode(*key, last.kind, last.reason, last.since, until, 0, last.run_id) if until > now else None


def _signs(rows: Sequence[Any]) -> int:
    """The signs of the two weeks up to the last attempt. First crashes of one run are one sign."""
    recent = [row for row in rows if row.since > rows[-1].since - SIGN_DAYS * DAY_SECONDS]
    crashes = {row.run_id for row in recent if row.kind == CRASH}
    return sum(int(row.signs) for row in recent if row.kind != CRASH) + len(crashes)


def forgive(store: Store, node: str, now: float, cluster: str | None = None) -> int:
    """Forgive the failures of a node so far, on every cluster unless one is named, and return their number."""
    chosen = sick_nodes.update().where(sick_nodes.c.node == node, sick_nodes.c.forgiven_at.is_(None))
    if cluster is not None:
        chosen = chosen.where(sick_nodes.c.cluster == cluster)
    with store.write() as connection:
        return int(connection.execute(chosen.values(forgiven_at=now)).rowcount)
