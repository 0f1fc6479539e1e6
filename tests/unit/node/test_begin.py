"""What a job that starts again finds out before it trains."""

from __future__ import annotations

import json
import pickle
import shutil
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llmlaunch.causes.cause import cause_from_log
from llmlaunch.causes.log_scan import scan
from llmlaunch.node.begin import Beginning, begin

RESTART = {"by": "requeue", "times": 3, "fruitless": 2, "backoff_seconds": 60}
NODES = ("node1", "node2")
FAILED_LOGS = Path(__file__).parents[2] / "data" / "failed_logs"
RANK = "zero_pp_rank_{}_mp_rank_00_optim_states.pt"


class Run:
    """A run directory and what its attempts left."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "run"
        (self.folder / "attempts").mkdir(parents=True)
        (folder / "checkpoints").mkdir()
        self.tracker = folder / "checkpoints" / "latest"
        self.describe(restart=RESTART)

    def describe(self, layout: str = ".", **more: Any) -> None:
        checkpoint = {"path": str(self.tracker.parent), "tracker": "latest"}
        (self.folder / layout).mkdir(parents=True, exist_ok=True)
        (self.folder / layout / "run.json").write_text(json.dumps({"checkpoint": checkpoint} | more))

    def past(self, attempt: str, layout: str = "", from_step: int = 0, fallback: bool = False, **status: Any) -> None:
        """An attempt that has been. `tracker_step` is the last step that it saw saved."""
        folder = self.folder / "attempts" / attempt
        folder.mkdir()
        record = {"attempt": attempt, "layout": layout, "from_step": from_step, "started_at": time.time()}
        (folder / "attempt.json").write_text(json.dumps({**record, "fallback": fallback}))
        if status:
            (folder / "status.json").write_text(json.dumps({"attempt": attempt, **status}))

    def failed(self, attempt: str = "7.0", **status: Any) -> None:
        self.past(attempt, state="failed", exit_code=1, **status)

    def save(self, step: int) -> None:
        """A checkpoint as our DeepSpeed script leaves it: a file of torch.save, and the tracker that names it."""
        folder = self.tracker.parent / f"step-{step}"
        folder.mkdir(exist_ok=True)
        with zipfile.ZipFile(folder / "mp_rank_00_model_states.pt", "w") as archive:
            archive.writestr("archive/data.pkl", b"x" * 4096)
        self.tracker.write_text(f"step-{step}")

    def begin(self, attempt: str, layout: str = "", is_restart: bool = False) -> str:
        """The layout to train with; where nothing is trained, the exit code of the job."""
        (self.folder / "attempts" / attempt).mkdir()
        begun = begin(Beginning(self.folder, attempt, NODES, layout, is_restart))
        return begun.layout if begun.exit_code is None else f"end {begun.exit_code}"

    def first_step(self, attempt: str, layout: str = "") -> int:
        """Begin an attempt that trains, and return the step that it goes on from."""
        assert self.begin(attempt, layout) == "."
        return int(self.record(attempt)["from_step"])

    def record(self, attempt: str, name: str = "attempt.json") -> dict[str, Any]:
        record: dict[str, Any] = json.loads((self.folder / "attempts" / attempt / name).read_text())
        return record

    @property
    def status(self) -> dict[str, Any]:
        status: dict[str, Any] = json.loads((self.folder / "status.json").read_text())
        return status


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def test_the_first_attempt_trains_from_the_start(run: Run) -> None:
    assert run.first_step("7.0") == 0
    assert (run.record("7.0")["layout"], run.record("7.0")["nodes"]) == ("", ["node1", "node2"])


def test_a_requeued_job_knows_the_step_it_goes_on_from(run: Run) -> None:
    run.past("7.0")
    run.save(120)
    assert run.first_step("7.1") == 120


@pytest.mark.parametrize(
    ("state", "code", "why"),
    [("succeeded", 0, "the training was finished by attempt 7.0"), ("failed", 3, "attempt 7.0 was the last: enough")],
)
def test_the_next_link_of_a_chain_that_was_finished_or_given_up_trains_nothing(
    run: Run, state: str, code: int, why: str
) -> None:
    (run.folder / "submission.json").write_text(json.dumps({"job_id": "7", "chain": ["7", "8"]}))
    run.past("7.0", state=state, exit_code=code, why="rank 0 exited with 3", next={"action": "end", "why": "enough"})
    assert run.begin("8.0") == f"end {code}"
    assert (run.status["attempt"], run.status["state"], run.status["why"]) == ("8.0", state, why)


def test_a_person_who_resumes_starts_counting_again(run: Run) -> None:
    for count in range(5):
        run.failed(f"7.{count}", next={"action": "end"})
    (run.folder / "submission.json").write_text(json.dumps({"job_id": "9", "chain": []}))
    assert run.begin("9.0") == "."


def test_a_stop_file_keeps_it_from_training(run: Run) -> None:
    (run.folder / "stop").touch()
    assert run.begin("7.0") == "end 75"
    assert run.status["state"] == "stopped"
    assert "remove it to continue" in run.status["why"]


def test_slurm_s_own_requeues_are_bounded_too(run: Run) -> None:
    """A node that fails again and again takes the job with it without asking anybody."""
    for count in range(4):
        run.past(f"7.{count}", from_step=10 * count)
    run.save(99)
    assert run.begin("7.4") == "end 75"
    assert "already restarted 3 times" in run.status["why"]


def test_attempts_that_get_no_further_are_given_up(run: Run) -> None:
    run.save(50)
    run.past("7.0", from_step=20)
    run.past("7.1", from_step=50)
    run.past("7.2", from_step=50)
    assert run.begin("7.3") == "end 75"
    assert "got no further than step 50" in run.status["why"]


def test_fallbacks_are_no_restarts_and_keep_their_layout(run: Run) -> None:
    run.describe("fallback/1")
    run.describe("fallback/2")
    run.failed(next={"action": "fallback", "layout": "fallback/1"})
    assert run.begin("7.1", "fallback/1") == "fallback/1"
    assert run.record("7.1")["fallback"] is True
    run.past("7.2", layout="fallback/2", fallback=True, state="failed", next={"action": "requeue", "layout": ""})
    assert run.begin("7.3") == "fallback/2"


def test_an_allocation_lost_between_two_layouts_goes_on_with_the_second(run: Run) -> None:
    run.describe("fallback/1")
    run.failed(next={"action": "fallback", "layout": "fallback/1"})
    assert run.begin("7.1") == "fallback/1"


def test_a_damaged_tracker_is_step_0(run: Run) -> None:
    run.tracker.write_bytes(b"\xff\xfe\n")
    assert run.first_step("7.0") == 0


def test_of_a_script_that_may_write_another_tracker_the_steps_due_count(run: Run) -> None:
    own = {"path": str(run.tracker.parent), "tracker": "latest", "promised": False, "interval": 20}
    run.describe(checkpoint=own)
    run.describe("fallback/1", checkpoint=own | {"path": "/ckpt-fallback-1"})  # begins again
    run.failed()
    (run.folder / "attempts" / "7.0" / "progress.json").write_text(json.dumps({"step": 55}))
    assert run.first_step("7.1") == 40
    assert run.begin("7.2", "fallback/1") == "fallback/1"
    assert run.record("7.2")["from_step"] == 0
    run.tracker.write_text("step-20")
    assert run.first_step("7.3", ".") == 20


def test_where_no_checkpoints_are_written_every_attempt_begins_at_step_0(run: Run) -> None:
    run.describe(checkpoint=None)
    run.failed()
    (run.folder / "attempts" / "7.0" / "progress.json").write_text(json.dumps({"step": 40}))
    assert run.first_step("7.1") == 0


def lost(run: Run, attempt: str = "7.1") -> str:
    """Why the attempt ends: a cause, said with its remedy."""
    assert run.begin(attempt) == "end 1"
    assert run.status["state"] == "failed"
    assert run.status["cause"]["kind"] == "checkpoint"
    assert not (run.folder / "attempts" / attempt / "attempt.json").exists()
    assert f"llmlaunch resume {run.folder} --from-older" in run.status["why"]
    why: str = run.status["why"]
    return why


@pytest.mark.parametrize("name", ["attempt.json", "progress.json", "status.json"])
def test_a_checkpoint_that_vanished_ends_the_job_and_never_begins_at_step_0(run: Run, name: str) -> None:
    run.failed()
    path = run.folder / "attempts" / "7.0" / name
    record = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**record, "tracker_step": 120}))
    assert f"{run.tracker} names no checkpoint, but attempt 7.0 had saved step 120" in lost(run)


def test_a_file_system_that_is_not_mounted_is_named(run: Run) -> None:
    run.failed(tracker_step=120)
    run.tracker.parent.rmdir()
    assert f"the folder {run.tracker.parent} is missing (is its file system mounted on this node?)" in lost(run)


def test_a_tracker_that_names_an_older_step_ends_the_job(run: Run) -> None:
    run.failed(tracker_step=120)
    run.save(120)
    run.save(100)
    assert f"{run.tracker} names step 100, but attempt 7.0 had saved step 120" in lost(run)


def test_a_person_may_let_it_go_on_from_an_older_step_once(run: Run) -> None:
    run.failed(tracker_step=120)
    run.save(100)
    (run.folder / "from_older").touch()
    assert run.first_step("7.1") == 100
    assert not (run.folder / "from_older").exists()
    run.save(110)
    assert run.begin("7.2") == "."  # 110 is progress since 100, not a way back from 120
    run.save(90)
    assert "names step 90, but attempt 7.2 had saved step 110" in lost(run, "7.3")


def test_a_person_may_let_it_begin_again_at_step_0(run: Run) -> None:
    run.failed(tracker_step=120)
    run.tracker.write_text("step-120")  # the folder is gone
    assert "there is no whole one before it" in lost(run)
    (run.folder / "from_older").touch()
    assert run.first_step("7.2") == 0
    assert not run.tracker.exists()  # it would end the trainers


def test_a_lost_tracker_whose_checkpoint_is_whole_is_written_again(run: Run) -> None:
    run.save(100)
    run.save(120)
    run.tracker.unlink()
    run.failed(tracker_step=120)
    assert run.first_step("7.1") == 120
    assert run.tracker.read_text() == "step-120"
    assert "which is there and whole" in run.record("7.1")["note"]


def cut_short(run: Run, step: int = 120) -> None:
    path = run.tracker.parent / f"step-{step}" / "mp_rank_00_model_states.pt"
    path.write_bytes(path.read_bytes()[:1000])


def half_purged(names: tuple[str, ...], *lost: str) -> Callable[[Run], None]:
    """Return what leaves these files of the checkpoint, and `.metadata` of all, but for those that are lost."""

    def damage(run: Run) -> None:
        folder = run.tracker.parent / "step-120"
        for name in names:
            shutil.copy(folder.with_name("step-100") / "mp_rank_00_model_states.pt", folder / name)
        (folder / ".metadata").write_bytes(pickle.dumps([f"{name}" for name in names]))
        for name in lost:
            (folder / name).unlink()

    return damage


def lose_folder(run: Run) -> None:
    shutil.rmtree(run.tracker.parent / "step-120")


def fail_to_load(run: Run) -> None:
    cannot_load(run, "7.1", 120)


def cannot_load(run: Run, attempt: str, step: int) -> None:
    """An attempt that begins at `step`, and whose trainers end while they load that checkpoint."""
    assert run.first_step(attempt) == step
    ended = {"attempt": attempt, "state": "failed", "exit_code": 1, "step": None, "tracker_step": step}
    status = {**ended, "cause": {"kind": "checkpoint", "source": "log"}}
    (run.folder / "attempts" / attempt / "status.json").write_text(json.dumps(status))


@pytest.mark.parametrize(
    ("damage", "wrong"),
    [
        (cut_short, "step-120/mp_rank_00_model_states.pt is cut short"),
        (lose_folder, "step-120 is missing"),
        (half_purged(("__0_0.distcp", "__1_0.distcp"), "__0_0.distcp"), "step-120/__0_0.distcp is missing"),
        (half_purged(tuple(f"bf16_{RANK.format(rank)}" for rank in range(3)), ".metadata", f"bf16_{RANK.format(1)}"),
         f"step-120/bf16_{RANK.format(1)} is missing"),
        (half_purged((RANK.format(0),), ".metadata", "mp_rank_00_model_states.pt"),
         "step-120/mp_rank_00_model_states.pt is missing"),
        (fail_to_load, "the trainers of attempt 7.1 could not load it, and none of its files has changed since"),
    ],
)  # fmt: skip
def test_a_damaged_last_checkpoint_is_left_for_the_one_before(
    run: Run, damage: Callable[[Run], None], wrong: str
) -> None:
    run.save(100)
    run.save(120)
    run.failed(tracker_step=120)
    damage(run)
    assert run.first_step("7.2") == 100
    assert (run.record("7.2")["tracker_step"], run.tracker.read_text()) == (100, "step-100")
    assert f"is damaged: {wrong}; continuing from step 100, the one before it" in run.record("7.2")["note"]


def test_several_that_cannot_be_loaded_are_left_one_by_one_and_it_is_not_given_up(run: Run) -> None:
    for step in (60, 80, 100, 120):
        run.save(step)
    for attempt, step in (("7.0", 120), ("7.1", 100), ("7.2", 80)):
        cannot_load(run, attempt, step)
    assert run.first_step("7.3") == 60
    assert [skipped["step"] for skipped in run.record("7.1")["skipped"]] == [120]
    assert run.record("7.3")["skipped"][0]["why"].startswith("the trainers of attempt 7.2 could not load it")


def test_a_checkpoint_that_does_not_match_is_neither_left_nor_renamed(run: Run) -> None:
    """The log of a public failure in which a whole checkpoint met a job of another split."""
    run.save(100)
    run.save(120)
    cause = cause_from_log(scan((FAILED_LOGS / "c03.log").read_text()), "n1", [])
    for attempt in ("7.0", "8.0"):  # the second is a person's resume
        assert run.first_step(attempt) == 120
        ended = {"attempt": attempt, "state": "failed", "exit_code": 1, "step": None, "tracker_step": 120}
        (run.folder / "attempts" / attempt / "status.json").write_text(json.dumps({**ended, "cause": cause}))
    assert run.tracker.read_text() == "step-120"
    assert not run.record("8.0").get("skipped")


def test_a_checkpoint_whose_step_megatron_has_judged_is_left_for_the_one_before(run: Run) -> None:
    run.save(100)
    run.save(120)
    cannot_load(run, "7.0", 120)
    status = run.folder / "attempts" / "7.0" / "status.json"
    cause = {"kind": "silent_corruption", "source": "log", "suspects": {"n1": ["a", "b"]}}
    status.write_text(json.dumps({**json.loads(status.read_text()), "cause": cause}))
    assert run.first_step("7.1") == 100
    assert "attempt 7.0 has judged the step it was saved for" in run.record("7.1")["note"]


def test_those_between_that_are_damaged_too_are_named(run: Run) -> None:
    for step in (80, 100, 120):
        run.save(step)
        cut_short(run, step)
    run.save(60)
    run.tracker.write_text("step-120")
    assert run.first_step("7.0") == 60
    assert [skipped["step"] for skipped in run.record("7.0")["skipped"]] == [120, 100, 80]
    assert "; so is that of step 80: step-80/mp_rank_00_model_states.pt is cut short; " in run.record("7.0")["note"]


def test_one_that_could_not_be_loaded_is_not_gone_back_to_until_it_is_written_again(run: Run) -> None:
    run.save(100)
    run.save(120)
    cannot_load(run, "7.0", 120)
    run.past("7.1", from_step=100, tracker_step=100)
    run.tracker.unlink()
    run.tracker.write_text("step-120")
    assert run.first_step("7.2") == 100
    run.save(120)
    assert run.first_step("7.3") == 120


def test_a_file_of_data_that_broke_after_steps_does_not_condemn_the_checkpoint(run: Run) -> None:
    run.save(120)
    cannot_load(run, "7.0", 120)
    progress = {"step": 130, "tracker_step": 120}
    (run.folder / "attempts" / "7.0" / "progress.json").write_text(json.dumps(progress))
    assert run.first_step("7.1") == 120


@pytest.mark.parametrize("damage", [lambda run: cut_short(run), lambda run: cannot_load(run, "7.0", 120)])
def test_a_recipe_may_have_the_training_stop_at_a_bad_checkpoint(run: Run, damage: Callable[[Run], None]) -> None:
    run.describe(restart={**RESTART, "bad_checkpoint": "stop"})
    run.save(100)
    run.save(120)
    damage(run)
    why = lost(run, "7.1")
    assert "restart.bad_checkpoint is stop" in why
    assert "or train from step 100, the newest whole one: " in why
    assert run.tracker.read_text() == "step-120"
    (run.folder / "from_older").touch()
    assert run.first_step("8.0") == 100


def test_megatron_s_folders_are_known(run: Run) -> None:
    tracker = run.tracker.with_name("latest_checkpointed_iteration.txt")
    run.describe(restart=RESTART, checkpoint={"path": str(tracker.parent), "tracker": tracker.name})
    for step in (100, 120):
        folder = tracker.parent / f"iter_{step:07d}"
        folder.mkdir()
        for name in ("__0_0.distcp", "metadata.json", ".metadata"):
            (folder / name).write_bytes(b"x")
    (folder / ".metadata").unlink()
    tracker.write_text("120")
    run.failed(tracker_step=120)
    assert (run.first_step("7.1"), tracker.read_text()) == (100, "100")
    assert "iter_0000120 has no .metadata" in run.record("7.1")["note"]


def test_from_the_queue_all_nodes_come_with_the_planned_layout(run: Run) -> None:
    """Also after several attempts on fewer nodes; a fallback layout that ran before them is kept."""
    run.describe("nodes/1", nodes=1)
    run.past("7.0", state="failed")
    run.past("7.1", "nodes/1", from_step=20, state="failed")
    run.save(40)
    run.past("7.2", "nodes/1", from_step=20, state="failed")
    assert run.begin("7.3") == "."
    run.past("8.0", "fallback/1", state="failed")
    run.past("8.1", "nodes/1", from_step=20, state="failed")
    run.describe("fallback/1")
    assert run.begin("8.2") == "fallback/1"


def test_in_the_same_allocation_it_begins_with_the_layout_for_fewer(run: Run) -> None:
    run.describe("nodes/1", nodes=1)
    run.failed("7.0")
    assert run.begin("7.1", "nodes/1", is_restart=True) == "nodes/1"
    assert (run.record("7.1")["layout"], run.record("7.1")["fallback"]) == ("nodes/1", False)


def test_a_checkpoint_that_only_fewer_ranks_could_not_load_is_none_the_worse(run: Run) -> None:
    run.describe("nodes/1", nodes=1)
    run.save(20)
    run.save(40)
    run.failed("7.0", from_step=20)
    run.past("7.1", "nodes/1", from_step=40, state="failed", cause={"kind": "checkpoint", "source": "log"})
    assert run.first_step("7.2") == 40


MEGATRON_TRACKER = "latest_checkpointed_iteration.txt"


def save_megatron(run: Run, step: int, within: str = "") -> Path:
    """A checkpoint as Megatron-LM leaves it, in the folder of those that stay or in one within."""
    place = run.tracker.parent / within
    folder = place / f"iter_{step:07d}"
    folder.mkdir(parents=True)
    for name in ("__0_0.distcp", "metadata.json", ".metadata"):
        (folder / name).write_bytes(b"x")
    (place / MEGATRON_TRACKER).write_text(str(step))
    return folder


@pytest.fixture
def often(run: Run) -> Run:
    """A run whose last checkpoint that stays is of step 200, and the newest of all of step 250."""
    checkpoint = {"path": str(run.tracker.parent), "tracker": MEGATRON_TRACKER, "promised": True, "interval": 100}
    run.describe(restart=RESTART, checkpoint={**checkpoint, "non_persistent": "non_persistent"})
    save_megatron(run, 200)
    save_megatron(run, 250, "non_persistent")
    return run


def test_a_non_persistent_checkpoint_is_gone_on_from(often: Run) -> None:
    often.failed(from_step=200, tracker_step=250, step=260)
    assert often.first_step("7.1") == 250
    assert often.record("7.1")["tracker_step"] == 250
    assert often.record("7.1")["checkpoint_changed_ns"] is not None


def test_a_damaged_non_persistent_one_costs_the_steps_since_the_durable_one(often: Run) -> None:
    (often.tracker.parent / "non_persistent" / "iter_0000250" / ".metadata").unlink()
    often.failed(from_step=200, tracker_step=250, step=260)
    assert often.first_step("7.1") == 200
    assert "non_persistent/iter_0000250 has no .metadata; continuing from step 200" in often.record("7.1")["note"]
    assert not (often.tracker.parent / "non_persistent" / MEGATRON_TRACKER).exists()


def test_a_non_persistent_one_that_could_not_be_loaded_is_left_for_the_durable_one(often: Run) -> None:
    cannot_load(often, "7.0", 250)
    assert often.first_step("7.1") == 200


def test_non_persistent_ones_that_are_gone_are_no_reason_to_stop(often: Run) -> None:
    """They may lie where a site removes what is old; what was durable has to be there."""
    shutil.rmtree(often.tracker.parent / "non_persistent")
    often.failed(from_step=200, tracker_step=250, step=260)
    assert often.first_step("7.1") == 200
    assert "the non-persistent checkpoint of step 250 is gone; continuing from step 200" in often.record("7.1")["note"]
    (often.folder / "attempts" / "7.1" / "progress.json").write_text(json.dumps({"tracker_step": 300}))
    assert "names step 200, but attempt 7.1 had saved step 300" in lost(often, "7.2")
