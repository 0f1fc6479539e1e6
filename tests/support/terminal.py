"""A real terminal for tests: a tmux server of its own, with a shell in it."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.node_rig import until

PACKAGES = Path(__file__).resolve().parents[2] / "wrapper"


class Terminal:
    """What a person sees, and types."""

    def __init__(self, directory: Path, columns: int = 100, rows: int = 30, **variables: str) -> None:
        program = shutil.which("tmux")
        assert program, "no terminal for the test: apt-get install tmux"
        self._tmux = [program, "-S", str(directory / "tmux"), "-f", "/dev/null"]
        environment = {**os.environ, "PYTHONPATH": str(PACKAGES), "LC_ALL": "C.UTF-8", "PS1": "$ "}
        for name in ("TMUX", "NO_COLOR", "COLUMNS", "LINES"):
            environment.pop(name, None)
        environment.update(variables)
        size = ("-x", str(columns), "-y", str(rows))
        shell = ("new-session", "-d", *size, "bash", "--norc", "--noprofile")
        subprocess.run([*self._tmux, *shell], env=environment, check=True, timeout=120)

    def command(self, *arguments: str) -> str:
        return subprocess.run([*self._tmux, *arguments], capture_output=True, text=True, check=True, timeout=120).stdout

    def type(self, line: str) -> None:
        self.command("send-keys", "-l", line)
        self.command("send-keys", "Enter")

    def llmlaunch(self, *arguments: object, before: str = "") -> None:
        """Type the command, and have its exit code said after it."""
        line = shlex.join([sys.executable, "-m", "llmlaunch", *map(str, arguments)])
        self.type(f"{before} {line}; echo code-$?".strip())

    def press(self, key: str) -> None:
        self.command("send-keys", key)

    def resize(self, columns: int, rows: int) -> None:
        self.command("resize-window", "-x", str(columns), "-y", str(rows))

    def text(self, *options: str) -> str:
        return self.command("capture-pane", "-p", *options)

    def until(self, text: str) -> str:
        return str(until(lambda: text in (shown := self.text()) and shown, f"{text!r} on the terminal"))

    def whole(self) -> bool:
        """Neither the other screen is shown nor the cursor hidden."""
        return self.command("display-message", "-p", "#{alternate_on} #{cursor_flag}").split() == ["0", "1"]

    def close(self) -> None:
        subprocess.run([*self._tmux, "kill-server"], check=False, capture_output=True, timeout=120)


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    opened = Terminal(tmp_path)
    yield opened
    opened.close()
