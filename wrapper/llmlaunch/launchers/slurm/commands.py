"""Runs SLURM's commands: with a time-out, several side by side, and again where SLURM did not answer; and knows what
each release of them has and lacks, from slurm/versions.json (docs/slurm-versions.md shows it as a table)."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from llmlaunch.assets import asset
from llmlaunch.errors import UserError
from llmlaunch.launchers.run_environment import QUERIES, VariableFilter

# After these words of a command the controller may have heard it, and may still do what it was asked. The second line:
# the connection broke after it was made (slurm_recv_timeout and _remap_slurmctld_errno of SLURM's slurm_protocol_*.c).
_LATE = (
    *("timed out", "Zero Bytes were transmitted", "Unexpected message received"),
    *("Connection reset", "Broken pipe", "No route to host", "is unreachable", "receive failure", "shutdown failure"),
)

_UNREACHED = ("Unable to contact",)
MOST_ERROR_BYTES = 1 << 20  # of stderr, of which a person is shown a few lines
_PAUSES_SECONDS = (1.0, 2.0, 5.0)


@dataclass(frozen=True)
class CommandAnswer:
    """What a command printed; `code` is None where it did not end in time."""

    code: int | None
    output: str
    words: str

    @property
    def late(self) -> bool:
        """It may have been heard: nothing can be said of what became of it."""
        return self.code is None or any(words in self.words for words in _LATE)

    @property
    def unreached(self) -> bool:
        """It was not heard."""
        return not self.late and any(words in self.words for words in _UNREACHED)


@dataclass
class Call:
    """A command that was started; others may be started before its answer is asked for."""

    argv: Sequence[str]
    process: subprocess.Popen[str]
    errors: IO[bytes]
    """What it says on stderr."""
    until: float
    stdin_text: str | None = None
    """What it reads from its standard input."""

    def answer(self) -> CommandAnswer:
        name = self.argv[0]
        try:
            output, _ = self.process.communicate(self.stdin_text, max(0.0, self.until - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.abandon()
            return CommandAnswer(None, "", f"{name} did not answer in time")
        except BaseException:
            self.abandon()
            raise
        with self.errors:
            self.errors.seek(0)
            errors = self.errors.read(MOST_ERROR_BYTES).decode(errors="replace")
        code = self.process.returncode
        return CommandAnswer(code, output, complaint(errors) or f"{name} exit code {code}")

    def is_silent(self, seconds: float) -> bool:
        """Wait until it begins to answer, or ends, and return whether it did neither in so many seconds."""
        stdout = self.process.stdout
        return stdout is not None and not select.select([stdout], [], [], seconds)[0]

    def abandon(self) -> None:
        """End the command, whose answer nobody needs. What it started may hold its pipes: they are not read to their
        end."""
        self.process.kill()
        self.process.wait()
        self.errors.close()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):  # a broken pipe, with words that nobody reads
                    pipe.close()


@dataclass(frozen=True)
class SlurmCommands:
    """Each call may take `timeout_seconds`; one that changes nothing is made `tries` times, and `say` is told what is
    waited for."""

    timeout_seconds: float
    tries: int
    say: Callable[[str], None]

    def start(
        self,
        argv: Sequence[str],
        variables: VariableFilter = QUERIES,
        run_dir: Path | None = None,
        stdin_text: str | None = None,
    ) -> Call:
        """Start a command, in the run directory where one is named. Raises UserError where there is no such command."""
        errors = tempfile.TemporaryFile()  # noqa: SIM115 (the call closes it)
        try:
            process = subprocess.Popen(
                argv,
                cwd=run_dir,
                env=variables.of(os.environ),
                stdin=subprocess.DEVNULL if stdin_text is None else subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                encoding="utf-8",
                errors="replace",
            )
        except OSError as error:
            raise UserError(
                f"{argv[0]} cannot be run ({error.strerror}); is this a SLURM machine? --local runs the job here"
            ) from error
        return Call(argv, process, errors, time.monotonic() + self.timeout_seconds, stdin_text)

    def ask(self, argv: Sequence[str]) -> CommandAnswer:
        """The answer to a question (or to scancel, which may be repeated)."""
        return self.insist(self.start(argv))

    def insist(self, call: Call) -> CommandAnswer:
        """The answer to a question that was started, which is asked again where nobody answered."""
        answer = call.answer()
        for attempt in range(1, self.tries):
            if not (answer.late or answer.unreached):
                break
            self.wait_before(attempt, answer)
            answer = self.start(call.argv).answer()
        return answer

    def wait_before(self, attempt: int, answer: CommandAnswer) -> None:
        """Pause before try number `attempt` + 1, and say why."""
        pause = _PAUSES_SECONDS[min(attempt, len(_PAUSES_SECONDS)) - 1]
        self.say(f"waiting for SLURM ({answer.words}); try {attempt + 1} of {self.tries} in {pause:g} s")
        time.sleep(pause)


Release = tuple[int, int]

OLDEST: Release = (20, 2)
"""The first that has `squeue --me` and `-O FIELD:SUFFIX`, which the launcher asks with."""


@dataclass(frozen=True)
class Feature:
    """One thing that came, went or changed. `option` is the long option of sbatch it is about, if any; `since` and
    `until` are the first and the last release that has it, None where that is before 19.05, not yet, or not known.
    `seen` says by version what was found where it was run (yes, no, once); where it is empty, `source` was read."""

    command: str
    feature: str
    option: str | None
    since: Release | None
    until: Release | None
    seen: Mapping[str, str]
    source: str
    note: str = ""

    @property
    def everywhere(self) -> bool:
        """Every release the launcher works with has it."""
        return self.until is None and (self.since is None or self.since <= OLDEST)


def features() -> list[Feature]:
    """The entries of slurm/versions.json."""
    listed = json.loads(asset("slurm", "versions.json").read_text(encoding="utf-8"))["features"]
    return [Feature(**entry | {"since": release(entry["since"]), "until": release(entry["until"])}) for entry in listed]


def release(text: str | None) -> Release | None:
    """`slurm-wlm 22.05.8` or `24.11` -> (22, 5), (24, 11); None where no release is named."""
    match = re.search(r"(\d{2})\.(\d{2})", text or "")
    return (int(match[1]), int(match[2])) if match else None


def refuse_unknown(arguments: Sequence[str], version: Callable[[], str]) -> None:
    """Raise UserError for an option of sbatch this site's SLURM does not have.

    `arguments` are the options of a script and a command line; `version()` what `sbatch --version` prints, asked only
    where an option is among them that came or went.
    """
    used = {word[2:].partition("=")[0] for word in arguments if word.startswith("--")}
    doubtful = [feature for feature in features() if feature.option in used and not feature.everywhere]
    if not doubtful:
        return
    version_text = version().strip()
    here = release(version_text)
    if here is None:
        return
    for feature in doubtful:
        too_old = feature.since is not None and here < feature.since
        too_new = feature.until is not None and here > feature.until
        if too_old or too_new:
            when = (
                f"came with {release_text(feature.since)}" if too_old else f"went after {release_text(feature.until)}"
            )
            raise UserError(
                f"sbatch --{feature.option} {when}, and this site runs {version_text}; remove it (slurm: in the recipe "
                "or the cluster profile, or the arguments after --)"
            )


def release_text(version: Release | None) -> str:
    return "" if version is None else f"{version[0]}.{version[1]:02}"


def complaint(stderr: str) -> str:
    """Return the error lines of a command as one line, without the `sbatch: error:` before each."""
    lines = (re.sub(r"^\w+: (error: )?", "", line.strip()) for line in stderr.splitlines())
    return "; ".join(line for line in lines if line)
