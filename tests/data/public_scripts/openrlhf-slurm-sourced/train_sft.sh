set -x
read -r -d '' training_commands <<EOF
openrlhf.cli.train_sft \
   --data.max_len 2048 \
   --train.batch_size 256 \
   --model.model_name_or_path meta-llama/Meta-Llama-3-8B \
   --ds.zero_stage 2
EOF
if [[ ${1} != "slurm" ]]; then
    deepspeed --module $training_commands
fi
