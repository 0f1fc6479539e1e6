"""A Megatron-LM command line becomes the recipe of the same job."""

from __future__ import annotations

import contextlib
import re
import shlex

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmlaunch.command_lines.command import Reading, TrainerCommand
from llmlaunch.documents.yaml_strict import Document
from llmlaunch.errors import NoVerdict, UserError
from llmlaunch.frameworks.megatron.backend import MegatronLM
from llmlaunch.frameworks.megatron.command_line import pinned_layout, read_megatron, read_values, with_stand_ins
from llmlaunch.frameworks.megatron.extra_arguments import classed_arguments
from llmlaunch.frameworks.megatron.parser import KNOWN_VERSIONS, NEWEST, core_parser
from llmlaunch.layout import Layout
from llmlaunch.recipe.load import recipe_from
from support.backend_output import words_of
from support.recipes import recipe_of, small

LLAMA3_8B = (
    "--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention "
    "--num-query-groups 8 --seq-length 8192 --max-position-embeddings 8192 --position-embedding-type rope "
    "--rotary-base 500000 --swiglu --normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights "
    "--attention-dropout 0 --hidden-dropout 0 --vocab-size 128256 --mock-data --tokenizer-type NullTokenizer "
    "--micro-batch-size 1 --global-batch-size 128 --train-iters 1000 --lr 3e-4 --bf16 --tensor-model-parallel-size 2 "
    "--sequence-parallel --use-distributed-optimizer"
)


def reading_of(words: str, nodes: int | None = 2) -> Reading:
    return read_megatron(TrainerCommand("pretrain_gpt.py", tuple(shlex.split(words)), nodes=nodes, devices_per_node=8))


def test_a_model_of_known_sizes_is_named_by_its_preset() -> None:
    assert reading_of(LLAMA3_8B).document["model"] == "llama3-8b"


def test_a_model_beside_a_preset_says_what_differs() -> None:
    longer = LLAMA3_8B.replace("--max-position-embeddings 8192", "--max-position-embeddings 16384")
    assert reading_of(longer).document["model"] == {"base": "llama3-8b", "max_position_embeddings": 16384}


def test_what_no_key_says_stays_an_extra_argument() -> None:
    backend = reading_of(f"{LLAMA3_8B} --manual-gc --timing-log-level 2 --flag-of-a-fork 1").document["backend"]
    assert backend["extra_args"] == ["--manual-gc", "--timing-log-level", "2", "--flag-of-a-fork", "1"]


def test_lengths_in_samples_become_steps() -> None:
    words = LLAMA3_8B.replace("--train-iters 1000", "--train-samples 128000 --lr-warmup-samples 1280")
    training = reading_of(words).document["training"]
    assert (training["steps"], training["warmup_steps"]) == (1000, 10)


UNSAID = re.sub(r"--(vocab-size 128256|mock-data|train-iters 1000|tokenizer-type NullTokenizer) ?", "", LLAMA3_8B)


@pytest.mark.parametrize(
    ("words", "tokens"),
    [
        (f"{UNSAID} --tokenizer-type HuggingFaceTokenizer --tokenizer-model /tokens", 128256),  # Llama 3's sizes
        (f"{UNSAID.replace('14336', '11264')} --tokenizer-type Llama2Tokenizer --tokenizer-model /tokens", 32000),
        (f"{UNSAID.replace('14336', '11264')} --tokenizer-type SentencePieceTokenizer", 128256),
    ],
)
def test_what_memory_does_not_depend_on_has_a_stand_in_and_is_asked_for(words: str, tokens: int) -> None:
    reading = reading_of(f"{words} --lr-warmup-iters 2000")
    values = {key: stand_in.value for key, stand_in in reading.stand_ins.items()}
    assert values == {"training.steps": 4000, "data": {"mock": True}, "model.vocab_size": tokens}
    asked = {sentence.partition(":")[0] for sentence in reading.missing}
    assert asked == set(values)
    assert reading.not_rendered is None
    unread = [each.words for each in reading.unread]
    assert len(unread) == len(set(unread))


def test_what_decides_memory_has_no_stand_in() -> None:
    reading = reading_of(LLAMA3_8B.replace("--seq-length 8192 ", ""))
    assert reading.missing == (
        "training.sequence_length: --seq-length is not given; add it, or --set training.sequence_length=N",
    )
    assert reading.stand_ins == {}


def test_paths_without_a_value_are_missing_by_their_keys() -> None:
    words = LLAMA3_8B.replace("--vocab-size 128256 --mock-data --tokenizer-type NullTokenizer", "--data-path ${5}")
    reading = reading_of(f"{words} --vocab-file ${{3}} --save ${{1}} --save-interval 10")
    assert reading.document["model"] == {"base": "llama3-8b", "vocab_size": 50257}  # GPT-2's tokenizer has files
    keys = {sentence.partition(":")[0] for sentence in reading.missing}
    assert keys == {"data.path", "training.checkpoint_path", "backend.extra_args"}
    assert "data" not in reading.document
    assert "checkpoint_path" not in reading.document["training"]


def test_the_namespace_of_a_log_is_read_from_its_text() -> None:
    values = {
        "num_layers": "32", "hidden_size": "4096", "ffn_hidden_size": "14336", "num_attention_heads": "32",
        "group_query_attention": "True", "num_query_groups": "8", "swiglu": "True", "bf16": "True",
        "add_bias_linear": "False", "untie_embeddings_and_output_weights": "True", "position_embedding_type": "rope",
        "rotary_base": "500000", "normalization": "RMSNorm", "padded_vocab_size": "128256", "seq_length": "8192",
        "max_position_embeddings": "8192", "micro_batch_size": "1", "global_batch_size": "128",
        "attention_dropout": "0.0", "hidden_dropout": "0.0", "lr_decay_iters": "None", "params_dtype": "torch.bfloat16",
        "virtual_pipeline_model_parallel_size": "2", "pipeline_model_parallel_size": "4",
    }  # fmt: skip
    document = read_values(values, nodes=2, devices_per_node=8).document
    assert document["model"] == "llama3-8b"
    assert (document["layout"]["pipeline"], document["layout"]["virtual_pipeline"]) == (4, 2)


def test_no_secret_of_a_command_line_is_read() -> None:
    token = "hf_" + "aB3dE5gH7jK9mN1pQ3sT5vX7zA2cD4eF6g"
    command = TrainerCommand(
        "pretrain_gpt.py",
        (*shlex.split(LLAMA3_8B), "--hub-token", token, "--load", f"https://{token}@host/x", "stray", token),
        nodes=2,
        devices_per_node=8,
        environment={"HF_TOKEN": token, "NCCL_DEBUG": "INFO"},
    )
    reading = read_megatron(command)
    assert token not in str(reading)
    assert reading.document["secrets"] == ["HF_TOKEN"]
    assert reading.document["environment"] == {"NCCL_DEBUG": "INFO"}


def test_a_switch_with_a_value_is_refused_as_megatron_refuses_it() -> None:
    with pytest.raises(UserError, match="--bf16: takes no value"):
        reading_of(f"{LLAMA3_8B} --bf16=False")


def test_sizes_that_stand_elsewhere_are_missing() -> None:
    reading = reading_of("--use-checkpoint-args --seq-length 2048 --micro-batch-size 1 --mock-data --train-iters 5")
    assert "model" not in reading.document
    assert reading.missing[0].startswith("model: --num-layers, --hidden-size, ")
    assert [each.words for each in reading.unread] == [("--use-checkpoint-args",)]


@pytest.mark.parametrize("flag", ["--hybrid-layer-pattern MGM*", "--is-hybrid-model", "--decoder-num-layers 4"])
def test_a_model_of_another_kind_is_refused(flag: str) -> None:
    with pytest.raises(UserError, match=r"recipes describe (decoders|layers)"):
        reading_of(f"{LLAMA3_8B} {flag}")


@pytest.mark.parametrize(
    ("earlier", "key", "value"),
    [
        ("--recompute-activations", "recompute", "selective"),
        ("--checkpoint-activations", "recompute", "full"),
        ("--activations-checkpoint-method block", "recompute_method", "block"),
        ("--pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 4", "virtual_pipeline", 2),
        ("--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 14", "layers_by_stage", [14, 18]),
        ("--pipeline-model-parallel-size 4 --pipeline-model-parallel-layout Et*7|(t*9|)*2t*7L", "layers_by_stage",
         [7, 9, 9, 7]),
        ("--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads", "zero_stage", 2),
        ("--batch-size 3", "micro_batch_size", 3),
        ("--cuda-graph-impl local --cuda-graph-scope full_iteration", "cuda_graphs", ["full_iteration"]),
        ("--cuda-graph-impl full_iteration", "cuda_graphs", ["full_iteration"]),
        ("--cuda-graph-impl transformer_engine --cuda-graph-scope mlp attn", "cuda_graphs", ["attn", "mlp"]),
        ("--cuda-graph-impl transformer_engine --cuda-graph-scope full", "cuda_graphs", ["layer"]),
        ("--fine-grained-activation-offloading --offload-modules core_attn --activation-offload-fraction 0.25",
         "offload_fraction", 0.25),
        ("--use-distributed-optimizer --num-distributed-optimizer-instances 2", "optimizer_instances", 2),
        ("--external-cuda-graph", "cuda_graphs", ["layer"]),
    ],
)  # fmt: skip
def test_each_spelling_is_read(earlier: str, key: str, value: object) -> None:
    assert reading_of(f"{LLAMA3_8B} {earlier}").document["layout"][key] == value


def test_layers_of_one_part_each_are_read_with_the_stages_they_lie_in() -> None:
    model = "model={base: nemotron-3-super, mtp_num_layers: 2, mtp_repeated: true}"
    recipe = recipe_of("qwen3-30b-a3b", model, "nodes=8")
    layout = Layout(2, 4, virtual_pipeline=11, data=8, expert=8, sequence_parallel=1, zero_stage=1)
    rendered = [str(word) for word in words_of(recipe, layout)[1:]]
    document = reading_of(" ".join(rendered), nodes=8).document
    assert document["model"] == {"base": "nemotron-3-super", "mtp_num_layers": 2, "mtp_repeated": True}
    assert (document["layout"]["pipeline"], document["layout"]["virtual_pipeline"]) == (4, 11)
    whole = rendered[rendered.index("--hybrid-layer-pattern") + 1]
    legacy = ("--hybrid-override-pattern", whole.partition("/")[0].replace("|", ""))
    first = ("--decoder-first-pipeline-num-layers", "19")
    at = rendered.index("--hybrid-layer-pattern")
    rendered[at : at + 2] = [*legacy, "--mtp-hybrid-override-pattern", "*E", *first]
    document = reading_of(" ".join(rendered), nodes=8).document
    assert document["model"] == {"base": "nemotron-3-super", "mtp_num_layers": 2, "mtp_repeated": True}
    assert document["layout"]["layers_by_stage"] == [19, 23, 23, 23]


@pytest.mark.parametrize("version", KNOWN_VERSIONS)
@pytest.mark.parametrize("scopes", ["full_iteration", "layer", "attn, mlp"])
def test_graphs_of_each_core_are_read_as_they_were_rendered(version: str, scopes: str) -> None:
    backend = f'backend={{name: megatron-lm, version: "{version}"}}'
    words = words_of(small(f"layout.cuda_graphs=[{scopes}]", backend), Layout(data=32, zero_stage=1))
    reading = read_megatron(TrainerCommand("pretrain_gpt.py", tuple(words[1:]), nodes=4, devices_per_node=8))
    assert reading.document["layout"]["cuda_graphs"] == scopes.split(", ")
    assert not [each for each in reading.unread if "graph" in " ".join(each.words)]


def test_fixed_rows_and_pages_are_read_as_they_were_rendered() -> None:
    rows = {"token_dispatcher": "flex", "flex_backend": "hybridep", "expert_rank_capacity_factor": 1.5}
    pages = {"page_size": 32, "device_factor": 1.2, "host_factor": 0.5}
    said = [f"layout.{key}={value}" for key, value in rows.items()]
    said += [f"layout.paged_stash.{key}={value}" for key, value in pages.items()]
    recipe = recipe_of("qwen3-30b-a3b", "cluster=b200-x8", "training.fp8=mxfp8", *said)
    words = words_of(recipe, Layout(data=8, expert=8, zero_stage=1))[1:]
    document = read_megatron(TrainerCommand("pretrain_gpt.py", tuple(words), nodes=1, devices_per_node=8)).document
    assert document["layout"] | rows | {"paged_stash": pages} == document["layout"]
    by_what_arrives = words.index("--moe-paged-stash-buffer-size-factor-cuda") + 1
    words[by_what_arrives] = "-1.2"
    document = read_megatron(TrainerCommand("pretrain_gpt.py", tuple(words), nodes=1, devices_per_node=8)).document
    assert "paged_stash" not in document["layout"]


def test_a_save_beside_the_training_is_read_as_it_was_rendered() -> None:
    saved = ("training.checkpoint_path=/ckpt", "training.save_interval=10", "training.async_save=true")
    saved += ("training.non_persistent_save_interval=2",)
    words = words_of(small(*saved), Layout(data=32, zero_stage=1))
    reading = read_megatron(TrainerCommand("pretrain_gpt.py", tuple(words[1:]), nodes=4, devices_per_node=8))
    assert reading.document["training"]["async_save"] is True
    assert reading.document["training"]["non_persistent_save_interval"] == 2
    assert not [each for each in reading.unread if re.search("async|non-persistent", " ".join(each.words))]


MIXTURE = (
    f"{LLAMA3_8B} --num-experts 64 --moe-router-topk 8 --moe-ffn-hidden-size 768 --moe-grouped-gemm "
    "--expert-model-parallel-size 8 --expert-tensor-parallel-size 1 --moe-router-dtype fp32"
)
OTHER_KINDS = {
    "--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend=later": [
        *("--moe-flex-dispatcher-backend", "later")
    ],
    "--cuda-graph-impl local --cuda-graph-scope attn": ["--cuda-graph-impl", "local"],
    "--cuda-graph-impl transformer_engine --cuda-graph-modules mamba": [
        *("--cuda-graph-impl", "transformer_engine"),
        *("--cuda-graph-modules", "mamba"),
    ],
    "--fp8-format hybrid --fp8-recipe custom": ["--fp8-format", "hybrid", "--fp8-recipe", "custom"],
    "--cross-entropy-loss-fusion --cross-entropy-fusion-impl linear": ["--cross-entropy-fusion-impl", "linear"],
}


@pytest.mark.parametrize(("flags", "kept"), OTHER_KINDS.items(), ids=OTHER_KINDS)
def test_a_library_or_kind_that_no_key_says_is_kept_as_written(flags: str, kept: list[str]) -> None:
    """Never read as another one: it takes the place of the planned argument, and nothing is called safe with it."""
    reading = reading_of(f"{MIXTURE} {flags}")
    assert reading.unread == ()
    assert reading.document["backend"]["extra_args"] == kept
    recipe = recipe_from(Document("the recipe", "", with_stand_ins(reading, 16), {}, {}))
    layout = pinned_layout(recipe)
    flag = kept[0].partition("=")[0]
    assert sum(word.partition("=")[0] == flag for word in words_of(recipe, layout)) == 1
    unknown = classed_arguments(recipe, layout).unknown
    assert [argument.flag for argument in unknown] == [word.partition("=")[0] for word in kept if word[:2] == "--"]


def test_narrow_main_gradients_are_the_buffer_of_gradients() -> None:
    words = f"{LLAMA3_8B} --use-precision-aware-optimizer --main-grads-dtype bf16"
    reading = reading_of(words)
    assert reading.document["training"]["gradient_dtype"] == "bf16"
    assert reading.document["backend"] == "megatron-lm"
    wide = reading_of(f"{words} --accumulate-allreduce-grads-in-fp32").document
    assert "gradient_dtype" not in wide["training"]


def test_a_norm_around_one_is_kept() -> None:
    assert reading_of(f"{LLAMA3_8B} --apply-layernorm-1p").document["model"]["zero_centered_norm"] is True


def test_an_overlap_without_a_shared_expert_changes_nothing() -> None:
    reading = reading_of(f"{LLAMA3_8B} --num-experts 8 --moe-shared-expert-overlap")
    assert "overlap_shared_expert" not in reading.document["layout"]
    assert [each.reason for each in reading.unread] == ["there is no shared expert"]


def test_a_number_is_written_as_python_takes_it() -> None:
    words = LLAMA3_8B.replace("--train-iters 1000", "--train-samples 732_421_875")
    assert reading_of(words).document["training"]["steps"] == 732421875 // 128


def test_graphs_of_another_implementation_are_kept_as_written() -> None:
    backend = reading_of(f"{LLAMA3_8B} --enable-cuda-graph").document["backend"]
    assert backend["extra_args"] == ["--cuda-graph-impl", "local"]


def test_libraries_that_keys_say_are_planned_and_not_repeated() -> None:
    for library, key in (("deepep", None), ("hybridep", "hybridep")):
        words = f"{MIXTURE} --moe-token-dispatcher-type flex --moe-flex-dispatcher-backend {library}"
        document = reading_of(words).document
        assert document["layout"].get("flex_backend") == key
        assert document["backend"] == "megatron-lm"


LONG = LLAMA3_8B.replace("--seq-length 8192", "--seq-length 131072").replace("embeddings 8192", "embeddings 131072")


def test_masks_of_the_loader_are_read_where_they_are_large() -> None:
    """Those of 8,192 tokens are 64 MiB, which rendering spares."""
    assert reading_of(LONG).document["data"] == {"mock": True, "attention_masks": True}
    paths = LONG.replace("--mock-data", "--data-path /data/text_document")
    assert reading_of(paths).document["data"]["attention_masks"] is True
    for without in ("--no-create-attention-mask-in-dataloader", "--dataloader-inter-document-masking"):
        assert "attention_masks" not in reading_of(f"{LONG} {without}").document["data"]
    assert "attention_masks" not in reading_of(LLAMA3_8B).document["data"]


def test_a_job_with_masks_is_rendered_and_priced_with_them() -> None:
    flag, layout = "--no-create-attention-mask-in-dataloader", Layout(data=32, zero_stage=1)
    plain, masks = small(), small("data.attention_masks=true")
    assert (flag in words_of(plain, layout), flag in words_of(masks, layout)) == (True, False)
    host = [MegatronLM().facts(recipe).host for recipe in (plain, masks)]
    assert [each.loader_mask for each in host] == [False, True]
    words = ("--reset-attention-mask", "--num-workers=4", "--no-create-attention-mask-in-dataloader")
    by_sample, four, none = (
        MegatronLM().facts(small("data.attention_masks=true", f"backend.extra_args=[{word}]")).host for word in words
    )
    assert (by_sample.loader_mask_kept, four.loader_workers, none.loader_mask) == (False, 4, False)


HOSTILE = st.sampled_from(
    ["NaN", "-1", "0", "1e999", "9" * 17, "1.5", "[0]*9999*9999", "([1]*2)", "(" * 99, "Et*99999|(t|)*99999L", "true",
     "${X}", "full", "!!python/object:os.system", "a=b", "/x", "rope", "hybrid", "\x1b[31m", "", "inf", "0x10"]
)  # fmt: skip


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.sampled_from(sorted(core_parser(NEWEST).flags)), st.lists(HOSTILE, max_size=2)), max_size=6)
)
def test_no_shape_of_arguments_raises_anything_but_a_message(groups: list[tuple[str, list[str]]]) -> None:
    words = [word for flag, values in groups for word in (flag, *values)]
    with contextlib.suppress(UserError):
        read_megatron(TrainerCommand("train.py", (*shlex.split(LLAMA3_8B), *words), nodes=2, devices_per_node=8))


@pytest.mark.parametrize(("written", "read"), [("-1.0", None), ("0", None), ("1.5", 1.5)])
def test_a_capacity_factor_that_megatron_takes_for_none_is_left_out(written: str, read: float | None) -> None:
    mixture = f"{LLAMA3_8B} --num-experts 8 --moe-expert-capacity-factor {written}"
    reading = reading_of(mixture)
    assert reading.document["model"]["moe"].get("capacity_factor") == read
    assert reading.document["backend"] == "megatron-lm"


SPARSE = f"{LLAMA3_8B} --multi-latent-attention --q-lora-rank 1536 --experimental-attention-variant dsa"
LATENT = f"{SPARSE} --dsa-kernel-backend cudnn"


@pytest.mark.parametrize("kernels", ["", "--dsa-kernel-backend none", "--dsa-kernel-backend tilelang"])
def test_sparse_attention_with_other_kernels_gets_no_verdict(kernels: str) -> None:
    sizes = "--dsa-indexer-n-heads 64 --dsa-indexer-head-dim 128 --dsa-indexer-topk 2048"
    with pytest.raises(NoVerdict, match=r"--dsa-kernel-backend (none|tilelang) is not read: .* scores of all keys"):
        reading_of(f"{SPARSE} {sizes} {kernels}")


def test_sparse_attention_without_its_sizes_is_no_ordinary_attention() -> None:
    reading = reading_of(f"{LATENT} --dsa-indexer-n-heads 64")
    assert reading.document["model"]["indexer"] == {"heads": 64}
    assert reading.missing == (
        "model.indexer.head_dim: --dsa-indexer-head-dim is not given; add it, or --set model.indexer.head_dim=N",
        "model.indexer.topk: --dsa-indexer-topk is not given; add it, or --set model.indexer.topk=N",
    )
    none = reading_of(LATENT)
    assert none.document["model"]["indexer"] == {}
    assert len(none.missing) == 3
    assert "model.indexer.heads: is missing" in str(none.not_rendered)


def test_a_size_of_sparse_attention_without_a_value_is_named_once() -> None:
    sizes = "--dsa-indexer-n-heads ${HEADS} --dsa-indexer-head-dim 128 --dsa-indexer-topk 2048"
    assert reading_of(f"{LATENT} {sizes}").missing == (
        "model.indexer.heads: --dsa-indexer-n-heads reads HEADS, which has no value in the script; "
        "give --set HEADS=VALUE",
    )
