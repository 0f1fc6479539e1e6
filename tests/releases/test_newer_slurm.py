"""Each command once under the SLURM of Debian sid: 26.05.

tests/slurm tells whole lives of jobs under this machine's own. `python tests/releases/debian.py sid python -m pytest
-m slurm` tells the same under sid's, and `make soak` does so under sid's and trixie's (24.11).
"""

from __future__ import annotations

import shlex
import sys

import pytest
from newer_site import Site
from one_machine import wait_until
from test_sbatch_options import options_wrongly_listed
from training import SLOW_SAVER, slow_saver

from support.side_by_side import side_by_side

pytestmark = pytest.mark.releases


def submit_follow_status_logs_report_and_collect(site: Site, home: str) -> None:
    person = site.person(home)
    training = slow_saver(person, person.home, "nodes=2", "--follow", steps=4)
    lines = training.said.stdout.splitlines()
    nodes = sorted(rank["node"] for rank in training.status()["ranks"])
    assert f"Attempt 1 ({training.job}.0) begins on {', '.join(nodes)}" in lines
    assert [line.split()[1] for line in lines if line.startswith("step ")][-1] == "4/4"
    assert training.phase()["phase"] == "succeeded"
    assert "step 4/4 | loss" in person.llmlaunch("logs", training.run, code=0).stdout
    assert "succeeded" in person.llmlaunch("report", training.run, code=0).stdout
    person.llmlaunch("collect", training.run, code=0)
    peaks = {(record["peak_kind"], record["node"]): record["peak_bytes"] for record in person.measurements()}
    assert {*peaks} == {(kind, node) for kind in ("host", "resident") for node in nodes}
    assert min(peaks.values()) > 2**20


def cancel_saves_and_resume_continues_from_there(site: Site, home: str) -> None:
    person = site.person(home)
    training = slow_saver(person, person.home, "slurm.hold=true", steps=2000, save_seconds=1)
    said = training.phase()
    assert (said["phase"], said["reason"]) == ("pending", "JobHeldUser")
    person.ask("scontrol", "release", training.job)
    training.wait_for_step(2)
    person.llmlaunch("cancel", training.run, code=0)
    training.wait_for_end()
    first, saved = training.job, training.saved_step()
    assert training.phase()["phase"] == "cancelled"
    training.hurry()
    person.llmlaunch("resume", training.run, code=0)
    assert training.job != first
    person.ask("scontrol", "release", training.job)
    training.wait_for_end()
    assert f"resumed after step {saved}\n" in training.log("0")
    assert training.phase()["phase"] == "succeeded"


def observe_measures_a_script_as_it_is(site: Site, home: str) -> None:
    person = site.person(home)
    person.llmlaunch("observe", "--write-node-pyz", person.home / "node.pyz", code=0)
    observe = f"{shlex.quote(sys.executable)} {person.home}/node.pyz observe --"
    trainer = f"{person.python} {person.give(SLOW_SAVER)} --steps 3 --save saved"
    (person.home / "job.sbatch").write_text(f"#!/bin/bash\n{observe} {trainer}\n")
    job = person.ask("sbatch", "--parsable", "job.sbatch").strip()
    wait_until(lambda: not person.ask("squeue", "-h", "-j", job, "-t", "PD,R,CG", "-o", "%i"), "the job has ended")
    assert "(succeeded): collected" in person.llmlaunch("collect", "observed", code=0).stdout


def init_describes_the_site(site: Site, home: str) -> None:
    """What SLURM's own commands print is read."""
    person = site.person(home)
    person.llmlaunch("init", "--site", "ours", code=0)
    profile = (person.home / "ours.yaml").read_text()
    lines = {line.partition("#")[0].strip() for line in profile.splitlines()}
    drafted = {"base: h100-80gb-x8", "cpus_per_node: 8", "host_memory_gib: 62", "gpu_request: gpus-per-node"}
    assert lines >= {*drafted, "partition: train", "exclusive: true", "mem: 0"}, profile
    assert f"# Cluster llmlaunch, SLURM {site.version}." in profile


def sbatch_has_the_options_that_versions_json_lists(site: Site, home: str) -> None:
    assert options_wrongly_listed(site.cluster) == []


test_release = side_by_side(
    cancel_saves_and_resume_continues_from_there,
    submit_follow_status_logs_report_and_collect,
    observe_measures_a_script_as_it_is,
    init_describes_the_site,
    sbatch_has_the_options_that_versions_json_lists,
)
