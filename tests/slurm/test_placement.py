"""The order of the nodes on real SLURM: chosen at job start, and followed by the ranks."""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import pytest
from one_machine import running_cluster
from person import Person, at_home
from training import QUICKSTART, Training, backend, submit

from llmlaunch.cluster.matrix import matrix_text
from support.side_by_side import side_by_side

pytestmark = pytest.mark.slurm

# Each rank says where it is.
SAY = """\
import os
print("rank", os.environ["RANK"], "on", os.environ["LLMLAUNCH_NODE"], flush=True)
"""


def site(person: Person, fast: list[tuple[int, int]] | None) -> str:
    """A profile of one process a node; with `fast`, a matrix in which only these links are, in both directions."""
    profile, nodes = "base: cpu-x1\n", person.cluster.nodes
    if fast is not None:
        links = {*fast, *((j, i) for i, j in fast)}
        every = range(len(nodes))
        speeds = [[10e9 if (i, j) in links else 1e9 for j in every] for i in every]
        (person.home / "links.json").write_text(matrix_text(nodes, speeds))
        profile += "links: {matrix: links.json}\n"
    (person.home / "site.yaml").write_text(profile)
    return f"cluster={person.home / 'site.yaml'}"


def trainer(person: Person) -> str:
    """The recipe's key for SAY."""
    (person.home / "trainer.py").write_text(SAY)
    return backend(person.home / "trainer.py")


def on_nodes(person: Person, count: int, *words: str) -> Training:
    """A job that has ended well, on the first so many nodes."""
    first = f"slurm.nodelist='{','.join(person.cluster.nodes[:count])}'"
    training = submit(person, person.home, f"nodes={count}", trainer(person), first, *words, "--follow")
    assert len(nodes_by_rank(training)) == count
    return training


def nodes_by_rank(training: Training) -> list[str]:
    return [rank["node"] for rank in sorted(training.status()["ranks"], key=lambda rank: rank["rank"])]


def decision(training: Training) -> dict[str, Any]:
    return training.of_attempt("0", "attempt.json")["placement"]


def ranks_follow_the_best_order_of_a_measured_matrix(person: Person) -> None:
    nodes = person.cluster.nodes
    # one ring of fast links: 0 - 2 - 1 - 3 - 0
    training = on_nodes(person, 4, site(person, [(0, 2), (2, 1), (1, 3), (3, 0)]))
    placed = decision(training)
    assert placed["source"] == "matrix"
    assert placed["seconds"] == pytest.approx(placed["slurm_order_seconds"] / 10)
    assert nodes_by_rank(training) == placed["order"]
    ring = [nodes.index(node) for node in placed["order"]]
    assert ring != [0, 1, 2, 3]
    steps = {frozenset(pair) for pair in zip(ring, [*ring[1:], ring[0]], strict=True)}
    assert steps == {frozenset(pair) for pair in [(0, 2), (2, 1), (1, 3), (3, 0)]}


def a_failed_placement_keeps_slurms_order_and_the_job_succeeds(person: Person) -> None:
    """By which node10 and node11 come after node9."""
    run = person.home / "run"
    words = ("nodes=4", "cluster=cpu-x1", f"python={person.python}", trainer(person))
    said = person.llmlaunch("render", QUICKSTART, *words, "-o", run, code=0)
    (run / "placement.json").write_text('{"schema": 1, "layout": {"surprise": 1}, "bytes": {}}')
    nodes = person.cluster.nodes[7:]
    assert [re.sub(r".*\D", "", node) for node in nodes] == ["8", "9", "10", "11"]
    assert person.cluster.run(run, f"--nodelist={','.join(nodes)}", "job.sbatch") == "0:0"
    training = Training(person, run, said)
    (begun,) = run.glob("attempts/*/attempt.json")
    assert json.loads(begun.read_text())["placement"]["why"].startswith("placing failed")
    assert nodes_by_rank(training) == nodes


def the_network_is_measured_in_an_allocation_and_places_the_next_job(person: Person) -> None:
    words = site(person, None)
    doctor = f"{sys.executable} -m llmlaunch doctor --network --message-mib 1 --save {person.home / 'site.yaml'}"
    nodes = person.cluster.nodes[:2]
    on_two = ("--nodes=2", "--ntasks-per-node=1", f"--nodelist={','.join(nodes)}", "--output=doctor.out")
    ended = person.cluster.run(person.home, *on_two, f"--wrap={doctor}")
    assert ended == "0:0", (person.home / "doctor.out").read_text()
    saved = json.loads((person.home / "site.links.json").read_text())
    assert saved["nodes"] == nodes
    assert saved["measured"]["devices_per_node"] == 1
    assert decision(on_nodes(person, 2, words))["source"] == "matrix"


def without_a_matrix_slurms_topology_decides(person: Person) -> None:
    """A ring must pass from one switch to the other and back: SLURM's order does so twice each way. The nodes are under
    two switches: the first and third, the second and fourth."""
    with running_cluster(4, CPUS="4", SWITCHES="2") as switched:
        person = at_home(switched, person.home)
        training = on_nodes(person, 4, site(person, None), "cluster.nodes_per_switch=2")
        assert "#SBATCH --switches=2\n" in (training.run / "job.sbatch").read_text()
        placed = decision(training)
        assert placed["source"] == "topology"
        assert nodes_by_rank(training) == placed["order"]
        ring = [switched.nodes.index(node) % 2 for node in placed["order"]]
        assert sum(a != b for a, b in zip(ring, [*ring[1:], ring[0]], strict=True)) == 2
        assert "over fewer slow links" in placed["why"]


test_placement = side_by_side(
    the_network_is_measured_in_an_allocation_and_places_the_next_job,
    ranks_follow_the_best_order_of_a_measured_matrix,
    without_a_matrix_slurms_topology_decides,
    a_failed_placement_keeps_slurms_order_and_the_job_succeeds,
)
