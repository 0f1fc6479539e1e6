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


NEWEST = f"non_persistent/{TRACKER}"


@pytest.fixture
def both(tmp_path: Path) -> CheckpointFolder:
    """Megatron-LM's: 100 and 200 stay, and of those between two saves the last two are there."""
    for place, steps in (("", (100, 200)), ("non_persistent/", (225, 250))):
        for step in steps:
            (tmp_path / f"{place}iter_{step:07d}").mkdir(parents=True)
            (tmp_path / f"{place}iter_{step:07d}" / "common.pt").write_bytes(b"x")
    (tmp_path / TRACKER).write_text("200")
    (tmp_path / NEWEST).write_text("250")
    return CheckpointFolder({"path": str(tmp_path), "tracker": TRACKER, "non_persistent": "non_persistent"})


def trackers(folder: CheckpointFolder) -> tuple[str, str]:
    paths = (folder.path / TRACKER, folder.path / NEWEST)
    return tuple(path.read_text() if path.exists() else "" for path in paths)  # type: ignore[return-value]


def newest(folder: CheckpointFolder) -> list[str]:
    return sorted(path.name for path in (folder.path / "non_persistent").glob("iter_*"))


def test_non_persistent_ones_are_among_the_steps(both: CheckpointFolder) -> None:
    assert sorted(both.steps()) == [100, 200, 225, 250]
    assert both.newest_whole(250) == (250, ())
    both.name(250)
    assert trackers(both) == ("200", "250")
    assert newest(both) == ["iter_0000225", "iter_0000250"]


def test_a_damaged_one_is_left_to_the_trainers_and_the_one_before_it_named(both: CheckpointFolder) -> None:
    """Megatron-LM keeps the highest number before a save, and would remove the whole one for it."""
    (both.folder_of(250) / "common.pt").write_bytes(b"")
    step, skipped = both.newest_whole(250)
    assert (step, [each.why for each in skipped]) == (225, ["non_persistent/iter_0000250/common.pt is cut short"])
    both.name(225)
    assert trackers(both) == ("200", "225")
    assert newest(both) == ["iter_0000000", "iter_0000225"]


def test_a_durable_one_that_is_named_is_loaded_whatever_lies_beside_it(both: CheckpointFolder) -> None:
    both.name(200)
    assert trackers(both) == ("200", "")
    assert newest(both) == ["iter_0000000", "iter_00000000"]
    assert both.newest_whole(250) == (200, ())


def test_a_non_persistent_one_before_a_damaged_durable_one_is_loaded(both: CheckpointFolder) -> None:
    """Megatron-LM goes on from the later of the two, and from the non-persistent one where both are the same."""
    (both.path / "iter_0000300").mkdir()
    (both.path / TRACKER).write_text("300")
    assert both.newest_whole(300)[0] == 250
    both.name(250)
    assert trackers(both) == ("250", "250")


def test_before_the_first_durable_one_weights_to_start_from_do_not_win(both: CheckpointFolder) -> None:
    """Megatron-LM loads --pretrained-checkpoint where --load has no tracker."""
    (both.path / TRACKER).unlink()
    both.name(250)
    assert trackers(both) == ("250", "250")


def test_what_was_being_written_when_the_job_died_goes_first(both: CheckpointFolder) -> None:
    (both.path / NEWEST).write_text("225")
    both.name(225)
    assert newest(both) == ["iter_0000000", "iter_0000225"]


def test_those_that_stay_can_be_looked_at_alone(both: CheckpointFolder) -> None:
    checkpoint = {"path": str(both.path), "tracker": TRACKER, "non_persistent": "non_persistent"}
    assert sorted(CheckpointFolder(checkpoint, durable_only=True).steps()) == [100, 200]
    assert sorted(both.own_steps()) == [100, 200]
