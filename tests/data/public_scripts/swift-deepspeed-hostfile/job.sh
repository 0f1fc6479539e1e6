deepspeed --hostfile=host.txt swift/cli/sft.py --deepspeed zero2 \
    --tuner_type lora --lora_alpha 32 --lora_rank 8 \
    --max_length 4096 --per_device_train_batch_size 2 --gradient_accumulation_steps 16 \
    --learning_rate 1e-4 --num_train_epochs 1 \
    --dataset 'texts/questions#1000' \
    --torch_dtype bfloat16 --model Qwen/Qwen2.5-7B-Instruct
