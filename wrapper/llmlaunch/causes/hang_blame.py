"""Who is to blame for a hang: the rank that never came, by the flight recorder, and those that gave no answer.

A rank waits in a collective for the members of its group that have not scheduled it, and in a send or recv for a peer
that has not scheduled the other half. Those who are waited for may themselves wait for others; at the end of each such
chain stands a rank that waits for nobody: it never came.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from ..rundir import file_names
from ..rundir.stack_files import ranks_that_wrote
from ..rundir.values import counted, is_host
from .flight_recorder import read_dumps
from .redaction import harmless

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ..rundir.attempt import Attempt
    from ..rundir.attempt_files import Blame, Cause, RankRecord
    from .flight_recorder import Dump, Operation


MOST_STEPS = 20_000_000
"""Limit for the members of groups that are looked at, of each group once and for each operation in which ranks wait."""

# Their input has one size on all ranks; others may be uneven (all_to_all, gather, scatter, the `_v` forms).
_EVEN = ("all_reduce", "broadcast", "reduce", "_all_gather_base", "_reduce_scatter_base", "all_gather_single")
_OTHER_HALF = {"send": "recv", "recv": "send"}
_PROGRESS = ("scheduled", "started", "completed")


class TooManyRanks(ValueError):
    """The dumps name more ranks than are looked at."""


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
    looked into, so nothing is said of it; one that is in neither is known to have written none. Raises TooManyRanks
    where they name more than MOST_STEPS."""
    facts = _Facts(dumps, frozenset(unread))
    return facts.mismatch() or facts.absent() or facts.stuck()


class _Facts:
    """What all dumps say together."""

    def __init__(self, dumps: Mapping[int, Dump], unread: frozenset) -> None:  # type: ignore[type-arg]
        self._dumps, self._unread = dumps, unread
        self._steps_left = MOST_STEPS
        self._labels: dict[str, str] = {}
        self._members: dict[str, set[int]] = {}
        self._at: dict[tuple[str, int], dict[int, Operation]] = {}  # collectives by group and number
        self._furthest: dict[str, dict[int, int]] = {}
        self._absent: dict[tuple[str, int], frozenset[int]] = {}  # by group and number: who has not come there
        self._between: dict[int, dict[tuple[str, str, int | None], list[Operation]]] = {}  # by rank
        for dump in dumps.values():
            self._labels.update(dump.labels)
            for group, ranks in dump.members.items():
                if group not in self._members:  # what tells a group apart has its ranks, so all dumps name the same
                    self._spend(len(ranks))
                    self._members[group] = set(ranks)
        for rank, dump in dumps.items():
            for operation in dump.operations:
                self._add(rank, operation)
        self._open = {rank: _first_open(dump.operations) for rank, dump in dumps.items()}

    def _spend(self, steps: int) -> None:
        """Count steps that are about to be taken. Raises TooManyRanks beyond MOST_STEPS."""
        self._steps_left -= steps
        if self._steps_left < 0:
            raise TooManyRanks(f"not judged: it would take more than {MOST_STEPS:,} steps")

    def _add(self, rank: int, operation: Operation) -> None:
        self._members.setdefault(operation.group, set()).add(rank)
        if operation.is_between_two:
            return
        self._at.setdefault((operation.group, operation.number), {}).setdefault(rank, operation)
        furthest = self._furthest.setdefault(operation.group, {})
        furthest[rank] = max(furthest.get(rank, 0), operation.number)

    def mismatch(self) -> Roots | None:
        """Whether ranks of one group are in different operations under the same number, or in one of different size."""
        for at in self._all_open():
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
        # the ranks of a group wait for the same others, whom they share: each set is looked at once
        distinct = {id(whom): whom for reasons in waits.values() for _, whom in reasons}
        awaited = set().union(*distinct.values())
        if not awaited:
            return None
        roots = frozenset(rank for rank in awaited if not waits.get(rank))
        waiting = sum(1 for reasons in waits.values() if reasons)
        # The sentence names the operation in which nobody but the roots is awaited.
        order = {key: (not whom & roots, len(whom - roots)) for key, whom in distinct.items()}
        reasons = [reason for rank in sorted(waits) for reason in waits[rank]]
        operation, _ = min(reasons, key=lambda reason: order[id(reason[1])])
        return self._roots("absent" if roots else "circle", tuple(sorted(roots)), operation, waiting)

    def stuck(self) -> Roots | None:
        """All came. The few whose device has not got as far as that of the others in the same collective."""
        for at in self._all_open():
            places = {rank: _progress(theirs) for rank, theirs in at.items()}
            first = min(places.values())
            behind = sorted(rank for rank, place in places.items() if place == first)
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

    def _all_open(self) -> list[dict[int, Operation]]:
        """The collectives that a rank has not completed, of each group and rank the first, as all ranks see them; the
        lowest numbers first, and each once."""
        collectives = [each for opened in self._open.values() for each in opened if not each.is_between_two]
        places = dict.fromkeys((each.group, each.number) for each in sorted(collectives, key=lambda each: each.number))
        return [self._at[place] for place in places]

    def _waits_for(self, rank: int) -> list[tuple[Operation, frozenset[int]]]:
        """Each operation in which the rank waits, and for whom."""
        reasons = []
        for operation in self._open[rank]:
            is_p2p = operation.is_between_two
            whom = (
                self._absent_peer(rank, operation) if is_p2p else self._absent_from(operation.group, operation.number)
            )
            if whom:
                reasons.append((operation, whom))
        return reasons

    def _absent_from(self, group: str, number: int) -> frozenset[int]:
        """Members of the group that have not scheduled this collective. A rank that remembers nothing of the group, and
        has forgotten its oldest operations, may have."""
        known = self._absent.get((group, number))
        if known is not None:
            return known
        self._spend(len(self._members[group]))
        furthest = self._furthest.get(group, {})
        absent = {rank for rank in self._members[group] if furthest.get(rank, 0) < number} - self._unread
        known = frozenset(
            rank for rank in absent if rank in furthest or rank not in self._dumps or self._dumps[rank].is_whole
        )
        self._absent[group, number] = known
        return known

    def _absent_peer(self, rank: int, operation: Operation) -> frozenset[int]:
        """The peer, where it has not scheduled the other half. Where both ranks remember everything, their operations
        are counted; else the other half must still be open, too."""
        peer = operation.peer
        if peer is None or peer == rank or peer in self._unread:
            return frozenset()
        if peer not in self._dumps:
            return frozenset({peer})
        other = _OTHER_HALF.get(operation.name, "")
        mine = self._operations_between(rank, operation.group, operation.name, peer)
        theirs = self._operations_between(peer, operation.group, other, rank)
        if self._dumps[rank].is_whole and self._dumps[peer].is_whole:
            return frozenset({peer}) if len(theirs) <= mine.index(operation) else frozenset()
        return frozenset() if any(_is_open(each) for each in theirs) else frozenset({peer})

    def _operations_between(self, rank: int, group: str, name: str, peer: int) -> list[Operation]:
        """The sends or recvs of a rank with one peer, oldest first."""
        if rank not in self._between:
            self._between[rank] = {}
            for each in self._dumps[rank].operations:
                if each.is_between_two:
                    self._between[rank].setdefault((each.group, each.name, each.peer), []).append(each)
        return self._between[rank].get((group, name, peer), [])


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


MOST_NAMED = 4  # ranks in a sentence
MOST_LISTED = 1000
FLIGHT_SIGN, NO_ANSWER_SIGN = "flight_recorder", "no_answer"


def with_blame(cause: Cause, attempt: Attempt, ranks: Sequence[RankRecord]) -> Cause:
    """Return the cause of a hang with `blame`, its rank and node in place of those whose log told of the hang, and
    `suspects`: the signs against the node.

    The cause stays as it is where neither the flight recorder nor the stacks point at anybody. Raises nothing for files
    that cannot be read.
    """
    if cause["kind"] != "hung":
        return cause
    problems: list[str] = []
    dumps, unread = read_dumps(attempt.folder / file_names.FLIGHT, problems)
    roots = _roots(dumps, unread, problems)
    silent = _silent_ranks(attempt)
    if roots is None and not silent:
        return {**cause, "line": harmless("; ".join([cause["line"], *problems[:1]]))} if problems else cause
    scene = _Scene(ranks)
    # awaited, and without an answer either: the kernel holds it; a rank that answers stands in its program
    silent_roots = silent if roots is None else sorted({*roots.ranks} & {*silent})
    blamed = silent_roots or list(roots.ranks if roots is not None else ())
    why = f"{scene.named(silent)} gave no answer" if roots is None else _sentence(roots, dumps, scene)
    first, node = (blamed[0] if blamed else None), scene.only_node(blamed)
    signs = [FLIGHT_SIGN] * (roots is not None) + [NO_ANSWER_SIGN] * bool(silent_roots)
    blame: Blame = {
        "kind": "no_answer" if roots is None else roots.kind,
        "rank": first,
        "device": scene.device(first),
        "node": node,
        "ranks": blamed[:MOST_LISTED],
        "why": harmless(why),
    }
    return {
        **cause,
        "rank": first,
        "node": None if first is None else scene.node(first),
        "line": harmless(f"{why}; {cause['line']}"),
        "blame": blame,
        "suspects": {} if node is None else {node: signs},
    }


def _roots(dumps: Mapping[int, Dump], unread: Sequence[int], problems: list[str]) -> Roots | None:
    """Why the ranks wait, by their dumps; None where these do not say, or say too much to be looked at."""
    try:
        return find_roots(dumps, unread) if dumps else None
    except TooManyRanks as error:
        problems.append(f"{file_names.FLIGHT}: {error}")
        return None


def _silent_ranks(attempt: Attempt) -> list[int]:
    """The ranks that wrote no stacks when all were asked for them; none where nobody was asked, or most are silent, or
    a file of stacks is too long to be read from its beginning."""
    answers = ranks_that_wrote(attempt.folder)
    if answers is None:
        return []
    world = (attempt.run.get("nodes") or 0) * (attempt.run.get("devices_per_node") or 0)
    silent = sorted(set(range(min(world, 1_000_000))) - answers)
    return silent if len(silent) < len(answers) else []


class _Scene:
    """Where each rank runs, by the rank records."""

    def __init__(self, ranks: Sequence[Mapping[str, Any]]) -> None:
        self._records = {record.get("rank"): record for record in ranks}

    def node(self, rank: int) -> str | None:
        node = (self._records.get(rank) or {}).get("node")
        return str(node) if is_host(node) else None

    def device(self, rank: int | None) -> int | None:
        local = (self._records.get(rank) or {}).get("local_rank")
        return local if isinstance(local, int) else None

    def only_node(self, ranks: Sequence[int]) -> str | None:
        """The node that all of them run on; None where they are several, or not all are known."""
        nodes = {self.node(rank) for rank in ranks}
        return nodes.pop() if len(nodes) == 1 else None

    def named(self, ranks: Sequence[int]) -> str:
        """`rank 3 (device 1 of n2)`, `ranks 2, 3 (n2)`."""
        if len(ranks) == 1:
            place = self.node(ranks[0])
            device = self.device(ranks[0])
            where = f" (device {device} of {place})" if place and device is not None else f" ({place})" if place else ""
            return f"rank {ranks[0]}{where}"
        numbers = ", ".join(map(str, ranks[:MOST_NAMED])) + (" ..." if len(ranks) > MOST_NAMED else "")
        nodes = sorted({self.node(rank) or "?" for rank in ranks})
        places = ", ".join(nodes) if len(nodes) <= MOST_NAMED else counted(len(nodes), "node")
        return f"{len(ranks)} ranks ({numbers} on {places})"


def _sentence(roots: Roots, dumps: Mapping[int, Any], scene: _Scene) -> str:
    what = _operation(roots.operation, roots.label)
    waiting = counted(roots.waiting, "rank")
    if roots.kind == "mismatch" and roots.other is not None:
        sizes = roots.other.name == roots.operation.name
        mine, other = (each.sizes if sizes else each.name for each in (roots.operation, roots.other))
        rank = scene.named([roots.other_rank]) if roots.other_rank is not None else "a rank"
        return f"{rank} has {other} where others have {mine} in {what}: the program's fault, not a node's"
    if roots.kind == "circle":
        return f"{waiting} wait for each other in a circle, one of them in {what}: the program's fault, not a node's"
    who = scene.named(roots.ranks)
    if roots.kind == "stuck":
        return f"{who} came to {what}, but did not get through it as {waiting} did"
    left_none = "" if all(rank in dumps for rank in roots.ranks) else " and left no flight record"
    return f"{who} never came to {what}{left_none}; {waiting} wait for it, or for those who do"


def _operation(operation: Operation, label: str) -> str:
    number = "" if operation.is_between_two else f" {operation.number}"
    return f"{operation.name}{number}" + (f" of group {label}" if label else "")
