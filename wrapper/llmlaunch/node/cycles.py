"""Restarts by ft_launcher of nvidia-resiliency-ext: inside the step, it starts the trainers again on the nodes that are
left, spare ones among them. It calls what lies between two of them a cycle; here each is an attempt of its own.

The rank wrappers begin such an attempt: they alone are started again. The watchdog has the one before it judged by
`finish`, as after any end, and ends the step where ft_launcher should not go on, since it restarts whatever failed.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ..rundir import file_names
from ..rundir.attempt import Attempt
from ..rundir.file_names import attempt_folder, node_log
from ..rundir.foreign_values import is_whole_number
from ..rundir.rank_records import rank_files, rank_records
from ..rundir.values import is_host
from .files import open_to_append, say

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence


NO_RESTART = 93
"""Exit code of ft_launcher that asks for no restart, by whomever (0.7, fault_tolerance/utils.py)."""
CYCLE_VARIABLE = "TORCHELASTIC_RESTART_COUNT"
NEXT, END = "next", "end"  # the next attempt has begun; the step is to be ended
SETTLE_SECONDS = 5.0  # from the first rank's failure to the others' ends
# Stopping trainers takes ft_launcher 15 s, then it waits 50 s for their device memory, looks at the node, and meets.
REGROUP_SECONDS = 180.0
LATE_SAVE_SECONDS = 60.0  # where the trainers were told to save and one has failed; ft_launcher ends the others in 15 s
ALL_BEGIN_SECONDS = 15.0  # from the first node's new trainers to the last's
JUDGE_SECONDS = 150.0
COMMAND_SECONDS = 60.0
# Folders that job.sbatch makes for all nodes of an attempt.
FOLDERS = (file_names.DONE, file_names.RANKS, file_names.FLIGHT, file_names.PROBES)


def attempt_of_cycle(first: str, environment: Mapping[str, str]) -> str:
    """Return the attempt that ft_launcher's cycle is, in a step that began with attempt `first`."""
    job, _, number = first.rpartition(".")
    cycle = environment.get(CYCLE_VARIABLE, "")
    return f"{job}.{int(number) + int(cycle)}" if is_whole_number(cycle) and is_whole_number(number) else first


def later_attempts(run_directory: Path, attempt: str) -> Iterator[str]:
    """Yield the attempts after this one that have a folder, in their order."""
    job, _, number = attempt.rpartition(".")
    later = int(number) + 1 if is_whole_number(number) else 0
    while later and attempt_folder(run_directory, f"{job}.{later}").is_dir():
        yield f"{job}.{later}"
        later += 1


def begin_cycle(run_directory: Path, first: str, attempt: str, node: str) -> None:
    """Make this process, a rank wrapper, one of `attempt`: its folders, its log, and what the trainer's environment
    says of it. Whatever cannot be made is left as it was for the step's first attempt."""
    before, folder = attempt_folder(run_directory, first), attempt_folder(run_directory, attempt)
    with contextlib.suppress(OSError):
        for name in FOLDERS:
            if (before / name).is_dir():
                (folder / name).mkdir(parents=True, exist_ok=True)
    for name, value in os.environ.items():
        if f"/{first}/" in value:
            os.environ[name] = value.replace(f"/{first}/", f"/{attempt}/")
    os.environ["LLMLAUNCH_ATTEMPT"] = attempt
    try:
        log = open_to_append(node_log(run_directory, attempt, node))
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
    except OSError as error:
        say(f"the log of {attempt} cannot be written on {node}: {error.strerror}; it goes on in that of {first}")


class CycleWatch:
    """The watchdog's view of one attempt inside a step of ft_launcher. Times are seconds of the watchdog's clock."""

    def __init__(self, run_directory: Path, attempt: str, layout: str, nodes: int) -> None:
        self._run_directory, self._attempt, self._layout, self._nodes = run_directory, attempt, layout or ".", nodes
        self._folder = attempt_folder(run_directory, attempt)
        # in a job array never SLURM_JOB_ID: that of the last task is the array's own
        self._job, _, number = attempt.rpartition(".")
        self.next_attempt = f"{self._job}.{int(number) + 1}"
        self._next_folder = attempt_folder(run_directory, self.next_attempt)
        self._over_since: float | None = None
        self._begun_since: float | None = None
        self._judged = False
        self._fit: set[str] = set()  # nodes of the allocation that may train on

    @property
    def is_over(self) -> bool:
        """Whether the trainers of the attempt have failed, or those of the next have begun."""
        return self._over_since is not None

    def look(self, now: float) -> str:
        """Return NEXT where the next attempt has begun and is written down, END where the step is to be ended, else
        nothing."""
        if self._over_since is None:
            failed = (self._folder / file_names.FAILED).exists() or self._ended_launchers()
            if not failed and not self._next_folder.is_dir():
                return ""
            self._over_since = now
        to_stop = any((self._folder / file_names.STOP_SIGNALS).glob("*"))
        if to_stop:  # what was to save and end is not to train on
            late = now - self._over_since > LATE_SAVE_SECONDS
            return END if late or self._next_folder.is_dir() else ""
        if not self._judged:
            if now - self._over_since < SETTLE_SECONDS:
                return ""
            if not self._goes_on():
                return END
            self._judged = True
        if not self._next_folder.is_dir():
            if len(self._fit - self._ended_launchers()) < self._nodes:
                say("watchdog: too few nodes still have a launcher to start the trainers again; ending the step")
                return END
            if now - self._over_since <= REGROUP_SECONDS:
                return ""
            say(f"watchdog: ft_launcher has not started the trainers again in {REGROUP_SECONDS:.0f} s; ending the step")
            return END
        if self._begun_since is None:
            self._begun_since = now
        if len(rank_files(self._next_folder)) < self._nodes and now - self._begun_since < ALL_BEGIN_SECONDS:
            return ""
        return NEXT if self._begin_next() else END

    def _ended_launchers(self) -> set[str]:
        """Return the nodes that trained and whose launcher has ended in failure."""
        causes = (self._folder / file_names.CAUSES).glob("[!.]*.json")  # those of the preflight are of other nodes
        ranks = self._folder / file_names.RANKS
        return {path.stem for path in causes if (ranks / f"{path.stem}.jsonl").exists()}

    def _goes_on(self) -> bool:
        """Have the attempt judged; whether ft_launcher is to go on. What it cannot know is done for it: lost nodes are
        given back, and those at fault kept out."""
        allocated = allocated_nodes(self._job) or Attempt(self._run_directory, self._attempt).nodes
        options = ("--nodes", str(self._nodes), "--code", "1", "--within", "--step-goes-on")
        answer = self._ask("finish", *options, stdin=allocated, seconds=JUDGE_SECONDS)
        action, *rest = answer.split() if answer else ("", "")
        if action != "restart":
            say("watchdog: ft_launcher is not to start the trainers again; ending the step")
            return False
        lost = rest[2].split(",") if len(rest) > 2 else []
        if lost:
            give_back(self._job, allocated, lost)
        verdict = Attempt(self._run_directory, self._attempt).verdict or {}
        bad = [node for node in verdict.get("left_out") or () if node not in lost]
        keep_out(self._run_directory, self._attempt, bad)
        self._fit = {*allocated}.difference(lost, bad)
        return True

    def _begin_next(self) -> bool:
        """Write down the attempt that ft_launcher has begun; False where there is nothing to train."""
        ranks = rank_records(self._next_folder)
        nodes = list(dict.fromkeys(str(rank["node"]) for rank in ranks if is_host(rank.get("node"))))
        options = ("--layout", self._layout, "--restart")
        answer = self._ask("begin", *options, stdin=nodes, seconds=COMMAND_SECONDS, attempt=self.next_attempt)
        say(f"ft_launcher has started the trainers again on {' '.join(nodes)}: attempt {self.next_attempt}")
        return not answer.startswith("end")

    def _ask(self, command: str, *options: str, stdin: Sequence[str], seconds: float, attempt: str = "") -> str:
        """Return the last line of a command of node.pyz, without its first word where that is `next`; empty where it
        did not answer."""
        place = ("--run-dir", str(self._run_directory), "--attempt", attempt or self._attempt)
        archive = str(Path(sys.argv[0]).absolute())
        try:
            done = subprocess.run(
                [sys.executable, "-I", "-S", archive, command, *place, *options],
                input="\n".join(stdin) + "\n",
                stdout=subprocess.PIPE,
                text=True,
                timeout=seconds,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            say(f"watchdog: {command} did not answer: {type(error).__name__}")
            return ""
        line = done.stdout.strip().rpartition("\n")[2]
        return line[len("next ") :] if line.startswith("next ") else line


def allocated_nodes(job: str) -> list[str]:
    """Return the nodes that the job has now, in SLURM's order; none where SLURM does not say."""
    listed = _slurm("squeue", "-h", "-j", job, "-o", "%N").strip()
    return _slurm("scontrol", "show", "hostnames", listed).split() if listed else []


def give_back(job: str, allocated: Sequence[str], lost: Sequence[str]) -> None:
    """Return lost nodes to SLURM, which would end the job once it has noticed. A step that runs with --no-kill stays
    (seen in 22.05)."""
    left = ",".join(node for node in allocated if node not in lost)
    if not left or not _slurm("scontrol", "update", f"JobId={job}", f"NodeList={left}", answers=False):
        say(f"watchdog: the job keeps {' '.join(lost)}, and ends when SLURM has noticed that it is lost")
    for ending in ("sh", "csh"):  # scontrol's, for the shell that called it
        with contextlib.suppress(OSError):
            Path(f"slurm_job_{os.environ.get('SLURM_JOB_ID')}_resize.{ending}").unlink()


def _slurm(*command: str, answers: bool = True) -> str:
    """Return what a command of SLURM printed; empty where it failed. Without `answers`, its name where it succeeded."""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            timeout=COMMAND_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    if done.returncode != 0:
        return ""
    return done.stdout if answers else command[0]


def keep_out(run_directory: Path, attempt: str, nodes: Sequence[str]) -> None:
    """Write what keeps nodes out of ft_launcher's next rendezvous (0.7: a file that is not empty,
    fault_tolerance/segment_health_check.py). train.sh gives each launcher its node's name for an identity there."""
    folder = run_directory / file_names.HEALTH / attempt.rpartition(".")[0]
    for node in nodes:
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"segment_health_check.{node}.{node}").write_text(f"left out after attempt {attempt}\n")
