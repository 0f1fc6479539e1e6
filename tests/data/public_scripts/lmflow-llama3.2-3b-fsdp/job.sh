#!/bin/bash
home=/scratch/tuned
mkdir -p ${home}

accelerate launch --config_file fully_sharded.yaml examples/finetune.py \
    --model_name_or_path meta-llama/Llama-3.2-3B-Instruct --conversation_template llama3 \
    --dataset_path /data/talks --disable_group_texts 1 --block_size 512 \
    --per_device_train_batch_size 1 --gradient_accumulation_steps 1 --gradient_checkpointing 0 \
    --do_train --num_train_epochs 1 --learning_rate 2e-5 --bf16 --torch_dtype bfloat16 \
    --output_dir ${home} > >(tee ${home}/words) 2> >(tee ${home}/errors >&2)
