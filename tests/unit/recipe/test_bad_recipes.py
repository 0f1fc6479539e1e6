"""Every mistake is answered with the file, the line, the key and the fix; nothing else ever comes out."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from llmlaunch.errors import UserError
from llmlaunch.recipe.load import load_recipe
from support.recipes import SMALL
from support.soak import examples

Write = Callable[[str | bytes], Path]

GOOD = SMALL.read_text(encoding="utf-8")


def complaint(path: Path, *overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        load_recipe(path, overrides)
    assert caught.value.exit_code == 2
    return str(caught.value)


# for each line of the recipe: what stands in its place, the line of the mistake, and what the message says
MISTAKES = {
    "model: llama3-8b": {
        "model: llama3-9b": (3, "model: unknown model 'llama3-9b'; did you mean llama3-8b?"),
        "model: models/config.json": (3, "config.json: cannot be read: No such file"),
        "model: {base: llama3-8b, hidden_size: -4096}": (3, "model.hidden_size: must be a whole number, at least 1"),
        "model: {base: llama3-8b, rotary_base: .nan}": (3, "model.rotary_base"),
        "model: {base: llama3-8b, num_attention_heads: 30}": (3, "hidden_size 4096 is not divisible by 30 heads"),
        "model: {base: llama3-8b, num_query_groups: 5}": (3, "num_query_groups must divide num_attention_heads"),
    },
    "cluster: h100-80gb-x8": {
        "cluster: {base: h100-80gb-x8, accelerator: gaudi}": (
            5,
            "cluster.accelerator: unknown accelerator 'gaudi'; known: v100-16gb, v100-32gb, a100-40gb",
        ),
        "cluster: h100-80g-x8": (5, "cluster: unknown cluster 'h100-80g-x8'; did you mean h100-80gb-x8?"),
    },
    "steps: 1000": {
        "stepz: 1000": (10, "training.stepz: is not a known key; did you mean steps?"),
        "": (7, "training: steps: is missing; add it, or tokens:"),
        "steps: 1e9": (10, "YAML reads 1e9 as text: write 1000000000"),
        "steps: 9\n  learning_rate: 1e4": (11, "learning_rate: must be a finite number, above 0 and at most 1000, not"),
        'steps: "1000"': (
            10,
            "training.steps: must be a whole number, at least 1 and at most 1000000000, not '1000'; remove the quotes",
        ),
        "steps: 2.5": (10, "must be a whole number, at least 1 and at most 1000000000, not 2.5"),
        "steps: 9\n  learning_rate: .nan": (11, "training.learning_rate: must be a finite number"),
        "steps: 1000\n  tokens: 1T": (
            7,
            "training: steps and tokens both say how long the training is; remove one of the two",
        ),
        "tokens: 1.5 T": (
            10,
            "training.tokens: must be a whole number, or one with K, M, B or T such as 1.5T, not '1.5 T'",
        ),
        "tokens: 1e12": (10, "or one with K, M, B or T such as 1.5T, not '1e12'"),
        "tokens: 0.0005K": (10, "training.tokens: 0.0005K is no whole number of tokens"),
        "tokens: 900000T": (
            10,
            "training.tokens: are 214576721192 steps of 4194304 tokens; use at most 1000000000 steps",
        ),
        "steps: 9\n  save_interval: 5": (7, "add checkpoint_path"),
    },
    "nodes: 4": {
        "nodes: 4\nnodes: 8": (7, "the key 'nodes' stands twice (first at"),
        "nodes: 0": (6, "nodes: must be a whole number, at least 1 and at most 100000, not 0"),
        "nodes: yes": (6, "not true"),
        "nodes: 010": (6, "YAML reads 010 as an octal number"),
        "nodes:": (6, "not empty; give it a value or remove the line"),
        "nodes: 4\nbudget: {max_nodes: 3}": (6, "nodes: 4 are more than budget.max_nodes: 3; change one of the two"),
        "nodes: auto\nmax_nodes: 3": (7, "max_nodes: stands under `budget:`"),
        "nodes: auto\nbudget: {days: 0}": (7, "budget.days: must be a finite number, above 0"),
    },
    "name: small": {
        "name: no": (2, 'YAML reads an unquoted no as false: quote it: "no"'),
        "name: 12": (2, 'quote it: "12"'),
        "name: ../x": (2, "name: must be a safe file and job name"),
        "name: -rf": (2, "not beginning with '.' or '-'"),
    },
    'time: "24:00:00"': {
        "time: 24:00:00": (15, 'YAML reads 24:00:00 as a number in base 60; quote it: "24:00:00"'),
        'comment: "a\\n#SBATCH --uid=0"': (15, "slurm.comment: contains a line break"),
        "cpus_per_task: 4": (15, "write cpus-per-task"),
        "--mem: 4": (15, "slurm.--mem: is not a long option of sbatch without its dashes; write mem"),
        "nodes: 4": (15, "slurm.nodes: is not set here"),
    },
    "precision: bf16": {"precision: bf8": (11, "training.precision: must be one of bf16, fp16, fp32, not 'bf8'")},
    "backend: megatron-lm": {
        "backend: megatron": (4, "backend: must be one of megatron-lm, deepspeed, megatron-bridge or a mapping"),
        "backend: {name: megatron-lm, script: x.py, script_kind: pipeline}": (4, "script_kind belongs to deepspeed"),
        "backend: {name: megatron-lm, script_args: [--mine]}": (4, "script_args needs script"),
        "backend: {name: deepspeed, path: x}": (4, "path is the Megatron-LM checkout"),
    },
    "layout: auto": {
        "memory: {risk: 0}": (13, "memory.risk: must be"),
        "memory: {limit: 80}": (13, "memory.limit: must be a finite number, above 0 and at most 1"),
        "layout: {tensor: 3}": (13, "32 attention heads are not divisible by 3"),
        "layout: {data: 32, micro_batch_size: 3}": (
            9,
            "training.global_batch_size: 512 is not divisible by data x micro_batch_size = 96",
        ),
        "layout: {pipeline: 64}": (13, "64 stages for 32 layers; use at most 32"),
        "layout: {tensor: 8, context: 8}": (13, "tensor x context = 64 does not divide the 32 devices of 4 nodes"),
        "layout: {expert: 2}": (13, "shares out experts, and llama3-8b is a dense model"),
        "layout: {layers_by_stage: [9, 8, 8, 8]}": (
            13,
            "layout.layers_by_stage: 9, 8, 8, 8 are 33 layers, llama3-8b has 32; make them add up",
        ),
        "layout: {pipeline: 2, virtual_pipeline: 1, layers_by_stage: [9, 8, 8, 7]}": (
            13,
            "layout.layers_by_stage: 4 stages are no pipeline x virtual_pipeline with pipeline: 2, virtual_pipeline: 1",
        ),
        "layout: {layers_by_stage: 4}": (
            13,
            "layout.layers_by_stage: must be auto, even, or the decoder layers of each stage in order, such as [21, 20",
        ),
        "layout: {tensr: 2}": (13, "layout.tensr: is not a known key; did you mean tensor?"),
        "layout: {tensor: [1, x]}": (13, "layout.tensor: must be a whole number, at least 1 and"),
        "layout: best": (13, "layout: must be auto or a mapping, not 'best'"),
        "layout: {zero_stage: 0, distributed_optimizer: true}": (
            13,
            "distributed_optimizer: true is zero_stage: 1, which contradicts the zero_stage given",
        ),
        "environment: {HF_TOKEN: hf_abc}": (
            13,
            "environment.HF_TOKEN: looks like a secret, which must not stand in a recipe; list the name under secrets:",
        ),
        "setup: [export WANDB_API_KEY=abc]": (13, "gives WANDB_API_KEY a literal value"),
        "environment: {A-B: x}": (13, "is not a name of an environment variable"),
        "environment: {MASTER_ADDR: x}": (13, "is set by the launcher itself"),
        "python: --version": (13, "python: must not begin with '-'"),
        "container: {image: a.sqsh, mounts: [/x]}": (13, "must be /source:/destination"),
        "---\nlayout: auto": (13, "a second document begins here"),
    },
    "layout: auto\nslurm:": {"slurm:\n  export: ALL,HF_TOKEN=hf_abc": (14, "gives HF_TOKEN a literal value")},
    "data: {mock: true}": {
        "data: {mock: true, path: /x}": (12, "data: give exactly one of"),
        "data: {}": (12, "data: give exactly one of"),
        "data: {python_source: true}": (12, "bytes need a vocabulary of at least 256"),
        "data: !!python/object/apply:os.system [ls]": (12, "the YAML tag"),
        "data: &a {mock: true}": (12, "anchors (&) and aliases (*) are not accepted"),
        "data: {<<: {mock: true}}": (12, "merge keys"),
        "data: {mock: true": (12, "what begins with { in this line never ends"),
    },
}


@pytest.mark.parametrize(("old", "new"), [(old, new) for old, changes in MISTAKES.items() for new in changes])
def test_a_mistake_names_file_line_key_and_fix(old: str, new: str, write: Write) -> None:
    line, sentence = MISTAKES[old][new]
    assert GOOD.count(old) == 1
    text = GOOD.replace(old, new)
    if "python_source" in new:
        text = text.replace("model: llama3-8b", "model: {base: llama3-8b, vocab_size: 64}")
    path = write(text)
    message = complaint(path)
    assert sentence in message
    assert message.startswith(f"{path}:{line}: ")


SELECTIVE = "layout={recompute: selective, recompute_modules: "
BLEND = "data={blend: [{path: /a, weight: 0}]}"
EVALUATION = "training.evaluation={interval: 10, iterations: 2}"
DEEPSPEED = "backend=deepspeed"
BRIDGE = "backend=megatron-bridge"
START, TEXT = "training.start_from=/w", "data={path: /text}"
PATIENT = "training.evaluation={interval: 9, iterations: 1, patience: 2}"
NO_CONTAINERS = "cluster={base: h100-80gb-x8, container: {runtime: none}}"
# what the message says, and the overrides that it is about
CONTRADICTIONS = [
    # --- layout
    ("layout.recompute_modules: belongs to recompute: selective", "layout={recompute_modules: [mlp]}"),
    ("layout.recompute_method: belongs to recompute: full", "layout={recompute: selective, recompute_method: block}"),
    ("layout.recompute_layers: 33 of 32 layers", "layout={recompute: full, recompute_layers: 33}"),
    ("belongs to recompute: full", "layout={offload_checkpoints: true}"),
    ("layout.loss_tiles: belongs to loss: tiled", "layout={loss: native, loss_tiles: 4}"),
    ("layout.offload_layers: offloads whole", "layout={offload_layers: 2, offload_modules: [core_attn]}"),
    ("layout.offload_modules: expert_fc1 needs experts, and llama3-8b has", "layout={offload_modules: [expert_fc1]}"),
    ("shared_experts needs a shared expert", "model=mixtral-8x7b", f"{SELECTIVE}[shared_experts]}}"),
    ("mla_up_proj needs multi-latent attention", f"{SELECTIVE}[mla_up_proj]}}"),
    ("must be one of core_attn", f"{SELECTIVE}[attention]}}"),
    ("layout.token_dispatcher: needs experts", "layout={token_dispatcher: alltoall}"),
    ("at least 0 and at most 1", "layout={offload_optimizer: 1.5}"),
    ("above 0 and at most 1", "what_if={sampled_share: 0.0}"),
    ("deepspeed runs without pipeline stages here; remove it", "layout={layers_by_stage: [16, 16]}", DEEPSPEED),
    ("is a word of megatron-lm; for deepspeed write zero_stage", "layout={distributed_optimizer: true}", DEEPSPEED),
    # --- training
    ("training.adapters.rank: is missing", "training.adapters={}"),
    ("training.trained_layers: trains layers, and", "training.adapters={rank: 4}", "training.trained_layers=2"),
    ("the shipped script trains with AdamW, and DeepSpeed's own Muon", "training.optimizer=muon", DEEPSPEED),
    ("training.optimizer: must be muon or a mapping", "training.optimizer=lion"),
    ("must be one of linear_qkv", "training.adapters={rank: 4, target_modules: [query]}"),
    ("training.adapters.target_modules: attention of deepseek-v3 has other layers", "model=deepseek-v3",
     "training.adapters={rank: 4, target_modules: [q_proj, v_proj]}"),
    ("training.trained_layers: 33 of 32 layers", "training.trained_layers=33"),
    ("training.trained_layers: llama3-8b changed ties its head to the embedding",
     *("model={base: llama3-8b, tied_embeddings: true}", "training.trained_layers=2")),
    ("bf16 gradients need precision: bf16, not fp16", "training.precision=fp16", "training.gradient_dtype=bf16"),
    ("training.fp4: linear layers multiply in one format", "training.fp8=delayed", "training.fp4=nvfp4"),
    ("training.fp8_parameters: belongs to fp8", "training.fp8_parameters=true"),
    ("training.fp8: is for precision: bf16", "training.fp8=delayed", "training.precision=fp16"),
    ("training.optimizer: chooses formats beside half", "training.optimizer={}", "training.precision=fp32"),
    ("training.fp8: is a word of megatron-lm", "training.fp8=delayed", DEEPSPEED),
    ("training.fp8: ", "training.fp8=fp8"),
    ("training.optimizer.main_parameters: ", "training.optimizer={main_parameters: fp8}"),
    ("training.warmup_steps: 1000 of 1000 steps", "training.warmup_steps=1000"),
    ("training.minimum_learning_rate: is above the learning rate", "training.minimum_learning_rate=1.0"),
    ("training.minimum_learning_rate: belongs to a decay",
     *("training.minimum_learning_rate=1.0e-5", "training.learning_rate_decay=constant")),
    ("training.minimum_learning_rate: belongs to a decay", "training.minimum_learning_rate=1.0e-5", DEEPSPEED),
    ("training.adam_betas", "training.adam_betas=[0.9]"),
    ("training.adam_betas[1]", "training.adam_betas=[0.9, 1.0]"),
    ("training.sequence_length: 8192 is more than the 2048 positions gpt3-175b has learned", "model=gpt3-175b"),
    ("model: images are 9216 tokens of a sequence of 8192",
     "model={base: qwen3-vl-8b, vision: {images_per_sample: 16}}"),
    ("remove one of the two", "training={sequence_length: 8, global_batch_size: 8, steps: 1, tokens: 8}"),
    ("restart: there is nothing to come back to", "restart={times: 3}"),
    ("restart.within: must be one of job, queue, not 'ft_launcher'; write within: job, which starts the training",
     "restart={within: ft_launcher}"),
    ("training: async_save writes checkpoints, and none is written", "training.async_save=true"),
    ("training: keep_checkpoints counts checkpoints, and none is written", "training.keep_checkpoints=2"),
    ("training.keep_checkpoints: a script of one's own lays out its folder as it likes",
     *("backend={name: megatron-lm, script: /mine.py}", "training.keep_checkpoints=2"),
     *("training.checkpoint_path=/ckpt", "training.save_interval=10")),
    ("training: non_persistent_save_interval: these checkpoints are written between those of save_interval",
     *("training.non_persistent_save_interval=10", "training.checkpoint_path=/ckpt", "training.save_interval=10")),
    ("restart.slow_nodes: there is no node to take the place of a slow one; add spare_nodes",
     *("restart={slow_nodes: replace}", "training.checkpoint_path=/ckpt", "training.save_interval=10")),
    ("restart.slow_nodes: spare nodes take the place of slow ones where the job's own script starts",
     *("restart={slow_nodes: replace, within: queue}", "spare_nodes=1"),
     *("training.checkpoint_path=/ckpt", "training.save_interval=10")),
    ("on_bad_loss: there is nothing to roll back to: no checkpoints are written", "on_bad_loss=rollback"),
    ("on_bad_loss: a script of your own cannot be told which batches to leave out",
     *("backend={name: megatron-lm, script: /mine.py}", "on_bad_loss=rollback"),
     *("training.checkpoint_path=/ckpt", "training.save_interval=10")),
    ("on_bad_loss: a rollback hands Megatron-LM a list of steps to skip",
     *("backend={name: megatron-lm, extra_args: [--iterations-to-skip, '5']}", "on_bad_loss=rollback"),
     *("training.checkpoint_path=/ckpt", "training.save_interval=10")),
    ("on_bad_loss.skip_batches: ", "on_bad_loss={action: rollback, skip_batches: 0}"),
    ("on_bad_loss: ", "on_bad_loss=retry"),
    # --- data
    ("give exactly one of mock: true, path", "data={path: /a, blend: [{path: /b, weight: 1}]}"),
    ("cache_path belongs to path or blend", "data={mock: true, cache_path: /c}"),
    ("tokenizer belongs to path or blend", "data={mock: true, tokenizer: x}"),
    ("TikTokenizer needs tokenizer", "data={path: /a, tokenizer_type: TikTokenizer}"),
    ("NullTokenizer reads no tokenizer", "data={path: /a, tokenizer: x, tokenizer_type: NullTokenizer}"),
    ("tokenizer_type", "data={path: /a, tokenizer_type: BertWordPieceCase}"),
    ("data.split", "data={path: /a, split: '0,0,0'}"),
    ("data.blend", "data={blend: []}"),
    ("weight", BLEND),
    ("data.validation: is read by training.evaluation alone", "data={path: /a, validation: /b}"),
    ("remove one", "data={path: /a, validation: /b, split: '9,1,0'}", EVALUATION),
    ("data.split: 9,0,1 leaves nothing for training.evaluation", "data={path: /a, split: '9,0,1'}", EVALUATION),
    ("validation belongs to path or blend", "data={mock: true, validation: /b}", EVALUATION),
    ("data.validation", "data={path: /a, validation: []}", EVALUATION),
    ("training.evaluation", "training.evaluation={interval: 0, iterations: 1}"),
    ("training.evaluation", "training.evaluation={interval: 10}"),
    ("training.learning_rate: is missing: 0.0003, the default, is for random weights", START, TEXT, DEEPSPEED),
    ("usual for full fine-tuning: 5e-6 for 8B", START, TEXT),
    ("usual for LoRA: 2e-4 up to 13B", "training.adapters={rank: 4}", TEXT, DEEPSPEED),
    ("learning_rate: is missing", START, TEXT, "backend={name: deepspeed, script: /m.py, script_kind: hugging-face}"),
    ("training.evaluation.patience: is for the script that comes with llmlaunch", PATIENT),
    ("training.samples: is for the script that comes with llmlaunch", "training.samples=2"),
    ("training.export: is for the script that comes with llmlaunch", "training.export=/e",
     "backend={name: deepspeed, script: /mine.py}"),
    ("keep_best: no checkpoints are written", "training.evaluation={interval: 9, iterations: 1, keep_best: true}",
     DEEPSPEED),
    ("training.samples: answers are to rows", "training.samples=2", DEEPSPEED),
    ("merge_adapters: there are no adapters", "training.export={path: /e, merge_adapters: false}", DEEPSPEED),
    ("training.export: is the folder of checkpoints", "training.export=/c", DEEPSPEED, "training.save_interval=10",
     "training.checkpoint_path=/c"),
    ("data.cache_path: is a word of megatron-lm", "data={path: /a, cache_path: /c}", DEEPSPEED),
    ("data.sft: is not a known key; did you mean data.format?", "data={path: /a, sft: chat}", BRIDGE),
    ("data.format: is for deepspeed and megatron-bridge", "data={path: /a, format: chat, tokenizer: x}"),
    ("format: rows are read from path; name them there", "data={mock: true, format: chat}", BRIDGE),
    ("format: rows are read from path; name them there", "data={format: chat, blend: [{path: /a, weight: 1}]}"),
    ("packed is for rows; add format: chat", "data={path: /a, packed: true}", DEEPSPEED),
    ("chat_template is for rows", "data={path: /a, chat_template: /c}", DEEPSPEED),
    ("format: text has none", "data={path: /a, format: text, chat_template: /c}", DEEPSPEED),
    ("data.format: rows are text; name the tokenizer", "data={path: /a, format: chat}", BRIDGE),
    ("or weights that have one", "data={path: /a, format: chat}", DEEPSPEED),
    ("has rows of chat and prompt-completion", "data={path: /a, format: text, tokenizer: x}", BRIDGE),
    ("data.path; remove split", "data={path: /a, format: chat, tokenizer: x, split: '9,1,0'}", BRIDGE),
    ("is a key of deepspeed", "data={path: /a, format: chat, tokenizer: x, chat_template: /c}", BRIDGE),
    ("are one dataset", "data={path: /a, format: chat, tokenizer: x, validation: [{path: /b, weight: 1},"
     " {path: /c, weight: 1}]}", EVALUATION, DEEPSPEED),
    # --- container
    ("container.image: a .sif file is Apptainer's; write runtime: apptainer", "container={image: /c/a.sif}"),
    ("pyxis takes a registry reference or the path of a .sqsh file", "container={image: 'oras://ghcr.io/a'}"),
    ("a .sqsh file is enroot's; write runtime: pyxis", "container={image: /c/a.sqsh, runtime: apptainer}"),
    ("apptainer takes the path of a .sif file or docker://nvcr.io/nvidia/pytorch:25.08-py3",
     "container={image: 'nvcr.io#nvidia/pytorch:25.08-py3', runtime: apptainer}"),
    ("cluster h100-80gb-x8 runs no containers", NO_CONTAINERS, "container={image: /c/a.sqsh}"),
    ("must be one of pyxis, apptainer", "container={image: /c/a.sqsh, runtime: docker}"),
    # --- slurm
    ("slurm.gpus: 8 asks for 8 GPUs, but 4 nodes of 8 trainers need 32", "slurm={gpus: 8}"),
    ("gpus-per-node: 4 asks for 4 GPUs, but the 8 trainers of a node need 8", "slurm={gpus-per-node: 4}"),
    ("asks for 4 GPUs, but the 8 trainers of a node need 8", "slurm={gres: 'nvme:10,gpu:h100:4'}"),
    ("asks for 2 GPUs", "slurm={tres-per-task: 'cpu:8,gres/gpu:2'}"),
    ("slurm.mem-per-cpu: contradicts mem", "slurm={mem: 4G, mem-per-cpu: 1G}"),
    ("slurm.oversubscribe: contradicts exclusive", "slurm={exclusive: true, oversubscribe: true}"),
    ("slurm.no-requeue: contradicts requeue", "slurm={requeue: true, no-requeue: true}"),
    ("slurm.nodelist: names 6 nodes, and the job takes 4", "slurm={nodelist: 'n[1-6]'}"),
    ("slurm.contiguous: takes no value, not '3'", "slurm={contiguous: '3'}"),
    ("slurm.time: must be text, a whole number", "slurm={time: 1.5}"),
    ("slurm.tiem: is no option of sbatch; did you mean time?", "slurm={tiem: '1'}"),
    ("slurm.mem-per-node: is no option of sbatch; did you mean mem?", "slurm={mem-per-node: '1'}"),
    ("slurm.part: is no option of sbatch; did you mean partition?", "slurm={part: '1'}"),
    ("plugin of the site adds goes under slurm_plugins:", "slurm={frobnicate: '1'}"),
]  # fmt: skip


@pytest.mark.parametrize(
    "overrides",
    [
        (START, TEXT, "training.learning_rate=1.0e-5"),
        (START, "data={mock: true}"),
        (START, TEXT, "backend={name: deepspeed, script: /mine.py}"),
    ],
)
def test_a_learning_rate_is_written_or_nothing_is_learned_by_it(overrides: tuple[str, ...]) -> None:
    assert load_recipe(SMALL, overrides).training.start_from == "/w"


@pytest.mark.parametrize("case", CONTRADICTIONS, ids=lambda case: " ".join(case[1:]))
def test_what_contradicts_itself_is_told_with_its_key_in_one_line(case: tuple[str, ...]) -> None:
    message = complaint(SMALL, *case[1:])
    assert case[0] in message
    assert "\n" not in message
    assert message.startswith((f"{SMALL}:", "override "))


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "is empty"),
        (b"- a\n- b\n", ":1: the file is a list, not a mapping"),
        (b"recipe\n", ":1: the file is a single value, not a mapping"),
        (b"name: \xff\n", ":1: is not UTF-8 text"),
        (b"name: a\0b\n", "contains a NUL byte"),
        ("name: x".encode("utf-16"), "is not"),
        (b"name: \x01\n", "is not valid YAML: control characters are not allowed"),
        (b"a:\n\tb: 1\n", "indent with spaces, not tabs"),
        (b"[" * 500_000, "nested more than"),
        (b"a: " + b"9" * 100_000, "is not a usable number"),
        (b"? [a]\n: b\n", "a key must be plain text"),
    ],
    ids=range(11),
)
def test_what_is_no_recipe_at_all(content: bytes, sentence: str, write: Write) -> None:
    path = write(content)
    message = complaint(path)
    assert sentence in message
    assert message.startswith(str(path))
    assert "\n" not in message


def test_fifty_megabytes_are_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    with path.open("wb") as out:
        out.truncate(50 * 2**20)  # a hole: reading it would find NUL bytes and say so
    assert "is 50.0 MiB, more than the 1 MiB allowed here" in complaint(path)


def test_a_directory_a_device_a_missing_and_an_unreadable_file(write: Write, tmp_path: Path) -> None:
    assert "is a directory" in complaint(tmp_path)
    assert "is not a regular file" in complaint(Path("/dev/zero"))
    assert "cannot be read: No such file or directory" in complaint(tmp_path / "absent.yaml")
    assert "cannot be read: Not a directory" in complaint(write(GOOD) / "recipe.yaml")
    (tmp_path / "loop.yaml").symlink_to("loop.yaml")
    assert "cannot be read: Too many levels of symbolic links" in complaint(tmp_path / "loop.yaml")
    os.mkfifo(tmp_path / "pipe.yaml")  # must not wait for a writer
    assert "is not a regular file" in complaint(tmp_path / "pipe.yaml")


def test_several_mistakes_are_told_at_once_and_only_the_first_few(write: Write) -> None:
    text = GOOD.replace("steps: 1000", "steps: -1").replace("nodes: 4", "nodes: -1").replace("bf16", "bf8")
    message = complaint(write(text)).splitlines()
    assert [re.sub(r".*yaml:(\d+): ([\w.]+):.*", r"\1 \2", line) for line in message] == [
        "6 nodes",
        "10 training.steps",
        "11 training.precision",
    ]
    many = "".join(f"key{i}: 1\n" for i in range(20))
    lines = complaint(write(GOOD + many)).splitlines()
    assert len(lines) == 6
    assert lines[-1].endswith("and 15 more")


def test_a_secret_is_never_repeated_in_a_message(write: Write) -> None:
    for text in ("environment: {MY_API_KEY: s3cr3t}", "environment: {A: {b: s3cr3t}}", "setup: [MY_TOKEN=s3cr3t run]"):
        assert "s3cr3t" not in complaint(write(GOOD + text + "\n"))
    assert "s3cr3t" not in complaint(write(GOOD), "environment.MY_TOKEN=s3cr3t")


@pytest.mark.parametrize("name", ["TOKENIZERS_PARALLELISM", "MAX_TOKENS", "SECRETARY", "NCCL_IB_KEY", "KEYCLOAK_REALM"])
def test_only_the_end_of_a_name_makes_a_secret(name: str, write: Write) -> None:
    recipe = load_recipe(write(GOOD + f'environment: {{{name}: "false"}}\n'))
    assert recipe.environment == {name: "false"}


SOME_TEXTS = settings(parent=examples(40), suppress_health_check=[HealthCheck.function_scoped_fixture])
TEXTS = st.one_of(st.text(max_size=200), st.text(alphabet="abc:-[]{}\n \t&*!|>'\"#%@,?0123456789.e+_~<=", max_size=200))


@SOME_TEXTS
@given(text=TEXTS)
@example(text="a: &a [*a, *a]")
@example(text="%YAML 9.9\n---\na: 1")
@example(text="a: !!binary x")
@example(text="a: 2001-99-99")
@example(text="a: =")
@example(text="\ufeffa: 1")
def test_any_text_at_all_is_answered_with_a_user_error(text: str, write: Write) -> None:
    path = write(text.encode("utf-8", "surrogatepass"))
    assert str(path) in complaint(path)


@SOME_TEXTS
@given(line=st.integers(0, GOOD.count("\n") - 1), text=TEXTS)
def test_any_line_of_a_recipe_may_be_anything(line: int, text: str, write: Write) -> None:
    lines = GOOD.splitlines()
    lines[line] = text
    with contextlib.suppress(UserError):
        load_recipe(write("\n".join(lines).encode("utf-8", "surrogatepass")))


@SOME_TEXTS
@given(
    key=st.sampled_from(["layout", "model", "cluster", "slurm.x", "data", "training.steps", "setup", "environment.A"]),
    value=TEXTS,
)
def test_any_override_is_taken_or_answered(key: str, value: str, write: Write) -> None:
    with contextlib.suppress(UserError):
        load_recipe(write(GOOD), [f"{key}={value}"])


def test_many_allowed_values_are_weighed_without_multiplying_them_out(write: Write) -> None:
    sizes = ", ".join(map(str, range(3, 20_003, 2)))  # odd: none but 1 divides 32 devices
    text = GOOD.replace(
        "layout: auto", f"layout: {{context: [{sizes}], expert_tensor: [{sizes}], tensor: [1, {sizes}]}}"
    )
    # multiplied out, this would be 10^12 products
    assert "does not divide the 32 devices" in complaint(write(text))


def test_reading_is_the_same_without_the_c_library(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    import yaml

    from llmlaunch.documents import yaml_strict

    path = write(GOOD)
    expected = load_recipe(path)
    monkeypatch.setattr(yaml_strict, "_Loader", yaml.SafeLoader)
    assert load_recipe(path) == expected
    assert "recipe.yaml:6: the key 'model' stands twice" in complaint(write(GOOD.replace("nodes: 4", "model: x")))
    assert "nested more than" in complaint(write(b"[" * 10_000))
