"""What the job asks of SLURM: the words of an srun, the environment of its steps, and the few scontrol commands. Each
function that asks runs one command, for a bounded time."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
from typing import TYPE_CHECKING, Any, NamedTuple

from ..rundir.values import host_names
from .files import say

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

ANSWER_SECONDS = 30.0
# SLURM exports what the job asked for, and srun takes each such variable for an option of its step. A number of GPUs or
# tasks of the whole job, or of the job in which sbatch was called, does not fit a step on some of the nodes. So each
# step is told its own. Of what it is not told (memory, GPUs of a node) it gets all that the job has.
_OF_THE_JOB = re.compile(
    r"SLURM_(?:NTASKS(?:_PER_(?:NODE|CORE|SOCKET|GPU|TRES))?|NPROCS|DISTRIBUTION|DIST_PLANESIZE|HOSTFILE"
    r"|GPUS(?:_PER_(?:NODE|SOCKET|TASK))?|GRES|STEP_GRES|TRES_PER_TASK|TRES_BIND|GPU_BIND|CPUS_PER_(?:TASK|GPU)"
    r"|MEM_PER_(?:CPU|GPU|NODE)|EXCLUSIVE|EXACT|OVERCOMMIT|LABELIO|STDINMODE|STDOUTMODE|STDERRMODE|UNBUFFEREDIO)"
    r"|SRUN_(?:INPUT|OUTPUT|ERROR|CPUS_PER_TASK)|LLMLAUNCH_(?:SETUP|TOLD)|PWD|OLDPWD"
)
# A site may export cpu-bind=none. A mask or map is that of the step in which sbatch was called.
_BINDING = re.compile(r"SLURM_(CPU|MEM)_BIND(?:_LIST|_TYPE|_VERBOSE|_PREFER)?")


class StepOptions(NamedTuple):
    """What each srun of the job is told beside its nodes: run.json's `job` (docs/run-files.md) and what SLURM exported
    to the batch script."""

    allocated: int  # nodes of the job
    words: tuple[str, ...]  # the site's
    gres: str  # of a step on a whole node; empty where none is named
    cpus_per_task: str
    is_hinted: bool  # a hint (nomultithread) binds by itself

    @classmethod
    def of(cls, job: Mapping[str, Any], environment: Mapping[str, str]) -> StepOptions:
        return cls(
            int(job["allocated"]),
            tuple(map(str, job["srun"])),
            # A step that names none wants as many as the whole job where the job asked for a total (sbatch --gpus).
            str(job["step_gres"]) if environment.get("SLURM_GPUS") else "",
            environment.get("SLURM_CPUS_PER_TASK", ""),
            bool(environment.get("SLURM_HINT")),
        )

    def srun(self, nodes: Sequence[str], error: str | Path, again: bool, output: str = "") -> list[str]:
        """Return the words of an srun of one task on each of `nodes`, up to the program. What the tasks say on stderr
        goes to `error` (%N is the node), what they print to `output`, or comes back. `again`: other steps of the job
        may not have ended, and one that waits for a lost node holds the others' memory and devices."""
        count = len(nodes)
        words = ["srun", f"--nodes={count}", f"--ntasks={count}", "--ntasks-per-node=1"]
        words += ["--export=ALL"]  # also where the job was submitted with --export=NONE
        words += ["--kill-on-bad-exit=0", "--no-kill", "--wait=0", f"--error={error}", "--open-mode=append"]
        words += [f"--output={output}"] if output else []
        words += ["--overlap", "--mem=0"] if again else []
        words += [f"--nodelist={','.join(nodes)}"] if again or count != self.allocated else []
        # Without either, the one task of a node may be bound to one core.
        if self.cpus_per_task:
            words.append(f"--cpus-per-task={self.cpus_per_task}")
        elif not self.is_hinted:
            words.append("--cpu-bind=none")
        words += [f"--gres={self.gres}"] if self.gres else []
        return [*words, *self.words]


def step_environment(environment: Mapping[str, str]) -> dict[str, str]:
    masked = {kind for kind in ("CPU", "MEM") if re.search(r"ma(?:sk|p)_", environment.get(f"SLURM_{kind}_BIND", ""))}

    def stays(name: str) -> bool:
        binding = _BINDING.fullmatch(name)
        return not _OF_THE_JOB.fullmatch(name) and not (binding and binding[1] in masked)

    return {name: value for name, value in environment.items() if stays(name)}


def job_name(environment: Mapping[str, str]) -> str:
    """Return the job as SLURM's commands name it; empty without SLURM. Never the id of an array's task: the last task
    has the array's own, and a word to that is one to all tasks."""
    if environment.get("SLURM_ARRAY_JOB_ID"):
        return f"{environment['SLURM_ARRAY_JOB_ID']}_{environment['SLURM_ARRAY_TASK_ID']}"
    return environment.get("SLURM_JOB_ID", "")


def allocated_nodes(environment: Mapping[str, str]) -> list[str]:
    """Return the nodes of the job, in SLURM's order."""
    return host_names(environment.get("SLURM_JOB_NODELIST", ""))


def held_nodes(job: str) -> list[str]:
    """Return the nodes that the job has now: SLURM may have taken some away. Empty where it does not say."""
    answer = ask("squeue", "-h", "-j", job, "-o", "%N")
    return [] if answer is None else host_names(answer.strip())


def signals_reach_every_process() -> bool:
    """Whether SLURM signals every process of a step (proctrack/linuxproc), not only the one that it started there."""
    return "proctrack/linuxproc" in (ask("scontrol", "show", "config") or "")


def give_back(job: str, kept: Sequence[str]) -> bool:
    """Keep those nodes of the job alone. A lost one ends every job that has it, once SLURM notices that it is."""
    done = ask("scontrol", "update", f"JobId={job}", f"NodeList={','.join(kept)}") is not None
    for suffix in ("sh", "csh"):  # scontrol's, for the shell that called it
        path = f"slurm_job_{os.environ.get('SLURM_JOB_ID')}_resize.{suffix}"
        with contextlib.suppress(OSError):
            os.unlink(path)  # noqa: PTH108
    return done


def kill_steps(job: str) -> None:
    """End what the steps of the job have left behind: whoever ended an srun did not end its tasks."""
    for step in (ask("squeue", "-h", "-s", "-j", job, "-o", "%i") or "").split():
        if not step.endswith((".batch", ".extern", ".interactive")):
            ask("scancel", "--signal=KILL", step)


def answer_of(*command: str, seconds: float = ANSWER_SECONDS) -> str | None:
    """Return what SLURM says against a command; None where it has done it."""
    try:
        done = _run(command, seconds)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return None if done.returncode == 0 else " ".join((done.stderr or done.stdout).split())


def ask(*command: str, seconds: float = ANSWER_SECONDS) -> str | None:
    """Return what SLURM answers; None, and one line on stderr, where it does not."""
    try:
        done = _run(command, seconds)
    except (OSError, subprocess.TimeoutExpired) as error:
        say(f"{command[0]}: {error}")
        return None
    if done.returncode:
        named = " ".join(word for word in command[:3] if "=" not in word)  # a NAME=VALUE may hold thousands of nodes
        say(f"{named}: {' '.join(done.stderr.split())}")
        return None
    return done.stdout


def _run(command: Sequence[str], seconds: float) -> subprocess.CompletedProcess[str]:
    """A step among them is told nothing by what SLURM exported to the job."""
    return subprocess.run(
        command,
        env=step_environment(os.environ),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=seconds,
        check=False,
    )
