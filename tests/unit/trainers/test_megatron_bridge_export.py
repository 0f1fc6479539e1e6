"""What `megatron_bridge.py --export` refuses before it imports Bridge, and which checkpoint it takes."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llmlaunch.trainers import megatron_bridge as program


def settings(**checkpoint: Any) -> dict[str, Any]:
    return {"checkpoint": checkpoint}


def test_the_newest_checkpoint_is_the_last_that_was_finished(tmp_path: Path) -> None:
    for step in (10, 20):
        (tmp_path / f"iter_{step:07d}").mkdir()
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("10", "utf-8")
    assert program.newest_checkpoint(str(tmp_path)) == f"{tmp_path}/iter_0000010"


def test_what_cannot_be_exported_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit, match=r"write no checkpoints \(training\.checkpoint_path\)"):
        program.export(settings(), "/out", None)
    with pytest.raises(SystemExit, match="name the Hugging Face folder of this model"):
        program.export(settings(save=str(tmp_path)), "/out", "/nowhere")
    (tmp_path / "config.json").touch()
    weights = settings(save=str(tmp_path), pretrained_checkpoint=str(tmp_path))
    with pytest.raises(SystemExit, match=f"no checkpoint was finished in {tmp_path}"):
        program.export(weights, "/out", None)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("10", "utf-8")
    cuda = SimpleNamespace(is_available=lambda: False)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    with pytest.raises(SystemExit, match="--export: there is no GPU here"):
        program.export(weights, "/out", None)
