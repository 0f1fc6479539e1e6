"""What a site's profile puts into a rendered job: words stay words, and a container sees what the recipe names."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from run_samples import (
    H100,
    NASTY,
    cluster,
    container_job,
    deepspeed_cpu,
    megatron_70b,
    plan,
    recipe,
    script_of,
)

from llmlaunch.cluster.profile import Site
from llmlaunch.errors import UserError
from llmlaunch.layout import Layout
from llmlaunch.node import containers
from llmlaunch.recipe.containers import Container
from llmlaunch.recipe.datasets import Data
from llmlaunch.recipe.types import BackendChoice, Recipe
from llmlaunch.rendering.launch import command_text, launch_json
from llmlaunch.rendering.scripts import job_json, job_script, refuse_unrenderable


def bash(script: str, **environment: str) -> list[str]:
    """The words it prints, each ended by NUL."""
    done = subprocess.run(["bash", "-uc", script], env={"PATH": "/usr/bin:/bin", **environment}, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode().split("\0")[:-1]


UNWRITABLE = ("nul\x00", "half \ud800")
PLACES: dict[str, Callable[[str], dict[str, object]]] = {
    "interpreter": lambda text: {"python": f"/usr/bin/{text}"},
    "variable": lambda text: {"environment": {"WORD": text}},
    "variable's name": lambda text: {"environment": {f"A{text}": "1"}},
    "image": lambda text: {"container": Container(text)},
    "mount": lambda text: {"container": Container("/image.sqsh", (f"/{text}:/data",))},
    "sbatch option": lambda text: {"slurm": {"comment": text}},
}


@pytest.mark.parametrize("text", UNWRITABLE)
@pytest.mark.parametrize("place", PLACES)
def test_check_refuses_what_the_scripts_would_refuse_in_the_same_words(place: str, text: str) -> None:
    boxed, planned, rendered = container_job()
    hostile = replace(boxed, **PLACES[place](text))  # type: ignore[arg-type]
    with pytest.raises(UserError) as of_scripts:
        _ = (job_script(hostile, planned), job_json(hostile, planned, False), launch_json(hostile, rendered, None))
    with pytest.raises(UserError) as of_check:
        refuse_unrenderable(hostile, planned, rendered)
    assert str(of_check.value) == str(of_scripts.value)
    assert str(of_check.value).startswith("recipes/boxed.yaml: ")


@pytest.mark.parametrize("text", UNWRITABLE)
def test_check_refuses_what_no_script_can_hold_of_the_framework_s_arguments(text: str) -> None:
    of, planned, rendered = megatron_70b()
    hostile = replace(rendered, program=(*rendered.program, text))
    with pytest.raises(UserError, match="holds"):
        refuse_unrenderable(of, planned, hostile)


def test_check_refuses_none_of_what_the_scripts_hold() -> None:
    for of, planned, rendered in (megatron_70b(), container_job(), deepspeed_cpu()):
        refuse_unrenderable(of, planned, rendered)
        assert job_script(of, planned)
        assert job_json(of, planned, prepares=True)
        assert launch_json(of, rendered, None)
        assert command_text(of, rendered, None)


def test_check_renders_templates_of_one_s_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "job.sbatch.j2").write_text("{{ no_such_name }}")
    monkeypatch.setenv("LLMLAUNCH_TEMPLATES", str(tmp_path))
    of, planned, rendered = megatron_70b()
    with pytest.raises(UserError, match="no_such_name"):
        refuse_unrenderable(of, planned, rendered)


def at_site(site: Site, **changes: object) -> Recipe:
    return replace(recipe(cluster=cluster(H100, 8, site=site)), **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("text", [text for text in NASTY if text])
def test_an_srun_option_reaches_srun_as_it_is_written(text: str) -> None:
    of = at_site(Site(srun={"comment": text, "overlap": True, "mem": False}, mpi="none"))
    assert job_json(of, plan(of, Layout()), prepares=False)["srun"] == ["--mpi=none", f"--comment={text}", "--overlap"]


def test_setup_lines_of_the_site_then_its_modules_then_the_recipes_lines() -> None:
    site = Site(setup=("module() { printf '%s\\0' \"$@\"; }",), modules=("cuda/12.4", "a; touch PWNED"))
    script = script_of(at_site(site, setup=("module last",)))
    start = script.index(site.setup[0])
    words = bash(script[start : script.index("trap - ERR", start)])
    assert words == ["load", "cuda/12.4", "load", "a; touch PWNED", "last"]


def mounts(folder: Path, of: Recipe, run: str = "runs/1") -> list[str]:
    """What the job would mount for a run directory in `folder`."""
    (folder / run).mkdir(parents=True, exist_ok=True)
    record = job_json(of, plan(of, Layout()), prepares=False)["container"]
    assert isinstance(record, dict)
    return containers.mounts(record, folder / run)


def boxed(*given: str, **changes: object) -> Recipe:
    return replace(recipe(container=Container("/box.sqsh", given)), **changes)  # type: ignore[arg-type]


def saving(of: Recipe, path: Path) -> Recipe:
    return replace(of, training=replace(of.training, save_interval=5, checkpoint_path=str(path)))


def test_what_the_recipe_names_is_in_the_container_at_its_own_place(tmp_path: Path) -> None:
    for name in ("data/corpus.bin", "code/pretrain.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    of = boxed(
        data=Data(path=str(tmp_path / "data" / "corpus")),  # the beginning of corpus.bin and corpus.idx
        backend=BackendChoice("deepspeed", script=str(tmp_path / "code" / "pretrain.py")),
    )
    saved = tmp_path / "ck" / "mine"
    places = [tmp_path / name for name in ("ck", "code", "data", "runs/1")]
    assert mounts(tmp_path, saving(of, saved)) == [f"{place}:{place}" for place in places]
    assert saved.is_dir()


def test_what_only_the_image_has_or_a_mount_brings_is_left_alone(tmp_path: Path) -> None:
    in_image = BackendChoice("megatron-lm", path="/opt/megatron-lm")  # though this host has an /opt
    of = boxed("/lustre:/data", data=Data(path="/data/corpus"), backend=in_image)
    run = tmp_path / "runs" / "1"
    assert mounts(tmp_path, saving(of, Path("/data/checkpoints"))) == ["/lustre:/data", f"{run}:{run}"]
    assert not Path("/data/checkpoints").exists()


def test_a_read_only_mount_leaves_what_is_written_below_it_writable(tmp_path: Path) -> None:
    of = saving(boxed(f"{tmp_path}:{tmp_path}:ro", data=Data(path=str(tmp_path / "corpus"))), tmp_path / "ck" / "mine")
    run = tmp_path / "runs" / "1"
    assert mounts(tmp_path, of) == [f"{tmp_path}:{tmp_path}:ro", f"{tmp_path}/ck:{tmp_path}/ck", f"{run}:{run}"]


def test_nothing_is_mounted_twice_nor_below_a_mount_that_brings_it_there(tmp_path: Path) -> None:
    """Saved into the run directory, which lies below a mount of the site."""
    of = saving(boxed(f"{tmp_path}:{tmp_path}:rw", "/lustre:/data", "/lustre:/data"), tmp_path / "runs" / "1" / "ck")
    assert mounts(tmp_path, of) == ["/lustre:/data", f"{tmp_path}:{tmp_path}:rw"]


def test_what_another_mount_would_hide_is_mounted_in_it(tmp_path: Path) -> None:
    of = boxed(f"{tmp_path}:{tmp_path}", f"/scratch:{tmp_path}/runs")
    run = tmp_path / "runs" / "1"
    assert mounts(tmp_path, of) == [f"{tmp_path}:{tmp_path}", f"/scratch:{tmp_path}/runs", f"{run}:{run}"]


def test_paths_no_mount_can_hold_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=re.escape("no mount can hold the comma or colon of /a,b/c")):
        mounts(tmp_path, boxed(data=Data(path="/a,b/c")))
    with pytest.raises(containers.ContainerError, match="comma, colon or line break"):
        mounts(tmp_path, boxed(), run="runs/a:b")
