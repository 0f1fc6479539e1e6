"""The rows of `zero_optimization` in ds_config.json (deepspeed/runtime/zero/config.py, offload_config.py, 0.19.8)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llmlaunch.frameworks.deepspeed.own_settings import (
    LIVE_PARAMETERS,
    PERSISTENT_PARAMETER,
    bucket_elements,
    live_parameters,
    sub_group_elements,
)
from llmlaunch.frameworks.deepspeed.setting_row import (
    ABSENT,
    ANY,
    COUNT,
    DEVICE,
    SHARE,
    STAGE,
    SWITCH,
    DsConfigKey,
    Form,
)
from llmlaunch.layout import Layout
from llmlaunch.recipe.types import Recipe

_BUCKET = "elements in one collective: a tenth of the model, 1 to 50 million; the estimate counts 3"
_LIVE = "no more than the model has; the estimate counts them"
_PINNED = "page-locked memory is what a GPU copies from without waiting"
# deepspeed/runtime/zero/config.py, 0.19.8: where a file does not say them, llmlaunch would write its own smaller ones.
_BUCKET_DEFAULT = (ABSENT, 500_000_000, 500_000_000, 500_000_000)
_PINNED_DEFAULT = (False,) * 4  # until 0.19.5
_ON_NVME = "belongs to NVMe, where no recipe puts states"


def _from_stage(stage: int, value: Callable[[Recipe, Layout], Any]) -> Callable[[Recipe, Layout], Any]:
    """Return a writer of a key that is rendered from a ZeRO stage on."""
    return lambda recipe, layout: value(recipe, layout) if layout.zero_stage >= stage else ABSENT


def _always(stage: int, value: Any) -> Callable[[Recipe, Layout], Any]:
    return _from_stage(stage, lambda recipe, layout: value)


def _of_recipe(stage: int, value: Callable[[Recipe], Any]) -> Callable[[Recipe, Layout], Any]:
    return _from_stage(stage, lambda recipe, layout: value(recipe))


def _pinned(recipe: Recipe) -> bool:
    return recipe.cluster.accelerator.kind == "gpu"


def _optimizer(value: Callable[[Recipe], Any]) -> Callable[[Recipe, Layout], Any]:
    """Return a writer of a key that is rendered where optimizer states leave the device."""
    return lambda recipe, layout: value(recipe) if recipe.techniques.offload_optimizer else ABSENT


def _parameters(value: Callable[[Recipe], Any]) -> Callable[[Recipe, Layout], Any]:
    return lambda recipe, layout: value(recipe) if recipe.techniques.offload_parameters else ABSENT


Writer = Callable[[Recipe, Layout], Any]


def _offloaded(section: str, of: str, write: Callable[[Callable[[Recipe], Any]], Writer]) -> tuple[DsConfigKey, ...]:
    """Return the keys that send a part of the model states to the host, which the recipe key `of` decides."""
    within = f"zero_optimization.{section}"
    return (
        DsConfigKey(f"{within}.device", DEVICE, of=of, write=write(lambda recipe: "cpu"), planned=True, since="0.3.15"),
        DsConfigKey(
            f"{within}.pin_memory",
            SWITCH,
            "how ZeRO orders its work",
            of="cluster",
            why=_PINNED,
            write=write(_pinned),
            unwritten=_PINNED_DEFAULT,
            since="0.3.15",
        ),
    )


def _on_nvme(section: str, **forms: Form) -> tuple[DsConfigKey, ...]:
    """Return the rows of a section of offloaded states that belong to NVMe."""
    names = {"nvme_path": ANY, "buffer_count": COUNT, **forms}
    within = f"zero_optimization.{section}"
    return tuple(
        DsConfigKey(f"{within}.{name}", form, left_out=_ON_NVME, since="0.3.15") for name, form in names.items()
    )


ZERO_SETTINGS = (
    DsConfigKey("zero_optimization.stage", STAGE, write="layout.zero_stage", planned=True),
    DsConfigKey("zero_optimization.cpu_offload", SWITCH, planned=True, reads="layout.offload_optimizer"),
    DsConfigKey(
        "zero_optimization.cpu_offload_params", SWITCH, reads="layout.offload_parameters", since="0.3.12", until="0.7.0"
    ),
    DsConfigKey(
        "zero_optimization.cpu_offload_param", SWITCH, planned=True, reads="layout.offload_parameters", since="0.7.0"
    ),
    DsConfigKey("zero_optimization.cpu_offload_use_pin_memory", SWITCH, since="0.3.12"),
    DsConfigKey(
        "zero_optimization.contiguous_gradients",
        SWITCH,
        "buckets, and what ZeRO 3 gathers",
        why="gradients do not fragment memory",
        write=_always(1, True),
    ),
    DsConfigKey(
        "zero_optimization.reduce_scatter",
        SWITCH,
        "how ZeRO orders its work",
        why="a rank is sent the gradients of its own shard alone",
        write=_always(1, True),
    ),
    DsConfigKey("zero_optimization.allgather_partitions", SWITCH, "how ZeRO orders its work"),
    DsConfigKey("zero_optimization.round_robin_gradients", SWITCH, "how ZeRO orders its work", since="0.4.4"),
    DsConfigKey("zero_optimization.stage3_gather_16bit_weights_on_model_save", SWITCH, "checkpoints", since="0.6.0"),
    DsConfigKey("zero_optimization.stage3_gather_fp16_weights_on_model_save", subject="checkpoints", since="0.3.14"),
    DsConfigKey(
        "zero_optimization.reduce_bucket_size",
        COUNT,
        "buckets, and what ZeRO 3 gathers",
        of="model",
        why=_BUCKET,
        write=_of_recipe(1, bucket_elements),
        unwritten=_BUCKET_DEFAULT,
    ),
    DsConfigKey(
        "zero_optimization.allgather_bucket_size",
        COUNT,
        "how ZeRO orders its work",
        of="model",
        why=_BUCKET,
        write=_of_recipe(1, bucket_elements),
        unwritten=_BUCKET_DEFAULT,
    ),
    DsConfigKey(
        "zero_optimization.overlap_comm",
        SWITCH,
        "buckets, and what ZeRO 3 gathers",
        of="cluster",
        why="on a GPU gradients are reduced beside the backward pass",
        write=_of_recipe(1, _pinned),
        unwritten=(ABSENT, False, False, ABSENT),
    ),
    DsConfigKey(
        "zero_optimization.sub_group_size",
        COUNT,
        "buckets, and what ZeRO 3 gathers",
        of="layout.offload_optimizer",
        why="stepped together; smaller where only a share of the states is offloaded",
        write=_from_stage(3, sub_group_elements),
        since="0.3.12",
    ),
    DsConfigKey("zero_optimization.zero_hpz_partition_size", COUNT, "a second shard of the parameters", since="0.10.0"),
    DsConfigKey(
        "zero_optimization.stage3_prefetch_bucket_size",
        COUNT,
        "buckets, and what ZeRO 3 gathers",
        of="model",
        why=_BUCKET,
        write=_of_recipe(3, bucket_elements),
        unwritten=(ABSENT, ABSENT, ABSENT, 50_000_000),
        prices="prefetch_elements",
        automatic=lambda recipe: int(0.9 * recipe.model.hidden_size**2),
        old=("prefetch_bucket_size",),
        since="0.3.12",
    ),
    DsConfigKey(
        "zero_optimization.stage3_param_persistence_threshold",
        COUNT,
        "buckets, and what ZeRO 3 gathers",
        why="smaller tensors, norms, stay whole",
        write=_always(3, PERSISTENT_PARAMETER),
        prices="persistent_elements",
        automatic=lambda recipe: 10 * recipe.model.hidden_size,
        old=("param_persistence_threshold",),
        since="0.3.12",
    ),
    DsConfigKey(
        "zero_optimization.stage3_max_live_parameters",
        COUNT,
        "buckets, and what ZeRO 3 gathers",
        of="model",
        why=_LIVE,
        write=_of_recipe(3, live_parameters),
        prices="live_elements",
        automatic=lambda recipe: LIVE_PARAMETERS,
        old=("max_live_parameters",),
        since="0.3.12",
    ),
    DsConfigKey(
        "zero_optimization.stage3_max_reuse_distance",
        COUNT,
        "buckets, and what ZeRO 3 gathers",
        of="model",
        why=_LIVE,
        write=_of_recipe(3, live_parameters),
        prices="reuse_elements",
        old=("max_reuse_distance",),
        since="0.3.12",
    ),
    DsConfigKey(
        "zero_optimization.stage3_model_persistence_threshold",
        subject="buckets, and what ZeRO 3 gathers",
        prices="persistent_total",
        old=("model_persistence_threshold",),
        since="0.7.0",
    ),
    DsConfigKey(
        "zero_optimization.stage3_allgather_sequential",
        subject="buckets, and what ZeRO 3 gathers",
        old=("allgather_sequential",),
        since="0.18.5",
    ),
    DsConfigKey("zero_optimization.memory_efficient_linear", subject="buckets, and what ZeRO 3 gathers", since="0.9.0"),
    DsConfigKey(
        "zero_optimization.offload_optimizer.ratio",
        SHARE,
        of="layout.offload_optimizer",
        write=_optimizer(lambda recipe: recipe.techniques.offload_optimizer),
        planned=True,
        since="0.3.15",
    ),
    *_offloaded("offload_optimizer", "layout.offload_optimizer", _optimizer),
    *_on_nvme("offload_optimizer", fast_init=ANY, pipeline_read=ANY),
    *_offloaded("offload_param", "layout.offload_parameters", _parameters),
    *_on_nvme("offload_param", buffer_size=COUNT, max_in_cpu=COUNT),
    DsConfigKey("zero_optimization.zero_quantized_weights", subject="quantized weights", since="0.10.0"),
    DsConfigKey("zero_optimization.zero_quantized_nontrainable_weights", subject="quantized weights", since="0.10.2"),
    DsConfigKey("zero_optimization.zero_quantized_gradients", subject="quantized gradients", since="0.10.0"),
    DsConfigKey(
        "zero_optimization.mics_shard_size", subject="model states shared within groups", since="0.9.2", until="0.19.7"
    ),
    DsConfigKey(
        "zero_optimization.mics_hierarchical_params_gather", subject="no groups", since="0.9.2", until="0.19.7"
    ),
    DsConfigKey("zero_optimization.ignore_unused_parameters", subject="how ZeRO orders its work", since="0.4.0"),
    DsConfigKey(
        "zero_optimization.log_trace_cache_warnings", SWITCH, "logs, curves and profiles of time", since="0.16.4"
    ),
    DsConfigKey("zero_optimization.elastic_checkpoint", subject="how ZeRO orders its work", since="0.3.3"),
    DsConfigKey("zero_optimization.load_from_fp32_weights", subject="how ZeRO orders its work"),
)
