CUDA_VISIBLE_DEVICES=0,1 \
PYTORCH_CUDA_ALLOC_CONF='expandable_segments:True' \
NPROC_PER_NODE=2 \
megatron sft \
    --model Qwen/Qwen2.5-7B-Instruct --finetune true \
    --max_length 2048 --micro_batch_size 16 --global_batch_size 16 \
    --dataset 'texts/questions#500' \
              'texts/german#500' \
              'texts/dutch#500' \
    --system 'Answer in one sentence.' --model_name parrot --model_author them \
    --cross_entropy_loss_fusion true \
    --recompute_method uniform --recompute_num_layers 1 --recompute_granularity full \
    --tensor_model_parallel_size 2 --sequence_parallel true \
    --lr 1e-5 --min_lr 1e-6 --lr_warmup_fraction 0.05 --num_train_epochs 1 \
    --no_save_rng true --no_save_optim true --dataset_num_proc 4 \
    --output_dir /scratch/two --save_steps 100 --dataloader_num_workers 4
