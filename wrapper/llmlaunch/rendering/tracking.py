"""What a tracked run of Weights & Biases or TensorBoard is told beside the framework's arguments: variables, and the
prediction as configuration of the run."""

from __future__ import annotations

from typing import Any

from llmlaunch.frameworks.argument import Reason
from llmlaunch.planner.plan import Plan
from llmlaunch.recipe.types import Recipe

CONFIG_FILE = "wandb-config.json"  # beside the layout's run.json; a node copies it to where wandb.init looks

TRACKING_REASONS = {
    "WANDB_PROJECT": Reason(("tracking.wandb.project",)),
    "WANDB_ENTITY": Reason(("tracking.wandb.entity",)),
    "WANDB_MODE": Reason(("tracking.wandb.mode",)),
    "TENSORBOARD_LOGGING_DIR": Reason(("tracking.tensorboard",), "for Hugging Face's Trainer"),
}


def tracking_environment(recipe: Recipe) -> dict[str, str]:
    """Return the variables of a tracked run that are known before it starts; each node adds its id, name and folder."""
    run, folder = recipe.tracking.wandb, recipe.tensorboard
    variables = {} if run is None else {"WANDB_PROJECT": run.project, "WANDB_MODE": run.mode}
    if run is not None and run.entity is not None:
        variables["WANDB_ENTITY"] = run.entity
    trainer = recipe.backend.script is not None and recipe.backend.script_kind == "hugging-face"
    return variables | ({"TENSORBOARD_LOGGING_DIR": folder} if folder is not None and trainer else {})


def wandb_config(recipe: Recipe, plan: Plan) -> bytes:
    """Return the prediction in the form of config-defaults.yaml, which wandb.init reads in the working directory,
    whoever calls it (wandb/sdk/wandb_config.py _load_defaults, 0.31; the files of WANDB_CONFIG_PATHS end 0.31 with an
    error)."""
    ranks = plan.estimate.ranks
    kinds = {plan.estimate.peak_kind: "device_bytes", "reserved": "reserved_bytes", "allocated": "allocated_bytes"}
    predicted: dict[str, Any] = {
        kind: {f"stage{rank.pipeline_rank}": getattr(rank, name) for rank in ranks} for kind, name in kinds.items()
    }
    host = plan.estimate.host_bytes_per_node
    planned = {
        "recipe": recipe.name,
        "recipe_digest": recipe.digest,
        "verdict": plan.verdict,
        "nodes": recipe.nodes,
        "layout": plan.layout.as_json(),
        "techniques": plan.chosen.techniques.as_json(),
        "predicted_bytes": predicted | ({} if host is None else {"host": host}),
        "limit_bytes": plan.limit.limit_bytes,
        "predicted_step_seconds": plan.chosen.step_seconds,
        "predicted_tokens_per_second_per_gpu": plan.chosen.tokens_per_second_per_gpu,
    }
    from llmlaunch.documents.writing import json_bytes

    return json_bytes({"wandb_version": 1, "llmlaunch": {"value": planned}})
