"""Lines of monitors are cumulative, so what they come to hangs neither on their order nor on one that is there twice,
and one more never lowers a peak."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from llmlaunch.rundir.monitor_samples import add_lines
from llmlaunch.rundir.peak_account import MemoryEvidence, node_summary, rank_summaries
from llmlaunch.rundir.probe_files import TorchPeaks
from llmlaunch.rundir.summary import RankSummary
from llmlaunch.units import GIB
from support.soak import examples

PIDS = ("1000", "1001", "9")  # of rank 0, of rank 1, of a neighbour
CARDS = ("GPU-a", "GPU-b")
PEAKS = ("device_peak_bytes", "process_peak_bytes", "accounting_peak_bytes", "resident_peak_bytes", "power_peak_watts")
amounts = st.integers(0, 80).map(lambda gib: gib * GIB)
by_pid = st.dictionaries(st.sampled_from(PIDS), amounts, max_size=3)


def cards(processes: st.SearchStrategy[Any]) -> st.SearchStrategy[list[dict[str, Any]]]:
    card = {
        "pci": st.just("00"), "index": st.just(0), "total_bytes": st.just(80 * GIB),
        "reserved_bytes": st.just(GIB // 2), "baseline_bytes": amounts, "device_peak_bytes": amounts,
        "process_peak_bytes": processes, "accounting_peak_bytes": processes, "power_watts": st.floats(0, 700),
        "power_peak_watts": st.floats(0, 700), "samples": st.integers(0, 9),
    }  # fmt: skip
    return st.tuples(*(st.fixed_dictionaries({"uuid": st.just(uuid), **card}) for uuid in CARDS)).map(list)


processes = st.lists(st.fixed_dictionaries({"rank": st.integers(0, 1), "resident_peak_bytes": amounts}), max_size=2)
hosts = st.fixed_dictionaries({"used_peak_bytes": amounts, "total_bytes": st.just(81 * GIB)})


def lines(of_processes: st.SearchStrategy[Any] = by_pid) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries(
        {
            "event": st.sampled_from(["start", "beat", "end", "nvml_stalled"]),
            "attempt": st.just("1.0"),
            "time": st.floats(1.0, 1e9),
            "gpus": cards(of_processes),
            "processes": processes,
            "host": hosts,
        }
    )


probes = st.lists(st.tuples(st.sampled_from(CARDS), amounts, amounts, st.integers(0, 1)), max_size=2)


def account(
    monitor_lines: list[dict[str, Any]], probed: list[tuple[str, int, int, int]]
) -> tuple[list[RankSummary], Any]:
    """Return the summaries of two ranks and of their node, from what its monitor wrote and what the probes say."""
    files = MemoryEvidence(run={"devices_per_node": 2, "nodes": 1, "pipeline": 1})
    files.ranks = [{"rank": rank, "local_rank": rank, "node": "n0", "program_pid": 1000 + rank} for rank in (0, 1)]
    files.probes = [

            TorchPeaks(
                rank=rank, device=0, uuid=uuid, node="n0", local_rank=rank, pid=1000 + rank, at=None, ended=True,
                total_bytes=80 * GIB, allocated_peak_bytes=None, active_peak_bytes=None, reserved_peak_bytes=reserved,
                reserved_bytes=reserved, alloc_retries=retries, ooms=0, device_used_bytes=None, outside_bytes=outside,
            )
            for rank, (uuid, reserved, outside, retries) in enumerate(probed)
    ]  # fmt: skip
    raw = [json.dumps(line).encode() + b"\n" for line in monitor_lines]
    assert add_lines(files.nodes, raw, "1.0", "n0") == 0
    return rank_summaries(files), [node_summary(node) for node in files.nodes.values()]


@examples(30, 2000)
@given(st.lists(lines(), min_size=1, max_size=5), probes, st.data())
def test_order_and_duplicates_change_nothing(
    monitor_lines: list[dict[str, Any]], probed: Any, data: st.DataObject
) -> None:
    again = data.draw(
        st.permutations([*monitor_lines, *data.draw(st.lists(st.sampled_from(monitor_lines), max_size=3))])
    )
    assert account(again, probed) == account(monitor_lines, probed)


@examples(30, 2000)
@given(st.lists(lines(), max_size=4), lines(), probes)
def test_a_line_more_lowers_nothing_that_was_seen(
    monitor_lines: list[dict[str, Any]], more: dict[str, Any], probed: Any
) -> None:
    before, nodes_before = account(monitor_lines, probed)
    after, nodes_after = account([*monitor_lines, more], probed)
    for was, now in zip(before, after, strict=True):
        same_card = was.gpu_uuid == now.gpu_uuid  # a process list may say that the rank's is the other one
        for name in PEAKS if same_card else ("resident_peak_bytes",):
            assert (getattr(now, name) or 0) >= (getattr(was, name) or 0), name
    for was, now in zip(nodes_before, nodes_after, strict=False):
        assert now.host_peak_bytes >= was.host_peak_bytes


@examples(30, 2000)
@given(st.lists(lines(st.just({})), min_size=1, max_size=4), lines(st.just({})), probes)
def test_nor_a_ranks_peak_while_it_teaches_of_no_other_process(
    monitor_lines: list[dict[str, Any]], more: dict[str, Any], probed: Any
) -> None:
    """Only what the device held before, who else used it, and the driver's own maximum can show that it was less."""
    before, _ = account(monitor_lines, probed)
    after, _ = account([*monitor_lines, more], probed)
    for was, now in zip(before, after, strict=True):
        assert (now.peak_bytes or 0) >= (was.peak_bytes or 0)
        assert (now.reserved_peak_bytes or 0) == (was.reserved_peak_bytes or 0)


@examples(30, 2000)
@given(st.lists(lines(), max_size=4), probes)
def test_a_peak_is_never_less_than_torch_holds_and_the_rest_is_never_negative(
    monitor_lines: list[dict[str, Any]], probed: Any
) -> None:
    for rank in account(monitor_lines, probed)[0]:
        if rank.reserved_peak_bytes is not None:
            assert (rank.peak_bytes or 0) >= rank.reserved_peak_bytes
        assert rank.outside_torch_bytes is None or rank.outside_torch_bytes >= 0
        named = {name for name in RankSummary.__dataclass_fields__ if getattr(rank, name) is not None}
        identity = {"rank", "pipeline_rank", "node", "local_rank", "pid", "peak_source", "at_least", "sources"}
        assert named <= set(rank.sources) | identity
