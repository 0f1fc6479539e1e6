top=${SCRATCH_OF_TEAM:-/workspace}
torchrun --nproc-per-node=4 scripts/training/run_recipe.py --mode sft --recipe qwen3_8b_sft_4gpu_h100_bf16_config \
    train.train_iters=100 checkpoint.save=${top}/tuned checkpoint.pretrained_checkpoint=${top}/models/Qwen3-8B
