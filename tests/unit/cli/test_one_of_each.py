"""One of a thing is named in the singular: no message says `1 sequences`."""

from __future__ import annotations

import re

import pytest

from llmlaunch.assets import asset
from llmlaunch.rundir.values import counted
from support.command_line import CommandLine

QUICKSTART = asset("recipes", "quickstart.yaml")
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
    ("arguments", "code"),
    [
        (("check", *ONE_OF_ALL), 0),
        (("plan", *ONE_OF_ALL), 0),
        (("submit", *ONE_OF_ALL, "--dry-run"), 0),
        (("check", *ONE_OF_ALL, "layout={tensor: 2}"), 2),
        (("check", *ONE_OF_ALL, "layout={layers_by_stage: [2]}"), 2),
        (("check", *ONE_OF_ALL, "cluster={base: cpu-x1, accelerator: {memory_gib: 0.1}}"), 3),
    ],
)
def test_no_message_about_one_says_several(llmlaunch: CommandLine, arguments: tuple[str, ...], code: int) -> None:
    out, err = llmlaunch(arguments[0], QUICKSTART, *arguments[1:], code=code)
    prose = out.partition("=====")[0] + err
    assert prose.strip()
    assert WRONG.findall(prose) == [], prose
