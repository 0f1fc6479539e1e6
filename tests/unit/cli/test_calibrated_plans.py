"""The calibration in use corrects what check, plan, render and submit say, and each of them names it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from llmlaunch.assets import asset
from llmlaunch.calibration.calibrations import Calibration
from llmlaunch.store.calibrations import put, use
from llmlaunch.store.database import open_store
from llmlaunch.units import GIB
from support.calibrated import calibration, score
from support.checkouts import megatron_checkout
from support.command_line import CommandLine
from support.measured_runs import run

RECIPE = str(asset("recipes", "llama3-8b.yaml"))
CARD = "h100-80gb"
SCORES = [score(0.97 + i / 1000) for i in range(40)]


@pytest.fixture(autouse=True)
def megatron(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGATRON_LM_PATH", str(megatron_checkout(tmp_path / "Megatron-LM")))


def checked(llmlaunch: CommandLine, *overrides: str, recipe: str = RECIPE) -> dict[str, Any]:
    out, err = llmlaunch("check", recipe, *overrides, "--json")
    assert [line for line in err.splitlines() if not line.startswith("note: ")] == []
    return dict(json.loads(out))


def worst(plan: dict[str, Any]) -> int:
    return max(rank["device_bytes"] for rank in plan["memory"]["ranks"])


def stored(*calibrations: Calibration) -> None:
    """Store calibrations, and use the last."""
    with open_store() as store, store.write() as connection:
        for entry in calibrations:
            put(connection, entry)
        use(connection, entry.backend, entry.accelerator, entry.id, 100.0)


PINNED = (
    "layout={tensor: 2, pipeline: 2, virtual_pipeline: 1, context: 1, micro_batch_size: 1, layers_by_stage: even, "
    "offload_modules: [], offload_layers: 0, offload_optimizer: 0, techniques: asked}"
)


def test_the_one_in_use_is_in_every_number_and_is_named(llmlaunch: CommandLine, store_file: Path) -> None:
    plain = checked(llmlaunch, PINNED)
    assert not store_file.parent.exists()  # a look makes none
    assert plain["memory"]["correction"] is None
    assert plain["memory"]["evidence"]["calibration"] is None
    assert (
        "no measured run of Megatron-LM on h100-80gb yet. After your first run: llmlaunch collect"
        in plain["memory"]["evidence"]["widened"]
    )
    mine = calibration(SCORES, torch_share=0.05, outside_bytes=2**30, accelerator=CARD)
    stored(mine)
    plan = checked(llmlaunch, PINNED)
    assert plan["memory"]["correction"] == {"torch_share": 0.05, "outside_bytes": 2**30, "calibration_id": mine.id}
    assert plan["memory"]["evidence"] == {
        "runs": 40, "of_family": 40, "of_version": 40, "calibration": mine.id, "widened": None,
    }  # fmt: skip
    for before, after in zip(plain["memory"]["ranks"], plan["memory"]["ranks"], strict=True):
        assert after["reserved_bytes"] == pytest.approx(1.05 * before["reserved_bytes"], abs=2)
        assert (
            after["device_bytes"] - after["reserved_bytes"] == before["device_bytes"] - before["reserved_bytes"] + 2**30
        )
        assert after["terms"]["measured_residual"] == pytest.approx(0.05 * before["allocated_bytes"], abs=2)
    text, _ = llmlaunch("check", RECIPE, PINNED, "-v")
    assert "measured residual" in text
    assert f"(calibration {mine.id}, 40 runs)" in text
    assert "40 runs on h100-80gb, 40 of this family of models (dense gated)" in text
    assert f"none peaked more than 0.9 % above its prediction (calibration {mine.id})" in text
    assert checked(llmlaunch, PINNED, "memory.calibration=none")["memory"]["ranks"] == plain["memory"]["ranks"]


def test_going_back_and_naming_one(llmlaunch: CommandLine) -> None:
    plain = checked(llmlaunch, PINNED)
    first, second = (calibration(SCORES, torch_share=s, accelerator=CARD, number=n) for n, s in ((1, 0.01), (2, 0.09)))
    stored(first, second)
    newest = worst(checked(llmlaunch, PINNED))
    named = checked(llmlaunch, PINNED, f"memory.calibration={first.id}")
    assert named["memory"]["correction"]["calibration_id"] == first.id
    assert worst(plain) < worst(named) < newest
    with open_store() as store, store.write() as connection:
        use(connection, "megatron", CARD, None, 200.0)
    assert checked(llmlaunch, PINNED)["memory"]["ranks"] == plain["memory"]["ranks"]
    assert worst(checked(llmlaunch, PINNED, f"memory.calibration={second.id}")) == newest


def test_a_calibration_that_cannot_be_had_is_refused_by_name(llmlaunch: CommandLine) -> None:
    other = calibration(SCORES, accelerator="a100-80gb")
    stored(other)
    _, err = llmlaunch("check", RECIPE, "memory.calibration=no-such-20261121T000000Z", code=2)
    assert "memory.calibration: no-such-20261121T000000Z: the store holds no such calibration" in err
    _, err = llmlaunch("check", RECIPE, f"memory.calibration={other.id}", code=2)
    assert "is of megatron on a100-80gb; this recipe runs megatron on h100-80gb" in err
    assert checked(llmlaunch, PINNED)["memory"]["correction"] is None, "another accelerator's is not taken"


def test_a_risk_rests_on_its_scores_and_on_no_pricing(llmlaunch: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = calibration([score(1.0 + i / 1000) for i in range(100)], accelerator=CARD)
    stored(mine)
    monkeypatch.setitem(sys.modules, "llmlaunch.calibration.peaks", None)
    memory = checked(llmlaunch, PINNED, "memory.risk=0.01")["memory"]
    assert (memory["runs"], memory["risk"]) == (100, 0.01)
    assert memory["limit_bytes"] == pytest.approx(memory["memory_bytes"] / 1.099, abs=2)
    assert memory["margin"].startswith(f"risk 0.01 by 100 comparable runs on {CARD} (calibration {mine.id}): a device")
    few = checked(llmlaunch, PINNED, "memory.risk=0.005")["memory"]
    assert few["runs"] > 199, "the shipped runs join them"
    assert few["limit_bytes"] < memory["limit_bytes"]


def test_a_run_directory_says_what_check_said_and_by_which_calibration(llmlaunch: CommandLine, tmp_path: Path) -> None:
    mine = calibration(SCORES, torch_share=0.05, accelerator=CARD)
    stored(mine)
    plan = checked(llmlaunch, PINNED, "on_oom=fallback")
    llmlaunch("render", RECIPE, PINNED, "on_oom=fallback", "-o", tmp_path / "run")
    described = json.loads((tmp_path / "run" / "run.json").read_text())
    assert described["predicted_bytes"] == [rank["device_bytes"] for rank in plan["memory"]["ranks"]]
    assert described["measurement"]["calibration_id"] == mine.id
    written = json.loads((tmp_path / "run" / "plan.json").read_text())
    assert written["memory"] == plan["memory"]
    assert written["fallbacks"] == plan["fallbacks"]


def test_a_local_run_on_a_cpu_takes_that_of_the_cpu(llmlaunch: CommandLine) -> None:
    recipe = str(asset("recipes", "quickstart.yaml"))
    plain = checked(llmlaunch, recipe=recipe)
    stored(calibration([score(1.0, kind="resident")] * 3, 0.1, 2**28, backend="deepspeed", accelerator="cpu"))
    plan = checked(llmlaunch, recipe=recipe)
    assert plan["memory"]["peak_kind"] == "resident"
    assert plan["memory"]["evidence"]["runs"] == 3
    assert worst(plan) > worst(plain) + 2**28


def test_one_of_an_earlier_formula_may_add_and_never_take_off_and_bounds_nothing(llmlaunch: CommandLine) -> None:
    mine = calibration([score(1.0)] * 100, -0.1, 2**30, accelerator=CARD, estimator="0" * 64)
    stored(mine)
    out, err = llmlaunch("check", RECIPE, PINNED, "memory.risk=0.05", "--json")
    memory = json.loads(out)["memory"]
    assert memory["correction"] == {"torch_share": 0.0, "outside_bytes": 2**30, "calibration_id": mine.id}
    assert "the formula has changed since" in memory["evidence"]["widened"]
    assert (
        memory["limit_bytes"]
        == checked(llmlaunch, PINNED, "memory={risk: 0.05, calibration: none}")["memory"]["limit_bytes"]
    )
    assert err.count(f"warning: calibration {mine.id} was made for an earlier version of the formula") == 1


def test_a_check_reads_a_sqlite_store_without_the_database_library(own_home: Path) -> None:
    """Importing SQLAlchemy takes as long as half the check."""
    stored(calibration(SCORES, accelerator=CARD))
    program = f"""
import sys
from llmlaunch.cli.main import main
sys.argv = ["llmlaunch", "check", {RECIPE!r}, {PINNED!r}, "--json"]
try:
    main()
finally:
    print([name in sys.modules for name in ("sqlalchemy", "llmlaunch.calibration.cases")], file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert done.stderr.splitlines()[-1] == "[False, False]"
    assert json.loads(done.stdout)["memory"]["evidence"]["runs"] == 40


def memory_of_plan(llmlaunch: CommandLine, *overrides: str) -> dict[str, Any]:
    return dict(llmlaunch.json("check", RECIPE, PINNED, *overrides)["memory"])


@pytest.fixture
def measured(tmp_path: Path) -> Path:
    """Twenty runs that peaked at up to 1.1 times their prediction, beside records that say nothing."""
    records = [run(i, 1.005 + i * 0.005) for i in range(20)]
    strangers = [{**run(90, 5.0), "gpu": "A100"}, {"id": "imported, and no measurement"}]
    path = tmp_path / "measured.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in [*records, *strangers]))
    return path


def test_enough_measured_runs_set_the_limit(llmlaunch: CommandLine, measured: Path) -> None:
    llmlaunch("measurements", "import", measured)
    memory = memory_of_plan(llmlaunch, "memory.risk=0.05")
    assert memory["runs"] == 20
    assert memory["limit_bytes"] == pytest.approx(memory["memory_bytes"] / 1.1, rel=1e-4)
    assert "20 comparable runs" in memory["margin"]
    floor = memory_of_plan(llmlaunch, "memory={risk: 0.05, floor_gib: 4}")
    assert floor["limit_bytes"] == memory["limit_bytes"] - 4 * GIB
    assert "4.0 GiB stay free" in floor["margin"]
    assert memory_of_plan(llmlaunch)["runs"] == 20, "without a word they decide, too"
    assert memory_of_plan(llmlaunch, "memory.limit=0.8")["margin"].startswith("80% of device memory")
