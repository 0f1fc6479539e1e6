"""Cards are known by what records, torch and nvidia-smi call them, and each known one has a machine to be timed on."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmlaunch.cluster.cards import accelerator_of_card, capability_of_card, machines
from llmlaunch.cluster.load import accelerator_names, accelerator_table

GIB = 2**30


@pytest.mark.parametrize(
    ("card", "memory_gib", "accelerator"),
    [
        # of nvidia-smi and torch.cuda.get_device_name
        ("NVIDIA H100 80GB HBM3", None, "h100-80gb"),
        ("NVIDIA A100-SXM4-40GB", None, "a100-40gb"),
        ("NVIDIA H100 NVL", None, "h100-94gb"),
        ("NVIDIA GH200 480GB", None, "gh200-96gb"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", None, "rtx-pro-6000"),
        ("NVIDIA B300 SXM6 AC", None, "b300"),
        # of published records and of our own
        ("A100", None, "a100-80gb"),
        ("A100", 40, "a100-40gb"),
        ("A100", 80, "a100-80gb"),
        ("H100-94GB", 94, "h100-94gb-sxm"),
        ("H100 (HBM2e, Grand Teton)", 95, "h100-94gb-sxm"),
        ("gb300", 279, "gb300"),
        ("NVIDIA A100-SXM-64GB", None, "a100-64gb"),
        ("NVIDIA H20", 141, "h20-141gb"),
        ("NVIDIA H20-3e", None, "h20-141gb"),
        ("NVIDIA GeForce RTX 4090", 24, "rtx-4090"),
        ("NVIDIA RTX A6000", None, "rtx-a6000"),
        ("AMD Instinct MI250X", None, "mi250x-64gb"),
        # of none: other boards, slices of a card, nothing at all
        ("NVIDIA H100 PCIe", 80, None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", 10, None),
        ("MI210", 64, None),
        (None, 80, None),
    ],
)
def test_a_card_is_known_by_its_name(card: object, memory_gib: int | None, accelerator: str | None) -> None:
    assert accelerator_of_card(card, memory_gib and memory_gib * GIB) == accelerator


def test_no_name_means_two_cards() -> None:
    names = [name.lower() for row in accelerator_table().values() for name in row.get("names", ())]
    assert len(names) == len(set(names))


def test_every_accelerator_has_a_machine_and_a_card_alone_gets_its_own_links() -> None:
    known = machines()
    assert set(known) == set(accelerator_names())
    assert all(name == cluster.accelerator.name for name, cluster in known.items())
    assert known["gb300"].nvlink_domain_devices == 72  # the profile's
    assert known["h800-80gb"].node_link.bytes_per_second == 200e9
    assert known["l40s"].node_link.bytes_per_second < 32e9  # PCI Express


@pytest.mark.parametrize("name", [name for name, row in accelerator_table().items() if row["kind"] == "gpu"])
def test_a_profile_has_the_nvlink_of_its_cards(name: str) -> None:
    cluster, row = machines()[name], accelerator_table()[name]
    express = row.get("host_link", {}).get("bytes_per_second", 31.5e9)
    bridged = {"h100-94gb": 64e9, "rtx-a6000": express}  # in pairs: most pairs talk over PCI Express
    lanes = {"l4": 15.75e9}  # eight of PCIe 4.0
    expected = (bridged | lanes).get(name, row.get("nvlink_bytes_per_second", express))
    assert cluster.node_link.bytes_per_second == expected


def test_a_card_of_a_site_is_known_by_the_sites_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = "{name: x1, kind: gpu, memory_gib: 64, bf16_tflops: 100, memory_gigabytes_per_second: 1000}"
    (tmp_path / "ours.yaml").write_text(f"base: h100-80gb-x8\naccelerator: {device}\n")
    (tmp_path / "h100-80gb-x8.yaml").write_text("base: h100-80gb-x8\ndevices_per_node: 2\n")
    (tmp_path / "broken.yaml").write_text("base: [\n")
    monkeypatch.setenv("LLMLAUNCH_CLUSTERS", str(tmp_path))
    assert machines()["x1"].name == "ours"
    assert machines()["h100-80gb"].devices_per_node == 8


def test_a_card_brings_its_generation() -> None:
    capabilities = [capability_of_card(card) for card in ("V100", "GB300", "L40S", "cpu", "MI300X")]
    assert capabilities == [7.0, 10.3, 8.9, None, None]
