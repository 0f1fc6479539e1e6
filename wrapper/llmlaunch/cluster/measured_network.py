"""What a measured matrix of bandwidths is worth to the groups of a job whose nodes stand in a known order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from llmlaunch.cluster.matrix import BandwidthMatrix, slurm_order
from llmlaunch.columns import FloatColumn, IntColumn
from llmlaunch.placement.objective import inverse
from llmlaunch.placement.search import nearest_neighbours

__all__ = ["MeasuredNetwork", "measured_network"]


@dataclass(frozen=True)
class MeasuredNetwork:
    """`seconds_per_byte[a, b]` is what one device of node rank `a` takes for a byte to its like on node rank `b` while
    all devices send; the diagonal is 0. Node rank n holds the global ranks from n x `devices_per_node` on.

    A group is `size` ranks, `stride` apart, as in `timing/network.py`. Every method takes columns of both and returns a
    column of seconds per byte; 0 where no group leaves its node.
    """

    seconds_per_byte: FloatColumn
    devices_per_node: int
    _known: dict[tuple[str, int, int], float] = field(default_factory=dict, compare=False, repr=False)

    def ring(self, size: FloatColumn, stride: FloatColumn) -> FloatColumn:
        """Return the seconds per byte of the slowest link of any group's ring, which goes from node to node in the
        order of ranks and back to the first (nccl src/graph/connect.cc, connectRings).
        """
        return self._by_group("ring", self._slowest_link, size, stride)

    def chain(self, size: FloatColumn, stride: FloatColumn) -> FloatColumn:
        """Return the mean seconds per byte of one hop on the slowest path through all ranks of a group and back
        (Pipette's T_pp).
        """
        return self._by_group("chain", self._slowest_way, size, stride)

    def exchange(self, size: FloatColumn, stride: FloatColumn) -> FloatColumn:
        """Return the mean seconds per byte from the slowest node to the ranks on other nodes of its group."""
        return self._by_group("exchange", self._slowest_sender, size, stride)

    def _by_group(
        self, name: str, worst: Callable[[IntColumn], float], size: FloatColumn, stride: FloatColumn
    ) -> FloatColumn:
        """Apply `worst` once to each different (size, stride), and return the result for every layout."""
        pairs = np.stack(np.broadcast_arrays(size, stride)).astype(np.int64)
        different, which = np.unique(pairs, axis=1, return_inverse=True)
        values = np.zeros(different.shape[1])
        for place, (members, apart) in enumerate(different.T.tolist()):
            key = (name, members, apart)
            if key not in self._known:
                self._known[key] = worst(self._nodes_of_groups(members, apart))
            values[place] = self._known[key]
        return values[which.reshape(-1)]

    def _nodes_of_groups(self, size: int, stride: int) -> IntColumn:
        """Return node ranks, one row for each different group.

        Groups that do not divide the job, which no layout has, are cut off at its end.
        """
        world = len(self.seconds_per_byte) * self.devices_per_node
        size = max(min(size, world // stride), 1)
        block = size * stride
        first = np.arange(max(world // block, 1))[:, None] * block + np.arange(stride)[None, :]
        ranks = first.reshape(-1, 1) + np.arange(size)[None, :] * stride
        nodes = np.minimum(ranks // self.devices_per_node, len(self.seconds_per_byte) - 1)
        return np.unique(nodes, axis=0)

    def _slowest_link(self, nodes: IntColumn) -> float:
        return float(self.seconds_per_byte[nodes, np.roll(nodes, -1, axis=1)].max(initial=0.0))

    def _slowest_way(self, nodes: IntColumn) -> float:
        here, there = nodes[:, :-1], nodes[:, 1:]
        hops = self.seconds_per_byte[here, there] + self.seconds_per_byte[there, here]
        crossing = np.maximum((here != there).sum(axis=1), 1)
        return float((hops.sum(axis=1) / (2.0 * crossing)).max(initial=0.0))

    def _slowest_sender(self, nodes: IntColumn) -> float:
        worst = 0.0
        for group in nodes:
            members, count = np.unique(group, return_counts=True)
            away = np.maximum(len(group) - count, 1)
            sent = self.seconds_per_byte[np.ix_(members, members)] @ count
            worst = max(worst, float((sent / away).max()))
        return worst


def measured_network(
    matrix: BandwidthMatrix, nodes: int, devices_per_node: int, order: Sequence[int] | None = None
) -> MeasuredNetwork:
    """Return the network between the nodes of a job.

    `order[rank]` is the row of the matrix that gets that node rank. None is a chain in which each node is followed by
    the nearest node left, so it does not depend on the job's layout. Nodes that are not in the matrix get the median of
    its links, as at job start (`node/place.py`).
    """
    rows = slurm_order(matrix, nodes) if order is None else list(order)
    seconds = np.array(inverse([[matrix.bytes_per_second[a][b] for b in rows] for a in rows]))
    if order is None:
        chain = nearest_neighbours(seconds.tolist())
        seconds = seconds[np.ix_(chain, chain)]
    missing = nodes - len(rows)
    if missing > 0:
        links = seconds[~np.eye(len(rows), dtype=bool)]
        seconds = np.pad(seconds, (0, missing), constant_values=float(np.median(links)))
        np.fill_diagonal(seconds, 0.0)
    return MeasuredNetwork(seconds, devices_per_node)
