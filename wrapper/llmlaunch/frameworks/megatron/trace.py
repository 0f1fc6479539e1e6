"""One pipeline rank of a job of Megatron core by itself, on a device or as the tracer reads it, and what was alive at
its peak by the names of the estimate's terms.

A trace says of every storage which line of which framework made it, in which phase and inside which part of the model
(tracing/live_storages.py). The rules below read that as of Megatron core 0.19 and Transformer Engine 2.20; whatever
they do not know, in these or other versions, is in the remainder and in no term.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llmlaunch.errors import UserError
from llmlaunch.frameworks.argument import (
    RUN_DIR,
    Argument,
    NodeVariable,
    Word,
    argument,
    command_words,
    flag_groups,
    flag_of,
)
from llmlaunch.frameworks.base import OmittedTechnique, RankAlone, Rendered
from llmlaunch.frameworks.framework import FORWARD, REMAINDER
from llmlaunch.frameworks.megatron.arguments import planned_arguments
from llmlaunch.frameworks.megatron.parser import core_parser, rendered_version
from llmlaunch.layout import Layout
from llmlaunch.memory.estimator import RankEstimate
from llmlaunch.recipe.types import Recipe
from llmlaunch.techniques.switches import FULL_ITERATION
from llmlaunch.trainers import RANK_ALONE

FAKE = "--fake-process-group"
STARTER_FILE = "trainer/rank_alone.py"

_CHECKPOINTS = "nothing is saved or loaded: weights take the same memory whatever their values"
_WRITERS = "nothing is saved, so no process with a context of its own on the device writes beside it"
_DATA = "the dataset is not read: its loader takes memory of the host alone"
_VALUES = "what the other ranks would have sent is made up, and so are the values this would judge"
_SHORT = "it ends after its few steps"
_USER_BUFFERS = "Transformer Engine sets its buffers up by real NCCL or MPI between the tensor ranks"
_REGISTERED = "its buffers are registered with NCCL, which is not there"

LEFT_OUT: Mapping[str, str] = {
    **dict.fromkeys(
        (
            *("--save", "--load", "--save-interval", "--save-retain-interval", "--pretrained-checkpoint"),
            *("--exit-on-missing-checkpoint", "--async-save", "--exit-signal-handler"),
            *("--use-persistent-ckpt-worker", "--async-strategy"),
        ),
        _CHECKPOINTS,
    ),
    **dict.fromkeys(
        (
            *("--data-path", "--data-args-path", "--per-split-data-args-path", "--split", "--data-cache-path"),
            *("--train-data-path", "--valid-data-path", "--test-data-path"),
        ),
        _DATA,
    ),
    **dict.fromkeys(
        ("--tensorboard-dir", "--wandb-project", "--wandb-entity", "--wandb-exp-name", "--wandb-save-dir"),
        "it is no training to be followed",
    ),
    **dict.fromkeys(("--check-for-spiky-loss", "--check-for-large-grads", "--log-straggler"), _VALUES),
    **dict.fromkeys(("--exit-duration-in-mins", "--exit-interval", "--enable-ft-package"), _SHORT),
    "--rampup-batch-size": "its first steps would run fewer micro-batches than the job's later ones",
    "--nccl-communicator-config-path": "there is no NCCL to be set up",
    "--use-sharp": "there is no network to be used",
    "--use-nccl-ub": _REGISTERED,
}
"""Flags a rank alone is started without, and why."""

REFUSED: Mapping[str, str] = {
    "--tp-comm-overlap": _USER_BUFFERS,
    "--use-torch-fsdp2": "torch's FSDP gathers below torch.distributed, where nothing is made up",
}
"""Flags no rank can be run alone with, and why."""

_FLEX = "DeepEP and HybridEP write into the memory of other devices; an all-to-all can take their place"
OF_FLEX = ("flex_backend", "expert_rank_capacity_factor", "paged_stash")
_GRAPHS = "nothing is captured without a GPU"
_SIZES = "an all-to-all asks the device how many tokens arrive, which no graph of the whole iteration can hold"


@dataclass(frozen=True)
class _Added:
    """A flag that a rank alone is started with, and why a person should know of it. The job's own word of that name is
    taken out, or stays in its place where it `gives_way`."""

    argument: Argument
    note: str = ""
    gives_way: bool = False


def omitted_techniques(recipe: Recipe, traced: bool) -> tuple[OmittedTechnique, ...]:
    """Return what a rank of the planned recipe runs without, alone on a GPU or `traced` without one. What a trace alone
    lacks runs on a GPU as in the job. Techniques that move memory to the host stay: without them the rank would be
    another one."""
    techniques = recipe.techniques
    omitted = []
    if techniques.tp_comm_overlap:
        omitted.append(OmittedTechnique("tp_comm_overlap", {"tp_comm_overlap": False}, _USER_BUFFERS))
    if techniques.token_dispatcher == "flex":
        exchanged = {"token_dispatcher": "alltoall"} | dict.fromkeys(OF_FLEX)
        omitted.append(OmittedTechnique("token_dispatcher=flex", exchanged, _FLEX))
    iteration_of_fixed_rows = (
        techniques.expert_rank_capacity_factor is not None and FULL_ITERATION in techniques.cuda_graphs
    )
    if techniques.cuda_graphs and (traced or iteration_of_fixed_rows):
        omitted.append(OmittedTechnique("cuda_graphs", {"cuda_graphs": ()}, _GRAPHS if traced else _SIZES))
    if recipe.training.async_save:
        omitted.append(OmittedTechnique("async_save", {}, _WRITERS))
    if "--use-nccl-ub" in map(flag_of, flag_groups(recipe.backend.extra_args)):
        omitted.append(OmittedTechnique("--use-nccl-ub", {}, _REGISTERED))
    return tuple(omitted)


def rank_alone(recipe: Recipe, layout: Layout, rendered: Rendered, pipeline_rank: int, steps: int) -> RankAlone:
    """The rank of a stage that is first in its tensor, context, expert and data groups, for so many `steps`.

    Raises UserError for a rank that does not exist, and for what no rank can be run alone with.
    """
    if not 0 <= pipeline_rank < layout.pipeline:
        raise UserError(f"{recipe.path}: no pipeline rank {pipeline_rank}: ranks are 0 to {layout.pipeline - 1}")
    own = 1 + len(recipe.backend.script_args)
    script, arguments = rendered.program[:own], rendered.program[own:]
    groups = list(flag_groups(arguments))
    _refuse(recipe, groups)
    flags = {flag_of(group) for group in groups}
    added = [each for each in _added(recipe, flags, steps) if not (each.gives_way and each.argument.flag in flags)]
    dropped = {*LEFT_OUT, *(each.argument.flag for each in added)}
    remaining = _without(dropped, groups)
    added_arguments = tuple(each.argument for each in added)
    return RankAlone(
        program=(
            NodeVariable(RUN_DIR, f"/{STARTER_FILE}"),
            *script,
            *remaining,
            *command_words(added_arguments),
        ),
        environment={
            "WORLD_SIZE": str(layout.world_size),
            "RANK": str(pipeline_rank * _ranks_between_stages(layout, flags)),
            "LOCAL_RANK": "0",
        },
        notes=(*_notes_of_left_out(flags), *(each.note for each in added if each.note)),
        arguments=(*(each for each in rendered.arguments if each.flag not in dropped), *added_arguments),
        own_words=tuple(map(str, _without(dropped, flag_groups(recipe.backend.extra_args)))),
        files={STARTER_FILE: RANK_ALONE.read_bytes()},
    )


def _without(out: Collection[str], groups: Iterable[Sequence[Word]]) -> list[Word]:
    return [word for group in groups if flag_of(group) not in out for word in group]


def _refuse(recipe: Recipe, groups: Sequence[Sequence[Word]]) -> None:
    version = rendered_version(recipe)
    cannot = f"{recipe.path}: no rank of this job can be run alone on a device"
    if FAKE not in core_parser(version).flags:
        raise UserError(f"{cannot}: Megatron core {version} has no {FAKE}; name a newer backend.version")
    for group in groups:
        flag, values = flag_of(group), [str(word) for word in group]
        if flag in REFUSED:
            raise UserError(f"{cannot} with {flag}: {REFUSED[flag]}; rehearse without it")
        if flag == "--moe-token-dispatcher-type" and "flex" in (*values[1:], values[0].partition("=")[2]):
            raise UserError(f"{cannot} with the flex dispatcher: {_FLEX}")


def _ranks_between_stages(layout: Layout, job_flags: Collection[str]) -> int:
    """Stages are outermost (order tp-cp-ep-dp-pp), unless Megatron was told otherwise (training/initialize.py)."""
    inner = layout.tensor * layout.context
    return inner if "--use-tp-pp-dp-mapping" in job_flags else layout.world_size // layout.pipeline


def _added(recipe: Recipe, job_flags: Collection[str], steps: int) -> Iterator[_Added]:
    lone = "this rank runs alone: it takes part in all of the job's groups, and nothing is sent"
    yield _Added(argument(FAKE, why=lone))
    yield _Added(argument("--train-iters", steps, why="the peak is reached in the first steps"))
    horizon = argument(
        "--lr-decay-iters", recipe.training.steps, of="training.steps", why="of the job, not of these few"
    )
    yield _Added(horizon, gives_way=True)
    yield _Added(argument("--log-interval", 1, why="every step is looked at"))
    if recipe.training.evaluation is not None:
        yield _Added(
            argument("--eval-iters", 0, why="a step needs more: an evaluation keeps nothing for a backward pass")
        )
    if "--mock-data" not in job_flags:
        yield _Added(argument("--mock-data", why=_DATA), f"made-up data: {_DATA}")
    if "--num-experts" in job_flags:
        yield _Added(
            argument("--moe-router-force-load-balancing", why="what a router makes of made-up values is no balance"),
            "the router sends tokens to random experts: in the job, an expert may get more than its share",
        )
    if "--fp16" in job_flags and "--loss-scale" not in job_flags:
        scale = "the usual first one, 2**32, skips the first steps, and with them the optimizer's states"
        yield _Added(argument("--initial-loss-scale", 1, why=scale))


def _notes_of_left_out(job_flags: Collection[str]) -> Iterator[str]:
    by_reason: dict[str, list[str]] = {}
    for flag, why in LEFT_OUT.items():
        if flag in job_flags and why not in (_DATA, _REGISTERED):
            by_reason.setdefault(why, []).append(flag)
    for why, flags in by_reason.items():
        yield f"without {', '.join(flags)}: {why}"


BRIDGE = "megatron-bridge"

# The tokenizer's files lie on the cluster. What of it takes memory is the number of its words, which is said here.
TOKENIZER = frozenset(
    {"--tokenizer-type", "--tokenizer-model", "--vocab-size", "--padded-vocab-size", "--mock-data"}
    | {"--vocab-file", "--merge-file"}
)
DATA = ("--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size")


def megatron_job(recipe: Recipe, rendered: Rendered, layout: Layout, pipeline_rank: int) -> dict[str, Any]:
    """Return the job as tracing/trace_ranks.py reads it, named by its rank. What no rank alone needs is left out, as on
    a GPU: checkpoints, datasets and what follows a training (frameworks/megatron/trace.py).

    Raises UserError for a script of the person's own, whose model the tracer does not build."""
    if recipe.backend.script is not None:
        raise UserError(
            f"{recipe.path}: backend.script: {recipe.backend.script} cannot be traced: the tracer builds Megatron's "
            "own GPT model; rehearse on a GPU (--on gpu), or without backend.script"
        )
    on_bridge = recipe.backend.name == BRIDGE
    words = _words_of_bridge(recipe, layout) if on_bridge else _words(rendered)
    groups = (group for group in flag_groups(words) if flag_of(group) not in LEFT_OUT.keys() | TOKENIZER)
    arguments = [_plain(word) for group in groups for word in group]
    return {
        "name": str(pipeline_rank),
        "world_size": recipe.world_size,
        "pipeline_rank": pipeline_rank,
        "arguments": [*arguments, *DATA, str(recipe.model.vocab_size)],
        "environment": dict(rendered.environment),
        **(_of_bridge(rendered) if on_bridge else {}),
    }


def _words(rendered: Rendered) -> tuple[Word, ...]:
    _, *words = rendered.program  # the first is pretrain_gpt.py, whose work the tracer does
    return tuple(words)


def _words_of_bridge(recipe: Recipe, layout: Layout) -> tuple[Word, ...]:
    """Return the arguments that configure Megatron core as Bridge's settings do
    (tests/frameworks/test_megatron_bridge.py holds the two equal)."""
    return command_words(planned_arguments(recipe, layout))


def _of_bridge(rendered: Rendered) -> dict[str, Any]:
    """Return what only Bridge's settings say: those of its LoRA, with the package that has it, and whether rows are
    packed."""
    settings = json.loads(rendered.files[rendered.settings_file])
    packed, adapters = settings["dataset"].get("enable_offline_packing", False), settings.get("peft")
    return {"adapters": adapters, "packed": packed, **({"package": BRIDGE} if adapters else {})}


def _plain(word: Word) -> str:
    """Nothing of such a word is read: it names a place on a node."""
    return f"${word.name}{word.suffix}" if isinstance(word, NodeVariable) else word


Group = Mapping[str, Any]  # storages alike: bytes together, phase, site, module, role, the phase they were let go of in

ROLES = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer_states": "optimizer_states",
    "layer_input": "activations",
    "final_norm_input": "logits_and_loss",
}
# Made once and kept, or passing through, whatever the phase: what the site's text holds, and the term.
SITES = (
    ("get_dummy_wgrad", "weight_gradient_stubs"),
    ("cublas_workspace", "workspace"),
    ("GlobalMemoryBuffer.get_tensor", "sequence_gather"),
    ("initialize_ub", "user_buffers"),
    ("get_weight_workspace", "weight_copies"),
    ("pipeline_parallel/p2p_communication.py", "pipeline_buffers"),
)
HEAD_MODULES = (
    *("models/common/language_module/", "models/gpt/gpt_model.py GPTModel._postprocess"),
    "models/hybrid/hybrid_model.py HybridModel.forward",
)
HEAD_SITES = ("cross_entropy", "LinearWithGradAccumulationAndAsyncCommunication", "LinearWithFrozenWeight")
# What a forward pass keeps, by the model's code: "models/common/embeddings/rope_utils.py apply_rotary_pos_emb".
MODULES = (
    ("models/common/embeddings/rope_utils.py", "activations"),
    ("models/common/embeddings/language_model_embedding.py", "embedding"),
    *((head, "logits_and_loss") for head in HEAD_MODULES),
    ("transformer/transformer_block.py TransformerBlock.forward", "logits_and_loss"),  # the norm behind the layers
    ("models/hybrid/hybrid_block.py HybridStack.forward", "logits_and_loss"),
    ("transformer/", "activations"),
    ("ssm/", "activations"),
)


def megatron_terms(trace: Mapping[str, Any], predicted: RankEstimate) -> dict[str, int]:
    """Bytes of `trace["at_peak"]` by the names of the terms of `predicted`, largest first; they sum to
    `trace["peak_bytes"]`. A term that is not named had none; none is where the trace does not say what was alive.

    `activations` are what the forward passes of layers left behind, `layer_forward` what passed through one when the
    peak lay inside of it. `layer_backward` and `head_backward` are what the backward pass made that was there at a peak
    within it; at another peak it waits to be sent to the previous rank (`pipeline_buffers`).
    """
    groups = trace.get("at_peak") or ()
    if not groups:
        return {}
    terms: Counter[str] = Counter()
    width = _logits_width(groups)
    for group in groups:
        term = _term(group, str(trace["peak_phase"]), width)
        terms[term if term == FORWARD or term in predicted.terms else REMAINDER] += int(group["bytes"])
    terms[REMAINDER] += int(trace["peak_bytes"]) - sum(terms.values())
    return {term: count for term, count in terms.most_common() if count}


def _logits_width(groups: Iterable[Group]) -> int:
    """What the head made is the widest there: the vocabulary, or this rank's part of it."""
    shapes = [group["shape"] for group in groups if str(group.get("module", "")).startswith(HEAD_MODULES)]
    return max((int(shape[-1]) for shape in shapes if len(shape) > 1), default=0)


def _term(group: Group, peak_phase: str, logits_width: int) -> str:
    """`logits_width` is that of this rank's logits; 0: there are none."""
    term_of_role = ROLES.get(str(group.get("role", "")))
    if term_of_role is not None:
        return term_of_role
    site, phase = str(group.get("site", "")), group["phase"]
    for text, term in SITES:
        if text in site:
            return term
    if phase == "setup" and peak_phase == "setup":
        return "whole_model"
    if phase == "forward":
        return _of_forward(group, site)
    if phase == "recompute":
        return "recomputed_layer"
    if phase == "backward":
        if peak_phase not in ("backward", "recompute"):
            return "pipeline_buffers"
        wide = logits_width and logits_width in group["shape"][-1:]
        return "head_backward" if wide or any(text in site for text in HEAD_SITES) else "layer_backward"
    if phase == "optimizer step" and peak_phase == "optimizer step":
        return "gradient_norm" if "clip_grads" in site else "optimizer_step"
    return REMAINDER


def _of_forward(group: Group, site: str) -> str:
    module = str(group.get("module", ""))
    if module:
        term = next((term for start, term in MODULES if module.startswith(start)), REMAINDER)
        return FORWARD if term == "activations" and group.get("until") == "forward" else term
    if "cross_entropy" in site or "forward_step_calc_loss" in site:
        return "logits_and_loss"
    return "embedding" if site.endswith(" forward_step") else REMAINDER  # token ids, positions, labels and their mask
