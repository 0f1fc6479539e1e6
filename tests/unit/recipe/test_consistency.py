"""What a recipe asks of SLURM over what its site asks, and what a person is told of it before the job waits."""

from __future__ import annotations

import pytest

from llmlaunch.recipe.consistency import cautions
from llmlaunch.rendering.scripts import sbatch_options
from support.recipes import small

SITE = "cluster={base: h100-80gb-x8, slurm: {mem: 0, exclusive: true, partition: gpu}}"
SHARED = "cluster={base: h100-80gb-x8, slurm: {exclusive: false}}"


@pytest.mark.parametrize(
    ("asked", "options"),
    [
        ("{mem-per-gpu: 100G}", {"mem-per-gpu": "100G", "exclusive": True, "partition": "gpu"}),
        ("{oversubscribe: true}", {"mem": 0, "oversubscribe": True, "partition": "gpu"}),
        ("{mem-per-gpu: false, mem: 1T}", {"mem": "1T", "mem-per-gpu": False, "exclusive": True, "partition": "gpu"}),
    ],
)
def test_another_way_to_ask_for_the_same_replaces_the_sites(asked: str, options: dict[str, object]) -> None:
    """sbatch refuses --mem beside --mem-per-gpu: "mutually exclusive"."""
    assert small(SITE, f"slurm={asked}").slurm == options


@pytest.mark.parametrize(
    ("asked", "directives"),
    [
        ("{gpus: 32}", {"gpus": 32, "gpus-per-node": "8"}),
        ("{gpus: 'h100:32'}", {"gpus": "h100:32", "gpus-per-node": "h100:8"}),
        ("{gpus: 32, gpus-per-task: 8}", {"gpus": 32, "gpus-per-task": 8}),
    ],
)
def test_a_total_of_gpus_is_dealt_out_evenly(asked: str, directives: dict[str, object]) -> None:
    """SLURM 22.05 gave 1 and 3 of `--gpus=4` to two nodes of eight."""
    options = sbatch_options(small(SITE, f"slurm={asked}"), None)
    assert {name: value for name, value in options.items() if "gpu" in name} == directives


@pytest.mark.parametrize(
    "asked", ["{gpus: 32}", "{gres: 'nvme:10'}", "{gres: 'gpu:h100:8'}", "{gpus-per-node: 8}", "{gpus: false}"]
)
def test_gpus_that_fit_are_taken(asked: str) -> None:
    small(SITE, f"slurm={asked}")


def core_cautions(*overrides: str) -> list[str]:
    return [sentence for sentence in cautions(small(*overrides)) if "core" in sentence]


def test_trainers_that_would_share_one_core_are_warned_of() -> None:
    (sentence,) = core_cautions(SHARED)
    assert "the 8 trainers of a node get 1 core between them" in sentence
    assert "cpus-per-gpu: N" in sentence
    (sentence,) = core_cautions(SHARED, "slurm.cpus-per-task=4")
    assert "the 8 trainers of a node get 4 CPU cores between them" in sentence


@pytest.mark.parametrize(
    "overrides",
    [
        (SITE,),
        (SHARED, "slurm.cpus-per-gpu=4"),
        (SHARED, "slurm.cpus-per-task=8"),
        (SHARED, "slurm.tres-per-task='cpu:16,gres/gpu:8'"),
        ("cluster={base: h100-80gb-x8, cpus_per_node: 96, slurm: {exclusive: false}}",),
    ],
)
def test_whoever_asks_for_cores_is_not_warned(overrides: tuple[str, ...]) -> None:
    assert core_cautions(*overrides) == []


@pytest.mark.parametrize(
    ("box", "mend"),
    [
        (
            "{image: nvcr.io#nvidia/pytorch:25.08-py3}",
            "enroot import -o box.sqsh docker://nvcr.io#nvidia/pytorch:25.08-py3",
        ),
        ("{image: 'docker://nvcr.io#nvidia/pytorch:25.08-py3'}", "enroot import -o box.sqsh docker://nvcr.io#nvidia"),
        ("{image: 'docker://org/box', runtime: apptainer}", "apptainer pull box.sif docker://org/box"),
    ],
)
def test_an_image_that_every_node_fetches_is_warned_of(box: str, mend: str) -> None:
    (sentence,) = cautions(small(f"container={box}"))
    assert mend in sentence


@pytest.mark.parametrize("box", ["{image: box.sqsh}", "{image: /images/box.sif, runtime: apptainer}"])
def test_an_image_file_is_not_warned_of(box: str) -> None:
    assert cautions(small(f"container={box}")) == []


def test_who_has_checkpoints_written_beside_the_training_hears_what_a_preemption_costs() -> None:
    saved = ("training.checkpoint_path=/ckpt", "training.save_interval=10")
    (sentence,) = set(cautions(small(*saved, "training.async_save=true"))) - set(cautions(small(*saved)))
    assert sentence.startswith("training.async_save: a preemption ends the processes that write")
