"""What `llmlaunch calibrate` found, for a person."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from llmlaunch.calibration.calibrations import Calibration, Errors
from llmlaunch.calibration.margins import Bound
from llmlaunch.report.text import one_line, percent, table
from llmlaunch.rundir.messages import counted, to_type
from llmlaunch.units import gib

if TYPE_CHECKING:
    from llmlaunch.memory.correction import Correction
    from llmlaunch.store.calibrations import Answer, Learning, Use

__all__ = ["calibration_text", "correction_words", "learning_text", "list_text"]


def correction_words(correction: Correction) -> str:
    """torch +3.1 %, outside +0.42 GiB"""
    words = []
    if correction.torch_share:
        words.append(f"torch {100 * correction.torch_share:+.1f} %")
    if correction.outside_bytes:
        sign = "+" if correction.outside_bytes > 0 else "-"
        words.append(f"outside {sign}{gib(abs(correction.outside_bytes))} GiB")
    return ", ".join(words) or "none"


def learning_text(learning: Learning) -> str:
    parts = ["\n".join(_answer(answer)) for answer in learning.answers]
    if learning.left_out:
        parts.append("Left out: " + _counts(learning.left_out))
    return "\n\n".join(parts)


def _answer(answer: Answer) -> list[str]:
    outcome, found = answer.result, answer.result.calibration
    where = one_line(f"{outcome.backend} on {outcome.accelerator}")
    if found is None or answer.did == "unchanged":
        return [f"{where}: {answer.did}, {answer.why}"]
    lines = [f"{where}: {_data(found)}", *_learned(found)]
    kept = "the correction in use stays" if answer.before is not None else "none is in use"
    if answer.did == "taken":
        return [*lines, f"  taken as {found.id}", f"  go back with: {_going_back(answer)}"]
    return [*lines, f"  {answer.did}: {answer.why}; {kept}"]


def _going_back(answer: Answer) -> str:
    if answer.before is not None:
        return to_type("calibrate", "use", answer.before.id)
    about = ["--backend", answer.result.backend, "--accelerator", one_line(answer.result.accelerator)]
    return to_type("calibrate", "use", "none", *about)


def _data(found: Calibration) -> str:
    data = found.data
    died = f", {data.died} of them ran out of memory" if data.died else ""
    return f"{counted(data.runs, 'run')} ({counted(data.records, 'record')}){died}"


def _learned(found: Calibration) -> list[str]:
    return [
        f"  families   {_counts(found.data.families)}",
        f"  versions   {_counts(found.data.versions)}",
        f"  correction {correction_words(found.correction)}",
        _errors(found.before, found.after),
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


def calibration_text(found: Calibration, uses: Sequence[Use], estimator: str) -> str:
    """One calibration whole, with when it was in use. `estimator` is the digest of this program's."""
    stale = "" if found.estimator == estimator else ", not that of this program: calibrate again"
    lines = [
        one_line(f"{found.id}: {found.backend} on {found.accelerator}, {_data(found)}"),
        f"  made       {_when(found.made_at)} by llmlaunch {found.llmlaunch}, estimator {found.estimator[:12]}{stale}",
        f"  data       {found.data.digest[:12]}",
        *_learned(found),
    ]
    times = [use for use in uses if (use.backend, use.accelerator) == (found.backend, found.accelerator)]
    ends = [*(_when(use.since) for use in times[1:]), "now"]
    mine = [(use.since, end) for use, end in zip(times, ends, strict=True) if use.calibration_id == found.id]
    lines += [f"  in use     from {_when(since)} to {end}" for since, end in mine] or ["  in use     never"]
    return "\n".join(lines)


def list_text(found: Sequence[Calibration], uses: Sequence[Use]) -> str:
    now = {(use.backend, use.accelerator): use for use in uses}
    rows = []
    for one in found:
        use = now.get((one.backend, one.accelerator))
        since = _when(use.since) if use is not None and use.calibration_id == one.id else "-"
        errors = f"{percent(one.before.mape)} > {percent(one.after.mape)}"
        about = [one.backend, one.accelerator, str(one.data.runs), correction_words(one.correction), errors, since]
        rows.append([one_line(text) for text in (one.id, *about)])
    head = ["id", "backend", "accelerator", "runs", "correction", "mean error", "in use since"]
    return table(head, rows, indent="")


def _when(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))


def _counts(counts: Mapping[str, int]) -> str:
    return one_line(", ".join(f"{name}: {count}" for name, count in counts.items()))
