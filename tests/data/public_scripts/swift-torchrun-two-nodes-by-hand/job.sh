nodes=2
gpus=4

CUDA_VISIBLE_DEVICES=0,1,2,3 \
torchrun \
    --master_port 29500 \
    --nproc_per_node=$gpus \
    --nnodes=$nodes \
    --node_rank=0 \
    --master_addr=127.0.0.1 \
    swift/cli/sft.py \
    --model Qwen/Qwen2.5-7B-Instruct \
    --tuner_type full \
    --dataset 'a/zh#20000' 'a/en#20000' \
    --load_from_cache_file true \
    --torch_dtype bfloat16 \
    --num_train_epochs 1 \
    --per_device_train_batch_size 1 \
    --learning_rate 1e-5 \
    --gradient_accumulation_steps $(expr 32 / $gpus / $nodes) \
    --max_length 8192 \
    --output_dir output \
    --warmup_ratio 0.05 \
    --deepspeed zero2
