"""A training environment is probed the way its training would start, and remembered until it changes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from llmlaunch.assets import asset
from llmlaunch.errors import UserError
from llmlaunch.launchers.environment_cache import cache_probe, cached_probe, environment_key, probed_packages
from llmlaunch.launchers.frameworks import Environment, environment_named, environment_of, probe_environment
from llmlaunch.recipe.containers import Container
from llmlaunch.recipe.load import load_recipe

ANSWER = '{"packages": {"torch": "2.9.1", "megatron-core": "0.16.1"}}'
# srun, apptainer and the interpreter: each notes its arguments; what stands after our own arguments is started.
SRUN = """\
#!/bin/bash
printf '%s\\n' "$@" >"{folder}/srun.arguments"
while [[ $1 = -* ]]; do shift; done
exec "$@"
"""
APPTAINER = """\
#!/bin/bash
printf '%s\\n' "$@" >"{folder}/apptainer.arguments"
while [[ $1 != *.sif ]]; do shift; done
shift
exec "$@"
"""
PYTHON = """\
#!/bin/bash
[[ $1 = -c && $2 == *'def importable_core'* ]] || exit 9
echo "a module's greeting"
echo "$SITE_SAYS" >"{folder}/site"
echo '{answer}'
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in (("srun", SRUN), ("apptainer", APPTAINER), ("python3", PYTHON)):
        (tmp_path / name).write_text(text.format(folder=tmp_path, answer=ANSWER))
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("SLURM_JOB_ID", "MEGATRON_LM_PATH", "LLMLAUNCH_PYTHON"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def arguments(folder: Path, name: str) -> list[str]:
    return (folder / f"{name}.arguments").read_text().splitlines()


def quiet(_: str) -> None:
    pass


def test_apptainer_is_started_on_the_node_after_the_setup_lines(folder: Path) -> None:
    box = Container("/images/b x.sif", ("/data:/data:ro",), "apptainer")
    place = Environment(box, None, ("export SITE_SAYS='two words'",), ("--partition=train",), gpus=True)
    assert probe_environment(place, local=False, say=quiet)["packages"]["megatron-core"] == "0.16.1"
    assert (folder / "site").read_text() == "two words\n"
    assert arguments(folder, "srun")[:3] == ["--nodes=1", "--ntasks=1", "--time=10"]
    assert "--partition=train" in arguments(folder, "srun")
    entered = ["exec", "--no-home", "--nv", "--bind", "/data:/data:ro", "/images/b x.sif", "bash", "-c"]
    assert arguments(folder, "apptainer")[: len(entered)] == entered


def test_a_recipes_container_is_probed_as_it_will_train(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the first interpreter that has torch, the recipe's variables, and what it names mounted; not with the one
    of the login node."""
    (folder / "data").mkdir()
    (folder / "data" / "corpus.bin").touch()
    python = PYTHON.format(folder=folder, answer=ANSWER)
    (folder / "python").write_text(python.replace("||", "|| [[ $2 == *torch* ]] ||"))
    (folder / "python").chmod(0o755)
    (folder / "python3").write_text("#!/bin/bash\nexit 1\n")
    monkeypatch.setenv("LLMLAUNCH_PYTHON", str(folder / "nowhere"))
    changes = (
        f"container={{image: {folder}/box.sif, runtime: apptainer}}",
        f"data={{path: {folder}/data/corpus, tokenizer: gpt2}}",
        "environment={SITE_SAYS: it's here}",
    )
    place = environment_of(load_recipe(asset("recipes", "llama3-70b.yaml"), changes))
    assert probe_environment(place, local=True, say=quiet)["packages"]["torch"] == "2.9.1"
    assert (folder / "site").read_text() == "it's here\n"
    assert f"{folder}/data:{folder}/data" in arguments(folder, "apptainer")


def test_pyxis_gets_its_image_from_srun_and_the_checkout_comes_along(folder: Path) -> None:
    box = Container("nvcr.io#nvidia/pytorch:25.08-py3", ("/lustre:/lustre",), "pyxis")
    place = Environment(box, None, ("export SITE_SAYS=here",), checkout=str(folder))
    assert probe_environment(place, local=False, say=quiet)["packages"]["torch"] == "2.9.1"
    assert (folder / "site").read_text() == "here\n"
    assert f"--container-image={box.image}" in arguments(folder, "srun")
    assert f"--container-mounts=/lustre:/lustre,{folder}:{folder}" in arguments(folder, "srun")
    with pytest.raises(UserError, match="pyxis is a part of srun"):
        probe_environment(place, local=True, say=quiet)


def test_here_and_inside_an_allocation_and_what_fails_is_told_with_its_last_words(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = environment_named(None, str(folder / "python3"))
    probe_environment(place, local=True, say=quiet)
    assert not (folder / "srun.arguments").exists()
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    probe_environment(place, local=False, say=quiet)
    assert "--overlap" in arguments(folder, "srun")
    (folder / "python3").write_text("#!/bin/bash\necho 'no space on /tmp' >&2\nexit 4\n")
    with pytest.raises(UserError, match=r"(?s)the probe failed with exit code 4; its last words:\n  no space on /tmp"):
        probe_environment(environment_named(None, None), local=True, say=quiet)
    monkeypatch.setenv("PATH", str(folder / "cache"))  # no SLURM there
    with pytest.raises(UserError, match=r"srun: not found on this host.*--local"):
        probe_environment(place, local=False, say=quiet)


def test_a_recipe_asks_for_one_device_of_its_own_partition(folder: Path) -> None:
    recipe = load_recipe(
        asset("recipes", "llama3-70b.yaml"),
        ("slurm={partition: train, account: proj, time: '24:00:00', exclusive: true}", "setup=[export A=1]"),
    )
    place = environment_of(recipe)
    assert place.options == ("--gpus-per-node=1", "--account=proj", "--partition=train")
    assert (place.container, place.python, place.setup, place.gpus) == (None, None, ("export A=1",), True)


def test_an_image_alone_says_by_its_form_what_runs_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    images = {"box.sif": "apptainer", "docker://a/b:c": "apptainer", "box.sqsh": "pyxis", "nvcr.io#a/b:c": "pyxis"}
    for image, runtime in images.items():
        resolved = str(folder / image) if image.startswith("box") else image
        assert environment_named(image, None).container == Container(resolved, (), runtime)


def test_an_environment_is_remembered_until_it_changes(folder: Path) -> None:
    image = folder / "box.sif"
    image.write_text("one")
    recipe = load_recipe(asset("recipes", "llama3-70b.yaml"), (f"container={{image: {image}, runtime: apptainer}}",))
    assert probed_packages(recipe) is None
    key = environment_key(recipe.container, recipe.python)
    assert key is not None
    cache_probe(key, {"packages": {"megatron-core": "0.16.1"}, "at": "today"})
    assert probed_packages(recipe) == {"megatron-core": "0.16.1"}
    image.write_text("another")
    os.utime(image, ns=(1, 1))
    assert probed_packages(recipe) is None
    pinned = "reg/box@sha256:" + "a" * 64
    assert environment_key(Container(pinned), None) == "image sha256:" + "a" * 64
    assert environment_key(None, None) is None


def test_a_damaged_cache_says_nothing(folder: Path) -> None:
    cache_probe("k", {"packages": {"torch": "2.9.1"}})
    path = folder / "cache" / "llmlaunch" / "frameworks.json"
    for damaged in ("[]", "{", '{"k": 3}', '{"k": {"packages": []}}', '{"k": {"packages": {"torch": 3}}}'):
        path.write_text(damaged)
        assert cached_probe("k") is None
    cache_probe("k", {"packages": {"torch": "2.9.1"}})
    assert cached_probe("k") == {"packages": {"torch": "2.9.1"}}
