"""Of ranks that stand still, those few that stand elsewhere are named first."""

from __future__ import annotations

import json
from pathlib import Path

from llmlaunch.node.stacks import where_they_stand

BESIDE = 'Thread 0x00007f01 (most recent call first):\n  File "/lib/threading.py", line 324 in wait\n\n'


def stacks(folder: Path, rank: int | str) -> Path:
    (folder / "stacks").mkdir(exist_ok=True)
    return folder / "stacks" / f"{rank}.txt"


def write(folder: Path, rank: int, function: str, line: int, *, times: int = 1) -> None:
    main = (
        "Current thread 0x00007f00 (most recent call first):\n"
        f'  File "/site/torch/distributed/{function}.py", line {line} in {function}\n'
        '  File "/train.py", line 9 in main\n'
    )
    stacks(folder, rank).write_text((BESIDE + main) * times)


def test_the_fewest_come_first(tmp_path: Path) -> None:
    for rank in range(16):
        write(tmp_path, rank, "all_reduce", 2900, times=2)
    write(tmp_path, 11, "read", 7)
    write(tmp_path, 3, "save", 70)
    write(tmp_path, 5, "save", 70)
    assert where_they_stand(tmp_path, 16) == (
        "rank 11 in read (read.py line 7), ranks 3, 5 in save (save.py line 70), "
        "13 ranks in all_reduce (all_reduce.py line 2900)"
    )


def test_each_in_a_place_of_its_own_is_cut_short(tmp_path: Path) -> None:
    for rank in range(64):
        write(tmp_path, rank, "step", rank)
    assert where_they_stand(tmp_path, 64).endswith("rank 2 in step (step.py line 2), others in 61 more places")


def test_files_that_say_nothing_are_left_out(tmp_path: Path) -> None:
    assert where_they_stand(tmp_path / "none", 3) == ""
    stacks(tmp_path, "0").write_text("")
    stacks(tmp_path, "1").write_bytes(b"\xff" * 100_000)
    stacks(tmp_path, "2").write_text("Current thread 0x0 (most recent call first):\n  <no Python frame>\n")
    stacks(tmp_path, "notes").write_text("of a person")
    assert where_they_stand(tmp_path, 3) == ""


def test_who_gave_no_answer_comes_before_all(tmp_path: Path) -> None:
    """Stopped, or stuck in the kernel: its file is empty or was never made."""
    for rank in (0, 3):
        write(tmp_path, rank, "all_reduce", 2900)
    (tmp_path / "ranks").mkdir()
    for rank in (1, 3):
        (tmp_path / "ranks" / f"{rank}.json").write_text(json.dumps({"rank": rank, "node": f"node{rank // 2 + 1}"}))
    stacks(tmp_path, "1").write_text("")
    assert where_they_stand(tmp_path, 4) == (
        "no answer from ranks 1 on node1, 2, ranks 0, 3 on node2 in all_reduce (all_reduce.py line 2900)"
    )
