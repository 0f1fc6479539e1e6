"""A trainer of a person's own with Megatron-LM, and evaluation on the way, trained for real on this machine's CPU as it
is rendered."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from cpu_training import ADDED_WORDS, TrainOnCpu, cpu_job
from judges import MegatronScripts
from trained_cases import OWN_TRAINER, SHARED, own_job

from llmlaunch.frameworks.argument import NodeVariable
from llmlaunch.frameworks.base import Rendered
from llmlaunch.frameworks.logs import megatron_lines
from llmlaunch.frameworks.megatron.backend import MegatronLM
from llmlaunch.trainers import MEGATRON_CHECK, MEGATRON_DATASET
from support.step_lines import parse_step, parser_of

pytestmark = pytest.mark.frameworks


def on_one_node(
    scripts: MegatronScripts, words: tuple[str | NodeVariable, ...], script: Path, rendered: Rendered
) -> str:
    """Run one of our scripts as the job does before the training, and return its output."""
    code, said = scripts.start("build", str(script), *map(str, words[1:]), *ADDED_WORDS, **rendered.environment).end()
    assert code == 0, said
    return said


def test_a_trainer_of_ones_own_trains_on_own_data_and_evaluates(
    train_megatron: TrainOnCpu, dataset: Path, scripts: MegatronScripts, tmp_path: Path
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
    own = train_megatron([replace(cpu_job("own", recipe, SHARED), script=str(OWN_TRAINER))])["own"]
    assert own.codes == (0, 0), own.complaint()
    output = "".join(own.output)
    assert output.count("a model of its own, scaled by 0.5") == 2
    assert re.findall(r"validation loss at iteration (\d+)", output) == ["2", "4", "4"]  # again after the last step
    steps = [step for step in map(parse_step, output.splitlines()) if step is not None]
    assert [step.step for step in steps] == [1, 2, 3, 4]
    first_rank = own.output[0].splitlines()
    assert parser_of(megatron_lines()).read(line.encode() for line in first_rank).slow  # the last is announced
    assert sorted(path.name for path in tmp_path.rglob("*.npy")) == indexes
