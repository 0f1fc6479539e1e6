"""Where checkpoints go and come from, in Megatron-LM's words (core 0.19)."""

from __future__ import annotations

from llmlaunch.backends.argument import Argument, argument
from llmlaunch.backends.checkpoints import RESHARDING_FLAG, saved_by_parameter
from llmlaunch.backends.megatron.sharding import FIRST_STAGE
from llmlaunch.layout import Layout
from llmlaunch.recipe.types import Recipe

__all__ = ["checkpoint_arguments"]


def checkpoint_arguments(recipe: Recipe, layout: Layout) -> tuple[Argument, ...]:
    """The weights of the first step, and where checkpoints are written and read.

    --pretrained-checkpoint is read only where --load has no checkpoint yet (load_checkpoint, training/checkpointing.py,
    core 0.19), without optimizer and from step 0, so a job that comes back goes on from its own; without --load it is
    always read. Where it holds no checkpoint, Megatron ends with an error.

    Told by SIGTERM (--exit-signal's default), Megatron saves after the step and exits with 0; workers of its data
    loader then ignore that signal, too (training/datasets/data_samplers.py, core 0.16 on). Where --load is empty, it
    begins at step 0. Never --async-save (docs/backends.md says why)."""
    training = recipe.training
    begun = (*_start(training.start_from), *_format(recipe, layout))
    if training.checkpoint_path is None or training.save_interval is None:
        return begun
    place, key = training.checkpoint_path, "training.checkpoint_path"
    made = [
        argument("--save", place, of=key),
        argument("--load", place, of=key, why="a job that comes back goes on from its last checkpoint"),
        argument("--save-interval", training.save_interval, of="training.save_interval"),
        argument("--exit-signal-handler", of="restart", why="saves and ends when it is told to"),
    ]
    asked = RESHARDING_FLAG in recipe.backend.extra_args
    if layout.zero_stage == 1 and saved_by_parameter(recipe, layout) and not asked:
        made.append(argument(RESHARDING_FLAG, of="on_oom", why="another layout may have to load it"))
    return (*begun, *made)


def _format(recipe: Recipe, layout: Layout) -> tuple[Argument, ...]:
    """Megatron-FSDP takes no other format than its own, checkpoints or not."""
    if layout.zero_stage >= FIRST_STAGE:
        return (argument("--ckpt-format", "fsdp_dtensor", of="layout.zero_stage", why="Megatron-FSDP takes no other"),)
    if recipe.training.checkpoint_path is None:
        return ()
    said, dist = recipe.training.checkpoint_format, "loaded under another split, too"
    return (argument("--ckpt-format", said or "torch_dist", of="training.checkpoint_format", why="" if said else dist),)


def _start(weights: str | None) -> tuple[Argument, ...]:
    if weights is None:
        return ()
    first = "read by the first start alone: where --load has a checkpoint, that one wins"
    return (argument("--pretrained-checkpoint", weights, of="training.start_from", why=first),)
