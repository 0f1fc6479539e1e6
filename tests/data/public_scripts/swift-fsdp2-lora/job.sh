CUDA_VISIBLE_DEVICES=0,1 NPROC_PER_NODE=2 \
swift sft --fsdp fsdp2 --tuner_type lora --torch_dtype bfloat16 \
    --max_length 2048 --per_device_train_batch_size 1 \
    --model Qwen/Qwen2.5-7B-Instruct --dataset texts/answers \
    --output_dir /scratch/sharded
