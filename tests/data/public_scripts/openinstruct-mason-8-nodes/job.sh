#!/bin/bash
# sends the training to a queue of its own
python mason.py --gpus 8 --num_nodes 8 --cluster lab/cluster --workspace lab/tune --budget lab/money \
    --pure_docker_mode --image lab/image --preemptible --priority high \
    -- accelerate launch --num_processes 8 --mixed_precision bf16 \
    --use_deepspeed --deepspeed_multinode_launcher standard --deepspeed_config_file sharded.conf \
    open_instruct/finetune.py --gradient_checkpointing \
    --gradient_accumulation_steps 2 --per_device_train_batch_size 1 --max_seq_length 8192 \
    --num_train_epochs 2 --learning_rate 5e-06 --warmup_ratio 0.03 --lr_scheduler_type linear --weight_decay 0.0 \
    --model_revision main --model_name_or_path Qwen/Qwen2.5-7B --use_slow_tokenizer \
    --dataset_mixer_list lab/mixture 1.0 --report_to wandb --with_tracking --exp_name tune
