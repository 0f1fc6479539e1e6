"""What cannot be traced is refused before it runs, by its flag, and the documentation says so."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from tracer_modules import tracer_module

obstacles, failures = tracer_module("obstacles"), tracer_module("failures")

DOCUMENTED = Path(__file__).resolve().parents[3] / "docs" / "tracing.md"
PLAIN = {
    "fp8": None,
    "fp4": None,
    "use_megatron_fsdp": False,
    "use_torch_fsdp2": False,
    "moe_token_dispatcher_type": "alltoall",
    "fine_grained_activation_offloading": False,
    "cpu_offloading_num_layers": 0,
    "cuda_graph_impl": "none",
    "enable_cuda_graph": False,
    "external_cuda_graph": False,
    "tp_comm_overlap": False,
    "overlap_moe_expert_parallel_comm": False,
    "moe_paged_stash": False,
}


def test_a_plain_job_meets_none() -> None:
    obstacles.insist_traceable(SimpleNamespace(**PLAIN))


@pytest.mark.parametrize(
    ("asked", "flag"),
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
        ({"overlap_moe_expert_parallel_comm": True}, "--overlap-moe-expert-parallel-comm"),
        ({"moe_paged_stash": True}, "--moe-paged-stash"),
    ],
)
def test_each_is_said_by_its_flag_and_documented(asked: dict[str, object], flag: str) -> None:
    with pytest.raises(failures.Unsupported, match=flag) as caught:
        obstacles.insist_traceable(SimpleNamespace(**(PLAIN | asked)))
    assert failures.failure_of(caught.value)["kind"] == "unsupported"
    assert f"`{flag}`" in DOCUMENTED.read_text()


def test_a_package_of_the_jobs_own_that_is_missing_is_none_of_its_faults() -> None:
    failure = failures.failure_of(ImportError("emerging-optimizers package is required"))
    assert failure["kind"] == "unsupported"
