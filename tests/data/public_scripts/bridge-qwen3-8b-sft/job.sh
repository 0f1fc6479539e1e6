WORKSPACE=${WORKSPACE:-/workspace}
torchrun --nproc-per-node=4 scripts/training/run_recipe.py --recipe qwen3_8b_sft_4gpu_h100_bf16_config --mode sft \
    checkpoint.pretrained_checkpoint=${WORKSPACE}/models/Qwen3-8B train.train_iters=100 checkpoint.save=${WORKSPACE}/results
