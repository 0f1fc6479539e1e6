"""Number formats and the optimizer's schedule, as a recipe says them under `training:`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from llmlaunch.cluster.profile import Accelerator
from llmlaunch.documents.validate import StrictModel
from llmlaunch.documents.yaml_strict import KeyPath
from llmlaunch.number_formats import NumberFormats, OptimizerFormats
from llmlaunch.recipe.types import Recipe, Schedule
from llmlaunch.rundir.messages import counted

if TYPE_CHECKING:
    from llmlaunch.recipe.schema import RecipeFile, TrainingFile

__all__ = [
    "Betas",
    "Fp8",
    "OptimizerFile",
    "number_formats",
    "number_notes",
    "number_problems",
    "schedule",
    "schedule_problems",
]

Problem = tuple[KeyPath, str]

Fp8 = Literal["delayed", "tensorwise", "blockwise", "mxfp8"]
Moment = Literal["fp32", "bf16", "fp16", "fp8"]
Share = Annotated[float, Field(ge=0, lt=1)]
Betas = Annotated[list[Share], Field(min_length=2, max_length=2)]


class OptimizerFile(StrictModel):
    """Formats of what the optimizer keeps."""

    main_parameters: Literal["fp32", "fp16"] = Field(
        "fp32", description="Copy of the parameters it updates; fp32 takes 2 bytes beside bf16 parameters, the low ones"
    )
    first_moment: Moment = Field("fp32", description="Running mean of the gradients")
    second_moment: Moment = Field("fp32", description="Running mean of their squares")


def number_formats(file: TrainingFile) -> NumberFormats:
    said = file.optimizer
    kept = None if said is None else OptimizerFormats(said.main_parameters, said.first_moment, said.second_moment)
    return NumberFormats(file.fp8 or file.fp4, file.fp8_parameters, kept)


def schedule(file: TrainingFile) -> Schedule:
    first, second = file.adam_betas
    return Schedule(
        warmup_steps=file.warmup_steps,
        decay=file.learning_rate_decay,
        minimum_learning_rate=float(file.minimum_learning_rate),
        weight_decay=float(file.weight_decay),
        adam_betas=(float(first), float(second)),
        clipping=float(file.gradient_clipping),
    )


def schedule_problems(recipe: Recipe) -> Iterator[Problem]:
    """Every schedule that contradicts itself."""
    training, said = recipe.training, recipe.training.schedule
    decays = said.decay != "constant" and not (said.decay is None and recipe.backend.name == "deepspeed")
    least = ("training", "minimum_learning_rate")
    if said.warmup_steps is not None and said.warmup_steps >= max(training.steps, 1):
        yield (
            ("training", "warmup_steps"),
            f"{said.warmup_steps} of {counted(training.steps, 'step')}; leave at least one step after the warm-up",
        )
    if said.minimum_learning_rate > training.learning_rate:
        yield least, f"is above the learning rate, {training.learning_rate:g}; lower it"
    elif said.minimum_learning_rate and not decays:
        yield least, "belongs to a decay; write learning_rate_decay: cosine or linear, or remove it"


def number_notes(numbers: NumberFormats, device: Accelerator) -> tuple[str, ...]:
    """What the time of a step is worked out with where the device's own figure is not known."""
    if numbers.narrow is None:
        return ()
    if "fp8" not in device.flops_per_second:
        return (f"{device.name} has no fp8_tflops: narrow products are timed as those of bf16",)
    if numbers.narrow == "nvfp4" and "fp4" not in device.flops_per_second:
        return (f"the fp4 peak of {device.name} is not known: twice its fp8 peak",)
    return ()


def number_problems(file: RecipeFile) -> Iterator[Problem]:
    """Every number format that contradicts the rest of the recipe. What a device or a layout cannot do is for the
    backend's requirements and rules."""
    training = file.training
    backend = file.backend if isinstance(file.backend, str) else file.backend.name
    if backend != "megatron-lm":
        for key in ("fp8", "fp4", "optimizer"):
            if getattr(training, key) is not None:
                yield ("training", key), f"is a word of megatron-lm; remove it for backend: {backend}"
        if training.fp8_parameters:
            yield ("training", "fp8_parameters"), f"is a word of megatron-lm; remove it for backend: {backend}"
        return
    if training.fp8 is not None and training.fp4 is not None:
        yield ("training", "fp4"), "linear layers multiply in one format; remove fp4 or fp8"
    if training.fp8_parameters and training.fp8 is None:
        yield ("training", "fp8_parameters"), "belongs to fp8; write that too, or remove fp8_parameters"
    for key in ("fp8", "fp4"):
        if getattr(training, key) is not None and training.precision != "bf16":
            yield ("training", key), f"is for precision: bf16, which all else computes in, not {training.precision}"
    if training.optimizer is not None and training.precision == "fp32":
        yield (
            ("training", "optimizer"),
            "chooses formats beside half parameters; with precision: fp32 the parameters are their own main copy; "
            "remove it, or write precision: bf16",
        )
