"""A rank that runs alone holds what it holds among its peers: the shipped trainer over torch's fake group, and over
gloo with as many processes as the job has ranks."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from trainer_runner import TINY, Train, TrainerRuns, as_case

from llmlaunch.assets import asset
from llmlaunch.frameworks.deepspeed.backend import DeepSpeed
from llmlaunch.frameworks.deepspeed.trace import rank_alone
from llmlaunch.layout import RECOMPUTE_FULL, Layout, LayoutColumns
from llmlaunch.memory.job import Job, all_ranks
from llmlaunch.memory.weights import rank_parameters
from llmlaunch.recipe.load import load_recipe
from llmlaunch.recipe.types import Recipe
from llmlaunch.trainers import TRAINER
from support.soak import share

pytestmark = pytest.mark.frameworks

STEPS = 2  # states exist from the first, ZeRO 3 knows its order of modules from the second
ADAPTERS = "training.adapters={rank: 4}"
# name: a layout of few ranks, and what else the recipe says
SMALL = {
    "ZeRO 0": (Layout(data=2, micro_batch_size=2), ()),
    "ZeRO 2": (Layout(data=2, micro_batch_size=2, zero_stage=2, recompute=RECOMPUTE_FULL), ()),
    "ZeRO 3, adapters": (Layout(data=2, micro_batch_size=2, zero_stage=3), (ADAPTERS,)),
    "ZeRO 1, AutoTP": (Layout(data=2, tensor=2, micro_batch_size=2, zero_stage=1), ()),
    "ZeRO 3, Ulysses": (Layout(data=2, context=2, micro_batch_size=2, zero_stage=3), ()),
}
# of which no test could start the peers
LARGE = {
    "ZeRO 3 of 64": Layout(data=64, micro_batch_size=1, zero_stage=3),
    "ZeRO 1 of 64, AutoTP": Layout(data=32, tensor=2, micro_batch_size=1, zero_stage=1),
}
STARTED, LARGE_STARTED = share(SMALL, ("ZeRO 3, adapters",)), share(LARGE, ("ZeRO 3 of 64",))


def recipe_of(layout: Layout, *overrides: str) -> Recipe:
    """Two micro-batches a step."""
    batch = f"training.global_batch_size={2 * layout.data * layout.micro_batch_size}"
    words = (*TINY, "training.precision=bf16", f"training.steps={STEPS}", batch, *overrides)
    return load_recipe(asset("recipes", "quickstart.yaml"), words)


def alone(name: str, layout: Layout, *overrides: str) -> dict[str, Any]:
    recipe = recipe_of(layout, *overrides)
    rendered = DeepSpeed().render(recipe, layout)
    single = replace(rendered, program=rank_alone(recipe, layout, rendered, 0, STEPS).program[1:])
    return as_case(name, single, layout.world_size) | {"alone": True, "weighed": True}


def among(name: str, layout: Layout, *overrides: str) -> dict[str, Any]:
    rendered = DeepSpeed().render(recipe_of(layout, *overrides), layout)
    return as_case(name, rendered, layout.world_size) | {"weighed": True}


@pytest.fixture(scope="module")
def found(train: Train, tmp_path_factory: pytest.TempPathFactory) -> TrainerRuns:
    started = {name: SMALL[name] for name in STARTED}
    cases = [among(name, layout, *words) for name, (layout, words) in started.items()]
    cases += [alone(f"{name}, alone", layout, *words) for name, (layout, words) in started.items()]
    cases += [alone(name, LARGE[name]) for name in LARGE_STARTED]
    misplaced = among("misplaced", Layout(micro_batch_size=2))
    misplaced["words"] = [*misplaced["words"], "--alone", "4"]
    return train([*cases, misplaced], tmp_path_factory.mktemp("alone"))


@pytest.mark.parametrize("name", STARTED)
def test_a_rank_alone_holds_what_it_holds_among_its_peers(found: TrainerRuns, name: str) -> None:
    """To the byte what lasts, in every step. At most, gloo's threads may hold what has just travelled a little longer
    than a rank alone does."""
    peers, single = found[name], found[f"{name}, alone"]
    assert single.codes == [0], single.said
    assert set(peers.codes) == {0}, peers.said
    for there, here in zip(peers.weights, single.weights, strict=True):
        assert {**here, "most": None} == {**there, "most": None}
    assert 0.8 * peers.weights[-1]["most"] <= single.weights[-1]["most"] <= 1.001 * peers.weights[-1]["most"]


@pytest.mark.parametrize("name", LARGE_STARTED)
def test_its_shards_are_those_of_the_whole_job(found: TrainerRuns, name: str) -> None:
    """Of 64 ranks: bf16 parameters, whole but for AutoTP and ZeRO 3, and Adam's two moments in fp32."""
    layout, single = LARGE[name], found[name]
    assert single.codes == [0], single.said
    recipe = recipe_of(layout)
    job = Job(recipe.model, recipe.workload, DeepSpeed().facts(recipe))
    mine = rank_parameters(job, all_ranks(job, LayoutColumns.of([layout]))).dense[0]
    sharing = layout.data * layout.context
    weight = single.weights[-1]
    assert weight["parameters"] == pytest.approx(2 * mine / (sharing if layout.zero_stage == 3 else 1), rel=0.01)
    assert weight["states"] == pytest.approx(8 * mine / sharing, rel=0.01)


def test_it_says_what_it_did(found: TrainerRuns) -> None:
    said = found["ZeRO 3 of 64"].said
    assert "alone as rank 0 of 64: 2 steps, 4 micro-batches, none skipped" in said
    assert all(1.0 < loss < 10.0 for loss in found["ZeRO 3 of 64"].losses)


def test_among_real_ranks_it_ends(found: TrainerRuns) -> None:
    assert found["misplaced"].codes == [1]
    assert "--alone 4: this is a group of 1 ranks over gloo" in found["misplaced"].said


def work_checker(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """alone.py of the trainer, without DeepSpeed."""

    def refuse(message: str) -> None:
        raise SystemExit(message)

    monkeypatch.setitem(sys.modules, "group", SimpleNamespace(refuse=refuse, report=print))
    monkeypatch.setitem(sys.modules, "parallel", SimpleNamespace(RankSplit=None))
    spec = importlib.util.spec_from_file_location("trainer_alone", Path(TRAINER).with_name("alone.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"micro_steps": 5}, "5 of 6 micro-batches ran"),
        ({"skipped_steps": 1}, "1 of 3 steps were skipped"),
        ({"basic_optimizer": SimpleNamespace(state={})}, "the optimizer holds 0 of 50 elements of its states"),
    ],
)
def test_a_rank_that_did_less_fails(monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], sentence: str) -> None:
    """Of 100 parameters over four ranks each has 25, and two moments of each."""
    import torch

    checker = work_checker(monkeypatch)
    states = {0: {"step": torch.tensor(3.0), "exp_avg": torch.zeros(25), "exp_avg_sq": torch.zeros(25)}}
    engine = SimpleNamespace(
        gradient_accumulation_steps=lambda: 2,
        micro_steps=6,
        skipped_steps=0,
        zero_optimization=lambda: True,
        basic_optimizer=SimpleNamespace(state=states),
        module=torch.nn.Linear(10, 10, bias=False),
    )
    split = SimpleNamespace(ranks=4, data=4, sequence=1)
    checker.check_work(engine, 3, split)
    vars(engine).update(change)
    with pytest.raises(SystemExit, match=sentence):
        checker.check_work(engine, 3, split)
