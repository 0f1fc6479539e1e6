"""Which nodes of an allocation train after the preflight, as the command in node.pyz says it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from support.node_rig import run_archive

NODES = ["n1", "n2", "n3", "n4"]
GOOD: dict[str, Any] = {"stage": "reduced", "bad": None, "kind": "gpu", "matmul_seconds": [0.002, 0.002]}


def choose(archive: Path, run: Path, wanted: int, **markers: dict[str, Any] | None) -> Any:
    """The markers of n1 to n4; those not given are good, None is a node that left none."""
    attempt = run / "attempts" / "7.0"
    (attempt / "preflight").mkdir(parents=True, exist_ok=True)
    (attempt / "attempt.json").write_text(json.dumps({"schema": 1, "nodes": NODES, "layout": ""}))
    for node in NODES:
        marker = markers.get(node, {})
        if marker is not None:
            (attempt / "preflight" / f"{node}.json").write_text(json.dumps({**GOOD, "node": node, **marker}))
    place = ("--run-dir", run, "--attempt", "7.0", "--nodes", str(wanted))
    return run_archive(archive, "choose", *place, stdin="\n".join(NODES) + "\n")


def record(run: Path, name: str = "preflight.json") -> dict[str, Any]:
    return dict(json.loads((run / "attempts" / "7.0" / name).read_text()))


def test_the_first_good_nodes_train_and_the_rest_is_spare(archive: Path, tmp_path: Path) -> None:
    done = choose(archive, tmp_path, 3)
    assert (done.returncode, done.stdout.split()) == (0, ["n1", "n2", "n3"])
    assert (record(tmp_path)["spare"], record(tmp_path)["bad"]) == (["n4"], {})
    assert record(tmp_path, "attempt.json")["nodes"] == ["n1", "n2", "n3"]


@pytest.mark.parametrize(
    ("error", "bad"),
    [("File already exists: /run/enroot/pyxis_7.0", False), ("No such file or directory: /images/box.sqsh", True)],
)
def test_a_node_whose_container_may_start_next_time_is_not_bad(
    archive: Path, tmp_path: Path, error: str, bad: bool
) -> None:
    log = tmp_path / "attempts" / "7.0" / "preflight" / "n2.log"
    log.parent.mkdir(parents=True)
    line = f"slurmstepd-n2: error: pyxis:     [ERROR] {error}"
    log.write_text(f"slurmstepd-n2: error: pyxis: printing enroot log file:\n{line}\n")
    assert choose(archive, tmp_path, 3, n2=None).returncode == 0
    assert record(tmp_path)["bad"] == ({"n2": f"its container does not start: {line}"} if bad else {})


@pytest.mark.parametrize(
    ("marker", "why"),
    [
        ({"bad": "GPU 3 has 2 uncorrectable ECC errors"}, "GPU 3 has 2 uncorrectable ECC errors"),
        (None, "the preflight did not start on it"),
        ({"stage": "started"}, "did not show its devices; others did"),
        ({"stage": "devices"}, "did not compute on every device; others did"),
        ({"stage": "matmul"}, "did not reach the others; others did"),
        ({"stage": "joined"}, "did not finish the all-reduce with the others; others did"),
        ({"matmul_seconds": [0.002, 0.0055]}, "its slowest device takes 2.8 times as long for a product as others"),
    ],
)
def test_a_bad_node_is_left_out_and_kept_with_the_reason(
    archive: Path, tmp_path: Path, marker: dict[str, Any] | None, why: str
) -> None:
    done = choose(archive, tmp_path, 3, n2=marker)
    assert (done.returncode, done.stdout.split()) == (0, ["n1", "n3", "n4"])
    assert record(tmp_path)["bad"] == {"n2": why}
    cause = record(tmp_path, "causes/n2.json")
    assert (cause["kind"], cause["node"], cause["sick"], cause["line"]) == ("preflight", "n2", True, why)
    assert cause["consequence"]  # the training goes on: whatever ends it is another cause


def test_too_few_good_nodes_are_named(archive: Path, tmp_path: Path) -> None:
    done = choose(archive, tmp_path, 4, n2={"bad": "broken"})
    assert (done.returncode, done.stdout) == (3, "")
    assert "3 of 4 nodes are good and 4 are needed; n2: broken" in done.stderr
    assert not record(tmp_path, "causes/n2.json")["consequence"]


def test_what_fails_on_every_node_is_no_nodes_fault(archive: Path, tmp_path: Path) -> None:
    """All stop where torch is missing; that every node shows too few devices is the recipe's mistake."""
    alike: dict[str, Any] = {node: {"stage": "started"} for node in NODES}
    done = choose(archive, tmp_path / "a", 3, **alike)
    assert (done.returncode, done.stdout.split()) == (0, ["n1", "n2", "n3"])
    assert "no node could show its devices" in done.stderr
    wrong: dict[str, Any] = {node: {"bad": "4 GPUs are usable here, 8 were asked for"} for node in NODES}
    done = choose(archive, tmp_path / "b", 3, **wrong)
    assert done.returncode == 3
    assert "check the recipe and the environment first" in done.stderr
    assert not record(tmp_path / "b", "causes/n1.json")["sick"]


def test_on_a_cpu_other_processes_may_slow_a_node(archive: Path, tmp_path: Path) -> None:
    slow: dict[str, Any] = {"n1": {"kind": "cpu", "matmul_seconds": [0.9]}}
    others: dict[str, Any] = {node: {"kind": "cpu", "matmul_seconds": [0.1]} for node in NODES[1:]}
    assert choose(archive, tmp_path, 3, **slow, **others).stdout.split() == ["n1", "n2", "n3"]
