read -r -d '' what_to_train <<WORDS
openrlhf.cli.train_sft \
 --model.model_name_or_path meta-llama/Meta-Llama-3-8B --ds.zero_stage 2 \
 --train.batch_size 256 --data.max_len 2048
WORDS
if [[ ${1} != "slurm" ]]; then
    deepspeed --module $what_to_train
fi
