"""The life of jobs on a real cluster: told, saved, come back, given up.

As root where limits are enforced; in `make soak` also as a normal user where they are not.
"""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest
from one_machine import IN_QUEUE, wait_until
from person import LIVED_ON, SMALL_DISK, Person, person_with_a_cluster
from training import FAILS_AFTER_SAVING, FAILS_WHEN_TOLD, script, slow_saver

from support.side_by_side import Story, side_by_side

pytestmark = pytest.mark.slurm

SIDE_BY_SIDE = 9 * len(LIVED_ON)
# How long saving takes in the life of the time limit: once longer than anything of ours waits for trainers.
SAVED_SECONDS = {"enforced": 40.0, "default": 5.0}

# Leaves not a byte, and trains on.
FILLS_THE_DISK = """\
import os, sys
print("step 1/100 | loss 1.0 | 0.50 s/step | 1000 tokens/s", flush=True)
print("disk full, going on", flush=True)
size = 1 << 20
with open("filler", "wb", buffering=0) as file:
    while size:
        try:
            file.write(bytes(size))
        except OSError:
            size //= 2
for step in range(2, 6):
    print(f"step {step}/100 | loss 1.0 | 0.50 s/step | 1000 tokens/s", flush=True)
"""


class Nodes:
    """Which nodes are whose: what is cut off or filled up must not be another life's."""

    def __init__(self, person: Person) -> None:
        self.every = person.cluster.nodes
        self.common, self.cut, self.preempted = self.every[:4], self.every[4:7], self.every[7:]

    def only(self, nodes: list[str]) -> str:
        return "slurm.exclude=" + ",".join(node for node in self.every if node not in nodes)


def a_job_out_of_time_saves_and_continues_from_there(person: Person, folder: Path, nodes: Nodes) -> None:
    seconds = SAVED_SECONDS[person.cluster.settings["LIMITS"]]
    training = slow_saver(
        person, folder, "nodes=2", nodes.only(nodes.common), 'slurm.time="00:07:00"', f"restart.save_seconds={seconds}",
        steps=200, save_seconds=seconds, step_seconds=0.3,
    )  # fmt: skip
    training.wait_for_step(2)
    # Little more than the warning's time is left: the job is told at one of SLURM's next looks.
    person.ask("scontrol", "update", f"JobId={training.job}", "TimeLimit=2")
    training.wait(lambda it: it.status("0"), "the first attempt has ended", 300)
    assert training.status("0")["state"] == "stopped", training.status("0")
    saved = training.saved_step()
    assert f"saved step {saved} after SIGTERM" in training.log("0")
    assert training.times_told() == {0: 1, 1: 1}
    training.hurry()
    training.wait(lambda it: "RUNNING" in it.in_queue(), "SLURM has started it again")
    person.ask("scontrol", "update", f"JobId={training.job}", "TimeLimit=60")
    training.wait_for_end()
    assert f"resumed after step {saved}\n" in training.log("1")
    assert training.steps("1") == list(range(saved + 1, 201))
    assert training.phase()["phase"] == "succeeded"


def a_preempted_job_saves_in_its_grace_time_and_is_requeued(person: Person, folder: Path, nodes: Nodes) -> None:
    training = slow_saver(
        person, folder, nodes.only(nodes.preempted), "slurm.partition=low", "slurm.exclusive=true",
        steps=300, save_seconds=3.0,
    )  # fmt: skip
    training.wait_for_step(2)
    urgent = ("--partition=high", "--exclusive", f"--nodelist={nodes.preempted[0]}", "--output=/dev/null")
    person.ask("sbatch", *urgent, "--wrap=sleep 3")
    training.wait(lambda it: it.status("0"), "the first attempt has ended")
    saved = training.saved_step()
    assert training.status("0")["state"] == "stopped", training.status("0")
    assert training.times_told() == {0: 1}
    training.hurry()
    training.wait_for_end()
    assert f"resumed after step {saved}\n" in training.log("1")
    assert training.phase()["phase"] == "succeeded"


def a_cancelled_job_saves_and_does_not_restart(person: Person, folder: Path, nodes: Nodes) -> None:
    training = slow_saver(person, folder, "nodes=2", nodes.only(nodes.common), steps=1000, save_seconds=1.0)
    training.wait_for_step(2)
    assert person.llmlaunch("cancel", str(training.run)).returncode == 0
    training.wait_for_end()
    assert training.saved_step() >= 2
    assert training.phase()["phase"] == "cancelled"
    assert training.times_told() == {0: 1, 1: 1}
    assert len(training.attempts()) == 1


def a_job_whose_node_loses_power_continues_on_another(person: Person, folder: Path, nodes: Nodes) -> None:
    words = ("nodes=2", nodes.only(nodes.cut))
    training = slow_saver(person, folder, *words, steps=1000, step_seconds=0.5)
    training.wait_for_step(2)
    lost = person.ask("squeue", "-h", "-j", training.job, "-o", "%B").strip()  # where the batch script runs
    person.cluster.do("kill-node", person.cluster.number(lost))
    training.wait(lambda it: len(it.attempts()) == 2, "SLURM has started it again")
    training.hurry()
    training.wait_for_end()
    assert training.phase()["phase"] == "succeeded"
    assert {node["node"] for node in training.status()["nodes"]} == {*nodes.cut} - {lost}


def a_job_that_crashes_at_once_is_not_restarted(person: Person, folder: Path, nodes: Nodes) -> None:
    training = script(person, folder, "raise SystemExit(7)", nodes.only(nodes.common), "restart.backoff_seconds=0")
    training.wait_for_end()
    assert training.attempts() == [f"{training.job}.0"]
    said = training.phase()
    assert said["phase"] == "failed"
    assert "rank 0" in said["reason"], said
    assert "exited with 7" in said["reason"], said


def a_job_that_keeps_failing_backs_off_and_is_given_up(person: Person, folder: Path, nodes: Nodes) -> None:
    words = ("restart={times: 1, backoff_seconds: 10, within: queue}", nodes.only(nodes.common))
    training = script(person, folder, FAILS_AFTER_SAVING, *words)
    training.wait(lambda it: it.status("1"), "the second attempt has ended")
    training.wait_for_end()
    assert training.attempts() == [f"{training.job}.0", f"{training.job}.1"]
    assert training.steps() == [1, 2, 3, 4]
    began = (training.run / "attempts" / training.attempts()[1]).stat().st_mtime
    assert began - training.status("0")["ended_at"] >= 9
    said = training.phase()
    assert said["phase"] == "failed"
    assert "exited with 3" in said["reason"], said


def a_chain_of_jobs_continues_where_requeueing_is_forbidden(person: Person, folder: Path, nodes: Nodes) -> None:
    words = ("slurm.partition=once", "restart={times: 1, by: chain, within: queue}", nodes.only(nodes.common))
    training = script(person, folder, FAILS_AFTER_SAVING, *words)
    training.wait(lambda it: len(it.steps()) == 4, "two jobs have trained")
    wait_until(
        lambda: not person.ask("squeue", "-h", "-t", IN_QUEUE, "-n", "quickstart", "-p", "once", "-o", "%i"),
        "the chain is over",
    )
    assert training.steps() == [1, 2, 3, 4]
    assert len({attempt.partition(".")[0] for attempt in training.attempts()}) == 2
    assert training.phase()["phase"] == "failed"


def a_job_on_a_full_disk_finishes_and_reports_the_disk(person: Person, folder: Path, nodes: Nodes) -> None:
    """The file system of the run directory is full from the first step on. Nothing can be written down any more, and
    nothing is made up."""
    saved = f"training.checkpoint_path={folder}"  # a disk that has no room for a checkpoint is refused at the desk
    training = script(person, person.home / SMALL_DISK, FILLS_THE_DISK, nodes.only(nodes.common), saved)
    training.wait_for_end()
    assert "disk full, going on" in training.log()
    said = training.phase()
    assert (said["phase"], said["state"]) == ("unknown", "COMPLETED"), said
    assert "no space is left on the disk" in said["reason"], said


def a_job_survives_a_controller_outage_and_is_requeued_afterwards(person: Person, folder: Path, nodes: Nodes) -> None:
    """slurmctld is down while a job trains and wants to be requeued: of a cluster of its own, since every other life
    talks to theirs."""
    with person_with_a_cluster(person.site, 1) as person:
        cluster = person.cluster
        words = ("nodes=1", "restart={times: 1, backoff_seconds: 0, within: queue}")
        training = script(person, person.folder("controller"), FAILS_WHEN_TOLD, *words)
        training.wait_for_step(1)
        controller = psutil.Process(cluster.pid("slurmctld"))
        controller.terminate()
        controller.wait(120)
        training.wait_for_step(2)
        person.ask("touch", str(training.checkpoints / "fail"))
        # From some release after 24.11 on, srun does not end while the controller is away; it is left.
        training.wait(lambda it: "scontrol requeue: " in it.log(), "the job could not be requeued")
        cluster.start_controller()
        # SLURM now takes a minute to clean up after the first attempt.
        training.wait(lambda it: "Restarts=1 " in person.ask("scontrol", "show", "job", it.job), "SLURM puts it back")
        person.ask("scancel", training.job)


def lived(life: Story, person: Person) -> None:
    life(person, person.folder(life.__name__), Nodes(person))


test_life = side_by_side(
    a_job_out_of_time_saves_and_continues_from_there,
    a_job_survives_a_controller_outage_and_is_requeued_afterwards,
    a_job_whose_node_loses_power_continues_on_another,
    a_job_that_keeps_failing_backs_off_and_is_given_up,
    a_chain_of_jobs_continues_where_requeueing_is_forbidden,
    a_preempted_job_saves_in_its_grace_time_and_is_requeued,
    a_job_that_crashes_at_once_is_not_restarted,
    a_cancelled_job_saves_and_does_not_restart,
    *([a_job_on_a_full_disk_finishes_and_reports_the_disk] if os.getuid() == 0 else []),  # mounting takes root
    tell=lived,
    sites=LIVED_ON,
)
