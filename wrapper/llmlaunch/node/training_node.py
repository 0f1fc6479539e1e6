"""`node.pyz node`: one node of a training, started once on each by the job. It prepares the environment,
starts the monitor and the ranks, hands on what it is told, and writes down how it ended.

USR1 or TERM: the ranks save a checkpoint and end. USR2: they write down where they are. Its handlers are guarded, since
an exception here would end the ranks with it; the monitor is a child whose death is nobody's business.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING

from ..rundir import file_names
from ..rundir.command_file import CommandError, command_words
from ..rundir.run_file import ProgressRules, RunFile, read_run_file
from ..rundir.step_lines import StepLines
from . import node_channel
from .event_loop import EventLoop
from .files import RecordAppender, open_to_append
from .files import say as say_on_stderr
from .hook_files import HOOK_FOLDER, write_hook_files
from .host_memory import memory_counters
from .line_writer import DiskThread
from .monitor_process import Monitoring, deliver_log, start_monitor, stop_monitor
from .node_channel import (
    BEAT_SECONDS,
    PREFLIGHT,
    PREFLIGHT_SECONDS,
    PREPARE,
    LineReader,
    LineSender,
    StepForwarder,
)
from .node_environment import (
    PROBE_VARIABLE,
    NodeError,
    OwnFolders,
    TrainingPython,
    export_launch,
    export_tracking,
    fetch_tokenizer,
    probe_variable,
    put_first,
    raise_open_files,
    threads_on_host,
    training_python,
    value_of,
)
from .node_log import NodeLog
from .node_place import NodePlace, StoppedEarly, node_name
from .node_ranks import NodeRanks, StartedRank, environment_number, rank_variables
from .stacks import RankStacks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .files import Record

GRACE_SECONDS = 30.0
"""From the first rank's failure to the KILL of the others, as torchrun has it (torch 2.13, elastic/multiprocessing)."""
QUIET_SECONDS = 1.0  # after which a line without an end is written
DISK_SECONDS = 20.0  # for records of ranks that have ended
CAUSE_SECONDS = 40.0
LAST_WORDS_SECONDS = 2.0
NODE_FILES = "LLMLAUNCH_NODE_FILES"  # in command.txt: the folder of this node's own with a copy of our scripts


def main(argv: list[str]) -> int:
    """Train, or try or prepare the node. Returns the exit code of the first rank that failed, 128 and its number for a
    signal; 0 where none did, and 1 where no rank was started."""
    options = _arguments(argv)
    node: TrainingNode | None = None
    try:
        run = read_run_file(options.run_dir, options.layout)
        place = NodePlace.of(options, run.get("devices_per_node") or 1, os.environ)
        if "launch" not in run:
            raise NodeError(f"{place.layout / file_names.RUN} says nothing of how to launch")
        node = TrainingNode(place, run)
        code = node.run(options.what)
    except (NodeError, CommandError) as error:
        if node is None:
            say_on_stderr(f"{node_name(os.environ)}: {error}")
        else:
            node.say(str(error))
        if not isinstance(error, StoppedEarly) and options.what is None:
            from .diagnose import write_why

            write_why(options.run_dir, options.attempt, node_name(os.environ), str(error))
        code = 1
    finally:
        if node is not None:
            node.close()
    if node is not None:
        node.channel.send(node_channel.ENDED, code)
    return code


class TrainingNode:
    """`run` is the layout's run.json (docs/run-files.md)."""

    def __init__(self, place: NodePlace, run: RunFile) -> None:
        self._place, self._launch = place, run["launch"]
        progress = run.get("progress") or ProgressRules()
        self._step_lines = StepLines(progress.get("step_patterns"), progress.get("slow_patterns"), lenient=True)
        self.channel = LineSender(1, f"{place.node} ")
        self._steps = StepForwarder(self.channel)
        self._environment = dict(os.environ)
        self._told = ""
        self._port = 0  # where the ranks meet, once it is known
        self._port_holder: socket.socket | None = None
        self._is_killed = False
        self._ranks: NodeRanks | None = None
        self._log = NodeLog(os.dup(2))
        self._appender = RecordAppender(place.folder / file_names.RANKS / f"{place.node}.jsonl")
        self._disk = DiskThread()
        self._files = place.run_directory  # where the ranks import from: on this node's own disk, if that takes a copy
        self._own = OwnFolders(self.say)
        ignored = [n for n in (signal.SIGINT, signal.SIGHUP) if signal.getsignal(n) == signal.SIG_IGN]
        heard = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
        self._loop = EventLoop([n for n in heard if n not in ignored], self._on_signal, self._on_child)
        self._job_lines = LineReader(self._on_line)

    def run(self, what: str) -> int:
        """Train, or with PREFLIGHT or PREPARE do that instead. Raises NodeError where this node cannot."""
        place, launch, environment = self._place, self._launch, self._environment
        environment |= {
            "LLMLAUNCH_RUN_DIR": str(place.run_directory),
            "LLMLAUNCH_ATTEMPT": place.attempt,
            "LLMLAUNCH_NODES": str(place.nodes),
            "LLMLAUNCH_NODE": place.node,
            "LLMLAUNCH_NODE_RANK": str(place.node_rank),
        }
        if what is None:  # from here to the start of the ranks nothing is written to a disk that may hang
            self._log.start()
        self._listen()
        warning = raise_open_files(place.node_rank, launch)
        if warning:
            self.say(warning)
        self._enter_run_directory()
        export_tracking(launch, place.run_directory, place.layout, environment, self._disk.give)
        export_launch(launch, environment)
        if launch["threads_on_host"]:
            threads = threads_on_host(place.devices, environment)
            self.say(f"the optimizer steps on the host, with {threads} thread(s) a rank")
        python = training_python(launch, environment)
        self.say(f"training with {python.path}")
        self._own.use_temporary_folder(environment)
        if what != PREFLIGHT:
            self._own.make_caches(place.run_directory, place.attempt, place.node, environment)
        self._copy_to_this_node()
        environment[NODE_FILES] = str(self._files)
        if what == PREFLIGHT:
            return self._preflight(python)
        if launch["tokenizer"]:
            said = fetch_tokenizer(python.path, launch["tokenizer"], environment)
            if said:
                self.say(said)
        if what == PREPARE:
            return self._prepare(python)
        return self._train(python)

    def say(self, text: str) -> None:
        self._log.put(f"llmlaunch: {self._place.node}: {text}\n".encode("utf-8", "surrogateescape"))

    def close(self) -> None:
        """Remove the folders of this node's own, and write the last lines of the log if the disk takes them."""
        self._own.remove()
        self._log.flush(LAST_WORDS_SECONDS)

    # --- the job ---

    def _listen(self) -> None:
        with contextlib.suppress(OSError, ValueError):  # of a file, as where somebody starts it by hand
            self._loop.read(0, self._job_lines.take, self._on_end_of_job)
        self._loop.every(BEAT_SECONDS, lambda: self.channel.send(node_channel.ALIVE))

    def _on_line(self, line: str) -> None:
        word, _, rest = line.partition(" ")
        if word == node_channel.PORT:
            self._port = int(rest)
        elif word == node_channel.SAVE:
            self._save("the job")
        elif word == node_channel.STACKS and self._ranks is not None:
            self._ranks.ask_for_stacks()
        elif word == node_channel.END:
            self._end_ranks(signal.SIGTERM)
        elif word == node_channel.KILL:
            self._end_ranks(signal.SIGKILL)

    def _on_end_of_job(self) -> None:
        """The job's program or its srun is gone. Under SLURM others may go on in the place of a node that was cut off,
        so its ranks save nothing: they would overwrite newer checkpoints."""
        if self._ranks is None or self._ranks.have_ended:
            self._is_killed = True
        elif self._environment.get("SLURM_STEP_ID"):
            self.say("the job is gone; ending the ranks without a save")
            self._end_ranks(signal.SIGKILL)
        else:
            self._save("the job is gone")
            self._loop.after(GRACE_SECONDS, lambda: self._end_ranks(signal.SIGKILL))

    def _end_ranks(self, number: int) -> None:
        if self._ranks is None:
            self._is_killed = True
        else:
            self._ranks.end(number)

    def _save(self, who: str) -> None:
        if self._told:
            return
        self._told = who
        self.say(f"told to stop ({who}); asking the ranks to save")
        if self._ranks is not None:
            self._ranks.save()

    def _agree_on_port(self, seconds: float = float("inf")) -> int:
        """Return the port where rank 0 will listen; 0 where it is not known after so many seconds. It is chosen where
        it will be bound: bound, but not listened at, so that nobody else is given it, and rank 0, which also sets
        SO_REUSEADDR, can. Raises NodeError where the job ends this before."""
        self.channel.send(node_channel.ALIVE)  # and every BEAT_SECONDS from here on: what comes before may take minutes
        if self._place.node_rank == 0:
            self._port_holder = socket.socket()
            self._port_holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._port_holder.bind(("", 0))
            self.channel.send(node_channel.PORT, self._port_holder.getsockname()[1])
        give_up_at = time.monotonic() + seconds
        self._loop.run(
            lambda: bool(self._port or self._told or self._is_killed) or time.monotonic() >= give_up_at,
            keeps_timers=True,
        )
        if self._told or self._is_killed:
            raise StoppedEarly(f"told to stop ({self._told or 'the job'}) before the training began")
        return self._port

    # --- before the training ---

    def _enter_run_directory(self) -> None:
        place = self._place
        try:
            os.chdir(place.run_directory)
        except OSError as error:
            raise NodeError(f"cannot enter the run directory {place.run_directory}: {error.strerror}") from error
        meets_here = "SLURMD_NODENAME" not in self._environment or place.node == place.address
        if place.node_rank == 0 and not meets_here:  # better said now than after a time-out
            raise NodeError(f"this is node rank 0, but the others were told to meet on {place.address}")

    def _copy_to_this_node(self) -> None:
        """Python asks the file system about each module it imports, in each folder where that might be. Thousands of
        ranks would ask one shared server millions of times; so what they import of this run is copied here once."""
        folder = self._own.make("node")
        try:
            if folder is None:
                raise OSError
            (folder / "trainer").mkdir()
            for name in self._launch["node_files"]:
                (folder / name).write_bytes(Path(name).read_bytes())
            write_hook_files(folder, self._launch["hook_files"])
            (folder / "monitor.log").touch()
            self._files = folder
        except OSError:
            self.say("this node's disk takes no copy of what the ranks import; they read the run directory's")

    def _preflight(self, python: TrainingPython) -> int:
        """The job wants to know whether this node is fit."""
        from .preflight import main as preflight

        place, launch, script = self._place, self._launch, Path("trainer/preflight.py")
        if self._files != place.run_directory:
            with contextlib.suppress(OSError):  # its folder is the first in which Python looks for what it imports
                (self._files / script).write_bytes(script.read_bytes())
                script = self._files / script
        seconds = float(self._environment.get("LLMLAUNCH_PREFLIGHT_SECONDS") or PREFLIGHT_SECONDS)
        port = self._agree_on_port(seconds / 2.0)  # node rank 0 may be the one that is not whole
        words = [
            *("--run-dir", str(place.run_directory), "--attempt", place.attempt, "--node", place.node),
            *("--kind", launch["kind"], "--devices", str(place.devices), "--rank", str(place.node_rank)),
            *("--nodes", str(place.nodes), "--address", place.address, "--port", str(port)),
            *("--python", python.path, "--script", str(script), "--open-files", str(launch["open_files"])),
            *("--seconds", f"{seconds:g}"),
        ]
        for what in ("reads", "writes"):
            for path in launch["tried_paths"][what]:
                words += [f"--{what}", path]
        os.environ.clear()
        os.environ.update(self._environment)
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        return preflight(words)

    def _prepare(self, python: TrainingPython) -> int:
        """Ask the framework whether it takes the arguments, and build what all nodes will read."""
        for words in (self._launch["check"], self._launch["prepare"]):
            if words:
                command = [python.path, *(value_of(word, self._environment) for word in words)]
                code = subprocess.run(
                    command, env=self._environment, stdin=subprocess.DEVNULL, stdout=2, check=False
                ).returncode
                if code:
                    return code if code > 0 else 128 - code
        return 0

    # --- the training ---

    def _train(self, python: TrainingPython) -> int:
        place, launch = self._place, self._launch
        if launch["flight_recorder"]:  # the job made the folder
            self._own.record_collectives(place.folder / file_names.FLIGHT, python.torch, self._environment)
        program = [python.path, *self._program()]
        folder = self._working_directory()
        archive = self._files / file_names.NODE_ARCHIVE
        monitor = start_monitor(
            place.run_directory, place.attempt, place.node, archive, launch["monitor"], self._environment
        )
        before = {"schema": 1, "at": time.time(), **memory_counters()}
        try:
            port = self._agree_on_port()
        except NodeError:
            stop_monitor(monitor)
            deliver_log(monitor)
            raise
        processes = self._processes(port)
        self._ranks = NodeRanks(
            processes, self._loop, self._log, self._appender.append_or_say, self._disk.give, self._hear_lines
        )
        try:
            self._ranks.start(program, folder)
        except OSError as error:
            stop_monitor(monitor)
            deliver_log(monitor)
            raise NodeError(f"the ranks cannot be started: {error.strerror}") from error
        self._disk.start()
        self._loop.every(QUIET_SECONDS, self._ranks.flush_quiet_lines)
        self._on_child()  # of a rank that ended before the loop began
        self._loop.run(lambda: self._ranks is None or self._ranks.have_ended)
        return self._end(monitor, before)

    def _program(self) -> list[str]:
        path = self._place.layout / file_names.COMMAND
        try:
            text = path.read_bytes().decode("utf-8", "surrogateescape")  # as text, Python would change line ends in it
            words = command_words(text, self._environment)
        except OSError as error:
            raise NodeError(f"{path} cannot be read: {error.strerror}") from error
        except CommandError as error:
            raise NodeError(f"{path}: {error}") from error
        return [*words, *self._skipped_steps()]

    def _skipped_steps(self) -> list[str]:
        """After a rollback: the steps whose batches are left out (begin.py)."""
        if not self._launch["skip_flag"] or not self._place.skip:
            return []
        from .rollback import skipped_steps  # here: few attempts leave any out

        steps = [str(step) for step in skipped_steps(self._place.skip)]
        self.say(f"leaving out batches, from that of step {steps[0]} to that of step {steps[-1]}")
        return [self._launch["skip_flag"], *steps]

    def _working_directory(self) -> Path:
        word = self._launch["workdir"]
        folder = Path(value_of(word, self._environment)) if word else self._place.run_directory
        if not os.access(folder, os.X_OK):
            raise NodeError(f"cannot enter {folder}, the folder in which the training starts (workdir: in the recipe)")
        return folder

    def _processes(self, port: int) -> list[StartedRank]:
        launch, place = self._launch, self._place
        hook = self._files / HOOK_FOLDER
        is_hooked = bool(launch["hook_files"]) and (hook / "sitecustomize.py").exists()
        if is_hooked:
            put_first(self._environment, str(hook))
        processes = []
        for local_rank in range(1 if launch["by_itself"] else place.devices):
            ours = {"MASTER_ADDR": place.address, "MASTER_PORT": str(port)}
            if not launch["by_itself"]:  # else the variables of the recipe say its place
                ours = rank_variables(place.team(port), local_rank, self._environment)
            environment = {**self._environment, **ours}
            stacks = None
            if is_hooked:
                rank = environment_number(environment, "RANK")
                local_rank = environment_number(environment, "LOCAL_RANK")
                own = None if self._files == place.run_directory else self._files
                stacks = RankStacks(place.folder, place.node, rank, own)
                environment[PROBE_VARIABLE] = probe_variable(
                    place.run_directory, place.attempt, place.node, rank, local_rank
                )
            processes.append(StartedRank(place.node, environment, stacks))
        return processes

    def _hear_lines(self, lines: Sequence[bytes]) -> None:
        if self._step_lines:
            self._steps.forward(self._step_lines.read(lines))

    # --- signals ---

    def _on_signal(self, number: int) -> None:
        """SLURM, or somebody at a terminal. In an Apptainer container each signal arrives twice; where it signals every
        process of a step, the ranks have had a TERM."""
        if number == signal.SIGUSR2:
            if self._ranks is not None:
                self._ranks.ask_for_stacks()
            return
        if not self._told:
            name = "USR1" if number == signal.SIGUSR1 else "TERM"
            self.channel.send(node_channel.STOPPING, name)
            if name == "TERM" and self._ranks is not None and self._environment.get("LLMLAUNCH_TERM_REACHES_RANKS"):
                self._ranks.was_asked_to_save = True
            self._save(name)

    def _on_child(self) -> None:
        if self._ranks is None or not self._ranks.reap():
            return
        self.channel.send(node_channel.FAILED, self._ranks.exit_code)
        if not self._told:
            self._ranks.end(signal.SIGTERM)
        self._loop.after(GRACE_SECONDS, self._kill)

    def _kill(self) -> None:
        if self._ranks is not None and not self._ranks.have_ended:
            self.say(f"ranks are left {GRACE_SECONDS:.0f} s after the first one failed; killing them")
            self._ranks.end(signal.SIGKILL)

    # --- how it ended ---

    def _end(self, monitor: Monitoring, before: Record) -> int:
        assert self._ranks is not None
        place, failed, code = self._place, self._ranks.first_failed, self._ranks.exit_code
        if failed is not None:
            from ..causes.cause import rank_end  # here: only a node that failed needs all that knows of causes

            self.say(f"rank {failed.number} {rank_end(failed.record)}")
        self._log.flush(DISK_SECONDS)
        if self._log.dropped_bytes:
            self.say(f"{self._log.dropped_bytes} bytes of the ranks' output are lost: the disk did not take them")
        if not self._disk.finish(DISK_SECONDS):
            self.say("the file system does not answer; how the ranks ended may not be written down")
        if failed is None:
            self._disk.give(self._write_done_marker)
            self._disk.finish(DISK_SECONDS)
        else:
            from .diagnose import write_cause

            self._disk.give(lambda: write_cause(place.run_directory, place.attempt, place.node, code, before))
            self._disk.finish(CAUSE_SECONDS)
        stop_monitor(monitor)
        self._disk.give(lambda: deliver_log(monitor))
        self._disk.finish(LAST_WORDS_SECONDS)
        return code

    def _write_done_marker(self) -> None:
        marker = self._place.folder / file_names.DONE / self._place.node
        try:
            os.close(open_to_append(marker))  # the folder is there, unless this was started by hand
            self.say("done")
        except OSError as error:
            self.say(f"cannot write the done marker ({error.strerror}); the job will count as failed")


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="node.pyz node", description="started by the job, once on each node")
    parser.add_argument("--run-dir", required=True, type=Path)
    parser.add_argument("--attempt", required=True)
    parser.add_argument("--layout", default=".", help="folder in the run directory of the layout that is trained")
    parser.add_argument("--nodes", type=int, default=1, help="that train together")
    parser.add_argument("--address", default="127.0.0.1", help="of the node with rank 0")
    parser.add_argument("--node-ranks", default="", help="of the nodes in SLURM's order, where they are in another")
    parser.add_argument("--skip", default="", help="ranges of steps whose batches are left out after a rollback")
    parser.add_argument("what", nargs="?", choices=(PREFLIGHT, PREPARE), help="instead of training")
    return parser.parse_args(argv)
