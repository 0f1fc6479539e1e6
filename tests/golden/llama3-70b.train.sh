#!/bin/bash
# Rendered by llmlaunch. Trains on one node; job.sbatch starts it once per node and sets what it needs.
# USR1 or TERM: the trainers save a checkpoint and end. USR2: they write down where they are.
# Everything it prints is in logs/<attempt>.<node>.log of the run directory.

# -u: a misspelt variable ends the script. Not -e: every exit code is looked at where it arises.
set -u

: "${LLMLAUNCH_RUN_DIR:?job.sbatch sets it; start that instead}"
: "${LLMLAUNCH_ATTEMPT:?job.sbatch sets it; start that instead}"
: "${MASTER_ADDR:?job.sbatch sets it; start that instead}"
: "${MASTER_PORT:?job.sbatch sets it; start that instead}"

# SLURM's number of this node, or what job.sbatch made of it.
LLMLAUNCH_NODE_RANK=${SLURM_NODEID:-0}
if [[ -n ${LLMLAUNCH_NODE_RANKS:-} ]]; then
  read -ra node_ranks <<<"$LLMLAUNCH_NODE_RANKS"
  LLMLAUNCH_NODE_RANK=${node_ranks[LLMLAUNCH_NODE_RANK]}
fi
export LLMLAUNCH_NODE_RANK
export LLMLAUNCH_NODE=${SLURMD_NODENAME:-${HOSTNAME%%.*}}

# Told before the trainers run: there is nothing to save yet.
told=
trap 'told=USR1' USR1
trap 'told=TERM' TERM INT HUP
trap '' USR2

say() { printf 'train.sh on %s: %s\n' "$LLMLAUNCH_NODE" "$*"; }

die() {
  say "$*" >&2
  exit 1
}

# Each rank keeps two connections to node rank 0, where the ranks find each other; a soft limit of 1,024 starves 512 ranks.
raise_open_files() {
  local most=1048576 hard ranks=512 needed=1536
  hard=$(ulimit -Hn)
  [[ $hard != unlimited && $hard -le $most ]] || hard=$most
  [[ $(ulimit -Sn) = unlimited || $(ulimit -Sn) -ge $hard ]] || ulimit -Sn "$hard"
  [[ $LLMLAUNCH_NODE_RANK != 0 || $(ulimit -Sn) = unlimited || $(ulimit -Sn) -ge $needed ]] ||
    say "warning: this node may have $(ulimit -Sn) files open (ulimit -Hn), and $ranks ranks that meet here may need $needed; ask for a higher LimitNOFILE of slurmd"
}
raise_open_files

# bash asks for the folder it is in each time it looks for a command: it finds those it needs before that is the shared one.
cd / && hash cat mkdir mkfifo mktemp rm sleep tr grep 2>/dev/null
cd -- "$LLMLAUNCH_RUN_DIR" || die "cannot enter the run directory $LLMLAUNCH_RUN_DIR"

# Rank 0 listens here, and the others will look for it on MASTER_ADDR: better said now than after a time-out.
if [[ -n ${SLURMD_NODENAME:-} && $LLMLAUNCH_NODE_RANK = 0 && $SLURMD_NODENAME != "$MASTER_ADDR" ]]; then
  die "this is node rank 0, but the others were told to meet on $MASTER_ADDR"
fi

# --- environment of the trainers --------------------------------------------------------------------------------------
export CUDA_DEVICE_MAX_CONNECTIONS=1
export CUDA_DEVICE_ORDER=PCI_BUS_ID
export NCCL_DEBUG=WARN
export NCCL_SOCKET_IFNAME=ib0
export PYTHONUNBUFFERED=1
export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
: "${MEGATRON_LM_PATH:?is needed on every node; set it in the environment or the setup lines of the recipe, or where you submit}"

# What Python runs by -c looks for each module in this folder first, which all nodes share; these lines need none of it.
not_here='import sys; sys.path[:] = filter(None, sys.path); '

# --- which Python trains ----------------------------------------------------------------------------------------------
# The recipe's python, else $LLMLAUNCH_PYTHON, else the first on PATH that has torch.

recipe_python=''
if [[ -n $recipe_python ]]; then
  pythons=("$recipe_python")
elif [[ -n ${LLMLAUNCH_PYTHON:-} ]]; then
  pythons=("$LLMLAUNCH_PYTHON")
else
  pythons=(python3 python)
fi
python=
for candidate in "${pythons[@]}"; do
  if "$candidate" -c "$not_here"'import importlib.util; sys.exit(importlib.util.find_spec("torch") is None)' 2>/dev/null; then
    python=$(command -v "$candidate")
    break
  fi
done
[[ -n $python ]] || die "no torch in ${pythons[*]}: name the training environment's interpreter (python: in the recipe, or LLMLAUNCH_PYTHON)"
say "training with $python"

# --- caches -----------------------------------------------------------------------------------------------------------
# Where no home can be written, as in most containers and on sites that keep homes off their nodes, compilers keep their
# caches on this node while it trains, and what is downloaded stays in the run directory. A person's own setting is kept if
# its folder exists or can be made.

if [[ -n ${TMPDIR:-} && ! -w $TMPDIR ]]; then
  say "TMPDIR is $TMPDIR, which cannot be written on this node; /tmp is used"
  unset TMPDIR
fi
leftovers=() # removed in the end
trap 'rm -rf -- ${leftovers[@]+"${leftovers[@]}"}' EXIT

use_cache() { # VARIABLE FOLDER
  local chosen=${!1:-}
  if [[ -n $chosen ]]; then
    [[ ! -d $chosen ]] && ! mkdir -p -- "$chosen" 2>/dev/null || return 0
    say "$1 is $chosen, which cannot be made here; $2 is used"
  fi
  mkdir -p -- "$2" 2>/dev/null && export "$1=$2"
}

make_caches() {
  local caches downloads=$LLMLAUNCH_RUN_DIR/cache/huggingface
  caches=$(mktemp -d "${TMPDIR:-/tmp}/llmlaunch-caches.XXXXXX" 2>/dev/null || mktemp -d /tmp/llmlaunch-caches.XXXXXX) ||
    caches=$LLMLAUNCH_RUN_DIR/attempts/$LLMLAUNCH_ATTEMPT/caches/$LLMLAUNCH_NODE
  leftovers+=("$caches")
  if [[ ! -d ${HOME:-} ]]; then
    say "HOME is ${HOME:-empty}, which is not on this node; $caches is used"
    mkdir -p -- "$caches" && export HOME=$caches # for what keeps its settings there
  fi
  use_cache XDG_CACHE_HOME "$caches"
  use_cache TRITON_CACHE_DIR "$caches/triton"
  use_cache TORCHINDUCTOR_CACHE_DIR "$caches/torchinductor"
  use_cache CUDA_CACHE_PATH "$caches/cuda"
  use_cache MPLCONFIGDIR "$caches/matplotlib"
  use_cache HF_HOME "$downloads"
}
[[ -w ${HOME:-/nonexistent} || ${1:-} = preflight ]] || make_caches

# --- the last collectives of each rank ----------------------------------------------------------------------------------
# PyTorch's flight recorder: what each rank's NCCL was doing, written to attempts/<attempt>/flight/ after a time-out, and
# when the rank wrapper writes to the rank's pipe (USR2). What is set already stays. The pipes are in a folder of this
# node: not every shared file system has pipes, and a trainer that cannot make its own is ended by PyTorch. Whoever is not
# to train yet needs none.

flight=$LLMLAUNCH_RUN_DIR/attempts/$LLMLAUNCH_ATTEMPT/flight
pipes=
if (($# == 0)); then # job.sbatch made the folder
  # each has an old name; who set either meant both
  dumps=${TORCH_FR_DUMP_TEMP_FILE:-${TORCH_NCCL_DEBUG_INFO_TEMP_FILE:-$flight/rank_}}
  events=${TORCH_FR_BUFFER_SIZE:-${TORCH_NCCL_TRACE_BUFFER_SIZE:-2000}}
  export TORCH_FR_DUMP_TEMP_FILE="$dumps" TORCH_NCCL_DEBUG_INFO_TEMP_FILE="$dumps"
  export TORCH_NCCL_DUMP_ON_TIMEOUT="${TORCH_NCCL_DUMP_ON_TIMEOUT:-1}"
  torch_minor=$("$python" -c "$not_here"'import importlib.metadata as m; v = m.version("torch").split("."); print(int(v[0]) * 100 + int(v[1]))' 2>/dev/null)
  # the new name since 2.8; the old one is read for the pipe until 2.10, and warned of after that
  [[ ${torch_minor:-0} -lt 208 ]] || export TORCH_FR_BUFFER_SIZE="$events"
  [[ ${torch_minor:-0} -ge 211 ]] || export TORCH_NCCL_TRACE_BUFFER_SIZE="$events"
  pipes=$(mktemp -d "${TMPDIR:-/tmp}/llmlaunch-flight.XXXXXX" 2>/dev/null)
  [[ -z $pipes ]] || leftovers+=("$pipes")
  if [[ -n $pipes ]] && mkfifo "$pipes/probe" 2>/dev/null; then
    export TORCH_NCCL_DEBUG_INFO_PIPE_FILE="${TORCH_NCCL_DEBUG_INFO_PIPE_FILE:-$pipes/rank_}"
  fi
fi

# --- the node side: monitor and rank wrapper ----------------------------------------------------------------------------
# node.pyz wants Python 3.8 or newer and nothing else. Without it the training runs the same, only unwatched.

node_python=
for candidate in "$python" python3 python; do
  if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 8))' 2>/dev/null; then
    node_python=$candidate
    break
  fi
done

# --- what this node keeps on its own disk -----------------------------------------------------------------------------
# Python asks the file system about each module it imports, in each folder where that might be. Thousands of ranks ask one
# shared server millions of times; so what they import of this run is copied here once. Where that fails, they do ask.

node_files=$LLMLAUNCH_RUN_DIR
own_files=()
counters=attempts/$LLMLAUNCH_ATTEMPT/causes # of kills for want of memory, from before the training
shared_monitor_log=logs/$LLMLAUNCH_ATTEMPT.$LLMLAUNCH_NODE.monitor.log
monitor_log=$shared_monitor_log
copy_to_the_node() {
  local folder file
  folder=$(mktemp -d "${TMPDIR:-/tmp}/llmlaunch-node.XXXXXX" 2>/dev/null || mktemp -d /tmp/llmlaunch-node.XXXXXX) || return
  leftovers+=("$folder")
  mkdir -- "$folder/trainer" || return
  for file in node.pyz; do cat -- "$file" >"$folder/$file" || return; done
  [[ -z $node_python ]] || "$node_python" -I -S "$folder/node.pyz" unpack "$folder" hook/sitecustomize.py hook/llmlaunch_memory_probe.py || return
  : >"$folder/monitor.log" || return
  node_files=$folder counters=$folder monitor_log=$folder/monitor.log own_files=(--node-files "$folder")
}
copy_to_the_node 2>/dev/null || say "this node's disk takes no copy of what the ranks import; they read the run directory's"

program=("$python" "${MEGATRON_LM_PATH}"/pretrain_gpt.py --tensor-model-parallel-size 8 --pipeline-model-parallel-size 4 --num-layers 80 --bf16 --mock-data)
monitor=
if [[ -n $node_python ]]; then
  node_side=(--run-dir "$LLMLAUNCH_RUN_DIR" --attempt "$LLMLAUNCH_ATTEMPT" --node "$LLMLAUNCH_NODE")
  # A log of its own: a monitor that hangs must not hold this script's output open.
  # Signals for the trainers are none of the monitor's business, and it ends when it is told to by its own pid.
  (trap '' USR1 USR2
  exec "$node_python" -I -S "$node_files/node.pyz" monitor "${node_side[@]}" --parent "$$" --interval 1.0 \
    </dev/null >>"$monitor_log" 2>&1) &
  monitor=$!
  disown # its end is nobody's business: no message, no waiting
  "$node_python" -I -S "$node_files/node.pyz" diagnose "${node_side[@]}" --counters "$counters" --before
  # The wrapper notes each rank's own exit code or signal, which torchrun and srun blur.
  program=("$node_python" -I -S "$node_files/node.pyz" rank "${node_side[@]}" ${own_files[@]+"${own_files[@]}"} -- "${program[@]}")
else
  say "no Python 3.8 or newer here: no peaks and no exit codes of single ranks will be known of this node"
fi

# TERM, five seconds, KILL; never waited for, since a process stuck in the driver cannot be waited for.
stop_monitor() {
  [[ -n $monitor ]] || return 0
  # it may end between any two of these words
  is_ours() { { tr '\0' ' ' <"/proc/$monitor/cmdline" | grep -q 'node.pyz monitor'; } 2>/dev/null; }
  if is_ours; then
    kill -TERM "$monitor" 2>/dev/null
    for _ in {1..50}; do
      is_ours || break
      sleep 0.1
    done
    is_ours && kill -KILL "$monitor" 2>/dev/null
  fi
  if [[ $monitor_log != "$shared_monitor_log" ]]; then # on this node
    [[ ! -s $monitor_log ]] || cat -- "$monitor_log" >>"$shared_monitor_log" 2>/dev/null
  elif [[ ! -s $monitor_log ]]; then
    rm -f -- "$monitor_log"
  fi
}

# --- the training -------------------------------------------------------------------------------------------------------

torchrun=

# The trainers themselves are told, by way of their wrappers: torchrun hands on no USR1, and after a TERM it kills its
# workers in 30 seconds, saved or not. Where SLURM signals every process of a step, torchrun gets the signal, too; so it
# is started deaf to all three.
tell() { # SIGNAL
  [[ -n $torchrun ]] || return 0
  if [[ -n $node_python ]]; then
    "$node_python" -I -S "$node_files/node.pyz" tell --parent "$torchrun" --signal "$1" & # it may wait for trainers that start only now
  elif [[ $1 = USR1 ]]; then
    kill -TERM "$torchrun" 2>/dev/null
  fi
}

save_and_stop() { # SIGNAL
  [[ $told != "$1" ]] || return 0 # in an Apptainer container each signal arrives twice
  told=$1
  say "told to stop ($told); asking the trainers to save"
  mkdir -p "attempts/$LLMLAUNCH_ATTEMPT/told" && printf '%s\n' "$told" >"attempts/$LLMLAUNCH_ATTEMPT/told/$LLMLAUNCH_NODE"
  tell USR1
}
[[ -z $told ]] || die "told to stop ($told) before the training began"
trap 'save_and_stop USR1' USR1
trap 'save_and_stop TERM' TERM INT HUP
trap 'tell USR2' USR2
[[ -z $node_python ]] || export PET_SIGNALS_TO_HANDLE=SIGQUIT # of torchrun; those before 2.8 do not read it

# Static rendezvous: node ranks are those above. The c10d rendezvous of many examples sorts nodes by address (node10 before
# node2), and then pipeline stages do not lie on the nodes they were planned for.
# "--": torchrun would take a trainer's argument such as --node for a shortened one of its own.
# As `python -m torch.distributed.run`, which would look for each module in this folder first.
launch='import runpy; runpy.run_module("torch.distributed.run", None, "__main__", True)'
(
  [[ -z $node_python ]] || trap '' TERM USR1 USR2
  exec "$python" -c "$not_here$launch" \
    --nnodes=64 --nproc_per_node=8 --node_rank="$LLMLAUNCH_NODE_RANK" \
    --rdzv_backend=static --master_addr="$MASTER_ADDR" --master_port="$MASTER_PORT" \
    --max_restarts=0 --no_python \
    -- "${program[@]}"
) &
torchrun=$!
# A signal that came before the line above had nobody to be passed on to.
[[ -z $told ]] || tell USR1

# A trapped signal makes `wait` return early, sometimes before its trap has run; so only torchrun's end ends the loop. The
# last `wait` returns the exit code that bash remembers of torchrun, and no signal can interrupt that.
while kill -0 "$torchrun" 2>/dev/null; do wait "$torchrun"; done
wait "$torchrun"
code=$?

# --- how it ended ---------------------------------------------------------------------------------------------------------

if [[ $code = 0 ]]; then
  # the folder is there, unless this script was started by hand
  marker=attempts/$LLMLAUNCH_ATTEMPT/done/$LLMLAUNCH_NODE
  if ! { : >"$marker" || { mkdir -p "${marker%/*}" && : >"$marker"; }; } 2>/dev/null; then
    say "cannot write the done marker; the job will count as failed"
  fi
  say "done"
else
  say "torchrun ended with exit code $code"
  [[ -z $node_python ]] || "$node_python" -I -S "$node_files/node.pyz" diagnose "${node_side[@]}" --counters "$counters" --code "$code"
fi
stop_monitor
exit "$code"
