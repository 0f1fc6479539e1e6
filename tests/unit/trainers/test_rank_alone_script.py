"""The script that runs a training script as one rank of a job whose others do not exist (trainers/rank_alone.py)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from llmlaunch.trainers import RANK_ALONE

# Buffers begin as NaN, as memory may that nobody has written to.
SCRIPT = """
import json, os, sys
import torch, torch.distributed as dist
dist.init_process_group("nccl", init_method="env://", timeout=None)
pair = dist.new_group([5, 7], backend="gloo")
unset = lambda *shape: torch.full(shape, float("nan"))
mine = torch.tensor([1.0, 2.0])
gathered, lists, shard, one, both = unset(16), [unset(2) for _ in range(8)], unset(2), unset(2), unset(5)
dist.all_gather_into_tensor(gathered, mine)
dist.all_gather(lists, mine)
dist.reduce_scatter_tensor(shard, torch.arange(16.0))
dist.all_to_all_single(one, mine, group=pair)
dist.all_to_all_single(both, mine, [3, 2], [1, 1], group=pair)
received, waited, sizes = unset(1000), unset(1000), torch.tensor([7, 7])
dist.recv(received, src=4)
dist.batch_isend_irecv([dist.P2POp(dist.irecv, waited, 4), dist.P2POp(dist.isend, mine, 6)])[0].wait()
dist.recv(sizes, src=4)
flags = torch.tensor([0, 0, 0])
def build_train_valid_test_data_loaders():
    dist.broadcast(flags, 0)
build_train_valid_test_data_loaders()
other = torch.tensor([0, 0, 0])
dist.broadcast(other, 0)
objects = [None] * 8
dist.all_gather_object(objects, "mine")
dist.barrier()
json.dump({
    "place": [dist.get_rank(), dist.get_world_size(), dist.get_backend(), dist.get_backend(pair)],
    "words": sys.argv[1:], "path": sys.path[0], "name": __name__,
    "gathered": gathered.tolist(), "lists": [one.tolist() for one in lists], "shard": shard.tolist(),
    "one": one.tolist(), "both": both.tolist(),
    "deviations": [received.std().item(), waited.std().item()], "sizes": sizes.tolist(),
    "flags": flags.tolist(), "other": other.tolist(), "objects": objects,
}, open(os.environ["ANSWER"], "w"))
"""


@pytest.fixture(scope="module")
def answer(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    place = tmp_path_factory.mktemp("alone")
    (place / "train.py").write_text(SCRIPT)
    (place / "run" / "attempts" / "1.0").mkdir(parents=True)
    told = {"WORLD_SIZE": "8", "RANK": "5", "LOCAL_RANK": "0", "ANSWER": str(place / "answer")}
    run = {"LLMLAUNCH_RUN_DIR": str(place / "run"), "LLMLAUNCH_ATTEMPT": "1.0"}
    command = [sys.executable, str(RANK_ALONE), str(place / "train.py"), "--steps", "3"]
    done = subprocess.run(command, env={**os.environ, **told, **run}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    versions = json.loads((place / "run" / "attempts" / "1.0" / "versions.json").read_text())
    return {**json.loads((place / "answer").read_text()), "versions": versions, "folder": place}


def test_the_script_is_the_main_program_with_its_own_words(answer: dict[str, Any]) -> None:
    assert (answer["name"], answer["words"]) == ("__main__", ["--steps", "3"])
    assert Path(answer["path"]) == answer["folder"].resolve()


def test_every_group_is_fake_whatever_was_asked_for(answer: dict[str, Any]) -> None:
    assert answer["place"] == [5, 8, "fake", "fake"]


def test_what_is_gathered_or_exchanged_is_this_rank_s_own(answer: dict[str, Any]) -> None:
    assert answer["gathered"] == [1.0, 2.0] * 8
    assert answer["lists"] == [[1.0, 2.0]] * 8
    assert answer["shard"] == [0.0, 1.0]
    assert answer["one"] == [1.0, 2.0]
    assert answer["both"] == [1.0, 2.0, 1.0, 2.0, 1.0]
    assert answer["objects"] == ["mine"] * 8


def test_what_is_received_has_variance_and_sizes_are_none(answer: dict[str, Any]) -> None:
    assert all(0.005 < deviation < 0.02 for deviation in answer["deviations"])
    assert answer["sizes"] == [0, 0]


def test_megatron_s_question_whether_there_is_training_to_do_is_answered(answer: dict[str, Any]) -> None:
    assert answer["flags"] == [1, 0, 0]
    assert answer["other"] == [0, 0, 0]


def test_what_ran_is_written_down(answer: dict[str, Any]) -> None:
    assert answer["versions"].keys() == {"torch"}
