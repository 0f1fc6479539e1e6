"""The estimator against real Megatron core: one rank of a large job, run under fake tensors on this machine.

Megatron core 0.19.2 (its parser, DDP, distributed optimizer and schedules) and TransformerEngine 2.20.2 (its Python
layer over stand-ins for compiled kernels) allocate; every live "CUDA" storage is counted. What lasts must agree to the
byte, the peak within 3 %. The formula is not theirs: nothing is shared but the description of the job. A formula that
is wrong in one term fails one of the checks, and a training step that leaves a part out gives no trace.
"""

from __future__ import annotations

import json
import math
import subprocess
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import traced_cases
from judges import TRACED, megatron_python, megatron_versions
from traced_cases import ADAPTED, CASES, MANY_MICROBATCHES, PACKED, PADDED, TECHNIQUES, WHOLE_MATRICES, Case
from traces import Trace, traces_of
from wrong_formulas import Patch, everywhere, left_out, multiplied

from llmlaunch.effects import recompute
from llmlaunch.frameworks.framework import REMAINDER
from llmlaunch.frameworks.megatron.trace import megatron_terms
from llmlaunch.layers.columns import LayerColumns
from llmlaunch.layers.latent_attention import LatentAttention
from llmlaunch.layers.mixture import Mixture
from llmlaunch.memory import loss, schedule, states, tokens, weights, workspace
from llmlaunch.memory.peak import OUTSIDE_TORCH
from support.changed_facts import changed
from support.recorded import recorded
from support.soak import share

pytestmark = pytest.mark.frameworks

TraceOf = Callable[[Case], Trace]

ITERATIONS = 2  # the first makes the optimizer states, the second runs beside them
PEAK_TOLERANCE = 0.03
PARAMETER_BYTES, GRADIENT_BYTES, STATE_BYTES = 2, 4, 4  # bf16, fp32 accumulation, fp32 master and moments
ALLOCATION_BYTES = 512  # torch hands out no less
SECONDS = 600


# Traced in each `make test`: Transformer Engine's stand-ins for a mixture over tensor ranks. A rehearsal
# (test_rehearsals.py) traces Bridge's model with adapters.
LIVE = ("experts rank 0",)


@pytest.fixture(scope="module")
def trace(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TraceOf]:
    """Every case that a test of this run asks for."""
    items = [item for item in request.session.items if isinstance(item, pytest.Function)]
    params = [item.callspec.params for item in items if item.module is request.module and "trace" in item.fixturenames]
    cases = {value.name: value for each in params for value in each.values() if isinstance(value, Case)}
    jobs = {name: traced_job(case) for name, case in cases.items()}
    tracer = (megatron_python(), TRACED / "ranks_with_muon.py", "--framework", "megatron")
    with (
        recorded("megatron_traces", megatron_versions(), LIVE) as record,
        traces_of(jobs, tracer, record, tmp_path_factory.mktemp("tracer") / "errors") as trace_of,
    ):
        yield lambda case: trace_of(case.name)


def traced_job(case: Case) -> str:
    """Return what the tracer reads."""
    return json.dumps(
        {
            "name": case.name,
            "world_size": case.layout.world_size,
            "pipeline_rank": case.rank,
            "arguments": case.arguments(),
            "all_microbatches": case.all_microbatches,
            "adapters": _settings_of_lora(case),
            "packed": case.packed,
        }
    )


def _settings_of_lora(case: Case) -> dict[str, Any]:
    adapters = case.techniques.adapters
    if adapters is None:
        return {}
    targets = adapters.fused_targets(case.shape.gated_mlp) or ()
    if case.shape.mla is not None and "linear_qkv" in targets:
        latents = tuple(f"linear_{each}_proj" for each in ("q_down", "q_up", "kv_down", "kv_up"))
        targets = (*latents, *(name for name in targets if name != "linear_qkv"))
    return {"dim": adapters.rank, "alpha": adapters.rank, "target_modules": targets}


def ids(cases: Iterable[Case]) -> list[str]:
    return [case.name.replace(" ", "-") for case in cases]


def check_what_lasts(case: Case, traced: Trace) -> None:
    """Parameters, gradients and optimizer states, to the byte."""
    state, terms = traced["state"], case.estimate().terms
    padding = state["padded_count"] - state["parameter_count"]
    small = 128 if case.shape.attention_sinks else 512 if case.shape.mamba is not None else 0
    assert padding <= small  # sinks, and rates of state spaces, are few numbers a layer
    assert terms["parameters"] == PARAMETER_BYTES * state["parameter_count"]
    assert terms["gradients"] == GRADIENT_BYTES * state["parameter_count"]
    assert state["bytes"]["gradients"] == GRADIENT_BYTES * state["padded_count"]
    more = state["optimizer_state_count"] - terms["optimizer_states"] / STATE_BYTES
    assert -3 * padding <= more <= 3 * padding // case.layout.data  # this rank's share may hold all of it


def check_peak(case: Case, traced: Trace) -> None:
    """The most that torch handed out at once."""
    assert case.estimate().allocated_bytes == pytest.approx(traced["peak_bytes"], rel=PEAK_TOLERANCE)


every_case = pytest.mark.parametrize("case", CASES, ids=ids(CASES))


@every_case
def test_the_trace_is_honest(case: Case, trace: TraceOf) -> None:
    """Every micro-batch of every chunk ran forward and backward, and the optimizer stepped and has its states."""
    traced = trace(case)
    assert traced["microbatches"] == case.num_microbatches
    runs = sum(traced["microbatches_run"]) * case.layout.virtual_pipeline
    assert traced["calls"] == {"forward": runs, "backward": runs, "optimizer step": ITERATIONS}
    assert traced["chunks"] == case.layout.virtual_pipeline
    assert traced["state"]["optimizer_state_count"] > 0
    assert traced["parallel"]["data"] == case.layout.data


@every_case
def test_what_lasts_agrees_to_the_byte_and_is_alive_at_the_peak(case: Case, trace: TraceOf) -> None:
    traced = trace(case)
    check_what_lasts(case, traced)
    predicted = case.estimate()
    alive = megatron_terms(traced, predicted)
    padded = PARAMETER_BYTES * traced["state"]["padded_count"]
    assert alive["parameters"] == pytest.approx(padded, abs=ALLOCATION_BYTES)
    assert alive["gradients"] == traced["state"]["bytes"]["gradients"]
    before_the_first_step = traced["peak_phase"] == "setup"  # when there are no states
    assert alive.get("optimizer_states", 0) == (0 if before_the_first_step else traced["state"]["bytes"]["optimizer"])


@every_case
def test_the_peak_agrees_within_three_percent_and_all_of_it_has_a_name(case: Case, trace: TraceOf) -> None:
    traced = trace(case)
    check_peak(case, traced)
    alive = megatron_terms(traced, case.estimate())
    assert sum(alive.values()) == traced["peak_bytes"]
    assert 0 <= alive.get(REMAINDER, 0) < 0.002 * traced["peak_bytes"]


# Of these the estimate's worst moment is the trace's. Elsewhere two moments are close, and each names its own terms; or
# a layer's backward pass has let go of what it kept, which `layer_backward` is net of.
SAME_MOMENT = (
    *("8B rank 0", "8B rank 1", "8B rank 3", "full recompute rank 0", "full recompute rank 3"),
    *("recompute of attention", "recompute of the MLP", "interleaved rank 0", "GPT rank 0", "GPT rank 1"),
    "experts rank 1",
)
NAMED = {case.name: case for case in CASES}
NEAR = [NAMED[name] for name in SAME_MOMENT]


@pytest.mark.parametrize("case", NEAR, ids=ids(NEAR))
def test_every_term_is_near_its_estimate(case: Case, trace: TraceOf) -> None:
    """Within 1 % of the peak."""
    traced, predicted = trace(case), case.estimate()
    alive = megatron_terms(traced, predicted)
    for term in {*alive, *predicted.terms} - {*OUTSIDE_TORCH, "allocator_cache"}:
        expected = predicted.terms.get(term, 0)
        assert alive.get(term, 0) == pytest.approx(expected, abs=0.01 * traced["peak_bytes"]), term


@pytest.mark.parametrize("case", TECHNIQUES, ids=ids(TECHNIQUES))
def test_peaks_under_techniques_agree_within_three_percent(case: Case, trace: TraceOf) -> None:
    check_peak(case, trace(case))


@pytest.mark.parametrize("case", ADAPTED, ids=ids(ADAPTED))
def test_adapters_of_bridge_take_what_is_planned(case: Case, trace: TraceOf) -> None:
    """Gradients and optimizer states are of the adapters alone, to the byte."""
    traced, terms = trace(case), case.estimate().terms
    state = traced["state"]
    assert terms["parameters"] == PARAMETER_BYTES * state["parameter_count"]
    assert terms["gradients"] == GRADIENT_BYTES * state["padded_count"]
    assert terms["optimizer_states"] == STATE_BYTES * state["optimizer_state_count"]
    assert state["padded_count"] < 0.01 * state["parameter_count"]
    check_peak(case, traced)


@pytest.mark.parametrize("case", PACKED, ids=ids(PACKED))
def test_packed_rows_take_what_a_full_sequence_does(case: Case, trace: TraceOf) -> None:
    check_peak(case, trace(case))


@pytest.mark.parametrize("case", WHOLE_MATRICES, ids=ids(WHOLE_MATRICES))
def test_matrices_that_no_rank_may_cut_take_what_is_planned(case: Case, trace: TraceOf) -> None:
    """Buffers with their padding, and momentum and main parameters of the rank's own matrices."""
    traced, terms = trace(case), case.estimate().terms
    state = traced["state"]
    few = 2000 * case.layout.virtual_pipeline  # of what AdamW updates, each bucket ends at a whole number of shards
    assert state["padded_count"] - few <= terms["gradients"] / GRADIENT_BYTES <= state["padded_count"]
    assert terms["parameters"] / PARAMETER_BYTES == pytest.approx(terms["gradients"] / GRADIENT_BYTES, abs=1)
    assert terms["optimizer_states"] / STATE_BYTES - state["optimizer_state_count"] + 3 * few >= 0
    check_peak(case, traced)


@pytest.mark.parametrize("case", [PADDED], ids=["six-ways"])
def test_padding_of_gradient_buckets_is_too_small_to_model(case: Case, trace: TraceOf) -> None:
    """Each bucket ends at a multiple of lcm(data x context, 128) elements (megatron/core/optimizer/param_layout.py
    bucket_end_divisor, core 0.19), and there is a bucket for every 40 million parameters."""
    state = trace(case)["state"]
    padding = state["padded_count"] - state["parameter_count"]
    buckets = math.ceil(state["parameter_count"] / 40e6)
    assert 0 < padding < buckets * math.lcm(case.layout.data * case.layout.context, 128)
    assert case.estimate().terms["gradients"] == GRADIENT_BYTES * state["parameter_count"]


PHASES = ("forward", "backward")
WITH_ALL = [(case, replace(case, name=f"{case.name}, all", all_microbatches=True)) for case in MANY_MICROBATCHES]


@pytest.mark.parametrize(("case", "all_of_it"), WITH_ALL, ids=ids(MANY_MICROBATCHES))
def test_a_few_micro_batches_show_the_peak_of_all(case: Case, all_of_it: Case, trace: TraceOf) -> None:
    """In every phase, but for what the last stage keeps of the loss of each micro-batch."""
    few, every = trace(case), trace(all_of_it)
    assert every["microbatches_run"] == [case.num_microbatches] * 2
    assert few["microbatches_run"][1] < case.num_microbatches == few["microbatches"]
    last = case.rank == case.layout.pipeline - 1
    losses = (case.num_microbatches - few["microbatches_run"][1]) * ALLOCATION_BYTES if last else 0
    assert every["peak_bytes"] - few["peak_bytes"] == losses
    assert every["peak_phase"] == few["peak_phase"]
    assert {phase: every["peak_by_phase"][phase] - few["peak_by_phase"][phase] for phase in PHASES} == dict.fromkeys(
        PHASES, losses
    )


@dataclass(frozen=True)
class Wrong:
    """A mistake one could make, the check that must notice it, and the case it must be noticed in."""

    what: str
    make: Callable[[Patch], None]
    check: Callable[[Case, Trace], None]
    case: str


def facts(**changes: Any) -> Callable[[Patch], None]:
    """What the backend says, with a figure changed."""

    def make(patch: Patch) -> None:
        right = traced_cases.megatron_facts
        patch.setattr(traced_cases, "megatron_facts", lambda options: changed(right(options), **changes))

    return make


def sequence_parallelism_ignored(patch: Patch) -> None:
    everywhere(patch, tokens.sequence_split, lambda job, rows: np.ones(len(rows)))
    patch.setattr(LayerColumns, "sequence_split", property(lambda c: np.ones(len(c))))


def one_microbatch_more(patch: Patch) -> None:
    right = schedule.in_flight

    def wrong(job: Any, rows: Any) -> schedule.InFlight:
        alive = right(job, rows)
        more = (alive.depth + 1.0) / alive.depth
        layers = tuple(count * more for count in alive.alive)
        return schedule.InFlight(layers, alive.depth + 1.0, alive.heads * more)

    everywhere(patch, right, wrong)


def chunks_as_if_not_interleaved(patch: Patch) -> None:
    right = schedule.in_flight

    def wrong(job: Any, rows: Any) -> schedule.InFlight:
        plain = replace(rows, layouts=replace(rows.layouts, virtual_pipeline=np.ones_like(rows.rank)))
        return right(job, plain)

    everywhere(patch, right, wrong)


def experts_sharded_as_the_rest(patch: Patch) -> None:
    right = states.shard_groups
    everywhere(patch, right, lambda job, rows: (right(job, rows)[0],) * 2)


def every_token_at_one_expert(patch: Patch) -> None:
    right = Mixture.routed_tokens
    patch.setattr(Mixture, "routed_tokens", lambda mixture, c: right(mixture, c) / mixture.topk)


def latent_projections_not_kept(patch: Patch) -> None:
    right = LatentAttention.saved

    def wrong(attention: LatentAttention, c: LayerColumns) -> Any:
        return {name: tensor for name, tensor in right(attention, c).items() if name != "attn_qkv"}

    patch.setattr(LatentAttention, "saved", wrong)


def head_forgotten(patch: Patch) -> None:
    right = weights.tables
    everywhere(patch, right, lambda job, rows: (right(job, rows)[0], np.zeros(len(rows))))


def embedding_let_go(patch: Patch) -> None:
    everywhere(patch, workspace.embedding_backward, lambda job, rows, activations: np.zeros(len(rows)))


LASTING, PEAK = check_what_lasts, check_peak
WRONG = (
    Wrong("gradients of 2 bytes", facts(gradient_bytes=2.0), LASTING, "8B rank 0"),
    Wrong("one moment instead of two", facts(optimizer_bytes=8.0), LASTING, "8B rank 0"),
    Wrong("optimizer not sharded over context", facts(shard_over_context=False), LASTING, "context parallel rank 0"),
    Wrong("experts sharded as the rest", experts_sharded_as_the_rest, LASTING, "experts rank 0"),
    Wrong("no output head", head_forgotten, LASTING, "8B rank 3"),
    Wrong("no stubs for weight gradients", facts(weight_gradient_stubs=False), PEAK, "8B rank 3"),
    Wrong("keys and values of every query head", facts(key_values_expanded=True), PEAK, "8B rank 0"),
    Wrong("silu kept beside gate and up", facts(gated_activation_fused=False), PEAK, "8B rank 1"),
    Wrong("sequence parallelism ignored", sequence_parallelism_ignored, PEAK, "8B rank 0"),
    Wrong("one micro-batch more in flight", one_microbatch_more, PEAK, "8B rank 1"),
    Wrong("not interleaved", chunks_as_if_not_interleaved, PEAK, "interleaved rank 0"),
    Wrong("no logits", left_out(loss.logits), PEAK, "8B rank 3"),
    Wrong("logits without their fp32 copy", facts(logit_bytes=2.0), PEAK, "one pipeline rank"),
    Wrong("parameters made in their buffers", facts(moved_to_buffers=False), PEAK, "before the first step"),
    Wrong("a tied table's gradients not summed", left_out(loss.table_sum), PEAK, "a tied table"),
    Wrong(
        "prediction heads keep nothing",
        left_out(loss.saved_by_heads),
        PEAK,
        "prediction heads on one rank",
    ),
    Wrong("their losses keep nothing", facts(kept_logit_bytes=0.0), PEAK, "prediction heads"),
    Wrong("exchanges let go at once", facts(exchanges_held=False), PEAK, "many experts over tensor ranks"),
    Wrong("nothing computed again", left_out(recompute.recomputed_layer), PEAK, "full recompute rank 0"),
    Wrong("no gradients of activations", left_out(workspace.layer_backward), PEAK, "full recompute rank 0"),
    Wrong("no gradient of the embedding table", embedding_let_go, PEAK, "a table larger than its layer"),
    Wrong("two layers computed again", multiplied(recompute.recomputed_layer, 2.0), PEAK, "full recompute rank 0"),
    Wrong("one expert a token", every_token_at_one_expert, PEAK, "experts rank 0"),
    Wrong("latent projections not kept", latent_projections_not_kept, PEAK, "latent attention"),
)


@pytest.mark.parametrize(
    ("wrong", "case"),
    [pytest.param(wrong, NAMED[wrong.case], id=wrong.what.replace(" ", "-")) for wrong in WRONG],
)
def test_a_formula_wrong_in_one_term_is_caught(wrong: Wrong, case: Case, trace: TraceOf, monkeypatch: Patch) -> None:
    traced = trace(case)
    wrong.check(case, traced)  # the right one passes
    wrong.make(monkeypatch)
    with pytest.raises(AssertionError):
        wrong.check(case, traced)


# What the tracer says of each is tested in tests/unit/tracing/test_trace_checks.py; here, that Megatron shows it.
BROKEN = {
    "numbers_of_fp16": "",  # nothing is left out
    "one_micro_batch_fewer": "3 of 4 forward passes ran through model chunk 0",
    "no_backward_pass": "0 of 4 backward passes ran through model chunk 0",
    "an_optimizer_that_does_nothing": "the optimizer keeps no state of 8 of the tensors that it steps",
    "an_overflow": "the optimizer skipped 2 of 2 steps, as after an overflow",
    "a_step_that_is_not_taken": "the optimizer stepped 1 times in 2 iterations",
}
TRIED = share(BROKEN, ("an_optimizer_that_does_nothing",))


@pytest.fixture(scope="module")
def broken() -> dict[str, Trace]:
    """A training step traced again and again, each time with another part left out."""
    command = (megatron_python(), TRACED / "broken_ranks.py", *TRIED, "an_argument_of_nobody")
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return {answer["name"]: answer for answer in map(json.loads, done.stdout.splitlines())}


@pytest.mark.parametrize("name", TRIED)
def test_a_step_without_a_part_of_it_is_not(name: str, broken: dict[str, Trace]) -> None:
    failure = broken[name].get("failure")
    if not BROKEN[name]:
        assert failure is None
        return
    assert failure["kind"] == "dishonest", failure["detail"]
    assert BROKEN[name] in failure["what"]


def test_what_megatron_refuses_is_said_in_its_own_words(broken: dict[str, Trace]) -> None:
    """As `rehearse` says it to a person (tests/unit/cli/test_rehearse.py)."""
    failure = broken["an_argument_of_nobody"]["failure"]
    assert failure["kind"] == "refused", failure["detail"]
    assert "--no-such-flag" in failure["what"]
