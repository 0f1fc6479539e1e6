#!/bin/bash
changes="train.global_batch_size=64 logger.log_interval=10 train.train_iters=1000"
uv run python -m torch.distributed.run --nproc_per_node=8 scripts/training/run_recipe.py \
    --mode pretrain --recipe llama32_1b_pretrain_1gpu_h100_bf16_config $changes
