"""What was alive at a traced rank's peak, by the estimate's terms, from recorded traces of real Megatron core; and what
the tracer is asked: the rendered job, without what lies on the cluster."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from llmlaunch.frameworks.base import Rendered
from llmlaunch.frameworks.framework import FORWARD, REMAINDER, backend_for
from llmlaunch.frameworks.megatron.trace import megatron_job, megatron_terms
from llmlaunch.layout import Layout
from llmlaunch.memory.estimator import RankEstimate
from llmlaunch.recipe.load import load_recipe
from llmlaunch.recipe.types import Recipe
from support.rehearsed_plans import GALLERY

TRACES = Path(__file__).resolve().parents[2] / "data" / "traces"
RECORDED = sorted(path.stem for path in TRACES.glob("*.json"))
MIB = 2**20
TERMS = (
    *("parameters", "gradients", "optimizer_states", "weight_gradient_stubs", "workspace", "sequence_gather"),
    *("pipeline_buffers", "embedding", "activations", "logits_and_loss", "layer_backward", "recomputed_layer"),
    *("head_backward", "gradient_norm", "optimizer_step"),
)
Trace = dict[str, Any]


def recorded(name: str) -> Trace:
    return dict(json.loads((TRACES / f"{name}.json").read_text()))


def predicted(*terms: str) -> RankEstimate:
    """An estimate that knows these terms; how large it says they are does not matter."""
    return RankEstimate(0, dict.fromkeys(terms or TERMS, 0), 0, 0, 0)


def group(
    count: int, phase: str, site: str = "", module: str = "", role: str = "", shape: tuple[int, ...] = ()
) -> Trace:
    return {"bytes": count, "phase": phase, "site": site, "module": module, "role": role, "shape": list(shape)}


def trace_of(*groups: Trace, peak_phase: str = "backward") -> Trace:
    return {"peak_phase": peak_phase, "peak_bytes": sum(one["bytes"] for one in groups), "at_peak": list(groups)}


@pytest.mark.parametrize("name", RECORDED)
def test_the_terms_of_a_recorded_trace_sum_to_its_peak_and_almost_nothing_is_unknown(name: str) -> None:
    trace = recorded(name)
    found = megatron_terms(trace, predicted())
    assert sum(found.values()) == trace["peak_bytes"]
    assert 0 <= found[REMAINDER] < 0.002 * trace["peak_bytes"]
    assert list(found.values()) == sorted(found.values(), reverse=True)
    state = trace["state"]["bytes"]  # what lasts is what the rank says of itself
    assert found["gradients"] == state["gradients"]
    assert found["parameters"] == state["parameters"]
    assert found["optimizer_states"] == pytest.approx(state["optimizer"], rel=1e-3)  # groups too small to be recorded


def test_layers_of_a_dense_rank_keep_what_their_shapes_say() -> None:
    """The first of four ranks of Llama 3 8B, four micro-batches in flight of eight layers each, tensor and sequence
    parallel over 4: two projections of the MLP, its activation, Q, K, V and the attention's output a rank's part of
    8192 tokens; inputs and outputs of two norms a rank's part of the sequence; the softmax statistics."""
    found = megatron_terms(recorded("dense-first"), predicted())
    whole = 8192 * 2 * (2 * 3584 + 3584 + 1024 + 1024 + 2 * 256) + 8 * 8192 * 4
    split = 2048 * (4 * 4096 * 2 + 2 * 4)
    assert found["activations"] == pytest.approx(4 * 8 * (whole + split), abs=MIB)
    assert found["layer_backward"] == 2 * 8192 * (4096 + 3584)  # a gathered gradient, and that of the activation
    assert found["pipeline_buffers"] == 2 * 2048 * 4096  # the gradient that came from the next rank
    assert not {"logits_and_loss", "head_backward", "recomputed_layer"} & set(found)


def test_the_loss_of_a_last_rank_is_told_from_its_layers() -> None:
    """Full recompute: of eight layers their inputs are left, once more that of the micro-batch before."""
    found = megatron_terms(recorded("recomputed-last"), predicted())
    hidden = 2 * 2048 * 4096
    assert found["activations"] == (8 + 1) * hidden
    logits = 8192 * 32128 * (2 + 4)  # as the head made them, and in fp32
    assert found["logits_and_loss"] == pytest.approx(logits + 2 * hidden, abs=MIB)  # and both sides of the last norm
    assert found["sequence_gather"] == 2 * 8192 * 4096


def test_a_recomputed_layer_is_not_taken_for_gradients() -> None:
    """Full recompute on a first rank: four micro-batches of eight layers' inputs, and all of one layer again."""
    found = megatron_terms(recorded("recomputed-first"), predicted())
    assert found["activations"] == 4 * 8 * 2 * 2048 * 4096
    whole = 8192 * 2 * (2 * 3584 + 3584 + 1024 + 1024 + 2 * 256) + 8 * 8192 * 4 + 2048 * (4 * 4096 * 2 + 2 * 4)
    assert found["recomputed_layer"] == pytest.approx(whole, abs=MIB)
    assert found["layer_backward"] == 2 * 8192 * (4096 + 3584)


def test_what_passes_through_the_forward_pass_of_a_mixture_is_not_kept() -> None:
    """Copies of tokens on their way to their experts: 4096 of width 4096, eight experts each."""
    found = megatron_terms(recorded("latent-experts"), predicted())
    copy = 2 * 4096 * 8 * 4096
    assert copy <= found[FORWARD] <= 5 * copy
    assert "layer_backward" not in found


def test_what_no_rule_knows_and_what_no_group_holds_is_in_no_term() -> None:
    unknown = [
        group(512, "forward", "megatron/core/new_place.py:7 Thing.forward"),
        group(1024, "forward", "megatron/core/models/new/model.py:7 New.forward", "models/new/model.py New.forward"),
        group(2048, "setup", "transformer_engine/pytorch/somewhere.py:1 made"),
        group(4096, "a phase of another version"),
    ]
    assert megatron_terms(trace_of(*unknown), predicted()) == {REMAINDER: 7680}
    trace = trace_of(group(512, "backward"), group(1024, "setup", role="parameters"))
    assert megatron_terms(trace, predicted("parameters")) == {"parameters": 1024, REMAINDER: 512}
    trace = trace_of(group(512, "backward")) | {"peak_bytes": 2048}
    assert megatron_terms(trace, predicted()) == {"layer_backward": 512, REMAINDER: 1536}
    assert megatron_terms({"peak_bytes": 512, "peak_phase": "forward"}, predicted()) == {}


HEAD = "models/gpt/gpt_model.py GPTModel._postprocess"
LOSS = "megatron/core/tensor_parallel/cross_entropy.py:1 _VocabParallelCrossEntropy.backward"
CLIP = "megatron/core/optimizer/clip_grads.py:136 get_grad_norm_fp32"
WIDE = (
    group(512, "forward", module=HEAD, shape=(8, 1, 32)),
    group(1024, "backward", shape=(8, 1, 32)),
    group(2048, "backward", shape=(8, 1, 16)),
    group(4096, "backward", LOSS),
)
STEP = (group(512, "optimizer step", CLIP), group(1024, "optimizer step"), group(2048, "forward"))


@pytest.mark.parametrize(
    ("groups", "peak_phase", "terms"),
    [
        # gradients as wide as the logits are the head's
        (WIDE, "backward", {"head_backward": 5120, "layer_backward": 2048, "logits_and_loss": 512}),
        # a gradient at the peak of a forward pass waits to be sent
        ((group(512, "backward"),), "forward", {"pipeline_buffers": 512}),
        # at the peak of a step the norm is told from the optimizer
        (STEP, "optimizer step", {REMAINDER: 2048, "optimizer_step": 1024, "gradient_norm": 512}),
        (STEP, "forward", {REMAINDER: 3584}),
    ],
)
def test_what_a_storage_is_depends_on_the_moment_of_the_peak(
    groups: tuple[Trace, ...], peak_phase: str, terms: dict[str, int]
) -> None:
    assert megatron_terms(trace_of(*groups, peak_phase=peak_phase), predicted()) == terms


EIGHT = Layout(tensor=1, pipeline=4, data=8, sequence_parallel=0, zero_stage=1)
OWN_WORDS = 'backend={name: megatron-lm, extra_args: ["--log-progress", "--exit-interval=7", "--distrib-optim-x", "3"]}'


def rendered(*overrides: str) -> tuple[Recipe, Rendered]:
    recipe = load_recipe(GALLERY, overrides)
    return recipe, backend_for(recipe).render(recipe, EIGHT)


def asked(*overrides: str) -> dict[str, Any]:
    return megatron_job(*rendered(*overrides), EIGHT, 3)


def test_a_job_names_its_rank_and_the_size_of_the_whole_job() -> None:
    job = asked()
    assert (job["name"], job["pipeline_rank"], job["world_size"]) == ("3", 3, 32)
    assert job["environment"]["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"


def test_all_that_decides_memory_is_as_rendered() -> None:
    recipe, job = rendered()
    words = megatron_job(recipe, job, EIGHT, 0)["arguments"]
    for each in job.arguments:
        start = words.index(each.flag)
        assert words[start : start + len(each.words)] == [str(word) for word in each.words]


def test_what_lies_on_the_cluster_is_left_out_and_the_vocabulary_is_said() -> None:
    saved = asked(
        "training.checkpoint_path=/scratch/somewhere", "training.save_interval=100", "training.start_from=/weights"
    )["arguments"]
    words = [*saved, *asked("data={path: /data/tokens, tokenizer: meta-llama/Meta-Llama-3-8B}")["arguments"]]
    gone = {"--save", "--load", "--pretrained-checkpoint", "--data-path", "--tokenizer-model", "--padded-vocab-size"}
    assert not gone & set(words)
    assert not any(word.startswith(("/scratch", "/weights", "/data", "meta-llama")) for word in words)
    assert words.count("--tokenizer-type") == words.count("NullTokenizer") == words.count("--mock-data") == 2
    assert words[words.index("--vocab-size") + 1] == "128256"


def test_a_persons_own_words_go_along_but_for_those_no_rank_alone_needs() -> None:
    words = asked(OWN_WORDS)["arguments"]
    start = words.index("--distrib-optim-x")
    assert words[start : start + 2] == ["--distrib-optim-x", "3"]
    assert "--log-progress" in words
    assert "--exit-interval=7" not in words


ON_BRIDGE = ("backend=megatron-bridge", "training.start_from=/weights", "training.learning_rate=1.0e-5")
ROWS = "data={path: /rows, format: chat, tokenizer: /words, packed: true}"


def test_a_job_of_bridge_is_that_of_megatron_with_what_bridge_adds() -> None:
    plain = asked(*ON_BRIDGE)
    assert (plain.pop("adapters"), plain.pop("packed")) == (None, False)
    assert plain == asked(*ON_BRIDGE[1:])
    adapted = asked(*ON_BRIDGE, ROWS, "training.adapters={rank: 4, target_modules: [q_proj, k_proj, v_proj]}")
    assert adapted["adapters"] == {"dim": 4, "alpha": 4, "target_modules": ["linear_qkv"]}
    assert adapted["packed"] is True
    assert "/rows" not in adapted["arguments"]
