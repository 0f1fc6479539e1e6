"""What ended an attempt, from the files of its run directory: each node's own finding, else its log."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..rundir.files import read_object
from .node_cause import cause, ended_badly, failed, likelier, of_hits, of_ranks
from .scan import read_log, scan
from .signs import KINDS
from .slurm_words import failed_nodes, slurm_word, words_of_attempt

if TYPE_CHECKING:
    from collections.abc import Sequence

    Record = dict[str, Any]

__all__ = ["cause_of", "causes_of_nodes", "first_cause"]

LOGS_SECONDS = 20.0
LAST_WORDS_BYTES = 64 * 1024
SAME_TIME_SECONDS = 2.0  # clocks of nodes differ, and torchrun looks at its ranks now and then
_STATES = (
    ("NODE_FAIL", "node_fail"),
    ("NodeDown", "node_fail"),
    ("OUT_OF_MEMORY", "host_oom"),
    ("OutOfMemory", "host_oom"),
    ("PREEMPTED", "preempted"),
    ("TIMEOUT", "time_limit"),
    ("TimeLimit", "time_limit"),
    ("CANCELLED", "cancelled"),
)
_SLURM_BEATS_ONLY = frozenset({"crash", "hung", "nccl"})


def cause_of(run_dir: Path, attempt: str, ranks: Sequence[Record], code: int, state: str = "") -> Record | None:
    """What ended the attempt; None where nothing failed.

    `ranks` are the attempt's rank records, `code` what its launcher returned, `state` a scheduler's own words on
    the job, where somebody asked (NODE_FAIL, TIMEOUT ...). The first in time of all nodes' causes; one that only
    reports another's end counts where there is nothing better. It reads at most 5 MiB of each log and raises nothing.
    """
    if code == 0 and not state and not any(failed(rank) for rank in ranks):
        return None
    found = causes_of_nodes(run_dir, attempt, ranks)
    found += _from_the_watchdog(run_dir / "attempts" / attempt)
    if not ranks:
        found += _from_preparing(run_dir / "attempts" / attempt)
    best = first_cause(found)
    said = _from_slurm(run_dir, attempt, ranks, state)
    if said is not None and (best is None or best["consequence"] or _outdone(best, said)):
        return said
    return best


def causes_of_nodes(run_dir: Path, attempt: str, ranks: Sequence[Record]) -> list[Record]:
    """One cause for each node that has any: its own file's; its log's where it left none, or where its last words came
    after it had looked (SLURM counts the kernel's kills when a step has ended).

    Logs are read for LOGS_SECONDS at most, those of the nodes whose ranks failed first before others; a node beyond
    that is judged by how its ranks ended.
    """
    until = time.monotonic() + LOGS_SECONDS
    found = []
    for node, here in _first_failed_first(_nodes(run_dir, attempt, ranks), ranks):
        own = _written(run_dir / "attempts" / attempt / "causes" / f"{node}.json", node)
        log = run_dir / "logs" / f"{attempt}.{node}.log" if time.monotonic() < until else None
        if own is None:
            seen = likelier(of_hits(scan(read_log(log)), node, here) if log else None, of_ranks(node, here))
        elif _is_vague(own) and log:
            killed = [hit for hit in scan(read_log(log, LAST_WORDS_BYTES)) if hit.kind == "host_oom"]
            seen = of_hits(killed, node, here) or own
        else:
            seen = own
        if seen is not None:
            found.append(seen)
    return found


def _written(path: Path, node: str) -> Record | None:
    """What a node wrote, every value of the kind it should have; None where it is not there or of no known kind."""
    own = read_object(path)
    if own is None or own.get("kind") not in KINDS:
        return None
    at, rank, numbers, ranks = (own.get(key) for key in ("at", "rank", "numbers", "ranks"))
    sound = cause(
        str(own["kind"]),
        node,
        str(own.get("line") or ""),
        str(own.get("source") or "log"),
        rank=rank if isinstance(rank, int) else None,
        numbers=numbers if isinstance(numbers, dict) else {},
        sick=own.get("sick") is True,
        consequence=own.get("consequence") is True,
        at=float(at) if isinstance(at, (int, float)) else None,
    )
    return {**sound, "ranks": ranks} if isinstance(ranks, list) else sound


def first_cause(causes: Sequence[Record]) -> Record | None:
    """The cause that came first; among those within two seconds of it, or without a time, by the order of KINDS. What
    only reports another's end comes last, and a hang before that."""
    if not causes:
        return None
    best = min(_weight(one) for one in causes)
    equal = [one for one in causes if _weight(one) == best]
    first = min((one["at"] for one in equal if one.get("at") is not None), default=0.0)
    early = [one for one in equal if one.get("at") is None or one["at"] <= first + SAME_TIME_SECONDS]
    return min(early, key=lambda one: (_precedence(one["kind"]), one.get("at") or 0.0))


def _weight(one: Record) -> int:
    if not one.get("consequence"):
        return 1 if one["kind"] == "hung" else 0
    if one["source"] != "ranks":
        return 5 if one["kind"] == "crash" else 3  # the launcher's words on its ranks say least
    # killed from outside says more than what its peers heard of it, taken down by its own launcher says less
    return 4 if one["line"].endswith("SIGTERM") else 2


def _precedence(kind: str) -> int:
    return KINDS.index(kind) if kind in KINDS else len(KINDS)


def _is_vague(own: Record) -> bool:
    return own["kind"] == "crash" or bool(own.get("consequence"))


def _first_failed_first(
    nodes: Sequence[str], ranks: Sequence[Record]
) -> list[tuple[str, list[Record]]]:  # fmt: skip
    """Each node with its ranks."""
    by_node: dict[str, list[Record]] = {node: [] for node in nodes}
    for rank in ranks:
        if rank.get("node") in by_node:
            by_node[rank["node"]].append(rank)

    def failed_at(item: tuple[str, list[Record]]) -> float:
        return min((float(rank.get("ended_at") or 0.0) for rank in item[1] if ended_badly(rank)), default=float("inf"))

    return sorted(by_node.items(), key=failed_at)


def _nodes(run_dir: Path, attempt: str, ranks: Sequence[Record]) -> list[str]:
    """Every node of the attempt that a file names, in the order of node ranks where that is known."""
    begun = read_object(run_dir / "attempts" / attempt / "attempt.json") or {}
    listed = begun.get("nodes")
    names = [name for name in listed if isinstance(name, str)] if isinstance(listed, list) else []
    names += [str(rank["node"]) for rank in ranks if rank.get("node")]
    names += sorted(path.stem for path in (run_dir / "attempts" / attempt / "causes").glob("[!.]*.json"))
    logs = (path.name[len(attempt) + 1 : -len(".log")] for path in sorted((run_dir / "logs").glob(f"{attempt}.*.log")))
    names += [name for name in logs if name != "job" and not name.endswith(".monitor")]
    return list(dict.fromkeys(names))


def _from_the_watchdog(directory: Path) -> list[Record]:
    progress = read_object(directory / "progress.json") or {}
    behind, hung = progress.get("behind"), progress.get("hung")
    if isinstance(behind, dict):
        step, first = behind.get("checkpoint_step"), behind.get("first_step")
        line = f"the trainers began at step {first} although there is a checkpoint of step {step}; they were ended"
        return [cause("checkpoint", None, line, "watchdog")]
    if not isinstance(hung, dict):
        return []
    numbers = {key: hung[key] for key in ("since_seconds", "allowed_seconds") if key in hung}
    waited = numbers.get("since_seconds")
    line = f"no progress for {waited:.0f} s, waiting for {hung.get('what')}" if waited is not None else "no progress"
    if hung.get("where"):
        line = f"{line}; {hung['where']}"
    return [cause("hung", None, line, "watchdog", numbers=numbers)]


def _from_preparing(directory: Path) -> list[Record]:
    """What kept the training from beginning: one node checks the arguments, and builds what all will read."""
    told = of_hits(scan(read_log(directory / "prepare.log")), "", [])
    return [] if told is None else [{**told, "node": None}]


def _from_slurm(run_dir: Path, attempt: str, ranks: Sequence[Record], state: str) -> Record | None:
    """What SLURM's own words make of it: the job's log has srun's, `slurm-<job id>.out` those of the batch step."""
    # One for each job in this directory; of an array's task the name holds another number than the attempt's.
    outside = (words_of_attempt(read_log(path), attempt) for path in sorted(run_dir.glob("slurm-*.out")))
    text = "\n".join([read_log(run_dir / "logs" / f"{attempt}.job.log"), *outside])
    said = slurm_word(text) or next(((kind, f"SLURM says {word}") for word, kind in _STATES if word in state), None)
    if said is None:
        return None
    kind, line = said
    if kind != "node_fail":
        return cause(kind, None, line, "slurm")
    lost = failed_nodes(text) or _silent_nodes(run_dir, attempt, ranks)
    return cause("node_fail", lost[0] if lost else None, line, "slurm", sick=bool(lost), nodes=lost)


def _silent_nodes(run_dir: Path, attempt: str, ranks: Sequence[Record]) -> list[str]:
    """The nodes that left no end of any kind, where others did."""
    directory = run_dir / "attempts" / attempt
    ended = {str(rank.get("node")) for rank in ranks if rank.get("ended_at") is not None}
    ended |= {path.name for path in (directory / "done").glob("*")}
    ended |= {path.stem for path in (directory / "causes").glob("[!.]*.json")}
    names = _nodes(run_dir, attempt, ranks)
    silent = [name for name in names if name not in ended]
    return silent if len(silent) < len(names) else []


def _outdone(best: Record, said: Record) -> bool:
    """A lost node explains whatever its neighbours then died of; a time limit only what came after it."""
    return said["kind"] == "node_fail" and best["kind"] in _SLURM_BEATS_ONLY
