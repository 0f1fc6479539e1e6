"""What watching draws: never more lines nor columns than the terminal has, the worst GPUs first, nothing unsaid."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console
from rich.screen import Screen

from llmlaunch.units import GIB
from llmlaunch.watch.frames import BLOCKS, Bar, RunsFrame, alarm, sparkline
from llmlaunch.watch.loop import changes
from llmlaunch.watch.model import Gauge, WatchedRun
from support.soak import examples

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


def console(columns: int, rows: int, encoding: str = "utf-8") -> Console:
    terminal = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    return Console(file=terminal, width=columns, height=rows, force_terminal=True, color_system=None)


def drawn(runs: Sequence[WatchedRun], columns: int, rows: int, encoding: str = "utf-8", trouble: str = "") -> list[str]:
    """The lines of a frame, without those that only fill the terminal."""
    terminal = console(columns, rows, encoding)
    with terminal.capture() as capture:
        terminal.print(RunsFrame(runs, NOW, trouble), height=rows)
    return [line.rstrip() for line in capture.get().splitlines()]


def test_one_run_shows_steps_ages_and_a_bar_for_each_gpu() -> None:
    assert drawn([run_of(gauge(0, 50.0, used=40.0), gauge(1, 62.0))], 100, 24) == [
        "llama [4711] running",
        "step 40/100 | loss 2.5000 | 2 s/step | 8,000 tokens/s (2,000 per device) | 2 min left |",
        "  logged 3 s ago",
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
    lines = drawn([run_of(*gauges)], 80, 20)
    assert len(lines) == 20
    first = lines.index("node    gpu  rank  stage   now  peak  of pred.")
    assert lines[first + 1].startswith("node26    0   200")
    assert lines[first + 1].endswith("lost (NVML code 15)")
    assert lines[first + 2].split()[:3] == ["node38", "4", "300"]
    assert lines[-1] == f"and {512 - (20 - first - 2)} more, the fullest at 60 % of its prediction"


def test_forty_columns_keep_rank_peak_and_share() -> None:
    lines = drawn([run_of(*(gauge(n, 50.0) for n in range(4)))], 40, 15)
    assert max(map(len, lines)) <= 40
    head = next(line for line in lines if "of pred." in line)
    assert {"rank", "peak"} <= set(head.split())
    assert sum("83 %" in line and "█" in line for line in lines) == 4


SIZES = st.tuples(st.integers(40, 200), st.integers(18, 60))
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


@examples(25)
@given(st.lists(RUNS, min_size=1, max_size=40), SIZES, st.sampled_from(["utf-8", "ascii"]))
def test_no_frame_is_larger_than_its_terminal(runs: list[WatchedRun], size: tuple[int, int], encoding: str) -> None:
    columns, rows = size
    lines = drawn(runs, columns, rows, encoding, trouble="squeue does not answer")
    assert 1 <= len(lines) <= rows
    assert lines[-1] == "squeue does not answer"
    assert all(cell_len(line) <= columns for line in lines)
    assert all(line.isprintable() for line in lines)


@examples(10)
@given(st.lists(RUNS, min_size=1, max_size=3), st.integers(1, 39), st.integers(1, 17))
def test_the_smallest_terminal_is_drawn_on(runs: list[WatchedRun], columns: int, rows: int) -> None:
    terminal = console(columns, rows)
    screen = terminal.render_lines(Screen(RunsFrame(runs, NOW)))
    assert [sum(piece.cell_length for piece in line) for line in screen] == [columns] * rows


def test_text_of_a_run_is_no_markup_and_no_control() -> None:
    run = run_of(gauge(0, 50.0, note="[bold]\x1b[2Jx"), because="[red]why[/red] :warning:", remarks=("[/]\x07",))
    for runs in ([run], [run, run]):
        shown = "\n".join(drawn(runs, 150, 24))
        assert "[red]why[/red] :warning:" in shown
        assert "[/]?" in shown
        assert "\x1b" not in shown
    assert "[bold]x" in "\n".join(drawn([run], 150, 24))


def test_several_runs_have_a_line_each_and_those_that_go_on_come_first_where_there_are_too_many() -> None:
    waiting = [replace(run_of(), name=f"w{n}", phase="pending", because="Priority", step=None) for n in range(8)]
    lines = drawn([*waiting, run_of(gauge(0, 50.0))], 120, 6)
    assert len(lines) == 6
    assert lines[1].split()[:3] == ["llama", "4711", "running"]
    assert "83 %" in lines[1]
    assert lines[2].endswith("Priority")
    assert lines[-1] == "and 5 more: 5 pending"
    narrow = drawn([*waiting, run_of(gauge(0, 50.0))], 80, 24)
    assert sum(line.endswith("Priority") for line in narrow) == 8


def test_a_run_without_monitors_says_so_and_one_that_waits_says_why() -> None:
    assert drawn([run_of()], 80, 24)[-1] == "no monitor has written yet"
    pending = run_of(phase="pending", because="Resources", step=None, loss=None, losses=())
    assert drawn([pending], 80, 24) == ["llama [4711] pending: Resources"]


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
    terminal = console(20, 1, "ascii")
    with terminal.capture() as capture:
        terminal.print(Bar(gauge(0, peak), 80 * GIB))
    bar = capture.get().rstrip("\n")
    assert (len(bar), bar[15:17], bar.count("#")) == (20, ":|", min(round(peak / 4), 20) - (peak > 62) - (peak > 66))


def test_a_sparkline_shows_what_is_no_number_and_a_flat_one_is_flat() -> None:
    values = ((1.0, math.nan, 2.0), (2.0, 2.0), (math.nan,), (1.7e308, -1.7e308))
    assert [sparkline(shown, 10, BLOCKS.steps) for shown in values] == ["▁x█", "▁▁", "x", "█▁"]
    assert sparkline((1.0, 2.0), 0, BLOCKS.steps) == ""


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
