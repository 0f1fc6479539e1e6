"""A node is left out on two independent signs: hard evidence is both at once, a pointer alone is one."""

from __future__ import annotations

from typing import Any

import pytest

from llmlaunch.causes.cause import cause
from llmlaunch.causes.suspects import (
    most_left_out,
    nodes_to_leave_out,
    signs_against,
    with_first_crash,
    with_slow_nodes,
)
from llmlaunch.rundir.slow_devices import SlowDevice

XID = cause("gpu_lost", "n1", "Xid 79", "kernel", sick=True)
PREFLIGHT = cause("preflight", "n1", "no working GPU", "preflight", sick=True)
LOST = cause("node_fail", "n1", "Node failure on n1", "slurm", sick=True, nodes=["n1", "n2"])
FILES = cause("file_system", "n1", "Stale file handle", "log", sick=True)
NAMES = cause("name_resolution", "n1", "Temporary failure in name resolution", "log", sick=True)
POINTED = cause("hung", "n1", "rank 3 never came", "watchdog", suspects={"n1": ["flight_recorder"]})
SILENT = cause("hung", "n1", "rank 3 never came", "watchdog", suspects={"n1": ["flight_recorder", "no_answer"]})
CRASH = cause("crash", "n1", "rank 3 was ended by SIGBUS", "ranks", suspects={"n1": ["crash"]})
OOM = cause("oom", "n1", "CUDA out of memory", "log")


@pytest.mark.parametrize(
    ("record", "signs"),
    [
        pytest.param(XID, {"n1": 2}, id="a lost GPU is enough"),
        pytest.param(PREFLIGHT, {"n1": 2}, id="so is the preflight"),
        pytest.param(LOST, {"n1": 2, "n2": 2}, id="and SLURM's word"),
        pytest.param(SILENT, {"n1": 2}, id="others wait for it, and it gives no answer"),
        pytest.param(FILES, {"n1": 1}, id="a file system, which others may have broken"),
        pytest.param(NAMES, {"n1": 1}, id="a name server, too"),
        pytest.param(POINTED, {"n1": 1}, id="others wait for it"),
        pytest.param(OOM, {}, id="a program that needs too much"),
        pytest.param(None, {}, id="nothing"),
    ],
)
def test_signs_of_a_cause(record: dict[str, Any] | None, signs: dict[str, int]) -> None:
    assert signs_against(record) == signs


@pytest.mark.parametrize(
    ("causes", "left_out"),
    [
        ([XID], ["n1"]),
        ([POINTED], []),
        ([POINTED, POINTED], ["n1"]),  # in two attempts
        ([FILES, OOM, NAMES], ["n1"]),  # of two kinds
        ([CRASH, POINTED], ["n1"]),
        ([CRASH, CRASH, CRASH], []),  # the program is the same each time
        ([XID, OOM], []),  # it was left out before
        ([POINTED, {**POINTED, "suspects": {"n2": ["flight_recorder"]}}], []),  # another node each time
        ([], []),
    ],
)
def test_nodes_that_the_next_start_of_a_job_leaves_out(causes: list[dict[str, Any]], left_out: list[str]) -> None:
    assert nodes_to_leave_out(causes) == left_out


def test_the_node_that_crashed_first_is_suspected_where_the_program_had_trained_on_several() -> None:
    crash = cause("crash", "n1", "-", "ranks")
    assert with_first_crash(crash, made_a_step=True, nodes=2)["suspects"] == {"n1": ["crash"]}
    for made_a_step, nodes, record in ((False, 2, crash), (True, 1, crash), (True, 2, {**crash, "consequence": True})):
        assert "suspects" not in with_first_crash(record, made_a_step, nodes)


@pytest.mark.parametrize("suspects", ["n1", {"--exclude": ["x"]}, {"n1": "crash"}, {"a\x1b": ["x"]}])
def test_what_a_hostile_file_calls_suspects_counts_for_nothing(suspects: object) -> None:
    assert signs_against({**OOM, "suspects": suspects}) == {}


def test_no_more_than_one_node_in_twenty_is_left_out_and_one_of_a_small_partition() -> None:
    assert [most_left_out(nodes) for nodes in (0, 1, 19, 39, 40, 100, 2048)] == [1, 1, 1, 1, 2, 5, 102]


def test_a_slow_node_is_a_sign_of_its_own_beside_what_ended_the_attempt() -> None:
    slow = [SlowDevice("n1", 3, "GPU-3", 2.0, 1e9, ()), SlowDevice("n2", 0, "GPU-0", 1.2, 1e9, ())]
    assert signs_against(with_slow_nodes(OOM, slow)) == {"n1": 1, "n2": 1}
    assert signs_against(with_slow_nodes(POINTED, slow)) == {"n1": 2, "n2": 1}
    assert with_slow_nodes(CRASH, slow)["suspects"] == {"n1": ["crash", "slow"], "n2": ["slow"]}
    assert with_slow_nodes(OOM, []) == OOM
    assert nodes_to_leave_out([with_slow_nodes(OOM, slow[:1])] * 2) == ["n1"]
