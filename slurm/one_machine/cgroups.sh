# Jobs in cgroups, as sites have them: the kernel bounds their memory, and SLURM knows their processes by them.
# Sourced by cluster.sh.
# shellcheck shell=bash
#
# SLURM's plugin for cgroups of version 1 keeps a node's jobs in slurm_<node>, and takes no other name for that. So the
# names of the nodes hold the cluster's port: two clusters on one machine stay apart.

CGROUPS_MOUNT=/sys/fs/cgroup
CONTROLLERS=(freezer memory)

has_cgroups() { [ -e "$DIR/etc/cgroup.conf" ]; }

# Whether this machine can have them; where it cannot, one line says why.
choose_cgroups() {
  local why
  [ "$CGROUPS" = 1 ] || return 0
  why=$(why_no_cgroups)
  if [ -n "$why" ]; then
    say "no cgroups: $why; processes are known by proctrack/linuxproc, and memory is not bounded"
    return
  fi
  echo "c${BASE_PORT}n" > "$DIR/etc/prefix"
  # Cores stay free: nodes may claim more than the machine has. So do devices: its GPUs are links to /dev/null.
  cat > "$DIR/etc/cgroup.conf" << CONF
CgroupPlugin=cgroup/v1
CgroupMountpoint=$CGROUPS_MOUNT
ConstrainRAMSpace=yes
ConstrainCores=no
ConstrainDevices=no
CONF
}

why_no_cgroups() {
  local controller probe
  if [ "$(node_kind)" != namespace ]; then
    echo "they take root and namespaces"
  elif ! compgen -G "/usr/lib/*/slurm-wlm/cgroup_v1.so" > /dev/null; then
    echo "this SLURM has no plugin for version 1"
  else
    for controller in "${CONTROLLERS[@]}"; do
      probe=$CGROUPS_MOUNT/$controller/llmlaunch-$$
      [ -e "$CGROUPS_MOUNT/$controller/cgroup.procs" ] ||
        { echo "$CGROUPS_MOUNT/$controller is not there (version 2 is not tried here)" && return; }
      { mkdir "$probe" && rmdir "$probe"; } 2> /dev/null ||
        { echo "$CGROUPS_MOUNT/$controller cannot be written" && return; }
    done
  fi
}

# The folders of one node, or of all nodes of this cluster.
cgroups_of() { # [NODE]
  local controller name
  has_cgroups || return 0
  for controller in "${CONTROLLERS[@]}"; do
    for name in ${1:-$(sed -n 's/^NodeName=\([^ ]*\) NodeHostname.*/\1/p' "$SLURM_CONF")}; do
      [ ! -d "$CGROUPS_MOUNT/$controller/slurm_$name" ] || echo "$CGROUPS_MOUNT/$controller/slurm_$name"
    done
  done
}

# A slurmstepd that is killed while it freezes a job leaves processes that no KILL reaches.
thaw() { # [NODE]
  local folder
  for folder in $(cgroups_of "$@"); do
    [[ $folder != */freezer/* ]] ||
      find "$folder" -depth -name freezer.state -exec sh -c 'echo THAWED > "$1"' thaw {} \; 2> /dev/null || true
  done
}

remove_cgroups() {
  local folder
  for folder in $(cgroups_of); do find "$folder" -depth -type d -exec rmdir {} \; 2> /dev/null || true; done
  [ -z "$(cgroups_of)" ]
}
