NPROC_PER_NODE=8 \
PYTORCH_CUDA_ALLOC_CONF='expandable_segments:True' \
CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7 \
megatron sft \
    --finetune true --model Qwen/Qwen1.5-MoE-A2.7B \
    --overlap_grad_reduce true --overlap_param_gather true \
    --sequence_parallel true --expert_model_parallel_size 4 \
    --pipeline_model_parallel_size 2 --decoder_last_pipeline_num_layers 11 \
    --moe_router_dtype fp32 --moe_aux_loss_coeff 1e-3 \
    --moe_shared_expert_overlap true --moe_grouped_gemm true --moe_permute_fusion true \
    --cross_entropy_loss_fusion true --attention_backend flash \
    --recompute_method uniform --recompute_num_layers 1 --recompute_granularity full \
    --micro_batch_size 1 --global_batch_size 16 --max_length 8192 --packing true \
    --dataset texts/proofs --load_from_cache_file true \
    --num_train_epochs 1 --lr_warmup_fraction 0.05 --min_lr 1e-6 --lr 1e-5 \
    --no_save_rng true --no_save_optim true --output_dir /scratch/mixture \
    --save_steps 500 --dataloader_num_workers 8
