"""The schemas of the files of an attempt (docs/run-files.md)."""

from __future__ import annotations

from typing import Any, TypedDict

from .node_files import ObservedCommand
from .placement_files import NodeOrder
from .schema import Amount, Bytes, Count, Host, Seconds, Step, Time


class RollbackRecord(TypedDict, total=False):
    """Why an attempt began with an older checkpoint than the last."""

    since_step: Step | None
    """where the loss went bad"""
    to_step: Step | None
    """of the checkpoint that it went back to"""
    skip: list[Step] | None
    """first and last step whose batches are left out for it"""
    set_aside: list[str]
    """folders of newer checkpoints, renamed"""


class SkippedCheckpoint(TypedDict):
    """A checkpoint that an attempt did not begin with."""

    step: Step
    """of the checkpoint"""
    why: str
    """what is damaged"""


class PreflightResult(TypedDict, total=False):
    """What the preflight chose."""

    nodes: list[Host]
    """that train; empty if too few are good"""
    spare: list[Host]
    """good ones that are left"""
    bad: dict[str, str]
    """what is wrong with each of the others, by name"""
    warnings: list[str]
    """what all nodes lack"""
    why: str
    """in words"""


class AttemptStart(TypedDict, total=False):
    """How an attempt began. The job writes it before it starts the training, and adds what happens until the training
    has started: the preflight, what is built first, the order of the nodes; and the signal that ends it."""

    schema: int
    """1"""
    attempt: str
    """its name"""
    layout: str
    """empty for the planned layout, else `fallback/K` or `nodes/N`"""
    fallback: bool
    """whether it was started in the allocation of the attempt before"""
    cluster: str | None
    """SLURM's name of it"""
    nodes: list[Host]
    """the nodes it trains on, in SLURM's order"""
    started_at: Time | None
    """when it began"""
    from_step: Step | None
    """of the checkpoint it begins with; 0 without one"""
    tracker_step: Step | None
    """the step that the checkpoints' tracker file names"""
    checkpoint_changed_ns: Count | None
    """when a file of the checkpoint was last written, in nanoseconds by its file system"""
    skipped: list[SkippedCheckpoint]
    """newer checkpoints that are damaged"""
    note: str
    """what was unusual about the checkpoint; empty if nothing"""
    skips: list[list[Step]]
    """first and last step of each range whose batches are left out after a rollback"""
    rollback: RollbackRecord | None
    """null unless it went back to an older checkpoint"""
    loss_limit: float | None
    """after a rollback, the highest loss that counts as usual"""
    preflight: PreflightResult
    """what the preflight chose; absent without one"""
    prepared: bool
    """whether arguments were checked, and what is built before the first training is built; absent before that"""
    placement: NodeOrder
    """the order of the nodes; absent for one that nobody chose"""
    stop_signal: str
    """the signal that asked it to save and stop; absent without one"""
    child: Count | None
    """of an observed command: its process"""
    observed: ObservedCommand
    """the command that was observed; absent of a run that llmlaunch launched"""
    log: str
    """of an observed command: the file its output goes to, if it is known"""
    log_offset: Count
    """of an observed command: the length of that file when it began, in bytes"""


class Hang(TypedDict, total=False):
    """A training that makes no step."""

    since_seconds: Seconds | None
    """since the last sign of progress"""
    allowed_seconds: Seconds | None
    """how long it may take"""
    what: str
    """that is waited for: `first step`, `a step` or `saving`"""
    where: str
    """where the ranks are"""


class NotFinite(TypedDict, total=False):
    """A loss that is no number."""

    loss: str
    """`nan`, `inf` or `-inf`"""
    since_step: Step | None
    """the first such step"""


class BadLossRecord(TypedDict, total=False):
    """The last time that the loss went bad, over or not (watchdog.md)."""

    kind: str
    """`not_finite` or `spike`"""
    since_step: Step | None
    """the first bad step"""
    good_step: Step | None
    """the last good one before it"""
    usual: float | None
    """the median loss before it"""
    loss: float | str | None
    """a number, or `nan`, `inf` or `-inf`"""
    limit: float | None
    """the highest loss that counted as usual"""
    recovered_step: Step | None
    """the first good step after it; null while it lasts"""
    ended: bool
    """whether the watchdog ended the training for it"""


class StepsBehind(TypedDict, total=False):
    """Trainers that did not load their checkpoint."""

    first_step: Step | None
    """that they logged"""
    checkpoint_step: Step | None
    """that they should have gone on from"""


class _SlowDevice(TypedDict):
    """A GPU that is slower than its peers (pace.md)."""

    node: Host
    """where it is"""
    device: Count
    """its index in NVML"""
    factor: Amount
    """how many times slower than its peers"""
    since: Time
    """when that was first seen"""


class SlowEntry(_SlowDevice, total=False):
    """A GPU that is slower than its peers (pace.md)."""

    uuid: str | None
    """its name in NVML"""
    signs: list[str]
    """what shows it"""


class Progress(TypedDict, total=False):
    """How far an attempt is. Absent until the first step, hang or slow device; null is what no log line said."""

    schema: int
    """1"""
    step: Step | None
    """the last"""
    steps: Step | None
    """all that are planned"""
    loss: float | None
    """the last that was finite; null while it is not"""
    not_finite: NotFinite | None
    """null while the loss is finite"""
    tokens_per_second: Amount | None
    """of the job"""
    step_seconds: Seconds | None
    """median of the last 50 steps"""
    tracker_step: Step | None
    """the furthest step that the checkpoints' tracker file named"""
    first_step: Step | None
    """the first that was logged"""
    first_step_at: Time | None
    """when that was"""
    at: Time | None
    """when the last step was logged"""
    hung: Hang | None
    """null while steps are made in time"""
    behind: StepsBehind | None
    """null unless the trainers did not load their checkpoint"""
    good_step: Step | None
    """the last whose loss was as usual"""
    bad_loss: BadLossRecord | None
    """null unless the loss went bad once"""
    slow: list[SlowEntry]
    """the devices that are slow now"""
    replaced: list[Host]
    """slow nodes for which the trainers were asked to save and end; absent if none"""


class _Rank(TypedDict):
    rank: Count
    """its global number"""


class RankRecord(_Rank, total=False):
    """A rank: one line when its trainer starts, one when it ends; the last of a rank counts, and lines may be empty. A
    record without `ended_at` after the job: the node's program was killed, or the disk was full."""

    v: int
    """1"""
    local_rank: Count | None
    """its number on the node"""
    world_size: Count | None
    """of an observed rank: how many there are"""
    local_world_size: Count | None
    """of an observed rank: how many there are on the node"""
    node: Host | None
    """where it runs"""
    pid: Count | None
    """process id of the trainer (in runs of early versions, of its wrapper)"""
    program_pid: Count | None
    """process id of the trainer"""
    started_at: Time | None
    """when it was started"""
    ended_at: Time | None
    """null while it runs"""
    exit_code: int | None
    """null while it runs and where a signal ended it"""
    signal: str | None
    """name of the signal that ended it, such as `SIGKILL`"""
    resident_peak_bytes: Bytes | None
    """the kernel's own maximum (`ru_maxrss`); null while it runs"""
    visible_devices: str | None
    """CUDA_VISIBLE_DEVICES"""
    python: str | None
    """of an observed rank: its Python"""
    source: str | None
    """of an observed rank: the variable that says its number"""


class RankCause(TypedDict, total=False):
    """The message of one rank."""

    rank: Count | None
    """global rank"""
    line: str
    """the message"""
    numbers: dict[str, Any]
    """those of the message, in bytes where the name says so"""


class Blame(TypedDict, total=False):
    """Whom a hang points at."""

    kind: str
    """`absent` (never came), `stuck` (its device did not go on), `no_answer` (wrote no stacks); `mismatch` and `circle`
    are the program's fault"""
    rank: Count | None
    """the first to blame; null where nobody is"""
    device: Count | None
    """its number on the node"""
    node: Host | None
    """of all that are to blame, where that is one"""
    ranks: list[Count]
    """all that are to blame"""
    why: str
    """in words"""


class _Kind(TypedDict):
    kind: str
    """one of [the kinds](causes.md)"""


class Cause(_Kind, total=False):
    """What ended an attempt, or the trainers of a node (causes.md)."""

    schema: int
    """1"""
    node: Host | None
    """where it happened"""
    rank: Count | None
    """global rank that it happened to; of a hang, the rank that is to blame"""
    line: str
    """the line that shows it, at most 400 characters"""
    source: str
    """`log`, `ranks`, `kernel`, `monitor`, `disk` or `preflight`; in `status.json` also `watchdog`, `slurm`, `begin`,
    `finish` and `job`"""
    numbers: dict[str, Any]
    """those of the message, in bytes where the name says so"""
    sick: bool
    """whether that host is at fault, by [one or two signs](causes.md#nodes-at-fault)"""
    consequence: bool
    """whether it only reports that something else ended"""
    at: Time | None
    """when, by that node's clock"""
    count: Count
    """how often it happened, where that matters"""
    nodes: list[Host]
    """the hosts at fault, where there are several"""
    facts: dict[str, str]
    """texts from the line and those before it: `ours`, `theirs` and `of` of a mismatch, `missing`, `phase` (what the
    framework was doing), `doing` and `operation` of a hang"""
    ranks: list[RankCause]
    """every rank of the node with such a message; always with `oom`"""
    blame: Blame | None
    """of a hang that points at somebody"""
    suspects: dict[str, list[str]]
    """signs against each node"""


class NodeEnd(TypedDict, total=False):
    """A node of an attempt."""

    node: Host | None
    """null for each node that left neither a marker nor a record"""
    done: bool
    """whether all its trainers ended with 0"""


class NextStep(TypedDict, total=False):
    """What follows an attempt."""

    action: str
    """`end`, `again`, `rollback`, `fallback`, `restart`, `requeue` or `chain`"""
    why: str
    """in words"""
    layout: str
    """that the next attempt runs"""
    seconds: Count | None
    """to wait before it"""
    nodes: list[Host]
    """of a restart in the same allocation"""


class Status(TypedDict, total=False):
    """How an attempt ended. The one in the run directory is the latest attempt's."""

    schema: int
    """1"""
    attempt: str
    """its name"""
    state: str
    """`succeeded`, `failed` or `stopped`"""
    exit_code: int | None
    """of the job"""
    nodes: list[NodeEnd]
    """those that left a marker or a rank record, and as many unnamed ones as did not"""
    ranks: list[RankRecord]
    """by rank; empty if it ended before it trained"""
    ended_at: Time | None
    """when it was judged"""
    why: str
    """the sentence that the job says, such as `rank 1 on node n2 was ended by SIGKILL`"""
    layout: str
    """as in `attempt.json`"""
    cause: Cause | None
    """null if nothing ended it, or nobody knows what"""
    step: Step | None
    """the last that was seen in the log"""
    saved_step: Step | None
    """of the last checkpoint"""
    tracker_step: Step | None
    """that the checkpoints' tracker file names"""
    slow: list[SlowEntry]
    """that of `progress.json` at the end"""
    restarts: Count | None
    """how often the run was restarted before"""
    fruitless: Count | None
    """attempts in a row that got no further"""
    left_out: list[Host]
    """nodes that this job does not train on again in its allocation"""
    next: NextStep | None
    """what follows"""


class NoticeLine(TypedDict, total=False):
    """A notice and what became of it. One whose last line says null was on its way when its job was killed. The address
    of the webhook is in no line."""

    v: int
    """1"""
    at: Time | None
    """when this line was written"""
    event: str
    """one of [the events](notices.md)"""
    text: str
    """the notice"""
    to: str
    """`webhook` or `command`; empty for the notices that were left out because there were too many"""
    delivered: bool | None
    """null while it is being sent"""
    why: str | None
    """what kept it from its receiver"""
