"""The techniques the shipped trainer has keep as much less as the estimate says; test_trainer_curves.py trains them."""

from __future__ import annotations

import json

import pytest
from trainer_runner import Train

from llmlaunch.frameworks.deepspeed.facts import DeepSpeedOptions, deepspeed_facts
from llmlaunch.layout import RECOMPUTE_FULL, RECOMPUTE_NONE, Layout, LayoutColumns
from llmlaunch.memory.activations import kept_activations
from llmlaunch.memory.job import Job, all_ranks
from llmlaunch.memory.loss import final_norm
from llmlaunch.models.shape import ModelShape
from llmlaunch.techniques import NO_TECHNIQUES, Techniques
from llmlaunch.techniques.requests import Adapters
from llmlaunch.workload import Workload

pytestmark = pytest.mark.frameworks

CASES: dict[str, list[str]] = {
    "plain": [],
    "mlp_chunks": ["--mlp-chunks", "4"],
    "loss_tiled": ["--loss-tiles", "4"],
    "recompute": ["--gradient-checkpointing"],
    "offload_checkpoints": ["--gradient-checkpointing", "--offload-checkpoints"],
    "adapters": ["--adapter-rank", "4"],
    "adapters_frozen_down": ["--adapter-rank", "4", "--frozen-adapter-down"],
    "adapters_of_attention": ["--adapter-rank", "4", "--adapter-targets", "q_proj", "k_proj", "v_proj", "o_proj"],
    "trained_layers": ["--trained-layers", "1"],
}
# what saved_bytes.py builds: fp32
TOKENS, LAYERS, HIDDEN, FFN, VOCABULARY, BYTES = 256, 4, 64, 160, 512, 4
Figures = dict[str, dict[str, float]]


@pytest.fixture(scope="module")
def counted(train: Train, tmp_path_factory: pytest.TempPathFactory) -> Figures:
    """Bytes saved for the backward pass, parameters trained, loss and gradients of each technique."""
    cases = [{"name": name, "ranks": 1, "files": {}, "words": words, "saved": True} for name, words in CASES.items()]
    runs = train(cases, tmp_path_factory.mktemp("techniques"))
    assert {name: run.said for name, run in runs.items() if run.codes != [0]} == {}
    return {name: json.loads(run.said.splitlines()[-1]) for name, run in runs.items()}


@pytest.mark.parametrize("name", ["mlp_chunks", "loss_tiled", "recompute", "offload_checkpoints"])
def test_what_is_only_computed_otherwise_gives_the_same_loss_and_gradients(counted: Figures, name: str) -> None:
    for figure in ("loss", "gradients"):
        assert counted[name][figure] == pytest.approx(counted["plain"][figure], rel=1e-6)


def test_chunked_mlps_keep_their_input_alone(counted: Figures) -> None:
    kept = LAYERS * TOKENS * 4 * FFN * BYTES  # gate, its activation, up and the product
    assert counted["plain"]["saved_bytes"] - counted["mlp_chunks"]["saved_bytes"] == kept


def test_a_tiled_loss_keeps_no_logits(counted: Figures) -> None:
    saved = counted["plain"]["saved_bytes"] - counted["loss_tiled"]["saved_bytes"]
    assert saved >= TOKENS * VOCABULARY * BYTES


def test_checkpoints_on_the_host_leave_the_device(counted: Figures) -> None:
    saved = counted["recompute"]["saved_bytes"] - counted["offload_checkpoints"]["saved_bytes"]
    assert saved == LAYERS * TOKENS * HIDDEN * BYTES


def test_adapters_train_little_and_with_frozen_first_matrices_keep_less(counted: Figures) -> None:
    kv = HIDDEN // 2
    # q, k, v, o, gate, up, down: rank 4 on both sides
    ins = LAYERS * 4 * (6 * HIDDEN + FFN)
    outs = LAYERS * 4 * (HIDDEN + 2 * kv + HIDDEN + 2 * FFN + HIDDEN)
    assert counted["adapters"]["trained"] == ins + outs
    assert counted["adapters_frozen_down"]["trained"] == outs
    assert counted["adapters_of_attention"]["trained"] == LAYERS * 4 * (4 * HIDDEN + 2 * HIDDEN + 2 * kv)
    # the inputs of q, k, v in one, of o, of gate and up in one, and of down; all but one are saved by nothing else
    inputs = LAYERS * TOKENS * (3 * HIDDEN + FFN) * BYTES
    saved = counted["adapters"]["saved_bytes"] - counted["adapters_frozen_down"]["saved_bytes"]
    assert 0.5 * inputs < saved <= inputs


def test_frozen_first_layers_keep_nothing(counted: Figures) -> None:
    layers = counted["plain"]["saved_bytes"] - counted["trained_layers"]["saved_bytes"]
    per_layer = layers / (LAYERS - 1)
    assert per_layer > TOKENS * (4 * FFN + 4 * HIDDEN) * BYTES


ATTENTION = ("linear_qkv", "linear_proj")
PRICED = {
    "mlp_chunks": (Techniques(mlp_chunks=4), RECOMPUTE_NONE),
    "adapters": (Techniques(adapters=Adapters(4)), RECOMPUTE_NONE),
    "adapters_frozen_down": (Techniques(adapters=Adapters(4, frozen_down=True)), RECOMPUTE_NONE),
    "adapters_of_attention": (Techniques(adapters=Adapters(4, target_modules=ATTENTION)), RECOMPUTE_NONE),
    "trained_layers": (Techniques(trained_layers=1), RECOMPUTE_NONE),
    "recompute": (NO_TECHNIQUES, RECOMPUTE_FULL),
}


def priced(techniques: Techniques, recompute: int) -> float:
    """What the estimate counts of the same model: the layers, the final norm and its head's input."""
    shape = ModelShape("counted", LAYERS, HIDDEN, FFN, 4, 2, 16, VOCABULARY, 128)
    facts = deepspeed_facts(DeepSpeedOptions(precision="fp32"))
    job = Job(shape, Workload(TOKENS // 2, 2, "fp32"), facts, techniques=techniques)
    rows = all_ranks(job, LayoutColumns.of([Layout(micro_batch_size=2, recompute=recompute)]))
    return float((kept_activations(job, rows) + final_norm(job, rows))[0])


@pytest.mark.parametrize("name", PRICED)
def test_what_is_kept_falls_as_priced(counted: Figures, name: str) -> None:
    saved = counted["plain"]["saved_bytes"] - counted[name]["saved_bytes"]
    estimated = priced(NO_TECHNIQUES, RECOMPUTE_NONE) - priced(*PRICED[name])
    # a frozen model's first norm keeps nothing either, and its final norm no normalized copy: neither is priced
    assert saved - 2 * TOKENS * HIDDEN * BYTES * 1.1 <= estimated <= saved
