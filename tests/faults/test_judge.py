"""The judge of the fault tests sees a peak that is missing, too low, doubled, made up, or gone from the disk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from support.judge import judge, on_disk

Json = dict[str, Any]

ATTEMPT, NODE = "17.0", "n1"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two ranks on two GPUs; the last line is torn."""
    (tmp_path / "run.json").write_text(
        json.dumps({"peak_kind": "device", "nodes": 1, "devices_per_node": 2, "pipeline": 2})
    )
    ranks = tmp_path / "attempts" / ATTEMPT / "ranks"
    ranks.mkdir(parents=True)
    for rank in (0, 1):
        record = {"rank": rank, "local_rank": rank, "node": NODE, "pid": 10 + rank, "program_pid": 20 + rank}
        with (ranks / f"{NODE}.jsonl").open("a") as file:
            file.write(json.dumps({**record, "resident_peak_bytes": 5}) + "\n")
    torch = {"rank": 1, "node": NODE, "devices": [{"allocated_peak_bytes": 30}, {"allocated_peak_bytes": 40}]}
    (tmp_path / "attempts" / ATTEMPT / "memory").mkdir()
    (tmp_path / "attempts" / ATTEMPT / "memory" / f"{NODE}.jsonl").write_text(json.dumps(torch) + "\n")
    (tmp_path / "peaks").mkdir()
    line = json.dumps(_line(first=70, second=60))
    (tmp_path / "peaks" / f"{NODE}.jsonl").write_text(f"{json.dumps(_line(first=50, second=60))}\n{line}\n{line[:-9]}")
    return tmp_path


def _line(first: int, second: int) -> Json:
    """GPU a names its process, GPU b hides its own."""
    seen = {"process_peak_bytes": {"20": first - 2}, "accounting_peak_bytes": {"20": first}}
    gpus = [{"uuid": "a", "pci": "1", "index": 0, "baseline_bytes": 1, "device_peak_bytes": first + 1, **seen}]
    gpus += [{"uuid": "b", "pci": "2", "index": 1, "baseline_bytes": 1, "device_peak_bytes": second}]
    return {"attempt": ATTEMPT, "node": NODE, "gpus": gpus, "processes": [], "host": {"used_peak_bytes": 3}}


def _record(rank: int, peak: int, **observed: int) -> Json:
    seen = {"resident_peak_bytes": 5, "device_peak_bytes": 60, **observed}
    own = {"id": f"r/{rank}", "attempt": ATTEMPT, "global_rank": rank, "peak_kind": "device"}
    return {**own, "peak_bytes": peak, "observed": seen}


TRUE = (
    _record(0, 70, device_peak_bytes=71, process_peak_bytes=68, accounting_peak_bytes=70),
    _record(1, 59, allocated_peak_bytes=40),
    {"id": "r/stage", "attempt": ATTEMPT, "pipeline_rank": 1, "peak_kind": "allocated", "peak_bytes": 40},
    {"id": "r/node", "attempt": ATTEMPT, "node": NODE, "peak_kind": "host", "peak_bytes": 3},
)
FIRST, SECOND, STAGE, HOST = TRUE


def test_it_is_content_where_all_is_there_once(run: Path) -> None:
    now = on_disk(run)
    assert judge(run, now, now, TRUE) == []
    assert now.nodes == {(ATTEMPT, NODE): {"used_peak_bytes": 3}}


@pytest.mark.parametrize(
    ("records", "complaint"),
    [
        ([FIRST, STAGE, HOST], "rank 1 of 17.0: 0 records"),
        ([*TRUE, FIRST], "r/0 is there 2 times"),
        ([*TRUE, {**FIRST, "id": "other"}], "rank 0 of 17.0: 2 records"),
        ([*TRUE, {**FIRST, "id": "other", "global_rank": 7}], "other is of a rank that left no file"),
        ([{**FIRST, "peak_bytes": 68}, *TRUE[1:]], "its peak in the store is 68, by what is on disk {70}"),
        ([FIRST, _record(1, 59), STAGE, HOST], "allocated_peak_bytes is 40 on disk, and the store has None"),
        ([FIRST, SECOND, HOST], "allocated'): 40 on disk, and the store has []"),
        (
            [FIRST, SECOND, STAGE, {**HOST, "peak_bytes": 2}],
            "host memory of n1 in 17.0: {'used_peak_bytes': 3} on disk, and the store has [2]",
        ),
    ],
    ids=["missing", "the same twice", "two of a rank", "made up", "too low", "torch", "stage", "host"],
)
def test_it_says_what_is_wrong(run: Path, records: list[Json], complaint: str) -> None:
    now = on_disk(run)
    (wrong, *_) = judge(run, now, now, records)
    assert complaint in wrong


def test_it_sees_what_a_fault_took_from_the_disk(run: Path) -> None:
    before = on_disk(run)
    path = run / "peaks" / f"{NODE}.jsonl"
    path.write_text(path.read_text().partition("\n")[0])
    records = (_record(0, 50, device_peak_bytes=51, process_peak_bytes=48, accounting_peak_bytes=50), *TRUE[1:])
    wrong = judge(run, before, on_disk(run), records)
    assert any("accounting_peak_bytes was 70 at the fault, and the disk has 50" in one for one in wrong)
    assert judge(run, on_disk(run), on_disk(run), records) == []
