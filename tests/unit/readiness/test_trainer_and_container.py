"""The trainer, its interpreter and its container are looked for at the desk, by the line of the recipe."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from job_files import checkout, readiness, write

from support.recipes import recipe_text

DEEPSPEED = recipe_text(backend="{name: deepspeed, script: train.py}")
MEGATRON = recipe_text(backend="{name: megatron-lm, path: checkout}")
SIF = b"#!/usr/bin/env run-singularity\n\x00SIF_MAGIC\x00"


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "train.py is not there"),
        ({"train.py": ""}, "train.py is empty"),
        ({"train.py/x": "x"}, "train.py is a folder, not a file"),
    ],
)
def test_a_script_of_ones_own_is_there(files: Mapping[str, str], message: str, tmp_path: Path) -> None:
    (sentence,) = readiness(write(tmp_path, files), DEEPSPEED).missing
    assert sentence.startswith(f"{tmp_path}/recipe.yaml:4: backend.script: ")
    assert message in sentence


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "checkout is not there"),
        ({"checkout/setup.py": "x"}, "is no checkout of Megatron-LM: it lacks pretrain_gpt.py or megatron/core"),
        ({"pretrain_gpt.py": "x", "checkout/core/x": "x"}, "name {0}"),
    ],
)
def test_a_checkout_of_megatron_is_one(files: Mapping[str, str], message: str, tmp_path: Path) -> None:
    (sentence,) = readiness(write(tmp_path, files), MEGATRON).missing
    assert ": backend.path: " in sentence
    assert message.format(tmp_path) in sentence


def test_a_checkout_that_tells_no_version_is_asked_for_it(tmp_path: Path) -> None:
    write(checkout(tmp_path / "checkout"), {"megatron/core/package_info.py": "MAJOR = unknown"})
    assert "tells no version; name it in backend.version" in readiness(tmp_path, MEGATRON).doubtful[0]
    assert readiness(tmp_path, MEGATRON, "backend.version='0.19'").doubtful == ()


def test_a_checkout_by_variable_is_looked_for_and_an_unset_one_noted(tmp_path: Path) -> None:
    named = readiness(tmp_path, recipe_text(), environment={"MEGATRON_LM_PATH": f"{tmp_path}/nowhere"})
    assert named.missing == ()
    assert f"MEGATRON_LM_PATH={tmp_path}/nowhere is not there" in named.doubtful[0]
    unset = {"MEGATRON_LM_PATH": ""}
    assert "MEGATRON_LM_PATH is not set here" in readiness(tmp_path, recipe_text(), environment=unset).notes[0]
    assert readiness(tmp_path, recipe_text(setup="[module load megatron]"), environment=unset).notes == ()


def environment(folder: Path, *packages: str, settings: str = "include-system-site-packages = false\n") -> Path:
    """Write a virtual environment with these packages; return its interpreter."""
    files = {f"lib/python3.11/site-packages/{name}/x": "x" for name in packages}
    write(folder, {"bin/python": "#!/bin/sh\n", "lib/python3.11/site-packages/x": "x", "pyvenv.cfg": settings, **files})
    (folder / "bin/python").chmod(0o755)
    return folder / "bin/python"


def test_the_interpreter_is_there_and_can_be_run(tmp_path: Path) -> None:
    recipe = recipe_text(backend="deepspeed", python=str(tmp_path / "environment/bin/python"))
    (sentence,) = readiness(tmp_path, recipe).missing
    assert "bin/python is not there; name the interpreter" in sentence
    python = environment(tmp_path / "environment", "torch", "deepspeed")
    assert readiness(tmp_path, recipe).missing == ()
    python.chmod(0o644)
    assert "bin/python cannot be run" in readiness(tmp_path, recipe).missing[0]


def test_what_the_environment_lacks_is_warned_of(tmp_path: Path) -> None:
    recipe = recipe_text(backend="deepspeed", python=str(tmp_path / "environment/bin/python"))
    python = environment(tmp_path / "environment", "deepspeed-0.17.1.dist-info")
    assert f"{python} has no torch and no deepspeed" in readiness(tmp_path, recipe).doubtful[0]
    environment(tmp_path / "environment", "torch", "deepspeed")
    assert readiness(tmp_path, recipe).doubtful == ()
    other = readiness(tmp_path, recipe, "backend={name: deepspeed, version: '0.16'}").doubtful
    assert f"backend.version: says 0.16, and {python} has DeepSpeed 0.17.1" in other[0]
    assert readiness(tmp_path, recipe, "backend={name: deepspeed, version: '0.17'}").doubtful == ()
    inheriting = environment(tmp_path / "inheriting", settings="include-system-site-packages = true\n")
    assert readiness(tmp_path, recipe, f"python={inheriting}").doubtful == ()


@pytest.mark.parametrize(
    ("image", "files", "message"),
    [
        ("./box.sqsh", {}, "box.sqsh is not there"),
        ("./box.sqsh", {"box.sqsh": "hello"}, "box.sqsh is no squashfs image"),
        ("./box.sqsh", {"box.sqsh": ""}, "box.sqsh is empty"),
        ("./box.sqsh", {"box.sqsh/x": "x"}, "box.sqsh is a folder; pyxis takes a .sqsh file"),
        ("./box.sif", {"box.sif": "hello"}, "box.sif is no SIF image"),
        ("./box.sif", {}, "box.sif is not there"),
        ("docker:/nvcr.io/x:1", {}, "neither a path nor a reference; write docker://nvcr.io/x:1"),
        ("docker//nvcr.io/x:1", {}, "neither a path nor a reference; write docker://nvcr.io/x:1"),
    ],
)
def test_an_image_is_one(image: str, files: Mapping[str, str], message: str, tmp_path: Path) -> None:
    runtime = "apptainer" if image.endswith(".sif") else "pyxis"
    container = f"{{image: '{image}', runtime: {runtime}}}"
    (sentence,) = readiness(write(tmp_path, files), recipe_text(container=container)).missing
    assert sentence.startswith(f"{tmp_path}/recipe.yaml:9: container.image: ")
    assert message in sentence


@pytest.mark.parametrize(
    ("name", "data", "runtime"), [("box.sqsh", b"hsqs...", "pyxis"), ("box.sif", SIF, "apptainer")]
)
def test_a_whole_image_is_taken(name: str, data: bytes, runtime: str, tmp_path: Path) -> None:
    write(tmp_path, {name: data})
    ready = readiness(tmp_path, recipe_text(container=f"{{image: ./{name}, runtime: {runtime}}}"))
    assert (ready.missing, ready.doubtful) == ((), ())


def test_an_image_of_a_registry_is_noted_and_its_form_judged(tmp_path: Path) -> None:
    ready = readiness(tmp_path, recipe_text(container="{image: 'nvcr.io/nvidia/pytorch:25.01-py3'}"))
    assert "a registry stands before a #: nvcr.io#nvidia/pytorch:25.01-py3" in ready.doubtful[0]
    for image in ("nvcr.io#nvidia/pytorch:25.01-py3", "nvidia/cuda"):
        ready = readiness(tmp_path, recipe_text(container=f"{{image: '{image}'}}"))
        assert (ready.missing, ready.doubtful) == ((), ())
        assert "is in a registry, so whether it is there is not known here" in ready.notes[0]


def test_the_host_side_of_each_mount_is_looked_for(tmp_path: Path) -> None:
    shared = "/var"  # exists everywhere, and is not counted among the folders that each node has for itself
    mounts = f"['{shared}/no-such-folder:/data', '/tmp/no-such-folder:/scratch', '/no-such-file-system/x:/far']"
    ready = readiness(tmp_path, recipe_text(container=f"{{image: 'nvidia/cuda', mounts: {mounts}}}"))
    (sentence,) = ready.missing
    assert f"container.mounts.0: {shared}/no-such-folder, the source of {shared}/no-such-folder:/data, is not" in sentence
    assert "container.mounts.1: /tmp/no-such-folder" in ready.doubtful[0]
    assert "not there on this machine" in ready.doubtful[0]
    assert any("container.mounts.2: /no-such-file-system/x cannot be seen" in sentence for sentence in ready.notes)


def test_a_source_tree_that_is_not_there_is_warned_of(tmp_path: Path) -> None:
    assert "code.path: " in readiness(tmp_path, recipe_text(code="{path: ./mine}")).doubtful[0]
    (tmp_path / "mine").mkdir()
    assert readiness(tmp_path, recipe_text(code="{path: ./mine}")).doubtful == ()
