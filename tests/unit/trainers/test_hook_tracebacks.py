"""An uncaught exception of a rank carries its number on every line, once."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from llmlaunch.trainers import HOOK


def stderr_of(folder: Path, program: str, rank: str | None = "3") -> list[str]:
    shutil.copy(HOOK, folder / "sitecustomize.py")
    environment = {name: value for name, value in os.environ.items() if name != "RANK"}
    environment |= {"PYTHONPATH": str(folder)} | ({} if rank is None else {"RANK": rank})
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stdout == ""
    return done.stderr.splitlines()


def test_every_line_of_an_exception_begins_with_its_rank(tmp_path: Path) -> None:
    lines = stderr_of(tmp_path, "try:\n    {}['a']\nexcept KeyError:\n    raise ValueError('two\\nlines')")
    assert [line for line in lines if not line.startswith("[rank3]: ")] == []
    assert "[rank3]: KeyError: 'a'" in lines
    assert lines[-2:] == ["[rank3]: ValueError: two", "[rank3]: lines"]


@pytest.mark.parametrize("rank", [None, "", "x", "²"])
def test_a_program_that_is_no_rank_is_left_as_it_is(tmp_path: Path, rank: str | None) -> None:
    assert stderr_of(tmp_path, "raise ValueError('bad')", rank)[-1] == "ValueError: bad"


def test_another_hook_that_adds_the_rank_adds_it_once(tmp_path: Path) -> None:
    """As torch's does: it has the hook before it write into a buffer (torch 2.13, distributed_c10d.py)."""
    program = (
        "import io, sys\n"
        "before = sys.excepthook\n"
        "def hook(*error):\n"
        "    real, sys.stderr = sys.stderr, io.StringIO()\n"
        "    before(*error)\n"
        "    text, sys.stderr = sys.stderr.getvalue(), real\n"
        "    sys.stderr.write(''.join(f'[rank3]: {line}\\n' for line in text.splitlines()))\n"
        "sys.excepthook = hook\n"
        "raise ValueError('bad')\n"
    )
    assert stderr_of(tmp_path, program)[-1] == "[rank3]: ValueError: bad"
