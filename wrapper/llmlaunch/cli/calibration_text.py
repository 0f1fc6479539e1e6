"""What `llmlaunch calibrate` found, for a person."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from llmlaunch.calibration.calibrations import Calibration, Errors
from llmlaunch.calibration.margins import Bound
from llmlaunch.report.text import one_line, percent, table
from llmlaunch.rundir.values import counted, to_type
from llmlaunch.units import gib

if TYPE_CHECKING:
    from llmlaunch.memory.job import Correction
    from llmlaunch.store.calibrations import Answer, Learning, Use

__all__ = ["calibration_text", "correction_words", "learning_text", "list_text"]


def correction_words(correction: Correction) -> str:
    """torch +3.1 %, outside +0.42 GiB"""
    parts = []
    if correction.torch_share:
        parts.append(f"torch {100 * correction.torch_share:+.1f} %")
    if correction.outside_bytes:
        sign = "+" if correction.outside_bytes > 0 else "-"
        parts.append(f"outside {sign}{gib(abs(correction.outside_bytes))} GiB")
    return ", ".join(parts) or "none"


def learning_text(learning: Learning) -> str:
    parts = ["\n".join(_answer(answer)) for answer in learning.answers]
    if learning.left_out:
        parts.append("Left out: " + _counts(learning.left_out))
    return "\n\n".join(parts)


def _answer(answer: Answer) -> list[str]:
    outcome, calibration = answer.result, answer.result.calibration
    where = one_line(f"{outcome.backend} on {outcome.accelerator}")
    if calibration is None or answer.did == "unchanged":
        return [f"{where}: {answer.did}, {answer.why}"]
    lines = [f"{where}: {_data(calibration)}", *_learned(calibration)]
    consequence = "the correction in use stays" if answer.before is not None else "none is in use"
    if answer.did == "taken":
        return [*lines, f"  taken as {calibration.id}", f"  go back with: {_going_back(answer)}"]
    return [*lines, f"  {answer.did}: {answer.why}; {consequence}"]


def _going_back(answer: Answer) -> str:
    if answer.before is not None:
        return to_type("calibrate", "use", answer.before.id)
    about = ["--backend", answer.result.backend, "--accelerator", one_line(answer.result.accelerator)]
    return to_type("calibrate", "use", "none", *about)


def _data(calibration: Calibration) -> str:
    data = calibration.data
    died = f", {data.died} of them ran out of memory" if data.died else ""
    return f"{counted(data.runs, 'run')} ({counted(data.records, 'record')}){died}"


def _learned(calibration: Calibration) -> list[str]:
    return [
        f"  families   {_counts(calibration.data.families)}",
        f"  versions   {_counts(calibration.data.versions)}",
        f"  correction {correction_words(calibration.correction)}",
        _errors(calibration.before, calibration.after),
    ]


def _errors(before: Errors, after: Errors) -> str:
    rows = [
        ["mean error", percent(before.mape), percent(after.mape)],
        ["bias", f"{100 * before.bias:+.1f} %", f"{100 * after.bias:+.1f} %"],
        ["worst under-prediction", percent(before.worst_under), percent(after.worst_under)],
        ["predicted too low", percent(before.under_share), percent(after.under_share)],
    ]
    for old, new in zip(before.bounds, after.bounds, strict=True):
        rows.append([f"margin at risk {new.risk:g}", _ratio(old.worse), _ratio(new.worse)])
        rows.append(["  over all runs", _of(old.ratio, old.runs, old), _of(new.ratio, new.runs, new)])
        near = [_of(b.near_limit_ratio, b.near_limit_runs, b) for b in (old, new)]
        rows.append(["  near the limit", *near])
    return table(["", "in use", "new, cross-validated"], rows)


def _ratio(ratio: float | None) -> str:
    return "-" if ratio is None else f"x {ratio:.3f}"


def _of(ratio: float | None, runs: int, bound: Bound) -> str:
    if ratio is not None:
        return f"x {ratio:.3f} ({counted(runs, 'run')})"
    return f"{runs} of {counted(bound.needed, 'run')}" if runs < bound.needed else f"too many of {runs} died"


def calibration_text(calibration: Calibration, uses: Sequence[Use], estimator: str) -> str:
    """One calibration whole, with when it was in use. `estimator` is the digest of this program's."""
    stale = "" if calibration.estimator == estimator else ", not that of this program: calibrate again"
    lines = [
        one_line(f"{calibration.id}: {calibration.backend} on {calibration.accelerator}, {_data(calibration)}"),
        f"  made       {_when(calibration.made_at)} by llmlaunch {calibration.llmlaunch}, "
        f"estimator {calibration.estimator[:12]}{stale}",
        f"  data       {calibration.data.digest[:12]}",
        *_learned(calibration),
    ]
    times = [use for use in uses if (use.backend, use.accelerator) == (calibration.backend, calibration.accelerator)]
    ends = [*(_when(use.since) for use in times[1:]), "now"]
    mine = [(use.since, end) for use, end in zip(times, ends, strict=True) if use.calibration_id == calibration.id]
    lines += [f"  in use     from {_when(since)} to {end}" for since, end in mine] or ["  in use     never"]
    return "\n".join(lines)


def list_text(calibrations: Sequence[Calibration], uses: Sequence[Use]) -> str:
    now = {(use.backend, use.accelerator): use for use in uses}
    rows = []
    for calibration in calibrations:
        use = now.get((calibration.backend, calibration.accelerator))
        since = _when(use.since) if use is not None and use.calibration_id == calibration.id else "-"
        errors = f"{percent(calibration.before.mape)} > {percent(calibration.after.mape)}"
        about = [
            calibration.backend,
            calibration.accelerator,
            str(calibration.data.runs),
            correction_words(calibration.correction),
            errors,
            since,
        ]
        rows.append([one_line(text) for text in (calibration.id, *about)])
    head = ["id", "backend", "accelerator", "runs", "correction", "mean error", "in use since"]
    return table(head, rows, indent="")


def _when(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))


def _counts(counts: Mapping[str, int]) -> str:
    return one_line(", ".join(f"{name}: {count}" for name, count in counts.items()))
