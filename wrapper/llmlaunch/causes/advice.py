"""Advice that depends on the evidence: one function for each kind of cause whose advice is not a fixed text.

Each takes the record of a cause (`cause.cause`), of which it reads `numbers`, `facts` and `line`, and returns a text.
Where the evidence does not decide, the text names both possibilities. Records may come from a foreign file.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    Record = Mapping[str, Any]


GIB = 2.0**30
FRAGMENTED_BYTES = 2 * 2**30
"""Reserved but unallocated memory from which on fragmentation is named, where the failed allocation asked for less."""

BAD_NODE = "llmlaunch keeps new jobs away from the node; resume goes on without it. Tell your administrators."
_WAYS_TO_LOAD = (
    "Load it with the split it was saved with; or save it in a format that any split loads "
    "(Megatron: --dist-ckpt-optim-fully-reshardable; DeepSpeed: ds_to_universal.py, then load_universal); or go on "
    "with the weights alone (Megatron: --no-load-optim --no-load-rng; DeepSpeed: load_optimizer_states=False)."
)
CHECKPOINT_FORMAT = (
    "This Megatron core no longer writes the distributed optimizer as fully_sharded_model_space: save with "
    "--dist-ckpt-optim-fully-reshardable (Megatron-Bridge: checkpoint.dist_ckpt_optim_fully_reshardable=true), with "
    "core's default dp_reshardable, or with the version that wrote the earlier checkpoints."
)
_UNLOADED_CHECKPOINT = (
    "The message does not say why. Either the job differs from the one that saved it (another split, optimizer, model "
    "or version), or a file is damaged. Nothing was changed: compare the two recipes first; resume --from-older goes "
    "on from an older checkpoint."
)


def _number(record: Record, name: str) -> float | None:
    numbers = record.get("numbers")
    value = numbers.get(name) if isinstance(numbers, dict) else None
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _fact(record: Record, name: str) -> str:
    facts = record.get("facts")
    value = facts.get(name) if isinstance(facts, dict) else None
    return value if isinstance(value, str) else ""


def _gib(size: float) -> str:
    return f"{size / GIB:.1f} GiB"


def out_of_memory(record: Record) -> str:
    unallocated, asked = _number(record, "unallocated_bytes"), _number(record, "asked_bytes")
    reserved, allocated = _number(record, "reserved_bytes"), _number(record, "allocated_bytes")
    if unallocated is None and reserved is not None and allocated is not None:
        unallocated = reserved - allocated  # torch before 2.1 does not print it
    within = (unallocated or 0.0) + (_number(record, "free_bytes") or 0.0)
    if unallocated is not None and unallocated >= FRAGMENTED_BYTES and (asked is None or asked <= within):
        return (
            f"{_gib(unallocated)} were reserved but not in use, so the memory is fragmented: set "
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True (environment in a recipe; PYTORCH_ALLOC_CONF since torch "
            "2.9). If it returns, plan with more room."
        )
    if _number(record, "allowed_bytes") is not None:
        return "The program has set itself a limit (set_per_process_memory_fraction): raise it, or plan with less."
    return (
        "This layout needs more than the GPU has: split the model further, recompute more, or take a smaller "
        "micro-batch; llmlaunch plan shows the layouts that have room. With on_oom: fallback the job would go on with "
        "the next layout by itself."
    )


_ONE_GPU_EACH = (
    "Each rank must choose its own GPU by LOCAL_RANK (torch.cuda.set_device), CUDA_VISIBLE_DEVICES must not show all "
    "ranks the same one, and a node must not have more ranks than GPUs."
)


def busy_gpu(record: Record) -> str:
    others, process = _number(record, "other_processes_bytes"), _number(record, "other_process_id")
    held = f" held {_gib(others)} of the GPU" if others is not None else " held memory of the GPU"
    if process is None:
        return (
            f"Other processes{held}: the GPU was not free. Look for what an earlier job left behind (nvidia-smi on the "
            "node), or for a job that shares the node without asking SLURM for its GPUs; then resume. If they are "
            f"ranks of this job, the layout is not at fault either: {_ONE_GPU_EACH[:1].lower()}{_ONE_GPU_EACH[1:]}"
        )
    return (
        f"Process {process:.0f}{held}, and it is no rank of this job: the GPU was not free. Look for what an earlier "
        "job left behind (nvidia-smi on the node), or for a job that shares the node without asking SLURM for its "
        "GPUs; then resume. The layout is not at fault."
    )


def shared_gpu(record: Record) -> str:
    process, one, other = _number(record, "other_process_id"), _fact(record, "one"), _fact(record, "other")
    if one and other:
        return f"Ranks {one} and {other} have the same GPU. {_ONE_GPU_EACH}"
    who = f"Process {process:.0f}" if process is not None else "Another process"
    return f"{who} on this GPU is another rank of the same job. {_ONE_GPU_EACH}"


def host_memory(record: Record) -> str:
    peak, limit = _number(record, "peak_bytes"), _number(record, "limit_bytes")
    known = f"The job held {_gib(peak)} of {_gib(limit)} of main memory. " if peak and limit and peak <= limit else ""
    return (
        f"{known}Main memory was full: ask SLURM for more (--mem), use fewer data workers, or offload less "
        "(layout.offload_optimizer)."
    )


def killed(record: Record) -> str:
    return (
        "Nothing says who killed it. Mostly it is the kernel, for want of main memory: ask SLURM for more (--mem), use "
        "fewer data workers, or offload less; dmesg or sacct -o MaxRSS may show it. Otherwise a person or a script did."
    )


def shared_memory(record: Record) -> str:
    size = _number(record, "shm_bytes")
    holds = "/dev/shm was full" if size is None else f"/dev/shm holds {_gib(size)} there"
    return (
        f"{holds}: use fewer DataLoader workers, or a larger /dev/shm (the node's tmpfs, a container's --shm-size or "
        "--ipc=host)."
    )


def _shortened(name: str) -> str:
    """The end of a tensor's long name, which fits on a line; the message quoted beside it has all of it."""
    return name if len(name) <= 60 else f"...{name[-57:]}"


def mismatched_checkpoint(record: Record) -> str:
    theirs, ours, of = (_fact(record, name) for name in ("theirs", "ours", "of"))
    what = f"{_shortened(of)}: " if of else ""
    sides = f"The checkpoint has {what}{theirs}, this job has {ours}. " if theirs and ours else ""
    missing = _fact(record, "missing")
    sides = f"The checkpoint holds no {missing}, which this job looks for. " if missing else sides
    return f"{sides}Nothing is damaged, and no file was touched. {_ways_to_load(record)}"


def _ways_to_load(record: Record) -> str:
    if _fact(record, "ours") == "[0]":
        return (
            "[0] is how ZeRO 3 shows a parameter that is split over the ranks: load the weights with from_pretrained, "
            "or within deepspeed.zero.GatheredParameters."
        )
    if re.search(r"(?<!position_)embed|lm_head|output_layer", _fact(record, "of")):
        return (
            "The vocabulary is padded to another size: use the same tensor parallelism and "
            "--make-vocab-size-divisible-by as the job that saved it, or resize the embedding before loading."
        )
    if _fact(record, "scheduler"):
        return (
            "Give the job the schedule that the checkpoint was saved with, or say which counts: the job's "
            "(--override-opt-param-scheduler) or the checkpoint's (--use-checkpoint-opt-param-scheduler)."
        )
    if _fact(record, "argument"):
        return "Correct the recipe or script, or start from step 0 in another folder (training.checkpoint_path)."
    return _WAYS_TO_LOAD


def unloaded_checkpoint(record: Record) -> str:
    line = str(record.get("line"))
    if "Weights only load failed" in line:
        known = "can still be loaded" in line
        return (
            f"{'Nothing is damaged: since' if known else 'Since'} torch 2.6 torch.load only reads tensors by default. "
            "This file also holds other Python objects, and the lines below the message name them. If you trust the "
            "file, set TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=1 (environment in a recipe), or upgrade the library that "
            "loads it."
            f"{'' if known else ' If they say Unsupported operand, it is damaged: resume --from-older.'}"
        )
    if "Can't find a valid checkpoint" in line:
        return (
            "The folder holds no state of the optimizer that this job can load: it was saved with the weights alone "
            "(save_only_model), or by a job without DeepSpeed, or the save was cut short. Nothing was changed: resume "
            "from another folder, or start anew from these weights."
        )
    return _UNLOADED_CHECKPOINT


def illegal_access(record: Record) -> str:
    if _fact(record, "phase") == "offload":
        return (
            "It happened while the optimizer was offloaded to the host: try without it (layout.offload_optimizer: off, "
            "no --optimizer-cpu-offload), or with another version of the framework."
        )
    return (
        "Mostly a kernel has a bug: CUDA_LAUNCH_BLOCKING=1 shows which, and compute-sanitizer where. If it only "
        "happens on one node, suspect its GPU: look for Xids (dmesg) and set preflight: true."
    )


def refused_step(record: Record) -> str:
    if re.search(r"[Ll]aunch .{0,400}failed|launch failed", str(record.get("line"))):
        return (
            "SLURM did not start the program on a node, which is no fault of the job: start it again, without that "
            "node (--exclude) if the message names one. If it returns, tell your administrators."
        )
    if "memory" in str(record.get("line")).lower():
        return (
            "The step asks for more main memory than the job was given: ask for more with --mem (or --mem-per-gpu), or "
            "give srun --mem=0, which is all that the job has."
        )
    return (
        "The step asks for what the job was not given: compare srun's options (--mem, --cpus-per-task, --gpus) with "
        "those of sbatch; SLURM_* variables of an outer job also count."
    )


def rendezvous(record: Record) -> str:
    joined, expected, host = (_fact(record, name) for name in ("joined", "expected", "host"))
    count = f"{joined} of {expected} came. " if joined and expected else ""
    if host in ("localhost", "127.0.0.1", "::1"):
        return (
            f"{count}The ranks looked for node rank 0 on {host}, which on any other node is that node itself: "
            "MASTER_ADDR must be a name of the first node. Trying again cannot help."
        )
    if "gloo" in str(record.get("line")).lower():
        here = f", here {_fact(record, 'gloo')}" if _fact(record, "gloo") else ""
        return (
            f"Gloo connects the ranks by the address of each host's name{here}, which other nodes must be able to "
            "reach: set GLOO_SOCKET_IFNAME (and NCCL_SOCKET_IFNAME) to the interface that "
            "connects the nodes (ip -br addr), on all of them, and let no firewall close the ports between them."
        )
    where = f"{host} is" if host else "MASTER_ADDR is"
    return (
        f"{count}Either a node did not start (look in the other nodes' logs for an earlier error), or {where} not "
        "reachable from it: a wrong address or interface, a firewall, or another MASTER_PORT. --nnodes must be the "
        "number of launchers. If all nodes started, trying again cannot help."
    )


def network(record: Record) -> str:
    again = "The network between ranks failed, which is often over soon: resume; if it returns, "
    if re.search(r"Connect to |connect\w* returned|No route to host", str(record.get("line"))):
        return (
            f"{again}the ranks use an address that other nodes cannot reach: set NCCL_SOCKET_IFNAME to the interface "
            "that connects the nodes (ip -br addr), and let no firewall close the ports between them."
        )
    return f"{again}set preflight: true."


_OPERATIONS = {"ALLGATHER": "an all-gather", "ALLREDUCE": "an all-reduce", "BROADCAST": "a broadcast"}
_DOING = {
    "saving": "The log's last word before it is about saving a checkpoint, so the hang began in a save: look at that "
    "file system, and whether all ranks take part (a save by rank 0 alone that gathers from the others hangs).",
    "loading": "The log's last word before it is about loading: reading may only be slow. Raise the limit "
    "(watchdog.start in a recipe, the process group's timeout in a script), or read from a faster file system.",
    "tokenizing": "The log's last word before it is about preparing data, while other ranks wait: prepare the data "
    "before the job, or raise the limit (watchdog.start in a recipe, the process group's timeout in a script).",
    "first step": "No step was finished.",
}


def hung(record: Record) -> str:
    doing, operation = _fact(record, "doing"), _fact(record, "operation")
    waits = next((words for name, words in _OPERATIONS.items() if name in operation.upper()), "")
    parts = [_DOING.get(doing, "")]
    if waits:
        parts.append(f"Ranks wait in {waits}.")
    if doing == "first step" and waits == "an all-gather":
        parts.append(
            "With ZeRO 3 and a mixture of experts, ranks whose tokens go to different experts gather different "
            "weights: make the expert layer a leaf module (deepspeed.utils.set_z3_leaf_modules)."
        )
    known = " ".join(part for part in parts if part)
    if doing in ("saving", "loading", "tokenizing"):
        return known
    blame = (
        "Their stacks are in the logs" if record.get("source") == "watchdog" else "py-spy dump shows where a rank is"
    )
    slow = "If it was only slow, raise the limit (watchdog in a recipe, the process group's timeout in a script)."
    return f"{known} {blame}. {slow}".strip()


def weights_and_biases(record: Record) -> str:
    if _fact(record, "login"):
        return (
            "Weights & Biases has no key here: run wandb login where you submit, or set WANDB_API_KEY there; or set "
            "WANDB_MODE=offline (environment.WANDB_MODE in a recipe)."
        )
    return (
        "The nodes do not reach Weights & Biases: set WANDB_MODE=offline (environment.WANDB_MODE in a recipe), and "
        "send the run later with wandb sync."
    )


_OF_EXCEPTIONS = (
    (
        r".*(GatedRepoError|RepositoryNotFoundError|40[13] Client Error|\bgated repo|not a valid model identifier)",
        "The model or dataset is gated, private or misspelt: set HF_TOKEN of an account that may read it where you "
        "submit, or name a copy by its path.",
    ),
    (
        r".*invalid device ordinal",
        "A rank asks for a GPU that the node does not have: start as many ranks on a node as it has GPUs, and ask "
        "SLURM for all of them (--gpus-per-node).",
    ),
    (
        r".*DataLoader worker .*exited unexpectedly",
        "A data worker ended without a word: mostly it was killed for want of main memory (ask for more with --mem, or "
        "use fewer workers); otherwise its own error is further up in the log, or appears with num_workers=0.",
    ),
    (
        r"(ModuleNotFoundError|ImportError): ",
        "The nodes' Python lacks this module, or has another version of it: look at which environment the job "
        "activates (python and setup in a recipe), and at PYTHONPATH.",
    ),
    (
        r".*(-7\b|SIGBUS|signal 7\b)",
        "SIGBUS mostly means that /dev/shm was full: use fewer DataLoader workers, or a larger /dev/shm (a container's "
        "--shm-size or --ipc=host). Otherwise a file that the program had mapped was cut short, or its disk failed.",
    ),
    (
        r".*(-11\b|SIGSEGV|signal 11\b)",
        "SIGSEGV: a compiled library crashed, mostly because libraries do not fit together (torch, NCCL, flash-attn, "
        "Transformer Engine). PYTHONFAULTHANDLER=1 shows where.",
    ),
    (
        r".*CUBLAS_STATUS_NOT_INITIALIZED",
        "Mostly the GPU had no memory left for cuBLAS: a smaller micro-batch or another layout makes room. Otherwise "
        "an earlier kernel failed: CUDA_LAUNCH_BLOCKING=1 shows which.",
    ),
    (
        r".*environment variable (MASTER_ADDR|MASTER_PORT|RANK|WORLD_SIZE) expected",
        "The program was not started by a launcher that tells each rank its place: start it with torchrun, or set "
        "RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT from SLURM's variables.",
    ),
    (
        r".*Message truncated : received",
        "The ranks run different versions of NCCL, or another job's ranks came to the same port: use the same "
        "environment on all nodes.",
    ),
    (
        r"\s*Resource \S+ not found",
        "NLTK's data is not on the node: download it where there is a network into a folder that all nodes share, and "
        "set NLTK_DATA to it.",
    ),
    (
        r".*(CUDAMismatchException|MissingCUDAException|Failed to find C compiler)",
        "A library compiles a kernel while it runs, and does not find the compiler for it on the node: load the module "
        "of gcc, and that of the CUDA version that torch was built with (CUDA_HOME).",
    ),
    (
        r"(FileNotFoundError|NotADirectoryError): "
        r"|.*(Incorrect path_or_model_id|HFValidationError: Repo id must|cannot be found at the path prefix)",
        "The path is not there on the node: folders of a login node or a node's own disk are not everywhere. Name one "
        "that all nodes share.",
    ),
    (r"PermissionError: ", "The job's user may not use that path: look at its owner and mode on the node."),
    (
        r".*Expected all tensors to be on the same device",
        "The program mixes devices: mostly a tensor was made without the rank's device.",
    ),
)


def crash(record: Record) -> str:
    line = str(record.get("line"))
    advice = next((text for expression, text in _OF_EXCEPTIONS if re.match(expression, line)), "")
    return advice or "Correct what the trainer's message names, then start it again; the logs have all of it."
