"""The ranks of a node: started with the variables that torchrun sets, each in a session of its own, told to save or to
end, and written down as they begin and end.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import time
from typing import TYPE_CHECKING, NamedTuple

from ..rundir.foreign_values import is_whole_number
from .files import say
from .node_log import RankLines
from .signals import NOT_EXECUTABLE, die_with_parent, execute, signal_name, signal_number
from .stacks import STACKS_VARIABLE, RankStacks, ask_for_stacks

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from ..rundir.attempt_files import RankRecord
    from .event_loop import EventLoop
    from .node_log import NodeLog

SAVE_SIGNAL_VARIABLE = "LLMLAUNCH_SAVE_SIGNAL"  # for a trainer that saves at another signal than SIGTERM
# Where SLURM signals every process of a step, the trainer gets these too, and they end what does not expect them.
NOT_FOR_TRAINERS = (signal.SIGUSR1, signal.SIGUSR2)
PIPE_BYTES = 2**20
F_SETPIPE_SZ = 1031  # linux/fcntl.h; fcntl.F_SETPIPE_SZ is new in Python 3.10


class Team(NamedTuple):
    """The processes of a training as one node sees them."""

    node_rank: int
    nodes: int
    devices: int  # of a node, and its ranks
    address: str  # where rank 0 listens
    port: str
    attempt: str


def rank_variables(team: Team, local_rank: int, environment: Mapping[str, str]) -> dict[str, str]:
    """Return what torchrun sets for a rank (torch 2.13, distributed/run.py and elastic/agent/server/
    local_elastic_agent.py). Rank 0 makes the store itself, as with any other launcher: TORCHELASTIC_USE_AGENT_STORE
    is False, and there is no file for TORCHELASTIC_ERROR_FILE."""
    rank, world = team.node_rank * team.devices + local_rank, team.nodes * team.devices
    numbers = {
        "RANK": rank,
        "LOCAL_RANK": local_rank,
        "WORLD_SIZE": world,
        "LOCAL_WORLD_SIZE": team.devices,
        "GROUP_RANK": team.node_rank,
        "GROUP_WORLD_SIZE": team.nodes,
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": world,
        "TORCHELASTIC_RESTART_COUNT": 0,
        "TORCHELASTIC_MAX_RESTARTS": 0,
    }
    variables = {name: str(number) for name, number in numbers.items()}
    variables |= {"ROLE_NAME": "default", "MASTER_ADDR": team.address, "MASTER_PORT": team.port}
    variables |= {"TORCHELASTIC_RUN_ID": team.attempt, "TORCHELASTIC_USE_AGENT_STORE": "False"}
    if team.devices > 1:
        variables["OMP_NUM_THREADS"] = environment.get("OMP_NUM_THREADS", "1")
    variables["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = environment.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    return variables


class StartedRank:
    """One rank. `record` is its line in `ranks/<node>.jsonl`."""

    def __init__(self, node: str, environment: Mapping[str, str], stacks: RankStacks | None) -> None:
        self.environment = {**environment, **({} if stacks is None else {STACKS_VARIABLE: stacks.variable})}
        self.stacks = stacks
        self.pid = 0
        self.output = -1  # the end of its pipe that is read here
        self.lines: RankLines | None = None
        self.code: int | None = None  # once it has ended; -9 for SIGKILL
        self.record: RankRecord = {
            "v": 1,
            "rank": environment_number(environment, "RANK"),
            "local_rank": environment_number(environment, "LOCAL_RANK"),
            "node": node,
            "pid": None,
            "program_pid": None,
            "started_at": None,
            "ended_at": None,
            "exit_code": None,
            "signal": None,
            "resident_peak_bytes": None,
            "visible_devices": environment.get("CUDA_VISIBLE_DEVICES"),
        }

    @property
    def number(self) -> int:
        return int(self.record["rank"])

    def start(self, program: Sequence[str], folder: Path, mask: set[int | signal.Signals]) -> None:
        """Fork and become `program` in `folder`. Raises OSError where there is no process or pipe left."""
        self.output, write = os.pipe()
        with contextlib.suppress(OSError):  # beyond what one user may have
            fcntl.fcntl(self.output, F_SETPIPE_SZ, PIPE_BYTES)
        parent = os.getpid()
        self.record["started_at"] = time.time()
        self.pid = os.fork()
        if self.pid == 0:
            _become(program, folder, self.environment, write, parent, mask)
        os.close(write)
        self.record["pid"] = self.record["program_pid"] = self.pid

    def signal(self, number: int) -> None:
        """Send a signal, if it has not ended: it is not waited for before, so its number is no other's."""
        if self.code is None:
            with contextlib.suppress(OSError):
                os.kill(self.pid, number)

    def has_ended(self) -> bool:
        """Whether it has ended since the last call, and if so, write that into the record."""
        if self.code is not None:
            return False
        pid, status, usage = os.wait4(self.pid, os.WNOHANG)
        if pid == 0:
            return False
        self.record["ended_at"] = time.time()
        self.record["resident_peak_bytes"] = usage.ru_maxrss * 1024  # Linux counts KiB
        if os.WIFSIGNALED(status):
            self.code = -os.WTERMSIG(status)
            self.record["signal"] = signal_name(os.WTERMSIG(status))
        else:
            self.code = self.record["exit_code"] = os.WEXITSTATUS(status)
        return True


class NodeRanks:
    """All ranks of this node. `write` takes each record when its rank has begun and when it has ended, `hear` the lines
    that they print. What touches a file system that may hang is handed to `on_disk`, which does it later."""

    def __init__(
        self,
        ranks: Sequence[StartedRank],
        loop: EventLoop,
        log: NodeLog,
        write: Callable[[RankRecord], None],
        on_disk: Callable[[Callable[[], None]], None],
        hear: Callable[[Sequence[bytes]], None],
    ) -> None:
        self._ranks = ranks
        self._loop, self._log, self._write, self._on_disk, self._hear = loop, log, write, on_disk, hear
        self.was_asked_to_save = False
        self.first_failed: StartedRank | None = None

    def start(self, program: Sequence[str], folder: Path) -> None:
        """Start all. Raises OSError where one cannot be; those before it are killed."""
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            for rank in self._ranks:
                rank.start(program, folder, mask)
        except OSError:
            for rank in self._ranks:
                if rank.pid:
                    rank.signal(signal.SIGKILL)
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for rank in self._ranks:
            rank.lines = RankLines(rank.number, self._log, self._hear)
            self._loop.read(rank.output, rank.lines.take)
            self._note(rank)

    @property
    def have_ended(self) -> bool:
        return all(rank.code is not None for rank in self._ranks)

    @property
    def exit_code(self) -> int:
        """That of the first rank that failed, 128 and its number for a signal; 0 where none did."""
        code = 0 if self.first_failed is None else self.first_failed.code or 0
        return 128 - code if code < 0 else code

    def save(self) -> None:
        """Ask each rank, once, to save a checkpoint and to end: a second signal would break off its saving."""
        if not self.was_asked_to_save:
            self.was_asked_to_save = True
            for rank in self._ranks:
                rank.signal(save_signal(rank.environment))

    def end(self, number: int) -> None:
        for rank in self._ranks:
            rank.signal(number)

    def ask_for_stacks(self) -> None:
        for rank in self._ranks:
            if rank.code is None:
                ask_for_stacks(rank.pid, rank.number, rank.stacks, rank.environment)

    def reap(self) -> bool:
        """Take the ranks that have ended. Returns whether the first one of all has failed by that."""
        failed_before = self.first_failed is not None
        for rank in self._ranks:
            if rank.has_ended():
                self._close(rank)
                if rank.code and self.first_failed is None:
                    self.first_failed = rank
        return self.first_failed is not None and not failed_before

    def flush_quiet_lines(self) -> None:
        for rank in self._ranks:
            if rank.lines is not None and rank.code is None:
                rank.lines.flush_if_quiet()

    def _close(self, rank: StartedRank) -> None:
        """Take its last words, and write its end down."""
        self._loop.drain(rank.output)
        os.close(rank.output)
        if rank.lines is not None:
            rank.lines.flush()
        if rank.stacks is not None:
            self._on_disk(rank.stacks.close)
        self._note(rank)

    def _note(self, rank: StartedRank) -> None:
        record = rank.record.copy()
        self._on_disk(lambda: self._write(record))


def save_signal(environment: Mapping[str, str]) -> int:
    """What the trainer saves at: SIGTERM, as Megatron-LM with --exit-signal-handler and our own script do."""
    return signal_number(environment.get(SAVE_SIGNAL_VARIABLE, "")) or signal.SIGTERM


def environment_number(environment: Mapping[str, str], name: str) -> int:
    """Return the number that a variable holds; 0 where it holds none: a program that is alone is rank 0."""
    text = environment.get(name, "")
    return int(text) if is_whole_number(text) else 0


def _become(
    program: Sequence[str],
    folder: Path,
    environment: Mapping[str, str],
    output: int,
    parent: int,
    mask: set[int | signal.Signals],
) -> None:
    """In the child: turn into `program`. Never returns."""
    code = NOT_EXECUTABLE
    try:
        os.setsid()  # what signals this program's process group (proctrack/pgid, a terminal) does not reach the rank
        die_with_parent(signal.SIGKILL)
        if os.getppid() != parent:  # it went before this was asked
            os._exit(128 + signal.SIGKILL)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        for number in signal.valid_signals():
            if signal.getsignal(number) not in (signal.SIG_DFL, signal.SIG_IGN, None):
                signal.signal(number, signal.SIG_DFL)
        # Python ignores these two for itself; a program expects to inherit the defaults (as subprocess does).
        for number in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        for number in NOT_FOR_TRAINERS:
            signal.signal(number, signal.SIG_IGN)
        os.chdir(folder)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        code = execute(program, environment)
    except Exception as error:  # a word with a NUL, a folder that is gone by now
        say(f"cannot start {program[0]}: {error}")
    finally:
        os._exit(code)
