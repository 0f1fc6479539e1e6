"""Whether a rank can be traced, whether its trace is complete, and why it failed.

What a job may ask of Megatron that cannot be traced, or would be traced as something else, is refused before it runs.
Each such obstacle was met in Megatron core 0.19.2 and TransformerEngine 2.20.2; docs/tracing.md lists them for people.

A trace that skipped a part of the training step shows too little, and looks fine. Fake tensors have no values, and code
that reads one goes where the invented value leads: a skipped optimizer step ends as quietly as one that ran. So all
that allocates is counted afterwards.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

REFUSED = "refused"  # the frameworks do not take the job
DISHONEST = "dishonest"  # it ran, and not all of it that allocates
UNSUPPORTED = "unsupported"  # it would run on a GPU, and cannot be traced
ERROR = "error"  # anything else

FRAMEWORKS = ("megatron/", "transformer_engine/", "deepspeed/", "transformers/", "peft/")  # below site-packages
PACKAGES = "/site-packages/"
REFUSALS = (AssertionError, ValueError, SystemExit)  # what Megatron and TransformerEngine raise about arguments
NEEDS_VALUES = ("DataDependentOutputException", "DynamicOutputShapeException")  # torch/_subclasses/fake_tensor.py
LONGEST = 400  # characters of the sentence


class IncompleteTrace(Exception):
    """The trace ran to its end without all that a training step allocates."""


class NotTraceable(NotImplementedError):
    """What is asked of the pretended device or of a stand-in is not modelled."""


Predicate = Callable[[Any], object]

# Flag, whether Megatron's parsed arguments ask for it, and why it cannot be traced.
OBSTACLES: tuple[tuple[str, Predicate, str], ...] = (
    (
        "--fp8-format or --fp4-format",
        lambda args: args.fp8 or args.fp4,
        "8- and 4-bit products keep quantized copies that TransformerEngine's compiled part allocates "
        "(transformer_engine/pytorch/csrc/quantizer.cpp), and nothing here stands in for it",
    ),
    (
        "--use-megatron-fsdp or --use-torch-fsdp2",
        lambda args: args.use_megatron_fsdp or args.use_torch_fsdp2,
        "they shard over a mesh of devices, for which torch's fake backend has none",
    ),
    (
        "--moe-token-dispatcher-type flex",
        lambda args: args.moe_token_dispatcher_type == "flex",
        "DeepEP and HybridEP are compiled for GPUs (megatron/core/transformer/moe/token_dispatcher.py:1274)",
    ),
    (
        "--fine-grained-activation-offloading or --cpu-offloading-num-layers",
        lambda args: args.fine_grained_activation_offloading or args.cpu_offloading_num_layers,
        "TransformerEngine leaves fake tensors where they are (transformer_engine/pytorch/cpu_offload.py "
        "_check_if_offload), and the peak would be that without offload",
    ),
    (
        "--cuda-graph-impl",
        lambda args: args.cuda_graph_impl != "none" or args.enable_cuda_graph or args.external_cuda_graph,
        "graphs keep their tensors in memory pools of their own, and nothing is captured here",
    ),
    (
        "--tp-comm-overlap",
        lambda args: args.tp_comm_overlap,
        "userbuffers are allocated by TransformerEngine's compiled part "
        "(transformer_engine/pytorch/module/base.py initialize_ub)",
    ),
    (
        "--moe-paged-stash",
        lambda args: args.moe_paged_stash,
        "its kernels are Triton's, and decide what is kept (megatron/core/transformer/moe/paged_stash.py)",
    ),
)


def insist_traceable(args: Any) -> None:
    """Raises NotTraceable with every obstacle that `args`, Megatron's as parsed, meet."""
    met = [f"{flag} cannot be traced: {why}" for flag, is_requested, why in OBSTACLES if is_requested(args)]
    if met:
        raise NotTraceable("; ".join(met))


STEP_PHASES = ("forward", "backward", "optimizer step")


@dataclass(frozen=True)
class TraceEvidence:
    """What a rank did. `forwards` and `backwards` are passes by model chunk, `microbatches` those of each
    iteration; `stateless` counts the parameters that an optimizer was to step and keeps no state of."""

    microbatches: Sequence[int]
    forwards: Sequence[int]
    backwards: Sequence[int]
    steps: int
    skipped: int
    parameter_count: int
    optimizer_state_count: int
    stateless: int
    peak_phase: str
    peak_by_phase: Mapping[str, int]


def insist_complete(evidence: TraceEvidence) -> None:
    """Raises IncompleteTrace with all that is wrong."""
    missing = list(_missing(evidence))
    if missing:
        raise IncompleteTrace("the trace is worth nothing: " + "; ".join(missing))


def _missing(evidence: TraceEvidence) -> Iterator[str]:
    if evidence.parameter_count == 0:
        yield "the rank has no parameters"
    passes = sum(evidence.microbatches)
    for direction, counts in (("forward", evidence.forwards), ("backward", evidence.backwards)):
        for chunk, count in enumerate(counts):
            if count != passes:
                yield f"{count} of {passes} {direction} passes ran through model chunk {chunk}"
    if evidence.skipped:
        yield f"the optimizer skipped {evidence.skipped} of {len(evidence.microbatches)} steps, as after an overflow"
    if evidence.steps != len(evidence.microbatches):
        yield f"the optimizer stepped {evidence.steps} times in {len(evidence.microbatches)} iterations"
    if evidence.optimizer_state_count == 0:
        yield "the optimizer keeps no states"
    elif evidence.stateless:
        yield f"the optimizer keeps no state of {evidence.stateless} of the tensors that it steps"
    for phase in STEP_PHASES:
        if not evidence.peak_by_phase.get(phase):
            yield f"nothing was allocated in the phase {phase!r}"
    if not evidence.peak_by_phase.get(evidence.peak_phase):
        yield f"the phase of the peak, {evidence.peak_phase!r}, never happened"


def failed(kind: str, what: str, detail: str = "") -> dict[str, str]:
    return {"kind": kind, "what": " ".join(what.split())[:LONGEST], "detail": detail}


def failure_of(error: BaseException, stderr: str = "") -> dict[str, str]:
    """Describe the failure. `stderr` is what the program wrote there: a parser says there what it refuses, and
    exits."""
    lines = stderr.strip().splitlines()
    message = lines[-1] if isinstance(error, SystemExit) and lines else f"{error}" or type(error).__name__
    kind = _kind(error)
    place = "" if kind == DISHONEST else _place(error)
    return failed(kind, f"{message} ({place})" if place else message, "".join(traceback.format_exception(error)))


def _kind(error: BaseException) -> str:
    if isinstance(error, IncompleteTrace):
        return DISHONEST
    missing = isinstance(error, ImportError)  # a package of the job's own that the environment of traces has not
    if missing or isinstance(error, NotImplementedError) or type(error).__name__ in NEEDS_VALUES:
        return UNSUPPORTED
    last = traceback.extract_tb(error.__traceback__)[-1:]
    theirs = bool(last) and any(f"{PACKAGES}{framework}" in last[0].filename for framework in FRAMEWORKS)
    return REFUSED if isinstance(error, SystemExit) or (isinstance(error, REFUSALS) and theirs) else ERROR


def _place(error: BaseException) -> str:
    """The innermost line of the frameworks' own Python: file and number."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        for framework in FRAMEWORKS:
            _, separator, tail = frame.filename.rpartition(f"{PACKAGES}{framework}")
            if separator:
                return f"{framework}{tail}:{frame.lineno}"
    return ""
