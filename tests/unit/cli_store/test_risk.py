"""`memory: {risk: ...}`: the store's measured runs set the plan's limit, or the rule decides and says why."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from llmlaunch.assets import asset
from llmlaunch.cli.main import main
from llmlaunch.units import GIB
from support.measured_runs import run

RECIPE = str(asset("recipes", "llama3-8b.yaml"))


class Checked:
    """`check --json` with a risk asked for, in this process."""

    def __init__(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        self._capsys, self._monkeypatch = capsys, monkeypatch

    def run(self, *words: str) -> tuple[str, str]:
        self._monkeypatch.setattr(sys, "argv", ["llmlaunch", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = self._capsys.readouterr()
        assert ended.value.code == 0, err
        return out, err

    def memory(self, *words: str) -> dict[str, Any]:
        memory: dict[str, Any] = json.loads(self.run("check", RECIPE, *words, "--json")[0])["memory"]
        return memory


@pytest.fixture
def checked(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Checked:
    return Checked(capsys, monkeypatch)


@pytest.fixture
def measured(tmp_path: Path) -> Path:
    """Twenty runs that peaked at up to 1.1 times their prediction, beside records that say nothing."""
    records = [run(i, 1.005 + i * 0.005) for i in range(20)]
    strangers = [{**run(90, 5.0), "gpu": "A100"}, {"id": "imported, and no measurement"}]
    path = tmp_path / "measured.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in [*records, *strangers]))
    return path


def test_where_nothing_was_measured_the_rule_decides_and_no_store_is_made(checked: Checked, own_home: Path) -> None:
    memory = checked.memory("memory.risk=0.01")
    assert memory["margin"] == "risk 0.01 needs 99 comparable runs, the store holds 0: the 80 % rule decides"
    assert (memory["risk"], memory["runs"]) == (0.01, 0)
    assert memory["limit_bytes"] == int(0.8 * memory["memory_bytes"])
    assert not (own_home / "data" / "llmlaunch").exists()


def test_enough_measured_runs_set_the_limit(checked: Checked, measured: Path) -> None:
    checked.run("measurements", "import", str(measured))
    memory = checked.memory("memory.risk=0.05")
    assert memory["runs"] == 20
    assert memory["limit_bytes"] == pytest.approx(memory["memory_bytes"] / 1.1 - 4 * GIB, rel=1e-4)
    assert "20 comparable runs" in memory["margin"]
    assert "4.0 GiB stay free" in memory["margin"]
    assert checked.memory("memory.risk=0.01")["margin"].endswith("the store holds 20: the 80 % rule decides")
    without = checked.memory()
    assert (without["risk"], without["runs"]) == (None, None)
    assert without["limit_bytes"] == int(0.8 * without["memory_bytes"])


def test_a_store_that_cannot_be_read_is_a_warning_and_the_rule_decides(checked: Checked, own_home: Path) -> None:
    store = own_home / "data" / "llmlaunch" / "store.db"
    store.parent.mkdir(parents=True)
    store.write_bytes(b"not a database at all, " * 100)
    out, err = checked.run("check", RECIPE, "memory.risk=0.05", "--json")
    assert json.loads(out)["memory"]["margin"].endswith("the 80 % rule decides")
    assert "warning: measured runs are not used" in err
