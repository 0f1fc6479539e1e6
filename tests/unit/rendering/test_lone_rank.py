"""The run directory of one rank by itself: a job of one device and some minutes, that speaks of the job it is of."""

from __future__ import annotations

import re

from run_samples import rank_by_itself

from llmlaunch.rendering.provenance import Provenance
from llmlaunch.rendering.run_directory import run_files
from llmlaunch.rundir.peak_account import pipeline_rank_of

LONE = rank_by_itself()
FILES = run_files(LONE.recipe, LONE.plan, {}, LONE.rendered, Provenance(code={}), LONE.described)
JOB, TRAIN = FILES["job.sbatch"].decode(), FILES["train.sh"].decode()


def directives() -> dict[str, str]:
    return dict(re.findall(r"^#SBATCH --([\w-]+)=?(.*)$", JOB, re.MULTILINE))


def test_it_asks_for_one_device_on_a_part_of_one_node() -> None:
    options = directives()
    assert (options["nodes"], options["gres"], options["cpus-per-task"]) == ("1", "lscratch:100", "12")
    assert options["gpus-per-node"] == "1"
    assert options["mem"] == f"{2**40 * 9 // 10 // 8 // 2**20}M"
    assert not {"exclusive", "nodelist", "switches", "segment", "requeue", "signal"} & set(options)


def test_it_asks_for_minutes_where_and_as_the_recipe_says() -> None:
    options = directives()
    assert options["time"] == "00:20:00"  # a quarter of an hour to start, and three steps of 10 s
    assert (options["partition"], options["qos"], options["job-name"]) == ("gpu", "long", "llama3-70b-rank3")


def test_it_tries_no_nodes_prepares_nothing_and_does_not_come_back() -> None:
    assert "preflight" not in JOB
    assert "prepare" not in JOB
    assert not any(name.startswith("fallback/") for name in FILES)
    assert (LONE.described["restart"], LONE.described["checkpoint"], LONE.described["fallbacks"]) == (None, None, [])


def test_one_process_is_started_with_the_rank_s_place_and_no_torchrun() -> None:
    assert "torch.distributed.run" not in TRAIN
    assert all(f"export {line}" in TRAIN for line in ("RANK=384", "WORLD_SIZE=512", "LOCAL_RANK=0"))
    assert 'exec "${program[@]}"' in TRAIN
    assert '"${LLMLAUNCH_RUN_DIR}"/trainer/rank_alone.py "${MEGATRON_LM_PATH}"/pretrain_gpt.py' in TRAIN


def test_torch_s_own_peaks_are_always_written_down() -> None:
    assert "hook/llmlaunch_memory_probe.py" in FILES


def test_what_it_measures_is_of_the_job_it_is_of() -> None:
    described = LONE.described
    assert (described["nodes"], described["devices_per_node"], described["pipeline"]) == (1, 1, 4)
    assert described["measurement"]["world_size"] == 512  # type: ignore[index]
    assert len(described["predicted_bytes"]) == 4  # type: ignore[arg-type]
    assert described["progress"]["steps"] == 3  # type: ignore[index]
    assert pipeline_rank_of(described, 384) == 3


def test_its_stage_is_the_one_it_was_started_for_whatever_its_number() -> None:
    assert pipeline_rank_of({**LONE.described, "rehearsal": {"pipeline_rank": 2}}, 16) == 2
