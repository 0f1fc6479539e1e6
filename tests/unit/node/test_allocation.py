"""Where a training that failed starts again: on the nodes that are left of its allocation."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmlaunch.node.allocation import left_out, next_nodes, nodes_without_answer, replaceable_nodes
from llmlaunch.node.finish import Ending, finish
from llmlaunch.rundir.attempt import Attempt
from llmlaunch.rundir.slow_devices import SlowDevice
from support.node_rig import ATTEMPT, NODE, NodeRig
from support.soak import examples

NODES = st.lists(st.sampled_from([f"n{number}" for number in range(12)]), unique=True)


@examples(40, 2000)
@given(NODES, st.integers(1, 12), st.sets(st.sampled_from([f"n{number}" for number in range(12)])))
def test_as_many_fit_nodes_as_before_in_slurms_order_or_none(allocated: list[str], count: int, unfit: set[str]) -> None:
    trained = allocated[:count]
    chosen = next_nodes(allocated, trained, unfit)
    fit = [node for node in allocated if node not in unfit]
    if not trained or len(fit) < len(trained):
        assert chosen == ()
        return
    assert len(chosen) == len(trained)
    assert list(chosen) == [node for node in fit if node in chosen]
    assert {node for node in trained if node in fit} <= set(chosen)


def test_a_suspected_node_gives_its_place_to_a_spare_one_and_trains_where_there_is_none() -> None:
    assert next_nodes(["a", "b", "c"], ["a", "b"], [], ["a"]) == ("b", "c")
    assert next_nodes(["a", "b"], ["a", "b"], [], ["a"]) == ("a", "b")
    assert next_nodes(["a", "b", "c"], ["a", "b"], ["c"], ["a"]) == ("a", "b")


SRUN = """\
#!/bin/sh
for word; do case $word in --nodelist=*) node=${word#--nodelist=} ;; esac; done
case $node in lost*) exec sleep 600 ;; refused*) exit 1 ;; esac
"""


@pytest.fixture
def srun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An srun whose nodes answer by their names; the real one is asked in tests/slurm/test_same_allocation.py."""
    command = tmp_path / "bin" / "srun"
    command.parent.mkdir()
    command.write_text(SRUN)
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{command.parent}:/usr/bin:/bin")
    monkeypatch.setenv("SLURM_JOB_ID", "15")
    monkeypatch.setattr("llmlaunch.node.allocation.ANSWER_SECONDS", 2.0)


def attempt(folder: Path, *nodes: str) -> Attempt:
    own = folder / "attempts" / ATTEMPT
    own.mkdir(parents=True)
    (own / "attempt.json").write_text(json.dumps({"attempt": ATTEMPT, "nodes": nodes}))
    return Attempt(folder, ATTEMPT)


@pytest.mark.usefixtures("srun")
def test_silent_nodes_that_start_no_task_are_lost(tmp_path: Path) -> None:
    assert nodes_without_answer(["lost1", "well", "refused1"], ["other", "lost2"]) == ["lost1", "refused1"]


@pytest.mark.usefixtures("srun")
def test_a_silent_node_that_starts_a_task_shows_that_it_is_not_slurm(tmp_path: Path) -> None:
    """All are silent where one was lost before its step was launched."""
    assert nodes_without_answer(["well", "refused1"], []) == ["refused1"]


@pytest.mark.usefixtures("srun")
@pytest.mark.parametrize("others", [["refused2"], []])
def test_where_another_node_starts_none_either_it_is_slurm(others: list[str]) -> None:
    assert nodes_without_answer(["refused1"], others) == []


@pytest.mark.parametrize(("follows", "still"), [("restart", ["c", "d"]), ("fallback", ["c", "d"]), ("requeue", [])])
def test_what_an_attempt_or_its_preflight_left_out_stays_out_of_the_allocation(
    tmp_path: Path, follows: str, still: list[str]
) -> None:
    earlier = attempt(tmp_path, "a", "b").folder
    begun = json.loads((earlier / "attempt.json").read_text())
    begun["preflight"] = {"bad": {"c": "GPU 3 is slow", "../x": ""}}
    (earlier / "attempt.json").write_text(json.dumps(begun))
    verdict = {"attempt": ATTEMPT, "left_out": ["d", 7], "next": {"action": follows}}
    (earlier / "status.json").write_text(json.dumps(verdict))
    job = ATTEMPT.partition(".")[0]
    assert left_out(tmp_path, f"{job}.1", ["e", "f"]) == [*still, "e", "f"]
    assert left_out(tmp_path, "99.0", []) == []


RESTART = {"by": "requeue", "within": "job", "times": 20, "fruitless": 2, "backoff_seconds": 60}


@pytest.mark.parametrize(
    ("pool", "follows", "nodes"),
    [
        pytest.param((NODE, "node2", "spare1", "spare2"), ("restart", 0), ("node2", "spare1"), id="spare"),
        pytest.param((NODE, "node2"), ("requeue", 60), (), id="too few nodes are left"),
    ],
)
def test_a_verdict_names_the_nodes_of_the_next_attempt(
    cpu_node: NodeRig, pool: tuple[str, ...], follows: tuple[str, int], nodes: tuple[str, ...]
) -> None:
    cpu_node.write("run.json", {"schema": 1, "restart": RESTART})
    cpu_node.write_attempt("attempt.json", {"attempt": ATTEMPT, "nodes": [NODE, "node2"], "started_at": 1.0})
    cpu_node.write_attempt("progress.json", {"step": 40})
    cpu_node.write_attempt(f"causes/{NODE}.json", {"kind": "ecc", "node": NODE, "line": "Xid 48", "sick": True})
    cpu_node.write_rank({"rank": 0, "node": NODE, "ended_at": 9.0, "exit_code": 1, "signal": None})
    finished = finish(Ending(cpu_node.run_directory, ATTEMPT, 2, 1, pool=pool))
    assert ((finished.follows.action, finished.follows.seconds), finished.follows.nodes) == (follows, nodes)
    assert finished.at_fault == (NODE,)
    assert (cpu_node.status()["left_out"], cpu_node.status()["next"]["nodes"]) == ([NODE], list(nodes))


def replaceable(folder: Path, slow: str, restart: dict[str, object]) -> list[str]:
    (folder / "run.json").write_text(json.dumps({"restart": {"times": 3, **restart}}))
    devices = [SlowDevice(node, 3, None, 1.5, 1.0, ()) for node in slow.split()]
    return replaceable_nodes(Attempt(folder, ATTEMPT), devices)


def test_slow_nodes_are_replaced_where_the_recipe_asks_and_spare_ones_are_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-5]")
    attempt(tmp_path, "n1", "n2", "n3")
    wanted = {"slow_nodes": "replace"}
    assert replaceable(tmp_path, "n2 n2", wanted) == ["n2"]
    assert replaceable(tmp_path, "n2 n1", wanted) == ["n1", "n2"]
    assert replaceable(tmp_path, "n2", {}) == []
    assert replaceable(tmp_path, "n2", {**wanted, "times": 0}) == []
    assert replaceable(tmp_path, "n1 n2 n3", wanted) == []
    before = tmp_path / "attempts" / f"{ATTEMPT.rpartition('.')[0]}.9"
    before.mkdir()
    (before / "attempt.json").write_text(json.dumps({"attempt": before.name, "started_at": 1.0}))
    verdict = {"attempt": before.name, "left_out": ["n4", "n5"], "next": {"action": "restart"}}
    (before / "status.json").write_text(json.dumps(verdict))
    assert replaceable(tmp_path, "n2", wanted) == []  # no spare node is fit any more
