"""What scontrol says of switches and blocks, old and new."""

from __future__ import annotations

import pytest

from llmlaunch.node.place import expand, guessed_bandwidth, switch_levels

TREE = """\
SwitchName=s0 Level=0 LinkSpeed=1 Nodes=n[1-2]
SwitchName=s1 Level=0 LinkSpeed=1 Nodes=n[3-4]
SwitchName=s2 Level=0 LinkSpeed=1 Nodes=n5
SwitchName=s3 Level=1 LinkSpeed=1 Nodes=n[1-4] Switches=s[0-1]
SwitchName=s4 Level=2 LinkSpeed=1 Nodes=n[1-5] Switches=s[2-3]
"""
BLOCKS_23_11 = "BlockName=b1 BlockIndex=0 Nodes=n[1-2]\nBlockName=b2 BlockIndex=1 Nodes=n[3-4]\n"
BLOCKS_24_05 = """\
BlockName=b1 BlockIndex=0 Nodes=n[1-2] BlockSize=2
BlockName=b2 BlockIndex=1 Nodes=n[3-4] BlockSize=2
BlockName=b3 BlockIndex=2 Nodes=n[5-6] BlockSize=2
AggregatedBlock=b[1-2] BlockIndex=3 Nodes=n[1-4] BlockSize=4
"""


@pytest.mark.parametrize(
    ("text", "nodes", "levels"),
    [
        (TREE, ["n1", "n2", "n3", "n5"], [[0, 0, 1, 2], [0, 0, 1, 2], [1, 1, 0, 2], [2, 2, 2, 0]]),
        (TREE, ["n5", "n1", "x"], [[0, 2, 3], [2, 0, 3], [3, 3, 0]]),
        (BLOCKS_23_11, ["n1", "n3", "n2"], [[0, 1, 0], [1, 0, 1], [0, 1, 0]]),
        (BLOCKS_24_05, ["n1", "n2", "n4", "n6"], [[0, 0, 1, 2], [0, 0, 1, 2], [1, 1, 0, 2], [2, 2, 2, 0]]),
    ],
)
def test_the_level_of_two_nodes_is_that_of_the_lowest_switch_above_both(
    text: str, nodes: list[str], levels: list[list[int]]
) -> None:
    assert switch_levels(text, nodes) == levels


@pytest.mark.parametrize("text", ["", "No topology information available\n", "slurm_load_topo error: x", "a=b c=d"])
def test_no_topology_sets_nothing_apart(text: str) -> None:
    assert switch_levels(text, ["n1", "n2"]) is None


def test_nodes_under_one_switch_are_all_the_same() -> None:
    assert switch_levels(TREE, ["n1", "n2"]) is None


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("", []),
        ("n1", ["n1"]),
        ("n[1-3]", ["n1", "n2", "n3"]),
        ("n[08-10,12],m", ["n08", "n09", "n10", "n12", "m"]),
        ("r[1-2]n[1,3]", ["r1n1", "r1n3", "r2n1", "r2n3"]),
        ("127.77.0.[1-2]", ["127.77.0.1", "127.77.0.2"]),
    ],
)
def test_a_host_list_stands_for_its_names(text: str, names: list[str]) -> None:
    assert expand(text) == names


def test_each_level_is_taken_for_half_as_fast() -> None:
    assert guessed_bandwidth([[0, 1], [2, 0]], 40e9) == [[40e9, 20e9], [10e9, 40e9]]
