"""The schemas of the files of nodes (docs/run-files.md): what monitors, probes, the preflight and observers saw."""

from __future__ import annotations

from typing import TypedDict

from .schema import Amount, Bytes, Count, Host, Seconds, Time


class GpuSample(TypedDict, total=False):
    """One GPU or MIG slice. A value is null if the driver does not report it; all values are null until the driver
    first answers. Peaks cover the attempt so far."""

    index: Count | None
    """NVML index of the GPU"""
    uuid: str
    """UUID of the device: `GPU-...`, or `MIG-...` for a slice"""
    mig: str | None
    """UUID of the GPU that a MIG slice belongs to; null if the device is no slice"""
    name: str | None
    """product name, such as `NVIDIA H100 80GB HBM3`"""
    pci: str
    """PCI address of the GPU"""
    total_bytes: Bytes | None
    """memory of the device"""
    reserved_bytes: Bytes | None
    """memory that the driver reserves for itself; null before R510"""
    used_bytes: Bytes | None
    """memory in use at the last sample"""
    device_peak_bytes: Bytes | None
    """peak memory in use, summed over all processes"""
    baseline_bytes: Bytes | None
    """memory in use before the trainer started"""
    process_peak_bytes: dict[str, Bytes]
    """largest sample in the driver's process list, by process id"""
    accounting_peak_bytes: dict[str, Bytes]
    """peak in the driver's accounting, by process id"""
    utilization_percent: Amount | None
    """mean utilization of the GPU"""
    power_watts: Amount | None
    """mean power of the GPU"""
    power_source: str | None
    """how the mean power was measured"""
    power_peak_watts: Amount | None
    """highest power sample of the GPU"""
    samples: Count | None
    """number of samples of the memory in use"""
    lost: int | None
    """NVML error code if the GPU was lost"""
    unavailable: dict[str, int]
    """NVML error code of each call that the driver does not support, by call"""


class _RankMemory(TypedDict):
    rank: Count
    """global rank"""


class ProcessSample(_RankMemory, total=False):
    """The resident memory of one rank."""

    pid: Count | None
    """process id, as `program_pid` of the rank's record"""
    resident_bytes: Bytes | None
    """resident memory now; null once the process has ended"""
    resident_peak_bytes: Bytes | None
    """peak resident memory: the larger of the largest sample and the value in the rank's record; null if there is
    neither"""


class HostSample(TypedDict, total=False):
    """Main memory of the node. A value is null if the kernel does not report it."""

    used_peak_bytes: Bytes | None
    """peak of MemTotal - MemAvailable, which includes the operating system and other jobs"""
    total_bytes: Bytes | None
    """MemTotal of the node"""
    cgroup_peak_bytes: Bytes | None
    """peak memory charged to the job's cgroup, file cache included"""
    cgroup_limit_bytes: Bytes | None
    """memory limit of the job's cgroup"""


class PrintedSample(_RankMemory, total=False):
    """Memory figures that a trainer printed to its node's log. A value is null if the trainer did not print it."""

    allocated_peak_bytes: Bytes | None
    """torch's peak of allocated memory since the framework last reset its counters"""
    reserved_peak_bytes: Bytes | None
    """torch's peak of reserved memory since the framework last reset its counters"""
    device_bytes: Bytes | None
    """memory in use on the device"""
    source: str
    """which trainer printed it: `megatron log` or `deepspeed log`"""


class PaceSample(TypedDict, total=False):
    """One busy GPU during one window (pace.md)."""

    index: Count | None
    """NVML index of the GPU"""
    uuid: str | None
    """UUID of the GPU"""
    name: str | None
    """product name, such as `NVIDIA H100 80GB HBM3`"""
    samples: Count | None
    """number of samples in the window at which the GPU was busy"""
    clock_mhz: Amount | None
    """mean SM clock of the GPU"""
    watts: Amount | None
    """mean power of the GPU"""
    celsius: Amount | None
    """highest temperature of the GPU"""
    reasons: dict[str, Amount]
    """share of the samples at which the clock was held down, by reason: `power_cap`, `hw_slowdown`, `sw_thermal`,
    `hw_thermal` or `power_brake`"""
    corrected_ecc: Count | None
    """number of corrected memory errors since the monitor started"""
    remapped_rows: Count | None
    """number of memory rows remapped since the monitor started"""


class _MonitorLine(TypedDict):
    attempt: str
    """attempt to which the line belongs; the file holds all attempts on this node, one after another"""


class MonitorLine(_MonitorLine, total=False):
    """One event of a node's monitor. Peaks are cumulative, so any one line with peaks is enough. If an attempt has no
    `end` event, its monitor was lost; its last line still counts. A torn line is closed when the file is opened again,
    and readers skip it."""

    v: int
    """version of this format: 1"""
    event: str
    """`start`; `beat` (at once when a peak has risen by 1 GiB, every 10 s while one rises in steps of 64 MiB, otherwise
    every 60 s); `pace` (every half minute, if there are GPUs); `end`; `no_nvml` (there is no library or no driver, or
    NVML failed for good; in the first two cases before `start`); `gpu_skipped` (once for each GPU that this job may not
    see); `gpu_lost` (once for each GPU); `nvml_stalled` (a call has taken 30 s); `nvml_back` (that call returned)"""
    node: Host | None
    """node of the monitor"""
    time: Time | None
    """time at which the line was written"""
    gpus: list[GpuSample]
    """`start`, `beat`, `end`: the GPUs of the job on this node"""
    processes: list[ProcessSample]
    """`start`, `beat`, `end`: resident memory of each rank on this node"""
    host: HostSample | None
    """`start`, `beat`, `end`: main memory of the node"""
    logged: list[PrintedSample]
    """`start`, `beat`, `end`: memory figures that trainers printed"""
    dropped: Count
    """`start`, `beat`, `end`: number of lines so far that were given up, because too many waited for a run directory
    that could not be written; no peak is lost with them"""
    pid: Count
    """`start`: process id of the monitor"""
    driver: str | None
    """`start`: version of the GPU driver"""
    interval_seconds: Seconds
    """`start`: time between two samples"""
    window: Count
    """`pace`: number of the window, which is unix seconds divided by `seconds`"""
    seconds: Seconds
    """`pace`: length of the window"""
    devices: list[PaceSample]
    """`pace`: the GPUs that were busy"""
    signal: str
    """`end`: signal that ended the monitor"""
    nvml_answered: bool
    """`end`: false if the monitor was stuck in the driver"""
    cpu_seconds: Seconds
    """`end`: CPU time of the monitor"""
    wall_seconds: Seconds
    """`end`: time that the monitor ran"""
    code: int | None
    """`no_nvml`, `gpu_skipped`: NVML error code"""
    why: str
    """`no_nvml`: reason in words"""
    index: Count | None
    """`gpu_skipped`: NVML index of the GPU"""
    gpu: GpuSample
    """`gpu_lost`: last known values of the GPU"""
    waiting_seconds: Seconds
    """`nvml_stalled`, `nvml_back`: time since the NVML call was made"""


class _ProbedDevice(TypedDict):
    device: Count
    """CUDA index of the device in that process"""


class ProbedDevice(_ProbedDevice, total=False):
    """One device that torch has used."""

    uuid: str | None
    """UUID of the device: `GPU-...`, or `MIG-...` for a slice"""
    total_bytes: Bytes | None
    """memory of the device"""
    allocated_peak_bytes: Bytes | None
    """peak memory that torch's caching allocator had handed out"""
    active_peak_bytes: Bytes | None
    """peak memory in the allocator's blocks that were in use or not yet free for reuse"""
    reserved_peak_bytes: Bytes | None
    """peak memory that the allocator held on the device"""
    reserved_bytes: Bytes | None
    """memory that the allocator holds on the device now"""
    alloc_retries: Count | None
    """number of times the allocator released its cache and tried again"""
    ooms: Count | None
    """number of times the allocator ran out of memory"""
    device_used_bytes: Bytes | None
    """peak of total - free memory of the device, which includes all processes"""
    outside_bytes: Bytes | None
    """peak of the device's memory in use less torch's reserved memory, both read at the same moment: CUDA context,
    NCCL, workspaces, other processes"""


class _ProbeLine(TypedDict):
    rank: Count
    """global rank"""
    devices: list[ProbedDevice]
    """devices that torch has used"""


class ProbeLine(_ProbeLine, total=False):
    """The memory peaks of torch's allocator in one process. The last line of each process (`rank`, `pid`) counts; lines
    may be empty. A process writes a line when a number has risen, 2 s after its previous line at the earliest, or 30 s
    if no number has risen by 1/64. That makes 10 to 100 lines of half a KiB, and at most 4,000 for each counter of a
    device."""

    v: int
    """version of this format: 1"""
    local_rank: Count | None
    """rank within the node"""
    node: Host | None
    """node on which the rank runs"""
    pid: Count | None
    """process id of the trainer"""
    at: Time | None
    """time at which the line was written"""
    ended: bool
    """whether the process has ended"""


class NetworkPort(TypedDict, total=False):
    """An InfiniBand or RoCE port."""

    state: str
    """state of the port as the kernel reports it, such as `4: ACTIVE`"""
    phys_state: str
    """physical state of the port's link as the kernel reports it"""
    link_layer: str
    """kind of network: `InfiniBand` or `Ethernet`"""
    gigabits: Amount
    """rate of the port in Gb/s; 0 if it is not active"""


class PreflightLine(TypedDict, total=False):
    """How far a node came in the preflight. The last line of the file counts."""

    schema: int
    """version of this format: 1"""
    node: Host | None
    """name of the node"""
    kind: str
    """kind of device: `gpu` or `cpu`"""
    stage: str | None
    """last stage that all devices reached"""
    bad: str | None
    """what is wrong with the node, in words"""
    matmul_seconds: list[Seconds]
    """time of one matrix product on each device"""
    ports: dict[str, NetworkPort]
    """network ports of the node, by name"""
    problems: dict[str, str]
    """problems found on the node; a problem has the same key on every node"""
    at: Time | None
    """time at which the line was written"""


class MemoryCounters(TypedDict, total=False):
    """The kernel's memory counters before an observed command."""

    at: Time | None
    """time at which the counters were read"""
    oom_kills: Count | None
    """number of processes in this cgroup that the kernel killed because memory ran out"""
    limit_bytes: Bytes | None
    """memory limit of the cgroup"""
    peak_bytes: Bytes | None
    """peak memory of the cgroup"""


class ObservedEnd(TypedDict, total=False):
    """How one observed command started and ended."""

    schema: int
    """version of this format: 1"""
    node: Host | None
    """node on which the command runs"""
    process: str
    """number of the command's task in its SLURM step"""
    observers: Count
    """number of the job's commands that are observed"""
    started_at: Time | None
    """time at which the command started"""
    child: Count | None
    """process id of the command"""
    stop_signal: str
    """signal that asked the command to stop; absent if there was none"""
    ended_at: Time | None
    """time at which the command ended; null or absent while it runs"""
    exit_code: int | None
    """exit code; null if a signal ended the command"""
    signal: str | None
    """name of the signal that ended the command"""
    resident_peak_bytes: Bytes | None
    """peak resident memory, as the kernel counted it"""
    memory_before: MemoryCounters
    """the kernel's memory counters before the command"""


class ObservedCommand(TypedDict, total=False):
    """A command that llmlaunch did not launch ([observe.md](observe.md)), without its secrets."""

    job_id: str
    """id of the command's job"""
    launcher: str
    """launcher of the command's job: `slurm` or `local`"""
    nodes: Count
    """number of nodes in the command's step"""
    observers: Count
    """number of the job's commands that are observed"""
    node_list: str | None
    """list of the command's nodes, in SLURM's notation"""
    folder: str
    """folder in which the command was started"""
    command: list[str]
    """the command as a list of words"""
    environment: dict[str, str]
    """environment variables that matter to a training"""
    files: dict[str, str]
    """text of the JSON and YAML files that the command names, by name"""
    batch_script: str | None
    """text of the job's batch script"""
