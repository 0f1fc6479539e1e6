"""A DeepSpeed that answers: the judge's process, kept for all questions of a test module."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = ["Asked", "deepspeed_answers"]

JUDGE = Path(__file__).with_name("deepspeed_judge.py")
MARK = '{"refused"'


class Asked:
    """Asks one question after the other."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def keys_read(self) -> list[str]:
        """The keys DeepSpeedConfig looks for, dotted."""
        answer: Any = self(reads=True)
        assert isinstance(answer, list)
        return answer

    def __call__(self, **case: Any) -> str | None:
        """None where DeepSpeed takes it, else why not."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(case) + "\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith(MARK):
                refused: str | None = json.loads(line)["refused"]
                return refused
        raise AssertionError("the judge ended without an answer")


@contextmanager
def deepspeed_answers() -> Iterator[Asked]:
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [sys.executable, str(JUDGE)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment,
    ) as process:
        try:
            yield Asked(process)
        finally:
            process.stdin.close()
            process.terminate()
