"""A newcomer's session: what is typed, in order, and a real terminal of which every screen is a picture."""

from __future__ import annotations

import os
import re
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from support.terminal import Terminal

PATIENCE_SECONDS = 900.0
HOME = "/home/newcomer"  # as long as the folder that stands for it
FOLDERS = (("DATA", ".data"), ("CACHE", ".cache"), ("CONFIG", ".config"))
SLURM = re.compile(r"s(batch|info|run|control|acct|acctmgr|cancel|queue|alloc|stat|prio|hare)$")


@dataclass(frozen=True)
class Step:
    """One line that a newcomer types. `names` is what the screen must tell them to type, look at or change next; one
    that is `long` has more to say than a screen holds; of one that `varies`, the wording hangs on what was measured."""

    name: str
    line: str
    code: int = 0
    names: tuple[str, ...] = ("Next: ",)
    long: bool = False
    varies: bool = False
    makes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Screen:
    """What stands on the terminal when the prompt is back. `lines` are those of the screen; `text` is all that the
    command has written, with lines whole that the terminal had to break."""

    lines: tuple[str, ...]
    text: str
    code: int
    columns: int
    rows: int


STEPS = (
    Step("help", "llmlaunch --help", names=("Next: llmlaunch init",), long=True),
    Step("starters", "llmlaunch init --list", long=True),
    Step(
        "starter",
        "llmlaunch init quickstart",
        names=("llmlaunch check quickstart.yaml",),
        makes=("quickstart.yaml", "llmlaunch.schema.json"),
    ),
    Step("check", "llmlaunch check quickstart.yaml", names=("Next: llmlaunch submit",)),
    Step("wrong-key", "llmlaunch check quickstart.yaml layout.tp=2", 2, ("layout.tensor",)),
    Step("missing-space", "sed s/nodes:.1/nodes:4/ quickstart.yaml | llmlaunch check -", 2, ("nodes: 4",)),
    Step("plan", "llmlaunch plan quickstart.yaml"),
    Step("plan-page", "llmlaunch plan quickstart.yaml --html plan.html", names=("plan.html",)),
    Step("unknown-option", "llmlaunch submit quickstart.yaml --nodes 4", 2, ("nodes=4",)),
    Step("dry-run", "llmlaunch submit quickstart.yaml --dry-run"),
    Step("no-slurm", "llmlaunch submit quickstart.yaml cluster=h100-80gb-x8", 2, ("submit it where there is SLURM",)),
    Step("calibrate-nothing", "llmlaunch calibrate", names=("Next: llmlaunch submit",)),
    Step("no-runs", "llmlaunch runs", names=("llmlaunch submit",)),
    Step("follow", "llmlaunch submit quickstart.yaml --local --follow training.steps=6", long=True, varies=True),
    Step("status", "llmlaunch status last"),
    Step("runs", "llmlaunch runs"),
    Step("report", "llmlaunch report last"),
    Step("report-page", "llmlaunch report last --html run.html", names=("run.html",)),
    Step("collect", "llmlaunch collect"),
    Step("check-again", "llmlaunch check quickstart.yaml", names=("Before", "Next: llmlaunch submit"), varies=True),
    Step("missing-measurements", "llmlaunch accuracy mine.jsonl", 2, ("llmlaunch measurements export",)),
    Step("export", "llmlaunch measurements export mine.jsonl", makes=("mine.jsonl",)),
    Step("accuracy", "llmlaunch accuracy mine.jsonl", long=True, varies=True),
    Step("calibrate", "llmlaunch calibrate"),
)


class Session:
    """A shell in a real terminal, in a home with nothing in it. It is on a machine without SLURM."""

    def __init__(self, home: Path) -> None:
        self._home, self._codes = home, home / ".codes"
        programs = home / ".programs"
        programs.mkdir()
        for folder in reversed(os.environ["PATH"].split(os.pathsep)):
            for program in Path(folder).glob("*"):
                if not SLURM.match(program.name) and program.name != "llmlaunch":
                    (programs / program.name).unlink(missing_ok=True)
                    (programs / program.name).symlink_to(program)
        command = programs / "llmlaunch"
        command.write_text(f"#!{sys.executable}\nfrom llmlaunch.cli.main import main\n\nmain()\n")
        command.chmod(0o755)
        self._terminal = Terminal(
            home,
            HOME=str(home),
            HISTFILE="",  # bash would write it into a home that is gone
            PATH=str(programs),
            PROMPT_COMMAND=f"echo $? >> {self._codes}",
            **{f"XDG_{kind}_HOME": str(home / folder) for kind, folder in FOLDERS},
        )
        self._terminal.type(f"cd {home}")
        self._wait(2)

    def take(self, step: Step, columns: int, rows: int) -> Screen:
        """Type the step's line at the top of an empty screen, and wait until the prompt is back."""
        for name in step.makes:
            (self._home / name).unlink(missing_ok=True)
        self._terminal.resize(columns, rows)
        prompts = len(self._exit_codes())
        self._terminal.type("clear")
        self._wait(prompts + 1)
        self._terminal.command("clear-history")
        self._terminal.type(step.line)
        self._wait(prompts + 2)
        text = self._terminal.text("-J", "-S", "-")
        return Screen(
            tuple(self._anonymous(self._terminal.text()).splitlines()),
            self._anonymous(text).rstrip().removesuffix("\n$"),
            self._exit_codes()[-1],
            columns,
            rows,
        )

    def close(self) -> None:
        self._terminal.close()

    def _wait(self, prompts: int) -> None:
        """A training on a busy machine takes minutes; nothing is judged by how long it took."""
        end = time.monotonic() + PATIENCE_SECONDS
        while len(self._exit_codes()) < prompts:
            assert time.monotonic() < end, self._terminal.text()
            time.sleep(0.05)

    def _exit_codes(self) -> list[int]:
        return [int(code) for code in self._codes.read_text().split()] if self._codes.exists() else []

    def _anonymous(self, text: str) -> str:
        return text.replace(str(self._home), HOME).replace(socket.gethostname(), "laptop")


@contextmanager
def newcomer() -> Iterator[Session]:
    """A session whose home is as long as the one on the pictures, so that lines break alike."""
    home = Path(tempfile.mkdtemp(prefix="n", dir="/tmp"))
    session = Session(home)
    try:
        yield session
    finally:
        session.close()
        shutil.rmtree(home, ignore_errors=True)
