"""One run, drawn for a terminal of any size: its steps, and a bar for each GPU, the fullest first. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from llmlaunch.report.text import one_line
from llmlaunch.units import duration, gib
from llmlaunch.watch.bars import (
    BLOCKS,
    Column,
    Glyphs,
    Line,
    alarm,
    bar,
    cut,
    fit_columns,
    scale_bytes,
    sparkline,
    styled,
    wrapped,
)
from llmlaunch.watch.model import Gauge, WatchedRun, step_text

__all__ = ["frame"]

PHASE_STYLES = {"running": "green", "succeeded": "bold green", "failed": "bold red", "cancelled": "red"}
_LEAST_BAR = 10
_LONGEST_NODE = 20
_MOST_REMARKS = 4
_LEAST_TABLE = 3
_LONGEST_SPARK = 60


def frame(runs: Sequence[WatchedRun], columns: int, rows: int, now: float, glyphs: Glyphs = BLOCKS) -> list[Line]:
    """Draw one run with its GPUs, several with a line each, in at most `rows` lines, none longer than `columns`."""
    lines = _one_run(runs[0], columns, rows, now, glyphs) if len(runs) == 1 else _runs(runs, columns, rows, now, glyphs)
    return [cut(line, columns) for line in lines[: max(1, rows)]]


def _one_run(run: WatchedRun, columns: int, rows: int, now: float, glyphs: Glyphs) -> list[Line]:
    head = [*_title(run, columns), *_steps(run, columns, now, glyphs)]
    foot = _remarks(run)
    if run.gauges:
        head = [*head[: max(1, rows - _LEAST_TABLE - len(foot) - 1)], *_ages(run, columns, now)]
        room = max(_LEAST_TABLE, rows - len(head) - len(foot))
        table = _table(run, columns, room, glyphs)
        legend = _legend(run, columns, glyphs)
        spare = room - len(table) >= len(legend)
        return [*head, *table, *(legend if spare else ()), *foot]
    silent = run.phase not in ("pending", "unknown")
    return [*head, *([styled("no monitor has written yet", "dim")] if silent else []), *foot]


def _title(run: WatchedRun, columns: int) -> list[Line]:
    because = f": {one_line(run.because)}" if run.because else ""
    pieces = [(f"{one_line(run.name)} [{run.job}] ", "bold"), (run.phase, PHASE_STYLES.get(run.phase, "yellow"))]
    if sum(len(text) for text, _ in pieces) + len(because) <= columns:
        return [(*pieces, (because, ""))]
    return [tuple(pieces), *(styled(line) for line in wrapped(because.removeprefix(": ").split(" "), columns, " ")[:3])]


def _steps(run: WatchedRun, columns: int, now: float, glyphs: Glyphs) -> list[Line]:
    if run.step is None and run.loss is None:
        return []
    parts = step_text(run, with_memory=False).split(" | ")
    if run.step_at is not None and not run.ended:
        parts.append(f"logged {_ago(run.step_at, now)}")
    lines = [styled(line) for line in wrapped(parts, columns)]
    if len(run.losses) > 1:
        first, last = f"loss {run.losses[0]:.4g} ", f" {run.losses[-1]:.4g}"
        width = min(columns - len(first) - len(last), _LONGEST_SPARK)
        lines.append(((first, "dim"), (sparkline(run.losses, width, glyphs), "cyan"), (last, "dim")))
    return lines


def _ages(run: WatchedRun, columns: int, now: float) -> list[Line]:
    ages = run.memory_times
    if ages is None:
        return []
    newest, oldest = ages
    what = "resident memory" if run.peak_kind == "resident" else "GPU memory"
    parts = [f"{what}, GiB: " + ("at the end" if run.ended else f"as of {_ago(newest, now)}")]
    if not run.ended and newest - oldest > 30:
        parts[0] += f", the oldest number of {_ago(oldest, now)}"
    above = sum(gauge.share is not None and gauge.share > 1.0 for gauge in run.gauges)
    parts += [f"{above} above prediction"] if above else []
    return [styled(line, "dim") for line in wrapped(parts, columns)]


def _table(run: WatchedRun, columns: int, rows: int, glyphs: Glyphs) -> list[Line]:
    """Return a head and as many gauges as fit; those furthest below their prediction are left out first."""
    gauges = run.gauges
    if len(gauges) > rows - 1:
        worst = sorted(gauges, key=lambda g: (bool(g.note), g.share or 0.0, g.peak_bytes or 0), reverse=True)
        gauges, rest = tuple(worst[: max(1, rows - 2)]), worst[max(1, rows - 2) :]
        return [*_rows(gauges, columns, glyphs), styled(_rest(rest), "dim")]
    return _rows(gauges, columns, glyphs)


def _rows(gauges: Sequence[Gauge], columns: int, glyphs: Glyphs) -> list[Line]:
    styles = [alarm(gauge) for gauge in gauges]
    table = [
        Column("node", [one_line(gauge.node)[:_LONGEST_NODE] for gauge in gauges], 3, left=True),
        Column("gpu", [gauge.device for gauge in gauges], 2),
        Column("rank", [",".join(map(str, gauge.ranks)) or "-" for gauge in gauges], 5),
        Column("stage", ["-" if gauge.pipeline_rank is None else str(gauge.pipeline_rank) for gauge in gauges], 0),
        Column("now", [_gib(gauge.used_bytes) for gauge in gauges], 1),
        Column("peak", [_gib(gauge.peak_bytes) for gauge in gauges], 7),
        Column("of pred.", [_share(gauge) for gauge in gauges], 6, styles=styles),
    ]
    if all(gauge.share is None for gauge in gauges):
        table.pop()
    lines, room = fit_columns(table, columns)
    if room < _LEAST_BAR:
        lines, room = fit_columns(table, columns - _LEAST_BAR)
        room += _LEAST_BAR
    whole = scale_bytes(gauges)
    noted = [((gauge.note, "bold red"),) if gauge.note else bar(gauge, whole, room, glyphs) for gauge in gauges]
    return [lines[0], *((*line, *drawn) for line, drawn in zip(lines[1:], noted, strict=True))]


def _legend(run: WatchedRun, columns: int, glyphs: Glyphs) -> list[Line]:
    parts = [f"{glyphs.used} now", f"{glyphs.peak} peak", f"{glyphs.predicted} predicted", f"{glyphs.limit} limit"]
    parts.append(f"a whole bar is {gib(scale_bytes(run.gauges))} GiB")
    return [styled(line, "dim") for line in wrapped(parts, columns, "  ")]


def _remarks(run: WatchedRun) -> list[Line]:
    shown = [styled(one_line(remark), "yellow") for remark in run.remarks[:_MOST_REMARKS]]
    more = len(run.remarks) - _MOST_REMARKS
    return [*shown, styled(f"and {more} more remarks", "yellow")] if more > 0 else shown


def _rest(rest: Sequence[Gauge]) -> str:
    shares = [gauge.share for gauge in rest if gauge.share is not None]
    most = f", the fullest at {100 * max(shares):.0f} % of its prediction" if shares else ""
    return f"and {len(rest)} more{most}"


def _gib(size: int | None) -> str:
    return "-" if size is None else gib(size)


def _share(gauge: Gauge | None) -> str:
    return "-" if gauge is None or gauge.share is None else f"{100 * gauge.share:.0f} %"


def _ago(then: float, now: float) -> str:
    """Clocks of nodes differ a little: a time in the future counts as now."""
    return f"{duration(max(0.0, now - then))} ago"


_LONGEST_BAR = 30
_LONGEST_NAME = 60
_FIRST = ("running", "failed", "unknown", "pending")


def _runs(runs: Sequence[WatchedRun], columns: int, rows: int, now: float, glyphs: Glyphs) -> list[Line]:
    """Draw one line for each run; if there are too many, those that run or failed, and a count of the rest."""
    rest: Sequence[WatchedRun] = ()
    room = max(1, rows - 1)
    if len(runs) > room:
        ordered = sorted(runs, key=lambda run: _FIRST.index(run.phase) if run.phase in _FIRST else len(_FIRST))
        runs, rest = ordered[: max(1, room - 1)], ordered[max(1, room - 1) :]
    lines = _run_rows(runs, columns, now, glyphs)
    if rest:
        phases = ", ".join(f"{count} {phase}" for phase, count in Counter(run.phase for run in rest).items())
        lines.append(styled(f"and {len(rest)} more: {phases}", "dim"))
    return lines


def _run_rows(runs: Sequence[WatchedRun], columns: int, now: float, glyphs: Glyphs) -> list[Line]:
    fullest = [run.fullest for run in runs]
    table = [
        Column("run", [one_line(run.name)[:_LONGEST_NAME] for run in runs], 9, left=True),
        Column("job", [run.job for run in runs], 1),
        Column("phase", [run.phase for run in runs], 8, True, [PHASE_STYLES.get(run.phase, "yellow") for run in runs]),
        Column("step", [_step(run) for run in runs], 7),
        Column("s/step", [_number(run.step_seconds, ".3g") for run in runs], 3),
        Column("tokens/s", [_number(run.tokens_per_second, ",.0f") for run in runs], 4),
        Column("loss", [_number(run.loss, ".4g") for run in runs], 5),
        Column("peak GiB", [gib(gauge.peak_bytes) if gauge and gauge.peak_bytes else "-" for gauge in fullest], 2),
        Column("of pred.", [_share(gauge) for gauge in fullest], 6, styles=[alarm(g) if g else "" for g in fullest]),
        Column("seen", [_seen(run, now) for run in runs], 0),
    ]
    lines, room = fit_columns(table, columns)
    measured = [gauge for gauge in fullest if gauge is not None]
    if any(run.because or run.remarks for run in runs):
        room //= 2  # the other half is for words
    if not measured or room < _LEAST_BAR:
        return [lines[0], *(_with_words(line, run) for line, run in zip(lines[1:], runs, strict=True))]
    whole = scale_bytes(measured)
    width = min(room, _LONGEST_BAR)
    drawn = [bar(gauge, whole, width, glyphs) if gauge else styled(" " * width) for gauge in fullest]
    return [
        lines[0],
        *(
            _with_words((*line, *gauge, ("  ", "")), run)
            for line, gauge, run in zip(lines[1:], drawn, runs, strict=True)
        ),
    ]


def _with_words(line: Line, run: WatchedRun) -> Line:
    """Add why the run waits or what is wrong, as much as fits."""
    reasons = [run.because, *run.remarks]
    return (*line, (one_line("; ".join(word for word in reasons if word)), "yellow"))


def _step(run: WatchedRun) -> str:
    return "-" if run.step is None else f"{run.step}" + (f"/{run.steps}" if run.steps else "")


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _seen(run: WatchedRun, now: float) -> str:
    ages = run.memory_times
    return "-" if ages is None or run.ended else f"{duration(max(0.0, now - ages[0]))} ago"
