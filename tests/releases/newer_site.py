"""The cluster of another release, and who uses it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from debian import Release
from one_machine import Cluster, new_cluster, throw_away
from person import NORMAL_USER, Person, at_home

NODES = 6


@dataclass(frozen=True)
class Site:
    """A release's cluster. Which nodes are whose: what is cut off or taken away must not be another story's."""

    release: Release
    cluster: Cluster
    program: str
    """What runs its words in the release."""
    once: threading.Lock = field(default_factory=threading.Lock)
    made: dict[str, Any] = field(default_factory=dict)

    @property
    def version(self) -> str:
        return self.release.slurm

    @property
    def common(self) -> list[str]:
        return [f"node{number}" for number in (1, 2)]

    @property
    def cut(self) -> list[str]:
        return [f"node{number}" for number in (3, 4, 5)]

    @property
    def preempted(self) -> str:
        return "node6"

    def only(self, *nodes: str) -> str:
        every = (f"node{number}" for number in range(1, NODES + 1))
        return "slurm.exclude=" + ",".join(node for node in every if node not in nodes)

    def person(self, name: str, cluster: Cluster | None = None, *, normal: bool = False) -> Person:
        """Someone with a home of that name; root, unless he is a `normal` user."""
        user = ("setpriv", f"--reuid={NORMAL_USER}", f"--regid={NORMAL_USER}", "--clear-groups") if normal else ()
        cluster = cluster or self.cluster
        return at_home(cluster, cluster.directory.parent / name, (self.program, *user))

    def share(self, name: str, make: Callable[[], Any]) -> Any:
        """What `make` returned to the first who asked for it."""
        with self.once:
            if name not in self.made:
                self.made[name] = make()
        return self.made[name]

    @contextmanager
    def alone(self, name: str, **settings: str) -> Iterator[Person]:
        """Someone with a cluster of one node of his own, to be broken."""
        with cluster_inside(self.program, 1, settings) as cluster:
            yield self.person(name, cluster)


@contextmanager
def cluster_inside(program: str, nodes: int, settings: Mapping[str, str]) -> Iterator[Cluster]:
    cluster = replace(new_cluster({"CPUS": "8", **settings}), inside=(program,))
    try:
        cluster.do("up", str(nodes))
        yield cluster
    finally:
        throw_away(cluster)
