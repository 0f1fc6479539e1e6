"""The preflight: before the training, one task on each node tries whether it is whole and reaches the others.

How far the node came is in the last line of `attempts/<attempt>/preflight/<node>.jsonl` at any moment, so that one that
hangs or dies is known by what it did not reach. `choose` reads them: which of the allocated nodes train, and which are
bad and why.
"""

from __future__ import annotations

import argparse
import json
import os
import selectors
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pynvml

from ..causes.cause import cause, cause_from_log, in_words
from ..causes.image_import import failed_imports
from ..causes.log_scan import read_log, scan
from ..rundir import file_names
from ..rundir.file_names import attempt_folder
from ..rundir.files import appended_records, replace_json
from ..rundir.foreign_values import is_whole_number
from .files import RecordAppender, command_parser, note_in_attempt, say
from .preflight_checks import node_facts
from .preflight_verdict import DOES, NOT_STARTED, STAGES, bad_nodes, reached, site_warnings
from .signals import die_with_parent

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ..rundir.attempt_files import Cause, PreflightResult
    from .files import Record

# The driver itself takes up to about 1 GiB; what goes beyond is another process's.
MOST_USED_BYTES = 3 * 2**30


def main(argv: list[str]) -> int:
    """Try the node; its marker says what became of it. Always returns 0: what follows is for `choose` to say."""
    options = _arguments(argv)
    marker = Marker(
        attempt_folder(options.run_dir, options.attempt) / file_names.PREFLIGHT / f"{options.node}.jsonl", options
    )
    marker.write()
    marker.facts = node_facts(options.reads, [options.run_dir, *options.writes], options.open_files, options.root)
    marker.write()
    problems = gpu_problems(os.environ.get("CUDA_VISIBLE_DEVICES")) if options.kind == "gpu" else []
    if problems:
        marker.blame("; ".join(problems))
        return 0
    with _free_port() as free:
        port = free.getsockname()[1]
        children = [_start(options, device, port) for device in range(options.devices)]
        try:
            for device, line in _lines(children, time.monotonic() + options.seconds):
                marker.update(device, line)
                if marker.bad:
                    break
        finally:
            for child in children:
                child.kill()
    say(f"preflight of {options.node}: {marker.bad or marker.stage}")
    return 0


class Marker:
    """What is known of the node so far, appended to its file whenever it changes."""

    def __init__(self, path: Path, options: argparse.Namespace) -> None:
        self._file = RecordAppender(path)
        self.node = options.node
        self.kind = options.kind
        self.bad: str | None = None
        self.facts: Record = {}  # of network, storage and limits
        self._reached = [0] * options.devices
        self._seconds: list[float | None] = [None] * options.devices

    @property
    def stage(self) -> str:
        return STAGES[min(self._reached)]

    def update(self, device: int, line: str) -> None:
        """One line of a device's process; what is no JSON is none of ours."""
        try:
            message = json.loads(line)
        except ValueError:
            return
        if not isinstance(message, dict):
            return
        if "bad" in message:
            self.blame(str(message["bad"]))
        elif message.get("stage") in STAGES:
            before = self.stage
            self._reached[device] = STAGES.index(message["stage"])
            self._seconds[device] = message.get("seconds", self._seconds[device])
            if self.stage != before:
                self.write()

    def blame(self, why: str) -> None:
        self.bad = why
        self.write()

    def write(self) -> None:
        record: Record = {
            "schema": 1,
            "node": self.node,
            "kind": self.kind,
            "stage": self.stage,
            "bad": self.bad,
            "matmul_seconds": self._seconds,
            **self.facts,
            "at": time.time(),
        }
        self._file.append_or_say(record)


def _free_port() -> socket.socket:
    """A port at which the processes of this node may meet: bound, so that the kernel gives it to no one else, but not
    listened at, so that one of them can."""
    free = socket.socket()
    free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    free.bind(("127.0.0.1", 0))
    return free


def _start(options: argparse.Namespace, device: int, node_port: int) -> subprocess.Popen[bytes]:
    arguments = ["--kind", options.kind, "--devices", options.devices, "--local-rank", device]
    arguments += ["--node-port", node_port, "--node-rank", options.rank, "--nodes", options.nodes]
    arguments += ["--address", options.address, "--port", options.port, "--patience-seconds", options.seconds / 3]
    return subprocess.Popen(
        [options.python, str(options.script), *map(str, arguments)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        preexec_fn=lambda: die_with_parent(signal.SIGKILL),
    )


def _lines(children: list[subprocess.Popen[bytes]], end: float) -> Iterator[tuple[int, str]]:
    """Whole lines with the number of the process that wrote them, until all have closed or the time is over."""
    unfinished = [b""] * len(children)
    with selectors.DefaultSelector() as selector:
        for number, child in enumerate(children):
            selector.register(child.stdout.fileno(), selectors.EVENT_READ, number)  # type: ignore[union-attr]
        while selector.get_map() and time.monotonic() < end:
            for key, _ in selector.select(max(0.0, end - time.monotonic())):
                piece = os.read(key.fd, 65536)
                if not piece:
                    selector.unregister(key.fd)
                    continue
                *whole, unfinished[key.data] = (unfinished[key.data] + piece).split(b"\n")
                for line in whole:
                    yield key.data, line.decode(errors="replace")


def gpu_problems(visible: str | None) -> list[str]:
    """A sentence for each problem of this job's GPUs; none where NVML cannot be asked.

    `visible` is CUDA_VISIBLE_DEVICES: NVML itself knows all GPUs of a node that does not hide others' from a job. An
    error that a driver does not count (no ECC memory, an old GPU) is no problem.
    """
    try:
        pynvml.nvmlInit()
        count = pynvml.nvmlDeviceGetCount()
    except pynvml.NVMLError:
        return []
    problems = []
    for index in _ours(count, visible):
        try:
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        except pynvml.NVMLError as error:
            problems.append(f"GPU {index} does not answer: {error}")
            continue
        problems += [f"GPU {index} {problem}" for problem in _problems(handle)]
    return problems


def _ours(count: int, visible: str | None) -> list[int]:
    """Indexes of NVML. Where fewer are there than the highest number named, the others are hidden and all are ours."""
    names = [name.strip() for name in (visible or "").split(",") if name.strip()]
    if not names or not all(is_whole_number(name) and int(name) < count for name in names):
        return list(range(count))
    return [int(name) for name in names]


def _problems(handle: Any) -> list[str]:
    problems = []
    volatile = _ask(
        pynvml.nvmlDeviceGetTotalEccErrors, handle, pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC
    )
    if volatile:
        problems.append(f"has {volatile} uncorrectable ECC errors since the driver was loaded")
    if _ask(pynvml.nvmlDeviceGetRetiredPagesPendingStatus, handle) == pynvml.NVML_FEATURE_ENABLED:
        problems.append("waits for a reset to retire memory pages")
    remapped = _ask(pynvml.nvmlDeviceGetRemappedRows, handle)
    if remapped is not None:
        _, _, pending, failed = remapped
        problems += ["waits for a reset to remap memory rows"] if pending else []
        problems += ["could not remap a bad memory row"] if failed else []
    memory = _ask(pynvml.nvmlDeviceGetMemoryInfo, handle)
    if memory is not None and memory.total - memory.free > MOST_USED_BYTES:
        used = (memory.total - memory.free) / 2**30
        problems.append(f"has {used:.1f} GiB in use before the training; another process holds them")
    return problems


def _ask(call: Callable[..., Any], *arguments: Any) -> Any:
    """The answer, or None where this driver has none."""
    try:
        return call(*arguments)
    except (pynvml.NVMLError, pynvml.NVMLLibraryMismatchError):
        return None


def _arguments(argv: list[str]) -> argparse.Namespace:
    parser = command_parser("preflight")
    parser.add_argument("--node", required=True)
    parser.add_argument("--kind", choices=["gpu", "cpu"], required=True)
    parser.add_argument("--devices", type=int, required=True, help="of this node")
    parser.add_argument("--rank", type=int, required=True, help="of this node")
    parser.add_argument("--nodes", type=int, required=True, help="that are tried together")
    parser.add_argument("--address", required=True, help="of node rank 0")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--python", required=True, help="of the training environment")
    parser.add_argument("--script", required=True, type=Path, help="preflight.py of the run directory")
    for name, meaning in (("--reads", "data that must be readable"), ("--writes", "folders that must be writable")):
        parser.add_argument(name, type=Path, action="append", default=[], metavar="PATH", help=meaning)
    parser.add_argument("--open-files", type=int, default=0, help="that one process may need")
    parser.add_argument("--root", type=Path, default=Path("/"), help="where sys lies")
    parser.add_argument("--seconds", type=float, required=True, help="all of it may take")
    return parser.parse_args(argv)


def choose(run_directory: Path, attempt: str, allocated: Sequence[str], wanted: int) -> list[str]:
    """Return so many of the `allocated` nodes, in their order, that were found good; none where too few are.

    `attempt.json` says which were chosen and what is wrong with the others; each of these gets a cause of its own.
    """
    directory = attempt_folder(run_directory, attempt)
    markers = {node: read_marker(directory / file_names.PREFLIGHT / f"{node}.jsonl") for node in allocated}
    without_image = failed_imports(directory)
    bad = _without_container_failures(bad_nodes(markers), directory / file_names.PREFLIGHT)
    for node, failure in without_image.items():
        if failure["sick"]:
            bad[node] = f"{in_words('image')}: {failure['line']}"
        else:
            bad.pop(node, None)
    good = [node for node in allocated if node not in bad]
    # where there are too few with the image, the others may have it next time
    preferred = [
        *(node for node in good if node not in without_image),
        *(node for node in good if node in without_image),
    ]
    chosen = [node for node in good if node in preferred[:wanted]]
    spare = [node for node in good if node not in chosen and node not in without_image]
    enough = len(chosen) == wanted
    # What is wrong everywhere is seldom the nodes' fault: a wrong recipe, an environment that lacks something.
    all_bad = len(allocated) > 1 and len(bad) == len(allocated)
    warnings = site_warnings(markers)
    result: PreflightResult = {
        "nodes": chosen if enough else [],
        "spare": spare,
        "bad": bad,
        "warnings": warnings,
        "why": _why(list(allocated), bad, wanted, enough, all_bad, markers),
    }
    say(f"preflight: {result['why']}")
    for text in warnings:
        say(f"preflight: warning: {text}")
    try:
        note_in_attempt(directory, {"preflight": result, "nodes": chosen} if enough else {"preflight": result})
        for node, why in bad.items():
            replace_json(directory / file_names.CAUSES / f"{node}.json", _cause_of(node, why, all_bad, enough))
    except OSError as error:
        say(f"preflight: its result is not written: {error.strerror}")
    return chosen if enough else []


def read_marker(path: Path) -> Record | None:
    """Return the last whole line of a node's file; None where there is none."""
    try:
        return next(reversed(appended_records(path).records), None)
    except OSError:
        return None


def _without_container_failures(bad: dict[str, str], logs: Path) -> dict[str, str]:
    """`bad` without nodes whose container may start next time; for one whose container cannot start, the log's line is
    given."""
    remaining = {}
    for node, why in bad.items():
        hit = cause_from_log(scan(read_log(logs / f"{node}.log")), node, []) if why == NOT_STARTED else None
        if hit is None or hit["kind"] != "container_busy":
            remaining[node] = (
                f"its container does not start: {hit['line']}" if hit and hit["kind"] == "container" else why
            )
    return remaining


def _why(
    allocated: list[str],
    bad: dict[str, str],
    wanted: int,
    enough: bool,
    all_bad: bool,
    markers: dict[str, Record | None],
) -> str:
    named = "; ".join(f"{node}: {why}" for node, why in bad.items())
    if all_bad:
        return f"every node fails the same way; check the recipe and the environment first: {named}"
    if not enough:
        return f"{len(allocated) - len(bad)} of {len(allocated)} nodes are good and {wanted} are needed; {named}"
    stage = min(reached(marker) for node, marker in markers.items() if node not in bad)
    if stage < len(STAGES) - 1:
        last = "start" if stage < 0 else DOES[STAGES[stage + 1]]
        return f"no node could {last}, so no node is at fault" + (f"; {named}" if bad else "")
    return f"{len(allocated) - len(bad)} of {len(allocated)} nodes are good" + (f"; {named}" if bad else "")


def _cause_of(node: str, why: str, all_bad: bool, enough: bool) -> Cause:
    """Where enough nodes are left the training goes on, and whatever ends it has another cause."""
    kind = "crash" if all_bad else "preflight"
    return cause(kind, node, why, "preflight", sick=not all_bad, consequence=enough, at=time.time())
