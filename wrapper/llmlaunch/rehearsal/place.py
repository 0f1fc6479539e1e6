"""Where ranks are rehearsed: on one GPU, here or under SLURM, or traced; and what to do where nothing is at hand."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass

from llmlaunch.errors import UserError
from llmlaunch.launchers.choose import LauncherChoice, choose
from llmlaunch.launchers.local_gpus import gpu_at_hand
from llmlaunch.recipe.types import Recipe
from llmlaunch.rehearsal.environment import TraceEnvironment, find_trace_environment, how_to_get_one

__all__ = ["Place", "chosen_place"]

GPU, TRACE = "gpu", "trace"
MEGATRON = "megatron-lm"


@dataclass(frozen=True)
class Place:
    """Exactly one of both: the environment that traces, or the launcher of one process on a GPU. `why` is a sentence
    for the person."""

    environment: TraceEnvironment | None
    launcher: LauncherChoice | None
    why: str


def chosen_place(recipe: Recipe, place: str, say: Callable[[str], None]) -> Place:
    """`place` is "gpu", "trace" or "auto": a GPU of this machine, else a trace. A GPU is waited for under SLURM only
    where a person asks for one. `say` is told what a launcher waits for.

    Raises:
        UserError: there is nothing to rehearse on, with every way to have something; or the job has no trace.
    """
    if place == TRACE:
        return _traced(recipe)
    if recipe.cluster.accelerator.kind == "cpu":
        raise UserError(f"{recipe.path}: trains on CPUs: there is no GPU's memory to rehearse; submit runs it here")
    here = _here(recipe, say)
    if here is not None:
        return here
    if place == GPU:
        return _under_slurm(recipe, say)
    return _traced(recipe)


def _here(recipe: Recipe, say: Callable[[str], None]) -> Place | None:
    gpu = gpu_at_hand(recipe.cluster.accelerator)
    return None if gpu is None else _launched(choose(True, say), f"On a GPU of this machine: {gpu.name}.")


def _under_slurm(recipe: Recipe, say: Callable[[str], None]) -> Place:
    if shutil.which("sbatch") is None:
        raise UserError(_nothing_at_hand(recipe))
    return _launched(choose(False, say), "On one GPU of a node that SLURM gives.")


def _launched(choice: LauncherChoice, why: str) -> Place:
    return Place(None, LauncherChoice(choice.launcher, why), why)


def _traced(recipe: Recipe) -> Place:
    _refuse_untraceable(recipe)
    environment = find_trace_environment()
    if environment is None:
        raise UserError(_nothing_at_hand(recipe))
    return Place(environment, None, f"Traced without a GPU, with {environment.folder}.")


def _refuse_untraceable(recipe: Recipe) -> None:
    """Raises UserError for a job that has no trace, with what would do instead."""
    if recipe.backend.name != MEGATRON:
        raise UserError(
            f"{recipe.path}: a trace runs Megatron-LM alone. Under fake tensors DeepSpeed's engine does not start with "
            "ZeRO 3, and shows no difference between ZeRO 1 and 2, so that it would say nothing true of gradients. "
            f"--on gpu runs it on one {recipe.cluster.accelerator.name}, on a machine that has one or under SLURM"
        )


def _nothing_at_hand(recipe: Recipe) -> str:
    trace = (
        f"Without a GPU, its ranks are traced in an environment of their own: {how_to_get_one()}. "
        if recipe.backend.name == MEGATRON
        else ""
    )
    return (
        f"{recipe.path}: nothing here to rehearse on. {trace}With one: on a machine that has a "
        f"{recipe.cluster.accelerator.name} or its like, or --on gpu where there is SLURM (sbatch on PATH)"
    )
