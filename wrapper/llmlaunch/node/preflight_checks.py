"""What the preflight looks at beside the devices: network ports, storage paths, and the limits of processes.

It only says what it found. `preflight_verdict` compares the nodes: what all have alike is the site's, not a node's.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import select
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from .files import Record

STORAGE_SECONDS = 10.0  # a mount whose server is gone never answers
LEAST_LOCKED_BYTES = 2**30
ACTIVE = "4"  # of /sys/class/infiniband/*/ports/*/state
INTERFACE_VARIABLES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
DOWN = ("down", "lowerlayerdown", "notpresent")  # of operstate; a loopback is "unknown"
RATE = re.compile(r"([0-9]+(?:\.[0-9]+)?) Gb/sec")
LOCKED_REMEDY = "set LimitMEMLOCK=infinity for slurmd, and memlock unlimited in /etc/security/limits.d"
FILES_REMEDY = "set a higher LimitNOFILE for slurmd, and nofile in /etc/security/limits.d"


def node_facts(reads: Sequence[Path], writes: Sequence[Path], open_files: int, root: Path = Path("/")) -> Record:
    """Return `ports` by name and `problems` by key; a key is the same on all nodes that have the problem. `root` is
    where /sys lies."""
    ports = network_ports(root / "sys/class/infiniband")
    problems = {
        **interface_problems(root / "sys/class/net", os.environ),
        **limit_problems(bool(ports), open_files),
        **storage_problems(reads, writes),
    }
    return {"ports": ports, "problems": problems}


def network_ports(folder: Path) -> dict[str, Record]:
    """Return state, phys_state and rate (0 where the port is not active) of each InfiniBand or RoCE port."""
    ports = {}
    for port in sorted(folder.glob("*/ports/*")):
        rate = RATE.search(_text(port / "rate"))
        state = _text(port / "state")
        ports[f"{port.parts[-3]}/{port.name}"] = {
            "state": state,
            "phys_state": _text(port / "phys_state"),
            "link_layer": _text(port / "link_layer"),
            "gigabits": float(rate[1]) if rate and state.startswith(ACTIVE) else 0.0,
        }
    return ports


def interface_problems(folder: Path, environment: Mapping[str, str]) -> dict[str, str]:
    """Return what is wrong with the interfaces that NCCL and gloo are told to use: a list of beginnings of names, `=`
    before whole names, `^` before those to be left out."""
    states = {path.name: _text(path / "operstate") for path in folder.glob("*")}
    problems = {}
    for variable in INTERFACE_VARIABLES:
        wanted = environment.get(variable, "")
        names = [name.strip() for name in wanted.lstrip("=").split(",") if name.strip()]
        if not states or not names or wanted.startswith("^"):
            continue
        whole = wanted.startswith("=") or variable.startswith("GLOO")
        chosen = [each for each in states if any(each == n if whole else each.startswith(n) for n in names)]
        if not any(states[each] not in DOWN for each in chosen):
            interfaces = (
                ", ".join(f"{each} is {states[each]}" for each in sorted(chosen)) or "there is none of that name"
            )
            problems[f"interface {variable}"] = f"has no interface that is up for {variable}={wanted}: {interfaces}"
    return problems


def limit_problems(has_ports: bool, open_files: int) -> dict[str, str]:
    """Return which limits of this process are too low. Memory must be locked where adapters are to read it."""
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    problems = {}
    if has_ports and locked != resource.RLIM_INFINITY and locked < LEAST_LOCKED_BYTES:
        lets = f"lets a process lock {locked // 1024} KiB of memory (ulimit -l), too little for InfiniBand"
        problems["locked memory"] = f"{lets}; {LOCKED_REMEDY}"
    if files != resource.RLIM_INFINITY and files < open_files:
        lets = f"lets a process open {files} files (ulimit -n), and {open_files} may be needed"
        problems["open files"] = f"{lets}; {FILES_REMEDY}"
    return problems


def storage_problems(reads: Sequence[Path], writes: Sequence[Path], seconds: float = STORAGE_SECONDS) -> dict[str, str]:
    """Try each path in a process of its own, which may hang for ever; return what is wrong, by path."""
    tasks = {f"storage {path}": (path, False) for path in reads}
    tasks.update({f"storage {path}": (path, True) for path in writes})
    answers = {_start(path, write): (key, path) for key, (path, write) in tasks.items()}
    problems, give_up_at = {}, time.monotonic() + seconds
    waiting = dict(answers)
    while waiting and time.monotonic() < give_up_at:
        ready, _, _ = select.select([reader for reader, _ in waiting], [], [], max(0.0, give_up_at - time.monotonic()))
        for child in [child for child in waiting if child[0] in ready]:
            key, path = waiting.pop(child)
            problem = os.read(child[0], 4096).decode("utf-8", errors="replace")
            if problem != "ok":
                problems[key] = f"{path}: {problem or 'the trial ended without a word'}"
    for key, path in waiting.values():
        problems[key] = f"{path}: does not answer within {seconds:g} s; is its file server reachable?"
    for reader, pid in answers:
        os.close(reader)
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, os.WNOHANG)  # one that is stuck in the kernel is not waited for
    return problems


def _start(path: Path, write: bool) -> tuple[int, int]:
    """Start the trial of one path; return the pipe that its answer comes by, and its process."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        answer = "failed"
        try:
            answer = _trial(path, write)
        finally:
            os.write(writer, answer.encode("utf-8", errors="replace")[:4096])
            os._exit(0)
    os.close(writer)
    return reader, pid


def _trial(path: Path, write: bool) -> str:
    """Return `ok`, or what is wrong."""
    try:
        if write:
            _write_in(path)
        else:
            _read(path)
    except OSError as error:
        return f"cannot be {'written' if write else 'read'} ({error.strerror})"
    return "ok"


def _write_in(folder: Path) -> None:
    """Write into a folder, or where it is not there yet into the nearest above it, where the trainers will make it."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    trial = folder / f".llmlaunch-preflight.{os.uname().nodename}.{os.getpid()}"
    try:
        with trial.open("xb") as file:
            file.write(b"x" * 4096)
            file.flush()
            os.fsync(file.fileno())
    finally:
        with contextlib.suppress(FileNotFoundError):
            trial.unlink()


def _read(path: Path) -> None:
    """Read the beginning of a file or folder; a dataset of Megatron-LM is named without its suffix."""
    named = path if path.exists() else path.with_name(path.name + ".bin")
    if named.is_dir():
        with os.scandir(named) as entries:
            next(entries, None)
    else:
        with named.open("rb") as file:
            file.read(4096)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()[:100]
    except OSError:
        return ""
