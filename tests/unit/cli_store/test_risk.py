"""`memory: {risk: ...}`: the store's measured runs set the plan's limit, or the rule decides and says why."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from llmlaunch.assets import asset
from llmlaunch.units import GIB
from support.command_line import CommandLine
from support.measured_runs import run

RECIPE = str(asset("recipes", "llama3-8b.yaml"))


def memory_of_plan(llmlaunch: CommandLine, *overrides: str) -> dict[str, Any]:
    return dict(llmlaunch.json("check", RECIPE, *overrides)["memory"])


@pytest.fixture
def measured(tmp_path: Path) -> Path:
    """Twenty runs that peaked at up to 1.1 times their prediction, beside records that say nothing."""
    records = [run(i, 1.005 + i * 0.005) for i in range(20)]
    strangers = [{**run(90, 5.0), "gpu": "A100"}, {"id": "imported, and no measurement"}]
    path = tmp_path / "measured.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in [*records, *strangers]))
    return path


def test_where_nothing_was_measured_the_rule_decides_and_no_store_is_made(
    llmlaunch: CommandLine, store_file: Path
) -> None:
    memory = memory_of_plan(llmlaunch, "memory.risk=0.01")
    assert memory["margin"] == "risk 0.01 needs 99 comparable runs, the store holds 0: the 80 % rule decides"
    assert (memory["risk"], memory["runs"]) == (0.01, 0)
    assert memory["limit_bytes"] == int(0.8 * memory["memory_bytes"])
    assert not store_file.parent.exists()


def test_enough_measured_runs_set_the_limit(llmlaunch: CommandLine, measured: Path) -> None:
    llmlaunch("measurements", "import", measured)
    memory = memory_of_plan(llmlaunch, "memory.risk=0.05")
    assert memory["runs"] == 20
    assert memory["limit_bytes"] == pytest.approx(memory["memory_bytes"] / 1.1 - 4 * GIB, rel=1e-4)
    assert "20 comparable runs" in memory["margin"]
    assert "4.0 GiB stay free" in memory["margin"]
    assert memory_of_plan(llmlaunch, "memory.risk=0.01")["margin"].endswith("the store holds 20: the 80 % rule decides")
    without = memory_of_plan(llmlaunch)
    assert (without["risk"], without["runs"]) == (None, None)
    assert without["limit_bytes"] == int(0.8 * without["memory_bytes"])
