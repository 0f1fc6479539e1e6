"""Asks the trainers of this node, through their wrappers, to save and end (USR1) or to write their stacks (USR2)."""

from __future__ import annotations

import argparse
import os
import signal
import time
from pathlib import Path

from .files import say
from .process_tree import all_pids, parent_of

SIGNALS = {"USR1": signal.SIGUSR1, "USR2": signal.SIGUSR2}
POLL_SECONDS = 0.5


def main(argv: list[str]) -> int:
    """Signal the rank wrappers among the children of `--parent`, which is torchrun. Returns 0, or 1 where there were
    none until `--wait` was over: torchrun may still be on its way to start them."""
    options = _arguments(argv)
    give_up_at = time.monotonic() + options.wait
    while True:
        signalled = [pid for pid in wrappers(options.parent) if _send(pid, SIGNALS[options.signal])]
        if signalled:
            return 0
        if time.monotonic() > give_up_at or not Path(f"/proc/{options.parent}").exists():
            say(f"tell: no trainer to send {options.signal}")
            return 1
        time.sleep(POLL_SECONDS)


def wrappers(parent: int) -> list[int]:
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


def _arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="node.pyz tell")
    parser.add_argument("--parent", type=int, required=True, metavar="PID", help="of torchrun")
    parser.add_argument("--signal", choices=sorted(SIGNALS), required=True)
    parser.add_argument("--wait", type=float, default=60.0, metavar="SECONDS", help="for trainers that start only now")
    return parser.parse_args(argv)
