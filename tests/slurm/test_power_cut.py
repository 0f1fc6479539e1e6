"""A node loses power in mid-training: slurmd, step daemons, node program, monitor and trainers are gone at once, and
what its disk had not yet been told to keep is lost. Every peak that is left on disk is in the store, once.

The jobs share the time in which SLURM notices: one loses one of its two nodes, the other its only one. A node
is a pid namespace, whose end the kernel makes one step; where namespaces are not allowed its processes are killed one
after another. The nodes share this machine's memory, so nothing that was written is really lost: the files of the node
that was cut are shortened to a random length behind the last line that was synced, and end in zeros, as on XFS.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import pytest
from one_machine import IN_QUEUE, Cluster, wait_until
from person import interpreter

from llmlaunch.rundir.attempt import rank_records
from support import judge
from support.chain import LATENCIES, RECIPE, TRAINER, collect_and_export, quick_templates
from support.command_line import data_folders
from support.forked_commands import run_forked
from support.node_rig import build
from support.side_by_side import asked_for

SIDE_BY_SIDE = 3  # repeats that take three of the eleven nodes each
SYNCED = ("start", "gpu_lost", "nvml_stalled", "nvml_back")  # as docs/monitor.md says

pytestmark = [pytest.mark.slurm, pytest.mark.faults]


class Job:
    """A run on some of the cluster's nodes, two GPUs each."""

    def __init__(self, cluster: Cluster, library: Path, place: Path, nodes: list[str]) -> None:
        self.cluster, self.place, self.nodes, self.run = cluster, place, nodes, place / "run"
        place.mkdir()
        for node in nodes:
            self.hold(node, 1)
        scenario = 'export FAKE_NVML_SCENARIO="$FAKE_NVML_PLACE/scenario.$SLURMD_NODENAME"'
        self.python = interpreter(place / "python")
        self.python.write_text(self.python.read_text().replace("\nexec", f"\n{scenario}\nexec"))
        self.environment = {
            **cluster.environment,
            **data_folders(place),
            "LD_LIBRARY_PATH": str(library),
            "FAKE_NVML_PLACE": str(place),
            "FAKE_NVML_SCENARIO": str(place / "scenario"),
            "LLMLAUNCH_TEMPLATES": str(quick_templates(place)),
        }

    def hold(self, node: str, gib: int) -> None:
        """Each rank of the node holds so much; it does once its process is known."""
        pids = {record["local_rank"]: record["program_pid"] for record in self.ranks() if record["node"] == node}
        lines = "".join(f"gpu uuid=GPU-{node}-{index} accounting=1\n" for index in (0, 1))
        lines += "".join(f"proc {index} pid={pid} mem={gib + index}G\n" for index, pid in pids.items())
        path = self.place / f"scenario.{node}"
        path.with_suffix(".new").write_text(lines + LATENCIES)
        path.with_suffix(".new").replace(path)

    def ranks(self) -> list[dict[str, Any]]:
        return [record for attempt in self.run.glob("attempts/*") for record in rank_records(attempt)]

    def submit(self) -> None:
        words = (
            f"nodes={len(self.nodes)}", "cluster={base: h100-80gb-x8, devices_per_node: 2, slurm: {exclusive: true}}",
            "model={base: llama2-7b, num_layers: 4}", f"backend={{name: deepspeed, script: {TRAINER}}}",
            "layout={zero_stage: 2}", "monitor.interval_seconds=0.1", "restart=none", "slurm.no-requeue=true",
            f"python={self.python}", f"slurm.nodelist='{','.join(self.nodes)}'",
        )  # fmt: skip
        done = run_forked(("submit", str(RECIPE), *words, "-o", str(self.run)), self.place, self.environment)
        assert done.returncode == 0, done.stdout + done.stderr

    def train(self) -> None:
        wait_until(lambda: len(self.ranks()) == 2 * len(self.nodes), "all ranks have begun")
        for number, node in enumerate(self.nodes):
            self.hold(node, 40 + 10 * number)
        wait_until(lambda: all(self.seen(node) for node in self.nodes), "the monitors have written it down")

    def seen(self, node: str) -> bool:
        path = self.run / "peaks" / f"{node}.jsonl"
        return path.exists() and any(
            len([pid for gpu in line.get("gpus", []) for pid in gpu["process_peak_bytes"]]) == 2
            for line in judge.lines(path)
        )

    def lose_what_was_not_synced(self, node: str, chance: Random) -> None:
        path = self.run / "peaks" / f"{node}.jsonl"
        text = path.read_bytes()
        kept = max(
            (text.rindex(line) + len(line) for line in text.splitlines(keepends=True) if synced(line)), default=0
        )
        length = chance.randint(kept, len(text))
        path.write_bytes(text[:length] + bytes(chance.randint(0, 4096)))

    def in_queue(self) -> bool:
        job = json.loads((self.run / "submission.json").read_text())["job_id"]
        return bool(self.cluster.ask("squeue", "-h", "-j", job, "-t", IN_QUEUE, "-o", "%T").strip())

    def records(self) -> list[dict[str, Any]]:
        return collect_and_export(self.run, self.environment)


def synced(line: bytes) -> bool:
    return any(f'"event":"{event}"'.encode() in line for event in SYNCED)


@dataclass(frozen=True)
class Cut:
    """One repeat: a job of two nodes that loses one of them, and a job of one node that loses that."""

    repeat: int
    two: Job
    one: Job

    @property
    def lost(self) -> tuple[tuple[Job, str], ...]:
        second = self.repeat % 2  # job.sbatch runs on the first
        return (self.two, self.two.nodes[second]), (self.one, self.one.nodes[0])

    @property
    def jobs(self) -> tuple[Job, Job]:
        return self.two, self.one


def cut_side_by_side(cluster: Cluster, place: Path, repeats: list[int]) -> dict[int, list[str]]:
    """What the judge says of each repeat."""
    each = [cluster.nodes[3 * number : 3 * number + 3] for number in range(len(repeats))]
    library, cuts = build(place / "library"), []
    for repeat, (first, second, third) in zip(repeats, each, strict=True):
        two = Job(cluster, library, place / f"{repeat}-two", [first, second])
        cuts.append(Cut(repeat, two, Job(cluster, library, place / f"{repeat}-one", [third])))
    jobs = [job for cut in cuts for job in cut.jobs]
    for job in jobs:
        job.submit()
    for job in jobs:
        job.train()
    lost = []
    try:
        for cut in cuts:
            for job, node in cut.lost:
                cluster.do("kill-node", cluster.number(node))
                lost.append(node)
                job.lose_what_was_not_synced(node, Random(cut.repeat))
        at_the_cut = {job: judge.on_disk(job.run) for job in jobs}
        wait_until(lambda: not any(job.in_queue() for job in jobs), "SLURM has given the jobs up")
        return {cut.repeat: [said for job in cut.jobs for said in judged(job, at_the_cut[job])] for cut in cuts}
    finally:
        for node in lost:
            cluster.do("start-node", cluster.number(node))
        wait_until(lambda: states(cluster, lost) <= {"idle"}, "the nodes are up again")


def judged(job: Job, at_the_cut: judge.OnDisk) -> list[str]:
    records = job.records()
    said = judge.judge(job.run, at_the_cut, judge.on_disk(job.run), records)
    if len([record for record in records if record["peak_kind"] == "device"]) < 2 * (len(job.nodes) - 1):
        said.append("the ranks of the node that kept its power are missing")
    return said if job.records() == records else [*said, "collecting again changed the store"]


def states(cluster: Cluster, nodes: list[str]) -> set[str]:
    return {cluster.ask("sinfo", "-h", "-n", node, "-p", "train", "-o", "%t").strip() for node in nodes}


@pytest.fixture(scope="module")
def said(
    slurm_cluster: Cluster, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[int], list[str]]:
    """What the judge says of a repeat; those that fit on the cluster's nodes are done with it."""
    asked = sorted(parameters["repeat"] for parameters in asked_for(request, "said").values())
    known: dict[int, list[str]] = {}

    def of(repeat: int) -> list[str]:
        if repeat not in known:
            place = tmp_path_factory.mktemp("power")
            begin = asked.index(repeat)
            known.update(cut_side_by_side(slurm_cluster, place, asked[begin : begin + SIDE_BY_SIDE]))
        return known[repeat]

    return of


def test_a_power_cut_loses_no_peak_that_was_on_disk(said: Callable[[int], list[str]], repeat: int) -> None:
    assert said(repeat) == []
