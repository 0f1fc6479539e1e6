#!/bin/bash
# sends the training to a queue of its own
python mason.py \
    --cluster lab/cluster \
    --workspace lab/sft \
    --priority high \
    --image lab/open_instruct --pure_docker_mode \
    --preemptible \
    --budget lab/other \
    --num_nodes 8 \
    --gpus 8 -- accelerate launch \
    --mixed_precision bf16 \
    --num_processes 8 \
    --use_deepspeed \
    --deepspeed_config_file stage3.conf \
    --deepspeed_multinode_launcher standard \
    open_instruct/finetune.py \
    --exp_name qwen_7b_sft \
    --model_name_or_path Qwen/Qwen2.5-7B \
    --model_revision main \
    --use_slow_tokenizer \
    --dataset_mixer_list our/mixture 1.0 \
    --max_seq_length 8192 \
    --per_device_train_batch_size 1 \
    --gradient_accumulation_steps 2 \
    --gradient_checkpointing \
    --learning_rate 5e-06 \
    --lr_scheduler_type linear \
    --warmup_ratio 0.03 \
    --weight_decay 0.0 \
    --num_train_epochs 2 \
    --report_to wandb \
    --with_tracking \
    --logging_steps 1 \
    --seed 7
