"""What cannot be traced is refused before it runs, a trace that skipped a part of the step fails, and both say why."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from llmlaunch.tracing import trace_checks as checks

DOCUMENTED = Path(__file__).resolve().parents[3] / "docs" / "tracing.md"
OFF = (
    *("fp8", "fp4", "use_megatron_fsdp", "use_torch_fsdp2", "fine_grained_activation_offloading", "moe_paged_stash"),
    *("cpu_offloading_num_layers", "enable_cuda_graph", "external_cuda_graph", "tp_comm_overlap"),
    "overlap_moe_expert_parallel_comm",
)
PLAIN = {**dict.fromkeys(OFF), "moe_token_dispatcher_type": "alltoall", "cuda_graph_impl": "none"}
COMPLETE = checks.TraceEvidence(
    microbatches=(4, 6),
    forwards=(10, 10),
    backwards=(10, 10),
    steps=2,
    skipped=0,
    parameter_count=1000,
    optimizer_state_count=3000,
    stateless=0,
    peak_phase="backward",
    peak_by_phase={"setup": 1, "forward": 8, "backward": 9, "optimizer step": 5},
)


def test_a_plain_job_is_traceable_and_a_whole_step_complete() -> None:
    checks.insist_traceable(SimpleNamespace(**PLAIN))
    checks.insist_complete(COMPLETE)


@pytest.mark.parametrize(
    ("arguments", "flag"),
    [
        ({"fp8": "hybrid"}, "--fp8-format"),
        ({"fp4": "e2m1"}, "--fp4-format"),
        ({"use_megatron_fsdp": True}, "--use-megatron-fsdp"),
        ({"use_torch_fsdp2": True}, "--use-torch-fsdp2"),
        ({"moe_token_dispatcher_type": "flex"}, "--moe-token-dispatcher-type flex"),
        ({"fine_grained_activation_offloading": True}, "--fine-grained-activation-offloading"),
        ({"cpu_offloading_num_layers": 2}, "--cpu-offloading-num-layers"),
        ({"cuda_graph_impl": "local"}, "--cuda-graph-impl"),
        ({"tp_comm_overlap": True}, "--tp-comm-overlap"),
        ({"moe_paged_stash": True}, "--moe-paged-stash"),
    ],
)
def test_each_is_said_by_its_flag_and_documented(arguments: dict[str, object], flag: str) -> None:
    with pytest.raises(checks.NotTraceable, match=flag) as caught:
        checks.insist_traceable(SimpleNamespace(**(PLAIN | arguments)))
    assert checks.failure_of(caught.value)["kind"] == "unsupported"
    assert f"`{flag}`" in DOCUMENTED.read_text()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"parameter_count": 0}, "the rank has no parameters"),
        ({"forwards": (10, 9)}, "9 of 10 forward passes ran through model chunk 1"),
        ({"backwards": (0, 10)}, "0 of 10 backward passes ran through model chunk 0"),
        ({"skipped": 1}, "the optimizer skipped 1 of 2 steps, as after an overflow"),
        ({"steps": 1}, "the optimizer stepped 1 times in 2 iterations"),
        ({"optimizer_state_count": 0}, "the optimizer keeps no states"),
        ({"stateless": 3}, "the optimizer keeps no state of 3 of the tensors that it steps"),
        ({"peak_phase": "nowhere"}, "the phase of the peak, 'nowhere', never happened"),
        ({"peak_by_phase": {"backward": 9, "forward": 8}}, "nothing was allocated in the phase 'optimizer step'"),
    ],
)
def test_what_did_not_run_is_said(change: dict[str, object], message: str) -> None:
    with pytest.raises(checks.IncompleteTrace) as caught:
        checks.insist_complete(replace(COMPLETE, **change))
    assert message in str(caught.value)
    assert checks.failure_of(caught.value)["kind"] == "dishonest"


def test_all_that_is_wrong_is_said_at_once() -> None:
    with pytest.raises(checks.IncompleteTrace, match=r"skipped 2 of 2 steps.*no states"):
        checks.insist_complete(replace(COMPLETE, skipped=2, optimizer_state_count=0))


@pytest.mark.parametrize(
    ("error", "stderr", "kind", "what"),
    [
        (SystemExit(2), "usage: ...\nerror: unrecognized: --x\n", "refused", "error: unrecognized: --x"),
        (ImportError("emerging-optimizers package is required"), "", "unsupported", "emerging-optimizers package is"),
        (checks.NotTraceable("no"), "", "unsupported", "no"),
        (KeyError("a"), "", "error", "a"),
    ],
)
def test_what_is_not_modelled_is_told_from_what_is_wrong(error: Exception, stderr: str, kind: str, what: str) -> None:
    failure = checks.failure_of(error, stderr)
    assert (failure["kind"], what in failure["what"]) == (kind, True)
