#!/usr/bin/env bash
# A real SLURM cluster on this one machine: slurmctld and several slurmd from Debian packages, without
# systemd, on loopback addresses, with everything below one directory.
#
#   cluster.sh install        install the Debian packages that are missing (as root)
#   cluster.sh up [NODES]     start it, or leave it when it already runs so; prints the export line to use
#   cluster.sh down           end every process it started and remove its directory
#   cluster.sh status         its processes and nodes; exit code 0 only when all of them answer
#   cluster.sh env            print the export line: eval "$(cluster.sh env)"
#   cluster.sh kill-node I    power-cut node I: its slurmd and every job process on it
#   cluster.sh start-node I   boot it again
#
# Settings, all optional:
#   LLMLAUNCH_SLURM_DIR              its directory [${TMPDIR:-/tmp}/llmlaunch-slurm-<uid>]; keep it short
#   LLMLAUNCH_SLURM_PORT             first of 23 ports [26800]: controller, accounting, nodes from +11 on
#   LLMLAUNCH_SLURM_NODES            nodes of `up` without a number, 1 to 12 [4]
#   LLMLAUNCH_SLURM_CPUS             CPUs each node claims to have [16; with task/affinity as many as are there]
#   LLMLAUNCH_SLURM_MEMORY_MIB       memory each node claims to have [64000]
#   LLMLAUNCH_SLURM_GPUS             make-believe GPUs of each node, 0 for none [8]
#   LLMLAUNCH_SLURM_GPU_TYPE         their type in --gres=gpu:TYPE:N [h100]
#   LLMLAUNCH_SLURM_ACCOUNTING       1: slurmdbd and MariaDB, for the full sacct; 0: `sacct -c` only [0]
#   LLMLAUNCH_SLURM_SWITCHES         leaf switches the nodes are dealt out to, one by one; 0: no topology [0]
#   LLMLAUNCH_SLURM_LIMITS           enforced: what can never run is refused at once (EnforcePartLimits,
#                                    AccountingStorageEnforce); default: as SLURM is without being told [enforced]
#   LLMLAUNCH_SLURM_REQUEUE          JobRequeue, what a job is that says neither --requeue nor --no-requeue [1]
#   LLMLAUNCH_SLURM_GRACE_SECONDS    GraceTime of the partition `low`: from the preemption's signal to the kill [10]
#   LLMLAUNCH_SLURM_NODE_SECONDS     SlurmdTimeout: a node that has not answered for so long is down [10]
#   LLMLAUNCH_SLURM_AFFINITY         1: a task is bound to its CPUs (task/affinity), as `nproc` shows; 0: to none [0]
#   LLMLAUNCH_SLURM_CGROUPS          1: jobs in cgroups (proctrack/cgroup, task/cgroup), so that the kernel bounds their
#                                    memory; it says why where the machine has none to give, and goes on without [0]
#   LLMLAUNCH_SLURM_STRICT           1: job_submit.lua refuses jobs without account or time, with more than two nodes or
#                                    --exclusive, and takes --requeue away; partition `closed` is root's alone [0]
#   LLMLAUNCH_SLURM_TIMEOUT_SECONDS  how long to wait for a daemon to answer [60]

# shellcheck source-path=SCRIPTDIR
set -euo pipefail
umask 022
here=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")

DIR=${LLMLAUNCH_SLURM_DIR:-${TMPDIR:-/tmp}/llmlaunch-slurm-$(id -u)}
BASE_PORT=${LLMLAUNCH_SLURM_PORT:-26800}
NODES=${LLMLAUNCH_SLURM_NODES:-4}
MEMORY_MIB=${LLMLAUNCH_SLURM_MEMORY_MIB:-64000}
GPUS=${LLMLAUNCH_SLURM_GPUS:-8}
GPU_TYPE=${LLMLAUNCH_SLURM_GPU_TYPE:-h100}
ACCOUNTING=${LLMLAUNCH_SLURM_ACCOUNTING:-0}
SWITCHES=${LLMLAUNCH_SLURM_SWITCHES:-0}
LIMITS=${LLMLAUNCH_SLURM_LIMITS:-enforced}
REQUEUE=${LLMLAUNCH_SLURM_REQUEUE:-1}
GRACE_SECONDS=${LLMLAUNCH_SLURM_GRACE_SECONDS:-10}
NODE_SECONDS=${LLMLAUNCH_SLURM_NODE_SECONDS:-10}
AFFINITY=${LLMLAUNCH_SLURM_AFFINITY:-0}
CGROUPS=${LLMLAUNCH_SLURM_CGROUPS:-0}
STRICT=${LLMLAUNCH_SLURM_STRICT:-0}
TIMEOUT_SECONDS=${LLMLAUNCH_SLURM_TIMEOUT_SECONDS:-60}
MOST_NODES=12
# A binding is to CPUs that are there.
if [ "$AFFINITY" = 1 ]; then CPUS=${LLMLAUNCH_SLURM_CPUS:-$(nproc)}; else CPUS=${LLMLAUNCH_SLURM_CPUS:-16}; fi

export PATH=$PATH:/usr/sbin:/sbin
export SLURM_CONF=$DIR/etc/slurm.conf

say() { printf 'cluster: %s\n' "$*" >&2; }

die() {
  say "error: $*"
  exit 1
}

# A start that failed: what the daemons themselves said, and none of them left. The logs stay until the next
# up or down.
die_with_logs() {
  local log
  say "error: $*"
  end_processes || true
  for log in "$DIR"/log/*; do
    [ -s "$log" ] || continue
    grep -iE 'error|fatal|denied|cannot' "$log" | tail -n 2 | sed "s|^|$(basename "$log"): |" >&2 || true
  done
  exit 1
}

milliseconds() { date +%s%3N; }

# wait_for SECONDS WHAT COMMAND...: until the command succeeds.
wait_for() {
  local end=$(($(milliseconds) + $1 * 1000)) what=$2
  shift 2
  until "$@" > /dev/null 2>&1; do
    [ "$(milliseconds)" -lt "$end" ] || { say "timed out waiting until $what"; return 1; }
    sleep 0.05
  done
}

# shellcheck source=packages.sh
. "$here/packages.sh"
# shellcheck source=configuration.sh
. "$here/configuration.sh"
# shellcheck source=cgroups.sh
. "$here/cgroups.sh"
# shellcheck source=accounting.sh
. "$here/accounting.sh"
# shellcheck source=processes.sh
. "$here/processes.sh"
# shellcheck source=nodes.sh
. "$here/nodes.sh"

check_settings() {
  local name
  for name in BASE_PORT NODES CPUS MEMORY_MIB GPUS SWITCHES GRACE_SECONDS NODE_SECONDS TIMEOUT_SECONDS; do
    [[ ${!name} =~ ^(0|[1-9][0-9]*)$ ]] || die "LLMLAUNCH_SLURM_${name#BASE_} is '${!name}'; it must be a whole number"
  done
  [ "$NODES" -ge 1 ] && [ "$NODES" -le "$MOST_NODES" ] || die "$NODES nodes; it must be 1 to $MOST_NODES"
  [ "$SWITCHES" -le "$NODES" ] || die "$SWITCHES switches for $NODES nodes; each switch needs a node"
  [ "$CPUS" -ge 1 ] || die "LLMLAUNCH_SLURM_CPUS is 0; a node needs at least 1"
  for name in ACCOUNTING REQUEUE AFFINITY CGROUPS STRICT; do
    [[ ${!name} = [01] ]] || die "LLMLAUNCH_SLURM_$name is '${!name}'; it must be 0 or 1"
  done
  [ "$AFFINITY" = 0 ] || [ "$CPUS" -le "$(nproc)" ] ||
    die "$CPUS CPUs for each node, but $(nproc) are here; with LLMLAUNCH_SLURM_AFFINITY=1 tasks are bound to real ones"
  [[ $LIMITS = enforced || $LIMITS = default ]] ||
    die "LLMLAUNCH_SLURM_LIMITS is '$LIMITS'; it must be enforced or default"
  [[ $GPU_TYPE =~ ^[A-Za-z0-9_.-]+$ ]] || die "LLMLAUNCH_SLURM_GPU_TYPE is '$GPU_TYPE'; letters, digits, _ . - only"
  [[ $DIR =~ ^/[A-Za-z0-9_./-]+$ ]] || die "LLMLAUNCH_SLURM_DIR is '$DIR'; it must be absolute, without spaces"
  # the longest path of a unix socket is 107 bytes; slurmstepd's is <dir>/spool/<node>/<node>_<job>.<step>
  [ "${#DIR}" -le 60 ] || die "LLMLAUNCH_SLURM_DIR is ${#DIR} bytes long; sockets below it need it to be 60 at most"
}

print_env() { printf 'export SLURM_CONF=%q\n' "$SLURM_CONF"; }

is_up() { [ "$(cat "$DIR/etc/size" 2> /dev/null)" = "$NODES $ACCOUNTING $SWITCHES" ] && healthy; }

healthy() {
  local count accounting
  read -r count accounting _ < "$DIR/etc/size" || return 1
  alive munged && alive slurmctld && nodes_ready "$count" || return 1
  [ "$accounting" = 0 ] || alive slurmdbd
}

refuse_taken_ports() {
  local offset
  for offset in 0 1 $(seq 11 $((10 + NODES))); do
    ! (exec 3<> "/dev/tcp/127.0.0.1/$((BASE_PORT + offset))") 2> /dev/null ||
      die "port $((BASE_PORT + offset)) is taken; set LLMLAUNCH_SLURM_PORT to the first of 23 free ones"
  done
}

start_munge() {
  local run=$DIR/run
  # --force: the directory may lie below a world-writable one such as /tmp
  munged --force --key-file="$DIR/etc/munge.key" --socket="$run/munge.sock" --pid-file="$run/munged.pid" \
    --log-file="$DIR/log/munged.log" --seed-file="$run/munged.seed" --num-threads=4 \
    < /dev/null > "$DIR/log/munged.out" 2>&1 || die_with_logs "munged did not start"
  wait_for "$TIMEOUT_SECONDS" "munge answers" sh -c "munge -n -S '$run/munge.sock' | unmunge -S '$run/munge.sock'" ||
    die_with_logs "munged does not answer"
}

start_controller() {
  slurmctld < /dev/null > "$DIR/log/slurmctld.out" 2>&1 || die_with_logs "slurmctld did not start"
}

up() {
  local began i
  began=$(milliseconds)
  require_packages
  if is_up; then
    say "already up: $NODES nodes"
    print_env
    return
  fi
  [ ! -e "$DIR" ] || down
  refuse_taken_ports
  write_configuration
  mark_daemons controller
  start_munge
  [ "$ACCOUNTING" = 0 ] || start_accounting
  start_controller
  for ((i = 1; i <= NODES; i++)); do start_node "$i"; done
  wait_for "$TIMEOUT_SECONDS" "$NODES nodes answer" nodes_ready "$NODES" || die_with_logs "not all nodes came up"
  say "up: $NODES nodes in $(($(milliseconds) - began)) ms, below $DIR"
  print_env
}

down() {
  [ -e "$DIR" ] || { say "nothing at $DIR"; return; }
  # never remove a directory that this script did not make
  [ -O "$DIR/.llmlaunch-slurm" ] || die "$DIR was not made by cluster.sh for this user; not touching it"
  end_processes || die "processes did not end: $(own_processes | tr '\n' ' ')"
  wait_for "$TIMEOUT_SECONDS" "the cgroups are gone" remove_cgroups || die "cgroups remain: $(cgroups_of | tr '\n' ' ')"
  rm -rf -- "$DIR"
  say "down"
}

status() {
  [ -s "$SLURM_CONF" ] || { say "not up ($DIR)"; return 1; }
  local file name
  for file in "$DIR"/run/*.pid; do
    name=$(basename "$file" .pid)
    if alive "$name"; then echo "$name pid $(cat "$file")"; else echo "$name DEAD"; fi
  done
  sinfo --noheader -p train -N -o '%N %T cpus=%c memory=%mM gres=%G' || return 1
  healthy
}

main() {
  local command=${1:-help}
  [ "$command" != up ] || NODES=${2:-$NODES}
  check_settings
  case $command in
    install) install_packages ;;
    up) up ;;
    down) down ;;
    status) status ;;
    env) print_env ;;
    kill-node) kill_node "${2:-}" ;;
    start-node) boot_node "${2:-}" ;;
    help) sed -n '2,/^$/s/^# \{0,1\}//p' "$here/cluster.sh" ;;
    *) die "no command '$command'; 'cluster.sh help' lists them" ;;
  esac
}

main "$@"
