NPROC_PER_NODE=4 \
CUDA_VISIBLE_DEVICES=0,1,2,3 \
PYTORCH_CUDA_ALLOC_CONF='expandable_segments:True' \
megatron sft \
    --model Qwen/Qwen2.5-7B --finetune true --dataset texts/novels \
    --max_length 32768 --packing true --global_batch_size 8 --micro_batch_size 1 \
    --sequence_parallel true --tensor_model_parallel_size 4 \
    --attention_backend flash --cross_entropy_loss_fusion true \
    --recompute_num_layers 1 --recompute_method uniform --recompute_granularity full \
    --lr 1e-5 --train_iters 1000 --eval_iters 50 --no_save_optim true \
    --output_dir /scratch/novels
