CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7 \
NPROC_PER_NODE=8 \
PYTORCH_CUDA_ALLOC_CONF='expandable_segments:True' \
megatron sft \
    --optimizer_offload_fraction 1 --optimizer_cpu_offload true --use_precision_aware_optimizer true \
    --sequence_parallel true --tensor_model_parallel_size 8 \
    --recompute_granularity full --recompute_num_layers 1 --recompute_method uniform \
    --attention_backend flash --cross_entropy_loss_fusion true \
    --max_length 8192 --packing true --micro_batch_size 1 --global_batch_size 16 \
    --num_train_epochs 5 --lr_warmup_fraction 0.05 --lr 1e-5 --min_lr 1e-6 \
    --dataset texts/proofs --model Qwen/Qwen2.5-72B-Instruct --finetune true \
    --output_dir /scratch/on-host --no_save_optim true \
    --save_steps 500 --dataloader_num_workers 8
