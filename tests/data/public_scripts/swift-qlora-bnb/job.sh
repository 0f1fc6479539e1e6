CUDA_VISIBLE_DEVICES=0 \
swift sft --model Qwen/Qwen2.5-7B-Instruct --dataset texts/answers --tuner_type lora \
    --quant_method bnb --quant_bits 4 --bnb_4bit_quant_type nf4 --bnb_4bit_compute_dtype bfloat16 \
    --torch_dtype bfloat16 --max_length 2048 \
    --gradient_accumulation_steps 16 --per_device_train_batch_size 1 \
    --output_dir /scratch/four-bits
