#!/bin/bash
# 27 words decide everything: where it runs, which model, how it is split
set -e
where=$1 model=$2
micro=$3 batch=$4 rate=$5 last_rate=$6
tokens=$7 padded=$8 digits=$9
tensor=${10} stages=${11} ring=${12} expert_tensor=${13} experts=${14}
sequences=${15} sharded=${16} flash=${17} tuning=${18} recompute=${19}
on_host=${20} save_every=${21} texts=${22} held_out=${23} weights=${24}
all_tokens=${25} warm_tokens=${26} results=${27}

here="$(cd "$(dirname "$0")" && pwd)"
root=$(dirname $(dirname ${here}))
export PYTHONPATH=${root}:${root}/megatron:$PYTHONPATH CUDA_DEVICE_MAX_CONNECTIONS=1

case $where in
    dsw) gpus=`python -c "import torch; print(torch.cuda.device_count())"`
         meet="--nnodes 1 --node_rank 0 --master_addr localhost --master_port $(shuf -n 1 -i 10000-65535)" ;;
    dlc) gpus=$GPUS_OF_THE_POD
         meet="--nnodes ${WORLD_SIZE} --node_rank ${RANK} --master_addr ${MASTER_ADDR} --master_port ${MASTER_PORT}" ;;
esac

kernels="--attention-backend fused"
if [ $flash = true ]; then
    export NVTE_FUSED_ATTN=0 NVTE_FLASH_ATTN=1
    kernels="--attention-backend flash"
fi

if [ $model = 8B ]; then
    depth=36 width=4096 inner=12288 heads=32 groups=8
    mixture=""
elif [ $model = A3B ]; then
    depth=48 width=2048 inner=6144 heads=32 groups=4
    mixture="--num-experts 128 --moe-router-topk 8 --moe-ffn-hidden-size 768 --moe-grouped-gemm \
        --expert-model-parallel-size ${experts} --expert-tensor-parallel-size ${expert_tensor} \
        --moe-token-dispatcher-type alltoall --moe-layer-freq '([1]*48)' \
        --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.001"
fi

# of the environment, and mostly absent
if [ -z ${LAYERS_A_CHUNK} ]; then
    interleaved=""
else
    interleaved="--num-layers-per-virtual-pipeline-stage ${LAYERS_A_CHUNK}"
fi
[ -z ${LAYERS_AGAIN} ] && LAYERS_AGAIN=1

if [ $recompute = full ]; then
    rest=$(( ($depth / $stages) % ${LAYERS_AGAIN} ))
    if [ $rest != 0 ]; then
        echo "layers of a stage do not divide"
        exit -1
    fi
    again="--recompute-granularity full \
        --recompute-method uniform --recompute-num-layers ${LAYERS_AGAIN}"
elif [ $recompute = sel ]; then
    again="--recompute-activations"
fi

format="--bf16"
if [ $digits = fp8 ]; then format="${format} --fp8-format hybrid --fp8-recipe blockwise"; fi
if [ $sharded = true ]; then optimizer="--use-distributed-optimizer"; fi
if [ $sequences = true ] && [ $tensor -gt 1 ]; then spread="--sequence-parallel"; fi
if [ $weights != none ]; then from="--load $weights"; fi
if [ $on_host != false ]; then
    host="--optimizer-cpu-offload --use-precision-aware-optimizer --optimizer-offload-fraction ${on_host}"
fi

step=$(( batch * tokens ))
if [ $tuning = true ]; then
    steps=$all_tokens warm=$warm_tokens decay=$(( ${steps} - ${warm} ))
    stage="--calculate-per-token-loss --eod-mask-loss"
else
    steps=$(( all_tokens / step )) warm=$(( warm_tokens / step )) decay=$(( all_tokens / step ))
    stage="--train-mode pretrain"
fi

run=${model}-t${tensor}-p${stages}-c${ring}-${steps}
curves=${results}/curves/${run}_$(date "+%Y.%m.%d-%H.%M.%S")
kept=${results}/kept/${run}
mkdir -p ${curves} ${kept}
find -L ${weights} -maxdepth 1 -type f -name "*.json" -print0 | xargs -0 cp -t ${kept}

shape="--num-layers ${depth} --hidden-size ${width} --ffn-hidden-size ${inner} --num-attention-heads ${heads}
    --group-query-attention --num-query-groups ${groups} --kv-channels 128 --qk-layernorm
    --swiglu --disable-bias-linear --normalization RMSNorm --norm-epsilon 1e-6
    --position-embedding-type rope --use-rotary-position-embeddings --rotary-base 1000000
    --max-position-embeddings 40960 --padded-vocab-size 151936 --untie-embeddings-and-output-weights
    --attention-dropout 0.0 --hidden-dropout 0.0 --init-method-std 0.008"
schedule="--train-iters ${steps} --lr ${rate} --min-lr ${last_rate} --lr-decay-style cosine
    --lr-decay-iters ${decay} --lr-warmup-iters ${warm}
    --weight-decay 0.01 --clip-grad 1.0 --adam-beta1 0.9 --adam-beta2 0.95
    --micro-batch-size ${micro} --global-batch-size ${batch} --seq-length ${tokens} --max-padding-length ${padded}"
split="--tensor-model-parallel-size ${tensor} --pipeline-model-parallel-size ${stages} --context-parallel-size ${ring}
    --transformer-impl transformer_engine --cross-entropy-loss-fusion"
files="--save ${kept} --save-interval ${save_every} --ckpt-format torch_dist
    --no-load-optim --no-load-rng --no-save-optim
    --data-path ${texts} --split 99,1,0 --patch-tokenizer-type Qwen3Tokenizer --num-workers 32
    --tensorboard-dir ${curves} --tensorboard-queue-size 1
    --log-interval 1 --log-throughput --eval-interval 10000 --eval-iters 10"

line="torchrun --nproc_per_node ${gpus} ${meet} ../qwen2/pretrain_qwen.py
 ${shape} ${schedule} ${split} ${files} ${format} ${from} ${again} ${optimizer} \
 ${spread} ${mixture} ${host} ${stage} ${interleaved} ${kernels}"
echo ${line}
eval ${line}
