"""Every kind of file in a run directory: its path, its writer, its content, and the schema of the content.

docs/run-directory.md and docs/run-files.md are generated from this table, and a test limits its length. Nodes do not
need it.
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
    """One kind of file. `path` is relative to the run directory; several paths are separated by commas. `schema`
    describes the JSON object in the file, or in each of its lines."""

    path: str
    writer: str
    holds: str
    schema: type | None = None


RENDERED = (
    FileKind("recipe.yaml", "render", "the recipe, exactly as given"),
    FileKind("plan.json", "render", "the plan, as `check --json` prints it"),
    FileKind("run.json", "render", "what the nodes and `collect` need to know about the layout", RunFile),
    FileKind(
        "arguments.json",
        "render",
        "every argument, variable, setting and directive, and what each follows from; `llmlaunch explain-args RUN` "
        "shows it ([own-arguments.md](own-arguments.md#where-an-argument-comes-from))",
    ),
    FileKind(
        "job.sbatch", "render", "directives, setup lines, and `exec` of `node.pyz job` ([rendering.md](rendering.md))"
    ),
    FileKind(
        "command.txt",
        "render",
        "the training command, one argument per line, each with its reason; this file is what runs "
        "([rendering.md](rendering.md#commandtxt))",
    ),
    FileKind(
        "placement.json",
        "render",
        "what the job needs to choose the order of its nodes; only for jobs of several nodes "
        "([placement.md](placement.md))",
        PlacementFile,
    ),
    FileKind("ds_config.json", "render", "DeepSpeed's configuration"),
    FileKind(
        "trainer/, hook/",
        "render",
        "scripts for the training environment: the trainer, `preflight.py`, `megatron_check.py`, "
        "`megatron_dataset.py`; `hook/` holds what the Python of each trainer imports first, which writes stacks "
        "([watchdog.md](watchdog.md)) and starts the [memory probe](memory-probe.md)",
    ),
    FileKind(
        "node.pyz",
        "render",
        "the programs that run on the batch host and on the nodes; they need Python 3.9 or newer and nothing else",
    ),
    FileKind(
        "code.json, code.diff, code/",
        "render",
        "commit, uncommitted changes and container digest of the trainer's code; `code/` exists only with "
        "`code: {snapshot: true}` ([code.md](code.md))",
    ),
)
OF_THE_RUN = (
    FileKind("run.id", "submit, otherwise the job itself", "the name of this run in the store, on one line"),
    FileKind(
        "submission.json",
        "submit, resume",
        "the job that runs this directory, and the earlier submissions",
        SubmissionFile,
    ),
    FileKind(
        "submitting",
        "submit, resume",
        "exists while a submission is in progress, or after one was interrupted; records its process and start time "
        "([slurm.md](slurm.md#submitting))",
    ),
    FileKind(
        "ended.json",
        "submit, status, runs, resume",
        "what SLURM reported about a job that wrote no `status.json`: how it ended, or that sbatch refused it",
        JobEnd,
    ),
    FileKind(
        "from_older",
        "`resume --from-older`, or you",
        "allows the next attempt to continue from an older checkpoint, or from step 0; the attempt removes the file "
        "([recovery.md](recovery.md#a-checkpoint-that-is-gone-or-damaged))",
    ),
    FileKind(
        "stop",
        "you",
        "asks the run to save, stop and not restart ([recovery.md](recovery.md)); `resume` removes the file",
    ),
    FileKind(
        "logs/*.log",
        "the job, its nodes",
        "`<attempt>.job.log` (the batch script), `<attempt>.<node>.log` (all ranks of a node), "
        "`<attempt>.<node>.monitor.log` (messages of the monitor, if any, once the node has ended)",
    ),
    FileKind("logs/<job id>.cancelled", "cancel", "exists once `llmlaunch cancel` has cancelled the job"),
    FileKind(
        "slurm-<job id>.out, logs/<job id>.out",
        "SLURM, submit --local",
        "output of the batch script before it has opened its log, and the last messages of SLURM itself; for a task of "
        "an array, a link to the file in the sweep's directory ([slurm.md](slurm.md))",
    ),
    FileKind(
        "peaks/<node>.jsonl",
        "the monitor of that node",
        "what the monitor saw; append-only, one writer per file",
        MonitorLine,
    ),
    FileKind(
        "cache/huggingface/",
        "the trainers",
        "what they downloaded from the Hugging Face hub, if the home directory is not writable "
        "([sites.md](sites.md#containers))",
    ),
    FileKind(
        "status.json",
        "the job, at its end",
        "how the latest attempt ended; each attempt also has its own `status.json`",
        Status,
    ),
)
OF_AN_ATTEMPT = (
    FileKind(
        f"{ATTEMPT}attempt.json",
        "the job",
        "how the attempt began: its layout, first step and nodes, and what the preflight found",
        AttemptStart,
    ),
    FileKind(f"{ATTEMPT}progress.json", "the job", "the last step, and whether the training hangs", Progress),
    FileKind(
        f"{ATTEMPT}ranks/<node>.jsonl",
        "the program of that node",
        "start and end of each rank; append-only",
        RankRecord,
    ),
    FileKind(
        f"{ATTEMPT}done/<node>", "the program of that node", "exists once every trainer of the node has exited with 0"
    ),
    FileKind(
        f"{ATTEMPT}memory/<node>.jsonl",
        "the probes in the ranks that use CUDA",
        "memory peaks as torch counts them; append-only ([memory-probe.md](memory-probe.md))",
        ProbeLine,
    ),
    FileKind(
        f"{ATTEMPT}causes/<node>.json",
        "the program of that node, if its trainers failed",
        "what ended the trainers",
        Cause,
    ),
    FileKind(
        f"{ATTEMPT}stacks/<node>.txt",
        "the program of that node, when asked",
        "stack of each rank; append-only ([watchdog.md](watchdog.md))",
    ),
    FileKind(
        f"{ATTEMPT}flight/rank_<rank>",
        "the trainer, when asked",
        "the last collectives of that rank ([watchdog.md](watchdog.md))",
    ),
    FileKind(
        f"{ATTEMPT}preflight/<node>.jsonl",
        "`node.pyz preflight`",
        "how far the node came, and what is wrong with it; append-only; next to it is `<node>.log`",
        PreflightLine,
    ),
    FileKind(f"{ATTEMPT}prepare.log", "one node", "output while arguments were checked and indexes built"),
    FileKind(
        f"{ATTEMPT}import/<node>.log",
        "the step that imports an image from a registry",
        "output of pyxis and enroot ([sites.md](sites.md#an-image-of-a-registry))",
    ),
    FileKind(
        f"{ATTEMPT}notices.jsonl", "the job", "the notices that were sent, and whether they were delivered", NoticeLine
    ),
    FileKind(
        f"{ATTEMPT}summary.json",
        "the job, as its last act",
        "what every rank and node used, and how each number was measured",
        AttemptSummary,
    ),
    FileKind(
        f"{ATTEMPT}versions.json",
        "a rank",
        "versions of the frameworks that ran, by package; only for an observed command and a rank that runs alone",
    ),
    FileKind(
        f"{ATTEMPT}observers/<node>.<task>.json",
        "an observer",
        "how the observed command ended; the folder also has `.reported`, made by the observer that reports the "
        "measurements at the end",
        ObservedEnd,
    ),
)
FILE_KINDS = RENDERED + OF_THE_RUN + OF_AN_ATTEMPT
