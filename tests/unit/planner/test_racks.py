"""Jobs over several racks, each one NVLink domain: whole groups stay inside, or the plan says that they may not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from llmlaunch.cluster.load import load_cluster
from llmlaunch.layout import Layout
from llmlaunch.planner.setting import group_nodes, rack_note, segment_nodes

RACK = load_cluster("gb300-nvl72")
KNOWN = replace(RACK, nodes_per_block=18)
EXPERTS = Layout(data=64, expert=64)


@pytest.mark.parametrize(
    ("layout", "nodes"),
    [(EXPERTS, 16), (Layout(tensor=8), 2), (Layout(tensor=4, expert=4), 1), (Layout(expert=128), 1), (Layout(), 1)],
)
def test_a_group_beyond_a_node_and_within_the_rack_has_nodes(layout: Layout, nodes: int) -> None:
    assert group_nodes(RACK, layout) == nodes
    assert group_nodes(load_cluster("b300-x8"), layout) == 1


@pytest.mark.parametrize(
    ("nodes", "group", "segment"), [(64, 16, 16), (144, 16, 16), (144, 1, 18), (36, 16, 18), (12, 2, 12), (37, 2, 1)]
)
def test_a_segment_is_the_largest_that_cuts_no_group(nodes: int, group: int, segment: int) -> None:
    assert segment_nodes(nodes, 18, group) == segment


def test_the_plan_says_where_a_group_may_lie_across_two_racks() -> None:
    [unasked] = rack_note(RACK, 64, EXPERTS)
    assert "groups of 64 devices are priced inside one rack of 72" in unasked
    assert "nodes_per_block: 18" in unasked
    assert "segments of 16 nodes" in unasked
    [cut] = rack_note(KNOWN, 36, EXPERTS)
    assert "choose a multiple of 16 nodes" in cut
    for cluster, nodes, layout in ((KNOWN, 64, EXPERTS), (RACK, 18, EXPERTS), (RACK, 64, Layout(data=256))):
        assert rack_note(cluster, nodes, layout) == ()
