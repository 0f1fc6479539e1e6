"""Accelerators and cluster profiles: sources, profiles that load, sites say what jobs need, mistakes are told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import llmlaunch.cluster.load as accelerators
from llmlaunch.cluster.load import accelerator_names, find_accelerator, load_cluster, profile_names, profile_path
from llmlaunch.cluster.profile import Site, SiteContainer
from llmlaunch.documents.slurm_options import sbatch_value_problem
from llmlaunch.errors import UserError
from llmlaunch.units import GIB

# nominal memory of each card; what torch can use is a little less (of an L40S, A10 and L4 less its error correction)
NOMINAL_GIB = {
    "v100-16gb": 16, "v100-32gb": 32, "a100-40gb": 40, "a100-80gb": 80, "a100-64gb": 64, "a800-80gb": 80,
    "h100-80gb": 80, "h800-80gb": 80, "h100-94gb": 94, "h100-94gb-sxm": 94, "h20-96gb": 96, "h20-141gb": 141,
    "gh200-96gb": 96, "h200-141gb": 141, "l40s": 45, "rtx-3090": 24, "rtx-4090": 24, "rtx-5090": 32, "rtx-a6000": 48,
    "a10": 22.5, "l4": 22.5, "rtx-pro-6000": 96, "b200": 180, "gb200": 186, "b300": 270, "gb300": 279,
    "mi250x-64gb": 64, "mi300x-192gb": 192, "mi325x-256gb": 256, "mi355x-288gb": 288,
}  # fmt: skip


def test_every_figure_has_a_source() -> None:
    table = json.loads(Path(accelerators.__file__).with_name("accelerators.json").read_text(encoding="utf-8"))
    assert set(table) == {*NOMINAL_GIB, "cpu"}
    for row in table.values():
        assert all(len(row[key]) > 15 for key in ("memory_source", "flops_source", "memory_bytes_per_second_source"))
        assert ("nvlink_bytes_per_second" in row) == ("nvlink_source" in row)
        assert ("host_link" in row) == ("host_link_source" in row)


def test_usable_memory_is_a_little_less_than_the_card_is_sold_with() -> None:
    for name, gib in NOMINAL_GIB.items():
        assert 0.97 * gib < find_accelerator(name).memory_bytes / GIB < gib, name


@pytest.mark.parametrize("name", NOMINAL_GIB)
def test_peaks_are_dense(name: str) -> None:
    peaks = find_accelerator(name).flops_per_second
    assert peaks["fp32"] < peaks["fp16"]
    if name.startswith("v100"):  # no tensor products but in fp16
        assert set(peaks) == {"bf16", "fp16", "fp32"}
        assert peaks["bf16"] == peaks["fp32"]
        return
    assert peaks["bf16"] == peaks["fp16"]
    assert peaks.get("fp8", 2 * peaks["bf16"]) == pytest.approx(2 * peaks["bf16"], rel=0.02)
    if name not in ("mi250x-64gb", "mi355x-288gb"):  # CDNA 2 and CDNA 4 have no tf32
        assert peaks["tf32"] == pytest.approx(peaks["bf16"] / 2, rel=0.03)
        assert peaks["fp32"] <= peaks["tf32"]  # GeForce cards have the same of both


def test_the_h100_of_the_data_sheet() -> None:
    device = find_accelerator("h100-80gb")
    assert device.flops_per_second["bf16"] == 989e12
    assert device.memory_bytes == int(79.10 * GIB)
    assert device.compute_capability == "9.0"


def test_a_cpu_process_has_four_gib_unless_changed() -> None:
    assert load_cluster("cpu-x2").accelerator.memory_bytes == 4 * GIB
    changed = load_cluster({"base": "cpu-x2", "accelerator": {"memory_gib": 8}})
    assert changed.accelerator.memory_bytes == 8 * GIB
    assert changed.accelerator.kind == "cpu"
    assert changed.devices_per_node == 2


def test_unknown_names_are_answered_with_known_ones() -> None:
    with pytest.raises(UserError, match="unknown accelerator 'h100-80'; did you mean h100-80gb"):
        find_accelerator("h100-80")
    with pytest.raises(UserError, match="unknown cluster 'h100'; did you mean h100-80gb-x8"):
        load_cluster("h100")
    assert set(accelerator_names()) == {*NOMINAL_GIB, "cpu"}


@pytest.mark.parametrize("name", profile_names())
def test_every_shipped_profile_loads(name: str) -> None:
    cluster = load_cluster(name)
    assert cluster.name == name
    assert cluster.node_link.bytes_per_second >= cluster.fabric_link.bytes_per_second
    assert not cluster.node_link.measured
    assert (cluster.gpu_request == "none") == (cluster.accelerator.kind == "cpu")
    assert cluster.nvlink_domain_devices % cluster.devices_per_node == 0


def test_the_profiles_are_the_machines_their_names_say() -> None:
    assert set(profile_names()) == {
        "a100-40gb-x8", "a100-64gb-x4", "a100-80gb-x8", "gh200-96gb-x4", "h100-80gb-x8", "h100-94gb-x8",
        "h100-94gb-sxm-x4", "h20-141gb-x8", "h200-141gb-x8", "mi250x-x8", "a10-x4", "l4-x8", "rtx-3090-x2",
        "rtx-4090-x2", "rtx-4090-x8", "rtx-5090-x2", "rtx-5090-x8", "rtx-a6000-x2", "rtx-a6000-x8", "b200-x8",
        "b300-x8", "gb200-nvl72", "gb300-nvl72", "mi300x-x8", "mi325x-x8", "mi355x-x8", "cpu-x1", "cpu-x2",
    }  # fmt: skip
    for name in ("gb200-nvl72", "gb300-nvl72"):
        rack = load_cluster(name)
        assert (rack.devices_per_node, rack.nvlink_domain_devices) == (4, 72)
    for name, link in (("mi300x-x8", 448e9), ("mi325x-x8", 448e9), ("mi355x-x8", 537.6e9)):
        board = load_cluster(name)
        assert (board.accelerator.platform, board.node_mesh, board.node_link.bytes_per_second) == ("rocm", True, link)
    for name in ("a100-64gb-x4", "gh200-96gb-x4"):  # four to a node, wired pair by pair
        board = load_cluster(name)
        assert (board.devices_per_node, board.node_mesh) == (4, True)
    dies = load_cluster("mi250x-x8")
    assert (dies.devices_per_node, dies.accelerator.platform, dies.node_mesh) == (8, "rocm", False)
    hopper = load_cluster("h100-80gb-x8")
    assert hopper.fabric_link.bytes_per_second == 50e9  # 400 Gb/s for each GPU
    assert hopper.node_link.bytes_per_second == 450e9


def test_cards_of_desktops_have_nvlink_only_over_a_bridge_and_share_their_memory_with_a_screen() -> None:
    for name in ("rtx-3090-x2", "rtx-a6000-x2"):
        assert load_cluster(name).node_link.bytes_per_second == 56.25e9
    for name in ("rtx-4090-x2", "rtx-4090-x8", "rtx-5090-x2", "rtx-5090-x8", "rtx-a6000-x8"):
        assert load_cluster(name).node_link.bytes_per_second <= 63e9  # PCI Express
    desktops = {name for name in profile_names() if load_cluster(name).desktop_gib}
    assert desktops == {"rtx-3090-x2", "rtx-4090-x2", "rtx-5090-x2", "rtx-a6000-x2"}


def test_a_site_profile_starts_from_a_shipped_one_and_changes_what_it_must(tmp_path: Path) -> None:
    (tmp_path / "ours.yaml").write_text(
        "base: h100-80gb-x8\n"
        "devices_per_node: 4\n"
        "slurm: {partition: gpu}\n"
        "links: {fabric: {gigabytes_per_second: 25, measured: true}}\n"
        "environment: {NCCL_SOCKET_IFNAME: ib0}\n",
        encoding="utf-8",
    )
    cluster = load_cluster("./ours.yaml", tmp_path)
    assert cluster.name == "ours"
    assert cluster.devices_per_node == cluster.nvlink_domain_devices == 4
    assert cluster.slurm == {"exclusive": True, "partition": "gpu"}
    assert (cluster.fabric_link.bytes_per_second, cluster.fabric_link.measured) == (25e9, True)
    assert cluster.fabric_link.latency_seconds == pytest.approx(10e-6)
    assert cluster.environment == {"NCCL_SOCKET_IFNAME": "ib0"}


def test_an_accelerator_nobody_knows_can_be_described_in_full() -> None:
    device = {
        "name": "x1", "kind": "gpu", "memory_gib": 94.5, "bf16_tflops": 500, "memory_gigabytes_per_second": 2000,
    }  # fmt: skip
    cluster = load_cluster({"base": "h100-80gb-x8", "accelerator": device | {"base": "h100-80gb"}})
    assert cluster.accelerator.memory_bytes == int(94.5 * GIB)
    assert cluster.accelerator.flops_per_second["bf16"] == 500e12
    speed = {"gigabytes_per_second": 100, "latency_microseconds": 5}
    whole = {
        "accelerator": device,
        "devices_per_node": 2,
        "host_memory_gib": 64,
        "links": {"node": speed, "fabric": speed},
    }
    described = load_cluster(whole)
    assert described.accelerator.name == "x1"
    assert described.accelerator.flops_per_second == {"bf16": 500e12}
    assert described.domain_link == described.node_link


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("devices_per_node: 8\n", "is missing `accelerator`"),
        (
            "base: h100-80gb-x8\ndevices: 4\n",
            "site.yaml:2: devices: is not a known key; did you mean devices_per_node?",
        ),
        ("base: h100-80gb-x8\ndevices_per_node: -4\n", "site.yaml:2: devices_per_node: must be a whole number"),
        ("base: h100-80gb-x8\naccelerator: h300\n", "accelerator: unknown accelerator 'h300'"),
        ("base: h100-80gb-x8\nnvlink_domain_devices: 12\n", "nvlink_domain_devices: 12 devices are not whole nodes"),
        ("base: ./site.yaml\n", "does it name itself?"),
        ("base: nowhere\n", "site.yaml:1: base: unknown cluster 'nowhere'"),
        ("base: h100-80gb-x8\nenvironment: {WANDB_API_KEY: x}\n", "looks like a secret"),
    ],
    ids=range(8),
)
def test_a_mistake_in_a_profile_names_file_line_key_and_fix(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "site.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(UserError) as caught:
        load_cluster("./site.yaml", tmp_path)
    assert message in str(caught.value)
    assert "site.yaml" in str(caught.value)


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
        ("slurm: {wra: id}", "slurm.wra: is no option of sbatch; did you mean wrap?"),
        ("slurm_plugins: {tasks-per-n: 3}", "slurm_plugins.tasks-per-n: is short for tasks-per-node"),
        ("slurm_plugins: {wrap: id}", "slurm_plugins.wrap: is not set here: the job script is rendered"),
        ("slurm_plugins: {time: 1}", "slurm_plugins.time: is an option of sbatch itself; write it under slurm:"),
        ("slurm: {test-only: true}", "nothing would be submitted; llmlaunch submit --test-only"),
        ("slurm: {wait: true}", "llmlaunch submit --follow waits"),
        ("slurm: {partition: true}", "slurm.partition: needs a value: without one it would swallow"),
        ("slurm: {array: 1-4}", "array: the tasks of 1-4 would train into one run directory at the same time"),
        ("srun: {ntasks: 4}", "srun.ntasks: is not set here: job.sbatch sets it"),
        ("srun: {multi-prog: true}", "srun would not start the training"),
        ("srun: {mpi: pmix}", "write `mpi:` beside `srun:`"),
        ("srun: {container-name: x}", "outlives its job and is shared with others"),
        ("srun: {--cpu-bind: none}", "is not a long option of srun without its dashes; write cpu-bind"),
        ('srun: {comment: "a\\nb"}', "contains a line break"),
        ("mpi: list", "is not one of those `srun --mpi=list` shows"),
        ("exclude: [-n1]", "is not a node name"),
        ('modules: ["cuda; id"]', "is not the name of a module"),
        ("gpu_type: 'h100:8'", "is not the type of a GPU"),
        ("restart_by: magic", "must be one of requeue, chain"),
        ("container: {runtime: docker}", "must be one of pyxis, apptainer, none"),
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
