"""Memory lines as the frameworks print them."""

from __future__ import annotations

from llmlaunch.node.rank_memory import LoggedPeaks

MIB, GIB = 2**20, 2**30


def records(*lines: str) -> list[dict[str, object]]:
    logged = LoggedPeaks()
    logged.take([line.encode() for line in lines])
    return logged.records()


def record(rank: int, allocated: float, reserved: float, source: str) -> dict[str, object]:
    peaks = {"allocated_peak_bytes": int(allocated), "reserved_peak_bytes": int(reserved)}
    return {"rank": rank, **peaks, "device_bytes": None, "source": source}


def megatron(rank: int, allocated: str, reserved: str, more: str = "") -> str:
    """As megatron/training/utils/common_utils.py of Megatron core 0.19 prints it."""
    return (
        f"[Rank {rank}] (after 2 iterations) memory (MB) | allocated: 1.00 | max allocated: {allocated} "
        f"| reserved: 3.00 | max reserved: {reserved}{more}"
    )


def test_the_largest_of_a_ranks_lines_counts_in_binary_megabytes() -> None:
    assert records(megatron(8, "200.25", "300.50"), megatron(8, "100.00", "400.00")) == [
        record(8, 200.25 * MIB, 400 * MIB, "megatron log")
    ]


def test_device_memory_where_megatron_was_asked_for_it() -> None:
    (logged,) = records(megatron(0, "1.00", "2.00", " | total device memory used: 512.00"))
    assert logged["device_bytes"] == 512 * MIB


def test_two_ranks_in_one_line_behind_torchruns_prefix() -> None:
    line = "[default0]:" + megatron(0, "5.00", "6.00") + "[default1]:" + megatron(1, "7.00", "8.00")
    assert [(r["rank"], r["reserved_peak_bytes"]) for r in records(line)] == [(0, 6 * MIB), (1, 8 * MIB)]


def test_deepspeeds_gigabytes_are_binary_and_its_last_one_is_rounded() -> None:
    """As deepspeed/runtime/utils.py prints it: the source has line continuations inside the string."""
    line = "MA {} GB         Max_MA {} GB         CA {} GB         Max_CA {} GB "
    assert records(line.format(1.25, 2.5, 3.0, 3), line.format(1.0, 1.5, 3.25, 4)) == [
        record(0, 2.5 * GIB, 3.5 * GIB, "deepspeed log")  # 4 may have been 3.5
    ]


def test_what_only_looks_like_one() -> None:
    assert records("memory (MB) | allocated: many", "Max_MA", "[Rank x] memory (MB) |", "step: 3") == []
