"""One of a thing is named in the singular: no message says `1 sequences`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from llmlaunch.rundir.messages import counted

ROOT = Path(__file__).resolve().parents[3]
QUICKSTART = str(ROOT / "recipes" / "quickstart.yaml")
ONE_OF_ALL = (
    "nodes=1", "cluster=cpu-x1", "training.global_batch_size=1", "training.steps=1", "model.num_layers=1",
    "budget={gpu_hours: 1, days: 1}",
)  # fmt: skip
WRONG = re.compile(r"(?<![\d.,/])1 (?!times\b|is\b|does\b|has\b|leaves\b|runs at\b|us\b)[A-Za-z-]+s\b")


@pytest.mark.parametrize(
    ("count", "noun", "form", "shown"),
    [
        (1, "sequence", "", "1 sequence"),
        (0, "sequence", "", "0 sequences"),
        (2, "process", "", "2 processes"),
        (1234, "step", ",", "1,234 steps"),
        (1.0, "day", ",.10g", "1 day"),
    ],
)
def test_a_count_has_its_noun_in_the_right_number(count: float, noun: str, form: str, shown: str) -> None:
    assert counted(count, noun, form) == shown


@pytest.mark.parametrize(
    "words",
    [
        ("check", QUICKSTART, *ONE_OF_ALL),
        ("plan", QUICKSTART, *ONE_OF_ALL),
        ("submit", QUICKSTART, *ONE_OF_ALL, "--dry-run"),
        ("check", QUICKSTART, *ONE_OF_ALL, "layout={tensor: 2}"),
        ("check", QUICKSTART, *ONE_OF_ALL, "layout={layers_by_stage: [2]}"),
        ("check", QUICKSTART, *ONE_OF_ALL, "cluster={base: cpu-x1, accelerator: {memory_gib: 0.1}}"),
    ],
)
def test_no_message_about_one_says_several(tmp_path: Path, words: tuple[str, ...]) -> None:
    environment = {**os.environ, "XDG_DATA_HOME": str(tmp_path)}
    argv = [sys.executable, "-m", "llmlaunch", *words]
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=300, check=False)
    prose = done.stdout.partition("=====")[0] + done.stderr
    assert "Traceback" not in prose
    assert prose.strip()
    assert WRONG.findall(prose) == [], prose
