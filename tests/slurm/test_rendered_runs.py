"""Rendered run directories on real SLURM: submitted by llmlaunch and by bare sbatch, on two nodes."""

from __future__ import annotations

import pytest
from one_machine import Cluster
from person import Person
from training import QUICKSTART, Training, backend, submit

pytestmark = pytest.mark.slurm

# One process a node: the machine under all nodes has few cores.
TWO_NODES = ("nodes=2", "training.steps=6")
TINY = "model={num_layers: 2, hidden_size: 64, ffn_hidden_size: 160, num_attention_heads: 4, vocab_size: 256}"
# Trains nothing, and holds as much as torch alone.
LARGE = """\
import os
held = b"x" * 2**28
if os.environ["RANK"] == "0":
    for step in range(1, 7):
        print(f"step {step}/6 | loss {1 / step:.4f} | 0.10 s/step | 1000 tokens/s", flush=True)
"""
FAILS_ON_RANK_1 = "import os, sys, time\nsys.exit(7) if os.environ['RANK'] == '1' else time.sleep(300)\n"
SLEEPS = "import time\ntime.sleep(600)\n"


def own(person: Person, text: str) -> str:
    (person.home / "trainer.py").write_text(text)
    return backend(person.home / "trainer.py")


def assert_both_nodes_are_measured(person: Person) -> None:
    measurements = person.measurements()
    assert len({r["node"] for r in measurements if r["peak_kind"] == "host"}) == 2
    records = [r for r in measurements if r["peak_kind"] != "host"]
    assert sorted(r["global_rank"] for r in records) == [0, 1]
    assert len({r["node"] for r in records}) == 2
    for record in records:
        assert record["peak_kind"] == "resident"
        assert record["peak_bytes"] > 2**27
        assert record["world_size"] == 2


def test_a_small_quickstart_trains_on_two_nodes_and_both_peaks_are_collected(person: Person) -> None:
    training = submit(person, person.home, *TWO_NODES, TINY, "--follow")
    assert "Submitting to SLURM" in training.said.stderr
    assert "step 6/6 | loss" in training.said.stdout
    status = training.status()
    assert status["state"] == "succeeded"
    assert sorted(node["node"] for node in status["nodes"]) == sorted(person.cluster.nodes[:2])
    progress = training.of_attempt("0", "progress.json")
    assert (progress["step"], progress["steps"], progress["hung"]) == (6, 6, None)
    assert_both_nodes_are_measured(person)
    assert "succeeded" in person.llmlaunch("status", "run").stdout


def test_bare_sbatch_of_a_rendered_directory_behaves_the_same(slurm: Cluster, person: Person) -> None:
    run = person.home / "run"
    words = (*TWO_NODES, "cluster=cpu-x1", f"python={person.python}", own(person, LARGE))
    training = Training(person, run, person.llmlaunch("render", QUICKSTART, *words, "-o", run, code=0))
    ended = slurm.run(run, "job.sbatch")
    assert ended == "0:0", training.log()
    assert "step 6/6 | loss" in training.log()
    assert training.status()["state"] == "succeeded"
    person.llmlaunch("collect", "run", code=0)
    assert_both_nodes_are_measured(person)


def test_a_trainer_that_fails_fails_the_job_and_its_own_code_is_kept(person: Person) -> None:
    training = submit(person, person.home, *TWO_NODES, own(person, FAILS_ON_RANK_1), "--follow", code=1)
    status = training.status()
    assert status["state"] == "failed"
    assert {rank["rank"]: rank["exit_code"] for rank in status["ranks"]}[1] == 7
    assert "failed" in person.llmlaunch("status", "run").stdout


def test_a_refused_job_is_exit_code_4_with_sbatchs_own_words_and_the_directory_kept(person: Person) -> None:
    refused = submit(person, person.home, *TWO_NODES, "slurm.partition=nowhere", code=4)
    assert "invalid partition" in refused.said.stderr.lower()
    assert "Traceback" not in refused.said.stderr
    assert (refused.run / "job.sbatch").is_file()


def test_a_cancelled_job_is_cancelled_everywhere(person: Person) -> None:
    training = submit(person, person.home, *TWO_NODES, own(person, SLEEPS))
    person.llmlaunch("cancel", "run", code=0)
    training.wait(lambda it: "cancelled" in it.phase()["phase"], "it is cancelled")
