"""Runs a one-node job on this machine, detached from the terminal that started it."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from llmlaunch.errors import UserError
from llmlaunch.launchers import run_environment, run_files
from llmlaunch.launchers.base import JobState, Submission
from llmlaunch.launchers.environment_cache import cache_file
from llmlaunch.launchers.local_gpus import refuse_without_gpus_of
from llmlaunch.launchers.run_environment import INTERPRETER_VARIABLE
from llmlaunch.rundir import file_names
from llmlaunch.rundir.files import create
from llmlaunch.rundir.values import count_above_zero
from llmlaunch.trainers import TRAINER, TRAINER_MODULES

# Boot time, and with it a process's start, moves by a second when the clock is set.
_START_TOLERANCE_SECONDS = 3

_RUN_DIR = "LLMLAUNCH_RUN_DIR"
"""In the environment of a local job's script: tells it from any other process that submission.json may name."""


@dataclass(frozen=True)
class LocalLauncher:
    """Starts `bash job.sbatch`. A cancelled job has `kill_after_seconds` to end by itself.

    A node kills the ranks that are left 30 seconds after the first one failed, hence more than that.
    """

    kill_after_seconds: float = 40.0

    @property
    def name(self) -> str:
        return "local"

    def submit(self, run_dir: Path, extra: Sequence[str] = (), again: bool = False) -> Submission:
        if extra:
            raise UserError(f"{' '.join(extra)}: options of sbatch; a local run has no sbatch to give them to")
        nodes = run_files.node_count(run_dir)
        if nodes > 1:
            raise UserError(
                f"{run_dir / file_names.RUN}: nodes is {nodes}, and this machine is one; submit it to SLURM, or "
                "render it with nodes: 1"
            )
        refuse_without_gpus_of(run_dir)
        run_dir = run_files.prepare(run_dir, again)
        before = run_files.read_submission(run_dir) if again else None
        submission = _start(run_dir)
        if before is not None:
            submission = replace(submission, earlier=(*before.earlier, replace(before, earlier=())))
        try:
            run_files.write_submission(submission, over=before is not None)
        except (OSError, UserError):
            # Another submit was faster, or the disk is full: a job nobody knows of must not run on.
            self.cancel(submission)
            raise
        return submission

    def states(self, submissions: Iterable[Submission]) -> Mapping[str, JobState]:
        return {submission.job_id: _state(submission) for submission in submissions}

    def cancel(self, submission: Submission) -> bool:
        if not _here(submission):
            raise UserError(f"job {submission.job_id} runs on host {submission.cluster}; cancel it there")
        leader = _process(submission)
        if leader is None:
            return False
        if not _works_in(leader, submission.run_dir):
            raise UserError(
                f"{submission.run_dir / file_names.SUBMISSION}: names process {leader.pid}, which is no job of this "
                "directory; nothing was stopped. Where it is yours: kill it yourself"
            )
        with contextlib.suppress(OSError):  # a full disk must not keep a job from being stopped
            create(run_files.cancel_mark(submission), "")
        stop_job(leader, self.kill_after_seconds)
        return True


def _start(run_dir: Path) -> Submission:
    """Start the job in a session of its own, so that no closing terminal and no Ctrl-C reaches it."""
    output = run_dir / file_names.LOGS / f".starting.{os.getpid()}"
    with output.open("xb") as file:
        try:
            child = subprocess.Popen(
                ["bash", file_names.JOB_SCRIPT],
                cwd=run_dir,
                env=run_environment.for_local_job(os.environ) | _interpreter() | {_RUN_DIR: str(run_dir)},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            output.unlink()
            raise UserError(f"bash cannot be run on this machine: {error.strerror}") from error
    started_at = psutil.Process(child.pid).create_time()
    job_id = f"local-{int(started_at)}-{child.pid}"
    output.rename(output.with_name(f"{job_id}.out"))
    _children.append(child)
    return Submission("local", job_id, run_dir, started_at, platform.node())


def _interpreter() -> dict[str, str]:
    """Return the variable that names the interpreter of a run whose recipe names none: what is set, else this one if it
    has torch. It need not be the first on PATH."""
    if INTERPRETER_VARIABLE in os.environ or importlib.util.find_spec("torch") is None:
        return {}
    return {INTERPRETER_VARIABLE: sys.executable}


# Kept so that an ended child of this process is waited for; children of an ended launcher belong to init.
_children: list[subprocess.Popen[bytes]] = []


def _state(submission: Submission) -> JobState:
    # In this order: a job that ends in between has written its status.json.
    running = _here(submission) and _process(submission) is not None
    end = run_files.read_end(submission)
    if running:
        return JobState("running")
    if end is not None and end.succeeded:
        return JobState("succeeded", reason=end.why, exit_code=end.exit_code)
    if run_files.cancel_mark(submission).exists():  # status.json is the job's own and says failed
        return JobState("cancelled", reason=end.why if end else "")
    if end is not None:
        return JobState(end.state, reason=end.why, exit_code=end.exit_code)
    if not _here(submission):
        return JobState("unknown", reason=f"started on host {submission.cluster}; ask there while it runs")
    return JobState("failed", reason="its process is gone and left no status.json: killed, or the machine restarted")


def _here(submission: Submission) -> bool:
    return submission.cluster == platform.node()


def _process(submission: Submission) -> psutil.Process | None:
    """The job's script while it runs: by process id and start time, for ids are used again."""
    for child in _children:
        child.poll()
    _, started, pid = submission.job_id.split("-")
    try:
        process = psutil.Process(int(pid))
        same = abs(process.create_time() - int(started)) <= _START_TOLERANCE_SECONDS
    except (psutil.NoSuchProcess, OverflowError):  # an id larger than any
        return None
    return process if same and alive([process]) else None


def _works_in(process: psutil.Process, run_dir: Path) -> bool:
    """Whether a process of ours was started as the job of `run_dir`; one that was moved since is told by its folder."""
    try:
        started_in = _environment(process).get(_RUN_DIR)
        ours = process.uids().real == os.getuid()
        return ours and started_in is not None and (started_in == str(run_dir) or run_dir.samefile(process.cwd()))
    except (psutil.Error, OSError):
        return False


def _environment(process: psutil.Process) -> Mapping[str, str]:
    """Return the environment of a process; for an instant after its start it reads as empty, so it is read again."""
    deadline = time.monotonic() + 2 * _POLL_SECONDS
    while not (found := process.environ()) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS / 10)
    return dict(found)


_POLL_SECONDS = 0.1
_KILL_SECONDS = 10.0


def stop_job(leader: psutil.Process, kill_after_seconds: float) -> None:
    """TERM to the script, which hands it on; TERM to what outlives the script; at last KILL to all of it.

    Not to the whole group at once: a node would get it twice, from here and from the job. Ranks have sessions of
    their own, so the group alone is not the whole job.
    """
    job = _processes(leader, set())
    _each([leader], psutil.Process.terminate)
    terminated = False
    deadline = time.monotonic() + kill_after_seconds
    while time.monotonic() < deadline:
        job = _processes(leader, job)
        if not job:
            return
        if leader not in job and not terminated:
            _each(job, psutil.Process.terminate)
            terminated = True
        time.sleep(_POLL_SECONDS)
    deadline = time.monotonic() + _KILL_SECONDS
    # Again and again: a process may have started another between the look and the signal.
    while job and time.monotonic() < deadline:
        _each(job, psutil.Process.kill)
        time.sleep(_POLL_SECONDS)
        job = _processes(leader, job)


def alive(processes: Iterable[psutil.Process]) -> set[psutil.Process]:
    """Those that still run; a zombie does not, and neither does a stranger with a process id used again."""
    living = set()
    for process in processes:
        with contextlib.suppress(psutil.Error):
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                living.add(process)
    return living


def _processes(leader: psutil.Process, earlier: set[psutil.Process]) -> set[psutil.Process]:
    """The job's living processes: those earlier before, the leader's group, and what any of them has started."""
    members = {process for process in psutil.process_iter() if _group(process) == leader.pid}
    children: set[psutil.Process] = set()
    for process in earlier | members | {leader}:
        with contextlib.suppress(psutil.Error):
            children.update(process.children(recursive=True))
    return alive(earlier | members | children | {leader})


def _group(process: psutil.Process) -> int | None:
    try:
        return os.getpgid(process.pid)
    except OSError:
        return None


def _each(processes: Iterable[psutil.Process], act: Callable[[psutil.Process], None]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.Error):
            act(process)


_VERSIONS = (
    "import importlib.metadata as m, json, sys;"
    "print(json.dumps([sys.version] + [m.version(n) for n in ('torch', 'deepspeed', 'transformers')]))"
)
_SECONDS = 300


def measured_baseline(python: str, say: Callable[[str], None]) -> int:
    """Return the resident bytes of an idle trainer under `python`, from the cache or from a new measurement.

    Raises:
        UserError: the interpreter lacks torch, deepspeed or transformers, or the measurement fails.
    """
    source = b"".join(path.read_bytes() for path in TRAINER_MODULES)
    key = f"{_versions(python)} {hashlib.sha256(source).hexdigest()[:12]}"
    from llmlaunch.rundir.files import read_object, replace_json

    path = cache_file("baseline.json")
    table = {name: size for name, size in (read_object(path) or {}).items() if count_above_zero(size)}
    if key not in table:
        say("Measuring an idle trainer once, so that the prediction counts what its libraries take...")
        table[key] = _measure(python)
        with contextlib.suppress(OSError):  # if the cache cannot be written, the next run measures again
            replace_json(path, table, lasting=False)
    return int(table[key])


def _versions(python: str) -> str:
    import subprocess  # imported late, because most plans measure nothing

    try:
        answer = subprocess.run([python, "-c", _VERSIONS], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as failure:
        raise UserError(
            f"{python}: cannot be run ({failure}); name another interpreter (python: in the recipe)"
        ) from None
    if answer.returncode != 0:
        missing = answer.stderr.strip().splitlines()[-1] if answer.stderr.strip() else "it failed"
        raise UserError(
            f"{python}: lacks what the training needs ({missing}); install llmlaunch[local] there, or name another "
            "interpreter (python: in the recipe)"
        )
    return f"{python} {answer.stdout.strip()}"


def _measure(python: str) -> int:
    import subprocess

    from llmlaunch.frameworks.deepspeed.arguments import CPU_ACCELERATOR, MALLOC
    from llmlaunch.launchers.bandwidth import free_port

    command = [python, "-m", "torch.distributed.run", "--nnodes=1", "--nproc_per_node=1", "--node_rank=0"]
    command += ["--rdzv_backend=static", "--master_addr=127.0.0.1", f"--master_port={free_port()}"]
    command += [str(TRAINER), "--measure-baseline"]
    environment = {**os.environ, **CPU_ACCELERATOR, **MALLOC, "OMP_NUM_THREADS": "1"}
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, env=environment)
    except subprocess.TimeoutExpired:
        raise UserError(f"{python}: an idle trainer did not come up within {_SECONDS} s; try again") from None
    for line in answer.stdout.splitlines():
        with contextlib.suppress(ValueError, KeyError, TypeError):
            return int(json.loads(line)["resident_peak_bytes"])
    tail = "\n".join(answer.stderr.strip().splitlines()[-5:])
    raise UserError(f"{python}: an idle trainer failed with exit code {answer.returncode}:\n{tail}")
