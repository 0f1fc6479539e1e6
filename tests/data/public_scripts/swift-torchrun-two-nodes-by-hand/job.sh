cards=4 machines=2

CUDA_VISIBLE_DEVICES=0,1,2,3 \
torchrun --nnodes=$machines --nproc_per_node=$cards --node_rank=0 \
    --master_addr=127.0.0.1 --master_port 29500 \
    swift/cli/sft.py --deepspeed zero2 --torch_dtype bfloat16 \
    --gradient_accumulation_steps $(expr 32 / $cards / $machines) --per_device_train_batch_size 1 \
    --dataset 'texts/german#20000' 'texts/dutch#20000' --max_length 8192 \
    --warmup_ratio 0.05 --learning_rate 1e-5 --num_train_epochs 1 \
    --tuner_type full --model Qwen/Qwen2.5-7B-Instruct \
    --output_dir /scratch/by-hand
