"""Every kind of file of a run directory: where it is, who writes it, what it holds, and the schema of its content.

docs/run-directory.md and docs/run-files.md are made from this table, and a test counts it. Nodes do not need it.
"""

from __future__ import annotations

from typing import NamedTuple

from .attempt_files import AttemptStart, Cause, NoticeLine, Progress, RankRecord, Status
from .node_files import MonitorLine, ObservedEnd, PreflightLine, ProbeLine
from .placement_files import PlacementFile
from .run_file import RunFile
from .submission_files import JobEnd, SubmissionFile
from .summary import AttemptSummary

ATTEMPT = "attempts/<attempt>/"


class FileKind(NamedTuple):
    """`path` is in the run directory; `schema` is of the JSON object that it holds, or that each of its lines holds."""

    path: str
    writer: str
    holds: str
    schema: type | None = None


RENDERED = (
    FileKind("recipe.yaml", "render", "the recipe exactly as given"),
    FileKind("plan.json", "render", "what `check --json` prints"),
    FileKind("run.json", "render", "what the nodes and `collect` need", RunFile),
    FileKind(
        "arguments.json",
        "render",
        "every argument, variable, setting and directive with what it follows from; `llmlaunch explain-args RUN` shows "
        "it ([rendering.md](rendering.md#why-a-word-is-there))",
    ),
    FileKind(
        "job.sbatch", "render", "directives, setup lines, and `exec` of `node.pyz job` ([rendering.md](rendering.md))"
    ),
    FileKind(
        "command.txt",
        "render",
        "the training command, one argument on a line, with its reason; it is what runs "
        "([rendering.md](rendering.md#commandtxt))",
    ),
    FileKind(
        "placement.json",
        "render",
        "what the job needs to order its nodes; jobs of several nodes only ([placement.md](placement.md))",
        PlacementFile,
    ),
    FileKind("ds_config.json", "render", "DeepSpeed's configuration"),
    FileKind(
        "trainer/, hook/",
        "render",
        "scripts for the training environment: the trainer, `preflight.py`, `megatron_check.py`, "
        "`megatron_dataset.py`; "
        "`hook/` has what each Python of the trainers imports first: it writes their stacks "
        "([watchdog.md](watchdog.md)) and starts the [memory probe](memory-probe.md)",
    ),
    FileKind(
        "node.pyz", "render", "the programs of the batch host and of the nodes; Python 3.9 or newer, nothing installed"
    ),
    FileKind(
        "code.json, code.diff, code/",
        "render",
        "commit, uncommitted changes and container digest of the trainer's code; `code/` with `code: {snapshot: true}` "
        "([rendering.md](rendering.md))",
    ),
)
OF_THE_RUN = (
    FileKind("run.id", "submit, else the job itself", "the name of this run in the store; one line"),
    FileKind(
        "submission.json", "submit, resume", "which job runs this directory, and which ran it before", SubmissionFile
    ),
    FileKind(
        "submitting",
        "submit, resume",
        "a submission is under way, or was interrupted: since when, by which process ([slurm.md](slurm.md#submitting))",
    ),
    FileKind(
        "ended.json",
        "submit, status, runs, resume",
        "what SLURM said of a job that left no `status.json` of its own: how it ended, or that sbatch did not take it",
        JobEnd,
    ),
    FileKind(
        "from_older",
        "`resume --from-older`, or you",
        "the next attempt may go on from an older checkpoint, or from step 0, and removes the file "
        "([recovery.md](recovery.md#a-checkpoint-that-is-gone-or-damaged))",
    ),
    FileKind("stop", "you", "save, stop and do not come back ([recovery.md](recovery.md)); `resume` removes it"),
    FileKind(
        "logs/*.log",
        "the job, its nodes",
        "`<attempt>.job.log` (the batch script), `<attempt>.<node>.log` (all ranks of a node), "
        "`<attempt>.<node>.monitor.log` (if the monitor had something to say, once the node has ended)",
    ),
    FileKind("logs/<job id>.cancelled", "cancel", "exists once `llmlaunch cancel` has cancelled the job"),
    FileKind(
        "slurm-<job id>.out, logs/<job id>.out",
        "SLURM, submit --local",
        "what the batch script said before it had a log, and SLURM's own last words; of an array's task a link to that "
        "of the sweep's directory ([slurm.md](slurm.md))",
    ),
    FileKind("peaks/<node>.jsonl", "monitor of that node", "append-only, one writer a file: what it saw", MonitorLine),
    FileKind(
        "cache/huggingface/",
        "the trainers",
        "what they downloaded from Hugging Face's hub, where no home can be written ([sites.md](sites.md#containers))",
    ),
    FileKind(
        "status.json", "the job, at its end", "how the latest attempt ended; each attempt has its own, too", Status
    ),
)
OF_AN_ATTEMPT = (
    FileKind(
        f"{ATTEMPT}attempt.json",
        "the job",
        "how it began: which layout, from which step, on which nodes; what the preflight found",
        AttemptStart,
    ),
    FileKind(f"{ATTEMPT}progress.json", "the job", "the last step, and whether the training hung", Progress),
    FileKind(
        f"{ATTEMPT}ranks/<node>.jsonl", "the program of that node", "append-only: each rank's start and end", RankRecord
    ),
    FileKind(
        f"{ATTEMPT}done/<node>", "the program of that node", "exists once every trainer of the node has ended with 0"
    ),
    FileKind(
        f"{ATTEMPT}memory/<node>.jsonl",
        "the probes in the ranks that use CUDA",
        "append-only: torch's own memory peaks ([memory-probe.md](memory-probe.md))",
        ProbeLine,
    ),
    FileKind(
        f"{ATTEMPT}causes/<node>.json",
        "the program of that node, where its trainers failed",
        "what ended them",
        Cause,
    ),
    FileKind(
        f"{ATTEMPT}stacks/<node>.txt",
        "the program of that node, when asked",
        "append-only: where each rank is ([watchdog.md](watchdog.md))",
    ),
    FileKind(
        f"{ATTEMPT}flight/rank_<rank>", "the trainer, when asked", "its last collectives ([watchdog.md](watchdog.md))"
    ),
    FileKind(
        f"{ATTEMPT}preflight/<node>.jsonl",
        "`node.pyz preflight`",
        "append-only: how far the node came, and what is wrong with it; `<node>.log` beside it",
        PreflightLine,
    ),
    FileKind(f"{ATTEMPT}prepare.log", "one node", "what was said while arguments were checked and indexes built"),
    FileKind(
        f"{ATTEMPT}import/<node>.log",
        "the step that imports an image of a registry",
        "what pyxis and enroot said ([sites.md](sites.md#an-image-of-a-registry))",
    ),
    FileKind(f"{ATTEMPT}notices.jsonl", "the job", "which notices were sent, and what became of them", NoticeLine),
    FileKind(
        f"{ATTEMPT}summary.json",
        "the job's last act",
        "what every rank and node used, and where each number is from",
        AttemptSummary,
    ),
    FileKind(
        f"{ATTEMPT}versions.json",
        "a rank",
        "of an observed command, and of a rank that runs alone: versions of the frameworks that ran, by package",
    ),
    FileKind(
        f"{ATTEMPT}observers/<node>.<task>.json",
        "an observer",
        "how the command that it observed ended; beside them `.reported`, made by the observer that says at "
        "the end what was measured",
        ObservedEnd,
    ),
)
FILE_KINDS = RENDERED + OF_THE_RUN + OF_AN_ATTEMPT
