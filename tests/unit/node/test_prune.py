"""Old checkpoints are removed and nothing else, and a removal that is cut anywhere leaves whole ones."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llmlaunch.node.checkpoint_folder import CheckpointFolder
from support.node_rig import ATTEMPT, NodeRig

MEGATRON, DEEPSPEED = "latest_checkpointed_iteration.txt", "latest"
# Ends itself with SIGKILL before the n-th change of the file system.
CUT = """
import os, signal, sys
left = int(sys.argv[1])
def cut(event, arguments):
    global left
    if event in ("os.rename", "os.remove", "os.rmdir"):
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        left -= 1
from llmlaunch.node.prune import prune
from pathlib import Path
sys.addaudithook(cut)
prune(Path(sys.argv[2]), sys.argv[3], ".")
"""


class Saved:
    """A run directory whose checkpoints a job has saved."""

    def __init__(self, rig: NodeRig, folder: Path, tracker: str, keep: int | None) -> None:
        self.rig, self.folder, self.tracker = rig, folder, folder / tracker
        folder.mkdir()
        checkpoint = {"path": str(folder), "tracker": tracker, "promised": True, "interval": 20}
        self.describe(checkpoint if keep is None else {**checkpoint, "keep": keep})
        self.began_at(0)

    def describe(self, checkpoint: dict[str, Any]) -> None:
        self.rig.write("run.json", {"schema": 1, "checkpoint": checkpoint})

    def began_at(self, step: int) -> None:
        self.rig.write_attempt("attempt.json", {"attempt": ATTEMPT, "from_step": step, "started_at": 1.0})

    def save(self, *steps: int, tracked: bool = True) -> None:
        for step in steps:
            folder = self.place(step)
            folder.mkdir()
            if self.tracker.name == MEGATRON:
                for name in ("__0_0.distcp", "__1_0.distcp", "metadata.json", ".metadata", "common.pt"):
                    (folder / name).write_bytes(b"x")
            else:
                for name in ("mp_rank_00_model_states.pt", "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"):
                    with zipfile.ZipFile(folder / name, "w") as archive:
                        archive.writestr("archive/data.pkl", b"x" * 64)
            if tracked:
                self.tracker.write_text(str(step) if self.tracker.name == MEGATRON else f"step-{step}")

    def place(self, step: int) -> Path:
        return self.folder / (f"iter_{step:07d}" if self.tracker.name == MEGATRON else f"step-{step}")

    def tear(self, step: int) -> None:
        next(self.place(step).glob("*.pt")).write_bytes(b"")

    def prune(self) -> str:
        """Prune in a process of its own, and return what it says."""
        done = self.rig.start("prune", *self.rig.place)
        _, said = done.communicate(timeout=120)
        assert done.returncode == 0, said
        return str(said)

    def steps(self) -> list[int]:
        return sorted(
            int(path.name.split("-")[-1].split("_")[-1]) for path in self.folder.glob("[is]*") if path.is_dir()
        )

    def names(self) -> list[str]:
        return sorted(path.name for path in self.folder.iterdir())


@pytest.fixture
def saved(cpu_node: NodeRig, tmp_path: Path) -> Saved:
    return Saved(cpu_node, tmp_path / "checkpoints", MEGATRON, keep=2)


@pytest.mark.parametrize("tracker", [MEGATRON, DEEPSPEED])
def test_so_many_whole_ones_stay_and_the_log_names_those_that_went(
    cpu_node: NodeRig, tmp_path: Path, tracker: str
) -> None:
    saved = Saved(cpu_node, tmp_path / "checkpoints", tracker, keep=2)
    saved.save(20, 40, 60, 80)
    said = saved.prune()
    assert saved.steps() == [60, 80]
    assert f"removed the checkpoint {saved.place(20)}: the newest 2 stay (training.keep_checkpoints)" in said
    assert len(saved.names()) == 3  # nothing is left of the others
    assert saved.prune() == ""


def test_a_torn_one_does_not_count_and_goes_with_the_older_ones(saved: Saved) -> None:
    saved.save(20, 40, 60, 80, 100)
    saved.tear(80)
    saved.tear(20)
    saved.prune()
    assert saved.steps() == [60, 80, 100]


def test_nothing_goes_before_so_many_are_whole(saved: Saved) -> None:
    saved.save(20, 40, 60)
    saved.tear(40)
    saved.tear(60)
    saved.prune()
    assert saved.steps() == [20, 40, 60]


def test_one_that_no_tracker_names_yet_is_being_written_and_neither_counts_nor_goes(saved: Saved) -> None:
    saved.save(20, 40)
    saved.save(60, tracked=False)
    saved.prune()
    assert saved.steps() == [20, 40, 60]
    saved.tracker.unlink()
    saved.prune()
    assert saved.steps() == [20, 40, 60]


def test_the_one_that_the_attempt_began_with_stays_until_a_newer_one_is_whole(saved: Saved) -> None:
    saved.began_at(40)
    saved.save(10, 20, 40, 60)
    saved.tear(40)  # as if: the trainers have loaded it
    saved.tear(60)
    saved.describe({"path": str(saved.folder), "tracker": saved.tracker.name, "promised": True, "keep": 1})
    saved.prune()
    assert saved.steps() == [20, 40, 60]
    saved.save(80)
    saved.prune()
    assert saved.steps() == [80]


def test_the_one_with_the_lowest_validation_loss_stays(cpu_node: NodeRig, tmp_path: Path) -> None:
    saved = Saved(cpu_node, tmp_path / "checkpoints", DEEPSPEED, keep=1)
    (saved.folder / "best").write_text("step-40")
    saved.save(20, 40, 60, 80)
    saved.prune()
    assert saved.steps() == [40, 80]


def test_one_that_the_trainers_could_not_load_does_not_count(saved: Saved) -> None:
    saved.save(20, 40, 60, 80)
    folder = CheckpointFolder({"path": str(saved.folder), "tracker": saved.tracker.name})
    began = {"attempt": "16.0", "from_step": 80, "checkpoint_changed_ns": folder.changed_ns(80), "started_at": 0.0}
    saved.rig.write("attempts/16.0/attempt.json", began)
    cause = {"kind": "checkpoint", "source": "log"}
    saved.rig.write("attempts/16.0/status.json", {"attempt": "16.0", "state": "failed", "cause": cause})
    saved.prune()
    assert saved.steps() == [40, 60, 80]


def test_only_folders_that_the_trainers_name_so_go_and_no_link_is_followed(saved: Saved, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "thesis").write_text("mine")
    saved.save(20, 40, 60, 80)
    (saved.place(20) / "link").symlink_to(outside)
    (saved.place(20) / "inner").mkdir()
    (saved.place(20) / "inner" / "file").symlink_to(outside / "thesis")
    others = ["step-07", "iter_12", "step-5.bak", "iter_0000005x", "release", "global_step_3", "notes"]
    for name in others:
        (saved.folder / name).mkdir()
    saved.place(10).symlink_to(outside)
    saved.place(11).write_text("a file")
    saved.prune()
    assert not saved.place(20).exists()
    assert (outside / "thesis").read_text() == "mine"
    assert [name for name in others if not (saved.folder / name).is_dir()] == []
    assert saved.place(10).is_symlink()
    assert saved.place(11).is_file()


def test_the_checkpoint_folder_may_itself_be_reached_by_a_link(saved: Saved, tmp_path: Path) -> None:
    saved.save(20, 40, 60)
    (tmp_path / "scratch").symlink_to(saved.folder)
    place = {"path": str(tmp_path / "scratch"), "tracker": saved.tracker.name, "promised": True, "keep": 1}
    saved.describe(place)
    saved.prune()
    assert saved.steps() == [60]


def test_a_link_under_the_name_of_a_removal_is_refused_in_one_line(saved: Saved, tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "thesis").write_text("mine")
    saved.save(20, 40, 60)
    (saved.folder / f".removed-{saved.place(20).name}").symlink_to(tmp_path / "outside")
    assert "old checkpoints stay: " in saved.prune()
    assert saved.steps() == [20, 40, 60]
    assert (tmp_path / "outside" / "thesis").exists()


@pytest.mark.parametrize("change", [{"keep": 0}, {"keep": "2"}, {"keep": 2, "promised": False}, {}])
def test_without_the_key_or_for_a_script_of_ones_own_all_stay(saved: Saved, change: dict[str, Any]) -> None:
    saved.save(20, 40, 60)
    saved.describe({"path": str(saved.folder), "tracker": saved.tracker.name, "promised": True, **change})
    assert saved.prune() == ""
    assert saved.steps() == [20, 40, 60]


def test_a_pruning_that_is_killed_anywhere_leaves_whole_checkpoints_and_the_next_ends_it(saved: Saved) -> None:
    saved.save(20, 40, 60, 80)
    folder = CheckpointFolder({"path": str(saved.folder), "tracker": saved.tracker.name})
    kills = 0
    for cut in range(40):
        command = [sys.executable, "-c", CUT, str(cut % 3), str(saved.rig.run_directory), ATTEMPT]
        done = subprocess.run(command, capture_output=True, check=False)
        assert [folder.fault(step) for step in folder.steps()] == [""] * len(folder.steps())
        assert {60, 80} <= set(folder.steps())
        if done.returncode == 0:
            break
        assert done.returncode == -signal.SIGKILL, done.stderr
        kills += 1
    assert kills > 3
    assert saved.steps() == [60, 80]
    assert len(saved.names()) == 3


def test_the_last_act_of_a_job_that_is_done_prunes_too(saved: Saved) -> None:
    saved.save(20, 40, 60)
    saved.rig.rank("true", rank=0).wait()
    saved.rig.done("node1")
    code, _, said = saved.rig.finish(nodes=1, code=0)
    assert (code, saved.steps()) == (0, [40, 60]), said


def test_a_file_system_that_refuses_changes_nothing_else(saved: Saved, monkeypatch: pytest.MonkeyPatch) -> None:
    from llmlaunch.node import prune

    def refuse(*arguments: Any, **options: Any) -> None:
        raise OSError(28, os.strerror(28))

    saved.save(20, 40, 60)
    said: list[str] = []
    keep: Callable[[str], None] = said.append
    monkeypatch.setattr(prune, "say", keep)
    monkeypatch.setattr(os, "rename", refuse)
    prune.prune(saved.rig.run_directory, ATTEMPT, ".")
    assert said == ["old checkpoints stay: OSError: [Errno 28] No space left on device; the training continues"]
    assert saved.steps() == [20, 40, 60]


def test_hostile_names_and_records_end_in_one_line_at_most(saved: Saved) -> None:
    saved.save(20, 40, 60)
    (saved.folder / ("iter_" + "9" * 200)).mkdir()
    (saved.folder / ("step-" + "9" * 200)).mkdir()
    saved.rig.write_attempt("attempt.json", json.dumps({"attempt": ATTEMPT, "from_step": "x" * 99, "started_at": []}))
    saved.prune()
    assert {40, 60} <= set(saved.steps())


def test_non_persistent_checkpoints_are_the_trainers_to_remove(cpu_node: NodeRig, tmp_path: Path) -> None:
    saved = Saved(cpu_node, tmp_path / "checkpoints", MEGATRON, keep=2)
    checkpoint = {"path": str(saved.folder), "tracker": MEGATRON, "promised": True, "interval": 20, "keep": 2}
    saved.describe({**checkpoint, "non_persistent": "non_persistent"})
    saved.save(20, 40, 60)
    newest = saved.folder / "non_persistent" / "iter_0000065"
    newest.mkdir(parents=True)
    (newest / "common.pt").write_bytes(b"x")
    (saved.folder / "non_persistent" / MEGATRON).write_text("65")
    saved.prune()
    assert saved.steps() == [40, 60]
    assert newest.exists()
