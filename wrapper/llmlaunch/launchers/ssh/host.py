"""llmlaunch on a host, by the person's own ssh.

ssh hands one text to the person's login shell there, whichever that is: `exec sh -c '...'` with constant words on one
line, and everything that is a person's as base64, in which no shell finds anything to obey. That sh starts bash as a
login shell, so that PATH is what the person has where they type; what its profile prints goes nowhere.
"""

from __future__ import annotations

import base64
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from llmlaunch.errors import UserError
from llmlaunch.launchers.ssh import ON_VARIABLE
from llmlaunch.rundir.values import to_type

_ENTER = (
    "command -v bash >/dev/null || exit 127; exec 3>&1 4<&0 5>&2 >/dev/null </dev/null 2>/dev/null; "
    'body=$1; shift; exec bash -lc "$body" llmlaunch "$@"'
)
_BEGIN = (
    "exec >&3 <&4 2>&5 3>&- 4<&- 5>&-; command -v llmlaunch >/dev/null || exit 127; words=(); "
    'while IFS= read -r -d "" word; do words+=("$word"); done < <(printf %s "$1" | base64 -d); '
    'set -- "${words[@]}"; cd -- "$HOME" || exit; folder=$1; shift; '
)
_TAKE = (
    'umask 077; mkdir -p -- "$folder" && cd -- "$folder" && { [ $# = 0 ] || rm -f -- "$@"; } && '
    "exec tar -xzf - --no-same-owner"
)
_RUN = f'cd -- "$folder" 2>/dev/null; export {ON_VARIABLE}="$1"; [ -z "$2" ] || export COLUMNS="$2"; shift 2; '
_ON_TERMINAL = 'exec llmlaunch "$@"'
# Where there is no terminal the end of stdin stands for Ctrl-C, which a job of its own (set -m) does not ignore.
_IN_PIPES = (
    'exec 4<&0; set -m; llmlaunch "$@" </dev/null 4<&- & job=$(jobs -p); '
    "{ read -r -n 1 <&4; kill -INT -- -$job; } >/dev/null 2>&1 & "
    "exec 2>/dev/null; wait $job; code=$?; kill %2; exit $code"
)

_SEND_SECONDS = 1800.0
_ABSENT, _NOT_CONNECTED = 127, 255  # the latter is ssh's own exit code
_HOST = re.compile(r"[A-Za-z0-9_][\w.@%+-]*|([A-Za-z0-9_][\w.+-]*@)?\[[0-9A-Fa-f:.]+(%\w+)?\]", re.ASCII)
_TARGET = re.compile(r"((?:[^:\[\]]*@)?(?:\[[^\]]*\]|[^:\[\]]*))(?::(.*))?", re.DOTALL)


@dataclass(frozen=True)
class Host:
    """`name` is what ssh takes, HOST or USER@HOST. Commands work in `folder`, which begins at the home there unless it
    is absolute. `typed` is both as the person wrote them."""

    name: str
    folder: str
    typed: str

    def send(self, files: Mapping[str, Path], absent: Sequence[str] = ()) -> None:
        """Bring files to their places below the folder, whatever is there, and remove what is to be `absent`. Raises
        UserError where they do not arrive."""
        with tempfile.TemporaryFile() as packed:
            try:
                _pack(files, packed)
            except OSError as failure:
                raise UserError(f"{failure.filename}: cannot be sent: {failure.strerror}") from failure
            packed.seek(0)
            process = self._start(_TAKE, absent, stdin=packed)
            try:
                code = process.wait(_SEND_SECONDS)
            except subprocess.TimeoutExpired:
                raise UserError(f"{self.name}: did not take the files within {_SEND_SECONDS:.0f} s") from None
            finally:
                process.kill()
        self._refuse(code)
        if code != 0:
            raise UserError(
                f"{self.name}: the files could not be written to {self.folder} there; make room, or name a folder of "
                "yours (--on HOST:FOLDER)"
            )

    def run(self, words: Sequence[str], output: IO[bytes] | None = None) -> int:
        """Run `llmlaunch WORDS` in the folder and return its exit code. What it writes comes as it is written, its
        stdout to `output` where that is given; Ctrl-C reaches it. Raises UserError where it was not run to its end."""
        sys.stdout.flush()
        if output is None and _has_terminal():
            code = self._start(_RUN + _ON_TERMINAL, [self.typed, "", *words], terminal="-t").wait()
        else:
            columns = str(shutil.get_terminal_size().columns) if os.isatty(1) else ""
            words = [self.typed, columns, *words]
            code = _interruptible(self._start(_RUN + _IN_PIPES, words, stdin=subprocess.PIPE, stdout=output))
        self._refuse(code)
        return code

    def _start(
        self, body: str, words: Sequence[str], *, terminal: str = "-T", **streams: Any
    ) -> subprocess.Popen[bytes]:
        """Start `body`, a line of bash, with `words` as $1, $2 ..."""
        folder = self.folder if self.folder.startswith("/") else f"./{self.folder}"
        packed = b"".join(os.fsencode(word) + b"\0" for word in (folder, *words))
        text = " ".join(map(shlex.quote, ("sh", "-c", _ENTER, "sh", _BEGIN + body, base64.b64encode(packed).decode())))
        # None of the tunnels of the person's configuration, and no command of its own; nobody can answer a question
        # where there is no terminal, and Ctrl-C is not ssh's.
        options = [terminal, "-o", "ClearAllForwardings=yes", "-o", "RemoteCommand=none", "-o", "LogLevel=ERROR"]
        asks = _has_terminal()
        options += [] if asks else ["-o", "BatchMode=yes"]
        argv = ["ssh", *options, "--", self.name.replace("[", "").replace("]", ""), f"exec {text}"]
        try:
            return subprocess.Popen(argv, start_new_session=terminal == "-T" and not asks, **streams)
        except OSError as failure:
            raise UserError(f"ssh cannot be run here ({failure.strerror}); install OpenSSH's client") from failure

    def _refuse(self, code: int) -> None:
        """Raise UserError for an exit code which says that nothing was run there, or not to its end."""
        if code == _ABSENT:
            raise UserError(
                f"{self.name}: llmlaunch is not on the PATH of a login shell there; install it there (in a checkout: "
                "python3 -m venv ~/llmlaunch && ~/llmlaunch/bin/pip install .) and put ~/llmlaunch/bin on the PATH in "
                "~/.bash_profile"
            )
        if code == _NOT_CONNECTED:
            by_hand = shlex.join(["ssh", self.name, "true"])
            raise UserError(
                f"{self.name} is not reached, or the connection was lost; try again when `{by_hand}` works. A job that "
                f"was submitted goes on: {to_type('status', '--on', self.typed)}"
            )


def host_at(typed: str, folder: str) -> Host:
    """Return what HOST or HOST:FOLDER names, with `folder` where it names none. Raises UserError for what ssh would not
    take for a host."""
    match = _TARGET.fullmatch(typed)
    name, named = (match[1], match[2] or "") if match else (typed, "")
    if len(name) > 255 or not _HOST.fullmatch(name):
        raise UserError(
            f"--on {typed}: {name!r} is no host as ssh takes it; write --on HOST or --on HOST:FOLDER, with a HOST of "
            "your ~/.ssh/config or USER@MACHINE"
        )
    if "\0" in named:
        raise UserError(f"--on {typed!r}: a folder's name holds no NUL; name another")
    return Host(name, "." if named == "~" else named.removeprefix("~/") or folder, typed)


def _has_terminal() -> bool:
    return all(map(os.isatty, (0, 1, 2)))


def _pack(files: Mapping[str, Path], packed: IO[bytes]) -> None:
    def of_nobody(member: tarfile.TarInfo) -> tarfile.TarInfo:
        member.uid = member.gid = 0
        member.uname = member.gname = ""
        return member

    with tarfile.open(fileobj=packed, mode="w:gz", compresslevel=1) as archive:
        for name, path in sorted(files.items()):
            archive.add(path, name, recursive=False, filter=of_nobody)


def _interruptible(process: subprocess.Popen[bytes]) -> int:
    """Wait for a command there, whose stdin is closed where Ctrl-C is pressed here."""
    assert process.stdin is not None
    try:
        with process.stdin:
            return process.wait()
    except KeyboardInterrupt:
        return process.wait()
    finally:
        process.kill()
