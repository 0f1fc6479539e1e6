CUDA_VISIBLE_DEVICES=0,1,2,3 \
NPROC_PER_NODE=4 \
PYTORCH_CUDA_ALLOC_CONF='expandable_segments:True' \
megatron sft \
    --use_precision_aware_optimizer true --optimizer_offload_fraction 1 --optimizer_cpu_offload true \
    --sequence_parallel true --expert_model_parallel_size 4 \
    --recompute_method uniform --recompute_num_layers 1 --recompute_granularity full \
    --attention_backend flash --cross_entropy_loss_fusion true \
    --moe_grouped_gemm true --moe_permute_fusion true --moe_aux_loss_coeff 1e-3 --moe_shared_expert_overlap true \
    --global_batch_size 16 --micro_batch_size 1 --packing true --max_length 8192 \
    --num_train_epochs 3 --lr 1e-5 --lr_warmup_fraction 0.05 --min_lr 1e-6 \
    --dataset texts/proofs --no_save_optim true \
    --finetune true --model Qwen/Qwen3-30B-A3B-Base \
    --output_dir /scratch/experts --save_steps 500 --dataloader_num_workers 8
