#!/bin/bash
TP=${TP:-1}
MODEL_OPTIONS="\
  --seq-length 32768 --inference-max-seq-length 32768 \
  --untie-embeddings-and-output-weights \
  --num-layers 36 --hidden-size 4096 --ffn-hidden-size 12288 --num-attention-heads 32 \
  --kv-channels 128 --max-position-embeddings 40960 --group-query-attention --num-query-groups 8 \
  --normalization RMSNorm --qk-layernorm --swiglu --disable-bias-linear \
  --tokenizer-type HuggingFaceTokenizer --tokenizer-model Qwen/Qwen3-8B --vocab-size 151936 --lr 1e-6"
torchrun --nproc-per-node=8 train_rl.py --tensor-model-parallel-size ${TP} --micro-batch-size 1 --global-batch-size 256 \
  --grpo-group-size 16 --grpo-prompts-per-step 64 --perform-rl-step ${MODEL_OPTIONS}
