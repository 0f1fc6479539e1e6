"""Messages name one of a thing in the singular, and commands in them can be typed whatever the paths are called."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from llmlaunch.assets import asset
from llmlaunch.cli.main import COMMANDS
from llmlaunch.rundir.values import counted, to_type
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


ROOT = Path(__file__).resolve().parents[3]
SOURCES = ROOT / "wrapper"
UNQUOTED = re.compile(rf"llmlaunch (?:{'|'.join(COMMANDS)})(?: --?[a-z-]+| [A-Z]+)*[ =]$")


def values_behind_commands(path: Path) -> Iterator[str]:
    """Yield each f-string in which a value follows the words of a command without `to_type`."""
    text = path.read_text(encoding="utf-8")
    if "llmlaunch " not in text:
        return
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.JoinedStr):
            continue
        for text, value in zip(node.values, node.values[1:], strict=False):
            if isinstance(text, ast.Constant) and isinstance(value, ast.FormattedValue) and UNQUOTED.search(text.value):
                shown = ast.unparse(value.value)
                if "shlex.quote" not in shown:
                    yield f"{path.name}:{node.lineno}: {text.value[-40:]}{{{shown}}}"


def test_no_message_puts_a_bare_value_into_a_command() -> None:
    assert [value for path in SOURCES.rglob("*.py") for value in values_behind_commands(path)] == []


@pytest.mark.parametrize(
    "arguments",
    [
        ("resume", Path("/my runs/a")),
        ("logs", Path("it's"), "--node", "a;b"),
        ("submit", Path("-x.yaml"), "model={a: 'b c'}"),
    ],
)
def test_a_shell_reads_the_words_that_were_meant(arguments: tuple[object, ...]) -> None:
    texts = ["llmlaunch", *map(str, arguments)]
    assert shlex.split(to_type(*arguments)) == [f"./{text}" if text == "-x.yaml" else text for text in texts]


def test_the_hints_of_a_run_in_an_odd_place_can_be_typed(
    llmlaunch: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "my run's $(touch oops) place"
    place.mkdir()
    monkeypatch.chdir(place)
    rendered = llmlaunch("render", QUICKSTART, "-o", "a run").stdout
    script, *_ = shlex.split(rendered.partition("sbatch ")[2], comments=True)
    assert (place / script).is_file()
    hint = llmlaunch("status", "a run", code=2).stderr.rpartition("by llmlaunch; ")[2].rpartition(" does")[0]
    program, *words = shlex.split(hint)
    assert (program, words) == ("llmlaunch", ["resume", str(place / "a run")])
    refused = llmlaunch(*words, "--local", "--", "--partition=x", code=2)
    assert "a local run has no sbatch" in refused.stderr  # found, and not started
