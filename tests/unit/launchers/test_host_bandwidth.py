"""Copies between a node's devices and its memory, over a stand-in of the driver; and what a profile says of them."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from llmlaunch.cluster.load import load_cluster
from llmlaunch.launchers.bandwidth import BandwidthProbe, default_python
from llmlaunch.launchers.host_bandwidth import HostReport, measure_host
from llmlaunch.timing.network import host_link_bytes_per_second
from llmlaunch.trainers import HOST_BANDWIDTH
from support.command_line import CommandLine
from support.probe_rig import build_libcuda

PROBE = BandwidthProbe(default_python(), message_bytes=4096, repeats=2)


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_libcuda(tmp_path_factory.mktemp("cuda"), source="fake_copies.c").parent


@pytest.fixture
def devices(driver: Path, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A node of four devices."""
    monkeypatch.setenv("LD_LIBRARY_PATH", str(driver))
    monkeypatch.setenv("FAKE_DEVICES", "4")
    return monkeypatch


def measured() -> HostReport:
    return measure_host(True, PROBE, lambda _: None)


def test_every_device_copies_both_ways_alone_and_together(devices: pytest.MonkeyPatch) -> None:
    report = measured()
    assert report.problem is None
    for kind in ("alone", "together"):
        assert {way: len(rates) for way, rates in report.content[kind].items()} == {"to_device": 4, "to_host": 4}
        assert min(min(rates) for rates in report.content[kind].values()) > 0


@pytest.mark.parametrize("call", ["cuInit", "cuMemAlloc_v2", "cuMemHostAlloc", "cuMemcpyHtoDAsync_v2"])
def test_what_the_driver_refuses_is_told_in_its_own_word(devices: pytest.MonkeyPatch, call: str) -> None:
    devices.setenv("FAKE_FAILS", call)
    report = measured()
    assert report.problem == f"{call}: CUDA_ERROR_OUT_OF_MEMORY"
    assert report.bytes_per_second is None
    assert f"were not measured: {report.problem}" in report.text()


def test_a_node_without_a_device_says_why(devices: pytest.MonkeyPatch) -> None:
    devices.setenv("FAKE_DEVICES", "0")
    assert "the driver shows no GPU here" in str(measured().problem)
    devices.delenv("LD_LIBRARY_PATH")
    assert "there is no NVIDIA driver here" in str(measured().problem)


def test_doctor_prints_what_it_measured(devices: pytest.MonkeyPatch, llmlaunch: CommandLine) -> None:
    answer = llmlaunch.json("doctor", "--host", "--local", "--repeats", "1", "--message-mib", "1")
    assert answer["devices"] == 4
    text, _ = llmlaunch("doctor", "--host", "--local", "--repeats", "1", "--message-mib", "1")
    assert "each device while all copy" in text
    _, err = llmlaunch("doctor", "--host", code=2)
    assert "salloc --nodes=1 --exclusive" in err


def report_of(alone: float, together: float, adapters: list[float], devices: int = 8) -> HostReport:
    def rates(speed: float) -> dict[str, list[float]]:
        return {"to_device": [speed] * devices, "to_host": [1.1 * speed] * devices}

    ports = [
        {"name": f"mlx5_{n}", "gigabits_per_second": rate, "layer": "InfiniBand"} for n, rate in enumerate(adapters)
    ]
    content: dict[str, Any] = {"node": "n1", "devices": devices, "problem": None, "adapters": ports}
    return HostReport({**content, "alone": rates(alone), "together": rates(together)})


def test_the_lines_for_a_profile_are_read_by_one() -> None:
    report = report_of(25e9, 12.7e9, [200.0] * 8 + [100.0])
    assert report.devices_per_uplink == 2
    assert "about 2 devices share a link to the host" in report.text()
    snippet = yaml.safe_load("\n".join(report.profile_lines()))
    cluster = load_cluster({"base": "a100-80gb-x8", **snippet})
    assert host_link_bytes_per_second(cluster) == 12.7e9
    assert cluster.fabric_link.bytes_per_second == 25e9
    assert report_of(25e9, 24e9, []).devices_per_uplink == 1


def test_adapters_that_are_down_do_not_count(tmp_path: Path) -> None:
    for name, rate, state in (("mlx5_0", "400 Gb/sec (4X NDR)", "4: ACTIVE"), ("mlx5_1", "10 Gb/sec (1X)", "1: DOWN")):
        port = tmp_path / "sys" / "class" / "infiniband" / name / "ports" / "1"
        port.mkdir(parents=True)
        for file, text in (("rate", rate), ("state", state), ("link_layer", "InfiniBand")):
            (port / file).write_text(text + "\n")
    command = [default_python(), str(HOST_BANDWIDTH), "--root", str(tmp_path)]
    answer = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert answer["adapters"] == [{"name": "mlx5_0", "gigabits_per_second": 400.0, "layer": "InfiniBand"}]
