"""The report of a run: what it lost, what was predicted, on a screen of 24 lines, as JSON, and as a page that loads
nothing; of runs that lack half of it, too."""

from __future__ import annotations

import json
import re
import unicodedata
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from llmlaunch.app.run_report import run_report
from llmlaunch.app.run_series import thinned
from llmlaunch.report.run_page import run_page
from llmlaunch.report.run_summary_text import run_summary_text
from llmlaunch.units import GIB
from support.command_line import CommandLine
from support.page_elements import Elements
from support.report_runs import PACE, huge_run, restarted_run
from support.soak import SOAK
from support.store_run_dirs import STARTED, RunDir, fallback_chain, finished_cpu_run

HOSTILE = "</script><img src=x onerror=alert(1)>"
SCHEMA = Path(__file__).parents[3] / "docs" / "schemas" / "report.schema.json"


def report_of(run: RunDir) -> Any:
    """The report as JSON has it, which keeps its published shape."""
    report = json.loads(json.dumps(run_report(run.path, lambda _: None), allow_nan=False))
    schema = json.loads(SCHEMA.read_text("utf-8"))
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.Draft202012Validator(schema).validate(report)
    return report


def page_of(run: RunDir) -> str:
    return run_page(report_of(run), "llmlaunch report run --html report.html")


def test_steps_made_again_are_lost_to_what_ended_the_attempt(tmp_path: Path) -> None:
    report = report_of(restarted_run(tmp_path / "run"))
    assert [attempt["time"]["repeated_steps"] for attempt in report["attempts"]] == [20, 20, 0]
    spent = report["goodput"]
    stops = {stop["cause"]: stop for stop in spent["stops"]}
    assert stops.keys() == {"gpu", "hang"}
    assert stops["gpu"]["seconds"] == pytest.approx(20 * PACE)
    assert spent["queue_seconds"] == pytest.approx(2 * 420)
    assert (spent["useful_steps"], spent["useful_seconds"]) == (400, pytest.approx(400 * PACE))
    assert spent["share"] == pytest.approx(400 * PACE / (3 * 240 + 440 * PACE))


def test_a_last_attempt_that_failed_lost_what_it_had_not_saved(tmp_path: Path) -> None:
    run = restarted_run(tmp_path / "run")
    status = json.loads((run.path / "status.json").read_text())
    for place in ("status.json", "attempts/77.2/status.json"):
        run.write(place, status | {"state": "failed", "saved_step": 360, "cause": None})
    spent = report_of(run)["attempts"][-1]["time"]
    assert (spent["repeated_steps"], spent["repeated_seconds"]) == (40, pytest.approx(40 * PACE))


def test_measured_peaks_stand_beside_their_predictions_by_pipeline_rank(tmp_path: Path) -> None:
    report = report_of(restarted_run(tmp_path / "run"))
    stages = report["memory"]["stages"]
    assert [(stage["pipeline_rank"], stage["ranks"]) for stage in stages] == [(0, 4), (1, 4)]
    assert [stage["predicted_bytes"] for stage in stages] == [62 * GIB, 60 * GIB]
    assert stages[0]["peak_bytes"] > stages[1]["peak_bytes"] > 50 * GIB
    compared = {row["name"]: row for row in report["compared"]}
    assert compared["device memory"]["error"] == pytest.approx(62 * GIB / stages[0]["peak_bytes"] - 1)
    assert compared["step time"]["measured"] == pytest.approx(PACE, rel=0.02)
    assert compared["throughput of a device"]["measured"] == pytest.approx(1_048_576 / 8 / PACE, rel=0.02)
    assert [curve["rank"] for curve in report["memory"]["over_time"]] == [0, 4]


def test_loss_and_step_time_are_those_of_the_logs(tmp_path: Path) -> None:
    steps = report_of(restarted_run(tmp_path / "run"))["steps"]
    assert steps["logged"] == 140 + 140 + 160
    assert [curve["attempt"] for curve in steps["loss"]] == ["77.0", "77.1", "77.2"]
    assert steps["loss"][0]["points"][0][0] <= 3


def test_a_spike_survives_the_thinning() -> None:
    values = [(float(step), 50.0 if step == 777 else 1.0) for step in range(100_000)]
    points = thinned(values)
    assert len(points) <= 400
    assert max(most for *_, most in points) == 50.0
    assert thinned(values[:3]) == [(0.0, 1.0, 1.0, 1.0), (1.0, 1.0, 1.0, 1.0), (2.0, 1.0, 1.0, 1.0)]


def test_a_run_of_many_ranks_and_steps_is_a_small_page(tmp_path: Path) -> None:
    nodes, steps = (2_000, 100_000) if SOAK else (1_000, 25_000)
    report = report_of(huge_run(tmp_path / "run", nodes, steps))
    assert report["steps"]["logged"] == steps
    assert sum(stage["ranks"] for stage in report["memory"]["stages"]) == 8 * nodes
    assert len(run_page(report, "llmlaunch report run")) < 400_000
    assert len(json.dumps(report)) < 400_000


def test_a_layout_that_was_fallen_back_on_is_compared_with_its_own_prediction(tmp_path: Path) -> None:
    report = report_of(fallback_chain(tmp_path / "run"))
    assert report["plan"]["layout_of"] == "fallback/1"
    assert report["memory"]["stages"][0]["predicted_bytes"] == 8 * GIB


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    fresh = RunDir(tmp_path / "fresh")
    assert report_of(fresh)["state"]["phase"] == "not submitted"
    assert any("No attempt has begun" in what for what in report_of(fresh)["missing"])
    assert "No attempt has begun" in page_of(fresh)
    finished = finished_cpu_run(tmp_path / "finished")
    lacks = " ".join(report_of(finished)["missing"])
    assert "No log reports a step" in lacks
    assert "fewer than two samples" in lacks
    (attempt,) = (finished.path / "attempts").iterdir()
    for name, times in (("attempt.json", {"started_at": STARTED}), ("status.json", {"ended_at": STARTED + 20.0})):
        path = attempt / name
        before = json.loads(path.read_text()) if path.exists() else {"schema": 1, "attempt": attempt.name}
        path.write_text(json.dumps({**before, **times}))
    assert not any("samples" in what for what in report_of(finished)["missing"])  # it was too short for a curve
    early = RunDir(tmp_path / "early", kind="gpu")
    early.write("attempts/77.0/attempt.json", {"schema": 1, "attempt": "77.0", "nodes": ["n0"], "started_at": STARTED})
    early.write("status.json", {"schema": 1, "attempt": "77.0", "state": "failed", "exit_code": 1, "ranks": []})
    assert any("No peak of memory" in what for what in report_of(early)["missing"])
    assert "failed, exit code 1" in page_of(early)


def test_a_loss_that_is_no_number_is_said_and_not_drawn(tmp_path: Path) -> None:
    run = restarted_run(tmp_path / "run")
    log = run.path / "logs" / "77.2.n1.log"
    log.write_text(re.sub(r"lm loss: \S+", "lm loss: nan", log.read_text()))
    report = report_of(run)
    assert "The loss was no number at 160 steps, first at step 241." in report["missing"]
    assert [curve["attempt"] for curve in report["steps"]["loss"]] == ["77.0", "77.1"]


def test_a_gpu_that_was_slow_is_said_of_its_attempt(tmp_path: Path) -> None:
    run = restarted_run(tmp_path / "run")
    slow = {"node": "n2", "device": 3, "factor": 2.0, "since": 1e9, "signs": ["power brake"]}
    place = run.path / "attempts/77.2/status.json"
    run.write("attempts/77.2/status.json", {**json.loads(place.read_text()), "slow": [slow]})
    report = report_of(run)
    said = "GPU 3 of n2 is 2.0 times slower than its peers (power brake)"
    assert [attempt["slow"] for attempt in report["attempts"]] == [[], [], [said]]
    assert said in run_summary_text(report)


def test_a_spike_that_the_watchdog_saw_is_said(tmp_path: Path) -> None:
    run = restarted_run(tmp_path / "run")
    bad = {"kind": "spike", "since_step": 300, "loss": 9.5, "usual": 3.03, "recovered_step": 331}
    run.write("attempts/77.2/progress.json", {"schema": 1, "step": 400, "bad_loss": bad})
    spike = "The loss of attempt 77.2: spike since step 300 (9.5, was 3.03), over at step 331."
    assert spike in report_of(run)["missing"]


def test_torn_and_foreign_files_cost_nothing_else(tmp_path: Path) -> None:
    run = restarted_run(tmp_path / "run")
    (run.path / "plan.json").write_text('{"memory": 7, "layout": [1], "step_seconds": "x"}')
    (run.path / "attempts/77.1/status.json").write_text('{"state":')
    (run.path / "attempts/77.0/progress.json").write_text('{"step": "many", "step_seconds": 1e400}')
    run.torn("n0")
    (run.path / "peaks" / "n1.jsonl").write_text('{"attempt": "77.2", "time": 1, "gpus": 5}\nnull\n[]\n')
    report = report_of(run)
    assert report["steps"]["logged"] == 440
    assert any("status.json" in what for what in report["missing"])
    assert "</html>" in page_of(run)


def test_whatever_a_run_directory_says_stays_text(tmp_path: Path) -> None:
    run = restarted_run(tmp_path / "run", name=HOSTILE, overrides=[HOSTILE], backend=HOSTILE)
    (run.path / "recipe.yaml").write_text(HOSTILE)
    status = json.loads((run.path / "status.json").read_text())
    cause = {"schema": 1, "kind": HOSTILE, "node": "n1", "rank": 5, "line": HOSTILE}
    for place in ("status.json", "attempts/77.2/status.json"):
        run.write(place, status | {"state": "failed", "cause": cause, "why": HOSTILE})
    html = page_of(run)
    elements = Elements(html)
    assert elements.of("img") == []
    assert len(elements.of("script")) == 2
    assert not [name for _, attributes in elements.found for name in attributes if name.startswith("on")]
    assert HOSTILE in " ".join(elements.texts)
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', html, re.DOTALL)
    assert data is not None
    assert "charts" in json.loads(data[1])


def test_a_page_has_no_character_that_hides_or_reorders_others(tmp_path: Path) -> None:
    run = restarted_run(tmp_path / "run")
    run.run["name"] = "tiny\u202egpj\u200b"
    run.write("run.json", run.run)
    run.status(why="ended by \u2066a\x9b31m line", state="failed", exit_code=1)
    page = page_of(run)
    assert not any(
        unicodedata.category(character) in ("Cf", "Cs", "Cc") for character in page if character not in "\n\t"
    )
    assert "tiny\\u202egpj\\u200b" in page
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert data is not None
    drawn = json.dumps(json.loads(data[1]), ensure_ascii=False)
    assert not any(unicodedata.category(character) == "Cf" for character in drawn)


def test_secrets_of_this_environment_are_masked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "a-very-secret-word")
    run = restarted_run(tmp_path / "run", overrides=["environment.A=a-very-secret-word"])
    assert "a-very-secret-word" not in page_of(run)


@pytest.mark.parametrize("make", [restarted_run, fallback_chain, finished_cpu_run, RunDir])
def test_the_summary_fits_a_screen_and_names_the_next_command(
    make: Any, tmp_path: Path, llmlaunch: CommandLine
) -> None:
    run = make(tmp_path / "run")
    assert all(len(line) <= 80 for line in run_summary_text(report_of(run)).splitlines())
    lines = llmlaunch("report", run.path).stdout.splitlines()
    assert len(lines) <= 24
    assert any(line.startswith("Next: llmlaunch report ") for line in lines)


def test_the_page_is_written_where_it_is_asked_for(tmp_path: Path, llmlaunch: CommandLine) -> None:
    run = restarted_run(tmp_path / "run")
    answer = llmlaunch("report", run.path, "--html", tmp_path / "r.html")
    assert f"wrote {tmp_path / 'r.html'}" in answer.stderr
    assert answer.stdout.startswith("Next: llmlaunch ")
    assert "tiny: " in (tmp_path / "r.html").read_text("utf-8")
    assert "ends in .html" in llmlaunch("report", run.path, "--html", tmp_path / "r.txt", code=2).stderr
    assert "no run directory" in llmlaunch("report", f"{tmp_path}/", code=2).stderr
