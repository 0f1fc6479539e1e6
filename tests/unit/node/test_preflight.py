"""The preflight: how far the devices of a node came is on disk at any moment, whatever they do; and which nodes of an
allocation train after it."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import socket
import socketserver
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

import llmlaunch
from llmlaunch.node.preflight import choose, read_marker
from support.node_rig import ATTEMPT, NODE, NodeRig, until

PREFLIGHT = Path(llmlaunch.__file__).parent / "trainers" / "preflight.py"
# Stands for preflight.py of a run directory; each device does what its line says.
DEVICE = """\
import json, os, sys, time
rank = int(sys.argv[sys.argv.index("--local-rank") + 1])
for word in {scripts}[rank].split():
    if word == "hang":
        time.sleep(600)
    elif word == "die":
        os._exit(9)
    elif word == "chatter":
        print("a library says something", flush=True)
    elif word == "bad":
        print(json.dumps({{"bad": "device %d computed a wrong product" % rank}}), flush=True)
    else:
        print(json.dumps({{"stage": word, **({{"seconds": 0.5 + rank}} if word == "matmul" else {{}})}}), flush=True)
"""
ALL = "devices chatter matmul together joined reduced"


def start(
    rig: NodeRig, scripts: list[str], seconds: str = "60", kind: str = "cpu", options: tuple[str, ...] = (), **more: Any
) -> Any:
    script = rig.write("preflight.py", DEVICE.format(scripts=scripts))
    node = ("--node", NODE, "--kind", kind, "--devices", str(len(scripts)), "--rank", "0", "--nodes", "1")
    group = ("--address", "127.0.0.1", "--port", "1", "--seconds", seconds)
    python = ("--python", sys.executable, "--script", str(script))
    return rig.start("preflight", *rig.place, *node, *group, *python, *options, **more)


def marker_after(rig: NodeRig, scripts: list[str], **options: str) -> dict[str, Any]:
    """Run the preflight to its end, with exit code 0, and return the node's marker."""
    process = start(rig, scripts, **options)
    _, stderr = process.communicate(timeout=180)
    assert process.returncode == 0, stderr
    return marker(rig)


def marker(rig: NodeRig) -> dict[str, Any]:
    return read_marker(rig.attempt_directory / "preflight" / f"{NODE}.jsonl") or {}


def test_a_node_that_is_well_says_so(gpu_node: NodeRig) -> None:
    result = marker_after(gpu_node, [ALL, ALL])
    assert (result["stage"], result["bad"], result["matmul_seconds"]) == ("reduced", None, [0.5, 1.5])


def test_the_slowest_device_says_how_far_the_node_came(gpu_node: NodeRig) -> None:
    process = start(gpu_node, [ALL, "devices matmul hang"])
    until(lambda: marker(gpu_node), "the marker to be written")
    until(lambda: marker(gpu_node)["stage"] == "matmul", "both devices to have computed")
    process.kill()
    assert marker(gpu_node)["bad"] is None


def test_a_device_that_hangs_is_given_up(gpu_node: NodeRig) -> None:
    assert marker_after(gpu_node, ["devices hang", ALL], seconds="1.5")["stage"] == "devices"


@pytest.mark.parametrize(("script", "stage"), [("die", "started"), ("devices matmul joined die", "joined")])
def test_a_device_whose_process_dies_came_no_further(gpu_node: NodeRig, script: str, stage: str) -> None:
    result = marker_after(gpu_node, [script, ALL])
    assert (result["stage"], result["bad"]) == (stage, None)


def test_a_device_that_computes_wrong_makes_the_node_bad(gpu_node: NodeRig) -> None:
    assert marker_after(gpu_node, ["devices hang", "devices bad"])["bad"] == "device 1 computed a wrong product"


@pytest.mark.parametrize(
    ("gpus", "bad"),
    [
        ("gpu ecc=2\ngpu", "GPU 0 has 2 uncorrectable ECC errors since the driver was loaded"),
        ("gpu\ngpu rows=1", "GPU 1 waits for a reset to remap memory rows"),
        ("gpu pages=1\ngpu", "GPU 0 waits for a reset to retire memory pages"),
        ("gpu broken=1\ngpu", "GPU 0 could not remap a bad memory row"),
        ("gpu used=20G\ngpu", "GPU 0 has 20.5 GiB in use before the training; another process holds them"),
        ("gpu\ngpu\nfail * code=15 gpu=1", "GPU 1 does not answer: GPU is lost"),
    ],
)
def test_what_nvml_knows_of_a_gpu_makes_the_node_bad(gpu_node: NodeRig, gpus: str, bad: str) -> None:
    gpu_node.scenario(gpus + "\n")
    assert bad in marker_after(gpu_node, [ALL, ALL], kind="gpu")["bad"]


def test_gpus_of_others_and_errors_a_driver_does_not_count_are_nobodys_problem(gpu_node: NodeRig) -> None:
    """Of four GPUs the job has the last two; the driver knows nothing of ECC."""
    gpu_node.scenario("gpu used=20G\ngpu ecc=1\ngpu\ngpu\nfail nvmlDeviceGetTotalEccErrors code=3 gpu=2\n")
    result = marker_after(gpu_node, [ALL, ALL], kind="gpu", CUDA_VISIBLE_DEVICES="2,3")
    assert (result["stage"], result["bad"]) == ("reduced", None)


def test_ports_limits_and_storage_are_noted_beside_the_devices(cpu_node: NodeRig, tmp_path: Path) -> None:
    """With limits as a login's default would have them."""

    def low_limits() -> None:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (64 * 1024, 64 * 1024))
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))

    port = "class/infiniband/mlx5_0/ports/1"
    files = {f"{port}/state": "4: ACTIVE", f"{port}/rate": "400 Gb/sec (4X NDR)", "class/net/eth0/operstate": "down"}
    for name, text in files.items():
        (tmp_path / "sys" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "sys" / name).write_text(f"{text}\n")
    options = ("--root", str(tmp_path), "--open-files", "1024", "--reads", str(tmp_path / "absent"))
    environment = {"NCCL_SOCKET_IFNAME": "eth0"}
    process = start(cpu_node, ["devices matmul joined reduced"], options=options, setup=low_limits, **environment)
    _, stderr = process.communicate(timeout=180)
    assert process.returncode == 0, stderr
    result: dict[str, Any] = marker(cpu_node)
    assert (result["stage"], result["node"]) == ("reduced", NODE)
    assert result["ports"]["mlx5_0/1"]["gigabits"] == 400.0
    problems = result["problems"]
    expected = {"interface NCCL_SOCKET_IFNAME", "locked memory", "open files", f"storage {tmp_path / 'absent'}"}
    assert set(problems) == expected
    assert "64 KiB" in problems["locked memory"]
    assert "LimitMEMLOCK=infinity" in problems["locked memory"]
    assert "256 files" in problems["open files"]


NODES = ["n1", "n2", "n3", "n4"]
GOOD: dict[str, Any] = {"stage": "reduced", "bad": None, "kind": "gpu", "matmul_seconds": [0.002, 0.002]}


def chosen(run: Path, wanted: int, **markers: dict[str, Any] | None) -> list[str]:
    """The markers of n1 to n4; those not given are good, None is a node that left none."""
    attempt = run / "attempts" / "7.0"
    (attempt / "preflight").mkdir(parents=True, exist_ok=True)
    (attempt / "attempt.json").write_text(json.dumps({"schema": 1, "nodes": NODES, "layout": ""}))
    for node in NODES:
        marker = markers.get(node, {})
        if marker is not None:
            (attempt / "preflight" / f"{node}.jsonl").write_text(json.dumps({**GOOD, "node": node, **marker}) + "\n")
    return choose(run, "7.0", NODES, wanted)


def record(run: Path, name: str = "attempt.json") -> dict[str, Any]:
    return dict(json.loads((run / "attempts" / "7.0" / name).read_text()))


def result(run: Path) -> dict[str, Any]:
    return dict(record(run)["preflight"])


def test_the_first_good_nodes_train_and_the_rest_is_spare(tmp_path: Path) -> None:
    assert chosen(tmp_path, 3) == ["n1", "n2", "n3"]
    assert (result(tmp_path)["spare"], result(tmp_path)["bad"]) == (["n4"], {})
    assert record(tmp_path)["nodes"] == ["n1", "n2", "n3"]


@pytest.mark.parametrize(
    ("error", "bad"),
    [("File already exists: /run/enroot/pyxis_7.0", False), ("No such file or directory: /images/box.sqsh", True)],
)
def test_a_node_whose_container_may_start_next_time_is_not_bad(tmp_path: Path, error: str, bad: bool) -> None:
    log = tmp_path / "attempts" / "7.0" / "preflight" / "n2.log"
    log.parent.mkdir(parents=True)
    line = f"slurmstepd-n2: error: pyxis:     [ERROR] {error}"
    log.write_text(f"slurmstepd-n2: error: pyxis: printing enroot log file:\n{line}\n")
    assert chosen(tmp_path, 3, n2=None)
    assert result(tmp_path)["bad"] == ({"n2": f"its container does not start: {line}"} if bad else {})


@pytest.mark.parametrize(
    ("error", "wanted", "nodes", "spare", "bad"),
    [
        ("error: pyxis:     Write failed because No space left on device", 2, ["n2", "n3"], ["n4"], ["n1"]),
        ("error: pyxis:     [ERROR] URL https://x returned error code: 429 ", 2, ["n2", "n3"], ["n4"], []),
        ("error: pyxis:     [ERROR] URL https://x returned error code: 429 ", 4, ["n1", "n2", "n3", "n4"], [], []),
        ("", 3, ["n2", "n3", "n4"], [], []),  # it was cut short
    ],
)
def test_a_node_without_the_containers_image_is_the_last_to_train(
    tmp_path: Path, error: str, wanted: int, nodes: list[str], spare: list[str], bad: list[str]
) -> None:
    logs = tmp_path / "attempts" / "7.0" / "import"
    logs.mkdir(parents=True)
    for node in NODES:
        (logs / f"{node}.log").write_text("imported\n" if node != "n1" else error)
    assert chosen(tmp_path, wanted, n1=None) == nodes
    assert (result(tmp_path)["spare"], list(result(tmp_path)["bad"])) == (spare, bad)


@pytest.mark.parametrize(
    ("marker", "why"),
    [
        ({"bad": "GPU 3 has 2 uncorrectable ECC errors"}, "GPU 3 has 2 uncorrectable ECC errors"),
        (None, "the preflight did not start on it"),
        ({"stage": "started"}, "did not show its devices; others did"),
        ({"stage": "devices"}, "did not compute on every device; others did"),
        ({"stage": "matmul"}, "did not finish an all-reduce of its own devices; others did"),
        ({"stage": "together"}, "did not reach the others; others did"),
        ({"stage": "joined"}, "did not finish the all-reduce with the others; others did"),
        ({"matmul_seconds": [0.002, 0.0026]}, "its device 1 takes 1.30 times as long for a product as others"),
    ],
)
def test_a_bad_node_is_left_out_and_kept_with_the_reason(
    tmp_path: Path, marker: dict[str, Any] | None, why: str
) -> None:
    assert chosen(tmp_path, 3, n2=marker) == ["n1", "n3", "n4"]
    assert result(tmp_path)["bad"] == {"n2": why}
    cause = record(tmp_path, "causes/n2.json")
    assert (cause["kind"], cause["node"], cause["sick"], cause["line"]) == ("preflight", "n2", True, why)
    assert cause["consequence"]  # the training goes on: whatever ends it is another cause


def test_too_few_good_nodes_are_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert chosen(tmp_path, 4, n2={"bad": "broken"}) == []
    assert "3 of 4 nodes are good and 4 are needed; n2: broken" in capfd.readouterr().err
    assert not record(tmp_path, "causes/n2.json")["consequence"]


def test_what_fails_on_every_node_is_no_nodes_fault(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """All stop where torch is missing; that every node shows too few devices is the recipe's mistake."""
    alike: dict[str, Any] = {node: {"stage": "started"} for node in NODES}
    assert chosen(tmp_path / "a", 3, **alike) == ["n1", "n2", "n3"]
    assert "no node could show its devices" in capfd.readouterr().err
    wrong: dict[str, Any] = {node: {"bad": "4 GPUs are usable here, 8 were asked for"} for node in NODES}
    assert chosen(tmp_path / "b", 3, **wrong) == []
    assert "check the recipe and the environment first" in capfd.readouterr().err
    assert not record(tmp_path / "b", "causes/n1.json")["sick"]


def test_on_a_cpu_other_processes_may_slow_a_node(tmp_path: Path) -> None:
    slow: dict[str, Any] = {"n1": {"kind": "cpu", "matmul_seconds": [0.9]}}
    others: dict[str, Any] = {node: {"kind": "cpu", "matmul_seconds": [0.1]} for node in NODES[1:]}
    assert chosen(tmp_path, 3, **slow, **others) == ["n1", "n2", "n3"]


def test_devices_that_differ_as_healthy_ones_do_are_good(tmp_path: Path) -> None:
    healthy: dict[str, Any] = {node: {"matmul_seconds": [0.0019, 0.0022]} for node in NODES}
    healthy["n3"] = {"matmul_seconds": [0.0019, 0.00245]}
    assert chosen(tmp_path, 4, **healthy)
    assert result(tmp_path)["bad"] == {}


def port(gigabits: float, state: str = "4: ACTIVE") -> dict[str, Any]:
    return {"state": state, "phys_state": "5: LinkUp", "link_layer": "InfiniBand", "gigabits": gigabits}


@pytest.mark.parametrize(
    ("ports", "why"),
    [
        ({"mlx5_0/1": port(400), "mlx5_1/1": port(100)}, "mlx5_1/1 runs at 100 Gb/s; on others 400 Gb/s"),
        ({"mlx5_0/1": port(0, "1: DOWN"), "mlx5_1/1": port(400)}, "mlx5_0/1 is not active (1: DOWN, 5: LinkUp); on"),
        ({"mlx5_0/1": port(400)}, "mlx5_1/1 is not there; on others 400 Gb/s"),
    ],
)
def test_a_network_port_that_is_worse_than_on_other_nodes(tmp_path: Path, ports: dict[str, Any], why: str) -> None:
    """The third port is down everywhere: nobody has put a cable into it."""
    unused = {"mlx5_2/1": port(0, "1: DOWN")}
    markers: dict[str, Any] = {n: {"ports": {"mlx5_0/1": port(400), "mlx5_1/1": port(400), **unused}} for n in NODES}
    markers["n2"] = {"ports": {**ports, **unused}}
    assert chosen(tmp_path, 3, **markers) == ["n1", "n3", "n4"]
    assert why in result(tmp_path)["bad"]["n2"]
    assert result(tmp_path)["warnings"] == []


def test_of_two_nodes_a_slower_port_is_a_warning(tmp_path: Path) -> None:
    two = {"ports": {"mlx5_0/1": port(400), "mlx5_1/1": port(200)}}
    assert chosen(tmp_path, 2, n1=two, n2=two, n3=None, n4=None) == ["n1", "n2"]
    assert result(tmp_path)["warnings"] == [
        f"network port mlx5_1/1 of {node} runs at 200 Gb/s; its fastest 400 Gb/s" for node in ("n1", "n2")
    ]


def test_what_one_node_lacks_is_its_fault_and_what_all_lack_is_the_sites(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    limit = {"locked memory": "lets a process lock 64 KiB of memory; set LimitMEMLOCK=infinity for slurmd"}
    mount = {"storage /data": "/data: does not answer within 10 s"}
    markers: dict[str, Any] = {node: {"problems": limit} for node in NODES}
    markers["n4"] = {"problems": {**limit, **mount}}
    assert chosen(tmp_path, 3, **markers) == ["n1", "n2", "n3"]
    assert result(tmp_path)["bad"] == {"n4": "/data: does not answer within 10 s"}
    assert result(tmp_path)["warnings"] == [f"every node {limit['locked memory']}"]
    assert "preflight: warning: every node lets a process lock 64 KiB" in capfd.readouterr().err


class CountingRelay(socketserver.ThreadingTCPServer):
    """Passes each connection on to another port of this machine, and counts them."""

    daemon_threads = True

    def __init__(self, port: int) -> None:
        self.target, self.count = ("127.0.0.1", port), 0
        super().__init__(("127.0.0.1", 0), socketserver.BaseRequestHandler)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def finish_request(self, request: Any, client_address: Any) -> None:
        self.count += 1
        with until(self._connection, "the other end listens") as other:
            threading.Thread(target=pump, args=(other, request), daemon=True).start()
            pump(request, other)

    def _connection(self) -> socket.socket | None:
        with contextlib.suppress(ConnectionRefusedError):
            return socket.create_connection(self.target)
        return None


def pump(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while piece := source.recv(65536):
            target.sendall(piece)


def test_nodes_meet_over_one_connection_each_and_the_one_whose_storage_hangs_is_left_out(
    cpu_node: NodeRig, tmp_path: Path
) -> None:
    """Each with the real script and torch, of two devices: they compute, reduce within the node, meet and reduce with
    the others. One has a mount that never answers."""
    os.mkfifo(tmp_path / "hangs")
    (tmp_path / "data").mkdir()
    names = ["n1", "n2"]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    trials = []
    with CountingRelay(port) as relay:
        for rank, name in enumerate(names):
            address = ("--address", "127.0.0.1", "--port", str(relay.server_address[1] if rank else port))
            node = ("--node", name, "--kind", "cpu", "--devices", "2", "--rank", str(rank), "--nodes", "2", *address)
            reads = ("--reads", str(tmp_path / ("hangs" if name == "n2" else "data")), "--seconds", "240")
            script = ("--python", sys.executable, "--script", str(PREFLIGHT))
            trials.append(cpu_node.start("preflight", *cpu_node.place, *node, *script, *reads))
        for trial in trials:
            _, stderr = trial.communicate(timeout=300)
            assert trial.returncode == 0, stderr
        assert relay.count == 1  # of two processes on the node that comes from elsewhere
    cpu_node.write_attempt("attempt.json", {"attempt": ATTEMPT, "nodes": names})
    assert choose(cpu_node.run_directory, ATTEMPT, names, 1) == ["n1"]
    bad = json.loads((cpu_node.attempt_directory / "attempt.json").read_text())["preflight"]["bad"]
    assert list(bad) == ["n2"]
    assert "hangs: does not answer within 10 s" in bad["n2"]
    for name in names:
        assert (read_marker(cpu_node.attempt_directory / f"preflight/{name}.jsonl") or {})["stage"] == "reduced"
