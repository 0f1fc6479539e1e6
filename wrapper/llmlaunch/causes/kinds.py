"""The table of causes: everything that is known about what can end an attempt, a row for each kind.

A new cause is one row here and the patterns that name it: `patterns.py` has those of CUDA, NCCL, PyTorch, the kernel
and SLURM, and `frameworks/<framework>/failures.py` those of a framework. The restart policy, the stops that the planner
counts, the signs against nodes, every screen and the table in docs/causes.md read this table.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import advice as advise
from .cause_kind import (
    AT_ONCE,
    ENOUGH_SIGNS,
    IF_TRAINED,
    LATER,
    LATER_IF_STEPPED,
    NEVER,
    NOBODY,
    NODE,
    ONE_SIGN,
    PERSON,
    PROGRAM,
    SITE,
    CauseKind,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .cause_kind import Advice


SILENT_CORRUPTION, RERUN = "silent_corruption", "rerun"


def _bad_node(name: str, words: str, recognised_by: str, interrupts: bool = True) -> CauseKind:
    """What a device, its driver, SLURM or the preflight says of the node itself: hard evidence."""
    return CauseKind(name, words, advise.BAD_NODE, recognised_by, NODE, signs=ENOUGH_SIGNS, interrupts=interrupts)


def _planned(name: str, words: str, advice: str, fault: str = NOBODY) -> CauseKind:
    return CauseKind(name, words, advice, "SLURM's words in the job's log or `slurm-<job id>.out`", fault, planned=True)


def _certain(name: str, words: str, advice: Advice, recognised_by: str, fault: str = PERSON) -> CauseKind:
    """What would end a job in the same way wherever, and however often, it runs."""
    return CauseKind(name, words, advice, recognised_by, fault, retry=NEVER)


# Where no time decides, an earlier kind goes before a later one: the device, then its memory, the host, the network.
_ROWS = (
    _bad_node(
        "gpu_lost",
        "a GPU was lost",
        "`GPU is lost`, `fallen off the bus`, Xid 79, the monitor's `gpu_lost` (NVML 15, 16, 28)",
    ),
    _bad_node(
        "ecc",
        "memory of a GPU is damaged (ECC)",
        "`uncorrectable ECC error`, Xids 48, 64, 94, 95, 140",
    ),
    _bad_node(
        "xid",
        "a GPU failed",
        "another Xid that NVIDIA's catalogue answers with a reset, a restart or a call: `HARDWARE_XIDS` in "
        "`causes/log_scan.py`",
    ),
    _bad_node(
        "nvlink",
        "NVLink failed",
        "`uncorrectable NVLink error`, Xids 74, 121, 136, 144 to 150, 155",
    ),
    _bad_node(
        "driver",
        "the GPU driver is not in order",
        "driver and library of different versions; an error that says `No CUDA GPUs are available`, `CUDA driver "
        "initialization failed`, `CUDA-capable device(s) is/are busy or unavailable`, `system not yet initialized` "
        "(the fabric manager does not run); `GPU requires reset`, `RmInitAdapter failed`",
    ),
    CauseKind(
        SILENT_CORRUPTION,
        "a GPU computes wrongly",
        "llmlaunch suspects the GPU, or keeps new jobs away from its node; resume goes on without it. Have it tested.",
        "the verdict of Megatron-LM's rerun state machine (`--rerun-mode validate_results`, its default), where ranks "
        "exit with 17: `Possible transient error`, another result on the same GPU; `Possible persistent error`, "
        "another result on a second GPU, which speaks against the GPU of the attempt before, not the one that says it, "
        "and is enough",
        NODE,
        signs=ONE_SIGN,
        interrupts=True,
    ),
    _bad_node(
        "preflight",
        "the preflight found a node unfit",
        "what the preflight found ([recovery.md](recovery.md#preflight-and-spare-nodes))",
        interrupts=False,
    ),
    _certain(
        "gpu_shared",
        "two ranks of the job use one GPU",
        advise.shared_gpu,
        "NCCL's `Duplicate GPU detected`; an out-of-memory message in which another rank of the same job holds the "
        "memory that was missing",
        PROGRAM,
    ),
    CauseKind(
        "gpu_busy",
        "another process holds the GPU's memory",
        advise.busy_gpu,
        "an out-of-memory message in which a process that is no rank of the job holds the memory that was missing",
        NODE,
        interrupts=True,
    ),
    _certain(
        "oom",
        "out of GPU memory",
        advise.out_of_memory,
        "the GPU's memory: PyTorch's message in all its spellings, `CUDA error: out of memory`, Triton's, "
        "`CUBLAS_STATUS_ALLOC_FAILED`, NCCL's and `cudaMalloc`'s failures",
    ),
    CauseKind(
        "host_oom",
        "out of main memory",
        advise.host_memory,
        "main memory: `MemoryError`, `DefaultCPUAllocator: can't allocate memory`, pinned memory; a killed DataLoader "
        "worker; Ray's memory monitor; a killed process while the cgroup's `oom_kill` rose; slurmstepd's `Detected N "
        "oom_kill event`",
        PERSON,
        repeats=True,
        interrupts=True,
    ),
    _certain(
        "shm_full",
        "no space left in /dev/shm",
        advise.shared_memory,
        "NCCL's and torch's messages that name `/dev/shm` or shared memory, a DataLoader worker's `Bus error`; "
        "`shm_bytes` is the size of `/dev/shm` there",
    ),
    CauseKind(
        "disk_full",
        "no space left on a disk",
        "Make room (training.keep_checkpoints removes old checkpoints), or point training.checkpoint_path at another "
        "file system; then resume.",
        "`No space left on device`, quota",
        PERSON,
        retry=LATER_IF_STEPPED,
    ),
    CauseKind(
        "file_system",
        "a file system failed on the node",
        "A file system failed on the node, which new jobs avoid; resume goes on elsewhere.",
        "`Input/output error`, `Stale file handle`, `Remote I/O error`, `Cannot send after transport endpoint "
        "shutdown` (a Lustre client that was evicted); with a path, `Transport endpoint is not connected`, `No such "
        "device`, `Resource temporarily unavailable`",
        NODE,
        retry=LATER,
        signs=ONE_SIGN,
        interrupts=True,
    ),
    _certain(
        "checkpoint_mismatch",
        "the checkpoint does not match this job",
        advise.mismatched_checkpoint,
        "a message or an exception of the framework's loader that names another split, shape, argument or optimizer "
        "than the job's: `Global shape mismatch`, `value from checkpoint (...) is not equal to`, `used a DP world size "
        "of`, a `KeyError` of what the file does not hold. No file of the checkpoint and no tracker is touched",
    ),
    _certain(
        "checkpoint_format",
        "this version of the framework cannot write the checkpoint's format",
        advise.CHECKPOINT_FORMAT,
        "`ShardedTensor.flattened_range is not supported`",
    ),
    CauseKind(
        "checkpoint",
        "the checkpoint is damaged",
        "A file of the last checkpoint is missing, cut short or cannot be read; resume --from-older goes on from an "
        "older one.",
        "a checkpoint that vanished, went backwards or has a damaged file "
        "([recovery.md](recovery.md#a-checkpoint-that-is-gone-or-damaged)): `PytorchStreamReader failed`, "
        "`UnpicklingError`",
        NOBODY,
        damages_checkpoint=True,
    ),
    CauseKind(
        "checkpoint_load",
        "the checkpoint was not loaded",
        advise.unloaded_checkpoint,
        "`is not a distributed checkpoint`; an exception that left the framework's `load_checkpoint` and says neither "
        "that a file is damaged nor what does not match. No file of the checkpoint and no tracker is touched",
        PERSON,
        retry=IF_TRAINED,
    ),
    _certain(
        "damaged_file",
        "a file that the trainer reads is damaged",
        "A file of weights or data is cut short, or is something else than its name says: compare its size with the "
        "source's, and download or copy it again. With Git LFS, fetch the file itself, not its pointer.",
        "safetensors' `Error while deserializing header`; outside the loading of a checkpoint, `PytorchStreamReader "
        "failed` and `UnpicklingError`",
    ),
    CauseKind(
        "bad_loss",
        "the loss went bad",
        "Look at the steps before it: learning rate, warm-up, data, fp16. on_bad_loss: rollback goes back to a "
        "checkpoint from before and leaves out the batches around the step.",
        "the watchdog, where [`on_bad_loss`](recovery.md#a-loss-that-goes-bad) had it end the training; the shipped "
        "DeepSpeed script's `the loss is nan`; Megatron-LM's `found NaN in local forward loss`, `found NaN in local "
        "grad norm`. `since_step` is the first bad step",
        PROGRAM,
        retry=IF_TRAINED,
        repeats=True,
    ),
    _certain(
        "open_files",
        "too many open files",
        "Raise the limit of open files (ulimit -Hn) on the nodes: LimitNOFILE of slurmd, PropagateResourceLimits. Or "
        "use fewer data workers.",
        "`Too many open files`: the limit of the nodes (`ulimit -Hn`); job scripts raise the soft limit to it",
        SITE,
    ),
    _certain(
        "memlock",
        "the limit of locked memory is too low",
        "InfiniBand needs to lock memory: ulimit -l must say unlimited in a job. Ask your administrators for "
        "LimitMEMLOCK=infinity of slurmd and PropagateResourceLimitsExcept=MEMLOCK; in a container, for "
        "--ulimit memlock=-1.",
        "`ibv_reg_mr`, `ibv_create_cq` and their like fail with `Cannot allocate memory`, or a line names `memlock`",
        SITE,
    ),
    _bad_node(
        "node_fail",
        "the node failed",
        "SLURM's words (`DUE TO NODE FAILURE`, `Node failure on`), and the node that reported no end while others did",
    ),
    _certain(
        "bad_arguments",
        "wrong arguments",
        "The framework refuses an argument: correct it in the recipe (llmlaunch explain-args says which line it "
        "follows from) or in your script, and submit again.",
        "the framework refuses the arguments: what `trainer/megatron_check.py` says before the first step "
        "([megatron.md](megatron.md)); an exception out of Megatron-LM's `validate_args`; its pipeline schedules' "
        "rules; argparse's `unrecognized arguments`",
    ),
    _certain(
        "attention_backend",
        "no attention kernel takes these inputs",
        "Transformer Engine has no attention kernel for this mask, head dimension, number format or context-parallel "
        "split: NVTE_DEBUG=1 NVTE_DEBUG_LEVEL=2 says why each was left out. Mostly flash-attn is missing or of another "
        "version, or NVTE_FLASH_ATTN, NVTE_FUSED_ATTN or --attention-backend forbid the one that would do.",
        "Transformer Engine's `No dot product attention backend is available`",
    ),
    _certain(
        "gpu_code",
        "a library has no code for this GPU",
        "A compiled library (torch, flash-attn, apex, Transformer Engine ...) was built without this GPU's "
        "architecture: install a build for it, or compile with TORCH_CUDA_ARCH_LIST naming it.",
        "`no kernel image is available for execution on the device`",
    ),
    _certain(
        "kernel_resources",
        "a kernel needs more of the GPU's on-chip memory than there is",
        "It is no lack of memory that another layout would cure. Give the Triton kernel fewer stages (num_stages) or a "
        "smaller block, or install a version of its library that is tuned for this GPU.",
        "Triton's `OutOfResources: out of resource`: shared memory, tensor memory, threads",
        PROGRAM,
    ),
    CauseKind(
        "device_assert",
        "an index is out of range on the GPU",
        "Mostly a token id is not below the vocabulary's size, a label not below the number of classes, or a position "
        "not below the longest sequence: compare the tokenizer with the model's embedding (vocab_size, padding). "
        "CUDA_LAUNCH_BLOCKING=1, or one step on the CPU, shows the line.",
        "`device-side assert triggered`",
        PROGRAM,
        retry=IF_TRAINED,
        repeats=True,
        interrupts=True,
    ),
    CauseKind(
        "illegal_access",
        "a kernel accessed memory that is not its own",
        advise.illegal_access,
        "`an illegal memory access was encountered`, `misaligned address`, `unspecified launch failure`",
        PROGRAM,
        retry=IF_TRAINED,
        repeats=True,
        interrupts=True,
    ),
    _certain(
        "index_cache",
        "the data's index is not on this node",
        "One node builds the index of the data and all read it, so it must be on a file system that all nodes share: "
        "name such a folder with --data-cache-path (data.cache_path in a recipe), or put the data itself there.",
        "a `FileNotFoundError` of Megatron-LM's `GPTDataset_indices`",
    ),
    _certain(
        "no_program",
        "a program was not found on the node",
        "The node does not find the program: activate the training environment in the script (or in the recipe's setup "
        "lines), or name the program by its path. A folder of your login node may not be there on compute nodes.",
        "slurmstepd's and srun's `execve(): ...: No such file or directory`, a shell's `command not found`",
    ),
    CauseKind(
        "step_refused",
        "SLURM does not start the step",
        advise.refused_step,
        "srun's `Unable to create step`",
        PERSON,
        retry=IF_TRAINED,
    ),
    _certain(
        "no_ssh",
        "the launcher cannot reach a node by ssh",
        "DeepSpeed's launcher starts the other nodes by ssh, which the node refuses. Under SLURM start one launcher "
        "per node with srun (deepspeed --launcher slurm, or srun torchrun); llmlaunch submit does that. Otherwise "
        "allow ssh between the nodes.",
        "`ssh: connect to host`, pdsh's `ssh exited with exit code`",
        SITE,
    ),
    CauseKind(
        "image",
        "the image could not be imported",
        "Correct container.image (REGISTRY#NAME:TAG), your credentials for enroot, or the nodes' room for images; or "
        "name a .sqsh file that enroot import wrote. Then submit the recipe again.",
        "the image of a registry could not be [imported](sites.md#an-image-of-a-registry): not there, access denied, "
        "no room on the node; the first node that failed, and how many others did. It counts against the node where "
        "other nodes have it",
        PERSON,
        retry=IF_TRAINED,
        signs=ONE_SIGN,
    ),
    _certain(
        "container",
        "the container does not start",
        "Correct container.image or container.mounts in the recipe, and submit it again.",
        "the container does not start: no such image, a mount's source is missing, access denied; enroot's words by "
        "way of pyxis, Apptainer's `FATAL`, an srun without pyxis",
    ),
    CauseKind(
        "container_busy",
        "the container did not start this time",
        "It may start next time: resume.",
        "it may start next time: a folder that pyxis left behind (`File already exists`; the step that meets it "
        "removes it), a registry's time-out, HTTP 429 or 5xx",
        NOBODY,
        retry=AT_ONCE,
    ),
    CauseKind(
        "port_taken",
        "another program used the port",
        "Another program used the port; resume takes another one.",
        "`EADDRINUSE`, `address already in use`: another program used the port when rank 0 came to listen",
        NOBODY,
        retry=AT_ONCE,
    ),
    _certain(
        "network_interface",
        "the network interface is not on the node",
        "NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME or NCCL_IB_HCA names an interface that this node does not have: ip -br "
        "addr on the node (and ibdev2netdev) shows those it has. Leave the variable out, or exclude interfaces with ^.",
        "NCCL's `no socket interface found`, gloo's `Unable to find address for`",
    ),
    CauseKind(
        "name_resolution",
        "a host name could not be resolved",
        "A host name was not found, which is often over soon: resume. If it returns, MASTER_ADDR or a path names a "
        "host that the nodes do not know.",
        "an error that says `Temporary failure in name resolution` or `Name or service not known`",
        NODE,
        retry=LATER,
        signs=ONE_SIGN,
        interrupts=True,
    ),
    CauseKind(
        "hub",
        "a web site did not answer",
        "Compute nodes often have no network: download the model, the tokenizer and the data elsewhere, and name them "
        "by their paths (or share the caches: HF_HOME, TIKTOKEN_CACHE_DIR, NLTK_DATA); or resume later.",
        "Hugging Face's hub or another site cannot be reached, or the hub answers 429 or 5xx",
        SITE,
        retry=LATER,
        interrupts=True,
    ),
    CauseKind(
        "wandb",
        "Weights & Biases did not answer",
        advise.weights_and_biases,
        "`wandb.errors...CommError`, `api_key not configured`, no way to `api.wandb.ai`",
        SITE,
        retry=IF_TRAINED,
        interrupts=True,
    ),
    CauseKind(
        "rendezvous",
        "the ranks did not find each other",
        advise.rendezvous,
        "the rendezvous timed out: torch's `waiting for clients`, `RendezvousTimeoutError`, `The client socket has "
        "timed out`",
        NOBODY,
        interrupts=True,
    ),
    CauseKind(
        "killed",
        "killed (SIGKILL)",
        advise.killed,
        "a rank ended by SIGKILL while nothing else is known: torchrun's `exitcode: -9`, `Signal 9 (SIGKILL)`, "
        "DeepSpeed's `return code = -9`",
        NOBODY,
        retry=IF_TRAINED,
        repeats=True,
        interrupts=True,
    ),
    CauseKind(
        "nccl",
        "the network between ranks failed",
        advise.network,
        "InfiniBand's `local catastrophic error` or port down (host at fault); NCCL's system error, with its own last "
        "error",
        NODE,
        signs=ENOUGH_SIGNS,
        is_weak=True,
        interrupts=True,
    ),
    CauseKind(
        RERUN,
        "an unexpected result is to be computed again on another GPU",
        "Megatron-LM wants the step on another GPU: resume on other nodes.",
        "the same machine asks for the step on another GPU (exit code 16). The job comes back without that node where "
        "enough others are left; on the same GPU it would only ask again",
        NOBODY,
        interrupts=True,
    ),
    _certain(
        "unexpected_result",
        "the program or the data gives an unexpected result",
        "Two GPUs agree on the result: look at the data and the program at that step.",
        "its verdict that a second GPU agrees: the program or the data. Started again by itself only with "
        "[`on_bad_loss: rollback`](recovery.md#a-loss-that-goes-bad)",
        PROGRAM,
    ),
    CauseKind(
        "crash",
        "crashed",
        advise.crash,
        "nothing better known: the last exception of the rank that failed first, or how it ended",
        PROGRAM,
        retry=IF_TRAINED,
        is_weak=True,
        repeats=True,
        interrupts=True,
    ),
    _planned(
        "preempted",
        "preempted",
        "Nothing is wrong with the job: resume.",
    ),
    _planned(
        "time_limit",
        "out of time",
        "Time was up: resume, with more of it after `--` (--time=...), or shorten training.steps.",
    ),
    _planned(
        "cancelled",
        "cancelled",
        "Somebody cancelled it: resume when you want it back.",
        PERSON,
    ),
    CauseKind(
        "hung",
        "hung",
        advise.hung,
        "the watchdog's finding; NCCL's and gloo's own time-outs. A sign against a node each where the others wait for "
        "a rank there, and where it gave no answer",
        NOBODY,
        is_weak=True,
        repeats=True,
        interrupts=True,
    ),
)
KINDS = {row.name: row for row in _ROWS}
_UNKNOWN = CauseKind("", "", "", "", NOBODY, retry=IF_TRAINED)


def kind_of(cause: Mapping[str, Any] | None) -> CauseKind:
    """Return the row of a cause's kind; of none, or of a kind that this version does not know, a row that says nothing
    and has the job started again only where it has trained before."""
    return _UNKNOWN if cause is None else KINDS.get(str(cause.get("kind")), _UNKNOWN)


def kinds_where(**fields: object) -> frozenset[str]:
    return frozenset(row.name for row in _ROWS if all(getattr(row, name) == value for name, value in fields.items()))
