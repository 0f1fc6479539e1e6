"""A Prometheus textfile, read back as node_exporter reads it."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

from example_scripts import example, run_example
from prometheus_client.parser import text_string_to_metric_families

from llmlaunch.store.database import Store
from support.collected_runs import GIB, RUN_ID, exported, finished
from support.command_line import CommandLine


def series(path: Path) -> dict[tuple[str, str], float]:
    """Value by metric and labels. No name twice, no times."""
    values: dict[tuple[str, str], float] = {}
    for family in text_string_to_metric_families(path.read_text()):
        assert (family.type, bool(family.documentation)) == ("gauge", True)
        for sample in family.samples:
            assert sample.timestamp is None
            key = (sample.name, ",".join(v for _, v in sorted(sample.labels.items())))
            assert key not in values
            values[key] = sample.value
    return values


def test_exported_runs_are_a_file_that_node_exporter_can_read(llmlaunch: CommandLine, tmp_path: Path) -> None:
    folder = tmp_path / "textfiles"
    folder.mkdir()
    llmlaunch("collect", finished(tmp_path / "run").path)
    lines = llmlaunch("runs", "--export", "-").stdout
    before = os.umask(0o077)
    try:
        run_example("to_prometheus", [lines], folder)
    finally:
        os.umask(before)
    (path,) = folder.iterdir()
    assert path.name == "llmlaunch.prom"
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    values = series(path)
    assert values["llmlaunch_peak_bytes", f"77.0,device,tiny,{RUN_ID},1"] == 30 * GIB
    assert values["llmlaunch_predicted_bytes", f"77.0,device,tiny,{RUN_ID},1"] == 11 * GIB
    assert values["llmlaunch_peak_bytes", f"77.0,host,tiny,{RUN_ID},"] == 9 * GIB
    assert values["llmlaunch_step_seconds", f"77.0,tiny,{RUN_ID}"] == 2.0
    assert values["llmlaunch_tokens_per_second", f"77.0,tiny,{RUN_ID}"] == 800.0
    assert values["llmlaunch_limit_bytes", f"77.0,tiny,{RUN_ID}"] == 64 * GIB
    assert values["llmlaunch_run_info", f"77.0,tiny,{RUN_ID},succeeded"] == 1


def test_runs_that_are_not_exported_leave_the_file_and_names_come_back_as_they_were(
    store: Store, tmp_path: Path
) -> None:
    (line,) = exported(store, finished(tmp_path / "run"))
    nasty = 'a"b\\c\nd{e}=é'
    example("to_prometheus").write_runs([line], tmp_path)
    example("to_prometheus").write_runs([json.dumps({**json.loads(line), "run_id": "../" + nasty})], tmp_path)
    families = list(text_string_to_metric_families((tmp_path / "llmlaunch.prom").read_text()))
    assert {sample.labels["run"] for family in families for sample in family.samples} == {"../" + nasty}
