"""At job start, when the nodes are known: which of them gets which node rank.

The order comes from the measured matrix of the cluster profile, else from SLURM's own topology, else it stays SLURM's.
Nothing that goes wrong here fails a job: then the order stays, and the record says why.
"""

from __future__ import annotations

import os
import re
import statistics
import subprocess
from typing import TYPE_CHECKING, NamedTuple

from ..placement.search import place
from ..placement.traffic import Sizes, Volumes, inverse, term_seconds, traffic
from ..rundir import file_names
from ..rundir.file_names import attempt_folder
from ..rundir.files import read_object
from ..rundir.foreign_values import is_whole_number
from ..rundir.placement_files import NodeOrder, PlacementFile
from ..rundir.schema import sound
from ..rundir.values import counted, host_names
from .files import note_in_attempt, say

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from ..placement.search import Placement
    from ..placement.traffic import Term

    Unit = tuple[int, frozenset[str]]  # level from the leaves up, the nodes below

BUDGET_SECONDS = 3.0
SCONTROL_SECONDS = 20.0
SLURMS_ORDER = "slurm"
LEAST_GAIN = 0.0005  # worth naming
_FIELD = re.compile(r"(\w+)=(\S+)")


class Source(NamedTuple):
    """Bandwidths between the job's nodes, and where they are from: "matrix" or "topology"."""

    name: str
    description: str
    bytes_per_second: list[list[float]]


def node_order(
    run_directory: Path, attempt: str, layout: str, nodes: Sequence[str], budget_seconds: float = BUDGET_SECONDS
) -> list[str]:
    """Return the nodes by node rank; `nodes` are in SLURM's order. Adds the order to the attempt's `attempt.json`."""
    try:
        record = _decide(run_directory / layout, list(nodes), budget_seconds)
    except Exception as error:  # the job goes on in any case
        record = _unchanged(list(nodes), f"placing failed: {type(error).__name__}: {error}")
    try:
        note_in_attempt(attempt_folder(run_directory, attempt), {"placement": record})
    except OSError as error:
        say(f"the order of the nodes is not written down: {error.strerror}")
    say(f"node order: {record['why']}")
    return record["order"]


def _decide(layout: Path, nodes: list[str], budget_seconds: float) -> NodeOrder:
    if len(nodes) == 1:
        return _unchanged(nodes, "there is one node")
    job = sound(PlacementFile, read_object(layout / file_names.PLACEMENT))
    if job is None:
        return _unchanged(nodes, "SLURM's order: placement.json cannot be read")
    terms = _terms(job)
    if not terms:
        return _unchanged(nodes, "SLURM's order: nothing that depends on the order crosses from node to node")
    why: list[str] = []
    source = _from_matrix(job, nodes, why) or _from_topology(job, nodes, why)
    if source is None:
        return _unchanged(nodes, f"SLURM's order: {'; '.join(why)}")
    return _placed(nodes, terms, source, place(terms, inverse(source.bytes_per_second), budget_seconds))


def _terms(job: PlacementFile) -> dict[str, Term]:
    volumes = job["bytes"]
    sent = Volumes(
        float(volumes["pipeline"]), tuple(volumes["data"]), tuple(volumes["expert_data"]), float(volumes["expert"])
    )
    devices = job["devices_per_node"]
    return traffic(Sizes(**job["layout"]), sent, devices, job.get("nvlink_domain_devices") or devices)


def _placed(nodes: list[str], terms: dict[str, Term], source: Source, placement: Placement) -> NodeOrder:
    order = [nodes[index] for index in placement.order]
    best = ", and no order takes less" if placement.proved else ""
    gain = 1.0 - placement.seconds / placement.before_seconds
    if order == nodes:
        why = f"SLURM's order: no better one was found{best} (by {source.description})"
    elif gain < LEAST_GAIN:
        why = (
            f"changed by {source.description}: as long between nodes as SLURM's order, but over fewer slow links{best}"
        )
    else:
        why = f"changed by {source.description}: {gain:.1%} less time between nodes than in SLURM's order{best}"
    cost = inverse(source.bytes_per_second)
    return {
        "order": order,
        "source": source.name,
        "seconds": placement.seconds,
        "slurm_order_seconds": placement.before_seconds,
        "terms": term_seconds(terms, placement.order, cost),
        "slurm_order_terms": term_seconds(terms, range(len(nodes)), cost),
        "proved": placement.proved,
        "why": why,
    }


def _unchanged(nodes: list[str], why: str) -> NodeOrder:
    return {"order": nodes, "source": SLURMS_ORDER, "why": why}


def _from_matrix(job: PlacementFile, nodes: Sequence[str], why: list[str]) -> Source | None:
    """The profile's matrix for these nodes; a pair it does not know gets the median of those it does."""
    matrix = job.get("matrix")
    if matrix is None:
        why.append("the cluster profile has no measured matrix")
        return None
    place_of = {name: index for index, name in enumerate(matrix["nodes"])}
    rows = matrix["gigabytes_per_second"]
    measured = [(a, b) for a in nodes for b in nodes if a != b and a in place_of and b in place_of]
    if not measured:
        why.append(f"the measured matrix knows fewer than two of these {counted(len(nodes), 'node')}")
        return None
    speeds = {(a, b): rows[place_of[a]][place_of[b]] * 1e9 for a, b in measured}
    median = statistics.median(speeds.values())
    missing = sum(node not in place_of for node in nodes)
    description = "the measured matrix" + (f" ({missing} of {len(nodes)} nodes not in it: median)" if missing else "")
    return Source("matrix", description, [[speeds.get((a, b), median) for b in nodes] for a in nodes])


def _from_topology(job: PlacementFile, nodes: Sequence[str], why: list[str]) -> Source | None:
    environment = {name: value for name, value in os.environ.items() if name != "SLURM_TOPO_LEN"}  # cuts lines off
    try:
        answer = subprocess.run(
            ["scontrol", "show", "topology"],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            timeout=SCONTROL_SECONDS,
            check=False,
            env=environment,
        ).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        why.append(f"scontrol show topology: {error}")
        return None
    levels = switch_levels(answer, nodes)
    if levels is None:
        why.append("scontrol show topology sets no two of these nodes apart")
        return None
    leaf = job["fabric_gigabytes_per_second"] * 1e9
    return Source("topology", "SLURM's topology, each level of switches taken for half as fast",
                  guessed_bandwidth(levels, leaf))  # fmt: skip


def switch_levels(text: str, nodes: Sequence[str]) -> list[list[int]] | None:
    """For each pair of `nodes` the level of the lowest switch (or block) above both: 0 is a leaf switch. Pairs with
    none in common are one level above all. None where the text tells nothing that sets one pair apart from another.

    Reads the lines of topology/tree (`SwitchName= Level= ... Nodes=`) and topology/block (`BlockName=` 23.11 on,
    `AggregatedBlock=` 24.05 on; slurm src/plugins/topology/*/topology_*.c, 22.05 to 26.05).
    """
    wanted = set(nodes)
    units = sorted(_units(text, wanted), key=lambda unit: unit[0])
    top = 1 + max((level for level, _ in units), default=0)
    levels = [[0 if a == b else _level(units, a, b, top) for b in nodes] for a in nodes]
    apart = {level for i, row in enumerate(levels) for j, level in enumerate(row) if i != j}
    return levels if len(apart) > 1 else None


def guessed_bandwidth(levels: Sequence[Sequence[int]], leaf_bytes_per_second: float) -> list[list[float]]:
    """Each level up halves it: not measured, but nearer is always faster."""
    return [[leaf_bytes_per_second / 2**level for level in row] for row in levels]


def _units(text: str, wanted: set[str]) -> Iterator[Unit]:
    sizes: list[tuple[int, frozenset[str]]] = []
    for line in text.splitlines():
        fields: dict[str, str] = dict(_FIELD.findall(line))
        below = frozenset(host_names(fields.get("Nodes", ""))) if "Nodes" in fields else frozenset()
        if "SwitchName" in fields and is_whole_number(fields.get("Level", "")):
            yield int(fields["Level"]), below & wanted
        elif "BlockName" in fields:
            yield 0, below & wanted
        elif "AggregatedBlock" in fields:
            sizes.append((len(below), below & wanted))
    # aggregated blocks have no level of their own: the larger, the higher
    steps = sorted({size for size, _ in sizes})
    for size, below in sizes:
        yield 1 + steps.index(size), below


def _level(units: Sequence[Unit], a: str, b: str, top: int) -> int:
    return next((level for level, below in units if a in below and b in below), top)
