"""What ended a job on real SLURM, and what follows: a measurement, another layout or node, a restart, or the end."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from one_machine import wait_until
from person import TRIED, Person, interpreter
from training import HERE, SLOW_SAVER, Training, backend, submit

from llmlaunch.node.preflight import read_marker
from llmlaunch.rundir.rank_records import rank_records
from llmlaunch.rundir.stack_files import ranks_stacks
from llmlaunch.units import GIB
from support.side_by_side import side_by_side

pytestmark = pytest.mark.slurm

FLOOR_SECONDS = 5  # of the watchdog
# A two-node job of one process each, since the machine under all nodes has few cores.
TWO_NODES = ("nodes=2", "training.steps=6")
SLEEPS = "import time\ntime.sleep(600)\n"
FAULTY = """
import os
if os.environ["RANK"] == "1" and len(os.listdir(os.environ["LLMLAUNCH_RUN_DIR"] + "/attempts")) == 1:
    print("Traceback (most recent call last):\\nRuntimeError: No CUDA GPUs are available")
    raise SystemExit(1)
"""
# Makes and saves a step; where it is told to it fails, and the next time makes one more.
SAVES = """
import os, sys, time
from pathlib import Path
if os.environ["RANK"] == "0":
    folder = Path(sys.argv[1])
    folder.mkdir(exist_ok=True)
    latest = folder / "latest"
    step = 1 + (int(latest.read_text().rpartition("-")[2]) if latest.exists() else 0)
    latest.write_text(f"step-{step}")
    print(f"step {step}/6 | loss 1.0 | 0.50 s/step | 1000 tokens/s", flush=True)
    while not (folder / "fail").exists():
        time.sleep(0.1)
    (folder / "fail").unlink()
    latest.unlink()
    raise SystemExit(3)
time.sleep(600)
"""
# The first line of the interpreter of a training environment that is broken on one node.
BROKEN = """\
case "$SLURMD_NODENAME $*" in "{broken} "*trainer/preflight.py*)
  echo "RuntimeError: CUDA unknown error" >&2
  exit 1
esac
"""


def own(person: Person, text: str, *words: str, name: str = "own") -> Training:
    """A two-node job of a trainer of our own; its argument is the folder of its checkpoints."""
    folder = person.folder(name)
    (folder / "trainer.py").write_text(text)
    return submit(person, folder, *TWO_NODES, backend(folder / "trainer.py", folder / "checkpoints"), *words)


def saving(person: Person, every: int, name: str = "own") -> tuple[str, ...]:
    """Words with which a job comes back soon."""
    path = person.home / name / "checkpoints"
    return (
        f"training.checkpoint_path={path}",
        f"training.save_interval={every}",
        "restart={backoff_seconds: 1, within: queue}",
    )


def a_lost_node_is_excluded_until_a_person_reinstates_it(person: Person) -> None:
    """The node is the batch host, so the job is lost with it and nobody writes a verdict: SLURM's own word counts."""
    training = own(person, SLEEPS, "slurm.no-requeue=true", "slurm.exclusive=true")
    training.wait(lambda it: len(it.ranks("0")) == 2, "both ranks have started")
    lost = person.ask("squeue", "-h", "-j", training.job, "-o", "%B").strip()
    cluster = person.cluster
    number = cluster.number(lost)
    try:
        cluster.do("kill-node", number)
        training.wait_for_end()  # SLURM has noticed
        training.wait(lambda it: it.phase()["phase"] == "failed", "the job has failed")
        assert f"the node failed ({lost})" in training.phase()["reason"]
        assert not training.status()
    finally:
        cluster.do("start-node", number)
        up = ("sinfo", "-h", "-n", lost, "-p", "train", "-o", "%t")
        wait_until(lambda: cluster.ask(*up).strip() in ("idle", "mix", "alloc"), "the node is up again")

    following = own(person, SLEEPS, name="next")
    assert f"{lost} left out until" in following.said.stderr
    assert "SLURM says NODE_FAIL" in following.said.stderr
    assert f"ExcNodeList={lost}" in person.ask("scontrol", "show", "job", following.job)
    assert "1 failure forgiven" in person.llmlaunch("nodes", "--forgive", lost, code=0).stderr
    assert person.json("nodes")["nodes"] == []
    person.ask("scancel", following.job)


def a_vanished_checkpoint_ends_the_job_until_a_person_resumes_from_an_older_one(person: Person) -> None:
    training = own(person, SAVES, *saving(person, 2))
    training.wait(lambda it: it.of_attempt("0", "progress.json").get("tracker_step"), "step 1 is seen saved")
    (training.checkpoints / "fail").touch()
    training.wait(lambda it: it.status("1"), "the next attempt has ended")
    said = training.phase()
    assert (said["phase"], said["cause"]["kind"]) == ("failed", "checkpoint")
    assert f"{training.checkpoints}/latest names no checkpoint, but attempt" in said["reason"]
    assert f"llmlaunch resume {training.run} --from-older" in said["reason"]
    assert not list(training.run.glob("logs/*.1.node*.log"))  # nothing was trained

    person.llmlaunch("resume", training.run, "--from-older", code=0)
    training.wait(lambda it: it.of_attempt("0", "progress.json").get("tracker_step"), "it trains again")
    assert not (training.run / "from_older").exists()
    person.ask("scancel", training.job)


def the_next_job_of_a_chain_excludes_a_faulty_node(person: Person) -> None:
    """It is updated while it waits."""
    training = own(person, FAULTY, *saving(person, 2), "restart.by=chain", "restart.times=2")
    training.wait(lambda it: len(it.attempts()) == 2, "it started again")
    job, _, number = training.attempts()[1].rpartition(".")
    again = training.run / "attempts" / f"{job}.{number}"
    training.wait(lambda _: len(rank_records(again)) == 2, "both ranks have begun")
    first = training.status("0")
    assert (first["cause"]["kind"], first["cause"]["sick"], first["next"]["action"]) == ("driver", True, "chain")
    faulty = first["cause"]["node"]
    assert faulty not in {record["node"] for record in rank_records(again)}
    assert f"{faulty} at fault: left out when job {job} starts" in training.log("0")
    assert job != training.job


def watched(person: Person, trainer: Path, *arguments: object, words: tuple[str, ...]) -> Training:
    """A training whose steps the watchdog waits for."""
    watchdog = f"watchdog={{floor_seconds: {FLOOR_SECONDS}, first_step_seconds: 300}}"
    more = (*saving(person, 10, "."), watchdog, 'slurm.time="00:10:00"', *words)
    return submit(person, person.home, backend(trainer, *arguments), *more)


def a_hang_is_detected_explained_and_ended_and_training_restarts(person: Person) -> None:
    training = watched(
        person, HERE / "hangs_once.py", person.home / "checkpoints", 30, words=("nodes=2", "training.steps=30")
    )
    training.wait(lambda it: it.status().get("state") == "succeeded", "succeeded")
    hung = training.of_attempt("0", "progress.json")["hung"]
    assert hung["what"] == "a step"
    assert hung["since_seconds"] >= hung["allowed_seconds"] >= FLOOR_SECONDS
    first, second = (training.run / "attempts" / name for name in training.attempts())
    stacks = ranks_stacks(first)
    assert "line 19 in hangs_here" in stacks[1]
    assert "in waits_for_the_other_ranks" in stacks[0]
    status = training.status("0")
    assert (status["state"], status["cause"]["kind"], status["next"]["action"]) == ("failed", "hung", "requeue")
    assert "in hangs_here (hangs_once.py line 19)" in status["cause"]["line"]
    assert not (second / "stacks").exists()
    progress = training.of_attempt("1", "progress.json")
    assert (progress["step"], progress["steps"], progress["hung"]) == (30, 30, None)
    assert training.of_attempt("1", "attempt.json")["from_step"] == 10


def a_slow_save_is_no_hang_and_the_stop_file_ends_the_job_cleanly(person: Person) -> None:
    arguments = ("--steps", 5000, "--step-seconds", 0.2, "--save", person.home / "checkpoints")
    arguments += ("--save-seconds", 2 * FLOOR_SECONDS, "--save-interval", 20)
    training = watched(person, SLOW_SAVER, *arguments, words=("training.steps=5000",))
    training.wait_for_step(2)
    (attempt,) = (training.run / "attempts").iterdir()
    person.ask("scancel", "--signal=USR2", training.job)
    person.ask("scancel", "--batch", "--signal=USR2", training.job)
    training.wait(lambda _: "in pause" in ranks_stacks(attempt).get(0, ""), "it says where it is")
    training.wait_for_step(24)  # past the first save
    (training.run / "stop").touch()
    training.wait(lambda it: it.status(), "ended")
    assert training.attempts() == [attempt.name]
    status = training.status("0")
    (saved,) = re.findall(r"saved step (\d+) after SIGTERM", training.log())
    assert training.saved_step() == int(saved)
    assert (status["state"], status["next"]["action"], status["saved_step"]) == ("stopped", "end", int(saved))
    assert training.of_attempt("0", "progress.json")["hung"] is None


def a_broken_node_is_named_and_replaced_by_a_spare_one(person: Person) -> None:
    """The one in the middle: the last node is the second of those that train, and its rank says so."""
    first, broken, last = nodes = person.cluster.nodes[:3]
    python = interpreter(person.home / "own-python", first=BROKEN.format(broken=broken) + TRIED)
    words = ("nodes=2", "spare_nodes=1", "preflight=true", "--follow", f"slurm.nodelist='{','.join(nodes)}'")
    saver = backend(SLOW_SAVER, "--steps", 3, "--save", person.home / "saved")
    training = submit(person, person.home, saver, *words, f"python={python}")
    status = training.status()
    assert status["state"] == "succeeded"
    assert {rank["node"]: rank["rank"] for rank in status["ranks"]} == {first: 0, last: 1}
    chosen = training.of_attempt("0", "attempt.json")["preflight"]
    assert chosen["nodes"] == [first, last]
    assert list(chosen["bad"]) == [broken]
    assert training.of_attempt("0", f"causes/{broken}.json")["sick"]
    assert training.of_attempt("0", "attempt.json")["nodes"] == [first, last]
    for node in (first, last):  # the two are tried without the third
        marker = read_marker(training.run / "attempts" / f"{training.job}.0" / "preflight" / f"{node}.jsonl")
        assert marker is not None
        assert marker["stage"] == "reduced"


def after_out_of_memory_the_next_layout_trains_in_the_same_allocation(person: Person) -> None:
    """Of 8, the planned micro-batch, it runs out of memory; of 4, that of the next layout, not: sequences are long, so
    that half a micro-batch leaves memory free."""
    size = ("nodes=2", "training.global_batch_size=64", "training.steps=6", "training.sequence_length=512")
    layouts = ("layout={zero_stage: 0, micro_batch_size: [4, 8]}", "on_oom=fallback", "--follow")
    training = submit(person, person.home, backend(HERE / "picky_trainer.py", "--fits", 4), *size, *layouts)
    assert training.attempts() == [f"{training.job}.0", f"{training.job}.1"]
    first, second = training.status("0"), training.status("1")
    assert (first["state"], first["layout"], first["cause"]["kind"]) == ("failed", "", "oom")
    assert (first["next"]["action"], first["next"]["layout"]) == ("fallback", "fallback/1")
    assert (second["state"], second["layout"]) == ("succeeded", "fallback/1")
    assert training.status() == second
    for words in ("fallback/1", "step 6/6", "attempt 1, rank 0 on {} (stage", "attempt 2, rank 0 on {} (stage"):
        assert words.format(training.ranks("0")[0]["node"]) in training.said.stdout
    said = person.llmlaunch("status", training.run).stdout
    assert "succeeded" in said
    assert "out of memory before, so with fallback/1" in said
    (run,) = person.json("runs")["runs"]
    assert (run["state"], run["attempt"], run["job_id"]) == ("succeeded", f"{training.job}.1", training.job)
    assert person.json("nodes") == {"nodes": [], "suspects": []}
    each_layout_has_its_own_measurements(training)


def each_layout_has_its_own_measurements(training: Training) -> None:
    records = training.person.measurements()
    for attempt, folder, size in ((f"{training.job}.0", "", 8), (f"{training.job}.1", "fallback/1/", 4)):
        mine = [record for record in records if record["attempt"] == attempt and record["peak_kind"] == "resident"]
        assert sorted(record["global_rank"] for record in mine) == [0, 1]
        predicted = training.read(f"{folder}run.json")["predicted_bytes"]
        died = [record for record in records if record["attempt"] == attempt and record["peak_kind"] == "oom"]
        assert [record["micro_batch_size"] for record in died] == ([] if folder else [size, size])
        assert {record["numbers"]["asked_bytes"] for record in died} == (set() if folder else {2 * GIB})
        assert {(r["micro_batch_size"], r["predicted_bytes"]) for r in mine} == {(size, predicted[0])}


test_what_ended_it = side_by_side(
    a_lost_node_is_excluded_until_a_person_reinstates_it,
    the_next_job_of_a_chain_excludes_a_faulty_node,
    a_broken_node_is_named_and_replaced_by_a_spare_one,
    a_vanished_checkpoint_ends_the_job_until_a_person_resumes_from_an_older_one,
    a_hang_is_detected_explained_and_ended_and_training_restarts,
    a_slow_save_is_no_hang_and_the_stop_file_ends_the_job_cleanly,
    after_out_of_memory_the_next_layout_trains_in_the_same_allocation,
)
