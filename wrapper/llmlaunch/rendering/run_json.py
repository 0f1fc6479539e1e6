"""run.json: what the node side and `collect` need, what follows when an attempt ends early, and a measurement record
that only its peak is missing from."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, fields

from llmlaunch.calibration.time_calibrations import machine_json
from llmlaunch.frameworks.base import Rendered
from llmlaunch.frameworks.checkpoints import NON_PERSISTENT_FOLDER, save_seconds, tracker
from llmlaunch.frameworks.registry import backend_for, recorded_name
from llmlaunch.layout import OFFLOAD_LAYERS, RECOMPUTE_NAMES, Layout
from llmlaunch.models.sections import BUILT_BY_CORE
from llmlaunch.models.shape import OF_FAMILIES, OF_MEMORY, OF_TIME, ModelShape, Router
from llmlaunch.planner.plan import FewerNodes, Plan
from llmlaunch.recipe.types import Recipe
from llmlaunch.rendering.restarts import is_expedited, restart_by
from llmlaunch.techniques.requests import OptimizerInstances
from llmlaunch.techniques.switches import TensorOverlap, TokenDispatch
from llmlaunch.techniques.technique import key_of
from llmlaunch.timing.step import evaluation_seconds

__all__ = [
    "FALLBACK_FOLDER",
    "FEWER_NODES_FOLDER",
    "fallback_folder",
    "fewer_nodes_folder",
    "measurement_template",
    "placement_json",
    "run_description",
]


_IMPLEMENTATION = (
    "attention",
    "transformer_impl",
    "deterministic",
    "cross_entropy_fusion",
    "gated_activation_fused",
    "overlap_grad_reduce",
    "overlap_param_gather",
    "gradient_accumulation_fusion",
    "cuda_graph",
    "torch_compile",
    "cpu_activation_offload",
    "overlap_moe_expert_parallel_comm",
    "cp_comm_type",
    "expandable_segments",
    "legacy_models",
    "defer_embedding_wgrad",
    key_of(TensorOverlap),
    "optimizer_in_backward",
)


def run_description(recipe: Recipe, plan: Plan, rendered: Rendered) -> dict[str, object]:
    """run.json as a value (docs/run-directory.md)."""
    return {
        "schema": 1,
        "name": recipe.name,
        "recipe_digest": recipe.digest,
        "overrides": list(recipe.overrides),
        "backend": recipe.backend.name,
        "accelerator_kind": recipe.cluster.accelerator.kind,
        "nodes": recipe.nodes,
        "devices_per_node": recipe.cluster.devices_per_node,
        "fabric_gigabytes_per_second": recipe.cluster.fabric_link.bytes_per_second / 1e9,
        "pipeline": plan.layout.pipeline,
        "verdict": plan.verdict,
        "stated_risk": plan.stated_risk,
        "peak_kind": plan.estimate.peak_kind,
        "predicted_bytes": [rank.device_bytes for rank in plan.estimate.ranks],
        "predicted_by_kind": {
            "allocated": [rank.allocated_bytes for rank in plan.estimate.ranks],
            "reserved": [rank.reserved_bytes for rank in plan.estimate.ranks],
            "host": plan.estimate.host_bytes_per_node,
        },
        "monitor_interval_seconds": recipe.monitor.interval_seconds,
        "progress": progress_json(recipe, plan, rendered),
        **recovery(recipe, plan),
        **({} if recipe.notify is None else {"notify": asdict(recipe.notify)}),
        "measurement": measurement_template(recipe, plan, rendered),
    }


def measurement_template(recipe: Recipe, plan: Plan, rendered: Rendered) -> dict[str, object]:
    """A whole measurement record; null = not known, never "default". `rendered.measurement` fills what only the
    backend knows, section by section."""
    accelerator = recipe.cluster.accelerator
    record: dict[str, object] = {
        "id": None,
        "family": "llmlaunch",
        "split": None,
        "peak_kind": plan.estimate.peak_kind,
        "peak_bytes": None,
        "allocator_statistic": None,
        "rounding_bytes": None,
        "repeats": None,
        "pipeline_rank": None,
        "rank_scope": None,
        "backend": recorded_name(recipe),
        "backend_version": recipe.backend.runs_version,
        "gpu": "cpu" if accelerator.kind == "cpu" else accelerator.name,
        "gpu_memory_bytes": accelerator.memory_bytes,
        "machine": machine_json(recipe.cluster),
        "world_size": plan.layout.world_size,
        "model": _model(recipe, plan),
        "sequence_length": recipe.workload.sequence_length,
        "micro_batch_size": plan.layout.micro_batch_size,
        "global_batch_size": recipe.workload.global_batch_size,
        "num_microbatches": plan.layout.num_microbatches(recipe.workload.global_batch_size),
        **_split(recipe, plan),
        "implementation": dict.fromkeys(_IMPLEMENTATION),
        **_techniques(recipe, plan.layout),
        "source": {"citation": "llmlaunch", "license": None, "evidence": "measured", "note": None},
        **_baseline(plan),
        **_calibration(plan),
    }
    for section, values in rendered.measurement.items():
        template_values = record[section]
        if not isinstance(template_values, Mapping):
            raise TypeError(f"measurement section {section!r} of backend {recipe.backend.name} is no section")
        record[section] = {**template_values, **values}
    return record


def _baseline(plan: Plan) -> dict[str, object]:
    """The idle trainer that the plan counts on a CPU-only machine, by which resident peaks are priced again; absent on
    GPUs, whose monitor sees what was held before the trainer."""
    return {"baseline_bytes": plan.estimate.worst.terms.get("context")} if plan.estimate.peak_kind == "resident" else {}


def _calibration(plan: Plan) -> dict[str, object]:
    """The one behind what was predicted; absent where there is none."""
    named = plan.correction.calibration_id
    return {} if named is None else {"calibration_id": named}


def _model(recipe: Recipe, plan: Plan) -> dict[str, object]:
    shape: ModelShape = recipe.model
    pads = recipe.backend.on_megatron_core  # Hugging Face models keep the vocabulary as it is
    moe = None
    if shape.moe is not None:
        moe = {name: value for name, value in asdict(shape.moe).items() if name not in ("router", "latent_size")}
        moe |= {} if shape.moe.latent_size is None else {"latent_size": shape.moe.latent_size}
        moe |= _router(shape.moe.router) | {key_of(TokenDispatch): plan.chosen.techniques.token_dispatcher}
        moe["layer_pattern"] = list(shape.moe.layer_pattern)
    return {
        "name": shape.name,
        "num_layers": shape.num_layers,
        "hidden_size": shape.hidden_size,
        "ffn_hidden_size": shape.ffn_hidden_size,
        "num_attention_heads": shape.num_attention_heads,
        "num_query_groups": shape.num_query_groups,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab_size,
        "padded_vocab_size": shape.padded_vocab_size(plan.layout.tensor) if pads else shape.vocab_size,
        "vocab_assumed": False,
        "tied_embeddings": shape.tied_embeddings,
        "gated_mlp": shape.gated_mlp,
        "linear_bias": shape.linear_bias,
        "normalization": shape.normalization,
        "position_embedding": shape.position_embedding,
        "qk_layernorm": shape.qk_layernorm,
        "attention_dropout": shape.attention_dropout,
        "hidden_dropout": shape.hidden_dropout,
        "mtp_num_layers": shape.mtp_num_layers,
        "moe": moe,
        "mla": None if shape.mla is None else asdict(shape.mla),
        **_of_family(shape),
    }


def _router(router: Router) -> dict[str, object]:
    """Return the router's settings that memory or time depends on, if any of them is not the default."""
    names = (*OF_MEMORY, *OF_TIME)
    settings = {name: getattr(router, name) for name in names}
    return {} if settings == {name: getattr(Router(), name) for name in names} else {"router": settings}


def _of_family(shape: ModelShape) -> dict[str, object]:
    """What few families have, only where this one has it: the format of measurements has no place for it, and what is
    in memory depends on it."""
    values = asdict(shape)
    if shape.mamba is not None:
        for name, value in BUILT_BY_CORE.items():
            if values["mamba"][name] == value:
                del values["mamba"][name]
    return {f.name: values[f.name] for f in fields(shape) if f.name in OF_FAMILIES and values[f.name] != f.default}


def _split(recipe: Recipe, plan: Plan) -> dict[str, object]:
    """The sections that say how the job is split and in which numbers it computes."""
    layout = plan.layout
    precision = recipe.workload.precision
    return {
        "parallelism": {
            "tensor": layout.tensor,
            "pipeline": layout.pipeline,
            "virtual_pipeline": layout.virtual_pipeline,
            "context": layout.context,
            "expert": layout.expert,
            "expert_tensor": layout.expert_tensor,
            "data": layout.data,
            "sequence_parallel": bool(layout.sequence_parallel),
            "layers_per_pipeline_rank": list(layout.layers_by_rank) or None,
            "microbatch_group": layout.pipeline,  # the schedule's default in every backend here
        },
        "optimizer": {
            "name": "adam",
            "zero_stage": layout.zero_stage,
            "distributed_optimizer": recipe.backend.on_megatron_core and layout.zero_stage > 0,
            key_of(OptimizerInstances): 1,
            "parameter_dtype": precision,
            "gradient_dtype": None,
            "state_dtype": "fp32",
            "state_bytes_per_parameter": None,
            "offload": "cpu" if recipe.techniques.offload_optimizer else None,
        },
        "recompute": _recompute(recipe, layout),
        "precision": {"compute": precision, "fp8_recipe": None, "fp8_param_gather": False},
    }


def _recompute(recipe: Recipe, layout: Layout) -> dict[str, object]:
    techniques, name = recipe.techniques, RECOMPUTE_NAMES[layout.recompute]
    return {
        "granularity": name,
        "method": techniques.recompute_method if name == "full" else None,
        "num_layers": layout.recompute_layers or None if name == "full" else None,
        "modules": list(techniques.recompute_modules) or None if name == "selective" else None,
    }


def _techniques(recipe: Recipe, layout: Layout) -> dict[str, object]:
    """What the format of measurements has no place for, in a section of our own; absent where there is nothing."""
    values = dict(recipe.techniques.as_json())
    if layout.offload_layers:
        values[OFFLOAD_LAYERS] = layout.offload_layers
    if layout.uneven and layout.virtual_pipeline > 1:
        values["layers_by_stage"] = list(layout.layers_by_stage)
    return {"techniques": values} if values else {}


def placement_json(recipe: Recipe, layout: Layout) -> bytes:
    """The file (docs/run-directory.md), a row of the matrix on a line."""
    from llmlaunch.planner.placement import layout_sizes, step_volumes

    cluster = recipe.cluster
    volumes = step_volumes(recipe, layout, backend_for(recipe).facts(recipe))
    described = {
        "schema": 1,
        "nodes": recipe.nodes,
        "devices_per_node": cluster.devices_per_node,
        "nvlink_domain_devices": cluster.nvlink_domain_devices,
        "layout": asdict(layout_sizes(layout)),
        "bytes": asdict(volumes),
        "fabric_gigabytes_per_second": cluster.fabric_link.bytes_per_second / 1e9,
    }
    lines = [f" {json.dumps(key)}: {json.dumps(value)}" for key, value in described.items()]
    return ("{\n" + ",\n".join([*lines, f' "matrix": {_matrix(recipe)}']) + "\n}\n").encode()


def _matrix(recipe: Recipe) -> str:
    matrix = recipe.cluster.bandwidth
    if matrix is None:
        return "null"
    rows = ",\n".join(
        "   " + json.dumps([float(f"{speed / 1e9:.6g}") for speed in row]) for row in matrix.bytes_per_second
    )
    return f'{{"nodes": {json.dumps(matrix.nodes)},\n  "gigabytes_per_second": [\n{rows}\n  ]}}'


FALLBACK_FOLDER = "fallback"
FEWER_NODES_FOLDER = "nodes"
LOST_HOURS = 48.0
"""Hours of all devices that may be lost where the recipe does not say. A failure costs half a save interval and a
start-up: at half an hour each, and one failure every three hours as on 16,384 GPUs (Llama 3, arXiv 2407.21783, table
5), a week loses 28 h."""


def recovery(recipe: Recipe, plan: Plan) -> dict[str, object]:
    """`restart`, `checkpoint`, `fallbacks`, `after_checkpoint`, `on_bad_loss` of run.json (docs/run-files.md), and of
    the planned layout's `fewer_nodes`."""
    return {
        "restart": _restart(recipe),
        "checkpoint": _checkpoint(recipe),
        "fallbacks": _fallbacks(plan),
        "after_checkpoint": recipe.on_oom.after_checkpoint,
        "on_bad_loss": asdict(recipe.on_bad_loss),
        **({} if plan.fewer_nodes is None else {"fewer_nodes": _fewer_nodes(recipe, plan, plan.fewer_nodes)}),
    }


def fallback_folder(place: int) -> str:
    """Where a layout lies in the run directory: the planned one, 0, in it, the first fallback in fallback/1."""
    return f"{FALLBACK_FOLDER}/{place}" if place else ""


def _fallbacks(plan: Plan) -> list[dict[str, object]]:
    """The chain of layouts, the same in the planned one's file and in each of theirs."""
    layouts = plan.fallbacks.layouts if plan.fallbacks else ()
    return [
        {
            "layout": fallback_folder(number),
            "keeps_checkpoints": fallback.keeps_checkpoints,
            "loads": [fallback_folder(place) for place, able in enumerate(fallback.loads) if able],
        }
        for number, fallback in enumerate(layouts, start=1)
    ]


def fewer_nodes_folder(nodes: int) -> str:
    """Where the layout for so many nodes, fewer than planned, lies in the run directory."""
    return f"{FEWER_NODES_FOLDER}/{nodes}"


def _fewer_nodes(recipe: Recipe, plan: Plan, fewer: FewerNodes) -> dict[str, object]:
    price = recipe.cluster.site.usd_per_gpu_hour
    return {
        "step_seconds": plan.chosen.step_seconds,
        "usd_per_node_hour": None if price is None else price * recipe.cluster.devices_per_node,
        "layouts": [
            {"layout": fewer_nodes_folder(nodes), "nodes": nodes, "step_seconds": reduced.chosen.step_seconds}
            for nodes, reduced in fewer.plans
        ],
    }


def _restart(recipe: Recipe) -> dict[str, object] | None:
    if recipe.restart is None:
        return None
    return {
        "by": restart_by(recipe),
        "within": recipe.restart.within,
        "times": recipe.restart.times,
        "fruitless": recipe.restart.fruitless,
        "per_hour": recipe.restart.per_hour,
        "lost_gpu_hours": recipe.restart.lost_gpu_hours or LOST_HOURS * recipe.nodes * recipe.cluster.devices_per_node,
        "backoff_seconds": recipe.restart.backoff_seconds,
        "bad_checkpoint": recipe.restart.bad_checkpoint,
        **({"slow_nodes": "replace"} if recipe.restart.slow_nodes == "replace" else {}),
        **({"expedite": True} if is_expedited(recipe) else {}),
    }


def _checkpoint(recipe: Recipe) -> dict[str, object] | None:
    """None where no checkpoints are written. A script of the person's own promises no tracker; of it the last step that
    should have been saved counts."""
    training = recipe.training
    if training.checkpoint_path is None:
        return None
    checkpoint: dict[str, object] = {
        "path": training.checkpoint_path,
        "tracker": tracker(recipe),
        "promised": recipe.backend.script is None,
        "interval": training.save_interval,
    }
    if training.keep_checkpoints is not None:
        checkpoint["keep"] = training.keep_checkpoints
    if training.non_persistent_save_interval is not None:
        checkpoint["non_persistent"] = NON_PERSISTENT_FOLDER
    return checkpoint


LEAST_SAVING_SECONDS = 1800.0
SAVES_OF_PATIENCE = 3.0


def progress_json(recipe: Recipe, plan: Plan, rendered: Rendered) -> dict[str, object]:
    """docs/watchdog.md says what each is. The times are null where the recipe says `watchdog: off`: progress is noted,
    and nothing is ended."""
    watchdog = recipe.watchdog
    saves = recipe.training.checkpoint_path is not None
    expected = save_seconds(recipe, plan.layout) if saves else 0.0
    evaluation = recipe.training.evaluation
    if evaluation is not None:
        expected += evaluation_seconds(evaluation.iterations, plan.chosen.step_seconds)
    return {
        "step_patterns": list(rendered.progress.step_patterns),
        "slow_patterns": list(rendered.progress.slow_patterns),
        "promised": rendered.progress.promised,
        "steps": recipe.training.steps,
        "tokens_per_step": recipe.workload.global_batch_size * recipe.workload.sequence_length,
        "floor_seconds": None if watchdog is None else watchdog.floor_seconds,
        "first_step_seconds": None if watchdog is None else watchdog.first_step_seconds,
        # a script of the person's own may save without a word
        "save_every": None if rendered.progress.promised else recipe.training.save_interval,
        # Megatron-LM announces the last evaluation alone, and a script of the person's own perhaps none
        "evaluate_every": None if evaluation is None else evaluation.interval,
        "saving_seconds": max(LEAST_SAVING_SECONDS, SAVES_OF_PATIENCE * expected),
    }
