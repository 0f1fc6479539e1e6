"""What a person can do about each kind of cause: the nearest change, in a sentence or two."""

from __future__ import annotations

__all__ = ["ADVICE", "advice"]

_HARDWARE = "llmlaunch keeps new jobs away from the node; resume goes on without it. Tell your administrators."

# For each of `causes.signs.KINDS`.
ADVICE = {
    "gpu_lost": _HARDWARE,
    "ecc": _HARDWARE,
    "xid": _HARDWARE,
    "nvlink": _HARDWARE,
    "driver": _HARDWARE,
    "silent_corruption": "The GPU is suspected, or new jobs avoid its node; resume goes on without it. Have it tested.",
    "preflight": _HARDWARE,
    "oom": "The layout needs more than was predicted, and the store knows it now: plan anew for one with more room. "
    "With on_oom: fallback the job would go on with the next layout by itself.",
    "host_oom": "Main memory was full: offload less (layout.offload_optimizer), or use fewer data workers.",
    "shm_full": "/dev/shm was full: give the container more of it, or use fewer data workers.",
    "disk_full": "Make room (training.keep_checkpoints removes old checkpoints), or point training.checkpoint_path at "
    "another file system; then resume.",
    "file_system": "A file system failed on the node, which new jobs avoid; resume goes on elsewhere.",
    "checkpoint": "The last checkpoint cannot be used; resume --from-older goes on from an older one.",
    "bad_loss": "Look at the steps before it: learning rate, warm-up, data, fp16. on_bad_loss: rollback goes back to a "
    "checkpoint from before and leaves out the batches around the step.",
    "open_files": "The nodes allow too few open files (ulimit -Hn): ask for more, or use fewer data workers.",
    "node_fail": _HARDWARE,
    "bad_arguments": "The framework refuses an argument: mend it in the recipe (explain-args says which line it "
    "follows from), and submit the recipe again.",
    "image": "Mend container.image (REGISTRY#NAME:TAG), your credentials for enroot, or the nodes' room for images; or "
    "name a .sqsh file that enroot import wrote. Then submit the recipe again.",
    "container": "Mend container.image or container.mounts in the recipe, and submit it again.",
    "container_busy": "It may start next time: resume.",
    "port_taken": "Another program used the port; resume takes another one.",
    "name_resolution": "A host name was not found, which is often over soon: resume.",
    "hub": "Compute nodes often have no network: name the tokenizer and the data by their paths; or resume later.",
    "nccl": "The network between ranks failed, which is often over soon: resume; if it returns, set preflight: true.",
    "rerun": "Megatron-LM wants the step on another GPU: resume on other nodes.",
    "unexpected_result": "Two GPUs agree on the result: look at the data and the program at that step.",
    "crash": "The trainer's own message is in the logs: mend what it names, then resume.",
    "preempted": "Nothing is wrong with the job: resume.",
    "time_limit": "Time was up: resume, with more of it after `--` (--time=...), or shorten training.steps.",
    "cancelled": "Somebody cancelled it: resume when you want it back.",
    "hung": "No rank made a step any more; their stacks are in the logs. Was it only slow: raise watchdog's limits.",
}


def advice(kind: object) -> str:
    """Return what to do about a cause of this kind; empty where nothing is known about it."""
    return ADVICE.get(str(kind), "")
