#!/bin/bash
export PYTORCH_CUDA_ALLOC_CONF='expandable_segments:True'
megatron_args=(
    --model Qwen/Qwen3-14B
    --tensor_model_parallel_size 4
    --micro_batch_size 1
    --global_batch_size 16
    --packing true
    --recompute_granularity selective
    --num_train_epochs 1
    --finetune true
    --cross_entropy_loss_fusion true
    --cross_entropy_fusion_impl native
    --max_length 8192
    --sequence_parallel true
    --use_precision_aware_optimizer true
    --exp_avg_dtype bf16
    --exp_avg_sq_dtype bf16
    --attention_backend flash
    --dataset our/data
    --output_dir out
)
NPROC_PER_NODE=8 CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7 megatron sft "${megatron_args[@]}"
