"""What a script loads is in the host's memory, with the version of the library that was assumed. The script is a
reconstruction of a common fine-tuning with Hugging Face's Trainer under ZeRO 3."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmlaunch.app.existing_job import job_of_script, reading_lines
from llmlaunch.units import GIB

SCRIPT = """#!/bin/bash
#SBATCH --nodes=1
#SBATCH --gpus-per-node=8
#SBATCH --mem=1900G
torchrun --nproc_per_node 8 sft.py --deepspeed zero3.json --model_name_or_path Qwen/Qwen3-30B-A3B --use_peft True \
--lora_r 16 --lora_target_modules q_proj k_proj v_proj o_proj --bf16 True --per_device_train_batch_size 1 \
--gradient_accumulation_steps 4 --max_steps 100 --max_length 4096 --gradient_checkpointing True --output_dir out \
--learning_rate 1e-4 --save_strategy no
"""
ZERO_3 = '{"bf16": {"enabled": true}, "zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": "auto", '
ZERO_3 += '"gradient_accumulation_steps": "auto", "train_batch_size": "auto"}'


def test_the_first_rank_holds_the_checkpoint_once(tmp_path: Path) -> None:
    script = tmp_path / "sft.sh"
    script.write_text(SCRIPT)
    (tmp_path / "zero3.json").write_text(ZERO_3)
    job = job_of_script(script, "h100-80gb-x8", (), lambda line: None)
    assert job.run.plan.estimate.host_terms["loading"] / GIB == pytest.approx(57, abs=0.5)
    assert [line for line in reading_lines(job) if "Transformers 5" in line]
