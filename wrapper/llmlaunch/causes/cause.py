"""The record of one cause, from the lines of a node's log and the ends of its ranks, and the cause as a sentence for
the user."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from ..rundir.values import is_host
from .kinds import KINDS, kind_of
from .redaction import harmless
from .rerun_verdict import without_reruns

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ..rundir.attempt_files import Cause, RankCause, RankRecord
    from .log_scan import Hit


SCHEMA = 1
LEAST_HELD_BYTES = 2**30
"""Memory of another process below which an out-of-memory error is the job's own: a CUDA context and what NCCL and
libraries hold of it take about half of that."""
_PROCESS = re.compile(r"\bProcess (\d{1,9}) has ")
MOST_RANKS = 1000
MOST_NAMED = 3  # ranks in a sentence


def cause(kind: str, node: str | None, line: str, source: str, **more: Any) -> Cause:
    """Return a cause as in `attempts/<attempt>/causes/<node>.json` (docs/run-directory.md)."""
    record: Cause = {
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
    record.update(more)  # type: ignore[typeddict-item]
    return record


def nodes_at_fault(record: Mapping[str, Any] | None) -> list[str]:
    if record is None or not record.get("sick"):
        return []
    listed = record.get("nodes")
    names = listed if isinstance(listed, list) and listed else [record.get("node")]
    return [str(name) for name in names if is_host(name)]


def failed(rank: RankRecord) -> bool:
    return rank.get("signal") is not None or rank.get("exit_code") not in (None, 0)


def ended_badly(rank: RankRecord) -> bool:
    """Whether a rank failed by itself, that is, was not merely ended with SIGTERM by its launcher."""
    return failed(rank) and rank.get("signal") != "SIGTERM"


def rank_end(rank: RankRecord) -> str:
    """Return `was ended by SIGKILL` or `exited with 1`."""
    signal = rank.get("signal")
    return f"exited with {rank.get('exit_code')}" if signal is None else f"was ended by {signal}"


def was_killed(ranks: Sequence[RankRecord]) -> bool:
    """Whether any rank was ended by SIGKILL. A rank without an end record counts: its wrapper died with it."""
    return any(rank.get("signal") == "SIGKILL" or rank.get("ended_at") is None for rank in ranks)


def is_vague(record: Cause) -> bool:
    """Whether a cause names no more than a crash, or only reports another's end."""
    return record["kind"] == "crash" or bool(record.get("consequence"))


def cause_from_log(hits: Sequence[Hit], node: str, ranks: Sequence[RankRecord]) -> Cause | None:
    """Return the cause that the log shows, or None if it has no line about one.

    It is the first line that names a kind with strong evidence; else one that names the network, which often recovers;
    else the last exception of the rank that failed first; else a line that only reports another's end.
    """
    hits = without_reruns(hits, ranks)
    own = [hit for hit in hits if not hit.consequence]
    named = [hit for hit in own if hit.kind != "crash"]
    if named:
        first_hit = next((hit for hit in named if not KINDS[hit.kind].is_weak), named[0])
        return _cause_of_hit(first_hit, [hit for hit in named if hit.kind == first_hit.kind], node, ranks)
    crashes = [hit for hit in own if hit.kind == "crash"]
    if crashes:
        first = _first_failed(ranks)
        of_first = [hit for hit in crashes if first is not None and _wrote(hit, first)]
        return _cause_of_hit((of_first or crashes)[-1], crashes, node, ranks)
    # If a launcher reports the ends of its ranks, a program that a shell did not find earlier prevented no start.
    hits = [hit for hit in hits if hit.kind != "no_program"] or hits
    told = [hit for hit in hits if not KINDS[hit.kind].is_weak] or [hit for hit in hits if hit.kind != "crash"] or hits
    return _cause_of_hit(told[0], [hit for hit in told if hit.kind == told[0].kind], node, ranks) if told else None


def cause_from_ranks(node: str, ranks: Sequence[RankRecord]) -> Cause | None:
    """Return how the first failed rank ended, for use when no line says more. A signal from outside is not a cause of
    its own."""
    first = _first_failed(ranks)
    if first is None:
        return None
    signal = first.get("signal")
    numbers = {"exit_code": first["exit_code"]} if signal is None else {}
    return cause(
        "killed" if signal == "SIGKILL" else "crash",
        node,
        f"rank {first.get('rank')} {rank_end(first)}",
        "ranks",
        rank=first.get("rank"),
        numbers=numbers,
        consequence=signal in ("SIGTERM", "SIGKILL", "SIGINT"),
        at=first.get("ended_at"),
    )


def likelier(logged: Cause | None, ended: Cause | None) -> Cause | None:
    """Return the better of the log's cause and the ranks' end: the signal that ended the first rank if the log only
    reports another's end, and how that rank ended if the log only has its launcher's lines about it."""
    if logged is None or ended is None:
        return logged or ended
    if logged["consequence"] and logged["kind"] == "crash":
        return ended
    signalled = "exit_code" not in ended["numbers"] and ended["line"].rpartition(" ")[2] != "SIGTERM"
    return ended if logged["consequence"] and signalled else logged


def _cause_of_hit(hit: Hit, same_kind: Sequence[Hit], node: str, ranks: Sequence[RankRecord]) -> Cause:
    if not _names_more(hit):  # in a message of several lines, the line that names both sides
        hit = next((other for other in same_kind if _names_more(other) and _same_speaker(other, hit)), hit)
    rank = _rank_of(hit, ranks)
    kind = _whose_memory(hit, ranks) if hit.kind == "oom" else hit.kind
    record = cause(
        kind,
        node,
        hit.line,
        "log",
        rank=None if rank is None else rank.get("rank"),
        numbers=dict(hit.numbers),
        sick=hit.sick,
        consequence=hit.consequence,
        at=_ended_at(rank, ranks),
    )
    if hit.facts:
        record["facts"] = dict(hit.facts)
    each = _each_rank(same_kind, ranks)
    if hit.kind == "oom" or len(each) > 1:
        record["ranks"] = each[:MOST_RANKS]
    return record


def _names_more(hit: Hit) -> bool:
    return bool(set(hit.facts) - {"phase"})


def _same_speaker(one: Hit, other: Hit) -> bool:
    return (one.rank, one.local_rank) == (other.rank, other.local_rank)


def _whose_memory(hit: Hit, ranks: Sequence[RankRecord]) -> str:
    """Return `oom`, or `gpu_shared` or `gpu_busy` if another process holds the missing memory: a rank of this job on
    the node, or a stranger, as far as its process id shows."""
    others, asked = hit.numbers.get("other_processes_bytes", 0), hit.numbers.get("asked_bytes")
    if asked is None or others < LEAST_HELD_BYTES or asked > hit.numbers.get("free_bytes", 0) + others:
        return "oom"
    own = {str(rank.get(name)) for rank in ranks for name in ("pid", "program_pid")}
    return "gpu_shared" if own.intersection(_PROCESS.findall(hit.line)) else "gpu_busy"


def _each_rank(hits: Sequence[Hit], ranks: Sequence[RankRecord]) -> list[RankCause]:
    """Return every rank of the node with such a message once, with the first of its messages that has numbers."""
    causes: dict[int | None, RankCause] = {}
    for hit in hits:
        rank = _rank_of(hit, ranks)
        number = None if rank is None else rank.get("rank")
        if number not in causes or (hit.numbers and not causes[number]["numbers"]):
            causes[number] = {"rank": number, "line": hit.line, "numbers": dict(hit.numbers)}
    if len(causes) > 1:
        causes.pop(None, None)  # a second message of a known rank, without its name
    return list(causes.values())


def _rank_of(hit: Hit, ranks: Sequence[RankRecord]) -> RankRecord | None:
    """Return the rank that wrote the line: by the line's prefix, else the only rank that failed by itself, else by the
    GPU that the message names, unless all ranks of the node call theirs 0."""
    if hit.rank is not None or hit.local_rank is not None:
        writer = next((rank for rank in ranks if _wrote(hit, rank)), None)
        return {"rank": hit.rank} if writer is None and hit.rank is not None else writer
    bad = [rank for rank in ranks if ended_badly(rank)]
    if len(bad) == 1:
        return bad[0]
    gpu = hit.numbers.get("gpu")
    if gpu is None or any("," not in (rank.get("visible_devices") or ",") for rank in ranks):
        return None
    return next((rank for rank in ranks if rank.get("local_rank") == gpu), None)


def _wrote(hit: Hit, rank: RankRecord) -> bool:
    if hit.rank is not None:
        return bool(rank.get("rank") == hit.rank)
    return hit.local_rank is not None and rank.get("local_rank") == hit.local_rank


def _first_failed(ranks: Sequence[RankRecord]) -> RankRecord | None:
    bad = [rank for rank in ranks if failed(rank)]
    return min(bad, key=lambda rank: (not ended_badly(rank), rank.get("ended_at") or float("inf")), default=None)


def _ended_at(rank: RankRecord | None, ranks: Sequence[RankRecord]) -> float | None:
    """Return when the rank ended, or else when the first rank of its node failed, in unix seconds of that node's
    clock."""
    if rank is not None and rank.get("ended_at") is not None:
        return rank["ended_at"]
    first = _first_failed(ranks)
    return None if first is None else first.get("ended_at")


def in_words(kind: str) -> str:
    """Return the words for a kind: `out of GPU memory` for `oom`."""
    return KINDS[kind].words if kind in KINDS else kind


def sentence(cause: Mapping[str, Any]) -> str:
    """Return a cause as a sentence, such as `out of GPU memory (rank 3 on n2): CUDA out of memory. Tried to allocate
    ...`."""
    node, line = cause.get("node"), str(cause.get("line") or "")
    place = " on ".join(part for part in (_ranks_named(cause), str(node or "")) if part)
    return in_words(str(cause.get("kind"))) + (f" ({place})" if place else "") + (f": {line}" if line else "")


def _ranks_named(cause: Mapping[str, Any]) -> str:
    """Return the ranks in words, such as `rank 3`, `ranks 0 and 3`, `ranks 0, 1, 2 and 5 more`."""
    listed = cause.get("ranks")
    each = [item.get("rank") for item in listed if isinstance(item, dict)] if isinstance(listed, list) else []
    numbers = sorted({number for number in [cause.get("rank"), *each] if type(number) is int})
    if len(numbers) < 2:
        return f"rank {numbers[0]}" if numbers else ""
    if len(numbers) > MOST_NAMED + 1:
        return f"ranks {', '.join(map(str, numbers[:MOST_NAMED]))} and {len(numbers) - MOST_NAMED} more"
    return f"ranks {', '.join(map(str, numbers[:-1]))} and {numbers[-1]}"


def advice(cause: Mapping[str, Any] | None) -> str:
    """Return what the user can do about a cause, according to its evidence; empty if nothing is known about its
    kind."""
    text = kind_of(cause).advice
    return text if isinstance(text, str) else text(cause or {})


_RESUME = re.compile(r"\bresumes?\b")
_KEYS_OF_A_RECIPE = re.compile(r"\b(on_oom|on_bad_loss|preflight)\b")  # that change what llmlaunch does after an end


def advice_to(cause: Mapping[str, Any], *, submitted: bool) -> str:
    """Return what a person can do about a cause; "" where the cause is not known.

    `submitted` is False for a run that llmlaunch did not submit and cannot resume (`observe`): nothing of the text
    proposes `resume` then, or a key of a recipe that has llmlaunch go on by itself.
    """
    if not cause.get("kind"):
        return ""
    text = advice(cause)
    return text if submitted else _without_resume(text)


def _without_resume(text: str) -> str:
    """Return the advice without the clauses that need a run of llmlaunch. Where `resume` follows a colon, it is what
    to do at once, so the person's own script takes its place."""
    sentences = []
    for sentence in re.split(r"(?<=\.) +", text):
        clauses = [_for_own_script(clause) for clause in sentence.rstrip(".").split("; ")]
        kept = "; ".join(clause for clause in clauses if clause)
        sentences += [f"{kept}."] if kept else []
    return " ".join(sentences)


def _for_own_script(clause: str) -> str:
    if _KEYS_OF_A_RECIPE.search(clause):
        return ""
    if not _RESUME.search(clause):
        return clause
    about, colon, act = clause.partition(": ")
    if colon and not _RESUME.search(about) and _RESUME.match(act):
        return f"{about}: submit your script again"
    return ""
