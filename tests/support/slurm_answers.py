"""What sites' SLURM printed, or prints by its sources. Each says where it comes from."""

from __future__ import annotations

from llmlaunch.cluster.slurm_site import Answers

# Printed by SLURM 22.05.8, the one-machine cluster of slurm/one_machine with two switches; parts left out.
SLURM_22_05 = Answers(
    config="""\
Configuration data as of 2026-11-21T12:41:25
AccountingStorageEnforce = none
AccountingStorageType   = accounting_storage/slurmdbd
ClusterName             = llmlaunch
EnforcePartLimits       = ALL
GresTypes               = gpu
JobRequeue              = 1
MpiDefault              = none
PreemptMode             = OFF
SelectType              = select/cons_tres
SelectTypeParameters    = CR_CORE_MEMORY
SLURM_VERSION           = 22.05.8
TaskPlugin              = task/none
TopologyPlugin          = topology/tree

Slurmctld(primary) at vm is UP
""",
    partitions="""\
PartitionName=train
   AllowGroups=ALL AllowAccounts=ALL AllowQos=ALL
   AllocNodes=ALL Default=YES QoS=N/A
   DefaultTime=01:00:00 DisableRootJobs=NO ExclusiveUser=NO GraceTime=0 Hidden=NO
   MaxNodes=UNLIMITED MaxTime=UNLIMITED MinNodes=0 LLN=NO MaxCPUsPerNode=UNLIMITED
   Nodes=node[1-4]
   PriorityJobFactor=1 PriorityTier=1 RootOnly=NO ReqResv=NO OverSubscribe=NO
   OverTimeLimit=NONE PreemptMode=OFF
   State=UP TotalCPUs=64 TotalNodes=4 SelectTypeParameters=NONE

PartitionName=debug
   AllocNodes=ALL Default=NO QoS=N/A
   MaxNodes=UNLIMITED MaxTime=00:10:00 MinNodes=0 LLN=NO MaxCPUsPerNode=UNLIMITED
   Nodes=node1
   State=UP TotalCPUs=16 TotalNodes=1 SelectTypeParameters=NONE
""",
    nodes="".join(
        f"""\
NodeName=node{number} Arch=x86_64 CoresPerSocket=16
   CPUAlloc=0 CPUEfctv=16 CPUTot=16 CPULoad=0.13
   AvailableFeatures=(null)
   ActiveFeatures=(null)
   Gres=gpu:h100:8
   NodeAddr=127.0.0.1 NodeHostName=node{number} Port=3021{number} Version=22.05.8
   OS=Linux 6.18.44 #1 SMP PREEMPT_DYNAMIC @0
   RealMemory=64000 AllocMem=0 FreeMem=23126 Sockets=1 Boards=1
   State=IDLE ThreadsPerCore=1 TmpDisk=0 Weight=1 Owner=N/A MCS_label=N/A
   Partitions={"train,debug" if number == 1 else "train"}
   CfgTRES=cpu=16,mem=62.50G,billing=16
   AllocTRES=

"""
        for number in range(1, 5)
    ),
    topology="""\
SwitchName=leaf1 Level=0 LinkSpeed=1 Nodes=node1,node3
SwitchName=leaf2 Level=0 LinkSpeed=1 Nodes=node2,node4
SwitchName=spine Level=1 LinkSpeed=1 Nodes=node[1-4] Switches=leaf[1-2]
""",
    srun_help="      --container             Path to OCI container bundle\n",
)

# Node and partition as SLURM 23.11.11 printed them, from the public user guide of a site with H100 nodes; the second
# node, the limits of the partition and the words of the configuration are made up.
SLURM_23_11 = Answers(
    config="""\
AccountingStorageEnforce = associations,limits,qos,safe
ClusterName             = guide 1
EnforcePartLimits       = NO
JobRequeue              = 0
MpiDefault              = pmix
SelectType              = select/cons_tres
SelectTypeParameters    = CR_CPU
SLURM_VERSION           = 23.11.11
TaskPlugin              = task/affinity,task/cgroup
TopologyPlugin          = topology/default
""",
    partitions="""\
PartitionName=dev
   AllowGroups=ALL DenyAccounts=mst109178 AllowQos=ALL
   AllocNodes=ALL Default=NO QoS=p_dev
   DefaultTime=NONE DisableRootJobs=NO ExclusiveUser=NO ExclusiveTopo=NO GraceTime=0 Hidden=NO
   MaxNodes=16 MaxTime=04:00:00 MinNodes=0 LLN=NO MaxCPUsPerNode=UNLIMITED MaxCPUsPerSocket=UNLIMITED
   Nodes=25a-hgpn[001-124,142-145]
   PriorityJobFactor=1 PriorityTier=15 RootOnly=NO ReqResv=NO OverSubscribe=NO
   OverTimeLimit=NONE PreemptMode=REQUEUE
   JobDefaults=(null)
   DefMemPerNode=UNLIMITED MaxMemPerNode=UNLIMITED
""",
    nodes="""\
NodeName=hgpn01 Arch=x86_64 CoresPerSocket=56
   CPUAlloc=9 CPUEfctv=104 CPUTot=112 CPULoad=37.41
   AvailableFeatures=(null)
   ActiveFeatures=(null)
   Gres=gpu:H100:8(S:0-1)
   NodeAddr=hgpn01 NodeHostName=hgpn01 Version=23.11.11
   OS=Linux 4.18.0-553.144.1.el8_10.x86_64 #1 SMP Mon Jul 13 11:33:25 EDT 2026
   RealMemory=1900000 AllocMem=327680 FreeMem=1107433 Sockets=2 Boards=1
   CoreSpecCount=8 CPUSpecList=52-55,108-111
   State=MIXED ThreadsPerCore=1 TmpDisk=0 Weight=1 Owner=N/A MCS_label=N/A
   Partitions=dev
   CfgTRES=cpu=104,mem=1900000M,billing=104,gres/gpu=8
   AllocTRES=cpu=9,mem=320G,gres/gpu=2

NodeName=hgpn02 Arch=x86_64 CoresPerSocket=56
   CPUAlloc=0 CPUEfctv=104 CPUTot=112 CPULoad=0.41
   Gres=gpu:H200:8(S:0-1),nvme:2
   RealMemory=1800000 AllocMem=0 FreeMem=1107433 Sockets=2 Boards=1
   State=DOWN+DRAIN ThreadsPerCore=1 TmpDisk=0 Weight=1 Owner=N/A MCS_label=N/A
   Partitions=dev
   Reason=Gres=gpu:1 is gone [root@2026-07-31T12:05:24]
""",
    srun_help="      --container-image=[USER@][REGISTRY#]IMAGE[:TAG]|PATH\n",
    associations="proj-1|normal,long\nno|normal\n",
    programs=("apptainer",),
)

# Made up after the format strings of SLURM 26.05 (src/api/node_info.c, src/plugins/topology/block of 24.05): one record
# a line (-o), GPUs without a type on nodes that features tell apart, as large sites have it.
SLURM_26_05 = Answers(
    config="""\
ClusterName             = big
SelectType              = select/cons_tres
SLURM_VERSION           = 26.05.3
SlurmctldParameters     = cloud_dns
""",
    partitions="PartitionName=batch Default=YES MaxTime=04:00:00 Exclusive=NODE OverSubscribe=NO PreemptMode=CANCEL "
    "GraceTime=120\n",
    nodes="".join(
        f"NodeName=pool0-{number:05} Arch=x86_64 CpuBind=none CoresPerSocket=64  CPUAlloc=0 CPUEfctv=128 CPUTot=128 "
        f"CPULoad=0.00 AvailableFeatures=location=local,{gpu},GPU ActiveFeatures=location=local,{gpu},GPU Gres=gpu:8 "
        f"GresDrain=N/A GresUsed=gpu:0 RealMemory=2058240 AllocMem=0 FreeMem=N/A Sockets=2 Boards=1 State=IDLE "
        f"Partitions=batch CfgTRES=cpu=128 AllocTRES= CurrentWatts=n/a AveWatts=n/a\n"
        for number, gpu in enumerate(("H100", "H100", "H200"), 1)
    ),
    topology="BlockName=b1 BlockIndex=0 Nodes=pool0-[00001-00018] BlockSize=18\n"
    "BlockName=b2 BlockIndex=1 Nodes=pool0-[00019-00034] BlockSize=18\n",
    programs=("singularity",),
)
