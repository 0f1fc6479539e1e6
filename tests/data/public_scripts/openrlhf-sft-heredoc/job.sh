set -x

read -r -d '' module_and_words <<END
openrlhf.cli.train_sft \
   --ds.param_dtype bf16 \
   --ds.zero_stage 2 \
   --model.gradient_checkpointing_enable \
   --model.model_name_or_path meta-llama/Meta-Llama-3-8B \
   --train.micro_batch_size 2 \
   --train.batch_size 256 \
   --train.max_epochs 1 \
   --adam.lr 5e-6 \
   --data.max_len 2048 \
   --data.dataset lab/questions \
   --ckpt.output_dir /scratch/tune
END
     # not packed

if [[ ${1} != "words" ]]; then
    deepspeed --module $module_and_words
fi
