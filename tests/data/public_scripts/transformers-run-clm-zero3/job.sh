#!/bin/bash
# causal language modelling of a text file, blocks of 2048 tokens
NUM_GPUS=${NUM_GPUS:=8}
OUT=${OUT:-/tmp/clm}
deepspeed --num_gpus=$NUM_GPUS examples/pytorch/language-modeling/run_clm.py \
    --deepspeed ds_zero3.json \
    --model_name_or_path mistralai/Mistral-7B-v0.1 \
    --train_file data.txt --validation_file dev.txt \
    --do_train --do_eval \
    --block_size 2048 \
    --per_device_train_batch_size 2 --per_device_eval_batch_size 2 \
    --gradient_accumulation_steps 4 \
    --gradient_checkpointing \
    --learning_rate 2e-5 --warmup_ratio 0.03 --lr_scheduler_type cosine \
    --bf16 --torch_dtype bfloat16 \
    --num_train_epochs 1 \
    --save_strategy epoch --logging_steps 10 --report_to none \
    --overwrite_output_dir --output_dir $OUT
