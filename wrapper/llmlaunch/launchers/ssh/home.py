"""Where a run lives that was submitted from another machine: `host.json` in its directory here, written before anything
is sent; and that host as a place (`launchers/place.py`)."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import subprocess
import tarfile
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from llmlaunch.errors import UserError
from llmlaunch.launchers.bounded_answer import AnswerTooLong, bounded_answer
from llmlaunch.launchers.place import Reached
from llmlaunch.launchers.run_environment import VariableFilter
from llmlaunch.launchers.run_files import is_foreign
from llmlaunch.launchers.ssh.connection import ENDLESS, Connection, is_ssh_host, no_ssh, text_of
from llmlaunch.rundir import file_names
from llmlaunch.rundir.files import read_object, replace_json
from llmlaunch.rundir.regular_files import read_bytes
from llmlaunch.rundir.values import is_run_id, to_type

_SEND_SECONDS = 1800.0
_SHARE_SECONDS = 30.0
_PATH = re.compile(r"/[^\x00-\x1f\x7f]{0,4000}")
_STAYS_HERE = (file_names.HOME, file_names.SUBMITTING, file_names.SUBMISSION, file_names.REFUSED)
_FULL = ("No space left", "Disk quota exceeded", "quota")

# A folder of its own beside the run directory, renamed when all of it is there. A stream that was cut is none: gzip
# tells. What an earlier try left is removed; the run's id is in its name.
_UNPACK = (
    'umask 077; runs=$1 id=$2; mkdir -p -- "$runs" && cd -- "$runs" || exit 1; '
    'if [ -d "$id" ]; then cat >/dev/null; else rm -rf -- ".$id".*; new=.$id.$$; '
    'trap \'rm -rf -- "$new"\' EXIT; mkdir -- "$new" && tar -xzf - --no-same-owner -C "$new" && '
    '[ -f "$new/job.sbatch" ] && '
    'mv -T -- "$new" "$id" || exit 1; fi; cd -- "$id" && pwd -P'
)


@dataclass(frozen=True)
class Home:
    """The run directory's path on a host, and who the person is there."""

    host: str
    directory: str
    user_id: int


def write_home(run_dir: Path, home: Home) -> None:
    """Write down where the run lives. Raises UserError where that cannot be written."""
    try:
        replace_json(run_dir / file_names.HOME, {"schema": 1, **vars(home)})
    except OSError as error:
        raise UserError(f"{run_dir}: cannot write into it: {error.strerror}; nothing was submitted") from error


def home_of(run_dir: Path) -> Home | None:
    """Return where a run lives; None of one that lives on this machine, and of another user's directory, on whose word
    no host is called. Raises UserError where the file is damaged."""
    path = run_dir / file_names.HOME
    if not os.path.lexists(path) or is_foreign(run_dir):
        return None
    record = read_object(path) or {}
    host, directory, user_id = (record.get(name) for name in ("host", "directory", "user_id"))
    whole = is_ssh_host(host) and isinstance(directory, str) and _PATH.fullmatch(directory)
    if not whole or type(user_id) is not int or user_id < 0:
        raise UserError(f"{path}: damaged: it names no host, no absolute path or no user; its job is in {run_dir}")
    return Home(str(host), str(directory), user_id)


def change_there(run_dir: Path, body: str, *words: str) -> None:
    """Run a line of bash in the run's directory on its host. Raises UserError where it fails, or is not reached."""
    home = home_of(run_dir)
    if home is None:
        return
    reply = Connection(home.host).run(f'cd -- "$1" && shift && {{ {body}; }}', home.directory, *words)
    if reply.code != 0:
        raise UserError(f"{home.host}: {home.directory}: {reply.words.strip()}; nothing was submitted")


@dataclass(frozen=True)
class SshPlace:
    """A host as the place of runs (`launchers/place.py`)."""

    host: str
    user_id: int

    def directory(self, run_dir: Path) -> Path:
        home = home_of(run_dir)
        return run_dir if home is None else Path(home.directory)

    def deliver(self, run_dir: Path) -> None:
        home = home_of(run_dir)
        assert home is not None
        place = Path(home.directory)
        directory = _send(Connection(self.host), run_dir, str(place.parent), place.name)
        if directory != home.directory:  # links are resolved, as SLURM shows the folder a job works in
            write_home(run_dir, Home(self.host, directory, self.user_id))

    def share(self, run_dir: Path, name: str) -> None:
        body = 'cd -- "$1" && umask 077 && cat >".$2.new" && mv -- ".$2.new" "$2"'
        with contextlib.suppress(OSError, UserError, subprocess.TimeoutExpired):
            process = Connection(self.host).start(body, str(self.directory(run_dir)), name, stderr=subprocess.DEVNULL)
            try:
                process.communicate(read_bytes(run_dir / name), timeout=_SHARE_SECONDS)
            finally:
                process.kill()

    def start(
        self, argv: Sequence[str], variables: VariableFilter, run_dir: Path | None, reads: bool, errors: IO[bytes]
    ) -> subprocess.Popen[str]:
        enter = "" if run_dir is None else f"cd -- {shlex.quote(str(self.directory(run_dir)))} && "
        body = f'{_without(variables)} {enter}exec "$@"'
        try:
            return subprocess.Popen(
                Connection(self.host).argv(body, *argv),
                stdin=subprocess.PIPE if reads else subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                encoding="utf-8",
                errors="replace",
            )
        except OSError as error:
            raise no_ssh(error) from error

    def heard(self, code: int, errors: str) -> tuple[Reached, str]:
        return Connection(self.host).heard(code, errors)


def _without(variables: VariableFilter) -> str:
    """Return the bash that leaves variables out as `VariableFilter.of` does. Times of answers are shown in this
    machine's zone, in which they are read."""
    names = "; ".join(f"compgen -e {prefix}" for prefix in variables.prefixes)
    exceptions = f"{'|'.join(variables.exceptions)}) ;; " if variables.exceptions else ""
    text = f'for name in $({names}); do case $name in {exceptions}*) unset "$name";; esac; done; '
    text += f"unset {' '.join(variables.names)}; " if variables.names else ""
    return text if variables.submits else f"{text}export TZ={_time_zone()};"


def _time_zone() -> str:
    """Return this machine's offset from UTC now, as POSIX writes it: west is positive."""
    minutes = time.localtime().tm_gmtoff // 60
    hours, rest = divmod(abs(minutes), 60)
    return f"HERE{'-' if minutes >= 0 else '+'}{hours:02}:{rest:02}"


def _send(connection: Connection, run_dir: Path, runs: str, run_id: str) -> str:
    """Send the run directory in one stream; return its path there, without links. Where it is there already, nothing is
    sent over it. Raises UserError where it is not there afterwards."""
    assert is_run_id(run_id)
    with tempfile.TemporaryFile() as errors:
        process = connection.start(_UNPACK, runs, run_id, stderr=errors)
        assert process.stdin is not None
        end = threading.Timer(_SEND_SECONDS, process.kill)  # a host that reads no further would be written to for ever
        end.daemon = True
        end.start()
        try:
            with contextlib.suppress(BrokenPipeError), process.stdin:
                _pack(run_dir, process.stdin)
            process.stdin = None  # closed: communicate would flush it
            output = bounded_answer(process, errors, _SEND_SECONDS)
            reply = connection.reply(process.returncode, output, text_of(errors))
        except OSError as error:
            raise UserError(f"{run_dir}: cannot be read: {error.strerror}; nothing was submitted") from error
        except subprocess.TimeoutExpired:
            raise UserError(connection.trouble("the run directory was not taken in time")) from None
        except AnswerTooLong:
            raise UserError(connection.trouble(ENDLESS)) from None
        except UserError as lost:
            again = f"the run directory is kept, and {to_type('resume', run_dir)} sends it again"
            raise UserError(f"{lost}. Nothing was submitted; {again}") from None
        finally:
            end.cancel()
            process.kill()
    directory = reply.output.strip()
    if reply.code == 0 and _PATH.fullmatch(directory):
        return directory
    complaint = "; ".join(reply.words.split("\n")[:3]).strip("; ")
    room = (
        "make room there, or name a folder with room (--on HOST:FOLDER)"
        if any(sign in complaint for sign in _FULL)
        else ""
    )
    raise UserError(
        f"{connection.host}: the run directory could not be written below {runs}: {complaint}; nothing was submitted. "
        f"{room or 'Name a folder of yours (--on HOST:FOLDER)'}"
    )


def _pack(run_dir: Path, stream: object) -> None:
    def plain(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
        member.uid = member.gid = 0
        member.uname = member.gname = ""
        return None if member.name.removeprefix("./") in _STAYS_HERE else member

    with tarfile.open(fileobj=stream, mode="w|gz") as archive:  # type: ignore[call-overload]
        archive.add(run_dir, ".", filter=plain)
