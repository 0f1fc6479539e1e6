"""`llmlaunch` for tests: in this process, or as a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest


class Output(NamedTuple):
    stdout: str
    stderr: str


class CommandLine:
    """`llmlaunch` in this process; `code` is the exit code of the last command."""

    code = 0

    def __init__(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        self._capsys, self._monkeypatch = capsys, monkeypatch

    def __call__(self, *arguments: str | Path, code: int | tuple[int, ...] = 0) -> Output:
        """Run a command that must end with `code`, or one of several, and without a traceback."""
        from llmlaunch.cli.main import main  # the GPU's machine has no click

        self._monkeypatch.setattr(sys, "argv", ["llmlaunch", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            main()
        stdout, stderr = self._capsys.readouterr()
        self.code = int(end.value.code or 0)
        assert self.code in (code if isinstance(code, tuple) else (code,)), stdout + stderr
        assert "Traceback" not in stderr
        return Output(stdout, stderr)

    def json(self, *arguments: str | Path, code: int = 0) -> Any:
        """Return what a command prints with --json."""
        return json.loads(self(*arguments, "--json", code=code).stdout)

    def import_records(self, records: Iterable[Mapping[str, Any]]) -> None:
        path = Path(os.environ["XDG_DATA_HOME"]).with_name("records.jsonl")
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        self("measurements", "import", path)


def run_llmlaunch(
    folder: Path, *arguments: str | Path, code: int | None = None, timeout: float = 300, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run `llmlaunch` in `folder` as a process of its own; with `code`, it must end with that exit code."""
    process = subprocess.run(
        [sys.executable, "-m", "llmlaunch", *map(str, arguments)],
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert code is None or process.returncode == code, process.stdout + process.stderr
    return process


def data_folders(home: Path) -> dict[str, str]:
    """Return the variables that keep llmlaunch's store and cache of a process below `home`."""
    return {"XDG_DATA_HOME": str(home / "data"), "XDG_CACHE_HOME": str(home / "cache")}
