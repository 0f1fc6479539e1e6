"""Where a run lives: its directory, and the SLURM that its commands speak with."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal, Protocol

from llmlaunch.errors import UserError
from llmlaunch.launchers.run_environment import VariableFilter

Reached = Literal["yes", "perhaps", "no"]


class Place(Protocol):
    """This machine, or a host behind ssh. `run_dir` is the run directory's path on this machine in both cases."""

    @property
    def host(self) -> str | None:
        """The host's name for ssh; None of this machine."""
        ...

    @property
    def user_id(self) -> int:
        """Who this person is there."""
        ...

    def directory(self, run_dir: Path) -> Path:
        """The path of the run directory there."""
        ...

    def deliver(self, run_dir: Path) -> None:
        """Bring the run directory there, whole or not at all, unless it is there. Raises UserError."""
        ...

    def start(
        self, argv: Sequence[str], variables: VariableFilter, run_dir: Path | None, reads: bool, errors: IO[bytes]
    ) -> subprocess.Popen[str]:
        """Start a command there, in the run directory where one is named; `reads`: from a pipe, else from nothing. What
        it says on stderr goes to the file `errors`.

        Raises UserError where there is no such command, as far as that is known at once.
        """
        ...

    def share(self, run_dir: Path, name: str) -> None:
        """Bring a small file there that was written since. Whoever looks there may miss it: nothing is raised."""
        ...

    def heard(self, code: int, errors: str) -> tuple[Reached, str]:
        """Return whether a command that ended with `code` was started there at all, and its words on stderr."""
        ...


@dataclass(frozen=True)
class _ThisMachine:
    host = None

    @property
    def user_id(self) -> int:
        return os.getuid()

    def directory(self, run_dir: Path) -> Path:
        return run_dir

    def deliver(self, run_dir: Path) -> None:
        return

    def start(
        self, argv: Sequence[str], variables: VariableFilter, run_dir: Path | None, reads: bool, errors: IO[bytes]
    ) -> subprocess.Popen[str]:
        try:
            return subprocess.Popen(
                argv,
                cwd=run_dir,
                env=variables.of(os.environ),
                stdin=subprocess.PIPE if reads else subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                encoding="utf-8",
                errors="replace",
            )
        except OSError as error:
            raise UserError(
                f"{argv[0]} cannot be run ({error.strerror}); is this a SLURM machine? --local runs the job here"
            ) from error

    def share(self, run_dir: Path, name: str) -> None:
        return

    def heard(self, code: int, errors: str) -> tuple[Reached, str]:
        return "yes", errors


THIS_MACHINE: Place = _ThisMachine()
