#!/bin/bash

TRAIN="accelerate launch \
    --mixed_precision bf16 \
    --num_processes 1 \
    open_instruct/finetune.py \
    --model_name_or_path Qwen/Qwen3-0.6B \
    --max_seq_length 1024 \
    --per_device_train_batch_size 1 \
    --gradient_accumulation_steps 4 \
    --learning_rate 5e-06 \
    --lr_scheduler_type linear \
    --warmup_ratio 0.03 \
    --weight_decay 0.0 \
    --num_train_epochs 2 \
    --report_to wandb \
    --logging_steps 1 \
    --dataset_mixer_list our/sample 100 \
    --add_bos \
    --seed 7 \
    --with_tracking"

if [ -n "$1" ]; then
    IMAGE="$1"
    echo "image: $IMAGE"
    uv run python mason.py \
        --cluster lab/cluster \
        --image "$IMAGE" \
        --pure_docker_mode \
        --num_nodes 1 \
        --gpus 1 \
        -- \
        $TRAIN
else
    echo "here"
    uv run $TRAIN
fi
