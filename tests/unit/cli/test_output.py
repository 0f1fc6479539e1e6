"""Every command ends in order where its output cannot be written: a closed pipe, a full disk, a closed stream."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from llmlaunch.assets import asset
from support.command_line import CommandLine

QUICKSTART = str(asset("recipes", "quickstart.yaml"))
HELP, RUNS = ("check", "--help"), ("runs", "--json")  # printed by the parser of words, and by us
BAD = ("Traceback", "Exception ignored", "BrokenPipe", "OSError")


def ended(tmp_path: Path, redirection: str, *arguments: str) -> tuple[int, str, str]:
    """Return exit code, stdout and stderr of a command in a shell with this redirection (`$@` is the command)."""
    script = f'"$@" {redirection}'
    argv = ["bash", "-c", script, "bash", sys.executable, "-m", "llmlaunch", *arguments]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert not [word for word in BAD if word in done.stderr], done.stderr
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("arguments", [HELP, RUNS], ids=" ".join)
def test_a_result_that_nobody_reads_ends_the_command_as_sigpipe_would(
    tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    code, _, stderr = ended(tmp_path, "| true; exit ${PIPESTATUS[0]}", *arguments)
    assert (code, stderr) == (141, ""), stderr


@pytest.mark.parametrize("arguments", [HELP, RUNS], ids=" ".join)
def test_a_full_disk_is_one_line(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    code, _, stderr = ended(tmp_path, "> /dev/full", *arguments)
    assert code == 1, stderr
    assert stderr.endswith("error: the output cannot be written: No space left on device\n")
    assert stderr.count("No space left") == 1


@pytest.mark.parametrize("redirection", ["<&- >&- 2>&-", "2> /dev/full"])
def test_a_closed_stream_or_a_full_stderr_changes_no_exit_code(tmp_path: Path, redirection: str) -> None:
    assert ended(tmp_path, redirection, *RUNS)[0] == 0
    assert ended(tmp_path, redirection, "status", "no-such-run")[0] == 2


def test_a_refusal_that_nobody_can_read_is_still_one(tmp_path: Path) -> None:
    assert ended(tmp_path, ">/dev/full 2>/dev/full", "check", "no-such-recipe.yaml")[0] == 2


def test_a_file_that_a_command_opens_does_not_become_its_stdout(llmlaunch: CommandLine, tmp_path: Path) -> None:
    """A closed stdout leaves its number to the next file opened, here the store, into which others would print."""
    records = tmp_path / "records.jsonl"
    records.write_text('{"id": "a", "peak_bytes": 1}\n')
    assert ended(tmp_path, ">&-", "measurements", "import", str(records))[0] == 0
    assert [record["id"] for record in llmlaunch.json("measurements", "list")["measurements"]] == ["a"]


def test_names_that_are_no_text_are_shown(tmp_path: Path) -> None:
    code, _, stderr = ended(tmp_path, "", "check", b"odd-\xff.yaml".decode("utf-8", "surrogateescape"))
    assert code == 2
    assert "odd-" in stderr
