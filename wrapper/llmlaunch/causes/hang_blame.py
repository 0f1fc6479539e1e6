"""Who is to blame for a hang: the rank that never came, by the flight recorder, and those that gave no answer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..rundir import file_names
from ..rundir.stack_files import ranks_that_wrote
from ..rundir.values import counted, is_host
from .flight_recorder import read_dumps
from .hang_roots import TooManyRanks, find_roots
from .redaction import harmless

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ..rundir.attempt import Attempt
    from ..rundir.attempt_files import Blame, Cause, RankRecord
    from .flight_recorder import Dump, Operation
    from .hang_roots import Roots


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
