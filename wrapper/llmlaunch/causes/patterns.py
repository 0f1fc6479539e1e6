"""The lines by which logs tell what ended a trainer, each with where it comes from: data, in the order of trying.

Here are those of CUDA, NCCL, PyTorch, Python, the kernel, containers and SLURM; `file_patterns.py` has those of
files and of sites on the internet. What only one framework says is in
`frameworks/<framework>/failures.py`, and comes first. The kinds that they name are in `kinds.py`.
"""

from __future__ import annotations

import pkgutil
from importlib import import_module
from typing import TYPE_CHECKING

from .file_patterns import FILE_PATTERNS, WEB_PATTERNS
from .pattern import Frame, Pattern

if TYPE_CHECKING:
    from types import ModuleType


_ERROR = ("Error: ",)

PATTERNS = (
    # --- the GPU itself
    Pattern(
        "gpu_lost", r"GPU is lost|has fallen off the bus|GPU_IS_LOST", "NVML error 15; kernel driver, Xid 79", True
    ),
    Pattern(
        "ecc",
        r"uncorrectable (double bit )?ECC error|ECC_?Uncorrectable|uncorrectable double bit error",
        "CUDA error 214 (cudaErrorECCUncorrectable); Xid 48",
        True,
    ),
    Pattern("nvlink", r"uncorrectable NVLink error", "CUDA error 220 (cudaErrorNvlinkUncorrectable)", True),
    Pattern(
        "driver",
        r"Driver/library version mismatch|NVML/RM version mismatch|GPU requires re(start|set)"
        r"|Failed to initialize NVML: (Unknown Error|Driver Not Loaded)|RmInitAdapter failed"
        r"|nvidia-container-cli: .{0,300}(nvml|driver) error: ",
        "NVML 13.615 errors 18, 16, 9 and 999 (nvmlErrorString); kernel driver; libnvidia-container",
        True,
    ),
    Pattern(
        # Raised, not warned of: on a machine without GPUs torch warns of the same and goes on.
        "driver",
        r"(No CUDA GPUs are available|Found no NVIDIA driver|CUDA driver initialization failed"
        r"|CUDA-capable device(s|\(s\))? (is/)?are busy or unavailable|no CUDA-capable device is detected"
        r"|system not yet initialized|Unexpected error from cudaGetDeviceCount|CUDA unknown error)",
        "torch 2.13, c10/cuda/CUDAFunctions.cpp and torch/cuda/__init__.py; CUDA errors 3, 46, 100 and 802 (the fabric "
        "manager does not run)",
        True,
        after=_ERROR,
    ),
    # --- memory of the host. Before the GPU's: some of these lines name CUDA, too.
    Pattern(
        "memlock",
        r"Cannot allocate memory",
        "NCCL 2.30, src/misc/ibvwrap.cc",
        after=("ibv_reg_mr", "ibv_create_"),
    ),
    Pattern(
        "memlock",
        r"RLIMIT_MEMLOCK|\bulimit -l\b|memlock limit",
        "libfabric and UCX name the limit",
        after=("ERROR", "rror:", "failed"),
    ),
    Pattern(
        "host_oom",
        r"Failed to CUDA host alloc|cuda(HostAlloc|MallocHost|HostRegister) failed",
        "NCCL 2.30, src/include/alloc.h; programs that pin memory",
    ),
    Pattern("host_oom", r"DefaultCPUAllocator: (can't allocate|not enough) memory", "torch 2.13, alloc_cpu.cpp"),
    Pattern(
        "host_oom",
        r"DataLoader worker \(pid\(?s?\)? .{0,300}(is|are) killed by signal: Killed",
        "torch 2.13, DataLoader.cpp",
    ),
    Pattern(
        "host_oom",
        r"ray\.exceptions\.OutOfMemoryError: |Task was killed due to the node running low on memory",
        "Ray 2.x, its memory monitor",
    ),
    Pattern(
        "oom", r"cudaErrorMemoryAllocation|CUDA_ERROR_OUT_OF_MEMORY", "CUDA error 2 by name, also as Thrust's bad_alloc"
    ),
    Pattern("host_oom", r"^MemoryError(:|$)|numpy\S{0,200}MemoryError: Unable to allocate", "Python; NumPy"),
    Pattern(
        "host_oom", r"\[Errno 12\]|std::bad_alloc|Cannot allocate memory \(12\)", "ENOMEM; libstdc++; torch's mmap"
    ),
    Pattern("host_oom", r"Detected \d{1,20} oom[-_]kill event", "slurmstepd 22.05 and 25.05, task_cgroup_memory.c"),
    Pattern("host_oom", r"\boom-kill:constraint=|Out of memory: Killed process|invoked oom-killer", "Linux kernel"),
    # --- memory of the device
    Pattern(
        "kernel_resources",
        r"OutOfResources: out of resource: [\w ]{1,60}, Required: (?P<asked>\d{1,20}), "
        r"Hardware limit: (?P<limit>\d{1,20})",
        "Triton 3.x, runtime/errors.py",
    ),
    Pattern("oom", r"Triton Error \[CUDA\]: out of memory", "Triton 3.x, backends/nvidia/driver.c"),
    Pattern(
        "oom", r"\b(CUDA|HIP|XPU) out of memory\. Tried to allocate", "torch 1.0 on, c10/cuda/CUDACachingAllocator.cpp"
    ),
    Pattern("oom", r"\btorch\.(cuda\.)?OutOfMemoryError(:|$)", "torch 1.13 on"),
    Pattern(
        "oom", r"C(UDA|uda) (driver )?(error|Error|failure):? ?\d* ?'?out of memory", "CUDA error 2; torch, NCCL, TE"
    ),
    Pattern("oom", r"CU(BLAS|DNN|SOLVER|SPARSE)_STATUS_ALLOC_FAILED", "CUDA libraries"),
    Pattern(
        "oom",
        r"cu(BLAS|DNN) Error: .{0,300}(alloc|resource allocation)",
        "TransformerEngine 2.20, common/util/logging.h",
    ),
    Pattern(
        "oom", r"cudaMalloc\w{0,100} failed|Failed to CUDA [mc]alloc", "NCCL 2.30, src/include/alloc.h; CUDA samples"
    ),
    # --- the container: enroot's words, which pyxis prints into the step's output, and Apptainer's own
    Pattern(
        "disk_full", r"^FATAL: +.{0,300}(no space left on device|disk quota exceeded)", "Apptainer 1.4, on a full cache"
    ),
    Pattern(
        "container_busy",
        r"pyxis: +(\[ERROR\] (File already exists|Could not acquire rootfs lock"
        r"|URL .{0,300} error code: (408|429|5\d\d))"
        r"|curl: \((5|6|7|16|18|28|35|52|55|56|92)\) |curl: \(22\) .{0,300}error: (408|429|5\d\d)|Checksum mismatch: )",
        "enroot 4.1, src/runtime.sh, docker.sh and common.sh; curl(1), EXIT CODES",
    ),
    Pattern(
        "container_busy",
        r"^FATAL: +.{0,300}(toomanyrequests|Too Many Requests|status code:? (429|5\d\d)|unexpected HTTP status: 5\d\d"
        r"|i/o timeout|TLS handshake timeout|Client\.Timeout|connection re(set|fused)|unexpected EOF|server misbehaving"
        r"|Temporary failure in name resolution)",
        "Apptainer 1.4 on registries: containers/image, net/http",
    ),
    Pattern(
        "container",
        r"pyxis: +\[ERROR\] |pyxis: +enroot-(mount|switchroot|nsenter): |pyxis: +curl: \("
        r"|pyxis: (--container-mounts: source path does not exist|couldn't chdir to )",
        "enroot 4.1, src/runtime.sh, docker.sh and bin/; pyxis 0.24, pyxis_slurmstepd.c",
    ),
    Pattern(
        "container",
        r"^FATAL: +(Unable to handle \S+ uri|container creation failed|.*no such file or directory|.*\bimage\b)",
        "Apptainer 1.4, cmd/internal/cli/actions.go, internal/pkg/runtime; SingularityCE",
    ),
    Pattern(
        "container", r"pyxis: (failed to|container start|container exited too soon)", "pyxis 0.24", consequence=True
    ),
    # --- programs and steps that do not start
    Pattern(
        "no_program",
        r"^(slurmstepd|srun): error: (.{0,300}: )?execve\(\): \S{1,200}: No such file or directory",
        "SLURM 22.05 to 25.05",
    ),
    Pattern(
        # Often nothing depends on it (`module: command not found`), so it only counts where nothing else is known.
        "no_program",
        r"^(\S{1,200}: )(line \d{1,20}: )?\S{1,200}: (command )?not found$",
        "bash 5.2, dash 0.5",
        consequence=True,
    ),
    Pattern(
        "step_refused",
        r"^srun: error: Unable to create step for job \d{1,20}: (?!.{0,300}already complet)(?P<why>.{0,300})",
        "SLURM 22.05 to 25.05, srun",
    ),
    Pattern(
        "step_refused",
        r"^srun: error: (Task launch for \S{1,100} failed on node \S{1,200}|Application launch failed): ",
        "SLURM 22.05 to 25.05, srun",
    ),
    # --- what the GPU cannot do
    Pattern(
        "gpu_shared",
        r"Duplicate GPU detected ?: rank (?P<one>\d{1,20}) and rank (?P<other>\d{1,20}) both on CUDA device",
        "NCCL 2.30, src/init.cc",
    ),
    Pattern("gpu_code", r"no kernel image is available for execution on the device", "CUDA error 209"),
    Pattern(
        "attention_backend",
        r"No dot product attention (backend|support) is available",
        "TransformerEngine 2.20, pytorch/attention/dot_product_attention",
    ),
    Pattern("device_assert", r"device-side assert triggered", "CUDA error 710", after=_ERROR),
    Pattern(
        "illegal_access",
        r"(an illegal memory access was encountered|misaligned address|unspecified launch failure)",
        "CUDA errors 700, 716 and 719",
        after=_ERROR,
    ),
    # --- open files and shared memory
    Pattern("open_files", r"Too many open files|\[Errno 24\]|error: EMFILE", "errno EMFILE: Python, torch, NCCL, gloo"),
    Pattern(
        "shm_full",
        r"/shm\.(h|cc):\d{1,9} NCCL WARN .{0,300}No space left on device"
        r"|/dev/shm\b.{0,300}No space left on device|No space left on device.{0,300}/dev/shm\b"
        r"|failed to extend /dev/shm/"
        r"|unable to (open|resize|allocate) shared memory.{0,300}No space left|insufficient shared memory \(shm\)"
        r"|workers are out of shared memory|killed by signal: Bus error",
        "NCCL 2.30, src/misc/shmutils.cc; torch 2.13, MapAllocator.cpp and DataLoader.cpp",
    ),
    # --- the disk
    Pattern("disk_full", r"No space left on device|Disk quota exceeded|\[Errno (28|122)\]", "errno ENOSPC, EDQUOT"),
    # --- a file system that other nodes may still have
    Pattern(
        "file_system",
        r"Input/output error|Stale (NFS )?file handle|Remote I/O error|Cannot send after transport endpoint shutdown"
        r"|\[Errno (11|19|107|112)\] [^:]*: b?['\"]",
        "glibc 2.36, strerror: EIO, ESTALE, EREMOTEIO, ESHUTDOWN (a Lustre client that was evicted); with a path, for "
        "sockets say the same: EAGAIN, ENODEV, ENOTCONN, EHOSTDOWN",
        True,
    ),
    *FILE_PATTERNS,
    # --- the arguments
    Pattern(
        "bad_arguments",
        r"^\S{1,200}\.py: error: (unrecognized arguments|the following arguments are required|argument \S{1,200}): ",
        "Python's argparse",
    ),
    Pattern(
        "bad_arguments",
        r"Error: (Some specified arguments are not used by the HfArgumentParser"
        r"|TrainingArguments\.__init__\(\) got an unexpected keyword argument)",
        "Transformers 4 and 5, hf_argparser.py and training_args.py",
    ),
    *WEB_PATTERNS,
    # --- the network
    Pattern(
        "network_interface",
        r"NCCL WARN Bootstrap ?: no socket interface found"
        r"|Unable to find address for: (?P<interface>\S{1,200})|unable to find (network )?interface"
        r"|no socket interface found|Error: network \S{1,50} not found",
        "NCCL 2.30, src/bootstrap.cc and plugin/net.cc; gloo, transport/tcp/device.cc",
    ),
    # --- the network
    Pattern(
        "port_taken", r"\bEADDRINUSE\b|[Aa]ddress already in use", "errno 98: torch 2.x, TCPStore; gloo; NCCL sockets"
    ),
    Pattern(
        "nccl",
        r"async (fatal )?event.{0,300}(local catastrophic error|port error)",
        "NCCL 2.30, src/transport/net_ib/common.cc",
        True,
        after=("NET/IB",),
    ),
    # --- ranks that never meet, and signals from outside
    Pattern(
        "rendezvous",
        r"[Tt]imed out after \d{1,20} seconds waiting for clients\. "
        r"(?P<joined>\d{1,20})/(?P<expected>\d{1,20}) clients joined",
        "torch 2.13, distributed/c10d/TCPStore.cpp",
        consequence=True,
    ),
    Pattern(
        "rendezvous",
        r"(client socket has (timed out|failed)"
        r"|timed out).{0,300}trying to connect to [\[(]*(?P<host>[\w.-]{1,200})\]?[,:] ?\d"
        r"|[Rr]endezvous(Timeout|Connection|Closed)Error",
        "torch 2.13, distributed/c10d/socket.cpp, elastic/rendezvous",
        consequence=True,
    ),
    Pattern(
        "rendezvous",
        r"Gloo connectFullMesh failed|gloo/transport/tcp/pair\.cc:\d{1,9}\] connect \[(?P<gloo>127\.[\d.]{1,20})\]",
        "torch 2.13, ProcessGroupGloo; gloo, transport/tcp/pair.cc",
        consequence=True,
    ),
    Pattern(
        "killed",
        r"\bexitcode *: *-9\b|\bSignal 9 \(SIGKILL\)|\breturn code = -9\b",
        "torch 2.13, distributed/elastic; DeepSpeed 0.19, launcher/launch.py",
        consequence=True,
    ),
    # --- what one hears of another's end
    Pattern(
        "nccl",
        r"remote process exited or there was a network error|ncclRemoteError|NCCL communicator was aborted"
        r"|NET/IB ?:.{0,300}Got completion .{0,300}status=",
        "NCCL 2.30, ncclGetErrorString; torch's ProcessGroupNCCL",
        consequence=True,
    ),
    Pattern(
        "hung",
        r"caught collective operation timeout|collective operations have failed or timed out"
        r"|watchdog thread terminated with exception|Timed out waiting \d{1,20}ms for (recv|send) operation"
        r"|monitoredBarrier|wait timeout after \d{1,20}ms"
        r"|store->get\(.{1,100}\) got error: Socket Timeout|HeartbeatMonitor|Received a dump signal",
        "torch 2.x, ProcessGroupNCCL.cpp and ProcessGroupGloo",
        consequence=True,
    ),
    Pattern(
        "nccl",
        r"Connection (closed|reset|refused)( by (remote )?peer)?\b|Broken pipe|BrokenPipeError"
        r"|(recvValue|sendBytes|recvBytes) failed|failed to recv, got 0 bytes|peer closed|socketProgress"
        r"|DistNetworkError|DistStoreError",
        "torch 2.x: TCPStore, gloo, elastic; NCCL sockets",
        consequence=True,
    ),
    Pattern(
        "crash",
        r"\b(exitcode *: *|return code = )-(?P<code>4|6|7|8|11)\b"
        r"|\bSignal \d{1,2} \((?P<signal>SIG(ILL|ABRT|BUS|FPE|SEGV))\)"
        r"|^\[\S{1,200}( :\S{1,50})?\] Caught signal (?P<caught>\d{1,2}) \(",
        "torch 2.13, distributed/elastic; DeepSpeed 0.19, launcher/launch.py; UCX",
        consequence=True,
    ),
    Pattern(
        "crash",
        r"ChildFailedError|SignalException: Process|KeyboardInterrupt|Sending process \d{1,20} closing signal",
        "torch 2.x, distributed/elastic: the launcher on its ranks",
        consequence=True,
    ),
    # --- after the peers' ends, whose messages quote this name
    Pattern("nccl", r"unhandled system error|ncclSystemError", "NCCL 2.30, ncclGetErrorString"),
)

# Every line that means anything has one of these. They are looked for first: ten times as fast as the expressions.
TELLING = (
    *("rror", "rrno", "xception", "emory", "MEMORY", "alloc", "ALLOC", "oom", "Xid", "lost", "_LOST", "fallen", "ECC"),
    *("NVLink", "mismatch", "space left", "quota", "NET/IB", "exited", "aborted", "terminated", "imeout", "imed out"),
    *("onitor", "dump signal", "onnection", "pipe", "failed", "peer", "socketProgress", "Interrupt", "closing signal"),
    *("what()", "EADDRINUSE", "ddress already", "refuses", "nable to load", "/latest names"),
    *("the loss is", "found NaN", "found Inf"),
    *("Stale", "Too Many Requests", "on the Hub", "to the Hub"),
    *("pyxis", "FATAL", "EMFILE", "shared memory", "open files"),
    *("Need to rerun", "Got rescheduled"),
    *(
        "not found",
        "exitcode",
        "(SIG",
        "return code",
        "ssh",
        "interface",
        "memlock",
        "ulimit",
        "Duplicate GPU",
        "out of resource",
        "aught signal",
        "OfflineMode",
    ),
)

# What those that are no framework's show in a traceback of what they were doing.
FRAMES = (
    Frame(
        "arguments",
        r'\s+File "[^"]*transformers/training_args\.py", line \d+, in (__post_init__|__init__)$',
        "Transformers 5, training_args.py",
        cause="bad_arguments",
    ),
)

# A line that looks like one of the above and ended nothing.
NO_CAUSES = (
    (r"encountered during tensors merging", "Megatron-LM, core/transformer/utils.py: the merge goes on"),
    (
        r"^\[[WI]\S{0,200} .{0,300}socket\.cpp",
        "torch 2.x, TCPStore: it tries again, and looks for IPv6 addresses that seldom are",
    ),
    (
        r"mismatch after resume .{0,300} will be ignored",
        "Megatron-LM, training/checkpointing.py: it goes on without the state of its random numbers",
    ),
    (r" thrown while requesting [A-Z]{3,7} https?:", "huggingface_hub: it tries again, or takes what it has kept"),
    (r"Runtime error during autotuning|Ignoring this choice", "torch 2.x, _inductor: it takes another kernel"),
    (r"^\+{1,9} ", "bash -x: a command, not what it said"),
    (r"\bRetrying \(Retry\(", "urllib3: it tries again"),
    (r"^llmlaunch: |^job: |^monitor: ", "our own files on a full disk"),
)

# What a line that ends a traceback looks like, and what stands for one in programs of C++ and argparse.
EXCEPTION = (
    r"([A-Za-z_][\w.]*(Error|Exception|Exit|Interrupt|Failure|Timeout|Warning|Full|Empty|Iteration)"
    r"|[a-z_]\w*(\.\w+)+)(: .*)?$"
)

# Exceptions that say nothing of what a file holds: another node, or another try, may read it.
OF_THE_SYSTEM = (
    r"(OSError|IOError|FileNotFoundError|PermissionError|BlockingIOError|InterruptedError|TimeoutError|MemoryError"
    r"|ConnectionError|ConnectionResetError|SystemExit|ImportError|ModuleNotFoundError)\b"
)
# Each rank's own traceback follows (torch 2.13, distributed/checkpoint/api.py).
WRAPPER = r"torch\.distributed\.checkpoint\.api\.CheckpointException\b"

# What a log shows of a program before it hangs; the last line that says anything counts.
ACTIVITIES = (
    (
        "saving",
        r"[Ss]aving (model |the )?checkpoint|saving checkpoint at iteration"
        r"|\[Torch\] Sav(ing|ed) |^saving step|Saving model checkpoint to",
    ),
    (
        "loading",
        r"[Ll]oading (checkpoint|weights|safetensors|model)|loading (release |distributed )?checkpoint"
        r"|Fetching \d{1,20} files",
    ),
    (
        "tokenizing",
        r"^(Map|Tokenizing|Running tokenizer|Generating|Grouping texts|Filter)\b.{0,300}\d%|[Tt]okeniz(ing|er on)|"
        r"building (train|the index|dataset|GPT)|> building|Build and save the|creating (document|sample"
        r"|shuffle) index",
    ),
    ("first step", r"\b0/\d{1,20} \[\d{1,20}:\d{1,20}<"),
    ("training", r"\biteration +[1-9]\d*/|\bstep [1-9]\d*(/|:)|^\{'loss': |\b[1-9]\d*/\d{1,20} \[\d{1,20}:\d{1,20}"),
)

# SLURM 22.05.8 and 25.05, in the job's log and in slurm-<job id>.out, the weightiest first. A step that is CANCELLED AT
# is no more than `srun --kill-on-bad-exit` at work.
_SLURM = "SLURM 22.05.8 and 25.05"
SLURM_PATTERNS = (
    Pattern("node_fail", r"CANCELLED AT .{0,300} DUE TO NODE FAILURE|error: Node failure on ", _SLURM),
    Pattern("container", r"srun: unrecognized option '--container-|srun: error: (spank: )?pyxis: ", _SLURM),
    Pattern("host_oom", r"srun: error: \S{1,4000}: tasks? \S{1,1000}: Out Of Memory", _SLURM),
    Pattern("preempted", r"CANCELLED AT .{0,300} DUE TO PREEMPTION", _SLURM),
    Pattern("time_limit", r"CANCELLED AT .{0,300} DUE TO TIME LIMIT", _SLURM),
    Pattern("cancelled", r"\*\*\* JOB .{0,300} CANCELLED AT [^ ]{1,64} \*\*\*", _SLURM),
    *(pattern for pattern in PATTERNS if pattern.cause in ("step_refused", "no_program")),
)
# What squeue, sacct and scontrol call a job's end.
SLURM_STATES = (
    ("NODE_FAIL", "node_fail"),
    ("NodeDown", "node_fail"),
    ("OUT_OF_MEMORY", "host_oom"),
    ("OutOfMemory", "host_oom"),
    ("PREEMPTED", "preempted"),
    ("TIMEOUT", "time_limit"),
    ("TimeLimit", "time_limit"),
    ("CANCELLED", "cancelled"),
)


def patterns() -> tuple[Pattern, ...]:
    """Return every row in the order of trying: the frameworks' own before those that all share, and those that need no
    traceback first, since a phase has the same name in all frameworks."""
    own = [pattern for module in _failures() for pattern in module.PATTERNS]
    return (*sorted(own, key=lambda pattern: bool(pattern.phase)), *PATTERNS)


def frames() -> tuple[Frame, ...]:
    """Return what the frameworks' tracebacks show of what they were doing."""
    return (*(frame for module in _failures() for frame in module.FRAMES), *FRAMES)


def _failures() -> list[ModuleType]:
    """Import `failures.py` of each framework's folder, by the order of their names; this floor knows none of them."""
    package = import_module("..frameworks", __package__)
    folders = sorted(module.name for module in pkgutil.iter_modules(package.__path__) if module.ispkg)
    modules = []
    for folder in folders:
        try:
            modules.append(import_module(f"..frameworks.{folder}.failures", __package__))
        except ModuleNotFoundError as error:
            if not str(error.name).endswith(f"{folder}.failures"):
                raise
    return modules
