#!/bin/bash
weights=meta-llama/Llama-3.2-3B-Instruct
home=/scratch/tuned
said=${home}/said/
mkdir -p ${said}

accelerate launch --config_file sharded.yaml examples/finetune.py --do_train \
    --torch_dtype bfloat16 --bf16 --gradient_checkpointing 0 --use_flash_attention 0 \
    --block_size 512 --disable_group_texts 1 \
    --gradient_accumulation_steps 1 --per_device_train_batch_size 1 \
    --num_train_epochs 1 --lr_scheduler_type cosine --learning_rate 2e-5 \
    --model_name_or_path ${weights} --trust_remote_code 0 \
    --conversation_template llama3 --dataset_path /data/talks --validation_split_percentage 0 \
    --overwrite_output_dir --output_dir ${home} --ddp_timeout 72000 \
    2> >(tee ${said}/errors >&2) > >(tee ${said}/words)
