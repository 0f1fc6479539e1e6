"""`check`, `submit` and `resume` warn of a saved checkpoint that the job cannot load: the same sentence, with its way
out, whatever is printed beside it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from llmlaunch.app.rendered_job import checkpoint_warnings
from llmlaunch.assets import asset
from support.command_line import CommandLine

JOB = "#!/bin/bash\nexit 0\n"
WARNING = (
    "was saved by stage 3 of ZeRO, and this plan has stage 1, which looks for other files; pin layout.zero_stage: 3"
)
SAVED_BY_STAGE_3 = [
    f"zero_pp_rank_{rank}_mp_rank_00_{kind}_states.pt" for rank in range(2) for kind in ("model", "optim")
]


@pytest.fixture
def words(tmp_path: Path) -> tuple[str, ...]:
    """The quickstart, which ZeRO's stage 1 trains, with a folder of checkpoints."""
    recipe = shutil.copy(asset("recipes", "quickstart.yaml"), tmp_path / "train.yaml")
    saving = (f"training.checkpoint_path={tmp_path / 'saved'}", "training.save_interval=10", "layout.zero_stage=1")
    return (str(recipe), *saving)


def saved_by_stage_3(folder: Path) -> None:
    tag = folder / "saved" / "step-10"
    tag.mkdir(parents=True)
    for name in SAVED_BY_STAGE_3:
        (tag / name).write_text("x")
    (folder / "saved" / "latest").write_text("step-10")


def test_check_and_a_dry_run_warn_and_end_as_they_would(
    llmlaunch: CommandLine, words: tuple[str, ...], tmp_path: Path
) -> None:
    assert "was saved by" not in llmlaunch("check", *words).stderr
    saved_by_stage_3(tmp_path)
    place = f"warning: {words[0]}"
    for command in (("check",), ("check", "--json"), ("submit", "--dry-run"), ("submit", "--dry-run", "--json")):
        shown = llmlaunch(*command, *words)
        (line,) = [line for line in shown.stderr.splitlines() if WARNING in line]
        assert line.startswith((place, "warning: override training.checkpoint_path"))
        assert line.endswith("or name a new folder to begin at step 0")
        if "--json" in command:
            json.loads(shown.stdout)


def test_resume_warns_of_what_the_rendered_plan_cannot_load(
    llmlaunch: CommandLine, words: tuple[str, ...], tmp_path: Path
) -> None:
    """The folder may be another run's by now, or the checkpoint was put there by hand."""
    run = tmp_path / "run"
    llmlaunch("render", *words, "-o", run)
    (run / "job.sbatch").write_text(JOB)
    saved_by_stage_3(tmp_path)
    resumed = llmlaunch("resume", run, "--local", "--json")
    assert WARNING in resumed.stderr
    assert json.loads(resumed.stdout)["run_dir"] == str(run)


def test_a_directory_that_cannot_be_read_yields_nothing(
    llmlaunch: CommandLine, words: tuple[str, ...], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    llmlaunch("render", *words, "-o", run)
    assert checkpoint_warnings(run) == ()
    saved_by_stage_3(tmp_path)
    (sentence,) = checkpoint_warnings(run)
    assert WARNING in sentence
    plan = (run / "plan.json").read_text()
    for damaged in ("", "[]", "{}", plan.replace('"tensor": 1', '"tensor": "x"')):
        (run / "plan.json").write_text(damaged)
        assert checkpoint_warnings(run) == ()
    (run / "plan.json").write_text(plan)
    (run / "recipe.yaml").write_text("model: [")
    assert checkpoint_warnings(run) == ()


def test_resume_compares_with_the_layout_that_ran_last(
    llmlaunch: CommandLine, words: tuple[str, ...], tmp_path: Path
) -> None:
    """A fallback that cannot load what the planned layout saves has a folder of its own."""
    run, attempt = tmp_path / "run", tmp_path / "run" / "attempts" / "7.0"
    llmlaunch("render", *words, "-o", run)
    fallback = run / "fallback" / "1"
    fallback.mkdir(parents=True)
    plan, described = (json.loads((run / name).read_text()) for name in ("plan.json", "run.json"))
    described["checkpoint"]["path"] += "-fallback-1"
    (fallback / "plan.json").write_text(json.dumps(plan))
    (fallback / "run.json").write_text(json.dumps(described))
    attempt.mkdir(parents=True)
    (attempt / "attempt.json").write_text(json.dumps({"schema": 1, "attempt": "7.0", "layout": "fallback/1"}))
    saved_by_stage_3(tmp_path)
    assert checkpoint_warnings(run) == ()
    shutil.move(tmp_path / "saved", tmp_path / "saved-fallback-1")
    (sentence,) = checkpoint_warnings(run)
    assert f"training.checkpoint_path: {tmp_path}/saved-fallback-1/step-10 was saved by stage 3" in sentence
