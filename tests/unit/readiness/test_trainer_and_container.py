"""The trainer, its interpreter and its container are looked for at the desk, by the line of the recipe."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from job_files import checkout, readiness, write

from llmlaunch.readiness.trainer_files import local_interpreter_findings
from llmlaunch.recipe.load import load_recipe
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


def test_a_checkout_is_named_by_the_recipe_or_by_a_variable(tmp_path: Path) -> None:
    named = readiness(tmp_path, recipe_text(), environment={"MEGATRON_LM_PATH": f"{tmp_path}/nowhere"})
    assert named.missing == ()
    assert f"MEGATRON_LM_PATH={tmp_path}/nowhere is not there" in named.doubtful[0]
    unset = {"MEGATRON_LM_PATH": ""}
    (sentence,) = readiness(tmp_path, recipe_text(), environment=unset).missing
    assert "backend: no checkout of Megatron-LM is named; set backend.path" in sentence
    assert "or export MEGATRON_LM_PATH where you submit" in sentence


@pytest.mark.parametrize(
    "values",
    [
        {"setup": "[module load megatron]"},
        {"environment": "{MEGATRON_LM_PATH: /opt/megatron}"},
        {"backend": "{name: megatron-lm, script: train.py}"},
        {"backend": "deepspeed"},
    ],
)
def test_what_may_say_where_the_checkout_is_is_trusted(values: dict[str, str], tmp_path: Path) -> None:
    write(tmp_path, {"train.py": "x"})
    ready = readiness(tmp_path, recipe_text(**values), environment={"MEGATRON_LM_PATH": ""})
    assert (ready.missing, ready.doubtful) == ((), ())


def test_an_image_may_know_its_checkout_so_that_is_a_warning(tmp_path: Path) -> None:
    ready = readiness(tmp_path, recipe_text(container="{image: nvidia/cuda}"), environment={"MEGATRON_LM_PATH": ""})
    assert ready.missing == ()
    assert "unless the container's image sets it, the job fails at startup" in ready.doubtful[0]


def environment(folder: Path, *packages: str, settings: str = "include-system-site-packages = false\n") -> Path:
    """Write a virtual environment with these packages; return its interpreter."""
    files = {f"lib/python3.11/site-packages/{name}/x": "x" for name in packages}
    write(folder, {"bin/python": "#!/bin/sh\n", "lib/python3.11/site-packages/x": "x", "pyvenv.cfg": settings, **files})
    (folder / "bin/python").chmod(0o755)
    return folder / "bin/python"


def test_the_interpreter_is_there_and_can_be_run(tmp_path: Path) -> None:
    recipe = recipe_text(backend="deepspeed", python=str(tmp_path / "environment/bin/python"))
    (sentence,) = readiness(tmp_path, recipe).missing
    assert "bin/python does not exist; name the interpreter" in sentence
    python = environment(tmp_path / "environment", "torch", "deepspeed")
    assert readiness(tmp_path, recipe).missing == ()
    python.chmod(0o644)
    assert "bin/python cannot be run" in readiness(tmp_path, recipe).missing[0]


def test_a_job_whose_interpreter_lacks_torch_is_refused(tmp_path: Path) -> None:
    recipe = recipe_text(backend="deepspeed", python=str(tmp_path / "environment/bin/python"))
    python = environment(tmp_path / "environment", "deepspeed-0.17.1.dist-info")
    assert f"{python} has no torch and no deepspeed; install what is missing" in readiness(tmp_path, recipe).missing[0]
    environment(tmp_path / "environment", "torch", "deepspeed")
    assert readiness(tmp_path, recipe).missing == ()
    other = readiness(tmp_path, recipe, "backend={name: deepspeed, version: '0.16'}").doubtful
    assert f"backend.version: is 0.16, but {python} has DeepSpeed 0.17.1" in other[0]
    assert readiness(tmp_path, recipe, "backend={name: deepspeed, version: '0.17'}").doubtful == ()


def test_an_interpreter_without_a_virtual_environment_is_looked_into_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of conda, or compiled: packages in the home of its user count as well."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    python = write(tmp_path / "conda", {"bin/python": b"\x7fELF", "lib/python3.12/site-packages/numpy/x": "x"})
    python = python / "bin/python"
    python.chmod(0o755)
    recipe = recipe_text(backend="deepspeed", python=str(python))
    assert f"{python} has no torch and no deepspeed" in readiness(tmp_path, recipe).missing[0]
    write(tmp_path / "home", {f".local/lib/python3.12/site-packages/{name}/x": "x" for name in ("torch", "deepspeed")})
    assert readiness(tmp_path, recipe).missing == ()


PREPARED = "or a setup line may add it"


@pytest.mark.parametrize(
    ("settings", "files", "words", "variables"),
    [
        pytest.param("include-system-site-packages = true\n", {}, (), {}, id="another environment's packages count"),
        pytest.param("", {"lib/python3.11/site-packages/x.pth": "../../../more\n"}, (), {}, id="a .pth file adds them"),
        pytest.param("home = /usr\n", {}, ("setup=['module load torch']",), {}, id=PREPARED),
        pytest.param("home = /usr\n", {}, (), {"PYTHONPATH": "/shared/packages"}, id="or PYTHONPATH may"),
    ],
)
def test_a_torch_that_may_come_from_elsewhere_is_not_called_missing(
    settings: str, files: dict[str, str], words: tuple[str, ...], variables: dict[str, str], tmp_path: Path
) -> None:
    python = environment(tmp_path / "environment", settings=settings)
    write(tmp_path, {f"environment/{name}": text for name, text in files.items()})
    write(tmp_path, {f"more/{name}/x": "x" for name in ("torch", "deepspeed")})
    recipe = recipe_text(backend="deepspeed", python=str(python))
    assert readiness(tmp_path, recipe, *words, environment=variables).missing == ()


def test_a_program_that_only_chooses_an_interpreter_is_trusted(tmp_path: Path) -> None:
    shim = write(tmp_path, {"shims/python": "#!/usr/bin/env bash\n", "lib/python3.11/site-packages/x": "x"})
    shim = shim / "shims/python"
    shim.chmod(0o755)
    assert readiness(tmp_path, recipe_text(backend="deepspeed", python=str(shim))).missing == ()


def test_an_interpreter_that_is_not_named_is_looked_for_on_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    python = environment(tmp_path / "environment").rename(tmp_path / "environment/bin/python3")
    path = {"PATH": str(python.parent)}
    (sentence,) = readiness(tmp_path, recipe_text(backend="deepspeed"), environment=path).notes
    assert f"python: is not written, and here {python} has no torch" in sentence
    environment(tmp_path / "environment", "torch")
    assert readiness(tmp_path, recipe_text(backend="deepspeed"), environment=path).notes == ()


def test_a_run_on_this_machine_needs_a_python_with_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    python = environment(tmp_path / "environment")
    path = tmp_path / "recipe.yaml"
    path.write_text(recipe_text(backend="deepspeed"))
    (finding,) = local_interpreter_findings(load_recipe(path), {"LLMLAUNCH_PYTHON": str(python)})
    assert f"no Python here has torch ({python}); name one that has it" in finding.sentence
    environment(tmp_path / "environment", "torch")
    assert list(local_interpreter_findings(load_recipe(path), {"LLMLAUNCH_PYTHON": str(python)})) == []


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
    assert f"container.mounts.0: {shared}/no-such-folder, the source of {shared}/no-such-folder:/data, is" in sentence
    assert "container.mounts.1: /tmp/no-such-folder" in ready.doubtful[0]
    assert "not there on this machine" in ready.doubtful[0]
    assert "cannot see the path: container.mounts.2 /no-such-file-system/x" in ready.doubtful[1]


def test_a_source_tree_that_is_not_there_is_warned_of(tmp_path: Path) -> None:
    assert "code.path: " in readiness(tmp_path, recipe_text(code="{path: ./mine}")).doubtful[0]
    (tmp_path / "mine").mkdir()
    assert readiness(tmp_path, recipe_text(code="{path: ./mine}")).doubtful == ()
