"""run.json: what the node side and `collect` need, what follows when an attempt ends early, and a measurement record
that only its peak is missing from."""

from __future__ import annotations

import json
from dataclasses import asdict

from llmlaunch.calibration.cases import recorded_job
from llmlaunch.calibration.records import machine_json
from llmlaunch.frameworks.base import Rendered
from llmlaunch.frameworks.checkpoints import NON_PERSISTENT_FOLDER, save_seconds, tracker
from llmlaunch.frameworks.framework import backend_for, framework_of
from llmlaunch.layout import Layout
from llmlaunch.planner.plan import FewerNodes, Plan
from llmlaunch.recipe.types import Recipe
from llmlaunch.rendering.restarts import restart_by
from llmlaunch.timing.step import evaluation_seconds


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
        "measurement": measurement_template(recipe, plan),
    }


def measurement_template(recipe: Recipe, plan: Plan) -> dict[str, object]:
    """A whole measurement record; null = not known, never "default"."""
    accelerator = recipe.cluster.accelerator
    return {
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
        "backend": framework_of(recipe).recorded_name(recipe),
        "backend_version": recipe.backend.runs_version,
        "gpu": "cpu" if accelerator.kind == "cpu" else accelerator.name,
        "gpu_memory_bytes": accelerator.memory_bytes,
        "machine": machine_json(recipe.cluster),
        "world_size": plan.layout.world_size,
        "sequence_length": recipe.workload.sequence_length,
        "micro_batch_size": plan.layout.micro_batch_size,
        "global_batch_size": recipe.workload.global_batch_size,
        "num_microbatches": plan.layout.num_microbatches(recipe.workload.global_batch_size),
        **recorded_job(recipe, plan.layout),
        "source": {"citation": "llmlaunch", "license": None, "evidence": "measured", "note": None},
        **_baseline(plan),
        **_calibration(plan),
    }


def _baseline(plan: Plan) -> dict[str, object]:
    """The idle trainer that the plan counts on a CPU-only machine, by which resident peaks are priced again; absent on
    GPUs, whose monitor sees what was held before the trainer."""
    return {"baseline_bytes": plan.estimate.worst.terms.get("context")} if plan.estimate.peak_kind == "resident" else {}


def _calibration(plan: Plan) -> dict[str, object]:
    """The one behind what was predicted; absent where there is none."""
    named = plan.correction.calibration_id
    return {} if named is None else {"calibration_id": named}


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
