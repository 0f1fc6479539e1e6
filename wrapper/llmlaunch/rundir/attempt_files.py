"""The schemas of the files of an attempt (docs/run-files.md)."""

from __future__ import annotations

from typing import Any, TypedDict

from .node_files import ObservedCommand
from .placement_files import NodeOrder
from .schema import Amount, Bytes, Count, Host, Seconds, Step, Time


class RollbackRecord(TypedDict, total=False):
    """Why an attempt went back to an older checkpoint."""

    since_step: Step | None
    """first step with a bad loss"""
    to_step: Step | None
    """step of the checkpoint from which training continues"""
    skip: list[Step] | None
    """first and last step whose batches are skipped because of the rollback; null if none are"""
    set_aside: list[str]
    """folders of the newer checkpoints, which were renamed"""


class SkippedCheckpoint(TypedDict):
    """A checkpoint from which an attempt could not start."""

    step: Step
    """step of the checkpoint"""
    why: str
    """what is damaged, in words"""


class PreflightResult(TypedDict, total=False):
    """The result of the preflight."""

    nodes: list[Host]
    """nodes chosen for the training; empty if too few are good"""
    spare: list[Host]
    """good nodes that are kept in reserve"""
    bad: dict[str, str]
    """what is wrong with each bad node, by node"""
    warnings: list[str]
    """problems that all nodes share"""
    why: str
    """summary of the result, in words"""


class AttemptStart(TypedDict, total=False):
    """How an attempt began. The job writes the file before it starts the training. Until the training has started, the
    job adds what happens: the preflight, what is built beforehand, the order of the nodes. Later it adds the signal
    that ends the attempt."""

    schema: int
    """version of this format: 1"""
    attempt: str
    """name of the attempt"""
    layout: str
    """folder of the layout: `fallback/K`, `nodes/N`, or empty for the planned layout"""
    fallback: bool
    """whether the attempt continues in the allocation of the one before it without counting as a restart"""
    cluster: str | None
    """name of the cluster in SLURM; null without SLURM"""
    nodes: list[Host]
    """nodes that train, in SLURM's order"""
    started_at: Time | None
    """time at which the attempt began"""
    from_step: Step | None
    """step of the checkpoint from which the attempt starts; 0 without a checkpoint"""
    tracker_step: Step | None
    """step named by the checkpoints' tracker file"""
    checkpoint_changed_ns: Count | None
    """time at which a file of the checkpoint was last written, in nanoseconds, by the clock of its file system"""
    skipped: list[SkippedCheckpoint]
    """newer checkpoints that are damaged"""
    note: str
    """anything unusual about the checkpoint, in words; empty if there is nothing"""
    skips: list[list[Step]]
    """first and last step of each range whose batches are skipped after a rollback"""
    rollback: RollbackRecord | None
    """why the attempt went back to an older checkpoint; null if it did not"""
    loss_limit: float | None
    """highest loss that counts as normal after a rollback"""
    preflight: PreflightResult
    """result of the preflight; absent without one"""
    prepared: bool
    """whether the arguments have been checked and everything needed for the first training has been built; absent
    before that"""
    placement: NodeOrder
    """chosen order of the nodes; absent if the job does not choose one"""
    stop_signal: str
    """signal that asked the attempt to save and stop; absent if there was none"""
    child: Count | None
    """process id of the observed command; only in observed runs"""
    observed: ObservedCommand
    """the observed command; absent from runs that llmlaunch launched"""
    log: str
    """file that receives the output of the observed command, if known; only in observed runs"""
    log_offset: Count
    """size of the log file in bytes when the observed command began; only in observed runs"""


class Hang(TypedDict, total=False):
    """A training that makes no progress."""

    since_seconds: Seconds | None
    """time since the last sign of progress"""
    allowed_seconds: Seconds | None
    """longest time allowed without progress"""
    what: str
    """what is overdue: `first step`, `a step` or `saving`"""
    where: str
    """where the ranks are, according to their stacks"""


class NotFinite(TypedDict, total=False):
    """A loss that is NaN or infinite."""

    loss: str
    """the loss: `nan`, `inf` or `-inf`"""
    since_step: Step | None
    """first step with a loss that is NaN or infinite"""


class BadLossRecord(TypedDict, total=False):
    """The most recent period of bad loss, whether it is over or not (watchdog.md)."""

    kind: str
    """kind of bad loss: `not_finite` or `spike`"""
    since_step: Step | None
    """first bad step"""
    good_step: Step | None
    """last good step before the bad ones"""
    usual: float | None
    """median loss before the bad steps"""
    loss: float | str | None
    """the bad loss: a number, or `nan`, `inf` or `-inf`"""
    limit: float | None
    """highest loss that counted as normal"""
    recovered_step: Step | None
    """first good step after the bad ones; null until the loss recovers"""
    ended: bool
    """whether the watchdog ended the training because of the loss"""


class StepsBehind(TypedDict, total=False):
    """Trainers that did not load their checkpoint."""

    first_step: Step | None
    """first step that the trainers logged"""
    checkpoint_step: Step | None
    """step of the checkpoint from which the trainers should have continued"""


class _SlowDevice(TypedDict):
    """A GPU that is slower than its peers (pace.md)."""

    node: Host
    """node of the GPU"""
    device: Count
    """NVML index of the GPU"""
    factor: Amount
    """how many times slower than its peers the GPU is"""
    since: Time
    """time at which the GPU was first seen to be slow"""


class SlowEntry(_SlowDevice, total=False):
    """A GPU that is slower than its peers (pace.md)."""

    uuid: str | None
    """UUID of the GPU"""
    signs: list[str]
    """evidence that the GPU is slow, in words"""


class Progress(TypedDict, total=False):
    """The progress of an attempt. The file is absent until the first step, hang or slow device. A value is null if no
    log line has shown it."""

    schema: int
    """version of this format: 1"""
    step: Step | None
    """last step logged"""
    steps: Step | None
    """number of steps planned"""
    loss: float | None
    """last loss; null while it is NaN or infinite"""
    not_finite: NotFinite | None
    """the NaN or infinite loss; null while the loss is finite"""
    tokens_per_second: Amount | None
    """throughput of the whole job"""
    step_seconds: Seconds | None
    """median step time, over the last 50 steps"""
    tracker_step: Step | None
    """highest step that the checkpoints' tracker file has named"""
    first_step: Step | None
    """first step logged"""
    first_step_at: Time | None
    """time at which the first step was logged"""
    at: Time | None
    """time at which the last step was logged"""
    hung: Hang | None
    """the hang; null while steps arrive in time"""
    behind: StepsBehind | None
    """evidence that the trainers did not load their checkpoint; null if there is none"""
    good_step: Step | None
    """last step with a normal loss"""
    bad_loss: BadLossRecord | None
    """the most recent period of bad loss; null if there was none"""
    slow: list[SlowEntry]
    """devices that are slow at present"""
    replaced: list[Host]
    """slow nodes to be replaced, for which the trainers were asked to save and end; absent if there are none"""


class _Rank(TypedDict):
    rank: Count
    """global rank"""


class RankRecord(_Rank, total=False):
    """The record of one rank: one line when its trainer starts and one when it ends. The last line of a rank counts;
    lines may be empty. If a record still has no `ended_at` after the job, the node's program was killed or the disk was
    full."""

    v: int
    """version of this format: 1"""
    local_rank: Count | None
    """rank within the node"""
    world_size: Count | None
    """number of ranks in the job; only for observed ranks"""
    local_world_size: Count | None
    """number of ranks on the node; only for observed ranks"""
    node: Host | None
    """node on which the rank runs"""
    pid: Count | None
    """process id of the trainer (in runs of early versions, of its wrapper)"""
    program_pid: Count | None
    """process id of the trainer"""
    started_at: Time | None
    """time at which the trainer started"""
    ended_at: Time | None
    """time at which the trainer ended; null while it runs"""
    exit_code: int | None
    """exit code of the trainer; null while it runs, or if a signal ended it"""
    signal: str | None
    """name of the signal that ended the trainer, such as `SIGKILL`; null if none did"""
    resident_peak_bytes: Bytes | None
    """peak resident memory as the kernel counted it (`ru_maxrss`); null while it runs"""
    visible_devices: str | None
    """value of CUDA_VISIBLE_DEVICES"""
    python: str | None
    """Python interpreter of the rank; only for observed ranks"""
    source: str | None
    """environment variable from which the rank was read; only for observed ranks"""


class RankCause(TypedDict, total=False):
    """The message of one rank."""

    rank: Count | None
    """global rank"""
    line: str
    """the message"""
    numbers: dict[str, Any]
    """numbers in the message; in bytes where the name says so"""


class Blame(TypedDict, total=False):
    """What a hang points at."""

    kind: str
    """`absent` (the ranks never came), `stuck` (their devices did not get through), `no_answer` (they wrote no stacks);
    `mismatch` and `circle` are faults of the program"""
    rank: Count | None
    """first rank to blame; null if none is"""
    device: Count | None
    """local rank of the first rank to blame"""
    node: Host | None
    """node of all ranks to blame; null if they are on several nodes"""
    ranks: list[Count]
    """all ranks to blame"""
    why: str
    """explanation of the blame, in words"""


class _Kind(TypedDict):
    kind: str
    """kind of cause: one of [these](causes.md)"""


class Cause(_Kind, total=False):
    """What ended an attempt, or the trainers of one node (causes.md)."""

    schema: int
    """version of this format: 1"""
    node: Host | None
    """node on which it happened"""
    rank: Count | None
    """global rank to which it happened; for a hang, the rank to blame"""
    line: str
    """log line that shows it, at most 400 characters"""
    source: str
    """where it was found: `log`, `ranks`, `kernel`, `monitor`, `disk` or `preflight`; in `status.json` also `watchdog`,
    `slurm`, `begin`, `finish` or `job`"""
    numbers: dict[str, Any]
    """numbers in the line; in bytes where the name says so"""
    sick: bool
    """whether the node is at fault, judged by [one or two signs](causes.md#nodes-at-fault)"""
    consequence: bool
    """whether the line only reports that something else ended"""
    at: Time | None
    """time at which it happened, by the clock of that node"""
    count: Count
    """number of times it happened, where that matters"""
    nodes: list[Host]
    """the nodes at fault, if there are several"""
    facts: dict[str, str]
    """texts taken from the line and the lines before it: `ours`, `theirs` and `of` for a mismatch; `missing`; `phase`
    (what the framework was doing); `doing` and `operation` for a hang"""
    ranks: list[RankCause]
    """each rank of the node with such a message, if there are several; always present for `oom`"""
    blame: Blame | None
    """what a hang points at; null if it points at nothing"""
    suspects: dict[str, list[str]]
    """signs against each node, by node"""


class NodeEnd(TypedDict, total=False):
    """How the attempt ended on one node."""

    node: Host | None
    """name of the node; null if it left neither a marker nor a rank record"""
    done: bool
    """whether all trainers of the node exited with 0"""


class NextStep(TypedDict, total=False):
    """What happens after an attempt."""

    action: str
    """what follows: `end`, `again`, `rollback`, `fallback`, `restart`, `requeue` or `chain`"""
    why: str
    """reason for what follows, in words"""
    layout: str
    """layout of the next attempt"""
    seconds: Count | None
    """seconds to wait before the next attempt"""
    nodes: list[Host]
    """nodes of the next attempt, if it restarts in the same allocation"""


class Status(TypedDict, total=False):
    """How an attempt ended. The file in the run directory itself describes the latest attempt."""

    schema: int
    """version of this format: 1"""
    attempt: str
    """name of the attempt"""
    state: str
    """outcome: `succeeded`, `failed` or `stopped`"""
    exit_code: int | None
    """exit code of the job"""
    nodes: list[NodeEnd]
    """nodes that left a marker or a rank record, and one unnamed entry for each node that left neither"""
    ranks: list[RankRecord]
    """records of all ranks, ordered by rank; empty if the attempt ended before it trained"""
    ended_at: Time | None
    """time at which the end was judged"""
    why: str
    """how it ended, as the job reports it, such as `rank 1 on node n2 was ended by SIGKILL`"""
    layout: str
    """folder of the layout: `fallback/K`, `nodes/N`, or empty for the planned layout"""
    cause: Cause | None
    """what ended the attempt; null if nothing did, or if the cause is unknown"""
    step: Step | None
    """last step seen in the log"""
    saved_step: Step | None
    """step of the last checkpoint"""
    tracker_step: Step | None
    """step named by the checkpoints' tracker file"""
    slow: list[SlowEntry]
    """devices that were slow at the end, as in `progress.json`"""
    restarts: Count | None
    """number of earlier restarts of the run"""
    fruitless: Count | None
    """number of consecutive attempts that made no progress"""
    left_out: list[Host]
    """nodes of the allocation on which this job does not train again"""
    next: NextStep | None
    """what happens after the attempt"""


class NoticeLine(TypedDict, total=False):
    """A notice and its delivery. If the last line of a notice has null in `delivered`, its job was killed while the
    notice was being sent. No line contains the address of the webhook."""

    v: int
    """version of this format: 1"""
    at: Time | None
    """time at which the line was written"""
    event: str
    """event that is reported: one of [these](notices.md)"""
    text: str
    """text of the notice"""
    to: str
    """receiver: `webhook` or `command`; empty if the notice was dropped because there were too many"""
    delivered: bool | None
    """whether the notice was delivered; null while it is being sent"""
    why: str | None
    """why it was not delivered"""
