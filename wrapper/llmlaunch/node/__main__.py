"""`python3 node.pyz COMMAND ...`: one command, its own module."""

from __future__ import annotations

import contextlib
import os
import sys

COMMANDS = "begin,choose,diagnose,finish,monitor,place,preflight,rank,tell,watchdog"
USAGE = f"usage: python3 node.pyz {{{COMMANDS}}} ... (docs/run-directory.md)"


def main() -> None:
    """Run the command that is named first. Never returns.

    Ends by `os._exit`: interpreter shutdown would wait for a thread stuck in the driver, and turns a flush that
    a full disk refused into exit code 120.
    """
    command, arguments = (sys.argv[1] if len(sys.argv) > 1 else ""), sys.argv[2:]
    if command == "monitor":
        from .signals import hold_end_signals

        hold_end_signals()  # before the rest is imported: a monitor that is stopped early still exits with 0
        from .monitor import main as run
    elif command == "rank":
        from .rank import main as run
    elif command == "finish":
        from .finish import main as run
    elif command == "place":
        from .place import main as run
    elif command == "begin":
        from .begin import main as run
    elif command == "diagnose":
        from .diagnose import main as run
    elif command == "tell":
        from .tell import main as run
    elif command == "watchdog":
        from .signals import hold_end_signals

        hold_end_signals()  # likewise: it still writes down the last step
        from .watchdog import main as run
    elif command == "preflight":
        from .preflight import main as run
    elif command == "choose":
        from .choose import main as run
    else:
        sys.exit(USAGE)
    code = run(arguments)
    with contextlib.suppress(OSError):  # a full disk does not change the exit code
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
