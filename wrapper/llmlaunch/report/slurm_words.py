"""What SLURM's words mean for a person: why sbatch refused a job, and why a job that was taken waits.

Words of refusals are those of slurm_strerror (src/common/slurm_errno.c) and reasons those of job_reason_string
(src/common/slurm_protocol_defs.c and, from 23.02 on, job_state_reason.c); the ones that tests/slurm provokes were seen
with 22.05.8.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple


class Mend(NamedTuple):
    """How a refusal is mended: a sentence, and the option of sbatch that mends it where there is one."""

    sentence: str
    option: str = ""


_POLICY = "sacctmgr show assoc user=$USER and sacctmgr show qos list the limits"
_SUBMIT_LIMIT = Mend(
    "You have as many jobs in the queue as your account or QoS allows: wait until one has ended, or cancel one "
    "(llmlaunch runs --state pending); each link of a chain and each run of a sweep takes a place"
)
_TIME = Mend(
    "Ask for a time that the partition and the QoS allow (slurm: {time: ...}; sinfo -o '%P %l' lists the partitions')",
    "--time=HH:MM:SS",
)
_SIZE = Mend(
    "The job asks for more than your account or QoS gives one job or user: plan it for fewer nodes (nodes), or name "
    f"another QoS (slurm: {{qos: NAME}}); {_POLICY}"
)
_ACCOUNT = Mend(
    "Name an account of yours that the partition takes (slurm: {account: NAME}; sacctmgr show assoc user=$USER lists "
    "yours, AllowAccounts of scontrol show partition the partition's)",
    "--account=NAME",
)
_PARTITION = Mend(
    "Name a partition that you may use (slurm: {partition: NAME}; sinfo -s lists them)", "--partition=NAME"
)
_MACHINES = Mend(
    "No node of the partition, or not enough of them, has what the job asks for: compare nodes and the cluster "
    "profile with sinfo -o '%P %D %c %m %G', or name another partition (slurm: {partition: NAME})"
)
_REFUSALS: Sequence[tuple[str, Mend]] = (
    (r"MaxSubmitJob|GrpSubmitJob", _SUBMIT_LIMIT),
    (r"MaxWallDuration|[Tt]ime limit (is invalid|specification required)", _TIME),
    (r"(Assoc|QOS)(Max|Grp|Min)\w+|violates accounting/QOS policy", _SIZE),
    (r"Invalid account", _ACCOUNT),
    (r"Invalid qos", Mend("Name a QoS that you and the partition have (slurm: {qos: NAME})", "--qos=NAME")),
    (r"not permitted to use this partition|[Ii]nvalid partition|No partition specified", _PARTITION),
    (
        r"[Rr]eservation",
        Mend("Name a reservation that is open to you now (slurm: {reservation: NAME}; scontrol show reservation)"),
    ),
    (
        r"generic resource|Trackable RESource|GRES",
        Mend("Ask for the GPUs as this site does (gpu_request and gpu_type of the cluster profile; sinfo -o '%P %G')"),
    ),
    (r"[Ii]nvalid feature", Mend("Name a feature that the nodes have (slurm: {constraint: NAME}; sinfo -o '%P %f')")),
    (r"[Ii]nvalid license", Mend("Name a licence that the site has (slurm: {licenses: ...}; scontrol show license)")),
    (
        r"Invalid node name|not in this partition",
        Mend("Name nodes of the partition (slurm: {nodelist: ..., exclude: ...}; sinfo -N)"),
    ),
    (r"Memory (required|specification)", Mend("Ask for memory that the nodes have (slurm: {mem: 0} is all of a node)")),
    (r"processors requested|[Nn]ode count|node configuration|CPU count|task count", _MACHINES),
)
_OFTEN_WANTED = (
    ("--account", "{account: NAME}"),
    ("--time", '{time: "HH:MM:SS"}'),
    ("--partition", "{partition: NAME}"),
)
"""Options of sbatch that sites' own rules ask for, and the recipe's keys for them."""


def mend_of_refusal(words: str, options: Sequence[str]) -> Mend:
    """Return how the job that sbatch refused with these words can be mended; `options` are those of its script and
    command line. Words that are none of SLURM's are of the site's own rules, which no program knows."""
    for pattern, mend in _REFUSALS:
        if re.search(pattern, words):
            return mend
    if "Unspecified error" not in words and "job_submit" not in words:
        return Mend("")
    names = {word.partition("=")[0] for word in options}
    remarks = ["asks for whole nodes (slurm: {exclusive: false} does not)"] if "--exclusive" in names else []
    remarks += [f"names no {option[2:]} (slurm: {key})" for option, key in _OFTEN_WANTED if option not in names]
    script = f"; this script {', '.join(remarks)}" if remarks else ""
    return Mend(f"A rule of the site (its job_submit plugin) refused it, and what that says stands first{script}")


_ASKED = "cancel it, and submit it as the limit allows"
_ADVICE: Sequence[tuple[str, str]] = (
    (
        r"PartitionTimeLimit",
        f"it asks for more time than its partition gives, so it never starts: {_ASKED} (slurm.time)",
    ),
    (
        r"PartitionNodeLimit",
        "it asks for more nodes than its partition gives a job or has now (nodes, slurm.partition)",
    ),
    (
        r"(Assoc|QOS)Max\w+Per(Job|Node)|(QOS|Association)(Time|Resource)Limit|QOSMin\w+|MaxMemPerLimit|"
        r"AssocMaxWall|QOSMaxWall",
        f"it asks for more than its account or QoS gives one job, so it never starts: {_ASKED} (nodes, slurm.time, "
        f"slurm.qos); {_POLICY}",
    ),
    (
        r"(Assoc|QOS)Grp\w*Minutes|QOSUsageThreshold",
        "the budget of its account or QoS is used up: it starts when the site renews it, or under another "
        f"(slurm.account, slurm.qos); {_POLICY}",
    ),
    (
        r"(Assoc|QOS)Grp\w+|Max\w+PerAccount",
        "others of its account or QoS have all that the account may have at once; where this job alone asks for more "
        f"than that, it never starts; {_POLICY}",
    ),
    (
        r"(Assoc|QOS)Max\w*(PerUser|Jobs)|QOSJobLimit|AssociationJobLimit",
        "your other jobs have all that you may have at once; where this job alone asks for more than that, it never "
        f"starts; {_POLICY}",
    ),
    (r"InvalidAccount|AccountNotAllowed", f"its account may not run here: {_ASKED} (slurm.account)"),
    (r"InvalidQOS|QOSNotAllowed", f"its QoS may not run here: {_ASKED} (slurm.qos)"),
    (r"DependencyNeverSatisfied", "what it waits for ended otherwise, so it never starts: cancel it"),
    (r"BadConstraints", f"no node has what it asks for, so it never starts: {_ASKED} (slurm.constraint, nodes)"),
    (r"ReservationDeleted", f"its reservation is gone, so it never starts: {_ASKED} (slurm.reservation)"),
    (r"JobHeldAdmin", "the site holds it, and only the site can let it go"),
    (
        r"JobHeldUser|JobHoldMaxRequeue|[Rr]equeued?[_ ]held|RequeueHold|RequeueExitHold|[Ll]aunch[_ ]failed",
        "it is held until somebody types: scontrol release JOB",
    ),
    (r"PartitionDown|PartitionInactive", "the site has closed its partition for now (slurm.partition)"),
    (r"ReqNodeNotAvail|NodeDown", "nodes that it needs are down, drained or kept for maintenance"),
)


def pending_advice(reason: str) -> str:
    """Return what a reason for waiting means where a person may have to act, and "" where waiting helps (Priority,
    Resources, Dependency, BeginTime)."""
    return next((advice for pattern, advice in _ADVICE if re.search(pattern, reason)), "")
