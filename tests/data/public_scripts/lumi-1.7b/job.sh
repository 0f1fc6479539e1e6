#!/bin/bash
#SBATCH --nodes=8
#SBATCH --gpus-per-node=8
#SBATCH --ntasks-per-node=8
#SBATCH --cpus-per-task=7
#SBATCH --mem=480G
#SBATCH --exclusive
#SBATCH --time=12:00:00
#SBATCH --partition=standard-g
#SBATCH --job-name=small
#SBATCH --output out/%j.txt

if [ -z $SLURM_JOB_ID ]; then
    mkdir -p out
    sbatch "$0" "$@"   # typed at a prompt: queue this very file
    exit
fi

set -euo pipefail
here="$SLURM_SUBMIT_DIR"
if [[ -v SLURM_RESTART_COUNT ]]; then
    dead=$(awk '/NODE_FAIL/ {print $1}' out/newest.txt)
    [[ -z ${dead:+x} ]] || echo "without ${dead//$'\n'/ } this time"
fi
ln -sf "${SLURM_JOBID}.txt" out/newest.txt

# seven cores of each of the eight chiplets, in the order of their GPUs
m=fe
cores="0x${m}000000000000,0x${m}00000000000000,0x${m}0000,0x${m}000000,0x${m},0x${m}00,0x${m}00000000,0x${m}0000000000"

export WORLD_SIZE=$SLURM_NTASKS MASTER_PORT=9999
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export CUDA_DEVICE_MAX_CONNECTIONS=1
export NCCL_SOCKET_IFNAME=hsn0,hsn1,hsn2,hsn3

must_be_new() {
    local what="$1"
    if [ -n "${!what+x}" ]; then
        echo "$what is worked out here" >&2
        exit 1
    fi
}
must_be_new samples
must_be_new ramp

tokens=350_000_000_000
length=2048
batch=1024
tokens=${tokens//_}
samples=$((tokens/length))
ramp=$((500*batch))

width=2048
heads=32
groups=32
shared_embedding=1
stages=1
chunk=1
torch_fsdp=0
trace=0
again=0

net=(--num-layers 24 --num-attention-heads $heads --hidden-size $width --ffn-hidden-size $((4*width)))
if [ "$groups" != "$heads" ]; then
    net+=(--group-query-attention --num-query-groups $groups)
fi
if [ "$shared_embedding" = "0" ]; then
    net+=(--untie-embeddings-and-output-weights)
fi
net+=(
    --seq-length $length --max-position-embeddings $length
    --position-embedding-type rope --rotary-base 10000
    --normalization RMSNorm --swiglu --disable-bias-linear
    --hidden-dropout 0.0 --attention-dropout 0.0
    --use-flash-attn --attention-softmax-in-fp32
    --no-rope-fusion    # wrong results on these GPUs
    --no-bias-dropout-fusion --no-masked-softmax-fusion --no-gradient-accumulation-fusion
)

if [ "$torch_fsdp" = "1" ]; then
    split=(--use-torch-fsdp2)
else
    split=(
        --use-distributed-optimizer --overlap-grad-reduce
        --context-parallel-size 1 --tensor-model-parallel-size 1 --pipeline-model-parallel-size $stages
        --sequence-parallel --no-async-tensor-model-parallel-allreduce
    )
fi
if [ $stages -gt 1 ] && [ $chunk -gt 1 ]; then
    split+=(--num-layers-per-virtual-pipeline-stage $chunk)
fi

steps=(
    --bf16 --micro-batch-size 4 --global-batch-size $batch --train-samples $samples
    --optimizer adam --adam-beta1 0.9 --adam-beta2 0.95 --adam-eps 1e-8 --clip-grad 1.0 --weight-decay 1e-1
    --lr-decay-style cosine --lr 3e-4 --min-lr 3e-5 --lr-warmup-samples $ramp --lr-decay-samples $samples
)
if [ "$again" = "1" ]; then
    steps+=(--recompute-granularity selective --recompute-activations)
fi

text=(
    --tokenizer-type HuggingFaceTokenizer --tokenizer-model gpt2 --make-vocab-size-divisible-by 128
    --data-path "1.0 $here/corpus/web_text_document"
    --dataloader-type single --num-workers 2 # of 7 cores
)

files=(
    --save "$here/weights" --load "$here/weights" --save-interval 500
#    --async-save
    --ckpt-format torch
    --eval-interval 5000 --eval-iters 100
)

if [ "$trace" = "1" ]; then
    spy=(--use-pytorch-profiler --profile-ranks 0)
else
    spy=()
fi

line=" \
    Megatron-LM/pretrain_gpt.py \
    "${net[@]}" \
    "${split[@]}" \
    "${spy[@]}" \
    "${steps[@]}" \
    "${text[@]}" \
    "${files[@]}" \
"

srun --cpu-bind=mask_cpu:$cores --label \
    singularity exec -B "/scratch,/flash,$here" /appl/local/containers/rocm.sif \
    "$here/rank.sh" $line
