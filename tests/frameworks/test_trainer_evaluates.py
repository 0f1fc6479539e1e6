"""Evaluation on the way with the shipped DeepSpeed script, trained for real on this machine's CPU as it is rendered."""

from __future__ import annotations

from pathlib import Path

import pytest
from trained_cases import EVALUATION
from trainer_runner import Train, case

from llmlaunch.frameworks.logs import deepspeed_lines
from llmlaunch.layout import Layout
from support.step_lines import parse_step, parser_of

pytestmark = pytest.mark.frameworks


def test_the_shipped_trainer_evaluates_on_a_share_or_on_other_data(train: Train, tmp_path: Path) -> None:
    """With parameters in shards, and again where the layers are split; both have one loss. It trains as it does without
    an evaluation, and a checkpoint is written beside it."""
    text = tmp_path / "text"
    text.write_text("to be or not to be, that is the question. " * 200)
    validation = tmp_path / "validation"
    validation.write_text("0123456789" * 100)
    data, other = f"data={{path: {text}}}", f"data={{path: {text}, validation: {validation}}}"
    sharded, pair = Layout(data=2, micro_batch_size=2, zero_stage=3), Layout(tensor=2, micro_batch_size=8)
    saving = ("training.save_interval=4", f"training.checkpoint_path={tmp_path / 'checkpoints'}")
    runs = train(
        [
            case("plain", sharded, data, "data.split='90,10,0'"),
            case("share", sharded, data, "data.split='90,10,0'", EVALUATION, *saving),
            case("split", pair, data, "data.split='90,10,0'", EVALUATION),
            case("other", Layout(micro_batch_size=4), other, EVALUATION),
        ],
        tmp_path,
    )
    for name, run in runs.items():
        assert not any(run.codes), f"{name}: {run.said}"
    losses = {name: validation_losses(run.said) for name, run in runs.items()}
    assert losses["plain"] == []
    assert losses["share"] == pytest.approx(losses["split"], abs=2e-3)
    assert len(losses["share"]) == 2
    assert losses["share"][1] < losses["share"][0], "what it learns is in the held out share, too"
    assert losses["other"][1] > losses["share"][1] + 0.5, "digits are not what it learned"
    assert runs["share"].losses == pytest.approx(runs["plain"].losses, abs=1e-5)
    assert (tmp_path / "checkpoints" / "latest").read_text() == "step-4"
    assert parser_of(deepspeed_lines()).is_slow(b"evaluating at step 2")


def validation_losses(output: str) -> list[float]:
    lines = [line for line in output.splitlines() if line.startswith("validation at step")]
    assert all(parse_step(line) is None for line in lines)
    return [float(line.split("validation loss ")[1].split()[0]) for line in lines]
