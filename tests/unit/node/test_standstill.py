"""Of ranks that stand still, those few that stand elsewhere are named first."""

from __future__ import annotations

from pathlib import Path

from llmlaunch.node.standstill import where_they_stand

BESIDE = 'Thread 0x00007f01 (most recent call first):\n  File "/lib/threading.py", line 324 in wait\n\n'


def write(folder: Path, rank: int, function: str, line: int, *, times: int = 1) -> None:
    main = (
        "Current thread 0x00007f00 (most recent call first):\n"
        f'  File "/site/torch/distributed/{function}.py", line {line} in {function}\n'
        '  File "/train.py", line 9 in main\n'
    )
    (folder / f"{rank}.txt").write_text((BESIDE + main) * times)


def test_the_fewest_come_first(tmp_path: Path) -> None:
    for rank in range(16):
        write(tmp_path, rank, "all_reduce", 2900, times=2)
    write(tmp_path, 11, "read", 7)
    write(tmp_path, 3, "save", 70)
    write(tmp_path, 5, "save", 70)
    assert where_they_stand(tmp_path) == (
        "rank 11 in read (read.py line 7), ranks 3, 5 in save (save.py line 70), "
        "13 ranks in all_reduce (all_reduce.py line 2900)"
    )


def test_each_in_a_place_of_its_own_is_cut_short(tmp_path: Path) -> None:
    for rank in range(64):
        write(tmp_path, rank, "step", rank)
    assert where_they_stand(tmp_path).endswith("rank 2 in step (step.py line 2), others in 61 more places")


def test_files_that_say_nothing_are_left_out(tmp_path: Path) -> None:
    assert where_they_stand(tmp_path / "none") == ""
    (tmp_path / "0.txt").write_text("")
    (tmp_path / "1.txt").write_bytes(b"\xff" * 100_000)
    (tmp_path / "2.txt").write_text("Current thread 0x0 (most recent call first):\n  <no Python frame>\n")
    (tmp_path / "notes.txt").write_text("of a person")
    assert where_they_stand(tmp_path) == ""
