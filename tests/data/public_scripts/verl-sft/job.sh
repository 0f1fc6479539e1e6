set -x
if [ "$#" -lt 2 ]; then
    echo "wanted: cards, folder of results, words of verl"
    exit 1
fi
cards=$1 results=$2
shift 2
torchrun --nproc_per_node=$cards --nnodes=1 --standalone -m verl.trainer.fsdp_sft_trainer \
    trainer.total_training_steps=1 trainer.default_local_dir=$results \
    model.partial_pretrain=Qwen/Qwen2.5-0.5B-Instruct data.micro_batch_size=4 \
    data.train_files=$HOME/sums.parquet $@ ulysses_sequence_parallel_size=2
