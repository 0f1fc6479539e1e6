"""What ended an attempt, according to the files of its run directory: the file of each node, its log, and SLURM's
files."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING

from ..rundir import file_names
from ..rundir.attempt import Attempt
from ..rundir.attempt_files import BadLossRecord, Cause
from ..rundir.file_names import node_log
from ..rundir.files import read_object
from ..rundir.schema import sound
from ..rundir.slow_devices import slow_devices
from ..rundir.values import host_names
from .cause import cause, cause_from_log, cause_from_ranks, ended_badly, failed, is_vague, likelier
from .hang_blame import with_blame
from .image_import import cause_of_import
from .kinds import KINDS, kind_of
from .log_scan import READ_CHARACTERS, read_log, scan, with_last_message
from .patterns import SLURM_PATTERNS, SLURM_STATES
from .rerun_verdict import with_first_gpu
from .suspects import with_first_crash, with_slow_nodes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ..rundir.attempt_files import Progress, RankRecord


_OF_A_NODE = ("rank", "numbers", "sick", "consequence", "at", "facts", "ranks")
LOGS_SECONDS = 20.0
LAST_LINES_BYTES = 64 * 1024
SAME_TIME_SECONDS = 2.0  # clocks of nodes differ, and torchrun looks at its ranks now and then


def cause_of(
    attempt: Attempt,
    ranks: Sequence[RankRecord],
    code: int,
    state: str = "",
    node_failure: Cause | None = None,
    tell: Callable[[Cause], None] = lambda _: None,
) -> Cause | None:
    """Return what ended the attempt, or None if nothing failed.

    `ranks` are the attempt's rank records, `code` is the exit code of its launcher, and `state` is the scheduler's name
    for the job's state, if somebody asked (NODE_FAIL, TIMEOUT ...). `node_failure` is the cause for nodes that were
    asked and did not answer.

    The earliest cause among all nodes is returned. A cause that only reports another's end counts only if there is
    nothing better. At most 5 MiB of each log are read, and nothing is raised. `tell` gets what is known before the
    dumps of the flight recorder are read, which may take long.
    """
    if code == 0 and not state and not any(failed(rank) for rank in ranks):
        return None
    if ended_for_loss(attempt.progress):  # anything logged after that is the ends of ranks
        return _of_bad_loss(attempt.progress.get("bad_loss") or {})
    causes = causes_of_nodes(attempt, ranks) + _from_watchdog(attempt.progress)
    if not ranks:
        causes += _from_preparation(attempt)
        causes += [cause for cause in [cause_of_import(attempt.folder)] if cause is not None]
    best = first_cause(causes)
    slurm = node_failure or _from_slurm(attempt, ranks, state)
    if slurm is not None and (best is None or best["consequence"] or _is_explained_by(best, slurm)):
        return slurm
    if best is None:
        return None
    tell(best)
    made_a_step = attempt.progress.get("step") is not None
    blamed = with_first_gpu(with_blame(best, attempt, ranks), attempt)
    suspected = with_first_crash(blamed, made_a_step, len(attempt.nodes))
    return with_slow_nodes(suspected, slow_devices(attempt.progress))


def cause_of_ranks(ranks: Sequence[RankRecord]) -> Cause | None:
    """Return what ended the attempt according to the ends of its ranks alone. No file is read."""
    nodes = list(dict.fromkeys(str(rank["node"]) for rank in ranks if rank.get("node")))
    ends = [cause_from_ranks(node, here) for node, here in _first_failed_first(nodes, ranks)]
    return first_cause([end for end in ends if end is not None])


def causes_of_nodes(attempt: Attempt, ranks: Sequence[RankRecord]) -> list[Cause]:
    """Return one cause for each node that has any. It is taken from the node's own file, or from its log if it left no
    file or if the last lines came after the node had looked (SLURM counts the kernel's kills when a step has ended).

    Logs are read for LOGS_SECONDS at most, those of nodes whose ranks failed first before others. After that, nodes are
    judged by how their ranks ended.
    """
    until = time.monotonic() + LOGS_SECONDS
    causes = []
    for node, here in _first_failed_first(_nodes(attempt, ranks), ranks):
        node_cause = _written_cause(attempt, node)
        log = node_log(attempt.run_directory, attempt.name, node) if time.monotonic() < until else None
        if node_cause is None:
            text = read_log(log) if log else ""
            logged = cause_from_log(scan(text), node, here)
            node_cause = with_last_message(likelier(logged, cause_from_ranks(node, here)), text)
        elif is_vague(node_cause) and log:
            kills = [hit for hit in scan(read_log(log, LAST_LINES_BYTES)) if hit.kind == "host_oom"]
            node_cause = cause_from_log(kills, node, here) or node_cause
        if node_cause is not None:
            causes.append(node_cause)
    return causes


def _written_cause(attempt: Attempt, node: str) -> Cause | None:
    """Return what a node wrote, or None if that is missing or of an unknown kind. What a hang points at is determined
    here."""
    own = sound(Cause, read_object(attempt.folder / file_names.CAUSES / f"{node}.json"))
    if own is None or own["kind"] not in KINDS:
        return None
    more = {name: value for name, value in own.items() if name in _OF_A_NODE}
    return cause(own["kind"], node, own.get("line", ""), own.get("source") or "log", **more)


def first_cause(causes: Sequence[Cause]) -> Cause | None:
    """Return the cause that came first. Among causes within two seconds of it, or without a time, the order of KINDS
    decides. Causes that only report another's end come last, and before them hangs."""
    if not causes:
        return None
    best = min(map(_weight, causes))
    equal = [cause for cause in causes if _weight(cause) == best]
    first = min((at for cause in equal if (at := cause.get("at")) is not None), default=0.0)
    early = [cause for cause in equal if (cause.get("at") or 0.0) <= first + SAME_TIME_SECONDS]
    precedence = {kind: place for place, kind in enumerate(KINDS)}
    return min(early, key=lambda cause: (precedence.get(cause["kind"], len(KINDS)), cause.get("at") or 0.0))


def _weight(cause: Cause) -> int:
    if not cause.get("consequence"):
        return 1 if cause["kind"] == "hung" else 0
    if cause["source"] != "ranks":
        return 5 if cause["kind"] == "crash" else 3  # what a launcher reports about its ranks says least
    # an outside kill says more than what its peers noticed; an end by its own launcher says less
    return 4 if cause["line"].endswith("SIGTERM") else 2


def _first_failed_first(nodes: Sequence[str], ranks: Sequence[RankRecord]) -> list[tuple[str, list[RankRecord]]]:
    """Return each node with its ranks, those whose ranks failed first before others."""
    by_node: dict[str, list[RankRecord]] = {node: [] for node in nodes}
    for rank in ranks:
        by_node.get(rank.get("node") or "", []).append(rank)

    def failed_at(item: tuple[str, list[RankRecord]]) -> float:
        return min((float(rank.get("ended_at") or 0.0) for rank in item[1] if ended_badly(rank)), default=float("inf"))

    return sorted(by_node.items(), key=failed_at)


def _nodes(attempt: Attempt, ranks: Sequence[RankRecord]) -> list[str]:
    """Return every node of the attempt that a file names, in the order of node ranks if that is known."""
    nodes = attempt.nodes + [str(rank["node"]) for rank in ranks if rank.get("node")]
    nodes += [path.stem for path in attempt.cause_files]
    logs = sorted((attempt.run_directory / file_names.LOGS).glob(f"{attempt.name}.*.log"))
    of_logs = (path.name[len(attempt.name) + 1 : -len(".log")] for path in logs)
    nodes += [node for node in of_logs if node != file_names.BATCH_LOG_NODE and not node.endswith(".monitor")]
    return list(dict.fromkeys(nodes))


def ended_for_loss(progress: Progress) -> bool:
    """Whether the watchdog ended the attempt because its loss was bad (progress.json)."""
    return (progress.get("bad_loss") or BadLossRecord()).get("ended", False)


def _of_bad_loss(bad: BadLossRecord) -> Cause:
    loss, usual, since = bad.get("loss"), bad.get("usual"), bad.get("since_step")
    step = "" if since is None else f" since step {since}"
    if bad.get("kind") == "spike" and isinstance(loss, (int, float)):
        line = f"the loss has spiked{step}, to {loss:.4g}" + ("" if usual is None else f" from {usual:.4g}")
    else:
        line = f"the loss was {'NaN' if bad.get('loss') == 'nan' else 'infinite'}{step}"
    steps = {"since_step": since, "good_step": bad.get("good_step")}
    numbers = {name: step for name, step in steps.items() if step is not None}
    return cause("bad_loss", None, f"{line}; the watchdog ended the training", "watchdog", numbers=numbers)


def _from_watchdog(progress: Progress) -> list[Cause]:
    behind, hung = progress.get("behind"), progress.get("hung")
    if behind is not None:
        step, first = behind.get("checkpoint_step"), behind.get("first_step")
        line = f"the trainers began at step {first} although there is a checkpoint of step {step}; they were ended"
        return [cause("checkpoint", None, line, "watchdog")]
    if hung is None:
        return []
    waited = hung.get("since_seconds")
    seconds = {"since_seconds": waited, "allowed_seconds": hung.get("allowed_seconds")}
    numbers = {name: value for name, value in seconds.items() if value is not None}
    line = f"no progress for {waited:.0f} s, waiting for {hung.get('what')}" if waited is not None else "no progress"
    if hung.get("where"):
        line = f"{line}; {hung['where']}"
    return [cause("hung", None, line, "watchdog", numbers=numbers)]


def _from_preparation(attempt: Attempt) -> list[Cause]:
    """Return what kept the training from beginning, when one node checks the arguments and builds what all nodes
    read."""
    logged = cause_from_log(scan(read_log(attempt.folder / file_names.PREPARE_LOG)), "", [])
    return [] if logged is None else [{**logged, "node": None}]


def _from_slurm(attempt: Attempt, ranks: Sequence[RankRecord], state: str) -> Cause | None:
    """Return the cause in SLURM's own messages: srun's are in the job's log, those of the batch step in `slurm-<job
    id>.out`."""
    # One for each job in this directory. For a task of an array, the number in the name differs from the attempt's.
    run_dir, name = attempt.run_directory, attempt.name
    outputs = (output_of_attempt(read_log(path), name) for path in sorted(run_dir.glob("slurm-*.out")))
    text = "\n".join([read_log(node_log(run_dir, name, file_names.BATCH_LOG_NODE)), *outputs])
    end = slurm_end(text) or next(((kind, f"SLURM says {word}") for word, kind in SLURM_STATES if word in state), None)
    if end is None:
        return None
    kind, line = end
    if kind != "node_fail":
        return cause(kind, None, line, "slurm")
    lost = failed_nodes(text) or _silent_nodes(attempt, ranks)
    return cause("node_fail", lost[0] if lost else None, line, "slurm", sick=bool(lost), nodes=lost)


def _silent_nodes(attempt: Attempt, ranks: Sequence[RankRecord]) -> list[str]:
    """Return the nodes that reported no end of any kind although others did."""
    ended = {str(rank.get("node")) for rank in ranks if rank.get("ended_at") is not None}
    ended |= {*attempt.done, *(path.stem for path in attempt.cause_files)}
    nodes = _nodes(attempt, ranks)
    silent = [node for node in nodes if node not in ended]
    return silent if len(silent) < len(nodes) else []


def _is_explained_by(best: Cause, slurm: Cause) -> bool:
    """Whether SLURM's cause explains the best other one. A lost node explains whatever ended its neighbours afterwards;
    a time limit explains only what came after it."""
    return slurm["kind"] == "node_fail" and kind_of(best).is_weak


_SLURM = [(re.compile(pattern.expression), pattern.cause) for pattern in SLURM_PATTERNS]
_NAMED = re.compile(r"error: Node failure on (\S{1,4096})")
_LOG_OF = re.compile(r"^job: the log of this job is (.*)\.job\.log$", re.MULTILINE)


def slurm_end(text: str) -> tuple[str, str] | None:
    """Return the kind of end that SLURM names, and the line that names it. If there are several, return the most
    important."""
    lines = dict.fromkeys(line[:READ_CHARACTERS] for line in text.splitlines())  # each once: there may be millions
    for expression, kind in _SLURM:
        said = next((line for line in lines if expression.search(line)), None)
        if said is not None:
            return kind, said.strip()
    return None


def failed_nodes(text: str) -> list[str]:
    return [name for match in _NAMED.finditer(text) for name in host_names(match.group(1))]


def output_of_attempt(text: str, attempt: str) -> str:
    """Return the part of `slurm-<job id>.out` that belongs to one attempt. Several attempts share the file after a
    requeue."""
    starts = list(_LOG_OF.finditer(text))
    for place, match in enumerate(starts):
        if match.group(1).rpartition("/logs/")[2] == attempt:
            end = starts[place + 1].start() if place + 1 < len(starts) else len(text)
            return text[match.end() : end]
    return ""
