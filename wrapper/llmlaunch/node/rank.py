"""The rank wrapper: runs one trainer as its child and writes down how it began and ended.

What the trainer would notice stays as it was: signals arrive once, its code or signal becomes the wrapper's, and no
disk error changes either. USR1 is the exception: it asks for a checkpoint and an end, and the trainer gets it as the
signal it saves at. USR2 asks for its stacks. `tell` sends them to the wrappers of a node.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

from ..rundir import file_names
from ..rundir.file_names import attempt_folder
from ..rundir.foreign_values import is_whole_number
from .files import RecordAppender, command_parser, say
from .hook_files import HOOK_FOLDER
from .process_tree import all_pids, parent_of
from .signals import die_with_parent, end_like, signal_name, signal_number
from .stacks import RankStacks, ask_for_stacks

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .files import Record

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
ASKS_TO_SAVE, ASKS_FOR_STACKS = signal.SIGUSR1, signal.SIGUSR2
# Where SLURM tells every process of a step, the trainer gets these too, and nobody asked it: they end what does not
# expect them.
NOT_FOR_TRAINERS = (signal.SIGUSR1, signal.SIGUSR2)
SAVE_SIGNAL_VARIABLE = "LLMLAUNCH_SAVE_SIGNAL"  # for a trainer that saves at another signal than SIGTERM
TELL_SIGNALS = {"USR1": ASKS_TO_SAVE, "USR2": ASKS_FOR_STACKS}
POLL_SECONDS = 0.5
NOT_FOUND, NOT_EXECUTABLE = 127, 126  # as a shell has them
PROBE_VARIABLE = "LLMLAUNCH_PROBE"


def main(argv: list[str]) -> int:
    """Run PROGRAM; returns its exit code, or ends by the signal that ended it."""
    options, program = _arguments(argv)
    rank, local_rank = _environment_int("RANK"), _environment_int("LOCAL_RANK")
    directory = attempt_folder(options.run_dir, options.attempt)
    records = RecordAppender(directory / file_names.RANKS / f"{options.node}.jsonl")
    stacks = None
    if put_hook_first((options.node_files or options.run_dir) / HOOK_FOLDER):
        stacks = RankStacks(directory, options.node, rank, options.node_files)
        set_probe_variable(options.run_dir, options.attempt, options.node, rank, local_rank)
    record: Record = {
        "v": 1,
        "rank": rank,
        "local_rank": local_rank,
        "node": options.node,
        "pid": os.getpid(),
        "program_pid": None,
        "started_at": time.time(),
        "ended_at": None,
        "exit_code": None,
        "signal": None,
        "resident_peak_bytes": None,
        "visible_devices": os.environ.get("CUDA_VISIBLE_DEVICES"),
    }
    record["program_pid"] = child = spawn(program, rank, stacks)
    records.append_or_say(record)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    # while the child is still a zombie, so that no signal ever goes to its number's heir
    for number in (*FORWARDED, *NOT_FOR_TRAINERS):
        signal.signal(number, signal.SIG_IGN)
    _, status, usage = os.wait4(child, 0)
    if stacks is not None:
        stacks.close()
    record["ended_at"] = time.time()
    record["resident_peak_bytes"] = usage.ru_maxrss * 1024  # Linux counts KiB
    if os.WIFSIGNALED(status):
        record["signal"] = signal_name(os.WTERMSIG(status))
        records.append_or_say(record)
        end_like(os.WTERMSIG(status))
    record["exit_code"] = os.WEXITSTATUS(status)
    records.append_or_say(record)
    return os.WEXITSTATUS(status)


def spawn(program: list[str], rank: int, stacks: RankStacks | None) -> int:
    """Start `program`; from now on what this process is told is passed on to it. Returns its pid.

    The child gets a process group of its own: torchrun signals the whole group of the wrapper (`os.killpg` in
    torch 2.13, subprocess_handler.py), a terminal likewise, and with the forwarded one the trainer would be
    told twice.
    """
    # torchrun is started deaf to TERM; its workers are not to inherit that
    handled = [n for n in FORWARDED if n == signal.SIGTERM or signal.getsignal(n) != signal.SIG_IGN]
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [*handled, *NOT_FOR_TRAINERS])
    wrapper = os.getpid()
    child = os.fork()
    if child == 0:
        _become(program, wrapper, mask)
    forwarded = []  # the signals it was sent so far

    def forward(number: int, frame: object = None) -> None:
        forwarded.append(number)
        with contextlib.suppress(OSError):  # gone, or of another user since
            os.kill(child, number)

    def ask_to_save(number: int, frame: object) -> None:
        """Once, and not where it was told to end already: a second signal would break off its saving."""
        if not forwarded:
            forward(save_signal())

    for number in handled:
        signal.signal(number, forward)
    signal.signal(ASKS_TO_SAVE, ask_to_save)
    signal.signal(ASKS_FOR_STACKS, lambda number, frame: ask_for_stacks(child, rank, stacks))
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    return child


def save_signal() -> int:
    """What the trainer saves at: SIGTERM, as Megatron-LM with --exit-signal-handler and our own script do."""
    return signal_number(os.environ.get(SAVE_SIGNAL_VARIABLE, "")) or signal.SIGTERM


def _become(program: list[str], parent: int, mask: set[int | signal.Signals]) -> None:
    """In the child: turn into `program`. Never returns."""
    code = NOT_EXECUTABLE
    try:
        os.setpgid(0, 0)
        die_with_parent(signal.SIGKILL)
        if os.getppid() != parent:  # it went before we asked
            os._exit(128 + signal.SIGKILL)
        # Python ignores these two for itself; a program expects to inherit the defaults (as subprocess does).
        for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        for number in NOT_FOR_TRAINERS:
            signal.signal(number, signal.SIG_IGN)
        if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        code = execute(program, os.environ)
    finally:
        os._exit(code)


def execute(program: list[str], environment: Mapping[str, str]) -> int:
    """Turn this process into `program`. Returns the exit code of a shell where that cannot be started."""
    try:
        os.execvpe(program[0], program, environment)
    except OSError as error:
        say(f"cannot start {program[0]}: {error.strerror}")
        return NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_EXECUTABLE


def _environment_int(name: str) -> int:
    """torchrun sets RANK and LOCAL_RANK; a program started alone is rank 0."""
    text = os.environ.get(name, "")
    return int(text) if is_whole_number(text) else 0


def put_hook_first(hook: Path) -> bool:
    """Put the folder of the hook first on PYTHONPATH for a trainer that is started next; False where there is no
    hook."""
    try:
        (hook / "sitecustomize.py").stat()
    except FileNotFoundError:
        return False
    except OSError:  # a file system that is away for the moment
        pass
    others = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = f"{hook}:{others}" if others else str(hook)
    return True


def set_probe_variable(run_directory: Path, attempt: str, node: str, rank: int, local_rank: int) -> None:
    """Set the variable that starts this rank's memory probe, in the trainer and in what that starts."""
    place = {"run": str(run_directory), "attempt": attempt, "node": node, "rank": rank, "local_rank": local_rank}
    os.environ[PROBE_VARIABLE] = json.dumps(place)


def _arguments(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = command_parser("rank")
    parser.usage = "%(prog)s [options] -- PROGRAM [ARG ...]"
    parser.add_argument("--node", required=True)
    parser.add_argument("--node-files", type=Path, metavar="FOLDER", help="of this node, with a copy of DIR's hook/")
    cut = argv.index("--") if "--" in argv else len(argv)
    options = parser.parse_args(argv[:cut])
    if not argv[cut + 1 :]:
        parser.error("no PROGRAM after --")
    return options, argv[cut + 1 :]


def tell(argv: list[str]) -> int:
    """Ask the trainers of this node, through their wrappers, to save and end (USR1) or to write their stacks (USR2).

    The wrappers are those among the children of `--parent`, which is torchrun. Returns 0, or 1 where there were none
    until `--wait` was over: torchrun may still be on its way to start them.
    """
    parser = argparse.ArgumentParser(prog="node.pyz tell")
    parser.add_argument("--parent", type=int, required=True, metavar="PID", help="of torchrun")
    parser.add_argument("--signal", choices=sorted(TELL_SIGNALS), required=True)
    parser.add_argument("--wait", type=float, default=60.0, metavar="SECONDS", help="for trainers that start only now")
    options = parser.parse_args(argv)
    give_up_at = time.monotonic() + options.wait
    while True:
        signalled = [pid for pid in _wrappers(options.parent) if _send(pid, TELL_SIGNALS[options.signal])]
        if signalled:
            return 0
        if time.monotonic() > give_up_at or not Path(f"/proc/{options.parent}").exists():
            say(f"tell: no trainer to send {options.signal}")
            return 1
        time.sleep(POLL_SECONDS)


def _wrappers(parent: int) -> list[int]:
    """Process ids of the rank wrappers `parent` has started. torchrun has other children too, and USR1 ends those."""
    return [pid for pid in all_pids() if parent_of(pid) == parent and _is_wrapper(pid)]


def _is_wrapper(pid: int) -> bool:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return any(word.endswith(b"node.pyz") and b"rank" in command[at + 1 : at + 2] for at, word in enumerate(command))


def _send(pid: int, number: signal.Signals) -> bool:
    try:
        os.kill(pid, number)
    except OSError:
        return False
    return True
