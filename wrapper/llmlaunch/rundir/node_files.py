"""The schemas of the files of nodes (docs/run-files.md): what monitors, probes, the preflight and observers saw."""

from __future__ import annotations

from typing import TypedDict

from .schema import Amount, Bytes, Count, Host, Seconds, Time


class GpuSample(TypedDict, total=False):
    """One GPU, or a MIG slice of one. Null is what the driver does not say: all of them before its first answer. Peaks
    are of the attempt so far."""

    index: Count | None
    """NVML's"""
    uuid: str
    """`GPU-...`, or `MIG-...` of a slice"""
    mig: str | None
    """of a slice, the uuid of its GPU"""
    name: str | None
    """such as `NVIDIA H100 80GB HBM3`"""
    pci: str
    """its address"""
    total_bytes: Bytes | None
    """its memory"""
    reserved_bytes: Bytes | None
    """what the driver keeps; null before R510"""
    used_bytes: Bytes | None
    """by the last sample"""
    device_peak_bytes: Bytes | None
    """of all processes"""
    baseline_bytes: Bytes | None
    """before the trainer"""
    process_peak_bytes: dict[str, Bytes]
    """largest sample of the driver's process list, by process id"""
    accounting_peak_bytes: dict[str, Bytes]
    """the driver's own maximum, by process id"""
    utilization_percent: Amount | None
    """mean"""
    power_watts: Amount | None
    """mean"""
    power_source: str | None
    """how power was read"""
    power_peak_watts: Amount | None
    """highest sample"""
    samples: Count | None
    """behind the means"""
    lost: int | None
    """NVML's code once it is lost"""
    unavailable: dict[str, int]
    """NVML's code of each call that it does not answer"""


class _RankMemory(TypedDict):
    rank: Count
    """global rank"""


class ProcessSample(_RankMemory, total=False):
    """A rank of this node."""

    pid: Count | None
    """the record's `program_pid`"""
    resident_bytes: Bytes | None
    """null once it ended"""
    resident_peak_bytes: Bytes | None
    """the larger of what was seen and what the rank's record says; null if neither"""


class HostSample(TypedDict, total=False):
    """Main memory of the node. Null is what the kernel does not say."""

    used_peak_bytes: Bytes | None
    """MemTotal - MemAvailable at its highest: the system and neighbours are in it"""
    total_bytes: Bytes | None
    """MemTotal"""
    cgroup_peak_bytes: Bytes | None
    """what the job was charged with, its file cache included"""
    cgroup_limit_bytes: Bytes | None
    """the most that it may be charged with"""


class PrintedSample(_RankMemory, total=False):
    """What a trainer printed into this node's log. Null is what it did not print."""

    allocated_peak_bytes: Bytes | None
    """torch's, since the framework last reset its counters"""
    reserved_peak_bytes: Bytes | None
    """torch's, likewise"""
    device_bytes: Bytes | None
    """the device's"""
    source: str
    """`megatron log` or `deepspeed log`"""


class PaceSample(TypedDict, total=False):
    """One busy GPU within a window (pace.md)."""

    index: Count | None
    """NVML's"""
    uuid: str | None
    """its name"""
    name: str | None
    """such as `NVIDIA H100 80GB HBM3`"""
    samples: Count | None
    """of the window"""
    clock_mhz: Amount | None
    """mean of the SM clock"""
    watts: Amount | None
    """mean"""
    celsius: Amount | None
    """highest"""
    reasons: dict[str, Amount]
    """share of the samples that `power_cap`, `hw_slowdown`, `sw_thermal`, `hw_thermal` or `power_brake` held the clock
    down"""
    corrected_ecc: Count | None
    """errors since the monitor began"""
    remapped_rows: Count | None
    """since the monitor began"""


class _MonitorLine(TypedDict):
    attempt: str
    """whose line it is: the file holds every attempt of this node, one after another"""


class MonitorLine(_MonitorLine, total=False):
    """What a monitor saw. Any one line with peaks is enough, since they are cumulative. No `end` event of an attempt
    means that its monitor was lost; its last line still counts. A torn line is closed when the file is opened again,
    and skipped by readers."""

    v: int
    """1"""
    event: str
    """`start`, `beat` (at once when a peak rose by 1 GiB, every 10 s while one rises by steps of 64 MiB, else every
    60 s), `pace` (each half minute, with GPUs), `end`, `no_nvml` (no library, no driver, or NVML failed for good;
    before `start` in the first two cases), `gpu_skipped` (of each GPU that this job may not see), `gpu_lost` (once a
    GPU), `nvml_stalled` (a call has taken 30 s), `nvml_back` (it returned)"""
    node: Host | None
    """its node"""
    time: Time | None
    """when it was written"""
    gpus: list[GpuSample]
    """`start`, `beat`, `end`: each GPU of the job"""
    processes: list[ProcessSample]
    """`start`, `beat`, `end`: each rank"""
    host: HostSample | None
    """`start`, `beat`, `end`: main memory"""
    logged: list[PrintedSample]
    """`start`, `beat`, `end`: what trainers printed"""
    dropped: Count
    """`start`, `beat`, `end`: lines that neither the run directory nor the spool could take so far"""
    pid: Count
    """`start`: of the monitor"""
    driver: str | None
    """`start`: its version"""
    interval_seconds: Seconds
    """`start`: between two samples"""
    window: Count
    """`pace`: unix seconds divided by `seconds`"""
    seconds: Seconds
    """`pace`: length of the window"""
    devices: list[PaceSample]
    """`pace`: each GPU that was busy"""
    signal: str
    """`end`: that asked it to end"""
    nvml_answered: bool
    """`end`: false if it was stuck in the driver"""
    cpu_seconds: Seconds
    """`end`: that the monitor computed"""
    wall_seconds: Seconds
    """`end`: that it ran"""
    code: int | None
    """`no_nvml`, `gpu_skipped`: NVML's"""
    why: str
    """`no_nvml`: in words"""
    index: Count | None
    """`gpu_skipped`: NVML's"""
    gpu: GpuSample
    """`gpu_lost`: the last that is known of it"""
    waiting_seconds: Seconds
    """`nvml_stalled`, `nvml_back`: since the call"""


class _ProbedDevice(TypedDict):
    device: Count
    """CUDA's index in that process"""


class ProbedDevice(_ProbedDevice, total=False):
    """One device that torch has used."""

    uuid: str | None
    """`GPU-...`, or `MIG-...` of a slice"""
    total_bytes: Bytes | None
    """its memory"""
    allocated_peak_bytes: Bytes | None
    """of torch's caching allocator, as are the next five"""
    active_peak_bytes: Bytes | None
    """blocks that are allocated or not yet free again"""
    reserved_peak_bytes: Bytes | None
    """what it holds of the device"""
    reserved_bytes: Bytes | None
    """the same, now"""
    alloc_retries: Count | None
    """how often it gave its cache back to go on"""
    ooms: Count | None
    """how often it ran out of memory"""
    device_used_bytes: Bytes | None
    """most of total - free: all processes"""
    outside_bytes: Bytes | None
    """most of device used - reserved at one look: context, NCCL, workspaces, neighbours"""


class _ProbeLine(TypedDict):
    rank: Count
    """global rank"""
    devices: list[ProbedDevice]
    """that torch has used"""


class ProbeLine(_ProbeLine, total=False):
    """What torch's allocator held at most in one process. The last line of a process (`rank`, `pid`) counts; lines may
    be empty. A process writes when a number has risen: 2 s after its last line at the earliest, and 30 s if nothing has
    risen by a 64th. That makes 10 to 100 lines of half a KiB, 4,000 at the very most for each counter of a device."""

    v: int
    """1"""
    local_rank: Count | None
    """its number on the node"""
    node: Host | None
    """its node"""
    pid: Count | None
    """its process id"""
    at: Time | None
    """when it was written"""
    ended: bool
    """whether the process has ended"""


class NetworkPort(TypedDict, total=False):
    """An InfiniBand or RoCE port."""

    state: str
    """as the kernel says, such as `4: ACTIVE`"""
    phys_state: str
    """the same of the link"""
    link_layer: str
    """`InfiniBand` or `Ethernet`"""
    gigabits: Amount
    """a second; 0 if it is not active"""


class PreflightLine(TypedDict, total=False):
    """How far a node came when it was tried. The last line counts."""

    schema: int
    """1"""
    node: Host | None
    """its name"""
    kind: str
    """`gpu` or `cpu`"""
    stage: str | None
    """the last that all devices reached"""
    bad: str | None
    """what is wrong with it"""
    matmul_seconds: list[Seconds]
    """of a product, by device"""
    ports: dict[str, NetworkPort]
    """its network ports, by name"""
    problems: dict[str, str]
    """what it lacks, by a key that is the same on all nodes"""
    at: Time | None
    """when it was written"""


class MemoryCounters(TypedDict, total=False):
    """The kernel's counters from before an observed command."""

    at: Time | None
    """when"""
    oom_kills: Count | None
    """processes of this cgroup that the kernel killed for want of memory"""
    limit_bytes: Bytes | None
    """the cgroup's limit"""
    peak_bytes: Bytes | None
    """the cgroup's peak"""


class ObservedEnd(TypedDict, total=False):
    """One observed command."""

    schema: int
    """1"""
    node: Host | None
    """where it runs"""
    process: str
    """its number in the step"""
    observers: Count
    """commands of the job that are observed"""
    started_at: Time | None
    """when it was started"""
    child: Count | None
    """its process id"""
    stop_signal: str
    """the signal that asked it to stop; absent without one"""
    ended_at: Time | None
    """null or absent while it runs"""
    exit_code: int | None
    """null where a signal ended it"""
    signal: str | None
    """name of the signal that ended it"""
    resident_peak_bytes: Bytes | None
    """the kernel's own maximum"""
    memory_before: MemoryCounters
    """the kernel's counters from before it"""


class ObservedCommand(TypedDict, total=False):
    """A command that somebody else launched ([observe.md](observe.md)), without its secrets."""

    job_id: str
    """its job"""
    launcher: str
    """`slurm` or `local`"""
    nodes: Count
    """of its step"""
    observers: Count
    """commands of the job that are observed"""
    node_list: str | None
    """SLURM's list of its nodes"""
    folder: str
    """where it was started"""
    command: list[str]
    """its words"""
    environment: dict[str, str]
    """its variables, as far as they matter"""
    files: dict[str, str]
    """text of files that the command names"""
    batch_script: str | None
    """text of the job's script"""
