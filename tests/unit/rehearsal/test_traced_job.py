"""What the tracer is asked: the rendered job, without what lies on the cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from llmlaunch.backends.registry import backend_for
from llmlaunch.layout import Layout
from llmlaunch.recipe.load import load_recipe
from llmlaunch.rehearsal.traced import traced_job

RECIPES = Path(__file__).parents[3] / "recipes"
EIGHT = Layout(tensor=1, pipeline=4, data=8, sequence_parallel=0, zero_stage=1)
OWN_WORDS = 'backend={name: megatron-lm, extra_args: ["--log-progress", "--exit-interval=7", "--distrib-optim-x", "3"]}'


def asked(*overrides: str) -> dict[str, Any]:
    recipe = load_recipe(str(RECIPES / "llama3-8b.yaml"), overrides)
    return traced_job(recipe, backend_for(recipe).render(recipe, EIGHT), 3)


def test_a_job_names_its_rank_and_the_size_of_the_whole_job() -> None:
    job = asked()
    assert (job["name"], job["pipeline_rank"], job["world_size"]) == ("3", 3, 32)
    assert job["environment"]["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"


def test_all_that_decides_memory_is_as_rendered() -> None:
    recipe = load_recipe(str(RECIPES / "llama3-8b.yaml"))
    rendered = backend_for(recipe).render(recipe, EIGHT)
    words = traced_job(recipe, rendered, 0)["arguments"]
    for each in rendered.arguments:
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
