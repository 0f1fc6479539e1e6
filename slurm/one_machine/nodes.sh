# The compute nodes: one slurmd each. Sourced by cluster.sh.
# shellcheck shell=bash
#
# Namespace nodes (root): a mount, UTS and PID namespace each. `hostname` is the node's name, its /etc/hosts
# knows all nodes, and killing its first process is a power cut.
# Plain nodes (a normal user, or root where namespaces are not allowed, as in most containers): a bare
# `slurmd -N`. They are named by address, 127.77.0.I, so that MASTER_ADDR resolves without an /etc/hosts.

node_kind() {
  if [ -s "$DIR/etc/kind" ]; then
    cat "$DIR/etc/kind"
  elif [ "$(id -u)" = 0 ] && unshare --mount --uts --pid --fork --kill-child --mount-proc true 2> /dev/null; then
    echo namespace
  else
    echo plain
  fi
}

node_name() { echo "$(node_prefix)$1"; }

# The host list expression of nodes 1 to N.
node_names() { echo "$(node_prefix)[1-$1]"; }

node_prefix() {
  if [ "$(node_kind)" = plain ]; then echo 127.77.0.; else cat "$DIR/etc/prefix" 2> /dev/null || echo node; fi
}

# The first process of a namespace node: names the host, starts slurmd and reaps what jobs leave behind.
# When slurmd goes, so does the node.
NODE_INIT='
hostname "$1"
mount --bind "$2/etc/hosts" /etc/hosts
slurmd -D -N "$1" &
while [ -d "/proc/$!" ]; do wait -n; done'

start_node() {
  local name
  name=$(node_name "$1")
  mkdir -p "$DIR/spool/$name"
  mark_daemons "$name"
  if [ "$(node_kind)" = namespace ]; then
    setsid unshare --mount --uts --pid --fork --kill-child --mount-proc \
      bash -c "$NODE_INIT" node "$name" "$DIR" < /dev/null >> "$DIR/log/node.$name.out" 2>&1 &
  else
    setsid slurmd -D -N "$name" < /dev/null >> "$DIR/log/node.$name.out" 2>&1 &
  fi
  echo $! > "$DIR/run/node.$name.pid"
}

check_node_number() {
  local count
  [ -s "$DIR/etc/size" ] || die "not up ($DIR)"
  read -r count _ < "$DIR/etc/size"
  [[ $1 =~ ^[1-9][0-9]*$ ]] && [ "$1" -le "$count" ] || die "'$1' is no node of this cluster; it has 1 to $count"
}

boot_node() {
  check_node_number "$1"
  ! alive "node.$(node_name "$1")" || { say "$(node_name "$1") is already running"; return; }
  start_node "$1"
  say "started $(node_name "$1")"
}

kill_node() {
  check_node_number "$1"
  local name pid
  name=$(node_name "$1")
  alive "node.$name" || die "$name is not running"
  pid=$(cat "$DIR/run/node.$name.pid")
  thaw "$name"
  # With a namespace the kernel takes every process of the node along; without one they are found by name.
  if [ "$(node_kind)" = namespace ]; then kill -KILL "$pid"; else kill_own "$name"; fi
  rm -f "$DIR/run/node.$name.pid"
  say "killed $name"
}

# nodes_ready COUNT: so many nodes answer the controller.
nodes_ready() {
  local ready
  ready=$(sinfo --noheader -p train -N -o %T 2> /dev/null | grep -cxE 'idle|mixed|allocated|completing') || true
  [ "$ready" -ge "$1" ]
}
