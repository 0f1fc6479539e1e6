"""What SLURM says of a job's end in the job's own output. Pure."""

from __future__ import annotations

import re

__all__ = ["expanded", "failed_nodes", "output_of_attempt", "slurm_end"]

# SLURM 22.05.8 and 25.05. A step that is CANCELLED AT is no more than `srun --kill-on-bad-exit` at work.
_WORDS = (
    ("node_fail", re.compile(r"CANCELLED AT .* DUE TO NODE FAILURE|error: Node failure on ")),
    ("container", re.compile(r"srun: unrecognized option '--container-|srun: error: (spank: )?pyxis: ")),
    ("host_oom", re.compile(r"srun: error: \S+: tasks? \S+: Out Of Memory")),
    ("preempted", re.compile(r"CANCELLED AT .* DUE TO PREEMPTION")),
    ("time_limit", re.compile(r"CANCELLED AT .* DUE TO TIME LIMIT")),
    ("cancelled", re.compile(r"\*\*\* JOB .* CANCELLED AT [^ ]+ \*\*\*")),
)
_NAMED = re.compile(r"error: Node failure on (\S+)")
_LOG_OF = re.compile(r"^job\.sbatch: the log of this job is .*/logs/(.+)\.job\.log$", re.MULTILINE)


def slurm_end(text: str) -> tuple[str, str] | None:
    """The kind of end that SLURM names, and its line; the weightiest where there are several."""
    for kind, expression in _WORDS:
        for line in text.splitlines():
            if expression.search(line):
                return kind, line.strip()
    return None


def failed_nodes(text: str) -> list[str]:
    """The nodes that srun names as failed."""
    return [name for match in _NAMED.finditer(text) for name in expanded(match.group(1))]


def output_of_attempt(text: str, attempt: str) -> str:
    """The part of `slurm-<job id>.out` that belongs to one attempt; several share the file after a requeue."""
    starts = list(_LOG_OF.finditer(text))
    for number, match in enumerate(starts):
        if match.group(1) == attempt:
            end = starts[number + 1].start() if number + 1 < len(starts) else len(text)
            return text[match.end() : end]
    return ""


def expanded(names: str) -> list[str]:
    """`n[1-2,5],x` -> n1, n2, n5, x; a form that is not understood stays as it is."""
    found: list[str] = []
    for part in re.findall(r"[^,\[\]]+(?:\[[^\]]*\])?", names):
        match = re.fullmatch(r"([^\[]*)\[([\d,-]+)\]", part)
        if match is None:
            found.append(part)
            continue
        for span in match.group(2).split(","):
            low, _, high = span.partition("-")
            width = len(low)
            found += [f"{match.group(1)}{n:0{width}d}" for n in range(int(low), int(high or low) + 1)]
    return found
