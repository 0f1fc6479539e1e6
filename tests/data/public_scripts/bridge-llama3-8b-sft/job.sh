WORKSPACE=${WORKSPACE:-/workspace}
PRETRAINED=${PRETRAINED:-${WORKSPACE}/models/llama3-8b}
SEQ_LENGTH=4096
GBS=16
uv run python -m torch.distributed.run --nproc_per_node=8 scripts/training/run_recipe.py \
    --recipe llama3_8b_sft_2gpu_h100_bf16_config \
    --mode sft \
    checkpoint.pretrained_checkpoint=$PRETRAINED \
    train.train_iters=100 \
    train.global_batch_size=$GBS \
    model.seq_length=$SEQ_LENGTH \
    dataset.seq_length=$SEQ_LENGTH \
    model.tensor_model_parallel_size=4 \
    model.sequence_parallel=True \
    checkpoint.save=${WORKSPACE}/results/sft
