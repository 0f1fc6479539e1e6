#!/bin/bash
# with an image the job goes to a queue, without one it runs here
training="accelerate launch --num_processes 1 --mixed_precision bf16 \
    open_instruct/finetune.py --model_name_or_path Qwen/Qwen3-0.6B --add_bos \
    --gradient_accumulation_steps 4 --per_device_train_batch_size 1 --max_seq_length 1024 \
    --num_train_epochs 2 --learning_rate 5e-06 --warmup_ratio 0.03 --lr_scheduler_type linear --weight_decay 0.0 \
    --dataset_mixer_list lab/sample 100 --report_to wandb --with_tracking"

if [ -n "$1" ]; then
    image="$1"
    uv run python mason.py --gpus 1 --num_nodes 1 --cluster lab/cluster \
        --pure_docker_mode --image "$image" -- $training
else
    uv run $training
fi
