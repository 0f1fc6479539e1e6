#!/bin/bash
# Facts of microsoft/Megatron-DeepSpeed examples_deepspeed/rebase/ds_pretrain_gpt_1.3B.sh at 4efb479d5317 (MIT)
dir=`pwd`
seq_len=2048
batch_size=$(( 512 / 256 ))
num_node=$(( 64 / 8 ))
no_pp="true"
train_samples=$(( 300 * 1000000000 / ${seq_len} ))
megatron_options=" --micro-batch-size ${batch_size} --seq-length ${seq_len} --train-samples ${train_samples} --fp16"
if [ "${activation_checkpoint}" = "true" ]; then
megatron_options="${megatron_options} \
    --checkpoint-activations"
fi
config_json="ds_config_mbs${batch_size}.json"
echo '{"train_micro_batch_size_per_gpu": MBSIZE, "zero_optimization": {"stage": ZERO_STAGE}}' > template.json
sed "s/MBSIZE/${batch_size}/" template.json \
    | sed "s/ZERO_STAGE/1/" \
      > ${config_json}
deepspeed_options=" --deepspeed --deepspeed_config ${config_json}"
if [[ "${no_pp}" = "true" ]]; then
deepspeed_options="${deepspeed_options} \
    --no-pipeline-parallel"
fi
iteration=0
for (( node = 0; node <= num_node-1; node++ ))
do
    if $(ssh -q worker-"$node" "test -f iteration"); then
        local_iteration=$(ssh -q worker-"$node" cat iteration)
    fi
done
deepspeed ${dir}/../pretrain_gpt.py ${megatron_options} ${deepspeed_options} &>> ${dir}/train_${HOSTNAME}.log
