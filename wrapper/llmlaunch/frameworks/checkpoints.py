"""The checkpoints of each backend: the file that names the last one, their size, the time to write one, and how long
before the end of a job the trainers must be asked to save."""

from __future__ import annotations

from math import ceil

from llmlaunch.documents.slurm_options import limit_seconds
from llmlaunch.documents.yaml_strict import KeyPath
from llmlaunch.errors import UserError
from llmlaunch.layers.parameters import count_parameters
from llmlaunch.layout import Layout
from llmlaunch.recipe.types import Recipe
from llmlaunch.timing.network import host_link_bytes_per_second
from llmlaunch.timing.step import evaluation_seconds
from llmlaunch.units import GB

KEY: KeyPath = ("training", "checkpoint_path")
NEW_FOLDER = "name a new folder to begin at step 0"

# Files in the checkpoint folder that hold the last step saved completely; both frameworks write them last.
MEGATRON_TRACKER = "latest_checkpointed_iteration.txt"
TRACKERS = {"megatron-lm": MEGATRON_TRACKER, "deepspeed": "latest", "megatron-bridge": MEGATRON_TRACKER}

# In the checkpoint folder (_NON_PERSISTENT_CKPT_SUBDIR, megatron/training/checkpointing.py, core 0.19).
NON_PERSISTENT_FOLDER = "non_persistent"

MEGATRON_SKIPS = "--iterations-to-skip"
SKIP_FLAGS = {"megatron-lm": MEGATRON_SKIPS, "deepspeed": "--skip-steps", "megatron-bridge": MEGATRON_SKIPS}

# The compute copy, and the optimizer's fp32 weights and two moments.
STATE_BYTES = 12
COMPUTE_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}

# BLOOM-176B's 2.3 TB were written by 48 nodes in 40 s: 57 GB/s in all, 1.2 GB/s a node, on a file system called very
# fast, with five times slower as "not uncommon" (Bekman, Machine Learning Engineering, training/fault-tolerance).
# A single node is seldom the bottleneck.
FILE_SYSTEM_BYTES_PER_SECOND = 2.3e12 / 40 / 5
NODE_BYTES_PER_SECOND = 1e9
# A fifth of what those 48 nodes had each. Llama 3's 2,048 nodes had ten times as much, 2 TB/s (Dubey et al. 2024,
# section 3.3.1).
FILE_SYSTEM_BYTES_PER_SECOND_A_NODE = FILE_SYSTEM_BYTES_PER_SECOND / 48
QUICKEST_SAVE_SECONDS = 5.0
# Noticing the end, containers, imports, process groups, data indexes, the first steps. Not measured.
START_SECONDS = 600.0
# All ranks agree on who writes what, and the worker starts on its copy. Not measured.
ASYNC_PAUSE_SECONDS = 2.0
LEAST_SAVE_SECONDS = 120.0  # metadata servers, and a file system that others use at the same time

# Every 30 s, slurmctld looks for jobs whose end is at most the lead plus 30 s away. The signal therefore comes up to
# 60 s early, and late only if slurmctld itself is late (PERIODIC_TIMEOUT, slurmctld/job_mgr.c send_job_warn_signal).
# The first constant allows for one missed look, the second for the signal's way to the trainers and for their end.
LATE_SECONDS = 30
PASSING_SECONDS = 30
UNKNOWN_STEP_SECONDS = 60.0
PLANNED_STEPS = 2  # a step may have just begun, and may take twice the planned time
MOST_LEAD_SECONDS = 65535  # sbatch --signal


def tracker(recipe: Recipe) -> str:
    """Return the name of the file in the checkpoint folder that holds the last step saved, as its last number. A
    DeepSpeed script of the user's own writes it when it calls the engine's save_checkpoint."""
    return TRACKERS[recipe.backend.name]


def skip_flag(recipe: Recipe) -> str:
    """Return the trainer's flag for steps whose batches are skipped, or the empty text if the recipe asks for no
    rollback. Megatron-LM counts these steps as done but does not advance the learning rate schedule (training.py, core
    0.19)."""
    return SKIP_FLAGS[recipe.backend.name] if recipe.on_bad_loss.action == "rollback" else ""


def checkpoint_bytes(recipe: Recipe) -> int:
    """Return the bytes of one checkpoint, as if all parameters were trained: compute copy, main weights and two
    moments."""
    return count_parameters(recipe.model).total * (COMPUTE_BYTES[recipe.workload.precision] + _state_bytes(recipe))


def _state_bytes(recipe: Recipe) -> int:
    """Return the bytes of main weights and moments per parameter in a checkpoint. DeepSpeed writes them in bf16 if it
    keeps them in bf16. Megatron's precision-aware optimizer widens them to fp32 (FusedAdam.state_dict, Transformer
    Engine 2.20)."""
    formats = recipe.training.numbers.optimizer
    narrow = formats is not None and {formats.main_parameters, formats.first_moment, formats.second_moment} == {"bf16"}
    return STATE_BYTES // 2 if narrow else STATE_BYTES


def save_seconds(recipe: Recipe, layout: Layout) -> float:
    """Return the seconds that writing one checkpoint may take: `restart.save_seconds`, or else what its size needs on a
    slow file system."""
    if recipe.restart is not None and recipe.restart.save_seconds is not None:
        return recipe.restart.save_seconds
    by_all = checkpoint_bytes(recipe) / FILE_SYSTEM_BYTES_PER_SECOND
    by_one = _bytes_of_busiest_node(recipe, layout) / NODE_BYTES_PER_SECOND
    return max(by_all, by_one, LEAST_SAVE_SECONDS)


def expected_save_seconds(recipe: Recipe, layout: Layout) -> float:
    """Return the seconds that writing one checkpoint is expected to take: `restart.save_seconds`, or else what its size
    needs on the file system in the cluster profile, or on the usual one for a cluster of this size."""
    if recipe.restart is not None and recipe.restart.save_seconds is not None:
        return recipe.restart.save_seconds
    speed = recipe.cluster.site.checkpoint_gigabytes_per_second
    if speed is not None:
        return checkpoint_bytes(recipe) / (speed * GB)
    usual = max(FILE_SYSTEM_BYTES_PER_SECOND, recipe.nodes * FILE_SYSTEM_BYTES_PER_SECOND_A_NODE)
    by_one = _bytes_of_busiest_node(recipe, layout) / NODE_BYTES_PER_SECOND
    return max(checkpoint_bytes(recipe) / usual, by_one, QUICKEST_SAVE_SECONDS)


def pause_seconds(recipe: Recipe, layout: Layout) -> float:
    """Return the seconds for which a regular save delays the steps. It is the whole save, but with
    `training.async_save` only the copy of each rank's share to the host, which a separate process then writes."""
    write = expected_save_seconds(recipe, layout)
    if not recipe.training.async_save:
        return write
    share = checkpoint_bytes(recipe) / recipe.world_size
    return min(write, ASYNC_PAUSE_SECONDS + share / host_link_bytes_per_second(recipe.cluster))


def resume_seconds(recipe: Recipe, save_seconds: float) -> float:
    """Return the seconds from a stop to the first new step, without the time in the queue. The recipe or the profile
    may set them; otherwise they are the wait before a restart, the start of the trainers, and the time to read the
    checkpoint, which is about as long as writing it takes."""
    restart, site = recipe.restart, recipe.cluster.site
    if restart is not None and restart.resume_seconds is not None:
        return restart.resume_seconds
    if site.resume_seconds is not None:
        return site.resume_seconds
    return (0.0 if restart is None else restart.backoff_seconds) + START_SECONDS + save_seconds


def _bytes_of_busiest_node(recipe: Recipe, layout: Layout) -> float:
    """Return the bytes that the busiest node writes. Megatron's torch_dist and fsdp_dtensor spread everything over data
    parallel ranks (--ckpt-fully-parallel-save, its default). In DeepSpeed, rank 0 alone writes the compute copy for
    stages 0 to 2, and for stage 0 the optimizer as well (_save_checkpoint and _save_zero_checkpoint, runtime/engine.py,
    0.19.8)."""
    whole = checkpoint_bytes(recipe)
    alone = 0.0
    if recipe.training.checkpoint_format == "torch":  # by the first data parallel rank of each stage, at least
        return whole / max(min(layout.pipeline, recipe.nodes), 1)
    if recipe.backend.name == "deepspeed" and layout.zero_stage < 3:
        compute = COMPUTE_BYTES[recipe.workload.precision]
        alone = whole if layout.zero_stage == 0 else whole * compute / (compute + _state_bytes(recipe))
    return alone + (whole - alone) / max(recipe.nodes, 1)


def lead_seconds(recipe: Recipe, layout: Layout, step_seconds: float | None) -> int:
    """Return how many seconds before its end a job must be asked to save: the step in progress, an evaluation after it,
    the save, and the time that the signal takes.

    Megatron-LM may have to save twice: if it is asked during a regular save, it saves again after the next step
    (checkpoint_and_decide_exit, training.py, core 0.19). `step_seconds` is the planned step time, or None if unknown.

    Raises:
        UserError: sbatch cannot give a signal that early.
    """
    save = save_seconds(recipe, layout)
    saves = 2 if recipe.backend.on_megatron_core else 1
    step = UNKNOWN_STEP_SECONDS if step_seconds is None else step_seconds
    evaluated = recipe.training.evaluation
    evaluation = 0.0 if evaluated is None else evaluation_seconds(evaluated.iterations, step)
    lead = ceil(saves * save + PLANNED_STEPS * step + evaluation) + LATE_SECONDS + PASSING_SECONDS
    if lead > MOST_LEAD_SECONDS:
        raise UserError(
            f"{recipe.path}: restart: saving before the end of a job would have to begin {lead} s before it (a "
            f"checkpoint of {save:.0f} s, a step of {step:.0f} s), and sbatch --signal takes at most "
            f"{MOST_LEAD_SECONDS}; set restart.save_seconds to what a checkpoint really takes, or restart: none"
        )
    return lead


def refuse_short_time(recipe: Recipe, lead: int) -> None:
    """Raise UserError if the job's time limit is less than twice the time needed to save."""
    for option in ("time", "time-min"):
        limit = limit_seconds(recipe.slurm.get(option))
        if limit is not None and limit < 2 * lead:
            raise UserError(
                f"{recipe.path}: slurm.{option}: {limit} s are less than twice the {lead} s before its end at which "
                "the job is told to save; give it more time, set restart.save_seconds to what a checkpoint takes, or "
                "write restart: none"
            )
