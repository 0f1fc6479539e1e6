"""Which checkpoint the trainers go on from is said in every file that one of them reads."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmlaunch.node.checkpoint_folder import CheckpointFolder

TRACKER, OF_BRIDGE = "latest_checkpointed_iteration.txt", "latest_train_state.pt"


@pytest.fixture
def folder(tmp_path: Path) -> CheckpointFolder:
    """Two checkpoints of Megatron-Bridge, named by both of its files, and an older one of Megatron-LM."""
    for step in (100, 200):
        (tmp_path / f"iter_{step:07d}").mkdir()
        (tmp_path / f"iter_{step:07d}" / "train_state.pt").write_text(f"state {step}")
    (tmp_path / "iter_0000050").mkdir()
    (tmp_path / TRACKER).write_text("200")
    (tmp_path / OF_BRIDGE).write_text("state 200")
    return CheckpointFolder({"path": str(tmp_path), "tracker": TRACKER})


def test_bridge_goes_on_from_the_step_that_is_named(folder: CheckpointFolder) -> None:
    folder.name(100)
    assert (folder.path / TRACKER).read_text() == "100"
    assert (folder.path / OF_BRIDGE).read_text() == "state 100"


def test_bridge_reads_the_tracker_where_the_step_is_megatron_lms(folder: CheckpointFolder) -> None:
    folder.name(50)
    assert (folder.path / TRACKER).read_text() == "50"
    assert not (folder.path / OF_BRIDGE).exists()


def test_nothing_is_named_any_more(folder: CheckpointFolder) -> None:
    folder.name_none()
    assert sorted(path.name for path in folder.path.glob("latest*")) == [f"{TRACKER}.damaged", f"{OF_BRIDGE}.damaged"]
