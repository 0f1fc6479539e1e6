"""The cluster of another release, and who uses it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from debian import Release
from one_machine import Cluster, new_cluster, throw_away
from person import NORMAL_USER, Person, at_home

NODES = 2


@dataclass(frozen=True)
class Site:
    """A release's cluster."""

    release: Release
    cluster: Cluster
    program: str
    """What runs its words in the release."""

    @property
    def version(self) -> str:
        return self.release.slurm

    def person(self, name: str, *, normal: bool = False) -> Person:
        """Someone with a home of that name; root, unless he is a `normal` user."""
        user = ("setpriv", f"--reuid={NORMAL_USER}", f"--regid={NORMAL_USER}", "--clear-groups") if normal else ()
        return at_home(self.cluster, self.cluster.directory.parent / name, (self.program, *user))


@contextmanager
def cluster_inside(program: str) -> Iterator[Cluster]:
    cluster = replace(new_cluster({"CPUS": "8"}), inside=(program,))
    try:
        cluster.do("up", str(NODES))
        yield cluster
    finally:
        throw_away(cluster)
