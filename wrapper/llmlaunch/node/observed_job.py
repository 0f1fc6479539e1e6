"""What an observed command is: its job, node and attempt, the directory that is kept of it, and what is written down of
its command line and environment, without secrets."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import socket
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ..causes.redaction import masked, secret_values
from ..rundir import file_names
from ..rundir.file_names import attempt_folder
from ..rundir.files import read_text
from ..rundir.foreign_values import is_whole_number
from ..rundir.values import is_host, is_path_component, is_slurm_job

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from ..rundir.node_files import ObservedCommand

PARENT_FOLDER = "observed"
SCONTROL_SECONDS = 20.0
MOST_FILE_BYTES = 2**20
MOST_ATTEMPTS = 1000
CONFIG_ENDINGS = (".json", ".yaml", ".yml")
KEPT_VARIABLES = re.compile(
    r"(SLURM|SBATCH|NCCL|TORCH|PYTORCH|CUDA|NVTE|DS|DEEPSPEED|ACCELERATE|FSDP|MEGATRON|HF|TRANSFORMERS|PET|OMPI)_\w+|"
    r"OMP_NUM_THREADS|MASTER_ADDR|MASTER_PORT|RANK|LOCAL_RANK|WORLD_SIZE|PYTHONPATH|VIRTUAL_ENV|CONDA_PREFIX"
)
_STEP_OF_BATCH = 4294967290  # from here on SLURM's numbers of steps have meanings of their own


class ObservedJob(NamedTuple):
    """One observed command among those of its job. `observers` is how many commands of the job are observed, one on
    each node or one for each rank; `first` is the one that writes down what is the same for all of them."""

    job_id: str
    launcher: str  # slurm or local
    restarts: int
    step: int  # of SLURM; 0 outside a step
    node: str
    process: str
    nodes: int
    observers: int
    first: bool
    name: str


def observed_job(environment: Mapping[str, str], command: Sequence[str], pid: int) -> ObservedJob:
    """Return what the environment says of this command; without SLURM a job of one node."""
    node = node_name(environment)
    job_id = _slurm_job(environment)
    if job_id is None:
        name = _component(program_name(command))
        return ObservedJob(f"local-{int(time.time())}-{pid}", "local", 0, 0, node, "0", 1, 1, True, name)
    step = _number(environment, "SLURM_STEP_ID", -1)
    in_step = 0 <= step < _STEP_OF_BATCH
    process = _number(environment, "SLURM_PROCID", 0) if in_step else 0
    nodes = _number(environment, "SLURM_STEP_NUM_NODES" if in_step else "SLURM_JOB_NUM_NODES", 1)
    observers = _number(environment, "SLURM_STEP_NUM_TASKS", 1) if in_step else 1
    name = _component(environment.get("SLURM_JOB_NAME") or program_name(command))
    restarts = _number(environment, "SLURM_RESTART_COUNT", 0)
    first, step = process == 0, step if in_step else 0
    return ObservedJob(job_id, "slurm", restarts, step, node, str(process), nodes, observers, first, name)


def _slurm_job(environment: Mapping[str, str]) -> str | None:
    array, task = environment.get("SLURM_ARRAY_JOB_ID"), environment.get("SLURM_ARRAY_TASK_ID")
    job_id = f"{array}_{task}" if array and task else environment.get("SLURM_JOB_ID", "")
    return job_id if is_slurm_job(job_id) else None


def node_name(environment: Mapping[str, str]) -> str:
    """Return what SLURM calls this node, else its host name; trainers/hook.py does the same."""
    name = environment.get("SLURMD_NODENAME") or socket.gethostname().split(".")[0]
    return name if is_host(name) else "node"


def program_name(command: Sequence[str]) -> str:
    """Return the name of the training script or module in a command, else that of its program."""
    for before, word in zip(("", *command), command):
        if word.endswith(".py") and not word.startswith("-"):
            return Path(word).stem
        if before == "-m" and not word.startswith("torch."):
            return word.rpartition(".")[2]
    return Path(command[0]).name


def _component(text: str) -> str:
    name = re.sub(r"[^A-Za-z0-9_.-]+", "_", text)[:64].strip(".-_") or "run"
    return name if is_path_component(name) else "run"


def _number(environment: Mapping[str, str], name: str, default: int) -> int:
    text = environment.get(name, "")
    return int(text) if is_whole_number(text) and len(text) < 12 else default


def take_attempt(job: ObservedJob, directory: Path | None) -> tuple[Path, str]:
    """Make the folder of this attempt, and return the directory and the attempt's name. Raises OSError.

    Where several commands of a job are observed they all come to the same folder, and a second step of the job has a
    directory of its own. A single command takes the next directory that has no such attempt yet: a script may train
    twice. With `directory` it takes the next attempt there.
    """
    if job.observers > 1:
        base = directory or Path(PARENT_FOLDER) / _directory_name(job, 1)
        attempt = f"{job.job_id}.{job.restarts}"
        attempt_folder(base, attempt).mkdir(parents=True, exist_ok=True)
        return Path(os.path.abspath(base)), attempt  # noqa: PTH100 - a link stays the link that the person named
    for base, attempt in _places(job, directory):
        with contextlib.suppress(FileExistsError):
            attempt_folder(base, attempt).mkdir(parents=True)
            return Path(os.path.abspath(base)), attempt  # noqa: PTH100
    raise OSError(f"{directory or PARENT_FOLDER} holds {MOST_ATTEMPTS} attempts of this job")


def _places(job: ObservedJob, directory: Path | None) -> Iterator[tuple[Path, str]]:
    for number in range(MOST_ATTEMPTS):
        if directory is None:
            yield Path(PARENT_FOLDER) / _directory_name(job, number + 1), f"{job.job_id}.{job.restarts}"
        else:
            yield directory, f"{job.job_id}.{job.restarts + number}"


def _directory_name(job: ObservedJob, number: int) -> str:
    own = job.job_id if job.launcher == "slurm" else time.strftime("%Y%m%dT%H%M%S")
    step = f".{job.step}" if job.step else ""
    return f"{job.name}-{own}{step}" + (f"-{number}" if number > 1 else "")


def socket_name(run_directory: str, attempt: str, node: str) -> str:
    """Return the abstract UNIX socket on which the observer of a node hears of its ranks. Whoever binds it is the
    observer of the node; trainers/hook.py makes the same name."""
    digest = hashlib.sha256(f"{run_directory}\n{attempt}\n{node}".encode("utf-8", "surrogateescape")).hexdigest()
    return f"\0llmlaunch-{digest[:32]}"


# --- what is written down ---------------------------------------------------------------------------------------------


def description(job: ObservedJob, command: Sequence[str], environment: Mapping[str, str]) -> ObservedCommand:
    """Return the command as data, and what of its environment matters to a training."""
    values = secret_values(environment)
    return {
        "job_id": job.job_id,
        "launcher": job.launcher,
        "nodes": job.nodes,
        "observers": job.observers,
        "node_list": environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST"),
        "folder": str(Path.cwd()),
        "command": masked_words(command, values),
        "environment": {
            name: masked(f"{name}={value}", values)[len(name) + 1 :]
            for name, value in sorted(environment.items())
            if KEPT_VARIABLES.fullmatch(name)
        },
        "files": config_files(command, values),
    }


def masked_words(command: Sequence[str], values: Sequence[str]) -> list[str]:
    """Return the words without secrets, also where a flag's name tells that the word after it is one."""
    words: list[str] = []
    for before, word in zip(("", *command), command):
        pair = masked(f"{before} {word}", values)
        words.append(pair[len(before) + 1 :] if before and pair.startswith(f"{before} ") else masked(word, values))
    return words


def config_files(command: Sequence[str], values: Sequence[str]) -> dict[str, str]:
    """Return the text of each JSON or YAML file that the command names, by its name there: what a ds_config said when
    the training began may not be what it says later."""
    files: dict[str, str] = {}
    for word in command:
        name = word.partition("=")[2] if word.startswith("-") else word
        if name.endswith(CONFIG_ENDINGS):
            with contextlib.suppress(OSError):
                files[name] = masked(read_text(Path(name), MOST_FILE_BYTES, follow=True), values)
    return files


def batch_script(job: ObservedJob, said: dict[str, str], environment: Mapping[str, str]) -> str | None:
    """Return the text of the job's batch script without secrets: SLURM's own copy, else the file it was read of. `said`
    is `scontrol_job`'s. None where there is none."""
    if job.launcher != "slurm":
        return None
    text = _answer("scontrol", "write", "batch_script", job.job_id, "-")
    if not text.startswith("#!"):
        try:
            text = read_text(
                Path(str(said.get("Command", "")).split(" ")[0] or os.devnull), MOST_FILE_BYTES, follow=True
            )
        except OSError:
            return None
    return masked(text, secret_values(environment))


def scontrol_job(job: ObservedJob) -> dict[str, str]:
    """Return what SLURM says of the job, by name: where its output goes, and which script it runs. Empty where SLURM
    does not answer."""
    text = "" if job.launcher != "slurm" else _answer("scontrol", "show", "job", job.job_id)
    return dict(re.findall(r"^\s*(Command|WorkDir|StdOut|StdErr)=(.+)$", text, re.MULTILINE))


def _answer(*command: str) -> str:
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            timeout=SCONTROL_SECONDS, check=False,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.decode("utf-8", "replace") if done.returncode == 0 else ""


def own_output() -> tuple[str, int] | None:
    """Return the regular file that this process writes its output to, and how long it is already; None where that goes
    to a pipe or a terminal."""
    return _regular_file("/proc/self/fd/1") or _regular_file("/proc/self/fd/2")


def jobs_output(said: dict[str, str]) -> tuple[str, int] | None:
    """Return the same of the job, by what SLURM says of it: the tasks of a step write into a pipe, and srun into that
    file."""
    return _regular_file(str(said["StdOut"])) if "StdOut" in said else None


def _regular_file(name: str) -> tuple[str, int] | None:
    try:
        path = Path(name).resolve()
        return (str(path), path.stat().st_size) if path.is_file() else None
    except (OSError, ValueError, RuntimeError):
        return None


def link_log(run_directory: Path, attempt: str, node: str, path: str) -> None:
    """Put the job's own log among those of the run directory, where `llmlaunch logs` looks; a link, no copy."""
    link = file_names.node_log(run_directory, attempt, node)
    with contextlib.suppress(OSError):
        link.parent.mkdir(exist_ok=True)
        try:
            os.link(path, link)
        except OSError:
            link.symlink_to(path)
