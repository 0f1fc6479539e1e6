"""A training that fails starts again in the same allocation, and goes back to the queue when nodes run out.

SLURM takes as long to notice a lost node as it does by default, so that nothing here can wait for its word.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import pytest
from one_machine import wait_until
from person import TRIED, Person, interpreter
from training import SLOW_SAVER, Training, slow_saver, submit

from support.side_by_side import Story, side_by_side
from support.soak import SOAK

pytestmark = pytest.mark.slurm

SETTINGS = {"NODE_SECONDS": "300"}  # SLURM's default
TOGETHER = ("--together", "--save-interval", 5)
# The shipped trainer is named on the command line; without `make soak` one that needs no torch trains in its place.
STANDS_IN = f"""case "$1" in */trainer/train.py)
  shift
  set -- {SLOW_SAVER} --together --step-seconds 0.5 "$@"
esac"""


def lose(person: Person, training: Training) -> str:
    """Cut the power of a node that trains, not of the one with the batch script; its name."""
    here = person.ask("squeue", "-h", "-j", training.job, "-o", "%B").strip()
    lost = next(str(rank["node"]) for rank in training.ranks("0") if rank["node"] != here)
    person.cluster.do("kill-node", person.cluster.number(lost))
    return lost


def processes_of(person: Person, node: str) -> list[psutil.Process]:
    """All of a node whose processes have a namespace of their own."""
    (first,) = psutil.Process(person.cluster.pid(f"node.{node}")).children()
    place = namespace(first)
    return [process for process in psutil.process_iter() if namespace(process) == place]


def namespace(process: psutil.Process) -> str:
    try:
        return str(Path(f"/proc/{process.pid}/ns/pid").readlink())
    except OSError:
        return ""


def act_on(processes: Sequence[psutil.Process], act: Callable[[psutil.Process], None]) -> None:
    """Some of them may have ended since they were listed."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            act(process)


def untried(folder: Path) -> str:
    return f"python={interpreter(folder / 'python', first=TRIED)}"


def is_the_same_job(training: Training) -> bool:
    return "Restarts=0 " in training.person.ask("scontrol", "show", "job", training.job)


def a_spare_node_replaces_a_lost_one_before_and_after_slurm_notices(person: Person, folder: Path) -> None:
    """SLURM would end the job, if it had the lost node still."""
    words = ("nodes=2", "spare_nodes=1", untried(folder), only_on(person, range(3)))
    training = slow_saver(person, folder, *words, steps=100_000, step_seconds=0.5, options=TOGETHER)
    training.wait_for_step(2)
    lost = lose(person, training)
    goes_on_without(training, lost)
    assert "down" not in person.ask("sinfo", "-h", "-N", "-n", lost, "-o", "%T")
    person.ask("scontrol", "update", f"NodeName={lost}", "State=DOWN", "Reason=lost")
    training.wait_for_step(max(training.steps("1")) + 4, "1")
    assert is_the_same_job(training)
    person.ask("scancel", training.job)


def a_spare_node_replaces_a_frozen_one_which_saves_nothing_when_it_thaws(person: Person, folder: Path) -> None:
    words = ("nodes=2", "spare_nodes=1", untried(folder), only_on(person, range(8, 11)))
    training = slow_saver(person, folder, *words, steps=100_000, step_seconds=0.5, options=TOGETHER)
    training.wait_for_step(2)
    here = person.ask("squeue", "-h", "-j", training.job, "-o", "%B").strip()
    (frozen,) = {*training.of_attempt("0", "attempt.json")["nodes"]} - {here}
    processes = processes_of(person, frozen)
    trainers = [process for process in processes if "slow_saver.py" in " ".join(process.cmdline())]
    act_on(processes, psutil.Process.suspend)
    try:
        goes_on_without(training, frozen)
    finally:
        act_on(processes, psutil.Process.resume)
    wait_until(lambda: not any(map(psutil.Process.is_running, trainers)), "the trainers of the node are gone", 120)
    assert not (training.checkpoints / f".told-{training.attempt('0')}").exists()
    assert person.llmlaunch("cancel", str(training.run)).returncode == 0


def goes_on_without(training: Training, lost: str) -> None:
    """The node is lost; a spare one takes its place in the same allocation."""
    lost_at = time.time()
    first = set(training.of_attempt("0", "attempt.json")["nodes"])
    training.wait_for_step(1, "1")
    print(f"a new step {time.time() - lost_at:.0f} s after the node was lost")
    training.wait(lambda it: it.of_attempt("1", "attempt.json"), "the second attempt is written down")
    assert is_the_same_job(training)
    status, second = training.status("0"), training.of_attempt("1", "attempt.json")["nodes"]
    assert (status["cause"]["kind"], status["cause"]["nodes"]) == ("node_fail", [lost])
    assert status["next"]["action"] == "restart"
    assert len(second) == len(first)
    assert first - {lost} < set(second)
    assert lost not in second
    assert "in the same allocation" in training.log()


def without_a_spare_node_the_job_is_requeued(person: Person, folder: Path) -> None:
    """And starts again before SLURM knows of the lost node."""
    words = ("nodes=2", "restart.backoff_seconds=0", only_on(person, range(3, 6)))
    training = slow_saver(person, folder, *words, steps=100_000, step_seconds=0.5, options=TOGETHER)
    training.wait_for_step(2)
    lost = lose(person, training)
    training.wait(lambda it: it.status("0"), "the first attempt has ended")
    assert training.status("0")["next"]["action"] == "requeue"
    training.wait_for_step(1, "1")
    assert not is_the_same_job(training)
    assert lost not in training.of_attempt("1", "attempt.json")["nodes"]
    assert len(training.of_attempt("1", "attempt.json")["nodes"]) == 2
    assert "down" not in person.ask("sinfo", "-h", "-N", "-n", lost, "-o", "%T")
    person.ask("scancel", training.job)


def without_a_spare_node_it_continues_on_fewer_where_the_recipe_allows(person: Person, folder: Path) -> None:
    tiny = "model={num_layers: 2, hidden_size: 64, ffn_hidden_size: 160, num_attention_heads: 4, vocab_size: 256}"
    words = (tiny, "nodes={count: 2, at_least: 1}", "layout.zero_stage=1", "data={mock: true}", "training.steps=100000")
    saved = (f"training.checkpoint_path={folder / 'checkpoints'}", "training.save_interval=4")
    python = interpreter(folder / "python", first="" if SOAK else STANDS_IN)
    saved += (f"python={python}", "training.global_batch_size=64", only_on(person, range(6, 8)))
    training = submit(person, folder, *words, *saved)
    assert "1 node: " in training.said.stdout  # what it would cost
    training.wait_for_step(5)
    lost = lose(person, training)
    training.wait(lambda it: len(it.steps("1")) > 1, "a step on one node")
    assert is_the_same_job(training)
    status, begun = training.status("0"), training.of_attempt("1", "attempt.json")
    assert status["next"]["action"] == "restart"
    assert "on 1 of 2 nodes (nodes.at_least); a step takes " in status["next"]["why"]
    assert begun["layout"] == "nodes/1"
    assert set(begun["nodes"]) == {*training.of_attempt("0", "attempt.json")["nodes"]} - {lost}
    assert not SOAK or f"converting step-{begun['from_step']} of 2 ranks for 1" in training.log("1")
    assert f"resumed after step {begun['from_step']}" in training.log("1")
    batches = [training.read(f"{layout}ds_config.json")["train_batch_size"] for layout in ("", "nodes/1/")]
    assert batches == [64, 64]
    before, after = losses(training, "0"), losses(training, "1")
    assert min(after) == begun["from_step"] + 1
    assert {step: after[step] for step in after if step in before} == pytest.approx(
        {step: before[step] for step in after if step in before}, abs=2e-3
    )
    assert training.phase()["layout"] == "nodes/1"
    assert person.llmlaunch("cancel", str(training.run)).returncode == 0


def losses(training: Training, attempt: str) -> dict[int, float]:
    lines = re.findall(r"^\[rank\d+\]: step (\d+)/\d+ \| loss ([\d.]+)", training.log(attempt), re.MULTILINE)
    return {int(step): float(loss) for step, loss in lines}


def only_on(person: Person, numbers: range) -> str:
    """Leave the nodes of other numbers to the other stories."""
    nodes = person.cluster.nodes
    return "slurm.exclude=" + ",".join(node for number, node in enumerate(nodes) if number not in numbers)


def begun(story: Story, person: Person) -> None:
    story(person, person.folder(story.__name__))


test_same_allocation = side_by_side(
    a_spare_node_replaces_a_lost_one_before_and_after_slurm_notices,
    a_spare_node_replaces_a_frozen_one_which_saves_nothing_when_it_thaws,
    without_a_spare_node_the_job_is_requeued,
    without_a_spare_node_it_continues_on_fewer_where_the_recipe_allows,
    tell=begun,
    sites=["root-enforced"],
)
