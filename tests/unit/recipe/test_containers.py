"""Which container a recipe's job runs in: its image, its own mounts and the site's, and what runs it."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmlaunch.errors import UserError
from llmlaunch.recipe.containers import Container
from llmlaunch.recipe.load import load_recipe

RECIPE = """\
schema: 1
name: boxed
model: llama3-8b
backend: megatron-lm
cluster: {{base: h100-80gb-x8, {site}}}
nodes: 4
training: {{sequence_length: 8192, global_batch_size: 512, steps: 10}}
data: {{mock: true}}
container: {container}
"""


def container(folder: Path, keys: str, site: str = "mpi: none") -> Container:
    (folder / "recipe.yaml").write_text(RECIPE.format(container=keys, site=site), encoding="utf-8")
    box = load_recipe(folder / "recipe.yaml").container
    assert box is not None
    return box


def test_the_runtime_is_the_recipes_word_then_the_sites_then_pyxis(tmp_path: Path) -> None:
    site = "container: {runtime: apptainer}"
    assert container(tmp_path, "{image: /c/a.sqsh}").runtime == "pyxis"
    assert container(tmp_path, "{image: /c/a.sif}", site).runtime == "apptainer"
    assert container(tmp_path, "{image: /c/a.sqsh, runtime: pyxis}", site).runtime == "pyxis"
    assert (
        container(tmp_path, "{image: /c/a.sif, runtime: apptainer}", "container: {runtime: none}").image == "/c/a.sif"
    )


def test_the_sites_mounts_come_first_and_give_way_to_the_recipes(tmp_path: Path) -> None:
    site = "container: {mounts: ['/lustre:/lustre', '/sw:/opt/sw:ro']}"
    box = container(tmp_path, "{image: /c/a.sqsh, mounts: ['/mine:/lustre']}", site)
    assert box.mounts == ("/sw:/opt/sw:ro", "/mine:/lustre")


PYXIS_IMAGES = ["nvcr.io#nvidia/pytorch:25.08-py3", "ubuntu:24.04", "registry:5000/a/b", "docker://ubuntu", "/c/a.sqsh"]
APPTAINER_IMAGES = [
    *("docker://nvcr.io/nvidia/pytorch:25.08-py3", "oras://ghcr.io/a/b:1"),
    *("/c/a.sif", "/c/sandbox", "docker-archive:a.tar"),
]


@pytest.mark.parametrize(
    ("keys", "image"),
    [
        *(("", image) for image in PYXIS_IMAGES),
        *((", runtime: apptainer", image) for image in APPTAINER_IMAGES),
    ],
)
def test_what_a_runtime_takes_reaches_it_as_it_is_written(keys: str, image: str, tmp_path: Path) -> None:
    assert container(tmp_path, f"{{image: '{image}'{keys}}}").image == image


def test_an_image_beside_the_recipe_is_found_from_the_run_directory(tmp_path: Path) -> None:
    assert container(tmp_path, "{image: images/a.sqsh}").image == str(tmp_path / "images/a.sqsh")
    assert container(tmp_path, "{image: ./box, runtime: apptainer}").image == str(tmp_path / "box")


@pytest.mark.parametrize(
    ("keys", "site", "message"),
    [
        ("{image: /c/a.sif}", "mpi: none", "container.image: a .sif file is Apptainer's; write runtime: apptainer"),
        ("{image: 'oras://ghcr.io/a'}", "mpi: none", "pyxis takes a registry reference or the path of a .sqsh file"),
        ("{image: /c/a.sqsh, runtime: apptainer}", "mpi: none", "a .sqsh file is enroot's; write runtime: pyxis"),
        (
            "{image: 'nvcr.io#nvidia/pytorch:25.08-py3', runtime: apptainer}",
            "mpi: none",
            "apptainer takes the path of a .sif file or docker://nvcr.io/nvidia/pytorch:25.08-py3",
        ),
        (
            "{image: 'nvcr.io/nvidia/pytorch:25.08-py3', runtime: apptainer}",
            "mpi: none",
            "docker://nvcr.io/nvidia/pytorch:25.08-py3",
        ),
        ("{image: /c/a.sqsh}", "container: {runtime: none}", "cluster h100-80gb-x8 runs no containers"),
        ("{image: /c/a.sqsh, runtime: docker}", "mpi: none", "must be one of pyxis, apptainer"),
    ],
)
def test_an_image_the_runtime_cannot_run_is_refused(keys: str, site: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        container(tmp_path, keys, site)
    assert message in str(caught.value)
    assert "recipe.yaml:9: " in str(caught.value)
