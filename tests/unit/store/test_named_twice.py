"""A directory that is named twice is collected once."""

from __future__ import annotations

from pathlib import Path

from llmlaunch.store.collect import collect
from llmlaunch.store.database import Store
from llmlaunch.store.measurements import contents
from support.store_run_dirs import finished_cpu_run


def test_one_directory_named_twice_and_two_of_one_id(store: Store, tmp_path: Path) -> None:
    run = finished_cpu_run(tmp_path / "run")
    (tmp_path / "link").symlink_to(run.path)
    copy = finished_cpu_run(tmp_path / "copy")
    outcomes = collect(store, [run.path, tmp_path / "link", copy.path])
    assert [outcome.did for outcome in outcomes] == ["collected", "unchanged", "unreadable"]
    assert "is a copy of run" in str(outcomes[2].reason)
    assert len(contents(store)) == 2
