"""A job that lost nodes goes on with the layout that was planned for as many as are left, and says what it costs."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmlaunch.node.allocation import next_nodes
from llmlaunch.node.restart_policy import Facts, cost_of_fewer_nodes, decide, layout_on, node_counts
from support.node_rig import ATTEMPT, NODE, NodeRig

NODES = [f"n{number}" for number in range(16)]
RESTART = {"by": "requeue", "within": "job", "times": 20, "fruitless": 2, "backoff_seconds": 60}


def described(*counts: int, full: int = 16) -> dict[str, Any]:
    layouts = [{"layout": f"nodes/{count}", "nodes": count, "step_seconds": 64.0 / count} for count in counts]
    fewer = {"step_seconds": 4.0, "usd_per_node_hour": 20.0, "layouts": layouts}
    return {"nodes": full, "restart": RESTART, "progress": {"steps": 10_000}, "fewer_nodes": fewer}


@given(
    full=st.integers(2, 12),
    counts=st.sets(st.integers(1, 11)),
    trained=st.integers(1, 12),
    unfit=st.sets(st.sampled_from(NODES)),
    suspected=st.sets(st.sampled_from(NODES)),
)
def test_the_layout_never_needs_more_nodes_than_are_left_and_no_larger_one_would_do(
    full: int, counts: set[int], trained: int, unfit: set[str], suspected: set[str]
) -> None:
    run = described(*(count for count in counts if count < full), full=full)
    chosen = next_nodes(NODES, NODES[:trained], unfit, suspected, node_counts(run, "."))
    left = [node for node in NODES if node not in unfit]
    possible = [count for count in node_counts(run, ".") if count <= len(left)] or (
        [trained] if not node_counts(run, ".") and trained <= len(left) else []
    )
    assert set(chosen) <= set(left)
    assert len(chosen) == max(possible, default=0)
    if node_counts(run, "."):
        layout = layout_on(run, ".", len(chosen))
        assert layout == ("." if len(chosen) in (0, full) else f"nodes/{len(chosen)}")


def test_with_all_nodes_again_the_planned_layout_goes_on() -> None:
    run = described(12, 8)
    assert node_counts(run, "nodes/12") == [16, 12, 8]
    assert layout_on(run, "nodes/12", 16) == "."
    assert layout_on(run, "fallback/1", 16) == "fallback/1"


def test_what_ran_out_of_memory_before_has_no_layout_for_fewer_nodes() -> None:
    assert node_counts(described(12), "fallback/1") == []


def test_where_the_recipe_does_not_ask_it_is_as_many_as_before() -> None:
    assert node_counts({"nodes": 16}, ".") == []
    assert next_nodes(NODES, NODES[:12], [], counts=[]) == tuple(NODES[:12])


def test_it_says_what_a_step_takes_how_long_is_to_go_and_what_that_costs() -> None:
    assert cost_of_fewer_nodes(described(12, 8), 8, 1000, held_nodes=10) == (
        "on 8 of 16 nodes (nodes.at_least), 2 more idle; a step takes 8 s in place of 4, 20.0 h to go in place of "
        "10.0 h, $4,000 in place of $3,200"
    )
    assert cost_of_fewer_nodes(described(12), 16, 1000, held_nodes=16) == ""
    torn = {
        "nodes": 16,
        "fewer_nodes": {"layouts": [{"layout": "nodes/8", "nodes": 8}, {"layout": "../x", "nodes": 9}]},
    }
    assert cost_of_fewer_nodes(torn, 8, 0, held_nodes=8) == "on 8 of 16 nodes (nodes.at_least)"
    assert node_counts(torn, ".") == [16, 8]


def facts(**changes: Any) -> Facts:
    plain = Facts("failed", "node_fail", "", False, True, True, ".", 1000, 0, 0, described(12))
    return plain._replace(nodes=tuple(NODES[:12]), held_nodes=12, **changes)


def test_lost_nodes_are_followed_by_the_smaller_layout_which_says_what_it_costs() -> None:
    follows = decide(facts())
    assert (follows.action, follows.layout, len(follows.nodes)) == ("restart", "nodes/12", 12)
    assert "continues from the last checkpoint, on 12 of 16 nodes (nodes.at_least); a step takes 5.33 s" in follows.why


@pytest.mark.parametrize(
    ("changes", "action"),
    [
        pytest.param({"kind": "oom"}, "requeue", id="out of memory: the queue gives all nodes"),
        pytest.param({"kind": "crash", "made_a_step": False}, "requeue", id="it never trained"),
        pytest.param({"kind": "checkpoint", "made_a_step": False}, "requeue", id="it could not load the checkpoint"),
        pytest.param({"kind": "node_fail", "made_a_step": False}, "restart", id="another node is lost"),
        pytest.param({"kind": "crash"}, "restart", id="it trained"),
    ],
)
def test_a_smaller_layout_that_does_not_work_is_left_for_the_planned_one(changes: dict[str, Any], action: str) -> None:
    assert decide(facts(layout="nodes/12", **changes)).action == action


def test_the_last_word_of_a_job_that_lost_a_node_names_the_fewer_ones(cpu_node: NodeRig) -> None:
    cpu_node.write("run.json", {"schema": 1, **described(1, full=2)})
    cpu_node.write_attempt("attempt.json", {"attempt": ATTEMPT, "nodes": [NODE, "node2"], "started_at": 1.0})
    cpu_node.write_attempt("progress.json", {"step": 40})
    cpu_node.write_attempt(f"causes/{NODE}.json", {"kind": "ecc", "node": NODE, "line": "Xid 48", "sick": True})
    cpu_node.rank("sh", "-c", "exit 1", rank=0).wait()
    _, status, stderr = cpu_node.finish(2, 1, pool=(NODE, "node2"))
    follows = status["next"]
    assert (follows["action"], follows["layout"], follows["nodes"]) == ("restart", "nodes/1", ["node2"]), stderr
    assert "on 1 of 2 nodes (nodes.at_least), 1 more idle; a step takes 64 s in place of 4" in stderr


def test_where_too_few_nodes_passed_the_preflight_the_job_script_ends_and_nothing_is_promised(
    cpu_node: NodeRig,
) -> None:
    cpu_node.write("run.json", {"schema": 1, **described(1, full=2)})
    tried = {"nodes": [], "bad": {"node2": "GPU 3 is slow"}}
    begun = {"attempt": ATTEMPT, "nodes": [NODE, "node2"], "started_at": 1.0, "preflight": tried}
    cpu_node.write_attempt("attempt.json", begun)
    assert cpu_node.finish(2, 3, pool=(NODE, "node2"))[1]["next"]["action"] != "restart"
