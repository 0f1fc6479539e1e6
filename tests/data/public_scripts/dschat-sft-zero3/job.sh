#!/bin/bash
# where the results go, and how much is sharded
into=$1 sharding=$2
if [ "$sharding" == "" ]; then sharding=2; fi
if [ "$into" == "" ]; then into=/scratch/chat; fi
mkdir -p $into

deepspeed main.py --deepspeed --zero_stage $sharding --dtype bf16 --gradient_checkpointing \
   --model_name_or_path meta-llama/Llama-3.2-3B --max_seq_len 2048 \
   --per_device_train_batch_size 4 --gradient_accumulation_steps 1 --num_train_epochs 4 \
   --learning_rate 9.65e-6 --lr_scheduler_type cosine --num_warmup_steps 0 --weight_decay 0. \
   --data_split 2,4,4 --data_path lab/ranked lab/helpful \
   --output_dir $into &> $into/said.txt
