#!/bin/bash
# Constructs of microsoft/Megatron-DeepSpeed examples_deepspeed/data_efficiency sweeps at 4efb479d5317 (MIT)
for lr in 1e-4 3e-4; do
    python tools/preprocess_data.py --input data.json
    deepspeed --include="worker-0:0,1,2,3@worker-1:0,1,2,3" train.py --lr $lr --deepspeed_config ds.json &
    wait
done
