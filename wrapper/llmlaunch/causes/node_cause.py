"""The one cause of what ended the trainers of a node, from the lines of its log and its ranks' own ends. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..rundir.identifiers import is_host
from .lines import harmless

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .scan import Hit

    Record = dict[str, Any]

__all__ = ["cause", "ended_badly", "failed", "likelier", "nodes_at_fault", "of_hits", "of_ranks", "was_killed"]

SCHEMA = 1


def cause(kind: str, node: str | None, line: str, source: str, **more: Any) -> Record:
    """A cause as `attempts/<attempt>/causes/<node>.json` has it (docs/run-directory.md)."""
    record: Record = {
        "schema": SCHEMA,
        "kind": kind,
        "node": node,
        "rank": None,
        "line": harmless(line),
        "source": source,
        "numbers": {},
        "sick": False,
        "consequence": False,
        "at": None,
    }
    record.update(more)
    return record


def nodes_at_fault(one: Record | None) -> list[str]:
    """The nodes a cause accuses."""
    if one is None or not one.get("sick"):
        return []
    listed = one.get("nodes")
    names = listed if isinstance(listed, list) and listed else [one.get("node")]
    return [str(name) for name in names if is_host(name)]


def failed(rank: Record) -> bool:
    return rank.get("signal") is not None or rank.get("exit_code") not in (None, 0)


def ended_badly(rank: Record) -> bool:
    """It failed by itself: not merely taken down with SIGTERM by its launcher."""
    return failed(rank) and rank.get("signal") != "SIGTERM"


def was_killed(ranks: Sequence[Record]) -> bool:
    """By SIGKILL; a rank without an end lost its wrapper, too."""
    return any(rank.get("signal") == "SIGKILL" or rank.get("ended_at") is None for rank in ranks)


def of_hits(hits: Sequence[Hit], node: str, ranks: Sequence[Record]) -> Record | None:
    """What the log says: its first line that names a device, memory or disk, else one that names the network, which
    often recovers; else the last exception of the rank that failed first; else a line that only reports another's end;
    None where there is no line at all."""
    named = [hit for hit in hits if hit.kind != "crash" and not hit.consequence]
    if named:
        told = next((hit for hit in named if hit.kind != "nccl"), named[0])
        return _of_hit(told, [hit for hit in named if hit.kind == told.kind], node, ranks)
    crashes = [hit for hit in hits if hit.kind == "crash" and not hit.consequence]
    if crashes:
        first = _first_failed(ranks)
        own = [hit for hit in crashes if first is not None and _speaks(hit, first)]
        return _of_hit((own or crashes)[-1], [], node, ranks)
    return _of_hit(hits[0], [], node, ranks) if hits else None


def of_ranks(node: str, ranks: Sequence[Record]) -> Record | None:
    """How the first failed rank ended, where no line says more; a signal from outside is no cause of its own."""
    first = _first_failed(ranks)
    if first is None:
        return None
    signal = first.get("signal")
    how = f"was ended by {signal}" if signal is not None else f"exited with {first.get('exit_code')}"
    numbers = {"exit_code": first["exit_code"]} if signal is None else {}
    return cause(
        "crash",
        node,
        f"rank {first.get('rank')} {how}",
        "ranks",
        rank=first.get("rank"),
        numbers=numbers,
        consequence=signal in ("SIGTERM", "SIGKILL", "SIGINT"),
        at=first.get("ended_at"),
    )


def likelier(said: Record | None, ended: Record | None) -> Record | None:
    """Of what the log says and how the ranks ended: the signal that ended the first one, where the log only tells of
    another's end; how it ended, where the log only has its launcher's words on it."""
    if said is None or ended is None:
        return said or ended
    if said["consequence"] and said["kind"] == "crash":
        return ended
    signalled = "exit_code" not in ended["numbers"] and ended["line"].rpartition(" ")[2] != "SIGTERM"
    return ended if said["consequence"] and signalled else said


def _of_hit(hit: Hit, alike: Sequence[Hit], node: str, ranks: Sequence[Record]) -> Record:
    rank = _rank_of(hit, ranks)
    record = cause(
        hit.kind,
        node,
        hit.line,
        "log",
        rank=None if rank is None else rank.get("rank"),
        numbers=dict(hit.numbers),
        sick=hit.sick,
        consequence=hit.consequence,
        at=_ended_at(rank, ranks),
    )
    if hit.kind == "oom":
        record["ranks"] = _each_rank(alike, ranks)
    return record


def _each_rank(hits: Sequence[Hit], ranks: Sequence[Record]) -> list[Record]:
    """Every rank of the node that ran out, once, with the numbers of its first message that has any."""
    found: dict[int | None, Record] = {}
    for hit in hits:
        rank = _rank_of(hit, ranks)
        number = None if rank is None else rank.get("rank")
        if number not in found or (hit.numbers and not found[number]["numbers"]):
            found[number] = {"rank": number, "line": hit.line, "numbers": dict(hit.numbers)}
    if len(found) > 1:
        found.pop(None, None)  # a second message of a rank already known, without its name
    return list(found.values())


def _rank_of(hit: Hit, ranks: Sequence[Record]) -> Record | None:
    """The rank that wrote the line: by its own prefix, else the only one that failed by itself, else by the GPU that
    the message names, where the ranks of a node do not all call theirs 0."""
    if hit.rank is not None or hit.local_rank is not None:
        spoken = next((rank for rank in ranks if _speaks(hit, rank)), None)
        return {"rank": hit.rank} if spoken is None and hit.rank is not None else spoken
    bad = [rank for rank in ranks if ended_badly(rank)]
    if len(bad) == 1:
        return bad[0]
    gpu = hit.numbers.get("gpu")
    if gpu is None or any("," not in (rank.get("visible_devices") or ",") for rank in ranks):
        return None
    return next((rank for rank in ranks if rank.get("local_rank") == gpu), None)


def _speaks(hit: Hit, rank: Record) -> bool:
    if hit.rank is not None:
        return bool(rank.get("rank") == hit.rank)
    return hit.local_rank is not None and rank.get("local_rank") == hit.local_rank


def _first_failed(ranks: Sequence[Record]) -> Record | None:
    bad = [rank for rank in ranks if failed(rank)]
    return min(bad, key=lambda rank: (not ended_badly(rank), rank.get("ended_at") or float("inf")), default=None)


def _ended_at(rank: Record | None, ranks: Sequence[Record]) -> float | None:
    """When the rank ended, else when the first of its node failed; unix seconds of that node's clock."""
    if rank is not None and isinstance(rank.get("ended_at"), (int, float)):
        return float(rank["ended_at"])
    first = _first_failed(ranks)
    at = None if first is None else first.get("ended_at")
    return float(at) if isinstance(at, (int, float)) else None
