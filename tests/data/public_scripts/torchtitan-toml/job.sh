srun --ntasks-per-node=1 --gpus-per-task=8 -N 8 -n 8 -p long -w "gpu-[1-8]" \
    torchrun --local-ranks-filter 0 --nproc_per_node 8 \
    --rdzv_id 7 --rdzv_endpoint "192.0.2.8:29500" --rdzv_backend c10d \
    ./train.py --job.config_file ./train_configs/llama2_70b.toml
