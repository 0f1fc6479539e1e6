"""Several runs, a line each, for a terminal of any size. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from llmlaunch.report.spans import Column, Line, cut, fitting, said
from llmlaunch.report.text import one_line
from llmlaunch.report.watch_bars import BLOCKS, Glyphs, alarm, bar, scale_bytes
from llmlaunch.report.watch_one import PHASE_STYLES
from llmlaunch.report.watched import Gauge, Watched
from llmlaunch.units import duration, gib

__all__ = ["several_runs"]

_LEAST_BAR = 10
_LONGEST_BAR = 30
_LONGEST_NAME = 60
_FIRST = ("running", "failed", "unknown", "pending")


def several_runs(runs: Sequence[Watched], columns: int, rows: int, now: float, glyphs: Glyphs = BLOCKS) -> list[Line]:
    """A line for each run; where there are too many, those that go on, and a count of the rest."""
    rest: Sequence[Watched] = ()
    room = max(1, rows - 1)
    if len(runs) > room:
        ordered = sorted(runs, key=lambda run: _FIRST.index(run.phase) if run.phase in _FIRST else len(_FIRST))
        runs, rest = ordered[: max(1, room - 1)], ordered[max(1, room - 1) :]
    lines = _rows(runs, columns, now, glyphs)
    if rest:
        phases = ", ".join(f"{sum(run.phase == phase for run in rest)} {phase}" for phase in _phases(rest))
        lines.append(said(f"and {len(rest)} more: {phases}", "dim"))
    return [cut(line, columns) for line in lines[: max(1, rows)]]


def _rows(runs: Sequence[Watched], columns: int, now: float, glyphs: Glyphs) -> list[Line]:
    fullest = [run.fullest for run in runs]
    table = [
        Column("run", [one_line(run.name)[:_LONGEST_NAME] for run in runs], 9, left=True),
        Column("job", [run.job for run in runs], 1),
        Column("phase", [run.phase for run in runs], 8, True, [PHASE_STYLES.get(run.phase, "yellow") for run in runs]),
        Column("step", [_step(run) for run in runs], 7),
        Column("s/step", [_number(run.step_seconds, ".3g") for run in runs], 3),
        Column("tokens/s", [_number(run.tokens_per_second, ",.0f") for run in runs], 4),
        Column("loss", [_number(run.loss, ".4g") for run in runs], 5),
        Column("peak GiB", [gib(one.peak_bytes) if one and one.peak_bytes else "-" for one in fullest], 2),
        Column("of pred.", [_share(one) for one in fullest], 6, styles=[alarm(g) if g else "" for g in fullest]),
        Column("seen", [_seen(run, now) for run in runs], 0),
    ]
    lines, room = fitting(table, columns)
    known = [one for one in fullest if one is not None]
    if any(run.because or run.remarks for run in runs):
        room //= 2  # the other half is for words
    if not known or room < _LEAST_BAR:
        return [lines[0], *(_with_words(line, run) for line, run in zip(lines[1:], runs, strict=True))]
    whole = scale_bytes(known)
    width = min(room, _LONGEST_BAR)
    drawn = [bar(one, whole, width, glyphs) if one else said(" " * width) for one in fullest]
    return [
        lines[0],
        *(_with_words((*line, *one, ("  ", "")), run) for line, one, run in zip(lines[1:], drawn, runs, strict=True)),
    ]


def _with_words(line: Line, run: Watched) -> Line:
    """Why it waits, or what is wrong: as much of it as fits."""
    words = [run.because, *run.remarks]
    return (*line, (one_line("; ".join(word for word in words if word)), "yellow"))


def _phases(runs: Sequence[Watched]) -> list[str]:
    return list(dict.fromkeys(run.phase for run in runs))


def _step(run: Watched) -> str:
    return "-" if run.step is None else f"{run.step}" + (f"/{run.steps}" if run.steps else "")


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _share(gauge: Gauge | None) -> str:
    return "-" if gauge is None or gauge.share is None else f"{100 * gauge.share:.0f} %"


def _seen(run: Watched, now: float) -> str:
    ages = run.memory_ages
    return "-" if ages is None or run.ended else f"{duration(max(0.0, now - ages[0]))} ago"
