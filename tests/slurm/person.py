"""Someone who uses a cluster: root or a normal user, with a home of his own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from one_machine import Cluster

SOURCES = Path(__file__).resolve().parents[2] / "wrapper"
NOBODY = 65534
SECONDS = 600


def as_normal_user() -> tuple[str, ...]:
    """What makes a command a normal user's; nothing where the tests are run by one.

    The checkout and its virtual environment may lie where only root may look; so he may read everything (no more).
    """
    if os.getuid() != 0:
        return ()
    reading = ("--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search")
    return ("setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", *reading)


@dataclass(frozen=True)
class Person:
    cluster: Cluster
    home: Path
    prefix: Sequence[str] = ()

    @property
    def is_root(self) -> bool:
        return os.getuid() == 0 and not self.prefix

    def call(self, *argv: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        """A command of his, whatever its exit code."""
        environment = {
            **self.cluster.environment,
            "HOME": str(self.home),
            "XDG_DATA_HOME": str(self.home / "data"),
            "XDG_CACHE_HOME": str(self.home / "cache"),
            "XDG_CONFIG_HOME": str(self.home / "config"),
            "PYTHONPATH": str(SOURCES),
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        return subprocess.run(
            [*self.prefix, *argv],
            cwd=cwd or self.home,
            env=environment,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )

    def ask(self, *argv: str, cwd: Path | None = None) -> str:
        """A command of his, which must succeed; what it printed."""
        done = self.call(*argv, cwd=cwd)
        if done.returncode != 0:
            pytest.fail(f"{' '.join(argv)}: exit code {done.returncode}: {done.stderr}{done.stdout}")
        return done.stdout

    def llmlaunch(self, *words: str) -> subprocess.CompletedProcess[str]:
        return self.call(sys.executable, "-m", "llmlaunch", *words)

    def json(self, *words: str) -> Any:
        """`llmlaunch WORDS --json`, which must succeed."""
        return json.loads(self.ask(sys.executable, "-m", "llmlaunch", *words, "--json"))

    def folder(self, name: str) -> Path:
        """A new folder of his in his home."""
        self.ask("mkdir", name)
        return self.home / name

    def give(self, file: Path) -> Path:
        """A copy of `file` in his home."""
        return Path(shutil.copy(file, self.home / file.name))


def at_home(cluster: Cluster, prefix: Sequence[str]) -> Person:
    """The person who has started `cluster` with `prefix`."""
    home = cluster.directory.parent / "home"
    subprocess.run([*prefix, "mkdir", "-p", home], check=True)
    return Person(cluster, home, prefix)
