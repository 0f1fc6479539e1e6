#!/bin/bash
cards=8 batch=32
export CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7
accelerate launch --use_deepspeed --deepspeed_config_file sharded.conf \
    --num_processes $cards --num_machines 1 --mixed_precision bf16 \
    open_instruct/dpo_tune_cache.py --gradient_checkpointing \
    --gradient_accumulation_steps $(($batch/$cards)) --per_device_train_batch_size 1 --max_seq_length 2048 \
    --num_epochs 3 --learning_rate 5e-7 \
    --model_name_or_path allenai/Llama-3.1-Tulu-3-8B-SFT --output_dir /scratch/prefer
