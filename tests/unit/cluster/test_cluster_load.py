"""Accelerators and cluster profiles: every figure has a source, every profile loads, mistakes are sentences."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import llmlaunch.cluster.load as accelerators
from llmlaunch.cluster.load import accelerator_names, find_accelerator, load_cluster, profile_names
from llmlaunch.errors import UserError
from llmlaunch.units import GIB

# nominal memory of each card; what torch can use is a little less
NOMINAL_GIB = {
    "a100-40gb": 40,
    "a100-80gb": 80,
    "a800-80gb": 80,
    "h100-80gb": 80,
    "h100-94gb": 94,
    "h200-141gb": 141,
    "b200": 180,
    "gb200": 186,
}


def test_every_figure_has_a_source() -> None:
    table = json.loads(Path(accelerators.__file__).with_name("accelerators.json").read_text(encoding="utf-8"))
    assert set(table) == {*NOMINAL_GIB, "cpu"}
    for row in table.values():
        assert all(len(row[key]) > 15 for key in ("memory_source", "flops_source", "memory_bytes_per_second_source"))


@pytest.mark.parametrize("name", NOMINAL_GIB)
def test_usable_memory_is_a_little_less_than_the_card_is_sold_with(name: str) -> None:
    device = find_accelerator(name)
    assert 0.97 * NOMINAL_GIB[name] < device.memory_bytes / GIB < NOMINAL_GIB[name]


@pytest.mark.parametrize("name", NOMINAL_GIB)
def test_peaks_are_dense(name: str) -> None:
    peaks = find_accelerator(name).flops_per_second
    assert peaks["bf16"] == peaks["fp16"]
    assert peaks["tf32"] == pytest.approx(peaks["bf16"] / 2, rel=0.03)
    assert peaks.get("fp8", 2 * peaks["bf16"]) == pytest.approx(2 * peaks["bf16"], rel=0.01)
    assert peaks["fp32"] < peaks["tf32"]


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
        "a100-40gb-x8",
        "a100-80gb-x8",
        "h100-80gb-x8",
        "h100-94gb-x8",
        "h200-141gb-x8",
        "b200-x8",
        "gb200-nvl72",
        "cpu-x1",
        "cpu-x2",
    }
    rack = load_cluster("gb200-nvl72")
    assert (rack.devices_per_node, rack.nvlink_domain_devices) == (4, 72)
    hopper = load_cluster("h100-80gb-x8")
    assert hopper.fabric_link.bytes_per_second == 50e9  # 400 Gb/s for each GPU
    assert hopper.node_link.bytes_per_second == 450e9


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
        "name": "x1",
        "kind": "gpu",
        "memory_gib": 94.5,
        "bf16_tflops": 500,
        "memory_gigabytes_per_second": 2000,
    }
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
        ("base: h100-80gb-x8\nslurm: {time: 24:00:00}\n", "base 60"),
        ("", "is empty"),
    ],
    ids=range(10),
)
def test_a_mistake_in_a_profile_names_file_line_key_and_fix(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "site.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(UserError) as caught:
        load_cluster("./site.yaml", tmp_path)
    assert message in str(caught.value)
    assert "site.yaml" in str(caught.value)
