"""Trainers of a person's own with Megatron-LM, and evaluation on the way with both backends, trained for real on this
machine's CPU as they are rendered."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from cpu_training import ADDED_WORDS, cpu_job, under_torchrun
from judges import MegatronScripts
from trained_cases import EVALUATION, OWN_TRAINER, SHARED, own_job
from trainer_runner import Train, case

from llmlaunch.frameworks.argument import NodeVariable
from llmlaunch.frameworks.base import Rendered
from llmlaunch.frameworks.logs import deepspeed_lines, megatron_lines
from llmlaunch.frameworks.megatron.backend import MegatronLM
from llmlaunch.layout import Layout
from llmlaunch.trainers import MEGATRON_CHECK, MEGATRON_DATASET
from support.step_lines import parse_step, parser_of

pytestmark = pytest.mark.frameworks

SECONDS = 240


def on_one_node(
    scripts: MegatronScripts, words: tuple[str | NodeVariable, ...], script: Path, rendered: Rendered
) -> str:
    """Run one of our scripts as the job does before the training, and return its output."""
    code, said = scripts.start("build", str(script), *map(str, words[1:]), *ADDED_WORDS, **rendered.environment).end()
    assert code == 0, said
    return said


def test_a_trainer_of_ones_own_trains_on_own_data_and_evaluates(
    dataset: Path, scripts: MegatronScripts, tmp_path: Path
) -> None:
    """Its arguments are checked and all indexes built before by the same words; then two ranks train and evaluate."""
    for name in ("training", "validation"):
        for suffix in (".bin", ".idx"):
            shutil.copy(dataset.with_suffix(suffix), tmp_path / f"{name}{suffix}")
    recipe = own_job(tmp_path)
    rendered = MegatronLM().render(recipe, SHARED)
    assert "takes the arguments of" in on_one_node(scripts, rendered.check, MEGATRON_CHECK, rendered)
    on_one_node(scripts, rendered.prepare, MEGATRON_DATASET, rendered)
    indexes = sorted(path.name for path in tmp_path.rglob("*.npy"))
    assert any("train" in name for name in indexes)
    assert any("valid" in name for name in indexes)
    process = under_torchrun(cpu_job("own", recipe, SHARED), OWN_TRAINER)
    output, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, output
    assert output.count("a model of its own, scaled by 0.5") == 2
    assert re.findall(r"validation loss at iteration (\d+)", output) == ["2", "4", "4"]  # again after the last step
    steps = [step for step in map(parse_step, output.splitlines()) if step is not None]
    assert [step.step for step in steps] == [1, 2, 3, 4]
    assert parser_of(megatron_lines()).read(line.encode() for line in output.splitlines()).slow  # the last is announced
    assert sorted(path.name for path in tmp_path.rglob("*.npy")) == indexes


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
