"""A tight plan ends with exit code 3 and the word that accepts it; accepted, every command goes on, and the run that is
rendered has a layout to fall back on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from llmlaunch.assets import asset
from support.command_line import CommandLine
from support.tight import ONE_LAYOUT, RECIPE, hand_made_limit, judge_by, needed_gib

PATH = str(asset("recipes", f"{RECIPE}.yaml"))
NEEDED = needed_gib()
LIMIT, FITS = NEEDED - 2.0, NEEDED + 3.0
ACCEPT = "memory.accept=tight"
COMMANDS = (("check",), ("plan",), ("render", "-o", "run"), ("submit", "--dry-run"))


@pytest.fixture(autouse=True)
def tight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of its own, and a limit that the plan exceeds by 2 GiB of the 5 there are up to the card."""
    monkeypatch.chdir(tmp_path)
    judge_by(monkeypatch, hand_made_limit(LIMIT, FITS, (FITS, 0.07)))


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_it_is_refused_and_nothing_is_written(llmlaunch: CommandLine, command: tuple[str, ...]) -> None:
    name, *options = command
    error = llmlaunch(name, PATH, ONE_LAYOUT, *options, code=3).stderr
    (message,) = (line for line in error.splitlines() if "no layout is safe. Tight: " in line)
    for part in ("2.0 GiB more than the limit", "out of memory: 7 %", "memory: {accept: tight}", ACCEPT):
        assert part in message
    assert not Path("run").exists()


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_accepted_every_command_goes_on(llmlaunch: CommandLine, command: tuple[str, ...]) -> None:
    name, *options = command
    output = llmlaunch(name, PATH, ONE_LAYOUT, ACCEPT, *options)
    if name in ("check", "plan"):
        assert output.stdout.startswith("llama2-7b-deepspeed: tight (risk 7 %), accepted by the recipe")
    else:
        assert "warning: tight, accepted by memory.accept: " in output.stderr
        assert "stated risk of running out of memory: 7 %" in output.stderr


def test_what_is_rendered_falls_back_as_if_the_recipe_asked_for_one_layout(llmlaunch: CommandLine) -> None:
    llmlaunch("render", PATH, ONE_LAYOUT, ACCEPT, "-o", "tight")
    described = read("tight/run.json")
    (fallback,) = described["fallbacks"]
    assert fallback["layout"] == "fallback/1"
    assert described["verdict"] == "tight"
    other = read("tight/fallback/1/run.json")
    assert max(other["predicted_bytes"]) <= LIMIT * 2**30 < max(described["predicted_bytes"])
    assert other["verdict"] == "safe"
    llmlaunch("render", PATH, ONE_LAYOUT, ACCEPT, "on_oom={layouts: 1}", "-o", "asked")
    assert files("tight") == files("asked")
    for name in ("job.sbatch", "command.txt", "ds_config.json", "fallback/1/command.txt", "fallback/1/ds_config.json"):
        assert Path("tight", name).read_bytes() == Path("asked", name).read_bytes(), name


def test_its_json_says_what_was_accepted(llmlaunch: CommandLine) -> None:
    plan = llmlaunch.json("check", PATH, ONE_LAYOUT, ACCEPT)
    memory = plan["memory"]
    assert (plan["verdict"], plan["accepted"], memory["stated_risk"]) == ("tight", True, 0.07)
    assert memory["limit_bytes"] == int(LIMIT * 2**30)
    assert memory["fits_bytes"] == int(FITS * 2**30)
    assert memory["fujii_verdict"] == "safe"
    assert plan["fallbacks"][0]["change"].startswith("set layout.")
    refused = llmlaunch.json("check", PATH, ONE_LAYOUT, code=3)
    assert (refused["verdict"], refused["accepted"], refused["fallbacks"]) == ("tight", False, None)
    assert refused["changes"]


def test_check_says_what_the_limit_is_made_of_and_what_fujiis_rule_says(llmlaunch: CommandLine) -> None:
    lines = llmlaunch("check", PATH, ONE_LAYOUT, ACCEPT, "-v").stdout.splitlines()
    (at,) = (number for number, line in enumerate(lines) if line.startswith("  limit: "))
    assert lines[at].startswith("  limit: by 12 measured runs; device memory is 79.1 GiB")
    assert lines[at + 1].startswith(f"  tight: 3.00 GiB less than the {FITS:.1f} that fit the card; stated risk")
    assert lines[at + 2] == f"  Fujii's 80 % rule: safe, {NEEDED:.1f} of 63.3 GiB"
    assert "Searched 1 layout; none is safe, and 1 is tight" in "\n".join(lines)
    assert any(line.startswith("If a device runs out of memory, the same job continues with") for line in lines)


def test_runs_says_how_a_run_was_judged_and_what_fujiis_rule_says(
    llmlaunch: CommandLine, monkeypatch: pytest.MonkeyPatch, put_commands: Any
) -> None:
    put_commands(sbatch="echo 101", **dict.fromkeys(("squeue", "sacct", "sinfo", "scontrol", "scancel"), ""))
    llmlaunch("submit", PATH, ONE_LAYOUT, ACCEPT, "-o", "tight")
    (run,) = llmlaunch.json("runs")["runs"]
    assert (run["verdict"], run["fujii_verdict"]) == ("tight", "safe")
    assert " tight, risk 7 % (safe) " in llmlaunch("runs").stdout


def test_one_tight_run_of_several_refuses_all_until_it_is_accepted(llmlaunch: CommandLine, put_commands: Any) -> None:
    put_commands(sbatch="echo 101", **dict.fromkeys(("squeue", "sacct", "sinfo", "scontrol", "scancel"), ""))
    words = (PATH, ONE_LAYOUT, "layout.zero_stage=3,1")
    error = llmlaunch("submit", *words, "--dry-run", code=3).stderr
    assert "zero_stage=1" in error
    assert "None of the 2 was submitted" in error
    assert "tight, accepted" in llmlaunch("submit", *words, ACCEPT, "--dry-run").stderr


def read(path: str) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(Path(path).read_text())
    return value


def files(directory: str) -> set[str]:
    root = Path(directory)
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}
