"""Dumps of the flight recorder that anybody may have written: read within a budget that is counted, or refused in one
sentence. Nothing in them is executed, and nothing they hold keeps a run from its verdict."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmlaunch.causes import flight_recorder, hang_blame
from llmlaunch.causes.flight_recorder import dump_of, read_dumps
from llmlaunch.causes.hang_blame import TooManyRanks, find_roots
from llmlaunch.rundir import plain_pickle
from support.flight_dumps import Recorder, write_dumps
from support.hostile_dumps import EMPTY_DICT, MARK, SET_ITEMS, dump_with, nested, shared_lists, text
from support.soak import examples

LEVELS = 60
"""Ten to the power of sixty: a reader that walks one such value never returns."""

FIELDS = ("record_id", "process_group", "profiling_name", "collective_seq_id", "is_p2p", "input_sizes", "state")


def in_a_list(instructions: bytes) -> bytes:
    return b"](" + instructions + b"e"


@pytest.mark.parametrize("value", [shared_lists(LEVELS), nested(5_000)], ids=["shared ten ways", "nested"])
def test_a_list_that_has_no_end_costs_what_its_bytes_cost(value: bytes) -> None:
    for field in (*FIELDS, "p2p_seq_id", "retired", "frames"):
        for instructions in (value, in_a_list(value)):
            dump = dump_of(dump_with({field: instructions}), 0)
            assert len(dump.operations) <= 1
            assert all(len(operation.sizes) <= 80 for operation in dump.operations)


def test_the_other_fields_of_such_an_entry_are_read() -> None:
    (operation,) = dump_of(dump_with({"input_sizes": shared_lists(LEVELS)}), 0).operations
    assert (operation.name, operation.number, operation.state, operation.sizes) == ("all_reduce", 1, "scheduled", "")


@pytest.mark.parametrize("ranks", [shared_lists(LEVELS), nested(50_000), b"N", b"K\x05"])
def test_a_group_whose_ranks_are_no_text_has_none(ranks: bytes) -> None:
    group = EMPTY_DICT + MARK + text("ranks") + ranks + SET_ITEMS
    dump = dump_of(dump_with({}, config=EMPTY_DICT + MARK + text("0") + group + SET_ITEMS), 0)
    assert dump.members == {}
    assert [operation.group for operation in dump.operations] == ["0"]


def test_a_text_that_many_entries_refer_to_is_counted_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flight_recorder, "MOST_CHARACTERS", 10_000)
    content = dump_with({"profiling_name": text("nccl:" + "x" * 1_000_000)}, entries=1000)
    with pytest.raises(ValueError, match="not read: its entries refer to more than 10,000 characters"):
        dump_of(content, 0)


def test_of_many_entries_the_newest_are_read_as_in_pytorchs_own_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(0, {"0": [0, 1]})
    for number in range(1, 31):
        recorder.collective("0", number, "completed" if number < 30 else "started")
    monkeypatch.setattr(flight_recorder, "MOST_ENTRIES", 10)
    dump = dump_of(recorder.content(), 0)
    assert [operation.number for operation in dump.operations] == list(range(21, 31))
    assert not dump.is_whole  # as where PyTorch itself forgot the oldest


def test_300_000_entries_are_cut_or_refused() -> None:
    shared = dump_of(dump_with({}, entries=300_000), 0)
    assert len(shared.operations) == flight_recorder.MOST_ENTRIES
    record = {"pg_config": {}, "entries": [{"profiling_name": "nccl:send 0->1", "is_p2p": True}] * 300_000}
    assert dump_of(json.dumps(record).encode(), 0).operations == []


def test_a_pickle_of_too_many_instructions_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain_pickle, "MOST_INSTRUCTIONS", 1000)
    with pytest.raises(ValueError, match="not read: it has more than 1,000 instructions"):
        dump_of(dump_with({}, entries=2000), 0)


def test_keys_of_one_hash_are_refused_before_they_cost_a_square() -> None:
    items = b"".join(b"\x8a\x10" + ((2**61 - 1) * 2**9 * n).to_bytes(16, "little") + b"N" for n in range(1, 1500))
    with pytest.raises(ValueError, match="not read: it has more than 1,000 keys that do not fit 64 bits"):
        dump_of(dump_with({"frames": EMPTY_DICT + MARK + items + SET_ITEMS}), 0)


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b'{"entries": ' + b"[" * 100_000, id="brackets"),
        pytest.param(b'{"entries": [{"input_sizes": ' + b"[" * 900 + b"]" * 900 + b"}]}", id="in an entry"),
        pytest.param(b'{"entries": 5}', id="no list"),
        pytest.param(b"[]", id="no object"),
        pytest.param(b"", id="empty"),
        pytest.param(b'{"entries": [{"collective_seq_id": ' + b"9" * 5000 + b"}]}", id="5,000 digits"),
    ],
)
def test_hostile_json_is_read_or_refused(content: bytes) -> None:
    try:
        assert dump_of(content, 0).operations == []
    except ValueError as error:
        assert str(error)  # noqa: PT017 - either answer is right


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.sampled_from(FIELDS),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
NAMES = st.sampled_from(
    ["nccl:send 0->1", "nccl:recv 1<-0", "nccl:coalesced", "gloo:all_reduce", "nccl:" + "send 9" * 99]
)
ENTRIES = st.fixed_dictionaries(
    {}, optional={**dict.fromkeys(FIELDS, VALUES), "profiling_name": VALUES | NAMES, "p2p_seq_id": VALUES | st.just(1)}
)
CONFIG = st.dictionaries(st.text(max_size=3), VALUES | st.fixed_dictionaries({"ranks": VALUES | st.just("[0, 1]")}))


@examples(12, 2000)
@given(
    dumps=st.lists(st.tuples(st.lists(VALUES | ENTRIES, max_size=6), CONFIG | VALUES), min_size=1, max_size=4),
    form=st.sampled_from([json.dumps, pickle.dumps]),
)
def test_values_of_the_wrong_kind_are_left_out_and_blame_nobody_by_an_exception(dumps: Any, form: Any) -> None:
    by_rank = {}
    for rank, (entries, config) in enumerate(dumps):
        record = {"entries": entries, "pg_config": config}
        content = json.dumps(record).encode() if form is json.dumps else pickle.dumps(record, protocol=2)
        by_rank[rank] = dump_of(content, rank)
    find_roots(by_rank)


@examples(50, 2000)
@given(st.binary(max_size=200), st.integers(0, 400))
def test_bytes_of_any_kind_in_the_midst_of_a_dump_are_one_sentence_at_most(junk: bytes, place: int) -> None:
    whole = dump_with({"frames": shared_lists(4)})
    content = whole[:place] + junk + whole[place:]
    try:
        dump_of(content, 0)
    except ValueError as error:
        assert str(error)  # noqa: PT017 - either answer is right


class Calls:
    def __init__(self, *command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, self.command


@pytest.mark.parametrize("protocol", [0, 2, 5])
def test_a_dump_that_names_code_is_a_problem_and_accuses_nobody(protocol: int, tmp_path: Path) -> None:
    """Nor is a rank whose file cannot be read taken for one that wrote none."""
    first, second = (Recorder(rank, {"0": [0, 1]}) for rank in (0, 1))
    first.collective("0", 1, "started")
    write_dumps(tmp_path / "flight", first, second)
    hostile = {"entries": [Calls(f"touch {tmp_path}/ran")], "pg_config": Calls(f"touch {tmp_path}/ran")}
    (tmp_path / "flight" / "rank_1").write_bytes(pickle.dumps(hostile, protocol))
    problems: list[str] = []
    dumps, unread = read_dumps(tmp_path / "flight", problems)
    assert (list(dumps), unread, len(problems)) == ([0], [1], 1)
    assert find_roots(dumps, unread) is None
    assert not (tmp_path / "ran").exists()


def test_all_files_together_have_a_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorders = [Recorder(rank, {"0": [0, 1, 2, 3]}) for rank in range(4)]
    for recorder in recorders:
        for number in range(1, 6):
            recorder.collective("0", number)
    write_dumps(tmp_path, *recorders)
    monkeypatch.setattr(flight_recorder, "MOST_OPERATIONS", 8)
    dumps, unread = read_dumps(tmp_path, [])
    assert (sorted(dumps), unread) == ([0, 1], [2, 3])


def test_ranks_that_a_dump_makes_up_are_not_looked_for_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(0, {"0": list(range(5000))})
    for number in range(1, 10):
        recorder.collective("0", number, "scheduled")
    monkeypatch.setattr(hang_blame, "MOST_STEPS", 4000)
    with pytest.raises(TooManyRanks, match="not judged: it would take more than 4,000 steps"):
        find_roots({0: dump_of(recorder.content(), 0)})


def test_what_thousands_of_ranks_wait_in_together_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenth of the steps that a look by each rank at each member takes, and with all members known."""
    ranks = list(range(400))
    recorders = [Recorder(rank, {"0": ranks}) for rank in ranks[:-1]]
    for recorder in recorders:
        recorder.collective("0", 1, "started")
    monkeypatch.setattr(hang_blame, "MOST_STEPS", len(ranks) ** 2 // 10)
    found = find_roots({recorder.rank: dump_of(recorder.content(), recorder.rank) for recorder in recorders})
    assert found is not None
    assert (found.kind, found.ranks, found.waiting) == ("absent", (399,), 399)


def test_a_rank_with_open_receives_from_thousands_is_looked_through_once() -> None:
    ranks = list(range(3000))
    receiver = Recorder(0, {"0": ranks})
    senders = [Recorder(rank, {"0": ranks}) for rank in (1, 2)]
    for rank in ranks[1:]:
        receiver.recv("0", rank, 1, "started")
    facts = hang_blame._Facts({r.rank: dump_of(r.content(), r.rank) for r in (receiver, *senders)}, frozenset())
    assert facts.absent() is not None
    assert set(facts._between) <= {0, 1, 2}  # sorted by peer once for each rank, however many it waits for
