"""Other Debian releases beside this machine's own: unpacked from their packages once, entered by each command.

    python tests/releases/debian.py SUITE COMMAND...

runs a command, such as `python -m pytest -m slurm`, with that release's SLURM.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
CACHE = Path(os.environ.get("LLMLAUNCH_TEST_RELEASES", Path("~/.cache/llmlaunch-releases").expanduser()))
"""Kept between runs; its roots are large (400 MB each), its packages half of that."""

SYSTEM = (
    *("base-files", "base-passwd", "libc-bin", "dash", "bash", "coreutils", "util-linux", "mount", "procps", "grep"),
    *("sed", "findutils", "mawk", "hostname", "python3", "libssl3t64", "libsqlite3-0", "libreadline8t64"),
    *("libbz2-1.0", "libffi8", "libstdc++6"),
)
"""A small Debian, with what an interpreter of this machine and torch need of it: also the image of containers."""
SLURM = (
    *SYSTEM,
    *("slurmctld", "slurmd", "slurm-client", "munge", "slurmdbd", "slurm-wlm-mysql-plugin", "mariadb-server"),
)
APPTAINER = (*SLURM, "apptainer", "squashfs-tools")


@dataclass(frozen=True)
class Release:
    """A Debian release in a folder."""

    suite: str
    root: Path
    packages: dict[str, str]
    """Name and version of all that was unpacked."""
    as_of: str

    @property
    def slurm(self) -> str:
        """The version of its SLURM, such as `24.11.5`."""
        return self.packages["slurmctld"].partition("-")[0]

    def __str__(self) -> str:
        named = ("slurmctld", "mariadb-server", "apptainer", "libc6")
        versions = ", ".join(f"{name} {self.packages[name]}" for name in named if name in self.packages)
        return f"Debian {self.suite} {self.as_of}: {versions}"

    def command(self, *argv: str, places: tuple[str, ...] = ()) -> list[str]:
        """Words that run `argv` in it, in the folder they are run in: one of `places` or of the project's."""
        every = ":".join(dict.fromkeys([*project_places(), "/tmp", str(CACHE), *places]))
        return ["bash", str(HERE / "enter.sh"), str(self.root), every, *argv]


def unpack(suite: str, name: str, packages: tuple[str, ...]) -> Release:
    """The release with those packages; raises RuntimeError with what was said where it cannot be had."""
    argv = ["bash", str(HERE / "unpack.sh"), str(CACHE), suite, name, *packages]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=900)
    if done.returncode != 0:
        raise RuntimeError(f"Debian {suite} could not be unpacked: {done.stdout[-4000:]}{done.stderr[-4000:]}")
    *lines, as_of = done.stdout.splitlines()
    root = CACHE / suite / name
    if sys.base_prefix == "/usr":  # the virtual environment's python3 is a link to this machine's
        interpreter = root / "usr" / "bin" / "python3"
        interpreter.unlink(missing_ok=True)
        interpreter.symlink_to(os.path.realpath(sys.executable))
    return Release(suite, root, dict(line.split(" ", 1) for line in lines), as_of)  # type: ignore[arg-type]


def project_places() -> list[str]:
    """What a release needs of this machine: the checkout, its virtual environments, and the interpreter behind them."""
    places = [str(ROOT), sys.prefix, os.path.realpath(sys.prefix), str((ROOT / ".venv-frameworks").resolve())]
    if sys.base_prefix != "/usr":
        return [*places, sys.base_prefix]
    # Debian's own Python shares its prefix with all else: only its program and its library.
    return [*places, os.path.realpath(sys.executable), sysconfig.get_path("stdlib")]


@contextmanager
def entered(release: Release, folder: Path) -> Iterator[str]:
    """A program, below `folder`, that runs its words in the release: all of them in one and the same name space of
    mounts, so that a file system which one of them mounts is there for the others."""
    argv = release.command("bash", "-c", "echo entered; exec sleep infinity")
    with subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout is not None
            if not holder.stdout.readline():
                raise RuntimeError(f"{release} cannot be entered, which takes root (unshare, pivot_root)")
            program = folder / f"in-{release.suite}"
            program.write_text(
                "#!/bin/bash\n"
                f'exec nsenter --target {holder.pid} --mount env --chdir "$PWD" LC_ALL=C '
                'PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin "$@"\n'
            )
            program.chmod(0o755)
            yield str(program)
        finally:
            holder.terminate()


if __name__ == "__main__":
    suite, *command = sys.argv[1:]
    release = unpack(suite, "slurm", SLURM)
    print(release, file=sys.stderr)
    sys.exit(subprocess.run(release.command(*command), cwd=ROOT, check=False).returncode)
