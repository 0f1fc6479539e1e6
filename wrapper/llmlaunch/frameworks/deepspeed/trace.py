"""A DeepSpeed job's rank by itself, on a device or as the tracer reads it, and what was alive at its peak by the names
of the estimate's terms.

The rules below read sites and modules as of DeepSpeed 0.19 and Transformers 5; whatever they do not know, in these or
other versions, is in the remainder and in no term.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from llmlaunch.errors import UserError
from llmlaunch.frameworks.argument import RUN_DIR, Argument, NodeVariable, argument, command_words
from llmlaunch.frameworks.base import RankAlone, Rendered
from llmlaunch.frameworks.deepspeed.arguments import CONFIG_FILE
from llmlaunch.frameworks.deepspeed.config import to_json
from llmlaunch.frameworks.framework import FORWARD, REMAINDER
from llmlaunch.layout import Layout
from llmlaunch.memory.estimator import RankEstimate
from llmlaunch.recipe.types import Recipe
from llmlaunch.trainers import RANK_ALONE

STARTER_FILE = "trainer/rank_alone.py"

LEFT_OUT: Mapping[str, str] = {
    "--save": "nothing is saved: writing a checkpoint takes memory of the host alone",
    "--save-interval": "",
    "--weights": "weights are drawn, not loaded: they take the same memory whatever their values",
    "--tokenizer": "",
    "--evaluation-interval": "nothing is evaluated: a step needs more memory",
    "--packed": "rows are not packed: the mask that keeps them apart is not in what is measured",
    **dict.fromkeys(("--format", "--chat-template"), ""),
    **dict.fromkeys(("--evaluation-iterations", "--validation-data", "--split", "--patience", "--keep-best"), ""),
    **dict.fromkeys(("--samples", "--sample-tokens", "--export", "--keep-adapters-apart"), ""),
}
"""Flags a rank alone is started without, and the sentence for the person; empty where another one's says it."""

SCRIPTS_REFUSED: Mapping[str, str] = {
    "own": "llmlaunch does not know how it is told to end after a few steps and to save nothing, and nothing in it "
    "says at the end whether a step was skipped",
    "hugging-face": "nothing in it says at the end whether a step was skipped, and its data may need other ranks",
    "pipeline": "a stage learns the shapes it receives from the stage before it (deepspeed/runtime/pipe/engine.py "
    "PipelineEngine._recv_tensor_meta, 0.19.8), which is not there",
}
"""The kinds of scripts (`backend.script_kind`) no rank of which can be run alone, and why."""


def rank_alone(recipe: Recipe, layout: Layout, rendered: Rendered, pipeline_rank: int, steps: int) -> RankAlone:
    """Rank 0 of the job for so many `steps`. Without a pipeline all its ranks hold the same.

    Raises UserError for a rank that does not exist, and for a script that is not the shipped one.
    """
    if not 0 <= pipeline_rank < layout.pipeline:
        raise UserError(
            f"{recipe.path}: there is no pipeline rank {pipeline_rank}; "
            + (f"ranks are 0 to {layout.pipeline - 1}" if layout.pipeline > 1 else "the only one is 0")
        )
    if recipe.backend.script is not None:
        raise UserError(
            f"{recipe.path}: backend.script: no rank of {recipe.backend.script} can be run alone: "
            f"{SCRIPTS_REFUSED[recipe.backend.script_kind]}; rehearse without backend.script, with the shipped trainer"
        )
    mine = tuple(_mine(rendered, layout, steps))
    replaced = {*LEFT_OUT, *(each.flag for each in mine)}
    arguments = (*(each for each in rendered.arguments if each.flag not in replaced), *mine)
    script = rendered.program[0]
    config, scaled = _config(rendered)
    return RankAlone(
        program=(
            NodeVariable(RUN_DIR, f"/{STARTER_FILE}"),
            script,
            *command_words(arguments),
            *recipe.backend.extra_args,
        ),
        environment={
            "WORLD_SIZE": str(layout.world_size),
            "RANK": "0",
            "LOCAL_RANK": "0",
        },
        notes=(*_notes(recipe, layout, rendered), *scaled),
        arguments=arguments,
        own_words=recipe.backend.extra_args,
        files={STARTER_FILE: RANK_ALONE.read_bytes(), **config},
    )


def _mine(rendered: Rendered, layout: Layout, steps: int) -> Iterator[Argument]:
    """What is said otherwise than in the job, or beside it."""
    yield argument("--alone", layout.world_size, why="rank 0 of so many, of which the others do not exist")
    yield argument("--steps", steps, why="the peak is reached in the first steps")
    yield argument("--log-interval", 1, why="every step is looked at")
    yield argument("--data", "mock", why="the dataset is not read: it is held by the host alone")


def _config(rendered: Rendered) -> tuple[dict[str, bytes], tuple[str, ...]]:
    """ds_config.json where it cannot be the job's, and a sentence of why: a rank alone is no run to be tracked."""
    config: dict[str, Any] = json.loads(rendered.files[CONFIG_FILE])
    tracked = [config.pop(name) for name in ("wandb", "tensorboard") if name in config]
    scaling = config.get("fp16", {})
    if not scaling.get("enabled") or scaling.get("loss_scale"):
        return ({CONFIG_FILE: to_json(config)} if tracked else {}), ()
    scaling["initial_scale_power"] = 0
    scale = "losses are scaled by 1 at first: the usual 2**16 skips first steps, and with them the optimizer's states"
    return {CONFIG_FILE: to_json(config)}, (scale,)


def _notes(recipe: Recipe, layout: Layout, rendered: Rendered) -> Iterator[str]:
    job_flags = {each.flag for each in rendered.arguments}
    if not recipe.data.mock:
        yield "made-up tokens: the dataset is not read, which is held by the host alone"
    yield from (why for flag, why in LEFT_OUT.items() if flag in job_flags and why)
    if recipe.model.moe is not None:
        yield "what a router makes of made-up weights is no balance: an expert's share of the tokens is not the job's"
    if recipe.techniques.offload_optimizer or recipe.techniques.offload_parameters:
        yield "on the host there is this rank's share alone; a node of the job holds that of all its ranks"


STEPS = 2

Group = Mapping[str, Any]  # storages alike: bytes together, phase, site, module, role, the phase they were let go of in


def deepspeed_job(recipe: Recipe, rendered: Rendered, layout: Layout, pipeline_rank: int) -> dict[str, Any]:
    """Return the job as tracing/trace_ranks.py reads it with `--framework deepspeed`: the words a rank alone has on a
    GPU, and the JSON files they name.

    Raises:
        UserError: no rank of this job can run alone, with the reason.
    """
    alone = rank_alone(recipe, layout, rendered, pipeline_rank, STEPS)
    texts = (word for argument in alone.arguments for word in argument.words)
    files = {**rendered.files, **alone.files}
    return {
        "name": str(pipeline_rank),
        "world_size": layout.world_size,
        "arguments": [
            *(f"${word.name}{word.suffix}" if isinstance(word, NodeVariable) else word for word in texts),
            *alone.own_words,
        ],
        "files": {name: json.loads(content) for name, content in files.items() if name.endswith(".json")},
        "environment": dict(rendered.environment),
    }


ROLES = {
    "parameters": "parameters",
    "gradients": "gradients",
    "waiting_gradients": "gradient_buffers",
    "optimizer_states": "optimizer_states",
}
# What the site's text holds, and the term, whatever the phase.
SITES = (
    ("DeepSpeedZeroOptimizer_Stage3._setup_for_real_optimizer", "gradient_buffers"),
    ("DeepSpeedZeroOptimizer.setup_buckets", "gradient_buffers"),
    ("copy_grads_in_partition", "gradient_buffers"),
    ("get_flat_partition", "gradient_buffers"),
    ("buffered_allreduce_fallback", "gradient_buffers"),
    ("_all_gather", "parameters"),  # of ZeRO 3: the estimate counts gathered parameters among all
    ("_allgather_params", "parameters"),
)
GATHERED = "deepspeed/utils/nvtx.py"  # ZeRO 3 puts gathered parameters together inside a wrapper of this file
HEAD = "ForCausalLM.forward"


def deepspeed_terms(trace: Mapping[str, Any], predicted: RankEstimate) -> dict[str, int]:
    """Return the bytes of `trace["at_peak"]` by the names of the terms of `predicted`, largest first; they sum to
    `trace["peak_bytes"]`. A term that is not named had none; none is where the trace does not say what was alive."""
    groups = trace.get("at_peak") or ()
    if not groups:
        return {}
    width = max((int(group["shape"][-1]) for group in groups if _of_head(group) and group["shape"]), default=0)
    terms: Counter[str] = Counter()
    for group in groups:
        term = _term(group, str(trace["peak_phase"]), width)
        terms[term if term == FORWARD or term in predicted.terms else REMAINDER] += int(group["bytes"])
    terms[REMAINDER] += int(trace["peak_bytes"]) - sum(terms.values())
    return {term: count for term, count in terms.most_common() if count}


def _of_head(group: Group) -> bool:
    return group["phase"] == "loss" or str(group.get("module", "")).endswith(HEAD)


def _term(group: Group, peak_phase: str, logits_width: int) -> str:
    """`logits_width` is that of this rank's logits; 0: there are none."""
    term_of_role = ROLES.get(str(group.get("role", "")))
    if term_of_role is not None:
        return term_of_role
    site, phase = str(group.get("site", "")), group["phase"]
    for text, term in SITES:
        if text in site:
            return term
    if GATHERED in site and phase != "optimizer step":
        return "parameters"
    if group["dtype"] == "int64":
        return "embedding"
    if phase == "setup" and peak_phase == "setup":
        return "whole_model"
    if _of_head(group):
        return "logits_and_loss"
    if phase == "forward":
        passing = group.get("until") == "forward" and peak_phase == "forward"
        return FORWARD if passing else "activations"
    if phase == "recompute":
        return "recomputed_layer"
    if phase == "backward":
        return _of_backward(group, logits_width)
    return "optimizer_step" if phase == "optimizer step" == peak_phase else REMAINDER


def _of_backward(group: Group, logits_width: int) -> str:
    if not logits_width or logits_width not in group["shape"][-1:]:
        return "layer_backward"
    return "logits_and_loss" if group["dtype"] == "float32" else "head_backward"
