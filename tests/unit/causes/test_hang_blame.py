"""Who is to blame for a hang: the end of the chain of those who wait, by the flight recorder's dumps; and nobody where
the program itself is wrong."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from llmlaunch.causes.attempt_cause import cause_of
from llmlaunch.causes.flight_recorder import dump_of
from llmlaunch.causes.hang_blame import Roots, find_roots
from llmlaunch.rundir.attempt import Attempt
from support.flight_dumps import Recorder, write_dumps

DUMPS = Path(__file__).parents[2] / "data" / "flight"
"""What PyTorch itself wrote: rank 3 sleeps before its fourth all_reduce of the group TENSOR; rank 2 waits for it there,
and 0 and 1 wait for both in the default group."""

WORLD = {"0": [0, 1, 2, 3], "1": [0, 1], "2": [2, 3], "3": [0, 2], "4": [1, 3]}


def roots(*recorders: Recorder) -> Roots | None:
    return find_roots({recorder.rank: dump_of(recorder.content(), recorder.rank) for recorder in recorders})


def world(forgotten: int = 0) -> list[Recorder]:
    return [Recorder(rank, WORLD, forgotten) for rank in range(4)]


@pytest.mark.parametrize("form", ["plain", "json"])
def test_real_dumps_of_gloo_lead_to_the_rank_that_sleeps(form: str) -> None:
    found = find_roots({rank: dump_of((DUMPS / f"{form}_{rank}").read_bytes(), rank) for rank in range(4)})
    assert found is not None
    assert (found.kind, found.ranks, found.label, found.operation.name) == ("absent", (3,), "TENSOR", "all_reduce")
    assert found.waiting == 3


def test_a_chain_over_several_groups_ends_at_the_rank_that_waits_for_nobody() -> None:
    """3 is away; 1 waits for it in group 4, 0 for 1 in group 1, and 2 for 0 in group 3."""
    ranks = world()
    for recorder in ranks:
        recorder.collective("0", 1)
    ranks[1].collective("4", 1, "scheduled")
    ranks[0].collective("1", 1, "scheduled")
    ranks[2].collective("3", 1, "scheduled")
    found = roots(*ranks)
    assert found is not None
    assert (found.kind, found.ranks, found.waiting) == ("absent", (3,), 3)
    assert (found.operation.group, found.operation.number) == ("4 (1, 3)", 1)


def test_a_rank_without_a_dump_is_the_root_where_others_wait_for_it() -> None:
    first, second, third, _ = world()
    for recorder in (first, second, third):
        recorder.collective("0", 5, "started")
    found = roots(first, second, third)
    assert found is not None
    assert found.ranks == (3,)
    unread = {recorder.rank: dump_of(recorder.content(), recorder.rank) for recorder in (first, second, third)}
    assert find_roots(unread, unread=[3]) is None  # it left a dump that nobody looked into


@pytest.mark.parametrize(
    "forgotten", [pytest.param(0, id="all remembered"), pytest.param(5000, id="the oldest forgotten")]
)
def test_a_pipeline_that_waits_for_its_first_stage(forgotten: int) -> None:
    """1 waits for 0, 2 for 1, in batches of sends and recvs; 3 has an open recv to which 2 has not come."""
    ranks = [Recorder(rank, {"0": [0, 1, 2, 3]}, forgotten) for rank in range(4)]
    for rank in (1, 2, 3):
        ranks[rank - 1].send("0", rank, 1, "scheduled")
        ranks[rank - 1].batch_end("0", 1, "completed")
        ranks[rank].recv("0", rank - 1, 1, "scheduled")
        ranks[rank].batch_end("0", 1, "completed")
        ranks[rank].recv("0", rank - 1, 2, "scheduled")
        ranks[rank].batch_end("0", 2, "started")
    found = roots(*ranks)
    assert found is not None
    assert (found.kind, found.ranks, found.waiting, found.operation.name) == ("absent", (0,), 3, "recv")


def test_a_send_and_its_recv_that_are_both_open_wait_for_nobody() -> None:
    ranks = [Recorder(rank, {"0": [0, 1]}, 100) for rank in range(2)]
    ranks[0].send("0", 1, 9, "started")
    ranks[1].recv("0", 0, 4, "started")
    assert roots(*ranks) is None


@pytest.mark.parametrize(
    ("change", "other"),
    [
        pytest.param({"name": "broadcast"}, "broadcast", id="another operation"),
        pytest.param({"size": 8}, "all_reduce", id="another size"),
    ],
)
def test_operations_that_do_not_fit_are_the_programs_fault(change: dict[str, Any], other: str) -> None:
    ranks = world()
    for recorder in ranks:
        recorder.collective("0", 3, "started", **(change if recorder.rank == 2 else {}))
    found = roots(*ranks)
    assert found is not None
    assert (found.kind, found.ranks, found.other_rank) == ("mismatch", (), 2)
    assert found.other is not None
    assert found.other.name == other


def test_ranks_that_wait_for_each_other_in_a_circle_are_the_programs_fault() -> None:
    """Two groups, entered in different order."""
    first, second = (Recorder(rank, {"1": [0, 1], "2": [0, 1]}) for rank in range(2))
    first.collective("1", 1, "scheduled")
    second.collective("2", 1, "scheduled")
    found = roots(first, second)
    assert found is not None
    assert (found.kind, found.ranks) == ("circle", ())


def test_all_came_and_one_device_does_not_get_on() -> None:
    ranks = world()
    for recorder in ranks:
        recorder.collective("0", 7, "scheduled" if recorder.rank == 1 else "started")
    found = roots(*ranks)
    assert found is not None
    assert (found.kind, found.ranks) == ("stuck", (1,))


def test_what_is_asynchronous_and_completed_by_all_blames_nobody() -> None:
    ranks = world()
    for recorder in ranks:
        recorder.collective("0", 1)
    ranks[0].collective("0", 2)
    assert roots(*ranks) is None


class Hang:
    """An attempt of four ranks on two nodes that the watchdog has ended."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.folder = directory / "attempts" / "7.0"
        self.folder.mkdir(parents=True)
        (directory / "run.json").write_text(json.dumps({"schema": 1, "nodes": 2, "devices_per_node": 2}))
        (self.folder / "attempt.json").write_text(json.dumps({"schema": 1, "nodes": ["n1", "n2"]}))
        hung = {"since_seconds": 700, "allowed_seconds": 600, "what": "a step", "where": ""}
        (self.folder / "progress.json").write_text(json.dumps({"step": 8, "hung": hung}))

    def answers(self, *ranks: int) -> None:
        (self.folder / "stacks").mkdir()
        for rank in ranks:
            (self.folder / "stacks" / f"{rank}.txt").write_text("Current thread 0x1 (most recent call first):\n")

    def dumps(self, *ranks: int) -> None:
        (self.folder / "flight").mkdir()
        for rank in ranks:
            shutil.copy(DUMPS / f"plain_{rank}", self.folder / "flight" / f"rank_{rank}")

    def cause(self) -> dict[str, Any]:
        ranks = [
            {"rank": rank, "local_rank": rank % 2, "node": f"n{1 + rank // 2}", "signal": "SIGTERM", "ended_at": 9.0}
            for rank in range(4)
        ]
        cause = cause_of(Attempt(self.directory, "7.0"), ranks, 1)
        assert cause is not None
        return cause


@pytest.fixture
def hang(tmp_path: Path) -> Hang:
    return Hang(tmp_path)


def test_the_cause_names_rank_device_and_node(hang: Hang) -> None:
    hang.dumps(0, 1, 2, 3)
    hang.answers(0, 1, 2, 3)
    cause = hang.cause()
    assert (cause["kind"], cause["rank"], cause["node"], cause["sick"]) == ("hung", 3, "n2", False)
    why = "rank 3 (device 1 of n2) never came to all_reduce 4 of group TENSOR; 3 ranks wait for it, or for those who do"
    assert cause["blame"] == {"kind": "absent", "rank": 3, "device": 1, "node": "n2", "ranks": [3], "why": why}
    assert cause["line"].startswith(f"{why}; no progress for 700 s")
    assert cause["suspects"] == {"n2": ["flight_recorder"]}


def test_a_rank_that_gave_no_answer_either_is_a_second_sign(hang: Hang) -> None:
    hang.dumps(0, 1, 2, 3)
    hang.answers(0, 1, 2)
    assert hang.cause()["suspects"] == {"n2": ["flight_recorder", "no_answer"]}


def test_without_a_flight_recorder_those_without_an_answer_are_named(hang: Hang) -> None:
    hang.answers(0, 1)
    assert "blame" not in hang.cause()  # half of them: something else is wrong
    (hang.folder / "stacks" / "2.txt").write_text("Thread")
    cause = hang.cause()
    assert cause["blame"]["why"] == "rank 3 (device 1 of n2) gave no answer"
    assert cause["suspects"] == {"n2": ["no_answer"]}


def test_a_hostile_dump_is_a_message_and_the_others_still_count(hang: Hang) -> None:
    hang.dumps(0, 1, 2)
    (hang.folder / "flight" / "rank_3").write_bytes(b"\x80\x02cos\nsystem\n(X\x05\x00\x00\x00touchtR.")
    cause = hang.cause()
    assert (cause["kind"], cause["blame"]["rank"]) == ("hung", 2)  # gloo notes no members: 2 is the last that is known
    for rank in (0, 1, 2):
        (hang.folder / "flight" / f"rank_{rank}").write_bytes(b"{")
    cause = hang.cause()
    assert "flight/rank_0:" in cause["line"]
    assert "blame" not in cause


def test_a_mismatch_blames_no_node(hang: Hang) -> None:
    ranks = world()
    for recorder in ranks:
        recorder.collective("0", 3, "started", name="all_reduce" if recorder.rank else "barrier")
    write_dumps(hang.folder / "flight", *ranks)
    cause = hang.cause()
    assert (cause["rank"], cause["node"], cause["suspects"]) == (None, None, {})
    assert "rank 0 (device 0 of n1) has barrier where others have all_reduce in all_reduce 3" in cause["line"]


def test_names_in_a_dump_are_text_that_no_terminal_obeys(hang: Hang) -> None:
    ranks = [Recorder(rank, {"\x1b[31mx": [0, 1, 2, 3]}) for rank in range(4)]
    for recorder in ranks[:3]:
        recorder.collective("\x1b[31mx", 1, "started")
    write_dumps(hang.folder / "flight", *ranks)
    assert "\x1b" not in hang.cause()["line"] + hang.cause()["blame"]["why"]
