"""Commands on a host, by the person's own ssh.

ssh hands one text to the person's login shell on the host, whichever that is: `exec sh -c '...' sh WORD...`, every word
quoted, all on one line. That sh starts bash as a login shell, so that PATH is what the person has where they type.
Whatever its profile prints goes nowhere, and what ssh and the host's banner say before the command begins is told
apart by a line on stderr.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import tempfile
from dataclasses import dataclass
from typing import IO

from llmlaunch.errors import UserError
from llmlaunch.launchers.bounded_answer import MOST_ERROR_BYTES, AnswerTooLong, bounded_answer
from llmlaunch.launchers.place import Reached
from llmlaunch.rundir.values import printable, to_type

_BEGINS = "llmlaunch: the command begins"
_ENTER = (
    "command -v bash >/dev/null || { echo bash is not there >&2; exit 127; }; "
    "exec 3>&1 4<&0 5>&2 >/dev/null </dev/null 2>/dev/null; "
    'body=$1; shift; exec bash -lc "$body" llmlaunch "$@"'
)
_ENTERED = f"exec >&3 <&4 2>&5 3>&- 4<&- 5>&-; echo '{_BEGINS}' >&2; "

# A second connection needs none of the tunnels of the person's configuration, and no command of its own. Nobody is
# there to answer a question.
_OPTIONS = ("-T", "-o", "BatchMode=yes", "-o", "ClearAllForwardings=yes", "-o", "RemoteCommand=none")

ENDLESS = "it answered with more than any answer has"
_FAILED = 255  # ssh's own exit code
_NOT_CONNECTED = re.compile(
    r"^ssh: (connect to host|Could not resolve hostname)|Permission denied \(|Host key verification failed"
    r"|^kex_exchange_identification|Too many authentication failures|Bad owner or permissions|Bad configuration option",
    re.MULTILINE,
)
_HOST = re.compile(r"[A-Za-z0-9_][\w.@%+-]*|([A-Za-z0-9_][\w.+-]*@)?\[[0-9A-Fa-f:.]+(%\w+)?\]", re.ASCII)


def is_ssh_host(text: object) -> bool:
    """Whether `text` is a host as ssh takes it, alone or as USER@HOST: never an option, a path or shell text."""
    return isinstance(text, str) and len(text) < 256 and _HOST.fullmatch(text) is not None


@dataclass(frozen=True)
class Reply:
    """What a command on a host printed, and its exit code."""

    code: int
    output: str
    words: str


@dataclass(frozen=True)
class Connection:
    """A host, each of whose commands is a call of ssh. Where the person's configuration shares connections
    (ControlMaster), so do these."""

    host: str

    def argv(self, body: str, *words: str) -> list[str]:
        """Return the call of ssh that runs `body`, a line of bash, with `words` as $1, $2 ..."""
        text = " ".join(map(shlex.quote, ("sh", "-c", _ENTER, "sh", _ENTERED + body, *words)))
        return ["ssh", *_OPTIONS, "--", self.host.replace("[", "").replace("]", ""), f"exec {text}"]

    def start(
        self, body: str, *words: str, stdin: int = subprocess.PIPE, stderr: int | IO[bytes]
    ) -> subprocess.Popen[bytes]:
        """Start `body` there. `stderr` is no pipe: a connection that goes on in the background (ControlPersist) would
        keep it open, with OpenSSH's clients of some years. Raises UserError where there is no ssh here."""
        try:
            return subprocess.Popen(self.argv(body, *words), stdin=stdin, stdout=subprocess.PIPE, stderr=stderr)
        except OSError as error:
            raise no_ssh(error) from error

    def run(self, body: str, *words: str, seconds: float = 60.0) -> Reply:
        """Run `body` to its end. Raises UserError where the host is not reached, or does not answer in time."""
        with tempfile.TemporaryFile() as errors:
            process = self.start(body, *words, stdin=subprocess.DEVNULL, stderr=errors)
            try:
                output = bounded_answer(process, errors, seconds)
            except subprocess.TimeoutExpired:
                raise UserError(self.trouble(f"it did not answer within {seconds:.0f} s")) from None
            except AnswerTooLong:
                raise UserError(self.trouble(ENDLESS)) from None
            return self.reply(process.returncode, output, text_of(errors))

    def reply(self, code: int, output: bytes, errors: str) -> Reply:
        """Return what a command that has ended said. Raises UserError where it was not reached, or the connection was
        lost."""
        reached, words = self.heard(code, errors)
        if reached != "yes":
            raise UserError(words)
        return Reply(code, output.decode(errors="replace"), words)

    def heard(self, code: int, errors: str) -> tuple[Reached, str]:
        """Return whether a command was started there at all, and what it said on stderr, else what is wrong with the
        connection."""
        _, begun, words = errors.rpartition(_BEGINS + "\n")
        if code != _FAILED:
            return "yes", words
        if begun:
            return "perhaps", self.trouble(f"the connection was lost{_of(words)}")
        if _NOT_CONNECTED.search(errors):
            return "no", self.trouble(_shown(errors))
        return "perhaps", self.trouble(_shown(errors) or "ssh ended without a word")

    def trouble(self, words: str) -> str:
        """Return the sentence on a host that is not reached, with what to do."""
        typed = to_type("ssh", self.host, "true").removeprefix("llmlaunch ")
        if "Could not resolve hostname" in words:
            advice = "name a host of your ~/.ssh/config, or USER@MACHINE"
        elif "Host key verification failed" in words:
            advice = f"type `{typed}` once, and compare the key it shows"
        elif "Permission denied" in words or "Too many authentication failures" in words:
            advice = (
                f"type `{typed}` until it asks for nothing: with a key in ssh-agent, or beside an open connection that "
                "is shared (ControlMaster)"
            )
        else:
            advice = f"try again when `{typed}` works"
        return f"{self.host} is not reached: {words}; {advice}"


def text_of(errors: IO[bytes]) -> str:
    """Return what a command that has ended wrote into this file, up to 1 MiB."""
    errors.seek(0)
    return errors.read(MOST_ERROR_BYTES).decode(errors="replace")


def no_ssh(error: OSError) -> UserError:
    """Return the mistake that ssh cannot be started on this machine."""
    return UserError(f"ssh cannot be run here ({error.strerror}); install OpenSSH's client")


def _of(words: str) -> str:
    return f" ({_shown(words)})" if words.strip() else ""


def _shown(errors: str) -> str:
    """Return the last lines of stderr as one, without what ssh warns of."""
    lines = [line.strip() for line in errors.splitlines() if line.strip() and not line.startswith("Warning: ")]
    return printable("; ".join(lines[-3:]))[:400]
