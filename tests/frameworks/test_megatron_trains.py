"""Real Megatron-LM trains on this machine's CPU with the words our renderer makes (core 0.19.2, `pretrain` itself).

Every split of a model begins with the weights one process saved, and must then lose what one process loses.
"""

from __future__ import annotations

import pytest
from cpu_training import Trained, cpu_job, train_on_cpu
from trained_cases import CASES, MODELS, STEPS, TrainedCase, recipe_for, start_of

from llmlaunch.layout import Layout

pytestmark = pytest.mark.frameworks

ALONE = Layout()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Trained]:
    """What became of every case, and of one process alone ("llama alone")."""
    folder = tmp_path_factory.mktemp("megatron")
    starts = [cpu_job(f"{model} start", recipe_for(model, start_of(model, folder)), ALONE) for model in MODELS]
    begin = {model: f"training.start_from={folder / model}" for model in MODELS}
    alone = [cpu_job(f"{model} alone", recipe_for(model, (begin[model],)), ALONE) for model in MODELS]
    cases = [
        cpu_job(case.name, recipe_for(case.model, (begin[case.model], *case.overrides)), case.layout) for case in CASES
    ]
    return train_on_cpu([*starts, *alone, *cases], folder / "logs")


@pytest.mark.parametrize("model", MODELS)
def test_the_loss_falls(trained: dict[str, Trained], model: str) -> None:
    alone = trained[f"{model} alone"]
    assert alone.codes == (0,), alone.complaint()
    assert [step.step for step in alone.steps] == list(range(1, STEPS + 1))
    assert alone.losses[-1] < alone.losses[0] - 0.3


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_however_it_is_split_it_learns_the_same(trained: dict[str, Trained], case: TrainedCase) -> None:
    one = trained[case.name]
    assert set(one.codes) == {0}, one.complaint()
    assert one.losses == pytest.approx(trained[f"{case.model} alone"].losses, rel=case.tolerance)
