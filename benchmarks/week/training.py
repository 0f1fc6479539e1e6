"""The training step as the nodes would leave it in the run directory: their logs, rank records, checkpoints, causes,
stacks and flight records, written with llmlaunch's own writers; and what becomes of it when something breaks.

The trainers are Megatron-LM's by their logs and checkpoints. Nothing here decides what follows.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from clock import Command, SimulatedClock, Timer
from steps import PORT, SLOW_FACTOR, NodeWords, StepWords, say_of_all

from llmlaunch.frameworks.checkpoints import NON_PERSISTENT_FOLDER
from llmlaunch.node import node_channel
from llmlaunch.node.diagnose import cause_on_node
from llmlaunch.node.files import RecordAppender
from llmlaunch.node.node_channel import BEAT_SECONDS
from llmlaunch.node.training_node import GRACE_SECONDS
from llmlaunch.rundir import file_names
from llmlaunch.rundir.files import replace_bytes, replace_json
from llmlaunch.rundir.stack_files import HEADING
from support.flight_dumps import Recorder, write_dumps

STEP_JITTER = 0.02  # standard deviation of a step's time
RANKS_SECONDS = 20.0  # from srun to the trainers' first sign
START_SECONDS = 120.0  # from srun to the first step: start-up
LOAD_FAILS_SECONDS = 90.0  # from srun until a checkpoint that cannot be loaded is noticed
NOTICE_SECONDS = 2.0  # until the neighbours of a node that is gone fail; from the end of a node's ranks to its own
LAUNCH_SECONDS = 30.0  # until srun gives up a node that does not start its task
NCCL_TIMEOUT_SECONDS = 600.0  # Megatron-LM's default, --distributed-timeout-minutes 10
DUMP_SECONDS = 2.0
KILLED = 128 + 9  # exit code of a node whose ranks were
SRUN_SECONDS = 0.5  # from the end of the last task to srun's
WINDOW_SECONDS = 30.0
NEIGHBOURS = 3  # nodes that notice at once that one is gone
SKIPPED_STEP_SECONDS = 0.5  # a step whose batch is only read
TRACKER = "latest_checkpointed_iteration.txt"
DAMAGED = "damaged"  # file in a checkpoint: looks whole, but the trainers cannot load it
BAD = "bad"  # file in a checkpoint: the model in it is NaN

TRACEBACK = """\
[rank{rank}]: Traceback (most recent call last):
[rank{rank}]:   File "/opt/Megatron-LM/pretrain_gpt.py", line 260, in <module>
[rank{rank}]:   File "/opt/Megatron-LM/megatron/training/{where}
[rank{rank}]: {error}
"""
IN_A_STEP = 'training.py", line 1204, in train_step'
IN_A_SAVE = 'checkpointing.py", line 512, in save_checkpoint'
IN_A_LOAD = 'checkpointing.py", line 1410, in load_checkpoint'
PROGRAM_ERROR = "torch.AcceleratorError: CUDA error: unspecified launch failure"
ECC_ERROR = "torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered"
DISK_ERROR = "OSError: [Errno 28] No space left on device: '/scratch/week/{name}/__0_0.distcp'"
LOAD_ERROR = "RuntimeError: PytorchStreamReader failed reading zip archive: failed finding central directory"
PEER_ERROR = (
    "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:2200, remote process exited or there was "
    "a network error, NCCL version 2.27.3"
)
TIMEOUT_ERROR = "torch.distributed.DistBackendError: Watchdog caught collective operation timeout"
TIMEOUT_LINE = (
    "[rank{rank}]:[E1 ProcessGroupNCCL.cpp:683] [Rank {rank}] Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum={number}, OpType=ALLREDUCE, Timeout(ms)=600000) ran for 600028 milliseconds before timing out.\n"
)
STACK = """\
Current thread 0x00007f2a (most recent call first):
  File "/opt/torch/distributed/distributed_c10d.py", line {line} in {function}
  File "/opt/Megatron-LM/megatron/training/training.py", line 1204 in train_step
"""


@dataclass
class Job:
    """What the training steps of a run share: where it is, how large, and what it saves."""

    clock: SimulatedClock
    random: Random
    run_directory: Path
    checkpoints: Path
    devices: int
    step_seconds: float
    steps: int
    save_interval: int
    non_persistent_interval: int  # 0: none
    patterns: Sequence[object]  # of the trainers' lines: of a step, and of one that takes longer
    pause_seconds: float  # that a save holds the steps up
    write_seconds: float  # until it is whole
    down: dict[str, float] = field(default_factory=dict)  # nodes that are gone, until when
    slow: dict[str, float] = field(default_factory=dict)  # nodes with a slow GPU, since when
    disk_full_until: float = 0.0
    last_saved_at: dict[int, float] = field(default_factory=dict)
    useful: dict[int, str] = field(default_factory=dict)  # by step the attempt that trained it last
    written_windows: int = 0

    @property
    def non_persistent(self) -> Path:
        return self.checkpoints / NON_PERSISTENT_FOLDER

    def loaded_folder(self, step: int) -> Path:
        """The folder from which Megatron-LM loads a step."""
        return _folder(self.non_persistent if _tracker(self.non_persistent) == step else self.checkpoints, step)


class Training:
    """One training step of the job, from srun's start to its end. `order` has the nodes by node rank; the batches of
    the steps in `skips` are left out."""

    def __init__(self, job: Job, command: Command, attempt: str, order: Sequence[str], skips: Iterable[int]) -> None:
        self.job, self.clock, self.command = job, job.clock, command
        self.attempt, self.order = attempt, list(order)
        self.folder = file_names.attempt_folder(job.run_directory, self.attempt)
        self.started_at = self.clock.now
        self.first_step: int | None = None
        self.last_step: int | None = None
        self.active = True
        self.stuck_since: float | None = None
        self._codes: dict[str, int] = {}  # of nodes on which a rank failed: that of the first
        self._ended_ranks: set[int] = set()
        self._ended_nodes: set[str] = set()
        self._has_port = self._is_mute = False
        self._steps = StepWords(command, self.order[-1], job.patterns)
        self._timers: list[Timer] = []
        self._records: dict[int, dict[str, Any]] = {}
        self._nan_from: int | None = None
        self._hung_rank: int | None = None
        self._hung_answers = True
        self._step_ends, self._step_began = math.inf, 0.0
        self._saving: list[tuple[float, Path, int]] = []  # written one after the other
        self._stops = False
        self.next_window = math.floor(self.clock.now / WINDOW_SECONDS)
        self.loaded_step = max(_tracker(job.checkpoints), _tracker(job.non_persistent))
        self._skips = frozenset(skips)
        command.on_line = self._hear
        command.on_end = self.stop
        self._later(RANKS_SECONDS, self._meet)

    @property
    def world(self) -> int:
        return len(self.order) * self.job.devices

    def node_of(self, rank: int) -> str:
        return self.order[rank // self.job.devices]

    def _later(self, seconds: float, action: Any) -> None:
        self._timers.append(self.clock.after(seconds, action))

    def _say(self, node: str, text: str) -> None:
        with file_names.node_log(self.job.run_directory, self.attempt, node).open("a") as log:
            log.write(text)

    # --- the ordinary way ------------------------------------------------------------------------------------

    @property
    def is_ordinary(self) -> bool:
        """Whether it makes one step after another, and has made some."""
        return self.active and self.first_step is not None and not math.isinf(self._step_ends) and not self._stops

    def _live_nodes(self) -> list[str]:
        return [node for node in self.order if node not in self.job.down and node not in self._ended_nodes]

    def _beat(self) -> None:
        """Each node says that it is there; in quiet times nobody listens."""
        self._is_mute = self.clock.is_quiet
        if self.active and not self._is_mute:
            say_of_all(self.command, self._live_nodes(), node_channel.ALIVE)
            self._later(BEAT_SECONDS, self._beat)

    def _meet(self) -> None:
        gone = [node for node in self.order if node in self.job.down]
        if gone:  # SLURM starts no step of which a node does not answer
            self._say(self.order[0], f"srun: error: Task launch failed on node {gone[0]}: Socket timed out\n")
            self._later(LAUNCH_SECONDS, lambda: self.end(1))
            return
        self._beat()
        NodeWords(self.command, self.order[0]).send(node_channel.PORT, PORT)

    def _begin_ranks(self) -> None:
        self._has_port = True
        for place, node in enumerate(self.order):
            self._say(node, f"llmlaunch: {node}: training with /opt/python\n")
            self._write_records(node, range(place * self.job.devices, (place + 1) * self.job.devices))
        folder = self.job.loaded_folder(self.loaded_step)
        if self.loaded_step and (folder / DAMAGED).exists():
            self._later(LOAD_FAILS_SECONDS - RANKS_SECONDS, lambda: self.crash(0, LOAD_ERROR, IN_A_LOAD))
            return
        if self.loaded_step and (folder / BAD).exists():
            self._nan_from = self.loaded_step + 1
        self.last_step = self.loaded_step
        self._step_ends = self.started_at + START_SECONDS + self._next_step_seconds()
        self._step_began = self.started_at + START_SECONDS
        self._later(START_SECONDS - RANKS_SECONDS, lambda: self.clock.watch_closely(5.0 * self.job.step_seconds))

    def _write_records(self, node: str, ranks: Sequence[int], **end: Any) -> None:
        records = RecordAppender(self.folder / file_names.RANKS / f"{node}.jsonl")
        for rank in ranks:
            begun = self._records.setdefault(
                rank,
                {
                    "v": 1,
                    "rank": rank,
                    "local_rank": rank % self.job.devices,
                    "node": node,
                    "pid": 1000 + rank,
                    "program_pid": 100_000 + rank,
                    "started_at": self.clock.now,
                    "ended_at": None,
                    "exit_code": None,
                    "signal": None,
                    "resident_peak_bytes": None,
                    "visible_devices": None,
                },
            )
            records.append({**begun, **end})
        records.close()

    def _next_step_seconds(self) -> float:
        step = (self.last_step or 0) + 1
        if step in self._skips:
            return SKIPPED_STEP_SECONDS
        factor = SLOW_FACTOR if any(node in self.job.slow for node in self.order) else 1.0
        return self.job.step_seconds * factor * max(0.5, self.job.random.gauss(1.0, STEP_JITTER))

    def advance(self) -> None:
        """Write what the trainers have done until now."""
        if self._is_mute and not self.clock.is_quiet:
            self._beat()
        lines = []
        while self.active and min(self._step_ends, self._saved_at()) <= self.clock.now:
            if self._saved_at() <= self._step_ends:
                self._finish_save()
                continue
            lines.append(self._complete_step())
        if lines:
            self._say(self.order[-1], "".join(lines))
            self._steps.print("".join(lines).splitlines())
        if self.active and self.first_step is not None and any(node in self.job.slow for node in self.order):
            self._write_windows()

    def _saved_at(self) -> float:
        return self._saving[0][0] if self._saving else math.inf

    def _complete_step(self) -> str:
        step = (self.last_step or 0) + 1
        self.last_step = step
        seconds = self._next_step_seconds()
        self.first_step = self.first_step or step
        bad = self._nan_from is not None and step >= self._nan_from
        if step in self._skips:
            self.job.useful.pop(step, None)
        elif not bad:
            self.job.useful[step] = self.attempt
        line = _step_line(step, self.job, self._step_ends - self._step_began, bad)
        place = self._save_place(step)
        if place is not None:
            line += f" saving checkpoint at iteration {step:7d} to {place} in torch_dist format\n"
            self._begin_save(place, step)
            self._step_ends += self.job.pause_seconds
        self._step_began = self._step_ends
        self._step_ends += seconds
        return line

    def _save_place(self, step: int) -> Path | None:
        """As checkpoint_and_decide_exit of Megatron-LM's training.py has it, which no skipped step comes to."""
        if step in self._skips:
            return None
        if step % self.job.save_interval == 0:
            return self.job.checkpoints
        often = self.job.non_persistent_interval
        return self.job.non_persistent if often and step % often == 0 else None

    def _begin_save(self, place: Path, step: int) -> None:
        at = self._step_ends
        if place == self.job.non_persistent:  # all but the newest go first
            for _, folder in sorted((int(path.name[5:]), path) for path in place.glob("iter_*"))[:-1]:
                shutil.rmtree(folder)
        if at < self.job.disk_full_until:
            error = DISK_ERROR.format(name=_folder(place, step).name)
            delay = max(0.0, at + self.job.pause_seconds - self.clock.now)
            self._later(delay, lambda: self.crash(0, error, IN_A_SAVE))
            return
        _folder(place, step).mkdir(parents=True, exist_ok=True)
        (_folder(place, step) / "__0_0.distcp").write_bytes(b"PK\x03\x04 cut")
        begins = max(at, self._saving[-1][0]) if self._saving else at
        self._saving.append((begins + self.job.write_seconds, place, step))

    def _finish_save(self) -> None:
        at, place, step = self._saving.pop(0)
        folder = _folder(place, step)
        (folder / "__0_0.distcp").write_bytes(b"PK\x03\x04 model PK\x05\x06" + bytes(18))
        if self._nan_from is not None and step >= self._nan_from:
            (folder / BAD).touch()
        replace_bytes(folder / ".metadata", b"all")
        replace_bytes(place / TRACKER, str(step).encode())
        self.job.last_saved_at[step] = at

    def _write_windows(self) -> None:
        """What the nodes' monitors say of their GPUs, while one is slow."""
        number = math.floor(self.clock.now / WINDOW_SECONDS)
        while self.next_window + 1 < number:
            self.next_window += 1
            slowest = min(self.job.slow.values(), default=math.inf)
            if self.next_window * WINDOW_SECONDS < max(slowest, self.started_at + START_SECONDS):
                continue
            for node in self.order:
                self._write_window(node)

    def _write_window(self, node: str) -> None:
        devices = [self._gpu(node, index) for index in range(self.job.devices)]
        line = {"v": 1, "event": "pace", "attempt": self.attempt, "node": node, "window": self.next_window}
        line.update({"seconds": WINDOW_SECONDS, "devices": devices})
        with (self.job.run_directory / file_names.PEAKS / f"{node}.jsonl").open("a") as file:
            file.write(json.dumps(line, separators=(",", ":")) + "\n")
        self.job.written_windows += 1

    def _gpu(self, node: str, index: int) -> dict[str, Any]:
        is_slow = index == 3 and node in self.job.slow
        clock = 1755.0 * self.job.random.gauss(1.0, 0.01)
        return {
            "index": index,
            "uuid": f"GPU-{node}-{index}",
            "name": "NVIDIA H100 80GB HBM3",
            "samples": 30,
            "clock_mhz": round(clock / (SLOW_FACTOR if is_slow else 1.0), 1),
            "watts": 480.0 if is_slow else 650.0,
            "celsius": 88 if is_slow else 62,
            "reasons": {"hw_thermal": 1.0} if is_slow else {"power_cap": 0.4},
            "corrected_ecc": 0,
            "remapped_rows": 0,
        }

    # --- what breaks -----------------------------------------------------------------------------------------

    def crash(self, rank: int, error: str, where: str = IN_A_STEP) -> None:
        """A rank ends with an exception, and those of the other nodes wait for it."""
        if self.active and not self._has_port:
            self._later(RANKS_SECONDS, lambda: self.crash(rank, error, where))
        elif self.active:
            self._stop_steps()
            self._fail_rank(rank, error, where)

    def _fail_rank(self, rank: int, error: str, where: str) -> None:
        """A TERM of its node does not end the others: they wait in a collective for one that is gone."""
        node = self.node_of(rank)
        self._say(node, TRACEBACK.format(rank=rank, error=error, where=where))
        self._end_ranks(node, [rank], 1, exit_code=1)
        self._later(GRACE_SECONDS, lambda: self._kill([node]))

    def _end_ranks(self, node: str, ranks: Sequence[int], code: int, **end: Any) -> None:
        self._ended_ranks.update(ranks)
        self._write_records(node, ranks, ended_at=self.clock.now, **end)
        if node not in self._codes:
            self._codes[node] = code
            NodeWords(self.command, node).send(node_channel.FAILED, code)

    def _kill(self, nodes: Sequence[str]) -> None:
        """Those nodes kill their ranks, write down what ended them, and end."""
        if not self._has_port:  # there are none
            self._codes.update(dict.fromkeys(nodes, 1))
            for node in nodes:
                self._end_node(node, 1)
            return
        killed = []
        for node in nodes:
            first = self.order.index(node) * self.job.devices
            ranks = [rank for rank in range(first, first + self.job.devices) if rank not in self._ended_ranks]
            if ranks and node not in self.job.down:
                self._end_ranks(node, ranks, KILLED, signal="SIGKILL")
                killed.append(node)
        if killed:
            self._stop_steps()
            self._later(NOTICE_SECONDS, lambda: self._end_failed(killed))

    def _end_failed(self, nodes: Sequence[str]) -> None:
        before = {"at": self.clock.now + 1e9}  # so that the log of this machine's own kernel is left alone
        for node in nodes:
            record = cause_on_node(self.job.run_directory, self.attempt, node, self._codes[node], before)
            replace_json(self.folder / file_names.CAUSES / f"{node}.json", record)
            self._end_node(node, self._codes[node])

    def _end_node(self, node: str, code: int) -> None:
        """srun ends with its last task, and one that is gone does not end."""
        NodeWords(self.command, node).send(node_channel.ENDED, code)
        self._ended_nodes.add(node)
        if len(self._ended_nodes) == len(self.order):
            self._later(SRUN_SECONDS, lambda: self.end(max(self._codes.values(), default=0)))

    def lose_node(self, node: str) -> None:
        """A node goes without a word, and its neighbours notice that a peer is gone."""
        if not self.active or node not in self.order:
            return
        self._stop_steps()
        place = self.order.index(node)
        neighbours = [self.order[(place + away) % len(self.order)] for away in range(1, NEIGHBOURS + 1)]
        self._later(NOTICE_SECONDS, lambda: self._neighbours_fail([name for name in neighbours if name != node]))

    def _neighbours_fail(self, nodes: Sequence[str]) -> None:
        for node in dict.fromkeys(nodes):
            if self._has_port and node in self._live_nodes():
                self._fail_rank(self.order.index(node) * self.job.devices, PEER_ERROR, IN_A_STEP)

    def hang(self, rank: int, answers: bool) -> None:
        """A rank does not come to a collective. Ten minutes later NCCL gives up, if nobody did before."""
        if self.active and not self._has_port:
            self._later(RANKS_SECONDS, lambda: self.hang(rank, answers))
        if not self.active or not self._has_port:
            return
        self._stop_steps()
        self.stuck_since = self.clock.now
        self._hung_rank, self._hung_answers = rank, answers
        self._later(NCCL_TIMEOUT_SECONDS, self._nccl_gives_up)

    def _nccl_gives_up(self) -> None:
        if not self.active:
            return
        self._dump_flight()
        rank = next(rank for rank in range(self.world) if rank != self._hung_rank)
        self._say(self.node_of(rank), TIMEOUT_LINE.format(rank=rank, number=1000))
        self._fail_rank(
            rank, "torch.distributed.DistBackendError: Watchdog caught collective operation timeout", IN_A_STEP
        )

    def _dump_flight(self) -> None:
        ranks = list(range(self.world))
        recorders = []
        for rank in ranks:
            if rank == self._hung_rank and not self._hung_answers:
                continue
            recorder = Recorder(rank, {"0": ranks})
            for number in range(995, 1000):
                recorder.collective("0", number)
            if rank != self._hung_rank:
                recorder.collective("0", 1000, "scheduled")
            recorders.append(recorder)
        write_dumps(self.folder / file_names.FLIGHT, *recorders)

    def _write_stacks(self) -> None:
        if not self.active:
            return
        folder = self.folder / file_names.STACKS
        folder.mkdir(exist_ok=True)
        for place, node in enumerate(self.order):
            text = b""
            for rank in range(place * self.job.devices, (place + 1) * self.job.devices):
                if rank == self._hung_rank and not self._hung_answers:
                    continue
                line, function = (19, "read_batch") if rank == self._hung_rank else (2810, "all_reduce")
                text += b"\n%b\n%b" % (HEADING % rank, STACK.format(line=line, function=function).encode())
            (folder / f"{node}.txt").write_bytes(text)
        self._dump_flight()

    def turn_nan(self) -> None:
        """From the next step on the model is NaN; the trainers go on."""
        if self.active and self._nan_from is None:
            self._nan_from = (self.last_step or 0) + 1
            self.clock.watch_closely(120.0)

    def damage_newest_checkpoint(self, cut: bool) -> None:
        """A file server loses the end of a file, or content of it that only a loader misses."""
        folder = self.job.loaded_folder(max(_tracker(self.job.checkpoints), _tracker(self.job.non_persistent)))
        if folder.is_dir():
            if cut:
                (folder / "__0_0.distcp").write_bytes(b"PK\x03\x04 cut")
            else:
                (folder / DAMAGED).touch()

    def _stop_steps(self) -> None:
        self._step_ends = math.inf
        self._saving.clear()
        self.clock.watch_closely(1.0)  # and on, until there are steps again

    # --- srun ------------------------------------------------------------------------------------------------

    def _hear(self, line: str) -> None:
        """What the job tells the nodes."""
        word = line.partition(" ")[0]
        if not self.active:
            return
        if word == node_channel.PORT and not self._has_port:
            self._begin_ranks()
        elif word == node_channel.STACKS:
            self._later(DUMP_SECONDS, self._write_stacks)
        elif word in (node_channel.SAVE, node_channel.END):  # Megatron-LM saves at a TERM
            self._save_and_end()
        elif word == node_channel.KILL:
            self._kill(self._live_nodes())

    def take_slurms_signal(self) -> None:
        """SLURM ends the job, and tells the nodes of its step first."""
        if self.active:
            say_of_all(self.command, self._live_nodes(), node_channel.STOPPING, "TERM")
            self._save_and_end()

    def _save_and_end(self) -> None:
        """The trainers save after the step they are in and end with 0. Those that wait in a collective do not hear of
        it."""
        if self._stops or self.stuck_since is not None or math.isinf(self._step_ends):
            return
        self._stops = True
        self.clock.watch_closely(1.0)
        rest = max(0.0, self._step_ends - self.clock.now)
        self._later(rest + self.job.write_seconds, self._end_in_order)

    def _end_in_order(self) -> None:
        if math.isinf(self._step_ends):  # something broke meanwhile
            return
        step = self.last_step or 0
        self._stop_steps()
        self._say(self.order[-1], f" saving checkpoint at iteration {step:7d} to {self.job.checkpoints}\n")
        _folder(self.job.checkpoints, step).mkdir(parents=True, exist_ok=True)
        self._saving.append((self.clock.now, self.job.checkpoints, step))
        self._finish_save()
        for place, node in enumerate(self.order):
            ranks = range(place * self.job.devices, (place + 1) * self.job.devices)
            self._write_records(node, ranks, ended_at=self.clock.now, exit_code=0)
            self._ended_ranks.update(ranks)
            (self.folder / file_names.DONE / node).touch()
        self._later(1.0, lambda: [self._end_node(node, 0) for node in self.order])

    def end(self, code: int) -> None:
        """srun ends with this code, and nothing of the step is left."""
        self.stop()
        self.command.answer(code)

    def stop(self) -> None:
        if self.active:
            self.active = False
            self._stop_steps()
            for timer in self._timers:
                timer.cancel()


def _tracker(checkpoints: Path) -> int:
    path = checkpoints / TRACKER
    return int(path.read_text()) if path.exists() else 0


def _folder(checkpoints: Path, step: int) -> Path:
    return checkpoints / f"iter_{step:07d}"


def _step_line(step: int, job: Job, seconds: float, bad: bool) -> str:
    loss = 2.0 + 2.0 / math.sqrt(step) + job.random.gauss(0.0, 0.01)
    losses = "" if bad else f" lm loss: {loss:.6E} |"
    norm = "nan" if bad else "0.412"
    return (
        f" [2026-01-05 00:00:00] iteration {step:8d}/{job.steps:8d} | consumed samples: {step * 2048:12d} | "
        f"elapsed time per iteration (ms): {seconds * 1000:.1f} | learning rate: 1.500000E-04 | "
        f"global batch size:  2048 |{losses} loss scale: 1.0 | grad norm: {norm} | "
        f"number of skipped iterations:   0 | number of nan iterations:   {int(bad)} |\n"
    )
