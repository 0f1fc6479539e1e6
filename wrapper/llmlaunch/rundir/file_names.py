"""The name of every file of a run directory (docs/run-directory.md). No other module spells one."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

# Written by `render`, in the run directory; the first four also of a fallback layout, in fallback/<number>.
RUN = "run.json"
PLAN = "plan.json"
PLACEMENT = "placement.json"  # also of an attempt: the order of its nodes
COMMAND = "command.txt"
RECIPE = "recipe.yaml"
ARGUMENTS = "arguments.json"
JOB_SCRIPT = "job.sbatch"
NODE_ARCHIVE = "node.pyz"
SWEEP = "sweep.json"  # of the directory of a sweep

# Written while it is submitted, runs and ends.
RUN_ID = "run.id"
SUBMISSION = "submission.json"
SUBMITTING = "submitting"
REFUSED = "refused.json"
ENDED = "ended.json"
STATUS = "status.json"  # also of an attempt
STOP = "stop"
FROM_OLDER = "from_older"

# Folders.
LOGS = "logs"
PEAKS = "peaks"
ATTEMPTS = "attempts"

# Files of an attempt, in attempts/<attempt>.
ATTEMPT = "attempt.json"
PROGRESS = "progress.json"
SUMMARY = "summary.json"
VERSIONS = "versions.json"
NOTICES = "notices.jsonl"
PREFLIGHT_RESULT = "preflight.json"
PREPARE_LOG = "prepare.log"
SKIP_STEPS = "skip_steps"  # after a rollback: the steps whose batches are left out
OBSERVED = "observed.json"  # of a command that somebody else launched

# Folders of an attempt.
RANKS = "ranks"
PROBES = "memory"
CAUSES = "causes"
DONE = "done"
STOP_SIGNALS = "told"
PREFLIGHT = "preflight"
IMPORT = "import"  # a log for each node, of the import of a container's image
STACKS = "stacks"
FLIGHT = "flight"
OBSERVERS = "observers"

BATCH_LOG_NODE = "job"
"""What stands for a node in the name of the batch script's own log."""


def attempt_folder(run_directory: Path, attempt: str) -> Path:
    return run_directory / ATTEMPTS / attempt


def node_log(run_directory: Path, attempt: str, node: str) -> Path:
    """Return the log of all ranks of a node, or of the batch script for BATCH_LOG_NODE."""
    return run_directory / LOGS / f"{attempt}.{node}.log"


OF_EARLIER_VERSIONS: tuple[str, ...] = ()
"""Names that this version only reads."""
