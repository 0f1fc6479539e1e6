"""The name of every file of a run directory (docs/run-directory.md). No other module spells one."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

# Written by `render`, in the run directory; the first four also of a fallback layout, in fallback/<number>.
RUN = "run.json"
PLAN = "plan.json"
PLACEMENT = "placement.json"
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
PREPARE_LOG = "prepare.log"

# Folders of an attempt.
RANKS = "ranks"
PROBES = "memory"
CAUSES = "causes"
DONE = "done"
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


# Of directories that the version before rendered: read, and never written.
EARLIER_REFUSAL = "refused.json"
EARLIER_OBSERVED = "observed.json"  # in the folder of an attempt
EARLIER_STOP_SIGNALS = "told"  # in the folder of an attempt
