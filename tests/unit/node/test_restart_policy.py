"""What follows an attempt: each rule by itself, and none of them for ever."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmlaunch.causes.kinds import KINDS
from llmlaunch.node.restart_bounds import Bounds
from llmlaunch.node.restart_policy import PREEMPTED, BadLossFacts, Facts, Next, decide

RESTART = {"by": "requeue", "times": 20, "fruitless": 2, "per_hour": 10, "lost_gpu_hours": 24.0, "backoff_seconds": 60}
FALLBACKS = [
    {"layout": "fallback/1", "keeps_checkpoints": False, "loads": []},
    {"layout": "fallback/2", "keeps_checkpoints": False, "loads": [""]},
    {"layout": "fallback/3", "keeps_checkpoints": True, "loads": ["", "fallback/2"]},
]


def facts(run: dict[str, Any] | None = None, **changes: Any) -> Facts:
    plain = Facts("failed", "nccl", "", False, True, False, ".", 100, 0, 0, {"restart": RESTART, **(run or {})})
    return plain._replace(**changes)


STOPPED: dict[str, Any] = {"state": "stopped", "kind": ""}


@pytest.mark.parametrize(
    ("changes", "follows"),
    [
        pytest.param({}, Next("requeue", "continues from the last checkpoint", seconds=60), id="a failure"),
        pytest.param({**STOPPED, "stop_signal": "USR1"}, Next("requeue", "saved; continues later"), id="a time limit"),
        # scancel tells the batch script too; preemption with grace time tells the steps alone
        pytest.param({**STOPPED, "stop_signal": PREEMPTED}, Next("requeue", "saved; continues later"), id="preempted"),
        pytest.param(
            {**STOPPED, "stop_signal": "USR1", "run": {"restart": {**RESTART, "by": "chain"}}},
            Next("chain", "saved; continues later"),
            id="the next link of a chain where requeue is forbidden",
        ),
    ],
)
def test_what_goes_on(changes: dict[str, Any], follows: Next) -> None:
    assert decide(facts(**changes)) == follows


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"state": "succeeded", "kind": ""}, "done"),
        ({"stop_signal": "TERM", "state": "stopped"}, "cancelled by SLURM or a person"),
        ({"stop_file": True, "stop_signal": "USR1", "state": "stopped"}, "stopped by the stop file"),
        *(
            ({"kind": kind, "made_a_step": False}, "it failed before its first step and would fail again")
            for kind in ("crash", "image", "")
        ),
        *(
            ({"kind": kind}, f"a restart would end in {kind} again")
            for kind in ("bad_arguments", "shm_full", "container", "unexpected_result")
        ),
        ({"kind": "disk_full", "made_a_step": False}, "a restart would end in disk_full again"),
        ({"kind": "container_busy", "tries": 3, "fruitless": 2}, "2 attempts in a row"),
        ({"kind": "oom"}, "on_oom: fallback tries layouts with more headroom"),
        ({"restarts": 20}, "already restarted 20 times"),
        ({"bounds": Bounds(failures_of_hour=11)}, "11 failures within an hour (restart.per_hour: 10)"),
        ({"bounds": Bounds(lost_gpu_hours=25.0)}, "25.0 GPU-hours are lost (restart.lost_gpu_hours: 24)"),
        ({"kind": "crash", "bounds": Bounds(same_step=149)}, "two attempts in a row died after step 149"),
        ({"fruitless": 2}, "2 attempts in a row got no further than step 100"),
        ({"run": {"restart": None}}, "the recipe asks for no restart"),
    ],
)
def test_what_ends_a_job(changes: dict[str, Any], why: str) -> None:
    after = decide(facts(**changes))
    assert after.action == "end"
    assert why in after.why


def test_what_has_trained_before_is_not_ended_by_a_crash_before_its_first_step() -> None:
    crash = facts(kind="crash", made_a_step=False, trained_before=True, fruitless=1)
    assert decide(crash).action == "requeue"
    assert decide(crash._replace(fruitless=2)).action == "end"  # and not for ever


@pytest.mark.parametrize(
    "kind", ["rerun", "silent_corruption", "driver", "file_system", "name_resolution", "hub", "checkpoint"]
)
def test_what_another_try_may_mend_is_tried_again_before_the_first_step(kind: str) -> None:
    assert decide(facts(kind=kind, made_a_step=False, fruitless=1)).action == "requeue"
    assert decide(facts(kind=kind, made_a_step=False, fruitless=2)).action == "end"


def test_a_checkpoint_that_could_not_be_loaded_ends_a_job_that_is_to_stop_there_or_has_no_other() -> None:
    bad = facts(kind="checkpoint", made_a_step=False)
    assert decide(bad).why == "continues from the checkpoint before the one that could not be loaded"
    stopping = {"restart": {**RESTART, "bad_checkpoint": "stop"}}
    assert "restart.bad_checkpoint: stop" in decide(bad._replace(run=stopping)).why
    assert decide(facts(stopping, kind="checkpoint")).action == "requeue"  # it trained: nothing was wrong with that one
    assert decide(bad._replace(saved_step=0)).action == "end"  # the weights it starts from


def test_a_failure_starts_again_on_the_nodes_that_are_left_and_the_queue_is_for_the_rest() -> None:
    here = facts(nodes=("n1", "n2"), layout="fallback/1")
    why = "continues from the last checkpoint"
    assert decide(here) == Next("restart", why, layout="fallback/1", nodes=("n1", "n2"))
    assert decide(here._replace(stop_signal="USR1", state="stopped")).action == "requeue"
    assert decide(here._replace(nodes=())).action == "requeue"
    assert decide(here._replace(fruitless=2)).action == "end"
    assert decide(here._replace(restarts=20)).action == "end"


def test_nodes_that_are_paid_for_wait_only_where_another_try_at_once_would_be_in_vain() -> None:
    patient = facts({"restart": {**RESTART, "fruitless": 50}}, nodes=("n1",))
    assert [decide(patient._replace(fruitless=attempts)).seconds for attempts in (0, 1, 2, 20)] == [0, 0, 120, 600]
    assert decide(patient._replace(kind="hub")).seconds == 60


def test_a_disk_that_filled_up_while_it_trained_may_have_room_again_and_is_not_tried_for_ever() -> None:
    full = facts(kind="disk_full", nodes=("n1",), fruitless=1)
    assert (decide(full).action, decide(full).seconds) == ("restart", 60)
    assert decide(full._replace(fruitless=2)).action == "end"


def test_the_wait_doubles_with_each_vain_attempt_up_to_an_hour() -> None:
    patient = {"restart": {**RESTART, "fruitless": 50}}
    waits = [decide(facts(patient, fruitless=attempts)).seconds for attempts in (0, 1, 2, 3, 20)]
    assert waits == [60, 60, 120, 240, 3600]


def oom(
    layout: str = ".", saved_step: int = 0, after: str = "reshard", kind: str = "oom", stop_signal: str = ""
) -> Next:
    run = {"fallbacks": FALLBACKS, "after_checkpoint": after}
    return decide(
        facts(run, kind=kind, layout=layout, saved_step=saved_step, stop_signal=stop_signal, made_a_step=False)
    )


def test_out_of_memory_falls_back_on_one_layout_after_the_other() -> None:
    assert oom() == Next("fallback", "out of memory", layout="fallback/1")
    assert oom("fallback/1").layout == "fallback/2"
    assert oom("fallback/3").action == "end"


@pytest.mark.parametrize(
    ("kind", "why", "lasting"),
    [
        ("port_taken", "another program used the port", "crash"),
        ("container_busy", "the container did not start this time", "container"),
    ],
)
def test_what_another_port_or_container_mends_is_tried_again_at_once_and_not_for_ever(
    kind: str, why: str, lasting: str
) -> None:
    case = facts({"restart": None}, kind=kind, made_a_step=False, layout="fallback/1")
    assert decide(case) == Next("again", why, layout="fallback/1")
    assert decide(case._replace(tries=3)).action == "end"
    assert decide(case._replace(stop_signal="USR1")).action == "end"
    assert decide(case._replace(kind=lasting)).action == "end"


def test_host_memory_is_never_answered_with_head_room_on_the_device() -> None:
    assert oom(kind="host_oom", saved_step=5).action == "requeue"


def test_after_a_checkpoint_only_what_can_load_it_follows() -> None:
    assert oom(saved_step=100).layout == "fallback/2"
    assert oom("fallback/2", saved_step=100).layout == "fallback/3"
    lost = oom("fallback/1", saved_step=100)
    assert lost.action == "end"
    assert "fallback/2 and fallback/3 cannot load the checkpoint of step 100" in lost.why
    assert oom(saved_step=100, after="stop").action == "end"


@pytest.mark.parametrize("layout", [".", "fallback/1"])
def test_what_begins_again_does_so_only_where_nothing_left_can_go_on(layout: str) -> None:
    assert oom(layout, saved_step=100, after="restart").layout == "fallback/2"


def test_there_is_no_time_left_for_another_layout_where_the_job_was_told_to_stop() -> None:
    assert oom(stop_signal="USR1").action == "end"


@given(
    st.builds(
        Facts,
        state=st.sampled_from(["failed", "stopped"]),
        kind=st.sampled_from(["", *KINDS]),
        stop_signal=st.sampled_from(["", "USR1", "TERM", PREEMPTED]),
        stop_file=st.booleans(),
        made_a_step=st.booleans(),
        trained_before=st.booleans(),
        layout=st.sampled_from([".", "fallback/1", "fallback/2", "fallback/3"]),
        saved_step=st.integers(0, 10**6),
        restarts=st.integers(0, 100),
        fruitless=st.integers(0, 10),
        nodes=st.sampled_from([(), ("n1", "n2")]),
        run=st.just({"restart": RESTART, "fallbacks": FALLBACKS, "after_checkpoint": "restart"}),
    )
)
def test_no_job_comes_back_for_ever(case: Facts) -> None:
    after = decide(case)
    if after.action in ("requeue", "chain", "restart"):
        assert case.restarts < 20
        assert case.fruitless < 2
        assert 0 <= after.seconds <= 3600
    if after.action == "fallback":
        assert after.layout > case.layout


BAD = BadLossFacts(since_step=451, at_once=False, from_step=300, older_step=400, rollbacks=0)


@pytest.mark.parametrize(
    ("policy", "changes", "action", "why"),
    [
        ({"action": "stop"}, {}, "end", "the loss was bad from step 451 on (on_bad_loss: stop)"),
        ({"action": "rollback", "times": 2}, {}, "rollback", "back to the checkpoint of step 400"),
        ({"action": "rollback", "times": 2}, {"rollbacks": 2}, "end",
         "already rolled back 2 times (on_bad_loss.times)"),
        ({"action": "rollback", "times": 2}, {"older_step": None}, "end", "there is no whole checkpoint before it"),
        ({"action": "tell"}, {}, "requeue", "continues from the last checkpoint"),
        (None, {}, "requeue", "continues from the last checkpoint"),
        *(
            ({"action": action, "times": 2}, {"at_once": True}, "end", "after the checkpoint of step 300 was bad again")
            for action in ("tell", "stop", "rollback")
        ),
    ],
)  # fmt: skip
def test_what_follows_a_bad_loss(policy: Any, changes: dict[str, Any], action: str, why: str) -> None:
    follows = decide(facts({"on_bad_loss": policy}, kind="bad_loss", bad_loss=BAD._replace(**changes)))
    assert follows.action == action
    assert why in follows.why


def test_a_job_that_was_told_to_end_is_not_rolled_back_in_its_last_minutes() -> None:
    run = {"on_bad_loss": {"action": "rollback", "times": 2}}
    assert decide(facts(run, kind="bad_loss", bad_loss=BAD, stop_signal="USR1")).action == "requeue"
