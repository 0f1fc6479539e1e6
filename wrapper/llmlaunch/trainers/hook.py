"""The hook that runs first in every Python that a node starts as a rank: copied into a run directory as
hook/sitecustomize.py, a folder that the node puts first on the trainer's PYTHONPATH. Python >= 3.8 and the standard
library alone; it must never harm the trainer, so each part fails alone and silently.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
from pathlib import Path

TYPE_CHECKING = False  # `typing` would be read by every Python the trainer starts
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

STACKS_VARIABLE = "LLMLAUNCH_STACKS"  # the file of this rank
PROBE_VARIABLE = "LLMLAUNCH_PROBE"  # what the memory probe is told; it stays for the processes the trainer starts
PROBE_FILE = "llmlaunch_memory_probe.py"
OBSERVE_VARIABLE = "LLMLAUNCH_OBSERVE"  # set by `observe` (node/observer.py) for all that its command starts
OBSERVED_VARIABLE = "LLMLAUNCH_OBSERVED_RANK"  # which rank the Python above was, and how it knew: our helpers are none
# How a rank knows its number, where in its node it is, and how many there are; the first that is there counts.
RANK_VARIABLES = (
    ("RANK", "LOCAL_RANK", "WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS"),
)
LAUNCHERS = frozenset({
    *("torchrun", "torch.distributed.run", "torch.distributed.launch", "deepspeed", "ds", "deepspeed.launcher.runner"),
    *("deepspeed.launcher.launch", "accelerate", "accelerate.commands.launch", "accelerate.commands.accelerate_cli"),
    *("composer", "colossalai", "llmlaunch", "node.pyz"),
})  # fmt: skip
PACKAGES = ("torch", "megatron-core", "transformer-engine", "deepspeed", "transformers", "accelerate", "peft")
MOST_VERSION_BYTES = 4096


def write_stacks_when_asked() -> None:
    """At SIGURG all threads' Python stacks go to the file of this rank, or to its log where that cannot be opened.

    The handler is C: it also answers while another thread, or a call that never returns, holds the interpreter's lock.
    SIGURG, since nobody else sends it and the processes that the trainer starts, without this handler, ignore it.
    Only the first Python of the rank is asked; the variable does not go to the processes it starts.
    """
    path = os.environ.pop(STACKS_VARIABLE, None)
    if path is None:
        return
    try:
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError:
        file = sys.stderr.fileno()
    faulthandler.register(signal.SIGURG, file=file, all_threads=True, chain=False)


def name_the_rank_in_tracebacks() -> None:
    """Each line of an uncaught exception begins with `[rank3]: `, as torch's own do once it has made a process group,
    and all go out in one write: the ranks of a node share a log. Where another hook calls this one, as torch's does to
    add the prefix itself, the exception is written as Python does."""
    rank = os.environ.get("RANK", "")
    if not (rank.isascii() and rank.isdigit()):
        return

    def write(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        text = None
        if sys.excepthook is write:
            with contextlib.suppress(Exception):
                import traceback  # here, since few programs end with an exception

                lines = "".join(traceback.format_exception(kind, error, trace)).splitlines()
                text = "".join(f"[rank{rank}]: {line}\n" for line in lines)
        if text is None or issubclass(kind, KeyboardInterrupt):
            sys.__excepthook__(kind, error, trace)
            return
        sys.stderr.write(text)
        sys.stderr.flush()

    sys.excepthook = write


def write_memory_peaks_when_cuda_is_used() -> None:
    """The probe is loaded when `torch.cuda` initialises CUDA: a program that never does has no thread of ours, which
    `os.fork` would mind, and reads nothing."""
    if PROBE_VARIABLE in os.environ and Path(__file__).with_name(PROBE_FILE).exists():
        once_there_is_torch(queue_probe)


def once_there_is_torch(act: Callable[[Any], None]) -> None:
    """Call `act` with torch.cuda once that is imported."""
    if "torch.cuda" in sys.modules:  # a .pth file was earlier
        act(sys.modules["torch.cuda"])
        return
    waiting = [finder for finder in sys.meta_path if isinstance(finder, UntilTorch)]
    if not waiting:
        waiting = [UntilTorch()]
        sys.meta_path.insert(0, waiting[0])
    waiting[0].acts.append(act)


class UntilTorch:
    """First among the finders of modules until `torch.cuda` has run. It finds nothing that the others would not."""

    def __init__(self) -> None:
        self.acts: list[Callable[[Any], None]] = []

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != "torch.cuda":
            return None
        with contextlib.suppress(Exception):
            for finder in sys.meta_path:
                spec = None if finder is self else finder.find_spec(name, path, target)
                if spec is not None:
                    self.hear_of(spec.loader)
                    return spec
        return None  # whatever is wrong, the others will say it

    def hear_of(self, loader: Any) -> None:
        """The loader is this module's alone; for its one use it gets a method of its own."""
        if loader is None or isinstance(loader, type):
            return
        real = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            with contextlib.suppress(Exception):
                del loader.exec_module
            real(module)
            with contextlib.suppress(Exception):
                sys.meta_path.remove(self)
            for act in self.acts:
                with contextlib.suppress(Exception):
                    act(module)

        loader.exec_module = exec_module


def queue_probe(cuda: Any) -> None:
    """torch keeps such calls until it initialises CUDA, and makes them then."""

    def start() -> None:
        with contextlib.suppress(Exception):
            from importlib.util import module_from_spec, spec_from_file_location

            spec = spec_from_file_location("llmlaunch_memory_probe", Path(__file__).with_name(PROBE_FILE))
            if spec is not None and spec.loader is not None:
                probe = module_from_spec(spec)
                spec.loader.exec_module(probe)
                probe.start(os.environ[PROBE_VARIABLE])

    cuda._lazy_call(start)


def run_the_shadowed_one() -> None:
    """The sitecustomize that Python would have found without this folder; what it raises is what Python reports."""
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec

    here = Path(__file__).resolve().parent
    spec = PathFinder.find_spec("sitecustomize", [place for place in sys.path if Path(place).resolve() != here])
    if spec is not None and spec.loader is not None:
        sys.modules["sitecustomize"] = module = module_from_spec(spec)
        spec.loader.exec_module(module)


def tell_the_observer() -> None:
    """Of a rank below an observed command: to the observer of this node, which process it is. A rank that was told its
    number says so at once; any other Python once it has torch, as a training has, unless it starts the ranks."""
    text = os.environ.get(OBSERVE_VARIABLE)
    if text is None or is_launcher():
        return
    import json

    place = json.loads(text)
    if place["job"] != os.environ.get("SLURM_JOB_ID", ""):  # of the job that submitted this one
        return
    rank = ObservedRank(place, os.environ)
    if os.environ.get(OBSERVED_VARIABLE) == rank.mark:
        return
    if rank.source == "RANK":
        rank.begin()
        once_there_is_torch(lambda cuda: rank.tell_versions())
    else:
        once_there_is_torch(lambda cuda: rank.begin_with_torch(cuda))


def is_launcher() -> bool:
    """Whether this Python runs a program that starts the ranks, by the first words of its command line."""
    command = os.fsdecode(Path("/proc/self/cmdline").read_bytes()[: 2**14]).split("\0")
    return any(part.rpartition("/")[2] in LAUNCHERS for part in command[1:6])


class ObservedRank:
    """One rank, and what it says to the observer: datagrams, for which nobody waits and no disk is needed."""

    def __init__(self, place: dict[str, Any], environment: Mapping[str, str]) -> None:
        self.place, self.pid = place, os.getpid()
        numbers: tuple[int | None, ...] = (0, 0, 1)
        self.source = ""
        for names in RANK_VARIABLES:
            if environment.get(names[0], "").isdigit() and names[1] in environment:
                numbers = tuple(
                    int(environment[name]) if environment.get(name, "").isdigit() else None for name in names
                )
                self.source = names[0]
                break
        self.rank, self.local_rank, self.world_size = numbers
        self.mark = f"{self.source}:{self.rank}"
        self.node = environment.get("SLURMD_NODENAME") or os.uname().nodename.split(".")[0]

    def begin(self) -> None:
        import atexit
        import json

        os.environ[OBSERVED_VARIABLE] = self.mark
        if Path(__file__).with_name(PROBE_FILE).exists():
            about = {name: getattr(self, name) for name in ("rank", "local_rank", "node")}
            about.update(run=self.place["run"], attempt=self.place["attempt"])
            os.environ[PROBE_VARIABLE] = json.dumps(about)
        first = {
            "local_rank": self.local_rank,
            "world_size": self.world_size,
            "local_world_size": number_or_none(os.environ.get("LOCAL_WORLD_SIZE")),
            "visible_devices": os.environ.get("CUDA_VISIBLE_DEVICES"),
            "python": sys.executable,
            "source": self.source,
        }
        if not self.tell(first):
            self.start_observer(first)
        atexit.register(self.end)

    def begin_with_torch(self, cuda: Any) -> None:
        self.begin()
        if PROBE_VARIABLE in os.environ:
            queue_probe(cuda)
        self.tell_versions()

    def tell_versions(self) -> None:
        if self.rank == 0:
            self.tell({"event": "versions", "versions": versions()})

    def end(self) -> None:
        """The last word of this process, not of what it forked: its true peak, and whether an exception ended it."""
        if os.getpid() == self.pid:
            with contextlib.suppress(Exception):
                raised = getattr(sys, "last_type", None) is not None
                self.tell({"event": "end", "peak_bytes": resident_peak_bytes(), "raised": raised})

    def tell(self, message: dict[str, Any]) -> bool:
        """Return whether this node has an observer."""
        import json
        import socket

        whole = json.dumps({**message, "rank": self.rank}).encode()
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            try:
                sender.sendto(whole, socket.MSG_DONTWAIT, self.socket_name())
            except BlockingIOError:
                pass
            except OSError:
                return False
        return True

    def socket_name(self) -> str:
        """As node/observed_job.py has it."""
        import hashlib

        text = f"{self.place['run']}\n{self.place['attempt']}\n{self.node}"
        return "\0llmlaunch-" + hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:32]

    def start_observer(self, first: dict[str, Any]) -> None:
        """Start one on this node, whose ranks another node has started. Forked twice, so that it is nobody's child."""
        import json

        archive = Path(self.place["run"], "node.pyz")
        if not archive.exists():
            return
        about = ["--run-dir", self.place["run"], "--attempt", self.place["attempt"], "--node", self.node]
        whole = json.dumps({**first, "rank": self.rank, "pid": self.pid})
        command = [sys.executable, "-I", "-S", str(archive), "beside", *about]
        command += ["--interval", str(self.place["interval"]), "--first", whole]
        child = os.fork()
        if child == 0:
            try:
                os.setsid()
                if os.fork() == 0:
                    null = os.open(os.devnull, os.O_RDWR)
                    for number in (0, 1, 2):
                        os.dup2(null, number)
                    os.execv(sys.executable, command)
            finally:
                os._exit(0)
        os.waitpid(child, 0)


def number_or_none(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdigit() else None


def resident_peak_bytes() -> int | None:
    """Return the most main memory that this process held: the kernel's own maximum."""
    for line in Path("/proc/self/status").read_bytes().splitlines():
        if line.startswith(b"VmHWM:"):
            return int(line.split()[1]) * 1024
    return None


def versions() -> dict[str, str]:
    """Return the versions of the packages of this Python; of a checkout of Megatron-LM on the path, which comes before
    an installed one, as its own file says."""
    from importlib import metadata

    found = {}
    for name in PACKAGES:
        with contextlib.suppress(Exception):
            found[name] = metadata.version(name)
    for folder in sys.path:
        with contextlib.suppress(Exception):
            package_info = Path(folder, "megatron", "core", "package_info.py")
            lines = package_info.read_text("utf-8")[:MOST_VERSION_BYTES].splitlines()
            numbers = dict(line.replace(" ", "").split("=", 1) for line in lines if "=" in line)
            found["megatron-core"] = ".".join(numbers[part] for part in ("MAJOR", "MINOR", "PATCH"))
            break
    return found


with contextlib.suppress(Exception):
    write_stacks_when_asked()
with contextlib.suppress(Exception):
    name_the_rank_in_tracebacks()
with contextlib.suppress(Exception):
    tell_the_observer()
with contextlib.suppress(Exception):
    write_memory_peaks_when_cuda_is_used()
run_the_shadowed_one()
