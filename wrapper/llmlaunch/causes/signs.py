"""The lines by which logs tell what ended a trainer, each with where it comes from: data, in the order of trying."""

from __future__ import annotations

from typing import NamedTuple

__all__ = [
    "EXCEPTION",
    "HARDWARE_XIDS",
    "KINDS",
    "LOADING_FRAME",
    "NO_CAUSES",
    "OF_THE_SYSTEM",
    "RERUN",
    "SAID_BY_SLURM",
    "SIGNS",
    "SILENT_CORRUPTION",
    "TELLING",
    "WRAPPER",
    "XID",
    "Sign",
]

# Each kind of cause, and how a sentence calls it. Where no time decides, an earlier kind goes before a later one: the
# device, then its memory, the host, the network.
KINDS = {
    "gpu_lost": "a GPU was lost",
    "ecc": "memory of a GPU is damaged (ECC)",
    "xid": "a GPU failed",
    "nvlink": "NVLink failed",
    "driver": "the GPU driver is not in order",
    "silent_corruption": "a GPU computes wrongly",
    "preflight": "the preflight found a node unfit",
    "oom": "out of GPU memory",
    "host_oom": "out of main memory",
    "shm_full": "no space left in /dev/shm",
    "disk_full": "no space left on a disk",
    "file_system": "a file system failed on the node",
    "checkpoint": "the checkpoint cannot be used",
    "bad_loss": "the loss went bad",
    "open_files": "too many open files",
    "node_fail": "the node failed",
    "bad_arguments": "wrong arguments",
    "image": "the image could not be imported",
    "container": "the container does not start",
    "container_busy": "the container did not start this time",
    "port_taken": "a port was taken",
    "name_resolution": "a host name could not be resolved",
    "hub": "the Hugging Face hub did not answer",
    "nccl": "the network between ranks failed",
    "rerun": "an unexpected result is to be computed again on another GPU",
    "unexpected_result": "the program or the data gives an unexpected result",
    "crash": "crashed",
    "preempted": "preempted",
    "time_limit": "out of time",
    "cancelled": "cancelled",
    "hung": "hung",
}
SILENT_CORRUPTION, RERUN = "silent_corruption", "rerun"
SAID_BY_SLURM = frozenset({"preempted", "time_limit", "cancelled"})


class Sign(NamedTuple):
    """`expression` found in a line means `kind`. `sick`: that host is at fault, and the next job should avoid it.
    `consequence`: the line only reports that something else went wrong, often on another node."""

    kind: str
    expression: str
    source: str
    sick: bool = False
    consequence: bool = False


SIGNS = (
    # --- the GPU itself
    Sign("gpu_lost", r"GPU is lost|has fallen off the bus|GPU_IS_LOST", "NVML error 15; kernel driver, Xid 79", True),
    Sign(
        "ecc",
        r"uncorrectable (double bit )?ECC error|ECC_?Uncorrectable|uncorrectable double bit error",
        "CUDA error 214 (cudaErrorECCUncorrectable); Xid 48",
        True,
    ),
    Sign("nvlink", r"uncorrectable NVLink error", "CUDA error 220 (cudaErrorNvlinkUncorrectable)", True),
    Sign(
        "driver",
        r"Driver/library version mismatch|NVML/RM version mismatch|GPU requires re(start|set)"
        r"|Failed to initialize NVML: (Unknown Error|Driver Not Loaded)|RmInitAdapter failed"
        r"|nvidia-container-cli: .*(nvml|driver) error: ",
        "NVML 13.615 errors 18, 16, 9 and 999 (nvmlErrorString); kernel driver; libnvidia-container",
        True,
    ),
    Sign(
        # Raised, not warned of: on a machine without GPUs torch warns of the same and goes on.
        "driver",
        r"Error: .*(No CUDA GPUs are available|Found no NVIDIA driver|CUDA driver initialization failed"
        r"|CUDA-capable device(s|\(s\))? (is/)?are busy or unavailable|no CUDA-capable device is detected"
        r"|system not yet initialized|Unexpected error from cudaGetDeviceCount|CUDA unknown error)",
        "torch 2.13, c10/cuda/CUDAFunctions.cpp and torch/cuda/__init__.py; CUDA errors 3, 46, 100 and 802 (the fabric "
        "manager does not run)",
        True,
    ),
    # --- Megatron's rerun state machine: causes.rerun_verdict says what its lines mean
    Sign(
        "silent_corruption",
        r"\bRank \d+, node \S+, device \d+, iteration #\d+: Possible transient error!",
        "Megatron-LM core 0.19, megatron/core/rerun_state_machine.py",
        True,
    ),
    Sign(
        "silent_corruption",
        r"\bRank \d+, node \S+, device \d+, iteration #\d+: Possible persistent error!",
        "the same; it names the place of the second GPU",
    ),
    Sign(
        "unexpected_result",
        r"\bRank \d+, node \S+, device \d+, iteration #\d+: Correct result \(but possible Application error\)",
        "the same",
    ),
    Sign(
        "rerun",
        r"\bRank \d+, node \S+, device \d+, iteration #\d+: First rerun: .*Need to rerun on a different GPU"
        r"|Got rescheduled on the same GPU\. Need to resume again",
        "the same",
    ),
    # --- memory of the host. Before the GPU's: some of these lines name CUDA, too.
    Sign(
        "host_oom",
        r"Failed to CUDA host alloc|cuda(HostAlloc|MallocHost|HostRegister) failed",
        "NCCL 2.30, src/include/alloc.h; programs that pin memory",
    ),
    Sign("host_oom", r"DefaultCPUAllocator: (can't allocate|not enough) memory", "torch 2.13, alloc_cpu.cpp"),
    Sign(
        "oom", r"cudaErrorMemoryAllocation|CUDA_ERROR_OUT_OF_MEMORY", "CUDA error 2 by name, also as Thrust's bad_alloc"
    ),
    Sign("host_oom", r"^MemoryError\b|numpy\S*MemoryError: Unable to allocate", "Python; NumPy"),
    Sign("host_oom", r"\[Errno 12\]|std::bad_alloc|Cannot allocate memory \(12\)", "ENOMEM; libstdc++; torch's mmap"),
    Sign("host_oom", r"Detected \d+ oom[-_]kill event", "slurmstepd 22.05 and 25.05, task_cgroup_memory.c"),
    Sign("host_oom", r"\boom-kill:constraint=|Out of memory: Killed process|invoked oom-killer", "Linux kernel"),
    # --- memory of the device
    Sign(
        "oom", r"\b(CUDA|HIP|XPU) out of memory\. Tried to allocate", "torch 1.0 on, c10/cuda/CUDACachingAllocator.cpp"
    ),
    Sign("oom", r"\btorch\.(cuda\.)?OutOfMemoryError", "torch 1.13 on"),
    Sign("oom", r"C(UDA|uda) (driver )?(error|Error|failure):? ?\d* ?'?out of memory", "CUDA error 2; torch, NCCL, TE"),
    Sign("oom", r"CU(BLAS|DNN|SOLVER|SPARSE)_STATUS_ALLOC_FAILED", "CUDA libraries"),
    Sign("oom", r"cu(BLAS|DNN) Error: .*(alloc|resource allocation)", "TransformerEngine 2.20, common/util/logging.h"),
    Sign("oom", r"cudaMalloc\w* failed|Failed to CUDA [mc]alloc", "NCCL 2.30, src/include/alloc.h; CUDA samples"),
    Sign("oom", r"Workspace can't be allocated, (no|not) enough memory", "DeepSpeed 0.19, csrc/transformer/inference"),
    # --- the container: enroot's words, which pyxis prints into the step's output, and Apptainer's own
    Sign("disk_full", r"^FATAL: +.*(no space left on device|disk quota exceeded)", "Apptainer 1.4, on a full cache"),
    Sign(
        "container_busy",
        r"pyxis: +(\[ERROR\] (File already exists|Could not acquire rootfs lock|URL .* error code: (408|429|5\d\d))"
        r"|curl: \((5|6|7|16|18|28|35|52|55|56|92)\) |curl: \(22\) .*error: (408|429|5\d\d)|Checksum mismatch: )",
        "enroot 4.1, src/runtime.sh, docker.sh and common.sh; curl(1), EXIT CODES",
    ),
    Sign(
        "container_busy",
        r"^FATAL: +.*(toomanyrequests|Too Many Requests|status code:? (429|5\d\d)|unexpected HTTP status: 5\d\d"
        r"|i/o timeout|TLS handshake timeout|Client\.Timeout|connection re(set|fused)|unexpected EOF|server misbehaving"
        r"|Temporary failure in name resolution)",
        "Apptainer 1.4 on registries: containers/image, net/http",
    ),
    Sign(
        "container",
        r"pyxis: +\[ERROR\] |pyxis: +enroot-(mount|switchroot|nsenter): |pyxis: +curl: \("
        r"|pyxis: (--container-mounts: source path does not exist|couldn't chdir to )",
        "enroot 4.1, src/runtime.sh, docker.sh and bin/; pyxis 0.24, pyxis_slurmstepd.c",
    ),
    Sign(
        "container",
        r"^FATAL: +(Unable to handle \S+ uri|container creation failed|.*no such file or directory|.*\bimage\b)",
        "Apptainer 1.4, cmd/internal/cli/actions.go, internal/pkg/runtime; SingularityCE",
    ),
    Sign("container", r"pyxis: (failed to|container start|container exited too soon)", "pyxis 0.24", consequence=True),
    # --- open files and shared memory
    Sign("open_files", r"Too many open files|\[Errno 24\]|error: EMFILE", "errno EMFILE: Python, torch, NCCL, gloo"),
    Sign(
        "shm_full",
        r"/dev/shm\b.*No space left on device|No space left on device.*/dev/shm\b|failed to extend /dev/shm/"
        r"|unable to (open|resize|allocate) shared memory.*No space left|insufficient shared memory \(shm\)"
        r"|workers are out of shared memory|killed by signal: Bus error",
        "NCCL 2.30, src/misc/shmutils.cc; torch 2.13, MapAllocator.cpp and DataLoader.cpp",
    ),
    # --- the disk
    Sign("disk_full", r"No space left on device|Disk quota exceeded|\[Errno (28|122)\]", "errno ENOSPC, EDQUOT"),
    # --- a file system that other nodes may still have
    Sign(
        "file_system",
        r"Input/output error|Stale (NFS )?file handle|Remote I/O error|Cannot send after transport endpoint shutdown"
        r"|\[Errno (11|19|107|112)\] [^:]*: b?['\"]",
        "glibc 2.36, strerror: EIO, ESTALE, EREMOTEIO, ESHUTDOWN (a Lustre client that was evicted); with a path, for "
        "sockets say the same: EAGAIN, ENODEV, ENOTCONN, EHOSTDOWN",
        True,
    ),
    # --- the checkpoint
    Sign(
        "checkpoint",
        r"PytorchStreamReader failed (reading|locating|finding)|_pickle\.UnpicklingError: |^EOFError: Ran out of input",
        "torch 2.13, caffe2/serialize/inline_container.cc and torch/serialization.py: a file that is cut short",
    ),
    Sign(
        "checkpoint",
        r"CheckpointingException: .* is not a distributed checkpoint|NotImplementedError: unknown checkpoint format in"
        r"|A metadata file exists but unable to load iteration",
        "Megatron-LM core 0.19, megatron/training/checkpointing.py, core/dist_checkpointing/validation.py",
    ),
    Sign("checkpoint", r"/latest names \S+, which (is missing|holds) ", "llmlaunch, trainers/deepspeed/checkpoints.py"),
    # --- the loss
    Sign("bad_loss", r"^step \d+: the loss is (nan|-?inf)\b", "llmlaunch, trainers/deepspeed/train.py"),
    Sign(
        "bad_loss",
        r"Unexpected result .*found (NaN|Inf) in local (forward loss|grad norm)",
        "Megatron-LM core 0.16 to 0.19, core/rerun_state_machine.py, core/distributed/param_and_grad_buffer.py and "
        "pretrain_gpt.py",
    ),
    # --- the arguments
    Sign("bad_arguments", r"^Megatron-LM refuses its arguments: ", "llmlaunch, trainers/megatron_check.py"),
    Sign("bad_arguments", r"^Megatron-Bridge refuses its settings: ", "llmlaunch, trainers/megatron_bridge.py"),
    Sign(
        "bad_arguments",
        r"^\S+\.py: error: (unrecognized arguments|the following arguments are required|argument \S+): ",
        "Python's argparse",
    ),
    # --- what lies outside the cluster, and the way there
    Sign(
        "hub",
        r"(huggingface\.co|hf\.co).*(Max retries exceeded|timed out|Failed to resolve)"
        r"|Error: We couldn't connect to '|(on|to) the Hub,? and we cannot find"
        r"|^429 Too Many Requests(:| for url)|Error: .*(429|50[0234]) (Client|Server) Error"
        r"|Error: (Client|Server) error '(429|50[0234]) |^httpx2?\.\w+: .*\[Errno -\d\]",
        "huggingface_hub 0.11 to 2.4 (utils/_http.py, file_download.py), requests, urllib3, httpx, transformers 5.23",
    ),
    Sign(
        "name_resolution",
        r"([Ee]rror|Exception)\b.*(Temporary failure in name resolution|Name or service not known"
        r"|No address associated with hostname)",
        "glibc 2.36, gai_strerror: EAI_AGAIN, EAI_NONAME, EAI_NODATA",
        True,
    ),
    # --- the network
    Sign(
        "port_taken", r"\bEADDRINUSE\b|[Aa]ddress already in use", "errno 98: torch 2.x, TCPStore; gloo; NCCL sockets"
    ),
    Sign(
        "nccl",
        r"NET/IB ?:.*async (fatal )?event.*(local catastrophic error|port error)",
        "NCCL 2.30, src/transport/net_ib/common.cc",
        True,
    ),
    # --- what one hears of another's end
    Sign(
        "nccl",
        r"remote process exited or there was a network error|ncclRemoteError|NCCL communicator was aborted"
        r"|NET/IB ?:.*Got completion .*status=",
        "NCCL 2.30, ncclGetErrorString; torch's ProcessGroupNCCL",
        consequence=True,
    ),
    Sign(
        "hung",
        r"caught collective operation timeout|collective operations have failed or timed out"
        r"|watchdog thread terminated with exception|Timed out waiting \d+ms for (recv|send) operation"
        r"|monitoredBarrier|wait timeout after \d+ms|HeartbeatMonitor|Received a dump signal",
        "torch 2.x, ProcessGroupNCCL.cpp and ProcessGroupGloo",
        consequence=True,
    ),
    Sign(
        "nccl",
        r"Connection (closed|reset|refused)( by (remote )?peer)?\b|Broken pipe|BrokenPipeError"
        r"|(recvValue|sendBytes|recvBytes) failed|failed to recv, got 0 bytes|peer closed|socketProgress"
        r"|DistNetworkError|DistStoreError|RendezvousConnectionError|RendezvousTimeoutError",
        "torch 2.x: TCPStore, gloo, elastic; NCCL sockets",
        consequence=True,
    ),
    Sign(
        "crash",
        r"ChildFailedError|SignalException: Process|KeyboardInterrupt|Sending process \d+ closing signal",
        "torch 2.x, distributed/elastic: the launcher on its ranks",
        consequence=True,
    ),
    # --- after the peers' ends, whose messages quote this name
    Sign("nccl", r"unhandled system error|ncclSystemError", "NCCL 2.30, ncclGetErrorString"),
)

# Every line that means anything has one of these. They are looked for first: ten times as fast as the expressions.
TELLING = (
    *("rror", "rrno", "xception", "emory", "MEMORY", "alloc", "ALLOC", "oom", "Xid", "lost", "_LOST", "fallen", "ECC"),
    *("NVLink", "mismatch", "space left", "quota", "NET/IB", "exited", "aborted", "terminated", "imeout", "imed out"),
    *("onitor", "dump signal", "onnection", "pipe", "failed", "peer", "socketProgress", "Interrupt", "closing signal"),
    *("what()", "EADDRINUSE", "ddress already", "refuses", "unable to load", "/latest names"),
    *("the loss is", "found NaN", "found Inf"),
    *("Stale", "Too Many Requests", "on the Hub", "to the Hub"),
    *("pyxis", "FATAL", "EMFILE", "shared memory", "open files"),
    *("Need to rerun", "Got rescheduled"),
)

# A line that looks like one of the above and ended nothing.
NO_CAUSES = (
    (r"encountered during tensors merging", "Megatron-LM, core/transformer/utils.py: the merge goes on"),
    (r"^\[[WI]\S* .*socket\.cpp", "torch 2.x, TCPStore: it tries again, and looks for IPv6 addresses that seldom are"),
    (r"^llmlaunch: |^(train\.sh on \S+|job\.sbatch): |^monitor: ", "our own files on a full disk"),
)

# What a line that ends a traceback looks like, and what stands for one in programs of C++ and argparse.
EXCEPTION = (
    r"([A-Za-z_][\w.]*(Error|Exception|Exit|Interrupt|Failure|Timeout|Warning|Full|Empty|Iteration)"
    r"|[a-z_]\w*(\.\w+)+)(: .*)?$"
)

# A traceback's frame in which a framework loads a checkpoint: Megatron-LM core 0.16 and 0.19, DeepSpeed 0.19.8.
LOADING_FRAME = (
    r'\s+File "[^"]*(megatron/training/checkpointing|deepspeed/runtime/engine)\.py", line \d+, in load_checkpoint$'
)
# Exceptions that say nothing of what a file holds: another node, or another try, may read it.
OF_THE_SYSTEM = (
    r"(OSError|IOError|FileNotFoundError|PermissionError|BlockingIOError|InterruptedError|TimeoutError|MemoryError"
    r"|ConnectionError|ConnectionResetError|SystemExit|ImportError|ModuleNotFoundError)\b"
)
# Each rank's own traceback follows (torch 2.13, distributed/checkpoint/api.py).
WRAPPER = r"torch\.distributed\.checkpoint\.api\.CheckpointException\b"

XID = r"NVRM: Xid \((?:PCI:)?(?P<pci>[0-9a-fA-F:.]+)\): (?P<number>\d+)"

# Xids by which the host is at fault, not the program: NVIDIA's Xid catalogue (docs.nvidia.com/deploy/xid-errors), where
# the immediate action is to reset the GPU, to restart the machine or to call support. Left out although on some lists:
# 13, 31, 43, 45, 69, 109 (programs cause them), 63 and 92 (a repair that worked; nothing died of them), 154 (only names
# what to do about another).
HARDWARE_XIDS = {
    46: "xid",  # GPU stopped processing
    48: "ecc",  # double-bit ECC error
    54: "xid",  # auxiliary power not connected
    61: "xid",  # breakpoint or warning of the internal micro-controller
    62: "xid",  # halt of the internal micro-controller
    64: "ecc",  # a page could not be retired, a row not be remapped
    74: "nvlink",
    79: "gpu_lost",  # has fallen off the bus
    94: "ecc",  # contained
    95: "ecc",  # uncontained
    110: "xid",  # security fault
    119: "xid",  # the GPU system processor does not answer
    120: "xid",  # error of the GPU system processor
    121: "nvlink",  # chip-to-chip link
    136: "nvlink",  # link training failed
    140: "ecc",  # not recovered
    143: "xid",  # initialisation failed
    144: "nvlink",
    145: "nvlink",
    146: "nvlink",
    147: "nvlink",
    148: "nvlink",
    149: "nvlink",
    150: "nvlink",
    155: "nvlink",
    156: "xid",  # a resource was retired
    158: "xid",  # fatal time-out
}
