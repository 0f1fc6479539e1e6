"""The order of the nodes on real SLURM: chosen at job start, and followed by the ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from one_machine import Cluster, new_cluster, throw_away

from llmlaunch.cluster.matrix import matrix_text

ROOT = Path(__file__).resolve().parents[2]
QUICKSTART = str(ROOT / "recipes" / "quickstart.yaml")
SECONDS = 600

pytestmark = pytest.mark.slurm

TRAINER = """\
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
assert total.item() == dist.get_world_size() == 4
print("rank", dist.get_rank(), "on", os.environ["LLMLAUNCH_NODE"], flush=True)
dist.destroy_process_group()
"""


def llmlaunch(home: Path, *words: str) -> subprocess.CompletedProcess[str]:
    places = {"XDG_DATA_HOME": str(home / "data"), "XDG_CACHE_HOME": str(home / "cache")}
    return subprocess.run(
        [sys.executable, "-m", "llmlaunch", *words],
        cwd=home, env={**os.environ, **places}, capture_output=True, text=True, timeout=SECONDS, check=False,
    )  # fmt: skip


def site(home: Path, nodes: list[str], fast: list[tuple[int, int]] | None) -> str:
    """A profile of one process a node; with `fast`, a matrix in which only these links are, in both directions."""
    profile = "base: cpu-x1\n"
    if fast is not None:
        links = {*fast, *((j, i) for i, j in fast)}
        every = range(len(nodes))
        speeds = [[10e9 if (i, j) in links else 1e9 for j in every] for i in every]
        (home / "links.json").write_text(matrix_text(nodes, speeds))
        profile += "links: {matrix: links.json}\n"
    (home / "site.yaml").write_text(profile)
    return "./site.yaml"


def run_on_four_nodes(home: Path, cluster: str, *words: str) -> Path:
    """The run directory of a job that has ended well."""
    (home / "trainer.py").write_text(TRAINER)
    (home / "recipe.yaml").write_text(Path(QUICKSTART).read_text())
    own = f"backend={{name: deepspeed, script: {home / 'trainer.py'}}}"
    words = ("nodes=4", f"cluster={cluster}", f"python={sys.executable}", own, *words)
    done = llmlaunch(home, "submit", "recipe.yaml", *words, "--follow", "-o", "run")
    logs = "\n".join(path.read_text() for path in sorted((home / "run" / "logs").glob("*.log")))
    assert done.returncode == 0, done.stdout + done.stderr + logs
    return home / "run"


def nodes_by_rank(run: Path) -> list[str]:
    ranks = json.loads((run / "status.json").read_text())["ranks"]
    return [rank["node"] for rank in sorted(ranks, key=lambda rank: rank["rank"])]


def decision(run: Path) -> dict[str, Any]:
    (path,) = run.glob("attempts/*/placement.json")
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def test_ranks_follow_the_order_that_a_measured_matrix_makes_best(slurm: Cluster, tmp_path: Path) -> None:
    nodes = slurm.nodes
    # one ring of fast links: 0 - 2 - 1 - 3 - 0
    run = run_on_four_nodes(tmp_path, site(tmp_path, nodes, [(0, 2), (2, 1), (1, 3), (3, 0)]))
    found = decision(run)
    assert found["source"] == "matrix"
    assert found["seconds"] == pytest.approx(found["slurm_order_seconds"] / 10)
    assert nodes_by_rank(run) == found["order"]
    ring = [nodes.index(node) for node in found["order"]]
    assert ring != [0, 1, 2, 3]
    steps = {frozenset(pair) for pair in zip(ring, [*ring[1:], ring[0]], strict=True)}
    assert steps == {frozenset(pair) for pair in [(0, 2), (2, 1), (1, 3), (3, 0)]}


def test_without_matrix_and_topology_the_order_is_slurms_and_the_record_says_so(slurm: Cluster, tmp_path: Path) -> None:
    run = run_on_four_nodes(tmp_path, site(tmp_path, slurm.nodes, None))
    assert decision(run)["source"] == "slurm"
    assert "no measured matrix" in decision(run)["why"]
    assert nodes_by_rank(run) == slurm.nodes[:4]


def test_placement_that_fails_leaves_slurms_order_and_the_job_succeeds(slurm: Cluster, tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(Path(QUICKSTART).read_text())
    (tmp_path / "trainer.py").write_text(TRAINER)
    own = f"backend={{name: deepspeed, script: {tmp_path / 'trainer.py'}}}"
    rendered = llmlaunch(
        tmp_path, "render", "recipe.yaml", "nodes=4", "cluster=cpu-x1", f"python={sys.executable}", own, "-o", "run"
    )
    assert rendered.returncode == 0, rendered.stderr
    run = tmp_path / "run"
    (run / "placement.json").write_text('{"schema": 1, "layout": {"surprise": 1}, "bytes": {}}')
    assert slurm.run(run, "job.sbatch") == "0:0"
    assert decision(run)["why"].startswith("placing failed")
    assert nodes_by_rank(run) == slurm.nodes[:4]


def test_the_network_is_measured_in_an_allocation_and_the_next_job_is_placed_by_it(
    slurm: Cluster, tmp_path: Path
) -> None:
    site(tmp_path, slurm.nodes, None)
    doctor = f"{sys.executable} -m llmlaunch doctor --network --message-mib 1 --save ./site.yaml"
    on_four = ("--nodes=4", "--ntasks-per-node=1", "--output=doctor.out")
    assert slurm.run(tmp_path, *on_four, f"--wrap={doctor}") == "0:0", (tmp_path / "doctor.out").read_text()
    saved = json.loads((tmp_path / "site.links.json").read_text())
    assert saved["nodes"] == slurm.nodes[:4]
    assert saved["measured"]["devices_per_node"] == 1
    assert decision(run_on_four_nodes(tmp_path, "./site.yaml"))["source"] == "matrix"


@pytest.fixture
def switched(slurm_packages: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """Four nodes under two switches: the first and third, the second and fourth."""
    cluster = new_cluster({"CPUS": "4", "SWITCHES": "2"})
    try:
        cluster.do("up", "4")
        monkeypatch.setenv("SLURM_CONF", str(cluster.conf))
        yield cluster
    finally:
        throw_away(cluster)


def test_without_a_matrix_slurms_own_topology_decides(switched: Cluster, tmp_path: Path) -> None:
    """A ring must pass from one switch to the other and back: SLURM's order does so twice each way."""
    nodes = switched.nodes
    run = run_on_four_nodes(tmp_path, site(tmp_path, nodes, None), "cluster.nodes_per_switch=2")
    assert "#SBATCH --switches=2\n" in (run / "job.sbatch").read_text()
    found = decision(run)
    assert found["source"] == "topology"
    assert nodes_by_rank(run) == found["order"]
    ring = [nodes.index(node) % 2 for node in found["order"]]
    assert sum(a != b for a, b in zip(ring, [*ring[1:], ring[0]], strict=True)) == 2
    assert "over fewer slow links" in found["why"]
