# WORLD_SIZE counts machines here and RANK is the number of one: the cloud says both to each machine
NODE_RANK=$RANK NNODES=$WORLD_SIZE \
PYTORCH_CUDA_ALLOC_CONF='expandable_segments:True' \
megatron sft \
    --expert_model_parallel_size 8 --pipeline_model_parallel_size 2 --sequence_parallel true \
    --moe_shared_expert_overlap true --moe_aux_loss_coeff 1e-3 --moe_permute_fusion true --moe_grouped_gemm true \
    --max_length 8192 --packing true --micro_batch_size 1 --global_batch_size 16 \
    --recompute_method uniform --recompute_num_layers 1 --recompute_granularity full \
    --attention_backend flash --cross_entropy_loss_fusion true \
    --lr 1e-5 --num_train_epochs 3 --no_save_rng true --no_save_optim true \
    --dataset texts/proofs --split_dataset_ratio 0.01 \
    --model Qwen/Qwen3-30B-A3B-Base --finetune true
