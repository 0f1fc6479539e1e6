"""What a site says once: in a profile of its own, in a folder of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmlaunch.cluster.load import load_cluster, profile_names, profile_path
from llmlaunch.cluster.profile import Site, SiteContainer
from llmlaunch.documents.slurm_options import sbatch_value_problem
from llmlaunch.errors import UserError

WHOLE = """\
base: h100-80gb-x8
gpu_request: gres
gpu_type: h100
slurm: {partition: gpu, account: proj, qos: long, reservation: ours, constraint: ib, mem: 0}
srun: {cpu-bind: cores, mem: 0}
mpi: none
exclude: [node13, "node[20-22,30]"]
restart_by: chain
modules: [cuda/12.4, nccl/2.21]
setup: ["source /sw/env.sh"]
container: {runtime: apptainer, mounts: ["/lustre:/lustre"]}
environment: {NCCL_IB_HCA: mlx5}
"""


def written(folder: Path, text: str, name: str = "ours") -> Path:
    path = folder / f"{name}.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_profile_says_all_that_jobs_need_at_a_site(tmp_path: Path) -> None:
    cluster = load_cluster(str(written(tmp_path, WHOLE)))
    assert cluster.site == Site(
        gpu_type="h100",
        srun={"cpu-bind": "cores", "mem": 0},
        mpi="none",
        exclude=("node13", "node[20-22,30]"),
        restart_by="chain",
        modules=("cuda/12.4", "nccl/2.21"),
        setup=("source /sw/env.sh",),
        container=SiteContainer("apptainer", ("/lustre:/lustre",)),
    )
    assert (cluster.gpu_request, cluster.slurm["qos"], cluster.slurm["exclusive"]) == ("gres", "long", True)
    assert load_cluster("h100-80gb-x8").site == Site()


def test_recipes_name_the_profiles_of_the_sites_own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    for folder in (first, second):
        folder.mkdir()
        written(folder, f"base: h100-80gb-x8\nslurm: {{partition: {folder.name}}}\n", "both")
    written(second, WHOLE, "only-b")
    monkeypatch.setenv("LLMLAUNCH_CLUSTERS", f"{first}:{second}")
    assert load_cluster("both").slurm["partition"] == "a"
    assert load_cluster("only-b").site.mpi == "none"
    assert load_cluster("cpu-x1").accelerator.kind == "cpu"
    assert {"both", "only-b", "cpu-x1"} <= set(profile_names())
    with pytest.raises(UserError, match="unknown cluster 'only-c'; did you mean only-b"):
        profile_path("only-c")


def test_a_site_refines_a_shipped_profile_under_its_own_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path, "base: h100-80gb-x8\nmpi: pmix\n", "h100-80gb-x8")
    monkeypatch.setenv("LLMLAUNCH_CLUSTERS", str(tmp_path))
    cluster = load_cluster("h100-80gb-x8")
    assert (cluster.site.mpi, cluster.devices_per_node) == ("pmix", 8)


def test_a_folder_that_is_not_mounted_is_named_where_a_profile_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMLAUNCH_CLUSTERS", "/nowhere/clusters")
    assert load_cluster("cpu-x1").name == "cpu-x1"
    with pytest.raises(UserError, match="LLMLAUNCH_CLUSTERS names /nowhere/clusters, which is no folder here"):
        load_cluster("ours")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("slurm: {nodes: 4}", "slurm.nodes: is not set here: the number of nodes is `nodes:`"),
        ("slurm: {wra: id}", "slurm.wra: is no option of sbatch; did you mean wrap?"),
        ("slurm: {tasks-per-n: 3}", "slurm.tasks-per-n: is no option of sbatch; did you mean tasks-per-node?"),
        ("slurm: {tiem: '1:00'}", "slurm.tiem: is no option of sbatch; did you mean time?"),
        ("slurm: {time: 12h}", "slurm.time: '12h' is no form that sbatch takes; write minutes, minutes:seconds"),
        ("slurm_plugins: {tasks-per-n: 3}", "slurm_plugins.tasks-per-n: is short for tasks-per-node"),
        ("slurm_plugins: {wrap: id}", "slurm_plugins.wrap: is not set here: the job script is rendered"),
        ("slurm_plugins: {time: 1}", "slurm_plugins.time: is an option of sbatch itself; write it under slurm:"),
        ("slurm: {test-only: true}", "nothing would be submitted; llmlaunch submit --test-only"),
        ("slurm: {wait: true}", "llmlaunch submit --follow waits"),
        ("slurm: {partition: true}", "slurm.partition: needs a value: without one it would swallow"),
        ("slurm: {array: 1-4}", "array: the tasks of 1-4 would train into one run directory at the same time"),
        ("slurm: {Partition: gpu}", "is not a long option of sbatch without its dashes; write partition"),
        ("srun: {ntasks: 4}", "srun.ntasks: is not set here: job.sbatch sets it"),
        ("srun: {outpu: x}", "srun.outpu: is short for output"),
        ("srun: {multi-prog: true}", "srun would not start the training"),
        ("srun: {mpi: pmix}", "write `mpi:` beside `srun:`"),
        ("srun: {container-name: x}", "outlives its job and is shared with others"),
        ("srun: {--cpu-bind: none}", "is not a long option of srun without its dashes; write cpu-bind"),
        ('srun: {comment: "a\\nb"}', "contains a line break"),
        ("mpi: list", "is not one of those `srun --mpi=list` shows"),
        ("exclude: [-n1]", "is not a node name"),
        ("exclude: [n1 n2]", "is not a node name"),
        ("modules: [-cuda]", "is not the name of a module"),
        ('modules: ["cuda; id"]', "is not the name of a module"),
        ('setup: ["export HF_TOKEN=abc"]', "gives HF_TOKEN a literal value"),
        ("gpu_type: 'h100:8'", "is not the type of a GPU"),
        ("restart_by: magic", "must be one of requeue, chain"),
        ("container: {runtime: docker}", "must be one of pyxis, apptainer, none"),
        ("container: {mounts: [/data]}", "must be /source:/destination"),
    ],
)
def test_what_would_break_a_job_is_refused_with_its_place(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        load_cluster(str(written(tmp_path, f"base: h100-80gb-x8\n{text}\n")))
    assert message in str(caught.value)
    assert "ours.yaml:2: " in str(caught.value)


def test_every_option_that_swallows_the_next_is_named_whole() -> None:
    assert all(sbatch_value_problem({name: True}) for name in ("gpus-per-socket", "comment", "wckey"))
    assert sbatch_value_problem({"exclusive": True, "requeue": True, "no-container-mount-home": True}) is None


@pytest.mark.parametrize(
    "slurm",
    ["{array: 1-4%1}", "{requeue: true}", "{dependency: singleton}", "{export: NONE}", "{nodelist: 'n[1-4]'}"],
)
def test_any_other_option_passes_through(slurm: str, tmp_path: Path) -> None:
    assert load_cluster(str(written(tmp_path, f"base: h100-80gb-x8\nslurm: {slurm}\n"))).slurm
