"""The shipped training script's life, for real: it is told to end, saves and comes back, refuses what it cannot go on
with, and ends with its ranks. Two processes on this machine's CPU."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from trainer_runner import TINY, Train, case

from llmlaunch.assets import asset
from llmlaunch.frameworks.checkpoints import checkpoint_bytes
from llmlaunch.layout import Layout
from llmlaunch.recipe.load import load_recipe
from support.soak import in_soak, share
from support.wandb_files import read_back

pytestmark = pytest.mark.frameworks

ZERO_1 = Layout(data=2, micro_batch_size=4, zero_stage=1)


def saving(folder: Path, interval: int, steps: int) -> tuple[str, ...]:
    place = f"training.checkpoint_path={folder / 'checkpoints'}"
    return (f"training.save_interval={interval}", place, f"training.steps={steps}")


@pytest.mark.parametrize("stage", share((2, 3), (3,)))
def test_told_to_end_it_saves_and_goes_on_as_if_never_interrupted(train: Train, tmp_path: Path, stage: int) -> None:
    """One rank alone is told, between two regular saves; all agree."""
    layout, steps = Layout(data=2, micro_batch_size=4, zero_stage=stage), 20
    words = saving(tmp_path, 1000, steps)
    whole = case("whole", layout, f"training.steps={steps}")
    runs = train([whole, case("told", layout, *words) | {"told": True}], tmp_path)
    assert (runs["whole"].codes, runs["told"].codes) == ([0, 0], [0, 0]), runs["told"].said
    saved = re.search(r"^saved step (\d+) after SIGTERM$", runs["told"].said, re.MULTILINE)
    assert saved is not None, runs["told"].said
    step = int(saved[1])
    assert 3 <= step < steps
    assert (tmp_path / "checkpoints" / "latest").read_text() == f"step-{step}"
    shutil.copytree(tmp_path / "checkpoints", tmp_path / "fewer" / "checkpoints")
    again = train([case("again", layout, *words)], tmp_path)["again"]
    assert again.codes == [0, 0], again.said
    assert again.said.splitlines()[0] == f"resumed after step {step}"
    assert again.losses == pytest.approx(runs["whole"].losses[step:], abs=2e-4)
    assert (tmp_path / "checkpoints" / "latest").read_text() == f"step-{steps}"
    if stage == 3:  # a node of a lower stage is lost in tests/slurm/test_same_allocation.py
        goes_on_on_one_rank_and_on_two_again(train, tmp_path / "fewer", step, runs["whole"].losses)


def goes_on_on_one_rank_and_on_two_again(train: Train, folder: Path, step: int, losses: list[float]) -> None:
    layout = Layout(data=2, micro_batch_size=4, zero_stage=3)
    one = train([case("one", replace(layout, data=1), *saving(folder, 1000, step + 2))], folder)["one"]
    assert one.codes == [0], one.said
    assert f"converting step-{step} of 2 ranks for 1" in one.said
    assert one.losses == pytest.approx(losses[step : step + 2], abs=2e-4)
    for again in in_soak("two"):
        two = train([case(again, layout, *saving(folder, 1000, step + 4))], folder)[again]
        assert two.codes == [0, 0], two.said
        assert f"converting step-{step + 2} of 1 ranks for 2" in two.said
        assert two.losses == pytest.approx(losses[step + 2 : step + 4], abs=2e-4)
    assert not [*(folder / "checkpoints").glob("*-universal")]


def test_a_checkpoint_that_is_not_whole_is_named_and_not_loaded(train: Train, tmp_path: Path) -> None:
    """DeepSpeed alone would go on without the optimizer's states."""
    words = saving(tmp_path, 2, 4)
    assert train([case("first", ZERO_1, *words)], tmp_path)["first"].codes == [0, 0]
    folder = tmp_path / "checkpoints"
    written = sum(path.stat().st_size for path in (folder / "step-4").iterdir())
    recipe = load_recipe(asset("recipes", "quickstart.yaml"), (*TINY, *words))
    assert written == pytest.approx(checkpoint_bytes(recipe), rel=0.03)  # what the lead time is derived from
    next((folder / "step-4").glob("*zero_pp_rank_1_*")).unlink()
    torn = train([case("torn", ZERO_1, *saving(tmp_path, 2, 6))], tmp_path)["torn"]
    assert 0 not in torn.codes
    assert "names step-4, which holds the optimizer states of 1 ranks; 2 have saved it" in torn.said
    (folder / "latest").write_text("step-40")
    missing = train([case("missing", ZERO_1, *saving(tmp_path, 2, 6))], tmp_path)["missing"]
    assert 0 not in missing.codes
    assert missing.said.count("latest names step-40, which is missing") == 1
    assert "there are step-2, step-4" in missing.said


def test_a_loss_that_is_not_finite_is_a_failure(train: Train, tmp_path: Path) -> None:
    job = case("nan", ZERO_1)
    model = json.loads(job["files"]["trainer/model.json"])
    job["files"]["trainer/model.json"] = json.dumps(model | {"rms_norm_eps": float("nan")})
    run = train([job], tmp_path)["nan"]
    assert 0 not in run.codes
    assert run.said.count("step 1: the loss is nan") == 1


def test_signals_while_it_saves_do_not_disturb_it(train: Train, tmp_path: Path) -> None:
    """SIGTERM to both ranks, as a node's wrapper sends it, again and again until they end."""
    pestered = train([case("pestered", ZERO_1, *saving(tmp_path, 5, 100_000)) | {"pestered": True}], tmp_path)[
        "pestered"
    ]
    assert pestered.codes == [0, 0], pestered.said
    assert pestered.said.count("after SIGTERM") == 1
    step = int((tmp_path / "checkpoints" / "latest").read_text().removeprefix("step-"))
    again = train([case("again", ZERO_1, *saving(tmp_path, 5, step + 1))], tmp_path)["again"]
    assert again.codes == [0, 0], again.said
    assert f"step {step + 1}/{step + 1} | loss" in again.said


@pytest.mark.parametrize(("refusing", "seconds"), share([([0, 1], 30), ([1], 1)], [([1], 1)]))
def test_what_ranks_refuse_is_said_once_by_whichever_sees_it(
    train: Train, tmp_path: Path, refusing: list[int], seconds: int
) -> None:
    job = {"name": "refusing", "ranks": 2, "files": {}, "words": [], "refusing": refusing, "meeting_seconds": seconds}
    run = train([job], tmp_path)["refusing"]
    assert [rank for rank, code in enumerate(run.codes) if code] == refusing, run.said
    assert run.said.count("the data has gone") == 1, run.said
    assert run.said.count("Said by rank 1 on ") == (refusing == [1])
    assert "Traceback" not in run.said


def test_the_curves_of_a_run_are_whole_in_wandb(train: Train, tmp_path: Path) -> None:
    """DeepSpeed's own monitor, by ds_config.json; the variables are those that a node sets. Rank 0 alone writes."""
    variables = {"WANDB_RUN_ID": "tiny-1", "WANDB_RESUME": "allow", "WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path)}
    words = ("training.steps=3", "tracking={wandb: {project: ours, mode: offline}}")
    run = train([case("curves", ZERO_1, *words) | {"environment": variables}], tmp_path)["curves"]
    assert run.codes == [0, 0], run.said
    (written,) = (tmp_path / "wandb").glob("offline-run-*")
    contents = read_back(written)
    assert (contents["id"], contents["project"], contents["exit"]) == ("tiny-1", "ours", 0)
    assert contents["summary"]["Train/Samples/train_loss"] == pytest.approx(run.losses[-1], abs=1e-4)
    assert contents["summary"]["_step"] == 3 * 8, "sequences, as DeepSpeed counts"
