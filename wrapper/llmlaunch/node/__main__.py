"""`python3 node.pyz COMMAND ...`: one command."""

from __future__ import annotations

import contextlib
import os
import sys
from importlib import import_module

COMMANDS = ("beside", "job", "monitor", "node", "observe", "preflight", "prune")
# of the others `main` of their own module
FUNCTIONS = {
    "beside": ("observer", "beside"),
    "node": ("training_node", "main"),
}
USAGE = f"usage: python3 node.pyz {{{','.join(COMMANDS)}}} ... (docs/run-directory.md)"
HOLD_END_SIGNALS = ("monitor",)


def main() -> None:
    """Run the command that is named first. Never returns.

    Ends by `os._exit`: interpreter shutdown would wait for a thread stuck in the driver, and turns a flush that
    a full disk refused into exit code 120.
    """
    command, arguments = (sys.argv[1] if len(sys.argv) > 1 else ""), sys.argv[2:]
    if command not in COMMANDS:
        sys.exit(USAGE)
    if command in HOLD_END_SIGNALS:  # before the rest is imported: one that is stopped early still exits with 0
        from .signals import hold_end_signals

        hold_end_signals()
    module, function = FUNCTIONS.get(command, (command, "main"))
    code = getattr(import_module(f".{module}", __package__), function)(arguments)
    with contextlib.suppress(OSError):  # a full disk does not change the exit code
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
