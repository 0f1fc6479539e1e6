#!/bin/bash
# full finetuning of a 3B with accelerate
model=meta-llama/Llama-3.2-3B-Instruct
data=data/alpaca/train_conversation
out=output_models/finetune
id=finetune
logs=${out}/log/
mkdir -p ${out} ${logs}

accelerate launch --config_file accelerate_dsz3.yaml \
  examples/finetune.py \
    --model_name_or_path ${model} \
    --trust_remote_code 0 \
    --dataset_path ${data} \
    --output_dir ${out} --overwrite_output_dir \
    --conversation_template llama3 \
    --disable_group_texts 1 \
    --num_train_epochs 1 \
    --block_size 512 \
    --per_device_train_batch_size 1 \
    --gradient_accumulation_steps 1 \
    --learning_rate 2e-5 \
    --lr_scheduler_type cosine \
    --bf16 \
    --torch_dtype bfloat16 \
    --validation_split_percentage 0 \
    --logging_steps 20 \
    --do_train \
    --ddp_timeout 72000 \
    --save_steps 5000 \
    --use_flash_attention 0 \
    --gradient_checkpointing 0 \
    --dataloader_num_workers 8 \
    --report_to wandb \
    --run_name ${id} \
    --seed 42 \
    > >(tee ${logs}/train.log) \
    2> >(tee ${logs}/train.err >&2)
