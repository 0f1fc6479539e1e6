"""Signs against nodes: how many independent ones a cause gives, when they are enough to leave a node out, and how many
nodes may be left out at all.

One sign alone is often wrong: a node that others wait for, or that crashed first, may only have met a fault of the
program."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..rundir.values import is_host
from .cause import nodes_at_fault
from .cause_kind import ENOUGH_SIGNS, ONE_SIGN
from .kinds import RERUN, kind_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ..rundir.attempt_files import Cause
    from ..rundir.slow_devices import SlowDevice

    Record = Mapping[str, Any]

__all__ = [
    "ENOUGH_SIGNS",
    "MOST_SHARE",
    "most_left_out",
    "nodes_to_leave_out",
    "signs_against",
    "with_first_crash",
    "with_slow_nodes",
]

MOST_SHARE = 0.05
"""Share of a partition's nodes that may be left out. Where more seem bad it is the file system, the network or the
program."""

_CRASH_SIGN, _SLOW_SIGN = "crash", "slow"


def most_left_out(nodes: int) -> int:
    """Return how many of a partition's nodes may be left out; one even of a small partition, since every job would get
    a bad node again."""
    return max(1, int(nodes * MOST_SHARE))


def signs_against(cause: Record | None) -> dict[str, int]:
    """Return the number of independent signs against each node that a cause names; ENOUGH_SIGNS for hard evidence."""
    signs: dict[str, int] = {}
    if cause is None:
        return signs
    for node in nodes_at_fault(cause):
        signs[node] = max(ONE_SIGN, kind_of(cause).signs)
    for node, kinds in _suspects(cause).items():
        signs[node] = min(ENOUGH_SIGNS, max(signs.get(node, 0), len(kinds)))
    return signs


def _suspects(cause: Record) -> dict[str, set[str]]:
    """Each suspected node with the kinds of sign against it; what is not of that form counts as absent."""
    suspects = cause.get("suspects")
    named = suspects.items() if isinstance(suspects, dict) else ()
    return {node: set(map(str, kinds)) for node, kinds in named if is_host(node) and isinstance(kinds, list) and kinds}


def with_first_crash(cause: Cause, made_a_step: bool, nodes: int) -> Cause:
    """Return the cause with a sign against the node that crashed first. A job of one node has no other, and what fails
    before its first step is the program's."""
    node = cause.get("node")
    if cause["kind"] != "crash" or cause["consequence"] or not made_a_step or nodes < 2 or not is_host(node):
        return cause
    return {**cause, "suspects": {str(node): [_CRASH_SIGN]}}


def with_slow_nodes(cause: Cause, slow: Sequence[SlowDevice]) -> Cause:
    suspects = {node: set(kinds) for node, kinds in _suspects(cause).items()}
    for device in slow:
        suspects.setdefault(device.node, set()).add(_SLOW_SIGN)
    return {**cause, "suspects": {node: sorted(kinds) for node, kinds in suspects.items()}} if slow else cause


def is_only_a_crash(cause: Record) -> bool:
    """Whether the only sign is a first crash. Of one run such signs count once: the program is the same."""
    return set().union(*_suspects(cause).values(), ()) == {_CRASH_SIGN} and not nodes_at_fault(cause)


def nodes_to_leave_out(causes: Sequence[Record | None]) -> list[str]:
    """Return the nodes against which the last of a run's causes is a sign and all of them together are enough; or the
    one whose result is to be computed again on another GPU."""
    total: dict[str, int] = {}
    crashed: set[str] = set()
    for cause in causes:
        for node, signs in signs_against(cause).items():
            if cause is not None and is_only_a_crash(cause):
                signs = 0 if node in crashed else signs
                crashed.add(node)
            total[node] = total.get(node, 0) + signs
    last = causes[-1] if causes else None
    if last is not None and last.get("kind") == RERUN and is_host(last.get("node")):
        return [str(last["node"])]
    return [node for node in signs_against(last) if total[node] >= ENOUGH_SIGNS]
