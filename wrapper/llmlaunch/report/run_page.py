"""The report of one run as a page for a browser: state, attempts, memory, loss and step time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from llmlaunch.causes.cause import in_words
from llmlaunch.report.page import BAR_UNITS, bar, looks, page, spread_of, tile, write_page
from llmlaunch.report.run_summary_text import amount, error_words, job_words, phase_words, planned_verdict
from llmlaunch.rundir.values import counted
from llmlaunch.units import GIB, duration, gib
from llmlaunch.verdicts import SAFE, TIGHT, UNSAFE, as_verdict

MARKS = {"succeeded": SAFE, "failed": UNSAFE, "refused": UNSAFE, "running": "running", "pending": TIGHT}
CURVE_LOOKS = ("weights", "activations", "buffers", "optimizer", "gradients", "outside")
MOST_BARS = 40  # attempts or pipeline ranks; if there are more, the first half and the last half of this number
MOST_ROWS = 60  # rows in a picture's table, evenly spaced
DASH = "\u2013"

Record = Mapping[str, Any]


def write_run_page(report: Record, command: str, path: Path) -> None:
    """Write the page to `path`, whose name must end in .html. Raises UserError."""
    write_page(path, lambda: run_page(report, command))


def run_page(report: Record, command: str) -> str:
    """Return the HTML of the page, made from what `report --json` prints. `command` is what the user typed."""
    run, state, plan = report["run"], report["state"], report["plan"]
    pictures, charts = _pictures(report)
    values = {
        "what": "report",
        "made_by": command,
        "mark": MARKS.get(state["phase"], "refused"),
        "phase": phase_words(state),
        "verdict": as_verdict(plan["verdict"]),
        "verdict_words": planned_verdict(plan),
        "name": run["name"],
        "job": job_words(run),
        "layout": run["layout"],
        "why": None if state["phase"] == "succeeded" else state["cause_sentence"] or state["why"],
        "advice": state["advice"],
        "tiles": _tiles(report),
        "missing": report["missing"],
        "compared": _compared(report),
        "attempts": _attempts(report),
        "memory": _memory(report),
        "pictures": pictures,
        "facts": _facts(report),
        "files": report["files"],
        "recipe": report["recipe"]["text"].strip(),
        "overrides": " ".join(report["recipe"]["overrides"]),
    }
    return page("run", f"{run['name']}: {state['phase']}", values, {"charts": charts})


def _tiles(report: Record) -> list[dict[str, str]]:
    run, state, spent = report["run"], report["state"], report["goodput"]
    by_name = {row["name"]: row for row in report["compared"]}
    step = DASH if state["step"] is None else f"{state['step']:,}"
    loss = "" if report["steps"]["last_loss"] is None else f"last loss {report['steps']['last_loss']:.4g}"
    tiles = [tile("Step", step, f"of {run['steps']:,}" if run["steps"] else "", loss)]
    memory = report["compared"][0] if report["compared"] else None
    for name, row, unit in (
        ("Memory, worst rank", memory if memory and memory["unit"] == "bytes" else None, "GiB"),
        ("A step", by_name.get("step time"), "s"),
        ("Throughput of a device", by_name.get("throughput of a device"), "tokens/s"),
    ):
        measured = None if row is None else row["measured"]
        predicted = None if row is None else row["predicted"]
        words = "" if predicted is None or row is None else f"{amount(predicted, row['unit'])} predicted"
        error = "" if row is None or row["error"] is None else f", {error_words(row['error'])}"
        value = DASH if measured is None or row is None else amount(measured, row["unit"])
        tiles.append(tile(name, value, unit, words + error))
    restarts = counted(max(len(report["attempts"]) - 1, 0), "restart")
    if spent["share"] is None:
        return [*tiles, tile("Goodput", DASH, note=restarts)]
    share, allocated = f"{100 * spent['share']:.0f}", f"% of {duration(spent['allocated_seconds'])}"
    return [*tiles, tile("Goodput", share, allocated, restarts)]


def _compared(report: Record) -> dict[str, Any]:
    rows = [
        [
            f"{row['name']}, {'GiB' if row['unit'] == 'bytes' else row['unit']}",
            *(DASH if row[key] is None else amount(row[key], row["unit"]) for key in ("predicted", "measured")),
            DASH if row["error"] is None else error_words(row["error"]),
        ]
        for row in report["compared"]
    ]
    about = "Peaks are of the fullest rank; the error is predicted against measured, so minus means predicted too low."
    return {"about": about, "head": ["", "predicted", "measured", "error"], "rows": rows}


# --- attempts -------------------------------------------------------------------------------------------------------


def _attempts(report: Record) -> dict[str, Any]:
    attempts, spent = report["attempts"], report["goodput"]
    timed = [each for each in attempts if each["started_at"] is not None]
    starts = [each["started_at"] for each in timed]
    ends = [each["ended_at"] or each["started_at"] for each in timed]
    whole = max(max(ends) - min(starts), 1.0) if timed else 1.0
    bars = [_attempt_bar(number, each, min(starts), whole) for number, each in _some(attempts) if starts]
    hidden = len(attempts) - len(bars)
    about = (
        f"{counted(len(attempts), 'attempt')}, {duration(whole)} from the first start to the last end. " if bars else ""
    )
    about += (
        f"Allocated: {duration(spent['allocated_seconds'])}; between attempts: {duration(spent['queue_seconds'])}. "
    )
    about += "Goodput is the share of the allocated time in which steps were made that count in the end."
    if hidden > 0 and bars:
        about += f" {hidden} attempts in the middle are in the table alone."
    parts = (("good", "steps that last"), ("bad", "steps made again, or lost"), ("outside", "starting, saving, ending"))
    legend = looks(*parts)
    return {
        "about": about,
        "chart": {"legend": legend, "bars": bars, "lines": []} if bars else None,
        "lost": [[*row[:3], duration(row[3])] for row in _losses(spent)],
        "head": ["attempt", "layout", "state", "began", "lasted", "steps", "made again", "s a step", "why it ended"],
        "rows": [_attempt_row(number, each) for number, each in enumerate(attempts, 1)],
    }


def _losses(spent: Record) -> list[tuple[str, str, str, float]]:
    """Return where the allocated time was lost, most expensive first: name, stops, repeated steps, seconds."""
    parts = [("start-up", "startup"), ("saves, evaluations, slow steps", "other"), ("after the last step", "end")]
    rows = [(name, DASH, DASH, spent[f"{part}_seconds"]) for name, part in parts]
    rows += [
        (in_words(stop["cause"]), str(stop["stops"]), f"{stop['repeated_steps']:,}", stop["seconds"])
        for stop in spent["stops"]
    ]
    return sorted((row for row in rows if row[3] > 0 or row[1] != DASH), key=lambda row: -row[3])


def _some(items: Sequence[Record]) -> list[tuple[int, Record]]:
    numbered = list(enumerate(items, 1))
    half = MOST_BARS // 2
    return numbered if len(numbered) <= MOST_BARS else [*numbered[:half], *numbered[-half:]]


def _attempt_bar(number: int, attempt: Record, first: float, whole: float) -> dict[str, Any]:
    began = attempt["started_at"] if attempt["started_at"] is not None else first
    lasted = max((attempt["ended_at"] or began) - began, 0.0)
    spent = attempt["time"] or {}
    repeated_steps, repeated = spent.get("repeated_steps", 0), min(spent.get("repeated_seconds", 0.0), lasted)
    before, good = spent.get("startup_seconds", 0.0), min(spent.get("useful_seconds", 0.0), lasted - repeated)
    before = min(before, lasted - repeated - good)
    parts = [("outside", before), ("good", good), ("bad", repeated), ("outside", lasted - before - good - repeated)]
    offset = BAR_UNITS * (began - first) / whole
    pieces = [piece | {"x": round(piece["x"] + offset, 2)} for piece in spread_of(parts, whole)]
    if not pieces:
        pieces = [{"look": "outside", "x": round(min(offset, BAR_UNITS - 4), 2), "width": 4}]
    ended = in_words(attempt["cause"] or attempt["state"] or "goes on")
    rows = [
        ("began after", duration(began - first)),
        ("lasted", duration(lasted) if attempt["ended_at"] is not None else DASH),
        ("steps", _span(attempt)),
        ("steps made again", f"{repeated_steps:,}, {duration(repeated)}"),
        ("layout", attempt["layout"]),
    ]
    title = f"Attempt {number}: {ended if attempt['state'] == 'succeeded' else attempt['why'] or ended}"
    return bar(f"attempt {number}", ended, pieces, rows, title, f"{title}. ")


def _span(attempt: Record) -> str:
    reached = attempt["to_step"]
    return DASH if reached is None else f"{attempt['from_step']:,} to {reached:,}"


def _attempt_row(number: int, attempt: Record) -> list[str]:
    began, ended = attempt["started_at"], attempt["ended_at"]
    return [
        f"{number}. {attempt['attempt']}",
        attempt["layout"],
        attempt["state"] or DASH,
        _moment(began),
        DASH if began is None or ended is None else duration(max(ended - began, 0.0)),
        _span(attempt),
        DASH if attempt["time"] is None else f"{attempt['time']['repeated_steps']:,}",
        DASH if attempt["step_seconds"] is None else f"{attempt['step_seconds']:.3g}",
        "; ".join([*([attempt["why"]] if attempt["why"] else []), *attempt["slow"]]) or DASH,
    ]


def _moment(seconds: float | None) -> str:
    return DASH if seconds is None else datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M")


# --- memory ---------------------------------------------------------------------------------------------------------


def _memory(report: Record) -> dict[str, Any]:
    memory, plan = report["memory"], report["plan"]
    stages, limit, card = memory["stages"], plan["limit_bytes"], plan["memory_bytes"]
    if not stages:
        return {"about": "No peak of memory was measured.", "chart": None, "remarks": memory["remarks"]}
    sizes = [size for stage in stages for size in (stage["peak_bytes"], stage["predicted_bytes"] or 0)]
    whole = 1.02 * max([*sizes, limit or 0, card or 0, 1])
    lines = [
        {"look": look, "x": round(min(BAR_UNITS * size / whole, BAR_UNITS - 4), 2)}
        for look, size in (("limit", limit), ("card", card))
        if size
    ]
    legend = looks(("good", "least of its ranks"), ("spread", "up to its fullest rank"), ("predicted", "predicted"))
    legend += looks(*((look, f"{look}, {gib(size)} GiB") for look, size in (("limit", limit), ("card", card)) if size))
    shown = [stage for _, stage in _some(stages)]
    hidden = f" {len(stages) - len(shown)} in the middle are in the table alone." if len(shown) < len(stages) else ""
    kind = plan["peak_kind"] or "device"
    return {
        "about": (
            f"Measured {kind} peaks of attempt {memory['attempt']}, of the ranks of each pipeline rank together, with "
            f"the prediction for its layout and the limit it was judged by.{hidden}"
        ),
        "chart": {"legend": legend, "bars": [_stage_bar(stage, whole) for stage in shown], "lines": lines},
        "head": ["pipeline rank", "ranks", "least", "median", "most", "predicted", "error", "fullest", "known from"],
        "rows": [_stage_row(stage) for stage in stages],
        "remarks": memory["remarks"],
    }


def _stage_bar(stage: Record, whole: float) -> dict[str, Any]:
    least, most, predicted = stage["least_bytes"], stage["peak_bytes"], stage["predicted_bytes"]
    lines = [{"look": "predicted", "x": round(BAR_UNITS * predicted / whole, 2)}] if predicted else []
    rows = [
        ("most", f"{gib(most)} GiB, rank {stage['worst_rank']}{_on(stage)}"),
        ("median", f"{gib(stage['median_bytes'])} GiB of {counted(stage['ranks'], 'rank')}"),
        ("least", f"{gib(least)} GiB"),
        ("predicted", "-" if predicted is None else f"{gib(predicted)} GiB"),
        ("error", "-" if not predicted or not most else error_words(predicted / most - 1)),
        ("known from", stage["source"] or "-"),
    ]
    name = _stage_name(stage)
    pieces = spread_of([("good", least), ("spread", most - least)], whole)
    return bar(name, f"{gib(most)} GiB", pieces, rows, f"Pipeline {name}", f"Pipeline {name}: ", lines=lines)


def _on(stage: Record) -> str:
    return f" on {stage['node']}" if stage["node"] else ""


def _stage_name(stage: Record) -> str:
    return "rank unknown" if stage["pipeline_rank"] is None else f"rank {stage['pipeline_rank']}"


def _stage_row(stage: Record) -> list[str]:
    predicted, most = stage["predicted_bytes"], stage["peak_bytes"]
    return [
        _stage_name(stage),
        f"{stage['ranks']:,}",
        *(gib(stage[key]) for key in ("least_bytes", "median_bytes", "peak_bytes")),
        DASH if predicted is None else gib(predicted),
        DASH if not predicted or not most else error_words(predicted / most - 1),
        f"rank {stage['worst_rank']}{_on(stage)}",
        stage["source"] or DASH,
    ]


# --- curves ---------------------------------------------------------------------------------------------------------


def _pictures(report: Record) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return what the template says about each picture, and what its script draws, by the picture's id."""
    drawn = [_memory_curves(report), _loss_curve(report), _pace_curve(report)]
    pictures = [{"legend": [], **picture} for picture, _ in drawn]
    return pictures, {picture["id"]: chart for picture, chart in drawn if chart is not None}


def _memory_curves(report: Record) -> tuple[dict[str, Any], dict[str, Any] | None]:
    plan, curves = report["plan"], report["memory"]["over_time"]
    kind = plan["peak_kind"] or "device"
    picture = {
        "id": "memory-over-time",
        "title": "Memory over time",
        "about": "What the fullest rank of each pipeline rank held, and (as a band) the most it had held so far: "
        f"{kind} memory, GiB, as the monitors sampled it.",
        "lacks": "There are fewer than two samples of memory: no monitor ran, or the run was too short.",
        "rows": [],
    }
    if not curves:
        return picture, None
    start = min(curve["points"][0][0] for curve in curves)
    series = []
    for place, curve in enumerate(curves):
        stage = "?" if curve["pipeline_rank"] is None else curve["pipeline_rank"]
        points = [[round(at - start, 1), *(round(size / GIB, 3) for size in sizes)] for at, *sizes in curve["points"]]
        series.append(
            {
                "name": f"rank {curve['rank']}, pipeline rank {stage}",
                "look": CURVE_LOOKS[place % len(CURVE_LOOKS)],
                "points": points,
            }
        )
    predicted = max((size for size in plan["predicted_bytes"] if size is not None), default=None)
    rules = [
        {"name": name, "look": look, "value": round(size / GIB, 3)}
        for name, look, size in (("predicted", "activations", predicted), ("limit", "limit", plan["limit_bytes"]))
        if size
    ]
    chart = {
        **{"x": "time since the first sample", "unit": "GiB", "clock": True, "zero": True},
        **{"series": series, "rules": rules},
    }
    rows = [
        [f"{each['name']}, after {duration(point[0])}", f"{point[1]:.2f}", f"{point[3]:.2f}"]
        for each in series
        for point in _evenly(each["points"])
    ]
    legend = looks(*((str(each["look"]), str(each["name"])) for each in series))
    return picture | {"head": ["", "GiB held", "GiB at most"], "rows": rows, "legend": legend}, chart


def _evenly(points: Sequence[Any], most: int = MOST_ROWS) -> list[Any]:
    if len(points) <= most:
        return list(points)
    return [points[round(place * (len(points) - 1) / (most - 1))] for place in range(most)]


def _loss_curve(report: Record) -> tuple[dict[str, Any], dict[str, Any] | None]:
    steps = report["steps"]
    return _step_curve(
        report,
        {"id": "loss", "title": "Loss over steps", "lacks": "No log reports a loss.", "rows": []},
        steps["loss"],
        {"unit": "", "zero": False, "rules": []},
    )


def _pace_curve(report: Record) -> tuple[dict[str, Any], dict[str, Any] | None]:
    predicted = report["plan"]["step_seconds"]
    rules = [{"name": "predicted", "look": "activations", "value": predicted}] if predicted else []
    return _step_curve(
        report,
        {"id": "step-time", "title": "Step time over steps", "lacks": "No log reports the time of a step.", "rows": []},
        report["steps"]["seconds"],
        {"unit": "s", "zero": True, "rules": rules},
    )


def _step_curve(
    report: Record, picture: dict[str, Any], curves: Sequence[Record], chart: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Return a curve over steps. Attempts have two alternating colours, and a dotted line marks where one began."""
    if not curves:
        return picture, None
    numbers = {each["attempt"]: place for place, each in enumerate(report["attempts"], 1)}
    series = [
        {
            "name": f"attempt {numbers.get(curve['attempt'], '?')}" if len(curves) > 1 else "this run",
            "look": ("weights", "buffers")[place % 2],
            "points": curve["points"],
        }
        for place, curve in enumerate(curves)
    ]
    marks = [each["from_step"] for each in report["attempts"][1:]]
    logged = report["steps"]["logged"]
    about = f"{counted(logged, 'logged step')}"
    about += "; of neighbours the median is drawn, with their range as a band" if logged > 400 else ""
    about += f"; {counted(len(marks), 'dotted line')} where an attempt went on" if marks else ""
    rows = [
        [f"{each['name']}, step {point[0]:,.0f}", f"{point[1]:.4g}", f"{point[2]:.4g}", f"{point[3]:.4g}"]
        for each in series
        for point in _evenly(each["points"], max(MOST_ROWS // len(series), 2))
    ]
    drawn = {"x": "step", "series": series, "marks": marks, **chart}
    return picture | {"about": f"{about}.", "head": ["", "median", "least", "most"], "rows": rows}, drawn


def _facts(report: Record) -> list[tuple[str, str]]:
    run, plan = report["run"], report["plan"]
    facts = [
        ("run", run["run_id"]),
        ("directory", run["directory"]),
        ("launched by", " ".join(filter(None, [run["launcher"], run["job_id"]]))),
        ("submitted", _moment(run["submitted_at"])),
        ("backend", run["backend"]),
        ("layout that ran", plan["layout_of"]),
        *((f"version of {name}", version) for name, version in report["versions"].items()),
    ]
    return [(name, value) for name, value in facts if value]
