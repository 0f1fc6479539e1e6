"""What the preflight finds of ports, interfaces, limits and storage, in a tree that stands for /sys, and with real
limits and paths."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from llmlaunch.node.preflight_checks import interface_problems, network_ports, storage_problems


def lay(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return root


def port(name: str, state: str = "4: ACTIVE", rate: str = "400 Gb/sec (4X NDR)") -> dict[str, str]:
    folder = f"sys/class/infiniband/{name}"
    more = {f"{folder}/phys_state": "5: LinkUp", f"{folder}/link_layer": "InfiniBand"}
    return {f"{folder}/state": state, f"{folder}/rate": rate, **more}


def test_ports_have_their_rate_while_they_are_active(tmp_path: Path) -> None:
    lay(tmp_path, {**port("mlx5_0/ports/1"), **port("mlx5_1/ports/1", "1: DOWN", "10 Gb/sec (4X SDR)")})
    ports = network_ports(tmp_path / "sys/class/infiniband")
    assert {name: port["gigabits"] for name, port in ports.items()} == {"mlx5_0/1": 400.0, "mlx5_1/1": 0.0}
    assert ports["mlx5_0/1"]["phys_state"] == "5: LinkUp"
    assert network_ports(tmp_path / "nothing") == {}


@pytest.mark.parametrize(
    ("variable", "value", "problem"),
    [
        ("NCCL_SOCKET_IFNAME", "ib", None),  # one that begins so is up
        ("NCCL_SOCKET_IFNAME", "=ib1", "has no interface that is up for NCCL_SOCKET_IFNAME==ib1: ib1 is down"),
        ("NCCL_SOCKET_IFNAME", "eth7,ib1", "eth7,ib1: ib1 is down"),
        ("NCCL_SOCKET_IFNAME", "bond", "there is none of that name"),
        ("NCCL_SOCKET_IFNAME", "^ib", None),
        ("GLOO_SOCKET_IFNAME", "ib", "there is none of that name"),  # gloo takes whole names
        ("GLOO_SOCKET_IFNAME", "lo", None),
        ("OTHER", "ib1", None),
    ],
)
def test_interfaces_count_where_training_uses_them(
    tmp_path: Path, variable: str, value: str, problem: str | None
) -> None:
    states = {"ib0": "up", "ib1": "down", "lo": "unknown"}
    lay(tmp_path, {f"{name}/operstate": state for name, state in states.items()})
    problems = interface_problems(tmp_path, {variable: value})
    assert list(problems) == ([] if problem is None else [f"interface {variable}"])
    assert problem is None or problem in problems[f"interface {variable}"]


def test_paths_are_read_and_written_and_nothing_is_left(tmp_path: Path) -> None:
    lay(tmp_path, {"data/shard_text_document.bin": "tokens", "file": "x"})
    reads = [tmp_path / "data", tmp_path / "data/shard_text_document", tmp_path / "file", tmp_path / "gone"]
    problems = storage_problems(reads, [tmp_path, tmp_path / "checkpoints" / "of" / "a run"])
    gone = tmp_path / "gone"
    assert problems == {f"storage {gone}": f"{gone}: cannot be read (No such file or directory)"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "file"]


def test_a_path_that_never_answers_does_not_keep_the_preflight(tmp_path: Path) -> None:
    """A pipe that nobody writes to, as a mount whose server is gone."""
    os.mkfifo(tmp_path / "hangs")
    problems = storage_problems([tmp_path / "hangs", tmp_path], [], seconds=0.5)
    assert list(problems) == [f"storage {tmp_path / 'hangs'}"]
    assert "does not answer within 0.5 s" in problems[f"storage {tmp_path / 'hangs'}"]
