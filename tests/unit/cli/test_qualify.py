"""`llmlaunch qualify`: six runs submitted once, and the page of what became of them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llmlaunch.assets import asset
from support.command_line import CommandLine
from support.json_schemas import validate
from support.recipes import recipe_text
from support.store_run_dirs import RunDir, gpu

ROOT = Path(__file__).parents[3]
CLUSTER = ("--cluster", "h100-80gb-x8")
QUALIFY = ("qualify", *CLUSTER)
NAME = "qualify-h100-80gb-x8-megatron-lm"
FOLDER = Path("runs", f"{NAME}-llama3-8b")


@pytest.fixture(autouse=True)
def questions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, put_commands: Callable[..., Path]) -> Path:
    """A SLURM that numbers jobs from 101 on, notes each, and says that every one has ended."""
    note = tmp_path / "questions"
    put_commands(
        sbatch=f'echo "$PWD" >> {note}\necho $((100 + $(wc -l < {note})))',
        **dict.fromkeys(("squeue", "sacct", "sinfo", "scontrol", "scancel"), ""),
    )
    monkeypatch.setenv("MEGATRON_LM_PATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return note


def submitted(questions: Path) -> list[str]:
    return [Path(line).name for line in questions.read_text().splitlines()] if questions.exists() else []


def run_dirs() -> list[Path]:
    (folder,) = Path("runs").iterdir()
    return [folder / f"{NAME}-{number}" for number in range(1, 7)]


def ended(run_dir: Path, ratio: float, died: bool = False, failed: bool = False) -> None:
    """Let a run end: each GPU held `ratio` times what was predicted, and a step took twice as long."""
    run = RunDir.rendered(run_dir, devices=8)
    submission = json.loads((run_dir / "submission.json").read_text())
    began = submission["submitted_at"] + 1
    job = submission["job_id"]
    attempt, peak_bytes = f"{job}.0", round(ratio * max(run.run["predicted_bytes"]))
    run.ranks(attempt, started_at=began, ended_at=began + 9, exit_code=int(died or failed))
    cards = [
        gpu(rank, accounting_peak_bytes={str(1000 + rank): peak_bytes}, total_bytes=128 * 2**30) for rank in range(8)
    ]
    run.line("n0", attempt=attempt, gpus=cards)
    seconds = 2 * json.loads((run_dir / "plan.json").read_text())["step_seconds"]
    run.write(f"attempts/{attempt}/progress.json", {"step": 12, "steps": 12, "step_seconds": seconds})
    if died:
        line = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
        cause = {"schema": 1, "kind": "oom", "node": "n0", "rank": 0, "line": line, "source": "log", "sick": False}
        run.write(f"attempts/{attempt}/causes/n0.json", cause)
    run.status(attempt, "failed" if died or failed else "succeeded", int(died or failed), ended_at=began + 10)


def all_ended() -> None:
    *fit, dies = run_dirs()
    for number, run_dir in enumerate(fit):
        ended(run_dir, 1.0 + 0.01 * number)
    ended(dies, 0.8, died=True)


def test_six_jobs_are_submitted_once_and_a_repeated_command_submits_what_is_missing(
    llmlaunch: CommandLine, questions: Path
) -> None:
    llmlaunch(*QUALIFY, "--no-wait")
    assert submitted(questions) == [f"{NAME}-{number}" for number in range(1, 7)]
    assert all(f"--job-name={path.name}" in (path / "job.sbatch").read_text() for path in run_dirs())
    assert not any((path / "fallback").exists() for path in run_dirs())
    again = llmlaunch(*QUALIFY, "--no-wait")
    assert "Continuing the qualification" in again.stderr
    assert len(submitted(questions)) == 6
    (run_dirs()[3] / "submission.json").unlink()
    llmlaunch(*QUALIFY, "--no-wait")
    assert submitted(questions)[6:] == [f"{NAME}-4"]
    assert "--again" in llmlaunch(*QUALIFY, "--nodes", "2", "--no-wait", code=2).stderr


def test_a_new_one_beside_the_earlier(llmlaunch: CommandLine, questions: Path) -> None:
    FOLDER.mkdir(parents=True)
    assert "holds no qualification" in llmlaunch(*QUALIFY, "--no-wait", code=2).stderr
    hint = llmlaunch(*QUALIFY, "--again", "--no-wait").stdout
    assert f"llmlaunch {' '.join(QUALIFY)} --report" in hint
    assert len(list(Path("runs").iterdir())) == 2
    assert "Continuing" in llmlaunch(*QUALIFY, "--no-wait").stderr
    assert len(submitted(questions)) == 6


def test_what_was_measured_is_on_the_page_in_json_and_in_check(
    llmlaunch: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = asset("recipes", "llama3-8b.yaml")
    not_qualified = "Not qualified: nothing was measured on h100-80gb-x8 with megatron-lm"
    llmlaunch(*QUALIFY, "--no-wait")
    assert not_qualified in llmlaunch("check", "-v", recipe).stdout
    all_ended()
    page = llmlaunch(*QUALIFY).stdout
    assert "Qualified h100-80gb-x8 with megatron-lm" in page
    assert "memory -3.8 % (too low) at worst" in page
    assert "out of memory: as predicted" in page
    assert re.search(r"tight \(risk [0-9.]+ %\): as predicted", page)
    assert "No calibration of megatron-lm on h100-80gb yet" in page
    assert "5 more runs will do" in page
    (written,) = Path("runs").glob("*/qualification.md")
    assert written.read_text().startswith("# Qualified h100-80gb-x8 with megatron-lm")

    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    answer = llmlaunch.json(*QUALIFY, "--report")
    validate(answer, json.loads((ROOT / "docs" / "schemas" / "qualify.schema.json").read_text()))
    assert (answer["complete"], answer["as_predicted"]) == (True, True)
    assert answer["worst_error"] == pytest.approx(1 / 1.04 - 1, abs=1e-6)
    assert [layout["expectation"] for layout in answer["layouts"]] == [*["fits"] * 4, "tight", "dies"]
    assert [layout["error"] is None for layout in answer["layouts"]] == [*[False] * 5, True]
    assert answer["layouts"][0]["step_error"] == pytest.approx(-0.5, abs=1e-6)

    checked = llmlaunch("check", "-v", recipe).stdout
    assert "Qualified on h100-80gb-x8 with megatron-lm on " in checked
    assert "(6 layouts, worst -3.8 % (too low))" in checked
    assert (
        not_qualified.replace("h100-80gb", "h200-141gb")
        in llmlaunch("check", "-v", recipe, "cluster=h200-141gb-x8").stdout
    )


def test_ends_that_were_not_predicted_are_findings(llmlaunch: CommandLine) -> None:
    llmlaunch(*QUALIFY, "--no-wait")
    ended(run_dirs()[0], 1.0)
    page = llmlaunch(*QUALIFY, "--report").stdout
    assert "Qualifying h100-80gb-x8 with megatron-lm: 1 of 6 layouts have ended" in page
    assert "alibration" not in page
    ended(run_dirs()[1], 1.0, failed=True)
    ended(run_dirs()[2], 1.0)
    ended(run_dirs()[3], 1.0)
    ended(run_dirs()[4], 1.1, died=True)
    ended(run_dirs()[5], 0.7)
    page = llmlaunch(*QUALIFY, code=1).stdout
    assert "Run 2 ended for another reason" in page
    assert "Run 5 ran out of memory though it was predicted to fit" in page
    assert "Run 6 was predicted to run out of memory and used" in page


def test_dry_run_shows_the_six_and_writes_nothing(llmlaunch: CommandLine, tmp_path: Path, questions: Path) -> None:
    before = sorted(tmp_path.iterdir())
    shown = llmlaunch(*QUALIFY, "--backend", "deepspeed", "--model", "qwen2.5-0.5b", "--dry-run").stdout
    assert "tight" in shown
    assert "Submitting" not in llmlaunch(*QUALIFY, "--dry-run").stderr
    answer: dict[str, Any] = llmlaunch.json(*QUALIFY, "--dry-run")
    assert len(answer["layouts"]) == 6
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ((), "name what is to be qualified: a RECIPE, or --cluster NAME"),
        (("--cluster", "nowhere"), "unknown cluster 'nowhere'"),
        ((*CLUSTER, "--report"), "nothing was measured on h100-80gb-x8 with megatron-lm"),
        ((*CLUSTER, "--local"), "8 h100-80gb on one node, and this machine has no GPU"),
        ((*CLUSTER, "--local", "--no-wait"), "leave out --no-wait"),
        (("--cluster", "cpu-x1", "--local", "python=/nowhere/python"), "/nowhere/python"),
        ((*CLUSTER, "--backend", "deepspeed", "backend.script=/x/train.py"), "qualify measures the trainer"),
    ],
)
def test_a_mistake_is_one_message(llmlaunch: CommandLine, questions: Path, words: tuple[str, ...], why: str) -> None:
    answer = llmlaunch("qualify", *words, code=2)
    assert why in answer.stderr
    assert answer.stdout == ""
    assert submitted(questions) == []
    assert not Path("runs").exists()


def test_a_recipes_own_split_is_left_out_and_its_other_techniques_stay(llmlaunch: CommandLine, tmp_path: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(recipe_text(nodes="64", layout="{tensor: 8, pipeline: 16, loss: native, recompute: full}"))
    answer = llmlaunch.json("qualify", recipe, "--dry-run")
    words = [next(word for word in layout["overrides"] if word.startswith("layout=")) for layout in answer["layouts"]]
    assert all('"loss": "native"' in word for word in words)
    assert not any('"pipeline": 16' in word for word in words)
