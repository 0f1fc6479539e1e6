"""Number formats: of the computation, of linear layers in fp8 and fp4, and of what the optimizer keeps."""

from __future__ import annotations

from collections.abc import Sequence

from llmlaunch.frameworks.megatron.flags.row import MODEL, PARSED, Field, Flag, PlannedJob, Space, chosen, flag, within

ADAM, DDP = "optimizer", "ddp"  # sections of Bridge
FP8, FP4, OPTIMIZER = "training.fp8", "training.fp4", "training.optimizer"
FP8_RECIPES = ("delayed", "tensorwise", "blockwise", "mxfp8")
# Gradients need the range of e5m2 where one scale is for a whole tensor; with a scale for each block e4m3 has enough of
# it (transformer_engine/common/recipe/__init__.py, the recipes' defaults, 2.20).
FORMATS = {"delayed": "hybrid", "tensorwise": "hybrid", "blockwise": "e4m3", "mxfp8": "e4m3"}
REMEMBERED_STEPS = 1024
# Loss scaling skips a step that is not finite, so that nothing looks for one.
UNCHECKED: tuple[Field, ...] = (
    ("rerun_state_machine.check_for_nan_in_loss", False),
    (f"{DDP}.check_for_nan_in_grad", False),
)


def _computing(name: str) -> tuple[Field, ...]:
    """Return the fields of Bridge that say what is computed in."""
    return (
        (f"{MODEL}.{name}", True),
        (f"{MODEL}.params_dtype", name),
        (f"{MODEL}.pipeline_dtype", name),
        (f"{MODEL}.autocast_dtype", name),
        (f"{ADAM}.{name}", True),
        (f"{ADAM}.params_dtype", name),
    )


def _precision(space: Space) -> str:
    return next((name for name in ("bf16", "fp16") if space.get(name)), "fp32")


PRECISION_ROWS: tuple[Flag, ...] = (
    flag(
        "--bf16",
        "training.precision",
        _computing("bf16"),
        write=lambda job: job.recipe.workload.precision == "bf16",
        read=_precision,
        decides=True,
    ),
    flag(
        "--fp16",
        "training.precision",
        (*_computing("fp16"), *UNCHECKED),
        write=lambda job: job.recipe.workload.precision == "fp16",
        reads={},
        decides=True,
    ),
)


def _narrow(job: PlannedJob) -> str | None:
    return job.training.numbers.narrow


def _in_fp4(job: PlannedJob) -> bool:
    return _narrow(job) == "nvfp4"


def _in_fp8(job: PlannedJob) -> bool:
    return _narrow(job) is not None and not _in_fp4(job)


def _delayed(job: PlannedJob) -> bool:
    return _narrow(job) == "delayed"


def _narrow_parameters(job: PlannedJob) -> bool:
    return _in_fp8(job) and job.training.numbers.narrow_parameters


def _read_fp8(space: Space) -> object:
    recipe = space.get("fp8_recipe") or "delayed"
    return recipe if space.get("fp8") and space.get("bf16") and recipe in FP8_RECIPES else None


def _another_fp8(values: Sequence[str]) -> bool:
    return "custom" in values


OF_MANY = "a scale from the largest value of many steps; its default is the last step alone"
SHARED = "gathered in bf16 into the gradients' buffer; one of their own would take 2 bytes a parameter more"

NARROW_ROWS: tuple[Flag, ...] = (
    chosen("--fp4-format", "e2m1", ((f"{MODEL}.fp4", PARSED),), keys=FP4, when=_in_fp4),
    flag(
        "--fp4-recipe",
        FP4,
        write=_narrow,
        when=_in_fp4,
        read=lambda space: "nvfp4" if space.get("fp4") and space.get("bf16") else None,
        unsaid=lambda values: not {*values} <= {"nvfp4"},
    ),
    chosen(
        "--fp8-format",
        lambda job: FORMATS[str(_narrow(job))],
        ((f"{MODEL}.fp8", PARSED),),
        keys=FP8,
        when=_in_fp8,
        decides=FP8,
        unread="training.fp8 names the recipe, which decides the format",
        companion="fp8_recipe",
    ),
    flag(
        "--fp8-recipe",
        FP8,
        ((f"{MODEL}.fp8_recipe", PARSED), (f"{ADAM}.fp8_recipe", PARSED)),
        write=_narrow,
        when=_in_fp8,
        read=_read_fp8,
        unsaid=_another_fp8,
    ),
    chosen(
        "--fp8-amax-history-len",
        REMEMBERED_STEPS,
        keys=FP8,
        why=OF_MANY,
        when=_delayed,
        added="a scale from the largest value of many steps",
        subject="scales of fp8",
    ),
    chosen(
        "--fp8-amax-compute-algo",
        "max",
        keys=FP8,
        why=OF_MANY,
        when=_delayed,
        added="a scale from the largest value of many steps",
        subject="scales of fp8",
    ),
    flag(
        "--fp8-param-gather",
        "training.fp8_parameters",
        ((f"{MODEL}.fp8_param", True), (f"{DDP}.fp8_param_gather", True)),
        write=_narrow_parameters,
        read=lambda space: True if _read_fp8(space) and space.get("fp8_param_gather") else None,
    ),
    chosen(  # Megatron-FSDP switches it off
        "--reuse-grad-buf-for-mxfp8-param-ag",
        bridge=(
            (f"{ADAM}.reuse_grad_buf_for_mxfp8_param_ag", True),
            (f"{DDP}.reuse_grad_buf_for_mxfp8_param_ag", True),
        ),
        keys="training.fp8_parameters",
        why=SHARED,
        when=lambda job: _narrow_parameters(job) and _narrow(job) == "mxfp8" and job.layout.zero_stage == 1,
        added="spares a buffer of its own",
    ),
)


def _has_formats(job: PlannedJob) -> bool:
    return not job.training.muon and job.training.numbers.optimizer is not None


def _is_muon(space: Space) -> bool:
    return space.get("optimizer") in ("muon", "dist_muon")


def _precise(space: Space) -> bool:
    precise = bool(space.get("use_precision_aware_optimizer"))
    return precise and not space.get("optimizer_cpu_offload") and not _is_muon(space)


def _format_row(name: str, key: str, dest: str) -> Flag:
    return flag(
        name,
        f"{OPTIMIZER}.{key}",
        ADAM,
        write=lambda job: getattr(job.training.numbers.optimizer, key),
        when=_has_formats,
        read=lambda space: space.get(dest) if space.get(dest) not in (None, "fp32") else None,
        subject="formats of the optimizer",
    )


OPTIMIZER_ROWS: tuple[Flag, ...] = (
    flag(
        "--optimizer",
        OPTIMIZER,
        ADAM,
        write=lambda job: "muon" if job.training.muon else None,
        read=lambda space: "muon" if _is_muon(space) else None,
        subject="optimizer",
    ),
    flag(
        "--use-precision-aware-optimizer",
        OPTIMIZER,
        ((f"{ADAM}.use_precision_aware_optimizer", True), (f"{DDP}.megatron_fsdp_use_decoupled_grad", True)),
        write=_has_formats,
        read=lambda space: {} if _precise(space) else None,
        subject="formats of the optimizer",
    ),
    *within(
        _precise,
        _format_row("--main-params-dtype", "main_parameters", "main_params_dtype"),
        _format_row("--exp-avg-dtype", "first_moment", "exp_avg_dtype"),
        _format_row("--exp-avg-sq-dtype", "second_moment", "exp_avg_sq_dtype"),
    ),
    chosen(
        "--main-grads-dtype",
        "bf16",
        ADAM,
        keys="training.gradient_dtype",
        when=lambda job: _has_formats(job) and job.training.gradient_dtype == "bf16",
        subject="formats of the optimizer",
    ),
)

# Megatron's main gradients are its gradient buffer: their format is that of `training.gradient_dtype`.
NUMBER_FLAGS: tuple[Flag, ...] = (*PRECISION_ROWS, *NARROW_ROWS, *OPTIMIZER_ROWS)
