#!/bin/bash
export CUDA_VISIBLE_DEVICES=0,1,2,3

SIZE=7b
GPUS=4
PER_GPU=1
TOTAL=128
ACCUMULATE=$(($TOTAL/$GPUS/$PER_GPU))
echo "Llama ${SIZE}: $GPUS GPUs, $PER_GPU a GPU, $ACCUMULATE steps of accumulation"

accelerate launch \
    --mixed_precision bf16 \
    --num_machines 1 \
    --num_processes $GPUS \
    --use_deepspeed \
    --deepspeed_config_file stage3_accelerate.conf \
    open_instruct/finetune.py \
    --model_name_or_path meta-llama/Llama-2-${SIZE}-hf \
    --use_lora \
    --lora_rank 64 \
    --lora_alpha 16 \
    --lora_dropout 0.1 \
    --tokenizer_name meta-llama/Llama-2-${SIZE}-hf \
    --use_slow_tokenizer \
    --train_file data.jsonl \
    --max_seq_length 4096 \
    --preprocessing_num_workers 16 \
    --checkpointing_steps epoch \
    --per_device_train_batch_size $PER_GPU \
    --gradient_accumulation_steps $ACCUMULATE \
    --learning_rate 1e-4 \
    --lr_scheduler_type linear \
    --warmup_ratio 0.03 \
    --weight_decay 0. \
    --num_train_epochs 5 \
    --output_dir output/lora_${SIZE}/ \
    --with_tracking \
    --report_to tensorboard \
    --logging_steps 1 &&

python open_instruct/merge_lora.py \
    --base_model_name_or_path meta-llama/Llama-2-${SIZE}-hf \
    --lora_model_name_or_path output/lora_${SIZE}/ \
    --output_dir output/merged_${SIZE}/ \
    --save_tokenizer
