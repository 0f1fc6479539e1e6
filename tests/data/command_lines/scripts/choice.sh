#!/bin/bash
# Constructs of NVIDIA/Megatron-LM examples/post_training/modelopt/train.sh at d98e8a64ddf3 (Apache-2.0) and its like
set -euo pipefail
SCRIPT_DIR="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"
MODEL=${1:-}
while [[ $# -gt 0 ]]; do
    case "$1" in
        --nodes) NODES="$2"; shift 2 ;;
        --nodes=*) NODES="${1#*=}"; shift ;;
        *) shift ;;
    esac
done
declare -A LAYERS=([7b]=32 [13b]=40)
size=13b
case "$size" in
    7b) HIDDEN=4096 ;;
    13b) HIDDEN=5120 ;;
    *) echo "unknown"; exit 1 ;;
esac
launch() {
    local script=$1; shift
    exec torchrun --nproc-per-node=gpu --nnodes="${NODES:-2}" "$script" "$@"
}
launch "${SCRIPT_DIR}/../train.py" --num-layers "${LAYERS[$size]}" --hidden-size $HIDDEN --micro-batch-size 1
