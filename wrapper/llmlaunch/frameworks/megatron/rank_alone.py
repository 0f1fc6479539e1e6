"""One pipeline rank of a Megatron-LM job by itself, on one device: the job's words, but for what that needs.

Megatron has a flag for it (--fake-process-group, core 0.16 and 0.19): it takes WORLD_SIZE and RANK for what they say,
sends nothing, checks no number for NaN and makes no Gloo groups (training/arguments.py, training/initialize.py, 0.19).
What the others would have sent is made up by trainers/rank_alone.py.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

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
from llmlaunch.frameworks.megatron.parser import core_parser, rendered_version
from llmlaunch.layout import Layout
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
