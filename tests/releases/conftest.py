"""Newer SLURM and real Apptainer: other Debian releases, unpacked from their packages and entered, with the project's
own tests run inside. Each release is unpacked when the first test asks for it, and removed when the session is over."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


@dataclass(frozen=True)
class Release:
    """A Debian release in a folder."""

    suite: str
    root: Path
    versions: str
    """What the mirror served, as `package<TAB>version` lines."""

    def test(self, *words: str, places: tuple[str, ...] = (), **environment: str) -> str:
        """`pytest WORDS` in this release, with `places` of this machine beside the project's; what it printed. Fails
        with that and the versions unless every test passed."""
        every = ":".join(dict.fromkeys([*project_places(), *places]))
        environment = {**os.environ, **environment, "LLMLAUNCH_TEST_PLACES": ":".join(project_places())}
        done = subprocess.run(
            ["bash", str(HERE / "enter.sh"), str(self.root), every, sys.executable, "-m", "pytest", "-q", *words],
            cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=1100,
        )  # fmt: skip
        if done.returncode != 0:
            pytest.fail(f"Debian {self.suite} served\n{self.versions}\n{done.stdout[-20000:]}{done.stderr[-4000:]}")
        return done.stdout


def project_places() -> list[str]:
    """What a release needs of this machine: the checkout, its virtual environment, and the interpreter behind it."""
    places = [str(ROOT), sys.prefix]
    if sys.base_prefix != "/usr":
        return [*places, sys.base_prefix]
    # Debian's own Python shares its prefix with all else: only its program and its library.
    return [*places, os.path.realpath(sys.executable), sysconfig.get_path("stdlib")]


@pytest.fixture(scope="session")
def release() -> Iterator[Callable[..., Release]]:
    """`release(SUITE, PACKAGE...)`, unpacked once. Directly below /tmp: the sockets of a cluster have short paths."""
    if os.getuid() != 0:
        pytest.fail("entering another release takes root (unshare, pivot_root)")
    folder = Path("/tmp") / f"llmlaunch-releases-{os.getpid()}"
    unpacked: dict[str, Release] = {}

    def unpack(suite: str, *packages: str) -> Release:
        if suite not in unpacked:
            place = folder / suite
            done = subprocess.run(
                ["bash", str(HERE / "unpack.sh"), str(place), suite, *packages],
                capture_output=True, text=True, check=False, timeout=600,
            )  # fmt: skip
            if done.returncode != 0:
                pytest.fail(f"Debian {suite} could not be unpacked: {done.stdout}{done.stderr}")
            if sys.base_prefix == "/usr":  # the virtual environment's python3 is a link to this machine's
                interpreter = place / "root" / "usr" / "bin" / "python3"
                interpreter.unlink(missing_ok=True)
                interpreter.symlink_to(os.path.realpath(sys.executable))
            unpacked[suite] = Release(suite, place / "root", done.stdout)
        return unpacked[suite]

    yield unpack
    shutil.rmtree(folder, ignore_errors=True)
