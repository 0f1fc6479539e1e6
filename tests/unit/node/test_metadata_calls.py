"""What a node asks of a shared file system: counted on two nodes as they really start, train and end, under strace."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from support.metadata_calls import by_path
from support.node_rig import nvml_library  # noqa: F401
from support.traced_node import ATTEMPT, RANKS, TracedNodes

NODES = 2
MOST_TO_START = 26  # 24 were counted, of them two for each rank; 2,146 in the version before
MOST_WHILE_IT_TRAINS = 2  # none was
MOST_TO_END = 3  # one was
STEADY_SECONDS = 5.0  # several of the monitor's looks


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory, nvml_library: Path) -> TracedNodes:  # noqa: F811
    return TracedNodes(tmp_path_factory.mktemp("nodes"), nvml_library)


def test_a_node_makes_few_metadata_calls(nodes: TracedNodes) -> None:
    nodes.start(NODES)
    up = time.time()
    time.sleep(STEADY_SECONDS)
    ends = time.time()
    assert nodes.end() == [0] * NODES
    for node in nodes.nodes:
        spans = {MOST_TO_START: (0.0, up), MOST_WHILE_IT_TRAINS: (up, ends), MOST_TO_END: (ends, float("inf"))}
        for most, span in spans.items():
            calls = node.calls(*span)
            assert len(calls) <= most, by_path(calls)


def test_no_folder_that_nodes_share_has_more_than_one_file_of_a_node(nodes: TracedNodes) -> None:
    """But for the logs, of which a monitor that has something to say has one of its own."""
    names = [f"node{node:04d}" for node in range(NODES)]
    folders = [*(nodes.run / "attempts" / ATTEMPT).iterdir(), nodes.run / "peaks"]
    files = {folder.name: sorted(path.name.partition(".")[0] for path in folder.iterdir()) for folder in folders}
    assert files == {**dict.fromkeys(("done", "memory", "ranks", "peaks"), names), "flight": []}
    assert len(list((nodes.folder / "place").glob("up.*"))) == NODES * RANKS
    assert list((nodes.folder / "tmp").iterdir()) == []  # what a node kept for itself is gone
