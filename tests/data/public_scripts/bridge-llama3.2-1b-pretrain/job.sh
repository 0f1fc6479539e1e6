#!/bin/bash
uv run python -m torch.distributed.run --nproc_per_node=8 scripts/training/run_recipe.py \
    --recipe llama32_1b_pretrain_1gpu_h100_bf16_config \
    --mode pretrain \
    train.train_iters=1000 \
    train.global_batch_size=64 \
    logger.log_interval=10
