"""A formula that is wrong in one term is caught: each wrong one fails a check that the right one passes.

The traces and the checks are those of test_megatron_traced.py. Nothing else is traced for this.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import traced_cases
from traced_cases import CASES, Case
from traced_runs import LONGEST_WAIT_SECONDS, Trace, check_peak, check_what_lasts

from llmlaunch.memory import loss, saved, schedule, states, weights, workspace

pytestmark = pytest.mark.frameworks

Patch = pytest.MonkeyPatch
NAMED = {case.name: case for case in CASES}


@dataclass(frozen=True)
class Wrong:
    """A mistake one could make, the check that must notice it, and the case it must be noticed in."""

    what: str
    make: Callable[[Patch], None]
    check: Callable[[Case, Trace], None]
    case: str


def everywhere(patch: Patch, right: Callable[..., Any], wrong: Callable[..., Any]) -> None:
    """In every module of the formula that took this function by its name."""
    places = [
        (module, name)
        for path, module in list(sys.modules.items())
        if path.startswith("llmlaunch.memory.")
        for name, value in vars(module).items()
        if value is right
    ]
    assert places
    for module, name in places:
        patch.setattr(module, name, wrong)


def facts(**changes: Any) -> Callable[[Patch], None]:
    """What the backend says, with a figure changed."""

    def make(patch: Patch) -> None:
        right = traced_cases.megatron_facts
        patch.setattr(traced_cases, "megatron_facts", lambda options: replace(right(options), **changes))

    return make


def left_out(right: Callable[..., Any]) -> Callable[[Patch], None]:
    """A term that is always zero."""
    return lambda patch: everywhere(patch, right, lambda job, rows: np.zeros(len(rows)))


def multiplied(right: Callable[..., Any], factor: float) -> Callable[[Patch], None]:
    return lambda patch: everywhere(patch, right, lambda job, rows: factor * right(job, rows))


def sequence_parallelism_ignored(patch: Patch) -> None:
    everywhere(patch, saved.sequence_split, lambda job, rows: np.ones(len(rows)))


def one_microbatch_more(patch: Patch) -> None:
    right = schedule.in_flight

    def wrong(job: Any, rows: Any) -> schedule.InFlight:
        alive = right(job, rows)
        more = (alive.depth + 1.0) / alive.depth
        return schedule.InFlight(alive.dense * more, alive.mixture * more, alive.depth + 1.0)

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
    right = saved.routed_tokens
    everywhere(patch, right, lambda job, rows: right(job, rows) / job.shape.moe.topk)


def latent_projections_not_kept(patch: Patch) -> None:
    right = saved._latents

    def wrong(job: Any, rows: Any) -> Any:
        return {name: column for name, column in right(job, rows).items() if name != "attn_qkv"}

    patch.setattr(saved, "_latents", wrong)


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
    Wrong("nothing computed again", left_out(workspace.recomputed_layer), PEAK, "full recompute rank 0"),
    Wrong("no gradients of activations", left_out(workspace.layer_backward), PEAK, "full recompute rank 0"),
    Wrong("no gradient of the embedding table", embedding_let_go, PEAK, "a table larger than its layer"),
    Wrong("two layers computed again", multiplied(workspace.recomputed_layer, 2.0), PEAK, "full recompute rank 0"),
    Wrong("one expert a token", every_token_at_one_expert, PEAK, "experts rank 0"),
    Wrong("latent projections not kept", latent_projections_not_kept, PEAK, "latent attention"),
)


@pytest.mark.parametrize(
    ("wrong", "case"),
    [(wrong, NAMED[wrong.case]) for wrong in WRONG],
    ids=[wrong.what.replace(" ", "-") for wrong in WRONG],
)
def test_a_formula_wrong_in_one_term_is_caught(
    wrong: Wrong, case: Case, traces: dict[str, Future[Trace]], monkeypatch: pytest.MonkeyPatch
) -> None:
    traced = traces[case.name].result(LONGEST_WAIT_SECONDS)
    wrong.check(case, traced)  # the right one passes
    wrong.make(monkeypatch)
    with pytest.raises(AssertionError):
        wrong.check(case, traced)
