"""However a job is split and computed, the shipped script learns what one process learns: the same loss and the same
gradients, step by step. Real DeepSpeed on this machine's CPU, jobs of our own rendering."""

from __future__ import annotations

from pathlib import Path

import pytest
from trainer_runner import TINY, Train, TrainerRun, TrainerRuns, case

from llmlaunch.assets import asset
from llmlaunch.frameworks.checkpoints import checkpoint_bytes
from llmlaunch.layout import RECOMPUTE_FULL, Layout
from llmlaunch.recipe.load import load_recipe
from support.soak import share

pytestmark = pytest.mark.frameworks

TILED = "layout={mlp_chunks: 2, loss: tiled, loss_tiles: 4}"
STREAMED = "layout={offload_parameters: true, offload_optimizer: 1.0}"
LORA = "training.adapters={rank: 4}"
LORA_FA = "training.adapters={rank: 4, frozen_down: true}"
LAST = "training.trained_layers=1"
TIED = "model.tied_embeddings=true"
BF16 = "training.precision=bf16"
BF16_STATES = "training.optimizer={main_parameters: bf16, first_moment: bf16, second_moment: bf16}"

# name -> how it is split, what the recipe says more
SPLITS: dict[str, tuple[Layout, tuple[str, ...]]] = {
    "zero 0": (Layout(data=2, micro_batch_size=4), ()),
    "zero 1": (Layout(data=2, micro_batch_size=2, zero_stage=1), ()),
    "zero 2": (Layout(data=2, micro_batch_size=2, zero_stage=2, recompute=RECOMPUTE_FULL), ()),
    "zero 3": (Layout(data=2, micro_batch_size=2, zero_stage=3), ()),
    "zero 2 offloaded": (Layout(data=2, micro_batch_size=4, zero_stage=2), ("layout.offload_optimizer=1.0",)),
    "zero 3 offloaded": (Layout(data=2, micro_batch_size=4, zero_stage=3), (STREAMED,)),
    "tensor, zero 0": (Layout(tensor=2, micro_batch_size=4), ()),
    "tensor, zero 1": (Layout(tensor=2, micro_batch_size=8, zero_stage=1, recompute=RECOMPUTE_FULL), ()),
    "tensor, zero 3": (Layout(tensor=2, micro_batch_size=8, zero_stage=3), ()),
    "tensor x data, zero 2": (Layout(tensor=2, data=2, micro_batch_size=4, zero_stage=2), ()),
    "context, zero 0": (Layout(context=2, micro_batch_size=4), ()),
    "context, zero 1": (Layout(context=2, micro_batch_size=8, zero_stage=1, recompute=RECOMPUTE_FULL), ()),
    "context, zero 3": (Layout(context=2, micro_batch_size=4, zero_stage=3), ()),
    "context x data, zero 2": (Layout(context=2, data=2, micro_batch_size=4, zero_stage=2), ()),
    "tiles": (Layout(data=2, micro_batch_size=2, zero_stage=1, recompute=RECOMPUTE_FULL), (TILED,)),
    "tiles, context": (Layout(context=2, micro_batch_size=8, zero_stage=3), (TILED,)),
}
ADAPTED: dict[str, tuple[Layout, tuple[str, ...]]] = {
    "lora": (Layout(micro_batch_size=8, zero_stage=1), (LORA,)),
    "lora, zero 3": (Layout(data=2, micro_batch_size=4, zero_stage=3), (LORA,)),
    "lora, context": (Layout(context=2, micro_batch_size=8, zero_stage=2), (LORA,)),
    "lora-fa": (Layout(micro_batch_size=8), (LORA_FA,)),
    "lora-fa, zero 3": (Layout(data=2, micro_batch_size=4, zero_stage=3), (LORA_FA,)),
    "last layer": (Layout(micro_batch_size=8), (LAST,)),
    "last layer, zero 2": (Layout(data=2, micro_batch_size=4, zero_stage=2), (LAST,)),
    "tied": (Layout(micro_batch_size=8, zero_stage=1), (TIED,)),
    "tied, tiles, zero 1": (Layout(data=2, micro_batch_size=2, zero_stage=1), (TIED, TILED)),
    "tied, tiles, zero 2": (Layout(data=2, micro_batch_size=2, zero_stage=2), (TIED, TILED)),
    "tied, tiles, zero 3": (Layout(data=2, micro_batch_size=4, zero_stage=3), (TIED, TILED)),
    "bf16": (Layout(micro_batch_size=8, zero_stage=1), (BF16,)),
    "bf16 states": (Layout(micro_batch_size=8, zero_stage=1), (BF16, BF16_STATES)),
    "bf16 states, zero 1": (Layout(data=2, micro_batch_size=4, zero_stage=1), (BF16, BF16_STATES)),
    "bf16 states, zero 2": (Layout(data=2, micro_batch_size=2, zero_stage=2), (BF16, BF16_STATES)),
    "bf16 states, zero 3": (Layout(data=2, micro_batch_size=4, zero_stage=3), (BF16, BF16_STATES)),
    "bf16, tensor": (Layout(tensor=2, micro_batch_size=8, zero_stage=2), (BF16,)),
    "bf16, context": (Layout(context=2, micro_batch_size=8, zero_stage=3), (BF16,)),
}
WHOLE = Layout(micro_batch_size=8, zero_stage=1)
# Trained in each `make test`; a name before a comma is that of the job whose curve it must have.
SPLIT = share(SPLITS, ("zero 3 offloaded", "tensor x data, zero 2", "context x data, zero 2", "tiles, context"))
OTHERWISE = share(
    [name for name in ADAPTED if "," in name], ("lora, zero 3", "tied, tiles, zero 3", "bf16 states, zero 2")
)


@pytest.fixture(scope="module")
def runs(train: Train, tmp_path_factory: pytest.TempPathFactory) -> TrainerRuns:
    jobs = {"one process": (WHOLE, ()), **SPLITS, **ADAPTED}
    alike = [name.split(",")[0] for name in OTHERWISE]
    names = dict.fromkeys(("one process", *SPLIT, *alike, *OTHERWISE))
    return train([case(name, jobs[name][0], *jobs[name][1]) for name in names], tmp_path_factory.mktemp("curves"))


def compare(run: TrainerRun, whole: TrainerRun, tolerance: float) -> None:
    assert set(run.codes) == {0}, run.said[-3000:]
    assert run.losses == pytest.approx(whole.losses, rel=tolerance)
    if None not in (*run.norms, *whole.norms):
        assert run.norms == pytest.approx(whole.norms, rel=10 * tolerance)


def test_one_process_learns(runs: TrainerRuns) -> None:
    whole = runs["one process"]
    assert len(whole.losses) == 4
    assert whole.losses[0] == pytest.approx(5.55, abs=0.1)
    assert whole.losses[-1] < whole.losses[0] - 1.0


@pytest.mark.parametrize("name", SPLIT)
def test_a_split_job_learns_the_same(runs: TrainerRuns, name: str) -> None:
    compare(runs[name], runs["one process"], 1e-5)


@pytest.mark.parametrize("name", OTHERWISE)
def test_so_does_one_that_trains_a_part_or_in_half_precision(runs: TrainerRuns, name: str) -> None:
    alike = runs[name.split(",")[0]]
    assert alike.losses[-1] < alike.losses[0] - 0.02
    compare(runs[name], alike, 1e-2 if name.startswith("bf16") else 1e-5)


def test_a_rank_that_is_told_less_counts_the_tokens_of_all(runs: TrainerRuns) -> None:
    """tokens/s times s/step is the tokens of the whole batch, however it is split."""
    for name in ("one process", "tensor x data, zero 2", "context x data, zero 2"):
        line = next(line for line in runs[name].said.splitlines() if line.startswith("step 4/4"))
        seconds, tokens = (float(part.split()[0]) for part in line.split(" | ")[2:])
        assert seconds * tokens == pytest.approx(8 * 64, rel=0.1 + 0.005 / seconds)


@pytest.fixture(scope="module")
def come_back(train: Train, tmp_path_factory: pytest.TempPathFactory) -> tuple[TrainerRuns, Path]:
    """Each job stops after two steps, and goes on to the fourth."""
    place = tmp_path_factory.mktemp("again")
    cases = []
    for name in COMING_BACK:
        layout, more = BACK[name]
        saving = ("training.save_interval=2", f"training.checkpoint_path={place / 'saved' / name.replace(' ', '-')}")
        cases.append(case(f"{name}, begun", layout, *more, *saving, "training.steps=2"))
        cases.append(case(f"{name}, again", layout, *more, *saving))
    return train(cases, place), place


BACK: dict[str, tuple[Layout, tuple[str, ...]]] = {
    "tensor x data": (Layout(tensor=2, data=2, micro_batch_size=4, zero_stage=3), ()),
    "context": (Layout(context=2, micro_batch_size=8, zero_stage=1), ()),
    "lora": (Layout(data=2, micro_batch_size=4, zero_stage=3), (LORA,)),
    "bf16 states": ADAPTED["bf16 states, zero 2"],
}
COMING_BACK = share(BACK, ("lora", "bf16 states"))
UNBROKEN = {"lora": "lora", "bf16 states": "bf16 states, zero 2"}  # other jobs are "one process", split


@pytest.mark.parametrize("name", COMING_BACK)
def test_a_job_that_comes_back_goes_on_with_the_same_curve(
    runs: TrainerRuns, come_back: tuple[TrainerRuns, Path], name: str
) -> None:
    again = come_back[0][f"{name}, again"]
    whole = runs[UNBROKEN.get(name, "one process")]
    assert set(again.codes) == {0}, again.said[-3000:]
    assert "resumed after step 2" in again.said
    assert again.losses == pytest.approx(whole.losses[2:], rel=1e-5)


@pytest.mark.parametrize("name", COMING_BACK)
def test_every_file_of_a_checkpoint_is_made_sure_of(come_back: tuple[TrainerRuns, Path], name: str) -> None:
    jobs, place = come_back
    folder = place / "saved" / name.replace(" ", "-") / "step-2"
    written = {path.name for path in folder.rglob("*") if path.is_file()}
    assert written <= set(jobs[f"{name}, begun"].kept)
    assert len(written) >= 2


def test_a_checkpoint_of_narrow_states_is_narrow(come_back: tuple[TrainerRuns, Path]) -> None:
    _, place = come_back
    written = sum(path.stat().st_size for path in (place / "saved" / "bf16-states" / "step-2").iterdir())
    recipe = load_recipe(asset("recipes", "quickstart.yaml"), (*TINY, BF16, BF16_STATES))
    assert written == pytest.approx(checkpoint_bytes(recipe), rel=0.06)  # its small file names parameters and options


def test_adapters_are_saved_as_peft_reads_them(come_back: tuple[TrainerRuns, Path]) -> None:
    """Every pair is found under the name peft looks for it; a second matrix that was not would still be zero."""
    import torch
    from peft import PeftModel
    from transformers import AutoConfig, AutoModelForCausalLM

    _, place = come_back
    config = AutoConfig.from_pretrained(place / "lora, again" / "trainer" / "model.json")
    model = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_config(config), place / "saved" / "lora" / "step-4" / "adapter"
    )
    pairs = [(n, p) for n, p in model.named_parameters() if "lora_" in n]
    assert len(pairs) == 2 * 2 * 7  # matrices, layers, linear layers of each
    assert all(p.shape[0 if "lora_A" in n else 1] == 4 for n, p in pairs)
    assert all(float(p.abs().sum()) > 0 for _, p in pairs), "untrained, or not found"
    assert torch.isfinite(torch.stack([p.norm() for _, p in pairs])).all()
