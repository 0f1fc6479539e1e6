"""The measured bandwidth between every two nodes of a cluster, its file (docs/placement.md), and what it means for the
groups of a job whose nodes are in a known order."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Any

import numpy as np

from llmlaunch.columns import FloatColumn, IntColumn
from llmlaunch.documents.yaml_strict import read_text
from llmlaunch.errors import UserError
from llmlaunch.frozen import frozen
from llmlaunch.rundir.values import counted, shortened
from llmlaunch.units import GB

_MAX_BYTES = 64 << 20  # 2,500 nodes
_SPEEDS = "gigabytes_per_second"
_KEYS = ("schema", "nodes", _SPEEDS, "measured")
_AGAIN = "measure again with llmlaunch doctor --network"

Key = tuple[str | int, ...]


@frozen
class BandwidthMatrix:
    """`bytes_per_second[i][j]` is what each device of `nodes[i]` sends to the corresponding device of `nodes[j]` when
    all of them send. The diagonal is 0 and has no meaning. `path` is the file from which it was read."""

    nodes: tuple[str, ...]
    bytes_per_second: tuple[tuple[float, ...], ...]
    path: str = field(default="", compare=False)


def slurm_order(matrix: BandwidthMatrix, nodes: int) -> list[int]:
    """Return the matrix rows of the nodes for which a job of this size is priced, in SLURM's order: the first by name,
    because it is unknown which ones SLURM will allocate. There are fewer if the matrix has fewer nodes."""
    return sorted(range(len(matrix.nodes)), key=lambda i: matrix.nodes[i])[:nodes]


def matrix_text(
    nodes: Sequence[str], bytes_per_second: Sequence[Sequence[float]], measured: Mapping[str, Any] | None = None
) -> str:
    """Return the text of a matrix file, one row per line. `measured` describes the measurement."""
    speeds = [
        [None if i == j else float(f"{speed / GB:.6g}") for j, speed in enumerate(row)]
        for i, row in enumerate(bytes_per_second)
    ]
    rows = ",\n".join(f"  {json.dumps(row)}" for row in speeds)
    about = f' "measured": {json.dumps(dict(measured))},\n' if measured else ""
    return (
        f'{{\n "schema": 1,\n{about} "nodes": {json.dumps(list(nodes))},\n "gigabytes_per_second": [\n{rows}\n ]\n}}\n'
    )


def merged(old: BandwidthMatrix, new: BandwidthMatrix) -> BandwidthMatrix:
    """Return `new`, or, if the old matrix has all its nodes and more, the old one with the new links in it."""
    place = {name: index for index, name in enumerate(old.nodes)}
    if not set(new.nodes) <= set(place):
        return new
    rows = [list(row) for row in old.bytes_per_second]
    for i, sender in enumerate(new.nodes):
        for j, receiver in enumerate(new.nodes):
            rows[place[sender]][place[receiver]] = new.bytes_per_second[i][j]
    return BandwidthMatrix(old.nodes, tuple(map(tuple, rows)))


def read_matrix(path: Path) -> BandwidthMatrix:
    """Return the matrix in a file.

    Raises `UserError` with file, place, problem and remedy unless the matrix is complete, positive and square.
    """
    return _Reader(path).matrix()


class _Reader:
    def __init__(self, path: Path) -> None:
        self.path = path

    def matrix(self) -> BandwidthMatrix:
        document = self._document()
        nodes = self._nodes(document["nodes"])
        rows = document[_SPEEDS]
        if not isinstance(rows, list) or len(rows) != len(nodes):
            count = counted(len(rows), "row") if isinstance(rows, list) else "no list of rows"
            raise self._wrong(
                (_SPEEDS,), f"there are {len(nodes)} nodes but {count}; give one row for each node, {_AGAIN}"
            )
        for i in range(len(nodes)):
            self._check_row(nodes, rows, i)
        for i in range(len(nodes)):
            self._check_zeros(nodes, rows, i)
        speeds = tuple(
            tuple(0.0 if i == j else float(speed) * GB for j, speed in enumerate(row)) for i, row in enumerate(rows)
        )
        return BandwidthMatrix(nodes, speeds, str(self.path))

    def _document(self) -> dict[str, Any]:
        try:
            document = json.loads(read_text(self.path, _MAX_BYTES), object_pairs_hook=_once)
        except ValueError as error:
            line = getattr(error, "lineno", 1)
            raise UserError(f"{self.path}:{line}: is not valid JSON: {error}; {_AGAIN}") from None
        except RecursionError:
            raise UserError(f"{self.path}: is nested too deep for a matrix of bandwidths; {_AGAIN}") from None
        if not isinstance(document, dict):
            raise UserError(f"{self.path}: is no JSON object with nodes and {_SPEEDS}; {_AGAIN}")
        for key in document:
            if key not in _KEYS:
                raise self._wrong((key,), f"is not a known key; known: {', '.join(_KEYS)}")
        for key in _KEYS[:3]:
            if key not in document:
                raise UserError(f"{self.path}: {key}: is missing; {_AGAIN}")
        if document["schema"] != 1:
            raise self._wrong(("schema",), "is another version of the format than 1; use the llmlaunch that wrote it")
        return document

    def _nodes(self, nodes: Any) -> tuple[str, ...]:
        if not isinstance(nodes, list) or len(nodes) < 2:
            raise self._wrong(("nodes",), "must be a list of at least two node names, as SLURM calls them")
        rows: dict[str, int] = {}
        for index, name in enumerate(nodes):
            if not isinstance(name, str) or not name or name.split() != [name]:
                raise self._wrong(("nodes", index), f"{_shown(name)} is no node name; write it as SLURM does")
            if name in rows:
                raise self._wrong(
                    ("nodes", index), f"{name} stands twice; name each node once, with one row and column"
                )
            rows[name] = index
        return tuple(nodes)

    def _check_row(self, nodes: Sequence[str], rows: Sequence[Any], i: int) -> None:
        row = rows[i]
        if not isinstance(row, list):
            raise self._wrong((_SPEEDS, i), f"the row of {nodes[i]} is no list; give {counted(len(nodes), 'number')}")
        if len(row) != len(nodes):
            raise self._wrong(
                (_SPEEDS, i),
                f"the row of {nodes[i]} has {len(row)} numbers for {len(nodes)} nodes; a matrix is square: {_AGAIN}",
            )
        for j, speed in enumerate(row):
            if i == j and speed is None:
                continue
            problem = _problem(speed)
            if problem:
                raise self._wrong((_SPEEDS, i, j), f"{nodes[i]} to {nodes[j]} is {_shown(speed)}, {problem}; {_AGAIN}")

    def _check_zeros(self, nodes: Sequence[str], rows: Sequence[Sequence[float]], i: int) -> None:
        for j, speed in enumerate(rows[i]):
            if i == j or speed > 0:
                continue
            back = rows[j][i]
            reason = f"though {nodes[j]} to {nodes[i]} is {back:g}" if back > 0 else "and so is the way back"
            raise self._wrong(
                (_SPEEDS, i, j),
                f"{nodes[i]} to {nodes[j]} is 0, {reason}: nothing was sent there; leave out a node that cannot be "
                f"reached, or {_AGAIN}",
            )

    def _wrong(self, key: Key, problem: str) -> UserError:
        named = str(key[0]) + "".join(f"[{part}]" for part in key[1:])
        return UserError(f"{self.path}: {named}: {problem}")


def _problem(speed: Any) -> str | None:
    if isinstance(speed, bool) or not isinstance(speed, (int, float)):
        return "no number"
    if speed > 1e9 and speed != math.inf:
        return "more than any network does"
    if not math.isfinite(speed):
        return "no finite number"
    return "negative" if speed < 0 else None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the object if no key occurs twice in it. Raises ValueError."""
    members = dict(pairs)
    if len(members) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {next(key for key in keys if keys.count(key) > 1)!r} stands twice")
    return members


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return shortened(text)


@frozen
class MeasuredNetwork:
    """The network between the nodes of a job. `seconds_per_byte[a, b]` is what one device of node rank `a` takes to
    send a byte to the corresponding device of node rank `b` while all devices send; the diagonal is 0. Node rank n has
    the global ranks from n x `devices_per_node` on.

    A group is `size` ranks, `stride` apart, as in `timing/network.py`. Every method takes columns of both and returns a
    column of seconds per byte, which is 0 if no group leaves its node.
    """

    seconds_per_byte: FloatColumn
    devices_per_node: int
    _known: dict[tuple[str, int, int], float] = field(default_factory=dict, compare=False, repr=False)

    def ring(self, size: FloatColumn, stride: FloatColumn) -> FloatColumn:
        """Return the seconds per byte of the slowest link in the ring of any group. The ring goes from node to node in
        the order of ranks and back to the first (nccl src/graph/connect.cc, connectRings)."""
        return self._by_group("ring", self._slowest_link, size, stride)

    def chain(self, size: FloatColumn, stride: FloatColumn) -> FloatColumn:
        """Return the mean seconds per byte of one hop on the slowest path through all ranks of a group and back
        (Pipette's T_pp)."""
        return self._by_group("chain", self._slowest_way, size, stride)

    def exchange(self, size: FloatColumn, stride: FloatColumn) -> FloatColumn:
        """Return the mean seconds per byte from the slowest node to the ranks of its group on other nodes."""
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

    `order[rank]` is the matrix row of the node with that node rank. None stands for a chain in which each node is
    followed by the nearest remaining node, so that it does not depend on the job's layout. Nodes that are not in the
    matrix get the median of its links, as at job start (`node/place.py`).
    """
    from llmlaunch.placement.search import nearest_neighbours
    from llmlaunch.placement.traffic import inverse

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
