NPROC_PER_NODE=2 CUDA_VISIBLE_DEVICES=0,1 \
swift sft \
    --model Qwen/Qwen2.5-7B-Instruct \
    --tuner_type lora \
    --dataset our/data \
    --torch_dtype bfloat16 \
    --per_device_train_batch_size 1 \
    --max_length 2048 \
    --output_dir output \
    --fsdp fsdp2
