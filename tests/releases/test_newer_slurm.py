"""What llmlaunch promises of a job, under the SLURM of newer Debian releases: 24.11 (trixie) and 26.05 (sid).

tests/slurm tells all of it under this machine's own. `python tests/releases/debian.py sid python -m pytest -m slurm`
tells the same under sid's.
"""

from __future__ import annotations

import os
import pwd
from collections.abc import Mapping
from concurrent.futures import Future
from functools import partial

import psutil
import pytest
from newer_site import Site
from one_machine import wait_until
from test_sbatch_options import options_wrongly_said
from training import FAILS_AFTER_SAVING, FAILS_WHEN_TOLD, Training, script, slow_saver, submit

from support.side_by_side import Story, by_name

pytestmark = pytest.mark.releases


def a_job_out_of_time_saves_and_goes_on_from_there(site: Site, home: str) -> None:
    person = site.person(home)
    words = (site.only(*site.common), 'slurm.time="00:07:00"', "restart.save_seconds=5")
    training = slow_saver(person, person.home, *words, steps=2000, save_seconds=1, step_seconds=0.5)
    training.wait_for_step(2)
    # Little more than the warning's time is left: the job is told at one of SLURM's next looks.
    person.ask("scontrol", "update", f"JobId={training.job}", "TimeLimit=2")
    comes_back_from_its_checkpoint(training)


def comes_back_from_its_checkpoint(training: Training) -> None:
    """It was told, saved, and is in the queue again: it trains to its end."""
    training.wait(lambda it: it.status("0"), "the first attempt has ended")
    assert training.status("0")["state"] == "stopped", training.status("0")
    saved = training.saved_step()
    assert f"saved step {saved} after SIGTERM" in training.log("0")
    assert {*training.times_told().values()} == {1}
    training.hurry()
    training.wait(lambda it: it.status("1"), "the second attempt has ended")
    assert f"resumed after step {saved}\n" in training.log("1")
    training.wait_for_end()
    assert training.phase()["phase"] == "succeeded"


def a_job_whose_node_loses_power_goes_on_on_another(site: Site, home: str) -> None:
    person = site.person(home)
    words = ("nodes=2", site.only(*site.cut))
    training = slow_saver(person, person.home, *words, steps=2000, step_seconds=0.5)
    training.wait_for_step(2)
    lost = person.ask("squeue", "-h", "-j", training.job, "-o", "%B").strip()  # where the batch script runs
    person.cluster.do("kill-node", person.cluster.number(lost))
    training.wait(lambda it: len(it.attempts()) == 2, "SLURM has started it again")
    training.hurry()
    training.wait_for_end()
    assert training.phase()["phase"] == "succeeded"
    assert {node["node"] for node in training.status()["nodes"]} == {*site.cut} - {lost}


def a_job_outlives_the_controller_and_comes_back_when_it_is_there_again(site: Site, home: str) -> None:
    """slurmctld is down while a job trains and wants to be requeued."""
    with site.alone(home) as person:
        words = ("restart={times: 1, backoff_seconds: 0, within: queue}",)
        training = script(person, person.home, FAILS_WHEN_TOLD, *words)
        training.wait_for_step(1)
        controller = psutil.Process(person.cluster.pid("slurmctld"))
        controller.terminate()
        controller.wait(120)
        training.wait_for_step(2)
        (training.checkpoints / "fail").touch()
        # From some release between the two on, srun does not end while the controller is away; it is left.
        training.wait(lambda it: "scontrol requeue: " in it.log(), "the job could not be requeued")
        person.cluster.start_controller()
        # SLURM now takes a minute to clean up after the first attempt.
        training.wait(lambda it: "Restarts=1 " in person.ask("scontrol", "show", "job", it.job), "SLURM puts it back")
        person.ask("scancel", training.job)


def a_preempted_job_saves_in_its_grace_time_and_comes_back(site: Site, home: str) -> None:
    person = site.person(home)
    words = (site.only(site.preempted), "slurm.partition=low", "slurm.exclusive=true")
    training = slow_saver(person, person.home, *words, steps=2000, save_seconds=1, step_seconds=0.5)
    training.wait_for_step(2)
    urgent = ("--partition=high", "--exclusive", f"--nodelist={site.preempted}", "--output=/dev/null")
    person.ask("sbatch", *urgent, "--wrap=sleep 1")
    comes_back_from_its_checkpoint(training)


def the_accounting_outlives_the_memory_of_the_controller(site: Site, home: str) -> None:
    """How a job ended is known when the controller has forgotten it: by slurmdbd, which knows who cancelled it, too."""
    with site.alone(home, ACCOUNTING="1") as person:
        fails, waits = (person.folder(name) for name in ("fails", "waits"))
        failed = script(person, fails, "raise SystemExit(7)", "restart=none")
        failed.wait_for_end()
        held = slow_saver(person, waits, "slurm.hold=true", steps=3)
        person.ask("scancel", held.job)

        def sacct(training: Training) -> str:
            return person.ask("sacct", "-X", "-P", "-n", "-j", training.job, "-o", "state,exitcode,submitline")

        first = partial(sacct, failed)
        wait_until(lambda: first().startswith("FAILED|7:0|sbatch "), "sacct knows the first", instead=first)
        wait_until(lambda: sacct(held).startswith(f"CANCELLED by {os.getuid()}|"), "sacct knows the second")
        person.cluster.kill("slurmctld")
        # It knows no job, as MinJobAge after their ends. Killed early, 26.05 has not yet saved the use of the accounts,
        # without which it starts only where it may ignore that (-i).
        person.cluster.start_controller("-c", "-i")
        wait_until(lambda: person.call("scontrol", "ping").returncode == 0, "the controller answers")
        assert failed.phase()["phase"] == "failed"
        said = held.phase()
        assert (said["phase"], said["reason"]) == ("cancelled", f"by {pwd.getpwuid(os.getuid()).pw_name}")


def a_job_that_fails_waits_in_the_queue_and_is_given_up(site: Site, home: str) -> None:
    person = site.person(home)
    once = "restart={times: 1, backoff_seconds: 5, within: queue}"
    training = script(person, person.home, FAILS_AFTER_SAVING, site.only(*site.common), once)
    training.wait(lambda it: it.status("1"), "the second attempt has ended")
    training.wait_for_end()
    assert training.steps() == [1, 2, 3, 4]
    assert training.attempts() == [f"{training.job}.0", f"{training.job}.1"]
    began = (training.run / "attempts" / training.attempts()[1]).stat().st_mtime
    assert began - training.status("0")["ended_at"] >= 4
    assert "Restarts=1 " in person.ask("scontrol", "show", "job", training.job)
    said = training.phase()
    assert said["phase"] == "failed"
    assert "exited with 3" in said["reason"], said


def where_requeueing_is_forbidden_a_chain_of_jobs_goes_on(site: Site, home: str) -> None:
    person = site.person(home)
    words = ("slurm.partition=once", "restart={times: 1, by: chain, within: queue}", site.only(*site.common))
    training = script(person, person.home, FAILS_AFTER_SAVING, *words)
    training.wait(lambda it: len(it.steps()) == 4, "two jobs have trained")
    wait_until(lambda: training.phase()["phase"] == "failed", "the chain is given up", instead=training.phase)
    assert len({attempt.partition(".")[0] for attempt in training.attempts()}) == 2
    assert person.ask("squeue", "-h", "-p", "once", "-t", "pending,running", "-o", "%i") == ""


def a_stopped_run_is_resumed_from_its_checkpoint(site: Site, home: str) -> None:
    person = site.person(home)
    training = slow_saver(person, person.home, site.only(*site.common), steps=2000, step_seconds=0.5)
    training.wait_for_step(2)
    person.ask("touch", str(training.run / "stop"))
    training.wait_for_end()
    assert training.phase()["phase"] == "stopped"
    first, saved = training.job, training.saved_step()
    training.hurry()
    person.llmlaunch("resume", training.run, code=0)
    assert training.job != first
    training.wait_for_end()
    assert f"resumed after step {saved}\n" in training.log("0")
    assert training.phase()["phase"] == "succeeded"


def a_cancelled_job_saves_and_stays_away(site: Site, home: str) -> None:
    person = site.person(home)
    training = slow_saver(person, person.home, site.only(*site.common), steps=2000, save_seconds=1)
    training.wait_for_step(2)
    person.llmlaunch("cancel", training.run, code=0)
    training.wait_for_end()
    assert training.saved_step() >= 2
    assert training.phase()["phase"] == "cancelled"
    assert len(training.attempts()) == 1


def followed(site: Site) -> Training:
    """A run of two nodes that was followed to its end."""

    def train() -> Training:
        person = site.person("followed")
        return slow_saver(person, person.home, "nodes=2", site.only(*site.common), "--follow", steps=4)

    training: Training = site.share("followed", train)
    return training


def a_submitted_job_is_followed_to_its_last_step(site: Site, home: str) -> None:
    training = followed(site)
    assert "Submitting to SLURM" in training.said.stderr
    lines = training.said.stdout.splitlines()
    assert f"Attempt 1 ({training.job}.0) begins on node1, node2" in lines
    assert [line.split()[1] for line in lines if line.startswith("step ")][-1] == "4/4"


def status_and_logs_tell_of_a_job_that_has_ended(site: Site, home: str) -> None:
    training = followed(site)
    said = training.phase()
    assert said["phase"] == "succeeded"  # by its files: SLURM is not asked about a run that has ended
    assert [rank["exit_code"] for rank in training.status()["ranks"]] == [0, 0]
    assert "step 4/4 | loss" in training.person.llmlaunch("logs", training.run, code=0).stdout


def the_peaks_of_both_ranks_are_collected(site: Site, home: str) -> None:
    training = followed(site)
    training.person.llmlaunch("collect", training.run, code=0)
    peaks = {(record["peak_kind"], record["node"]): record["peak_bytes"] for record in training.person.measurements()}
    assert {*peaks} == {(kind, node) for kind in ("host", "resident") for node in site.common}
    assert min(peaks.values()) > 2**20


def a_job_that_waits_tells_its_reason_and_is_cancelled_before_it_begins(site: Site, home: str) -> None:
    person = site.person(home)
    training = slow_saver(person, person.home, "slurm.hold=true", steps=3)
    said = training.phase()
    assert (said["phase"], said["reason"]) == ("pending", "JobHeldUser")
    person.llmlaunch("cancel", training.run, code=0)
    wait_until(lambda: training.phase()["phase"] == "cancelled", "it is cancelled", instead=training.phase)
    assert training.attempts() == []


def a_refused_job_is_told_in_sbatchs_own_words(site: Site, home: str) -> None:
    person = site.person(home)
    refused = submit(person, person.home, "slurm.partition=nowhere", code=4)
    assert "invalid partition" in refused.said.stderr.lower()
    assert (refused.run / "job.sbatch").is_file()


def a_site_describes_itself(site: Site, home: str) -> None:
    """`llmlaunch init --site`: what SLURM's own commands print is read."""
    person = site.person(home)
    person.llmlaunch("init", "--site", "ours", code=0)
    profile = (person.home / "ours.yaml").read_text()
    lines = {line.partition("#")[0].strip() for line in profile.splitlines()}
    drafted = {"base: h100-80gb-x8", "cpus_per_node: 8", "host_memory_gib: 62", "gpu_request: gpus-per-node"}
    assert lines >= {*drafted, "partition: train", "exclusive: true", "mem: 0"}, profile
    assert f"# Cluster llmlaunch, SLURM {site.version}." in profile


def sbatch_has_the_options_that_are_said_of_its_release(site: Site, home: str) -> None:
    """slurm/versions.json, asked of the real one."""
    assert options_wrongly_said(site.cluster) == []


# Those that wait longest begin first.
PROMISES = by_name(
    a_job_outlives_the_controller_and_comes_back_when_it_is_there_again,
    a_job_out_of_time_saves_and_goes_on_from_there,
    a_job_whose_node_loses_power_goes_on_on_another,
    a_preempted_job_saves_in_its_grace_time_and_comes_back,
    a_job_that_fails_waits_in_the_queue_and_is_given_up,
    where_requeueing_is_forbidden_a_chain_of_jobs_goes_on,
    the_accounting_outlives_the_memory_of_the_controller,
    a_stopped_run_is_resumed_from_its_checkpoint,
    a_cancelled_job_saves_and_stays_away,
    a_submitted_job_is_followed_to_its_last_step,
    status_and_logs_tell_of_a_job_that_has_ended,
    the_peaks_of_both_ranks_are_collected,
    a_job_that_waits_tells_its_reason_and_is_cancelled_before_it_begins,
    a_refused_job_is_told_in_sbatchs_own_words,
    a_site_describes_itself,
    sbatch_has_the_options_that_are_said_of_its_release,
)


@pytest.mark.parametrize("suite", ["trixie", "sid"])
@pytest.mark.parametrize("story", PROMISES.values(), ids=PROMISES)
def test_release(stories: Mapping[str, Future[None]], request: pytest.FixtureRequest, suite: str, story: Story) -> None:
    stories[request.node.nodeid].result()
