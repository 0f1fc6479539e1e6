"""The choice after the preflight: which of the allocated nodes train, and which are bad and why."""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from ..causes.cause import cause, cause_from_log
from ..causes.log_scan import read_log, scan
from ..rundir import file_names
from ..rundir.file_names import attempt_folder
from ..rundir.files import read_object, replace_json
from .files import say
from .preflight import STAGES

if TYPE_CHECKING:
    from .files import Record

TOO_FEW = 3
SLOW = 2.0  # times the median of all nodes' slowest devices: only clear outliers
NOT_STARTED = "the preflight did not start on it"
_DOES = {
    "devices": "show its devices",
    "matmul": "compute on every device",
    "joined": "reach the others",
    "reduced": "finish the all-reduce with the others",
}


def main(argv: list[str]) -> int:
    """Read the allocated nodes from stdin, one a line in SLURM's order; print those to train on, one a line.

    `preflight.json` of the attempt says which were chosen and what is wrong with the others; each of these gets a cause
    of its own. Returns 0, or 3 where too few are good.
    """
    options = _arguments(argv)
    allocated = sys.stdin.read().split()
    directory = attempt_folder(options.run_dir, options.attempt)
    markers = {node: read_object(directory / file_names.PREFLIGHT / f"{node}.json") for node in allocated}
    bad = _without_container_failures(bad_nodes(markers), directory / file_names.PREFLIGHT)
    chosen = [node for node in allocated if node not in bad][: options.nodes]
    enough = len(chosen) == options.nodes
    # What is wrong everywhere is seldom the nodes' fault: a wrong recipe, an environment that lacks something.
    all_bad = len(allocated) > 1 and len(bad) == len(allocated)
    record = {
        "schema": 1,
        "nodes": chosen if enough else [],
        "spare": [node for node in allocated if node not in bad and node not in chosen],
        "bad": bad,
        "why": _why(allocated, bad, options.nodes, enough, all_bad, markers),
    }
    say(f"preflight: {record['why']}")
    try:
        replace_json(directory / file_names.PREFLIGHT_RESULT, record)
        for node, why in bad.items():
            replace_json(directory / file_names.CAUSES / f"{node}.json", _cause(node, why, all_bad, enough))
        begun = read_object(directory / file_names.ATTEMPT)
        if enough and begun is not None:
            replace_json(directory / file_names.ATTEMPT, {**begun, "nodes": chosen})
    except OSError as error:
        say(f"preflight.json not written: {error.strerror}")
    if not enough:
        return TOO_FEW
    print("\n".join(chosen))
    return 0


def bad_nodes(markers: dict[str, Record | None]) -> dict[str, str]:
    """What is wrong, by node. Where a trial fails on every node alike, it names nobody."""
    bad = {node: str(marker["bad"]) for node, marker in markers.items() if marker and marker.get("bad")}
    others = {node: marker for node, marker in markers.items() if node not in bad}
    furthest = max((_reached(marker) for marker in others.values()), default=-1)
    for node, marker in others.items():
        reached = _reached(marker)
        if reached < furthest:
            bad[node] = NOT_STARTED if reached < 0 else f"did not {_DOES[STAGES[reached + 1]]}; others did"
    seconds = {node: _slowest(marker) for node, marker in others.items() if node not in bad}
    measured = {node: value for node, value in seconds.items() if value is not None}
    if len(measured) > 2:  # of two nobody can say which is the outlier
        median = statistics.median(measured.values())
        for node, value in measured.items():
            if value > SLOW * median:
                bad[node] = f"its slowest device takes {value / median:.1f} times as long for a product as others"
    return bad


def _without_container_failures(bad: dict[str, str], logs: Path) -> dict[str, str]:
    """`bad` without nodes whose container may start next time; for one whose container cannot start, the log's line is
    given."""
    remaining = {}
    for node, why in bad.items():
        hit = cause_from_log(scan(read_log(logs / f"{node}.log")), node, []) if why == NOT_STARTED else None
        if hit is None or hit["kind"] != "container_busy":
            remaining[node] = (
                f"its container does not start: {hit['line']}" if hit and hit["kind"] == "container" else why
            )
    return remaining


def _reached(marker: Record | None) -> int:
    stage = marker.get("stage") if marker else None
    return STAGES.index(stage) if stage in STAGES else -1


def _slowest(marker: Record | None) -> float | None:
    """Seconds of the node's slowest device; None on a CPU, which other processes share."""
    if marker is None or marker.get("kind") != "gpu":
        return None
    return max((value for value in marker.get("matmul_seconds") or [] if value is not None), default=None)


def _why(
    allocated: list[str],
    bad: dict[str, str],
    wanted: int,
    enough: bool,
    all_bad: bool,
    markers: dict[str, Record | None],
) -> str:
    named = "; ".join(f"{node}: {why}" for node, why in bad.items())
    if all_bad:
        return f"every node fails the same way; check the recipe and the environment first: {named}"
    if not enough:
        return f"{len(allocated) - len(bad)} of {len(allocated)} nodes are good and {wanted} are needed; {named}"
    reached = min(_reached(marker) for node, marker in markers.items() if node not in bad)
    if reached < len(STAGES) - 1:
        last = "start" if reached < 0 else _DOES[STAGES[reached + 1]]
        return f"no node could {last}, so no node is at fault" + (f"; {named}" if bad else "")
    return f"{len(allocated) - len(bad)} of {len(allocated)} nodes are good" + (f"; {named}" if bad else "")


def _cause(node: str, why: str, all_bad: bool, enough: bool) -> Record:
    """Where enough nodes are left the training goes on, and whatever ends it has another cause."""
    kind = "crash" if all_bad else "preflight"
    return cause(kind, node, why, "preflight", sick=not all_bad, consequence=enough, at=time.time())


def _arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="node.pyz choose", description="node names on stdin, one a line")
    parser.add_argument("--run-dir", required=True, type=Path)
    parser.add_argument("--attempt", required=True)
    parser.add_argument("--nodes", required=True, type=int, help="how many are to train")
    return parser.parse_args(argv)
