#!/bin/bash
split=${TENSOR_WAYS:-1}
shape="--num-layers 36 --hidden-size 4096 --ffn-hidden-size 12288 --swiglu --disable-bias-linear \
  --num-attention-heads 32 --kv-channels 128 --num-query-groups 8 --group-query-attention --qk-layernorm \
  --normalization RMSNorm --untie-embeddings-and-output-weights --max-position-embeddings 40960 \
  --vocab-size 151936 --tokenizer-model Qwen/Qwen3-8B --tokenizer-type HuggingFaceTokenizer"
torchrun --nproc-per-node=8 train_rl.py ${shape} --perform-rl-step --grpo-prompts-per-step 64 --grpo-group-size 16 \
  --inference-max-seq-length 32768 --seq-length 32768 --lr 1e-6 \
  --global-batch-size 256 --micro-batch-size 1 --tensor-model-parallel-size ${split}
