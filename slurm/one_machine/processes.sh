# Which processes are the cluster's own. Sourced by cluster.sh.
# shellcheck shell=bash

# Daemons inherit this mark: "controller", or the name of the node whose slurmd or step daemon they are.
mark_daemons() { export LLMLAUNCH_SLURM_DAEMON=$1; }

# own_processes [NODE]: process ids, of the whole cluster or of one node.
own_processes() {
  marked_processes "$@"
  step_daemons "$@"
}

# A process is the cluster's own when its environment names our SLURM_CONF, and it is a daemon we marked or
# runs on a node (slurmd sets SLURMD_NODENAME for every task). A person's shell, editor or `watch squeue`
# with SLURM_CONF exported is not. A pid file decides nothing: its number may meanwhile be a stranger's.
marked_processes() {
  local files value='.*'
  [ $# = 0 ] || value=${1//./\\.}
  mapfile -t files < <(grep -lzxF -- "SLURM_CONF=$SLURM_CONF" /proc/[0-9]*/environ 2> /dev/null)
  [ "${#files[@]}" -gt 0 ] || return 0
  { grep -lzxE -- "(LLMLAUNCH_SLURM_DAEMON|SLURMD_NODENAME)=$value" "${files[@]}" 2> /dev/null || true; } |
    tr -cd '0-9\n'
}

# slurmstepd writes its title over its environment, so it is known by the node's log that it holds open.
step_daemons() {
  local file pid
  for file in $(grep -lx slurmstepd /proc/[0-9]*/comm 2> /dev/null); do
    pid=$(tr -cd 0-9 <<< "$file")
    [ -z "$(find "/proc/$pid/fd" -lname "$DIR/log/slurmd.${1:-*}.log" -print -quit 2> /dev/null)" ] || echo "$pid"
  done
}

# kill_own [NODE]: at once and hard. Nothing they hold is kept, and a daemon that shuts down in order would
# first wait for the others. All are stopped before one is killed: a slurmstepd that saw its task die would still
# tell the controller that the job has failed, which no node without power does.
kill_own() {
  local pids
  mapfile -t pids < <(own_processes "$@")
  [ "${#pids[@]}" != 0 ] || return 0
  kill -STOP "${pids[@]}" 2> /dev/null || true
  kill -KILL "${pids[@]}" 2> /dev/null || true
  thaw "$@"
}

# Killing is repeated: a dying node may have started a process after we looked.
none_left() {
  [ -n "$(own_processes)" ] || return 0
  kill_own
  return 1
}

end_processes() { wait_for "$((2 * TIMEOUT_SECONDS))" "every process has ended" none_left; }

# alive NAME: the process of run/NAME.pid is there and it is ours.
alive() {
  local pid
  pid=$(cat "$DIR/run/$1.pid" 2> /dev/null) && [ -n "$pid" ] &&
    grep -qzxF -- "SLURM_CONF=$SLURM_CONF" "/proc/$pid/environ" 2> /dev/null
}
