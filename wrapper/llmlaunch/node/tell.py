"""Tells the trainers of this node, by way of their wrappers: save and end (USR1), or say where you are (USR2)."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

from .files import say

if TYPE_CHECKING:
    from collections.abc import Iterator

SIGNALS = {"USR1": signal.SIGUSR1, "USR2": signal.SIGUSR2}
POLL_SECONDS = 0.5


def main(argv: list[str]) -> int:
    """Signal the rank wrappers among the children of `--parent`, which is torchrun. Returns 0, or 1 where there were
    none until `--wait` was over: torchrun may still be on its way to start them."""
    options = _arguments(argv)
    give_up_at = time.monotonic() + options.wait
    while True:
        told = [pid for pid in wrappers(options.parent) if _send(pid, SIGNALS[options.signal])]
        if told:
            return 0
        if time.monotonic() > give_up_at or not Path(f"/proc/{options.parent}").exists():
            say(f"tell: no trainer to send {options.signal}")
            return 1
        time.sleep(POLL_SECONDS)


def wrappers(parent: int) -> Iterator[int]:
    """Process ids of the rank wrappers `parent` has started. torchrun has other children too, and USR1 ends those."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and _parent(entry) == parent and _is_wrapper(entry):
            yield int(entry.name)


def _parent(entry: Path) -> int:
    try:
        # the name in brackets may hold blanks and brackets of its own
        return int((entry / "stat").read_text(errors="replace").rpartition(")")[2].split()[1])
    except (OSError, ValueError, IndexError):
        return 0


def _is_wrapper(entry: Path) -> bool:
    with contextlib.suppress(OSError):
        words = (entry / "cmdline").read_bytes().split(b"\0")
        return any(word.endswith(b"node.pyz") and b"rank" in words[at + 1 : at + 2] for at, word in enumerate(words))
    return False


def _send(pid: int, number: signal.Signals) -> bool:
    try:
        os.kill(pid, number)
    except OSError:
        return False
    return True


def _arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="node.pyz tell")
    parser.add_argument("--parent", type=int, required=True, metavar="PID", help="of torchrun")
    parser.add_argument("--signal", choices=sorted(SIGNALS), required=True)
    parser.add_argument("--wait", type=float, default=60.0, metavar="SECONDS", help="for trainers that start only now")
    return parser.parse_args(argv)
