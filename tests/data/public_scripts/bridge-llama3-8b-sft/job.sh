top=${SCRATCH_OF_TEAM:-/workspace}
weights=${START_WEIGHTS:-${top}/models/llama3-8b}
batch=16
window=4096
uv run python -m torch.distributed.run --nproc_per_node=8 scripts/training/run_recipe.py \
    --mode sft --recipe llama3_8b_sft_2gpu_h100_bf16_config \
    model.sequence_parallel=True model.tensor_model_parallel_size=4 \
    model.seq_length=$window dataset.seq_length=$window \
    train.global_batch_size=$batch train.train_iters=100 \
    checkpoint.save=${top}/tuned checkpoint.pretrained_checkpoint=$weights
