"""Someone who uses a cluster: root or a normal user, with a home of his own."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from one_machine import Cluster, new_cluster, throw_away

from support.command_line import data_folders
from support.forked_commands import run_forked
from support.soak import SOAK

SOURCES = Path(__file__).resolve().parents[2] / "wrapper"
NORMAL_USER = 34  # `backup`, whom every Debian has: 65534 cannot be SlurmUser in 26.05
SECONDS = 600
BOTH_ENDS = ["root-enforced", "user-default"]  # who, and the site's limits
LIVED_ON = BOTH_ENDS if SOAK else BOTH_ENDS[:1]  # where whole lives of jobs are tested
# What a preflight tries with torch is taken for done: importing torch takes four seconds of each node.
TRIED = """case "$*" in *trainer/preflight.py*) echo '{"stage": "reduced"}'; exit;; esac"""
SMALL_DISK = "small"
SMALL_DISK_BYTES = 8 << 20


def as_normal_user() -> tuple[str, ...]:
    """What makes a command a normal user's; nothing where the tests are run by one.

    The checkout and its virtual environment may lie where only root may look; so he may read everything (no more).
    """
    if os.getuid() != 0:
        return ()
    reading = ("--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search")
    return ("setpriv", f"--reuid={NORMAL_USER}", f"--regid={NORMAL_USER}", "--clear-groups", *reading)


@dataclass(frozen=True)
class Person:
    cluster: Cluster
    home: Path
    prefix: Sequence[str] = ()
    site: str = ""  # one of BOTH_ENDS, where the cluster is his own

    @property
    def is_root(self) -> bool:
        return os.getuid() == 0 and not self.prefix

    @property
    def environment(self) -> dict[str, str]:
        return {
            **self.cluster.environment,
            **data_folders(self.home),
            "HOME": str(self.home),
            "XDG_CONFIG_HOME": str(self.home / "config"),
            "PYTHONPATH": str(SOURCES),
            "PYTHONDONTWRITEBYTECODE": "1",
        }

    def call(self, *argv: str, cwd: Path | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
        """A command of his, whatever its exit code."""
        return subprocess.run(
            [*self.prefix, *argv], cwd=cwd or self.home, env={**self.environment, **variables}, capture_output=True,
            text=True, timeout=SECONDS, check=False,
        )  # fmt: skip

    def ask(self, *argv: str, cwd: Path | None = None) -> str:
        """A command of his, which must succeed; what it printed."""
        done = self.call(*argv, cwd=cwd)
        if done.returncode != 0:
            pytest.fail(f"{' '.join(argv)}: exit code {done.returncode}: {done.stderr}{done.stdout}")
        return done.stdout

    def llmlaunch(
        self, *words: str | Path, code: int | None = None, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """`llmlaunch WORDS`; with `code`, it must end with that exit code."""
        typed = tuple(map(str, words))
        if self.prefix:
            done = self.call(sys.executable, "-m", "llmlaunch", *typed, **variables)
        else:
            done = run_forked(typed, self.home, {**self.environment, **variables}, SECONDS)
        assert code is None or done.returncode == code, done.stdout + done.stderr
        return done

    def json(self, *words: str | Path) -> Any:
        """`llmlaunch WORDS --json`, which must succeed."""
        return json.loads(self.llmlaunch(*words, "--json", code=0).stdout)

    def measurements(self, *words: str) -> list[dict[str, Any]]:
        """What `llmlaunch measurements list WORDS` tells of his store."""
        return list(self.json("measurements", "list", *words)["measurements"])

    @property
    def python(self) -> str:
        """The tests' own interpreter, by a name in his home: shells and Python ask access(2) whether he may run a path,
        which does not know that he may read everything."""
        return str(self.home / "python")

    def folder(self, name: str) -> Path:
        """A new folder of his in his home."""
        self.ask("mkdir", name)
        return self.home / name

    def give(self, file: Path) -> Path:
        """A copy of `file` in his home."""
        return Path(shutil.copy(file, self.home / file.name))


@contextmanager
def small_disk(cluster: Cluster, prefix: Sequence[str]) -> Iterator[None]:
    """A file system of 8 MiB in the home of who is about to start `cluster`: its nodes see only what is mounted before
    them. Nothing where the tests are not run by root."""
    place = cluster.directory.parent / "home" / SMALL_DISK
    subprocess.run([*prefix, "mkdir", "-p", place], check=True)
    if os.getuid() != 0:
        yield
        return
    options = f"size={SMALL_DISK_BYTES},uid={NORMAL_USER if prefix else 0},mode=755"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", place], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", place], check=True)


def at_home(cluster: Cluster, home: Path, prefix: Sequence[str] = ()) -> Person:
    """Someone with this home, which is made, who uses the cluster; `prefix` is what started it."""
    subprocess.run([*prefix, "mkdir", "-p", home], check=True)
    person = Person(cluster, home, prefix)
    interpreter(Path(person.python))
    return person


def interpreter(path: Path, python: str = sys.executable, first: str = "") -> Path:
    """Write a file that is `python` by another name, and runs a line of shell before it."""
    path.write_text(f'#!/bin/sh\n{first}\nexec {shlex.quote(python)} "$@"\n')
    path.chmod(0o755)
    return path


@contextmanager
def person_with_a_cluster(site: str, nodes: int, **settings: str) -> Iterator[Person]:
    """`site` is one of BOTH_ENDS, `settings` are cluster.sh's."""
    who, limits = site.split("-")
    prefix = as_normal_user() if who == "user" else ()
    settings = {"CPUS": "4", "LIMITS": limits, "GRACE_SECONDS": "20", **settings}
    cluster = replace(new_cluster(settings), prefix=prefix)
    # The checkout may lie where only root may look.
    scripts = shutil.copytree(cluster.script.parent, cluster.directory.parent / "scripts")
    cluster = replace(cluster, script=scripts / "cluster.sh")
    try:
        with small_disk(cluster, prefix):
            cluster.do("up", str(nodes))
            yield replace(at_home(cluster, cluster.directory.parent / "home", prefix), site=site)
            cluster.do("down")
    finally:
        throw_away(cluster)
