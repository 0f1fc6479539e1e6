"""The order of the nodes at job start, and SLURM's topology that it reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from llmlaunch.node.place import guessed_bandwidth, node_order, switch_levels
from llmlaunch.rundir.values import host_names

NODES = ["n1", "n2", "n3", "n4"]
# tensor parallel inside each node of eight, four nodes reduce gradients in a ring
RING = {"tensor": 8, "context": 1, "data": 4, "pipeline": 1, "virtual_pipeline": 1, "expert": 1, "expert_tensor": 1}
VOLUMES = {"pipeline": 0.0, "data": [8e9], "expert_data": [0.0], "expert": 0.0}
FAST = ({"n1", "n3"}, {"n3", "n2"}, {"n2", "n4"}, {"n4", "n1"})
SCONTROL = """\
#!/bin/sh
[ -z "$SLURM_TOPO_LEN" ] || exit 1
echo "SwitchName=s0 Level=0 LinkSpeed=1 Nodes=n[1,3]"
echo "SwitchName=s1 Level=0 LinkSpeed=1 Nodes=n[2,4]"
echo "SwitchName=s2 Level=1 LinkSpeed=1 Nodes=n[1-4] Switches=s[0-1]"
"""


def matrix(nodes: list[str]) -> dict[str, Any]:
    return {"nodes": nodes, "gigabytes_per_second": [[20.0 if {a, b} in FAST else 5.0 for b in nodes] for a in nodes]}


def job(folder: Path, **changes: Any) -> None:
    described = {
        "schema": 1, "nodes": 4, "devices_per_node": 8, "layout": RING, "bytes": VOLUMES,
        "fabric_gigabytes_per_second": 50.0, "matrix": None, **changes,
    }  # fmt: skip
    (folder / "placement.json").write_text(json.dumps(described))


class Placing:
    """A run directory, and the scontrol of its cluster."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
        self.folder, self.tools, self._capfd = folder, folder / "bin", capfd
        self._monkeypatch = monkeypatch
        self.tools.mkdir()
        monkeypatch.setenv("PATH", str(self.tools))
        monkeypatch.setenv("SLURM_TOPO_LEN", "10")

    def place(self, scontrol: str | None = None) -> tuple[list[str], dict[str, Any], str]:
        """Return the order, the attempt's record, and what is said."""
        if scontrol is not None:
            (self.tools / "scontrol").write_text(scontrol)
            (self.tools / "scontrol").chmod(0o755)
            self._monkeypatch.setenv("PATH", f"{self.tools}:/usr/bin:/bin")
        begun = self.folder / "attempts" / "7.0" / "attempt.json"
        begun.parent.mkdir(parents=True, exist_ok=True)
        begun.write_text("{}")
        order = node_order(self.folder, "7.0", ".", NODES)
        record = json.loads(begun.read_text())["placement"]
        return order, record, self._capfd.readouterr().err


@pytest.fixture
def placing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Placing:
    return Placing(tmp_path, monkeypatch, capfd)


def test_the_measured_matrix_decides(placing: Placing) -> None:
    job(placing.folder, matrix=matrix(["n4", "other", "n3", "n2", "n1"]))
    order, record, stderr = placing.place()
    assert order == record["order"]
    assert all({a, b} in FAST for a, b in zip(order, [*order[1:], order[0]], strict=True))
    assert (record["source"], record["proved"]) == ("matrix", True)
    assert record["seconds"] == pytest.approx(8e9 / 20e9)
    assert record["slurm_order_seconds"] == pytest.approx(8e9 / 5e9)
    assert "75.0% less time between nodes" in stderr


def test_a_node_the_matrix_does_not_know_is_taken_for_a_middling_one(placing: Placing) -> None:
    job(placing.folder, matrix=matrix(["n1", "n2", "n3"]))
    _, record, _ = placing.place()
    assert "1 of 4 nodes not in it: median" in record["why"]
    assert sorted(record["order"]) == NODES


def test_without_a_matrix_slurms_topology_decides(placing: Placing) -> None:
    """Two stages of two nodes: the ring of gradients, the heavier part, stays under one switch."""
    sizes = {**RING, "data": 2, "pipeline": 2}
    job(placing.folder, layout=sizes, bytes={**VOLUMES, "pipeline": 1e8, "data": [8e9, 8e9], "expert_data": [0, 0]})
    _, record, _ = placing.place(SCONTROL)
    assert record["source"] == "topology"
    assert sorted([sorted(record["order"][:2]), sorted(record["order"][2:])]) == [["n1", "n3"], ["n2", "n4"]]


@pytest.mark.parametrize(
    ("changes", "scontrol", "why"),
    [
        ({}, None, "the cluster profile has no measured matrix; scontrol show topology:"),
        ({}, "#!/bin/sh\n", "sets no two of these nodes apart"),
        ({"matrix": matrix(["x", "y"])}, None, "knows fewer than two of these 4 nodes"),
        ({"bytes": {**VOLUMES, "data": [0.0]}}, None, "nothing that depends on the order crosses"),
        ({"matrix": {**matrix(NODES), "gigabytes_per_second": [[7.0] * 4] * 4}}, None, "no better one was found"),
        ({"layout": {"surprise": 1}}, None, "nothing that depends on the order crosses"),
        ({"bytes": None}, None, "placing failed: KeyError"),
        ({"matrix": {"nodes": NODES, "gigabytes_per_second": [[1.0]]}}, None, "placing failed: IndexError"),
    ],
)
def test_whatever_is_missing_or_broken_slurms_order_stays_and_the_record_says_why(
    changes: dict[str, Any], scontrol: str | None, why: str, placing: Placing
) -> None:
    job(placing.folder, **changes)
    order, record, stderr = placing.place(scontrol)
    assert order == record["order"] == NODES
    assert why in record["why"]
    assert why in stderr


def test_a_placement_json_that_is_no_json_leaves_slurms_order(placing: Placing) -> None:
    (placing.folder / "placement.json").write_text("{")
    order, record, _ = placing.place()
    assert order == NODES
    assert "cannot be read" in record["why"]


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


@pytest.mark.parametrize(
    "text", ["", "No topology information available\n", "slurm_load_topo error: x", "a=b c=d", TREE]
)
def test_no_topology_and_one_switch_set_nothing_apart(text: str) -> None:
    assert switch_levels(text, ["n1", "n2"]) is None


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("", []),
        ("n1", ["n1"]),
        ("n[1-3]", ["n1", "n2", "n3"]),
        ("n[08-10,12],gpu-2", ["n08", "n09", "n10", "n12", "gpu-2"]),
        ("n[a-b],n[,n[1--2]", ["n[a-b]", "n[", "n[1--2]"]),
        ("r[1-2]n[1,3]", ["r1n1", "r1n3", "r2n1", "r2n3"]),
        ("127.77.0.[1-2]", ["127.77.0.1", "127.77.0.2"]),
    ],
)
def test_a_host_list_stands_for_its_names(text: str, names: list[str]) -> None:
    assert host_names(text) == names


def test_each_level_is_taken_for_half_as_fast() -> None:
    assert guessed_bandwidth([[0, 1], [2, 0]], 40e9) == [[40e9, 20e9], [10e9, 40e9]]
