"""A run directory is the same bytes for the same inputs, whole or absent, and its scripts are what the goldens say.

tests/support/golden.py says how scripts are compared, and how the stored ones are rewritten.
"""

from __future__ import annotations

import json
import re
import stat
import subprocess
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from run_samples import (
    CPU,
    H100,
    apptainer_job,
    cluster,
    coming_back,
    container_job,
    deepspeed_cpu,
    megatron_70b,
    nasty_job,
    rank_by_itself,
    recipe,
    script_of,
    tracked_job,
    tried_first,
)
from run_samples import (
    plan as plan_of,
)

from llmlaunch.calibration.records import problem
from llmlaunch.cluster.profile import Site
from llmlaunch.errors import UserError
from llmlaunch.frameworks.framework import backend_for
from llmlaunch.layout import Layout
from llmlaunch.recipe.types import Code, MonitorPolicy
from llmlaunch.rendering.launch import command_text
from llmlaunch.rendering.provenance import Provenance
from llmlaunch.rendering.run_directory import render_run, run_files
from llmlaunch.rendering.scripts import job_json, job_script
from support.golden import assert_golden
from support.recipes import recipe_of
from support.rendered_jobs import shown_words

NOTHING_RECORDED = Provenance(code={})
PROBE, HOOK = "hook/llmlaunch_memory_probe.py", "hook/sitecustomize.py"
H100_SITE = Site(gpu_type="h100")
JOBS = {
    "llama3-70b": megatron_70b(),
    "deepspeed-cpu": deepspeed_cpu(),
    "container": container_job(),
    "apptainer": apptainer_job(),
    "coming-back": coming_back(),
    "tried-first": tried_first(),
    "tracked": tracked_job(),
    "nasty": nasty_job(Path("/opt/train.py")),
    "rank-by-itself": (rank_by_itself().recipe, rank_by_itself().plan, rank_by_itself().rendered),
}


@cache
def files_of(name: str) -> dict[str, bytes]:
    of, plan, rendered = JOBS[name]
    return run_files(of, plan, {"recipe": of.name}, rendered, NOTHING_RECORDED)


@pytest.mark.parametrize("name", JOBS)
def test_scripts_are_the_golden_ones_and_bash_accepts_them(name: str) -> None:
    script = files_of(name)["job.sbatch"]
    assert_golden(name, "job.sbatch", script.decode())
    done = subprocess.run(["bash", "-n"], input=script, capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")


def test_the_command_is_the_golden_one() -> None:
    of = recipe_of("llama3-70b", "backend.path=/opt/megatron")
    layout = Layout(tensor=8, pipeline=4, data=of.world_size // 32, sequence_parallel=1, zero_stage=1)
    rendered = backend_for(of).render(of, layout)
    assert_golden("llama3-70b", "command.txt", command_text(of, rendered, None))


@pytest.mark.parametrize("name", JOBS)
def test_the_same_inputs_give_the_same_bytes(name: str) -> None:
    assert files_of.__wrapped__(name) == files_of(name)


def test_a_rendered_directory_holds_those_bytes_for_its_owner_alone(tmp_path: Path) -> None:
    of, plan, rendered = JOBS["deepspeed-cpu"]
    for target in (tmp_path / "one", tmp_path / "deep" / "two"):
        render_run(of, plan, {"verdict": "safe"}, rendered, target)
    first, second = (
        {str(p.relative_to(d)): p.read_bytes() for p in d.rglob("*") if p.is_file()}
        for d in (tmp_path / "one", tmp_path / "deep" / "two")
    )
    assert first == second
    assert first["recipe.yaml"] == of.text.encode()
    assert json.loads(first["plan.json"]) == {"verdict": "safe"}
    assert {"ds_config.json", "trainer/train.py", "node.pyz", "run.json", "code.json"} <= set(first)
    assert all((tmp_path / "one" / folder).is_dir() for folder in ("logs", "peaks", "attempts"))
    for path in [tmp_path / "one", *(tmp_path / "one").rglob("*")]:
        executable = path.is_dir() or path.name == "job.sbatch"
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if executable else 0o600), path


def test_an_occupied_place_is_refused_and_left_alone(tmp_path: Path) -> None:
    of, plan, rendered = JOBS["deepspeed-cpu"]
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "mine.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for target in (tmp_path / "run", tmp_path / "file"):
        with pytest.raises(UserError, match=re.escape(str(target))):
            render_run(of, plan, {}, rendered, target)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "mine.txt", "run"]


def test_an_empty_folder_may_be_filled(tmp_path: Path) -> None:
    of, plan, rendered = JOBS["deepspeed-cpu"]
    (tmp_path / "run").mkdir()
    render_run(of, plan, {}, rendered, tmp_path / "run")
    assert (tmp_path / "run" / "run.json").is_file()


def test_a_failure_on_the_way_leaves_nothing(tmp_path: Path) -> None:
    of, plan, rendered = JOBS["deepspeed-cpu"]
    clash = replace(rendered, files={"a": b"", "a/b": b""})  # a file cannot be a folder, too
    with pytest.raises(UserError, match="cannot be written"):
        render_run(of, plan, {}, clash, tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["../x", "/x", "job.sbatch", "logs/x", "code/x"])
def test_a_backend_cannot_write_over_or_out_of_the_run(name: str) -> None:
    of, plan, rendered = JOBS["deepspeed-cpu"]
    with pytest.raises(ValueError, match="may not write"):
        run_files(of, plan, {}, replace(rendered, files={name: b""}), NOTHING_RECORDED)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "x\n#SBATCH --wrap=id"}, r"tiny\.yaml: slurm\.job-name: .*line break"),
        ({"slurm": {"comment": 'a "b"'}}, r"tiny\.yaml: slurm\.comment: .*double quote"),
        ({"slurm": {"account": ""}}, r"slurm\.account: is empty; give a value, or false"),
        ({"slurm": {"nodes": 4}}, r"slurm\.nodes: .*`nodes:` of the recipe"),
        ({"slurm": {"wrap": "id"}}, r"slurm\.wrap: .*setup:"),
        ({"secrets": ("A;B",)}, "not a variable name"),
        ({"cluster": cluster(H100, 8, gpu_request="magic")}, "one of gpus-per-node, gres"),
    ],
)
def test_values_no_job_script_can_hold_are_refused_with_file_and_key(changes, message: str) -> None:
    of = recipe(**changes)
    with pytest.raises(UserError, match=message):
        _ = script_of(of), job_json(of, plan_of(of, Layout()), prepares=False)


def test_cpus_are_asked_for_in_one_form_only() -> None:
    node = replace(cluster(H100, 8), cpus_per_node=96)
    assert "--cpus-per-task=96\n" in script_of(recipe(cluster=node))
    asked = script_of(recipe(cluster=node, slurm={"cpus-per-gpu": 8}))
    assert "--cpus-per-gpu=8\n" in asked
    assert "#SBATCH --cpus-per-task" not in asked


@pytest.mark.parametrize(
    ("changes", "slurm", "line"),
    [
        ({}, {}, "#SBATCH --gpus-per-node=8"),
        ({"gpu_request": "gpus-per-task"}, {}, "#SBATCH --gpus-per-task=8"),
        ({"gpu_request": "gres"}, {}, "#SBATCH --gres=gpu:8"),
        ({"gpu_request": "gres"}, {"gres": "nvme:1"}, "#SBATCH --gres=gpu:8,nvme:1"),
        ({}, {"gres": "gpu:h100:8"}, "#SBATCH --gres=gpu:h100:8"),
        ({}, {"gpus-per-node": "h100:8"}, "#SBATCH --gpus-per-node=h100:8"),
        ({}, {"tres-per-task": "gres/gpu:8"}, "#SBATCH --tres-per-task=gres/gpu:8"),
        ({"gpu_request": "none"}, {}, None),
        ({"gpu_request": "gres", "site": H100_SITE}, {}, "#SBATCH --gres=gpu:h100:8"),
        ({"gpu_request": "gres", "site": H100_SITE}, {"gres": "nvme:1"}, "#SBATCH --gres=gpu:h100:8,nvme:1"),
        ({"gpu_request": "gpus-per-node", "site": H100_SITE}, {}, "#SBATCH --gpus-per-node=h100:8"),
        ({"gpu_request": "gpus-per-task", "site": H100_SITE}, {}, "#SBATCH --gpus-per-task=h100:8"),
        ({"gpu_request": "gres", "accelerator": CPU}, {}, None),
    ],
)
def test_devices_are_asked_for_once_in_the_clusters_form(changes, slurm, line: str | None) -> None:
    device = changes.get("accelerator", H100)
    script = script_of(recipe(cluster=replace(cluster(device, 8), **changes), slurm=slurm))
    asked = [row for row in script.splitlines() if row.startswith("#SBATCH") and re.search("gpu|gres", row)]
    assert asked == ([line] if line else [])


@pytest.mark.parametrize(
    ("site", "asked", "line"),
    [
        ((), {}, None),
        (("n1", "n[4-5]"), {}, "#SBATCH --exclude=n1,n[4-5]"),
        (("n1",), {"exclude": "n7"}, "#SBATCH --exclude=n1,n7"),
        ((), {"exclude": "n7"}, "#SBATCH --exclude=n7"),
        (("n1",), {"exclude": False}, None),
    ],
)
def test_nodes_of_the_site_and_of_the_recipe_are_left_out(site, asked, line: str | None) -> None:
    script = script_of(recipe(cluster=cluster(H100, 8, site=Site(exclude=site)), slurm=asked))
    assert [row for row in script.splitlines() if "--exclude" in row] == ([line] if line else [])


def test_how_jobs_come_back_is_the_recipes_word_then_the_sites() -> None:
    of, plan, _ = coming_back()
    assert of.restart is not None
    chained = replace(of, cluster=replace(of.cluster, site=Site(restart_by="chain")))
    requeued = replace(chained, restart=replace(of.restart, by="requeue"))
    asked = [job_script(each, plan).count("#SBATCH --no-requeue\n") for each in (of, chained, requeued)]
    assert asked == [0, 1, 0]


def test_a_secret_by_value_is_refused() -> None:
    of, plan, rendered = JOBS["deepspeed-cpu"]
    with pytest.raises(UserError, match=r"environment\.HF_TOKEN: looks like a secret.*secrets:"):
        run_files(replace(of, environment={"HF_TOKEN": "s3cret"}), plan, {}, rendered, NOTHING_RECORDED)


def test_run_json_carries_a_whole_measurement_record_without_its_peak() -> None:
    run = json.loads(files_of("llama3-70b")["run.json"])
    record = run["measurement"]
    assert problem({**record, "id": "some"}) is None
    assert record["peak_bytes"] is None
    assert record["num_microbatches"] == 64
    assert run["predicted_bytes"] == [H100.memory_bytes // 2] * 4
    assert (run["pipeline"], run["peak_kind"], run["accelerator_kind"]) == (4, "device", "gpu")


def test_the_record_of_a_run_names_no_path_of_its_recipe() -> None:
    of, plan, rendered = JOBS["llama3-70b"]
    backend = replace(of.backend, script="/home/ada/train.py", path="/home/ada/Megatron-LM")
    training = replace(of.training, start_from="/home/ada/weights", checkpoint_path="/home/ada/checkpoints")
    own = replace(of, backend=backend, training=training)
    record = json.loads(run_files(own, plan, {}, rendered, NOTHING_RECORDED)["run.json"])["measurement"]
    assert "/home" not in json.dumps(record)
    assert (record["recipe"]["backend"]["script"], record["recipe"]["training"]["start_from"]) == (
        "train.py",
        "weights",
    )


@pytest.mark.parametrize(
    ("changes", "files"),
    [
        ({"cluster": cluster(H100, 2)}, {HOOK, PROBE}),
        ({"cluster": cluster(H100, 2), "monitor": MonitorPolicy(probe=False)}, {HOOK}),
        ({}, {HOOK}),
        ({"cluster": cluster(H100, 2), "watchdog": None}, {HOOK, PROBE}),  # it brings its hook
        ({"cluster": cluster(H100, 2), "watchdog": None, "monitor": MonitorPolicy(probe=False)}, set()),
        ({"watchdog": None}, set()),
    ],
)
def test_the_memory_probe_is_for_gpus_and_can_be_turned_off(changes: dict[str, Any], files: set[str]) -> None:
    of, plan, rendered = JOBS["deepspeed-cpu"]
    names = run_files(replace(of, **changes), plan, {}, rendered, NOTHING_RECORDED)
    assert {name for name in names if name.startswith("hook/")} == files


def test_a_snapshot_is_what_runs(tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "pkg").mkdir(parents=True)
    (source / "train.py").write_text("print('old')\n")
    (source / "pkg" / "run.sh").write_text("#!/bin/sh\n")
    (source / "pkg" / "run.sh").chmod(0o755)
    of, plan, rendered = JOBS["deepspeed-cpu"]
    of = replace(of, code=Code(path=str(source), snapshot=True), environment={"CONFIGS": f"{source}/pkg"})
    rendered = replace(rendered, program=(f"{source}/train.py", f"{source}-other/x"))
    render_run(of, plan, {}, rendered, tmp_path / "run")
    assert (tmp_path / "run" / "code" / "train.py").read_text() == "print('old')\n"
    assert (tmp_path / "run" / "code" / "pkg" / "run.sh").stat().st_mode & 0o777 == 0o700
    words = shown_words((tmp_path / "run" / "command.txt").read_bytes())
    assert words == ["$LLMLAUNCH_RUN_DIR/code/train.py", f"{source}-other/x"]
    launch = json.loads((tmp_path / "run" / "run.json").read_bytes())["launch"]
    assert launch["environment"]["CONFIGS"] == {"variable": "LLMLAUNCH_RUN_DIR", "suffix": "/code/pkg"}
    assert launch["python_path"][-1] == {"variable": "LLMLAUNCH_RUN_DIR", "suffix": "/code"}
