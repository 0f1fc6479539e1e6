#!/bin/bash
export CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7
GPUS=8
TOTAL=32
accelerate launch --mixed_precision bf16 --num_machines 1 --num_processes $GPUS --use_deepspeed \
    --deepspeed_config_file stage3_accelerate.conf \
    open_instruct/dpo_tune_cache.py \
    --model_name_or_path allenai/Llama-3.1-Tulu-3-8B-SFT \
    --gradient_checkpointing \
    --max_seq_length 2048 \
    --per_device_train_batch_size 1 \
    --gradient_accumulation_steps $(($TOTAL/$GPUS)) \
    --learning_rate 5e-7 \
    --num_epochs 3 \
    --output_dir out
