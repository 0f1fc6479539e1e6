"""For which ranks the others wait, by the dumps of the flight recorder. Pure: dumps in, an answer out.

A rank waits in a collective for the members of its group that have not scheduled it, and in a send or recv for a peer
that has not scheduled the other half. Those who are waited for may themselves wait for others; at the end of each such
chain stands a rank that waits for nobody: it never came.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from .flight_recorder import Dump, Operation

__all__ = ["Roots", "find_roots"]

# Their input has one size on all ranks; others may be uneven (all_to_all, gather, scatter, the `_v` forms).
_EVEN = ("all_reduce", "broadcast", "reduce", "_all_gather_base", "_reduce_scatter_base", "all_gather_single")
_OTHER_HALF = {"send": "recv", "recv": "send"}
_PROGRESS = ("scheduled", "started", "completed")


class Roots(NamedTuple):
    """`ranks` are why the others wait; none where it is the program's fault. `kind` is absent (they never came), stuck
    (their device did not go on), mismatch, or circle. `operation` is what the others wait in, `waiting` how many they
    are, `other` the operation of `other_rank` that does not fit it."""

    kind: str
    ranks: tuple[int, ...]
    operation: Operation
    label: str
    waiting: int
    other: Operation | None = None
    other_rank: int | None = None


def find_roots(dumps: Mapping[int, Dump], unread: Iterable[int] = ()) -> Roots | None:
    """Return the end of the chains of waiting; None where no rank waits. A rank in `unread` has a dump that nobody
    looked into, so nothing is said of it; one that is in neither is known to have written none."""
    facts = _Facts(dumps, frozenset(unread))
    return facts.mismatch() or facts.absent() or facts.stuck()


class _Facts:
    """What all dumps say together."""

    def __init__(self, dumps: Mapping[int, Dump], unread: frozenset) -> None:  # type: ignore[type-arg]
        self._dumps, self._unread = dumps, unread
        self._labels: dict[str, str] = {}
        self._members: dict[str, set[int]] = {}
        self._at: dict[tuple[str, int], dict[int, Operation]] = {}  # collectives by group and number
        self._furthest: dict[str, dict[int, int]] = {}
        for rank, dump in dumps.items():
            self._labels.update(dump.labels)
            for group, ranks in dump.members.items():
                self._members.setdefault(group, set()).update(ranks)
            for operation in dump.operations:
                self._add(rank, operation)
        self._open = {rank: _first_open(dump.operations) for rank, dump in dumps.items()}

    def _add(self, rank: int, operation: Operation) -> None:
        self._members.setdefault(operation.group, set()).add(rank)
        if operation.is_between_two:
            return
        self._at.setdefault((operation.group, operation.number), {}).setdefault(rank, operation)
        furthest = self._furthest.setdefault(operation.group, {})
        furthest[rank] = max(furthest.get(rank, 0), operation.number)

    def mismatch(self) -> Roots | None:
        """Whether ranks of one group are in different operations under the same number, or in one of different size."""
        for operation in self._all_open():
            at = self._at.get((operation.group, operation.number), {})
            by_form: dict[tuple[str, str], list[int]] = {}
            for rank, theirs in at.items():
                by_form.setdefault((theirs.name, theirs.sizes if theirs.name in _EVEN else ""), []).append(rank)
            if len(by_form) > 1:
                most, fewest = max(by_form.values(), key=len), min(reversed(list(by_form.values())), key=len)
                return self._roots("mismatch", (), at[most[0]], len(at), at[fewest[0]], fewest[0])
        return None

    def absent(self) -> Roots | None:
        """The ends of the chains, or the circle where they have none."""
        waits = {rank: self._waits_for(rank) for rank in self._dumps}
        awaited = set().union(*(whom for reasons in waits.values() for _, whom in reasons)) if waits else set()
        if not awaited:
            return None
        roots = sorted(rank for rank in awaited if not waits.get(rank))
        waiting = sum(1 for reasons in waits.values() if reasons)
        # The sentence names the operation in which nobody but the roots is awaited.
        reasons = [reason for rank in sorted(waits) for reason in waits[rank]]
        operation, _ = min(reasons, key=lambda reason: (not reason[1] & set(roots), len(reason[1] - set(roots))))
        return self._roots("absent" if roots else "circle", tuple(roots), operation, waiting)

    def stuck(self) -> Roots | None:
        """All came. The few whose device has not got as far as that of the others in the same collective."""
        for operation in self._all_open():
            at = self._at.get((operation.group, operation.number), {})
            places = {rank: _progress(theirs) for rank, theirs in at.items()}
            behind = sorted(rank for rank, place in places.items() if place == min(places.values()))
            if len(behind) * 2 < len(places):
                return self._roots("stuck", tuple(behind), at[behind[0]], len(places) - len(behind))
        return None

    def _roots(
        self,
        kind: str,
        ranks: tuple[int, ...],
        operation: Operation,
        waiting: int,
        other: Operation | None = None,
        other_rank: int | None = None,
    ) -> Roots:
        label = self._labels.get(operation.group, operation.group)
        return Roots(kind, ranks, operation, label, waiting, other, other_rank)

    def _all_open(self) -> list[Operation]:
        """The first collective of each group and rank that is not completed, the lowest numbers first."""
        collectives = [each for opened in self._open.values() for each in opened if not each.is_between_two]
        return sorted(collectives, key=lambda each: each.number)

    def _waits_for(self, rank: int) -> list[tuple[Operation, set[int]]]:
        """Each operation in which the rank waits, and for whom."""
        reasons = []
        for operation in self._open[rank]:
            whom = self._absent_peer(rank, operation) if operation.is_between_two else self._absent_from(operation)
            whom -= {rank, *self._unread}
            if whom:
                reasons.append((operation, whom))
        return reasons

    def _absent_from(self, operation: Operation) -> set[int]:
        """Members of the group that have not scheduled this collective. A rank that remembers nothing of the group, and
        has forgotten its oldest operations, may have."""
        furthest = self._furthest.get(operation.group, {})
        absent = {rank for rank in self._members[operation.group] if furthest.get(rank, 0) < operation.number}
        return {rank for rank in absent if rank in furthest or rank not in self._dumps or self._dumps[rank].is_whole}

    def _absent_peer(self, rank: int, operation: Operation) -> set[int]:
        """The peer, where it has not scheduled the other half. Where both ranks remember everything, their operations
        are counted; else the other half must still be open, too."""
        peer = operation.peer
        if peer is None or peer not in self._dumps:
            return set() if peer is None else {peer}
        other = _OTHER_HALF.get(operation.name, "")
        mine, theirs = (
            _between(self._dumps[who], operation.group, name, whom)
            for who, name, whom in ((rank, operation.name, peer), (peer, other, rank))
        )
        if self._dumps[rank].is_whole and self._dumps[peer].is_whole:
            return {peer} if len(theirs) <= mine.index(operation) else set()
        return set() if any(_is_open(each) for each in theirs) else {peer}


def _between(dump: Dump, group: str, name: str, peer: int) -> list[Operation]:
    return [each for each in dump.operations if (each.group, each.name, each.peer) == (group, name, peer)]


def _first_open(operations: Sequence[Operation]) -> list[Operation]:
    """Return the first operation of each group, and of each pair of ranks, that is not completed: those after it are
    queued behind it."""
    first: dict[tuple[str, str, int | None], Operation] = {}
    for operation in operations:
        if _is_open(operation):
            kind = operation.name if operation.is_between_two else ""
            first.setdefault((operation.group, kind, operation.peer), operation)
    return list(first.values())


def _is_open(operation: Operation) -> bool:
    return operation.state != "completed"


def _progress(operation: Operation) -> int:
    return _PROGRESS.index(operation.state) if operation.state in _PROGRESS else 0
