"""Arguments of Megatron-LM: a job in flags, none beside the plan, and uneven stages in the plainest notation.

What Megatron core makes of the stages is in tests/frameworks/test_megatron_layers.py.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from llmlaunch.errors import UserError
from llmlaunch.frameworks.base import Rendered
from llmlaunch.frameworks.checkpoints import save_seconds
from llmlaunch.frameworks.megatron.backend import MegatronLM
from llmlaunch.frameworks.megatron.facts import MegatronOptions, megatron_facts
from llmlaunch.frameworks.megatron.flags.layout import STAGE_FLAGS, stage_flags
from llmlaunch.frameworks.megatron.flags.table import column
from llmlaunch.frameworks.megatron.parser import KNOWN_VERSIONS, core_parser
from llmlaunch.frameworks.megatron.rules import RULES
from llmlaunch.frameworks.resharding import reshards
from llmlaunch.layout import Layout
from llmlaunch.recipe.types import Recipe
from support.backend_output import check_flags, refused_by, value_of, words_of
from support.recipe_keys import schema
from support.recipes import recipe_of

LAYOUT = Layout(8, 4, data=16, sequence_parallel=1, zero_stage=1)
SAVING = ("training.save_interval=100", "training.checkpoint_path=/ckpt")


FORMAT, PINNED, FALLBACK = "training.checkpoint_format", "layout.zero_stage=3", "on_oom=fallback"
RESHARDABLE = "--dist-ckpt-optim-fully-reshardable"
OLD = (f"{FORMAT}=torch", "layout.zero_stage=0")
WHOLE = Layout(8, 8, data=8, sequence_parallel=1)
MIXTURE = Layout(2, 4, data=8, expert=8, sequence_parallel=1, zero_stage=1)
SECOND, THIRD = Layout(data=512, zero_stage=2), Layout(data=512, zero_stage=3)
GPT3 = ("model=gpt3-175b", "training.sequence_length=2048")
BLEND = (
    "data={blend: [{path: /data/a_document, weight: 7}, {path: /data/b_document, weight: 0.25}], split: '98,2,0', "
    "cache_path: /cache}"
)
FSDP = "--use-megatron-fsdp --use-distributed-optimizer --no-gradient-accumulation-fusion --ckpt-format fsdp_dtensor"


def data(tokenizer: str) -> tuple[str]:
    return (f"data={{path: /data/text_document, {tokenizer}}}",)


# Recipe and overrides, layout, the flags said and those that are not.
SAID: dict[str, tuple[str, tuple[str, ...], Layout, str, str]] = {
    "the layout": (
        *("llama3-70b", (), replace(LAYOUT, virtual_pipeline=5)),
        "--tensor-model-parallel-size 8 --pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 5 "
        "--micro-batch-size 1 --global-batch-size 1024 --sequence-parallel --use-distributed-optimizer --bf16 --swiglu",
        f"--exit-signal-handler {RESHARDABLE}",
    ),
    "expert tensor parallelism always, because its default is the tensor size": (
        *("mixtral-8x7b", (), MIXTURE, "--expert-model-parallel-size 8 --expert-tensor-parallel-size 1", ""),
    ),
    "gpt3 with its biases and learned positions": (
        *(
            "llama3-8b",
            GPT3,
            Layout(8, 8, data=1),
            "--position-embedding-type learned_absolute --normalization LayerNorm",
        ),
        "--swiglu --disable-bias-linear --untie-embeddings-and-output-weights",
    ),
    "checkpoints, written at a signal; the first start finds none": (
        *("llama3-70b", SAVING, LAYOUT, "--save /ckpt --load /ckpt --ckpt-format torch_dist --exit-signal-handler"),
        f"--exit-on-missing-checkpoint {RESHARDABLE}",
    ),
    "states gathered in host memory, where another split may have to load them": (
        *("llama3-70b", (*SAVING, FALLBACK), LAYOUT, RESHARDABLE, ""),
    ),
    "and not said again where a person has": (
        *("llama3-70b", (*SAVING, FALLBACK, f"backend.extra_args=[{RESHARDABLE}]"), LAYOUT, "", RESHARDABLE),
    ),
    "weights to start from; --finetune would begin again at step 0 every time": (
        *("llama3-70b", ("training.start_from=/llama",), LAYOUT, "--pretrained-checkpoint /llama", "--load --finetune"),
    ),
    "weights where there is no checkpoint yet": (
        *("llama3-70b", ("training.start_from=/llama", *SAVING), LAYOUT),
        *("--pretrained-checkpoint /llama --load /ckpt", "--finetune"),
    ),
    "a blend of weights and prefixes": (
        *("llama3-70b", (BLEND,), LAYOUT),
        "--data-path 7 /data/a_document 0.25 /data/b_document --split 98,2,0 --data-cache-path /cache "
        "--tokenizer-type NullTokenizer",
        "",
    ),
    "a tokenizer, and how many words the plan has: a multiple of 128 x tensor": (
        *("llama3-70b", data("tokenizer: meta-llama/Llama-3"), LAYOUT),
        "--tokenizer-type HuggingFaceTokenizer --tokenizer-model meta-llama/Llama-3 --padded-vocab-size 129024",
        "--vocab-size",
    ),
    "a tokenizer of another type": (
        *("llama3-70b", data("tokenizer: /t/20b.tiktoken, tokenizer_type: TikTokenizer"), LAYOUT),
        *("--tokenizer-type TikTokenizer --tokenizer-model /t/20b.tiktoken --padded-vocab-size 129024", "--vocab-size"),
    ),
    "a tokenizer without a file": (
        *("llama3-70b", data("tokenizer_type: GPT2BPETokenizer"), LAYOUT),
        *("--tokenizer-type GPT2BPETokenizer --padded-vocab-size 129024", "--vocab-size --tokenizer-model"),
    ),
    "checkpoints written beside the training, by core's own writer, which needs nothing installed": (
        *("llama3-70b", (*SAVING, "training.async_save=true"), LAYOUT),
        "--async-save --use-persistent-ckpt-worker --async-strategy mcore --ckpt-format torch_dist",
        "",
    ),
    "checkpoints of which the newest alone stays, between those that stay": (
        *("llama3-70b", (*SAVING, "training.non_persistent_save_interval=20"), LAYOUT),
        *("--save-interval 100 --non-persistent-save-interval 20 --non-persistent-ckpt-type global", "--async-save"),
    ),
    "and by that of core 0.16, which knows no other": (
        *("llama3-70b", (*SAVING, "training.async_save=true", "backend={name: megatron-lm, version: '0.16'}"), LAYOUT),
        *("--async-save --use-persistent-ckpt-worker", "--async-strategy"),
    ),
    "a format that is asked for": ("llama3-70b", (*SAVING, *OLD), WHOLE, "--ckpt-format torch", ""),
    "a folder for TensorBoard": ("llama3-70b", ("training.tensorboard=/tb",), WHOLE, "--tensorboard-dir /tb", ""),
    "zero_stage 2, which demands its format without checkpoints, too": (
        *("llama3-70b", ("layout.zero_stage=2",), SECOND),
        *(f"--data-parallel-sharding-strategy optim_grads --init-model-with-meta-device {FSDP}", RESHARDABLE),
    ),
    "zero_stage 3, whose checkpoints are in its own format whatever may follow": (
        *("llama3-70b", (PINNED, *SAVING, f"{FORMAT}=fsdp_dtensor", FALLBACK, "training.gradient_dtype=fp32"), THIRD),
        "--data-parallel-sharding-strategy optim_grads_params --init-model-with-meta-device "
        f"--megatron-fsdp-main-grads-dtype fp32 {FSDP}",
        RESHARDABLE,
    ),
    "gradients in what the plan counts": (
        *("llama3-70b", (PINNED, "training.gradient_dtype=bf16"), THIRD, "--megatron-fsdp-main-grads-dtype bf16", ""),
    ),
    "learned positions are not initialised on the meta device": (
        *("llama3-8b", (PINNED, *GPT3), Layout(data=32, zero_stage=3)),
        *(f"--megatron-fsdp-main-grads-dtype fp32 {FSDP}", "--init-model-with-meta-device"),
    ),
}


@pytest.mark.parametrize(("name", "overrides", "layout", "said", "unsaid"), SAID.values(), ids=SAID)
def test_a_job_is_said_in_flags(name: str, overrides: tuple[str, ...], layout: Layout, said: str, unsaid: str) -> None:
    check_flags(recipe_of(name, *overrides), layout, said, unsaid)


def rendered(*words: str, layout: Layout = LAYOUT) -> Rendered:
    backend = f"backend={{name: megatron-lm, extra_args: {list(words)}}}"
    return MegatronLM().render(recipe_of("llama3-70b", backend, *SAVING), layout)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--lr=1.0",), "--lr is planned by llmlaunch already (by training.learning_rate)"),
        (("--lr", "1.0"), "--lr is planned by llmlaunch already"),
        (("--persistent-save-interval", "5"), "--persistent-save-interval says what --save-interval does"),
        (("--fp16",), "--fp16 would change what is planned; say it as training.precision"),
        (("--recompute-activations",), "say it as layout.recompute"),
        (("--num-layers-per-virtual-pipeline-stage=2",), "say it as layout.layers_by_stage"),
        (("--use-megatron-fsdp",), "say it as layout.zero_stage"),
        (("--data-args-path", "x"), "say it as data.blend"),
    ],
)
def test_what_contradicts_the_plan_is_refused_and_names_the_key(words: tuple[str, ...], why: str) -> None:
    with pytest.raises(UserError, match=r"backend\.extra_args: ") as refused:
        rendered(*words)
    assert why in str(refused.value)


def test_a_switch_that_is_off_in_the_plan_stays_off() -> None:
    with pytest.raises(UserError, match=r"--sequence-parallel would change .*; say it as layout\.sequence"):
        rendered("--sequence-parallel", layout=Layout(8, 4, data=16, zero_stage=1))


@pytest.mark.parametrize("words", [("--manual-gc",), ("--min-lr", "1e-5"), ("--of-my-fork", "--value=--lr")])
def test_what_the_plan_does_not_speak_of_passes(words: tuple[str, ...]) -> None:
    assert rendered(*words).program[-len(words) :] == words


def test_every_name_is_one_of_the_parser_and_every_key_one_of_a_recipe() -> None:
    names = {flag.dest for version in KNOWN_VERSIONS for flag in core_parser(version).flags.values()}
    assert column("decides").keys() <= names
    sections = schema()["$defs"]
    for key in column("decides").values():
        section, _, name = key.partition(".")
        assert name in sections[section.title()]["properties"], key


STAGE_RULES = ("layers", "virtual-layers", "stages-named", "stages-hold-all", "stages-hold-some")


def flags_of_stages(
    pipeline: int, chunks: int, split: tuple[int, ...], mtp_layers: int = 0, before: bool = False
) -> str:
    layout = Layout(pipeline=pipeline, virtual_pipeline=chunks, layers_by_stage=split)
    written = stage_flags(layout, mtp_layers, before).items()
    return " ".join(flag if value is True else f"{flag} {value}" for flag, value in written)


@pytest.mark.parametrize(
    ("pipeline", "chunks", "split", "flags"),
    [
        (4, 1, (), ""),
        (4, 1, (20, 20, 20, 20), ""),
        (4, 2, (), "--num-virtual-stages-per-pipeline-rank 2"),
        (4, 1, (19, 21, 21, 19), "--decoder-first-pipeline-num-layers 19 --decoder-last-pipeline-num-layers 19"),
        (4, 1, (20, 20, 20, 17), "--decoder-last-pipeline-num-layers 17"),
        (2, 1, (41, 39), "--decoder-first-pipeline-num-layers 41"),
        (2, 2, (8, 12, 8, 12), "--decoder-first-pipeline-num-layers 16 --num-virtual-stages-per-pipeline-rank 2"),
        (
            3,
            2,
            (4, 5, 3, 4, 5, 3),
            "--decoder-first-pipeline-num-layers 8 --decoder-last-pipeline-num-layers 6 "
            "--num-virtual-stages-per-pipeline-rank 2",
        ),
        (
            4,
            2,
            (9, 10, 10, 10, 10, 10, 10, 9),
            "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split "
            "--num-virtual-stages-per-pipeline-rank 2",
        ),
        (2, 2, (2, 2, 2, 1), "--account-for-loss-in-pipeline-split --num-virtual-stages-per-pipeline-rank 2"),
        (4, 1, (20, 21, 20, 19), "--pipeline-model-parallel-layout Et*20|t*21|t*20|t*19L"),
        (2, 2, (1, 2, 2, 3), "--pipeline-model-parallel-layout Et|(tt|)*2t*3L"),
        (2, 2, (3, 3, 2, 0), "--pipeline-model-parallel-layout Et*3|t*3|tt|L"),
    ],
)
def test_the_plainest_way_is_taken(pipeline: int, chunks: int, split: tuple[int, ...], flags: str) -> None:
    assert flags_of_stages(pipeline, chunks, split) == flags


def test_prediction_heads_stand_before_the_loss() -> None:
    ends = "--decoder-first-pipeline-num-layers 3 --decoder-last-pipeline-num-layers 2"
    assert flags_of_stages(4, 1, (3, 4, 4, 2), mtp_layers=1) == ends
    assert flags_of_stages(4, 1, (3, 5, 4, 1), mtp_layers=1) == "--pipeline-model-parallel-layout Et*3|t*5|t*4|tmL"


def test_prediction_heads_before_the_last_stage_are_written_out() -> None:
    assert flags_of_stages(3, 1, (4, 4, 0), 2, before=True) == "--pipeline-model-parallel-layout Et*4|t*4mm|L"
    alone = flags_of_stages(3, 2, (1, 1, 1, 1, 0, 0), 1, before=True)
    assert alone == "--pipeline-model-parallel-layout Et|(t|)*3m|L"


@pytest.mark.parametrize(
    ("layout", "keys"),
    [
        (Layout(pipeline=4), set()),
        (Layout(pipeline=6), {"layers", "virtual-layers"}),
        (Layout(pipeline=6, layers_by_stage=(13, 14, 14, 14, 14, 11)), set()),
        (Layout(pipeline=6, layers_by_stage=(40, 40)), {"stages-named"}),
        (Layout(pipeline=2, layers_by_stage=(41, 40)), {"stages-hold-all"}),
        (Layout(pipeline=3, layers_by_stage=(40, 0, 40)), {"stages-hold-some"}),
        (Layout(pipeline=2, layers_by_stage=(80, 0)), {"stages-hold-some"}),
        (Layout(pipeline=2, virtual_pipeline=2, layers_by_stage=(0, 40, 40, 0)), set()),
        (Layout(pipeline=2, virtual_pipeline=2, layers_by_stage=(40, 0, 0, 40)), {"stages-hold-some"}),
    ],
)
def test_uneven_stages_need_no_divisor_but_must_add_up(layout: Layout, keys: set[str]) -> None:
    stage_rules = [rule for rule in RULES if rule.key in STAGE_RULES]
    assert refused_by(recipe_of("llama3-70b"), layout, stage_rules) == keys


def test_a_job_of_uneven_stages_is_rendered_with_their_flags() -> None:
    words = words_of(recipe_of("llama3-70b"), replace(LAYOUT, layers_by_stage=(20, 21, 20, 19)))
    assert [flag for flag in STAGE_FLAGS if flag in words] == ["--pipeline-model-parallel-layout"]
    assert value_of(words, "--pipeline-model-parallel-layout") == "Et*20|t*21|t*20|t*19L"


@pytest.mark.parametrize("flag", STAGE_FLAGS)
def test_the_layers_are_not_split_otherwise_beside_the_plan(flag: str) -> None:
    with pytest.raises(UserError, match=flag):
        rendered(f"{flag}=2")


def saving(*overrides: str) -> Recipe:
    return recipe_of("llama3-70b", *SAVING, *overrides)


def test_the_old_format_is_of_one_cut_and_written_by_few() -> None:
    old, new = saving(*OLD), saving()
    other = replace(WHOLE, pipeline=4, data=16)
    assert reshards(new, WHOLE, other)
    assert not reshards(old, WHOLE, other)
    assert reshards(old, WHOLE, replace(WHOLE, context=2, data=4))
    assert save_seconds(old, WHOLE) > save_seconds(new, WHOLE)


def test_what_writes_beside_the_training_reads_whole_segments_and_has_a_context_of_its_own() -> None:
    beside = saving("training.async_save=true")
    backend = MegatronLM()
    assert backend.render(beside, LAYOUT).environment["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:False"
    assert backend.render(saving(), LAYOUT).environment["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    alone, both = megatron_facts(), megatron_facts(MegatronOptions(async_save=True))
    assert both.allocator.context_bytes == 2 * alone.allocator.context_bytes
    assert both.host.process_bytes == 2 * alone.host.process_bytes


@pytest.mark.parametrize(("key", "value"), [("checkpoint_format", "torch"), ("tensorboard", "/tb")])
def test_formats_and_tensorboard_are_words_of_megatron(key: str, value: str) -> None:
    with pytest.raises(UserError, match=f"training.{key}: is a word of megatron-lm"):
        recipe_of("quickstart", *SAVING, f"training.{key}={value}")
