PYTORCH_CUDA_ALLOC_CONF='expandable_segments:True' \
NPROC_PER_NODE=4 \
CUDA_VISIBLE_DEVICES=0,1,2,3 \
megatron sft \
    --model Qwen/Qwen3-30B-A3B-Base \
    --expert_model_parallel_size 4 \
    --moe_permute_fusion true \
    --moe_grouped_gemm true \
    --moe_shared_expert_overlap true \
    --moe_aux_loss_coeff 1e-3 \
    --micro_batch_size 1 \
    --global_batch_size 16 \
    --packing true \
    --recompute_granularity full \
    --recompute_method uniform \
    --recompute_num_layers 1 \
    --lr 1e-5 \
    --min_lr 1e-6 \
    --max_length 8192 \
    --num_train_epochs 3 \
    --optimizer_cpu_offload true \
    --use_precision_aware_optimizer true \
    --optimizer_offload_fraction 1 \
    --finetune true \
    --cross_entropy_loss_fusion true \
    --lr_warmup_fraction 0.05 \
    --eval_steps 500 \
    --save_steps 500 \
    --dataloader_num_workers 8 \
    --dataset_num_proc 8 \
    --no_save_optim true \
    --no_save_rng true \
    --sequence_parallel true \
    --attention_backend flash \
    --load_from_cache_file true \
    --dataset 'our-lab/reasoning-110k' \
    --split_dataset_ratio 0.01 \
    --save_safetensors true \
    --output_dir runs/swift
