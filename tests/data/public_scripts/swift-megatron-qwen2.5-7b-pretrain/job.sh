NPROC_PER_NODE=4 \
PYTORCH_CUDA_ALLOC_CONF='expandable_segments:True' \
CUDA_VISIBLE_DEVICES=0,1,2,3 \
megatron pt \
    --train_iters 10000 --lr_warmup_iters 300 --lr 1e-5 --min_lr 1e-6 \
    --dataset texts/web --streaming true --packing true --max_length 8192 \
    --recompute_granularity selective \
    --sequence_parallel true --tensor_model_parallel_size 4 \
    --cross_entropy_loss_fusion true --attention_backend flash \
    --micro_batch_size 1 --global_batch_size 16 \
    --save_steps 500 --eval_steps 500 --no_save_rng true --no_save_optim true --output_dir /scratch/web \
    --finetune true --model Qwen/Qwen2.5-7B \
    --dataloader_num_workers 4
