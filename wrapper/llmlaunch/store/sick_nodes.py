"""Nodes that ended runs, by cluster: recorded by `collect`, excluded from new jobs for a while, and forgiven."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, select

from llmlaunch.store.database import Store
from llmlaunch.store.tables import sick_nodes

__all__ = ["DAY_SECONDS", "Failure", "SickNode", "forgive", "put_failures", "sick_nodes_of"]

DAY_SECONDS = 86400.0
FIRST_DAYS, MOST_DAYS = 7.0, 60.0


@dataclass(frozen=True)
class Failure:
    """One attempt that a node ended. `since` is the time of the failure in unix seconds."""

    cluster: str
    node: str
    run_id: str
    attempt: str
    kind: str
    reason: str
    since: float


@dataclass(frozen=True)
class SickNode:
    """A node that jobs should avoid until `until` (unix seconds): a week after its last failure, twice that with each
    further one, at most 60 days. The rest is of the last failure."""

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
        rest = {"kind": failure.kind, "reason": failure.reason, "since": failure.since}
        mine = [sick_nodes.c[name] == value for name, value in key.items()]
        if connection.execute(sick_nodes.update().where(*mine).values(rest)).rowcount == 0:
            connection.execute(sick_nodes.insert(), {**key, **rest})


def sick_nodes_of(store: Store, now: float, clusters: Sequence[str] | None = None) -> list[SickNode]:
    """Return the nodes to avoid at `now`, of all clusters unless some are named, the latest failure first."""
    wanted = select(sick_nodes).where(sick_nodes.c.forgiven_at.is_(None)).order_by(sick_nodes.c.since)
    by_node: dict[tuple[str, str], list[Any]] = {}
    with store.read() as connection:
        for row in connection.execute(wanted):
            by_node.setdefault((row.cluster, row.node), []).append(row)
    nodes = []
    for (cluster, node), rows in by_node.items():
        last, days = rows[-1], min(FIRST_DAYS * 2.0 ** (len(rows) - 1), MOST_DAYS)
        until = last.since + days * DAY_SECONDS
        if until > now and (clusters is None or cluster in clusters):
            nodes.append(SickNode(cluster, node, last.kind, last.reason, last.since, until, len(rows), last.run_id))
    return sorted(nodes, key=lambda sick: (-sick.since, sick.node))


def forgive(store: Store, node: str, now: float, cluster: str | None = None) -> int:
    """Forgive the failures of a node so far, on every cluster unless one is named, and return their number."""
    chosen = sick_nodes.update().where(sick_nodes.c.node == node, sick_nodes.c.forgiven_at.is_(None))
    if cluster is not None:
        chosen = chosen.where(sick_nodes.c.cluster == cluster)
    with store.write() as connection:
        return int(connection.execute(chosen.values(forgiven_at=now)).rowcount)
