NUM_GPUS=${NUM_GPUS:=8}
deepspeed --num_gpus=$NUM_GPUS examples/pytorch/language-modeling/run_clm.py \
    --model_name_or_path mistralai/Mistral-7B-v0.1 --block_size 2048 \
    --deepspeed zero3.json --bf16 --torch_dtype bfloat16 --gradient_checkpointing \
    --per_device_train_batch_size 2 --gradient_accumulation_steps 4 --per_device_eval_batch_size 2 \
    --do_eval --validation_file held-out.txt --do_train --train_file novels.txt --num_train_epochs 1 \
    --lr_scheduler_type cosine --warmup_ratio 0.03 --learning_rate 2e-5 \
    --report_to none --save_strategy epoch --overwrite_output_dir --output_dir ${RESULTS:-/tmp/novels}
