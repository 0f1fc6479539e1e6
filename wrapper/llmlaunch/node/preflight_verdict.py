"""Which of the nodes that were tried are bad, by comparing them: what all of them have alike names none."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

from ..rundir.values import number

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .files import Record

    Markers = Mapping[str, "Record | None"]

STAGES = ("started", "devices", "matmul", "together", "joined", "reduced")
# Sinha et al. (SC 2022) found GPUs of one model 8 % apart on average, and outliers that were 1.5 times slower.
SLOW = 1.25
FEWEST = 3  # of two nobody can say which is the outlier
NOT_STARTED = "the preflight did not start on it"
DOES = {
    "devices": "show its devices",
    "matmul": "compute on every device",
    "together": "finish an all-reduce of its own devices",
    "joined": "reach the others",
    "reduced": "finish the all-reduce with the others",
}


def bad_nodes(markers: Markers) -> dict[str, str]:
    """Return what is wrong, by node. Where a trial fails on every node alike, it names nobody."""
    bad = {node: str(marker["bad"]) for node, marker in markers.items() if marker and marker.get("bad")}
    others = {node: marker for node, marker in markers.items() if node not in bad}
    furthest = max((reached(marker) for marker in others.values()), default=-1)
    for node, marker in others.items():
        stage = reached(marker)
        if stage < furthest:
            bad[node] = NOT_STARTED if stage < 0 else f"did not {DOES[STAGES[stage + 1]]}; others did"
    for more in (_slow_devices(others, bad), _slow_ports(markers), _own_problems(markers)):
        for node, why in more.items():
            bad.setdefault(node, why)
    return bad


def reached(marker: Record | None) -> int:
    """Return the index in STAGES that all devices have reached; -1 of a node that never began."""
    stage = marker.get("stage") if marker else None
    return STAGES.index(stage) if stage in STAGES else -1


def site_warnings(markers: Markers) -> list[str]:
    """Return what all nodes that began have alike: nobody's fault here, and the site's to mend. Ports of fewer nodes
    than can be compared are compared within a node."""
    begun = {node: marker for node, marker in markers.items() if marker}
    problems = {node: _problems(marker) for node, marker in begun.items()}
    alike = set.intersection(*map(set, problems.values())) if problems else set()
    whose = "the node" if len(begun) == 1 else "every node"
    first = next(iter(problems.values()), {})
    warnings = [f"{whose} {first[key]}" for key in sorted(alike) if not key.startswith("storage ")]
    warnings += [f"on {whose}, {first[key]}" for key in sorted(alike) if key.startswith("storage ")]
    if len(begun) < FEWEST:
        warnings += [text for node, marker in begun.items() for text in _uneven_ports(node, _ports(marker))]
    return warnings


def _slow_devices(markers: Markers, bad: Mapping[str, str]) -> dict[str, str]:
    """GPUs that take SLOW times as long for a product as the median of all, by node the slowest."""
    seconds = {
        (node, device): value
        for node, marker in markers.items()
        if node not in bad and marker and marker.get("kind") == "gpu"
        for device, value in enumerate(_matmul_seconds(marker))
        if value
    }
    if len(seconds) < FEWEST:
        return {}
    median = statistics.median(seconds.values())
    ordered = sorted(seconds.items(), key=lambda item: item[1])  # of a node's devices the slowest is said
    return {
        node: f"its device {device} takes {value / median:.2f} times as long for a product as others"
        for (node, device), value in ordered
        if value > SLOW * median
    }


def _matmul_seconds(marker: Record) -> list[float | None]:
    values = marker.get("matmul_seconds")
    return [number(value) for value in values] if isinstance(values, list) else []


def _slow_ports(markers: Markers) -> dict[str, str]:
    """Ports that are down, absent or slower than the same port of most nodes."""
    ports = {node: _ports(marker) for node, marker in markers.items() if marker and "ports" in marker}
    bad: dict[str, str] = {}
    if len(ports) < FEWEST:
        return bad
    for name in sorted({name for of_node in ports.values() for name in of_node}):
        rates = {node: _gigabits(of_node.get(name)) for node, of_node in ports.items()}
        usual = statistics.median_low(rates.values())
        for node in [node for node, rate in rates.items() if rate < usual]:
            bad.setdefault(node, f"its network port {name} {_state(ports[node].get(name))}; on others {usual:g} Gb/s")
    return bad


def _uneven_ports(node: str, ports: Mapping[str, Record]) -> list[str]:
    fastest: dict[str, float] = {}
    for port in ports.values():
        kind = str(port.get("link_layer"))
        fastest[kind] = max(_gigabits(port), fastest.get(kind, 0.0))
    return [
        f"network port {name} of {node} {_state(port)}; its fastest {fastest[str(port.get('link_layer'))]:g} Gb/s"
        for name, port in sorted(ports.items())
        if 0 < _gigabits(port) < fastest[str(port.get("link_layer"))]
    ]


def _state(port: Record | None) -> str:
    if port is None:
        return "is not there"
    if _gigabits(port):
        return f"runs at {_gigabits(port):g} Gb/s"
    return f"is not active ({port.get('state') or 'no state'}, {port.get('phys_state') or 'no link'})"


def _gigabits(port: Record | None) -> float:
    return (number(port.get("gigabits")) or 0.0) if port else 0.0


def _ports(marker: Record) -> dict[str, Record]:
    ports: Any = marker.get("ports")
    return {name: port for name, port in ports.items() if isinstance(port, dict)} if isinstance(ports, dict) else {}


def _own_problems(markers: Markers) -> dict[str, str]:
    """Problems that some node that began does not have."""
    problems = {node: _problems(marker) for node, marker in markers.items() if marker}
    alike = set.intersection(*map(set, problems.values())) if problems else set()
    own = {node: [text for key, text in found.items() if key not in alike] for node, found in problems.items()}
    return {node: "; ".join(texts) for node, texts in own.items() if texts}


def _problems(marker: Record) -> dict[str, str]:
    problems = marker.get("problems")
    return {str(key): str(text) for key, text in problems.items()} if isinstance(problems, dict) else {}
