#!/bin/bash
set -x
weights=Qwen/Qwen3-4B-Instruct-2507

CUDA_VISIBLE_DEVICES=0 llamafactory-cli train --do_train --stage sft \
    --finetuning_type lora --lora_target all --lora_rank 8 \
    --gradient_accumulation_steps 8 --per_device_train_batch_size 1 --cutoff_len 2048 --bf16 \
    --num_train_epochs 3.0 --learning_rate 1e-4 --warmup_ratio 0.1 --lr_scheduler_type cosine \
    --dataset notes,tasks --max_samples 1000 --overwrite_cache \
    --model_name_or_path ${weights} --trust_remote_code --template qwen3_nothink \
    --output_dir /scratch/adapters
