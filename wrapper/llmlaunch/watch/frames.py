"""Runs as rich draws them: one with its steps and a bar of memory for each GPU, the fullest first; several with a line
each."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import sys
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import TextIO

from rich.console import Console, ConsoleOptions, JustifyMethod, RenderableType, RenderResult
from rich.live import Live
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from llmlaunch.report.text import one_line
from llmlaunch.units import duration, gib
from llmlaunch.watch.loop import View
from llmlaunch.watch.model import Gauge, WatchedRun, step_lines, step_text

PHASE_STYLES = {"running": "green", "succeeded": "bold green", "failed": "bold red", "cancelled": "red"}
_GAP = 2
_LEAST_BAR = 10
_LONGEST_NODE, _LONGEST_NAME = 20, 60
_LONGEST_SPARK = 60
_MOST_REMARKS = 4
_LEAST_TABLE = 3
_LONGEST_TITLE = 4
_ALL_ROWS = 10_000
"""The last frame stays on the terminal, and may scroll."""
_FIRST = ("running", "failed", "unknown", "pending")


@dataclass(frozen=True)
class Glyphs:
    """What bars are drawn with; `steps` are of a sparkline, the lowest first."""

    used: str
    peak: str
    empty: str
    predicted: str
    limit: str
    steps: str


BLOCKS = Glyphs("█", "▒", "·", "┆", "┃", "▁▂▃▄▅▆▇█")
ASCII = Glyphs("#", "=", ".", ":", "|", "_.-=*#")


def _glyphs(options: ConsoleOptions) -> Glyphs:
    return ASCII if options.ascii_only else BLOCKS


def _text(text: str, style: str = "") -> Text:
    """Return text of a run as one line that rich crops, and whose markup it does not read."""
    return Text(one_line(text), style, no_wrap=True, overflow="crop")


@dataclass(frozen=True)
class RunsFrame:
    """All runs, in as many lines as the console's height if it has one. `trouble` is said below them."""

    runs: Sequence[WatchedRun]
    now: float
    trouble: str = ""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        rows, width = (options.height or _ALL_ROWS) - bool(self.trouble), options.max_width
        if len(self.runs) == 1:
            yield from _one_run(self.runs[0], rows, self.now, console, width)
        else:
            yield from _several_runs(self.runs, rows, self.now, width)
        if self.trouble:
            yield _text(self.trouble, "yellow")


@dataclass(frozen=True)
class Bar:
    """Memory used now, up to the peak, and free, with prediction and limit marked. `whole_bytes` is its length."""

    gauge: Gauge
    whole_bytes: int

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(_LEAST_BAR, options.max_width)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        gauge, width, glyphs = self.gauge, options.max_width, _glyphs(options)
        used, peak = (min(self._cells(size, width), width) for size in (gauge.used_bytes, gauge.peak_bytes))
        drawn = glyphs.used * used + glyphs.peak * (peak - used)
        bar = Text.assemble((drawn, alarm(gauge)), (glyphs.empty * (width - len(drawn)), "dim"))
        for size, mark, style in (
            (gauge.predicted_bytes, glyphs.predicted, "cyan"),
            (gauge.limit_bytes, glyphs.limit, "bold magenta"),
        ):
            if size:
                before, _, after = bar.divide([(at := min(self._cells(size, width), width - 1)), at + 1])
                bar = Text.assemble(before, (mark, style), after)
        yield bar

    def _cells(self, size: int | None, width: int) -> int:
        return round((size or 0) / self.whole_bytes * width)


def sparkline(values: Sequence[float], width: int, steps: str) -> str:
    """Return the last `width` values as small bars between their minimum and maximum; x stands for NaN and infinity."""
    shown = values[-width:] if width > 0 else ()
    finite = [value for value in shown if math.isfinite(value)]
    if not finite:
        return "x" * len(shown)
    least, top = min(finite), len(steps) - 1
    span = max(finite) / 2 - least / 2 or 1.0  # halves, which are finite
    heights = [round((value / 2 - least / 2) / span * top) if math.isfinite(value) else 0 for value in shown]
    return "".join(steps[h] if math.isfinite(value) else "x" for value, h in zip(shown, heights, strict=True))


def alarm(gauge: Gauge) -> str:
    """Return the style of a gauge: red above the limit or if it is lost, yellow above the prediction, else green."""
    peak = gauge.peak_bytes or 0
    if gauge.note or (gauge.limit_bytes is not None and peak > gauge.limit_bytes):
        return "bold red"
    return "yellow" if gauge.share is not None and gauge.share > 1.0 else "green"


def scale_bytes(gauges: Sequence[Gauge]) -> int:
    """Return the bytes of a whole bar: the largest device or, without devices, the largest number to draw."""
    sizes = [size for gauge in gauges for size in (gauge.total_bytes, gauge.limit_bytes, gauge.predicted_bytes)]
    return max((size for size in (*sizes, *(gauge.peak_bytes for gauge in gauges)) if size), default=1)


@dataclass(frozen=True)
class Column:
    """`keep` is how long it stays where room is short: the lowest goes first. Flexible ones share what room is left."""

    head: str
    cells: Sequence[Text | Bar]
    keep: int
    left: bool = False
    flexible: bool = False

    @property
    def is_empty(self) -> bool:
        return all(isinstance(cell, Text) and cell.plain in ("", "-") for cell in self.cells)

    @property
    def width(self) -> int:
        """The least number of columns that it takes on the terminal, with the gap behind it."""
        widths = [len(self.head), *(cell.cell_len for cell in self.cells if isinstance(cell, Text))]
        return _GAP + (_LEAST_BAR if self.flexible else max(widths))


def _table(columns: Iterable[Column], width: int) -> Table:
    """Return a table of the columns that are not empty and fit."""
    shown = [column for column in columns if not column.is_empty]
    while sum(column.width for column in shown) > width + _GAP and len(shown) > 1:
        shown.remove(min(shown, key=lambda column: column.keep))
    expand = any(column.flexible for column in shown)
    table = Table(box=None, padding=(0, _GAP, 0, 0), pad_edge=False, header_style="dim", expand=expand)
    for column in shown:
        justify: JustifyMethod = "left" if column.left else "right"
        table.add_column(
            column.head, justify=justify, no_wrap=True, overflow="crop", ratio=int(column.flexible) or None
        )
    for row in zip(*(column.cells for column in shown), strict=True):
        table.add_row(*row)
    return table


def _one_run(run: WatchedRun, rows: int, now: float, console: Console, width: int) -> list[RenderableType]:
    head = [*_title(run, console, width), *_steps(run, now, console, width)]
    foot = _remarks(run)
    if run.gauges:
        head = [*head[: max(1, rows - _LEAST_TABLE - len(foot) - 1)], *_ages(run, now, console, width)]
        room = max(_LEAST_TABLE, rows - len(head) - len(foot))
        gauges, summary = _fullest(run.gauges, room)
        legend = _legend(run, console, width)
        spare = room - len(gauges) - len(summary) - 1 >= len(legend)
        return [*head, _gauge_table(gauges, width), *summary, *(legend if spare else ()), *foot]
    silent = run.phase not in ("pending", "unknown")
    return [*head, *([_text("no monitor has written yet", "dim")] if silent else []), *foot]


def _title(run: WatchedRun, console: Console, width: int) -> Sequence[Text]:
    because = f": {one_line(run.because)}" if run.because else ""
    phase = (run.phase, PHASE_STYLES.get(run.phase, "yellow"))
    return Text.assemble((f"{run.title} ", "bold"), phase, because).wrap(console, width)[:_LONGEST_TITLE]


def _steps(run: WatchedRun, now: float, console: Console, width: int) -> list[Text]:
    if run.step is None and run.loss is None:
        return []
    logged = f" | logged {_ago(run.step_at, now)}" if run.step_at is not None and not run.ended else ""
    lines = [_text(line) for line in step_lines(step_text(run, with_memory=False) + logged, width)]
    if len(run.losses) > 1:
        first, last = f"loss {run.losses[0]:.4g} ", f" {run.losses[-1]:.4g}"
        room = min(width - len(first) - len(last), _LONGEST_SPARK)
        spark = sparkline(run.losses, room, _glyphs(console.options).steps)
        lines += Text.assemble((first, "dim"), (spark, "cyan"), (last, "dim")).wrap(console, width)
    return lines


def _ages(run: WatchedRun, now: float, console: Console, width: int) -> Sequence[Text]:
    ages = run.memory_times
    if ages is None:
        return []
    newest, oldest = ages
    what = "resident memory" if run.peak_kind == "resident" else "GPU memory"
    text = f"{what}, GiB: " + ("at the end" if run.ended else f"as of {_ago(newest, now)}")
    if not run.ended and newest - oldest > 30:
        text += f", the oldest number of {_ago(oldest, now)}"
    above = sum(gauge.share is not None and gauge.share > 1.0 for gauge in run.gauges)
    text += f" | {above} above prediction" if above else ""
    return list(Text(text, "dim").wrap(console, width))


def _fullest(gauges: Sequence[Gauge], rows: int) -> tuple[Sequence[Gauge], list[Text]]:
    """Return as many gauges as fit below a head, and a count of the others: those furthest below their prediction."""
    if len(gauges) < rows:
        return gauges, []
    worst = sorted(
        gauges, key=lambda gauge: (bool(gauge.note), gauge.share or 0.0, gauge.peak_bytes or 0), reverse=True
    )
    shown, others = worst[: max(1, rows - 2)], worst[max(1, rows - 2) :]
    shares = [gauge.share for gauge in others if gauge.share is not None]
    most = f", the fullest at {100 * max(shares):.0f} % of its prediction" if shares else ""
    return shown, [_text(f"and {len(others)} more{most}", "dim")]


def _gauge_table(gauges: Sequence[Gauge], width: int) -> Table:
    full_bar_bytes = scale_bytes(gauges)
    bars = [_text(gauge.note, "bold red") if gauge.note else Bar(gauge, full_bar_bytes) for gauge in gauges]
    columns = [
        Column("node", [_text(one_line(gauge.node)[:_LONGEST_NODE]) for gauge in gauges], 3, left=True),
        Column("gpu", [_text(gauge.device) for gauge in gauges], 2),
        Column("rank", [_text(",".join(map(str, gauge.ranks)) or "-") for gauge in gauges], 5),
        Column("stage", [_number(gauge.pipeline_rank, "d") for gauge in gauges], 0),
        Column("now", [_gib(gauge.used_bytes) for gauge in gauges], 1),
        Column("peak", [_gib(gauge.peak_bytes) for gauge in gauges], 7),
        Column("of pred.", [_share(gauge) for gauge in gauges], 6),
        Column("", bars, 8, left=True, flexible=True),
    ]
    return _table(columns, width)


def _legend(run: WatchedRun, console: Console, width: int) -> Sequence[Text]:
    glyphs = _glyphs(console.options)
    marks = f"{glyphs.used} now  {glyphs.peak} peak  {glyphs.predicted} predicted  {glyphs.limit} limit"
    text = Text(f"{marks}  a whole bar is {gib(scale_bytes(run.gauges))} GiB", "dim")
    return list(text.wrap(console, width))


def _remarks(run: WatchedRun) -> list[Text]:
    shown = [_text(remark, "yellow") for remark in run.remarks[:_MOST_REMARKS]]
    more = len(run.remarks) - _MOST_REMARKS
    return [*shown, _text(f"and {more} more remarks", "yellow")] if more > 0 else shown


def _several_runs(runs: Sequence[WatchedRun], rows: int, now: float, width: int) -> list[RenderableType]:
    """Return a line for each run; if there are too many, for those that run or failed, and a count of the others."""
    summary: list[Text] = []
    if len(runs) >= rows:
        ordered = sorted(runs, key=lambda run: _FIRST.index(run.phase) if run.phase in _FIRST else len(_FIRST))
        runs, others = ordered[: max(1, rows - 2)], ordered[max(1, rows - 2) :]
        phases = ", ".join(f"{count} {phase}" for phase, count in Counter(run.phase for run in others).items())
        summary = [_text(f"and {len(others)} more: {phases}", "dim")]
    fullest = [run.fullest for run in runs]
    full_bar_bytes = scale_bytes([gauge for gauge in fullest if gauge is not None])
    columns = [
        Column("run", [_text(one_line(run.name)[:_LONGEST_NAME]) for run in runs], 10, left=True),
        Column("job", [_text(run.job) for run in runs], 3),
        Column("phase", [_text(run.phase, PHASE_STYLES.get(run.phase, "yellow")) for run in runs], 9, left=True),
        Column("step", [_step(run) for run in runs], 8),
        Column("s/step", [_number(run.step_seconds, ".3g") for run in runs], 2),
        Column("tokens/s", [_number(run.tokens_per_second, ",.0f") for run in runs], 4),
        Column("loss", [_number(run.loss, ".4g") for run in runs], 6),
        Column("peak GiB", [_gib(gauge.peak_bytes if gauge else None) for gauge in fullest], 1),
        Column("of pred.", [_share(gauge) for gauge in fullest], 7),
        Column("seen", [_seen(run, now) for run in runs], 0),
        Column(
            "", [Bar(gauge, full_bar_bytes) if gauge else _text("") for gauge in fullest], -1, left=True, flexible=True
        ),
        Column("", [_reasons(run) for run in runs], 5, left=True, flexible=True),
    ]
    return [_table(columns, width), *summary]


def _reasons(run: WatchedRun) -> Text:
    """Return why the run waits, or what is wrong."""
    return _text("; ".join(reason for reason in (run.because, *run.remarks) if reason), "yellow")


def _step(run: WatchedRun) -> Text:
    return _text("-" if run.step is None else f"{run.step}" + (f"/{run.steps}" if run.steps else ""))


def _seen(run: WatchedRun, now: float) -> Text:
    return _text("-" if run.memory_times is None or run.ended else _ago(run.memory_times[0], now))


def _number(value: float | None, form: str) -> Text:
    return _text("-" if value is None else format(value, form))


def _gib(size: int | None) -> Text:
    return _text("-" if size is None else gib(size))


def _share(gauge: Gauge | None) -> Text:
    return _text("-") if gauge is None or gauge.share is None else _text(f"{100 * gauge.share:.0f} %", alarm(gauge))


def _ago(then: float, now: float) -> str:
    """Clocks of nodes differ a little: a time in the future counts as now."""
    return f"{duration(max(0.0, now - then))} ago"


def live_view(stream: TextIO, screen: bool) -> Live:
    """Return a view that is drawn when it is updated: on the terminal's other screen, or else below what was printed.
    It is erased at its end."""
    console = Console(file=stream, highlight=False, markup=False, emoji=False, force_terminal=True)
    return Live(console=console, screen=screen, auto_refresh=False, transient=True)


class TerminalView(View):
    """Draws on the terminal's other screen, as an editor does; what was there comes back, and the last frame is left
    below it."""

    def __init__(self) -> None:
        self._live = live_view(sys.stdout, screen=True)
        self._frame: RunsFrame | None = None
        self._size = self._live.console.size

    @contextlib.contextmanager
    def shown(self) -> Iterator[None]:
        """While it is drawn. Whatever ends it, SIGTERM and errors included, the terminal is whole afterwards."""
        try:
            with drawn(self._live):
                yield
        finally:
            if self._frame is not None:
                self._live.console.print(self._frame)

    def show(self, looks: object, runs: Sequence[WatchedRun], now: float, trouble: str) -> None:
        self._frame, self._size = RunsFrame(runs, now, trouble), self._live.console.size
        self._live.update(self._frame, refresh=True)

    def idle(self) -> None:
        if self._size != self._live.console.size:
            self._size = self._live.console.size
            self._live.refresh()


@contextlib.contextmanager
def drawn(live: Live) -> Iterator[Live]:
    """The view is drawn within; SIGTERM leaves nothing of it behind, and Ctrl-Z gives the terminal back meanwhile."""
    with contextlib.ExitStack() as stack:
        if threading.current_thread() is threading.main_thread():
            stack.enter_context(_signals(live))
        with live:
            yield live


@contextlib.contextmanager
def _signals(live: Live) -> Iterator[None]:
    def stop(number: int, at: FrameType | None) -> None:
        live.stop()
        os.kill(os.getpid(), signal.SIGSTOP)  # comes back here with SIGCONT
        live.start(refresh=True)

    def end(number: int, at: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, what) for number, what in ((signal.SIGTSTP, stop), (signal.SIGTERM, end))}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
