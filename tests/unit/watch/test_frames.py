"""What watching draws: never more lines nor columns than the terminal has, the worst GPUs first, nothing unsaid."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmlaunch.units import GIB
from llmlaunch.watch.frames import ASCII, BLOCKS, Glyphs, Line, alarm, bar, frame, sparkline
from llmlaunch.watch.model import Gauge, WatchedRun
from llmlaunch.watch.views import changes

NOW = 1000.0


def gauge(n: int, peak: float, used: float | None = None, note: str = "") -> Gauge:
    return Gauge(
        node=f"node{1 + n // 8}",
        device=str(n % 8),
        uuid=f"GPU-{n}",
        ranks=(n,),
        pipeline_rank=n // 16,
        used_bytes=int((peak if used is None else used) * GIB),
        peak_bytes=int(peak * GIB),
        predicted_bytes=60 * GIB,
        limit_bytes=64 * GIB,
        total_bytes=80 * GIB,
        seen_at=NOW - 12,
        note=note,
    )


def run_of(*gauges: Gauge, **changed: object) -> WatchedRun:
    run = WatchedRun(
        name="llama",
        job="4711",
        phase="running",
        step=40,
        steps=100,
        loss=2.5,
        step_seconds=2.0,
        tokens_per_second=8000.0,
        devices=4,
        step_at=NOW - 3,
        losses=(4.0, 3.0, 2.5),
        gauges=gauges,
    )
    return replace(run, **changed)


def plain(line: Line) -> str:
    return "".join(text for text, _ in line).rstrip()


def text(lines: list[Line]) -> list[str]:
    return [plain(line) for line in lines]


def test_one_run_shows_steps_ages_and_a_bar_for_each_gpu() -> None:
    drawn = text(frame([run_of(gauge(0, 50.0, used=40.0), gauge(1, 62.0))], 100, 24, NOW))
    assert drawn == [
        "llama [4711] running",
        "step 40/100 | loss 2.5000 | 2 s/step | 8,000 tokens/s (2,000 per device) | 2 min left",
        "logged 3 s ago",
        "loss 4 █▃▁ 2.5",
        "GPU memory, GiB: as of 12 s ago | 1 above prediction",
        "node   gpu  rank  stage   now  peak  of pred.",
        "node1    0     0      0  40.0  50.0      83 %  ██████████████████████████▒▒▒▒▒▒▒·······┆·┃··········",
        "node1    1     1      0  62.0  62.0     103 %  ████████████████████████████████████████┆·┃··········",
        "█ now  ▒ peak  ┆ predicted  ┃ limit  a whole bar is 80.0 GiB",
    ]


def test_of_512_gpus_the_fullest_are_shown_and_the_rest_is_counted() -> None:
    gauges = [gauge(n, 30.0 + n % 7) for n in range(512)]
    gauges[300] = gauge(300, 63.0)
    gauges[200] = gauge(200, 1.0, note="lost (NVML code 15)")
    drawn = text(frame([run_of(*gauges)], 80, 20, NOW))
    assert len(drawn) == 20
    first = drawn.index("node    gpu  rank  stage   now  peak  of pred.")
    assert drawn[first + 1].startswith("node26    0   200")
    assert drawn[first + 1].endswith("lost (NVML code 15)")
    assert drawn[first + 2].split()[:3] == ["node38", "4", "300"]
    assert drawn[-1] == f"and {512 - (20 - first - 2)} more, the fullest at 60 % of its prediction"


def test_forty_columns_keep_rank_peak_and_share() -> None:
    drawn = text(frame([run_of(*(gauge(n, 50.0) for n in range(4)))], 40, 15, NOW))
    assert max(map(len, drawn)) <= 40
    head = next(line for line in drawn if "of pred." in line)
    assert {"rank", "peak"} <= set(head.split())
    assert sum("83 %" in line and "█" in line for line in drawn) == 4


SIZES = st.tuples(st.integers(1, 200), st.integers(1, 60))
RUNS = st.builds(
    run_of,
    st.builds(gauge, st.integers(0, 600), st.floats(0.0, 100.0), st.floats(0.0, 100.0), st.sampled_from(["", "lost"])),
    st.builds(gauge, st.integers(0, 600), st.floats(0.0, 100.0)),
    phase=st.sampled_from(["pending", "running", "failed", "unknown"]),
    because=st.text(max_size=300),
    remarks=st.lists(st.text(max_size=100), max_size=9).map(tuple),
    step=st.none() | st.integers(0, 10**9),
    losses=st.lists(st.floats(), max_size=200).map(tuple),
)


@given(st.lists(RUNS, min_size=1, max_size=40), SIZES, st.sampled_from([BLOCKS, ASCII]))
def test_no_frame_is_larger_than_its_terminal(runs: list[WatchedRun], size: tuple[int, int], glyphs: Glyphs) -> None:
    columns, rows = size
    drawn = frame(runs, columns, rows, NOW, glyphs)
    assert 1 <= len(drawn) <= rows
    assert all(sum(len(piece) for piece, _ in line) <= columns for line in drawn)
    assert all(c.isprintable() for line in drawn for piece, _ in line for c in piece)


def test_several_runs_have_a_line_each_and_those_that_go_on_come_first_where_there_are_too_many() -> None:
    waiting = [replace(run_of(), name=f"w{n}", phase="pending", because="Priority", step=None) for n in range(8)]
    drawn = text(frame([*waiting, run_of(gauge(0, 50.0))], 120, 6, NOW))
    assert len(drawn) == 6
    assert drawn[1].split()[:3] == ["llama", "4711", "running"]
    assert "83 %" in drawn[1]
    assert drawn[2].endswith("Priority")
    assert drawn[-1] == "and 5 more: 5 pending"


def test_a_run_without_monitors_says_so_and_one_that_waits_says_why() -> None:
    assert text(frame([run_of()], 80, 24, NOW))[-1] == "no monitor has written yet"
    pending = run_of(phase="pending", because="Resources", step=None, loss=None, losses=())
    assert text(frame([pending], 80, 24, NOW)) == ["llama [4711] pending: Resources"]


@pytest.mark.parametrize(
    ("peak", "note", "style"),
    [
        (0.0, "", "green"),
        (50.0, "", "green"),
        (61.0, "", "yellow"),
        (65.0, "", "bold red"),
        (500.0, "", "bold red"),
        (10.0, "lost", "bold red"),
    ],
)
def test_a_bar_has_its_length_its_marks_and_a_colour_by_prediction_and_limit(
    peak: float, note: str, style: str
) -> None:
    assert alarm(gauge(0, peak, note=note)) == style
    drawn = plain(bar(gauge(0, peak), 80 * GIB, 20, ASCII))
    assert (len(drawn), "|" in drawn) == (20, True)


def test_a_sparkline_shows_what_is_no_number_and_a_flat_one_is_flat() -> None:
    values = ((1.0, math.nan, 2.0), (2.0, 2.0), (math.nan,))
    assert [sparkline(shown, 10, BLOCKS) for shown in values] == ["▁x█", "▁▁", "x"]
    assert sparkline((1.0, 2.0), 0, BLOCKS) == ""


def test_a_pipe_gets_a_line_for_each_change_and_none_without() -> None:
    first = run_of(gauge(0, 50.0))
    assert changes(None, first) == [
        "llama [4711] running",
        "llama [4711] step 40/100 | loss 2.5000 | 2 s/step | 8,000 tokens/s (2,000 per device) | 50.0 GiB of 60.0 "
        "predicted | 2 min left",
    ]
    assert changes(first, replace(first, step_at=NOW + 9, gauges=(gauge(0, 50.1),))) == []
    risen = replace(first, gauges=(gauge(0, 55.0),))
    assert [line.split(" | ")[-2] for line in changes(first, risen)] == ["55.0 GiB of 60.0 predicted"]
    ended = replace(risen, phase="failed", because="out of memory\x1b[31m", remarks=("n1: silent",))
    assert changes(risen, ended) == ["llama [4711] failed: out of memory", "llama [4711] n1: silent"]
