"""What a job sends between its nodes in one step, by node rank: torchrun gives node rank n the global ranks from
n x devices_per_node on, and the layout says what those ranks are to each other. And the seconds that takes in a given
order of the nodes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    Hop = tuple[int, int, float]  # from node rank, to node rank, bytes
    Path = tuple[Hop, ...]  # hops one after the other
    Term = tuple[Path, ...]  # paths at the same time: the slowest counts
    Matrix = Sequence[Sequence[float]]

# what counts as less, relative to the whole: far above rounding, far below any measurement
LESS = 1e-9


@dataclass(frozen=True)
class Sizes:
    """The parallel sizes of a layout. `data` excludes `context`, as in `llmlaunch.layout.Layout`."""

    tensor: int = 1
    context: int = 1
    data: int = 1
    pipeline: int = 1
    virtual_pipeline: int = 1
    expert: int = 1
    expert_tensor: int = 1

    @property
    def stage(self) -> int:
        """Ranks of one pipeline stage."""
        return self.tensor * self.context * self.data


@dataclass(frozen=True)
class Volumes:
    """Bytes of one step, of one device.

    pipeline: what a device sends to the next stage in all traversals of the pipeline that nothing hides.
    data, expert_data: for each stage, what passes over every link of the ring that reduces gradients and gathers
    parameters. expert: what a device sends to each other rank of its expert group.
    """

    pipeline: float = 0.0
    data: tuple[float, ...] = ()
    expert_data: tuple[float, ...] = ()
    expert: float = 0.0


def traffic(
    sizes: Sizes, volumes: Volumes, devices_per_node: int, nvlink_domain_devices: int | None = None
) -> dict[str, Term]:
    """Return the bytes that one device's share of a node's adapters carries from node to node, by term; a term that
    stays inside nodes is absent. A domain is a node where none is named.

    Ranks lie in Megatron's order tp-cp-ep-dp-pp, tensor innermost and pipeline outermost (megatron/core/
    parallel_state.py, core 0.19: `RankGenerator`; experts have a generator of their own, without context). DeepSpeed
    jobs here are data parallel alone, which is the same with one stage.
    """
    devices, domain = devices_per_node, max(nvlink_domain_devices or 0, devices_per_node)
    apart = sizes.expert * sizes.expert_tensor
    members = sizes.data * sizes.context
    terms = {
        "pipeline": _pipelines(sizes, volumes.pipeline, devices_per_node),
        "data": _rings(sizes, _shared(volumes.data, members, sizes.tensor, domain), sizes.tensor, devices),
        "expert_data": _rings(sizes, _shared(volumes.expert_data, sizes.stage // apart, apart, domain), apart, devices),
        "expert": _exchanges(sizes, volumes.expert, devices_per_node),
    }
    return {name: term for name, term in terms.items() if term}


def _pipelines(sizes: Sizes, volume: float, devices: int) -> Term:
    """Return every route through the stages: activations there, gradients back. Interleaved, each hop is made once for
    every chunk, and the last stage hands all but the last chunk back to the first."""
    if volume <= 0.0 or sizes.pipeline == 1:
        return ()
    routes: set[tuple[int, ...]] = set()
    for first in range(sizes.stage):
        routes.add(tuple((first + stage * sizes.stage) // devices for stage in range(sizes.pipeline)))
    paths = (_route(nodes, volume, sizes.virtual_pipeline) for nodes in sorted(routes))
    return tuple(path for path in paths if path)


def _route(nodes: Sequence[int], volume: float, chunks: int) -> Path:
    there = [(a, b, volume * chunks) for a, b in zip(nodes, nodes[1:])]
    if chunks > 1:
        there.append((nodes[-1], nodes[0], volume * (chunks - 1)))
    hops = [(a, b, size) for a, b, size in there if a != b]
    return tuple(hops + [(b, a, size) for a, b, size in hops])


def _shared(volumes: Sequence[float], members: int, stride: int, domain_devices: int) -> list[float]:
    """Return the bytes over each adapter of a ring's link: its members in an NVLink domain, `stride` ranks apart, share
    what leaves it, each with its own adapter (the same in `timing/network.py`, `links`)."""
    together = min(max(domain_devices // stride, 1), max(members, 1))
    return [volume / together for volume in volumes]


def _rings(sizes: Sizes, volumes: Sequence[float], stride: int, devices: int) -> Term:
    """Return the rings over the ranks of each stage that are `stride` apart. Between nodes NCCL's ring goes from node
    to node in the order of ranks and back to the first (nccl src/graph/connect.cc, connectRings), all links at once:
    each is a path of its own."""
    loads: dict[tuple[int, int], float] = {}
    for stage, volume in enumerate(volumes):
        for offset in range(stride if volume > 0.0 else 0):
            begin = stage * sizes.stage
            ranks = range(begin + offset, begin + sizes.stage, stride)
            for link in _around(sorted({rank // devices for rank in ranks})):
                loads[link] = max(volume, loads.get(link, 0.0))
    return tuple(((a, b, volume),) for (a, b), volume in sorted(loads.items()))


def _around(nodes: Sequence[int]) -> Iterator[tuple[int, int]]:
    if len(nodes) > 1:
        yield from zip(nodes, [*nodes[1:], nodes[0]])


def _exchanges(sizes: Sizes, volume: float, devices: int) -> Term:
    """Return the all-to-all of every expert group: a node sends to the others of its group one after the other."""
    span = sizes.expert * sizes.expert_tensor
    if volume <= 0.0 or span <= 1:
        return ()
    paths: set[Path] = set()
    for begin in range(0, sizes.stage * sizes.pipeline, span):
        members: dict[int, int] = {}
        for rank in range(begin, begin + span):
            members[rank // devices] = members.get(rank // devices, 0) + 1
        for node in members:
            # expert-tensor ranks share a token's work: only those of the same place in it exchange tokens
            path = [(node, to, volume * n / sizes.expert_tensor) for to, n in members.items() if to != node]
            paths.add(tuple(path))
    return tuple(sorted(path for path in paths if path))


def term_seconds(terms: Mapping[str, Term], order: Sequence[int], seconds_per_byte: Matrix) -> dict[str, float]:
    """Return the seconds by term. `order[rank]` is the node, as an index of `seconds_per_byte` (row: sender), that gets
    that node rank. Of the paths of a term the slowest counts, as in Pipette (T_pp, T_dp): all pipelines wait for the
    slowest one, a ring runs at the pace of its slowest link. Terms follow each other and add up."""
    return {
        name: max((path_seconds(path, order, seconds_per_byte) for path in term), default=0.0)
        for name, term in terms.items()
    }


def order_seconds(terms: Mapping[str, Term], order: Sequence[int], seconds_per_byte: Matrix) -> float:
    """The sum of `term_seconds`."""
    return sum(term_seconds(terms, order, seconds_per_byte).values())


def path_seconds(path: Path, order: Sequence[int], seconds_per_byte: Matrix) -> float:
    seconds = 0.0
    for a, b, size in path:
        seconds += size * seconds_per_byte[order[a]][order[b]]
    return seconds


def inverse(bytes_per_second: Matrix) -> list[list[float]]:
    """Return the seconds per byte of each pair; the diagonal, which no path uses, is 0."""
    return [[0.0 if i == j else 1.0 / speed for j, speed in enumerate(row)] for i, row in enumerate(bytes_per_second)]
