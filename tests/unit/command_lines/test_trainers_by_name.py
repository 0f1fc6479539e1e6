"""Each trainer of the table is known by a command of its own: it is read by its reader, or refused by its name."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from llmlaunch.command_lines import trainers
from llmlaunch.command_lines.launch import trainer_command
from llmlaunch.command_lines.trainers import MEGATRON_DEEPSPEED, trainer_of
from llmlaunch.errors import NoVerdict
from llmlaunch.imports.command import read_command

MODEL = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 1"


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("pretrain_gpt.py", f"{MODEL} --deepspeed --zero-stage 1"),
        ("pretrain_gpt.py", f"{MODEL} --deepspeed_config=ds.json"),
        ("examples/train.py", f"{MODEL} --deepspeed-activation-checkpointing"),
        ("pretrain_gpt.py", f"{MODEL} --ds-sequence-parallel-size 2"),
        ("/home/me/Megatron-DeepSpeed/pretrain_gpt.py", MODEL),
        ("Megatron-DeepSpeed/pretrain_llama.py", "--yaml-cfg gpt.yaml"),
    ],
)
def test_the_fork_is_known_by_arguments_of_both_frameworks_or_by_its_checkout(program: str, words: str) -> None:
    assert trainer_of(program, words.split()).name == MEGATRON_DEEPSPEED


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("pretrain_gpt.py", MODEL),
        ("/home/me/Megatron-LM/pretrain_gpt.py", f"{MODEL} --use-distributed-optimizer"),
        ("train.py", "--deepspeed --deepspeed_config ds.json"),
        ("run_clm.py", "--model_name_or_path m --output_dir o --deepspeed ds.json"),
    ],
)
def test_megatron_lm_and_deepspeed_alone_are_not_taken_for_the_fork(program: str, words: str) -> None:
    assert trainer_of(program, words.split()).reader


# a command of each row of the table, as its own documentation or public scripts write it
REFUSED = {
    "torchtitan": ["torchrun --nproc_per_node 8 -m torchtitan.train --job.config_file x.toml",
                   "torchrun --nproc_per_node 8 ./train.py --job.config_file ./llama.toml"],
    "verl": ["python3 -m verl.trainer.main_ppo algorithm.adv_estimator=gae",
             "torchrun -m verl.trainer.fsdp_sft_trainer data.train_files=x"],
    "OpenRLHF": ["deepspeed --module openrlhf.cli.train_sft --max_len 2048", "python -m openrlhf.cli.train_ppo_ray"],
    "slime": ["ray job submit -- python3 train.py --actor-num-nodes 1 --num-layers 36"],
    "NeMo RL": ["uv run python -m nemo_rl.run --config x.yaml"],
    "TRL's GRPO": ["accelerate launch grpo.py --model_name_or_path m --learning_rate 1e-6", "trl grpo --config g.yaml"],
    "preference tuning (DPO, KTO, PPO, reward models)": ["trl dpo --model m", "swift rlhf --rlhf_type dpo --model m",
        "accelerate launch scripts/run_dpo.py recipes/config.yaml", "megatron rlhf --model m"],
    "NeMo 1": ["torchrun examples/nlp/language_modeling/megatron_gpt_pretraining.py trainer.devices=8",
               "python train_it.py trainer.devices=8 exp_manager.name=x model.megatron_amp_O2=True --lr 1"],
    "NeMo 2": ["nemo llm pretrain --factory llama3_8b"],
    "NeMo AutoModel": ["automodel finetune llm -c x.yaml"],
    "llama-cookbook's FSDP": ["torchrun --nproc_per_node 4 recipes/finetuning.py --enable_fsdp --use_peft"],
    "FSDP2": ["torchrun train_fsdp2.py --lr 1"],
    "torchtune": ["tune run --nproc_per_node 8 full_finetune_distributed --config llama3/8B_full"],
    "llm-foundry": ["composer train/train.py train/yamls/pretrain/mpt-7b.yaml"],
    "litgpt": ["litgpt finetune_lora meta-llama/Llama-3.2-1B --data JSON"],
    "Lightning": ["fabric run --accelerator=cuda --devices=8 train.py"],
    "nanotron": ["torchrun --nproc_per_node 8 run_train.py --config-file examples/config_tiny_llama.yaml"],
    "OLMo": ["torchrun --nproc_per_node 8 OLMo/scripts/train.py configs/official/OLMo-7B.yaml",
             "torchrun --nproc-per-node 8 /x/src/scripts/train/sft/OLMo-sft.py train --train_module.optim.lr=1"],
    "XTuner": ["xtuner train internlm2_7b_qlora_e3 --deepspeed deepspeed_zero2"],
    "GPT-NeoX": ["python ./deepy.py train.py -d configs 125M.yml local_setup.yml"],
    "Megatron-DeepSpeed": ["deepspeed pretrain_gpt.py --num-layers 24 --deepspeed --deepspeed_config ds.json"],
    "Colossal-AI": ["colossalai run --nproc_per_node 8 train.py --config c.py"],
    "fairseq": ["fairseq-hydra-train task.data=/data"],
    "diffusers": ["accelerate launch train_text_to_image_lora.py --pretrained_model_name_or_path m"],
    "Megatron-LM's BERT (pretrain_bert.py)": ["torchrun --nproc_per_node 8 pretrain_bert.py --num-layers 24"],
    "Megatron-LM's T5 (pretrain_t5.py)": ["torchrun --nproc_per_node 8 pretrain_t5.py --encoder-num-layers 24"],
    "Megatron-LM's vision-language model (pretrain_vlm.py)": ["torchrun pretrain_vlm.py --num-layers 24",
        "torchrun examples/multimodal/train.py --num-layers 32", "torchrun pretrain_qwen2_vl.py --num-layers 28"],
    "Megatron-LM's retrieval model": ["torchrun pretrain_retro.py --num-layers 12"],
    "Megatron-LM's vision model": ["torchrun pretrain_vision_classify.py --num-layers 12"],
    "Megatron-LM's reinforcement learning (train_rl.py)": ["torchrun train_rl.py --num-layers 12"],
    "Megatron-Bridge's launcher of experiments": ["torchrun scripts/performance/run_script.py -m llama3 -s 8b"],
}  # fmt: skip
MEGATRON = "megatron.command_line:read_megatron"
DEEPSPEED = "deepspeed.command_line:read_deepspeed"
READ = {
    "torchrun --nproc_per_node=8 scripts/training/run_recipe.py --recipe llama32_1b_pretrain_config "
    "model.tensor_model_parallel_size=2": ("Megatron-Bridge", "bridge.command_line:read_bridge"),
    "megatron sft --model Qwen/Qwen3-8B --micro_batch_size 1": ("Megatron-SWIFT", "megatron.swift:read_megatron_swift"),
    "torchrun swift/cli/_megatron/sft.py --load m": ("Megatron-SWIFT", "megatron.swift:read_megatron_swift"),
    "swift sft --model m --train_type lora": ("ms-swift", DEEPSPEED),
    "deepspeed swift/cli/sft.py --model m --model_name bot": ("ms-swift", DEEPSPEED),
    "accelerate launch open_instruct/finetune.py --model_name_or_path m": ("open-instruct", DEEPSPEED),
    "accelerate launch scripts/run_sft.py recipes/zephyr/sft.yaml": ("alignment-handbook", DEEPSPEED),
    "llamafactory-cli train sft.yaml": ("LLaMA-Factory", DEEPSPEED),
    "torchrun LLaMA-Factory/src/train.py sft.yaml": ("LLaMA-Factory", DEEPSPEED),
    "deepspeed src/train.py --stage sft --finetuning_type lora": ("LLaMA-Factory", DEEPSPEED),
    "axolotl train x.yaml": ("Axolotl", DEEPSPEED),
    "accelerate launch -m axolotl.cli.train x.yaml": ("Axolotl", DEEPSPEED),
    "axolotl train x.yaml --deepspeed zero2.json --micro-batch-size 1": ("Axolotl", DEEPSPEED),
    "torchrun fastchat/train/train_mem.py --model_name_or_path m": ("FastChat", DEEPSPEED),
    "trl sft --model_name_or_path m": ("TRL", DEEPSPEED),
    "accelerate launch examples/scripts/sft.py --model_name_or_path m": ("TRL", DEEPSPEED),
    "torchrun run_clm.py --model_name_or_path m": ("transformers", DEEPSPEED),
    "torchrun pretrain_gpt.py --hidden-size 8": ("Megatron-LM", MEGATRON),
    "torchrun pretrain_hybrid.py --hybrid-layer-pattern M*": ("Megatron-LM", MEGATRON),
    "torchrun examples/pretrain_deepseek.py --num-layers 8": ("Megatron-LM", MEGATRON),
    "python -u pretrain_gpt.py": ("Megatron-LM", MEGATRON),
    "torchrun my_train.py --lr 1": ("", DEEPSPEED),
    "deepspeed chat.py --deepspeed_config ds.json --micro_batch_size 4": ("", DEEPSPEED),
}
TABLE = json.loads(Path(trainers.__file__).with_name("trainers.json").read_text("utf-8"))["trainers"]


@pytest.mark.parametrize(
    ("line", "name"), [(line, name) for name, lines in REFUSED.items() for line in lines], ids=lambda each: each[:60]
)
def test_a_trainer_that_is_not_read_is_refused_by_its_name(line: str, name: str) -> None:
    command = trainer_command(shlex.split(line), place="train.sh:1")
    assert command is not None
    with pytest.raises(NoVerdict) as caught:
        read_command(command)
    assert caught.value.reason == f"{name} is not read; `llmlaunch observe --` measures it"
    assert (caught.value.exit_code, caught.value.recipe) == (5, "train.sh:1")


@pytest.mark.parametrize(("line", "row"), READ.items(), ids=lambda each: each[:60])
def test_a_trainer_that_is_read_goes_to_its_reader(line: str, row: tuple[str, str]) -> None:
    command = trainer_command(shlex.split(line))
    assert command is not None
    trainer = trainer_of(command.trainer, command.arguments)
    assert (trainer.name, trainer.reader.removeprefix("llmlaunch.frameworks.")) == row


def test_each_row_of_the_table_has_a_command_here() -> None:
    named = {row["name"] for row in TABLE}
    assert named == set(REFUSED) | {name for name, _ in READ.values()}


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("import torch\nfrom megatron.bridge.training.pretrain import pretrain\n", "Megatron-Bridge"),
        ("from nemo.collections import llm\nfrom nemo.collections.llm import x\nimport nemo_run as run\n", "NeMo 2"),
        ("# from megatron.bridge import x\nimport torch\n", ""),
    ],
)
def test_a_script_of_its_own_is_known_by_what_it_imports(text: str, name: str) -> None:
    assert trainer_of("train.py", ["--lr", "1"], lambda: text).name == name


@pytest.mark.parametrize(
    "line",
    [
        "torchrun --nproc_per_node 8 tools/weight_converter.py --load-from x --num-layers 4",
        "python tools/checkpoint/convert.py --model-type GPT --num-layers 4",
        "accelerate launch -m lm_eval --model hf",
        "swift infer --model m",
        "axolotl preprocess x.yaml",
        "python -m swift.cli.export --model_name_or_path m",
    ],
)
def test_a_tool_is_no_training(line: str) -> None:
    assert trainer_command(shlex.split(line)) is None
