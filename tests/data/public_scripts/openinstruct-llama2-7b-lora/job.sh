#!/bin/bash
# adapters are trained on four of eight, then put into the weights
cards=4 each=1 batch=128
rounds=$(($batch/$cards/$each))
kind=7b
export CUDA_VISIBLE_DEVICES=0,1,2,3

accelerate launch --use_deepspeed --deepspeed_config_file sharded.conf \
    --num_processes $cards --num_machines 1 --mixed_precision bf16 \
    open_instruct/finetune.py \
    --lora_dropout 0.1 --lora_alpha 16 --lora_rank 64 --use_lora \
    --gradient_accumulation_steps $rounds --per_device_train_batch_size $each --max_seq_length 4096 \
    --num_train_epochs 5 --learning_rate 1e-4 --warmup_ratio 0.03 --lr_scheduler_type linear --weight_decay 0. \
    --checkpointing_steps epoch --report_to tensorboard --with_tracking \
    --train_file /data/talks.jsonl --use_slow_tokenizer --tokenizer_name meta-llama/Llama-2-${kind}-hf \
    --model_name_or_path meta-llama/Llama-2-${kind}-hf --output_dir /scratch/adapters_${kind}/ &&

python open_instruct/merge_lora.py --save_tokenizer --output_dir /scratch/whole_${kind}/ \
    --lora_model_name_or_path /scratch/adapters_${kind}/ --base_model_name_or_path meta-llama/Llama-2-${kind}-hf
