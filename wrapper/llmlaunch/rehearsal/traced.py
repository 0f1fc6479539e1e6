"""Ranks traced on this machine: the tracer of tracing/ under the trace environment's own Python, and what was alive at
their peaks by the names of the estimate's terms.

A trace says of every storage which line of which framework made it, in which phase and inside which part of the model
(tracing/live_storages.py). The rules below read that as of Megatron core 0.19 and Transformer Engine 2.20; whatever
they do not know, in these or other versions, is in the remainder and in no term.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import IO, Any

from llmlaunch.backends.argument import NodeVariable, Word, flag_groups, flag_of
from llmlaunch.backends.base import Rendered
from llmlaunch.backends.megatron.rank_alone import LEFT_OUT
from llmlaunch.errors import UserError
from llmlaunch.memory.estimator import RankEstimate
from llmlaunch.planner.plan import Plan
from llmlaunch.recipe.types import Recipe
from llmlaunch.rehearsal.deepspeed_trace import FORWARD, REMAINDER, deepspeed_job, deepspeed_terms
from llmlaunch.rehearsal.job_alone import JobAlone
from llmlaunch.rehearsal.place import TraceEnvironment, refuse_another_version
from llmlaunch.rehearsal.ranks import ON_TRACE, RankChoice, RehearsedRank
from llmlaunch.tracing import TRACER

__all__ = ["FORWARD", "REMAINDER", "terms_at_peak", "traced", "traced_job"]


Say = Callable[[str], None]
LAST_WORDS = 12  # lines

FRAMEWORKS = {"megatron-lm": "Megatron-LM", "deepspeed": "DeepSpeed"}
_WHY = {
    "refused": "{framework} refuses these arguments",
    "dishonest": "the trace would not have been true, so it says nothing",
    "unsupported": "this cannot be traced",
}


def traced(
    environment: TraceEnvironment,
    recipe: Recipe,
    plan: Plan,
    job: JobAlone,
    chosen: Sequence[RankChoice],
    say: Say,
) -> Iterator[RehearsedRank]:
    """Each of `chosen` as it is done; `job` is what is traced of the planned one. Whoever stops asking, or is
    interrupted, ends the tracer and all it has started.

    Raises:
        UserError: the environment's framework is not the job's, or a rank cannot be traced; with the reason.
    """
    notes = refuse_another_version(environment, recipe)
    jobs = [_job(job.recipe, plan, job.rendered, chosen_rank.pipeline_rank) for chosen_rank in chosen]
    ranks = {str(chosen_rank.pipeline_rank): chosen_rank for chosen_rank in chosen}
    side_by_side = min(len(ranks), os.cpu_count() or 1)
    say(f"Tracing {_named(chosen)} of {plan.layout.describe()} with {environment.folder}, a minute or so each...")
    framework = recipe.backend.name.partition("-")[0]
    for done, answer in enumerate(_answers(environment, framework, jobs, side_by_side), start=1):
        chosen_rank = ranks[answer["name"]]
        result = _rehearsed(chosen_rank, job, answer, environment, notes)
        say(f"pipeline rank {chosen_rank.pipeline_rank}: traced in {result.seconds:.0f} s ({done} of {len(ranks)})")
        yield result


def _job(recipe: Recipe, plan: Plan, rendered: Rendered, pipeline_rank: int) -> dict[str, Any]:
    if recipe.backend.name == "deepspeed":
        return deepspeed_job(recipe, rendered, plan.layout, pipeline_rank)
    return traced_job(recipe, rendered, pipeline_rank)


def _named(chosen: Sequence[RankChoice]) -> str:
    ranks = ", ".join(str(rank.pipeline_rank) for rank in chosen)
    return f"pipeline rank{'s' if len(chosen) > 1 else ''} {ranks}"


def _answers(
    environment: TraceEnvironment, framework: str, jobs: Sequence[Mapping[str, Any]], side_by_side: int
) -> Iterator[Mapping[str, Any]]:
    command = [str(environment.python), str(TRACER), "--framework", framework, "--processes", str(side_by_side)]
    missing = {job["name"] for job in jobs}
    with tempfile.TemporaryFile("w+", errors="replace") as complaints:
        tracer = _started(command, environment, complaints)
        try:
            assert tracer.stdin is not None
            assert tracer.stdout is not None
            with contextlib.suppress(BrokenPipeError):  # it ended at once: its last words say why
                tracer.stdin.write("".join(json.dumps(job) + "\n" for job in jobs))
                tracer.stdin.close()
            for line in tracer.stdout:
                answer = _read(line)
                if answer is not None and answer.get("name") in missing:
                    missing.discard(answer["name"])
                    yield answer
            code = tracer.wait()
        finally:
            _end(tracer)
        if missing:
            raise UserError(_ended_early(environment, code, complaints))


def _started(command: Sequence[str], environment: TraceEnvironment, complaints: IO[str]) -> subprocess.Popen[str]:
    """In a session of its own, so that Ctrl-C reaches it from here alone and takes its children along."""
    try:
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=complaints,
            text=True,
            env=environment.variables(),
            start_new_session=True,
        )
    except OSError as failure:
        raise UserError(f"{command[0]}: cannot be run: {failure.strerror}") from None


def _end(tracer: subprocess.Popen[str]) -> None:
    """All of its session; nothing is lost, since a trace writes no file."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(tracer.pid, signal.SIGKILL)
    for stream in (tracer.stdin, tracer.stdout):
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.close()
    tracer.wait()


def _read(line: str) -> dict[str, Any] | None:
    with contextlib.suppress(ValueError):
        answer = json.loads(line)
        return answer if isinstance(answer, dict) else None
    return None


def _ended_early(environment: TraceEnvironment, code: int, complaints: IO[str]) -> str:
    complaints.seek(0)
    last_lines = [line.rstrip() for line in complaints if line.strip()][-LAST_WORDS:]
    how = f"was killed by signal {-code} ({_SIGNALS.get(-code, 'unknown')})" if code < 0 else f"ended with code {code}"
    shown = "".join(f"\n  {line}" for line in last_lines)
    return f"the tracer of {environment.folder} {how} before it was done" + (
        f"; its last words:{shown}" if last_lines else ""
    )


_SIGNALS = {number.value: number.name for number in signal.Signals}


def _rehearsed(
    chosen: RankChoice,
    job: JobAlone,
    answer: Mapping[str, Any],
    environment: TraceEnvironment,
    notes: tuple[str, ...],
) -> RehearsedRank:
    if "trace" not in answer:
        raise UserError(_failure(job.recipe, chosen, answer.get("failure")))
    trace = answer["trace"]
    terms = deepspeed_terms if job.recipe.backend.name == "deepspeed" else terms_at_peak
    return RehearsedRank(
        pipeline_rank=chosen.pipeline_rank,
        on=ON_TRACE,
        predicted=chosen.predicted,
        allocated_bytes=trace["peak_bytes"],
        reserved_bytes=_replayed(job.rendered, trace),
        stands_for=chosen.stands_for,
        terms=terms(trace, chosen.predicted),
        versions=trace.get("versions") or environment.versions,
        seconds=float(trace["seconds"]),
        remarks=(*notes, *_fewer(trace)),
        tracer_bytes=trace.get("resident_peak_bytes"),
        omissions=job.omissions[chosen.pipeline_rank],
    )


def _fewer(trace: Mapping[str, Any]) -> Iterator[str]:
    """The tracer runs no more micro-batches than it takes to have as many alive as ever are."""
    planned, run = trace.get("microbatches", 0), max(trace.get("microbatches_run") or [0])
    if 0 < run < planned:
        yield f"{run} of {planned} micro-batches a step were run: the rank keeps no more alive with all of them"


def _replayed(rendered: Rendered, trace: Mapping[str, Any]) -> int | None:
    """What the allocator's replay reserved, under the way to make segments that the job asks for."""
    replay = trace.get("allocator")
    if not replay:
        return None
    expandable = "expandable_segments:True" in rendered.environment.get("PYTORCH_CUDA_ALLOC_CONF", "")
    reserved: int | None = replay["reserved_bytes"]["expandable" if expandable else "default"]
    return reserved


def _failure(recipe: Recipe, chosen: RankChoice, failure: Any) -> str:
    """What went wrong, in one message: the framework's own words, and for our own bug where it happened."""
    report = failure if isinstance(failure, dict) else {"kind": "error", "what": "", "detail": str(failure)}
    kind, what, detail = report.get("kind"), str(report.get("what") or ""), str(report.get("detail") or "")
    lines = [line for line in detail.splitlines() if line.strip()]
    if kind in _WHY:
        why = _WHY[kind].format(framework=FRAMEWORKS[recipe.backend.name])
        return f"{recipe.path}: pipeline rank {chosen.pipeline_rank}: {why}: {what or (lines or ['?'])[-1].strip()}"
    tail = "".join(f"\n  {line}" for line in lines[-LAST_WORDS:])
    return (
        f"{recipe.path}: pipeline rank {chosen.pipeline_rank}: the trace failed: {what or 'no reason was given'}{tail}"
    )


# The tokenizer's files lie on the cluster. What of it takes memory is the number of its words, which is said here.
TOKENIZER = frozenset(
    {"--tokenizer-type", "--tokenizer-model", "--vocab-size", "--padded-vocab-size", "--mock-data"}
    | {"--vocab-file", "--merge-file"}
)
DATA = ("--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size")


def traced_job(recipe: Recipe, rendered: Rendered, pipeline_rank: int) -> dict[str, Any]:
    """A job as tracing/trace_ranks.py reads it, named by its rank. What no rank alone needs is left out, as on a GPU:
    checkpoints, datasets and what follows a training (backends/megatron/alone.py).

    Raises UserError for a script of the person's own, whose model the tracer does not build."""
    if recipe.backend.script is not None:
        raise UserError(
            f"{recipe.path}: backend.script: {recipe.backend.script} cannot be traced: the tracer builds Megatron's "
            "own GPT model; rehearse on a GPU (--on gpu), or without backend.script"
        )
    _, *arguments_of_program = rendered.program  # the first is pretrain_gpt.py, whose work the tracer does
    groups = (group for group in flag_groups(arguments_of_program) if flag_of(group) not in LEFT_OUT.keys() | TOKENIZER)
    arguments = [_plain(word) for group in groups for word in group]
    return {
        "name": str(pipeline_rank),
        "world_size": recipe.world_size,
        "pipeline_rank": pipeline_rank,
        "arguments": [*arguments, *DATA, str(recipe.model.vocab_size)],
        "environment": dict(rendered.environment),
    }


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


def terms_at_peak(trace: Mapping[str, Any], predicted: RankEstimate) -> dict[str, int]:
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
