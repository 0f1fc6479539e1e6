"""Installs what traces a rank: a CPU build of torch, Megatron core and TransformerEngine, in an environment of its own.

    python -m llmlaunch.rehearsal.install FOLDER

The same for a checkout (`make install-frameworks`) and for a person who has llmlaunch alone. Standard library only, so
that it runs before anything else is installed.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import distributions
from pathlib import Path

from llmlaunch.errors import UserError
from llmlaunch.tracing import FAKE_CUDA, REQUIREMENTS, REQUIREMENTS_NO_DEPS
from llmlaunch.user_data import user_data

MARK = ".installed"  # the last file an installation writes
# what a trace runs, as their packages are called
TRACED = ("torch", *re.findall(r"(?m)^([\w-]+)==", REQUIREMENTS_NO_DEPS.read_text("utf-8")))
TORCH_VARIABLE = "LLMLAUNCH_TRACED_TORCH"
# What pip is told to install torch; its default wheel for Linux is built for CUDA and cannot trace.
CPU_TORCH = "--index-url https://download.pytorch.org/whl/cpu torch==2.13.0"
OLDEST = (3, 11)  # the oldest Python that the traced versions import under
CANDIDATES = ("python3.12", "python3.13", "python3.11", "python3")
COMPILER = "c++"
SHOWN_LINES = 15
Say = Callable[[str], None]


def install(folder: Path, say: Say, torch_words: Sequence[str] | None = None, *, mark: bool = True) -> None:
    """Make the environment in `folder`, anew if there is one. It counts as installed once all of it is there; after an
    interruption the same call begins again. `torch_words` are pip's for torch, else those of LLMLAUNCH_TRACED_TORCH,
    else a CPU build. Without `mark` the caller has more to add and marks it.

    Raises:
        UserError: no Python new enough, no C++ compiler, a folder that is no environment or cannot be written, another
            installation under way, or a step that failed, with the last lines it said.
    """
    python, compiler = _python(), shutil.which(COMPILER)
    if compiler is None:
        raise UserError(
            f"no C++ compiler ({COMPILER}) on PATH: tracing compiles a stand-in for CUDA of 50 lines; install one "
            "(Debian and Ubuntu: apt-get install g++; elsewhere gcc-c++, or module load gcc) and try again"
        )
    pip_arguments = torch_words if torch_words is not None else shlex.split(os.environ.get(TORCH_VARIABLE) or CPU_TORCH)
    with _alone(folder):
        _check_place(folder)
        (folder / MARK).unlink(missing_ok=True)
        say(f"installing into {folder}: about 1 GB, minutes")
        inside = [str(python_of(folder)), "-m", "pip", "install", "--disable-pip-version-check", "--quiet"]
        apart = ["--no-deps", "--ignore-requires-python"]
        for what, command in (
            (f"an environment of {python}", [python, "-m", "venv", "--clear", str(folder)]),
            ("torch", [*inside, *pip_arguments]),
            ("what the frameworks import", [*inside, "-r", str(REQUIREMENTS)]),
            ("Megatron core and TransformerEngine", [*inside, *apart, "-r", str(REQUIREMENTS_NO_DEPS)]),
            ("the stand-in for CUDA", [str(python_of(folder)), str(FAKE_CUDA)]),
        ):
            say(f"  {what}")
            _run(what, command)
        if mark:
            (folder / MARK).touch()
            say(f"installed: {folder}")


def _python() -> str:
    """This interpreter, or one on PATH where it is too old. Raises UserError."""
    if sys.version_info >= OLDEST:
        return sys.executable
    check = f"import sys, ensurepip; sys.exit(sys.version_info < {OLDEST})"
    for name in CANDIDATES:
        path = shutil.which(name)
        if path and subprocess.run([path, "-c", check], capture_output=True, check=False).returncode == 0:
            return path
    here = ".".join(map(str, sys.version_info[:2]))
    raise UserError(
        f"tracing wants Python {OLDEST[0]}.{OLDEST[1]} or newer, with venv; llmlaunch runs under {here} and PATH has "
        "no newer one: install one (python3.12, python3.12-venv), or load the module of one, and try again"
    )


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """No two installations into one folder at once. The lock ends with the process that holds it."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = folder.with_name(f".{folder.name}.lock").open("w")
    except OSError as failure:
        raise UserError(f"cannot write to {folder.parent}: {failure.strerror}") from failure
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"another installation into {folder} is under way: wait for it, or end it") from None
        except OSError:
            pass  # a file system without locks: better unguarded than never
        yield


def _check_place(folder: Path) -> None:
    """`venv --clear` empties the folder: it must be ours to empty."""
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is not a folder")
    if folder.is_dir() and any(folder.iterdir()) and not (folder / "pyvenv.cfg").is_file():
        raise UserError(f"{folder} holds something else than a Python environment: it would be lost; name another one")


def _run(what: str, command: Sequence[str]) -> None:
    """Raises UserError with the last lines the command said."""
    plain = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    try:
        ended = subprocess.run(
            command,
            env=plain,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            check=False,
        )
    except OSError as failure:
        raise UserError(f"installing {what} failed: {command[0]}: {failure.strerror}") from failure
    if ended.returncode:
        last = "\n".join(f"  {line}" for line in ended.stdout.strip().splitlines()[-SHOWN_LINES:])
        raise UserError(
            f"installing {what} failed (exit {ended.returncode}); its last lines:\n{last}\n"
            f"Try again when that is mended; where torch comes from somewhere else, {TORCH_VARIABLE} holds pip's words "
            f'for it, e.g. {TORCH_VARIABLE}="{CPU_TORCH}"'
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", help="where to; a folder of the user's data unless said")
    parser.add_argument("--unmarked", action="store_true", help="more follows: the caller marks it as installed")
    options = parser.parse_args()
    try:
        install(
            (options.folder or user_folder()).absolute(),
            lambda line: print(line, flush=True),
            mark=not options.unmarked,
        )
    except UserError as mistake:
        sys.exit(f"error: {mistake}")


def user_folder(environment: Mapping[str, str] | None = None) -> Path:
    """`$XDG_DATA_HOME/llmlaunch/frameworks`, else `~/.local/share/llmlaunch/frameworks`: for people without a checkout.

    Raises UserError where there is no home directory.
    """
    data = user_data(os.environ if environment is None else environment)
    if data is None:
        raise UserError(
            "no place for the frameworks a rank is traced with: neither HOME nor XDG_DATA_HOME is an absolute path"
        )
    return data / "frameworks"


def is_installed(folder: Path) -> bool:
    """All of it, to the end: an installation that was interrupted does not count."""
    return (folder / MARK).is_file() and python_of(folder).exists()


def python_of(folder: Path) -> Path:
    """The interpreter of the environment in this folder."""
    return folder / "bin" / "python"


def versions_in(folder: Path, packages: Sequence[str] = TRACED) -> dict[str, str]:
    """Return the installed versions of the packages that are traced, by package; no process is started."""
    places = [str(path) for path in folder.glob("lib/python3*/site-packages")]
    versions = {
        _plain(distribution.metadata["Name"] or ""): distribution.version for distribution in distributions(path=places)
    }
    return {name: versions[_plain(name)] for name in packages if _plain(name) in versions}


def _plain(name: str) -> str:
    return name.lower().replace("_", "-")


if __name__ == "__main__":
    main()
