# Everything SLURM reads, written below $DIR. Sourced by cluster.sh.
# shellcheck shell=bash

write_configuration() {
  local host i
  host=$(hostname -s)
  mkdir "$DIR" || die "cannot make $DIR"
  touch "$DIR/.llmlaunch-slurm"
  mkdir "$DIR"/{etc,run,log,dev,spool} # everyone's jobs run from their own folders in spool
  mkdir -m 700 "$DIR/state"
  node_kind > "$DIR/etc/kind.new" && mv "$DIR/etc/kind.new" "$DIR/etc/kind"
  choose_cgroups
  echo "$NODES $ACCOUNTING $SWITCHES" > "$DIR/etc/size"
  (umask 077 && head -c 128 /dev/urandom > "$DIR/etc/munge.key")
  {
    echo "127.0.0.1 localhost $host"
    for ((i = 1; i <= NODES; i++)); do echo "127.0.0.1 $(node_name "$i")"; done
  } > "$DIR/etc/hosts"
  {
    controller_lines "$host"
    [ "$ACCOUNTING" = 0 ] || accounting_lines
    node_lines "$host"
  } > "$SLURM_CONF"
  write_gres
  write_job_submit
  [ "$SWITCHES" = 0 ] || write_topology
  [ "$ACCOUNTING" = 0 ] || write_slurmdbd_conf
}

# Neighbours by name are never under one switch: an order that follows the switches shows.
write_topology() {
  local i
  echo "TopologyPlugin=topology/tree" >> "$SLURM_CONF"
  for ((i = 1; i <= SWITCHES; i++)); do echo "SwitchName=leaf$i Nodes=$(nodes_of_switch "$i")"; done > "$DIR/etc/topology.conf"
  echo "SwitchName=spine Switches=leaf[1-$SWITCHES]" >> "$DIR/etc/topology.conf"
}

nodes_of_switch() {
  local i names=()
  for ((i = $1; i <= NODES; i += SWITCHES)); do names+=("$(node_name "$i")"); done
  (IFS=, && echo "${names[*]}")
}

# A GPU must be a device file; a link to one will do, and needs neither mknod nor root.
write_gres() {
  local i
  echo "AutoDetect=off" > "$DIR/etc/gres.conf"
  [ "$GPUS" -gt 0 ] || return 0
  for ((i = 0; i < GPUS; i++)); do ln -s /dev/null "$DIR/dev/nvidia$i"; done
  echo "NodeName=$(node_names "$NODES") Name=gpu Type=$GPU_TYPE File=$DIR/dev/nvidia[0-$((GPUS - 1))]" >> "$DIR/etc/gres.conf"
}

# With these two, slurmctld and srun listen on the address of their host's name alone. The nodes call
# slurmctld at 127.0.0.1, and step daemons call srun back at the address its connection came from, which on
# loopback is always 127.0.0.1. Where the host's name is another address (127.0.1.1 on a stock Debian) nobody
# would be reached and every srun would hang: there they have to listen on all addresses.
communication_line() {
  [ "$(getent ahostsv4 "$1" | awk 'NR == 1 {print $1}')" != 127.0.0.1 ] ||
    echo "CommunicationParameters=NoCtldInAddrAny,NoInAddrAny"
}

# Why some of these values:
#   cred_expire         a requeued job may start again only after so many seconds; more than KillWait, as on every site:
#                       before an old step has ended on a node that is left, 24.11 kills the new batch script with it
#   SlurmdPidFile       in spool/, not run/: it holds the number inside the node's own namespace
#   EnforcePartLimits   a request that can never run is refused at once, as on a well-kept site
#   FirstJobId          jobs choose ports by their ids; those of two clusters here are not to choose the same
#   JobCompType         a line for each finished job, so that `sacct -c` answers without slurmdbd
#   SrunPortRange       wide: slurmctld tells the port of an srun that died with its node that the node has failed; on
#                       one machine another srun may listen there by now, and would end its own step
#   *Timeout, *Wait     short, so that a dead node is noticed in seconds; a site has minutes
#   SlurmdTimeout       slurmctld counts the answers to a round of pings only when the round is over, which a dead node
#                       delays by up to twice MessageTimeout: where others must outlive that, more than three times it
controller_lines() {
  local track=linuxproc task="" enforced="" mebibytes_per_core=100
  [ "$AFFINITY" = 0 ] || task=task/affinity
  ! has_cgroups || track=cgroup task=${task:+$task,}task/cgroup mebibytes_per_core=1000 # a trainer with torch fits
  [ "$LIMITS" = default ] || enforced="EnforcePartLimits=ALL"
  cat << CONF
ClusterName=llmlaunch
SlurmctldHost=$1(127.0.0.1)
SlurmctldPort=$BASE_PORT
SrunPortRange=33000-60900
FirstJobId=$((1 + BASE_PORT % 3000 * 3))
SlurmUser=$(id -un)
SlurmdUser=$(id -un)
AuthType=auth/munge
AuthInfo=socket=$DIR/run/munge.sock,cred_expire=9
$(communication_line "$1")
StateSaveLocation=$DIR/state
SlurmdSpoolDir=$DIR/spool/%n
SlurmctldPidFile=$DIR/run/slurmctld.pid
SlurmdPidFile=$DIR/spool/slurmd.%n.pid
SlurmctldLogFile=$DIR/log/slurmctld.log
SlurmdLogFile=$DIR/log/slurmd.%n.log
ProctrackType=proctrack/$track
TaskPlugin=${task:-task/none}
SwitchType=switch/none
MpiDefault=none
MailProg=/bin/true
GresTypes=gpu
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
DefMemPerCPU=$mebibytes_per_core
SlurmdParameters=config_overrides
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=2,batch_sched_delay=0,sched_min_interval=0
PriorityType=priority/multifactor
$enforced
JobRequeue=$REQUEUE
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobSubmitPlugins=lua
ReturnToService=2
SlurmdTimeout=$NODE_SECONDS
SlurmctldTimeout=10
BatchStartTimeout=10
MessageTimeout=10
TCPTimeout=2
KillWait=5
UnkillableStepTimeout=20
CompleteWait=0
InactiveLimit=0
JobCompType=jobcomp/filetxt
JobCompLoc=$DIR/log/jobcomp.txt
CONF
}

# For connections to slurmdbd the munge socket is taken from AccountingStoragePass, not from AuthInfo.
accounting_lines() {
  local tres="" enforced=""
  [ "$GPUS" = 0 ] || tres="AccountingStorageTRES=gres/gpu,gres/gpu:$GPU_TYPE"
  [ "$LIMITS" = default ] || enforced="AccountingStorageEnforce=associations,limits,qos"
  cat << CONF
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort=$((BASE_PORT + 1))
AccountingStoragePass=$DIR/run/munge.sock
$enforced
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=5
$tres
CONF
}

# All nodes share 127.0.0.1 and differ by port: an address each would make every srun hang (see above).
node_lines() {
  local host i gres=""
  [ "$GPUS" = 0 ] || gres="Gres=gpu:$GPU_TYPE:$GPUS"
  for ((i = 1; i <= NODES; i++)); do
    host=$1
    [ "$(node_kind)" = plain ] || host=$(node_name "$i")
    echo "NodeName=$(node_name "$i") NodeHostname=$host NodeAddr=127.0.0.1 Port=$((BASE_PORT + 10 + i)) CPUs=$CPUS" \
      "Boards=1 SocketsPerBoard=1 CoresPerSocket=$CPUS ThreadsPerCore=1 RealMemory=$MEMORY_MIB $gres State=UNKNOWN"
  done
  partition_lines
}

# Only jobs of `low` are ever preempted, and only by those of `high`; in `once` no job comes back (job_submit.lua).
partition_lines() {
  local every
  every="Nodes=$(node_names "$NODES") MaxTime=INFINITE DefaultTime=01:00:00 State=UP"
  cat << CONF
PartitionName=train $every PreemptMode=OFF Default=YES
PartitionName=debug Nodes=$(node_name 1) MaxTime=00:10:00 State=UP PreemptMode=OFF
PartitionName=low $every PriorityTier=1 GraceTime=$GRACE_SECONDS
PartitionName=high $every PriorityTier=2 PreemptMode=OFF
PartitionName=once $every PreemptMode=OFF
CONF
  [ "$STRICT" = 0 ] || echo "PartitionName=closed $every PreemptMode=OFF AllowGroups=root"
}

# How a site forbids requeueing: whatever the job asks for, it is handed in with --no-requeue. A strict one has more rules,
# each with words of its own.
write_job_submit() {
  {
    [ "$STRICT" = 1 ] && echo "local STRICT = true" || echo "local STRICT = false"
    cat << 'LUA'
local MOST_NODES = 2

local function refusal(job)
  local nodes = job.max_nodes ~= slurm.NO_VAL and job.max_nodes or job.min_nodes
  if job.account == nil then
    return "say which project pays: --account", slurm.ESLURM_INVALID_ACCOUNT
  elseif job.time_limit == slurm.NO_VAL then
    return "say how long it takes: --time", slurm.ESLURM_MISSING_TIME_LIMIT
  elseif nodes ~= slurm.NO_VAL and nodes > MOST_NODES then
    return "no job gets more than " .. MOST_NODES .. " nodes", slurm.ESLURM_INVALID_NODE_COUNT
  elseif job.shared == 0 then
    return "nodes are shared here, no job gets them whole", slurm.ERROR
  end
end

function slurm_job_submit(job, partitions, uid)
  if STRICT then
    local words, code = refusal(job)
    if words then
      slurm.log_user(words)
      return code
    end
  end
  if STRICT or job.partition == "once" then job.requeue = 0 end
  return slurm.SUCCESS
end

function slurm_job_modify(job, record, partitions, uid)
  if (STRICT or record.partition == "once") and job.requeue == 1 then return slurm.ERROR end
  return slurm.SUCCESS
end
LUA
  } > "$DIR/etc/job_submit.lua"
}

# slurmdbd listens on every address (22.05 has no setting for it) and trusts none without the munge key.
write_slurmdbd_conf() {
  (
    umask 077
    cat > "$DIR/etc/slurmdbd.conf" << CONF
AuthType=auth/munge
AuthInfo=socket=$DIR/run/munge.sock
DbdHost=localhost
DbdAddr=127.0.0.1
DbdPort=$((BASE_PORT + 1))
SlurmUser=$(id -un)
PidFile=$DIR/run/slurmdbd.pid
LogFile=$DIR/log/slurmdbd.log
CommitDelay=1
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser=root
StorageLoc=slurm_acct
CONF
  )
}
