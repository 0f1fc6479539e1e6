"""One run, drawn for a terminal of any size: its steps, and a bar for each GPU, the fullest first. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from llmlaunch.report.run_words import step_line
from llmlaunch.report.spans import Column, Line, cut, fitting, said, wrapped
from llmlaunch.report.text import one_line
from llmlaunch.report.watch_bars import BLOCKS, Glyphs, alarm, bar, scale_bytes, sparkline
from llmlaunch.report.watched import Gauge, Watched
from llmlaunch.units import duration, gib

__all__ = ["PHASE_STYLES", "one_run"]

PHASE_STYLES = {"running": "green", "succeeded": "bold green", "failed": "bold red", "cancelled": "red"}
_LEAST_BAR = 10
_LONGEST_NODE = 20
_MOST_REMARKS = 4
_LEAST_TABLE = 3
_LONGEST_SPARK = 60


def one_run(run: Watched, columns: int, rows: int, now: float, glyphs: Glyphs = BLOCKS) -> list[Line]:
    """At most `rows` lines, none longer than `columns`; what does not fit is counted."""
    head = [*_title(run, columns), *_steps(run, columns, now, glyphs)]
    foot = _remarks(run)
    if run.gauges:
        head = [*head[: max(1, rows - _LEAST_TABLE - len(foot) - 1)], *_ages(run, columns, now)]
        room = max(_LEAST_TABLE, rows - len(head) - len(foot))
        table = _table(run, columns, room, glyphs)
        legend = _legend(run, columns, glyphs)
        spare = room - len(table) >= len(legend)
        lines = [*head, *table, *(legend if spare else ()), *foot]
    else:
        lines = [*head, *_no_memory(run), *foot]
    return [cut(line, columns) for line in lines[: max(1, rows)]]


def _title(run: Watched, columns: int) -> list[Line]:
    because = f": {one_line(run.because)}" if run.because else ""
    pieces = [(f"{one_line(run.name)} [{run.job}] ", "bold"), (run.phase, PHASE_STYLES.get(run.phase, "yellow"))]
    if sum(len(text) for text, _ in pieces) + len(because) <= columns:
        return [(*pieces, (because, ""))]
    return [tuple(pieces), *(said(line) for line in wrapped(because.removeprefix(": ").split(" "), columns, " ")[:3])]


def _steps(run: Watched, columns: int, now: float, glyphs: Glyphs) -> list[Line]:
    if run.step is None and run.loss is None:
        return []
    words = step_line(
        run.step,
        run.steps,
        run.loss,
        run.step_seconds,
        run.tokens_per_second,
        run.devices,
        None,
        None,
        run.seconds_left,
        run.loss_since,
    )
    parts = words.split(" | ")
    if run.step_at is not None and not run.ended:
        parts.append(f"logged {_ago(run.step_at, now)}")
    lines = [said(line) for line in wrapped(parts, columns)]
    if len(run.losses) > 1:
        first, last = f"loss {run.losses[0]:.4g} ", f" {run.losses[-1]:.4g}"
        width = min(columns - len(first) - len(last), _LONGEST_SPARK)
        lines.append(((first, "dim"), (sparkline(run.losses, width, glyphs), "cyan"), (last, "dim")))
    return lines


def _ages(run: Watched, columns: int, now: float) -> list[Line]:
    ages = run.memory_ages
    if ages is None:
        return []
    newest, oldest = ages
    what = "resident memory" if run.peak_kind == "resident" else "GPU memory"
    parts = [f"{what}, GiB: " + ("at the end" if run.ended else f"as of {_ago(newest, now)}")]
    if not run.ended and newest - oldest > 30:
        parts[0] += f", the oldest number of {_ago(oldest, now)}"
    above = sum(gauge.share is not None and gauge.share > 1.0 for gauge in run.gauges)
    parts += [f"{above} above prediction"] if above else []
    return [said(line, "dim") for line in wrapped(parts, columns)]


def _no_memory(run: Watched) -> list[Line]:
    return [] if run.phase in ("pending", "unknown") else [said("no monitor has written yet", "dim")]


def _table(run: Watched, columns: int, rows: int, glyphs: Glyphs) -> list[Line]:
    """A head, and as many gauges as there are rows; where some are left out, those furthest from their prediction."""
    gauges = run.gauges
    if len(gauges) > rows - 1:
        worst = sorted(gauges, key=_fullness, reverse=True)
        gauges, rest = tuple(worst[: max(1, rows - 2)]), worst[max(1, rows - 2) :]
        return [*_rows(gauges, columns, glyphs), said(_rest(rest), "dim")]
    return _rows(gauges, columns, glyphs)


def _rows(gauges: Sequence[Gauge], columns: int, glyphs: Glyphs) -> list[Line]:
    styles = [alarm(gauge) for gauge in gauges]
    table = [
        Column("node", [one_line(gauge.node)[:_LONGEST_NODE] for gauge in gauges], 3, left=True),
        Column("gpu", [gauge.device for gauge in gauges], 2),
        Column("rank", [_ranks(gauge) for gauge in gauges], 5),
        Column("stage", ["-" if gauge.pipeline_rank is None else str(gauge.pipeline_rank) for gauge in gauges], 0),
        Column("now", [_gib(gauge.used_bytes) for gauge in gauges], 1),
        Column("peak", [_gib(gauge.peak_bytes) for gauge in gauges], 7),
        Column("of pred.", [_share(gauge) for gauge in gauges], 6, styles=styles),
    ]
    if all(gauge.share is None for gauge in gauges):
        table.pop()
    lines, room = fitting(table, columns)
    if room < _LEAST_BAR:
        lines, room = fitting(table, columns - _LEAST_BAR)
        room += _LEAST_BAR
    whole = scale_bytes(gauges)
    noted = [((gauge.note, "bold red"),) if gauge.note else bar(gauge, whole, room, glyphs) for gauge in gauges]
    return [lines[0], *((*line, *drawn) for line, drawn in zip(lines[1:], noted, strict=True))]


def _legend(run: Watched, columns: int, glyphs: Glyphs) -> list[Line]:
    parts = [f"{glyphs.used} now", f"{glyphs.peak} peak", f"{glyphs.predicted} predicted", f"{glyphs.limit} limit"]
    parts.append(f"a whole bar is {gib(scale_bytes(run.gauges))} GiB")
    return [said(line, "dim") for line in wrapped(parts, columns, "  ")]


def _remarks(run: Watched) -> list[Line]:
    shown = [said(one_line(remark), "yellow") for remark in run.remarks[:_MOST_REMARKS]]
    more = len(run.remarks) - _MOST_REMARKS
    return [*shown, said(f"and {more} more remarks", "yellow")] if more > 0 else shown


def _fullness(gauge: Gauge) -> tuple[bool, float, int]:
    return bool(gauge.note), gauge.share or 0.0, gauge.peak_bytes or 0


def _rest(rest: Sequence[Gauge]) -> str:
    shares = [gauge.share for gauge in rest if gauge.share is not None]
    most = f", the fullest at {100 * max(shares):.0f} % of its prediction" if shares else ""
    return f"and {len(rest)} more{most}"


def _ranks(gauge: Gauge) -> str:
    return ",".join(str(rank) for rank in gauge.ranks) or "-"


def _gib(size: int | None) -> str:
    return "-" if size is None else gib(size)


def _share(gauge: Gauge) -> str:
    return "-" if gauge.share is None else f"{100 * gauge.share:.0f} %"


def _ago(then: float, now: float) -> str:
    """Clocks of nodes differ a little: what is of the future is of now."""
    return f"{duration(max(0.0, now - then))} ago"
